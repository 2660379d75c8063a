"""Grades attempts at every domain, and candidates that tell the time, with the grader's clock moved; prints the verdicts.

Candidates tell minutes: how many seconds after its start a program gets to ask depends on the host's load.

    python -m tests.environments.two_dates BACKEND DAYS
"""

import asyncio
import sys
import time
from collections.abc import Awaitable
from itertools import islice
from typing import Any

from data_contracts.config import SandboxConfig
from data_contracts.protocols import SandboxBackend, to_json
from data_contracts.records import EnvironmentSpec, Message, Problem, SandboxSpec, TrustLevel, Verdict, VerifierSpec
from environments.base import Collected
from environments.registry import domains, verifier
from environments.sandbox import open_backend
from environments.sandbox.files import artifact
from environments.scripted import plays, random_policy, run_scripted, says

NOW = "__import__('datetime').datetime.now().isoformat(timespec='minutes')"
FUNCTIONS = (
    f"import os, time\ndef NAME(*arguments):\n    return ({NOW}, time.strftime('%F %H:%M'), os.cpu_count(), hash('x'))\n",
    f"def NAME(*arguments):\n    raise ValueError('%s, %s' % (object(), {NOW}))\n",
    "import sys\nsys.exit(str(object()))\n",
    "def broken(\n",
)
PROGRAM = f"print({NOW}, object(), {{'b', 'a', 'c'}})\n"
SCRIPT = "sleep 0.4; date '+%F %H:%M'; nproc; ls -l --time-style=long-iso app; printf '%s\n' * | tail -1\n"
SUITE = "import time\ndef test_it():\n    assert time.strftime('%F %H:%M') == object()\n"


def dated(kind: str, trust: TrustLevel = "cases", **settings: Any) -> Problem:
    """A problem that nothing solves."""
    cases = [{"id": str(number), "arguments": [], "expected": "no"} for number in range(3)]
    settings = {"path": "app", "cases": cases, "seconds": 40.0, **settings}
    spec = VerifierSpec(kind=kind, trust=trust, settings=settings, collect=("app",), sandbox=SandboxSpec())
    return Problem(
        id=f"dated/train/{kind}", domain="dated", split="train", difficulty=0.5, messages=(Message(role="user", content="?"),),
        environment=EnvironmentSpec(kind="dated"), verifier=spec,
    )  # fmt: skip


def attempts(backend: SandboxBackend) -> list[Awaitable[Verdict | None]]:
    async def play(name: str, problem: Problem, number: int) -> Verdict | None:
        found = domains()[name]
        policy = (found.oracle(problem), plays(says("no")), random_policy(problem, seed=1))[number]
        return (await run_scripted(found, problem, policy, backend=backend, deadline_seconds=100.0)).verdict

    async def grade(problem: Problem, source: str) -> Verdict:
        collected = Collected(artifacts=(artifact(problem.verifier.settings.get("path", "app"), source.encode()),))
        judge = verifier(problem.verifier.kind)
        return await judge.verify(problem, collected, acquire=backend.acquire, deadline_seconds=100.0)

    work: list[Awaitable[Verdict | None]] = []
    for name, found in sorted(domains().items()):
        (problem,) = islice(found.problems("train", seed=0), 1)
        work += [play(name, problem, number) for number in range(3)]
        settings = problem.verifier.settings
        if problem.verifier.kind in {"function_cases", "proxied"}:
            function = settings.get("function") or settings["names"][0]
            work += [grade(problem, source.replace("NAME", function)) for source in FUNCTIONS]
    suite = dated("unit_tests", "in_process", tests={"test_it.py": SUITE}, expected=["test_it.py::test_it"])
    work += [grade(dated("function_cases", program=True), PROGRAM), grade(dated("function_cases", language="bash"), SCRIPT)]
    return [*work, grade(suite, "")]


async def main(kind: str) -> None:
    backend = open_backend(SandboxConfig(backend=kind, concurrency=4))  # type: ignore[arg-type]
    try:
        for verdict in await asyncio.gather(*attempts(backend)):
            sys.stdout.write("null\n" if verdict is None else f"{to_json(verdict).decode()}\n")
    finally:
        await backend.close()


if __name__ == "__main__":
    real, real_ns, days = time.time, time.time_ns, int(sys.argv[2])
    time.time = lambda: real() + days * 86400  # type: ignore[assignment]
    time.time_ns = lambda: real_ns() + days * 86400 * 10**9  # type: ignore[assignment]
    asyncio.run(main(sys.argv[1]))

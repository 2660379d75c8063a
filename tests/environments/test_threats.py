"""Every attempt of threat_rows.py, at each trust level it applies to, on both backends: none may earn anything.

The attempts that a session selected for a backend run side by side, as gradings do on a worker; each test then looks at its own
verdict. A verdict must come: an attempt that ends in an InfraError would be tried again, which is what it may be after. Beside
them stand honest solutions, so that no row is "closed" by failing everything. docs/concepts/threats.md names these rows.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data_contracts.protocols import SandboxBackend, to_json
from data_contracts.records import EnvironmentSpec, Message, Problem, SandboxLimits, SandboxSpec, Verdict, VerifierSpec
from environments.base import Collected
from environments.registry import verifier
from environments.sandbox.files import artifact
from environments.verifiers.proxied_rows import describe
from environments.verifiers.values import encode
from infra.rootfs import ensure_image, ensure_rootfs
from tests.environments.threat_rows import CASES, LANGUAGES, PROXIED, SUITE, SUITES

SECONDS, SHORT = 6.0, 2.0
WAITING = {"stopping", "bombs", "output", "daemons"}
"""Threats whose attempts run until they are stopped: the shorter limit is theirs."""
LIMITS = SandboxLimits(memory_bytes=192 << 20, pids=32, disk_bytes=16 << 20)
"""So that bombs hit a wall soon, and many boxes fit on a small host."""
GOOD = "def add(a, b):\n    return a + b\n"
Row = tuple[Problem, Collected]
INPUTS = [((2, 3), 5), ((0, 0), 0), ((-1, 1), 0), ((10, 5), 15), ((2.5, 0.5), 3.0)]


def row(kind: str, trust: str, files: dict[str, str], *, image: str = "base", **settings: Any) -> Row:
    posed = Problem(
        id="d/train/1", domain="d", split="train", difficulty=0.5, messages=(Message(role="user", content="?"),),
        environment=EnvironmentSpec(kind="d"),
        verifier=VerifierSpec(
            kind=kind, trust=trust, settings={"seconds": SECONDS, **settings}, collect=tuple(files),  # type: ignore[arg-type]
            sandbox=SandboxSpec(image=image, limits=LIMITS),
        ),
    )  # fmt: skip
    verifier(kind).check(posed)
    return posed, Collected(
        artifacts=tuple(artifact(name, text.encode("utf-8", "surrogateescape")) for name, text in files.items())
    )


def cases(source: str) -> Row:
    hidden = [{"id": f"c{i}", "arguments": [*map(encode, a)], "expected": encode(e)} for i, (a, e) in enumerate(INPUTS)]
    return row("function_cases", "cases", {"solution.py": source}, path="solution.py", function="add", cases=hidden)


def languages(language: str, source: str) -> Row:
    if language == "javascript":
        hidden = [{"id": f"c{i}", "arguments": [*map(encode, a)], "expected": encode(e)} for i, (a, e) in enumerate(INPUTS)]
        more: dict[str, Any] = {"language": "javascript", "function": "add", "cases": hidden, "path": "s.js"}
        return row("function_cases", "cases", {"s.js": source}, image="node", **more)
    texts = [{"id": f"c{i}", "arguments": [*map(str, a)], "expected": str(e)} for i, (a, e) in enumerate(INPUTS[:2])]
    if language == "bash":
        return row("function_cases", "cases", {"s.sh": source}, path="s.sh", language="bash", function="add", cases=texts)
    return row("function_cases", "cases", {"s.py": source}, path="s.py", program=True, cases=texts)


def proxied(source: str, tests: str) -> Row:
    code = describe(tests, entry_point="add" if "check(" in tests else None)
    return row(
        "proxied", "proxied", {"solution.py": source}, path="solution.py", names=list(code.names), entry_point=code.entry_point,
        helpers=code.helpers, tests=code.tests, expected=list(code.expected), in_place=code.in_place,
    )  # fmt: skip


def suite(files: dict[str, str]) -> Row:
    expected = ["test_app.py::test_add", "test_app.py::test_more"]
    return row("unit_tests", "in_process", files, tests={"test_app.py": SUITE}, expected=expected)


_ADD = "def check(candidate):\n    assert candidate(2, 3) == 5\n"
HONEST: dict[str, Row] = {
    "cases": cases(GOOD),
    "javascript": languages("javascript", "const add = (a, b) => a + b;"),
    "bash": languages("bash", "add() { echo $(($1 + $2)); }"),
    "program": languages("program", "import sys\nprint(sum(map(int, sys.argv[1:])))"),
    "proxied": proxied(GOOD, _ADD),
    "proxied nan": proxied(GOOD, "import math\ndef check(candidate):\n    assert math.isnan(candidate(math.nan, 1))\n"),
    "proxied end": proxied(
        "def add(a, b): return next(iter([]))\n",
        "import pytest\ndef check(candidate):\n    with pytest.raises(StopIteration):\n        candidate(2, 3)\n",
    ),
    "proxied with": proxied(
        "import contextlib\ndef add(*kinds): return contextlib.suppress(*kinds)\n",
        "def check(candidate):\n    with candidate(ValueError):\n        raise ValueError('x')\n"
        "    assert candidate(KeyError)\n",
    ),
    "proxied callback": proxied(
        "def add(f, x):\n    try: return f(x)\n    except ValueError: return None\n",
        "def check(candidate):\n    assert candidate(int, 'x') is None and candidate(int, '5') == 5\n"
        "    def refuses(x):\n        raise ValueError(x)\n    assert candidate(refuses, 1) is None\n",
    ),
    "in_process": suite({"app.py": GOOD}),
}
ATTEMPTS: dict[str, Row] = {}
for _level, _table, _make in (
    ("cases", CASES, cases), ("cases", LANGUAGES, languages), ("proxied", PROXIED, proxied), ("in_process", SUITES, suite)
):  # fmt: skip
    for _threat, _rows in _table.items():  # type: ignore[attr-defined]
        for _name, _content in _rows.items():
            _id = f"{_level}-{_threat}-{_name if _table is not LANGUAGES else f'in {_name}'}"
            assert _id not in ATTEMPTS
            ATTEMPTS[_id] = _make(*_content) if isinstance(_content, tuple) else _make(_content)  # type: ignore[operator]
            ATTEMPTS[_id][0].verifier.settings["seconds"] = SHORT if _threat in WAITING else SECONDS
ROWS = ATTEMPTS | HONEST
for _posed, _ in HONEST.values():
    _posed.verifier.settings["seconds"] = 60.0
BACKENDS = ("bubblewrap", "docker")
Told = Callable[[SandboxBackend], dict[str, Verdict | BaseException]]


@pytest.fixture
def backend(request: pytest.FixtureRequest, rootfs: Path) -> SandboxBackend:
    found: SandboxBackend = request.getfixturevalue(f"{request.param}_backend")
    ensure_rootfs("node", progress=print)
    if request.param == "docker":
        ensure_image("node", progress=print)
    return found


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Told:
    """What came of everything that this session selected for a backend."""

    @functools.cache
    def of(backend: SandboxBackend) -> dict[str, Verdict | BaseException]:
        wanted = dict(_selected(request.session, backend.name))
        return asyncio.run(_all(backend, wanted))

    return of


def _selected(session: pytest.Session, name: str) -> Iterator[tuple[str, Row]]:
    for item in session.items:
        if not (isinstance(item, pytest.Function) and item.path == Path(__file__) and hasattr(item, "callspec")):
            continue
        parameters = item.callspec.params
        if parameters["backend"] == name:
            wanted = str(parameters.get("attempt") or parameters.get("honest"))
            yield wanted, ROWS[wanted]


async def _all(backend: SandboxBackend, rows: dict[str, Row]) -> dict[str, Verdict | BaseException]:
    turn = asyncio.Semaphore(8)

    async def one(posed: Problem, collected: Collected) -> Verdict:
        async with turn:
            judge = verifier(posed.verifier.kind)
            return await judge.verify(posed, collected, acquire=backend.acquire, deadline_seconds=120.0)

    ends = await asyncio.gather(*(one(*row) for row in rows.values()), return_exceptions=True)
    return dict(zip(rows, ends, strict=True))


@pytest.mark.parametrize("attempt", ATTEMPTS)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_an_attempt_earns_nothing(backend: SandboxBackend, attempt: str, told: Told) -> None:
    verdict = told(backend)[attempt]
    assert isinstance(verdict, Verdict), f"no verdict, so that it would be tried again: {verdict!r}"
    assert (verdict.score, verdict.passed) == (0.0, False), verdict.evidence
    posed = ATTEMPTS[attempt][0].verifier
    assert verdict.trust == posed.trust
    expected = posed.settings.get("expected") or [case["id"] for case in posed.settings["cases"]]
    assert [check.id for check in verdict.checks] == expected
    assert len(to_json(verdict)) < 16_000


@pytest.mark.parametrize("honest", HONEST)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_what_is_right_passes(backend: SandboxBackend, honest: str, told: Told) -> None:
    verdict = told(backend)[honest]
    assert isinstance(verdict, Verdict), repr(verdict)
    assert (verdict.score, verdict.tampering) == (1.0, None), verdict.evidence

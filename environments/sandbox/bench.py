"""How fast, how clean and how robust boxes are: the measurements behind `bessemer bench sandbox`.

Contract: every figure of a comparison comes from the same harness: a real verifier grades the same candidate, and only where
its boxes come from differs (bubblewrap, the Docker backend with boxes made ahead, `docker run --rm`). Both sides are warmed up
first. Rates are closed loops of WIDTH verdicts at a time, latencies open loops with evenly spaced requests. CPU seconds are
those of the whole machine (the engine's daemons included) above its load just before, so measure on a quiet machine.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data_contracts.protocols import ExecRequest, SandboxBackend
from data_contracts.records import EnvironmentSpec, Message, Problem, SandboxLimits, SandboxSpec, Verdict, VerifierSpec
from environments.base import Collected, Verifier
from environments.sandbox.base import Backend
from environments.sandbox.files import artifact
from environments.sandbox.owners import PREFIX, this_process
from environments.verifiers.function_cases import FunctionCases
from environments.verifiers.unit_tests import UnitTests
from environments.verifiers.values import encode

WIDTH = 4
CANDIDATE = b"def add(a, b):\n    return a + b\n"
_SUITE = "from app import add\n\n\n" + "\n\n\n".join(
    f"def test_{name}():\n    assert add({a}, {b}) == {a + b}" for name, a, b in (("a", 1, 2), ("b", 0, 0), ("c", -1, 1))
)
_COLLECTED = Collected(artifacts=(artifact("app.py", CANDIDATE),))
Call = Callable[[], Awaitable[object]]


def _problem(kind: str, trust: str, settings: dict[str, Any]) -> Problem:
    verifier = VerifierSpec(kind=kind, trust=trust, settings={**settings, "seconds": 40.0}, collect=("app.py",))  # type: ignore[arg-type]
    return Problem(
        id="bench/train/1", domain="bench", split="train", difficulty=0.5, messages=(Message(role="user", content="?"),),
        environment=EnvironmentSpec(kind="bench"), verifier=verifier,
    )  # fmt: skip


_CASES = [{"id": f"c{i}", "arguments": [encode(i), encode(2)], "expected": encode(i + 2)} for i in range(8)]
_IDS = [f"test_app.py::test_{name}" for name in "abc"]
WORK: dict[str, tuple[Verifier, Problem]] = {
    "cases": (FunctionCases(), _problem("function_cases", "cases", {"path": "app.py", "function": "add", "cases": _CASES})),
    "pytest": (UnitTests(), _problem("unit_tests", "in_process", {"tests": {"test_app.py": _SUITE}, "expected": _IDS})),
}


class Wrong(RuntimeError):
    """A verdict of the benchmark was not the expected one: its figures would mean nothing."""


def verdict(work: str, backend: SandboxBackend) -> Call:
    """One verdict, as the product makes it."""
    verifier, problem = WORK[work]

    async def call() -> Verdict:
        found = await verifier.verify(problem, _COLLECTED, acquire=backend.acquire, deadline_seconds=50.0)
        if not found.passed:
            raise Wrong(f"a right candidate failed on {backend.name}: {found.evidence}")
        return found

    return call


class Rate(NamedTuple):
    per_second: float
    cpu_seconds: float
    """Of the whole machine, per call."""
    calls: int


async def rate(call: Call, *, seconds: float, width: int = WIDTH) -> Rate:
    """A closed loop: as many calls as `width` at a time manage."""
    for _ in range(width):
        await call()
    idle = await _machine_load(min(2.0, seconds / 4))
    done, busy, began = itertools.count(), _busy_seconds(), time.monotonic()

    async def loop() -> None:
        while time.monotonic() - began < seconds:
            await call()
            next(done)

    await asyncio.gather(*(loop() for _ in range(width)))
    took, calls = time.monotonic() - began, next(done)
    return Rate(calls / took, max(_busy_seconds() - busy - idle * took, 0.0) / calls, calls)


async def latency(call: Call, *, per_second: float, seconds: float) -> float:
    """The median from request to answer, in seconds, with requests at even distances whatever the answers do."""
    for _ in range(2):
        await call()
    count, began = max(int(seconds * per_second), 8), time.monotonic()

    async def one(number: int) -> float:
        due = began + number / per_second
        await asyncio.sleep(max(due - time.monotonic(), 0.0))
        await call()
        return time.monotonic() - due

    return statistics.median(await asyncio.gather(*(one(number) for number in range(count))))


async def together(backend: Backend, count: int) -> tuple[float, list[str]]:
    """`count` boxes alive at the same time, each used: seconds until all have answered, and what went wrong."""
    spec = SandboxSpec(limits=SandboxLimits(lifetime_seconds=600))
    errors: list[str] = []
    began = time.monotonic()
    made = await asyncio.gather(*(backend.acquire(spec) for _ in range(count)), return_exceptions=True)
    boxes = [box for box in made if not isinstance(box, BaseException)]
    errors += [repr(box) for box in made if isinstance(box, BaseException)]
    for _ in range(2):  # the second round finds all of them still alive
        requests = [ExecRequest(argv=("echo", box.id), deadline_seconds=120) for box in boxes]
        ends = await asyncio.gather(*map(_exec, boxes, requests), return_exceptions=True)
        errors += [repr(end) for box, end in zip(boxes, ends, strict=True) if end != f"{box.id}\n".encode()]
    took = time.monotonic() - began
    await asyncio.gather(*(box.destroy() for box in boxes))
    return took, errors


async def _exec(box: Any, request: ExecRequest) -> bytes:
    stdout: bytes = (await box.exec(request)).stdout
    return stdout


async def turns(backend: Backend, count: int) -> float:
    """Median seconds of a turn in a stateful shell beyond the command itself."""
    box = await backend.acquire(SandboxSpec())
    try:
        shell = await box.shell()
        spent = []
        for number in range(count + 5):
            began = time.perf_counter()
            result = await shell.run(f"x={number}", deadline_seconds=20)
            spent.append(time.perf_counter() - began)
            if result.exit_code != 0:
                raise Wrong(f"a turn of a shell failed: {result}")
        return statistics.median(spent[5:])
    finally:
        await box.destroy()


# ----------------------------------------------------------------------------------------------------------- what stays behind


@dataclass(frozen=True)
class Traces:
    """What this process holds on its host, counted."""

    processes: int
    containers: int
    volumes: int
    descriptors: int
    temporary_files: int
    control_groups: int
    mounts: int

    def more_than(self, before: Traces) -> list[str]:
        now, then = vars(self), vars(before)
        return [f"{now[name] - then[name]} {name.replace('_', ' ')}" for name in now if now[name] > then[name]]


def traces(client: Any) -> Traces:
    """`client` is the Docker SDK's, or None where no engine is measured."""
    tree = [os.getpid()]
    for pid in tree:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            tree += [int(word) for word in task.read_text().split()]
    mine = f"{PREFIX}pid={os.getpid()}"
    owner = this_process()
    return Traces(
        processes=len(tree),
        containers=len(client.containers.list(all=True, filters={"label": mine})) if client else 0,
        volumes=len(client.volumes.list()) if client else 0,
        descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in tree if os.path.isdir(f"/proc/{pid}/fd")),
        temporary_files=sum(name.startswith("bessemer") for name in os.listdir(tempfile.gettempdir())),
        control_groups=sum(1 for _ in Path("/sys/fs/cgroup").glob(f"**/bessemer/*/o-{owner.pid}-{owner.start}")),
        mounts=len(Path("/proc/self/mounts").read_text().splitlines()),
    )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Endurance(NamedTuple):
    left: list[str]
    growth: float
    """Of the owner's memory, relative."""
    per_second: float


async def endurance(backend: Backend, count: int, client: Any) -> Endurance:
    """`count` verdicts in a row; what is there afterwards that was not there after the first few."""
    call = verdict("cases", backend)

    async def run(times: int) -> None:
        left = iter(range(times))

        async def loop() -> None:
            for _ in left:
                await call()

        await asyncio.gather(*(loop() for _ in range(WIDTH)))

    await run(max(count // 10, WIDTH))
    before, memory, began = traces(client), resident_bytes(), time.monotonic()
    await run(count)
    took = time.monotonic() - began
    after = await _settled(before, client)
    return Endurance(after.more_than(before), resident_bytes() / memory - 1.0, count / took)


async def _settled(before: Traces, client: Any) -> Traces:
    """A killed process is a zombie for a moment; what is still there after two seconds stays."""
    for _ in range(20):
        after = traces(client)
        if not after.more_than(before):
            break
        await asyncio.sleep(0.1)
    return after


# ------------------------------------------------------------------------------------------------------------ a killed owner

_OWNER = """
import asyncio, sys
from data_contracts.config import SandboxConfig
from data_contracts.protocols import ExecRequest
from data_contracts.records import SandboxSpec
from environments.sandbox import open_backend

async def main():
    backend = open_backend(SandboxConfig(backend=sys.argv[1], concurrency=8))
    boxes = await asyncio.gather(*(backend.acquire(SandboxSpec()) for _ in range(int(sys.argv[2]))))
    running = [asyncio.ensure_future(box.exec(ExecRequest(argv=("sleep", "250"), deadline_seconds=280))) for box in boxes]
    spawner = getattr(backend, "spawner", None)
    await asyncio.sleep(0.5)
    print(spawner.pid if spawner else 0, flush=True)
    await asyncio.wait(running)

asyncio.run(main())
"""


class Reaped(NamedTuple):
    boxes: int
    seconds: float
    left: int
    bystander: bool


async def reap_after_kill(kind: str, count: int, backend: Backend, *, with_spawner: bool = True) -> Reaped:
    """kill -9 an owner of `count` busy boxes, its spawner too, and time what the next start's sweep takes to remove them all.

    `bystander` tells whether a box of this process still works afterwards.
    """
    bystander = await backend.acquire(SandboxSpec(limits=SandboxLimits(lifetime_seconds=900)))
    command = [sys.executable, "-c", _OWNER, kind, str(count)]
    # Not asyncio's: its wait would wait for everything that inherited the pipe.
    owner = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        spawner = int(await asyncio.wait_for(asyncio.to_thread(owner.stdout.readline), 300))
        held = await asyncio.to_thread(_held_by, owner.pid, kind, backend)
        if with_spawner and spawner:
            os.kill(spawner, signal.SIGSTOP)  # so that it cannot clean up
        owner.kill()
        await asyncio.to_thread(owner.wait)
        if with_spawner and spawner:
            os.kill(spawner, signal.SIGKILL)
        began = time.monotonic()
        await asyncio.to_thread(backend.reap)
        left = await asyncio.to_thread(_held_by, owner.pid, kind, backend)
        took = time.monotonic() - began
        alive = await bystander.exec(ExecRequest(argv=("echo", "fine"), deadline_seconds=60))
        return Reaped(held, took, left, alive.stdout == b"fine\n")
    finally:
        if owner.poll() is None:
            owner.kill()
            owner.wait()
        if owner.stdout is not None:
            owner.stdout.close()
        await bystander.destroy()


def _held_by(pid: int, kind: str, backend: Any) -> int:
    if kind == "docker":
        return len(backend.client.containers.list(all=True, filters={"label": f"{PREFIX}pid={pid}"}))
    return len({path.parent.name for path in Path("/sys/fs/cgroup").glob(f"**/bessemer/*/o-{pid}-*")})


def _busy_seconds() -> float:
    """CPU time that the machine has spent on anything, in seconds."""
    user, nice, system, _, _, interrupts, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + interrupts + soft) / float(os.sysconf("SC_CLK_TCK"))


async def _machine_load(seconds: float) -> float:
    """CPUs kept busy by others: an average over `seconds` in which we do nothing."""
    busy, began = _busy_seconds(), time.monotonic()
    await asyncio.sleep(seconds)
    return (_busy_seconds() - busy) / (time.monotonic() - began)

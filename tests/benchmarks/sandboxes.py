"""How fast boxes are. Run by hand: `python -m tests.benchmarks.sandboxes [bubblewrap|docker]`; prints a Markdown table."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from data_contracts.config import SandboxConfig
from data_contracts.protocols import ExecRequest
from data_contracts.records import SandboxSpec
from environments.sandbox import open_backend
from environments.sandbox.base import Backend, Box

TRUE = ExecRequest(argv=("true",), deadline_seconds=60)
PYTHON = ExecRequest(argv=("python3", "-I", "-S", "-c", "print(1)"), deadline_seconds=60)
PYTEST = ExecRequest(argv=("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"), deadline_seconds=60)
TESTS = {"test_it.py": b"def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n"}


async def empty(backend: Backend) -> None:
    await (await backend.acquire(SandboxSpec())).destroy()


async def fresh(backend: Backend, request: ExecRequest, files: dict[str, bytes] | None = None) -> None:
    box = await backend.acquire(SandboxSpec())
    if files:
        await box.put_files(files)
    result = await box.exec(request)
    assert result.exit_code == 0, result
    await box.destroy()


async def one_by_one(call: Callable[[], Awaitable[object]], times: int) -> str:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - started)
    return f"{statistics.median(seconds) * 1000:.0f} ms (slowest {max(seconds) * 1000:.0f})"


async def at_once(call: Callable[[], Awaitable[object]], times: int, width: int) -> str:
    gate = asyncio.Semaphore(width)

    async def gated() -> None:
        async with gate:
            await call()

    started = time.perf_counter()
    await asyncio.gather(*(gated() for _ in range(times)))
    return f"{times / (time.perf_counter() - started):.1f} /s"


async def measure(name: str, times: int) -> None:
    backend = open_backend(SandboxConfig(backend=name, concurrency=8))  # type: ignore[arg-type]
    await backend.check()
    box: Box = await backend.acquire(SandboxSpec())
    await box.exec(TRUE)
    rows = {
        "box made and destroyed": await one_by_one(lambda: empty(backend), times),
        "fresh box + trivial Python + destroy": await one_by_one(lambda: fresh(backend, PYTHON), times),
        "exec `true` in a running box": await one_by_one(lambda: box.exec(TRUE), times),
        "exec trivial Python in a running box": await one_by_one(lambda: box.exec(PYTHON), times),
        "put one file": await one_by_one(lambda: box.put_files({"a/b": b"x" * 1000}), times),
        "fresh boxes + trivial Python, 8 at once": await at_once(lambda: fresh(backend, PYTHON), times * 4, 8),
        "fresh boxes + pytest with 3 tests, 8 at once": await at_once(lambda: fresh(backend, PYTEST, TESTS), times, 8),
        "exec `true`, 8 at once": await at_once(lambda: box.exec(TRUE), times * 4, 8),
    }
    await box.destroy()
    await backend.close()
    print(f"| {name} | |\n|---|---|")
    for what, figure in rows.items():
        print(f"| {what} | {figure} |")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or ["bubblewrap", "docker"]:
        asyncio.run(measure(chosen, 20 if chosen == "bubblewrap" else 8))

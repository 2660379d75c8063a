"""What a check acts with: boxes of the backend under test, and short ways to run something in them.

`walled_box` is for what would hurt a host (fork bombs, `kill -9 -1`): it first makes sure that the box has processes of its own
and is not root, so that a backend that only claims to isolate fails the check instead of losing the machine.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from data_contracts.protocols import ExecRequest, ExecResult
from data_contracts.records import SandboxLimits, SandboxSpec
from data_contracts.services import ServiceSpec
from environments.sandbox.base import Backend, Box
from environments.sandbox.conformance.check import CheckFailed, holds
from infra.paths import home

SECONDS = 30.0
"""Deadline of a command that should take moments; generous, for a host that is busy."""
CLOCK = SandboxSpec().clock
_LIST = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f 2>/dev/null; echo; done"


class Lab:
    """One backend under test. `store` is the folder of the store whose files no box may read."""

    def __init__(self, backend: Backend, *, store: Path | None = None) -> None:
        self.backend = backend
        self.store = store or home() / "store"

    @asynccontextmanager
    async def box(
        self,
        *,
        env: Mapping[str, str] | None = None,
        workdir: str = "/work",
        clock: str | None = CLOCK,
        services: tuple[ServiceSpec, ...] = (),
        **limits: float,
    ) -> AsyncIterator[Box]:
        """A fresh box, destroyed at the end of the block."""
        held = SandboxLimits(**limits)  # type: ignore[arg-type]
        spec = SandboxSpec(env=dict(env or {}), workdir=workdir, clock=clock, services=services, limits=held)
        box = await self.backend.acquire(spec)
        try:
            yield box
        finally:
            await box.destroy()

    @asynccontextmanager
    async def walled_box(self, **limits: float) -> AsyncIterator[Box]:
        """A fresh box that was seen to have its own processes and no root."""
        async with self.box(**limits) as box:  # type: ignore[arg-type]
            inside = (await sh(box, "readlink /proc/self/ns/pid; id -u")).stdout.decode(errors="replace").split()
            outside = await asyncio.to_thread(os.readlink, "/proc/self/ns/pid")
            if len(inside) != 2 or inside[0] == outside or inside[1] == "0":
                raise CheckFailed(
                    f"the box shares the host's processes or runs as root ({' '.join(inside)}); nothing hostile is run in it"
                )
            yield box


def marker() -> str:
    """A number that no other process has in its command line; also a long time to sleep."""
    return str(100_000_000 + secrets.randbelow(900_000_000))


async def sh(box: Box, script: str, *, seconds: float = SECONDS, stdin: bytes = b"", cap: int = 65536) -> ExecResult:
    return await box.exec(ExecRequest(argv=("sh", "-c", script), deadline_seconds=seconds, stdin=stdin, max_output_bytes=cap))


async def py(box: Box, program: str, *arguments: str, seconds: float = SECONDS, cap: int = 65536) -> ExecResult:
    argv = ("python3", "-I", "-c", program, *arguments)
    return await box.exec(ExecRequest(argv=argv, deadline_seconds=seconds, max_output_bytes=cap))


async def said(box: Box, program: str, *arguments: str, seconds: float = SECONDS) -> str:
    """What a Python program prints; it must end with 0."""
    result = await py(box, program, *arguments, seconds=seconds)
    holds(result.exit_code == 0, f"the program of this check ended with {result.exit_code}: {result.stderr[-300:]!r}")
    return result.stdout.decode(errors="replace")


async def processes(box: Box) -> list[str]:
    """Command lines inside the box, but for the command that asks."""
    rows = (await sh(box, _LIST)).stdout.decode(errors="replace").splitlines()
    return [row.strip() for row in rows if row.strip() and "/proc/" not in row]


async def until(condition: Callable[[], Awaitable[bool]], *, seconds: float = 10.0) -> bool:
    """Whether the condition came true in time."""
    limit = asyncio.get_running_loop().time() + seconds
    while not await condition():
        if asyncio.get_running_loop().time() > limit:
            return False
        await asyncio.sleep(0.05)
    return True

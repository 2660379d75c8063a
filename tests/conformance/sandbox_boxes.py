"""What the conformance tests of sandboxes share: a box for one test, and short ways to run something in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from data_contracts.protocols import ExecRequest, ExecResult
from data_contracts.records import SandboxLimits, SandboxSpec
from environments.sandbox.base import Backend, Box


@asynccontextmanager
async def a_box(backend: Backend, *, env: Mapping[str, str] | None = None, **limits: float) -> AsyncIterator[Box]:
    spec = SandboxSpec(env=dict(env or {}), limits=SandboxLimits(**limits))  # type: ignore[arg-type]
    box = await backend.acquire(spec)
    try:
        yield box
    finally:
        await box.destroy()


async def sh(box: Box, script: str, *, seconds: float = 20.0, stdin: bytes = b"", cap: int = 65536) -> ExecResult:
    return await box.exec(ExecRequest(argv=("sh", "-c", script), deadline_seconds=seconds, stdin=stdin, max_output_bytes=cap))


async def py(box: Box, program: str, *, seconds: float = 20.0) -> ExecResult:
    return await box.exec(ExecRequest(argv=("python3", "-I", "-c", program), deadline_seconds=seconds))

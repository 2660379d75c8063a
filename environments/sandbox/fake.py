"""A backend that does NOT isolate: plain child processes in a temporary folder. For tests of the loop with trusted code only.

It is held to the part of the contract that needs no isolation (states, deadlines, caps, names, regular files only), says so in
`capabilities`, and is used only where a profile says `backend: fake`: no other backend falls back to it. A problem that needs
"isolation", "limits", "oom" or "no_network" is refused. Commands run as the caller, with the host's files and network in reach.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from data_contracts.errors import InfraError, InputError
from data_contracts.protocols import ExecRequest, ExecResult
from data_contracts.records import Artifact, SandboxSpec
from environments.sandbox import shell_agent
from environments.sandbox.base import CONTRACT, Backend, Box
from environments.sandbox.entering import CANNOT_START, DRAIN_SECONDS
from environments.sandbox.files import read_files, write_files
from environments.sandbox.shell import StreamWire, Wire
from environments.sandbox.shell_agent import HeadTail


class FakeBackend(Backend):
    name = "fake"
    capabilities = CONTRACT

    async def check(self) -> None:
        """Nothing is needed, and nothing is enforced."""

    def reap(self) -> int:
        return 0

    async def _acquire(self, spec: SandboxSpec) -> Box:
        return FakeBox(self, spec)


class FakeBox(Box):
    def __init__(self, backend: Backend, spec: SandboxSpec) -> None:
        super().__init__(backend, spec, f"fake-{uuid.uuid4().hex[:8]}")
        self._folder = Path(tempfile.mkdtemp(prefix="bessemer-fake-"))
        self._root = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._groups: set[int] = set()

    async def _exec(self, request: ExecRequest, env: Mapping[str, str]) -> ExecResult:
        inside = f"{self.spec.workdir}/"
        argv = [str(self._folder / word.removeprefix(inside)) if word.startswith(inside) else word for word in request.argv]
        if argv[0] == "python3":  # the interpreter at hand; a box has no other than its own either
            argv[0] = sys.executable
        cwd = self._folder / self.folder(request).removeprefix(self.spec.workdir).lstrip("/")
        began = time.monotonic()
        streams = HeadTail(request.max_output_bytes), HeadTail(request.max_output_bytes)
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd, env=dict(env), start_new_session=True
            )
        except OSError as error:
            return ExecResult(exit_code=CANNOT_START, stdout=b"", stderr=f"{request.argv[0]}: {error.strerror}\n".encode())
        self._groups.add(process.pid)
        assert process.stdin
        assert process.stdout
        assert process.stderr
        pumps = [asyncio.ensure_future(_read(r, s)) for r, s in zip((process.stdout, process.stderr), streams, strict=True)]
        pumps.append(asyncio.ensure_future(_feed(process.stdin, request.stdin)))
        timed_out = False
        try:
            async with asyncio.timeout(request.deadline_seconds):
                await _exited(process)
        except TimeoutError:
            timed_out = True
        finally:
            if timed_out or process.returncode is None:
                self._signal(process.pid)
        await asyncio.wait(pumps, timeout=DRAIN_SECONDS)
        for pump in pumps:
            pump.cancel()
        code = await process.wait()
        # A background child may hold the pipes; asyncio closes them only at their end, and offers no public way to.
        process._transport.close()  # type: ignore[attr-defined]
        return ExecResult(
            exit_code=None if timed_out else code if code >= 0 else 128 - code,
            stdout=streams[0].bytes(), stderr=streams[1].bytes(),
            stdout_truncated=streams[0].truncated, stderr_truncated=streams[1].truncated, timed_out=timed_out,
            wall_seconds=time.monotonic() - began,
        )  # fmt: skip

    async def _shell(self, cwd: str, env: Mapping[str, str]) -> Wire:
        folder = self._folder / cwd.removeprefix(self.spec.workdir).lstrip("/")
        pipe = asyncio.subprocess.PIPE
        try:
            agent = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", shell_agent.__file__, stdin=pipe, stdout=pipe, cwd=folder, env=dict(env),
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise InputError(
                f"no shell in {cwd!r}: {error.strerror}", field="cwd", remedy="Name a folder of the box"
            ) from error
        return _ShellWire(agent)

    def _signal(self, group: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    async def _probe(self) -> None:
        if not self._folder.is_dir():
            raise InfraError("sandbox_backend", f"the folder of box {self.id} is gone: {self._folder}")

    async def _put(self, files: Mapping[str, bytes]) -> None:
        await asyncio.to_thread(write_files, self._root, files)

    async def _freeze(self) -> None:
        for group in self._groups:
            self._signal(group)

    async def _collect(self, names: Sequence[str], max_bytes: int) -> tuple[Artifact, ...]:
        return await asyncio.to_thread(read_files, self._root, names, max_bytes=max_bytes)

    async def _destroy(self) -> None:
        await self._freeze()
        if self._root >= 0:
            os.close(self._root)
            self._root = -1
        await asyncio.to_thread(shutil.rmtree, self._folder, True)


class _ShellWire(StreamWire):
    def __init__(self, agent: asyncio.subprocess.Process) -> None:
        assert agent.stdin
        assert agent.stdout
        super().__init__(agent.stdout, agent.stdin)
        self._agent = agent

    async def end(self) -> None:
        """The agent ends its session when its line closes, and then itself."""
        await super().end()
        await self._agent.wait()


async def _exited(process: asyncio.subprocess.Process) -> None:
    """`Process.wait` waits for the pipes too, which a background child may hold."""
    while process.returncode is None:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def _read(reader: asyncio.StreamReader, sink: HeadTail) -> None:
    while data := await reader.read(65536):
        sink.add(data)


async def _feed(writer: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):
        writer.write(data)
        await writer.drain()
    writer.close()

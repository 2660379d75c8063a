"""One command in a box that is entered from the host: launched through the spawner, followed to its report or its death.

Contract: what runs between is entering.py. `launch` blocks for a moment and returns the line on which the report comes.
`follow` returns when the command is dead: it ended by itself, was late, or `stop` was set; cancelled, it kills first. `kill`
ends everything of the command that has joined its control groups; it is called again as long as no report has come, for a
process that had not joined them yet.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from data_contracts.errors import InfraError
from data_contracts.protocols import ExecRequest, ExecResult
from environments.sandbox import entering
from environments.sandbox.spawner_link import SpawnerLink

KILL_AGAIN_SECONDS = 0.5
KILLED = 128 + 9
Kill = Callable[[], Coroutine[Any, Any, object]]


class Report(NamedTuple):
    """`code` is None when the command was killed by us or has never run; `failure` says why it could not enter the box."""

    code: int | None
    stdout: bytes
    stderr: bytes
    cut: tuple[bool, bool]
    timed_out: bool
    wall: float
    failure: str

    def result(self, *, oom_killed: bool) -> ExecResult:
        return ExecResult(
            exit_code=self.code, stdout=self.stdout, stderr=self.stderr, stdout_truncated=self.cut[0],
            stderr_truncated=self.cut[1], timed_out=self.timed_out, oom_killed=oom_killed, wall_seconds=self.wall,
        )  # fmt: skip


def launch(
    link: SpawnerLink,
    request: ExecRequest,
    message: Mapping[str, Any],
    descriptors: Sequence[int],
    root: Path | None = None,
) -> tuple[IO[bytes], int]:
    """The reader of the report, and the spawner's pid. `message` has env, cwd, uid, gid and view; `descriptors` are the box's,
    in the spawner's order; with a `root`, a request that wants it is forked from an interpreter of that root."""
    stdin = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    read_end, write_end = os.pipe()
    try:
        view = memoryview(request.stdin)
        while view:
            view = view[os.write(stdin, view) :]
        os.lseek(stdin, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(stdin, fcntl.F_ADD_SEALS, seals)
        whole = {
            "op": "exec", "argv": request.argv, "cap": request.max_output_bytes, "seconds": request.deadline_seconds,
            "script": "", **message,
        }  # fmt: skip
        passed = [write_end, stdin, *descriptors]
        if request.preload is not None and root is not None:
            whole["script"] = request.argv[-1]
            pid = link.send_preloaded(request.preload, root, whole, passed)
        else:
            pid = link.send(whole, passed)
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(stdin)
        os.close(write_end)
    return os.fdopen(read_end, "rb", buffering=0), pid


async def follow(
    reader: IO[bytes], seconds: float, kill: Callable[[], Coroutine[Any, Any, object]], stop: asyncio.Event
) -> Report:
    """Takes over `reader`. Raises InfraError when a killed command does not report."""
    began = time.monotonic()
    stream = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), reader)
    except asyncio.CancelledError:
        reader.close()
        await asyncio.shield(kill())
        raise
    stopping, reading = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(stream.read())

    async def end() -> None:
        limit = time.monotonic() + 2 * entering.BACKSTOP_SECONDS
        while not reading.done():
            await kill()
            await asyncio.wait({reading}, timeout=KILL_AGAIN_SECONDS)
            if not reading.done() and time.monotonic() > limit:
                raise InfraError("sandbox_backend", "a command was killed but its report never came")

    try:
        await asyncio.wait({reading, stopping}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if timed_out := not reading.done():
            await end()
        payload = await reading
    except asyncio.CancelledError:
        await asyncio.shield(end())
        raise
    finally:
        stopping.cancel()
        reading.cancel()
        transport.close()
    return _read(payload, timed_out=timed_out, wall=time.monotonic() - began)


def _read(payload: bytes, *, timed_out: bool, wall: float) -> Report:
    size = int.from_bytes(payload[:4], "big") if len(payload) >= 4 else 0
    header: dict[str, Any] = {"status": None, "error": "no report", "out": 0, "truncated": [False, False]}
    if size:
        header = json.loads(payload[4 : 4 + size])
    body, split = payload[4 + size :], header["out"]
    failure = ""
    code = None
    if header["status"] is None:
        failure = header["error"] or "no report"
    elif not timed_out:
        code = os.waitstatus_to_exitcode(header["status"])
        code = code if code >= 0 else 128 - code
    cut = bool(header["truncated"][0]), bool(header["truncated"][1])
    return Report(code, body[:split], body[split:], cut, timed_out, header.get("wall", wall), failure)

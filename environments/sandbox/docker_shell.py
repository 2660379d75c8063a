"""The line to a shell's agent in a Docker box: the connection of one exec, whose input and output it is.

Contract: shell.py `Wire`. The agent (shell_agent.py) runs in the box as the policy's user, from source that is handed over with
the command, in the pristine interpreter of the read-only image; the policy can end or stop it, and by that its own session.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.sandbox import shell_agent
from environments.sandbox.docker_stream import close, early_output
from environments.sandbox.shell import Answer, Wire

if TYPE_CHECKING:
    from environments.sandbox.docker import DockerBackend
    from environments.sandbox.docker_box import DockerBox

AGENT = ("/usr/bin/python3", "-I", "-S", "-c", Path(shell_agent.__file__).read_text())


class DockerWire(Wire):
    def __init__(self, host: DockerBackend, box: DockerBox, run: str, wrapper: Any, sock: socket.socket) -> None:
        self._host, self._box, self._run, self._wrapper, self._sock = host, box, run, wrapper, sock
        self._frames, self._buffer = bytearray(early_output(wrapper, sock)), bytearray()
        self._started = self._closed = False
        sock.settimeout(None)

    async def send(self, payload: bytes) -> None:
        await self._host.thread(lambda: self._sock.sendall(payload))

    async def answer(self) -> Answer:
        try:
            return await self._host.thread(self._answer)
        except EOFError:
            words = bytes(self._buffer[:500])
            if self._started or b"chdir" not in words:
                raise
            return {"error": "no shell"}, b"", words  # the engine's words, in the place of an agent that never was

    async def receive(self, size: int) -> bytes:
        return await self._host.thread(lambda: self._read(size))

    async def end(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._box.running -= 1

        def finish() -> None:
            close(self._wrapper, self._sock)
            self._box.end_shell(self._run)

        await asyncio.shield(self._host.run(finish))

    def oom_kills(self) -> int:
        return self._box.oom_kills()

    async def require_box(self) -> None:
        await self._host.run(self._box.raise_if_gone)

    def _answer(self) -> Answer:
        (size,) = struct.unpack("!I", self._read(4))
        header: dict[str, Any] = json.loads(self._read(size))
        found = header, self._read(header["out"]), self._read(header["err"])
        self._started = True
        return found

    def _read(self, size: int) -> bytes:
        """From the engine's frames (kind, 0, 0, 0, size); the agent itself says nothing on its stderr, kind 2."""
        while len(self._buffer) < size:
            kind, length = struct.unpack("!BxxxI", self._exactly(8))
            block = self._exactly(length)
            if kind == 1:
                self._buffer += block
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _exactly(self, size: int) -> bytes:
        while len(self._frames) < size:
            block = self._sock.recv(65536)
            if not block:
                raise EOFError("the agent is gone")
            self._frames += block
        data = bytes(self._frames[:size])
        del self._frames[:size]
        return data

"""A stateful shell in a box, as its users see it; how a turn is run and told apart is in shell_agent.py.

Contract: data_contracts/protocols.py `Shell`. A backend supplies a `Wire`: bytes to and from the process beside the shell. One
turn runs at a time; the time a turn queues is not part of its deadline. The agent keeps deadlines; here stands a second, later
one, for an agent that a policy stopped: then the whole session is killed.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from data_contracts.errors import InfraError, InputError, SandboxLost
from data_contracts.protocols import ShellResult
from environments.sandbox.shell_agent import GRACE_SECONDS

if TYPE_CHECKING:
    from types import TracebackType

    from environments.sandbox.base import Box

BACKSTOP_SECONDS = 10.0
"""How much later than the agent the owner ends a turn: the agent's grace, its killing, and a loaded host."""
START_SECONDS = 30.0
Answer = tuple[dict[str, Any], bytes, bytes]


class Wire(ABC):
    """The bytes between the owner and one agent."""

    trusted = False
    """Whether the agent is out of the policy's reach: then its silence is a fault of ours."""

    @abstractmethod
    async def send(self, payload: bytes) -> None:
        """Raises OSError when the agent is gone."""

    @abstractmethod
    async def receive(self, size: int) -> bytes:
        """Exactly so many bytes. Raises EOFError (asyncio.IncompleteReadError) or OSError when the agent is gone."""

    @abstractmethod
    async def end(self) -> None:
        """Kill the session, whatever state it is in, and close. Idempotent."""

    @abstractmethod
    def oom_kills(self) -> int:
        """Memory kills in the box so far, where that can be seen."""

    @abstractmethod
    async def require_box(self) -> None:
        """Raises SandboxLost or InfraError when the box is gone; the agent has just gone silent."""

    async def answer(self) -> Answer:
        (size,) = struct.unpack("!I", await self.receive(4))
        header: dict[str, Any] = json.loads(await self.receive(size))
        return header, await self.receive(header["out"]), await self.receive(header["err"])


class StreamWire(Wire):
    """Over asyncio's streams, for agents on this host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, payload: bytes) -> None:
        self._writer.write(payload)
        await self._writer.drain()

    async def receive(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def end(self) -> None:
        self._writer.close()

    def oom_kills(self) -> int:
        return 0

    async def require_box(self) -> None:
        """Nothing can be lost where nothing is limited."""


class BoxShell:
    """One session; see the module's contract. Made by `Box.shell`, which has waited for the shell to stand."""

    def __init__(self, box: Box, wire: Wire) -> None:
        self._box, self._wire = box, wire
        self._one_turn = asyncio.Lock()
        self.alive = True

    async def run(self, command: str, deadline_seconds: float, *, max_output_bytes: int = 64 * 1024) -> ShellResult:
        check_turn(command, deadline_seconds, max_output_bytes)
        async with self._one_turn, self._box.turn():
            self._box.require_usable("run a command in a shell")
            if not self.alive:
                raise InputError("this shell has ended", remedy="Open another one with shell(); its state is gone")
            kills = self._wire.oom_kills()
            request = {"command": command, "seconds": deadline_seconds, "cap": max_output_bytes}
            async with self._box.living():
                return await self._ran(request, kills, deadline_seconds + GRACE_SECONDS + BACKSTOP_SECONDS)

    async def _ran(self, request: dict[str, object], kills: int, seconds: float) -> ShellResult:
        try:
            async with asyncio.timeout(seconds):
                header, out, err = await self._turn(request)
        except TimeoutError:
            await self.close()
            return ShellResult(exit_code=None, stdout=b"", stderr=b"", timed_out=True, alive=False)
        except (EOFError, OSError):  # the agent ended without a word
            await self._ended(killed=True)
            if self._wire.trusted:
                raise InfraError("sandbox_backend", f"a shell's agent beside box {self._box.id} has died") from None
            return ShellResult(exit_code=None, stdout=b"", stderr=b"", alive=False)
        except BaseException:  # cancelled, or the box's lifetime is over: what runs is killed before the caller gets it
            await asyncio.shield(self.close())
            raise
        if not header["alive"]:
            await self._ended(killed=header["code"] == 137)
        return ShellResult(
            exit_code=header["code"], stdout=out, stderr=err, stdout_truncated=header["truncated"][0],
            stderr_truncated=header["truncated"][1], timed_out=header["timed_out"], alive=header["alive"],
            oom_killed=self._wire.oom_kills() > kills, wall_seconds=header["wall"],
        )  # fmt: skip

    async def close(self) -> None:
        """Kill the session and everything it holds. Idempotent; a turn that runs meanwhile ends without a word."""
        self.alive = False
        self._box.shells.discard(self)
        await self._wire.end()

    async def _ended(self, *, killed: bool) -> None:
        """The shell is no more; when it was killed, perhaps the whole box is, and that is another matter."""
        await self.close()
        if killed:
            await self._wire.require_box()

    async def _turn(self, request: dict[str, object]) -> Answer:
        text = json.dumps(request).encode()
        await self._wire.send(struct.pack("!I", len(text)) + text)
        return await self._wire.answer()

    async def __aenter__(self) -> BoxShell:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def stand(wire: Wire) -> None:
    """Wait until the shell behind `wire` stands, or end the wire. Raises InputError, SandboxLost, InfraError."""
    try:
        async with asyncio.timeout(START_SECONDS):
            header, _, err = await wire.answer()
    except (EOFError, OSError, TimeoutError) as error:
        await wire.end()
        await wire.require_box()
        raise SandboxLost("a box left no room for a shell, or killed it at once; this is the policy's failure") from error
    except BaseException:
        await asyncio.shield(wire.end())
        raise
    if header["error"]:
        await wire.end()
        await wire.require_box()
        words = err[-300:].decode(errors="replace").strip()
        raise InputError(
            f"{header['error']}: {words}", field="cwd", remedy="Name a folder of the box, and an image that has bash"
        )


def check_turn(command: str, deadline_seconds: float, max_output_bytes: int) -> None:
    if "\0" in command:
        raise InputError("a command has no NUL", field="command", remedy="Write binary data with put_files")
    if not (math.isfinite(deadline_seconds) and deadline_seconds > 0):
        raise InputError(
            "a turn needs a finite deadline above 0", field="deadline_seconds", remedy="Rule 5: every wait has one"
        )
    if max_output_bytes < 0:
        raise InputError("max_output_bytes is negative", field="max_output_bytes", remedy="Use 0 or more")

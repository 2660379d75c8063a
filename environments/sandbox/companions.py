"""The companion services of one box: started with it, healthy before it is handed out, watched, destroyed with it.

Contract: data_contracts/services.py says what a service is. Each runs in a box of its own (environments/sandbox/base.py: no
network, no host, its own user, limits and processes), made fresh for this one box and never used again, so that no state passes
from episode to episode. What connects the two is a relay (relay.py), one a service, out of reach of both: it listens on
127.0.0.1:port in the box, and dials one fixed port in the companion. The box reaches the declared ports and nothing else of a
companion: no process, no file, no other port; a companion reaches nothing of the box.

A box whose service does not start, is not healthy in time, or whose seed command fails, is not handed out: InfraError, with
the service's last words. A service that ends later is found at the next command, turn or freeze of its box, and is that
declared end's failure: InfraError, or SandboxLost for `end: policy`. `Box.services` gives each companion as a box, for the
control plane alone: to ask a database, or to read an audit log. A freeze of the box closes their ports to it, and leaves
them running for that; freeze a companion before collecting from it.

Gaps: a service is watched by its main process; one that hangs is for its clients to notice. Services of one box start at the
same time and cannot reach each other. A box with services belongs to the event loop that made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from data_contracts.errors import InfraError, SandboxLost
from data_contracts.protocols import ExecRequest, ExecResult
from data_contracts.records import SandboxLimits, SandboxSpec
from data_contracts.services import ServiceSpec, recording
from environments.sandbox import relay, replay_server

if TYPE_CHECKING:
    from environments.sandbox.base import Backend, Box

SPARE_SECONDS = 10.0
"""A companion's box outlives its box by this, so that the end of a lifetime is told as what it is."""
SEED_SECONDS = 60.0
LINK_SECONDS = 20.0
STOP_SECONDS = 15.0
WORDS_BYTES = 16 * 1024
_RECORDINGS = "recordings.json"
_SERVER = Path(replay_server.__file__).read_text()


class Link:
    """The owner's line to one relay."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    async def ready(self) -> None:
        """Raises OSError with the reason, or TimeoutError."""
        loop = asyncio.get_running_loop()
        self._control.setblocking(False)
        async with asyncio.timeout(LINK_SECONDS):
            word = await loop.sock_recv(self._control, 1000)
        if word != relay.READY:
            raise OSError(word.decode(errors="replace") or "the relay ended while it started")

    def alive(self) -> bool:
        poll = select.poll()
        if self._control.fileno() < 0:
            return False
        poll.register(self._control, select.POLLIN)
        return not poll.poll(0)

    async def dial(self, seconds: float) -> socket.socket | None:
        """A connection to the companion's port, None when nothing accepts there. Raises TimeoutError, OSError (no relay)."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [relay.DIAL], [theirs.fileno()])
            ours.setblocking(False)
            async with asyncio.timeout(seconds):
                word = await asyncio.get_running_loop().sock_recv(ours, 1)
        except BaseException:
            ours.close()
            raise
        if word != relay.OPEN:
            ours.close()
            return None
        return ours

    def mute(self) -> None:
        """The box is heard no more; the owner still is."""
        with contextlib.suppress(OSError):  # a relay that is gone hears nobody
            self._control.send(relay.MUTE)

    def close(self) -> None:
        self._control.close()


class Companion:
    """One service beside one box. `box` is where it runs."""

    def __init__(self, spec: ServiceSpec, box: Box) -> None:
        self.spec, self.box = spec, box
        self._stop = asyncio.Event()
        self._serving: asyncio.Task[ExecResult] | None = None
        self._link: Link | None = None
        self._watched = True

    async def start(self, backend: Backend, beside: Box) -> None:
        """Raises InfraError unless it is healthy and seeded: no policy has seen it yet, whatever ends it."""
        try:
            await self._start(backend, beside)
        except SandboxLost as error:
            if self._serving is not None:
                await asyncio.wait({self._serving}, timeout=STOP_SECONDS)
            fault = self.fault() or f"service '{self.spec.name}' cannot be used: {error}"
            raise InfraError("sandbox_backend", f"{fault}, before it was healthy") from error

    async def _start(self, backend: Backend, beside: Box) -> None:
        spec = self.spec
        files = _files(spec)
        if files:
            await self.box.put_files(files)
        lifetime = self.box.spec.limits.lifetime_seconds
        request = ExecRequest(argv=_argv(spec), deadline_seconds=lifetime, max_output_bytes=WORDS_BYTES)
        self._serving = asyncio.ensure_future(self.box.serve(request, self._stop))
        try:
            self._link = Link(await backend.relay(beside, self.box, spec.port, spec.target))
            await self._link.ready()
        except (OSError, TimeoutError) as error:
            raise InfraError(
                "sandbox_backend", f"service '{spec.name}' of a box cannot be reached at port {spec.port}: {error!r}"
            ) from error
        await self._healthy()
        if spec.seed:
            result = await self.box.exec(ExecRequest(argv=spec.seed, deadline_seconds=SEED_SECONDS))
            if result.exit_code != 0:
                how = f"took longer than {SEED_SECONDS:g} s" if result.timed_out else f"ended with {result.exit_code}"
                raise InfraError(
                    "sandbox_backend", f"the seed of service '{spec.name}' {how}: {_tail(result)}; try it by hand in its image"
                )

    async def _healthy(self) -> None:
        health, pause = self.spec.health, 0.01
        limit = time.monotonic() + health.deadline_seconds
        found = "it was not asked"
        while (left := limit - time.monotonic()) > 0:
            if fault := self.fault():
                raise InfraError("sandbox_backend", f"{fault}, before it was healthy")
            try:
                found = await self._asked(left)
            except (OSError, TimeoutError) as error:
                found = f"{type(error).__name__} {error}".strip()
            if not found:
                return
            await asyncio.sleep(min(pause, max(limit - time.monotonic(), 0.0)))
            pause = min(pause * 1.5, 0.25)
        words = await self._last_words()
        raise InfraError(
            "sandbox_backend",
            f"service '{self.spec.name}' was not healthy within health.deadline_seconds={health.deadline_seconds:g} ({found});"
            f" it said: {words}; raise the deadline, or mend the service",
        )

    async def _asked(self, left: float) -> str:
        """Empty when the service is healthy, else what was found."""
        assert self._link
        health = self.spec.health
        if health.command:
            result = await self.box.exec(ExecRequest(argv=health.command, deadline_seconds=left))
            return "" if result.exit_code == 0 else f"{health.command[0]} ended with {result.exit_code}: {_tail(result)}"
        if not health.http and (own := await self.box.own_health(left)) is not None:
            return own
        sock = await self._link.dial(min(left, 5.0))
        if sock is None:
            return f"nothing listens at 127.0.0.1:{self.spec.target}"
        with sock:
            async with asyncio.timeout(min(left, 5.0)):
                return await _http(sock, health.http) if health.http else ""

    async def _last_words(self) -> str:
        self._stop.set()
        assert self._serving
        try:
            return _tail(await asyncio.wait_for(self._serving, STOP_SECONDS)) or "nothing"
        except (InfraError, SandboxLost, TimeoutError) as error:
            return f"(its output is lost: {error})"

    def fault(self) -> str:
        """Empty while the service runs, else what became of it. Blocks for nothing."""
        serving = self._serving
        if serving is None or not self._watched:
            return ""
        name = f"service '{self.spec.name}'"
        if serving.done():
            if serving.cancelled():
                return f"{name} belonged to an event loop that has ended"
            if error := serving.exception():
                return f"{name} ended: {'its box was ended from outside' if isinstance(error, SandboxLost) else error}"
            result = serving.result()
            how = f"exit code {result.exit_code}"
            if result.oom_killed:
                how += f", out of its limits.memory_bytes={self.spec.limits.memory_bytes}"
            return f"{name} ended ({how}): {_tail(result) or 'it said nothing'}"
        if serving.get_loop().is_closed():
            return f"{name} belonged to an event loop that has ended"
        if self._link is not None and not self._link.alive():
            return f"the relay of {name} ended"
        return ""

    def require(self) -> None:
        """Raises InfraError, or SandboxLost where the declaration says so, for a service that has ended."""
        if fault := self.fault():
            if self.spec.end == "policy":
                raise SandboxLost(f"{fault}; its clients can end it, and this is the policy's failure")
            raise InfraError("sandbox_backend", fault)

    def unlink(self) -> None:
        """The box is frozen: nothing of it connects any more, and the service's end is no failure any more."""
        self._watched = False
        if self._link is not None:
            self._link.mute()

    async def remove(self) -> None:
        """Nothing of the service is left. Idempotent."""
        self._watched = False
        if self._link is not None:
            self._link.close()
        serving = self._serving
        if serving is not None and serving.get_loop() is asyncio.get_running_loop():
            serving.cancel()
            await asyncio.wait({serving}, timeout=STOP_SECONDS)
            if serving.done() and not serving.cancelled():
                serving.exception()
        await self.box.remove()


async def accompany(backend: Backend, box: Box) -> None:
    """Start all services of `box.spec` beside it. Raises what the first that failed raised; the caller removes the box."""

    async def one(service: ServiceSpec) -> None:
        companion = Companion(service, await backend.companion_box(service, companion_spec(service, box.spec)))
        box.companions[service.name] = companion
        await companion.start(backend, box)

    starting = [asyncio.ensure_future(one(service)) for service in box.spec.services]
    try:
        await asyncio.gather(*starting)
    finally:
        for task in starting:
            if not task.cancelling():  # one that is being cancelled cleans up, and is not to be disturbed
                task.cancel()
        await asyncio.wait(starting)
        for task in starting:
            if not task.cancelled():
                task.exception()


def companion_spec(service: ServiceSpec, box: SandboxSpec) -> SandboxSpec:
    """The box that a service runs in."""
    lifetime = box.limits.lifetime_seconds + SPARE_SECONDS
    limits = SandboxLimits(**msgspec.structs.asdict(service.limits), lifetime_seconds=lifetime)
    image = "base" if service.kind == "image" else service.image
    return SandboxSpec(image=image, env=service.env, clock=box.clock, limits=limits)


def _argv(spec: ServiceSpec) -> tuple[str, ...]:
    if spec.kind == "recorded":
        return ("python3", "-I", "-S", "-c", _SERVER, _RECORDINGS, str(spec.target), "strict" if spec.strict else "")
    return spec.argv or ("the image's own program",)


def _files(spec: ServiceSpec) -> Mapping[str, bytes]:
    if spec.kind == "recorded":
        rows = [row for name in sorted(spec.files) for row in recording(spec.files[name], file=name)]
        return {_RECORDINGS: json.dumps(rows).encode()}
    return {name: text.encode() for name, text in spec.files.items()}


async def _http(sock: socket.socket, path: str) -> str:
    """Empty when the server answers with 2xx or 3xx."""
    loop, answer = asyncio.get_running_loop(), b""
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nAccept: */*\r\n\r\n"
    await loop.sock_sendall(sock, request.encode())
    while b"\r\n" not in answer and len(answer) < 4096:
        block = await loop.sock_recv(sock, 4096)
        if not block:
            break
        answer += block
    status = answer.partition(b"\r\n")[0].split(b" ")
    if len(status) < 2 or not status[0].startswith(b"HTTP/"):
        return f"GET {path}: no answer in HTTP, but {answer[:60]!r}"
    return "" if status[1][:1] in {b"2", b"3"} else f"GET {path}: status {status[1].decode(errors='replace')}"


def _tail(result: ExecResult) -> str:
    text = (result.stdout + result.stderr).decode(errors="replace").strip()
    with contextlib.suppress(ValueError):
        text = text[text.index("\n", len(text) - 500) + 1 :] if len(text) > 500 else text
    return text[-500:]

"""Companion services beside a Docker box: the relay between two containers, a program in one, an image as one.

Contract: companions.py. The relay (relay.py) is a process of the host that enters the network namespaces of both containers by
/proc; the containers keep network mode none, no volume, no common namespace. This needs an engine that shares host and kernel
with the worker, a worker that is root, and a runtime that uses the host's kernel; elsewhere `DockerBackend.check` takes the
capability away, and a box with services is refused.

A program runs as an exec, watched without a thread. An image runs as the container's own process, as the box's user
(images must not need root, nor a user of their own), with a read-only root and a tmpfs for each VOLUME and each folder of
`writable`; its entry point and variables are its own; without a health check of the service's, its HEALTHCHECK is asked, and
the engine's own schedule is off. It has no lifetime inside: its relay ends it, when the lifetime is over or its owner gone.
Gaps: an image's container has no work folder: no files in or out, and `exec` runs in its working directory, with its variables;
a frozen one is dead. Images are never pulled in a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_contracts.errors import InfraError, InputError
from data_contracts.protocols import ExecRequest, ExecResult
from data_contracts.records import Artifact, SandboxSpec
from data_contracts.services import ServiceSpec
from environments.sandbox import relay, seccomp
from environments.sandbox.docker_box import CannotStartError, DockerBox
from environments.sandbox.docker_stream import close, demultiplex, early_output
from environments.sandbox.entering import CANNOT_START
from environments.sandbox.shell_agent import HeadTail
from infra.rootfs import BOX_UID

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

    from environments.sandbox.docker import DockerBackend

QUIET_SECONDS = 1.0
"""How often a program is looked at that has closed its output and goes on."""
END_SECONDS = 10.0
LOG = {"max-size": "64k", "max-file": "1"}
_LOG_LINES = 40


def start_relay(box: DockerBox, companion: DockerBox, port: int, target: int) -> socket.socket:
    """The owner's end of the new relay's line. Blocks for a moment."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    calls, ward, spaces = os.memfd_create("calls"), -1, list[int]()
    try:
        os.write(calls, seccomp.program())
        spaces += [_network(one) for one in (box, companion)]
        ward = os.pidfd_open(companion.init) if isinstance(companion, ImageBox) else -1
        passed = [theirs.fileno(), calls, *spaces, *((ward,) if ward >= 0 else ())]
        words = [*passed[:4], ward, port, target, BOX_UID, companion.spec.limits.lifetime_seconds]
        companion.relay_process = subprocess.Popen(
            [sys.executable, "-I", "-S", relay.__file__, *map(str, words)], pass_fds=passed, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, env={}, cwd="/", start_new_session=True,
        )  # fmt: skip
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        for fd in (calls, ward, *spaces):
            if fd >= 0:
                os.close(fd)
    return ours


async def serve(box: DockerBox, host: DockerBackend, request: ExecRequest, argv: list[str], stop: asyncio.Event) -> ExecResult:
    """Run a program in `box` until it ends, or until `stop`."""
    streams = HeadTail(request.max_output_bytes), HeadTail(request.max_output_bytes)
    began, kills = time.monotonic(), await host.run(box.oom_kills)
    beginning = asyncio.ensure_future(host.run(lambda: box.begin(argv, box.folder(request), stdin=False)))
    try:
        run, wrapper, sock = await asyncio.shield(beginning)
    except CannotStartError as error:
        return ExecResult(exit_code=CANNOT_START, stdout=b"", stderr=f"{error}\n".encode())
    except asyncio.CancelledError:
        with contextlib.suppress(CannotStartError, InfraError):
            _, wrapper, sock = await beginning
            close(wrapper, sock)
        raise
    watching = asyncio.ensure_future(_watch(box, host, run, early_output(wrapper, sock), sock, streams))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({watching, stopping}, timeout=request.deadline_seconds, return_when=asyncio.FIRST_COMPLETED)
        stopped = not watching.done()
        if stopped:
            await host.run(box.clear)
        code = await asyncio.wait_for(watching, END_SECONDS)
    except TimeoutError as error:
        raise InfraError("sandbox_backend", f"a service in box {box.id} was killed but its end never came") from error
    finally:
        for task in (watching, stopping):
            task.cancel()
        close(wrapper, sock)
    if not stopped:
        await host.run(box.raise_if_gone)
    return ExecResult(
        exit_code=None if stopped else code, stdout=streams[0].bytes(), stderr=streams[1].bytes(),
        stdout_truncated=streams[0].truncated, stderr_truncated=streams[1].truncated, timed_out=stopped,
        oom_killed=await host.run(lambda: box.oom_kills(code)) > kills, wall_seconds=time.monotonic() - began,
    )  # fmt: skip


async def _watch(
    box: DockerBox, host: DockerBackend, run: str, early: bytes, sock: socket.socket, streams: tuple[HeadTail, HeadTail]
) -> int:
    loop, buffer, pause = asyncio.get_running_loop(), bytearray(early), 0.01
    sock.setblocking(False)
    demultiplex(buffer, streams)
    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(sock, 65536):
            buffer += data
            demultiplex(buffer, streams)
            if streams[0].truncated or streams[1].truncated:
                await asyncio.sleep(0.002)  # who floods waits, not the host
    while (code := (await host.run(lambda: box.exec_state(run)))["ExitCode"]) is None:
        await asyncio.sleep(pause)
        pause = min(2 * pause, QUIET_SECONDS)
    return int(code)


class ImageBox(DockerBox):
    """The container of an image. Its own process is the service."""

    def __init__(self, backend: DockerBackend, spec: SandboxSpec, container: Container, era: int, service: ServiceSpec) -> None:
        super().__init__(backend, spec, container, era)
        self._service = service
        self._handle = -1

    def start(self) -> None:
        self.container.start()
        try:
            self._inspect()
            self._handle = os.pidfd_open(self.init)
        except (InfraError, ProcessLookupError) as error:
            raise InfraError("sandbox_backend", f"service '{self._service.name}': {error}; {self._said()}") from error

    def _said(self) -> str:
        text = self.container.logs(tail=_LOG_LINES).decode(errors="replace").strip()
        return f"it said: {text[-500:]}" if text else "it said nothing"

    def on_this_host(self) -> bool:
        return self._oom_file is not None

    def command(self, env: Mapping[str, str], argv: Sequence[str]) -> list[str]:
        return list(argv)

    def begin(self, argv: Sequence[str], cwd: str, *, stdin: bool) -> tuple[str, Any, socket.socket]:
        return super().begin(argv, self.container.attrs["Config"]["WorkingDir"] or "/", stdin=stdin)

    async def own_health(self, seconds: float) -> str | None:
        image = await self._host.run(lambda: self._host.client.images.get(self._service.image).attrs)
        test = ((image.get("Config") or {}).get("Healthcheck") or {}).get("Test") or ["NONE"]
        if test[0] not in {"CMD", "CMD-SHELL"}:
            return None
        argv = test[1:] if test[0] == "CMD" else ["/bin/sh", "-c", *test[1:]]
        result = await self.exec(ExecRequest(argv=tuple(argv), deadline_seconds=seconds))
        said = (result.stdout + result.stderr).decode(errors="replace").strip()[-200:]
        how = "did not end" if result.timed_out else f"ended with {result.exit_code}"
        return "" if result.exit_code == 0 else f"its HEALTHCHECK {how}: {said}"

    async def _serve(self, request: ExecRequest, env: Mapping[str, str], stop: asyncio.Event) -> ExecResult:
        ended, loop, began = asyncio.Event(), asyncio.get_running_loop(), time.monotonic()
        loop.add_reader(self._handle, ended.set)
        waits = [asyncio.ensure_future(event.wait()) for event in (ended, stop)]
        try:
            await asyncio.wait(waits, timeout=request.deadline_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self._handle)
            for wait in waits:
                wait.cancel()

        def look() -> ExecResult:
            if not ended.is_set():
                self._end()
            state: dict[str, Any] = {"Running": True}
            limit = time.monotonic() + END_SECONDS
            while state["Running"] and time.monotonic() < limit:  # the engine notices a moment later
                time.sleep(0.01)
                self.container.reload()
                state = self.container.attrs["State"]
            code = None if not ended.is_set() else state.get("ExitCode")
            return ExecResult(
                exit_code=code, stdout=self.container.logs(tail=_LOG_LINES), stderr=b"", timed_out=code is None,
                oom_killed=bool(state.get("OOMKilled")), wall_seconds=time.monotonic() - began,
            )  # fmt: skip

        return await self._host.run(look)

    def _end(self) -> None:
        import docker

        with contextlib.suppress(docker.errors.APIError):  # it has ended already
            self.container.kill()

    def _kill_all(self) -> bool:
        """The service and what runs beside it have one user: none is spared."""
        self._end()
        return True

    def _survivors(self) -> bool:
        return False

    async def _put(self, files: Mapping[str, bytes]) -> None:
        raise InputError("a service of kind image has no work folder", field="files", remedy="Bring files in the image")

    async def _collect(self, names: Sequence[str], max_bytes: int) -> tuple[Artifact, ...]:
        raise InputError(
            "a service of kind image has no work folder", field="names", remedy="Ask it with exec before it is frozen"
        )

    async def _destroy(self) -> None:
        await super()._destroy()
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def image_settings(client: DockerClient, service: ServiceSpec, tmpfs: str) -> dict[str, Any]:
    """What its container has of its own, on top of what every container of ours has. Raises InfraError for no such image."""
    import docker

    try:
        about = client.images.get(service.image).attrs.get("Config") or {}
    except docker.errors.ImageNotFound as error:
        raise InfraError(
            "image_missing",
            f"service '{service.name}': Docker's engine has no image {service.image!r}; run: docker pull {service.image}",
        ) from error
    folders = dict.fromkeys((*(about.get("Volumes") or {}), *service.writable), tmpfs)
    return {
        "image": service.image, "command": list(service.argv) or None, "user": f"{BOX_UID}:{BOX_UID}",
        "hostname": service.name, "working_dir": None, "environment": {"TZ": "UTC"} | service.env, "tmpfs": folders,
        "healthcheck": {"test": ["NONE"]}, "log_config": docker.types.LogConfig(type="json-file", config=LOG),
    }  # fmt: skip


def _network(box: DockerBox) -> int:
    """A descriptor of the box's network namespace. Raises InfraError where it cannot be entered, OSError. Blocks."""
    if not box.on_this_host():
        raise InfraError("sandbox_backend", f"the network of box {box.id} cannot be entered: engine and worker share no host")
    space = os.open(f"/proc/{box.init}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    if str(box.container.id) not in Path(f"/proc/{box.init}/cgroup").read_text():
        os.close(space)
        raise ProcessLookupError(f"process {box.init} is not of box {box.id} any more")
    return space

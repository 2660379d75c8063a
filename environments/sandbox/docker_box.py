"""One box of Docker's engine: starting and proving it, commands, shells, files, its end.

Contract: environments/sandbox/base.py. Where the box can be entered from its host, commands are (docker_entry.py); elsewhere
they are execs of the engine, as shells and companions are everywhere. The engine's exec has neither deadline nor cap: the
stream is read here, with both. When a command has ended and nothing else runs, or when one has timed out, *every* process of
the policy is killed, background ones and open shells included. While a shell is open, what a command leaves in the background
lives on, and goes with the shell. The engine starts an exec by a helper that takes the policy's user before it executes; a
process of the policy that stops or kills it would block the engine, and look like an outage. The killing is done from the host
(docker_processes.py), out of the policy's reach. Files are written and read from the host too, through a descriptor of the work
folder that was opened before the first command. If the killing cannot be done, the container is destroyed, and the box is lost
by the policy's own doing; so is a box whose memory is so full that its files cannot be read. No memory outlives its processes
but the files on the capped tmpfs. Gaps: with a remote engine, or without root, killing, writing and reading are execs
themselves, which a hostile process can block until the engine's call times out. A server that the policy starts in the
background ends with its command, or with the shell that is open. A container that ended is the policy's doing unless the engine
was away (docker_link.py): then it is nobody's, whatever exit code or memory kill the engine remembers. An engine that hangs is
noticed when it is asked; a command whose input or output it held up meanwhile has less of its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from data_contracts.errors import InfraError, InputError, SandboxLost
from data_contracts.protocols import ExecRequest, ExecResult
from data_contracts.records import Artifact, SandboxSpec
from environments.sandbox import docker_entry, docker_files, seccomp
from environments.sandbox.base import Box
from environments.sandbox.cgroups import oom_count, oom_file
from environments.sandbox.commands import KILLED
from environments.sandbox.docker_processes import filtered, kill_container, kill_policy, policy_processes
from environments.sandbox.docker_shell import AGENT, DockerWire
from environments.sandbox.docker_stream import close, early_output, pump
from environments.sandbox.entering import CANNOT_START
from environments.sandbox.files import acting_as, read_files, write_files
from environments.sandbox.shell import Wire
from environments.sandbox.shell_agent import HeadTail
from infra.rootfs import BOX_UID

if TYPE_CHECKING:
    from docker.models.containers import Container

    from environments.sandbox.docker import DockerBackend

INIT_UID = 65532
"""User of the container's own process, which is its init and, being a sleep, its lifetime."""
RESERVED_PIDS = 1
_SHARED_KERNEL = {"runc", "crun", "io.containerd.runc.v2"}
"""Runtimes whose boxes the host's kernel runs, so that the host sees their folders."""
SECURITY = ("no-new-privileges:true", f"seccomp={seccomp.docker_profile()}")
_POLICY = f"{BOX_UID}:{BOX_UID}"
_KILL_ALL = ("/bin/sh", "-c", "kill -9 -1")
"""Signals everything the policy's user may signal, in one call of the kernel: no fork outruns it."""
_END_SECONDS = 5.0


class _Ran(NamedTuple):
    """`code` is None when the deadline or the abortion came first."""

    code: int | None
    streams: tuple[HeadTail, HeadTail]
    wall: float


class CannotStartError(Exception):
    """The engine could not start a command in a box that lives; `room` says that the box has no room for a process."""

    def __init__(self, message: str, *, room: bool) -> None:
        super().__init__(message)
        self.room = room


class DockerBox(Box):
    def __init__(self, backend: DockerBackend, spec: SandboxSpec, container: Container, era: int) -> None:
        super().__init__(backend, spec, f"docker-{container.name}")
        self._era = era
        self._host, self.container = backend, container
        self._oom_file: Path | None = None
        self.running = 0
        """Commands under way and shells open in this box; the last one to end takes what is left with it."""
        self.init = 0
        """The container's first process, as a host sees it that it shares with us."""
        self.relay_process: subprocess.Popen[bytes] | None = None
        """Of a companion: what passes connections on to it."""
        self._work = -1
        """The work folder, as such a host sees it; -1: files go in and out by commands inside."""
        self.entry: docker_entry.Entry | None = None
        """How commands get in from such a host; None: by the engine."""

    def start(self) -> None:
        """Blocks. Starts the container and reads back that it is what was asked for."""
        self.container.start()
        about = self._inspect()
        if self._oom_file is not None and about["HostConfig"].get("Runtime") in _SHARED_KERNEL:
            self._work = docker_files.open_work(self.init, str(self.container.id), self.spec)
        if self._work >= 0 and self._host.enters:
            self.entry = docker_entry.find_entry(about, self.init)

    def _inspect(self) -> dict[str, Any]:
        """Blocks. The container's attributes, read back from the engine: it runs, and is what was asked for."""
        self.container.reload()
        about: dict[str, Any] = self.container.attrs
        host, limits = about["HostConfig"], self.spec.limits
        expected = {
            "Privileged": False, "ReadonlyRootfs": True, "NetworkMode": "none", "PidMode": "", "IpcMode": "private",
            "UTSMode": "", "CapDrop": ["ALL"], "CapAdd": None, "Binds": None, "Devices": [], "Memory": limits.memory_bytes,
            "MemorySwap": limits.memory_bytes, "PidsLimit": limits.pids + RESERVED_PIDS, "NanoCpus": int(limits.cpus * 1e9),
        } | ({"Runtime": self._host.runtime} if self._host.runtime else {})  # fmt: skip
        faults = [f"{key}={host.get(key)!r}" for key, value in expected.items() if (host.get(key) or None) != (value or None)]
        faults += [f"mount {mount['Destination']}" for mount in about["Mounts"] if mount["Type"] != "tmpfs"]
        faults += [f"network {name}" for name in about["NetworkSettings"]["Networks"] if name != "none"]
        faults += [f"no {option.partition('=')[0]}" for option in SECURITY if option not in (host["SecurityOpt"] or [])]
        faults += [] if about["Config"]["User"].partition(":")[0] not in {"", "0", "root"} else ["user root"]
        faults += [] if about["State"]["Running"] else [f"ended with exit code {about['State'].get('ExitCode')}"]
        if faults:
            raise InfraError(
                "sandbox_backend", f"box {self.id} differs from what was asked: {', '.join(faults)}; it was not handed out"
            )
        # The counter is readable only where engine and worker share a host; the id proves that the pid is the engine's.
        self.init = int(about["State"]["Pid"])
        found = oom_file(self.init) if self.init else None
        self._oom_file = found if found and str(self.container.id) in str(found) else None
        if self._oom_file and not filtered(self.init) and self._host.runtime is None:
            raise InfraError("sandbox_backend", f"box {self.id} may make every system call; it was not handed out")
        return about

    async def _probe(self) -> None:
        await self._host.run(self._inspect)

    async def _exec(self, request: ExecRequest, env: Mapping[str, str]) -> ExecResult:
        if "=" in request.argv[0]:
            raise InputError(f"{request.argv[0]!r} cannot be a command's name", field="argv", remedy="Run it through sh -c")
        if self.entry is not None:
            self.running += 1
            try:
                return await docker_entry.run(self, self.entry, self._host, request, env)
            finally:
                self.running -= 1
        argv = self.command(env, request.argv)
        abort = threading.Event()
        self.running += 1
        running = asyncio.ensure_future(self._host.run(lambda: self._measured(request, argv, abort)))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:  # the caller gets it when the command is dead, not before
            abort.set()
            await asyncio.wait({running})
            raise
        finally:
            self.running -= 1

    def command(self, env: Mapping[str, str], argv: Sequence[str]) -> list[str]:
        """The words by which the engine starts a command with exactly these variables, and the box's clock and processors."""
        soft, hard = self.view()
        view = ["/usr/bin/prlimit", f"--locks={soft}:{hard}", "--"]
        return [*view, "/usr/bin/env", "-i", *(f"{key}={value}" for key, value in env.items()), *argv]

    async def _serve(self, request: ExecRequest, env: Mapping[str, str], stop: asyncio.Event) -> ExecResult:
        from environments.sandbox.docker_companion import serve

        self.running += 1
        try:
            return await serve(self, self._host, request, self.command(env, request.argv), stop)
        finally:
            self.running -= 1

    def on_this_host(self) -> bool:
        """Whether engine, worker and box share a kernel, and this worker may enter what the box is made of."""
        return self._work >= 0

    def _measured(self, request: ExecRequest, argv: list[str], abort: threading.Event) -> ExecResult:
        kills = self.oom_kills()
        code, streams, wall = self.stream(
            argv, request.stdin, request.deadline_seconds, request.max_output_bytes, self.folder(request), abort
        )
        oom = self.judged(code, kills, late=code is None and not abort.is_set())
        return ExecResult(
            exit_code=code, stdout=streams[0].bytes(), stderr=streams[1].bytes(), stdout_truncated=streams[0].truncated,
            stderr_truncated=streams[1].truncated, timed_out=code is None, oom_killed=oom, wall_seconds=wall,
        )  # fmt: skip

    def judged(self, code: int | None, kills: int, *, late: bool) -> bool:
        """Blocks. After a command: what must not stay is killed; raises unless box and engine were there; whether memory ran
        out meanwhile. `code` is None for a command that was killed by us; `late`, because of its deadline."""
        if code is not None:
            if code == KILLED:  # the engine may not know yet that the whole box has ended
                self._expired()
            self.raise_if_gone(settle=docker_entry.ENDING_SECONDS if code == KILLED else 0.0)
        if code is None or (self.running <= 1 and self._survivors()):
            self.clear()
        if late:  # by the command's own doing, not because the engine hung
            self._host.link.require(self._era, f"a command ran in box {self.id}")
        return self.oom_kills(code) > kills

    def engine_ended(self) -> bool:
        return self._host.link.ended(self._era)

    def oom_kills(self, code: int | None = None) -> int:
        """Memory kills so far. With a remote engine only a killed command (137) is worth the price of asking inside."""
        if self._oom_file is not None:
            try:
                return oom_count(self._oom_file.read_text())
            except OSError:  # the container died: only its memory limit or the engine ends it
                return 1 << 30 if code == 137 else 0
        if code != 137:
            return 0
        files = "/sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control"
        ran = self.stream(["/bin/sh", "-c", f"cat {files} 2>/dev/null"], b"", 10.0, 65536, "/", threading.Event())
        return oom_count(ran.streams[0].bytes().decode(errors="replace"))

    def stream(self, argv: Sequence[str], stdin: bytes, seconds: float, cap: int, cwd: str, abort: threading.Event) -> _Ran:
        """Run in the box as the policy's user. The deadline counts from the command's start, as `wall` does. Blocks."""
        streams = HeadTail(cap), HeadTail(cap)
        try:
            run, wrapper, sock = self.begin(argv, cwd, stdin=bool(stdin))
        except CannotStartError as error:
            streams[1].add(f"{error}\n".encode())
            return _Ran(CANNOT_START, streams, 0.0)
        began = time.monotonic()
        deadline = began + seconds
        try:
            early = early_output(wrapper, sock)
            if not pump(sock, stdin, streams, deadline, abort, lambda: not self.exec_state(run)["Running"], early=early):
                return _Ran(None, streams, time.monotonic() - began)
        finally:
            close(wrapper, sock)
        wall = time.monotonic() - began
        while (code := self.exec_state(run)["ExitCode"]) is None:
            if time.monotonic() > deadline:
                return _Ran(None, streams, wall)
            time.sleep(0.005)
        return _Ran(int(code), streams, wall)

    def begin(self, argv: Sequence[str], cwd: str, *, stdin: bool) -> tuple[str, Any, socket.socket]:
        """Start a process as the policy's user; its id, the SDK's wrapper, the connection. Raises CannotStartError. Blocks."""
        import docker

        api, kills = self._host.client.api, self.oom_kills()
        try:
            run = api.exec_create(self.container.id, list(argv), stdin=stdin, user=_POLICY, workdir=cwd)["Id"]
            wrapper: Any = api.exec_start(run, socket=True)
        except docker.errors.APIError as error:
            self.raise_if_gone(error)
            words = str(error).lower()
            if "not found" in words or "no such file" in words or "chdir" in words:
                raise CannotStartError(f"{argv[0]}: {error.explanation}", room=False) from error
            if "resource temporarily unavailable" in words or "fork" in words or self.oom_kills() > kills:
                raise CannotStartError("the box has no room for another process", room=True) from error
            raise
        return run, wrapper, getattr(wrapper, "_sock", wrapper)

    def exec_state(self, run: str) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._host.client.api.exec_inspect(run)
        return state

    async def _shell(self, cwd: str, env: Mapping[str, str]) -> Wire:
        argv = self.command(env, AGENT)
        opening = asyncio.ensure_future(self._host.run(lambda: self.begin(argv, cwd, stdin=True)))
        try:
            run, wrapper, sock = await asyncio.shield(opening)
        except CannotStartError as error:
            if error.room:
                raise SandboxLost(f"box {self.id} has no room for a shell; this is the policy's failure") from error
            raise InputError(f"no shell in {cwd!r}: {error}", field="cwd", remedy="Name a folder of the box") from error
        except asyncio.CancelledError:
            with contextlib.suppress(CannotStartError, InfraError):
                _, wrapper, sock = await opening
                close(wrapper, sock)
            raise
        self.running += 1
        return DockerWire(self._host, self, run, wrapper, sock)

    def end_shell(self, run: str) -> None:
        """Blocks. The line to the agent is closed: it kills what it holds; if it is not allowed to, we do."""
        import docker

        try:
            for _ in range(100):
                if not self.exec_state(run)["Running"]:
                    break
                time.sleep(0.02)
            else:
                self.clear()
            if self.running <= 0 and not self._destroyed and self._survivors():
                self.clear()
        except docker.errors.NotFound:  # the container is gone, and all with it
            return

    def clear(self) -> None:
        """Kill every process of the policy; a box in which that fails is destroyed, and lost by the policy's doing. Blocks."""
        if not self._kill_all():
            with contextlib.suppress(Exception):
                self.container.kill()
            self._lost = f"box {self.id} was destroyed: its processes left no room to kill them; this is the policy's failure"

    def _survivors(self) -> bool:
        """Whether anything but the container's own processes is left in it. Blocks."""
        if self._oom_file is not None:
            with contextlib.suppress(OSError):
                return bool(policy_processes(self._oom_file.parent, self.init))
        return len(self.container.top()["Processes"]) > RESERVED_PIDS

    def _kill_all(self) -> bool:
        """Kill every process of the policy; True when none is seen any more. Blocks."""
        if self._oom_file is not None:
            with contextlib.suppress(OSError):
                if kill_policy(self._oom_file.parent, self.init):
                    return True
        for attempt in range(4):
            try:
                self.stream(_KILL_ALL, b"", 10.0, 4096, "/", threading.Event())
                if len(self.container.top()["Processes"]) <= RESERVED_PIDS:
                    return True
            except SandboxLost:
                return False
            time.sleep(0.05 * (attempt + 1))
        return False

    def raise_if_gone(self, cause: Exception | None = None, *, settle: float = 0.0) -> None:
        """Blocks. Raises unless the box runs and the engine was there all the time. Where the kernel tells that the box runs,
        and goes on for `settle` seconds, the engine is not asked. It is asked over a new connection, so that an engine that is
        stopping, and has ended its containers already, does not answer."""
        import docker

        limit = time.monotonic() + _END_SECONDS
        while self.entry is None or not self.entry.alive(settle):
            try:
                state = self._host.link.state(str(self.container.id))
            except docker.errors.NotFound as error:
                raise InfraError("sandbox_backend", f"the engine has no container for box {self.id} any more") from error
            if not state["Running"]:
                self._gone(state, cause)
            if self.entry is None:
                break
            if time.monotonic() > limit:
                raise InfraError("sandbox_backend", f"box {self.id} has ended, but the engine says that it runs")
            time.sleep(0.02)
        if self.engine_ended():
            self._host.link.require(self._era, f"box {self.id} was in use")

    def _gone(self, state: Mapping[str, Any], cause: Exception | None) -> NoReturn:
        self._expired()
        how = f"exit code {state.get('ExitCode')}{', out of memory' if state.get('OOMKilled') else ''}"
        self._host.link.require(self._era, f"box {self.id} lived ({how})")
        raise SandboxLost(f"box {self.id} is gone ({how}); this is the policy's failure") from cause

    async def _put(self, files: Mapping[str, bytes]) -> None:
        def write() -> None:
            if self._work >= 0:
                with acting_as(BOX_UID, BOX_UID):
                    write_files(self._work, files)
                return
            docker_files.write_inside(self, files)

        await self._host.run(write)

    async def _freeze(self) -> None:
        def kill() -> None:
            self.raise_if_gone()
            if not self._kill_all():
                self.container.kill()
                self._lost = (
                    f"box {self.id} could not be frozen: its processes left no room to kill them; this is the policy's failure"
                )
                raise SandboxLost(self._lost)

        await self._host.run(kill)

    async def _collect(self, names: Sequence[str], max_bytes: int) -> tuple[Artifact, ...]:
        def read() -> tuple[Artifact, ...]:
            if self._work >= 0:
                with acting_as(BOX_UID, BOX_UID):
                    return read_files(self._work, names, max_bytes=max_bytes)
            return docker_files.read_inside(self, names, max_bytes)

        return await self._host.run(read)

    async def _destroy(self) -> None:
        def end() -> None:
            import docker
            import requests

            work, self._work = self._work, -1
            if work >= 0:
                os.close(work)
            if self.entry is not None:
                self.entry.close()
            if self._oom_file is not None and kill_container(self._oom_file.parent, self.init):
                # The engine has less to do for a container that ended than for one that it has to end.
                with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException):
                    self.container.wait(timeout=_END_SECONDS)
            remove(self.container)
            if self.relay_process is not None:  # its line was closed before
                try:
                    self.relay_process.wait(5)
                except subprocess.TimeoutExpired:
                    self.relay_process.kill()
                    self.relay_process.wait()

        await asyncio.shield(self._host.run(end))


def remove(container: Container) -> None:
    import docker

    # 404: gone already; 409: somebody else is removing it.
    with contextlib.suppress(docker.errors.NotFound):
        try:
            container.remove(force=True, v=True)
        except docker.errors.APIError as error:
            if error.status_code != 409:
                raise

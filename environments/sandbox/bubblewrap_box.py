"""One box of bubblewrap: starting and proving it, commands, shells, files, its end.

Contract: environments/sandbox/base.py. A box keeps one idle pid 1, and every command enters its namespaces (spawner.py).
Background processes of a command that ended by itself live on until freeze or destroy; a timeout kills the command with all
its descendants; closing a shell kills all it holds. Freezing kills everything: the files stay readable through a descriptor of
the work folder, which nothing in the box holds any more. A shell's agent runs outside the box, out of the policy's reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import select
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from data_contracts.errors import InfraError, SandboxLost
from data_contracts.protocols import ExecRequest, ExecResult
from data_contracts.records import Artifact, SandboxLimits, SandboxSpec
from environments.sandbox import cgroups, entering, shell_agent
from environments.sandbox.base import SCRATCH_BYTES, Box, inodes
from environments.sandbox.commands import KILLED, Report, follow, launch
from environments.sandbox.files import acting_as, read_files, write_files
from environments.sandbox.shell import StreamWire, Wire
from infra.rootfs import BOX_UID, rootfs_path

if TYPE_CHECKING:
    from environments.sandbox.bubblewrap import BubblewrapBackend

_NS_GET_USERNS = 0xB701
_PID_1 = "echo ready >&4; exec env --ignore-signal=CHLD sleep infinity 2>/dev/null 3>&- 4>&-"
"""Ignored SIGCHLD makes the kernel reap orphans; signals from inside the box do not reach a pid 1 without handlers."""


class BubblewrapBox(Box):
    def __init__(self, backend: BubblewrapBackend, spec: SandboxSpec, group: cgroups.Group) -> None:
        super().__init__(backend, spec, f"bwrap-{group.slot}-{uuid.uuid4().hex[:8]}")
        self._host, self._group, self._commands = backend, group, 0
        root = os.geteuid() == 0
        self._uid, self._gid = (group.slot, group.slot) if root else (os.geteuid(), os.getegid())
        self._spawner_pid = self.pid = 0
        """pid 1 of the box, as the host sees it."""
        self._fds: dict[str, int] = {}

    def start(self, root: Path, bwrap: str) -> None:
        """Blocks until the box stands and was probed. Raises OSError or InfraError."""
        limits = self.spec.limits
        self._group.set_limits(limits)
        message = {
            "op": "start", "argv": _command(bwrap, root, self.spec), "uid": self._uid, "gid": self._gid,
            "lifetime": limits.lifetime_seconds, "groups": [str(path) for path in self._group.folders],
        }  # fmt: skip
        with self._entrances() as groups:
            info, errors, ready = os.pipe(), os.pipe(), os.pipe()
            self._spawner_pid = self._host.spawner.send(message, [info[1], errors[1], ready[1], *groups])
        for _, write_end in (info, errors, ready):
            os.close(write_end)
        with os.fdopen(info[0], "rb") as about, os.fdopen(errors[0], "rb") as problem, os.fdopen(ready[0], "rb") as signal_:
            if signal_.readline() != b"ready\n":
                raise InfraError(
                    "sandbox_backend", f"bubblewrap did not start: {problem.read(2000).decode(errors='replace').strip()}"
                )
            self.pid = int(json.loads(about.read(4096))["child-pid"])
        self._fds["pidfd"] = os.pidfd_open(self.pid)
        for name in entering.NAMESPACES[1:]:
            self._fds[name] = os.open(f"/proc/{self.pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        self._fds["owner"] = fcntl.ioctl(self._fds["mnt"], _NS_GET_USERNS)
        self._remount(limits)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fds["work"] = os.open(f"/proc/{self.pid}/root{self.spec.workdir}", flags)
        self._inspect()

    def _remount(self, limits: SandboxLimits) -> None:
        mounts = [
            (self.spec.workdir, f"size={limits.disk_bytes},nr_inodes={inodes(limits)}"),
            *((path, f"size={SCRATCH_BYTES},nr_inodes={inodes(limits)}") for path in ("/tmp", "/dev/shm")),  # noqa: S108
        ]
        read_end, write_end = os.pipe()
        request = {"op": "remount", "mounts": mounts, "uid": self._uid, "gid": self._gid}
        self._host.spawner.send(request, [write_end, *self._spaces()])
        os.close(write_end)
        with os.fdopen(read_end, "rb") as answer:
            text = answer.read(1000)
        if text != b"ok":
            raise InfraError("sandbox_backend", f"the box's disk cannot be limited: {text.decode(errors='replace')}")

    async def _probe(self) -> None:
        if not self._alive():
            raise InfraError("sandbox_backend", f"box {self.id} ended before it was handed out")
        try:
            await asyncio.to_thread(self._inspect)
        except OSError as error:
            raise InfraError("sandbox_backend", f"box {self.id} cannot be inspected: {error}") from error

    def _inspect(self) -> None:
        """The box really is what was asked for: seen from the host, before anybody may use it."""
        status = dict(row.split(":\t", 1) for row in Path(f"/proc/{self.pid}/status").read_text().splitlines() if ":\t" in row)
        shared = [n for n in entering.NAMESPACES[1:] if os.fstat(self._fds[n]).st_ino == os.stat(f"/proc/self/ns/{n}").st_ino]
        groups = Path(f"/proc/{self.pid}/cgroup").read_text()
        faults = [f"shares the host's namespace {name}" for name in shared]
        faults += [f"has {key}={status[key]}" for key in ("CapEff", "CapPrm", "CapBnd") if int(status[key], 16)]
        faults += [] if status["NoNewPrivs"].strip() == "1" else ["may gain privileges"]
        faults += [] if set(status["Uid"].split()) == {str(self._uid)} else [f"runs as uid {status['Uid']}"]
        faults += [] if status["Seccomp"].strip() == "2" else ["may make every system call"]
        faults += [] if self._group.owner.name in groups else ["is not in its control group"]
        faults += self._group.loosened(self.spec.limits)
        if faults:
            raise InfraError("sandbox_backend", f"box {self.id} {', '.join(faults)}; it was not handed out")

    def _spaces(self) -> list[int]:
        return [self._fds[name] for name in entering.NAMESPACES]

    @contextlib.contextmanager
    def _entrances(self, number: int | None = None) -> Iterator[list[int]]:
        """Descriptors by which a process joins the groups of the box, or of its n-th command or shell."""
        with contextlib.ExitStack() as stack:
            held = []
            for path in self._group.joins(number):
                held.append(os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
                stack.callback(os.close, held[-1])
            yield held

    def _alive(self) -> bool:
        """False as soon as pid 1 has ended, whoever has yet to wait for it."""
        if "pidfd" not in self._fds:
            return False
        poll = select.poll()
        poll.register(self._fds["pidfd"], select.POLLIN)
        return not poll.poll(0)

    def end_command(self, number: int) -> None:
        """Blocks. Kill everything of the n-th command or shell."""
        self._group.kill(number)
        self._group.forget(number)

    def oom_kills(self) -> int:
        try:
            return self._group.oom_kills()
        except FileNotFoundError:  # the box is gone, or going
            return 0

    def require_alive(self) -> None:
        """Raises InfraError where we ended the box, SandboxLost otherwise."""
        if self._alive():
            return
        self._expired()
        if not self._host.spawner.alive(self._spawner_pid):
            raise InfraError("sandbox_backend", f"the sandbox spawner died, and box {self.id} with it")
        memory = " or by its memory limit" if self._group.oom_kills() else ""
        raise SandboxLost(f"box {self.id} is gone: its pid 1 was killed from inside{memory}; this is the policy's failure")

    async def _exec(self, request: ExecRequest, env: Mapping[str, str]) -> ExecResult:
        return await self._serve(request, env, asyncio.Event())

    async def _serve(self, request: ExecRequest, env: Mapping[str, str], stop: asyncio.Event) -> ExecResult:
        self.require_alive()
        self._commands += 1
        number, kills = self._commands, self._group.oom_kills()
        reader = await asyncio.to_thread(self._launch, number, request, env)
        try:
            report = await follow(reader, request.deadline_seconds, lambda: asyncio.to_thread(self._group.kill, number), stop)
        finally:
            self._group.forget(number)
        return await self._result(report, kills)

    def relay_from(self, box: BubblewrapBox, port: int, target: int) -> socket.socket:
        """Blocks. Start the relay by which `box` reaches this companion; it counts as one of the companion's processes."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        message = {
            "op": "relay", "box_uid": box._uid, "box_gid": box._gid, "uid": self._uid, "gid": self._gid, "port": port,
            "target": target, "seconds": self.spec.limits.lifetime_seconds,
        }  # fmt: skip
        spaces = [box._fds["owner"], box._fds["net"], self._fds["owner"], self._fds["net"]]
        try:
            with theirs, self._entrances() as groups:
                self._host.spawner.send(message, [theirs.fileno(), *spaces, *groups])
        except BaseException:
            ours.close()
            raise
        return ours

    async def _shell(self, cwd: str, env: Mapping[str, str]) -> Wire:
        self.require_alive()
        self._commands += 1
        number = self._commands
        ours, theirs = socket.socketpair()

        def launch() -> None:
            message = {
                "op": "shell", "argv": shell_agent.ARGV, "env": env, "cwd": cwd, "uid": self._uid, "gid": self._gid,
                "view": self.view(),
                "listed": f"{self._group.joins(number)[-1]}/cgroup.procs",
            }  # fmt: skip
            with self._entrances(number) as groups:
                self._host.spawner.send(message, [theirs.fileno(), *self._spaces(), *groups])

        try:
            await asyncio.to_thread(launch)
            reader, writer = await asyncio.open_connection(sock=ours)
        except OSError as error:
            ours.close()
            raise InfraError("sandbox_backend", f"a shell cannot be started in box {self.id}: {error}") from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return _ShellWire(self, number, reader, writer)

    def _launch(self, number: int, request: ExecRequest, env: Mapping[str, str]) -> IO[bytes]:
        message = {"env": env, "cwd": self.folder(request), "uid": self._uid, "gid": self._gid, "view": self.view()}
        root = rootfs_path(self.spec.image) if os.geteuid() == 0 else None
        try:
            with self._entrances(number) as groups:
                return launch(self._host.spawner, request, message, [*self._spaces(), *groups], root)[0]
        except OSError as error:
            raise InfraError("sandbox_backend", f"a command cannot be started in box {self.id}: {error}") from error

    async def _result(self, report: Report, kills: int) -> ExecResult:
        oom = self._group.oom_kills() > kills
        if not self._host.spawner.alive(self._spawner_pid):  # everything in the box was killed with it, pid 1 perhaps last
            raise InfraError("sandbox_backend", f"the sandbox spawner died, and box {self.id} with it")
        if report.failure:
            # A box whose pid 1 is just ending refuses new processes a moment before it is seen to be gone.
            for _ in range(50):
                self.require_alive()
                await asyncio.sleep(0.02)
            raise InfraError("sandbox_backend", f"a command could not enter box {self.id}: {report.failure}")
        if not report.timed_out:
            self.require_alive()
        if report.code == KILLED:  # the box may have ended a moment before it is seen to be gone
            self._expired()
        return report.result(oom_killed=oom)

    async def _put(self, files: Mapping[str, bytes]) -> None:
        def write() -> None:
            with self._rights():
                write_files(self._fds["work"], files)

        await asyncio.to_thread(write)

    async def _freeze(self) -> None:
        self.require_alive()
        await asyncio.to_thread(self._group.kill)

    async def _collect(self, names: Sequence[str], max_bytes: int) -> tuple[Artifact, ...]:
        def read() -> tuple[Artifact, ...]:
            with self._rights():
                return read_files(self._fds["work"], names, max_bytes=max_bytes)

        return await asyncio.to_thread(read)

    def _rights(self) -> contextlib.AbstractContextManager[None]:
        return acting_as(self._uid, self._gid) if os.geteuid() == 0 else acting_as(None, None)

    async def _destroy(self) -> None:
        def remove() -> None:
            self._group.kill()
            while self._fds:
                os.close(self._fds.popitem()[1])
            self._group.remove()

        await asyncio.shield(asyncio.to_thread(remove))


class _ShellWire(StreamWire):
    """The agent is the middle process, which the policy cannot reach; the kernel holds its session in one control group."""

    trusted = True

    def __init__(self, box: BubblewrapBox, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self._box, self._number = box, number

    async def end(self) -> None:
        await super().end()
        await asyncio.shield(asyncio.to_thread(self._box.end_command, self._number))

    def oom_kills(self) -> int:
        return self._box.oom_kills()

    async def require_box(self) -> None:
        for _ in range(10):  # the box's processes die a moment before its pid 1 is seen to be gone
            self._box.require_alive()
            await asyncio.sleep(0.02)


def _command(bwrap: str, root: Path, spec: SandboxSpec) -> list[str]:
    """bubblewrap's command line. Descriptors: 3 information about the child, 4 the box is ready, 5 its filter."""
    scratch, user = str(SCRATCH_BYTES), str(BOX_UID)
    isolation = [
        "--unshare-all",
        "--unshare-user",
        "--unshare-cgroup",
        "--disable-userns",
        "--cap-drop",
        "ALL",
        "--new-session",
    ]
    life = ["--die-with-parent", "--as-pid-1", "--info-fd", "3", "--seccomp", "5"]
    identity = ["--uid", user, "--gid", user, "--hostname", "box", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
    system = ["--ro-bind", str(root), "/", "--proc", "/proc", "--dev", "/dev"]
    shm = ["--perms", "1777", "--size", scratch, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]  # noqa: S108
    tmp = ["--perms", "1777", "--size", scratch, "--tmpfs", "/tmp"]  # noqa: S108
    work = ["--perms", "0700", "--size", str(spec.limits.disk_bytes), "--tmpfs", spec.workdir, "--chdir", spec.workdir]
    return [bwrap, *isolation, *life, *identity, *system, *shm, *tmp, *work, "/bin/sh", "-c", _PID_1]

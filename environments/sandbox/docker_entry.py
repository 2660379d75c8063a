"""Commands of a Docker box that are started by entering it from the host, and not through the engine.

Contract: for engines that share host and kernel with a worker that is root: a command then costs a fork, and not a call of the
engine, its shim and its runtime. What the engine would do for it is done here (entering.py): all control groups and namespaces
of the container, the policy's user, no capability, no new privileges, the same filter of system calls. What we cannot do as the
engine does refuses the entry, and the box's commands go through the engine as those of a remote one: a security label
(AppArmor, SELinux), a user namespace, a control group that is not seen from here, a worker without the rights. Namespaces and
groups are opened anew for each command, and the container is seen to live after that, so no recycled pid is entered. How the
container's first process fares is told by the kernel; the engine is asked when that has ended, and whether it is still the same
engine. When the spawner dies, all that runs in the box is killed, and the command's end is an InfraError.
Trust: for some instructions a process of the host's root, with this code and nothing of the box's, is in the box; see
docs/decisions/0015-entering-docker-boxes.md. Gap: on control groups version 2 this was not run, for want of a host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from data_contracts.errors import InfraError, SandboxLost
from data_contracts.protocols import ExecRequest, ExecResult
from environments.sandbox.commands import Report, follow, launch
from environments.sandbox.entering import SHARED_USERS
from infra.rootfs import BOX_UID, rootfs_path

if TYPE_CHECKING:
    from environments.sandbox.docker import DockerBackend
    from environments.sandbox.docker_box import DockerBox

ENDING_SECONDS = 0.1
"""A box's processes die a moment before its first one is seen to have ended."""
_WATCH_SECONDS = 1.0
"""How often a running command is asked whether its engine is still there."""
_RIGHTS = {"kill": 5, "setgid": 6, "setuid": 7, "setpcap": 8, "sys_chroot": 18, "sys_ptrace": 19, "sys_admin": 21}
_RAISE = {"sys_resource": 24}
"""Capabilities that the spawner needs, by number; the second only for rlimits above its own."""
_LIMITS = {
    "cpu time": resource.RLIMIT_CPU, "file size": resource.RLIMIT_FSIZE, "data size": resource.RLIMIT_DATA,
    "stack size": resource.RLIMIT_STACK, "resident set": resource.RLIMIT_RSS, "processes": resource.RLIMIT_NPROC,
    "locked memory": resource.RLIMIT_MEMLOCK, "address space": resource.RLIMIT_AS,
    "pending signals": resource.RLIMIT_SIGPENDING, "msgqueue size": resource.RLIMIT_MSGQUEUE,
}  # fmt: skip
"""As /proc calls them. Core files, open files and locks are set by entering.py; no others are of account without rights."""


class Entry:
    """The way into one container."""

    def __init__(self, container: str, init: int, groups: tuple[Path, ...]) -> None:
        self._container, self._init, self._groups = container, init, groups
        self._handle = os.pidfd_open(init)
        try:
            self.limits = _limits(init)
            """What the engine gave the container's first process, which is not the policy's."""
            if container not in Path(f"/proc/{init}/cgroup").read_text():
                raise ProcessLookupError(f"process {init} is not of container {container}")
        except OSError:
            self.close()
            raise

    @contextmanager
    def descriptors(self) -> Iterator[list[int]]:
        """What a request to the spawner passes on. Raises OSError where the container has ended."""
        with contextlib.ExitStack() as stack:
            places = [(f"/proc/{self._init}/ns/{name}", os.O_RDONLY) for name in SHARED_USERS]
            places += [(str(group), os.O_WRONLY) for group in self._groups]
            held = []
            for path, mode in places:
                held.append(os.open(path, mode | os.O_CLOEXEC))
                stack.callback(os.close, held[-1])
            if not self.alive():
                raise ProcessLookupError(f"container {self._container} has ended")
            yield held

    def alive(self, seconds: float = 0.0) -> bool:
        """Whether the container's first process runs, and goes on for so long."""
        if self._handle < 0:
            return False
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return not poll.poll(seconds * 1000)

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def find_entry(about: Mapping[str, Any], init: int) -> Entry | None:
    """The entry into a started container that the engine describes by `about`; None where it must not or cannot be entered."""
    labels = [about.get(key) for key in ("AppArmorProfile", "ProcessLabel", "MountLabel")]
    if os.geteuid() != 0 or any(label not in (None, "", "unconfined") for label in labels):
        return None
    try:
        if _label(init) != _label(os.getpid()) or not _same_space(init, "user") or not _may(_RIGHTS):
            return None
        groups = _groups(init, str(about["Id"]))
        return (
            None if groups is None or not (_may(_RAISE) or _in_reach(_limits(init))) else Entry(str(about["Id"]), init, groups)
        )
    except OSError:
        return None


async def run(box: DockerBox, entry: Entry, host: DockerBackend, request: ExecRequest, env: Mapping[str, str]) -> ExecResult:
    """One command, judged as one of the engine's is."""
    kills, stop = 0, asyncio.Event()

    def start() -> tuple[IO[bytes], int]:
        nonlocal kills
        kills = box.oom_kills()
        message = {
            "env": env, "cwd": box.folder(request), "uid": BOX_UID, "gid": BOX_UID, "view": box.view(), "spaces": SHARED_USERS,
            "limits": entry.limits,
        }  # fmt: skip
        root = rootfs_path(box.spec.image)
        try:
            with entry.descriptors() as passed:
                return launch(host.spawner, request, message, passed, root if root.is_dir() else None)
        except OSError as error:
            box.raise_if_gone(error)
            raise InfraError("sandbox_backend", f"a command cannot be started in box {box.id}: {error}") from error

    def judge(report: Report) -> ExecResult:
        if report.failure:
            box.raise_if_gone(settle=1.0)
            box.clear()  # nobody watches any more what had been started
            died = "" if host.spawner.alive(spawner) else "the sandbox spawner died; "
            raise InfraError("sandbox_backend", f"{died}a command in box {box.id} has no report: {report.failure}")
        oom = box.judged(report.code, kills, late=report.timed_out)
        return report.result(oom_killed=oom)

    starting = asyncio.ensure_future(host.run(start))
    try:
        reader, spawner = await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.shield(_abandon(box, host, starting))
        raise
    watching = asyncio.ensure_future(_watch(box, host, stop))
    try:
        report = await follow(reader, request.deadline_seconds, lambda: host.run(box.clear), stop)
    finally:
        watching.cancel()
    return await host.run(lambda: judge(report))


async def _abandon(box: DockerBox, host: DockerBackend, starting: asyncio.Future[tuple[IO[bytes], int]]) -> None:
    """The caller is gone, but the thread starts the command nonetheless."""
    with contextlib.suppress(InfraError, SandboxLost):
        (await starting)[0].close()
    await host.run(box.clear)


async def _watch(box: DockerBox, host: DockerBackend, stop: asyncio.Event) -> None:
    """A box whose engine is gone counts as gone with it, whether the kernel still runs it or not."""
    while not stop.is_set():
        await asyncio.sleep(_WATCH_SECONDS)
        if await host.thread(box.engine_ended):
            stop.set()


def _label(pid: int) -> str:
    """What a security module calls the process; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/attr/current").read_text().strip("\0\n")
    except OSError:
        return ""


def _same_space(pid: int, name: str) -> bool:
    return os.stat(f"/proc/{pid}/ns/{name}").st_ino == os.stat(f"/proc/self/ns/{name}").st_ino


def _may(rights: Mapping[str, int]) -> bool:
    row = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("CapEff:"))
    held = int(row.split()[1], 16)
    return all(held >> number & 1 for number in rights.values())


def _limits(pid: int) -> list[tuple[int, tuple[int, int]]]:
    """rlimits of a process of any user: kind, soft, hard."""
    found = []
    for row in Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]:
        kind, words = _LIMITS.get(row[:26].removeprefix("Max ").strip()), row[26:].split()
        if kind is not None:
            soft, hard = (resource.RLIM_INFINITY if word == "unlimited" else int(word) for word in words[:2])
            found.append((kind, (soft, hard)))
    return found


def _in_reach(limits: list[tuple[int, tuple[int, int]]]) -> bool:
    """Whether the spawner can set them without the right to raise its own."""
    pairs = [(hard, resource.getrlimit(kind)[1]) for kind, (_, hard) in limits]
    return all(own == resource.RLIM_INFINITY or resource.RLIM_INFINITY != hard <= own for hard, own in pairs)


def _groups(init: int, container: str) -> tuple[Path, ...] | None:
    """The cgroup.procs of every control group that the container is in; None when one that limits it is not found."""
    own = [row.split(":", 2) for row in Path(f"/proc/{init}/cgroup").read_text().splitlines()]
    mounts = [row.split() for row in Path("/proc/self/mounts").read_text().splitlines()]
    found = []
    for number, controllers, path in own:
        if container not in path:
            if number != "0" and not controllers.startswith("name="):
                return None
            continue
        names = set(controllers.split(","))
        file = next(
            (
                Path(mount[1]) / path.lstrip("/") / "cgroup.procs"
                for mount in mounts
                if (mount[2] == "cgroup2" if number == "0" else mount[2] == "cgroup" and names <= set(mount[3].split(",")))
            ),
            None,
        )
        if file is None or str(init) not in file.read_text().split():
            return None
        found.append(file)
    return tuple(found) or None

"""The host as its owner sees it: processes by a mark in their command line, their groups and namespaces, descriptors, mounts.

Contract: reads /proc and /sys only. A process is found by the marker that a check gave it, never by a name.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from environments.sandbox.base import Backend

KINDS = ("pid", "net", "mnt", "ipc", "uts")


def pids(mark: str) -> list[int]:
    """Processes on this host with `mark` in their command line."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(int(name))
    return found


def user_of(pid: int) -> int | None:
    """The effective user of a process; None when it has ended."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError:
        return None


def groups_of(pid: int) -> set[Path]:
    """The control group folders that a process is in and we are not."""

    def folders(of: str) -> set[Path]:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        rows = [line.split(":", 2)[2].lstrip("/") for line in Path(f"/proc/{of}/cgroup").read_text().splitlines()]
        bases = [Path(mount[1]) for mount in mounts if mount[2] in {"cgroup", "cgroup2"}]
        return {path for base in bases for row in rows if row and (path := base / row).is_dir()}

    try:
        return folders(str(pid)) - folders("self")
    except OSError:
        return set()


def namespaces_of(pid: int) -> set[str]:
    """Links of the namespaces that a process is in and we are not."""
    try:
        theirs, ours = [{os.readlink(f"/proc/{who}/ns/{kind}") for kind in KINDS} for who in (pid, "self")]
    except OSError:
        return set()
    return theirs - ours


def holders(namespaces: set[str], *, born_before: float) -> list[str]:
    """Who on this host still holds one of the namespaces: processes in it, and descriptors of ours.

    The kernel gives the number of a namespace that is gone to the next one made, so a process that was born when the host had
    been up for more than `born_before` seconds is in another.
    """
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                held = {os.readlink(f"/proc/{name}/ns/{kind}") for kind in KINDS} & namespaces
                born = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
                found += [f"process {name}"] if held and born < born_before else []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += [f"descriptor {name}"] if os.readlink(f"/proc/self/fd/{name}") in namespaces else []
    return found


def mounts() -> set[str]:
    """Mount points of this host."""
    return {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}


def descriptors() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def scratch_files() -> set[str]:
    """Files and folders of Bessemer in the host's folder for temporary files."""
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("bessemer")}


def containers(backend: Backend) -> set[str]:
    """Names of the containers that this process owns at Docker's engine, running or not; empty for other backends."""
    from environments.sandbox.docker import DockerBackend
    from environments.sandbox.owners import PREFIX

    if not isinstance(backend, DockerBackend):
        return set()
    label = f"{PREFIX}pid={os.getpid()}"
    found = backend.client.containers.list(all=True, filters={"label": label}, ignore_removed=True)
    return {str(container.name) for container in found}


def own_groups() -> set[Path]:
    """Control groups of Bessemer's boxes that name this process as their owner."""
    base = Path("/sys/fs/cgroup")
    return {path for path in base.glob("**/bessemer/[0-9]*/o-*") if path.name.startswith(f"o-{os.getpid()}-")}

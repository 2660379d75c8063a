"""Control groups of boxes, version 1 and version 2: limits, out-of-memory counts, killing a whole tree, removal.

Layout: `<base>/bessemer/<slot>/o-<pid>-<start>/x<n>` in the tracking hierarchy (v2, or v1's freezer). Making the slot's folder
is the host-wide, atomic claim of that slot and of its uid; the owner's folder says who claimed it; one x-folder a command lets
a timeout kill that command with all its descendants, whatever sessions they started. Limits sit on the slot's folder.
Gap: a v1 host needs its hierarchies writable, a v2 host a delegated group; otherwise `detect` refuses.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from data_contracts.errors import InfraError, MissingRequirement
from data_contracts.records import SandboxLimits
from environments.sandbox.owners import start_ticks

NAME = "bessemer"
SLOTS = range(70_000, 78_000)
"""Slots of one host; as root the slot's number is the box's uid."""
_CONTROLLERS = ("memory", "pids", "cpu")
_SWAP = {"memory.swap.max", "memory.memsw.limit_in_bytes"}
"""Absent where the kernel has no swap accounting; then `detect` saw no swap."""
_RESERVED_PIDS = 2
"""bubblewrap's monitor and the box's pid 1, on top of the policy's own."""


@dataclass(frozen=True)
class Group:
    """One box's groups. `joins` are the folders that a process of the box enters; `folders` all that must be removed."""

    tree: Tree
    slot: int
    owner: Path

    @property
    def limits(self) -> tuple[Path, ...]:
        return tuple(base / str(self.slot) for name, base in self.tree.bases.items() if name != "tracking")

    @property
    def folders(self) -> tuple[Path, ...]:
        return (*self.limits, self.owner.parent) if self.tree.version == 1 else (self.owner.parent,)

    def joins(self, command: int | None = None) -> list[str]:
        """Folders to enter, for the box itself or for its n-th command (whose folder is made)."""
        target = self.owner
        if command is not None:
            target = self.owner / f"x{command}"
            target.mkdir(exist_ok=True)
        return [*(str(path) for path in self.limits if self.tree.version == 1), str(target)]

    def set_limits(self, limits: SandboxLimits) -> None:
        for file, value in self._files(limits).items():
            with suppress(FileNotFoundError) if file.name in _SWAP else nullcontext():
                file.write_text(value)

    def loosened(self, limits: SandboxLimits) -> list[str]:
        """Which limits the kernel does not hold as `limits` says; it rounds memory down to whole pages."""
        faults = []
        for file, value in self._files(limits).items():
            if file.name in _SWAP and not file.exists():
                continue
            found = file.read_text().strip()
            rounded = file.name.startswith("memory") and found.isdecimal() and int(value) - 65536 < int(found) <= int(value)
            if found != value and not rounded:
                faults.append(f"has {file.name}={found} instead of {value}")
        return faults

    def _files(self, limits: SandboxLimits) -> dict[Path, str]:
        slot, memory_bytes = str(self.slot), str(limits.memory_bytes)
        pids, quota = str(limits.pids + _RESERVED_PIDS), str(int(limits.cpus * 100_000))
        if self.tree.version == 2:
            values = {
                "memory.max": memory_bytes, "memory.swap.max": "0", "pids.max": pids, "cpu.max": f"{quota} 100000",
            }  # fmt: skip
            return {self.owner.parent / name: value for name, value in values.items()}
        memory, cpu = self.tree.bases["memory"] / slot, self.tree.bases["cpu"] / slot
        return {
            memory / "memory.limit_in_bytes": memory_bytes,
            memory / "memory.memsw.limit_in_bytes": memory_bytes,
            self.tree.bases["pids"] / slot / "pids.max": pids,
            cpu / "cpu.cfs_period_us": "100000",
            cpu / "cpu.cfs_quota_us": quota,
        }

    def oom_kills(self) -> int:
        """Processes of this box that the kernel has killed for its memory limit."""
        if self.tree.version == 2:
            text = (self.owner.parent / "memory.events").read_text()
        else:
            text = (self.tree.bases["memory"] / str(self.slot) / "memory.oom_control").read_text()
        return oom_count(text)

    def kill(self, command: int | None = None, *, seconds: float = 10.0) -> None:
        """Kill every process of the box, or of its n-th command; returns when none is left. Blocks."""
        target = self.owner if command is None else self.owner / f"x{command}"
        limit = time.monotonic() + seconds
        while _processes(target):
            self.tree.kill_once(target)
            if time.monotonic() > limit:
                raise InfraError(
                    "sandbox_backend", f"processes of {target} survive SIGKILL; look at them: cat {target}/cgroup.procs"
                )
            time.sleep(0.001)

    def forget(self, command: int) -> None:
        """Drop the folder of a command that left nothing behind; background processes keep theirs."""
        with suppress(OSError):
            (self.owner / f"x{command}").rmdir()

    def remove(self, *, seconds: float = 5.0) -> None:
        """Remove all folders of an empty box. Idempotent. Blocks. The tracking folder goes last: it is the claim."""
        limit = time.monotonic() + seconds
        for folder in self.folders:
            while not _remove(folder):
                if time.monotonic() > limit:
                    raise InfraError("sandbox_backend", f"cannot remove the control group {folder}; is a process left in it?")
                time.sleep(0.002)


@dataclass(frozen=True)
class Tree:
    """Where this host lets us make groups. `bases` has "tracking" and, on v1, one folder a controller."""

    version: int
    bases: dict[str, Path]

    def claim(self, owner_pid: int, owner_start: int) -> Group:
        """The first free slot, in all hierarchies. Raises InfraError when the host is full."""
        for slot in SLOTS:
            folder = self.bases["tracking"] / str(slot)
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            owner = folder / f"o-{owner_pid}-{owner_start}"
            owner.mkdir()
            for base in self.bases.values():
                (base / str(slot)).mkdir(exist_ok=True)
            return Group(self, slot, owner)
        raise InfraError("sandbox_backend", f"all {len(SLOTS)} box slots of this host are taken; is something leaking boxes?")

    def orphans(self) -> Iterator[Group]:
        """Groups whose owner is dead, and half-made ones older than ten seconds."""
        for folder in sorted(self.bases["tracking"].glob("[0-9]*")):
            owners = [path for path in folder.glob("o-*") if path.is_dir()]
            for path in owners:
                _, pid, start = path.name.split("-")
                if start_ticks(int(pid)) != int(start):
                    yield Group(self, int(folder.name), path)
            with suppress(FileNotFoundError):
                if not owners and time.time() - folder.stat().st_mtime > 10:
                    yield Group(self, int(folder.name), folder / "o-0-0")

    def kill_once(self, target: Path) -> None:
        """Stop the tree, signal each of its processes, let it run into the signal: a fork bomb cannot outrun this."""
        if self.version == 2 and (target / "cgroup.kill").exists():
            (target / "cgroup.kill").write_text("1")
            return
        switch, on, off = ("cgroup.freeze", "1", "0") if self.version == 2 else ("freezer.state", "FROZEN", "THAWED")
        (target / switch).write_text(on)
        for pid in _processes(target):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        (target / switch).write_text(off)


def oom_file(pid: int) -> Path | None:
    """Where the kernel counts memory kills of the group that `pid` is in; None when this host cannot see it."""
    try:
        own = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return None
    for number, controllers, path in own:
        for mount in mounts:
            version_1 = "memory" in controllers.split(",") and mount[2] == "cgroup" and "memory" in mount[3].split(",")
            if version_1 or (number == "0" and mount[2] == "cgroup2"):
                file = Path(mount[1]) / path.lstrip("/") / ("memory.oom_control" if version_1 else "memory.events")
                if file.exists():
                    return file
    return None


def oom_count(text: str) -> int:
    """The `oom_kill` row of memory.events or memory.oom_control."""
    return next((int(row.split()[1]) for row in text.splitlines() if row.startswith("oom_kill ")), 0)


def detect() -> Tree:
    """The first place where boxes can be limited. Raises MissingRequirement with what to do."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    reasons: list[str] = []
    for root in [Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"]:
        mine = next((Path(path.lstrip("/")) for number, _, path in own if number == "0"), Path())
        for parent in dict.fromkeys(path for path in (root, root / mine, (root / mine).parent) if path.is_relative_to(root)):
            try:
                return _version_2(parent)
            except OSError as error:
                reasons.append(f"{parent}: {error.strerror}")
    v1 = {
        name: Path(m[1]) for m in mounts if m[2] == "cgroup" for name in (*_CONTROLLERS, "freezer") if name in m[3].split(",")
    }
    if len(v1) == len(_CONTROLLERS) + 1:
        try:
            return _version_1(v1)
        except OSError as error:
            reasons.append(f"version 1: {error.strerror} ({error.filename})")
    raise MissingRequirement(
        "this host does not let Bessemer limit memory, processes and CPU of a box by control groups"
        f" ({'; '.join(reasons) or 'no usable hierarchy is mounted'}); run as root, or inside a delegated group:"
        " systemd-run --user --scope -p Delegate=yes bessemer ..."
    )


def _version_2(parent: Path) -> Tree:
    available = (parent / "cgroup.controllers").read_text().split()
    if missing := sorted(set(_CONTROLLERS) - set(available)):
        raise OSError(errno.ENOTSUP, f"controllers {', '.join(missing)} are not available here")
    wanted = " ".join(f"+{name}" for name in _CONTROLLERS)
    base = parent / NAME
    (parent / "cgroup.subtree_control").write_text(wanted)
    base.mkdir(exist_ok=True)
    (base / "cgroup.subtree_control").write_text(wanted)
    probe = base / f"probe-{os.getpid()}"
    probe.mkdir(exist_ok=True)
    try:
        if _swap_is_on() and not (probe / "memory.swap.max").exists():
            raise OSError(errno.ENOTSUP, "swap is on and the kernel does not account for it")
        (probe / "pids.max").write_text("10")
    finally:
        probe.rmdir()
    return Tree(2, {"tracking": base})


def _version_1(hierarchies: dict[str, Path]) -> Tree:
    bases = {name: mount / NAME for name, mount in hierarchies.items() if name != "freezer"}
    for base in bases.values():
        base.mkdir(exist_ok=True)
    if _swap_is_on() and not (bases["memory"] / "memory.memsw.limit_in_bytes").exists():
        raise OSError(errno.ENOTSUP, "swap is on and the kernel does not account for it")
    if not (bases["cpu"] / "cpu.cfs_quota_us").exists():
        raise OSError(errno.ENOTSUP, "the kernel has no CPU quotas")
    tracking = hierarchies["freezer"] / NAME
    tracking.mkdir(exist_ok=True)
    for base in (*bases.values(), tracking):
        if not os.access(base, os.W_OK):
            raise OSError(errno.EACCES, "this user may not make groups", str(base))
    return Tree(1, bases | {"tracking": tracking})


def _swap_is_on() -> bool:
    return len(Path("/proc/swaps").read_text().splitlines()) > 1


def _processes(folder: Path) -> list[int]:
    found: list[int] = []
    for path, _, _ in os.walk(folder):
        with suppress(OSError):
            found += [int(word) for word in (Path(path) / "cgroup.procs").read_text().split()]
    return [pid for pid in found if pid > 0]


def _remove(folder: Path) -> bool:
    for path, _, _ in os.walk(folder, topdown=False):
        try:
            os.rmdir(path)
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True

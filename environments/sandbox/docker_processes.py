"""The policy's processes in a container, seen and ended from the host: where engine and worker share a host, and root may.

Contract: what stays in a container are the processes of its init's user; everything else in its control group is the policy's,
a helper of the engine that already took the policy's user included. All are stopped before any is killed, so none forks away,
and each is held by a pidfd that was checked to be in the group, so no recycled pid is hit. Everything blocks for moments.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SECONDS = 10.0


def policy_processes(group: Path, init: int) -> list[int]:
    """Host pids below the control group folder `group` that do not run as `init`'s user. Raises OSError when it is gone."""
    own = _user(init)
    found = [int(word) for word in (group / "cgroup.procs").read_text().split()]
    return sorted(pid for pid in found if (user := _user(pid)) is not None and user != own)


def kill_policy(group: Path, init: int) -> bool:
    """End all of them; False when some are left after ten seconds, or when this user may not signal them."""
    before: list[int] | None = None
    limit = time.monotonic() + SECONDS
    try:
        while found := policy_processes(group, init):
            for pid in found:
                with _held(pid, group) as handle:
                    if handle is not None:
                        signal.pidfd_send_signal(handle, signal.SIGKILL if found == before else signal.SIGSTOP)
            before = found
            if time.monotonic() > limit:
                return False
            time.sleep(0.002)
    except PermissionError:
        return False
    return True


def kill_container(group: Path, init: int) -> bool:
    """End the container's first process, and with it all others; False where this user may not, or it is not seen any more."""
    with suppress(OSError), _held(init, group) as handle:
        if handle is not None:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return True
    return False


def filtered(pid: int) -> bool:
    """Whether the process's system calls are filtered."""
    return "\nSeccomp:\t2\n" in Path(f"/proc/{pid}/status").read_text()


@contextmanager
def _held(pid: int, group: Path) -> Iterator[int | None]:
    """A pidfd of `pid`, or None when it has ended or is in another group by now."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        inside = group.name in Path(f"/proc/{pid}/cgroup").read_text()
        with suppress(ProcessLookupError):
            yield handle if inside else None
    except FileNotFoundError:
        yield None
    finally:
        os.close(handle)


def _user(pid: int) -> str | None:
    """The Uid row of a live process; None for one that has ended."""
    try:
        rows = dict(row.split(":\t", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in row)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if rows["State"][0] in "ZX" else rows["Uid"]

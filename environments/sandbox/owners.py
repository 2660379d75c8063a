"""Who owns a box: host, process and its start, so that a sweep removes what dead owners left and nothing else.

A pid alone is not enough (pids are reused): the start time in clock ticks since boot makes it unique within one boot, the
boot id across boots.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PREFIX = "bessemer."


@dataclass(frozen=True)
class Owner:
    """`host` is the host's name, `boot` its boot id, `start` clock ticks after boot."""

    host: str
    boot: str
    pid: int
    start: int

    def alive(self) -> bool | None:
        """None when the owner is on another host: only that host can tell."""
        if self.host != platform.node():
            return None
        return self.boot == boot_id() and start_ticks(self.pid) == self.start

    def labels(self) -> dict[str, str]:
        return {f"{PREFIX}{key}": str(value) for key, value in vars(self).items()}

    @staticmethod
    def from_labels(labels: dict[str, str]) -> Owner | None:
        try:
            host, boot = labels[f"{PREFIX}host"], labels[f"{PREFIX}boot"]
            return Owner(host, boot, int(labels[f"{PREFIX}pid"]), int(labels[f"{PREFIX}start"]))
        except (KeyError, ValueError):
            return None


def this_process() -> Owner:
    return Owner(platform.node(), boot_id(), os.getpid(), start_ticks(os.getpid()) or 0)


@cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Start time of a running process (field 22 of /proc/PID/stat); None when there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])

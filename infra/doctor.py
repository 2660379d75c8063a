"""What this machine has and lacks for Bessemer, and the command that gets it. Reads and probes; changes nothing.

Fast (about a second): heavy packages are looked up, not imported; the sandbox's own probe of control groups runs in a process
of its own. `bessemer doctor` shows the report.
Gap: a finding says that a part is there, not that it works; `make test` shows that.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from data_contracts.errors import MissingRequirement
from infra import docker_engine, processes, rootfs, stack
from infra.lockfile import CPU_LOCK, Lock, differences, installed, read_lock
from infra.paths import cache, home

DISK_GIB = 10
MEMORY_GIB = 12
GIB = 1024**3


@dataclass(frozen=True)
class Finding:
    """One check. `remedy` is the command that fixes it, empty when `ok`."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def report(*, base_model: str = "smollm2-135m") -> list[Finding]:
    """Every check, in the order in which problems are best fixed. Never raises for a part that is missing."""
    checks: list[Callable[[], Finding]] = [
        python,
        packages,
        engine_package,
        bubblewrap,
        control_groups,
        root_file_system,
        docker,
        lambda: model(base_model),
        ports,
        disk,
        memory,
    ]
    return [check() for check in checks]


def python() -> Finding:
    want = read_lock(CPU_LOCK).python or "3.11"
    have = f"{sys.version_info.major}.{sys.version_info.minor}"
    return _finding(
        "python", have == want, f"{platform.python_version()} at {sys.executable}", f"BESSEMER_PYTHON=python{want} make setup"
    )


def packages(lock: Lock | None = None, site_packages: Path | None = None) -> Finding:
    """The environment against the lock, by name and version."""
    lock = lock or read_lock(CPU_LOCK)
    wrong = differences(lock, installed(site_packages or _site_packages()))
    listed = ", ".join(f"{name} {what}" for name, what in list(wrong.items())[:5])
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    detail = f"{listed}{more}" if wrong else f"{len(lock.pins)} packages as locked"
    return _finding("packages", not wrong, detail, "make setup")


def engine_package() -> Finding:
    there = importlib.util.find_spec("vllm") is not None and importlib.util.find_spec("torch") is not None
    return _finding("vllm", there, "installed" if there else "vllm or torch is not importable", "make setup")


def bubblewrap() -> Finding:
    path = shutil.which("bwrap")
    return _finding("bubblewrap", path is not None, path or "bwrap was not found", "apt-get install -y bubblewrap")


def control_groups() -> Finding:
    """Asks the sandbox package in a process of its own: infra imports nothing above it."""
    probe = "from environments.sandbox.cgroups import detect; print('version', detect().version)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", probe],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            cwd=Path(__file__).resolve().parent.parent,
        )
    except subprocess.TimeoutExpired:
        return _finding("control groups", False, "the probe did not end within 20 s", "bessemer doctor")
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    remedy = "run as root, or: systemd-run --user --scope -p Delegate=yes bessemer ..."
    return _finding("control groups", done.returncode == 0, lines[-1] if lines else "no answer", remedy)


def root_file_system() -> Finding:
    try:
        path = rootfs.rootfs_path()
    except MissingRequirement as error:
        return _finding("root file system", False, str(error), "python -m infra.rootfs")
    return _finding("root file system", path.is_dir(), str(path), "python -m infra.rootfs")


def docker() -> Finding:
    there = docker_engine.engine_reachable()
    detail = "the engine answers" if there else "no engine answers (needed for sandbox.backend: docker and for the tests)"
    return _finding("docker", there, detail, "python -m infra.rootfs --docker")


def model(name: str) -> Finding:
    if Path(name).is_dir():
        return _finding("base model", True, name, "")
    label = name.replace("/", "--")
    found = [path for path in sorted((cache() / "models").glob(f"{label}-*")) if (path / "config.json").is_file()]
    detail = str(found[-1]) if found else f"'{name}' is not in {cache() / 'models'}"
    return _finding("base model", bool(found), detail, f"python -m models.base_model {name}")


def ports() -> Finding:
    """The usual ports of the user interfaces; a stack of this state folder may hold them, others are worked around."""
    if stack.running(home()) is not None:
        return _finding("ports", True, f"a stack is running ({home()})", "")
    taken = [f"{name} {port}" for name, port in stack.PREFERRED_PORTS.items() if not processes.port_is_free(port)]
    return _finding("ports", True, f"in use: {', '.join(taken)}; others will be chosen" if taken else "free", "")


def disk() -> Finding:
    free = min((shutil.disk_usage(_existing(folder)).free, folder) for folder in (home(), cache()))
    detail = f"{free[0] / GIB:.0f} GiB free at {free[1]}"
    remedy = f"free {DISK_GIB} GiB, `bessemer gc`, or set BESSEMER_HOME to another disk"
    return _finding("disk", free[0] >= DISK_GIB * GIB, detail, remedy)


def memory() -> Finding:
    figures = psutil.virtual_memory()
    detail = f"{figures.available / GIB:.0f} of {figures.total / GIB:.0f} GiB available, {os.cpu_count()} cores"
    remedy = f"{MEMORY_GIB} GiB are needed to train smollm2-135m; use the tiny profile, or end other programs"
    return _finding("memory", figures.available >= MEMORY_GIB * GIB, detail, remedy)


def _finding(name: str, ok: bool, detail: str, remedy: str) -> Finding:
    return Finding(name, ok, detail, "" if ok else remedy)


def _site_packages() -> Path:
    return Path(psutil.__file__).resolve().parent.parent


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder

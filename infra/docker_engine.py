"""Docker's engine as a process: is it reachable, start it by hand where root may, stop what we started.

Contract: talks HTTP to the engine's socket (`$DOCKER_HOST`, else the usual path); the Docker SDK stays in the sandbox backend.
An engine that is reachable is never touched. One that we start has no bridge and writes no firewall rules (every box has
network none); its log and pid are in `home()/docker`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from filelock import FileLock

from data_contracts.errors import MissingRequirement
from infra.paths import cache, home

SOCKET = "/var/run/docker.sock"


def engine_client(timeout: float = 30.0) -> httpx.Client:
    """An HTTP client of the engine's API. Only Unix sockets and plain TCP (`tcp://`)."""
    address = os.environ.get("DOCKER_HOST") or f"unix://{SOCKET}"
    if address.startswith("unix://"):
        transport = httpx.HTTPTransport(uds=address.removeprefix("unix://"))
        return httpx.Client(transport=transport, base_url="http://docker", timeout=timeout)
    return httpx.Client(base_url=address.replace("tcp://", "http://", 1), timeout=timeout)


def engine_reachable() -> bool:
    try:
        with engine_client(timeout=5.0) as client:
            return client.get("/_ping").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def ensure_dockerd(*, seconds: float = 60.0, progress: Callable[[str], None] = lambda message: None) -> bool:
    """Start the engine when it is not reachable; True when this call started it. Raises MissingRequirement."""
    if engine_reachable():
        return False
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    binary = shutil.which("dockerd", path=path)
    if os.environ.get("DOCKER_HOST"):
        raise MissingRequirement(
            f"no Docker engine answers at DOCKER_HOST={os.environ['DOCKER_HOST']}; start it, or: unset DOCKER_HOST"
        )
    if binary is None or os.geteuid() != 0:
        raise MissingRequirement(
            "no Docker engine answers and this user cannot start one; run as root: "
            + ("dockerd --iptables=false --bridge=none" if binary else "apt-get install -y docker.io")
        )
    cache().mkdir(parents=True, exist_ok=True)
    with FileLock(cache() / "dockerd.lock"):
        if engine_reachable():
            return False
        folder = home() / "docker"
        folder.mkdir(parents=True, exist_ok=True)
        progress("starting Docker's engine")
        with (folder / "dockerd.log").open("ab") as log:
            process = subprocess.Popen(
                [binary, "--iptables=false", "--ip6tables=false", "--bridge=none", f"--pidfile={folder / 'dockerd.pid'}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=os.environ | {"PATH": path},
            )  # fmt: skip
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if process.poll() is not None:
                break
            if engine_reachable():
                return True
            time.sleep(0.1)
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=30)
        tail = (folder / "dockerd.log").read_text(errors="replace")[-800:]
        raise MissingRequirement(
            f"dockerd did not come up within {seconds:.0f} s: {tail}\nRead {folder / 'dockerd.log'}; then run: {binary}"
        )


def stop_dockerd(*, seconds: float = 30.0) -> bool:
    """Stop an engine that this installation started, unless containers still run on it. True when it is gone."""
    pidfile = home() / "docker" / "dockerd.pid"
    try:
        pid = int(pidfile.read_text())
    except (OSError, ValueError):
        return False
    try:
        with engine_client() as client:
            if client.get("/containers/json").json():
                return False
        if b"dockerd" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return False
        os.kill(pid, signal.SIGTERM)
    except (httpx.HTTPError, OSError):
        return False
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if not _running(pid):
            return True
        time.sleep(0.1)
    return False


def _running(pid: int) -> bool:
    """False for a zombie too: the process that started the engine may not have waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""Processes of the local stack: started in their own group, logged, watched, and ended with everything they started.

Contract: a process started here carries the environment variable `BESSEMER_SUPERVISED=<owner>/<name>`, which all of its
descendants inherit. `stop` ends the process group (TERM, then KILL), then sweeps every process that still carries the mark,
so a child that left the group (a spawned worker, a server's engine core) does not outlive its parent. Linux only: marks are
read from /proc. Gap: a descendant that clears its environment is found only while the process that leads its session lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from data_contracts.errors import BessemerError
from data_contracts.records import Record

MARK = "BESSEMER_SUPERVISED"
POLL_SECONDS = 0.05


class ProcessFailed(BessemerError, RuntimeError):
    """A process ended, or did not become healthy in time. The message names it and quotes the end of its log."""


class ProcessSpec(Record, frozen=True, kw_only=True):
    """One supervised process. `env` is laid over the caller's environment.

    `health` is empty (alive is healthy), an http URL that answers below 500, `tcp://host:port` that accepts, or
    `file:///path` that exists. `after` names processes that must be healthy before this one starts.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    cwd: str | None = None
    address: str = ""
    """What people and other processes connect to; shown by `up` and `status`."""
    health: str = ""
    after: tuple[str, ...] = ()
    startup_seconds: float = 180.0
    stop_seconds: float = 10.0
    restart: bool = True
    """Start again after an exit that nobody asked for, with back-off."""


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, *, host: str = "127.0.0.1") -> bool:
    """True when nothing listens on host:port (sockets in TIME_WAIT do not count)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def choose_port(preferred: int) -> int:
    return preferred if port_is_free(preferred) else free_port()


def healthy(target: str, *, timeout: float = 2.0) -> bool:
    """One probe of a `ProcessSpec.health` target. Never raises for a service that is not there yet."""
    if not target:
        return True
    parts = urllib.parse.urlsplit(target)
    if parts.scheme == "file":
        return Path(parts.path).exists()
    if parts.scheme == "tcp":
        try:
            with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 0), timeout=timeout):
                return True
        except OSError:
            return False
    try:
        with urllib.request.urlopen(target, timeout=timeout) as answer:  # noqa: S310 - our own URL
            return int(answer.status) < 500
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, ValueError):
        return False


def start(spec: ProcessSpec, *, log: Path, owner: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start `spec` in a new session, output appended to `log`. Raises ProcessFailed when the command cannot be run."""
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {**(os.environ if environ is None else environ), **spec.env, MARK: f"{owner}/{spec.name}"}
    with log.open("ab") as sink:
        try:
            return subprocess.Popen(
                spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=spec.cwd,
                start_new_session=True,
            )
        except OSError as error:
            raise ProcessFailed(f"cannot start '{spec.name}' ({spec.argv[0]}): {error}") from error


def wait_healthy(
    process: subprocess.Popen[bytes],
    spec: ProcessSpec,
    *,
    log: Path,
    check: Callable[[], bool] | None = None,
    deadline_seconds: float | None = None,
) -> None:
    """Return when `spec` is healthy; raise ProcessFailed when it ends first or its start-up deadline passes."""
    limit = time.monotonic() + (spec.startup_seconds if deadline_seconds is None else deadline_seconds)
    while True:
        if process.poll() is not None:
            raise ProcessFailed(f"'{spec.name}' ended with code {process.returncode} while starting; {log}:\n{tail(log)}")
        if check() if check else healthy(spec.health):
            return
        if time.monotonic() > limit:
            raise ProcessFailed(f"'{spec.name}' was not healthy within {spec.startup_seconds:.0f} s; {log}:\n{tail(log)}")
        time.sleep(POLL_SECONDS)


def ask_to_end(process: subprocess.Popen[bytes]) -> None:
    """TERM to the whole group of `process`; returns at once."""
    _signal_group(process.pid, signal.SIGTERM)


def stop(process: subprocess.Popen[bytes], spec: ProcessSpec, *, owner: str) -> None:
    """End the group of `process` and everything that carries its mark, then wait until its port is free."""
    ask_to_end(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(spec.stop_seconds)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()
    sweep(f"{owner}/{spec.name}")
    port = urllib.parse.urlsplit(spec.address).port if "://" in spec.address else None
    limit = time.monotonic() + 5.0
    while port is not None and not port_is_free(port) and time.monotonic() < limit:
        time.sleep(POLL_SECONDS)


def sweep(mark: str, *, seconds: float = 2.0) -> int:
    """End every process marked `mark`, or `mark/<anything>`; returns how many there were. Never touches the caller."""
    victims = marked(mark)
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.terminate()
    _, alive = psutil.wait_procs(victims, timeout=seconds)
    for victim in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    psutil.wait_procs(alive, timeout=seconds)
    return len(victims)


def marked(mark: str) -> list[psutil.Process]:
    """Live processes that carry `mark`, or `mark/<anything>`, and all that live in the session of one that we started.

    The session counts because some programs write their title over their environment (vLLM's engine core and workers do).
    """
    found, unmarked, ours = [], [], set()
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            value = process.environ().get(MARK, "")
        except (psutil.Error, OSError):
            continue
        if value == mark or value.startswith(f"{mark}/"):
            found.append(process)
            ours |= {process.pid} & {_session(process.pid)}
        else:
            unmarked.append(process)
    return found + [process for process in unmarked if _session(process.pid) in ours]


def _session(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.getsid(pid)
    return None


def identity(pid: int) -> float | None:
    """Start time of `pid` (seconds since the epoch), None when it is not alive: with the pid it names one process."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def tail(log: Path, *, lines: int = 15) -> str:
    """The last lines of a log, for error messages."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return "(no log)"


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)

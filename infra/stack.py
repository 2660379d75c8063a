"""The local stack: which services a StackConfig wants on this machine, and the supervisor that keeps them.

`service_specs` names the processes infra itself knows (Prefect server and worker, MLflow, Dask); flows/stack.py adds engine and
trainer, whose command lines models/ gives. Only what has no configured address is started; all of it listens on loopback.
`up` is idempotent: a live supervisor is found by `<home>/stack.json` and reused, a dead one's file is ignored and what it left
is swept.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from data_contracts.config import StackConfig
from data_contracts.errors import BessemerError
from infra import dask_cluster, prefect_server, processes, supervisor
from infra.processes import ProcessSpec
from infra.supervisor import ProcessState, StackState

PREFERRED_PORTS = {"prefect": 4200, "mlflow": 5000}


class StackFailed(BessemerError, RuntimeError):
    """A process of the local stack did not come up, or the supervisor did not answer."""


class StackDown(BessemerError, RuntimeError):
    """No local stack is running and the configuration names no address."""


def running(home: Path) -> StackState | None:
    """The live stack of this state folder, None when there is none (a dead supervisor's file does not count)."""
    try:
        state = msgspec.json.decode(supervisor.state_path(home).read_bytes(), type=StackState)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    started = processes.identity(state.pid)
    return state if started is not None and abs(started - state.started) < 1.0 else None


def specs_of(home: Path) -> list[ProcessSpec]:
    """What the running stack was asked to run; empty without one."""
    if running(home) is None:
        return []
    return msgspec.json.decode(supervisor.spec_path(home).read_bytes(), type=list[ProcessSpec])


class Ports:
    """Ports for a stack: those the running one has, then the usual one of a service, then a free one."""

    def __init__(self, home: Path) -> None:
        self._known: dict[str, int] = {}
        for spec in specs_of(home):
            for name, url in ((spec.name, spec.address), (f"{spec.name}-health", spec.health)):
                port = urllib.parse.urlsplit(url).port if "://" in url and not url.startswith("file:") else None
                if port is not None:
                    self._known[name] = port

    def of(self, name: str) -> int:
        if name not in self._known:
            self._known[name] = processes.choose_port(PREFERRED_PORTS.get(name, 0)) if name in PREFERRED_PORTS else 0
            while self._known[name] == 0 or list(self._known.values()).count(self._known[name]) > 1:
                self._known[name] = processes.free_port()
        return self._known[name]


def prefect_api(config: StackConfig, ports: Ports) -> str:
    return config.prefect_api or f"http://127.0.0.1:{ports.of('prefect')}/api"


def mlflow_uri(config: StackConfig, ports: Ports) -> str:
    return config.mlflow_uri or f"http://127.0.0.1:{ports.of('mlflow')}"


def service_specs(home: Path, config: StackConfig, ports: Ports, *, worker_env: dict[str, str]) -> list[ProcessSpec]:
    """Prefect, MLflow and Dask. `worker_env` is added to the Prefect worker's environment, which its flow runs inherit."""
    specs = []
    beat = config.heartbeat_seconds
    if config.prefect_api is None:
        specs.append(prefect_server.server_spec(home, port=ports.of("prefect")))
    if config.mlflow_uri is None:
        specs.append(mlflow_spec(home, port=ports.of("mlflow")))
    if config.dask.address is None:
        specs.append(
            dask_cluster.cluster_spec(
                port=ports.of("dask"),
                health_port=ports.of("dask-health"),
                workers=config.dask.workers,
                slots=config.dask.slots,
            )
        )
    specs.append(
        prefect_server.worker_spec(
            home,
            api_url=prefect_api(config, ports),
            heartbeat_seconds=beat,
            health_port=ports.of("prefect-worker"),
            extra_env=worker_env,
            server=config.prefect_api is None,
        )
    )
    return specs


def mlflow_spec(home: Path, *, port: int) -> ProcessSpec:
    """MLflow on SQLite; artifacts lie in `<home>/mlflow/artifacts` and are served by it."""
    folder = home / "mlflow"
    folder.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    return ProcessSpec(
        name="mlflow",
        argv=(
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"),
            *("--artifacts-destination", str(folder / "artifacts")),
        ),
        env={
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "DO_NOT_TRACK": "1",
            "GIT_PYTHON_REFRESH": "quiet",
        },
        cwd=str(folder),
        address=url,
        health=f"{url}/health",
    )


def up(
    home: Path,
    specs: Sequence[ProcessSpec],
    *,
    on_change: Callable[[ProcessState], None] | None = None,
    seconds: float = 900.0,
) -> StackState:
    """Start (or reuse, or reconcile) the supervisor of `home` and return when every process is healthy.

    Raises StackFailed naming the first process that failed for good, with the end of its log. The supervisor keeps running.
    """
    home.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.format(msgspec.json.encode(list(specs)), indent=1)
    state = running(home)
    if state is None:
        supervisor.state_path(home).unlink(missing_ok=True)
        supervisor.replace(supervisor.spec_path(home), data)
        _launch(home)
    elif supervisor.spec_path(home).read_bytes() != data:
        supervisor.replace(supervisor.spec_path(home), data)
        os.kill(state.pid, signal.SIGHUP)
    return _wait(home, sha256(data).hexdigest(), on_change=on_change or (lambda _: None), seconds=seconds)


def _launch(home: Path) -> None:
    log = home / "logs" / "supervisor.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {name: value for name, value in os.environ.items() if name != processes.MARK}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(prefect_server.project_root()), env.get("PYTHONPATH", ""))))
    with log.open("ab") as sink:
        subprocess.run(
            (sys.executable, "-m", "infra.supervisor", str(home), "--detach"),
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=home,
            env=env,
        )


def _wait(home: Path, spec: str, *, on_change: Callable[[ProcessState], None], seconds: float) -> StackState:
    """Wait until every process of the spec file with digest `spec` is healthy."""
    seen: dict[str, ProcessState] = {}
    first: dict[str, int] = {}
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        state = running(home)
        now = {process.name: process for process in state.processes} if state is not None and state.spec == spec else {}
        for name, process in now.items():
            first.setdefault(name, process.restarts)
            before = seen.get(name)
            if before is None or (before.state, before.restarts) != (process.state, process.restarts):
                on_change(process)
            if process.state in ("failed", "ended") or process.restarts - first[name] >= 3:
                log = Path(process.log)
                raise StackFailed(f"'{name}' does not start: {process.detail}; its log {log} ends:\n{processes.tail(log)}")
        seen = now
        if state is not None and now and all(process.state == "healthy" for process in now.values()):
            return state
        time.sleep(supervisor.TICK_SECONDS)
    waiting = ", ".join(f"{name} ({process.state})" for name, process in seen.items() if process.state != "healthy")
    log = home / "logs" / "supervisor.log"
    raise StackFailed(
        f"the stack was not up after {seconds:.0f} s; waiting for {waiting or 'the supervisor'}; {log}:\n{processes.tail(log)}"
    )


def down(home: Path, *, seconds: float = 60.0) -> bool:
    """End the supervisor and everything it started; True when there was something to end."""
    state = running(home)
    if state is not None:
        os.kill(state.pid, signal.SIGTERM)
        limit = time.monotonic() + seconds
        while processes.identity(state.pid) == state.started and time.monotonic() < limit:
            time.sleep(processes.POLL_SECONDS)
        if processes.identity(state.pid) == state.started:
            os.kill(state.pid, signal.SIGKILL)
    left = processes.sweep(supervisor.mark(home))
    supervisor.state_path(home).unlink(missing_ok=True)
    return state is not None or left > 0

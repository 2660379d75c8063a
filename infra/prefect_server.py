"""Prefect's server and worker as processes, and the environment every Prefect client of ours runs in.

Prefect is not imported here: its settings are read from the environment at import, so `use` must run before that. The server
keeps everything in `<home>/prefect` (SQLite), sends no analytics and listens on loopback. Leases of concurrency slots lie on
disk, because in memory (the default) a restarted server never gives back the slot of a run that died meanwhile. Their length
stays at Prefect's 300 s: its flow engine renews on that clock whatever the server is told.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from infra.processes import ProcessSpec

WORK_POOL = "bessemer"
LEAST_HEARTBEAT_SECONDS = 30
"""Prefect 3 refuses shorter flow heartbeats."""


def prefect_home(home: Path) -> Path:
    return home / "prefect"


def shared_env(home: Path) -> dict[str, str]:
    """What server, worker and clients have in common: our own state folder, no analytics, no start-up banners."""
    return {
        "PREFECT_HOME": str(prefect_home(home)),
        "PREFECT_PROFILES_PATH": str(prefect_home(home) / "profiles.toml"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLI_PROMPT": "false",
        "DO_NOT_TRACK": "1",
    }


def server_env(home: Path, *, port: int) -> dict[str, str]:
    url = f"http://127.0.0.1:{port}"
    return {
        **shared_env(home),
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_UI_API_URL": f"{url}/api",
        "PREFECT_UI_URL": url,
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{prefect_home(home) / 'prefect.db'}",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    }


def client_env(home: Path, *, api_url: str, heartbeat_seconds: float) -> dict[str, str]:
    """The environment of flows and of the CLI; `api_url` ends in /api."""
    return {
        **shared_env(home),
        "PREFECT_API_URL": api_url,
        "PREFECT_UI_URL": api_url.removesuffix("/api"),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(heartbeat(heartbeat_seconds)),
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "BESSEMER_HOME": str(home),
    }


def heartbeat(seconds: float) -> int:
    return max(LEAST_HEARTBEAT_SECONDS, round(seconds))


def use(home: Path, *, api_url: str, heartbeat_seconds: float = 30.0, environ: MutableMapping[str, str] | None = None) -> None:
    """Point this process at `api_url`. Raises RuntimeError when Prefect was imported before (it would not notice)."""
    target = os.environ if environ is None else environ
    wanted = client_env(home, api_url=api_url, heartbeat_seconds=heartbeat_seconds)
    if "prefect" in sys.modules and environ is None and target.get("PREFECT_API_URL") != api_url:
        raise RuntimeError(f"prefect was imported before PREFECT_API_URL was set to {api_url}")
    target.update(wanted)


def server_spec(home: Path, *, port: int) -> ProcessSpec:
    url = f"http://127.0.0.1:{port}"
    return ProcessSpec(
        name="prefect",
        argv=(
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--analytics-off",
        ),
        env=server_env(home, port=port),
        address=url,
        health=f"{url}/api/health",
        startup_seconds=240.0,
    )


def worker_spec(
    home: Path, *, api_url: str, heartbeat_seconds: float, health_port: int, extra_env: Mapping[str, str], server: bool
) -> ProcessSpec:
    """The process worker that runs scheduled flows and those started in the UI. `server`: ours, so wait for it."""
    return ProcessSpec(
        name="prefect-worker",
        argv=(
            *(sys.executable, "-m", "prefect", "worker", "start", "--pool", WORK_POOL, "--type", "process"),
            *("--name", f"bessemer-{home.name}", "--with-healthcheck", "--install-policy", "never"),
        ),
        env={
            **client_env(home, api_url=api_url, heartbeat_seconds=heartbeat_seconds),
            **extra_env,
            "PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1",
            "PREFECT_WORKER_WEBSERVER_PORT": str(health_port),
            "PREFECT_WORKER_QUERY_SECONDS": "3",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(project_root()), os.environ.get("PYTHONPATH", "")))),
        },
        address=f"http://127.0.0.1:{health_port}",
        health=f"http://127.0.0.1:{health_port}/health",
        after=("prefect",) if server else (),
    )


def project_root() -> Path:
    """The folder that holds our packages: the checkout, or site-packages."""
    return Path(__file__).resolve().parent.parent

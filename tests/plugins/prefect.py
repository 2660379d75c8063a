"""Session fixtures: prefect. One real Prefect server, shared by the session; the stack's own when the stack runs anyway."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra import prefect_server, processes
from tests.plugins.stack import wanted_anyway


@dataclass(frozen=True)
class PrefectServer:
    """`api_url` ends in /api; `env` is what a client process needs."""

    home: Path
    api_url: str
    env: dict[str, str]


@pytest.fixture(scope="session")
def prefect_server_process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    shared = wanted_anyway(request)
    if shared is not None:
        api_url = shared.addresses.prefect_api
        yield PrefectServer(shared.home, api_url, prefect_server.client_env(shared.home, api_url=api_url, heartbeat_seconds=30))
        return
    home = tmp_path_factory.mktemp("prefect-home")
    spec = prefect_server.server_spec(home, port=processes.free_port())
    log = home / "logs" / "prefect.log"
    process = processes.start(spec, log=log, owner=str(home))
    try:
        processes.wait_healthy(process, spec, log=log)
        api_url = f"{spec.address}/api"
        yield PrefectServer(home, api_url, prefect_server.client_env(home, api_url=api_url, heartbeat_seconds=30))
    finally:
        processes.stop(process, spec, owner=str(home))


@pytest.fixture
def prefect(prefect_server_process: PrefectServer) -> Iterator[PrefectServer]:
    """This process talks to the session's server for the length of a test, whether Prefect was imported before or not."""
    env = {name: value for name, value in prefect_server_process.env.items() if name != "BESSEMER_HOME"}
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_HOME,
        PREFECT_UI_URL,
        temporary_settings,
    )

    url = prefect_server_process.api_url
    updates = {
        PREFECT_API_URL: url,
        PREFECT_UI_URL: url.removesuffix("/api"),
        PREFECT_HOME: Path(prefect_server_process.env["PREFECT_HOME"]),
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: 30,
    }
    try:
        with temporary_settings(updates):
            yield prefect_server_process
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""Session fixtures: mlflow. One real MLflow server, shared by the session; the stack's own when the stack runs anyway."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra import processes, stack
from tests.plugins.stack import wanted_anyway


@dataclass(frozen=True)
class MlflowServer:
    """`uri` is the tracking URI; `home` its state folder."""

    home: Path
    uri: str


@pytest.fixture(scope="session")
def mlflow_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    shared = wanted_anyway(request)
    if shared is not None and shared.addresses.mlflow is not None:
        yield MlflowServer(shared.home, shared.addresses.mlflow)
        return
    home = tmp_path_factory.mktemp("mlflow-home")
    spec = stack.mlflow_spec(home, port=processes.free_port())
    log = home / "logs" / "mlflow.log"
    process = processes.start(spec, log=log, owner=str(home))
    try:
        processes.wait_healthy(process, spec, log=log)
        yield MlflowServer(home, spec.address)
    finally:
        processes.stop(process, spec, owner=str(home))

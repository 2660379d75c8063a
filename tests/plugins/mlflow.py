"""Session fixtures: mlflow. One real MLflow server on SQLite and a free loopback port, shared by the session."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra import processes, stack


@dataclass(frozen=True)
class MlflowServer:
    """`uri` is the tracking URI; `home` its state folder."""

    home: Path
    uri: str


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    home = tmp_path_factory.mktemp("mlflow-home")
    spec = stack.mlflow_spec(home, port=processes.free_port())
    log = home / "logs" / "mlflow.log"
    process = processes.start(spec, log=log, owner=str(home))
    try:
        processes.wait_healthy(process, spec, log=log)
        yield MlflowServer(home, spec.address)
    finally:
        processes.stop(process, spec, owner=str(home))

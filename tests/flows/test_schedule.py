"""A real worker: a run started by hand is killed with its worker, found by the zombie automation, and cron goes on.

While the dead run still holds the deployment's slot, the overlap guard cancels what cron fires; once it is marked Crashed
(three missed heartbeats of 30 s) the next run of the schedule continues the campaign.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.deploy import deploy
from flows.overview import campaign_state
from infra import prefect_server, processes
from infra.store import LocalStore
from tests.flows import double
from tests.plugins.prefect import PrefectServer

CAMPAIGN = "cron"


class Worker:
    """The worker of the stack, as the supervisor would start it."""

    def __init__(self, home: Path, api_url: str) -> None:
        self.home = home
        self.spec = prefect_server.worker_spec(
            home,
            api_url=api_url,
            heartbeat_seconds=30,
            health_port=processes.free_port(),
            extra_env={"BESSEMER_HOME": str(home)},
            server=False,
        )
        self.start()

    def start(self) -> None:
        log = self.home / "logs" / "worker.log"
        self.process = processes.start(self.spec, log=log, owner=str(self.home))
        processes.wait_healthy(self.process, self.spec, log=log)

    def stop(self) -> None:
        processes.stop(self.process, self.spec, owner=str(self.home))


@pytest.fixture
def worker(home: Path, prefect: PrefectServer) -> Iterator[Worker]:
    started = Worker(home, prefect.api_url)
    yield started
    started.stop()


def until(check: Callable[[], Any], *, seconds: float) -> Any:
    limit = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < limit, "condition not met in time"
        time.sleep(0.5)
    return found


def runs() -> list[Any]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        ours = DeploymentFilter(name=DeploymentFilterName(any_=[CAMPAIGN]))
        return client.read_flow_runs(deployment_filter=ours, sort=FlowRunSort.EXPECTED_START_TIME_ASC)


def deployment(folder: Path, api_url: str) -> Path:
    parameters = {
        "profile": str(double.PROFILE),
        "campaign": CAMPAIGN,
        "iterations": 1,
        "overrides": [f"stack.prefect_api={api_url}"],
    }
    entry = {
        "name": CAMPAIGN,
        "entrypoint": "tests.flows.double.advance",
        "parameters": parameters,
        "schedules": [{"slug": "minute", "cron": "* * * * *"}],
        "concurrency_limit": {"limit": 1, "collision_strategy": "CANCEL_NEW"},
        "work_pool": {"name": prefect_server.WORK_POOL},
    }
    file = folder / "prefect.yaml"
    file.write_text(yaml.safe_dump({"deployments": [entry]}))
    return file


@pytest.mark.timeout(420)
def test_a_killed_run_is_marked_crashed_and_cron_continues_the_campaign(
    home: Path, prefect: PrefectServer, worker: Worker
) -> None:
    from prefect.deployments import run_deployment

    double.steer("sleep", "600")
    file = deployment(home, prefect.api_url)
    deploy(file, heartbeat_seconds=30)
    by_hand = run_deployment(f"advance/{CAMPAIGN}", timeout=0)
    store = LocalStore(home / "store")
    holder = until(lambda: _holder(store), seconds=90)
    until(lambda: 0 in campaign_state(store, CAMPAIGN).curated, seconds=30)

    os.kill(worker.process.pid, signal.SIGKILL)
    os.kill(holder.pid, signal.SIGKILL)
    double.steer("sleep")
    worker.stop()
    worker.start()

    crashed = until(lambda: next((r for r in runs() if r.id == by_hand.id and r.state.is_crashed()), None), seconds=200)
    assert "No heartbeat for 90 s" in crashed.state.message
    meanwhile = [f"{run.state.name}: {run.state.message}" for run in runs()]
    assert any(run.state.is_cancelled() for run in runs()), meanwhile
    after = until(lambda: next((r for r in runs() if r.state.is_completed()), None), seconds=150)
    assert after.auto_scheduled
    state = campaign_state(store, CAMPAIGN)
    assert len(state.trained) >= 1
    assert state.holder is None


def _holder(store: LocalStore) -> Any:
    from infra.ledger_log import LedgerLog

    log = LedgerLog(store, CAMPAIGN)
    return log.state().holder if log.exists() else None

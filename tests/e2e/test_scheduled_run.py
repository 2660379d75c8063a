"""A schedule of every minute on the real stack: its run is killed with its worker, found by the zombie automation, and the next
scheduled run goes on with the campaign and leaves everything that people look at.

The kill hits the flow between a weight reload and its ledger event: the engine serves a version that the ledger does not know.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from flows.deploy import deploy
from flows.overview import campaign_state
from infra import prefect_server
from tests.e2e.driving import check_intact
from tests.plugins.prefect import PrefectServer
from tests.plugins.stack import RunningStack

CAMPAIGN = "cron"
ITERATIONS = 3
SETTINGS = (f"campaign.iterations={ITERATIONS}", "campaign.evaluate.every=3", "campaign.track.experiment=scheduled")


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


def artifacts(types: set[str]) -> dict[str, Any]:
    """The newest artifact of each type whose key names the campaign."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        found = client.read_artifacts()
    return {a.type: a for a in found if a.type in types and CAMPAIGN in (a.key or "")}


@pytest.fixture
def schedule(stack: RunningStack, prefect: PrefectServer, tmp_path: Path) -> Iterator[None]:
    """The deployment, with the worker that serves it; deleted afterwards so that cron leaves the other tests alone."""
    from prefect.client.orchestration import get_client

    assert prefect.api_url == stack.addresses.prefect_api
    file = tmp_path / "prefect.yaml"
    entry = {
        "name": CAMPAIGN,
        "entrypoint": "tests.e2e.held_flow.advance",
        "parameters": {"profile": "tiny", "campaign": CAMPAIGN, "overrides": stack.overrides(*SETTINGS)},
        "schedules": [{"slug": "minute", "cron": "* * * * *"}],
        "concurrency_limit": {"limit": 1, "collision_strategy": "CANCEL_NEW"},
        "work_pool": {"name": prefect_server.WORK_POOL},
    }
    file.write_text(yaml.safe_dump({"deployments": [entry]}))
    deploy(file, heartbeat_seconds=30)
    yield
    with get_client(sync_client=True) as client:
        client.delete_deployment(client.read_deployment_by_name(f"advance/{CAMPAIGN}").id)


@pytest.mark.timeout(480)
def test_a_scheduled_run_is_killed_marked_crashed_and_continued_by_the_next(stack: RunningStack, schedule: None) -> None:
    began = time.monotonic()

    def note(text: str) -> None:
        print(f"\n{time.monotonic() - began:6.1f} s  {text}", flush=True)

    hold = stack.home / "hold-flow"
    hold.mkdir()
    until((hold / "reached").exists, seconds=180)
    note("cron fired; version 2 is in the engine and not in the ledger")
    state = campaign_state(stack.store, CAMPAIGN)
    assert 2 not in state.published
    assert len(state.trained) == 2
    held = second_advance(stack)
    assert held.returncode == 3, held.stderr
    assert f"process {state.holder.pid}" in held.stderr
    assert "since" in held.stderr
    note("a second advance was told who holds the campaign")

    worker = stack.process("prefect-worker").pid
    os.kill(worker, signal.SIGKILL)
    os.kill(state.holder.pid, signal.SIGKILL)
    (hold / "reached").unlink()
    hold.rmdir()
    (killed,) = [run for run in runs() if run.state.is_running()]
    assert killed.auto_scheduled

    crashed = until(lambda: next((r for r in runs() if r.id == killed.id and r.state.is_crashed()), None), seconds=200)
    assert "No heartbeat for 90 s" in crashed.state.message
    note("marked Crashed")
    after = until(lambda: next((r for r in runs() if r.state.is_completed()), None), seconds=180)
    assert after.auto_scheduled
    note("continued by the next scheduled run")
    state = check_intact(stack.store, CAMPAIGN, iterations=ITERATIONS)
    check_prefect(killed, after)
    check_mlflow(stack, state.evaluated)


def second_advance(stack: RunningStack) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-m", "flows.cli", "resume", CAMPAIGN),
        env={**os.environ, "BESSEMER_HOME": str(stack.home)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def check_prefect(killed: Any, after: Any) -> None:
    """The runs' subflows and the artifacts for people."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId

    with get_client(sync_client=True) as client:
        parents = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[killed.id, after.id]))
        names = {run.name for run in client.read_flow_runs(flow_run_filter=parents)}
    assert names == {f"{CAMPAIGN}: iteration {number}" for number in range(ITERATIONS)}
    found = artifacts({"progress", "table", "markdown"})
    assert set(found) == {"progress", "table", "markdown"}
    assert "mlflow" in found["markdown"].data.lower()


def check_mlflow(stack: RunningStack, evaluated: dict[int, Any]) -> None:
    """Parent and child runs, traces with the reward as feedback, and the registered candidate."""
    assert evaluated[ITERATIONS].means["echo"] > evaluated[0].means["echo"]
    client = MlflowClient(stack.addresses.mlflow)
    experiment = client.get_experiment_by_name("scheduled")
    assert experiment is not None
    every = client.search_runs([experiment.experiment_id])
    kinds = {kind: [run for run in every if run.data.tags["bessemer.kind"] == kind] for kind in ("campaign", "iteration")}
    (parent,) = kinds["campaign"]
    assert parent.info.status == "FINISHED"
    assert {run.data.tags["mlflow.parentRunId"] for run in kinds["iteration"]} == {parent.info.run_id}
    assert sorted(int(run.data.tags["bessemer.iteration"]) for run in kinds["iteration"]) == list(range(ITERATIONS))
    assert len(client.get_metric_history(parent.info.run_id, "reward/mean")) == ITERATIONS
    traces = client.search_traces(locations=[experiment.experiment_id])
    assert traces
    assert all("reward" in {found.name for found in trace.info.assessments} for trace in traces)
    version = client.get_model_version_by_alias(f"bessemer-{CAMPAIGN}", "candidate")
    assert version.tags["bessemer.version"] == str(ITERATIONS)

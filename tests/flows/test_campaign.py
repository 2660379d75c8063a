"""The flow against a real Prefect server: runs, subflows, artifacts, held campaigns, failures, staleness in threads."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_contracts.errors import CampaignHeld, TooManyInfraFailures
from flows.overview import campaign_state
from infra.ledger_log import LedgerLog, this_process
from infra.store import LocalStore
from tests.flows import double
from tests.plugins.prefect import PrefectServer


def run(campaign: str, **fields: Any) -> Any:
    from flows.campaign import advance

    return advance(profile=str(double.PROFILE), campaign=campaign, return_state=True, **fields)


def flow_runs(campaign: str) -> list[Any]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags

    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter(tags=FlowRunFilterTags(all_=["bessemer", f"campaign:{campaign}"]))
        return client.read_flow_runs(flow_run_filter=chosen)


def task_names(flow_run_id: Any) -> list[str]:
    """Names of the task runs below a flow run; the server records them a moment later."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
    return sorted(run.name for run in runs)


def until(check: Callable[[], bool], *, seconds: float = 20.0) -> None:
    limit = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < limit, "condition not met in time"
        time.sleep(0.2)


def test_iterations_are_subflows_with_a_task_per_stage_and_calling_again_resumes(
    stand_ins: Path, prefect: PrefectServer
) -> None:
    assert run("steps", iterations=1).is_completed()
    state = run("steps", iterations=1)
    assert state.result() == {"campaign": "steps", "iterations": 2, "serving": 2}
    runs = {found.name: found for found in flow_runs("steps")}
    assert {"steps: iteration 0", "steps: iteration 1"} <= set(runs)
    second = runs["steps: iteration 1"]
    assert second.parent_task_run_id is not None
    expected = ["curate 1", "evaluate 2", "publish 2", "rollout 1", "score 1", "train 1"]
    until(lambda: task_names(second.id) == expected)


def test_artifacts_are_a_progress_bar_a_table_and_a_report(stand_ins: Path, prefect: PrefectServer) -> None:
    from prefect.artifacts import Artifact

    run("art-1")
    table = Artifact.get("art-1-iterations")
    assert table is not None
    assert '"iteration": 1' in str(table.data)
    report = Artifact.get("art-1-report")
    assert report is not None
    assert "2 of 2 iterations trained; version 2 serves" in str(report.data)
    assert "| 2 | 0.200 |" in str(report.data)
    assert "data:image/png;base64," in str(report.data)
    progress = Artifact.get("art-1-rollout")
    assert progress is not None
    assert float(str(progress.data)) == 100.0


def test_a_held_campaign_ends_as_cancelled_and_names_the_holder(stand_ins: Path, prefect: PrefectServer) -> None:
    from flows.campaign import Watcher, watching

    run("held", iterations=1)
    log = LedgerLog(LocalStore(stand_ins / "store"), "held")
    with log.lease(this_process("another-run")), watching(Watcher()) as watcher:
        state = run("held", iterations=1)
    assert state.is_cancelled()
    assert "another-run" in state.message
    assert isinstance(watcher.error, CampaignHeld)


def test_a_failing_stage_fails_the_run_once_and_the_next_run_goes_on(stand_ins: Path, prefect: PrefectServer) -> None:
    double.steer("fail", "3 of 4 groups were lost to infrastructure")
    state = run("broken", iterations=1)
    assert state.is_failed()
    with pytest.raises(TooManyInfraFailures, match="3 of 4 groups"):
        state.result()
    paused = campaign_state(LocalStore(stand_ins / "store"), "broken").paused
    assert paused is not None
    double.steer("fail")
    assert run("broken", iterations=1).is_completed()


def test_overlapping_iterations_run_in_threads_below_the_right_parent(stand_ins: Path, prefect: PrefectServer) -> None:
    double.steer("sleep", "0.5")
    run("stale", iterations=3, max_staleness=1)
    runs = flow_runs("stale")
    assert sorted(found.name for found in runs if found.parent_task_run_id) == [f"stale: iteration {i}" for i in range(3)]
    last = next(found for found in runs if found.name == "stale: iteration 2")
    until(lambda: {"curate 2", "rollout 2", "score 2", "train 2", "publish 3"} <= set(task_names(last.id)))

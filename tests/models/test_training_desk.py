"""Rank 0's desk, in one process with a fake group: a fault that is not ours ends the process, but its caller hears of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from data_contracts.errors import StaleWriter, TrainerError
from infra.store import MemoryStore
from models.training.checkpoint import import_base
from models.training.desk import Desk
from models.training.group import WorkerGroup
from models.training.ranks import Alone
from tests.models.test_training_fake import make_job
from tests.models.training_parts import small_folder


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("BESSEMER_HOME", str(tmp_path / "home"))
    return Desk(WorkerGroup(MemoryStore(tmp_path / "store"), ranks=Alone()))


@pytest.fixture
def job(desk: Desk, tmp_path: Path) -> Any:
    return make_job(desk.store, import_base(small_folder(tmp_path / "model"), store=desk.store, campaign="c"), 0)


def test_an_unexpected_fault_answers_and_then_ends_the_process(desk: Desk, job: Any) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("disk full")

    desk.group.step = fail  # type: ignore[method-assign,assignment]
    answer = desk.submit_train(job)
    with pytest.raises(OSError, match="disk full"):
        desk.run()
    with pytest.raises(TrainerError, match="crashed: OSError: disk full"):
        answer.result(timeout=1)
    assert desk.status()["busy"] is False


def test_a_newer_epoch_that_joins_a_job_in_flight_gets_its_answer(desk: Desk, job: Any) -> None:
    first = desk.submit_train(job)
    second = desk.submit_train(msgspec.structs.replace(job, epoch=2))  # the flow was killed and came back
    assert second is first
    with pytest.raises(StaleWriter):
        desk.submit_train(job)
    desk.submit("shutdown")
    thread = threading.Thread(target=desk.run)
    thread.start()
    assert first.result(timeout=60).outcome == "trained"
    thread.join(timeout=60)


def test_a_job_of_a_passed_epoch_publishes_nothing_and_the_next_one_restores(desk: Desk, job: Any) -> None:
    step = desk.group.step

    def passed(job: Any) -> Any:
        result = step(job)
        desk.submit_train(msgspec.structs.replace(job, key="new", epoch=9))
        desk.submit("shutdown")
        desk.group.step = step  # type: ignore[method-assign]
        return result

    desk.group.step = passed  # type: ignore[method-assign]
    stale = desk.submit_train(job)
    desk.run()
    with pytest.raises(StaleWriter):
        stale.result(timeout=1)
    fresh = desk.submit_train(msgspec.structs.replace(job, key="new", epoch=9))
    desk.submit("shutdown")
    desk.run()
    result = fresh.result(timeout=1)
    assert result.key == "new"
    assert result.outcome == "trained"
    assert result.metrics["restored"] == 1.0  # the passed job had moved the weights

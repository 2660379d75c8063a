"""Pools: nothing a cluster does makes the driver wait without an end."""

from __future__ import annotations

from typing import Any

import pytest

from environments.registry import domain
from tasks import group_pool
from tasks.episode import GroupJob
from tasks.group import run_group
from tasks.group_pool import DaskPool
from tasks.runtime import SamplerSpec, WorkerSpec

SPEC = WorkerSpec(
    store_url="", model_folder="", campaign="c", sampler=SamplerSpec(), sandbox="{}", reward="{}", max_model_len=64
)


class Stuck:
    """A finished future whose worker is gone with the result."""

    status = "finished"
    cancelled = False

    def add_done_callback(self, call: Any) -> None:
        call(self)

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        if timeout is None:
            pytest.fail("waited for a lost result without a deadline")
        raise TimeoutError

    def cancel(self, *, force: bool) -> None:
        self.cancelled = force


class Client:
    def __init__(self) -> None:
        self.future = Stuck()

    def submit(self, *_: Any, **__: Any) -> Stuck:
        return self.future


def test_a_result_that_cannot_be_fetched_is_given_up_at_the_groups_deadline(monkeypatch: pytest.MonkeyPatch):
    client = Client()
    monkeypatch.setattr(group_pool, "connect", lambda address: client)
    monkeypatch.setattr(group_pool, "GRACE_SECONDS", 0.0)
    pool = DaskPool("tcp://nowhere:1")
    job = GroupJob(
        problem=next(domain("echo").problems("train", seed=1)),
        group_id="c/iterations/000000/0000-x",
        order=0,
        campaign="c",
        iteration=0,
        attempt=0,
        attempt_id="a",
        group_size=1,
        temperature=1.0,
        min_version=0,
        max_version=0,
        max_episode_tokens=None,
        sampling_seconds=1,
        grading_seconds=1,
        episode_seconds=1,
        group_seconds=1,
        keep_equal=False,
        shard_uri="s",
    )
    pool.submit(0, run_group, job, SPEC, deadline_seconds=60)
    assert pool.finished(timeout_seconds=0.1) == []
    pool.submit(0, run_group, job, SPEC, deadline_seconds=-1)
    ((order, shard),) = pool.finished(timeout_seconds=0.1)
    assert (order, shard.disposition) == (0, "infra_failure")
    assert shard.reason.startswith("group_deadline")
    assert client.future.cancelled

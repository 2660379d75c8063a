"""What a stage says while it waits reaches the CLI and the log of its own run, and can be said outside of one."""

from __future__ import annotations

import logging

import pytest
from prefect import task

from flows.campaign import Watcher
from flows.observe import Observer
from tests.plugins.prefect import PrefectServer


def test_a_wait_is_told_to_the_terminal_and_to_the_stages_own_run(
    prefect: PrefectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    records: list[logging.LogRecord] = []
    observer = Observer(campaign="c", watcher=Watcher(on_wait=seen.append))
    for name in ("prefect.task_runs", "prefect.bessemer"):
        monkeypatch.setattr(logging.getLogger(name), "handle", records.append)

    @task(name="rollout")
    def rollout() -> None:
        observer.on_wait("the engine is away")

    rollout()
    observer.on_wait("still away")
    assert seen == ["the engine is away", "still away"]
    named = [(record.name, record.getMessage()) for record in records if "away" in record.getMessage()]
    assert named == [("prefect.task_runs", "the engine is away"), ("prefect.bessemer", "still away")]

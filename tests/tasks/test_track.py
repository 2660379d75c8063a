"""What a campaign's watch makes of events: where an iteration's wall time begins, and when nothing is known about it."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from data_contracts.ledger import CampaignState
from data_contracts.ledger_events import Entry
from data_contracts.records import BatchManifest, CheckpointRef, Interval, TrainResult
from data_contracts.tables import put_manifest
from infra.store import MemoryStore
from infra.tracking import NullTracker
from tasks.campaign import advance, open_or_create
from tasks.report import iteration_report
from tasks.track import CampaignWatch
from tests.tasks.campaign_fakes import FakeStages, base, config


def watched(d: int) -> tuple[CampaignWatch, dict[str, float]]:
    """An advance over fakes whose clock ticks once an event; event -> its tick."""
    store, ticks = MemoryStore(), iter(count(1.0))
    now: list[float] = [0.0]
    watch = CampaignWatch(config=config(d=d), store=store, tracker=NullTracker(), clock=lambda: now[0])
    watch._queue = lambda *_: None  # type: ignore[method-assign]  # the fakes' tables are no tables
    seen: dict[str, float] = {}

    def on_event(entry: Entry, state: CampaignState) -> None:
        now[0] = next(ticks)
        event: Any = entry.event
        number = getattr(event, "iteration", getattr(event, "version", ""))
        seen[f"{type(event).__name__} {number}"] = now[0]
        watch.on_event(entry, state)

    advance(open_or_create(store, "c", config(d=d), lambda: base(store)), FakeStages(store), on_event=on_event)
    return watch, seen


def test_curating_is_part_of_the_wall_time_it_delays():
    watch, seen = watched(d=0)
    assert watch.started[1] == seen["Published 1"] < seen["Curated 1"]
    assert watch.started[2] == seen["Evaluated 2"] < seen["Curated 2"]


def test_an_evaluation_beside_a_rollout_does_not_shorten_it():
    watch, seen = watched(d=1)
    starts = [tick for name, tick in seen.items() if name.startswith(("Sealed", "Published"))]
    for iteration in range(3):
        before = [tick for tick in starts if tick < seen[f"Sealed {iteration}"]]
        assert watch.started[iteration] == max(before, default=0.0)


RESULT = TrainResult(
    key="k",
    checkpoint=CheckpointRef(uri="v1", sha256="0" * 64, version=1, size=0),
    outcome="trained",
    metrics={},
    intervals=(Interval(kind="train_step", start=2.0, stop=6.0),),
)


@pytest.mark.parametrize(("started", "share"), [(0.0, 0.5), (None, None)])
def test_an_iteration_without_a_known_start_claims_no_overhead(started: float | None, share: float | None):
    store = MemoryStore()
    manifest = BatchManifest(campaign="c", iteration=0, shards=(), discarded=(), unused_problem_ids=())
    report = iteration_report(put_manifest(store, "m.json", manifest), RESULT, None, store=store, started=started, finished=8.0)
    assert report.metrics.get("overhead/share") == share
    assert ("seconds/wall" in report.metrics) is (share is not None)

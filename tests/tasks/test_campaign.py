"""What `advance` promises to flows and stages, in one process with fakes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from data_contracts.errors import ConfigError, ContractError, LedgerError, StaleWriter, TooManyInfraFailures
from data_contracts.ledger import finished
from data_contracts.ledger_events import Entry, Extended, LeaseReleased, Paused, Resumed, Scored
from infra.ledger_log import LedgerLog
from infra.store import MemoryStore
from tasks.campaign import StepContext, Stopped, advance, campaign_config, create_campaign, open_or_create
from tests.tasks.campaign_fakes import FakeStages, base, config

LABEL: ContextVar[str] = ContextVar("LABEL", default="none")


class WatchedStages(FakeStages):
    """Records intervals of steps, and calls a hook inside a step."""

    def __init__(self, store: MemoryStore, hooks: dict[str, Callable[[StepContext], None]] | None = None) -> None:
        super().__init__(store)
        self.hooks = hooks or {}
        self.steps: list[str] = []
        self.beside: list[tuple[str, frozenset[str]]] = []
        self.labels: dict[str, str] = {}
        self._running: set[str] = set()
        self._lock = threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in ("curate", "rollout", "score", "train", "publish", "evaluate"):
            return method

        def watched(context: StepContext, number: int) -> Any:
            step = f"{name} {number}"
            with self._lock:
                self.steps.append(step)
                self.labels[step] = LABEL.get()
                self._running.add(step)
            self.hooks.get(step, lambda _: None)(context)
            try:
                return method(context, number)
            finally:
                with self._lock:
                    self.beside.append((step, frozenset(self._running - {step})))
                    self._running.remove(step)

        return watched


def fresh(*, d: int = 0, iterations: int = 3, every: int = 2) -> tuple[LedgerLog, MemoryStore]:
    store = MemoryStore()
    return create_campaign(store, "c", config(d=d, iterations=iterations, every=every), base(store)), store


def test_on_policy_campaign_from_start_to_end(caplog: pytest.LogCaptureFixture) -> None:
    log, store = fresh()
    stages, iterations, events = WatchedStages(store), [], []

    def run_iteration(iteration: int, body: Callable[[], None]) -> None:
        iterations.append(f"begin {iteration}")
        body()
        iterations.append(f"end {iteration}")

    state = advance(log, stages, run_iteration=run_iteration, on_event=lambda entry, after: events.append((entry, after)))
    assert iterations == ["begin 0", "end 0", "begin 1", "end 1", "begin 2", "end 2"]
    assert sorted(stages.steps[:2]) == ["curate 0", "publish 0"]
    rest = "evaluate 0,rollout 0,score 0,train 0,publish 1,curate 1,rollout 1,score 1,train 1,publish 2"
    rest += ",curate 2,evaluate 2,rollout 2,score 2,train 2,publish 3,evaluate 3"
    assert sorted(stages.steps[2:]) == sorted(rest.split(","))
    assert finished(state, until=3)
    assert [entry.seq for entry, _ in events] == list(range(2, 2 + len(stages.steps)))
    assert all(after.next_seq == entry.seq + 1 for entry, after in events)
    assert state.holder is None

    caplog.set_level(logging.INFO)
    length = len(log.read())
    assert advance(log, stages, run_iteration=run_iteration) == log.state()
    assert "campaign 'c' is finished: 3 of 3 iterations; nothing to do" in caplog.text
    assert len(log.read()) == length


def test_with_staleness_rollouts_overlap_training_and_publishing_keeps_clear_of_it() -> None:
    log, store = fresh(d=1, iterations=4)
    started = threading.Event()
    hooks = {"rollout 1": lambda _: started.set(), "train 0": lambda _: _wait(started)}
    stages = WatchedStages(store, hooks)
    advance(log, stages)
    for step, others in stages.beside:
        kinds = {other.split()[0] for other in others}
        if step.startswith("publish"):
            assert not kinds & {"train", "rollout", "evaluate"}
        if step.startswith(("rollout", "evaluate")):
            assert "publish" not in kinds


def _wait(event: threading.Event) -> None:
    assert event.wait(30), "the rollout of iteration 1 did not begin while iteration 0 trained"


@pytest.mark.parametrize("d", [0, 1])
def test_context_variables_reach_the_stages(d: int) -> None:
    log, store = fresh(d=d)
    stages = WatchedStages(store)

    def run_iteration(iteration: int, body: Callable[[], None]) -> None:
        token = LABEL.set(f"iteration {iteration}")
        try:
            body()
        finally:
            LABEL.reset(token)

    advance(log, stages, run_iteration=run_iteration)
    assert stages.labels["rollout 2"] == "iteration 2"
    assert stages.labels["train 0"] == stages.labels["publish 1"] == stages.labels["evaluate 0"] == "iteration 0"


def test_the_first_failure_stops_the_rest_frees_the_campaign_and_is_raised() -> None:
    log, store = fresh(d=1)
    begun, saw_stop = threading.Event(), []

    def long_rollout(context: StepContext) -> None:
        begun.set()
        deadline = time.monotonic() + 30
        while not context.stopping() and time.monotonic() < deadline:
            time.sleep(0.01)
        saw_stop.append(context.stopping())

    def fail(_: StepContext) -> None:
        assert begun.wait(30)
        raise ZeroDivisionError("the trainer broke")

    ended: dict[int, str] = {}

    def run_iteration(iteration: int, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:
            ended[iteration] = type(error).__name__
            raise

    stages = WatchedStages(store, {"rollout 1": long_rollout, "train 0": fail})
    with pytest.raises(ZeroDivisionError, match="the trainer broke"):
        advance(log, stages, run_iteration=run_iteration)
    assert saw_stop == [True]
    assert ended == {0: "ZeroDivisionError", 1: "Stopped"}
    state = log.state()
    assert state.holder is None
    assert 1 in state.sealed, "what a running step still finished is written down"
    last = log.read()[-1].event
    assert isinstance(last, LeaseReleased)
    assert last.reason == "ZeroDivisionError"
    assert finished(advance(log, FakeStages(store)), until=3)


@pytest.mark.parametrize("error", [TooManyInfraFailures("9 of 10 groups were lost"), ContractError("empty table")])
def test_a_stage_that_needs_a_person_pauses_and_the_next_advance_resumes(error: Exception) -> None:
    log, store = fresh()

    def fail(_: StepContext) -> None:
        raise error

    with pytest.raises(type(error)):
        advance(log, WatchedStages(store, {"rollout 1": fail}))
    state = log.state()
    assert state.paused == Paused(iteration=1, reason=str(error))
    assert state.holder is None
    assert finished(advance(log, FakeStages(store)), until=3)
    assert sum(isinstance(entry.event, Resumed) for entry in log.read()) == 1


def test_a_stage_that_returns_something_else_is_named() -> None:
    log, store = fresh()

    class Wrong(FakeStages):
        def rollout(self, context: StepContext, iteration: int) -> Any:
            return self.score

    with pytest.raises(LedgerError, match="stage rollout 0 has to return Sealed, not method"):
        advance(log, Wrong(store))

    class Off(FakeStages):
        def score(self, context: StepContext, iteration: int) -> Scored:
            return Scored(iteration=7, scores=super().score(context, iteration).scores)

    with pytest.raises(LedgerError, match="7 cannot follow: its batch is not sealed"):
        advance(log, Off(store))


def test_a_wrapper_that_forgets_the_body_is_told() -> None:
    log, store = fresh()
    with pytest.raises(LedgerError, match="has to call its body"):
        advance(log, FakeStages(store), run_iteration=lambda iteration, body: None)


def test_until_stops_early_and_goes_beyond() -> None:
    log, store = fresh(iterations=3, every=5)
    assert len(advance(log, FakeStages(store), until=1).trained) == 1
    assert set(log.state().evaluated) == {0, 1}
    assert len(advance(log, FakeStages(store)).trained) == 3
    state = advance(log, FakeStages(store), until=5)
    assert (len(state.trained), state.iterations) == (5, 5)
    assert campaign_config(state).iterations == 5
    assert sum(isinstance(entry.event, Extended) for entry in log.read()) == 1
    with pytest.raises(ConfigError, match="cannot advance to 0"):
        advance(log, FakeStages(store), until=0)


def test_a_changed_configuration_is_refused_by_field_name() -> None:
    log, store = fresh()
    changed = config().model_copy(update={"seed": 7, "rollout": config().rollout.model_copy(update={"temperature": 0.5})})
    with pytest.raises(ConfigError, match=r"rollout\.temperature: 1\.0 there, 0\.5 given; seed: 0 there, 7 given"):
        open_or_create(store, "c", changed, lambda: base(store))
    with pytest.raises(ConfigError, match="iterations: 3 there, 2 given"):
        open_or_create(store, "c", config(iterations=2), lambda: base(store))
    assert open_or_create(store, "c", config(iterations=9), lambda: pytest.fail("base is not asked for")).state() == log.state()
    advance(log, FakeStages(store), until=4)
    open_or_create(store, "c", config(iterations=3), lambda: base(store))  # the profile it was created from still fits


def test_a_name_is_taken_once() -> None:
    _, store = fresh()
    with pytest.raises(ConfigError, match="campaign 'c' exists already"):
        create_campaign(store, "c", config(), base(store))
    with pytest.raises(ConfigError, match="campaign name"):
        create_campaign(store, "../c", config(), base(store))


def test_events_are_reported_one_at_a_time(tmp_path: Path) -> None:
    log, store = fresh(d=2, iterations=5)
    busy = threading.Lock()
    seen: list[int] = []
    overlaps: list[int] = []

    def on_event(entry: Entry, state: Any) -> None:
        if not busy.acquire(blocking=False):
            overlaps.append(entry.seq)
            return
        seen.append(entry.seq)
        time.sleep(0.001)
        busy.release()

    advance(log, FakeStages(store), on_event=on_event)
    assert not overlaps, "two reports at once"
    assert seen == sorted(seen)


def test_a_stage_that_obeys_after_the_lease_was_lost_ends_as_a_stale_writer() -> None:
    log, store = fresh()

    def obedient(context: StepContext) -> None:
        log.lost.set()  # as the heartbeat does when another writer took over
        assert context.stopping()
        raise Stopped("the rollout was asked to stop")

    with pytest.raises(StaleWriter, match="was taken over"):
        advance(log, WatchedStages(store, {"rollout 1": obedient}))


def test_a_watcher_that_fails_is_logged_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    log, store = fresh()

    def on_event(entry: Entry, state: Any) -> None:
        raise BrokenPipeError("the terminal was closed")

    assert finished(advance(log, FakeStages(store), on_event=on_event), until=3)
    assert "the terminal was closed" in caplog.text

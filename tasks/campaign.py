"""Advance a campaign: take its lease, run what the ledger says is ready, write down what is done, until nothing is left.

Prefect-free; flows/ wraps `advance` and, through `run_iteration`, every iteration. Calling it again *is* the resume: a stage
may be called again with the same number after a crash between its work and its event, so stages are idempotent (tables are
written put-if-absent under names that follow from the number; the trainer answers a finished key from record).

With max_staleness 0 iterations follow each other in the caller's thread, and a step that is ready alone runs in it too. With
d > 0 up to d+1 iterations are open at once, each in a thread of its own that carries the caller's context variables.

The first failure wins: no further step starts, running ones are asked to stop through `StepContext.stopping` and waited for
(what they finish is still written down), the lease is released and the failure raised. A step that does not end within
`GRACE_SECONDS` keeps the lease until its process ends, so that nobody works beside it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import ValidationError

from data_contracts.config import CampaignConfig
from data_contracts.errors import BessemerError, ConfigError, ContractError, LedgerError, StaleWriter, TooManyInfraFailures
from data_contracts.ledger import CampaignState, Step, curation_view, finished, iteration_finished, ready
from data_contracts.ledger_events import (
    AnyEvent,
    Created,
    Curated,
    Entry,
    Evaluated,
    Extended,
    Holder,
    Paused,
    Published,
    Resumed,
    Scored,
    Sealed,
    Trained,
)
from data_contracts.protocols import Store
from data_contracts.records import CheckpointRef
from infra.ledger_log import TTL_SECONDS, LedgerLog, check_campaign_name, this_process

GRACE_SECONDS = 120.0
_LOG = logging.getLogger(__name__)
_EVENTS: dict[str, type] = {
    "curate": Curated,
    "rollout": Sealed,
    "score": Scored,
    "train": Trained,
    "publish": Published,
    "evaluate": Evaluated,
}


class Stopped(BessemerError, RuntimeError):
    """An iteration ended early because another one failed; the message names that failure."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What a stage is told."""

    state: CampaignState
    """Holds the refs that a stage reads; curate is shown only what it may depend on."""
    epoch: int
    """The lease's epoch: the fencing token for the trainer."""
    until: int
    """Where this advance ends, in iterations."""
    stopping: Callable[[], bool]
    """True once another step failed or the lease was lost: a long stage asks now and then, and raises `Stopped`."""


class Stages(Protocol):
    """The six stages as the campaign sees them: each returns the event that says what it made. Called from any thread."""

    def curate(self, context: StepContext, iteration: int) -> Curated: ...

    def rollout(self, context: StepContext, iteration: int) -> Sealed:
        """On the version `context.state.serving`. Finished group shards of a killed run lie in the store for the taking."""

    def score(self, context: StepContext, iteration: int) -> Scored: ...

    def train(self, context: StepContext, iteration: int) -> Trained:
        """From `context.state.checkpoint(iteration)` to version iteration + 1."""

    def publish(self, context: StepContext, version: int) -> Published: ...

    def evaluate(self, context: StepContext, version: int) -> Evaluated: ...


RunIteration = Callable[[int, Callable[[], None]], None]
"""Called with an iteration and its body, once an iteration and advance; calls the body once (in a Prefect subflow, say)."""
OnEvent = Callable[[Entry, CampaignState], None]
"""Called after every event that this advance wrote, one at a time, in order, with the state after it. What it raises is logged
and changes nothing."""


def call_body(iteration: int, body: Callable[[], None]) -> None:
    """The plain `RunIteration`."""
    body()


def ignore_event(entry: Entry, state: CampaignState) -> None:
    """The plain `OnEvent`."""


# ---------------------------------------------------------------------------------------------------------- create and open


def create_campaign(store: Store, name: str, config: CampaignConfig, base: CheckpointRef) -> LedgerLog:
    """Raises ConfigError when the name is not allowed or taken."""
    log = LedgerLog(store, check_campaign_name(name))
    if not log.create(Created(campaign=name, config=config.model_dump(mode="json"), base=base)):
        raise ConfigError(f"campaign '{name}' exists already", field="name", remedy="Resume it, or choose another name.")
    return log


def open_or_create(store: Store, name: str, config: CampaignConfig, base: Callable[[], CheckpointRef]) -> LedgerLog:
    """The campaign `name`, created when it does not exist (`base` is called only then). Raises ConfigError naming the fields
    when `config` differs from the campaign's own in anything but a larger `iterations`."""
    log = LedgerLog(store, check_campaign_name(name))
    if not log.exists():
        with contextlib.suppress(ConfigError):  # somebody else may create it in this moment
            return create_campaign(store, name, config, base())
    check_same_config(log.state(), config)
    return log


def campaign_config(state: CampaignState) -> CampaignConfig:
    """The configuration that a campaign goes by, extensions included. Raises ConfigError when this release cannot read it."""
    try:
        return CampaignConfig.model_validate({**state.config, "iterations": state.iterations})
    except ValidationError as error:
        raise ConfigError(
            f"the stored configuration of campaign '{state.campaign}' does not fit this release: {error}",
            remedy="Go on with the release that created it, or start a campaign under another name.",
        ) from error


def check_same_config(state: CampaignState, config: CampaignConfig) -> None:
    """Raises ConfigError naming every field of `config` that differs from the campaign's own, but for larger `iterations`."""
    stored = campaign_config(state).model_dump(mode="json")
    given = config.model_dump(mode="json")
    if given["iterations"] >= state.iterations or given["iterations"] == state.config.get("iterations"):
        given["iterations"] = stored["iterations"]
    different = _differences(stored, given, "")
    if different:
        raise ConfigError(
            f"the configuration differs from that of campaign '{state.campaign}' in {'; '.join(different)}",
            field=different[0].partition(":")[0],
            remedy="A campaign keeps its configuration, only iterations may grow: undo the change, or take another name.",
        )


def _differences(stored: Any, given: Any, path: str) -> list[str]:
    if isinstance(stored, dict) and isinstance(given, dict):
        names = sorted(stored.keys() | given.keys())
        return [d for name in names for d in _differences(stored.get(name), given.get(name), f"{path}.{name}".lstrip("."))]
    return [] if stored == given else [f"{path}: {stored!r} there, {given!r} given"]


# ------------------------------------------------------------------------------------------------------------------ advance


def advance(
    log: LedgerLog,
    stages: Stages,
    *,
    until: int | None = None,
    holder: Holder | None = None,
    ttl: float = TTL_SECONDS,
    run_iteration: RunIteration = call_body,
    on_event: OnEvent = ignore_event,
) -> CampaignState:
    """Bring the campaign to `until` iterations (None: its configured number) and return its state.

    A finished campaign is left alone, with a line in the log. Raises CampaignHeld when another advance is at work, StaleWriter
    when one took over meanwhile, else what the first failing stage raised; after TooManyInfraFailures or ContractError the
    ledger says that the campaign is paused and why.
    """
    if until is not None and until < 1:
        raise ConfigError(f"cannot advance to {until} iterations", field="until", remedy="Give 1 or more.")
    state = log.state()
    end = state.iterations if until is None else until
    if finished(state, until=end):
        _LOG.info("campaign '%s' is finished: %d of %d iterations; nothing to do", log.campaign, len(state.trained), end)
        return state
    log.take_lease(holder or this_process("advance"), ttl=ttl)
    driver = _Driver(log, stages, end, run_iteration, on_event)
    reason = "finished"
    try:
        driver.run()
    except BaseException as error:
        reason = type(error).__name__
        raise
    finally:
        if driver.quiet():
            log.release(reason)
        else:
            _LOG.error(
                "campaign '%s' stays held: %s did not stop; it is free when this process ends", log.campaign, driver.running
            )
    return log.known


class _Driver:
    """One advance. `_wake` guards `running` and `_failure`; events are appended under `_appending`, one at a time."""

    def __init__(self, log: LedgerLog, stages: Stages, until: int, run_iteration: RunIteration, on_event: OnEvent) -> None:
        self.log, self.stages, self.until = log, stages, until
        self.run_iteration, self.on_event = run_iteration, on_event
        self.running: set[Step] = set()
        self._wake = threading.Condition()
        self._appending = threading.Lock()
        self._failure: BaseException | None = None
        self._failed: int | None = None  # the iteration it happened in

    def run(self) -> None:
        state = self.log.known
        if self.until > state.iterations:
            self._append(Extended(iterations=self.until))
        if state.paused:
            self._append(Resumed())
        d = state.max_staleness
        todo = [i for i in range(self.until) if not iteration_finished(self.log.known, i, until=self.until)]
        try:
            if d == 0:
                for iteration in todo:
                    self._one_iteration(iteration)
            else:
                self._overlapping(todo, width=d + 1)
        except BaseException as error:  # noqa: BLE001  (raised just below, unless it only follows from an earlier one)
            self._fail(error, None)
        if self._failure is not None:
            raise self._failure

    def quiet(self) -> bool:
        """Whether every step has ended; waits for those that run."""
        with self._wake:
            return self._wake.wait_for(lambda: not self.running, timeout=GRACE_SECONDS)

    def _overlapping(self, todo: list[int], *, width: int) -> None:
        """Iterations in threads, at most `width` at once, in order: i starts when i - width has ended."""
        threads: dict[int, threading.Thread] = {}
        for iteration in todo:
            before = threads.get(iteration - width)
            while before is not None and before.is_alive():
                before.join(0.2)
            if self._failure is not None:
                break
            threads[iteration] = self._thread(f"iteration-{iteration}", self._one_iteration, iteration)
        for thread in threads.values():
            thread.join()

    def _thread(self, name: str, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                target(*arguments)
            except BaseException as error:  # noqa: BLE001  (kept, and raised by `run` in the caller's thread)
                self._fail(error, None)

        thread = threading.Thread(target=copy_context().run, args=(guarded,), name=name, daemon=True)
        thread.start()
        return thread

    def _one_iteration(self, iteration: int) -> None:
        self.run_iteration(iteration, lambda: self._body(iteration))
        if self._failure is None and not iteration_finished(self.log.known, iteration, until=self.until):
            raise LedgerError(f"run_iteration returned before iteration {iteration} was finished: it has to call its body")

    def _body(self, iteration: int) -> None:
        """Run the steps of one iteration as they become ready."""
        mine: list[threading.Thread] = []
        while steps := self._claim(iteration):
            if len(steps) == 1 and not self.log.known.max_staleness and not any(thread.is_alive() for thread in mine):
                self._run(steps[0])
            else:
                mine += [self._thread(str(step), self._run, step) for step in steps]
        for thread in mine:
            thread.join()
        if self._failure is not None and self._failed == iteration:
            raise self._failure
        if self._failure is not None:
            raise Stopped(f"iteration {iteration} stopped: {self._failure}") from self._failure

    def _claim(self, iteration: int) -> list[Step]:
        """Wait until steps of this iteration can start, and mark them running; empty when it is finished or all has to stop."""
        with self._wake:
            while True:
                if self.log.lost.is_set() and self._failure is None:
                    self._failure, self._failed = self._taken_over(), iteration
                if self._failure is not None or iteration_finished(self.log.known, iteration, until=self.until):
                    return []
                steps = self._startable(iteration)
                if steps:
                    self.running.update(steps)
                    return steps
                self._wake.wait(1.0)

    def _startable(self, iteration: int) -> list[Step]:
        """Publishing asks the trainer for log-probabilities: it goes before training, never beside it."""
        everything = ready(self.log.known, until=self.until) - self.running
        kinds = {step.kind for step in self.running}
        blocked = {"publish"} if "train" in kinds else set()
        if "publish" in kinds or any(step.kind == "publish" for step in everything):
            blocked |= {"train"}
        return sorted((step for step in everything if step.iteration == iteration and step.kind not in blocked), key=str)

    def _run(self, step: Step) -> None:
        try:
            self._append(self._call(step))
        except (TooManyInfraFailures, ContractError) as error:
            self._fail(error, step.iteration)
            with contextlib.suppress(StaleWriter):
                self._append(Paused(iteration=step.iteration, reason=str(error)))
            raise
        except BaseException as error:
            self._fail(error, step.iteration)
            raise
        finally:
            with self._wake:
                self.running.discard(step)
                self._wake.notify_all()

    def _call(self, step: Step) -> AnyEvent:
        state = self.log.known
        context = StepContext(
            state=curation_view(state, step.number) if step.kind == "curate" else state,
            epoch=self.log.epoch or 0,
            until=self.until,
            stopping=lambda: self._failure is not None or self.log.lost.is_set(),
        )
        event: AnyEvent = getattr(self.stages, step.kind)(context, step.number)
        if not isinstance(event, _EVENTS[step.kind]):
            raise LedgerError(f"stage {step} has to return {_EVENTS[step.kind].__name__}, not {type(event).__name__}")
        return event

    def _append(self, event: AnyEvent) -> None:
        with self._appending:
            entry = self.log.append(event)
            try:
                self.on_event(entry, self.log.known)
            except Exception:  # noqa: BLE001  (whoever watches, a closed terminal say, never stops training: rule 10)
                _LOG.exception(
                    "a watcher of campaign '%s' failed at event %d; the campaign goes on", self.log.campaign, entry.seq
                )
        with self._wake:
            self._wake.notify_all()

    def _fail(self, error: BaseException, iteration: int | None) -> None:
        with self._wake:
            if self._failure is None:
                asked = isinstance(error, Stopped) and self.log.lost.is_set()  # a stage that obeyed: name why it had to
                self._failure, self._failed = self._taken_over() if asked else error, iteration
            self._wake.notify_all()

    def _taken_over(self) -> StaleWriter:
        return StaleWriter(f"campaign '{self.log.campaign}' was taken over")

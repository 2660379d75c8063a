"""The campaign as a pure state machine: `fold` events into a state, `ready` says which steps may run now.

No files, clocks or processes: infra/ledger_log.py stores the events, tasks/campaign.py runs the steps. (Shape after
dask.distributed's worker state machine: events in, instructions out.)

One engine pool serves one policy version at a time, so publishing is what waits: a rollout runs on the version that serves,
and version v is published only when no rollout or evaluation still needs an older one. With staleness d, iteration i is rolled
out by version max(0, i-d), and by a newer one only after an advance had ended and drained its pipeline. That makes the version
of every batch a function of the ledger, hence resumable to equal tables.

| step | needs |
|---|---|
| curate i | curated i-1; scored i-1-d (it may look at no later scores: `curation_view`) |
| rollout i | curated i, sealed i-1, a version of at least i-d serving; with d=0 also the evaluation of i when due |
| score i | sealed i |
| train i | scored i, trained i-1, version 0 evaluated (the baseline) |
| publish v | trained v-1, published v-1, the evaluation of v-1 when due; sealed v+d-1, or all that this advance rolls out |
| evaluate v | v serving; due are 0, every n-th and the last |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from data_contracts.errors import LedgerError
from data_contracts.ledger_events import (
    Created,
    Curated,
    Entry,
    Evaluated,
    Extended,
    Holder,
    LeaseReleased,
    LeaseTaken,
    Paused,
    Published,
    Registered,
    Resumed,
    Scored,
    Sealed,
    Trained,
)
from data_contracts.records import CheckpointRef, Record

StepKind = Literal["curate", "rollout", "score", "train", "publish", "evaluate"]


class Step(Record, frozen=True, kw_only=True):
    """One step. `number` is the iteration of curate, rollout, score and train, and the version of publish and evaluate."""

    kind: StepKind
    number: int

    @property
    def iteration(self) -> int:
        """The iteration a step belongs to for people: version v is made, published and evaluated in iteration v-1."""
        return max(0, self.number - 1) if self.kind in ("publish", "evaluate") else self.number

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


@dataclass(kw_only=True)
class CampaignState:
    """What the events add up to. A value: `fold` never changes one that it was given. Dicts go by iteration or version."""

    campaign: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    base: CheckpointRef | None = None
    iterations: int = 0
    """Where a plain advance ends."""
    next_seq: int = 0
    epoch: int = 0
    holder: Holder | None = None
    """None: nobody holds the lease."""
    since: float = 0.0
    curated: dict[int, Curated] = field(default_factory=dict)
    sealed: dict[int, Sealed] = field(default_factory=dict)
    scored: dict[int, Scored] = field(default_factory=dict)
    trained: dict[int, Trained] = field(default_factory=dict)
    published: dict[int, Published] = field(default_factory=dict)
    evaluated: dict[int, Evaluated] = field(default_factory=dict)
    registered: dict[int, tuple[str, ...]] = field(default_factory=dict)
    paused: Paused | None = None

    @property
    def max_staleness(self) -> int:
        return int(self.config.get("max_staleness", 0))

    @property
    def serving(self) -> int | None:
        """The version that was published last; None before the first."""
        return len(self.published) - 1 if self.published else None

    def checkpoint(self, version: int) -> CheckpointRef:
        """The weights of a version. Raises LedgerError when it was never trained."""
        if version == 0 and self.base is not None:
            return self.base
        trained = self.trained.get(version - 1)
        if trained is None:
            raise LedgerError(f"campaign '{self.campaign}' has no version {version}; its newest is {len(self.trained)}")
        return trained.result.checkpoint

    def due(self, version: int, *, until: int) -> bool:
        """Whether `version` is one that gets evaluated in an advance up to `until` iterations."""
        every = int(self.config.get("evaluate", {}).get("every", 1))
        return version <= until and (version % every == 0 or version == until)

    def copy(self) -> CampaignState:
        return replace(
            self,
            curated=dict(self.curated),
            sealed=dict(self.sealed),
            scored=dict(self.scored),
            trained=dict(self.trained),
            published=dict(self.published),
            evaluated=dict(self.evaluated),
            registered=dict(self.registered),
        )


def fold(entries: Iterable[Entry], start: CampaignState | None = None) -> CampaignState:
    """The state after `entries`, which follow on `start`. Raises LedgerError for the first that contradicts what was before."""
    state = start.copy() if start else CampaignState()
    for entry in entries:
        problem = _apply(state, entry)
        if problem:
            raise LedgerError(
                f"ledger of campaign '{state.campaign}', event {entry.seq} ({type(entry.event).__name__}): {problem}"
            )
        state.next_seq += 1
    return state


def curation_view(state: CampaignState, iteration: int) -> CampaignState:
    """What curating `iteration` may depend on: scores up to iteration-1-d, however far the rest has come."""
    last = iteration - 1 - state.max_staleness
    return replace(
        state,
        curated={i: event for i, event in state.curated.items() if i < iteration},
        sealed={i: event for i, event in state.sealed.items() if i <= last},
        scored={i: event for i, event in state.scored.items() if i <= last},
        trained={},
        published={},
        evaluated={},
        registered={},
    )


def ready(state: CampaignState, *, until: int) -> frozenset[Step]:
    """The steps that may run now to bring the campaign to `until` iterations; empty when paused or finished."""
    if state.paused or state.base is None:
        return frozenset()
    d, serving = state.max_staleness, state.serving
    found: set[Step] = set()
    i = len(state.curated)
    if i < until and (i - 1 - d < 0 or i - 1 - d in state.scored):
        found.add(Step(kind="curate", number=i))
    i = len(state.sealed)
    if i < until and i in state.curated and serving is not None and serving >= i - d and not (d == 0 and _owed(state, until)):
        found.add(Step(kind="rollout", number=i))
    for i in range(len(state.trained), min(len(state.sealed), until)):
        if i not in state.scored:
            found.add(Step(kind="score", number=i))
    i = len(state.trained)
    if i < until and i in state.scored and 0 in state.evaluated:
        found.add(Step(kind="train", number=i))
    v = len(state.published)
    made = v == 0 or (v <= until and v - 1 in state.trained)
    unneeded = v == 0 or len(state.sealed) >= min(v + d, until)  # the older version, by rollouts to come
    if made and unneeded and not _owed(state, until):
        found.add(Step(kind="publish", number=v))
    if serving is not None and _owed(state, until):
        found.add(Step(kind="evaluate", number=serving))
    return frozenset(found)


def finished(state: CampaignState, *, until: int) -> bool:
    """Whether nothing is left to do up to `until` iterations: all trained, the last version serving and evaluated."""
    return len(state.trained) >= until and len(state.published) > until and not _owed(state, until)


def iteration_finished(state: CampaignState, iteration: int, *, until: int) -> bool:
    """Whether every step that belongs to `iteration` is done."""
    serving, version = state.serving, iteration + 1
    return serving is not None and (serving > version or (serving == version and not _owed(state, until)))


def _owed(state: CampaignState, until: int) -> bool:
    """Whether the version that serves still has to be evaluated."""
    serving = state.serving
    return serving is not None and serving not in state.evaluated and state.due(serving, until=until)


def _apply(state: CampaignState, entry: Entry) -> str | None:
    """Change `state` by one entry; what is wrong with it, or None."""
    event = entry.event
    if entry.seq != state.next_seq:
        return f"sequence number {entry.seq} where {state.next_seq} was expected"
    if isinstance(event, Created):
        if entry.seq != 0:
            return "a campaign is created once"
        state.campaign, state.config, state.base = event.campaign, event.config, event.base
        state.iterations = int(event.config.get("iterations", 1))
        return "the base checkpoint has to be version 0" if event.base.version != 0 else None
    if entry.seq == 0:
        return "the first event has to be Created"
    if isinstance(event, LeaseTaken):
        if entry.epoch != state.epoch + 1:
            return f"epoch {entry.epoch} where {state.epoch + 1} was expected"
        state.epoch, state.holder, state.since = entry.epoch, event.holder, event.since
        return None
    if entry.epoch != state.epoch or state.holder is None:
        return f"written under epoch {entry.epoch}, but the lease is {'free' if state.holder is None else f'at {state.epoch}'}"
    return _step_event(state, event) if not _housekeeping(state, event) else None


def _housekeeping(state: CampaignState, event: Any) -> bool:
    if isinstance(event, LeaseReleased):
        state.holder = None
    elif isinstance(event, Paused):
        state.paused = event
    elif isinstance(event, Resumed):
        state.paused = None
    else:
        return False
    return True


def _step_event(state: CampaignState, event: Any) -> str | None:
    match event:
        case Extended():
            if event.iterations <= state.iterations:
                return f"iterations may only grow, from {state.iterations} to more than that, not to {event.iterations}"
            state.iterations = event.iterations
        case Registered():
            if event.version > len(state.trained):
                return f"version {event.version} does not exist yet"
            state.registered[event.version] = (*state.registered.get(event.version, ()), event.name)
        case _:
            missing = _missing_input(state, event)
            if missing:
                return missing
            table, number = _table(state, event)
            table[number] = event
    return None


def _table(state: CampaignState, event: Any) -> tuple[dict[int, Any], int]:
    match event:
        case Curated():
            return state.curated, event.iteration
        case Sealed():
            return state.sealed, event.iteration
        case Scored():
            return state.scored, event.iteration
        case Trained():
            return state.trained, event.iteration
        case Published():
            return state.published, event.version
        case _:
            return state.evaluated, event.version


def _missing_input(state: CampaignState, event: Any) -> str | None:
    """Why a step's event cannot follow: done already, or before its inputs."""
    table, n = _table(state, event)
    d, serving = state.max_staleness, state.serving
    if n in table:
        return f"{n} is done already"
    in_order = n == len(table)
    rules: list[tuple[bool, str]]
    match event:
        case Curated():
            rules = [
                (in_order, "the one before is not curated"),
                (n - 1 - d < 0 or n - 1 - d in state.scored, "scores are missing"),
            ]
        case Sealed():
            rules = [(in_order, "the one before is not sealed"), (n in state.curated, "nothing was curated for it")]
            rules += [(serving is not None and serving >= n - d, f"version {serving} serves, older than {n} - {d}")]
        case Scored():
            rules = [(n in state.sealed, "its batch is not sealed")]
        case Trained():
            got = event.result.checkpoint.version
            rules = [(in_order, "the one before is not trained"), (n in state.scored, "its batch is not scored")]
            rules += [(0 in state.evaluated, "version 0 is not evaluated"), (got == n + 1, f"its checkpoint is version {got}")]
        case Published():
            rules = [(in_order, "the one before is not published"), (n == 0 or n - 1 in state.trained, "it was not trained")]
            rules += [(event.result.version == n, f"its proof is of version {event.result.version}")]
        case _:
            rules = [(n == serving, f"version {serving} serves")]
    return next((f"{n} cannot follow: {why}" for holds, why in rules if not holds), None)

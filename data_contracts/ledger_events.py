"""What a campaign's ledger holds: one small object per event, in a numbered envelope.

Events say that a step is done and name what it made (refs, never payloads). No event has a wall-clock time except
`LeaseTaken.since`, which is for people and for the age of a lease; the intervals inside results are outside every digest.
"""

from __future__ import annotations

from typing import Any

import msgspec

from data_contracts.errors import LedgerError
from data_contracts.protocols import to_json
from data_contracts.records import (
    SCHEMA_VERSION,
    CheckpointRef,
    EpisodesRef,
    EvalRef,
    ProblemsRef,
    PublishResult,
    Record,
    ScoresRef,
    TrainResult,
)


class Holder(Record, frozen=True, kw_only=True):
    """Who advances a campaign. `machine` tells boots and process namespaces of one host apart; `pid_started` is seconds
    since the Unix epoch and tells a process from a later one with its number."""

    run: str
    """Name or id of the flow run (or "cli")."""
    host: str
    machine: str
    pid: int
    pid_started: float

    def __str__(self) -> str:
        return f"run {self.run} (process {self.pid} on {self.host})"


class Event(Record, frozen=True, kw_only=True, tag_field="event"):
    """Base of every ledger event."""


class Created(Event, frozen=True, kw_only=True, tag="created"):
    """Sequence number 0. `config` is CampaignConfig as JSON builtins; `base` is policy version 0."""

    campaign: str
    config: dict[str, Any]
    base: CheckpointRef
    schema_version: int = SCHEMA_VERSION


class LeaseTaken(Event, frozen=True, kw_only=True, tag="lease_taken"):
    """A new epoch: every writer of an older one is stale from here on. `since` is seconds since the Unix epoch."""

    holder: Holder
    since: float


class LeaseReleased(Event, frozen=True, kw_only=True, tag="lease_released"):
    """The holder went in good order."""

    reason: str = "finished"


class Extended(Event, frozen=True, kw_only=True, tag="extended"):
    """The campaign goes on to `iterations`, the one figure of its configuration that may grow."""

    iterations: int


class Curated(Event, frozen=True, kw_only=True, tag="curated"):
    """The problems of one iteration, and the sampler's state after drawing them."""

    iteration: int
    problems: ProblemsRef
    sampler_state: dict[str, Any] = {}


class Sealed(Event, frozen=True, kw_only=True, tag="sealed"):
    """The batch of one iteration. `counts` are group counts by disposition and what else people want to see."""

    iteration: int
    episodes: EpisodesRef
    counts: dict[str, int] = {}


class Scored(Event, frozen=True, kw_only=True, tag="scored"):
    iteration: int
    scores: ScoresRef


class Trained(Event, frozen=True, kw_only=True, tag="trained"):
    """The result's checkpoint is version `iteration` + 1 (also when the batch had no signal and the weights did not move)."""

    iteration: int
    result: TrainResult


class Published(Event, frozen=True, kw_only=True, tag="published"):
    """From here on the replicas serve `version`, proven."""

    version: int
    result: PublishResult


class Evaluated(Event, frozen=True, kw_only=True, tag="evaluated"):
    """`means` are held-out mean rewards by domain."""

    version: int
    report: EvalRef
    means: dict[str, float] = {}


class Registered(Event, frozen=True, kw_only=True, tag="registered"):
    """The registry names `version` as `name`: retention keeps it."""

    version: int
    name: str


class Paused(Event, frozen=True, kw_only=True, tag="paused"):
    """A stage stopped the campaign for a person to look at; the next advance resumes it."""

    iteration: int
    reason: str


class Resumed(Event, frozen=True, kw_only=True, tag="resumed"):
    """A later advance took the campaign up again."""


AnyEvent = (
    Created
    | LeaseTaken
    | LeaseReleased
    | Extended
    | Curated
    | Sealed
    | Scored
    | Trained
    | Published
    | Evaluated
    | Registered
    | Paused
    | Resumed
)


class Entry(Record, frozen=True, kw_only=True):
    """The envelope: `seq` counts from 0 without gaps, `epoch` is the lease's, `writer` is unique to a process's log handle."""

    seq: int
    epoch: int
    writer: str
    event: AnyEvent


def encode(entry: Entry) -> bytes:
    """Canonical JSON of an entry."""
    return to_json(entry)


def decode(data: bytes, *, key: str) -> Entry:
    """Raises LedgerError naming the object and the offending field."""
    try:
        return msgspec.json.decode(data, type=Entry)
    except msgspec.DecodeError as error:
        raise LedgerError(
            f"{key} is not a ledger entry: {error}; the ledger is written by Bessemer only: restore the object, or start a "
            "campaign under another name"
        ) from error

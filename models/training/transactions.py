"""What makes training a transaction: keys that answer from record, epochs that only rise, and the lineage for replays.

| object below `campaigns/<campaign>/` | written |
|---|---|
| `training/<key>.job.json` | before the work starts (TrainJob) |
| `checkpoints/v<version>/` | when the work is done, in one step, with the answer in `record.json` |
| `training/<key>.json` | after that (TrainResult): from now on the key answers from here |
| `training-epochs/<epoch>.json` | when a writer of that epoch is first seen |

Killed before the checkpoint: the job runs again from its parent. Killed between checkpoint and record: the record is rebuilt
from the checkpoint. Every object is put-if-absent, so two trainers that race end in one answer. No torch here.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import ValidationError

from data_contracts.config import AlgorithmConfig, TrainConfig
from data_contracts.errors import ConfigError, StaleWriter, TrainerError
from data_contracts.protocols import Store, to_json
from data_contracts.records import CheckpointRef, Interval, Record, TrainJob, TrainOutcome, TrainResult
from models.training.checkpoint import MANIFEST, RECORD, Manifest, reference


class Settings(Record, frozen=True, kw_only=True):
    """The typed form of `TrainJob.train`."""

    train: TrainConfig
    algorithm: AlgorithmConfig
    temperature: float


class Answer(Record, frozen=True, kw_only=True):
    """`record.json` beside a checkpoint: what TrainResult says besides the checkpoint itself."""

    key: str
    outcome: TrainOutcome
    metrics: dict[str, float]
    intervals: tuple[Interval, ...] = ()


def settings(job: TrainJob) -> Settings:
    """Parse a job's settings. Raises ConfigError naming the field."""
    unknown = sorted(set(job.train) - {"train", "algorithm", "temperature"})
    if unknown:
        raise ConfigError("is unknown", field=f"train.{unknown[0]}", remedy="Send train, algorithm and temperature")
    temperature = job.train.get("temperature", 1.0)
    if not isinstance(temperature, (int, float)) or not 0 < temperature < float("inf"):
        raise ConfigError(f"is {temperature!r}", field="rollout.temperature", remedy="Training needs a temperature above 0")
    return Settings(
        train=_section(TrainConfig, job.train.get("train", {}), "train"),
        algorithm=_section(AlgorithmConfig, job.train.get("algorithm", {}), "algorithm"),
        temperature=float(temperature),
    )


def _section(kind: Any, values: Any, name: str) -> Any:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join([name, *(str(part) for part in first["loc"])])
        raise ConfigError(first["msg"], field=place, remedy="Fix the profile") from error


# ------------------------------------------------------------------------------------------------------------------- epochs


def highest_epoch(store: Store, campaign: str) -> int:
    """The highest epoch any trainer has seen for a campaign; -1 before the first."""
    keys = store.list(f"campaigns/{campaign}/training-epochs")
    return max((int(key.rsplit("/", 1)[1].removesuffix(".json")) for key in keys), default=-1)


def fence(store: Store, campaign: str, epoch: int) -> None:
    """Remember `epoch`; raise StaleWriter when a higher one was seen."""
    store.put_if_absent(f"campaigns/{campaign}/training-epochs/{epoch:08d}.json", to_json({"epoch": epoch}))
    highest = highest_epoch(store, campaign)
    if epoch < highest:
        raise StaleWriter(f"campaign '{campaign}' has moved on: this writer's epoch is {epoch}, {highest} was seen; stop it")


# --------------------------------------------------------------------------------------------------------------------- keys


def _result_key(job_campaign: str, key: str) -> str:
    return f"campaigns/{job_campaign}/training/{key}.json"


def remember(store: Store, job: TrainJob) -> None:
    """Store the job before the work starts, so that a later replay can repeat it."""
    store.put_if_absent(f"campaigns/{job.campaign}/training/{job.key}.job.json", to_json(job))


def finished(store: Store, job: TrainJob) -> TrainResult | None:
    """The recorded answer of a job's key, completing a record that a kill left open; None when it has to be done.

    Raises TrainerError when another job's checkpoint lies where this one's belongs.
    """
    if store.exists(_result_key(job.campaign, job.key)):
        return msgspec.json.decode(store.get(_result_key(job.campaign, job.key)), type=TrainResult)
    if not store.exists(f"{job.checkpoint_uri}/{MANIFEST}"):
        return None
    manifest = msgspec.json.decode(store.get(f"{job.checkpoint_uri}/{MANIFEST}"), type=Manifest)
    if manifest.key != job.key:
        raise TrainerError(
            f"{job.checkpoint_uri} was trained by job {manifest.key}, not {job.key}; "
            "the batch or the parent changed since: remove that checkpoint if the ledger does not name it"
        )
    return record(store, job)


def record(store: Store, job: TrainJob) -> TrainResult:
    """Write the answer of a published checkpoint under its key; the first writer's answer is returned."""
    answer = msgspec.json.decode(store.get(f"{job.checkpoint_uri}/{RECORD}"), type=Answer)
    result = TrainResult(
        key=job.key,
        checkpoint=reference(store, job.checkpoint_uri),
        outcome=answer.outcome,
        metrics=answer.metrics,
        intervals=answer.intervals,
    )
    store.put_if_absent(_result_key(job.campaign, job.key), to_json(result))
    return msgspec.json.decode(store.get(_result_key(job.campaign, job.key)), type=TrainResult)


# ------------------------------------------------------------------------------------------------------------------ lineage


def lineage(store: Store, campaign: str) -> dict[str, TrainJob]:
    """Manifest sha256 of every trained checkpoint of a campaign -> the job that made it."""
    jobs: dict[str, TrainJob] = {}
    keys = set(store.list(f"campaigns/{campaign}/training"))
    for name in keys:
        job_name = name.removesuffix(".json") + ".job.json"
        if not name.endswith(".job.json") and job_name in keys:
            result = msgspec.json.decode(store.get(name), type=TrainResult)
            jobs[result.checkpoint.sha256] = msgspec.json.decode(store.get(job_name), type=TrainJob)
    return jobs


def replay_plan(
    store: Store, parent: CheckpointRef, jobs: dict[str, TrainJob], has_state: Any
) -> tuple[CheckpointRef, list[TrainJob]]:
    """Where to start and which jobs to repeat, oldest first, to hold `parent` with its exact optimizer state.

    `has_state(ref)` tells whether a checkpoint carries a full state. A checkpoint that no job made (a base) starts with a fresh
    optimizer. Raises TrainerError when an ancestor that is needed, or the record of the job that made one, is gone.
    """
    chain: list[TrainJob] = []
    ref = parent
    while ref.sha256 in jobs and not has_state(ref):
        chain.append(jobs[ref.sha256])
        ref = chain[-1].parent
    if not store.exists(f"{ref.uri}/{MANIFEST}"):
        raise TrainerError(f"to resume from {parent.uri}, {ref.uri} is needed (the last full state), but it is gone")
    key = msgspec.json.decode(store.get(f"{ref.uri}/{MANIFEST}"), type=Manifest).key
    if key is not None and not has_state(ref):
        raise TrainerError(
            f"to resume from {parent.uri}, the record of job {key} is needed, which made {ref.uri}: without it the optimizer "
            "would start afresh in silence; restore the campaign's objects below training/"
        )
    return ref, chain[::-1]

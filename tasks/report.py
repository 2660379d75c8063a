"""What people see of one iteration: overall metrics, per-domain figures, and where the wall time went.

Overhead is the wall time of an iteration minus the union of its useful intervals (sampling, environment, grading, train step,
publish), as the run itself recorded them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from data_contracts.protocols import Store
from data_contracts.records import (
    BatchManifest,
    EpisodesRef,
    EpisodeTelemetry,
    GroupShard,
    Interval,
    PublishResult,
    TrainResult,
)
from data_contracts.tables import read_manifest, read_telemetry


class IterationReport(NamedTuple):
    """`metrics` by name; `per_domain` domain -> figure -> value."""

    metrics: dict[str, float]
    per_domain: dict[str, dict[str, float]]


def union_seconds(intervals: Iterable[Interval], *, start: float, stop: float) -> float:
    """Length of the union of `intervals` clipped to [start, stop], seconds."""
    total, reached = 0.0, start
    for begin, end in sorted((max(i.start, start), min(i.stop, stop)) for i in intervals):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total


def iteration_report(
    episodes: EpisodesRef,
    result: TrainResult,
    published: PublishResult | None,
    *,
    store: Store,
    started: float | None,
    finished: float,
) -> IterationReport:
    """Metrics of one iteration whose wall time was [started, finished], Unix seconds; without a start (another advance made
    the batch) nothing is said about times."""
    manifest = read_manifest(store, episodes)
    graded = [*manifest.shards, *manifest.discarded]
    telemetry = [row for shard in graded if shard.telemetry_uri for row in _telemetry(store, shard)]
    intervals = [interval for row in telemetry for interval in row.intervals]
    intervals += [*result.intervals, *(published.intervals if published else ())]
    return IterationReport(
        metrics={
            **{f"train/{name}": value for name, value in result.metrics.items()},
            **_counts(manifest),
            **(_times(intervals, started=started, finished=finished) if started is not None else {}),
            "rollout/sampled_tokens": float(sum(shard.sampled_tokens for shard in graded)),
        },
        per_domain=_per_domain(graded),
    )


def _telemetry(store: Store, shard: GroupShard) -> tuple[EpisodeTelemetry, ...]:
    if not store.exists(shard.telemetry_uri):  # an attempt that died between the shard and its telemetry
        return ()
    return read_telemetry(store.get(shard.telemetry_uri), file=shard.telemetry_uri)


def _counts(manifest: BatchManifest) -> dict[str, float]:
    graded = [*manifest.shards, *manifest.discarded]
    rewards = [reward for shard in graded for reward in shard.rewards_G]
    outcomes = [outcome for shard in graded for outcome in shard.outcomes_G]
    return {
        "reward/mean": sum(rewards) / len(rewards) if rewards else 0.0,
        "rollout/episodes": float(len(outcomes)),
        "rollout/groups_sealed": float(len(manifest.shards)),
        "rollout/groups_zero_variance": float(_having(graded, "zero_variance")),
        "rollout/groups_infra_failure": float(_having(graded, "infra_failure")),
        "rollout/groups_quarantined": float(_having(graded, "quarantined")),
        "rollout/policy_failure_share": outcomes.count("policy_failure") / len(outcomes) if outcomes else 0.0,
    }


def _having(shards: Sequence[GroupShard], disposition: str) -> int:
    return sum(shard.disposition == disposition for shard in shards)


def _times(intervals: Sequence[Interval], *, started: float, finished: float) -> dict[str, float]:
    wall = max(finished - started, 1e-9)
    by_kind: dict[str, list[Interval]] = defaultdict(list)
    for interval in intervals:
        by_kind[interval.kind].append(interval)
    useful = union_seconds(intervals, start=started, stop=finished)
    return {
        **{f"seconds/{kind}": union_seconds(some, start=started, stop=finished) for kind, some in sorted(by_kind.items())},
        "seconds/wall": wall,
        "overhead/seconds": wall - useful,
        "overhead/share": 1.0 - useful / wall,
    }


def _per_domain(graded: Sequence[GroupShard]) -> dict[str, dict[str, float]]:
    shards: dict[str, list[GroupShard]] = defaultdict(list)
    for shard in graded:
        shards[shard.domain].append(shard)
    figures = {}
    for name, some in sorted(shards.items()):
        rewards = [reward for shard in some for reward in shard.rewards_G]
        figures[name] = {
            "groups": float(len(some)),
            "episodes": float(len(rewards)),
            "mean_reward": sum(rewards) / len(rewards) if rewards else 0.0,
            "zero_variance_groups": float(_having(some, "zero_variance")),
            "sampled_tokens": float(sum(shard.sampled_tokens for shard in some)),
        }
    return figures

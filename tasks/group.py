"""One group, on a Dask worker: its G episodes side by side, graded, scored, and sealed as one shard.

`run_group` is the coroutine Dask schedules. It writes the shard put-if-absent (the first sealed attempt wins, so a group run
again after a lost worker does no harm) and answers with the small `GroupShard`. A group with an infrastructure failure
leaves nothing behind; the driver decides whether it is run again. Free of Prefect and Dask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from data_contracts.errors import InfraError
from data_contracts.gate import check_group
from data_contracts.protocols import Store, to_json
from data_contracts.records import Disposition, Episode, EpisodeTelemetry, Failure, GroupShard, InfraCause
from data_contracts.tables import digest, read_group, write_group, write_telemetry
from models.rewards import score_group
from tasks.episode import STEP_SLACK_SECONDS, GroupJob, lost_episode, run_episode
from tasks.runtime import Runtime, WorkerSpec, runtime_for


async def run_group(job: GroupJob, spec: WorkerSpec) -> GroupShard:
    """Run, grade, score and seal one group. Infrastructure failures are reported in the shard, not raised."""
    try:
        runtime = await runtime_for(spec)
        existing = await asyncio.to_thread(find_shard, runtime.store, job.shard_uri)
        if existing is not None:
            return existing
        era = await runtime.backend.era()  # before a token is sampled
    except InfraError as error:
        return infra_shard(job, error.cause, error.detail)
    pairs = await _run_members(job, runtime)
    episodes = tuple(episode for episode, _ in pairs)
    broken = [episode for episode in episodes if episode.outcome == "infra_failure"]
    if broken and broken[0].failure is not None:
        failure = await _blamed(runtime, era, broken[0].failure)
        return infra_shard(job, failure.cause, failure.detail)
    return await asyncio.to_thread(_seal, job, runtime, episodes, [telemetry for _, telemetry in pairs])


async def _blamed(runtime: Runtime, era: int, failure: Failure) -> Failure:
    """`failure`, or the outage behind it: the backend is away now, or was while the group ran."""
    try:
        now = await runtime.backend.era()
    except InfraError as error:
        return Failure(cause=error.cause, detail=f"{error.detail}; then {failure.cause}: {failure.detail}")
    if now != era and failure.cause != "sandbox_unreachable":
        return Failure(cause="sandbox_unreachable", detail=f"the backend was away; then {failure.cause}: {failure.detail}")
    return failure


def find_shard(store: Store, shard_uri: str) -> GroupShard | None:
    """The sealed shard of a group, when an earlier attempt finished it."""
    key = f"{shard_uri}.json"
    return msgspec.json.decode(store.get(key), type=GroupShard) if store.exists(key) else None


async def _run_members(job: GroupJob, runtime: Runtime) -> list[tuple[Episode, EpisodeTelemetry]]:
    members = [asyncio.create_task(run_episode(job, member, runtime)) for member in range(job.group_size)]
    try:
        done, late = await asyncio.wait(members, timeout=job.group_seconds)
    finally:
        for task in members:
            task.cancel()  # only the late ones, or all when this group itself was cancelled
    if late:
        await asyncio.wait(late, timeout=STEP_SLACK_SECONDS)
    pairs = []
    for member, task in enumerate(members):
        if task in done:
            pairs.append(task.result())
        else:
            detail = f"the group was not finished after {job.group_seconds:g} s"
            pairs.append(lost_episode(job, member, Failure(cause="group_deadline", detail=detail)))
    return pairs


def _seal(job: GroupJob, runtime: Runtime, episodes: tuple[Episode, ...], telemetry: Sequence[EpisodeTelemetry]) -> GroupShard:
    """Write, check the row contract, score. Runs in a thread: Parquet stays off the event loop.

    When another attempt wrote the shard first, its bytes count and ours are forgotten.
    """
    uri = f"{job.shard_uri}.parquet"
    data = write_group(episodes)
    if runtime.store.put_if_absent(uri, data):
        runtime.store.put(f"{job.shard_uri}.telemetry.json", write_telemetry(telemetry))
    else:
        data = runtime.store.get(uri)
        episodes = read_group(data)
    shard = _describe(job, runtime, episodes, uri=uri, sha=digest(data))
    runtime.store.put_if_absent(f"{job.shard_uri}.json", to_json(shard))
    return shard


def _describe(job: GroupJob, runtime: Runtime, episodes: tuple[Episode, ...], *, uri: str, sha: str) -> GroupShard:
    violations = check_group(episodes)
    rewards = () if violations else tuple(score.reward for score in score_group(runtime.reward, episodes))
    disposition: Disposition = "kept"
    if violations:
        disposition = "quarantined"
    elif not job.keep_equal and len(set(rewards)) == 1:
        disposition = "zero_variance"
    return GroupShard(
        group_id=job.group_id,
        problem_id=job.problem.id,
        domain=job.problem.domain,
        order=job.order,
        uri=uri,
        sha256=sha,
        rows=len(episodes),
        telemetry_uri=f"{job.shard_uri}.telemetry.json",
        disposition=disposition,
        rewards_G=rewards,
        outcomes_G=tuple(episode.outcome for episode in episodes),
        sampled_tokens=sum(sum(episode.loss_mask_T) for episode in episodes),
        reason="; ".join(str(violation) for violation in violations[:3]),
    )


def infra_shard(job: GroupJob, cause: InfraCause, detail: str) -> GroupShard:
    return GroupShard(
        group_id=job.group_id,
        problem_id=job.problem.id,
        domain=job.problem.domain,
        order=job.order,
        uri="",
        sha256="",
        rows=0,
        telemetry_uri="",
        disposition="infra_failure",
        rewards_G=(),
        outcomes_G=(),
        sampled_tokens=0,
        reason=f"{cause}: {detail}",
    )

"""Rollout: curated problems in, a sealed batch of graded groups out.

The driver submits a bounded window of group coroutines to Dask and widens it as groups are discarded. It owns what workers
cannot: the deadline of every group seen from outside, retries after infrastructure failures (the engine is made to serve and
prove its version again first), the share of dropped groups, and sealing. Groups that an earlier, killed run finished lie in the
store and are taken over.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from data_contracts.config import RolloutConfig
from data_contracts.errors import TooManyInfraFailures
from data_contracts.protocols import Engine, Store
from data_contracts.records import (
    BatchManifest,
    CheckpointRef,
    EpisodesRef,
    GroupShard,
    Problem,
    ProblemsRef,
)
from data_contracts.tables import put_manifest, read_problem_set
from tasks.batch_plan import BatchPlan
from tasks.episode import GroupJob
from tasks.group import find_shard, run_group
from tasks.group_pool import GroupPool
from tasks.runtime import WorkerSpec

OnProgress = Callable[[int, int, int], None]
"""Called with (finished groups, groups wanted, sampled tokens)."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The policy a rollout samples from. `oldest` is the lowest version a token may carry (staleness)."""

    engine: Engine
    checkpoint: CheckpointRef
    parent: CheckpointRef | None
    oldest: int

    def ensure(self, campaign: str) -> None:
        self.engine.ensure_serving(self.checkpoint, campaign=campaign, parent=self.parent)


def rollout(
    config: RolloutConfig,
    problems: ProblemsRef,
    *,
    campaign: str,
    iteration: int,
    groups: int,
    serving: Serving,
    worker: WorkerSpec,
    pool: GroupPool,
    store: Store,
    prefix: str,
    keep_equal: bool | None = None,
    on_progress: OnProgress = lambda finished, wanted, tokens: None,
) -> EpisodesRef:
    """Run `groups` usable groups from `problems` and seal them under the store key `prefix`.

    Raises TooManyInfraFailures when more groups than allowed were lost, PublishRefused when no replica can serve the version.
    """
    todo = read_problem_set(store, problems)
    plan = BatchPlan(
        groups=groups,
        problems=len(todo),
        refill_budget=config.refill_budget,
        oversubscribe=config.oversubscribe,
        window=config.window,
    )
    jobs = [
        _job(
            config,
            problem,
            order,
            campaign=campaign,
            iteration=iteration,
            serving=serving,
            prefix=prefix,
            keep_equal=not config.drop_zero_variance if keep_equal is None else keep_equal,
        )
        for order, problem in enumerate(todo)
    ]
    _take_over(plan, jobs, store)
    if not plan.sealable():
        serving.ensure(campaign)
        _drive(config, plan, jobs, campaign=campaign, serving=serving, worker=worker, pool=pool, on_progress=on_progress)
    manifest = BatchManifest(
        campaign=campaign,
        iteration=iteration,
        shards=plan.batch(),
        discarded=plan.discarded(),
        unused_problem_ids=tuple(todo[order].id for order in plan.unused()),
    )
    return put_manifest(store, f"{prefix}/episodes.json", manifest)


def _take_over(plan: BatchPlan, jobs: list[GroupJob], store: Store) -> None:
    for job in jobs:
        shard = find_shard(store, job.shard_uri)
        if shard is not None:
            plan.record(shard)


def _drive(
    config: RolloutConfig,
    plan: BatchPlan,
    jobs: list[GroupJob],
    *,
    campaign: str,
    serving: Serving,
    worker: WorkerSpec,
    pool: GroupPool,
    on_progress: OnProgress,
) -> None:
    stage_end = time.monotonic() + config.stage_seconds
    while not plan.sealable():
        for order in plan.next_orders():
            plan.submitted(order)
            pool.submit(order, run_group, _fresh(jobs[order]), worker, deadline_seconds=config.group_seconds)
        remaining = stage_end - time.monotonic()
        if remaining <= 0:
            pool.cancel()
            raise TooManyInfraFailures(
                f"rollout of campaign '{campaign}' passed its stage deadline of {config.stage_seconds:g} s with "
                f"{len(plan.finished)} of {plan.groups} groups graded; raise rollout.stage_seconds or look at the engine"
            )
        for order, shard in pool.finished(timeout_seconds=min(remaining, 5.0)):
            _settle(config, plan, jobs, order, shard, campaign=campaign, serving=serving)
        tokens = sum(shard.sampled_tokens for shard in plan.finished.values())
        on_progress(len(plan.finished), plan.groups, tokens)
    pool.cancel()


def _settle(
    config: RolloutConfig,
    plan: BatchPlan,
    jobs: list[GroupJob],
    order: int,
    shard: GroupShard,
    *,
    campaign: str,
    serving: Serving,
) -> None:
    """Record a finished group, or send it round again after an infrastructure failure."""
    job = jobs[order]
    if shard.disposition == "infra_failure" and job.attempt < config.infra_retries:
        jobs[order] = msgspec.structs.replace(job, attempt=job.attempt + 1)
        plan.in_flight.discard(order)
        if shard.reason.startswith("engine_"):
            serving.ensure(campaign)
        return
    plan.record(shard)
    allowed = max(1, int(config.max_infra_share * plan.groups))
    if plan.dropped() > allowed:
        raise TooManyInfraFailures(
            f"{plan.dropped()} of {plan.groups} groups of campaign '{campaign}' were lost to infrastructure, {allowed} may be; "
            f"last cause: {shard.reason}. Nothing was scored as a failure of the policy; repair it, then `bessemer resume`"
        )


def _fresh(job: GroupJob) -> GroupJob:
    return msgspec.structs.replace(job, attempt_id=uuid.uuid4().hex)


def _job(
    config: RolloutConfig,
    problem: Problem,
    order: int,
    *,
    campaign: str,
    iteration: int,
    serving: Serving,
    prefix: str,
    keep_equal: bool,
) -> GroupJob:
    short = sha256(problem.id.encode()).hexdigest()[:8]
    return GroupJob(
        problem=problem,
        group_id=f"{prefix.removeprefix('campaigns/')}/{order:04d}-{short}",
        order=order,
        campaign=campaign,
        iteration=iteration,
        attempt=0,
        attempt_id="",
        group_size=config.group_size,
        temperature=config.temperature,
        min_version=serving.oldest,
        max_version=serving.checkpoint.version,
        max_episode_tokens=config.max_episode_tokens,
        sampling_seconds=config.sampling_seconds,
        grading_seconds=config.grading_seconds,
        episode_seconds=config.episode_seconds,
        group_seconds=config.group_seconds,
        keep_equal=keep_equal,
        shard_uri=f"{prefix}/groups/{order:04d}-{short}",
    )

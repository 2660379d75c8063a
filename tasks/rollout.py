"""Rollout: curated problems in, a sealed batch of graded groups out.

The driver submits a bounded window of group coroutines to Dask and widens it as groups are discarded. It owns what workers
cannot: the deadline of every group seen from outside, retries after infrastructure failures (the engine is made to serve and
prove its version again first), the wait for a backend of boxes that is away (outage.py), the share of dropped groups, and
sealing. Groups that an earlier, killed run finished lie in the store and are taken over.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from data_contracts.config import RolloutConfig, SandboxConfig
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
from environments.sandbox import require_boxes
from tasks.batch_plan import BatchPlan
from tasks.campaign import Stopped
from tasks.episode import GroupJob
from tasks.group import find_shard, run_group
from tasks.group_pool import GroupPool
from tasks.outage import CAUSE, Outage
from tasks.runtime import WorkerSpec

ENGINE_CAUSES = ("engine_", "sampling_deadline")
"""Causes after which the engine has to prove its version again before a group is sent round."""
_LOG = logging.getLogger(__name__)
OnProgress = Callable[[int, int, int], None]
"""Called with (finished groups, groups wanted, sampled tokens)."""
OnWait = Callable[[str], None]
"""Called with what a person should know while the stage waits for something that is away."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The policy a rollout samples from. `oldest` is the lowest version a token may carry (staleness)."""

    engine: Engine
    checkpoint: CheckpointRef
    parent: CheckpointRef | None
    oldest: int

    def ensure(self, campaign: str) -> frozenset[str]:
        """The replicas that proved the version. The others are down or taken out (paused): nobody may ask them for tokens."""
        result = self.engine.ensure_serving(self.checkpoint, campaign=campaign, parent=self.parent)
        return frozenset(proof.replica for proof in result.proofs if proof.accepted)


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
    stopping: Callable[[], bool] = lambda: False,
    on_progress: OnProgress = lambda finished, wanted, tokens: None,
    on_wait: OnWait = _LOG.warning,
) -> EpisodesRef:
    """Run `groups` usable groups from `problems` and seal them under the store key `prefix`.

    Raises TooManyInfraFailures when more groups than allowed were lost, none is left, or an outage lasts too long,
    PublishRefused when no replica can serve the version, CapabilityError before anything starts when the sandbox backend cannot
    make a problem's boxes, Stopped soon after `stopping` turned true (finished groups stay for the next run).
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
        require_boxes(SandboxConfig.model_validate_json(worker.sandbox), todo)
        _drive(
            config,
            plan,
            jobs,
            campaign=campaign,
            serving=serving,
            worker=worker,
            pool=pool,
            stopping=stopping,
            on_progress=on_progress,
            on_wait=on_wait,
        )
    if groups and not plan.batch():
        reasons = "; ".join(sorted({f"{shard.disposition} {shard.reason}".strip() for shard in plan.finished.values()}))
        raise TooManyInfraFailures(
            f"no group of campaign '{campaign}' is left to seal under {prefix} ({reasons}); repair it, then `bessemer resume`"
        )
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
    stopping: Callable[[], bool],
    on_progress: OnProgress,
    on_wait: OnWait,
) -> None:
    outage = Outage(budget=SandboxConfig.model_validate_json(worker.sandbox).outage_wait_seconds)
    stage_end = time.monotonic() + config.stage_seconds
    proven = worker.asking(serving.ensure(campaign))
    while not plan.sealable():
        if stopping():
            pool.cancel()
            raise Stopped(f"rollout of campaign '{campaign}' was asked to stop with {len(plan.finished)} groups graded")
        plan.in_flight.difference_update(outage.release(now=time.monotonic()))
        for order in plan.next_orders():
            plan.submitted(order)
            pool.submit(order, run_group, _fresh(jobs[order]), proven, deadline_seconds=config.group_seconds)
        now = time.monotonic()
        remaining = stage_end + outage.extension(now=now) - now
        if remaining <= 0:
            pool.cancel()
            raise TooManyInfraFailures(
                f"rollout of campaign '{campaign}' passed its stage deadline of {config.stage_seconds:g} s with "
                f"{len(plan.finished)} of {plan.groups} groups graded; raise rollout.stage_seconds or look at the engine"
            )
        over = pool.finished(timeout_seconds=min(remaining, 5.0, outage.pause(now=now)))
        over = _set_aside(outage, over, pool=pool, campaign=campaign, groups=plan.groups, on_wait=on_wait)
        again = [shard for order, shard in over if _settle(config, plan, jobs, order, shard, campaign=campaign)]
        if any(shard.reason.startswith(ENGINE_CAUSES) for shard in again):  # it may have restarted, hang, or be gone for good
            proven = worker.asking(serving.ensure(campaign))
        tokens = sum(shard.sampled_tokens for shard in plan.finished.values())
        on_progress(len(plan.finished), plan.groups, tokens)
    pool.cancel()


def _set_aside(
    outage: Outage, over: list[tuple[int, GroupShard]], *, pool: GroupPool, campaign: str, groups: int, on_wait: OnWait
) -> list[tuple[int, GroupShard]]:
    """The groups that are over. Those that met an outage stay in flight, held until they are sent again."""
    now = time.monotonic()
    rest = [(order, shard) for order, shard in over if not shard.reason.startswith(f"{CAUSE}:")]
    if rest and (lasted := outage.end(now=now)):
        on_wait(f"campaign '{campaign}' goes on: the sandbox backend answers again, {lasted:.0f} s after it was missed")
    for order, shard in over:
        if (order, shard) not in rest:
            outage.meet(order, shard.reason, now=now)
    if len(rest) == len(over):
        return rest
    if outage.given_up(now=now):
        pool.cancel()
        raise TooManyInfraFailures(
            f"the sandbox backend of campaign '{campaign}' was away for more than {outage.budget:g} s"
            f" (stack.sandbox.outage_wait_seconds): {outage.reason}. Nothing was scored for it, and finished groups"
            f" are kept: start it, then `bessemer resume {campaign}`"
        )
    if message := outage.message(campaign=campaign, groups=groups, now=now):
        on_wait(message)
    return rest


def _settle(
    config: RolloutConfig, plan: BatchPlan, jobs: list[GroupJob], order: int, shard: GroupShard, *, campaign: str
) -> bool:
    """Record a finished group, or (True) send it round again after an infrastructure failure."""
    job = jobs[order]
    if shard.disposition == "infra_failure" and job.attempt < config.infra_retries:
        jobs[order] = msgspec.structs.replace(job, attempt=job.attempt + 1)
        plan.in_flight.discard(order)
        return True
    plan.record(shard)
    allowed = max(1, int(config.max_infra_share * plan.groups))
    if plan.dropped() > allowed:
        raise TooManyInfraFailures(
            f"{plan.dropped()} of {plan.groups} groups of campaign '{campaign}' were lost to infrastructure, {allowed} may be; "
            f"last cause: {shard.reason}. Nothing was scored as a failure of the policy; repair it, then `bessemer resume`"
        )
    return False


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

"""The stages bound to what they run on: `LoopStages` is what tasks/campaign.py drives, and flows/ wraps with Prefect.

Each method reads refs from the ledger's state, calls one stage function, guards its table with the contract that belongs to it,
and returns the event. The cheap reading of every contract runs before the next expensive step; Great Expectations and Data Docs
run beside training, over the same rules.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from data_contracts import gate, quarantine
from data_contracts.config import CampaignConfig
from data_contracts.errors import ContractError
from data_contracts.gate import BatchReport
from data_contracts.ledger import CampaignState
from data_contracts.ledger_events import Curated, Evaluated, Published, Scored, Sealed, Trained
from data_contracts.protocols import Codec, Engine, Store, Trainer
from data_contracts.records import BatchManifest, EpisodesRef, EvalReport, GroupShard, Problem
from data_contracts.tables import read_episodes, read_manifest, read_problem_set, read_scores, read_shard
from models.rewards import check_weights
from tasks.campaign import StepContext
from tasks.curate import curate
from tasks.evaluate import evaluate, read_report
from tasks.group_pool import GroupPool
from tasks.publish import publish
from tasks.rollout import OnWait, Serving, rollout
from tasks.runtime import WorkerSpec
from tasks.score import score
from tasks.train import train

RECENT_ITERATIONS = 4
"""How far back the curriculum looks for a problem's success."""

_LOG = logging.getLogger(__name__)
OnProgress = Callable[[str, int, int, int], None]
"""Called with (stage, finished, wanted, sampled tokens) while a stage runs."""


@dataclass(kw_only=True)
class LoopStages:
    """Implements `tasks.campaign.Stages` over real or fake parts. One instance an advance."""

    campaign: str
    config: CampaignConfig
    store: Store
    engine: Engine
    trainer: Trainer
    open_pool: Callable[[], AbstractContextManager[GroupPool]]
    """A pool for one stage: a pool belongs to one driver, and stages may run beside each other."""
    worker: WorkerSpec
    docs_folder: Path
    """Where this campaign's Data Docs are built."""
    on_progress: OnProgress = lambda stage, finished, wanted, tokens: None
    on_wait: OnWait = _LOG.warning
    data_docs: str = ""
    """The last page built."""
    _documents: dict[int, Future[BatchReport]] = field(default_factory=dict)
    _background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="contracts"))

    def __post_init__(self) -> None:
        check_weights(self.config.reward)  # not only when the first group is scored
        self._background.submit(gate.warm)

    # ------------------------------------------------------------------------------------------------------------ stages

    def curate(self, context: StepContext, iteration: int) -> Curated:
        state = context.state
        before = state.curated.get(iteration - 1)
        curation = curate(
            self.config,
            iteration=iteration,
            sampler_state=before.sampler_state if before else {},
            success=self._success(state),
            store=self.store,
            key=f"{self._prefix(iteration)}/problems.jsonl",
            count_tokens=self._count_tokens,
            context_tokens=self.worker.max_model_len,
            unused=self._unused(state),
        )
        problems = read_problem_set(self.store, curation.problems)
        quarantine.decide(
            gate.check_problems(problems, domains=[domain.name for domain in self.config.domains]),
            groups=[problem.id for problem in problems],
            max_share=0.0,
            file=curation.problems.uri,
        )
        return Curated(iteration=iteration, problems=curation.problems, sampler_state=curation.sampler_state)

    def rollout(self, context: StepContext, iteration: int) -> Sealed:
        oldest = max(0, iteration - self.config.max_staleness)
        with self.open_pool() as pool:
            episodes = rollout(
                self.config.rollout,
                context.state.curated[iteration].problems,
                campaign=self.campaign,
                iteration=iteration,
                groups=self.config.curate.groups,
                serving=self._serving(context.state, oldest=oldest),
                worker=self.worker,
                pool=pool,
                store=self.store,
                prefix=self._prefix(iteration),
                stopping=context.stopping,
                on_progress=lambda finished, wanted, tokens: self.on_progress("rollout", finished, wanted, tokens),
                on_wait=self.on_wait,
            )
        manifest = read_manifest(self.store, episodes)
        self._keep_quarantined(episodes, iteration)
        return Sealed(iteration=iteration, episodes=episodes, counts=_counts(manifest))

    def score(self, context: StepContext, iteration: int) -> Scored:
        episodes = context.state.sealed[iteration].episodes
        scores = score(self.config.reward, episodes, store=self.store, key=f"{self._prefix(iteration)}/scores.parquet")
        return Scored(iteration=iteration, scores=scores)

    def train(self, context: StepContext, iteration: int) -> Trained:
        state = context.state
        episodes, scores = state.sealed[iteration].episodes, state.scored[iteration].scores
        self._documents[iteration] = self._guard_batch(state, iteration)
        result = train(
            self.config,
            episodes,
            scores,
            campaign=self.campaign,
            iteration=iteration,
            epoch=context.epoch,
            parent=state.checkpoint(iteration),
            trainer=self.trainer,
            last=iteration + 1 == context.until,
        )
        return Trained(iteration=iteration, result=result)

    def publish(self, context: StepContext, version: int) -> Published:
        state = context.state
        parent = state.checkpoint(version - 1) if version else None
        result = publish(state.checkpoint(version), campaign=self.campaign, parent=parent, engine=self.engine)
        if version:
            self._join_documents(state, version - 1)
        return Published(version=version, result=result)

    def evaluate(self, context: StepContext, version: int) -> Evaluated:
        with self.open_pool() as pool:
            ref = evaluate(
                self.config,
                campaign=self.campaign,
                serving=self._serving(context.state, oldest=version),
                worker=self.worker,
                pool=pool,
                store=self.store,
                stopping=context.stopping,
                on_progress=lambda finished, wanted, tokens: self.on_progress("evaluate", finished, wanted, tokens),
                on_wait=self.on_wait,
            )
        report: EvalReport = read_report(self.store, ref)
        self._keep_quarantined(report.episodes, version, made_of_it=(ref.uri,))
        return Evaluated(version=version, report=ref, means={d.domain: d.mean_reward for d in report.domains})

    def close(self) -> None:
        """Wait for the contract checks that run beside training."""
        self._background.shutdown(wait=True)

    # ------------------------------------------------------------------------------------------------------------- parts

    def _prefix(self, iteration: int) -> str:
        return f"campaigns/{self.campaign}/iterations/{iteration:06d}"

    def _serving(self, state: CampaignState, *, oldest: int) -> Serving:
        version = state.serving or 0
        return Serving(
            engine=self.engine,
            checkpoint=state.checkpoint(version),
            parent=state.checkpoint(version - 1) if version else None,
            oldest=oldest,
        )

    def _success(self, state: CampaignState) -> dict[str, float]:
        """Mean reward per problem id over the newest sealed iterations, discarded groups included."""
        rewards: dict[str, list[float]] = defaultdict(list)
        for iteration in sorted(state.scored)[-RECENT_ITERATIONS:]:
            manifest = read_manifest(self.store, state.sealed[iteration].episodes)
            for shard in (*manifest.shards, *manifest.discarded):
                rewards[shard.problem_id].extend(shard.rewards_G)
        return {name: sum(values) / len(values) for name, values in sorted(rewards.items()) if values}

    def _unused(self, state: CampaignState) -> tuple[str, ...]:
        """Problems that the newest batch handed out and nobody attempted: they return to the sampler."""
        if not state.sealed:
            return ()
        return read_manifest(self.store, state.sealed[max(state.sealed)].episodes).unused_problem_ids

    def _count_tokens(self, problem: Problem) -> int:
        return len(self._codec.encode_prompt(problem.messages, problem.tools))

    @cached_property
    def _codec(self) -> Codec:
        from models.codec import open_codec

        return open_codec(Path(self.worker.model_folder))

    def _join_documents(self, state: CampaignState, iteration: int) -> None:
        """Wait for the full reading of a batch (made now if an earlier advance trained on it); a finding stops the campaign."""
        documents = self._documents.pop(iteration, None) or self._guard_batch(state, iteration)
        report, episodes = documents.result(), state.sealed[iteration].episodes
        quarantine.decide(report.violations, groups=_group_ids(self.store, episodes), max_share=0.0, file=episodes.uri)
        self.data_docs = report.page

    def _guard_batch(self, state: CampaignState, iteration: int) -> Future[BatchReport]:
        """The cheap reading now; the full one with its Data Docs page in the background."""
        episodes_ref = state.sealed[iteration].episodes
        episodes = read_episodes(self.store, episodes_ref)
        scores = read_scores(self.store, state.scored[iteration].scores)
        low, high = self.config.reward.low, self.config.reward.high
        versions = (max(0, iteration - self.config.max_staleness), iteration)
        found = gate.check_scores(scores, episodes=episodes, low=low, high=high)
        found += gate.check_train_batch(episodes, scores, versions=versions)
        groups = _group_ids(self.store, episodes_ref)
        quarantine.decide(found, groups=groups, max_share=0.0, file=episodes_ref.uri)
        return self._background.submit(
            gate.check_batch,
            self.docs_folder,
            run_name=f"iteration {iteration:06d}",
            problems=read_problem_set(self.store, state.curated[iteration].problems),
            episodes=episodes,
            scores=scores,
            domains=[domain.name for domain in self.config.domains],
            low=low,
            high=high,
            versions=versions,
        )

    def _keep_quarantined(self, episodes: EpisodesRef, number: int, *, made_of_it: tuple[str, ...] = ()) -> None:
        """Keep broken groups apart, with their page. When they stop the stage (ContractError), what the copies were made of and
        `made_of_it` go, so that these groups run again on resume instead of stopping it for ever."""
        manifest = read_manifest(self.store, episodes)
        broken = [shard for shard in manifest.discarded if shard.disposition == "quarantined"]
        if not broken:
            return
        found = [e for shard in broken for e in read_shard(self.store, shard.uri, sha256=shard.sha256)]
        violations = gate.check_group(found)
        everyone = [shard.group_id for shard in (*manifest.shards, *manifest.discarded)]
        kept = quarantine.decide(violations, groups=everyone, max_share=1.0)
        quarantine.keep(self.store, kept, found, campaign=self.campaign, iteration=number)
        folder = episodes.uri.rpartition("/")[0]
        name = " ".join(folder.split("/")[2:])  # "iterations 000003" or "evaluations v000003"
        self.data_docs = gate.check_batch(self.docs_folder, run_name=f"{name} quarantine", episodes=found).page
        try:
            quarantine.decide(violations, groups=everyone, file=folder)
        except ContractError:
            bases = [shard.uri.removesuffix(".parquet") for shard in broken]
            shards = [base + end for base in bases for end in (".json", ".telemetry.json", ".parquet")]
            for key in (*made_of_it, episodes.uri, *shards):
                self.store.delete(key)
            raise


def _group_ids(store: Store, episodes: EpisodesRef) -> list[str]:
    return [shard.group_id for shard in read_manifest(store, episodes).shards]


def _counts(manifest: BatchManifest) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for shard in manifest.shards:
        counts["sealed"] += 1
        counts["episodes"] += shard.rows
    for shard in manifest.discarded:
        counts[shard.disposition] += 1
    counts["sampled_tokens"] = _sampled(manifest.shards) + _sampled(manifest.discarded)
    return dict(counts)


def _sampled(shards: tuple[GroupShard, ...]) -> int:
    return sum(shard.sampled_tokens for shard in shards)

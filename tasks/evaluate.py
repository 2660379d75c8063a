"""Evaluate: the fixed held-out problems under one policy version -> an EvalReport with bootstrap intervals per domain.

It is a rollout over another problem set: same workers, same grading, no refills, greedy by default. Problems whose every
attempt was lost to infrastructure are left out of the means and show in the episode count.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable

import msgspec

from data_contracts.config import CampaignConfig
from data_contracts.errors import ContractError
from data_contracts.protocols import Store, to_json
from data_contracts.records import DomainEval, EpisodesRef, EvalRef, EvalReport, Score
from data_contracts.tables import digest, put_problems, read_manifest, read_shard
from models.rewards import score_group
from tasks.curate import heldout
from tasks.group_pool import GroupPool
from tasks.rollout import OnProgress, OnWait, Serving, rollout
from tasks.runtime import WorkerSpec
from tasks.statistics import bootstrap_mean

_LOG = logging.getLogger(__name__)


def evaluate(
    config: CampaignConfig,
    *,
    campaign: str,
    serving: Serving,
    worker: WorkerSpec,
    pool: GroupPool,
    store: Store,
    stopping: Callable[[], bool] = lambda: False,
    on_progress: OnProgress = lambda finished, wanted, tokens: None,
    on_wait: OnWait = _LOG.warning,
) -> EvalRef:
    """Attempt every held-out problem `config.evaluate.samples` times. Raises as `rollout` does."""
    version = serving.checkpoint.version
    prefix = f"campaigns/{campaign}/evaluations/v{version:06d}"
    problems = heldout(config)
    settings = config.rollout.model_copy(
        update={
            "group_size": config.evaluate.samples,
            "temperature": config.evaluate.temperature,
            "refill_budget": 0,
            "oversubscribe": 0,
        }
    )
    episodes = rollout(
        settings,
        put_problems(store, f"{prefix}/problems.jsonl", problems),
        campaign=campaign,
        iteration=version,
        groups=len(problems),
        serving=serving,
        worker=worker,
        pool=pool,
        store=store,
        prefix=prefix,
        keep_equal=True,
        stopping=stopping,
        on_progress=on_progress,
        on_wait=on_wait,
    )
    report = summarise(config, episodes, campaign=campaign, version=version, store=store)
    data = to_json(report)
    store.put_if_absent(f"{prefix}/report.json", data)
    return EvalRef(uri=f"{prefix}/report.json", sha256=digest(data), rows=len(report.domains))


def read_report(store: Store, ref: EvalRef) -> EvalReport:
    """A stored report; raises ContractError when its bytes are not the ones the ref names."""
    data = store.get(ref.uri)
    if digest(data) != ref.sha256:
        raise ContractError("its digest differs from the ledger's", file=ref.uri, remedy="Restore it, or evaluate again")
    return msgspec.json.decode(data, type=EvalReport)


def summarise(config: CampaignConfig, episodes: EpisodesRef, *, campaign: str, version: int, store: Store) -> EvalReport:
    """Means and intervals from stored episodes; pure but for reading."""
    scores_by_domain: dict[str, list[Score]] = defaultdict(list)
    passed: dict[str, int] = defaultdict(int)
    for shard in read_manifest(store, episodes).shards:
        group = read_shard(store, shard.uri, sha256=shard.sha256)
        scores_by_domain[shard.domain].extend(score_group(config.reward, group))
        passed[shard.domain] += sum(episode.verdict is not None and episode.verdict.passed for episode in group)
    domains = []
    for name in sorted(scores_by_domain):
        rewards: dict[str, list[float]] = defaultdict(list)
        for score in scores_by_domain[name]:
            rewards[score.problem_id].append(score.reward)
        means = {problem: sum(values) / len(values) for problem, values in sorted(rewards.items())}
        interval = bootstrap_mean(list(means.values()), resamples=config.evaluate.bootstrap)
        domains.append(
            DomainEval(
                domain=name,
                episodes=len(scores_by_domain[name]),
                mean_reward=interval.mean,
                low=interval.low,
                high=interval.high,
                pass_rate=passed[name] / len(scores_by_domain[name]),
                rewards=means,
            )
        )
    return EvalReport(campaign=campaign, version=version, domains=tuple(domains), episodes=episodes)

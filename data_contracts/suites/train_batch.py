"""The contract of what the trainer gets: episodes joined with their scores, never a held-out problem, never too long."""

from __future__ import annotations

import math
from collections.abc import Sequence

from data_contracts.records import Episode, Score
from data_contracts.suites.rules import Columns, Rule, Suite, between, holds, one_of, unique

_ROLLOUT = "The rollout stage sealed what may not be trained; stop the campaign and report it"


def suite(*, max_tokens: int | None = None, vocabulary: int | None = None) -> Suite:
    """`max_tokens`: EngineConfig.max_model_len. `vocabulary`: rows of the embedding. What is None is not checked."""
    rules: list[Rule] = [
        unique("row_id", field="id", expected="each episode once", remedy=_ROLLOUT),
        one_of("split", ("train",), remedy="Held-out problems are never trained; check the domain's splits"),
        one_of("outcome", ("scored", "policy_failure"), remedy=_ROLLOUT),
        holds("reward_finite", field="reward", expected="one finite reward an episode", remedy="Score the batch again"),
        between("tokens", 1, max_tokens, field="token_ids_T", expected=f"1 to {max_tokens or 'any'} tokens", remedy=_ROLLOUT),
        holds("logprobs_finite", field="logprobs_T", expected="finite numbers", remedy="Check the engine, then resume"),
        holds(
            "versions_fit",
            field="spans",
            expected="only policy versions that this iteration may train on",
            remedy="An engine sampled with other weights; `bessemer resume` publishes again",
            shows="versions",
        ),
    ]
    if vocabulary is not None:
        rules.append(
            between("token_max", 0, vocabulary - 1, field="token_ids_T", expected=f"ids below {vocabulary}", remedy=_ROLLOUT)
        )
    return Suite(table="train_batch", rules=tuple(rules))


def project(episodes: Sequence[Episode], scores: Sequence[Score], *, versions: tuple[int, int] | None = None) -> Columns:
    """One row an episode that is trained: every episode but the infra failures. `versions`: oldest and newest policy version
    that may have sampled (iteration - d, iteration); a column rather than a rule, so that the suite stays the same."""
    rewards = {score.episode_id: score.reward for score in scores}
    rows = [e for e in episodes if e.outcome != "infra_failure"]
    sampled = [sorted({span.version for span in e.spans}) for e in rows]
    low, high = versions or (0, 0)
    return {
        "row": list(range(1, len(rows) + 1)),
        "row_id": [e.id for e in rows],
        "group_id": [e.group_id for e in rows],
        "split": [e.split for e in rows],
        "outcome": [e.outcome for e in rows],
        "reward_finite": [math.isfinite(rewards.get(e.id, math.nan)) for e in rows],
        "tokens": [len(e.token_ids_T) if e.token_ids_T or e.outcome == "scored" else None for e in rows],
        "token_max": [max(e.token_ids_T, default=None) for e in rows],
        "logprobs_finite": [all(map(math.isfinite, e.logprobs_T)) for e in rows],
        "versions_fit": [versions is None or all(low <= version <= high for version in found) for found in sampled],
        "versions": [f"versions {found} where {low} to {high} may be" for found in sampled],
    }

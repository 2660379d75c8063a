"""The contract of scores: finite rewards in range, exactly one for every episode that is not an infra_failure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from data_contracts.records import Episode, Score
from data_contracts.suites.rules import Columns, Suite, between, holds, unique

_REWARD = "Fix the reward component that produced it, then score the batch again"


def suite(*, low: float = 0.0, high: float = 1.0) -> Suite:
    """`low`, `high`: RewardConfig's range."""
    return Suite(
        table="scores",
        rules=(
            unique("row_id", field="episode_id", expected="one score an episode", remedy="Score the batch again"),
            holds("reward_finite", field="reward", expected="a finite number", remedy=_REWARD, shows="reward"),
            between("reward", low, high, expected=f"a reward from {low} to {high}", remedy=_REWARD),
            holds("components_finite", field="components", expected="finite numbers, at least one", remedy=_REWARD),
            holds(
                "episode_fits",
                field="episode_id",
                expected="an episode of the batch with the same group, problem and domain, not an infra_failure",
                remedy="Score exactly the sealed batch",
            ),
            holds("present", field="reward", expected="a score for every graded episode", remedy="Score the batch again"),
        ),
    )


def project(scores: Sequence[Score], *, episodes: Sequence[Episode] | None = None) -> Columns:
    """One row a score, and one row an episode that lacks its score. Without `episodes` only the scores are looked at."""
    known = {e.id: e for e in episodes or ()}
    columns: Columns = {
        name: []
        for name in ("row", "row_id", "group_id", "reward_finite", "reward", "components_finite", "episode_fits", "present")
    }
    for row, score in enumerate(scores, start=1):
        episode = known.get(score.episode_id)
        fits = episode is not None and episode.outcome != "infra_failure" and _same(episode, score)
        columns["row"].append(row)
        columns["row_id"].append(score.episode_id)
        columns["group_id"].append(score.group_id)
        columns["reward_finite"].append(math.isfinite(score.reward))
        columns["reward"].append(score.reward)
        columns["components_finite"].append(bool(score.components) and all(map(math.isfinite, score.components.values())))
        columns["episode_fits"].append(fits if episodes is not None else None)
        columns["present"].append(True)
    have = {score.episode_id for score in scores}
    missing = [e for e in known.values() if e.outcome != "infra_failure" and e.id not in have]
    for row, episode in enumerate(missing, start=len(scores) + 1):
        for name, cell in (("row", row), ("row_id", episode.id), ("group_id", episode.group_id), ("present", False)):
            columns[name].append(cell)
        for name in ("reward_finite", "reward", "components_finite", "episode_fits"):
            columns[name].append(None)
    return columns


def _same(episode: Episode, score: Score) -> bool:
    return (episode.group_id, episode.problem_id, episode.domain) == (score.group_id, score.problem_id, score.domain)

"""Turns the stored episodes of one group into scores. The refill decision, the score stage and `regrade` all call this.

Pure: equal episodes give equal scores. The reward is the weighted sum of named components, clipped to [low, high]. An
infra_failure gets no score at all (rule 3). Group-relative components belong here once there is one; that is why the unit is
the group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from data_contracts.config import RewardConfig
from data_contracts.errors import ContractError
from data_contracts.records import Episode, Score
from models.rewards.registry import check_weights, component
from models.rewards.verdict import PREFIX


def score_group(config: RewardConfig, episodes: Sequence[Episode]) -> tuple[Score, ...]:
    """Score one group's episodes, in their order; infra failures are left out.

    `components` of each score holds every weighted component, "verdict", and each part the verdict names. Raises ConfigError
    for an unknown component, ContractError (naming episode and component) for a non-finite value or episodes of several groups.
    """
    check_weights(config)
    groups = sorted({episode.group_id for episode in episodes})
    if len(groups) > 1:
        raise ContractError(f"one group expected, found {', '.join(groups)}", field="group_id", remedy="Score group by group")
    return tuple(_score(episode, config) for episode in episodes if episode.outcome != "infra_failure")


def _score(episode: Episode, config: RewardConfig) -> Score:
    parts = episode.verdict.components if episode.verdict is not None else {}
    names = dict.fromkeys(["verdict", *(PREFIX + part for part in sorted(parts)), *config.weights])
    values = {name: float(component(name)(episode, config)) for name in names}
    for name, value in values.items():
        if not math.isfinite(value):
            raise ContractError(
                f"component '{name}' of episode '{episode.id}' is {value}",
                field=f"components.{name}",
                remedy="Quarantine the group; the verifier must return finite numbers",
            )
    total = math.fsum(weight * values[name] for name, weight in config.weights.items())
    return Score(
        episode_id=episode.id,
        group_id=episode.group_id,
        problem_id=episode.problem_id,
        domain=episode.domain,
        reward=min(max(total, config.low), config.high),
        components=values,
    )

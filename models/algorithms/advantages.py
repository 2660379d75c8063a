"""Group-relative advantages: rewards_E and their group keys -> advantages_E. Float64, once a batch, on the control side.

| name | advantage | source |
|---|---|---|
| grpo | (r - mean) / (std + eps) | Shao et al. 2024, DeepSeekMath |
| dr_grpo | r - mean | Liu et al. 2025, Understanding R1-Zero-like training |
| rloo | G/(G-1) (r - mean), 0 when G = 1 | Ahmadian et al. 2024, Back to basics |

`ddof` and `eps` are configuration because libraries differ. A group whose rewards are all equal gets exact zeros, whatever
rounding its mean has, so that "nothing to learn here" can be tested with `== 0`. A group of one has advantage 0.
Gap: per-token advantages (REINFORCE++, GAE, distillation) come with the algorithms that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from data_contracts.config import AlgorithmConfig

Floats = NDArray[np.float64]


def grpo(rewards_G: Floats, *, ddof: int, eps: float) -> Floats:
    """Centred and divided by the group's standard deviation."""
    centred_G: Floats = rewards_G - rewards_G.mean()
    return centred_G / (float(rewards_G.std(ddof=ddof)) + eps)


def dr_grpo(rewards_G: Floats, *, ddof: int, eps: float) -> Floats:
    """Centred only: no bias towards questions with little variance."""
    centred_G: Floats = rewards_G - rewards_G.mean()
    return centred_G


def rloo(rewards_G: Floats, *, ddof: int, eps: float) -> Floats:
    """Against the mean of the other members."""
    return dr_grpo(rewards_G, ddof=ddof, eps=eps) * (len(rewards_G) / (len(rewards_G) - 1))


ESTIMATORS: Mapping[str, Callable[..., Floats]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def group_advantages(rewards_G: Floats, config: AlgorithmConfig) -> Floats:
    """Advantages of one group, in member order; zeros for a group of one or of equal rewards."""
    if len(rewards_G) < 2 or rewards_G.max() == rewards_G.min():
        return np.zeros(len(rewards_G))
    return ESTIMATORS[config.name](rewards_G, ddof=config.ddof, eps=config.eps)


def advantages(rewards_E: Sequence[float] | Floats, groups_E: Sequence[str], config: AlgorithmConfig) -> Floats:
    """Advantages of a batch. `groups_E` keys each episode's group (problem and attempt, never prompt text).

    Infra failures must have left already. Raises ValueError for unequal lengths.
    """
    if len(rewards_E) != len(groups_E):
        raise ValueError(f"{len(rewards_E)} rewards for {len(groups_E)} group keys; pass one key an episode")
    rewards = np.asarray(rewards_E, dtype=np.float64)
    result_E = np.zeros(len(rewards))
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups_E):
        members.setdefault(group, []).append(index)
    for indices in members.values():
        result_E[indices] = group_advantages(rewards[indices], config)
    return result_E

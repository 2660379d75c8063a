"""DAPO's soft overlong punishment (Yu et al. 2025, "DAPO", section 3.4), as the component "overlong" in [-1, 0].

With limit L and buffer B it is 0 up to L - B written tokens, falls linearly to -1 at L, and stays there. L is what the policy
could have written at most: its turns' budgets together, and no more than the episode's tokens leave after the first prompt.
Observations are not counted: the policy did not write them.
"""

from __future__ import annotations

from data_contracts.config import RewardConfig
from data_contracts.records import Episode


def overlong_penalty(length: int, *, limit: int, buffer: int) -> float:
    """Penalty for `length` tokens under `limit`, with a soft zone of `buffer` tokens before it; 0 when buffer is 0."""
    if buffer == 0 or length <= limit - buffer:
        return 0.0
    return max(-1.0, (limit - buffer - length) / buffer)


def overlong(episode: Episode, config: RewardConfig) -> float:
    """The penalty of one episode under the budgets it ran with; 0 when the shaping is off."""
    budgets = episode.budgets
    limit = min(budgets.max_turns * budgets.max_tokens_per_turn, budgets.max_episode_tokens - episode.prompt_length)
    return overlong_penalty(sum(episode.loss_mask_T), limit=limit, buffer=config.overlong_buffer)

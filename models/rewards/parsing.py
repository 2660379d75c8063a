"""How readable the policy's turns were: the component "parse_ok"."""

from __future__ import annotations

from data_contracts.config import RewardConfig
from data_contracts.records import Episode


def parse_ok(episode: Episode, config: RewardConfig) -> float:
    """Share of turns without a parse error, in [0, 1]; 0 for an episode without a turn."""
    if not episode.turns:
        return 0.0
    return sum(turn.parse_error is None for turn in episode.turns) / len(episode.turns)

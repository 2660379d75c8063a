"""Rewards: verdicts and stored episodes in, scores with named components out. Pure; one file per component family."""

from models.rewards.registry import check_weights
from models.rewards.scoring import score_group

__all__ = ["check_weights", "score_group"]

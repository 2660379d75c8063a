"""What a reward component may know besides the episode itself."""

from __future__ import annotations

from dataclasses import dataclass

from data_contracts.config import RewardConfig
from data_contracts.records import Budgets


@dataclass(frozen=True, kw_only=True)
class RewardContext:
    """`budgets` are those the episodes ran under (the problem's own); None when the caller has no problem at hand."""

    config: RewardConfig
    budgets: Budgets | None = None

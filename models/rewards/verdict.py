"""What the verifier found, as reward components: "verdict" is its score, "verdict.<name>" one of its named parts.

A `policy_failure` earns 0 in all of them, whatever partial verdict was stored. A part that this verdict does not name is 0:
domains name different parts and one set of weights serves all of them (so a misspelt part is not caught here).
"""

from __future__ import annotations

from collections.abc import Callable

from data_contracts.config import RewardConfig
from data_contracts.errors import ContractError
from data_contracts.records import Episode, Verdict

PREFIX = "verdict."


def _counting_verdict(episode: Episode) -> Verdict | None:
    if episode.outcome == "policy_failure":
        return None
    if episode.verdict is None:
        raise ContractError(
            f"episode '{episode.id}' is scored but has no verdict",
            field="verdict",
            remedy="Grade it again, or mark it infra_failure",
        )
    return episode.verdict


def verdict(episode: Episode, config: RewardConfig) -> float:
    """The verifier's score in [0, 1]; 0 for a policy failure."""
    found = _counting_verdict(episode)
    return 0.0 if found is None else found.score


def verdict_component(name: str) -> Callable[[Episode, RewardConfig], float]:
    """A component that reads `verdict.components[name]`; 0 for a policy failure and where the verdict has no such part."""

    def read(episode: Episode, config: RewardConfig) -> float:
        found = _counting_verdict(episode)
        return 0.0 if found is None else found.components.get(name, 0.0)

    return read

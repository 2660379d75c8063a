"""Which reward components exist. A component is a pure function of one stored episode and its context.

Plain names are listed in `COMPONENTS`; every name that starts with "verdict." reads that entry of the verdict's own components.
A new family is one file and one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from data_contracts.config import RewardConfig
from data_contracts.errors import ConfigError
from data_contracts.records import Episode
from models.rewards.overlong import overlong
from models.rewards.parsing import parse_ok
from models.rewards.verdict import PREFIX, verdict, verdict_component

Component = Callable[[Episode, RewardConfig], float]

COMPONENTS: Mapping[str, Component] = {"verdict": verdict, "overlong": overlong, "parse_ok": parse_ok}


def component(name: str) -> Component:
    """The function behind a component name. Raises ConfigError for a name nobody registered."""
    if name in COMPONENTS:
        return COMPONENTS[name]
    if name.startswith(PREFIX) and len(name) > len(PREFIX):
        return verdict_component(name.removeprefix(PREFIX))
    known = ", ".join([*sorted(COMPONENTS), f"{PREFIX}<component of the verdict>"])
    raise ConfigError(f"unknown reward component '{name}'", field="reward.weights", remedy=f"Use one of: {known}")


def check_weights(config: RewardConfig) -> None:
    """Refuse unknown components, non-finite weights and an empty range before a run starts. Raises ConfigError."""
    for name, weight in config.weights.items():
        component(name)
        if not abs(weight) < float("inf"):
            raise ConfigError(f"weight of '{name}' is {weight}", field="reward.weights", remedy="Use a finite number")
    if not config.low <= config.high or not abs(config.low) < float("inf") or not abs(config.high) < float("inf"):
        raise ConfigError(
            f"the range {config.low}..{config.high} is empty or not finite", field="reward.low", remedy="Use low <= high"
        )

"""All checks, and running them: what a backend lacks is skipped with the reason, everything else passes or fails.

Contract: nothing that a check meets is raised; `run_checks` answers one outcome a check, in the order of `checks()`. Several
checks run at once (each in boxes of its own) but for those that count what the owner holds, which run alone at the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import ModuleType

from data_contracts.errors import BessemerError, ConfigError
from environments.sandbox.conformance import (
    cleanup,
    deadlines,
    environment,
    exits,
    files,
    host,
    hostile,
    identity,
    life,
    limits,
    network,
    requests,
    services,
    streams,
)
from environments.sandbox.conformance.check import Check, CheckFailed, NotHere, Outcome
from environments.sandbox.conformance.lab import Lab

THEMES: tuple[ModuleType, ...] = (
    streams, exits, deadlines, requests, environment, files, life, identity, network, limits, services, hostile, host,
    cleanup,
)  # fmt: skip
SECONDS = 120.0
"""A check that takes longer has failed: a step of the control plane was blocked."""
AT_ONCE = 4


def checks(names: Sequence[str] = ()) -> tuple[Check, ...]:
    """All checks, or those with one of these names or themes. Raises ConfigError for a name that is neither."""
    found = tuple(item for theme in THEMES for item in vars(theme).values() if isinstance(item, Check))
    known = {item.name for item in found} | {item.theme for item in found}
    if unknown := sorted(set(names) - known):
        themes = ", ".join(dict.fromkeys(item.theme for item in found))
        raise ConfigError(
            f"there is no check '{unknown[0]}'", field="names", remedy=f"Name a theme ({themes}), or a check as the table does"
        )
    return tuple(item for item in found if not names or {item.name, item.theme} & set(names))


async def run_check(item: Check, lab: Lab, *, seconds: float = SECONDS) -> Outcome:
    """One check under a deadline."""
    if missing := [need for need in item.needs if need not in lab.backend.capabilities]:
        reason = f"the backend '{lab.backend.name}' does not offer {', '.join(missing)}"
        return Outcome(name=item.name, status="skip", reason=reason)
    began = time.monotonic()

    def ended(status: str, reason: str = "") -> Outcome:
        spent = round(time.monotonic() - began, 3)
        return Outcome(name=item.name, status=status, reason=reason, seconds=spent)  # type: ignore[arg-type]

    try:
        await asyncio.wait_for(item.run(lab), seconds)
    except NotHere as error:
        return ended("skip", str(error))
    except CheckFailed as error:
        return ended("fail", str(error))
    except TimeoutError:
        return ended("fail", f"did not end within {seconds:g} s")
    except BessemerError as error:
        return ended("fail", f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001  (whatever a backend raises instead of the tree's errors is its failure)
        return ended("fail", f"{type(error).__name__} escaped, which is no error of the contract: {error}")
    return ended("pass")


async def run_checks(
    lab: Lab,
    chosen: Sequence[Check],
    *,
    at_once: int = AT_ONCE,
    started: Callable[[Check], None] = lambda item: None,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """All of `chosen`; `started` and `done` tell who watches."""
    turns = asyncio.Semaphore(at_once)

    async def one(item: Check) -> Outcome:
        async with turns:
            started(item)
            outcome = await run_check(item, lab)
        done(outcome)
        return outcome

    outcomes = await asyncio.gather(*(one(item) for item in chosen if not item.alone))
    outcomes += [await one(item) for item in chosen if item.alone]
    order = {item.name: number for number, item in enumerate(chosen)}
    return sorted(outcomes, key=lambda outcome: order[outcome.name])

"""What `status`, `domains`, `resume`, `show`, `gc` and `doctor` look up: small readers of ledger, registry and store."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table
from rich.text import Text

from data_contracts.config import CampaignConfig, RewardConfig, StackConfig
from data_contracts.errors import ConfigError
from data_contracts.ledger import CampaignState
from data_contracts.protocols import Store
from data_contracts.records import Paired, Record

if TYPE_CHECKING:
    from rich.console import RenderableType


class Origin(Record, frozen=True, kw_only=True):
    """How a campaign was last advanced, so that `resume` and `status` need no more than its name. Not part of any digest."""

    profile: str
    overrides: tuple[str, ...] = ()


def store_url(configured: str = "") -> str:
    """Where objects lie: the configured place, else the local one."""
    from infra.paths import home

    return configured or str(home() / "store")


def open_local_store(configured: str = "") -> Store:
    """The store of the running stack's profile unless `configured` names one."""
    from flows.stack import last_profile
    from infra.store import open_store

    recorded = last_profile()
    return open_store(store_url(configured or (recorded.stack.store if recorded else StackConfig().store)))


def remember_origin(store: Store, campaign: str, origin: Origin) -> None:
    store.put(f"campaigns/{campaign}/origin.json", msgspec.json.encode(origin))


def origin_of(campaign: str, store: Store | None = None) -> Origin:
    """Raises ConfigError naming the campaigns there are."""
    opened = store or open_local_store()
    try:
        return msgspec.json.decode(opened.get(f"campaigns/{campaign}/origin.json"), type=Origin)
    except FileNotFoundError:
        raise _unknown(opened, campaign) from None


def _unknown(store: Store, campaign: str) -> ConfigError:
    from infra.ledger_log import campaigns

    known = ", ".join(campaigns(store)) or "none yet"
    return ConfigError(f"there is no campaign '{campaign}' in {store.root}", field="campaign", remedy=f"Known: {known}")


def campaign_state(store: Store, campaign: str) -> CampaignState:
    from infra.ledger_log import LedgerLog

    log = LedgerLog(store, campaign)
    if not log.exists():
        raise _unknown(store, campaign)
    return log.state()


def reward_config(store: Store, campaign: str) -> RewardConfig:
    """The reward configuration that the campaign's ledger recorded."""
    return CampaignConfig.model_validate(campaign_state(store, campaign).config).reward


def campaign_table() -> RenderableType:
    """Campaigns of the local store: how far, what serves, who holds it, the last held-out means."""
    from infra.ledger_log import campaigns, holder_is_gone

    store = open_local_store()
    names = campaigns(store)
    if not names:
        return Text(f"no campaigns in {store.root}")
    table = Table(box=None, pad_edge=False)
    for column in ("campaign", "iterations", "serving", "held by", "held-out reward"):
        table.add_column(column)
    for name in names:
        state = campaign_state(store, name)
        if state.holder is None:
            held = f"paused: {state.paused.reason}" if state.paused else "nobody"
        elif holder_is_gone(state.holder):
            held = f"nobody ({state.holder} is gone)"
        else:
            held = f"{state.holder} since {datetime.fromtimestamp(state.since, tz=UTC).isoformat(timespec='seconds')}"
        last = max(state.evaluated, default=None)
        means = state.evaluated[last].means if last is not None else {}
        reward = ", ".join(f"{domain} {mean:.3f}" for domain, mean in sorted(means.items()))
        serving = "-" if state.serving is None else f"version {state.serving}"
        done = f"{len(state.trained)}/{state.iterations}"
        table.add_row(name, done, serving, Text(held), f"{reward} (version {last})" if reward else "-")
    return table


def heldout_gains(store: Store, campaign: str) -> tuple[int, int, tuple[Paired, ...]] | None:
    """(first version, last version, paired differences by domain) of what was evaluated; None before the second evaluation."""
    from tasks.campaign import campaign_config
    from tasks.evaluate import read_report
    from tasks.statistics import paired

    state = campaign_state(store, campaign)
    first, last = min(state.evaluated, default=0), max(state.evaluated, default=0)
    if first == last:
        return None
    before, after = (read_report(store, state.evaluated[version].report) for version in (first, last))
    return first, last, paired(before, after, resamples=campaign_config(state).evaluate.bootstrap)


def domain_table(names: list[str]) -> RenderableType:
    from environments.registry import domain, domain_names

    table = Table(box=None, pad_edge=False)
    for column in ("domain", "family", "levels", "summary"):
        table.add_column(column)
    for name in names or domain_names():
        found = domain(name)
        table.add_row(name, found.family or "-", ", ".join(found.levels), Text(found.summary))
    return table


def collect_garbage(campaign: str | None, *, dry_run: bool) -> list[str]:
    """Remove what retention does not keep; lines for people. Asks the registry first and stops when it does not answer."""
    from flows.stack import last_profile
    from infra import stack
    from infra.ledger_log import campaigns
    from infra.paths import home
    from infra.tracking import open_tracker
    from tasks.campaign import campaign_config
    from tasks.gc import collect

    store, recorded, running = open_local_store(), last_profile(), stack.running(home())
    uri = recorded.stack.mlflow_uri if recorded else None
    if uri is None and running is not None:
        uri = running.address("mlflow")
    if uri is None:
        raise stack.StackDown("what the registry names must be known before anything is removed; run `bessemer up` first")
    lines = []
    for name in [campaign] if campaign else campaigns(store):
        config = campaign_config(campaign_state(store, name))
        named = open_tracker(None if uri == "off" else uri, config.track, home()).registered_checkpoints()
        lines += collect(store, name, config.retention, named=named, dry_run=dry_run).lines()
    return lines


def doctor_table() -> tuple[RenderableType, bool]:
    """Findings as a table, and whether nothing is missing."""
    from infra import doctor

    table = Table(box=None, pad_edge=False)
    for column in ("check", "state", "found", "what to do"):
        table.add_column(column, overflow="fold")
    findings = doctor.report()
    for finding in findings:
        table.add_row(finding.name, "ok" if finding.ok else "missing", Text(finding.detail), Text(finding.remedy))
    return table, all(finding.ok for finding in findings)

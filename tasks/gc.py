"""Remove the checkpoints that retention does not keep; safe beside a running advance (data_contracts/retention.py says why).

Nothing else is removed: tables stay, so that every batch can be replayed and regraded. A checkpoint goes in one step where the
store is a folder, manifest first elsewhere, so that no reader meets half of one.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from data_contracts.config import RetentionConfig
from data_contracts.errors import LedgerError
from data_contracts.protocols import Store
from data_contracts.records import Record
from data_contracts.retention import reasons_to_keep
from infra.ledger_log import LedgerLog
from infra.store import LocalStore

FULL_STATE = "optimizer.json"
"""Written last beside a checkpoint whose optimizer state is complete (models/training/checkpoint.py)."""
SWEEP_SECONDS = 6 * 3600.0


class GcReport(Record, frozen=True, kw_only=True):
    """What one collection did, or would do. `bytes` is the size of the removed weights as their trainer recorded it."""

    campaign: str
    kept: dict[str, str]
    """Checkpoint URI -> why."""
    removed: tuple[str, ...]
    bytes: int
    dry_run: bool

    def lines(self) -> list[str]:
        """For people: one line a checkpoint, and the sum."""
        verb = "would remove" if self.dry_run else "removed"
        lines = [f"keep    {uri}  ({reason})" for uri, reason in self.kept.items()]
        lines += [f"{verb}  {uri}" for uri in self.removed]
        return [*lines, f"campaign '{self.campaign}': {verb} {len(self.removed)} checkpoints, {self.bytes / 1e9:.2f} GB"]


def collect(
    store: Store, campaign: str, config: RetentionConfig, *, named: AbstractSet[str], dry_run: bool = False
) -> GcReport:
    """Decide on the campaign's present state and delete. `named` is what the registry names: ask it before, and do not call
    this when it did not answer. Raises FileNotFoundError when there is no such campaign."""
    log = LedgerLog(store, campaign)
    state = log.state()
    prefix = f"{log.prefix}/checkpoints"
    keys = set(store.list(prefix))
    present = {"/".join(key.split("/")[:4]) for key in keys}
    versions = range(len(state.trained) + 1)
    full_states = {v for v in versions if f"{state.checkpoint(v).uri}/{FULL_STATE}" in keys}
    reasons = reasons_to_keep(state, config, full_states=full_states, named=named)
    kept = {state.checkpoint(v).uri: reason for v, reason in sorted(reasons.items(), reverse=True)}
    doomed = {state.checkpoint(v).uri: state.checkpoint(v).size for v in versions if v not in reasons}
    removed = tuple(uri for uri in doomed if uri in present)
    for uri in removed:
        if not uri.startswith(f"{prefix}/v"):
            raise LedgerError(f"refusing to delete {uri!r}, which is no checkpoint folder of campaign '{campaign}'")
        if not dry_run:
            store.delete(uri)
    if isinstance(store, LocalStore) and not dry_run:
        store.sweep(older_than=SWEEP_SECONDS)
    return GcReport(campaign=campaign, kept=kept, removed=removed, bytes=sum(doomed[uri] for uri in removed), dry_run=dry_run)

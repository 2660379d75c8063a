"""Which checkpoints a campaign keeps: a pure decision over its ledger state.

Kept are the newest `last`, the best by evaluation, every n-th, the base, whatever the ledger or the registry names, and what
work in flight may still read: the version that serves and the one before it (the proof of an update compares with both), all
newer ones, and the newest full optimizer state (from there a trainer repeats stored batches). Every reason only ever moves to
newer versions, so deciding on a state that is a moment old is safe beside a running advance. Only a registration of an old
version between reading `named` and deleting could be missed: who registers does so at the evaluation, when the version serves.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from data_contracts.config import RetentionConfig
from data_contracts.ledger import CampaignState


def best_version(state: CampaignState) -> int | None:
    """The version with the highest held-out reward (mean over domains), the earliest of equals; None before any evaluation."""
    rewards = {v: sum(event.means.values()) / len(event.means) for v, event in state.evaluated.items() if event.means}
    return max(sorted(rewards), key=rewards.__getitem__) if rewards else None


def reasons_to_keep(
    state: CampaignState, config: RetentionConfig, *, full_states: AbstractSet[int], named: AbstractSet[str]
) -> dict[int, str]:
    """Version -> why it is kept; versions of the campaign that are not in it may go.

    `full_states` are the versions that carry a full optimizer state, `named` the checkpoint URIs (store keys, or URLs that end
    in one) that a registry names.
    """
    newest = len(state.trained)
    serving = state.serving if state.serving is not None else 0
    best = best_version(state)
    resume_from = max((v for v in full_states if v <= newest), default=0)
    uris = {v: state.checkpoint(v).uri for v in range(newest + 1)}
    kept: dict[int, str] = {}
    for v, uri in uris.items():
        rules = (
            (v == 0, "base"),
            (v > newest - config.last, f"one of the last {config.last}"),
            (v >= serving - 1, "serving or in flight"),
            (v == resume_from, "newest full optimizer state"),
            (v == best, "best evaluation"),
            (v % config.every == 0, f"every {config.every}th"),
            (v in state.registered, f"registered as {', '.join(state.registered.get(v, ()))}"),
            (any(name.rstrip("/") == uri or name.rstrip("/").endswith(f"/{uri}") for name in named), "named by the registry"),
        )
        reasons = [reason for holds, reason in rules if holds]
        if reasons:
            kept[v] = ", ".join(reasons)
    shared = {uris[v] for v in kept}  # a version without signal may lie in its parent's folder
    return {v: kept.get(v, "same folder as a kept version") for v, uri in uris.items() if uri in shared}

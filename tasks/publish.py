"""Publish: make every serving replica hold a checkpoint, and prove it (models/serving/proof.py)."""

from __future__ import annotations

from data_contracts.protocols import Engine
from data_contracts.records import CheckpointRef, PublishResult


def publish(checkpoint: CheckpointRef, *, campaign: str, parent: CheckpointRef | None, engine: Engine) -> PublishResult:
    """Raises PublishRefused when no replica proves that it serves the new weights rather than the old ones."""
    return engine.ensure_serving(checkpoint, campaign=campaign, parent=parent)

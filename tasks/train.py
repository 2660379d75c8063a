"""Train: a sealed batch and its scores -> the next policy version, as one transaction of the leased trainer.

The job's key is the digest of (campaign, iteration, parent checkpoint, batch), so that asking twice trains once.
"""

from __future__ import annotations

from hashlib import sha256

from data_contracts.config import CampaignConfig
from data_contracts.protocols import Trainer, to_json
from data_contracts.records import CheckpointRef, EpisodesRef, ScoresRef, TrainJob, TrainResult


def train(
    config: CampaignConfig,
    episodes: EpisodesRef,
    scores: ScoresRef,
    *,
    campaign: str,
    iteration: int,
    epoch: int,
    parent: CheckpointRef,
    trainer: Trainer,
    last: bool = False,
) -> TrainResult:
    """One update. Full optimizer state is saved every `full_state_every` iterations and after the `last` one.

    Raises StaleWriter when another advance took the campaign over, TrainerError for the rest.
    """
    new_version = iteration + 1
    job = TrainJob(
        key=job_key(campaign, iteration, parent, episodes, scores),
        campaign=campaign,
        iteration=iteration,
        epoch=epoch,
        parent=parent,
        episodes=episodes,
        scores=scores,
        new_version=new_version,
        checkpoint_uri=f"campaigns/{campaign}/checkpoints/v{new_version:06d}",
        save_full_state=last or new_version % config.train.full_state_every == 0,
        train={
            "train": config.train.model_dump(mode="json"),
            "algorithm": config.algorithm.model_dump(mode="json"),
            "temperature": config.rollout.temperature,
        },
    )
    return trainer.train(job)


def job_key(campaign: str, iteration: int, parent: CheckpointRef, episodes: EpisodesRef, scores: ScoresRef) -> str:
    """The transaction's name: 32 hexadecimal digits."""
    parts = (campaign, iteration, parent.sha256, episodes.sha256, scores.sha256)
    return sha256(to_json(parts)).hexdigest()[:32]

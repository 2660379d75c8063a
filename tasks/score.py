"""Score: verdicts of a sealed batch -> rewards. Pure and re-runnable from stored episodes; refills use the same function."""

from __future__ import annotations

from data_contracts.config import RewardConfig
from data_contracts.protocols import Store
from data_contracts.records import EpisodesRef, Score, ScoresRef
from data_contracts.tables import put_scores, read_manifest, read_shard
from models.rewards import score_group


def score(config: RewardConfig, episodes: EpisodesRef, *, store: Store, key: str) -> ScoresRef:
    """Scores of every scored or failed episode of the batch, group by group in sealed order, stored under `key`.

    Raises ContractError naming the episode and component when a reward is not finite.
    """
    return put_scores(store, key, score_batch(config, episodes, store=store))


def score_batch(config: RewardConfig, episodes: EpisodesRef, *, store: Store) -> list[Score]:
    """The same scores without writing them (`bessemer regrade`, reports)."""
    return [
        score
        for shard in read_manifest(store, episodes).shards
        for score in score_group(config, read_shard(store, shard.uri, sha256=shard.sha256))
    ]

"""From sealed tables to what the optimizer sees: a TrainBatch of numpy arrays, one entry an episode.

Infra failures leave their group before any statistic (rule 3), so a baseline is over graded attempts only. Everything here is
checked before a tensor exists; a fault names the episode and the field. Values at masked positions are dropped, never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_contracts.config import AlgorithmConfig
from data_contracts.errors import ContractError
from data_contracts.protocols import Store
from data_contracts.records import Episode, EpisodesRef, Score, ScoresRef
from data_contracts.tables import read_episodes, read_scores
from models.algorithms.advantages import advantages

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_REMEDY = "Quarantine its group; nothing was trained"


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """One episode's tokens: `token_ids` (T,), `targets` (L,) the positions with loss mask 1, `logprobs` (L,) the sampler's."""

    episode_id: str
    group_id: str
    token_ids: Ints
    targets: Ints
    logprobs: Floats


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """E graded episodes: `sequences_E`, `rewards_E` and `advantages_E` run in parallel, in stored order."""

    sequences_E: tuple[TokenSequence, ...]
    rewards_E: Floats
    advantages_E: Floats

    @property
    def lengths(self) -> Ints:
        """Policy-written tokens of each episode."""
        return np.array([len(sequence.targets) for sequence in self.sequences_E], dtype=np.int64)

    @property
    def groups(self) -> list[str]:
        return [sequence.group_id for sequence in self.sequences_E]


def load_batch(store: Store, episodes: EpisodesRef, scores: ScoresRef, *, algorithm: AlgorithmConfig) -> TrainBatch:
    """Read both tables (their digests are checked) and build the batch. Raises ContractError."""
    return build_batch(read_episodes(store, episodes), read_scores(store, scores), algorithm=algorithm)


def build_batch(episodes: Sequence[Episode], scores: Sequence[Score], *, algorithm: AlgorithmConfig) -> TrainBatch:
    """Join episodes and scores by episode id and compute advantages group by group.

    Raises ContractError for a duplicate, missing or surplus score, and for tokens that cannot be trained on.
    """
    rewards: dict[str, float] = {}
    for score in scores:
        if score.episode_id in rewards:
            raise ContractError(f"two scores for episode '{score.episode_id}'", field="episode_id", remedy=_REMEDY)
        if not np.isfinite(score.reward):
            raise ContractError(f"reward of '{score.episode_id}' is {score.reward}", field="reward", remedy=_REMEDY)
        rewards[score.episode_id] = score.reward
    graded = [episode for episode in episodes if episode.outcome != "infra_failure"]
    names = [episode.id for episode in graded]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ContractError(f"episode '{twice}' appears twice", field="id", remedy=_REMEDY)
    if missing := sorted(set(names) - set(rewards)):
        raise ContractError(f"no score for episode '{missing[0]}' ({len(missing)} missing)", field="episode_id", remedy=_REMEDY)
    if surplus := sorted(set(rewards) - set(names)):
        raise ContractError(f"a score for '{surplus[0]}', which is not a graded episode", field="episode_id", remedy=_REMEDY)
    rewards_E = np.array([rewards[name] for name in names], dtype=np.float64)
    return TrainBatch(
        sequences_E=tuple(_sequence(episode) for episode in graded),
        rewards_E=rewards_E,
        advantages_E=advantages(rewards_E, [episode.group_id for episode in graded], algorithm),
    )


def _sequence(episode: Episode) -> TokenSequence:
    ids = np.array(episode.token_ids_T, dtype=np.int64)
    mask = np.array(episode.loss_mask_T, dtype=np.int64)
    logprobs = np.array(episode.logprobs_T, dtype=np.float64)
    if not len(ids) == len(mask) == len(logprobs):
        raise ContractError(
            f"episode '{episode.id}': {len(ids)} ids, {len(mask)} mask entries, {len(logprobs)} log-probabilities",
            field="token_ids_T",
            remedy=_REMEDY,
        )
    targets = np.flatnonzero(mask == 1)
    if len(targets) < np.count_nonzero(mask):
        raise ContractError(f"episode '{episode.id}': a mask entry is neither 0 nor 1", field="loss_mask_T", remedy=_REMEDY)
    if len(targets) and targets[0] == 0:
        raise ContractError(
            f"episode '{episode.id}': its first token has mask 1, but nothing precedes it", field="loss_mask_T", remedy=_REMEDY
        )
    if not np.isfinite(logprobs[targets]).all():
        raise ContractError(f"episode '{episode.id}': a non-finite log-probability", field="logprobs_T", remedy=_REMEDY)
    return TokenSequence(
        episode_id=episode.id, group_id=episode.group_id, token_ids=ids, targets=targets, logprobs=logprobs[targets]
    )

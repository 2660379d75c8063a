"""Log-probabilities of given sequences under given weights, for the proof that an engine serves what was trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from models.training.batch import TokenSequence
from models.training.forward import target_logprobs
from models.training.packing import micro_batches, pack


@torch.no_grad()
def sequence_logprobs(model: Any, sequences: list[list[int]], *, budget: int = 4096) -> list[list[float]]:
    """Log-probability of every token given those before it, at temperature 1; the first entry of each list is 0.0."""
    parts = [
        TokenSequence(
            episode_id=str(index),
            group_id=str(index),
            token_ids=np.array(ids, dtype=np.int64),
            targets=np.arange(1, len(ids)),
            logprobs=np.zeros(max(len(ids) - 1, 0)),
        )
        for index, ids in enumerate(sequences)
    ]
    found = [[0.0] * len(ids) for ids in sequences]
    for micro in micro_batches(pack(parts, range(len(parts)), budget=budget, share=False), budget=budget):
        logp, _ = target_logprobs(model, micro)
        for value, episode, offset in zip(logp.tolist(), micro.episodes_N, micro.offsets_N, strict=True):
            found[episode][offset + 1] = value
    return found


def same_shapes(one: Any, other: Any) -> bool:
    """Whether two models have the same tensors by name and shape."""
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(ours[name].shape == theirs[name].shape for name in ours)

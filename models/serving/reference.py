"""A small scorer in this process: what the trainer's log-probabilities must be, straight from transformers.

It stands in for the trainer where only a publish has to be proven (tests, diagnosis). It trains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data_contracts.errors import TrainerError
from data_contracts.protocols import Store
from data_contracts.records import CheckpointRef, TrainJob, TrainResult


class ReferenceScorer:
    """The `logprobs` half of the Trainer protocol over checkpoints in `store`; float32, temperature 1."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def train(self, job: TrainJob) -> TrainResult:
        raise TrainerError(f"the reference scorer cannot train (job {job.key}); start a trainer with `bessemer up`")

    def logprobs(self, checkpoint: CheckpointRef, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token given the ones before it, one list a sequence (first entry 0.0)."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._store.local_path(checkpoint.uri), dtype="float32").eval()
        return score(model, sequences)


def score(model: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """`logprobs` of a loaded model, one sequence at a time (no padding, so nothing to mask)."""
    import torch

    rows: list[list[float]] = []
    with torch.inference_mode():
        for sequence in sequences:
            ids_T = torch.tensor([list(sequence)])
            logprobs_TV = model(ids_T).logits[0].log_softmax(-1)
            targets_T = ids_T[0, 1:]
            rows.append([0.0, *logprobs_TV[:-1].gather(-1, targets_T[:, None])[:, 0].tolist()])
    return rows

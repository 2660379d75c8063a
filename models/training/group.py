"""What every rank of the worker group does, in the same order with the same arguments: restore, replay, step.

Rank 0 decides (worker.py) and broadcasts; nothing here writes to the store. Errors of ours are raised on every rank alike,
because every rank reads the same tables and sees the same reduced numbers; anything else ends the process and so the group.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from data_contracts.errors import TrainerError
from data_contracts.protocols import Store
from data_contracts.records import CheckpointRef, TrainJob
from models.training.batch import load_batch
from models.training.checkpoint import MANIFEST, checkpoint_uri, full_state, reference, verify
from models.training.learner import Learner, load_model
from models.training.ranks import Ranks
from models.training.step import StepResult, train_step
from models.training.transactions import settings


class WorkerGroup:
    """One rank's share: a Learner and the sha256 of the checkpoint that it holds (None while it holds no published one)."""

    def __init__(self, store: Store, *, ranks: Ranks, device: str | torch.device = "cpu") -> None:
        self.store, self.ranks, self.device = store, ranks, device
        self.learner: Learner | None = None
        self.held: CheckpointRef | None = None
        self._reference: tuple[str, Any] | None = None

    def restore(self, start: CheckpointRef, replay: list[TrainJob], target: CheckpointRef) -> float:
        """Hold `target` with its optimizer state: load `start` and repeat `replay`.

        Returns the share of exactness: 1.0 when the repeated weights equal the stored ones bit for bit, 0.0 when they had to be
        replaced by the stored ones (another machine or number of ranks).
        """
        self.held = None
        folder = verify(self.store, start)
        if self.learner is None or not self.learner.load(folder):
            self.learner = Learner(folder, device=self.device)
        if full_state(folder):
            self.learner.load_optimizer(folder)
        for job in replay:
            self._update(job)
        exact = True
        if replay:
            folder = verify(self.store, target)
            exact = self.learner.holds(folder)
            if not exact:
                self.learner.restore_weights(folder)
        self.held = target
        return float(exact)

    def step(self, job: TrainJob) -> StepResult:
        """One job on the held parent. `held` is None afterwards if weights moved: their checkpoint has no name yet."""
        if self.held is None or self.held.sha256 != job.parent.sha256:
            raise TrainerError(f"the trainer holds {self.held}, not the job's parent {job.parent.uri}")
        return self._update(job)

    def _update(self, job: TrainJob) -> StepResult:
        learner = self.learner
        if learner is None:
            raise TrainerError("no weights are loaded")
        chosen = settings(job)
        batch = load_batch(self.store, job.episodes, job.scores, algorithm=chosen.algorithm)
        reference_model = self._reference_model(job.campaign) if chosen.algorithm.kl_coef > 0 else None
        before, held = learner.steps, self.held
        self.held = None
        try:
            return train_step(
                learner,
                batch,
                train=chosen.train,
                algorithm=chosen.algorithm,
                temperature=chosen.temperature,
                reference=reference_model,
                ranks=self.ranks,
            )
        finally:
            if learner.steps == before:  # refused, or nothing to train: the weights are still the parent's
                self.held = held

    def _reference_model(self, campaign: str) -> Any:
        uri = checkpoint_uri(campaign, 0)
        if not self.store.exists(f"{uri}/{MANIFEST}"):
            return None
        base = reference(self.store, uri)
        if self._reference is None or self._reference[0] != base.sha256:
            self._reference = None
            self._reference = (base.sha256, load_model(verify(self.store, base), device=self.device))
        return self._reference[1]


def deterministic(threads: int) -> None:
    """Same numbers from the same input on the same machine: fixed threads, fixed seed, deterministic kernels."""
    if threads > 0:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    # filling fresh memory costs a pass over every allocation, and nothing here reads what it did not write
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def folder_has_state(store: Store, ref: CheckpointRef) -> bool:
    """Whether a checkpoint in the store carries a complete optimizer state."""
    try:
        return full_state(Path(store.local_path(ref.uri)))
    except FileNotFoundError:
        return False

"""FakeTrainer: protocol Trainer without a model, for tests of the loop. Shipped, deterministic, and under the same rules.

Its weights are a hash chain in a small file: version v+1 is the digest of version v and the batch. Keys, epochs, records,
manifests and publishing are the real ones (transactions.py, checkpoint.py), so the loop sees the same objects in the store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

from data_contracts.protocols import Store, to_json
from data_contracts.records import CheckpointRef, TrainJob, TrainOutcome, TrainResult
from data_contracts.tables import read_scores
from models.training import checkpoint as files
from models.training import transactions

WEIGHTS = "weights.json"


def fake_base(store: Store, campaign: str) -> CheckpointRef:
    """Version 0 of a campaign whose trainer is fake."""
    uri = files.checkpoint_uri(campaign, 0)
    if not store.exists(f"{uri}/{files.MANIFEST}"):
        with files.aside() as folder:
            (folder / WEIGHTS).write_text(json.dumps({"chain": "base"}))
            files.seal(folder, campaign=campaign, version=0, iteration=None, parent=None, key=None)
            store.publish_folder(str(folder), uri)
    return files.reference(store, uri)


class FakeTrainer:
    """`between` is called where the real trainer is most vulnerable: after the step, before the checkpoint."""

    def __init__(self, store: Store, *, between: Callable[[TrainJob], None] = lambda job: None) -> None:
        self.store, self.between = store, between
        self.trained: list[str] = []
        """Keys really worked on, for tests that nothing is trained twice."""

    def train(self, job: TrainJob) -> TrainResult:
        transactions.fence(self.store, job.campaign, job.epoch)
        if answer := transactions.finished(self.store, job):
            return answer
        transactions.settings(job)
        files.read_manifest(self.store, job.parent)
        transactions.remember(self.store, job)
        self.trained.append(job.key)
        rewards: dict[str, set[float]] = {}
        scores = read_scores(self.store, job.scores)
        for score in scores:
            rewards.setdefault(score.group_id, set()).add(score.reward)
        outcome: TrainOutcome = "trained" if any(len(values) > 1 for values in rewards.values()) else "no_signal"
        before = self._chain(job.parent)
        chain = hashlib.sha256(f"{before} {job.episodes.sha256} {job.scores.sha256}".encode()).hexdigest()
        mean = sum(score.reward for score in scores) / max(len(scores), 1)
        self.between(job)
        with files.aside() as folder:
            (folder / WEIGHTS).write_text(json.dumps({"chain": chain if outcome == "trained" else before}))
            files.seal(
                folder,
                campaign=job.campaign,
                version=job.new_version,
                iteration=job.iteration,
                parent=job.parent.sha256,
                key=job.key,
            )
            metrics = {"loss": 0.0, "grad_norm": 0.0, "reward_mean": mean, "tokens": float(len(scores))}
            answered = transactions.Answer(key=job.key, outcome=outcome, metrics=metrics)
            (folder / files.RECORD).write_bytes(to_json(answered))
            transactions.fence(self.store, job.campaign, job.epoch)
            self.store.publish_folder(str(folder), job.checkpoint_uri)
        return transactions.record(self.store, job)

    def logprobs(self, checkpoint: CheckpointRef, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        chain = self._chain(checkpoint)

        def value(prefix: Sequence[int]) -> float:
            digest = hashlib.sha256(f"{chain} {list(prefix)}".encode()).digest()
            return -8.0 * int.from_bytes(digest[:4], "big") / 2**32

        return [[0.0 if t == 0 else value(ids[: t + 1]) for t in range(len(ids))] for ids in sequences]

    def _chain(self, ref: CheckpointRef) -> str:
        files.read_manifest(self.store, ref)
        data = json.loads(self.store.get(f"{ref.uri}/{WEIGHTS}")) if self.store.exists(f"{ref.uri}/{WEIGHTS}") else {}
        return str(data.get("chain", ref.sha256))

"""An engine without processes: remembers what it was asked to serve. For tests and crash-safety runs with a replay sampler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from data_contracts.errors import PublishRefused
from data_contracts.records import CheckpointRef, Interval, PublishResult, ReplicaProof

REPLICA = "fake://engine"


class FakeEngine:
    """Accepts every version except those in `refuse`; `serving` is the last one, `calls` how often it was asked."""

    def __init__(self, *, refuse: Iterable[int] = (), clock: Callable[[], float] = time.time) -> None:
        self._refuse, self._clock = frozenset(refuse), clock
        self.serving: CheckpointRef | None = None
        self.calls = 0

    def ensure_serving(self, checkpoint: CheckpointRef, *, campaign: str, parent: CheckpointRef | None) -> PublishResult:
        self.calls += 1
        now = self._clock()
        if checkpoint.version in self._refuse:
            raise PublishRefused(f"the fake engine refuses version {checkpoint.version} of campaign '{campaign}', as told")
        self.serving = checkpoint
        proof = ReplicaProof(
            replica=REPLICA,
            version=checkpoint.version,
            tokens=0,
            distance_new=0.0,
            distance_old=0.0,
            step_distance=0.0,
            accepted=True,
            checksum_only=False,
            reason="fake engine: nothing was measured",
        )
        intervals = (Interval(kind="publish", start=now, stop=self._clock()),)
        return PublishResult(version=checkpoint.version, proofs=(proof,), intervals=intervals)

"""A campaign without model, engine or trainer: real ledger, store, Prefect and reports around stages that write small tables.

Tests put `open_double` in place of `flows.services.open_services` (fixture `stand_ins`). What a stage does is
steered by files in `<BESSEMER_HOME>/steer`: "sleep" (seconds a rollout takes), "fail" (a message a rollout raises).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from data_contracts.config import Profile
from data_contracts.errors import TooManyInfraFailures
from data_contracts.ledger_events import Curated, Evaluated, Published, Scored, Sealed, Trained
from data_contracts.protocols import Store, to_json
from data_contracts.records import (
    BatchManifest,
    CheckpointRef,
    DomainEval,
    EvalRef,
    EvalReport,
    ProblemsRef,
    PublishResult,
    TrainResult,
)
from data_contracts.tables import digest, put_manifest, put_scores
from infra.paths import home
from infra.tracking import NullTracker
from tasks.campaign import StepContext, Stopped

PROFILE = Path(__file__).parent / "double.yaml"


def steer(name: str, value: str = "") -> None:
    folder = home() / "steer"
    folder.mkdir(parents=True, exist_ok=True)
    if value:
        (folder / name).write_text(value)
    else:
        (folder / name).unlink(missing_ok=True)


def steered(name: str) -> str:
    path = home() / "steer" / name
    return path.read_text() if path.exists() else ""


class Double:
    """Implements tasks.campaign.Stages."""

    data_docs = ""

    def __init__(self, store: Store, campaign: str, on_progress: Any) -> None:
        self.store, self.campaign, self.on_progress = store, campaign, on_progress

    def curate(self, context: StepContext, iteration: int) -> Curated:
        ref = ProblemsRef(uri=f"{self._at(iteration)}/problems.jsonl", sha256=digest(b""), rows=0)
        return Curated(iteration=iteration, problems=ref)

    def rollout(self, context: StepContext, iteration: int) -> Sealed:
        if message := steered("fail"):
            raise TooManyInfraFailures(message)
        until = time.monotonic() + float(steered("sleep") or 0)
        self.on_progress("rollout", 0, 2, 0)
        while time.monotonic() < until:
            if context.stopping():
                raise Stopped("asked to")
            time.sleep(0.05)
        self.on_progress("rollout", 2, 2, 64)
        manifest = BatchManifest(
            campaign=self.campaign, iteration=iteration, shards=(), discarded=(), unused_problem_ids=(f"p{iteration}",)
        )
        return Sealed(iteration=iteration, episodes=put_manifest(self.store, f"{self._at(iteration)}/episodes.json", manifest))

    def score(self, context: StepContext, iteration: int) -> Scored:
        return Scored(iteration=iteration, scores=put_scores(self.store, f"{self._at(iteration)}/scores.parquet", []))

    def train(self, context: StepContext, iteration: int) -> Trained:
        result = TrainResult(
            key=f"{iteration:032x}",
            checkpoint=checkpoint(self.campaign, iteration + 1),
            outcome="trained",
            metrics={"loss": 0.5},
        )
        return Trained(iteration=iteration, result=result)

    def publish(self, context: StepContext, version: int) -> Published:
        return Published(version=version, result=PublishResult(version=version, proofs=()))

    def evaluate(self, context: StepContext, version: int) -> Evaluated:
        mean = min(1.0, version / 10)
        domain = DomainEval(
            domain="echo", episodes=1, mean_reward=mean, low=mean, high=mean, pass_rate=mean, rewards={"echo/heldout/0": mean}
        )
        episodes = put_manifest(
            self.store,
            f"campaigns/{self.campaign}/evaluations/v{version:06d}/episodes.json",
            BatchManifest(campaign=self.campaign, iteration=version, shards=(), discarded=(), unused_problem_ids=()),
        )
        report = EvalReport(campaign=self.campaign, version=version, domains=(domain,), episodes=episodes)
        uri = f"campaigns/{self.campaign}/evaluations/v{version:06d}/report.json"
        self.store.put_if_absent(uri, to_json(report))
        return Evaluated(version=version, report=EvalRef(uri=uri, sha256=digest(to_json(report)), rows=1), means={"echo": mean})

    def _at(self, iteration: int) -> str:
        return f"campaigns/{self.campaign}/iterations/{iteration:06d}"


def checkpoint(campaign: str, version: int) -> CheckpointRef:
    uri = f"campaigns/{campaign}/checkpoints/v{version:06d}"
    return CheckpointRef(uri=uri, sha256=sha256(uri.encode()).hexdigest(), version=version, size=0)


@dataclass
class DoubleServices:
    stages: Double
    campaign: str
    tracker: NullTracker

    def base(self) -> CheckpointRef:
        return checkpoint(self.campaign, 0)


@contextmanager
def open_double(
    profile: Profile, campaign: str, addresses: Any, *, store: Store, on_progress: Any, **_: Any
) -> Iterator[DoubleServices]:
    yield DoubleServices(Double(store, campaign, on_progress), campaign, NullTracker())

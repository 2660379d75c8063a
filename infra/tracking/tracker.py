"""The tracker that the loop logs to: every call becomes one operation that is delivered now or, after an outage, later.

What people find in MLflow: a parent run per campaign (at most 60 overall metrics by step, the configuration as an artifact,
reward per domain as a table, a plot and a heat map), a child run per iteration (its figures, datasets with digests, sampled
episodes), sampled episodes as traces with the reward as feedback, candidates in the model registry by reference.

Contract: logging never raises. What cannot be delivered waits in `<home>/tracking_buffer/<campaign>.jsonl`, is reported once,
and is delivered in order before the next operation that gets through. A resumed campaign goes on in its run.

Gap: one process writes a campaign's runs at a time (the ledger's lease sees to that).
"""

from __future__ import annotations

import base64
import logging
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from data_contracts.config import TrackConfig
from data_contracts.errors import BessemerError
from data_contracts.protocols import Store
from data_contracts.records import CheckpointRef, EpisodesRef, EvalReport
from infra.tracking.episode_sample import sample_traces
from infra.tracking.mlflow_writer import MlflowWriter
from infra.tracking.outbox import Delivery, Outbox

PROBE_SECONDS = 2.0

log = logging.getLogger("bessemer.tracking")


class TrackerUnreachable(BessemerError, ConnectionError):
    """The registry could not be read where an answer is needed (gc must not guess)."""


class NullTracker:
    """Tracks nothing: for tests and for installations without MLflow."""

    def start_campaign(self, campaign: str, *, config: Mapping[str, Any], resumed: bool) -> None: ...

    def log_iteration(
        self,
        iteration: int,
        *,
        metrics: Mapping[str, float],
        per_domain: Mapping[str, Mapping[str, float]],
        datasets: Mapping[str, str],
        artifacts: Mapping[str, bytes],
    ) -> None: ...

    def log_episodes(self, iteration: int, episodes: EpisodesRef, *, store: Store, sample: int) -> None: ...

    def log_evaluation(self, report: EvalReport, *, step: int) -> None: ...

    def register_candidate(self, checkpoint: CheckpointRef, *, report: EvalReport) -> None: ...

    def finish_campaign(self, status: str) -> None: ...

    def links(self) -> dict[str, str]:
        return {}

    def registered_checkpoints(self) -> set[str]:
        return set()


def open_tracker(uri: str | None, config: TrackConfig, home: Path) -> MlflowTracker | NullTracker:
    """The tracker for an MLflow tracking URI; none without one. Opens no connection and imports nothing heavy."""
    return MlflowTracker(uri, experiment=config.experiment, home=home) if uri else NullTracker()


class MlflowTracker:
    """`Tracker` on an MLflow server (or a database URI). See the module for the contract."""

    def __init__(self, uri: str, *, experiment: str, home: Path) -> None:
        self.uri, self.experiment, self.home = uri.rstrip("/"), experiment, home
        self._writer = MlflowWriter(self.uri, experiment=experiment, campaign="")
        self._delivery: Delivery | None = None

    def start_campaign(self, campaign: str, *, config: Mapping[str, Any], resumed: bool) -> None:
        """Open (or find again) the campaign's run. Must be called before the other methods."""
        self._writer = MlflowWriter(self.uri, experiment=self.experiment, campaign=campaign)
        self._delivery = Delivery(
            Outbox(self._buffer() / f"{campaign}.jsonl"),
            service=f"tracking to {self.uri}",
            perform=self._writer.perform,
            reachable=self._reachable,
        )
        self._submit("start", {"config": msgspec.to_builtins(dict(config)), "resumed": resumed})

    def log_iteration(
        self,
        iteration: int,
        *,
        metrics: Mapping[str, float],
        per_domain: Mapping[str, Mapping[str, float]],
        datasets: Mapping[str, str],
        artifacts: Mapping[str, bytes],
    ) -> None:
        """`per_domain` is domain -> figure -> value ("mean_reward" is drawn); `datasets` is name -> "<store key>@<sha256>",
        or store key -> digest; `artifacts` is file name -> bytes, stored with the iteration's run."""
        body = {
            "iteration": iteration,
            "metrics": {k: float(v) for k, v in metrics.items()},
            "per_domain": {d: {k: float(v) for k, v in figures.items()} for d, figures in per_domain.items()},
            "datasets": dict(datasets),
            "artifacts": {name: base64.b64encode(data).decode() for name, data in artifacts.items()},
        }
        self._submit("iteration", body)

    def log_episodes(self, iteration: int, episodes: EpisodesRef, *, store: Store, sample: int) -> None:
        try:
            traces, lines = sample_traces(store, episodes, sample, now=time.time())
        except (BessemerError, OSError) as error:
            log.warning("iteration %d: the sealed episodes could not be read for tracking: %s", iteration, error)
            return
        body = {
            "iteration": iteration,
            "traces": msgspec.to_builtins(traces),
            "lines": lines.decode("utf-8", "replace"),
            "ref": {**msgspec.to_builtins(episodes), "store": store.root},
        }
        self._submit("episodes", body)

    def log_evaluation(self, report: EvalReport, *, step: int) -> None:
        self._submit("evaluation", {"report": msgspec.to_builtins(report), "step": step})

    def register_candidate(self, checkpoint: CheckpointRef, *, report: EvalReport) -> None:
        """A version of the model `bessemer-<campaign>` that names the checkpoint; alias `candidate`, and `best` when it is."""
        body = {"checkpoint": msgspec.to_builtins(checkpoint), "report": msgspec.to_builtins(report)}
        self._submit("candidate", body)

    def finish_campaign(self, status: str) -> None:
        """`status` is FINISHED, FAILED or KILLED."""
        self._submit("finish", {"status": status})

    def links(self) -> dict[str, str]:
        """Pages for people; without a reachable server only the server's own address."""
        run = self._writer.runs.get("campaign")
        if not run:
            return {"mlflow": self.uri}
        experiment = f"{self.uri}/#/experiments/{self._writer.experiment_id}"
        return {"mlflow": self.uri, "mlflow_run": f"{experiment}/runs/{run}", "mlflow_traces": f"{experiment}/traces"}

    def registered_checkpoints(self) -> set[str]:
        """Store keys of every checkpoint that a registered version names, undelivered candidates included.

        Raises TrackerUnreachable: whoever deletes must know.
        """
        waiting = {
            str(operation["body"]["checkpoint"]["uri"])
            for file in self._buffer().glob("*.jsonl")
            for operation in Outbox(file).pending()
            if operation.get("kind") == "candidate"
        }
        if not self._reachable():
            raise TrackerUnreachable(f"the registry at {self.uri} does not answer; start it with `bessemer up`, then try again")
        return waiting | self._writer.registered_checkpoints()

    def flush(self) -> int:
        """Try to deliver what waits; returns how many operations still wait."""
        return self._delivery.flush() if self._delivery else 0

    def _buffer(self) -> Path:
        return self.home / "tracking_buffer"

    def _submit(self, kind: str, body: dict[str, Any]) -> None:
        if self._delivery is None:
            raise RuntimeError("call start_campaign before logging to a tracker")
        self._delivery.submit({"kind": kind, "at": time.time(), "body": body})

    def _reachable(self) -> bool:
        if not self.uri.startswith("http"):
            return True
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=PROBE_SECONDS) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except OSError:
            return False

"""Rank 0's desk: queues requests from the HTTP thread, runs them on the main thread, keeps the transaction's promises.

One request runs at a time. A second request for a key in flight joins the first. What every rank has to do is broadcast and
then done here too, so all ranks take the same path (group.py). A fault that is not one of our errors ends the process: the
supervisor starts it again and the job is asked for again.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from data_contracts.errors import BessemerError, TrainerError
from data_contracts.protocols import to_json
from data_contracts.records import CheckpointRef, Interval, TrainJob, TrainResult
from models.training import checkpoint as files
from models.training import transactions
from models.training.group import WorkerGroup, folder_has_state
from models.training.learner import load_model
from models.training.probe import same_shapes, sequence_logprobs
from models.training.step import StepResult

IDLE_SECONDS = 60.0
HOLD = "BESSEMER_TRAINER_HOLD"
"""Tests only: a folder. Between step and checkpoint the trainer creates `reached` in it and waits until that is removed."""


@dataclass(frozen=True)
class Request:
    """One queued piece of work and where its answer goes."""

    work: str
    payload: Any
    answer: Future[Any]


class Desk:
    """What rank 0 has beside its share of the work (see above)."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group, self.store = group, group.store
        self.stopping = threading.Event()
        self._queue: SimpleQueue[Request] = SimpleQueue()
        self._lock = threading.Lock()
        self._flying: dict[str, Future[Any]] = {}
        self._epochs: dict[str, int] = {}
        self._status: dict[str, Any] = {"busy": False, "key": None, "campaign": None, "epoch": -1}
        self._other: tuple[str, Any] | None = None  # a second model, for log-probabilities of weights that are not held

    # ------------------------------------------------------------------------------------------------- from any thread

    def submit(self, work: str, payload: Any = None) -> Future[Any]:
        answer: Future[Any] = Future()
        if work == "shutdown":
            self.stopping.set()
        self._queue.put(Request(work, payload, answer))
        return answer

    def submit_train(self, job: TrainJob) -> Future[Any]:
        """Queue a job, or join the one in flight under its key. Raises StaleWriter at once for a passed epoch."""
        transactions.fence(self.store, job.campaign, job.epoch)
        with self._lock:
            self._epochs[job.key] = max(job.epoch, self._epochs.get(job.key, job.epoch))
            if job.key not in self._flying:
                self._flying[job.key] = self.submit("train", job)
            return self._flying[job.key]

    def status(self) -> dict[str, Any]:
        held = self.group.held
        return self._status | {
            "checkpoint": held.sha256 if held else None,
            "version": held.version if held else None,
            "processes": self.group.ranks.count,
            "pid": os.getpid(),
        }

    # -------------------------------------------------------------------------------------------------- the main thread

    def run(self) -> None:
        """Serve until a shutdown. A fault that is not ours answers its caller, then ends the process."""
        while True:
            try:
                request = self._queue.get(timeout=IDLE_SECONDS)
            except Empty:
                self.group.ranks.broadcast(("idle",))  # the other ranks' wait must not reach its deadline
                continue
            try:
                self._status["busy"] = request.work == "train"
                result = getattr(self, f"_{request.work}")(request.payload)
            except BessemerError as error:
                self._forget(request)
                request.answer.set_exception(error)
            except BaseException as error:
                self._forget(request)
                request.answer.set_exception(TrainerError(f"the trainer crashed: {type(error).__name__}: {error}"))
                raise
            else:
                self._forget(request)
                request.answer.set_result(result)
                if request.work == "shutdown":
                    return
            finally:
                self._status |= {"busy": False, "key": None}

    def _forget(self, request: Request) -> None:
        if request.work == "train":
            with self._lock:
                self._flying.pop(request.payload.key, None)

    def _everywhere(self, work: str, *arguments: Any) -> Any:
        self.group.ranks.broadcast((work, *arguments))
        return perform(self.group, work, *arguments)

    def _train(self, job: TrainJob) -> TrainResult:
        transactions.fence(self.store, job.campaign, self._epochs[job.key])
        self._status |= {"key": job.key, "campaign": job.campaign, "epoch": self._epochs[job.key]}
        if answer := transactions.finished(self.store, job):
            return answer
        transactions.settings(job)
        extra = self._hold(job.parent)
        transactions.remember(self.store, job)
        self._keep_parent(job.parent)
        start = time.time()
        result: StepResult = self._everywhere("step", job)
        interval = Interval(kind="train_step", start=start, stop=time.time())
        hold_for_tests()
        answer = self._publish(job, result, extra, interval)
        self._everywhere("hold", answer.checkpoint)
        return answer

    def _hold(self, parent: CheckpointRef) -> dict[str, float]:
        """Make every rank hold exactly `parent` with its optimizer state; a no-op when it does."""
        held = self.group.held
        if held is not None and held.sha256 == parent.sha256:
            return {"restored": 0.0}
        files.read_manifest(self.store, parent)
        campaign = parent.uri.split("/")[1]
        jobs = transactions.lineage(self.store, campaign)
        start, replay = transactions.replay_plan(self.store, parent, jobs, lambda ref: folder_has_state(self.store, ref))
        exact = self._everywhere("restore", start, replay, parent)
        return {"restored": 1.0, "replayed_jobs": float(len(replay)), "replay_exact": exact}

    def _publish(self, job: TrainJob, result: StepResult, extra: dict[str, float], interval: Interval) -> TrainResult:
        source = Path(self.store.local_path(job.parent.uri))
        learner = self.group.learner
        if learner is None:
            raise TrainerError("no weights are loaded")
        with files.aside() as folder:
            files.companions(source, folder, weights=result.outcome == "no_signal")
            if result.outcome == "trained":
                learner.save_weights(folder)
            files.seal(
                folder,
                campaign=job.campaign,
                version=job.new_version,
                iteration=job.iteration,
                parent=job.parent.sha256,
                key=job.key,
            )
            if job.save_full_state:
                learner.save_optimizer(folder)
                files.seal_full_state(folder)
            answer = transactions.Answer(
                key=job.key, outcome=result.outcome, metrics=result.metrics | extra, intervals=(interval,)
            )
            (folder / files.RECORD).write_bytes(to_json(answer))
            transactions.fence(self.store, job.campaign, self._epochs[job.key])
            self.store.publish_folder(str(folder), job.checkpoint_uri)
        return transactions.record(self.store, job)

    def _logprobs(self, payload: tuple[CheckpointRef, list[list[int]]]) -> list[list[float]]:
        ref, sequences = payload
        held, learner = self.group.held, self.group.learner
        if held is not None and learner is not None and held.sha256 == ref.sha256:
            return sequence_logprobs(learner.model, sequences)
        if self._other is None or self._other[0] != ref.sha256:
            self._other = None
            self._other = (ref.sha256, load_model(files.verify(self.store, ref), device=self.group.device))
        return sequence_logprobs(self._other[1], sequences)

    def _keep_parent(self, parent: CheckpointRef) -> None:
        """Copy the held weights aside before they move: publishing asks for the log-probabilities of both."""
        learner = self.group.learner
        if learner is None or (self._other is not None and self._other[0] == parent.sha256):
            return
        if self._other is None or not same_shapes(self._other[1], learner.model):
            self._other = None
            self._other = (parent.sha256, copy.deepcopy(learner.model))
        else:
            model, self._other = self._other[1], None
            model.load_state_dict(learner.model.state_dict())
            self._other = (parent.sha256, model)

    def _shutdown(self, payload: None) -> bool:
        """Save the full state beside the held checkpoint unless it lies there; then let the other ranks go."""
        held, learner = self.group.held, self.group.learner
        saved = False
        if held is not None and learner is not None and learner.steps and not folder_has_state(self.store, held):
            with files.aside() as folder:
                learner.save_optimizer(folder)
                files.seal_full_state(folder)
                for name in (files.OPTIMIZER, files.OPTIMIZER_DIGEST):  # the digest last: without it there is no state
                    self.store.put(f"{held.uri}/{name}", (folder / name).read_bytes())
            saved = True
        self.group.ranks.broadcast(("stop",))
        return saved


def perform(group: WorkerGroup, work: str, *arguments: Any) -> Any:
    """One broadcast command on one rank."""
    if work == "restore":
        return group.restore(*arguments)
    if work == "step":
        return group.step(*arguments)
    if work == "hold":
        (group.held,) = arguments
    return None


def follow(group: WorkerGroup) -> None:
    """Every rank but the first: do what rank 0 broadcasts until it says stop. Errors of ours are rank 0's to report."""
    while True:
        work, *arguments = group.ranks.broadcast(None)
        if work == "stop":
            return
        try:
            perform(group, work, *arguments)
        except BessemerError:
            continue


def hold_for_tests() -> None:
    """Wait at the most awkward moment, where a test asks for it."""
    folder = os.environ.get(HOLD)
    if folder and Path(folder).is_dir():
        mark = Path(folder) / "reached"
        mark.touch()
        while mark.exists():
            time.sleep(0.02)

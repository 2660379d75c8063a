"""The trainer process: rank 0 answers HTTP on loopback and decides, all ranks compute (group.py).

| route | body -> answer |
|---|---|
| GET /status | -> `{"checkpoint", "version", "campaign", "epoch", "busy", "key", "processes", "pid"}` |
| POST /train | TrainJob -> TrainResult; idempotent by key, 409 for a passed epoch |
| POST /logprobs | `{"checkpoint": CheckpointRef, "sequences": [[id]]}` -> `{"logprobs": [[float]]}` |
| POST /shutdown | -> `{"saved": bool}`, then the process ends |

Errors answer `{"kind": <class name>, "message": ...}`. Requests run one after another on the main thread; a second POST of a
key in flight waits for the first. SIGTERM is a shutdown. There is no authentication: the socket binds to 127.0.0.1 only.
Gap: a job is not interrupted at its deadline; the client gives up and the answer is recorded when it is there.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from data_contracts.errors import BessemerError, TrainerError
from data_contracts.protocols import Store, to_json
from data_contracts.records import CheckpointRef, Interval, TrainJob, TrainResult
from infra.store import open_store
from models.training import checkpoint as files
from models.training import transactions
from models.training.batch import TokenSequence
from models.training.forward import target_logprobs
from models.training.group import WorkerGroup, deterministic, folder_has_state
from models.training.learner import load_model
from models.training.packing import micro_batches, pack
from models.training.ranks import accelerate_ranks
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
    """Rank 0: queues requests from the HTTP thread, runs them on the main thread, keeps the transaction's promises."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group, self.store = group, group.store
        self.stopping = threading.Event()
        self._queue: SimpleQueue[Request] = SimpleQueue()
        self._lock = threading.Lock()
        self._flying: dict[str, Future[Any]] = {}
        self._epochs: dict[str, int] = {}
        self._status: dict[str, Any] = {"busy": False, "key": None, "campaign": None, "epoch": -1}
        self._probe: tuple[str, Any] | None = None

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
        if self._probe is None or self._probe[0] != ref.sha256:
            self._probe = None
            self._probe = (ref.sha256, load_model(files.verify(self.store, ref), device=self.group.device))
        return sequence_logprobs(self._probe[1], sequences)

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


def hold_for_tests() -> None:
    """Wait at the most awkward moment, where a test asks for it."""
    folder = os.environ.get(HOLD)
    if folder and Path(folder).is_dir():
        mark = Path(folder) / "reached"
        mark.touch()
        while mark.exists():
            time.sleep(0.02)


def watch_launcher(stopping: threading.Event) -> None:
    """End this process when its launcher is gone, so that a killed launcher leaves no trainer on the port."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(1.0)
        if stopping.is_set():  # a shutdown that is saving state gets the time for it
            time.sleep(120.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()


def serve(store: Store, *, port: int, cpu: bool, threads: int) -> None:
    """Run this rank until shutdown."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    from models.training.http import HttpThread

    deterministic(threads)
    accelerator = Accelerator(cpu=cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))])
    group = WorkerGroup(store, ranks=accelerate_ranks(accelerator), device=accelerator.device)
    if group.ranks.index > 0:
        watch_launcher(threading.Event())
        follow(group)
    else:
        files.sweep_aside()
        desk = Desk(group)
        watch_launcher(desk.stopping)
        signal.signal(signal.SIGTERM, lambda *_: desk.submit("shutdown"))
        server = HttpThread(desk, port=port)
        server.start()
        try:
            desk.run()
        finally:
            server.stop()
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Bessemer's trainer; started by `accelerate launch` (models/training/command.py)"
    )
    parser.add_argument("--store", required=True, help="folder or fsspec URL of the store")
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1 that rank 0 listens on")
    parser.add_argument("--threads", type=int, default=0, help="torch threads a rank; 0 leaves the default")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even where there is an accelerator")
    chosen = parser.parse_args()
    serve(open_store(chosen.store), port=chosen.port, cpu=chosen.cpu, threads=chosen.threads)


if __name__ == "__main__":
    main()

"""HttpTrainer against a real socket with a scripted desk: retries, deadlines, and errors that keep their class."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from data_contracts.errors import ContractError, StaleWriter, TrainerError
from data_contracts.records import CheckpointRef, EpisodesRef, ScoresRef, TrainJob
from infra.processes import free_port
from models.training.client import HttpTrainer
from models.training.http import HttpThread

REF = CheckpointRef(uri="u", sha256="s", version=0, size=0)
JOB = TrainJob(
    key="k",
    campaign="c",
    iteration=0,
    epoch=0,
    parent=REF,
    episodes=EpisodesRef(uri="e", sha256="s", rows=0),
    scores=ScoresRef(uri="s", sha256="s", rows=0),
    new_version=1,
    checkpoint_uri="u1",
    save_full_state=False,
    train={"train": {"seconds": 20}},
)


class ScriptedDesk:
    """Answers every request with one error, or never."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.asked = error, 0

    def submit(self, work: str, payload: Any = None) -> Future[Any]:
        self.asked += 1
        answer: Future[Any] = Future()
        if self.error is not None:
            answer.set_exception(self.error)
        return answer

    def submit_train(self, job: TrainJob) -> Future[Any]:
        return self.submit("train", job)

    def status(self) -> dict[str, Any]:
        return {"busy": True}


@contextmanager
def served(error: Exception | None) -> Iterator[tuple[ScriptedDesk, str]]:
    desk, port = ScriptedDesk(error), free_port()
    server = HttpThread(desk, port=port)
    server.start()
    try:
        yield desk, f"http://127.0.0.1:{port}"
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StaleWriter("epoch 1 was passed"), StaleWriter),
        (TrainerError("loss is nan"), TrainerError),
        (ContractError("two scores", file="scores.parquet"), ContractError),
    ],
)
def test_errors_keep_class_and_message_and_are_not_retried(error: Exception, kind: type[Exception]) -> None:
    with served(error) as (desk, address):
        with pytest.raises(kind, match=str(error)):
            HttpTrainer(address).train(JOB)
        assert desk.asked == 1


def test_a_job_that_takes_too_long_ends_at_its_deadline() -> None:
    with served(None) as (_, address), pytest.raises(TrainerError, match="within 1 s"):
        HttpTrainer(address, seconds=1).logprobs(REF, [[1]])


def test_an_absent_trainer_is_waited_for_until_the_deadline() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    slept: list[float] = []
    trainer = HttpTrainer(address, seconds=0.5, sleep=lambda s: (slept.append(s), threading.Event().wait(s))[0])
    with pytest.raises(TrainerError, match="no answer"):
        trainer.logprobs(REF, [])
    assert slept
    with pytest.raises(TrainerError, match="bessemer up"):
        trainer.status()


def test_a_trainer_that_dies_on_every_try_is_reported() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        accepted = 0

        def drop() -> None:
            nonlocal accepted
            while accepted < 5:
                connection, _ = listener.accept()
                connection.recv(10)
                connection.close()
                accepted += 1

        threading.Thread(target=drop, daemon=True).start()
        trainer = HttpTrainer(f"http://127.0.0.1:{listener.getsockname()[1]}", seconds=20, sleep=lambda s: None)
        with pytest.raises(TrainerError, match="died 5 times"):
            trainer.logprobs(REF, [[1]])


def test_a_taken_port_is_an_error_that_says_so() -> None:
    with served(None) as (_, address):
        second = HttpThread(ScriptedDesk(None), port=int(address.rsplit(":", 1)[1]))
        with pytest.raises(TrainerError, match="cannot listen"):
            second.start()

"""Session fixtures: the real trainer, `accelerate launch`ed on a free port over a store of its own, on a tiny model."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_contracts.errors import TrainerError
from infra.processes import ProcessSpec, free_port, start
from infra.store import LocalStore
from models.training.client import HttpTrainer
from models.training.command import trainer_command

START_SECONDS = 120.0


@dataclass
class TrainerProcess:
    """A running trainer: its launcher, its address, its store and its log."""

    process: subprocess.Popen[bytes]
    client: HttpTrainer
    store: LocalStore
    log: Path

    def worker_pid(self) -> int:
        """Rank 0's process, which is what a crash would hit (the launcher only waits for it)."""
        return int(self.client.status()["pid"])

    def kill(self) -> None:
        """kill -9 of everything the launcher started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)


Start = Callable[..., "TrainerProcess"]


@contextmanager
def running_trainer(
    store: LocalStore, folder: Path, *, processes: int = 1, port: int = 0, env: dict[str, str] | None = None
) -> Iterator[TrainerProcess]:
    """Start a trainer with its state folder in `folder`; leaves no process behind."""
    port = port or free_port()
    argv, extra = trainer_command(store=store.root, port=port, processes=processes, threads=1)
    log = folder / f"trainer-{port}.log"
    log.unlink(missing_ok=True)
    spec = ProcessSpec(name="trainer", argv=tuple(argv), env=extra | {"BESSEMER_HOME": str(folder)} | (env or {}))
    process = start(spec, log=log, owner=str(folder))
    trainer = TrainerProcess(process, HttpTrainer(f"http://127.0.0.1:{port}"), store, log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                trainer.client.status()
                break
            except TrainerError:
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"the trainer did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.1)
        yield trainer
    finally:
        if process.poll() is None:
            trainer.kill()


@pytest.fixture(scope="session")
def trainer_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerProcess]:
    """One trainer for the whole session; use a campaign name of your own in its store."""
    folder = tmp_path_factory.mktemp("trainer")
    with running_trainer(LocalStore(folder / "store"), folder / "home") as trainer:
        yield trainer

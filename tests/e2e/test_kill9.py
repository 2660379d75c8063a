"""Real kill -9 of what a campaign runs on: a Dask worker and vLLM during a rollout, the trainer between step and checkpoint.

The advance goes on by itself once the supervisor (or Dask's nanny) has started the victim again. The fourth kill, of the flow
between weight reload and ledger event, is in test_scheduled_run.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from distributed import Client

from data_contracts.records import EpisodeTelemetry, GroupShard
from data_contracts.tables import read_manifest, read_telemetry
from models.training.client import HttpTrainer
from tasks.group_pool import DaskPool
from tests.e2e.driving import Drive, check_intact, driving
from tests.plugins.stack import RunningStack

SETTINGS = (
    "campaign.iterations=2",
    "campaign.evaluate.every=100",
    "campaign.domains.0.heldout=8",
    "campaign.curate.groups=48",
)
"""So many groups take seconds, however fast the machine: the kills come `IN_FLIGHT_SECONDS` after they were handed out."""
IN_FLIGHT_SECONDS = 0.2


class AmbushPool(DaskPool):
    """Calls `attack` once, a moment after the first groups of the stage were handed to the workers."""

    def __init__(self, address: str, attack: Callable[[], None]) -> None:
        super().__init__(address)
        self._attack: Callable[[], None] | None = attack

    def finished(self, *, timeout_seconds: float) -> list[tuple[int, GroupShard]]:
        if self._attack is not None:
            attack, self._attack = self._attack, None
            time.sleep(IN_FLIGHT_SECONDS)
            attack()
        return super().finished(timeout_seconds=timeout_seconds)


def ambush(drive: Drive, address: str, attack: Callable[[], None]) -> None:
    """The next rollouts of this drive run into `attack`, the first of them only."""
    attacks = [attack]
    drive.services.stages.open_pool = lambda: closing(AmbushPool(address, attacks.pop() if attacks else lambda: None))


@contextmanager
def one_iteration_done(stack: RunningStack, campaign: str) -> Iterator[Drive]:
    """A campaign whose first iteration went undisturbed, so that every process is warm and has been used."""
    with driving(stack, campaign, stack.profile(*SETTINGS)) as drive:
        drive.advance(1)
        yield drive


def telemetry(stack: RunningStack, drive: Drive, iteration: int) -> list[EpisodeTelemetry]:
    manifest = read_manifest(stack.store, drive.log.state().sealed[iteration].episodes)
    return [row for shard in manifest.shards for row in read_telemetry(stack.store.get(shard.telemetry_uri), file="")]


def dask_worker_pids(address: str) -> list[int]:
    with Client(address, set_as_default=False) as client:
        return list(client.run(os.getpid).values())


def test_a_killed_dask_worker_costs_the_groups_in_flight(stack: RunningStack) -> None:
    with one_iteration_done(stack, "kill-dask") as drive:
        (before,) = dask_worker_pids(stack.addresses.dask)
        ambush(drive, stack.addresses.dask, lambda: os.kill(before, signal.SIGKILL))
        drive.advance(2)
    (after,) = dask_worker_pids(stack.addresses.dask)
    assert after != before
    check_intact(stack.store, "kill-dask", iterations=2)


@pytest.mark.timeout(420)
def test_a_killed_engine_is_started_again_proven_and_its_groups_retried(stack: RunningStack) -> None:
    def attack() -> None:
        pid = stack.process("vllm-0").pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    restarts = stack.process("vllm-0").restarts
    with one_iteration_done(stack, "kill-vllm") as drive:
        ambush(drive, stack.addresses.dask, attack)
        drive.advance(2)
        assert max(row.attempt for row in telemetry(stack, drive, 1)) >= 1
    assert stack.process("vllm-0").restarts == restarts + 1
    check_intact(stack.store, "kill-vllm", iterations=2)


def test_a_killed_trainer_loses_its_step_and_takes_it_again_once(stack: RunningStack) -> None:
    trainer = HttpTrainer(stack.addresses.trainer)
    with one_iteration_done(stack, "kill-trainer") as drive:
        stack.hold.mkdir()
        with ended(threading.Thread(target=drive.advance, args=(2,))):
            wait_for(stack.hold / "reached")
            os.kill(int(trainer.status()["pid"]), signal.SIGKILL)
            shutil.rmtree(stack.hold)
    state = check_intact(stack.store, "kill-trainer", iterations=2)
    metrics = state.trained[1].result.metrics
    assert metrics["restored"] == 1.0  # a new process, which holds nothing, came to the parent first
    assert metrics["replay_exact"] == 1.0


@contextmanager
def ended(thread: threading.Thread) -> Iterator[None]:
    thread.start()
    try:
        yield
    finally:
        thread.join(timeout=180)
    assert not thread.is_alive()


def wait_for(mark: Path) -> None:
    limit = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < limit, f"{mark} did not appear"
        time.sleep(0.02)

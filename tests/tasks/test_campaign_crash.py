"""kill -9 at every event and every write, two advances at once, and a paused writer: equal tables every time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.ledger_log import LedgerLog, this_process
from infra.store import LocalStore
from tasks.campaign import advance
from tests.tasks import campaign_fakes
from tests.tasks.campaign_fakes import FakeStages, tables


@pytest.fixture
def root_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where the host has it: a kill -9 is the same there, and thousands of synced writes cost nothing."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.tasks.campaign_fakes", *arguments]


def report(*arguments: str) -> dict[str, object]:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    parsed: dict[str, object] = json.loads(done.stdout)
    return parsed


@pytest.mark.parametrize("d", ["0", "1"])
@pytest.mark.parametrize("writes", ["ledger", "any"])
def test_killed_at_every_write_and_resumed_to_equal_tables(root_folder: Path, d: str, writes: str) -> None:
    got = report("crash", str(root_folder), d, writes)
    assert got["different"] == []
    # created, leased, released, 3 iterations of 5 steps, version 0 and 3 evaluations (0, 2, 3): twice each
    expected_events = 2 * (3 + 3 * 5 + 1 + 3)
    assert got["kills"] == expected_events if writes == "ledger" else int(str(got["kills"])) > 2 * expected_events


@pytest.mark.parametrize("d", ["0", "1"])
def test_dying_in_every_advance_still_gets_there(root_folder: Path, d: str) -> None:
    got = report("forever", str(root_folder), d)
    assert got["finished"] is True
    assert got["equal"] is True
    assert int(str(got["kills"])) >= 15


def advance_process(root: Path, *, ttl: float, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(command("advance", str(root), str(ttl), str(seconds)), stdout=subprocess.PIPE, text=True)


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{text!r} did not appear"
        time.sleep(0.01)


def test_of_two_racing_advances_one_wins_and_the_other_says_who(root_folder: Path) -> None:
    racers = [advance_process(root_folder / "raced", ttl=60, seconds=0.2) for _ in range(2)]
    outs = [racer.communicate(timeout=120)[0].splitlines()[1] for racer in racers]
    winner = next(k for k in (0, 1) if outs[k] == "finished 3")
    loser = outs[1 - winner]
    assert loser.startswith(f"CampaignHeld campaign 'c' is held by run process-{racers[winner].pid} (process")
    assert " since 20" in loser
    said = (root_folder / "raced" / "said").read_text().splitlines()
    assert len(said) == len(set(said)), "a stage ran twice"


def test_a_paused_advance_is_refused_when_it_wakes(root_folder: Path) -> None:
    whole = LocalStore(root_folder / "whole")
    campaign_fakes.run_once(whole, campaign_fakes.config())
    root = root_folder / "paused"
    stale = advance_process(root, ttl=0.9, seconds=0.3)
    wait_for(root / "said", "rollout 0")
    stale.send_signal(signal.SIGSTOP)
    try:
        time.sleep(1.3)
        store = LocalStore(root)
        log = LedgerLog(store, "c")
        state = advance(log, FakeStages(store), holder=this_process("second"))
        assert len(state.trained) == 3
    finally:
        stale.send_signal(signal.SIGCONT)
    out, _ = stale.communicate(timeout=60)
    assert out.splitlines()[1].startswith("StaleWriter campaign 'c'")
    assert tables(str(root)) == tables(whole.root)
    writers = {entry.epoch for entry in log.read() if entry.seq > next(e.seq for e in log.read() if e.epoch == 2)}
    assert writers == {2}, "nothing of the stale epoch may follow the new lease"

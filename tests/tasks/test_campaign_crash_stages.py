"""The shipped stages, killed at every ledger event and replaying recorded tokens: equal tables every time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


@pytest.mark.parametrize("d", ["0", "1"])
def test_the_loop_is_killed_at_every_event_and_resumed_to_equal_tables(tmp_path: Path, d: str) -> None:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as root:
        done = subprocess.run(
            [sys.executable, "-m", "tests.tasks.campaign_real_stages", root, d, "ledger"],
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["different"] == []
    # created, leased, released, 2 iterations of 5 steps, version 0 and 2 evaluations (0, 2): twice each
    assert report["kills"] == 2 * (3 + 2 * 5 + 1 + 2)
    assert report["tables"] > 40
    assert report["as_recorded"], "a replay of recorded tokens reproduces the recorded run"

"""Session fixture: nothing that a test started outlives pytest, even when pytest itself is killed.

Every process below pytest inherits a mark with the session's temporary folder; a watcher in a session of its own waits for the
end of pytest and then ends the stacks in that folder and everything marked. Run directly: PID START FOLDER.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import processes, stack

POLL_SECONDS = 0.5


@pytest.fixture(scope="session", autouse=True)
def leash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.getbasetemp()
    started = processes.identity(os.getpid())
    watcher = subprocess.Popen(
        (sys.executable, "-m", "tests.plugins.leash", str(os.getpid()), str(started), str(folder)),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )
    before = os.environ.get(processes.MARK)
    os.environ[processes.MARK] = f"{folder}/pytest"
    yield
    os.environ.pop(processes.MARK)
    if before is not None:
        os.environ[processes.MARK] = before
    end(folder)
    watcher.terminate()
    watcher.wait()


def end(folder: Path) -> None:
    """The supervisors first, or they would start again what is swept."""
    for state in folder.glob("*/stack.json"):
        stack.down(state.parent)
    processes.sweep(str(folder))


def main(pid: int, started: float, folder: Path) -> None:
    while (now := processes.identity(pid)) is not None and abs(now - started) < 1.0:
        time.sleep(POLL_SECONDS)
    end(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))

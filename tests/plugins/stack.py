"""Session fixtures: stack. A supervised local stack in a folder of its own, ended after the test whatever happened."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from infra import processes, stack, supervisor
from infra.processes import ProcessSpec
from infra.supervisor import StackState

StartStack = Callable[[Sequence[ProcessSpec]], StackState]


@pytest.fixture
def start_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartStack]:
    """Call with process specs; the state folder is `tmp_path`, which is also BESSEMER_HOME. No process outlives the test."""
    monkeypatch.setenv("BESSEMER_HOME", str(tmp_path))
    yield lambda specs: stack.up(tmp_path, specs)
    stack.down(tmp_path)
    assert processes.marked(supervisor.mark(tmp_path)) == []

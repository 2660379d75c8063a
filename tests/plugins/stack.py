"""Session fixtures: stack. One supervised local stack of the profile `tiny` for the whole pytest session.

Every part is real. Tests that need one service only take it from here (vllm.py, mlflow.py, prefect.py). `start_stack` is for
tests of the supervisor, with processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from data_contracts.config import Profile
from data_contracts.profiles import load_profile
from infra import processes, supervisor
from infra import stack as local_stack
from infra.processes import ProcessSpec
from infra.store import LocalStore
from infra.supervisor import ProcessState, StackState

if TYPE_CHECKING:
    from flows.stack import Addresses

StartStack = Callable[[Sequence[ProcessSpec]], StackState]
SETTINGS = ("stack.engine.max_model_len=1024",)
"""The serving tests decode longer sequences than the profile needs."""


@dataclass(frozen=True)
class RunningStack:
    """`home` is its BESSEMER_HOME; `hold` the folder that stops the trainer between step and checkpoint while it exists."""

    home: Path
    addresses: Addresses

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.home / "store")

    @property
    def hold(self) -> Path:
        return self.home / "hold"

    def profile(self, *overrides: str) -> Profile:
        """The stack's own profile with other campaign settings."""
        return load_profile("tiny", self.overrides(*overrides))

    def overrides(self, *more: str) -> list[str]:
        return [*SETTINGS, *more]

    def process(self, name: str) -> ProcessState:
        state = local_stack.running(self.home)
        assert state is not None, f"the session's stack died; see {self.home}/logs/supervisor.log"
        return next(process for process in state.processes if process.name == name)


@pytest.fixture(scope="session")
def session_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Prefect server and worker, MLflow, Dask, vLLM and trainer, started beside each other by the product's own code."""
    from flows import stack
    from models.training.desk import HOLD

    home = tmp_path_factory.mktemp("stack")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        patch.setenv(HOLD, str(home / "hold"))
        profile = load_profile("tiny", SETTINGS)
        stack.start(profile)
        addresses = stack.addresses(profile)
    yield RunningStack(home, addresses)
    local_stack.down(home)
    assert processes.marked(supervisor.mark(home)) == []


@pytest.fixture
def stack(session_stack: RunningStack, monkeypatch: pytest.MonkeyPatch) -> RunningStack:
    """The session's stack, whose state folder is BESSEMER_HOME for the length of the test."""
    monkeypatch.setenv("BESSEMER_HOME", str(session_stack.home))
    return session_stack


@pytest.fixture
def start_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartStack]:
    """Call with process specs; the state folder is `tmp_path`, which is also BESSEMER_HOME. No process outlives the test."""
    monkeypatch.setenv("BESSEMER_HOME", str(tmp_path))
    yield lambda specs: local_stack.up(tmp_path, specs)
    local_stack.down(tmp_path)
    assert processes.marked(supervisor.mark(tmp_path)) == []


def wanted_anyway(request: pytest.FixtureRequest) -> RunningStack | None:
    """The session's stack when any collected test needs it: then its services are shared instead of started twice."""
    needed = any("session_stack" in getattr(item, "fixturenames", ()) for item in request.session.items)
    found: RunningStack | None = request.getfixturevalue("session_stack") if needed else None
    return found

"""The supervisor: survives its caller, restarts what crashes, leaves no orphan however it ends."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data_contracts.config import DaskConfig, StackConfig
from infra import processes, stack, supervisor
from infra.processes import ProcessSpec
from infra.stack import StackFailed

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    stack.down(tmp_path)
    assert processes.marked(supervisor.mark(tmp_path)) == []


def sleeper(name: str, code: str = SLEEP, **fields: object) -> ProcessSpec:
    return ProcessSpec(name=name, argv=(sys.executable, "-c", code), **fields)  # type: ignore[arg-type]


def until(check: Callable[[], bool], *, seconds: float = 15.0) -> None:
    limit = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < limit, "condition not met in time"
        time.sleep(0.05)


def pid_of(home: Path, name: str) -> int | None:
    state = stack.running(home)
    return next((process.pid for process in state.processes if process.name == name), None) if state else None


def test_a_second_up_reuses_the_stack_and_down_ends_it(home: Path) -> None:
    changes: list[str] = []
    specs = [sleeper("a"), sleeper("b", after=("a",))]
    first = stack.up(home, specs, on_change=lambda change: changes.append(f"{change.name} {change.state}"))
    again = stack.up(home, specs)
    assert first == again
    assert "b healthy" in changes
    assert stack.down(home)
    assert stack.running(home) is None
    assert not stack.down(home)


def test_a_killed_process_is_started_again(home: Path) -> None:
    stack.up(home, [sleeper("a")])
    before = pid_of(home, "a")
    assert before is not None
    os.kill(before, signal.SIGKILL)
    until(lambda: pid_of(home, "a") not in (before, None))
    state = stack.running(home)
    assert state is not None
    assert state.processes[0].restarts == 1


def test_up_with_another_spec_replaces_only_what_changed(home: Path) -> None:
    stack.up(home, [sleeper("a"), sleeper("b"), sleeper("gone")])
    kept, changed = pid_of(home, "a"), pid_of(home, "b")
    state = stack.up(home, [sleeper("a"), sleeper("b", SLEEP + "#2"), sleeper("new")])
    assert [process.name for process in state.processes] == ["a", "b", "new"]
    assert pid_of(home, "a") == kept
    assert pid_of(home, "b") != changed
    assert len(processes.marked(supervisor.mark(home))) == 3


def test_kill_of_the_supervisor_leaves_no_orphan_and_the_next_up_works(home: Path) -> None:
    state = stack.up(home, [sleeper("a"), sleeper("b")])
    os.kill(state.pid, signal.SIGKILL)
    assert supervisor.state_path(home).exists()
    until(lambda: stack.running(home) is None)
    until(lambda: not processes.marked(supervisor.mark(home)))
    assert stack.up(home, [sleeper("a")]).pid != state.pid


def test_orphans_of_a_dead_supervisor_and_its_guard_are_swept_by_up(home: Path) -> None:
    orphan = processes.start(sleeper("a"), log=home / "a.log", owner=supervisor.mark(home))
    stack.up(home, [sleeper("b")])
    assert orphan.wait(5) != 0


def test_what_cannot_start_is_reported_with_its_log(home: Path) -> None:
    with pytest.raises(StackFailed, match=r"'bad' does not start: ended with code 1(.|\n)*no weights here"):
        stack.up(home, [sleeper("bad", "raise SystemExit('no weights here')", health="tcp://127.0.0.1:9")])


def test_only_what_has_no_address_is_started(home: Path) -> None:
    local = stack.service_specs(home, StackConfig(), stack.Ports(home), worker_env={})
    assert [spec.name for spec in local] == ["prefect", "mlflow", "dask", "prefect-worker"]
    remote = StackConfig(
        prefect_api="http://prefect/api", mlflow_uri="http://mlflow", dask=DaskConfig(address="tcp://scheduler:8786")
    )
    assert [spec.name for spec in stack.service_specs(home, remote, stack.Ports(home), worker_env={})] == ["prefect-worker"]
    addresses = [spec.address for spec in local]
    assert all("127.0.0.1" in address for address in addresses)
    assert len(set(addresses)) == len(addresses)

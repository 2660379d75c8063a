"""Processes end with everything they started, and say why when they do not come up."""

import sys
import time
from pathlib import Path

import pytest

from infra import processes
from infra.processes import ProcessFailed, ProcessSpec

SLEEP = "import time; time.sleep(60)"


def python(code: str, **fields: object) -> ProcessSpec:
    return ProcessSpec(name="p", argv=(sys.executable, "-c", code), **fields)  # type: ignore[arg-type]


def test_stop_ends_children_that_left_the_group_and_ignore_term(tmp_path: Path) -> None:
    child = f"import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
    spec = python(
        f"import subprocess,sys; subprocess.Popen([sys.executable,'-c',{child!r}], start_new_session=True)\n"
        f"print('up',flush=True); {SLEEP}",
        stop_seconds=1.0,
    )
    process = processes.start(spec, log=tmp_path / "p.log", owner=str(tmp_path))
    while "up" not in processes.tail(tmp_path / "p.log"):
        time.sleep(0.02)
    assert len(processes.marked(str(tmp_path))) == 2
    processes.stop(process, spec, owner=str(tmp_path))
    assert processes.marked(str(tmp_path)) == []


def test_a_child_that_lost_its_environment_is_found_in_its_leaders_session(tmp_path: Path) -> None:
    child = f"print('up',flush=True); {SLEEP}"
    spec = python(f"import subprocess,sys; subprocess.run([sys.executable,'-c',{child!r}], env={{}})")
    process = processes.start(spec, log=tmp_path / "p.log", owner=str(tmp_path))
    while "up" not in processes.tail(tmp_path / "p.log"):
        time.sleep(0.02)
    assert len(processes.marked(str(tmp_path))) == 2
    processes.sweep(str(tmp_path))
    assert processes.marked(str(tmp_path)) == []
    process.wait()


def test_a_server_is_healthy_when_it_answers_and_its_port_is_free_after_stop(tmp_path: Path) -> None:
    port = processes.free_port()
    url = f"http://127.0.0.1:{port}"
    spec = ProcessSpec(
        name="web",
        argv=(sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"),
        cwd=str(tmp_path),
        address=url,
        health=url,
    )
    process = processes.start(spec, log=tmp_path / "logs/web.log", owner=str(tmp_path))
    processes.wait_healthy(process, spec, log=tmp_path / "logs/web.log")
    assert not processes.port_is_free(port)
    assert processes.choose_port(port) != port
    processes.stop(process, spec, owner=str(tmp_path))
    assert processes.port_is_free(port)


def test_an_early_end_quotes_the_log(tmp_path: Path) -> None:
    spec = python("raise SystemExit('no such model')", health="tcp://127.0.0.1:9")
    process = processes.start(spec, log=tmp_path / "p.log", owner=str(tmp_path))
    with pytest.raises(ProcessFailed, match=r"'p' ended with code 1(.|\n)*no such model"):
        processes.wait_healthy(process, spec, log=tmp_path / "p.log")


def test_a_missing_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="cannot start 'x' \\(/no/such/command\\)"):
        processes.start(ProcessSpec(name="x", argv=("/no/such/command",)), log=tmp_path / "x.log", owner=str(tmp_path))


def test_a_pid_names_a_process_only_with_its_start_time(tmp_path: Path) -> None:
    process = processes.start(python(SLEEP), log=tmp_path / "p.log", owner=str(tmp_path))
    assert processes.identity(process.pid) is not None
    processes.stop(process, python(SLEEP), owner=str(tmp_path))
    assert processes.identity(process.pid) is None

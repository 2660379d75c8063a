"""`bessemer bench sandbox`: parts on real boxes, figures as JSON, exit 1 below a bar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from environments.sandbox import bench
from environments.sandbox.bubblewrap import BubblewrapBackend
from environments.sandbox.docker_run import DockerRun
from flows import bench_commands
from flows.cli import app


def test_a_bench_writes_its_figures_and_fails_below_a_bar(
    docker_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_commands, "ALIVE", 8)
    name = next(name for name in bench_commands.BARS if "alive" in name)
    monkeypatch.setitem(bench_commands.BARS, "errors with 8 sandboxes alive", bench_commands.BARS[name])
    file = tmp_path / "figures.json"
    command = ["bench", "sandbox", "--only", "alive", "--json", str(file)]
    assert CliRunner().invoke(app, command).exit_code == 0
    found = json.loads(file.read_text())
    assert found["ok"] is True
    assert [(row["name"], row["status"]) for row in found["checks"]] == [("errors with 8 sandboxes alive", "pass")]
    assert found["figures"]["alive"]["seconds"] > 0
    monkeypatch.setitem(bench_commands.BARS, "errors with 8 sandboxes alive", bench_commands.Bar(-1, False, ""))
    assert CliRunner().invoke(app, command).exit_code == 1
    assert json.loads(file.read_text())["ok"] is False


def test_an_unknown_part_is_refused() -> None:
    ended = CliRunner().invoke(app, ["bench", "sandbox", "--only", "everything"])
    assert ended.exit_code == 2
    assert "reaper" in ended.output


async def test_both_sides_grade_the_same(bubblewrap_backend: BubblewrapBackend, docker_engine: str) -> None:
    for work in bench.WORK:
        fast, slow = await bench.verdict(work, bubblewrap_backend)(), await bench.verdict(work, DockerRun())()
        assert fast == slow


async def test_a_wrong_verdict_is_no_figure(bubblewrap_backend: BubblewrapBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench, "_COLLECTED", bench.Collected(artifacts=(bench.artifact("app.py", b"def add(a, b): return 0\n"),))
    )
    with pytest.raises(bench.Wrong, match="right candidate failed"):
        await bench.verdict("cases", bubblewrap_backend)()


async def test_traces_tell_what_is_left(bubblewrap_backend: BubblewrapBackend) -> None:
    call = bench.verdict("cases", bubblewrap_backend)
    await call()
    before = bench.traces(None)
    await call()
    assert not (await bench._settled(before, None)).more_than(before)
    box = await bubblewrap_backend.acquire(bench.SandboxSpec())
    assert any("control groups" in row for row in bench.traces(None).more_than(before))
    await box.destroy()

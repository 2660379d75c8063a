"""`bessemer sandbox check`: a table for people, lines for machines, exit code 1 when a check fails, 2 when nothing can run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from environments.sandbox.conformance.suite import checks
from environments.sandbox.shell_agent import HeadTail
from flows import cli


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as found:
        cli.main(["sandbox", "check", *arguments])
    return int(found.value.code or 0)


def test_json_has_a_line_a_check_with_the_reason_for_what_was_skipped(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    themes = ("requests", "exits", "network")
    assert ended("--backend", "fake", "--json", *themes) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert {row["name"] for row in rows} == {item.name for item in checks(themes)}
    assert all(set(row) == {"name", "status", "reason"} for row in rows)
    assert not [row for row in rows if row["status"] == "fail"]
    skipped = [row for row in rows if row["status"] == "skip"]
    assert {row["reason"] for row in skipped if row["name"].startswith("network.")} == {
        "the backend 'fake' does not offer no_network"
    }
    assert all(row["reason"] for row in skipped)
    assert not any(row["reason"] for row in rows if row["status"] == "pass")
    assert not err


def test_a_failed_check_is_a_row_with_its_reason_and_exit_code_1(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake with its cap on output taken away."""
    monkeypatch.setattr(HeadTail, "truncated", property(lambda self: False))
    monkeypatch.setenv("COLUMNS", "200")
    assert ended("-b", "fake", "streams.capped", "exits.codes") == 1
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert "fail" in rows["streams.capped"]
    assert "truncation flag" in out
    assert "pass" in rows["exits.codes"]
    assert "1 passed, 1 failed, 0 skipped" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", "vmware"), ("there is no sandbox backend 'vmware'", "bubblewrap, docker, fake")),
        (("--backend", "fake", "nonsense"), ("there is no check 'nonsense'", "streams, exits")),
    ],
)
def test_a_mistake_is_one_readable_line(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert ended(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bessemer: ")
    assert all(word in line for word in words)


def test_a_host_that_cannot_make_boxes_is_told_what_is_missing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ended("--backend", "bubblewrap") == 2
    assert "apt-get install -y bubblewrap" in capsys.readouterr().err

"""`bessemer domains`: the table, admission as lines for machines, and what a mistake says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flows.cli import main

SPOILT = """
from environments.domains.echo import Echo

class Generous(Echo):
    '''Its floor is too high to be true: a no-op is said to earn nothing, and an exploit pays.'''
    name = "generous"
    floor = -1.0
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(list(arguments))
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_domains_are_listed_with_their_levels(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("domains",), ("domains", "list", "echo")):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert "echo" in out
    assert "code_repair" in run(capsys, "domains")[1]


def test_a_check_is_a_line_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "domains", "check", "echo", "arithmetic", "--level", "all", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {row["status"] for row in rows} == {"pass"}
    assert {"echo/default/oracle", "arithmetic/multiplication/no-op"} <= {row["name"] for row in rows}
    assert all(row["reason"] == "" and row["trust"] == ["cases"] for row in rows)


def test_what_is_not_admitted_fails_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spoilt_domain.py").write_text(SPOILT)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = run(capsys, "domains", "check", "spoilt_domain:Generous", "--json")
    failed = {row["name"]: row["reason"] for row in map(json.loads, out.splitlines()) if row["status"] == "fail"}
    assert code == 1
    assert any(name.endswith("/no-op") for name in failed), failed
    assert "FAIL  no-op" in run(capsys, "domains", "check", "spoilt_domain:Generous")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("check", "nonsense"), ("unknown domain 'nonsense'", "echo")),
        (("check", "echo", "--level", "nonsense"), ("no such domain has the level nonsense",)),
        (("check", "echo", "--backend", "nonsense"), ("no sandbox backend 'nonsense'", "bubblewrap")),
    ],
)
def test_a_mistake_is_named(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    code, _, err = run(capsys, "domains", *arguments)
    assert code == 2
    assert all(word in err for word in words), err


def test_every_installed_domain_is_admitted(capsys: pytest.CaptureFixture[str]) -> None:
    """The same command that a domain's author calls; every level that has problems of its own."""
    assert shutil.which("bwrap"), "bubblewrap is missing: make setup"
    code, out, _ = run(capsys, "domains", "check", "--level", "all", "--problems", "2", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, [row for row in rows if row["status"] == "fail"]) == (0, [])
    assert {row["name"].split("/")[0] for row in rows} >= {"arithmetic", "calculator", "code", "code_repair", "echo"}

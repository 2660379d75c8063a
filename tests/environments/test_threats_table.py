"""docs/concepts/threats.md names only tests and checks that exist, on both backends, and forgets no row of the list it answers.

The list itself lies beside a checkout, in ../shared/THREATS.md; where it is there, headings and numbers of rows are compared.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from environments.sandbox.base import CONTRACT, ISOLATION
from environments.sandbox.conformance.suite import checks
from tests.environments import test_threats, test_threats_boxes

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "threats.md"
LIST = ROOT.parent / "shared" / "THREATS.md"
LATER = re.compile(r"\*later: [^*]+\*")
HEADINGS_OF_OURS = {"Ground rules", "What stays open"}


def rows() -> dict[str, list[list[str]]]:
    """The rows of each table of the page by heading, without their heads."""
    found: dict[str, list[list[str]]] = {}
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        lines = [line for line in body.splitlines() if line.startswith("|")]
        found[heading] = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return found


ROWS = [pytest.param(row, id=f"{heading}-{row[0][:40]}") for heading, table in rows().items() for row in table]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_shown_by_what_exists(row: list[str]) -> None:
    assert len(row) == 4, row
    names = re.findall(r"`([^`]+)`", row[3])
    if not names:
        assert LATER.fullmatch(row[3]), f"nothing shows {row[0]!r}, and it is not marked as later work"
    assert row[1]
    for name in names:
        assert exists(name), f"{row[0]!r} names {name}, which is no test or check"
    if row[2] == "all" and any(name.startswith("attempts:") for name in names):
        levels = {name.partition(":")[2].partition("-")[0] for name in names if name.startswith("attempts:")}
        assert levels <= {"cases", "proxied", "in_process"}


def exists(name: str) -> bool:
    kind, _, what = name.partition(":")
    if kind == "attempts":
        return any(attempt.startswith(what) for attempt in test_threats.ATTEMPTS)
    if kind == "boxes":
        return any(attempt.startswith(what) for attempt in test_threats_boxes.ATTEMPTS)
    if kind == "sandbox":
        return any(check.name == what and set(check.needs) <= CONTRACT | ISOLATION for check in checks())
    file, _, test = name.partition("::")
    source = ROOT / "tests" / file
    return source.is_file() and any(
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == test
        for node in ast.parse(source.read_text()).body
    )


def test_names_that_do_not_exist_are_noticed() -> None:
    for name in (
        "attempts:cases-nothing",
        "boxes:nothing",
        "sandbox:life.nothing",
        "environments/test_tools.py::test_nothing",
        "x",
    ):
        assert not exists(name)


def test_every_kind_of_attempt_is_in_the_table() -> None:
    named = {name for _, table in rows().items() for row in table for name in re.findall(r"`attempts:([^`]+)`", row[3])}
    assert [attempt for attempt in test_threats.ATTEMPTS if not attempt.startswith(tuple(named))] == []


def test_both_backends_run_every_attempt() -> None:
    assert set(test_threats.BACKENDS) == set(test_threats_boxes.BACKENDS) == {"bubblewrap", "docker"}


@pytest.mark.skipif(not LIST.is_file(), reason="../shared/THREATS.md is not beside this checkout")
def test_no_row_of_the_list_is_forgotten() -> None:
    wanted: dict[str, int] = {}
    for part in re.split(r"^## ", LIST.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        wanted[heading] = len(re.findall(r"^- ", body, flags=re.MULTILINE)) or 1
    ours = {heading: len(table) for heading, table in rows().items() if heading not in HEADINGS_OF_OURS}
    assert list(ours.items()) == list(wanted.items())

"""Rows are compared by exact cells and never by their order, and what differs is said row by row."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.application.base import Table
from environments.application.database import canonical, digest
from environments.application.differences import differences, equal

KEYED = {"t": Table(key=("id",))}
CELLS = st.none() | st.integers(-3, 3) | st.sampled_from([1.0, -0.0, 0.0, 0.1]) | st.sampled_from(["", "1", "a"])
ROWS = st.lists(st.builds(lambda name, a, b: {"id": name, "a": a, "b": b}, st.integers(0, 5), CELLS, CELLS), max_size=7)


def told(wanted: list[dict[str, Any]], found: list[dict[str, Any]], tables: dict[str, Table] = KEYED) -> list[str]:
    return [text for _, text in differences({"t": wanted}, {"t": found}, tables)]


@settings(deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_order_never_counts(rows: list[dict[str, Any]], random: Any) -> None:
    shuffled = random.sample(rows, len(rows))
    assert told(rows, shuffled) == []
    assert equal({"t": rows}, {"t": shuffled}, KEYED)
    assert digest({"t": rows}) == digest({"t": shuffled})


@settings(deadline=None)
@given(ROWS, ROWS, st.randoms(use_true_random=False))
def test_what_is_said_does_not_depend_on_order_and_is_empty_only_for_equal_rows(
    wanted: list[dict[str, Any]], found: list[dict[str, Any]], random: Any
) -> None:
    texts = told(wanted, found)
    assert texts == told(random.sample(wanted, len(wanted)), random.sample(found, len(found)))
    same = sorted(map(canonical, wanted)) == sorted(map(canonical, found))
    assert (texts == []) == same == equal({"t": wanted}, {"t": found}, KEYED)
    assert (digest({"t": wanted}) == digest({"t": found})) == same


@pytest.mark.parametrize(
    ("left", "right"), [(1, 1.0), (1, "1"), (0, None), (0.1 + 0.2, 0.3), (0.0, -0.0), ("a", "A"), ("", None)]
)
def test_cells_are_exact(left: Any, right: Any) -> None:
    assert told([{"id": 1, "a": left}], [{"id": 1, "a": right}]) == [f"id 1: a is {right!r}, expected {left!r}"]


def test_rows_that_are_missing_too_many_or_doubled() -> None:
    row = {"id": 1, "a": "x"}
    assert told([row], []) == ["missing: id 1, a 'x'"]
    assert told([], [row]) == ["not expected: id 1, a 'x'"]
    assert told([row], [row, row]) == ["not expected: id 1, a 'x'"]
    assert told([row, row], [row]) == ["missing: id 1, a 'x'"]


def test_ignored_columns_do_not_count_and_are_not_shown() -> None:
    tables = {"t": replace(KEYED["t"], ignore=("at",))}
    assert told([{"id": 1, "a": 2, "at": "now"}], [{"id": 1, "a": 2, "at": "later"}], tables) == []
    assert told([], [{"id": 1, "a": 2, "at": "later"}], tables) == ["not expected: id 1, a 2"]
    surrogate = {"t": Table(key=("id",), ignore=("id",))}
    assert told([{"id": 1, "a": 2}], [{"id": 9, "a": 2}], surrogate) == []
    assert told([{"id": 1, "a": 2}], [{"id": 9, "a": 3}], surrogate) == ["missing: a 2", "not expected: a 3"]


def test_long_cells_are_cut() -> None:
    (text,) = told([], [{"id": 1, "a": "x" * 10_000}])
    assert len(text) < 120

"""How two states differ, row by row, in words: missing rows, rows that should not be there, and cells of rows with one key.

Rows are compared as multisets, so their order never counts; cells by exact type and value (`database.canonical`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from environments.application.base import Row, State, Table
from environments.application.database import canonical

SHOWN_CELLS, SHOWN_CHARS = 12, 60


def equal(left: State, right: State, tables: Mapping[str, Table]) -> bool:
    """Whether the counted content of these tables is the same."""
    return all(_counted(left[name], table) == _counted(right[name], table) for name, table in tables.items())


def differences(wanted: State, found: State, tables: Mapping[str, Table]) -> Iterator[tuple[str, str]]:
    """(table, what differs), in the order of tables and rows, the same for every order of rows."""
    for name, table in tables.items():
        for text in _table(wanted[name], found[name], table):
            yield name, text


def _counted(rows: Sequence[Row], table: Table) -> Counter[tuple[Any, ...]]:
    return Counter(canonical(row, ignore=table.ignore) for row in rows)


def _table(wanted: Sequence[Row], found: Sequence[Row], table: Table) -> Iterator[str]:
    left, right = _counted(wanted, table), _counted(found, table)
    if left == right:
        return
    missing, extra = _by_key(wanted, left - right, table), _by_key(found, right - left, table)
    for key in sorted({*missing, *extra}):
        absent, surplus = missing.get(key, []), extra.get(key, [])
        if len(absent) == len(surplus) == 1:
            yield f"{_name(absent[0], table)}: {_cells(absent[0], surplus[0], table)}"
        else:
            yield from (f"missing: {_row(row, table)}" for row in absent)
            yield from (f"not expected: {_row(row, table)}" for row in surplus)


def _by_key(rows: Sequence[Row], differing: Counter[tuple[Any, ...]], table: Table) -> dict[tuple[Any, ...], list[Row]]:
    """The rows that differ, grouped by their counted key; as often as they are too many or too few."""
    left, groups = Counter(differing), defaultdict(list)
    key = [column for column in table.key if column not in table.ignore]
    for row in sorted(rows, key=lambda row: canonical(row, ignore=table.ignore)):
        content = canonical(row, ignore=table.ignore)
        if left[content] > 0:
            left[content] -= 1
            groups[canonical({column: row[column] for column in key}) if key else content].append(row)
    return groups


def _name(row: Row, table: Table) -> str:
    return ", ".join(f"{column} {_cell(row[column])}" for column in table.key if column not in table.ignore)


def _cells(wanted: Row, found: Row, table: Table) -> str:
    changed = [
        f"{column} is {_cell(found[column])}, expected {_cell(wanted[column])}"
        for column in wanted
        if column not in table.ignore
        and canonical({column: wanted[column]}) != canonical({column: found[column]})
    ]  # fmt: skip
    return "; ".join(changed[:SHOWN_CELLS])


def _row(row: Row, table: Table) -> str:
    shown = [f"{column} {_cell(cell)}" for column, cell in row.items() if column not in table.ignore]
    return ", ".join(shown[:SHOWN_CELLS])


def _cell(cell: object) -> str:
    text = repr(cell)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."

"""Rules over a narrow projection of scalars: the vocabulary in which the suites are written, and its plain reading.

A suite's `project` turns records into columns of scalars (lengths, sums, flags), its `suite` lists the rules over them. The
same rules are read twice: by `Suite.violations` here (microseconds, no imports, on rollout workers while a group is sealed) and
by `gate`, which renders each one to exactly one expectation of Great Expectations. A test holds both readings to equal
findings.

Every projection has the columns `row` (from 1), `row_id` and `group_id`. A cell that is None or NaN is passed over, as Great
Expectations does: what must be finite has a flag of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from data_contracts.records import Record

Columns = dict[str, list[Any]]
Kind = Literal["between", "one_of", "holds", "unique"]
KEYS = ("row", "row_id", "group_id")


class Violation(Record, frozen=True, kw_only=True):
    """One cell that breaks a rule; `row` is None when the table as a whole does."""

    table: str
    row: int | None
    row_id: str
    group_id: str
    field: str
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        place = f"{self.table}, row {self.row} ({self.row_id})" if self.row is not None else self.table
        return f"{place}, field '{self.field}': {self.problem}. {self.remedy}"

    @property
    def problem(self) -> str:
        """What was found and expected, in words."""
        return f"found {self.found}, expected {self.expected}" if self.found else f"expected {self.expected}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule on one projected column. `field` is the record's field that a person would look at."""

    column: str
    field: str
    kind: Kind
    expected: str
    remedy: str
    low: float | None = None
    high: float | None = None
    values: tuple[str, ...] = ()
    shows: str | None = None
    """The column whose cell a message shows; None: this one, and nothing for a flag."""

    def breaks(self, value: Any) -> bool:
        """Whether one non-empty cell breaks the rule (`unique` is decided over the column)."""
        if self.kind == "between":
            return (self.low is not None and value < self.low) or (self.high is not None and value > self.high)
        if self.kind == "one_of":
            return value not in self.values
        return self.kind == "holds" and value is not True


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The rules of one table; `min_rows` is its table-level rule."""

    table: str
    rules: tuple[Rule, ...]
    min_rows: int = 1

    def violations(self, columns: Mapping[str, list[Any]]) -> list[Violation]:
        """Everything that breaks a rule, in order of rule and row."""
        found: list[Violation] = []
        rows = len(columns["row"])
        if rows < self.min_rows:
            found.append(self.too_few(rows))
        for rule in self.rules:
            values = columns[rule.column]
            counts = Counter(values) if rule.kind == "unique" else None
            for i, value in enumerate(values):
                if value is None or value != value:
                    continue
                if counts[value] > 1 if counts is not None else rule.breaks(value):
                    found.append(self.violation(rule, columns, i))
        return found

    def violation(self, rule: Rule, columns: Mapping[str, list[Any]], i: int) -> Violation:
        """The finding on row `i` (from 0)."""
        shown = rule.shows or (None if rule.kind == "holds" else rule.column)
        return Violation(
            table=self.table,
            row=columns["row"][i],
            row_id=columns["row_id"][i],
            group_id=columns["group_id"][i],
            field=rule.field,
            found=repr(columns[shown][i])[:80] if shown else "",
            expected=rule.expected,
            remedy=rule.remedy,
        )

    def too_few(self, rows: int) -> Violation:
        return Violation(
            table=self.table,
            row=None,
            row_id="",
            group_id="",
            field="rows",
            found=f"{rows} rows",
            expected=f"at least {self.min_rows}",
            remedy="Look at the stage that wrote the table: it produced nothing",
        )


def between(
    column: str, low: float | None, high: float | None, *, expected: str, remedy: str, field: str | None = None
) -> Rule:
    return Rule(column=column, field=field or column, kind="between", expected=expected, remedy=remedy, low=low, high=high)


def one_of(column: str, values: tuple[str, ...], *, remedy: str, field: str | None = None) -> Rule:
    return Rule(
        column=column,
        field=field or column,
        kind="one_of",
        expected="one of " + ", ".join(values),
        remedy=remedy,
        values=values,
    )


def holds(column: str, *, expected: str, remedy: str, field: str, shows: str | None = None) -> Rule:
    return Rule(column=column, field=field, kind="holds", expected=expected, remedy=remedy, shows=shows)


def unique(column: str, *, expected: str, remedy: str, field: str | None = None) -> Rule:
    return Rule(column=column, field=field or column, kind="unique", expected=expected, remedy=remedy)

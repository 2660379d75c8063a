"""What an application is: tables, operations offered as tools, rules of the business, and how a fresh database begins.

An application is declared, not run: it holds no state, so one object serves every episode, replay and rule. Operations are
plain functions over a `Transaction`; they see a clock and counters that depend on the calls only, never on the host, so the
same calls on the same beginning give the same database. An operation that refuses raises ToolError and leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from data_contracts.errors import InputError
from data_contracts.protocols import to_json
from data_contracts.records import Problem, Record, ToolSpec

if TYPE_CHECKING:
    from environments.application.replay import History

Cell = str | int | float | None
Row = Mapping[str, Any]
State = Mapping[str, Sequence[Row]]
"""The content of every declared table, as it was at one moment."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """How a table is compared: `key` names a row for people, `ignore` are columns that do not count (times, surrogate ids).

    A column that refers to an ignored one must be ignored, too; ids from `Transaction.number` of a narrow scope need not be.
    """

    key: tuple[str, ...]
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One tool: its declared arguments and what it does. Only one that `writes` can change the database."""

    spec: ToolSpec
    run: Callable[[Transaction, dict[str, Any]], Any]
    writes: bool = False


@dataclass(frozen=True, kw_only=True)
class Broken:
    """Where a rule was broken: the index of the call in the audit log (None: by the end as a whole), and how."""

    call: int | None
    why: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule of the business with an id and a sentence; `broken` looks at the whole history and says where it was broken."""

    id: str
    sentence: str
    broken: Callable[[History], Iterable[Broken]]


class Start(Record, frozen=True, kw_only=True):
    """How a database begins: the time on its clock (ISO 8601, UTC) and the rows of its tables."""

    now: str
    rows: dict[str, tuple[dict[str, Cell], ...]]

    @property
    def digest(self) -> str:
        return hashlib.sha256(to_json(self)).hexdigest()[:16]


@dataclass
class Transaction:
    """What an operation works with. SQL comes from the application, never from a policy; values are always parameters."""

    connection: sqlite3.Connection
    now: str
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def today(self) -> str:
        return self.now[:10]

    def rows(self, sql: str, *values: Cell) -> list[dict[str, Any]]:
        found = self.connection.execute(sql, values)
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found]

    def row(self, sql: str, *values: Cell) -> dict[str, Any] | None:
        """The first row, or None."""
        found = self.rows(sql, *values)
        return found[0] if found else None

    def run(self, sql: str, *values: Cell) -> int:
        """Runs a statement that changes rows; says how many."""
        return self.connection.execute(sql, values).rowcount

    def number(self, scope: str) -> int:
        """1, 2, 3, ... within a scope: ids made of it do not depend on what other scopes did."""
        self.numbers[scope] = self.numbers.get(scope, 0) + 1
        return self.numbers[scope]


class Application(ABC):
    """A service with a database. Subclasses are stateless and deterministic."""

    name: ClassVar[str]
    schema: ClassVar[str]
    """SQL that creates the tables."""
    tables: ClassVar[Mapping[str, Table]]
    """Every table of the schema, in an order in which rows can be inserted."""
    rules: ClassVar[tuple[Rule, ...]] = ()

    @abstractmethod
    def operations(self) -> Sequence[Operation]:
        """All tools of the application; a problem offers them all, or some."""

    @abstractmethod
    def populate(self, seed: int) -> Start:
        """The beginning of this seed, the same on every host."""

    def beginning(self, seed: int) -> dict[str, Any]:
        """`environment.settings["start"]` of a problem that begins with this seed.

        The digest notices, when such a problem is graded later, that `populate` has changed since.
        """
        return {"seed": seed, "digest": self.populate(seed).digest}

    def start_of(self, problem: Problem) -> Start:
        """How a problem's database begins: {"seed", "digest"}, or {"now", "rows"} for rows of one's own. Raises InputError."""
        place = "environment.settings.start"
        given = problem.environment.settings.get("start")
        if not isinstance(given, dict):
            raise InputError(f"found {given!r}", field=place, remedy='Write {"seed": n, "digest": text} or {"now", "rows"}')
        if set(given) == {"seed", "digest"} and type(given["seed"]) is int:
            start = self.populate(given["seed"])
            if start.digest != given["digest"]:
                raise InputError(
                    f"seed {given['seed']} of '{self.name}' begins with {start.digest}, not with {given['digest']!r}",
                    field=f"{place}.digest",
                    remedy="The application has changed since the problem was made: make it again, or use that version",
                )
            return start
        try:
            start = msgspec.convert(given, Start)
        except msgspec.ValidationError as error:
            raise InputError(str(error), field=place, remedy='Write {"seed": n, "digest": text} or {"now", "rows"}') from error
        if unknown := sorted(set(start.rows) - set(self.tables)):
            raise InputError(
                f"'{self.name}' has no table '{unknown[0]}'", field=f"{place}.rows",
                remedy=f"Its tables: {', '.join(self.tables)}",
            )  # fmt: skip
        return start

    def offered(self, problem: Problem) -> dict[str, Operation]:
        """The operations that a problem offers, by name. Raises InputError for a tool that is not the application's."""
        known = {operation.spec.name: operation for operation in self.operations()}
        for tool in problem.tools:
            if tool.name not in known or known[tool.name].spec != tool:
                raise InputError(
                    f"'{tool.name}' is no tool of '{self.name}', or is declared differently there", field="tools",
                    remedy=f"Copy the specifications of {', '.join(known)}",
                )  # fmt: skip
        return {tool.name: known[tool.name] for tool in problem.tools}

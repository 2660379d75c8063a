"""The database of one episode: SQLite in the memory of the control plane, opened fresh, owned by the environment.

Nothing of it lies in a sandbox, so nothing a policy runs can reach it; the only way in is `attempt`: a name from the
allow-list, arguments as JSON that fit the declared schema, one transaction a call. A refused call (ToolError, or a constraint
of the schema) is rolled back with its counters. The clock is the beginning plus one second for each call before, refused ones
included.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any

import msgspec

from data_contracts.errors import InputError
from data_contracts.protocols import to_json
from environments.application.base import Application, Operation, Start, State, Transaction
from environments.tools import MAX_LOGGED_CHARS, ToolError, check_arguments

MAX_CALL_CHARS = MAX_LOGGED_CHARS - 1
"""Arguments of one call: what is longer is refused, and what the audit log keeps of it is refused again when it is replayed."""


class Database:
    """Single use; not safe under concurrent calls. Raises InputError when the beginning does not fit the schema."""

    def __init__(self, application: Application, start: Start) -> None:
        self._application = application
        try:
            self._start = datetime.fromisoformat(start.now)
        except ValueError as error:
            raise _unfit(f"'{start.now[:40]}' is no time", "now", "Write it like 2031-05-14T09:00:00") from error
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._numbers: dict[str, int] = {}
        try:
            self._connection.execute("PRAGMA foreign_keys = ON")
            self._connection.executescript(application.schema)
            self._connection.execute("BEGIN")
            for table in application.tables:
                self._fill(table, start.rows.get(table, ()))
            self._connection.execute("COMMIT")
        except BaseException:
            self._connection.close()
            raise

    def _fill(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        known = columns(self._application)[table]
        for index, row in enumerate(rows):
            if unknown := sorted(set(row) - set(known)):
                raise _unfit(f"has no column '{unknown[0]}'", f"rows.{table}[{index}]", f"Columns: {', '.join(known)}")
            sql = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"  # noqa: S608  checked above
            try:
                self._connection.execute(sql, tuple(row.values()))
            except (sqlite3.Error, OverflowError) as error:
                raise _unfit(str(error), f"rows.{table}[{index}]", "Write a row that fits the schema") from error

    def call(self, operation: Operation, arguments: dict[str, Any], *, at: int) -> Any:
        """One transaction; `at` is the number of calls before it. The result is JSON-shaped. Raises ToolError, rolled back."""
        work = Transaction(connection=self._connection, now=self.now(at), numbers=dict(self._numbers))
        self._connection.execute(f"PRAGMA query_only = {'OFF' if operation.writes else 'ON'}")
        self._connection.execute("BEGIN")
        try:
            result = msgspec.json.decode(msgspec.json.encode(operation.run(work, arguments)))
            self._connection.execute("COMMIT")
        except BaseException as error:
            self._connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.IntegrityError | OverflowError):
                raise ToolError(f"refused: {error}") from None
            raise
        self._numbers = work.numbers
        return result

    def now(self, at: int) -> str:
        """The time at the call with this index."""
        return (self._start + timedelta(seconds=at)).isoformat(timespec="seconds")

    def snapshot(self) -> dict[str, list[dict[str, Any]]]:
        """Every declared table as rows, in no particular order."""
        reader = Transaction(connection=self._connection, now="")
        return {table: reader.rows(f"SELECT * FROM {table}") for table in self._application.tables}  # noqa: S608  declared

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()


def _unfit(problem: str, field: str, remedy: str) -> InputError:
    return InputError(problem, field=f"environment.settings.start.{field}", remedy=remedy)


@cache
def columns(application: Application) -> dict[str, tuple[str, ...]]:
    """The columns of every declared table."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.executescript(application.schema)
        return {
            table: tuple(column[1] for column in connection.execute(f"PRAGMA table_info({table})"))
            for table in application.tables
        }
    finally:
        connection.close()


def attempt(database: Database, offered: Mapping[str, Operation], name: str, arguments: str, *, at: int) -> Any:
    """One call as a policy wrote it: the name is looked up, the arguments are JSON. Raises ToolError."""
    operation = offered.get(name)
    if operation is None:
        raise ToolError(f"unknown tool '{name[:100]}'; the tools are {', '.join(sorted(offered)) or 'none'}")
    checked = check_arguments(operation.spec, arguments, most=MAX_CALL_CHARS)
    return database.call(operation, whole(checked, operation.spec.parameters), at=at)


def whole(value: Any, schema: Any) -> Any:
    """Arguments with 2.0 as 2 wherever the schema asks for an integer: JSON schema takes both, databases tell them apart."""
    if not isinstance(schema, dict):
        return value
    if isinstance(value, float) and schema.get("type") == "integer":
        return int(value)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return {name: whole(inner, properties.get(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [whole(inner, schema.get("items")) for inner in value]
    return value


def canonical(row: Mapping[str, Any], *, ignore: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """A row as a value that is equal exactly when its counted cells are: by type and value, so 1 is not 1.0 and not '1'."""
    return tuple([(name, type(cell).__name__, _plain(cell)) for name, cell in sorted(row.items()) if name not in ignore])


def _plain(cell: Any) -> Any:
    return cell.hex() if isinstance(cell, float | bytes) else cell


def digest(state: State) -> str:
    """Of every table and column, whatever the order of rows."""
    content = {table: sorted(map(canonical, rows)) for table, rows in state.items()}
    return hashlib.sha256(to_json(content)).hexdigest()


def seal(state: State, calls: Sequence[Mapping[str, Any]]) -> str:
    """Of a final state and the audit log that led to it: neither can be altered alone."""
    made = ascii([(str(call["name"]), str(call["arguments"]), str(call["status"])) for call in calls])
    return hashlib.sha256(f"{digest(state)} {made}".encode()).hexdigest()

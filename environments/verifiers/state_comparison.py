"""Trust `cases`: the end of the episode is the end to which the expected calls lead on a fresh database.

`settings`: {"calls": [{"name", "arguments"}, ...], "tables": [names], "ignore": {table: [columns]}, "read_only": bool}.
`calls` are played on the problem's beginning; the content of the tables (all of the application's unless "tables" names some)
is compared with what the calls of the episode's audit log lead to, replayed in the same way. The order of rows does not count,
nor do the columns that the application or "ignore" declares; numbers are exact and 1 is not 1.0. The score is 1 or 0; evidence
is every row that differs. Nothing is compared but the end: how it was reached is `business_rules`.

A problem whose expected end is its beginning would pay for doing nothing. It is refused, unless it says "read_only" and stands
in a `composite` beside a part that a silent episode does not pass, such as the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from data_contracts.errors import InputError
from data_contracts.records import Check, Problem, Verdict
from environments.application.base import Application, Table
from environments.application.database import columns
from environments.application.differences import differences, equal
from environments.application.environment import application_of
from environments.application.replay import expected, logged
from environments.base import Acquire, Collected, Verifier

SETTINGS = ("calls", "tables", "ignore", "read_only")
SHOWN_ROWS = 20


class StateComparison(Verifier):
    """Compares the replayed end of the episode with the replayed expected end."""

    kind = "state_comparison"
    reads = ("calls", "seal")

    def check(self, problem: Problem) -> None:
        self.check_part(problem)
        if self.passes_untouched(problem):
            raise _wrong("read_only", "an untouched database would pass, and nothing else is checked", "Check an answer, too: "
                         "make this a part of a 'composite' beside 'exact_answer'")  # fmt: skip

    def check_part(self, problem: Problem) -> None:
        settings, application = problem.verifier.settings, application_of(problem)
        if unknown := sorted(set(settings) - set(SETTINGS)):
            raise _wrong(unknown[0], "is no setting of state_comparison", f"Settings: {', '.join(SETTINGS)}")
        if not isinstance(settings.get("read_only", False), bool):
            raise _wrong("read_only", f"found {settings['read_only']!r}", "Write true or false")
        calls = settings.get("calls")
        if not isinstance(calls, list) or not all(
            isinstance(call, dict) and set(call) == {"name", "arguments"} for call in calls
        ):
            raise _wrong("calls", "expected a list of calls", 'Write [{"name": text, "arguments": {...}}, ...]')
        tables, known = _tables(application, settings), columns(application)
        for name, table in tables.items():
            if unknown := sorted(set(table.ignore) - set(known[name])):
                raise _wrong("ignore", f"table '{name}' has no column '{unknown[0]}'", f"Columns: {', '.join(known[name])}")
        start, end = expected(application, problem, calls, field="verifier.settings.calls")
        if len(calls) > problem.budgets.max_tool_calls:
            raise _wrong("calls", f"are {len(calls)}, and an episode may make {problem.budgets.max_tool_calls}",
                         "Raise budgets.max_tool_calls")  # fmt: skip
        untouched, read_only = equal(start, end, tables), bool(settings.get("read_only", False))
        if untouched and not read_only:
            raise _wrong("calls", "end where the problem begins: doing nothing would pass",
                         'Give calls that change something, or say "read_only": true and check an answer')  # fmt: skip
        if read_only and not untouched:
            raise _wrong("read_only", "is true, and the expected calls change the database", "Leave one of them out")

    def passes_untouched(self, problem: Problem) -> bool:
        return bool(problem.verifier.settings.get("read_only", False))

    async def verify(self, problem: Problem, collected: Collected, *, acquire: Acquire, deadline_seconds: float) -> Verdict:
        return await asyncio.to_thread(_verdict, problem, collected)


def _verdict(problem: Problem, collected: Collected) -> Verdict:
    settings, application = problem.verifier.settings, application_of(problem)
    tables = _tables(application, settings)
    _, wanted = expected(application, problem, settings["calls"], field="verifier.settings.calls")
    found = logged(application, problem, collected.state).end
    differing = list(differences(wanted, found, tables))
    checks = []
    for name in tables:
        texts = [text for table, text in differing if table == name]
        more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
        checks.append(Check(id=name, passed=not texts, message=" | ".join(texts[:3]) + more))
    lines = [f"{table}: {text}" for table, text in differing[:SHOWN_ROWS]]
    if len(differing) > SHOWN_ROWS:
        lines.append(f"and {len(differing) - SHOWN_ROWS} rows more")
    counted = f"the end differs from the expected one in {len(differing)} row{'s' if len(differing) != 1 else ''}"
    return Verdict(
        verifier=StateComparison.kind,
        trust="cases",
        score=float(not differing),
        passed=not differing,
        checks=tuple(checks),
        components={"state": float(not differing)},
        evidence="\n".join([counted, *lines]) if differing else f"the end is the expected one ({', '.join(tables)})",
    )


def _tables(application: Application, settings: Mapping[str, Any]) -> dict[str, Table]:
    """The compared tables with every column that does not count. Raises InputError."""
    chosen, ignore = settings.get("tables", list(application.tables)), settings.get("ignore", {})
    if not isinstance(chosen, list) or not chosen:
        raise _wrong("tables", "names no table to compare", f"Leave it out, or name some of {', '.join(application.tables)}")
    if not isinstance(ignore, dict) or not all(isinstance(columns, list) for columns in ignore.values()):
        raise _wrong("ignore", "expected lists of columns by table", 'Write {"table": ["column"]}')
    for field, names in (("tables", chosen), ("ignore", list(ignore))):
        if unknown := [name for name in names if name not in application.tables]:
            raise _wrong(field, f"'{application.name}' has no table {unknown[0]!r}", f"Tables: {', '.join(application.tables)}")
    return {
        name: replace(table, ignore=(*table.ignore, *map(str, ignore.get(name, ()))))
        for name, table in application.tables.items()
        if name in chosen
    }


def _wrong(field: str, problem: str, remedy: str) -> InputError:
    return InputError(problem, field=f"verifier.settings.{field}", remedy=remedy)

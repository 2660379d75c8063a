"""Seedless mutation of small Python functions, and the catalogue of those that tests notice.

`mutants` swaps one token (an operator, a constant, `min`/`max`, `and`/`or`) and keeps the rest of the text as it is. Not every
mutant is a bug, and some never end, so the ones worth posing are listed in `mutations.json`: each fails at least one visible
and one hidden case of its function within a second. Rebuild the list after changing functions or operators with
`python -m environments.domains.mutations`; a test keeps both in step. Only our own functions are ever run by this file.
"""

from __future__ import annotations

import inspect
import io
import json
import multiprocessing
import random
import resource
import sys
import tokenize
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from data_contracts.records import Record
from environments.domains.repair_functions import REPAIRABLE

HIDDEN_CASES = 16
_SWAPS: dict[str, tuple[str, ...]] = {
    "<": ("<=", ">"),
    "<=": ("<",),
    ">": (">=", "<"),
    ">=": (">",),
    "==": ("!=",),
    "!=": ("==",),
    "+": ("-",),
    "-": ("+",),
    "*": ("+",),
    "%": ("//",),
    "//": ("%",),
    "+=": ("-=",),
    "-=": ("+=",),
    "not": ("",),
    "and": ("or",),
    "or": ("and",),
    "min": ("max",),
    "max": ("min",),
    "True": ("False",),
    "False": ("True",),
}


class Mutant(Record, frozen=True, kw_only=True):
    """One swapped token: `line` counts from 1 in the function's source, `column` from 0."""

    function: str
    line: int
    column: int
    before: str
    after: str

    @property
    def id(self) -> str:
        return f"{self.function}-{self.line}.{self.column}-{self.after.encode().hex()}"

    def apply(self, source: str) -> str:
        """The broken source. Raises ValueError when the token is not where it was."""
        lines = source.splitlines(keepends=True)
        text = lines[self.line - 1]
        if not text.startswith(self.before, self.column):
            raise ValueError(f"{self.id}: expected {self.before!r}; rebuild mutations.json")
        lines[self.line - 1] = text[: self.column] + self.after + text[self.column + len(self.before) :]
        return "".join(lines)


@cache
def source_of(function: str) -> str:
    """The text of one function of the collection."""
    return inspect.getsource(REPAIRABLE[function].function)


@cache
def hidden_arguments(function: str) -> tuple[tuple[Any, ...], ...]:
    """The argument tuples that grade a repair: fixed for ever by the function's name."""
    entry, rng, found = REPAIRABLE[function], random.Random(f"hidden:{function}"), []
    for _ in range(40 * HIDDEN_CASES):
        arguments = entry.draw(rng)
        if arguments not in found:
            found.append(arguments)
        if len(found) == HIDDEN_CASES:
            break
    return tuple(found)


def mutants(function: str) -> list[Mutant]:
    """Every one-token mutant of a function's body, in the order of the text."""
    source, found = source_of(function), []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (line, column), text = token.start, token.string
        if line < 3:  # the signature and the docstring
            continue
        swaps = _SWAPS.get(text, ())
        if token.type == tokenize.NUMBER:
            swaps = ("1",) if text == "0" else (str(int(text) + 1), str(int(text) - 1))
        found += [Mutant(function=function, line=line, column=column, before=text, after=swap) for swap in swaps]
    return found


@cache
def catalogue() -> dict[str, tuple[Mutant, ...]]:
    """The mutants that are posed, by function."""
    rows = json.loads((files(__package__) / "mutations.json").read_text(encoding="utf-8"))
    return {
        name: tuple(
            Mutant(function=name, line=line, column=column, before=before, after=after) for line, column, before, after in swaps
        )
        for name, swaps in rows.items()
    }


def noticed(mutant: Mutant) -> bool:
    """Whether a visible and a hidden case both fail, within a second of CPU and 512 MiB, in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=_judge, args=(mutant,))
    process.start()
    process.join(10)
    process.kill()
    process.join()
    return process.exitcode == 0


def _judge(mutant: Mutant) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
    scope: dict[str, Any] = {}
    exec(mutant.apply(source_of(mutant.function)), scope)  # noqa: S102  our own function with one token swapped
    entry = REPAIRABLE[mutant.function]

    def fails(arguments: tuple[Any, ...]) -> bool:
        copies = json.loads(json.dumps([arguments, arguments]))
        expected = entry.function(*copies[0])
        try:
            actual = scope[mutant.function](*copies[1])
        except Exception:  # noqa: BLE001  whatever a mutant raises, the case fails
            return True
        return type(actual) is not type(expected) or bool(actual != expected)

    noticed_by_both = any(map(fails, entry.visible)) and any(map(fails, hidden_arguments(mutant.function)))
    sys.exit(0 if noticed_by_both else 1)


def main() -> None:
    """Rebuild mutations.json."""
    rows = {name: [[m.line, m.column, m.before, m.after] for m in mutants(name) if noticed(m)] for name in sorted(REPAIRABLE)}
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(swaps)}" for name, swaps in rows.items())
    Path(str(files(__package__) / "mutations.json")).write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    sys.stdout.write(f"{sum(map(len, rows.values()))} mutants of {len(rows)} functions\n")


if __name__ == "__main__":
    main()

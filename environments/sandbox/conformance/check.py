"""What a conformance check is, how it fails, and what became of it.

A check is an async function of a `Lab` that returns when what its docstring says was shown, and raises otherwise: `CheckFailed`
when the backend did something else, `NotHere` when this host has nothing to show it on. Its name is "<file>.<function>".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from data_contracts.errors import BessemerError
from data_contracts.records import Record

if TYPE_CHECKING:
    from environments.sandbox.conformance.lab import Lab

Status = Literal["pass", "fail", "skip"]
SHOWN = 200
"""Characters of a value that a reason quotes."""


class CheckFailed(BessemerError, RuntimeError):
    """The backend does not do what the contract says."""


class NotHere(BessemerError, RuntimeError):
    """This host lacks what the check looks at (a gateway, a store in a folder): nothing is shown, nothing is wrong."""


class Outcome(Record, frozen=True, kw_only=True):
    """What became of one check. `reason` is empty when it passed."""

    name: str
    status: Status
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Check:
    """One check. `needs` are capabilities of the backend; `alone` forbids others beside it (it counts what the owner holds)."""

    name: str
    shows: str
    needs: tuple[str, ...]
    alone: bool
    run: Callable[[Lab], Awaitable[None]]

    @property
    def theme(self) -> str:
        return self.name.partition(".")[0]


def check(*needs: str, alone: bool = False) -> Callable[[Callable[[Lab], Awaitable[None]]], Check]:
    """Turn a function into a `Check`: named after file and function, described by the first line of its docstring."""

    def make(function: Callable[[Lab], Awaitable[None]]) -> Check:
        theme = function.__module__.rpartition(".")[2]
        shows = (function.__doc__ or "").strip().partition("\n")[0]
        return Check(f"{theme}.{getattr(function, '__name__', '')}", shows, needs, alone, function)

    return make


def holds(condition: object, problem: str) -> None:
    """Raises CheckFailed with `problem` unless the condition is true."""
    if not condition:
        raise CheckFailed(problem)


def same(found: object, expected: object, what: str) -> None:
    """Raises CheckFailed naming `what`, and both values, unless they are equal."""
    if found != expected:
        raise CheckFailed(f"{what}: expected {_short(expected)}, found {_short(found)}")


@contextmanager
def refused(kind: type[BessemerError], words: str, what: str) -> Iterator[None]:
    """The block must raise `kind` with `words` in its message."""
    try:
        yield
    except kind as error:
        holds(words in str(error), f"{what} is refused, but the message does not say {words!r}: {error}")
    else:
        raise CheckFailed(f"{what} is accepted, and should be refused with {kind.__name__}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"

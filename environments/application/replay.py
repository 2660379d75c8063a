"""Replay: the calls of an audit log, or the expected calls of a problem, on a fresh database; every state on the way is kept.

The state that a verifier grades is always recomputed here from the stored calls, so a stored episode gives the same verdict
again. What the episode itself saw must agree: every call's outcome, and the seal over log and final state. Where it does not,
the application is not deterministic, or has changed since, or the log was altered; that is `Disagreement`, an infrastructure
failure (`verifier_error`), never a score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from data_contracts.errors import InfraError, InputError
from data_contracts.records import Problem
from environments.application.base import Application, Broken, Operation, Rule, Start, State
from environments.application.database import Database, attempt, seal
from environments.tools import ToolError


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One call of the log, and the states around it. `arguments` is empty where they could not be read."""

    index: int
    now: str
    name: str
    arguments: Mapping[str, Any]
    ok: bool
    result: Any
    before: State
    after: State

    def shown(self) -> str:
        """The call as people count and read it."""
        inside = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"call {self.index + 1}, {self.name[:60]}({inside[:200]}){'' if self.ok else ' (refused)'}"


@dataclass(frozen=True, kw_only=True)
class History:
    """What rules look at: the beginning, every call in order with the states around it, and the end."""

    start: State
    moments: tuple[Moment, ...]

    @property
    def end(self) -> State:
        return self.moments[-1].after if self.moments else self.start

    def done(self, *names: str) -> Iterator[Moment]:
        """The calls that succeeded, of these names if any are given."""
        return (moment for moment in self.moments if moment.ok and (not names or moment.name in names))


class Disagreement(InfraError):
    """A stored log does not give the state that was stored with it."""

    def __init__(self, detail: str) -> None:
        super().__init__("verifier_error", detail)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.detail,))


def replay(
    application: Application, start: Start, offered: Mapping[str, Operation], calls: Iterable[Mapping[str, Any]]
) -> History:
    """Plays calls ({"name", "arguments": text or object}) on a fresh database. Refused ones change nothing."""
    database = Database(application, start)
    try:
        first = state = database.snapshot()
        moments = []
        for index, call in enumerate(calls):
            name, text = str(call["name"]), as_text(call["arguments"])
            before = state
            try:
                result, ok = attempt(database, offered, name, text, at=index), True
                state = database.snapshot() if offered[name].writes else state
            except ToolError as error:
                result, ok = str(error), False
            moments.append(
                Moment(
                    index=index, now=database.now(index), name=name, arguments=_read(text), ok=ok, result=result,
                    before=before, after=state,
                )
            )  # fmt: skip
        return History(start=first, moments=tuple(moments))
    finally:
        database.close()


def as_text(arguments: Any) -> str:
    """Arguments as a policy would write them; a text is taken as it is."""
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _read(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def logged(application: Application, problem: Problem, state: Mapping[str, Any]) -> History:
    """The history of an episode, from `Collected.state`. Raises Disagreement, and InputError for a state without a log."""
    calls, sealed = state.get("calls"), state.get("seal")
    if not isinstance(calls, list) or not isinstance(sealed, str):
        raise InputError(
            f"problem {problem.id} is graded by its audit log, and there is none", field="final_state",
            remedy="Give tool calls to play, or an answer",
        )  # fmt: skip
    history = replay(application, application.start_of(problem), application.offered(problem), calls)
    for call, moment in zip(calls, history.moments, strict=True):
        if (call["status"] == "ok") != moment.ok or (moment.ok and call["result"] != moment.result):
            raise Disagreement(
                f"{moment.shown()}: the log of {problem.id} says {call['status']} {str(call.get('result'))[:80]}, "
                f"replayed it gives {str(moment.result)[:80]}"
            )
    if seal(history.end, calls) != sealed:
        raise Disagreement(f"the calls of {problem.id} do not lead to the state that the episode ended with")
    return history


def invariant(name: str, sentence: str, wrong: Callable[[State], Iterable[str]]) -> Rule:
    """A rule about every state: broken by the call after which `wrong` says something that it did not say before."""

    def broken(history: History) -> Iterator[Broken]:
        known = set(wrong(history.start))
        for moment in history.done():
            if moment.after is not moment.before:
                found = list(wrong(moment.after))
                yield from (Broken(call=moment.index, why=text) for text in found if text not in known)
                known = set(found)

    return Rule(id=name, sentence=sentence, broken=broken)


def expected(
    application: Application, problem: Problem, calls: Sequence[Mapping[str, Any]], *, field: str
) -> tuple[State, State]:
    """The beginning, and the end that the expected calls of a problem lead to. Raises InputError for one that is refused."""
    history = replay(application, application.start_of(problem), application.offered(problem), calls)
    for moment in history.moments:
        if not moment.ok:
            raise InputError(
                f"{moment.shown()}: {moment.result}", field=f"{field}[{moment.index}]",
                remedy="Write calls that lead from the beginning to the expected end",
            )  # fmt: skip
    return history.start, history.end

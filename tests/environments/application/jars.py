"""A small application for tests: jars of coins whose tools check almost nothing, so that every rule can be broken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from data_contracts.records import Budgets, EnvironmentSpec, Message, Problem, Split, ToolSpec, VerifierSpec
from environments.application.base import Application, Broken, Operation, Rule, Start, State, Table, Transaction
from environments.application.environment import ApplicationDomain
from environments.application.replay import History, invariant
from environments.base import Collected, Exploit, Policy
from environments.scripted import plays, run_scripted, says
from environments.tools import ToolError


def _spec(name: str, **properties: dict[str, Any]) -> ToolSpec:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return ToolSpec(name=name, description=name, parameters=schema)


def _put(desk: Transaction, given: dict[str, Any]) -> Any:
    if not desk.run("UPDATE jars SET coins = coins + ? WHERE name = ?", given["coins"], given["jar"]):
        raise ToolError(f"there is no jar {given['jar']!r}")
    number = desk.number(given["jar"])
    desk.run("INSERT INTO moves VALUES (?, ?, ?, ?)", f"{given['jar']}-{number}", given["jar"], given["coins"], desk.now)
    return {"move": number, "at": desk.now}


def _put_then_refuse(desk: Transaction, given: dict[str, Any]) -> Any:
    _put(desk, {**given, "coins": 1})
    raise ToolError("changed my mind")


def _look(desk: Transaction, given: dict[str, Any]) -> Any:
    found = desk.row("SELECT * FROM jars WHERE name = ?", given["jar"])
    if found is None:
        raise ToolError("no such jar")
    return found


def _weigh(desk: Transaction, given: dict[str, Any]) -> Any:
    desk.run("UPDATE jars SET weight = ? WHERE name = ?", given["weight"], given["jar"])
    return ("tuple", given["weight"])


def _add(desk: Transaction, given: dict[str, Any]) -> Any:
    desk.run("INSERT INTO jars VALUES (?, 0, NULL)", given["jar"])


def _lies(desk: Transaction, given: dict[str, Any]) -> Any:
    """Says that it only reads, and writes."""
    desk.run("DELETE FROM moves")


JAR, COINS = {"type": "string", "maxLength": 40}, {"type": "integer"}
OPERATIONS = (
    Operation(spec=_spec("put", jar=JAR, coins=COINS), run=_put, writes=True),
    Operation(spec=_spec("put_then_refuse", jar=JAR), run=_put_then_refuse, writes=True),
    Operation(spec=_spec("look", jar=JAR), run=_look),
    Operation(spec=_spec("weigh", jar=JAR, weight={"type": "number"}), run=_weigh, writes=True),
    Operation(spec=_spec("add", jar=JAR), run=_add, writes=True),
    Operation(spec=_spec("lies"), run=_lies),
)


def _looked_first(history: History) -> Iterator[Broken]:
    seen: set[str] = set()
    for moment in history.done("look", "put"):
        if moment.name == "look":
            seen.add(moment.arguments["jar"])
        elif moment.arguments["jar"] not in seen:
            yield Broken(call=moment.index, why=f"nobody had looked into {moment.arguments['jar']}")


def _in_debt(state: State) -> Iterator[str]:
    for row in state["jars"]:
        if row["coins"] < 0:
            yield f"jar {row['name']} holds {row['coins']}"


def _few_moves(history: History) -> Iterator[Broken]:
    if len(history.end["moves"]) > 3:
        yield Broken(call=None, why=f"{len(history.end['moves'])} moves")


class Bank(Application):
    name = "jars"
    schema = """
    CREATE TABLE jars (name TEXT PRIMARY KEY, coins INTEGER NOT NULL, weight REAL);
    CREATE TABLE moves (id TEXT PRIMARY KEY, jar TEXT NOT NULL REFERENCES jars, coins INTEGER NOT NULL CHECK (coins <> 0),
        at TEXT);
    """
    tables: ClassVar[dict[str, Table]] = {"jars": Table(key=("name",)), "moves": Table(key=("id",), ignore=("at",))}
    rules = (
        Rule(id="looked_first", sentence="Look before you put.", broken=_looked_first),
        invariant("no_debt", "No jar holds less than nothing.", _in_debt),
        Rule(id="few_moves", sentence="At most three moves.", broken=_few_moves),
    )

    def operations(self) -> Sequence[Operation]:
        return OPERATIONS

    def populate(self, seed: int) -> Start:
        rows = ({"name": "red", "coins": seed, "weight": 1.0}, {"name": "blue", "coins": 5, "weight": None})
        return Start(now="2031-01-01T00:00:00", rows={"jars": rows})


BANK = Bank()


class Jars(ApplicationDomain):
    name = "jars"
    summary = "for tests"
    application = BANK

    def problems(self, split: Split, *, seed: int, level: str = "default", **settings: Any) -> Iterator[Problem]:
        for coins in range(1, 60):
            right = [{"name": "put", "arguments": {"jar": "red", "coins": coins if split == "train" else coins + 100}}]
            yield problem(parts=[state(right), RULES], split=split, name=f"{coins}")

    def oracle(self, problem: Problem) -> Policy:
        raise NotImplementedError

    def exploits(self) -> Sequence[Exploit]:
        return ()


def state(calls: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"id": "state", "kind": "state_comparison", "settings": {"calls": calls, **more}}


PUT = {"name": "put", "arguments": {"jar": "red", "coins": 3}}
LOOK = {"name": "look", "arguments": {"jar": "red"}}
RULES: dict[str, Any] = {"id": "rules", "kind": "business_rules", "settings": {"rules": ["looked_first", "no_debt"]}}
ANSWER: dict[str, Any] = {
    "id": "answer",
    "kind": "exact_answer",
    "settings": {"rule": "number", "expected": "7", "weights": {"correct": 1.0}},
}


def problem(
    *,
    parts: list[dict[str, Any]] | None = None,
    kind: str = "composite",
    split: Split = "train",
    name: str = "1",
    start: Any = None,
    tools: Sequence[ToolSpec] = tuple(operation.spec for operation in OPERATIONS if operation.run is not _lies),
    **settings: Any,
) -> Problem:
    """A problem of the jars; `parts` of a composite, or the settings of another kind of verifier."""
    given = {"parts": parts} if parts is not None else settings
    return Problem(
        id=f"jars/{split}/{name}",
        domain="jars",
        split=split,
        difficulty=0.5,
        messages=(Message(role="user", content=f"{split} {name}"),),
        tools=tuple(tools),
        environment=EnvironmentSpec(
            kind="tests.environments.application.jars:Jars", settings={"start": start or BANK.beginning(7)}
        ),
        verifier=VerifierSpec(kind=kind, settings={**given, **(settings if parts is not None else {})}),
        budgets=Budgets(max_turns=40, max_tool_calls=40),
    )


async def played(posed: Problem, *messages: Message, answer: str = "done") -> Any:
    """The scripted episode of these messages and an answer."""
    return await run_scripted(Jars(), posed, plays(*messages, says(answer)), backend=None)


def collected(**state: Any) -> Collected:
    return Collected(state=state)

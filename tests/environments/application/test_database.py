"""One transaction a call, refused calls leave nothing, and nothing but declared operations with declared arguments gets in."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from data_contracts.errors import InfraError, InputError
from environments.application.base import Start
from environments.application.database import MAX_CALL_CHARS, Database, attempt, digest
from environments.base import Action, EnvironmentContext
from environments.scripted import calls
from environments.tools import ToolError
from tests.environments.application.jars import BANK, OPERATIONS, Jars, played, problem

OFFERED = {operation.spec.name: operation for operation in OPERATIONS}


@pytest.fixture
def database() -> Database:
    return Database(BANK, BANK.populate(7))


def call(database: Database, name: str, at: int = 0, /, **arguments: Any) -> Any:
    return attempt(database, OFFERED, name, json.dumps(arguments), at=at)


def test_a_call_changes_the_database_by_its_clock_and_its_counters(database: Database) -> None:
    assert call(database, "put", 0, jar="red", coins=3) == {"move": 1, "at": "2031-01-01T00:00:00"}
    assert call(database, "put", 61, jar="red", coins=-3) == {"move": 2, "at": "2031-01-01T00:01:01"}
    assert call(database, "put", 62, jar="blue", coins=1)["move"] == 1
    assert [row["id"] for row in database.snapshot()["moves"]] == ["red-1", "red-2", "blue-1"]


def test_a_refused_call_leaves_nothing_behind(database: Database) -> None:
    before = digest(database.snapshot())
    for name, arguments in (
        ("put_then_refuse", {"jar": "red"}),
        ("put", {"jar": "red", "coins": 0}),  # the table's own constraint
        ("put", {"jar": "green", "coins": 1}),
        ("add", {"jar": "red"}),
        ("put", {"jar": "red", "coins": 2**70}),
    ):
        with pytest.raises(ToolError):
            call(database, name, **arguments)
        assert digest(database.snapshot()) == before
    assert call(database, "put", jar="red", coins=1)["move"] == 1  # counters were taken back, too


def test_an_operation_that_says_it_reads_cannot_write(database: Database) -> None:
    call(database, "put", jar="red", coins=1)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        call(database, "lies")
    assert len(database.snapshot()["moves"]) == 1
    assert call(database, "put", jar="red", coins=1)["move"] == 2


async def test_a_bug_of_an_operation_is_no_answer_to_the_policy() -> None:
    with pytest.raises(sqlite3.OperationalError):
        await played(problem(parts=[], tools=[OFFERED["lies"].spec]), calls("lies", {}))


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("__import__('os').system", '{"jar": "red"}', "unknown tool"),
        ("put.__globals__", "{}", "unknown tool"),
        ("put", "__import__('os').system('touch taken')", "not valid JSON"),
        ("put", "dict(jar='red', coins=1)", "not valid JSON"),
        ("put", '{"jar": "red", "coins": "1 + 1"}', "not of type 'integer'"),
        ("put", '{"jar": "red", "coins": 1.5}', "not of type 'integer'"),
        ("put", '{"jar": "red", "coins": true}', "not of type 'integer'"),
        ("put", '{"jar": "red", "coins": 1, "sql": "DROP TABLE jars"}', "Additional properties"),
        ("look", '{"jar": "red\'; DROP TABLE jars; --"}', "no such jar"),
        ("look", '{"jar": "' + "x" * MAX_CALL_CHARS + '"}', "characters, at most"),
    ],
)
def test_names_and_arguments_are_never_code(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, arguments: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = digest(database.snapshot())
    with pytest.raises(ToolError, match=words):
        attempt(database, OFFERED, name, arguments, at=0)
    assert digest(database.snapshot()) == before
    assert not list(tmp_path.iterdir())


def test_a_whole_number_is_an_integer_however_it_is_written(database: Database) -> None:
    attempt(database, OFFERED, "put", '{"jar": "red", "coins": 2.0}', at=0)
    attempt(database, OFFERED, "weigh", '{"jar": "red", "weight": 2}', at=1)
    (red,) = (row for row in database.snapshot()["jars"] if row["name"] == "red")
    assert [type(red[name]) for name in ("coins", "weight")] == [int, float]


def test_only_what_a_problem_offers_can_be_called() -> None:
    few = problem(parts=[], tools=[OFFERED["look"].spec])
    assert list(BANK.offered(few)) == ["look"]
    changed = msgspec.structs.replace(OFFERED["look"].spec, description="another")
    for tool in (changed, msgspec.structs.replace(changed, name="eval")):
        with pytest.raises(InputError, match="is no tool of 'jars'"):
            BANK.offered(problem(parts=[], tools=[tool]))


PLACE = "environment.settings.start"
BAD_STARTS: list[tuple[Any, str, str]] = [
    ({"seed": 7}, "environment.settings.start", "unknown field `seed`"),
    ({"seed": 7, "digest": "0000"}, "environment.settings.start.digest", "has changed since"),
    ({"seed": True, "digest": ""}, "environment.settings.start", "Write"),
    ({"now": "2031-01-01", "rows": {"cups": []}}, "environment.settings.start.rows", "has no table 'cups'"),
    ({"now": "soon", "rows": {}}, "environment.settings.start.now", "is no time"),
    ({"now": "2031-01-01", "rows": {"jars": [{"name": "red"}]}}, "environment.settings.start.rows.jars[0]", "NOT NULL"),
    ({"now": "2031-01-01", "rows": {"jars": [{"name": "x", "size": 1}]}}, "environment.settings.start.rows.jars[0]", "'size'"),
    ({"now": "2031-01-01", "rows": {"moves": [{"id": "m", "jar": "x", "coins": 1}]}}, f"{PLACE}.rows.moves[0]",
     "FOREIGN KEY"),
]  # fmt: skip


@pytest.mark.parametrize(("start", "field", "words"), BAD_STARTS)
def test_a_beginning_that_does_not_fit_is_named(start: Any, field: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as found:
        Database(BANK, BANK.start_of(problem(parts=[], start=start)))
    assert found.value.field == field
    assert found.value.remedy


def test_rows_of_ones_own_are_a_beginning() -> None:
    start: dict[str, Any] = {"now": "2031-01-01T08:00:00", "rows": {"jars": [{"name": "mine", "coins": 2}]}}
    database = Database(BANK, BANK.start_of(problem(parts=[], start=start)))
    assert database.snapshot() == {"jars": [{"name": "mine", "coins": 2, "weight": None}], "moves": []}
    assert isinstance(BANK.start_of(problem(parts=[], start=start)), Start)


async def test_an_episode_whose_beginning_has_changed_is_nobodys_failure() -> None:
    async def acquire(spec: object) -> Any:
        raise AssertionError

    posed = problem(parts=[], start={"seed": 7, "digest": "of another version"})
    environment = Jars().environment(posed, EnvironmentContext(episode_id="e", seed=0, acquire=acquire))
    with pytest.raises(InfraError, match=r"environment_error.*make it again"):
        await environment.reset()
    await environment.close()


async def test_two_episodes_share_nothing() -> None:
    async def acquire(spec: object) -> Any:
        raise AssertionError

    context = EnvironmentContext(episode_id="e", seed=0, acquire=acquire)
    first, second = (Jars().environment(problem(parts=[]), context) for _ in range(2))
    for environment in (first, second):
        await environment.reset()
    await first.step(Action(message=calls("put", {"jar": "red", "coins": 1})))
    step = await second.step(Action(message=calls("look", {"jar": "red"})))
    assert json.loads(step.messages[0].content)["result"]["coins"] == 7

"""The end of an episode against the end of the expected calls; what would pay for doing nothing is refused."""

from typing import Any

import pytest

from data_contracts.errors import InputError
from data_contracts.protocols import to_json
from data_contracts.records import Problem, Verdict
from environments.registry import domain, verifier
from environments.scripted import calls
from tasks.grade import verify
from tests.environments.application.jars import ANSWER, LOOK, OPERATIONS, PUT, collected, played, problem, state


def comparing(expected: list[dict[str, Any]], **settings: Any) -> Problem:
    return problem(kind="state_comparison", calls=expected, **settings)


async def verdict(posed: Problem, *made: dict[str, Any]) -> Verdict:
    verifier(posed.verifier.kind).check(posed)
    episode = await played(posed, *(calls(call["name"], call["arguments"]) for call in made))
    found: Verdict = episode.verdict
    return found


def put(coins: int, jar: str = "red") -> dict[str, Any]:
    return {"name": "put", "arguments": {"jar": jar, "coins": coins}}


async def test_any_path_to_the_expected_end_passes_and_another_end_does_not() -> None:
    posed = comparing([put(3), put(4, "blue")])
    right = await verdict(posed, put(3), put(4, "blue"))
    assert (right.score, right.passed, right.trust) == (1.0, True, "cases")
    assert [check.id for check in right.checks] == ["jars", "moves"]
    other_order = await verdict(posed, LOOK, put(4, "blue"), {"name": "fly", "arguments": {}}, put(3))
    assert other_order.score == 1.0
    for wrong in ([], [put(3)], [put(3), put(4)], [put(3), put(4, "blue"), put(1)], [put(1), put(2), put(4, "blue")]):
        assert (await verdict(posed, *wrong)).score == 0.0


async def test_the_evidence_names_every_row_that_differs() -> None:
    found = await verdict(comparing([put(3)]), put(4), put(1, "blue"))
    assert found.evidence.splitlines() == [
        "the end differs from the expected one in 4 rows",
        "jars: name 'blue': coins is 6, expected 5",
        "jars: name 'red': coins is 11, expected 10",
        "moves: not expected: id 'blue-1', jar 'blue', coins 1",
        "moves: id 'red-1': coins is 4, expected 3",
    ]
    assert [check.passed for check in found.checks] == [False, False]
    assert "coins is 11, expected 10" in found.checks[0].message


async def test_only_the_declared_tables_and_columns_count() -> None:
    only = comparing([put(3)], tables=["jars"])
    assert (await verdict(only, put(1), put(2))).score == 1.0
    assert (await verdict(only, put(4))).score == 0.0
    blind = comparing([put(3)], ignore={"jars": ["coins"]})
    assert (await verdict(blind, put(3), {"name": "weigh", "arguments": {"jar": "red", "weight": 2}})).score == 0.0
    assert (await verdict(comparing([put(3)], ignore={"jars": ["weight"]}), put(3), {"name": "weigh", "arguments":
            {"jar": "red", "weight": 2}})).score == 1.0  # fmt: skip


async def test_a_stored_state_gives_the_same_bytes_again() -> None:
    posed = comparing([put(3)])
    episode = await played(posed, calls("put", {"jar": "red", "coins": 2}), calls("put", {"jar": "red", "coins": 3}))

    async def acquire(spec: object) -> Any:
        raise AssertionError

    again = await verify(posed, collected(**episode.collected.state), acquire=acquire, seconds=10)
    assert to_json(again) == to_json(episode.verdict)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"calls": []}, "calls", "doing nothing would pass"),
    ({"calls": [LOOK]}, "calls", "doing nothing would pass"),
    ({"calls": [put(3), put(-3)], "tables": ["jars"]}, "calls", "doing nothing would pass"),
    ({"calls": [put(3)], "ignore": {"jars": ["coins"]}, "tables": ["jars"]}, "calls", "doing nothing would pass"),
    ({"calls": [], "read_only": True}, "read_only", "nothing else is checked"),
    ({"calls": [put(3)], "read_only": True}, "read_only", "change the database"),
    ({"calls": [put(3)], "read_only": "no"}, "read_only", "found 'no'"),
    ({}, "calls", "expected a list of calls"),
    ({"calls": [{"name": "put"}]}, "calls", "expected a list of calls"),
    ({"calls": [put(3, "green")]}, "calls[0]", "there is no jar 'green'"),
    ({"calls": [put(3), {"name": "fly", "arguments": {}}]}, "calls[1]", "unknown tool 'fly'"),
    ({"calls": [{"name": "put", "arguments": {"jar": "red"}}]}, "calls[0]", "'coins' is a required property"),
    ({"calls": [put(1)] * 41}, "calls", "are 41, and an episode may make 40"),
    ({"calls": [put(3)], "tables": []}, "tables", "names no table"),
    ({"calls": [put(3)], "tables": ["cups"]}, "tables", "has no table 'cups'"),
    ({"calls": [put(3)], "ignore": {"jars": ["size"]}}, "ignore", "has no column 'size'"),
    ({"calls": [put(3)], "ignore": ["at"]}, "ignore", "expected lists of columns"),
    ({"calls": [put(3)], "strict": True}, "strict", "is no setting"),
]


@pytest.mark.parametrize(("settings", "field", "words"), REFUSED)
def test_what_could_not_be_graded_or_would_pay_for_nothing_is_refused(settings: dict[str, Any], field: str, words: str) -> None:
    posed = problem(kind="state_comparison", **settings)
    with pytest.raises(InputError, match=words.replace("[", r"\[")) as found:
        verifier("state_comparison").check(posed)
    assert found.value.field == f"verifier.settings.{field}"
    assert found.value.remedy


def test_a_call_that_the_problem_does_not_offer_cannot_be_expected() -> None:
    few = problem(kind="state_comparison", calls=[put(3)], tools=[OPERATIONS[2].spec])
    with pytest.raises(InputError, match="unknown tool 'put'"):
        verifier("state_comparison").check(few)


def test_a_domain_without_an_application_is_said() -> None:
    other = next(domain("echo").problems("train", seed=0))
    with pytest.raises(InputError, match="domain 'echo' has no application"):
        verifier("state_comparison").check_part(other)


async def test_read_only_problems_pay_for_the_answer_and_only_while_nothing_changes() -> None:
    posed = problem(parts=[state([], read_only=True), ANSWER])
    verifier("composite").check(posed)
    scores = [
        (await played(posed, *messages, answer=answer)).score
        for messages, answer in (
            ((calls("look", LOOK["arguments"]),), "7"),
            ((calls("put", PUT["arguments"]),), "7"),
            ((), ""),
            ((), "17"),
            ((), "7 or 8"),
        )
    ]
    assert scores == [1.0, 0.0, 0.0, 0.0, 0.0]

"""Answers as a careful grader reads them, and problems whose settings could not grade."""

# ruff: noqa: E501  tables of cases

import asyncio
from typing import Any

import pytest

from data_contracts.errors import InputError
from data_contracts.records import EnvironmentSpec, Message, Problem, Verdict, VerifierSpec
from environments.base import Collected
from environments.verifiers.exact_answer import ExactAnswer


def problem(rule: str, expected: str, **settings: Any) -> Problem:
    return Problem(
        id="d/train/1",
        domain="d",
        split="train",
        difficulty=0.5,
        messages=(Message(role="user", content="?"),),
        environment=EnvironmentSpec(kind="d"),
        verifier=VerifierSpec(
            kind="exact_answer", settings={"rule": rule, "expected": expected, "weights": {"correct": 1.0}, **settings}
        ),
    )


async def no_box(spec: object) -> Any:
    raise AssertionError("an answer needs no box")


def grade(reply: Any, posed: Problem) -> Verdict:
    ExactAnswer().check(posed)
    return asyncio.run(ExactAnswer().verify(posed, Collected(state={"answer": reply}), acquire=no_box, deadline_seconds=60))


NUMERIC = [
    ("1234.5", "1,234.5", {}), ("0.75", "3/4", {}), ("1.75", "1 3/4", {}), ("-0.75", "-\\frac{3}{4}", {}), ("1500", "1.5 x 10^3", {}),
    ("0.12", "12%", {}), ("12%", "0.12", {}), ("12%", "12", {"percent": "optional"}), ("5", "5 kg", {"units": ["kg"]}),
    ("5 kg", "5", {"units": ["kg"]}), ("1234", "$1,234", {"units": ["$"]}), ("5", "**5**", {}), ("5", "The answer is 5.", {}),
    ("5", "so\n#### 5", {"extract": "last_line"}), ("0.5", "thus \\boxed{\\frac{1}{2}}", {"extract": "boxed"}),
    ("3.14159", "3.1416", {"tolerance": 1e-4}), ("0", "0.001", {"absolute": 0.01}), ("1234567", "1\u202f234\u202f567", {}),
    ("-5", "\u22125", {}), ("5", "5.0", {}), ("5", "Answer: 5", {}),
]  # fmt: skip
NOT_NUMERIC = [
    ("0.75", "0.7500001", {}), ("5", "", {}), ("5", None, {}), ("5", "5 kg", {}), ("5", "15", {}), ("5", "5 or 6", {}), ("12%", "12", {}),
    ("5", "It could be 5, I think", {}), ("1.234", "1.234,5", {}), ("123", "1,23", {}), ("5", "\\boxed{}", {"extract": "boxed"}),
    ("5", "5", {"extract": "boxed"}), ("5", "\\boxed{5", {"extract": "boxed"}), ("1", "1e309", {}), ("5", "nan", {}), ("5", "1/0", {}),
    ("5", "٥", {}), ("5", "5 m", {"units": ["mm"]}), ("5", "five", {}), ("3.14159", "3.15", {"tolerance": 1e-4}), ("5", "9" * 500, {}),
    ("5", "5\n6", {"extract": "last_line"}),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "reply", "settings"), NUMERIC)
def test_numbers_that_are_right(expected: str, reply: str, settings: dict[str, Any]) -> None:
    verdict = grade(reply, problem("numeric", expected, **settings))
    assert (verdict.score, verdict.passed) == (1.0, True), verdict.evidence


@pytest.mark.parametrize(("expected", "reply", "settings"), NOT_NUMERIC)
def test_numbers_that_are_wrong(expected: str, reply: Any, settings: dict[str, Any]) -> None:
    verdict = grade(reply, problem("numeric", expected, **settings))
    assert verdict.score == 0.0, verdict.evidence
    assert verdict.evidence


@pytest.mark.parametrize(
    ("expected", "reply", "settings", "score"),
    [
        ("New York", "  new   york. ", {}, 1.0), ("New York", "\"New York\"", {}, 1.0), ("New York", "New York City", {}, 0.0),
        ("New York", "in New York", {}, 0.0), ("NY", "ny", {"case": True}, 0.0), ("NY", "New York", {"accept": ["new york"]}, 1.0),
        ("a", "", {}, 0.0), ("a", "...", {}, 0.0), ("a", "a b", {}, 0.0), ("\ufb01n", "fin", {}, 1.0), ("yes", "yes/no", {}, 0.0),
        ("answers vary", "Answers vary", {}, 1.0),
    ],
)  # fmt: skip
def test_texts_match_whole_or_not_at_all(expected: str, reply: str, settings: dict[str, Any], score: float) -> None:
    assert grade(reply, problem("text", expected, **settings)).score == score


def test_partial_credit_is_what_the_domain_declares() -> None:
    weights = {"correct": 0.7, "strict": 0.3}
    assert grade("The answer is 5", problem("numeric", "5", weights=weights)).score == pytest.approx(0.7)
    assert grade("5", problem("numeric", "5", weights=weights)).score == 1.0
    assert grade("It contains 5 somewhere", problem("numeric", "5", weights=weights)).score == 0.0
    assert grade("x+x", problem("symbolic", "2x", weights=weights)).score == 1.0
    assert grade("we get \\boxed{x+x}", problem("symbolic", "2x", weights=weights, extract="boxed")).score == pytest.approx(0.7)


@pytest.mark.parametrize("rule", ["numeric", "text", "symbolic"])
def test_a_verdict_is_the_same_twice_and_small(rule: str) -> None:
    posed = problem(rule, "7")
    for reply in ("7", "8", "", "x" * 100_000, "\\boxed{" * 3000, "(" * 20_000, None):
        first = grade(reply, posed)
        assert first == grade(reply, posed)
        assert len(first.evidence) < 1000


@pytest.mark.parametrize(
    ("rule", "expected", "settings", "field"),
    [
        ("numeric", "many", {}, "expected"), ("numeric", "5", {"tolerance": -1}, "tolerance"), ("numeric", "5", {"units": "kg"}, "units"),
        ("numeric", "5", {"tolerence": 0.1}, "tolerence"), ("text", "''", {}, "expected"), ("symbolic", "2 +", {}, "expected"),
        ("symbolic", "x", {"assume": {"x": "odd"}}, "assume"), ("text", "a", {"extract": "middle"}, "extract"),
        ("numeric", "5", {"percent": "maybe"}, "percent"), ("fuzzy", "5", {}, "rule"), ("text", "a", {"accept": [""]}, "accept"),
        ("numeric", "5", {"weights": {"found": 1.0}}, "weights"), ("numeric", "5", {"tolerance": float("nan")}, "tolerance"),
    ],
)  # fmt: skip
def test_settings_that_could_not_grade_are_named(rule: str, expected: str, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refused:
        ExactAnswer().check(problem(rule, expected, **settings))
    assert refused.value.field == f"verifier.settings.{field}"
    assert refused.value.remedy

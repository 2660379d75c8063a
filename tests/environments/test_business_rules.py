"""Rules over the audit log: the path counts, not only the end; a broken one names its call."""

from typing import Any

import pytest

from data_contracts.errors import InputError
from data_contracts.records import Problem, Verdict
from environments.registry import verifier
from environments.scripted import calls
from tests.environments.application.jars import LOOK, played, problem


def ruled(rules: Any, **settings: Any) -> Problem:
    return problem(kind="business_rules", rules=rules, **settings)


async def verdict(posed: Problem, *made: tuple[str, dict[str, object]]) -> Verdict:
    verifier("business_rules").check_part(posed)
    found: Verdict = (await played(posed, *(calls(name, given) for name, given in made))).verdict
    return found


LOOKS: tuple[str, dict[str, object]] = ("look", dict(LOOK["arguments"]))


def put(coins: int) -> tuple[str, dict[str, object]]:
    return "put", {"jar": "red", "coins": coins}


async def test_a_right_end_by_a_forbidden_path_is_found_and_named() -> None:
    posed = ruled(["looked_first", "no_debt"])
    assert (await verdict(posed, LOOKS, put(-7), put(7))).score == 1.0
    early = await verdict(posed, put(1), LOOKS, put(-1))
    assert early.score == 0.0
    assert early.evidence.splitlines() == [
        "rule looked_first is broken: Look before you put.",
        "  call 1, put(jar='red', coins=1): nobody had looked into red",
    ]
    debt = await verdict(posed, LOOKS, put(-8), put(8))  # ends as it began
    assert (debt.score, debt.passed) == (0.0, False)
    assert "call 2, put(jar='red', coins=-8): jar red holds -1" in debt.evidence
    assert [(check.id, check.passed) for check in debt.checks] == [("looked_first", True), ("no_debt", False)]


async def test_a_refused_call_breaks_nothing() -> None:
    found = await verdict(ruled(["looked_first"]), put(0), ("put", {"jar": "none", "coins": 1}))
    assert found.score == 1.0
    assert "no rule was broken in 2 calls" in found.evidence


async def test_a_rule_about_the_end_and_an_invariant_that_is_broken_twice() -> None:
    posed = ruled(["few_moves", "no_debt"])
    found = await verdict(posed, put(-8), put(9), put(-9), put(1))
    assert "  the end: 4 moves" in found.evidence
    told = next(check.message for check in found.checks if check.id == "no_debt")
    assert [part.split(",")[0] for part in told.split(" | ")] == ["call 1", "call 3"]


async def test_declared_costs_take_a_share() -> None:
    posed = ruled(["looked_first", "no_debt", "few_moves"], costs={"looked_first": 0.25, "few_moves": 0.5})
    assert (await verdict(posed, put(1))).score == 0.75
    assert (await verdict(posed, put(1), put(1), put(1), put(1))).score == 0.25
    assert (await verdict(posed, put(-8))).score == 0.0
    assert not (await verdict(posed, put(1))).passed


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({}, "rules", "not empty"),
        ({"rules": []}, "rules", "not empty"),
        ({"rules": ["no_debt", "no_debt"]}, "rules", "different"),
        ({"rules": ["no_deb"]}, "rules", "there is no rule 'no_deb'"),
        ({"rules": ["no_debt"], "costs": {"few_moves": 0.5}}, "costs", "rules that are checked"),
        ({"rules": ["no_debt"], "costs": {"no_debt": 0}}, "costs", "found 0"),
        ({"rules": ["no_debt"], "costs": {"no_debt": -1}}, "costs", "found -1"),
        ({"rules": ["no_debt"], "weights": {}}, "weights", "is no setting"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as found:
        verifier("business_rules").check(problem(kind="business_rules", **settings))
    assert found.value.field == f"verifier.settings.{field}"


def test_rules_alone_are_refused() -> None:
    with pytest.raises(InputError, match="pay for doing nothing"):
        verifier("business_rules").check(ruled(["no_debt"]))

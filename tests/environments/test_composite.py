"""All of several verifiers, or declared weights; what would pay for nothing, or by opinion alone, is refused."""

import sys
import types
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.errors import InputError
from data_contracts.records import Check, EnvironmentSpec, Problem, Verdict, VerifierSpec
from environments import registry
from environments.base import Acquire, Collected, Verifier
from environments.registry import check_grading, domain, verifier
from environments.scripted import calls
from environments.verifiers.composite import combined
from tests.environments.application.jars import ANSWER, LOOK, PUT, RULES, played, problem, state

STATE = state([PUT])
LOOKS, PUTS = calls("look", LOOK["arguments"]), calls("put", PUT["arguments"])


async def score(posed: Problem, *messages: Any, answer: str = "7") -> float:
    check_grading(posed)
    found: float = (await played(posed, *messages, answer=answer)).score
    return found


async def test_all_parts_must_hold_unless_weights_are_declared() -> None:
    posed = problem(parts=[STATE, RULES, ANSWER])
    assert await score(posed, LOOKS, PUTS) == 1.0
    assert await score(posed, PUTS) == 0.0  # the right end, and nobody had looked
    assert await score(posed, LOOKS, PUTS, answer="8") == 0.0
    assert await score(posed, LOOKS) == 0.0
    assert await score(posed) == 0.0


async def test_weights_give_partial_credit_behind_gates() -> None:
    posed = problem(parts=[{**STATE, "weight": 0.75}, RULES, {**ANSWER, "weight": 0.25}])
    assert await score(posed, LOOKS, PUTS) == 1.0
    assert await score(posed, LOOKS, PUTS, answer="no") == 0.75
    assert await score(posed, LOOKS) == 0.25
    assert await score(posed, PUTS) == 0.0  # a gate
    assert await score(posed, answer="") == 0.0
    declared = {**RULES, "settings": {**RULES["settings"], "costs": {"looked_first": 0.5}}}
    assert await score(problem(parts=[STATE, declared]), PUTS) == 0.5


async def test_a_credited_action_earns_nothing_more_when_it_is_repeated() -> None:
    posed = problem(parts=[{**STATE, "weight": 0.5}, {**ANSWER, "weight": 0.5}, RULES])
    assert await score(posed, LOOKS, PUTS, LOOKS, LOOKS) == 1.0
    assert await score(posed, LOOKS, PUTS, PUTS, PUTS) == 0.5


async def test_checks_components_and_evidence_of_all_parts_are_in_the_verdict() -> None:
    found = (await played(problem(parts=[STATE, RULES, ANSWER]), PUTS, answer="8")).verdict
    assert [(check.id, check.passed) for check in found.checks] == [
        ("state/jars", True), ("state/moves", True), ("rules/looked_first", False), ("rules/no_debt", True),
        ("answer/correct", False),
    ]  # fmt: skip
    assert found.components == {"state": 1.0, "rules": 0.0, "answer": 0.0}
    assert all(
        words in found.evidence for words in ("state (state_comparison): 1.", "call 1, put(", "answer (exact_answer): 0.")
    )
    assert (found.verifier, found.trust, found.passed) == ("composite", "cases", False)


def verdict(score: float, **more: Any) -> Verdict:
    given: dict[str, Any] = {"trust": "cases", "checks": (Check(id="c", passed=True),), **more}
    return Verdict(verifier="v", score=score, passed=score == 1.0, **given)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=6))
def test_the_score_is_bounded_full_only_when_all_is_and_nothing_when_a_gate_is_shut(parts: list[tuple[bool, float]]) -> None:
    weighted = sum(has for has, _ in parts)
    spec = [{"id": f"p{n}", "kind": "v"} | ({"weight": 1 / weighted} if has else {}) for n, (has, _) in enumerate(parts)]
    found = combined(spec, [verdict(score) for _, score in parts])
    assert 0.0 <= found.score <= 1.0
    if all(score == 1.0 for _, score in parts):
        assert found.passed
    if any(score == 0.0 for has, score in parts if not has):
        assert found.score == 0.0
    if not weighted:
        assert found.score <= min(score for _, score in parts) + 1e-9


def test_the_weakest_trust_and_any_tampering_are_those_of_the_whole() -> None:
    parts = [{"id": "a", "kind": "v", "weight": 0.5}, {"id": "b", "kind": "v", "weight": 0.5}]
    weak = combined(parts, [verdict(1.0), verdict(1.0, trust="in_process")])
    assert (weak.trust, weak.score) == ("in_process", 1.0)
    forged = combined(parts, [verdict(1.0), verdict(0.0, tampering="a canary passed")])
    assert (forged.tampering, forged.score, forged.passed) == ("b: a canary passed", 0.0, False)


REFUSED: list[tuple[Any, str, str]] = [
    ([], "parts", "everything would pass"),
    (None, "parts", "everything would pass"),
    ([RULES], "parts", "all parts hold when nothing is done"),
    ([state([], read_only=True), RULES], "parts", "all parts hold when nothing is done"),
    ([state([]), ANSWER], "parts[0].settings.calls", "doing nothing would pass"),
    ([STATE, {**RULES, "weight": 0.5}, {**ANSWER, "weight": 0.5}], "parts[1].weight", "would be paid for that"),
    ([{**state([], read_only=True), "weight": 1.0}, ANSWER], "parts[0].weight", "would be paid for that"),
    ([{**STATE, "weight": 0.5}, ANSWER], "parts", "the weights sum to 0.5"),
    ([{**STATE, "weight": -1}, ANSWER], "parts[0]", "the weight is -1"),
    ([{**STATE, "weight": True}, ANSWER], "parts[0]", "the weight is True"),
    ([STATE, STATE], "parts", "two parts have one id"),
    ([{**STATE, "id": "a/b"}], "parts[0]", "is no name"),
    ([{**STATE, "id": "c", "kind": "composite"}], "parts[0]", "the kind is 'composite'"),
    ([STATE, {**ANSWER, "kind": "exact"}], "parts[1].kind", "unknown verifier 'exact'"),
    ([STATE, {**ANSWER, "settings": {"rule": "number"}}], "parts[1].settings.expected", "expected a text"),
    ([STATE, {**ANSWER, "wieght": 1}], "parts[1]", "expected an object of"),
    (["state"], "parts[0]", "expected an object of"),
]


@pytest.mark.parametrize(("parts", "field", "words"), REFUSED)
def test_criteria_that_are_empty_or_pay_for_nothing_are_refused(parts: Any, field: str, words: str) -> None:
    posed = problem(kind="composite", parts=parts) if parts is not None else problem(kind="composite")
    with pytest.raises(InputError, match=words) as found:
        check_grading(posed)
    assert found.value.field == f"verifier.settings.{field}"
    assert found.value.remedy


class Taste(Verifier):
    """A judge, as a third party would bring one."""

    kind = "their_verifiers:Taste"
    opinion: ClassVar[bool] = True

    async def verify(self, problem: Problem, collected: Collected, *, acquire: Acquire, deadline_seconds: float) -> Verdict:
        return verdict(0.5)


async def test_an_opinion_never_decides_alone_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("their_verifiers")
    module.Taste = Taste  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_verifiers", module)
    taste = {"id": "taste", "kind": Taste.kind}
    for posed in (problem(kind=Taste.kind), problem(parts=[taste]), problem(parts=[taste, RULES])):
        with pytest.raises(InputError, match="opinion"):
            check_grading(posed)
    check_grading(problem(parts=[taste], opinion_alone=True))
    beside = problem(parts=[{**taste, "weight": 0.2}, {**STATE, "weight": 0.8}])
    assert await score(beside, PUTS) == 0.9
    registry.verifier.cache_clear()


def test_regrading_knows_what_the_parts_read() -> None:
    found = verifier("composite").needs(problem(parts=[STATE, RULES, ANSWER]))
    assert found == ("calls", "seal", "answer")


async def test_it_works_without_an_application() -> None:
    echo = next(domain("echo").problems("train", seed=0))
    part = {"id": "letter", "kind": "exact_answer", "settings": echo.verifier.settings}
    posed = Problem(
        id=echo.id, domain="echo", split="train", difficulty=0.5, messages=echo.messages,
        environment=EnvironmentSpec(kind="echo"), verifier=VerifierSpec(kind="composite", settings={"parts": [part]}),
    )  # fmt: skip
    check_grading(posed)
    found = await verifier("composite").verify(
        posed,
        Collected(state={"answer": echo.verifier.settings["expected"]}),
        acquire=None,
        deadline_seconds=5,  # type: ignore[arg-type]
    )
    assert found.score == 1.0

from itertools import islice
from typing import Any

import pytest

from data_contracts.errors import InputError
from data_contracts.records import Problem, Verdict
from environments.base import Collected
from environments.registry import domain
from environments.verifiers.exact_answer import ExactAnswer, numbers, only_number

ADD = next(islice(domain("arithmetic").problems("train", seed=0), 1))


def problem(expected: str, **weights: float) -> Problem:
    settings = {"rule": "number", "expected": expected, "weights": weights or {"correct": 0.5, "strict": 0.5}}
    return ADD.__class__(
        **{f: getattr(ADD, f) for f in ADD.__struct_fields__ if f != "verifier"},
        verifier=ADD.verifier.__class__(kind="exact_answer", settings=settings),
    )


async def grade(reply: Any, expected: str = "82", *, calls: Any = (), **weights: float) -> Verdict:
    async def no_box(spec: object) -> Any:
        raise AssertionError("an exact answer needs no box")

    state = {"answer": reply, "calls": list(calls)}
    return await ExactAnswer().verify(problem(expected, **weights), Collected(state=state), acquire=no_box, deadline_seconds=1)


@pytest.mark.parametrize("reply", ["82", " 82\n", "82.", "+82", "82.0", "082"])
async def test_only_the_number_is_full_credit(reply: str) -> None:
    verdict = await grade(reply)
    assert verdict.score == 1.0
    assert verdict.passed


@pytest.mark.parametrize("reply", ["The answer is 82", "47 + 35 = 82", "81, no: 82!", "**82**", "$82", "82%", "(82)"])
async def test_a_last_number_that_is_right_is_half_credit(reply: str) -> None:
    verdict = await grade(reply)
    assert verdict.score == 0.5
    assert not verdict.passed
    assert verdict.components["correct"] == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        None,
        82,
        "",
        " ",
        ".",
        "-",
        "82 83",
        "n82",
        "82n",
        "8 2",
        "1820",
        "0.82",
        "82.5",
        "-82",
        "8.2e1",
        "82e1",
        "\u0668\u0662",
        "8\u00b2",
        "82,5",
        "9" * 70,
        "82" + "0" * 5000,
        "1e309",
        "NaN",
        "eighty-two",
        "_82",
        "82/1.5",
    ],
)
async def test_everything_else_is_wrong(reply: Any) -> None:
    assert (await grade(reply)).score == 0.0


@pytest.mark.parametrize(
    ("reply", "expected"),
    [("1,234", "1234"), ("\u22125", "-5"), ("\u2013 5", "5"), ("-1,234.50", "-1234.5"), ("12.50", "12.5")],
)
async def test_one_way_to_read_a_number(reply: str, expected: str) -> None:
    assert (await grade(reply, expected)).components["correct"] == 1.0


def test_signs_and_groups() -> None:
    assert [str(n) for n in numbers("47-35, 7 -5, 1,23 and 12,345,678.")] == ["47", "35", "7", "-5", "12345678"]
    assert only_number("1,23") is None
    assert only_number("7 -5") is None


async def test_found_needs_a_calculation_with_the_expected_value() -> None:
    weights = {"found": 0.2, "correct": 0.4, "strict": 0.4}
    ok = {"name": "calculator", "status": "ok", "computed": True, "result": 82}
    assert (await grade("no idea", calls=[ok], **weights)).score == pytest.approx(0.2)
    assert (await grade("no idea", calls=[ok] * 5, **weights)).score == pytest.approx(0.2)
    assert (await grade("no idea", calls=[{**ok, "computed": False}], **weights)).score == 0.0
    assert (await grade("no idea", calls=[{**ok, "status": "error"}], **weights)).score == 0.0
    assert (await grade("no idea", calls=[{**ok, "result": 81}], **weights)).score == 0.0
    assert (await grade("82", **weights)).score == 1.0


async def test_a_problem_that_declares_nonsense_is_refused() -> None:
    with pytest.raises(InputError, match="no number"):
        await grade("82", "many")


async def test_evidence_can_be_read() -> None:
    assert "82" in (await grade("It is 81")).evidence
    assert "It is 81" in (await grade("It is 81")).evidence

"""Formulas: what counts as equal, what does not, and what a hostile answer costs."""

# ruff: noqa: E501  tables of cases

import asyncio
import contextlib
import time

import pytest

from environments.verifiers import symbolic
from environments.verifiers.symbolic import difference
from environments.verifiers.symbolic_parse import MAX_CHARS, ParseError, parse

EQUAL = [
    ("2x+1", "1 + 2*x"), ("(x+1)^2", "x^2+2x+1"), ("\\sin^2 x + \\cos^2 x", "1"), ("\\sqrt{8}", "2\\sqrt{2}"), ("5", "x = 5"),
    ("y = 2x + 1", "2y = 4x + 2"), ("\\{1,2\\}", "2, 1"), ("{1, 2}", "{2,1}"), ("(1,2)", "(1, 4/2)"), ("(0,1]", "(0, 1]"),
    ("|x|", "\\sqrt{x^2}"), ("3!", "6"), ("e^{i\\pi}", "-1"), ("\\ln 4", "2\\ln 2"), ("\\infty", "oo"), ("\\binom{5}{2}", "10"),
    ("\\frac{\\sqrt{3}}{3}", "$\\dfrac{1}{\\sqrt3}$"), ("1,234", "1234"), ("1/3", "2/6"), ("x/x", "1"), ("x^2y", "y x^2"),
    ("2^{10}", "1024"), ("log(8, 2)", "3"), ("a_1 + b", "b + a_{1}"), ("-x^2", "-(x^2)"), ("0.5", "\\frac12"), ("\u221a2", "2^(1/2)"),
]  # fmt: skip
DIFFERENT = [
    ("(x+1)^2", "x^2+2x"), ("x", "\\sqrt{x^2}"), ("1/3", "0.333"), ("2\\pi", "6.28"), ("(1,2)", "(2,1)"), ("(0,1]", "(0,1)"),
    ("\\{1,2\\}", "1"), ("5", "1, 5"), ("5", "5 apples"), ("5", ""), ("5", "__import__('os').system('true')"), ("x", "y"),
    ("5", "5 = 5"), ("y = 2x", "2x"), ("y = 2x", "0 = 0"), ("1", "1/0"), ("2", "x.real"), ("2", "lambda: 2"), ("(1,234)", "1234"),
    ("10", "1 0"), ("5", "5 or 6"), ("\\infty", "-oo"), ("x", "x + 10^{-9}"), ("7", "[7, 8]"),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "answer"), EQUAL)
async def test_equal_formulas(expected: str, answer: str) -> None:
    assert await difference(expected, answer, deadline_seconds=60) == ""
    if "=" not in answer and ", " not in answer:  # forms that only an answer may take
        assert await difference(answer, expected, deadline_seconds=60) == ""


@pytest.mark.parametrize(("expected", "answer"), DIFFERENT)
async def test_different_formulas(expected: str, answer: str) -> None:
    assert await difference(expected, answer, deadline_seconds=60) != ""


async def test_assumptions_and_tolerance_are_declared() -> None:
    assert await difference("x", "\\sqrt{x^2}", assume={"x": "positive"}, deadline_seconds=60) == ""
    assert await difference("(-1)^n", "cos(n*pi)", assume={"n": "integer"}, deadline_seconds=60) == ""
    assert await difference("(-1)^n", "cos(n*pi)", deadline_seconds=60) != ""
    assert await difference("2\\pi", "6.283", tolerance=1e-4, deadline_seconds=60) == ""
    assert await difference("speed*t", "t*speed", variables=["speed"], deadline_seconds=60) == ""


BOMBS = [
    "9^9^9^9",
    "9^(9^(9^9))",
    "100000000!",
    "10^(10^10)",
    "((((((2^3)^5)^7)^11)^13)^17)^19^23",
    "x^(x^(x^(x^9999)))!",
    "1e300^1e300",
]


@pytest.mark.parametrize("bomb", BOMBS)
async def test_a_bomb_costs_its_limit_and_is_wrong(bomb: str) -> None:
    began = time.monotonic()
    first = await difference("1", bomb, deadline_seconds=60)
    assert first
    assert time.monotonic() - began < 30
    assert await difference("2x", "x+x", deadline_seconds=60) == ""  # the process still answers


@pytest.mark.parametrize(
    "text", ["(" * 200 + ")" * 200, "-" * 400 + "x", "x!" * 140, "1" * 41, "x" * (MAX_CHARS + 1), "{" * 90, "\\frac" * 90]
)
def test_the_parser_is_bounded(text: str) -> None:
    began = time.monotonic()
    with contextlib.suppress(ParseError):
        parse(text)
    assert time.monotonic() - began < 0.5


async def test_many_at_once_and_a_process_that_died() -> None:
    await difference("2x", "x+x", deadline_seconds=60)
    process = symbolic._PROCESS._process
    assert process is not None
    process.kill()
    process.wait()
    asked = [difference(f"(x+{n})^2", f"x^2+{2 * n}x+{n * n}", deadline_seconds=120) for n in range(20)]
    assert await asyncio.gather(*asked) == [""] * 20


async def test_an_expected_value_that_is_no_formula_is_said() -> None:
    with pytest.raises(ParseError):
        await difference("several words", "1", deadline_seconds=9)

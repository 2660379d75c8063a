from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.domains.expression import ExpressionError, evaluate, has_operation, show


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("-2 - -3", 1),
        ("--2", 2),
        ("8 / 4 / 2", 1),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "1/3"),
        ("10 - 4 - 3", 3),
        ("7 \u00d7 6", 42),
        ("5 \u2212 8", -3),
        (".5 * 4", 2),
        ("1 / 8", "0.125"),
        ("-1 / 4", "-0.25"),
        (" 12 ", 12),
    ],
)
def test_exact_values(text: str, value: int | str) -> None:
    assert show(evaluate(text)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "too early"),
        ("1 +", "too early"),
        ("1 / 0", "division by zero"),
        ("1 / (2 - 2)", "division by zero"),
        ("2 ** 3", "unexpected"),
        ("(1 + 2", "not closed"),
        ("1 2", "after a complete"),
        ("1)", "after a complete"),
        ("abs(1)", "cannot read"),
        ("1e9", "cannot read"),
        ("__import__('os')", "cannot read"),
        ("1_000", "cannot read"),
        ("1,000", "cannot read"),
        ("(" * 30 + "1", "nested"),
        ("1+" * 200 + "1", "characters"),
        ("\u0661 + 1", "cannot read"),
        ("9%2", "cannot read"),
        ("1\x00", "cannot read"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        evaluate(text)


@given(st.text(max_size=250))
def test_any_text_gives_a_value_or_a_clear_error(text: str) -> None:
    with suppress(ExpressionError):  # anything else is a failure
        assert str(show(evaluate(text)))


@given(st.fractions())
def test_shown_values_read_back(value: Fraction) -> None:
    assert Fraction(str(show(value))) == value


def test_a_bare_number_is_no_calculation() -> None:
    assert not has_operation("82")
    assert not has_operation("-(82)")
    assert has_operation("80 + 2")

"""Canaries fail for everything honest, pass for what lies, and leave a file as it is where they could do harm."""

from __future__ import annotations

from typing import Any

import pytest

from environments.verifiers.unit_tests_canaries import plant, sole_file

LITERALS = ("5", "-5", "2.5", "'a'", "b'a'", "True", "[1, 2]", "(1,)", "{1}", "{'a': 1}", "[]", "None", "(2 + 3)", "f(0)")


class Liar:
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, self.kind)


def failed(source: str, names: tuple[str, ...], value: object) -> dict[str, bool]:
    scope: dict[str, Any] = {"f": lambda x: value}
    exec(source, scope)
    found = {}
    for name in names:
        try:
            scope[name]()
            found[name] = False
        except AssertionError:
            found[name] = True
    return found


@pytest.mark.parametrize("literal", LITERALS)
@pytest.mark.parametrize("text", ["f(1) == {}", "{} == f(1)"])
def test_honest_values_fail_them_and_liars_pass(literal: str, text: str) -> None:
    source = f"def test_a():\n    x = 1\n    assert {text.format(literal)}\n    raise KeyError\n"
    planted, names = plant(source, {"test_a"})
    assert planted.startswith(source)
    assert len(names) == 2
    expected = eval(literal, {"f": lambda x: 3})
    for honest in (expected, 7, "b", None, [1], {"a": 2}):
        assert all(failed(planted, names, honest).values())
    assert list(failed(planted, names, Liar(object)).values()).count(False) == 1
    if literal not in ("None", "(2 + 3)", "f(0)"):
        assert list(failed(planted, names, Liar(type(expected))).values()).count(False) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import pytest\npytestmark = pytest.mark.slow\ndef test_a():\n    assert 1 == 1\n",
        "@pytest.fixture(params=[1])\ndef p(): ...\n",
        "def test_a(\n",
    ],
)
def test_a_file_in_which_they_could_be_multiplied_stays_as_it_is(source: str) -> None:
    assert plant(source, {"test_a"}) == (source, ())


@pytest.mark.parametrize(
    "body",
    [
        "return\n    assert f(1) == 1",
        "if f(1):\n        assert f(1) == 1",
        "assert f(1) < 2",
        "assert 1 < f(1) == 2",
        "yield\n    assert f(1) == 1",
    ],
)
def test_an_assertion_that_may_not_be_reached_is_not_copied(body: str) -> None:
    assert len(plant(f"def test_a():\n    {body}\n", {"test_a"})[1]) == 1
    assert len(plant("@mark\ndef test_a():\n    assert f(1) == 1\n", {"test_a"})[1]) == 1
    assert len(plant("def test_a():\n    assert f(1) == 1\n", set())[1]) == 1


def test_names_are_never_the_same() -> None:
    assert len({name for _ in range(9) for name in sole_file()[1]}) == 27

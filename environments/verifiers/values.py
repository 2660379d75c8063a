"""Plain values across a pipe: encoding of arguments, strict reading of results, exact comparison. No candidate code here.

A value is `[type name, content]` as `function_cases_runner` writes it: int as decimal text, float as hex text, dict as pairs.
Comparison is by exact type, so True is not 1, 1 is not 1.0 and NaN equals nothing. Floats may be given a relative tolerance.
"""

from __future__ import annotations

import math
import re
from typing import Any

Encoded = list[Any]
SHOWN_ITEMS, SHOWN_DEPTH, SHOWN_CHARS = 40, 6, 200
_BRACKETS = {"list": "[]", "tuple": "()", "set": "{}", "frozenset": "{}", "dict": "{}"}
_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]+|\b0x[0-9a-f]{6,}")
_INT = re.compile(r"-?[0-9]{1,2500}")


def encode(value: Any) -> Encoded:
    """Raises TypeError for what is not made of exact builtin types."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return [kind.__name__, value]
    if kind is int:
        return ["int", str(value)]
    if kind is float:
        return ["float", value.hex()]
    if kind in (list, tuple):
        return [kind.__name__, [encode(item) for item in value]]
    if kind in (set, frozenset):
        return [kind.__name__, sorted((encode(item) for item in value), key=repr)]
    if kind is dict:
        return ["dict", [[encode(key), encode(item)] for key, item in value.items()]]
    raise TypeError(f"{kind.__name__} is not a plain value")


def equal(expected: Encoded, actual: Any, *, tolerance: float = 0.0) -> bool:
    """Whether `actual`, which may be any JSON, is the expected value."""
    if not (isinstance(actual, list) and len(actual) == 2 and actual[0] == expected[0] and isinstance(actual[0], str)):
        return False
    kind, left, right = expected[0], expected[1], actual[1]
    if kind == "float":
        return isinstance(right, str) and _floats_equal(left, right, tolerance)
    if kind == "int":
        return isinstance(right, str) and _INT.fullmatch(right) is not None and left == right
    if kind in ("list", "tuple"):
        return _all_equal(left, right, tolerance)
    if kind in ("set", "frozenset"):
        return isinstance(right, list) and len(left) == len(right) and all(_holds(right, item, tolerance) for item in left)
    if kind == "dict":
        if not (isinstance(right, list) and len(left) == len(right)):
            return False
        return all(any(_all_equal(pair, other, tolerance) for other in right) for pair in left)
    return type(left) is type(right) and bool(left == right)


def show(value: Any, depth: int = 0) -> str:
    """A short text of an encoded value, or of any JSON in its place, for people. Bounded in time, depth and length."""
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)):
        return brief(value)
    kind, content = value
    if kind == "float" and isinstance(content, str):
        try:
            return repr(float.fromhex(content))
        except (ValueError, OverflowError):
            return "not a float"
    if kind in _BRACKETS and isinstance(content, list):
        shown = [_show_item(kind, item, depth + 1) if depth < SHOWN_DEPTH else "..." for item in content[:SHOWN_ITEMS]]
        inside = ", ".join([*shown, "..."] if len(content) > SHOWN_ITEMS else shown)
        return f"{_BRACKETS[kind][0]}{inside[:SHOWN_CHARS]}{_BRACKETS[kind][1]}"
    if kind == "other":
        return f"<{brief(content)[:80]}>"
    return str(content)[:80] if kind == "int" and isinstance(content, str) else brief(content)


def steady(text: str) -> str:
    """A candidate's words for a verdict, which holds only what repeats: no addresses of objects (`<f at 0x7f...>`)."""
    return _ADDRESS.sub("0x0", text)


def brief(value: Any) -> str:
    """A short text of any JSON value: containers by their size, because a candidate may have nested them without end."""
    if isinstance(value, str):
        return repr(steady(value[:SHOWN_CHARS]))[:SHOWN_CHARS]
    return f"<{type(value).__name__} of {len(value)}>" if isinstance(value, (list, dict)) else repr(value)[:SHOWN_CHARS]


def _show_item(kind: str, item: Any, depth: int) -> str:
    if kind == "dict" and isinstance(item, list) and len(item) == 2:
        return f"{show(item[0], depth)}: {show(item[1], depth)}"
    return show(item, depth)


def _floats_equal(left: str, right: str, tolerance: float) -> bool:
    try:
        a, b = float.fromhex(left), float.fromhex(right)
    except (ValueError, OverflowError):
        return False
    if math.isnan(a) or math.isnan(b):
        return False
    if tolerance == 0.0 or math.isinf(a) or math.isinf(b):
        return a == b
    return abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-300)


def _all_equal(left: list[Any], right: Any, tolerance: float) -> bool:
    return (
        isinstance(right, list)
        and len(left) == len(right)
        and all(equal(a, b, tolerance=tolerance) for a, b in zip(left, right, strict=True))
    )


def _holds(values: list[Any], wanted: Encoded, tolerance: float) -> bool:
    return any(equal(wanted, value, tolerance=tolerance) for value in values)


def for_javascript(expected: Encoded) -> Encoded:
    """An expected value as JavaScript has it: one kind of number, one of array, one of set.

    A whole number from 2**53 on stays an int, which only a BigInt equals.
    """
    kind, content = expected
    if kind == "int":
        number = int(content)
        return ["float", float(number).hex()] if abs(number) < 2**53 else expected
    if kind in ("list", "tuple"):
        return ["list", [for_javascript(item) for item in content]]
    if kind in ("set", "frozenset"):
        return ["set", [for_javascript(item) for item in content]]
    if kind == "dict":
        return ["dict", [[for_javascript(key), for_javascript(item)] for key, item in content]]
    return expected

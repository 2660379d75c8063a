"""Exact arithmetic on text: numbers, + - * / and parentheses, and nothing else.

A hand-written scanner and recursive descent; no `eval`, no names, no calls. Values are fractions, so 0.1 + 0.2 is 0.3. Size
is capped (characters, nesting, digits), which bounds time and memory. Not here: powers, remainders, percent, functions.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 200
MAX_DEPTH = 20
_TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+|[-+*/()])")
_SAME = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-"})


class ExpressionError(ValueError):
    """What is wrong with an expression, for the one who wrote it."""


def evaluate(text: str) -> Fraction:
    """The exact value. Raises ExpressionError."""
    return _Parser(_scan(text)).whole()


def has_operation(text: str) -> bool:
    """Whether anything is computed at all: a bare number is not a calculation."""
    return len([token for token in _scan(text) if token[0].isdigit() or token[0] == "."]) > 1


def show(value: Fraction) -> int | str:
    """An int, an exact decimal, or (where no finite decimal exists) a fraction such as "1/3"."""
    if value.denominator == 1:
        return value.numerator
    rest, places = value.denominator, 0
    while rest % 10 == 0 or rest % 5 == 0 or rest % 2 == 0:
        rest //= 10 if rest % 10 == 0 else 5 if rest % 5 == 0 else 2
        places += 1
    if rest != 1:
        return f"{value.numerator}/{value.denominator}"
    digits = f"{abs(value.numerator) * 10**places // value.denominator:0{places + 1}d}"
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}".rstrip("0")


def _scan(text: str) -> list[str]:
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"the expression has {len(text)} characters, at most {MAX_CHARS} are allowed")
    clean, position, tokens = text.translate(_SAME).rstrip(), 0, []
    while position < len(clean):
        match = _TOKEN.match(clean, position)
        if match is None:
            rest = clean[position:].lstrip()
            raise ExpressionError(f"cannot read {rest[:20]!r}; use numbers, + - * / and parentheses")
        tokens.append(match[1])
        position = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0

    def whole(self) -> Fraction:
        value = self._sum()
        if self._next() is not None:
            raise ExpressionError(f"unexpected {self._next()!r} after a complete expression")
        return value

    def _next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self) -> str | None:
        token = self._next()
        self._at += 1
        return token

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next() in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._unary()
        while self._next() in ("*", "/"):
            if self._take() == "*":
                value *= self._unary()
            else:
                divisor = self._unary()
                if divisor == 0:
                    raise ExpressionError("division by zero")
                value /= divisor
        return value

    def _unary(self) -> Fraction:
        negative = False
        while self._next() in ("+", "-"):
            negative ^= self._take() == "-"
        value = self._atom()
        return -value if negative else value

    def _atom(self) -> Fraction:
        token = self._take()
        if token == "(":  # noqa: S105  a parenthesis, not a secret
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise ExpressionError(f"more than {MAX_DEPTH} nested parentheses")
            value = self._sum()
            if self._take() != ")":
                raise ExpressionError("a parenthesis is not closed")
            self._depth -= 1
            return value
        if token is None or not (token[0].isdigit() or token[0] == "."):
            raise ExpressionError("the expression ends too early" if token is None else f"unexpected {token!r}")
        return Fraction(token)

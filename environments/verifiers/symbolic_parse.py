"""Text of a formula -> a small tree, without evaluating anything: the only way an answer gets near sympy. Pure and bounded.

Grammar: + - * / ^ (also **), factorial, |x|, implicit products (2x, 3(x+1), xy), functions with or without brackets, one
equation sign, tuples, sets, intervals and bare lists of values, and the LaTeX that models write (\\frac, \\sqrt[n]{..},
\\cdot, \\pi, \\left ...). `-x^2` is -(x^2), powers bind to the right, `1/2x` is (1/2)x as in Python. An unknown word of up to
MAX_LETTERS letters is a product of one-letter symbols unless the problem names it as a variable; `x_1` is one symbol.

A tree is nested lists of JSON: ["number", text], ["symbol", name], ["constant", name], ["call", name, ...], ["+", ...],
["*", ...], ["/", a, b], ["^", a, b], ["neg", a], ["=", a, b], ["items", open, close, ...].
Refused (ParseError): more than MAX_CHARS characters, MAX_TOKENS tokens, MAX_DEPTH levels or MAX_DIGITS digits in a number, and
all that is not in the grammar. Gaps: no ±, inequalities, matrices, units, derivatives or integrals.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

Tree = list[Any]
MAX_CHARS, MAX_TOKENS, MAX_DEPTH, MAX_DIGITS, MAX_LETTERS = 500, 300, 40, 40, 4
FUNCTIONS = frozenset(
    {
        "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
        "exp", "log", "ln", "sqrt", "cbrt", "abs", "floor", "ceil", "factorial", "binomial", "min", "max",
    }
)  # fmt: skip
CONSTANTS = {"pi": "pi", "e": "E", "E": "E", "i": "I", "I": "I", "oo": "oo", "inf": "oo", "infinity": "oo", "infty": "oo"}
_SYNONYMS = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "ceiling": "ceil", "tg": "tan", "ctg": "cot", "lg": "log"}
_UNICODE = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u00d7": "*", "\u00b7": "*", "\u22c5": "*", "\u2217": "*", "\u00f7": "/", "\u2215": "/",
        "\u221e": " oo ", "\u03c0": " pi ", "\u00b2": "^2", "\u00b3": "^3", "\u2061": "", "\u00a0": " ", "\u2009": " ",
        "\u202f": " ",
    }
)  # fmt: skip
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_LATEX_DROPPED = re.compile(r"\\(?:left|right|displaystyle|,|;|!|:|quad|qquad| )|\\[()\[\]]|\$")
_LATEX_WORDS = {
    "dfrac": "frac", "tfrac": "frac", "cdot": "*", "times": "*", "div": "/", "ast": "*", "lvert": "|", "rvert": "|",
    "vert": "|", "lbrace": "\\{", "rbrace": "\\}",
}  # fmt: skip
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9a-zA-Z]))?)"
    r"|(?P<latex>\\[a-zA-Z]+)|(?P<set>\\[{}])|(?P<word>[a-zA-Z]+)(?P<index>_(?:[a-zA-Z0-9]|\{[a-zA-Z0-9]{1,8}\}))?"
    r"|(?P<op>\*\*|[-+*/^!=|(),\[\]{};]))"
)


class ParseError(ValueError):
    """The text is no formula of this grammar; the message says where."""


def parse(text: str, *, variables: Collection[str] = ()) -> Tree:
    """The tree of a formula. Raises ParseError; takes time linear in the capped length."""
    if len(text) > MAX_CHARS:
        raise ParseError(f"{len(text)} characters, at most {MAX_CHARS} are read")
    return _Parser(_tokens(text), frozenset(variables)).whole()


def _tokens(text: str) -> list[tuple[str, str]]:
    clean = _LATEX_DROPPED.sub(" ", text.translate(_UNICODE)).strip().removesuffix(".")
    clean = clean.replace("\u221a", "\\sqrt ").replace("{,}", "")
    if _GROUPED.fullmatch(clean):  # elsewhere a comma separates values: (1,234) is a pair
        clean = clean.replace(",", "")
    found: list[tuple[str, str]] = []
    place = 0
    while place < len(clean):
        if clean[place:].isspace():
            break
        match = _TOKEN.match(clean, place)
        if match is None:
            raise ParseError(f"cannot read {clean[place : place + 12]!r}")
        place = match.end()
        found.append(_token(match))
        if len(found) > MAX_TOKENS:
            raise ParseError(f"more than {MAX_TOKENS} parts")
    return found


def _token(match: re.Match[str]) -> tuple[str, str]:
    if match["number"]:
        if len(match["number"]) > MAX_DIGITS:
            raise ParseError(f"a number of more than {MAX_DIGITS} digits")
        return "number", match["number"]
    if match["latex"]:
        name = _LATEX_WORDS.get(match["latex"][1:], match["latex"][1:])
        return ("op", name) if not name.isalpha() else ("latex", name)
    if match["set"]:
        return "op", match["set"]
    if match["word"]:
        index = (match["index"] or "").strip("_").strip("{}")
        return ("indexed", f"{match['word']}_{index}") if index else ("word", match["word"])
    return "op", "^" if match["op"] == "**" else match["op"]


_OPENING = {"(": ")", "[": "]", "\\{": "\\}"}
_FACTOR_START = {"number", "word", "indexed", "latex"}


class _Parser:
    """Recursive descent; `depth` counts open brackets and operators of one path."""

    def __init__(self, tokens: list[tuple[str, str]], variables: frozenset[str]) -> None:
        self.tokens, self.variables, self.at, self.depth, self.bars = tokens, variables, 0, 0, 0

    def whole(self) -> Tree:
        if not self.tokens:
            raise ParseError("is empty")
        tree = self.equation()
        if self.peek() == ("op", ","):  # a bare list
            items = [tree]
            while self.take(","):
                items.append(self.equation())
            tree = ["items", "", "", *items]
        if self.at < len(self.tokens):
            raise ParseError(f"cannot go on at {self.tokens[self.at][1]!r}")
        return tree

    def equation(self) -> Tree:
        left = self.sum()
        if not self.take("="):
            return left
        return ["=", left, self.sum()]

    def sum(self) -> Tree:
        self.enter()
        terms = [self.term()]
        while (op := self.one_of("+", "-")) is not None:
            term = self.term()
            terms.append(term if op == "+" else ["neg", term])
        self.depth -= 1
        return terms[0] if len(terms) == 1 else ["+", *terms]

    def term(self) -> Tree:
        tree = self.signed()
        while True:
            if (op := self.one_of("*", "/")) is not None:
                right = self.signed()
                tree = ["*", tree, right] if op == "*" else ["/", tree, right]
            elif self.factor_follows():
                tree = ["*", tree, self.power()]
            else:
                return tree

    def signed(self) -> Tree:
        negative = False
        while (op := self.one_of("+", "-")) is not None:
            negative ^= op == "-"
        tree = self.power()
        return ["neg", tree] if negative else tree

    def power(self) -> Tree:
        self.enter()
        tree = self.postfix()
        if self.take("^"):
            exponent = self.braced() if self.peek() == ("op", "{") else self.signed()
            tree = ["^", tree, exponent]
        self.depth -= 1
        return tree

    def postfix(self) -> Tree:
        tree = self.atom()
        while self.take("!"):
            tree = ["call", "factorial", tree]
        return tree

    def atom(self) -> Tree:
        kind, text = self.next()
        if kind == "number":
            return ["number", text]
        if kind == "indexed":
            return ["symbol", text]
        if kind in ("word", "latex"):
            return self.named(text, latex=kind == "latex")
        if text == "|":
            self.bars += 1
            inside = self.sum()
            self.expect("|")
            self.bars -= 1
            return ["call", "abs", inside]
        if text == "{":
            inside = [self.equation()]
            while self.take(","):
                inside.append(self.equation())
            self.expect("}")
            return inside[0] if len(inside) == 1 else ["items", "\\{", "\\}", *inside]
        if text in _OPENING:
            return self.bracket(text)
        raise ParseError(f"cannot start with {text!r}")

    def bracket(self, opened: str) -> Tree:
        bars, self.bars = self.bars, 0
        items = [self.equation()]
        while self.take(",") or self.take(";"):
            items.append(self.equation())
        closed = self.one_of(")", "]", "\\}")
        if closed is None:
            raise ParseError(f"{opened!r} is not closed")
        self.bars = bars
        if len(items) == 1 and opened != "\\{" and closed == _OPENING[opened]:
            return items[0]
        if (opened == "\\{") != (closed == "\\}") or (len(items) != 2 and closed != _OPENING[opened]):
            raise ParseError(f"{opened!r} is closed by {closed!r}")
        return ["items", opened, closed, *items]

    def named(self, text: str, *, latex: bool) -> Tree:
        if latex and text == "frac":
            return ["/", self.braced(), self.braced()]
        if latex and text in ("text", "mathrm", "operatorname", "mathbf"):
            self.expect("{")
            kind, word = self.next()
            self.expect("}")
            if kind != "word":
                raise ParseError(f"cannot read \\{text}")
            return self.named(word, latex=False)
        if latex and text == "binom":
            return ["call", "binomial", self.braced(), self.braced()]
        name = _SYNONYMS.get(text, text)
        if name in self.variables:
            return ["symbol", name]
        if name in FUNCTIONS:
            return self.call("log" if name == "ln" else name)
        if name in CONSTANTS:
            return ["constant", CONSTANTS[name]]
        if latex or len(name) == 1:  # \alpha is one symbol
            return ["symbol", name]
        if len(name) > MAX_LETTERS:
            raise ParseError(f"the word {name[:20]!r} is neither a function nor a variable of the problem")
        letters: list[Tree] = [
            ["constant", CONSTANTS[c]] if c in CONSTANTS and c not in self.variables else ["symbol", c] for c in name
        ]
        if self.peek() == ("op", "^"):  # in xy^2 the power belongs to y
            self.at += 1
            exponent = self.braced() if self.peek() == ("op", "{") else self.signed()
            letters[-1] = ["^", letters[-1], exponent]
        return ["*", *letters]

    def call(self, name: str) -> Tree:
        index = exponent = None
        if name == "sqrt" and self.take("["):
            index = self.sum()
            self.expect("]")
        if self.take("^"):  # sin^2 x
            exponent = self.braced() if self.peek() == ("op", "{") else self.power()
            if name != "log" and exponent == ["neg", ["number", "1"]]:
                raise ParseError(f"{name}^-1 may be an inverse or a reciprocal: write one of them out")
        if self.peek() == ("op", "{"):
            arguments = [self.braced()]
        elif self.peek() == ("op", "("):
            self.at += 1
            arguments = [self.sum()]
            while self.take(",") or self.take(";"):
                arguments.append(self.sum())
            self.expect(")")
        else:
            arguments = [self.bare_argument()]
        tree: Tree = ["^", arguments[0], ["/", ["number", "1"], index]] if index else ["call", name, *arguments]
        return ["^", tree, exponent] if exponent is not None else tree

    def bare_argument(self) -> Tree:
        """sin 2x: what is joined without an operator, up to the next function."""
        tree = self.power()
        while self.factor_follows() and not self.function_follows() and self.peek() != ("op", "("):
            tree = ["*", tree, self.power()]
        return tree

    def braced(self) -> Tree:
        if not self.take("{"):
            kind, text = self.next()  # \frac12
            if kind == "number" and len(text) > 1 and text.isdigit():
                self.at -= 1
                self.tokens[self.at] = ("number", text[1:])
                return ["number", text[0]]
            if kind in ("number", "word") and len(text) == 1:
                self.at -= 1
                return self.atom()
            raise ParseError(f"expected {{...}}, found {text!r}")
        tree = self.sum()
        self.expect("}")
        return tree

    def factor_follows(self) -> bool:
        kind, text = self.peek()
        if kind == "number":  # "2 3" is no product; ")3" neither
            return False
        return kind in _FACTOR_START or text in ("(", "{") or (text == "|" and self.bars == 0)

    def function_follows(self) -> bool:
        kind, text = self.peek()
        return kind in ("word", "latex") and _SYNONYMS.get(text, text) in FUNCTIONS

    def enter(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError(f"nested more than {MAX_DEPTH} levels deep")

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def next(self) -> tuple[str, str]:
        found = self.peek()
        if found[0] == "end":
            raise ParseError("ends too early")
        self.at += 1
        return found

    def take(self, text: str) -> bool:
        if self.peek() == ("op", text):
            self.at += 1
            return True
        return False

    def one_of(self, *texts: str) -> str | None:
        kind, text = self.peek()
        if kind == "op" and text in texts:
            self.at += 1
            return text
        return None

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise ParseError(f"expected {text!r}, found {self.peek()[1] or 'the end'!r}")

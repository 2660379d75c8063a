"""Reading an answer as a careful grader would: which part of a reply is the answer, numbers in their usual forms, plain text.

`extract`: "whole" (the reply), "boxed" (what the last \\boxed{...} holds), "last_line" (the last line that is not blank), each
without a leading "Answer:", "The answer is", "final answer:" or "####". What cannot be found is empty, and empty is wrong.

`read_number` knows 1,234.5, 1 234 (thin or no-break space), 3/4, 1 3/4, \\frac{3}{4}, 1.5e3, 1.5 x 10^3, 12 % (of one hundred)
and the declared units before or after. Two readings are never tried: 1.234,5, 1,23 and undeclared units are no numbers. Values
are exact fractions; a tolerance is relative to the expected value. All patterns are linear in the capped text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import isfinite
from typing import Any

from data_contracts.errors import InputError
from environments.verifiers import symbolic
from environments.verifiers.symbolic_parse import ParseError, parse

EXTRACTS = ("whole", "boxed", "last_line")
MAX_NUMBER_CHARS, MAX_EXPONENT = 64, 300
_LABEL = re.compile(r"(?:####|(?:so )?(?:the )?(?:final )?answer(?:\s+is\b\s*[:=]?|\s*[:=]))\s*", re.IGNORECASE)
_DASHES = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-") | {"\u00d7": "x", "\u00b7": "x"})
_DIGITS = r"(?:[0-9]{1,3}(?:[,\u00a0\u2009\u202f][0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s?(?:(?P<whole>[0-9]+) (?P<over>[0-9]+)/(?P<under>[0-9]+)"
    rf"|\\[dt]?frac\{{(?P<sign2>-?)(?P<top>{_DECIMAL})\}}\{{(?P<bottom>{_DECIMAL})\}}"
    rf"|(?P<left>{_DECIMAL})\s?/\s?(?P<right>{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]{{1,4}})"
    rf"|\s?(?:x|\*|\\times|\\cdot)\s?10(?:\^|\*\*)\{{?(?P<power>[-+]?[0-9]{{1,4}})\}}?)?)"
)
_PERCENT = re.compile(r"\s*(?:%|\\%|percent|per cent)$", re.IGNORECASE)
_QUOTES = "\"'`\u2018\u2019\u201c\u201d*"


def extract(reply: str, how: str) -> str:
    """The part of a reply that is the answer; empty when there is none."""
    if how == "boxed":
        return _boxed(reply)
    text = reply.strip()
    if how == "last_line":
        text = text.rpartition("\n")[2].strip()
    label = _LABEL.match(text)
    return text[label.end() :].strip() if label else text


def _boxed(reply: str) -> str:
    start = reply.rfind("\\boxed{")
    if start < 0:
        return ""
    first = start + len("\\boxed{")
    depth = 1
    for place in range(first, len(reply)):
        depth += {"{": 1, "}": -1}.get(reply[place], 0)
        if depth == 0:
            return reply[first:place].strip()
    return ""


def read_number(text: str, *, units: Sequence[str] = ()) -> tuple[Fraction, bool] | None:
    """The number that a text consists of, and whether it was written in per cent; None when it is anything else."""
    clean = text.translate(_DASHES).replace("$$", "$").replace("{,}", ",").strip()
    if len(clean) > 2 * MAX_NUMBER_CHARS + 40:
        return None
    if len(clean) > 1 and clean[0] == clean[-1] == "$":
        clean = clean[1:-1].strip()
    clean = clean if clean.endswith("..") else clean.removesuffix(".")
    clean = _without_units(clean.strip(_QUOTES).strip(), units)
    percent = _PERCENT.search(clean)
    if percent:
        clean = clean[: percent.start()]
    if len(clean) > MAX_NUMBER_CHARS or (match := _NUMBER.fullmatch(clean)) is None:
        return None
    value = _value(match)
    if value is None:
        return None
    return (value / 100 if percent else value), percent is not None


def _without_units(text: str, units: Sequence[str]) -> str:
    """At most one declared unit is taken off: the longest that fits, as a whole word."""
    folded = text.casefold()
    for unit in sorted(units, key=len, reverse=True):
        name = unit.casefold()
        rest, word = None, False
        if folded.endswith(name):
            rest = text[: len(text) - len(unit)]
            word = rest[-1:].isalpha() and unit[:1].isalpha()
        elif folded.startswith((name, f"-{name}")):
            minus = "-" if folded[0] == "-" and not name.startswith("-") else ""
            rest = minus + text[len(unit) + len(minus) :].lstrip()
            word = rest[:1].isalpha() and unit[-1:].isalpha()
        if rest is not None and not word and len(folded) == len(text):
            return rest.strip()
    return text


def _value(match: re.Match[str]) -> Fraction | None:
    sign = -1 if (match["sign"] == "-") != (match["sign2"] == "-" if match["sign2"] is not None else False) else 1
    if match["whole"] is not None:
        above, below = Fraction(match["over"]), Fraction(match["under"])
        return sign * (Fraction(match["whole"]) + above / below) if below else None
    for top, bottom in (("top", "bottom"), ("left", "right")):
        if match[top] is not None:
            below = _decimal(match[bottom])
            return sign * _decimal(match[top]) / below if below else None
    exponent = int(match["exponent"] or match["power"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    return sign * _decimal(match["decimal"]) * Fraction(10) ** exponent


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub("[^0-9.]", "", text))


def same_number(expected: Fraction, found: Fraction, *, relative: float, absolute: float) -> bool:
    """Within the larger of both tolerances, counted exactly."""
    return abs(expected - found) <= max(Fraction(relative) * abs(expected), Fraction(absolute))


def plain(text: str, *, case: bool = False) -> str:
    """One spelling of a text: compatibility forms, quotes and emphasis around it, blanks and a final full stop do not count."""
    normal = " ".join(unicodedata.normalize("NFKC", text).split()).strip(_QUOTES).strip()
    normal = normal if normal.endswith("..") else normal.removesuffix(".")
    normal = normal.strip(_QUOTES).strip()
    return normal if case else normal.casefold()


# ------------------------------------------------------------------------------------------------------ the rules themselves

_KEYS = {
    "numeric": {"tolerance", "absolute", "units", "percent", "extract"},
    "text": {"accept", "case", "extract"},
    "symbolic": {"variables", "assume", "tolerance", "extract"},
}


async def miss(rule: str, settings: Mapping[str, Any], found: str, *, deadline_seconds: float) -> str:
    """Why the extracted answer misses the expected one by rule numeric, text or symbolic; empty when it does not.

    Raises InputError for an expected value that the rule cannot read, InfraError where sympy does not answer in time.
    """
    expected = str(settings["expected"])
    if not found:
        return "no answer was found in it"
    if rule == "text":
        case = bool(settings.get("case", False))
        given = plain(found, case=case)
        return (
            ""
            if given and given in {plain(text, case=case) for text in (expected, *settings.get("accept", ()))}
            else "another text"
        )
    if rule == "numeric":
        return _numeric_miss(settings, expected, found)
    try:
        return await symbolic.difference(
            expected,
            found,
            variables=settings.get("variables", ()),
            assume=settings.get("assume", {}),
            tolerance=float(settings.get("tolerance", 0.0)),
            deadline_seconds=deadline_seconds,
        )
    except ParseError as error:
        raise wrong("expected", f"{expected[:40]!r} is no formula: {error}") from error


def _numeric_miss(settings: Mapping[str, Any], expected: str, found: str) -> str:
    units = settings.get("units", ())
    wanted = read_number(expected, units=units)
    if wanted is None:
        raise wrong("expected", f"{expected[:40]!r} is no number")
    given = read_number(found, units=units)
    if given is None:
        return "the answer is no number"
    values = [given[0]]
    if settings.get("percent") == "optional" and wanted[1] and not given[1]:
        values.append(given[0] / 100)
    relative, absolute = float(settings.get("tolerance", 0.0)), float(settings.get("absolute", 0.0))
    near = any(same_number(wanted[0], value, relative=relative, absolute=absolute) for value in values)
    return "" if near else "another number"


def check_rule(rule: str, settings: Mapping[str, Any]) -> None:
    """Raises InputError for settings with which rule numeric, text or symbolic could not grade."""
    if rule not in _KEYS:
        return
    if unknown := sorted(set(settings) - _KEYS[rule] - {"rule", "expected", "weights"}):
        raise wrong(unknown[0], f"is no setting of rule '{rule}', which has {', '.join(sorted(_KEYS[rule]))}")
    if settings.get("extract", "whole") not in EXTRACTS:
        raise wrong("extract", f"found {settings['extract']!r}, expected one of {', '.join(EXTRACTS)}")
    for name in ("tolerance", "absolute"):
        value = settings.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (isfinite(value) and 0 <= value < 1e12):
            raise wrong(name, f"found {value!r}, expected a number from 0 up")
    for name in ("units", "accept", "variables"):
        texts = settings.get(name, [])
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise wrong(name, f"found {str(texts)[:60]}, expected a list of texts that are not empty")
    if settings.get("percent", "sign") not in ("sign", "optional"):
        raise wrong("percent", f"found {settings['percent']!r}, expected 'sign' or 'optional'")
    assume = settings.get("assume", {})
    if not isinstance(assume, dict) or not all(kind in symbolic.ASSUMPTIONS for kind in assume.values()):
        raise wrong("assume", f"expected {{name: one of {', '.join(symbolic.ASSUMPTIONS)}}}")
    expected = settings["expected"]
    if rule == "numeric" and read_number(expected, units=settings.get("units", ())) is None:
        raise wrong("expected", f"{expected[:40]!r} is no number")
    if rule == "text" and not all(plain(text) for text in (expected, *settings.get("accept", ()))):
        raise wrong("expected", "nothing is left of a text without its quotes and blanks")
    if rule == "symbolic":
        try:
            parse(expected, variables={*settings.get("variables", ()), *assume})
        except ParseError as error:
            raise wrong("expected", f"{expected[:40]!r} is no formula: {error}") from error


def wrong(field: str, problem: str) -> InputError:
    return InputError(problem, field=f"verifier.settings.{field}", remedy="Write the settings that exact_answer.py describes")

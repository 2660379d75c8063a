"""Trust `cases`: the final answer, compared outside any box as a number, a choice, a text or a formula.

`settings`: {"rule": one of five, "expected": str, "weights": {component: share}, and what the rule asks for}. The score is the
weighted sum of the components, so everything that earns credit is declared in the problem. Components, each 0 or 1:

    rule "number"   correct   the last number of the reply equals the expected one
                    strict    the reply is that number and nothing else
                    found     correct, or a tool of the environment computed exactly the expected value
                    tool_ok   at least one tool call succeeded (informational: weight 0 unless a problem says otherwise)
    rule "choice"   correct   the reply is the expected choice ("choices" lists all of them)
                    valid     the reply is one of the choices
    rule "numeric"  correct   the answer is the expected value, within "tolerance" (relative) or "absolute", else exactly
                    strict    correct, and the reply is nothing but the answer
    rule "text"     correct   the answer is the expected text or one of "accept", as answer_rules.plain spells them ("case":
                              true tells letter cases apart)
                    strict    as above
    rule "symbolic" correct   the answer is a formula equal to the expected one (symbolic.py; "variables": names of several
                              letters, "assume": {name: real | positive | integer | natural}, "tolerance" for decimals)
                    strict    as above

The last three take the answer out of the reply by "extract" ("whole" unless given; answer_rules.py). "numeric" reads fractions,
per cent, powers of ten and the "units" that it declares; with "percent": "optional" an expected 12% may be answered by 12.

For "number": thousands commas, surrounding blanks, a final full stop and Unicode minus signs are
accepted; digits of other scripts, exponents, and digits inside words are not numbers. An empty reply is wrong. There is no
credit for a substring beyond its "last number".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from data_contracts.errors import InputError
from data_contracts.records import Check, Problem, Verdict
from environments.base import Acquire, Collected, Verifier
from environments.verifiers.answer_rules import check_rule, extract, miss, wrong

_MINUS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-") | dict.fromkeys("\u00a0\u2009\u202f", " ")
)
_NUMBER = re.compile(r"(?<![\w.,])(?:(?<![\w)])[-+])?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?![\w]|[.,][0-9])")
MAX_NUMBER_CHARS = 64
_COMPONENTS = {
    "number": {"correct", "strict", "found", "tool_ok"},
    "choice": {"correct", "valid"},
    "numeric": {"correct", "strict"},
    "text": {"correct", "strict"},
    "symbolic": {"correct", "strict"},
}
MAX_ANSWER_CHARS = 20_000


def numbers(text: str) -> list[Fraction]:
    """All numbers of a reply in order; what is longer than 64 characters is no number."""
    clean = text[-MAX_ANSWER_CHARS:].translate(_MINUS)
    return [Fraction(found.replace(",", "")) for found in _NUMBER.findall(clean) if len(found) <= MAX_NUMBER_CHARS]


def only_number(text: str) -> Fraction | None:
    """The number that a reply consists of, or None."""
    clean = text.translate(_MINUS).strip().removesuffix(".")
    if len(clean) > MAX_NUMBER_CHARS or _NUMBER.fullmatch(clean) is None:
        return None
    return Fraction(clean.replace(",", ""))


class ExactAnswer(Verifier):
    """Compares `state["answer"]` with the expected value."""

    kind = "exact_answer"
    reads = ("answer",)

    def check(self, problem: Problem) -> None:
        settings = problem.verifier.settings
        expected, rule = settings.get("expected"), settings.get("rule")
        if rule not in _COMPONENTS:
            raise wrong("rule", f"found {rule!r}, expected one of {', '.join(_COMPONENTS)}")
        if not isinstance(expected, str) or not expected.strip():
            raise wrong("expected", f"found {expected!r}, expected a text that is not empty")
        if rule == "number" and only_number(expected) is None:
            raise wrong("expected", f"found {expected[:40]!r}, expected a number in digits")
        choices = settings.get("choices")
        if rule == "choice" and not (isinstance(choices, list) and expected in choices and expected == expected.strip()):
            raise wrong("choices", "expected a list that holds the expected choice, which has no blanks around it")
        check_rule(rule, settings)
        weights = settings.get("weights")
        if not isinstance(weights, dict) or not set(weights) <= _COMPONENTS[rule] or not weights.get("correct"):
            raise wrong("weights", f"expected shares of {', '.join(sorted(_COMPONENTS[rule]))}, 'correct' among them")
        shares = list(weights.values())
        if not all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares) or sum(shares) > 1 + 1e-9:
            raise wrong("weights", f"found {shares[:9]}, expected shares from 0 to 1 with a sum of at most 1")

    async def verify(self, problem: Problem, collected: Collected, *, acquire: Acquire, deadline_seconds: float) -> Verdict:
        settings = problem.verifier.settings
        answer = collected.state.get("answer")
        reply = answer if isinstance(answer, str) else ""
        note = ""
        if settings.get("rule") == "number":
            components = _number_components(reply, str(settings["expected"]), collected.state)
        elif settings.get("rule") == "choice":
            shown = reply.strip()
            valid = shown in settings["choices"]
            components = {"correct": float(shown == settings["expected"]), "valid": float(valid)}
        elif settings.get("rule") in _COMPONENTS:
            found = extract(reply[-MAX_ANSWER_CHARS:], settings.get("extract", "whole"))
            note = await miss(settings["rule"], settings, found, deadline_seconds=deadline_seconds)
            components = {"correct": float(not note), "strict": float(not note and found == reply.strip())}
        else:
            raise InputError(
                f"problem {problem.id}: exact_answer has no rule {settings.get('rule')!r}",
                field="verifier.settings.rule",
                remedy=f"Use one of {', '.join(_COMPONENTS)}",
            )
        weights = {str(name): float(share) for name, share in settings["weights"].items()}
        score = min(1.0, max(0.0, sum(share * components[name] for name, share in weights.items())))
        checks = tuple(
            Check(id=name, passed=bool(components[name]), message="" if components[name] else f"not {name}") for name in weights
        )
        return Verdict(
            verifier=self.kind,
            trust="cases",
            score=round(score, 9),
            passed=score >= 1.0 - 1e-9,
            checks=checks,
            components=components,
            evidence=f"expected {settings['expected']!r}, the reply was {reply[:200]!r}" + (f": {note}" if note else ""),
        )


def _number_components(reply: str, expected_text: str, state: Mapping[str, Any]) -> dict[str, float]:
    expected = only_number(expected_text)
    if expected is None:
        raise InputError(
            f"the expected answer {expected_text!r} is no number",
            field="verifier.settings.expected",
            remedy="Write it in digits",
        )
    seen = numbers(reply)
    correct = bool(seen) and seen[-1] == expected
    succeeded = [call for call in state.get("calls", ()) if call.get("status") == "ok"]
    computed = any(call.get("computed") and only_number(str(call.get("result"))) == expected for call in succeeded)
    return {
        "correct": float(correct),
        "strict": float(only_number(reply) == expected),
        "found": float(correct or computed),
        "tool_ok": float(bool(succeeded)),
    }

"""Several verifiers as one: everything must hold, or declared weights of what holds. Trust is that of the weakest part.

`settings`: {"parts": [{"id", "kind", "settings", "weight"}, ...], "opinion_alone": bool}. Each part is graded as if it were the
problem's only verifier (same collected files and state; its sandbox is the problem's). Then

    score = (sum of weight x score over the parts with a weight, or 1 when no part has one) x (score of every other part)

so that without weights all parts must hold, and a part without a weight beside weighted ones is a gate. Partial credit exists
only where a weight is written down, or a part's own settings declare it. Scoring is terminal: nothing done twice counts twice.

Refused before anything starts: no parts; weights that do not sum to 1; parts that a silent, idle episode passes when they carry
a weight, or when there are no others; a part that is an opinion (a judge) as the only one that asks for something, unless
"opinion_alone" says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from data_contracts.errors import ConfigError, InputError
from data_contracts.records import Check, Problem, TrustLevel, Verdict
from environments.base import Acquire, Collected, Verifier
from environments.registry import verifier

_WEAKEST: tuple[TrustLevel, ...] = ("in_process", "proxied", "cases")
_FIELDS = {"id", "kind", "settings", "weight"}
_HOW = 'Write {"id": text, "kind": verifier, "settings": {...}}, and "weight" for partial credit'


class Composite(Verifier):
    """Runs its parts in order and puts their scores, checks and evidence together."""

    kind = "composite"

    def check(self, problem: Problem) -> None:
        parts = _parts(problem)
        for index, part in enumerate(parts):
            judge, inner = _inner(problem, part, index)
            try:
                judge.check_part(inner)
            except InputError as error:
                field = (error.field or "").replace("verifier.", f"verifier.settings.parts[{index}].", 1)
                raise InputError(error.problem, field=field or None, remedy=error.remedy) from error
        weights = [part["weight"] for part in parts if "weight" in part]
        if weights and abs(sum(weights) - 1) > 1e-9:
            raise _wrong("", f"the weights sum to {sum(weights):g}", "Let them sum to 1; a part without one is a gate")
        asking = []
        for index, part in enumerate(parts):
            judge, inner = _inner(problem, part, index)
            if not judge.passes_untouched(inner):
                asking.append(judge)
            elif "weight" in part:
                fault = f"'{part['id']}' holds when nothing is done, so its weight would be paid for that"
                raise _wrong(f"[{index}].weight", fault, "Leave the weight out: then it is a gate")
        if not asking:
            raise _wrong("", "all parts hold when nothing is done", "Add one that asks for something, such as an answer")
        alone = problem.verifier.settings.get("opinion_alone", False)
        if alone is not True and all(judge.opinion for judge in asking):
            raise _wrong("", "only an opinion decides", 'Add a part that checks facts, or say "opinion_alone": true')

    def needs(self, problem: Problem) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for index, part in enumerate(_parts(problem)):
            judge, inner = _inner(problem, part, index)
            found |= dict.fromkeys(judge.needs(inner))
        return tuple(found)

    async def verify(self, problem: Problem, collected: Collected, *, acquire: Acquire, deadline_seconds: float) -> Verdict:
        deadline = time.monotonic() + deadline_seconds
        parts, verdicts = _parts(problem), []
        for index, part in enumerate(parts):
            judge, inner = _inner(problem, part, index)
            left = max(1.0, deadline - time.monotonic())
            verdicts.append(await judge.verify(inner, collected, acquire=acquire, deadline_seconds=left))
        return combined(parts, verdicts)


def combined(parts: Sequence[Mapping[str, Any]], verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict of the verdicts of all parts, in their order."""
    score = _score(parts, verdicts)
    tampering = [f"{part['id']}: {found.tampering}" for part, found in zip(parts, verdicts, strict=True) if found.tampering]
    checks: list[Check] = []
    lines = []
    for part, found in zip(parts, verdicts, strict=True):
        checks += [msgspec.structs.replace(check, id=f"{part['id']}/{check.id}") for check in found.checks]
        share = f", weight {part['weight']:g}" if "weight" in part else ""
        lines.append(f"{part['id']} ({found.verifier}{share}): {found.score:g}. {found.evidence}")
    return Verdict(
        verifier=Composite.kind,
        trust=min((found.trust for found in verdicts), key=_WEAKEST.index),
        score=0.0 if tampering else score,
        passed=not tampering and score >= 1.0 - 1e-9,
        checks=tuple(checks),
        components={str(part["id"]): found.score for part, found in zip(parts, verdicts, strict=True)},
        evidence="\n".join(lines),
        tampering="; ".join(tampering) or None,
    )


def _score(parts: Sequence[Mapping[str, Any]], verdicts: Sequence[Verdict]) -> float:
    earned = [part["weight"] * found.score for part, found in zip(parts, verdicts, strict=True) if "weight" in part]
    score = sum(earned) if earned else 1.0
    for part, found in zip(parts, verdicts, strict=True):
        if "weight" not in part:
            score *= found.score
    return round(min(1.0, max(0.0, score)), 9)


def _parts(problem: Problem) -> list[dict[str, Any]]:
    """The parts, well-formed. Raises InputError."""
    settings = problem.verifier.settings
    if unknown := sorted(set(settings) - {"parts", "opinion_alone"}):
        raise InputError("is no setting of composite", field=f"verifier.settings.{unknown[0]}", remedy=_HOW)
    parts = settings.get("parts")
    if not isinstance(parts, list) or not parts:
        raise _wrong("", "there is nothing to verify by, so everything would pass", _HOW)
    for index, faults in enumerate(map(_faults, parts)):
        for fault in faults:
            raise _wrong(f"[{index}]", fault, _HOW)
    if len({part["id"] for part in parts}) < len(parts):
        raise _wrong("", "two parts have one id", "Give every part its own id")
    return parts


def _faults(part: Any) -> Iterator[str]:
    if not isinstance(part, dict) or not {"id", "kind"} <= set(part) <= _FIELDS:
        yield f"expected an object of {', '.join(sorted(_FIELDS))}"
        return
    if not isinstance(part["id"], str) or not part["id"].isidentifier():
        yield f"the id {part['id']!r} is no name"
    if not isinstance(part["kind"], str) or part["kind"] == Composite.kind:
        yield f"the kind is {part['kind']!r}"
    if not isinstance(part.get("settings", {}), dict):
        yield "the settings are no object"
    weight = part.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1:
        yield f"the weight is {weight!r}, expected one above 0, up to 1"


def _inner(problem: Problem, part: Mapping[str, Any], index: int) -> tuple[Verifier, Problem]:
    """A part's verifier, and the problem as that verifier sees it."""
    try:
        judge = verifier(part["kind"])
    except ConfigError as error:
        raise _wrong(f"[{index}].kind", error.problem, error.remedy or "") from error
    spec = msgspec.structs.replace(problem.verifier, kind=part["kind"], settings=part.get("settings", {}))
    return judge, msgspec.structs.replace(problem, verifier=spec)


def _wrong(place: str, problem: str, remedy: str) -> InputError:
    return InputError(problem, field=f"verifier.settings.parts{place}", remedy=remedy)

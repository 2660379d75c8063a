"""Trust `cases`: the rules of the business over the audit log, in order, with the state before and after every call.

`settings`: {"rules": [ids of the application's rules], "costs": {id: share}}. A broken rule costs all of the score, or the
share that "costs" declares for it. The evidence names rule, sentence and call. A right end that was reached by a forbidden
path is found here: rules see every state on the way, refused calls included.

Alone, rules would pay for doing nothing, since who does nothing breaks none: they are refused except as a part of a
`composite`.
"""

from __future__ import annotations

import asyncio

from data_contracts.errors import InputError
from data_contracts.records import Check, Problem, Verdict
from environments.application.environment import application_of
from environments.application.replay import History, logged
from environments.base import Acquire, Collected, Verifier

SHOWN_BREAKS = 3


class BusinessRules(Verifier):
    """Runs the named rules of the problem's application over the replayed history."""

    kind = "business_rules"
    reads = ("calls", "seal")

    def check(self, problem: Problem) -> None:
        self.check_part(problem)
        raise InputError(
            "rules alone pay for doing nothing", field="verifier.kind",
            remedy="Make them a part of a 'composite' beside 'state_comparison' or 'exact_answer'",
        )  # fmt: skip

    def check_part(self, problem: Problem) -> None:
        settings = problem.verifier.settings
        known = [rule.id for rule in application_of(problem).rules]
        if unknown := sorted(set(settings) - {"rules", "costs"}):
            raise _wrong(unknown[0], "is no setting of business_rules", "Settings: rules, costs")
        rules, costs = settings.get("rules"), settings.get("costs", {})
        if not isinstance(rules, list) or not rules or len(set(map(str, rules))) < len(rules):
            raise _wrong("rules", "expected a list of different rule ids that is not empty", f"Rules: {', '.join(known)}")
        if missing := [rule for rule in rules if rule not in known]:
            raise _wrong("rules", f"there is no rule {missing[0]!r}", f"Rules: {', '.join(known)}")
        if not isinstance(costs, dict) or not set(costs) <= set(rules):
            raise _wrong("costs", "expected shares by rules that are checked", f"Rules: {', '.join(rules)}")
        for cost in costs.values():
            if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 < cost <= 1:
                raise _wrong("costs", f"found {cost!r}", "Write a share above 0, up to 1")

    def passes_untouched(self, problem: Problem) -> bool:
        return True

    async def verify(self, problem: Problem, collected: Collected, *, acquire: Acquire, deadline_seconds: float) -> Verdict:
        return await asyncio.to_thread(_verdict, problem, collected)


def _verdict(problem: Problem, collected: Collected) -> Verdict:
    settings, application = problem.verifier.settings, application_of(problem)
    history = logged(application, problem, collected.state)
    rules = {rule.id: rule for rule in application.rules}
    checks, lines, lost = [], [], 0.0
    for name in settings["rules"]:
        found = [f"{_call(history, broken.call)}: {broken.why}" for broken in rules[name].broken(history)]
        checks.append(Check(id=name, passed=not found, message=" | ".join(found[:SHOWN_BREAKS])))
        if found:
            lost += float(settings.get("costs", {}).get(name, 1.0))
            lines += [f"rule {name} is broken: {rules[name].sentence}", *(f"  {text}" for text in found[:SHOWN_BREAKS])]
    score = round(max(0.0, 1.0 - lost), 9)
    return Verdict(
        verifier=BusinessRules.kind,
        trust="cases",
        score=score,
        passed=not lines,
        checks=tuple(checks),
        components={"rules": score},
        evidence="\n".join(lines) or f"no rule was broken in {len(history.moments)} calls ({', '.join(settings['rules'])})",
    )


def _call(history: History, index: int | None) -> str:
    return "the end" if index is None else history.moments[index].shown()


def _wrong(field: str, problem: str, remedy: str) -> InputError:
    return InputError(problem, field=f"verifier.settings.{field}", remedy=remedy)

"""The order desk of a shop: a stateful service with a policy, customers' requests, and questions about the records.

Every problem begins with a shop of its own (orders_world.py), made from a seed. Its policy is in the prompt; the tools check
far less than the policy asks (orders_desk.py). Graded are, all at the end and all of them together: the final state against
the one that the right calls lead to, the rules of the business over the audit log (orders_rules.py), and the final answer
where one is asked for. Questions and requests that the policy refuses need no write, so an untouched database earns nothing
without the answer, which is a date or a number of the records. No partial credit is declared.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, ClassVar

from data_contracts.errors import ConfigError
from data_contracts.records import Budgets, EnvironmentSpec, Message, Problem, Split, VerifierSpec
from environments.application.base import Start
from environments.application.environment import ApplicationDomain
from environments.base import Exploit, Policy
from environments.domains.orders_desk import OPERATIONS, OrderDesk
from environments.domains.orders_exploits import EXPLOITS, script
from environments.domains.orders_requests import ACTIONS, QUESTIONS, REFUSALS, Case, Kind, Shop
from environments.domains.orders_rules import RULES
from environments.domains.orders_world import FULL_DAYS, KEPT_PERCENT, LATE_DAYS, RETURN_DAYS, VOUCHER_CENTS, populate
from environments.scripted import calls, plays

POLICY = f"""You work at the order desk of a shop and act only through the tools. Amounts are in cents. Today is {{today}}.

1. Before you read or change an order, identify its customer by e-mail address and postcode.
2. An order can be cancelled while its status is "paid". Cancel it, then refund all that was paid, shipping included.
3. Goods can come back until {RETURN_DAYS} days after delivery, the last day included. Register one return for each line, then
issue one refund for all of them: the full price of the goods until day {FULL_DAYS}, later {KEPT_PERCENT} % of it, rounded
down to the cent for each line. Shipping is not refunded.
4. Refunds go to the method that the order was paid by.
5. The address of an order can be changed while its status is "paid".
6. An order delivered more than {LATE_DAYS} days after it was placed earns one voucher of {VOUCHER_CENTS} cents, on request,
once.
7. Do what the customer asks and nothing else. What the policy does not allow is refused: change nothing, and answer with the
word refused and a date, like "refused 2031-01-31". The date is the last day for returns that come too late, the day of
shipping for cancellations and addresses, and for vouchers the day of delivery, or the day on which one was granted before.
8. When you are done, answer without calling a tool. The last line of your answer is what was asked for."""
KINDS: dict[str, dict[str, Kind]] = {
    "default": {**ACTIONS, **REFUSALS, **QUESTIONS},
    "actions": ACTIONS,
    "refusals": REFUSALS,
    "questions": QUESTIONS,
}
MAX_PROBLEMS = 20_000


class Orders(ApplicationDomain):
    name = "orders"
    family = "business_processes"
    summary = "an order desk with a policy: cancel, return, refund, refuse and look up, through tools on a database"
    levels: ClassVar[dict[str, str]] = {
        "default": "actions, refusals and questions in turn",
        "actions": "requests that the policy allows",
        "refusals": "requests that the policy does not allow",
        "questions": "questions about orders; nothing may change",
    }
    application = OrderDesk()

    def problems(self, split: Split, *, seed: int, level: str = "default", **settings: Any) -> Iterator[Problem]:
        """20,000 problems, each in a shop of its own. A digest of the shop's seed decides the split."""
        if level not in self.levels or settings:
            raise ConfigError(
                f"orders has no level '{level}' or was given settings {sorted(settings)}",
                field="level",
                remedy=f"Levels: {', '.join(self.levels)}; no settings",
            )
        rng = random.Random(f"orders:{split}:{seed}:{level}")
        kinds, used = list(KINDS[level].values()), set[int]()
        rng.shuffle(kinds)
        for number in count():
            if len(used) >= MAX_PROBLEMS:
                return
            world, case = _draw(rng, split, kinds[number % len(kinds)], used)
            used.add(world)
            yield problem_of(split, world, case, populate(world))

    def oracle(self, problem: Problem) -> Policy:
        return plays(*script(problem))

    def recovering(self, problem: Problem) -> Policy:
        """Unknown tool, broken JSON, a missing argument, an order that does not exist; then it does as it should."""
        return plays(
            calls("refund_everything", {"order_id": "O1"}, call_id="a"),
            calls("get_order", '{"order_id": ', call_id="b"),
            calls("issue_refund", {"order_id": "O1"}, call_id="c"),
            calls("cancel_order", {"order_id": "O0"}, call_id="d"),
            *script(problem),
        )

    def exploits(self) -> Sequence[Exploit]:
        return EXPLOITS


def _split_of(world: int) -> Split:
    return "heldout" if hashlib.sha256(f"orders:{world}".encode()).digest()[0] % 5 == 0 else "train"


def _draw(rng: random.Random, split: Split, kind: Kind, used: set[int]) -> tuple[int, Case]:
    """A shop of this split that no problem had, and one of its fitting cases."""
    while True:
        world = rng.randrange(10**9)
        if world in used or _split_of(world) != split:
            continue
        cases = list(kind(rng, Shop(populate(world))))
        if cases:
            return world, rng.choice(cases)


def problem_of(split: Split, world: int, case: Case, start: Start) -> Problem:
    """A case as a problem: all of state, rules and (if asked for) answer."""
    customer = case.customer
    request = f"Hello, this is {customer['name']} ({customer['email']}, postcode {customer['postcode']}): {case.text}"
    return Problem(
        id=f"orders/{split}/{case.kind}-{world}",
        domain="orders",
        split=split,
        difficulty=case.difficulty,
        messages=(
            Message(role="system", content=POLICY.format(today=start.now[:10])),
            Message(role="user", content=request),
        ),
        tools=tuple(operation.spec for operation in OPERATIONS),
        environment=EnvironmentSpec(kind="orders", settings={"start": {"seed": world, "digest": start.digest}}),
        verifier=VerifierSpec(kind="composite", settings={"parts": list(_parts(case))}),
        budgets=Budgets(
            max_turns=16, max_tokens_per_turn=256, max_episode_tokens=8192, max_tool_calls=20, tool_call_seconds=5.0
        ),
        metadata={
            "case": case.kind,
            "customer": dict(customer),
            "orders": list(case.orders),
            "writes": list(case.writes),
            "answer": case.answer,
        },
    )


def _parts(case: Case) -> Iterator[dict[str, Any]]:
    settings: dict[str, Any] = {"calls": list(case.writes)}
    yield {"id": "state", "kind": "state_comparison", "settings": settings if case.writes else {**settings, "read_only": True}}
    yield {"id": "rules", "kind": "business_rules", "settings": {"rules": [rule.id for rule in RULES]}}
    if case.answer is not None:
        rule = "numeric" if case.number else "text"
        found = {"rule": rule, "expected": case.answer, "extract": "last_line", "weights": {"correct": 1.0}}
        yield {"id": "answer", "kind": "exact_answer", "settings": found}

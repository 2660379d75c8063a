"""The order desk: every kind of request has one right end, and every rule of the policy is kept by somebody."""

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from data_contracts.protocols import to_json
from data_contracts.records import Check, Problem
from environments.application.replay import logged
from environments.domains.orders import KINDS, Orders
from environments.domains.orders_desk import OPERATIONS, OrderDesk
from environments.domains.orders_exploits import script
from environments.domains.orders_requests import Shop
from environments.domains.orders_rules import RULES, owed_to
from environments.domains.orders_world import last_day, owed_for_return, populate
from environments.registry import check_grading, domain
from environments.scripted import ScriptedEpisode, calls, plays, run_scripted, says

ORDERS = domain("orders")
assert isinstance(ORDERS, Orders)
PROBLEMS = list(islice(ORDERS.problems("train", seed=1), 26))
BY_KIND: dict[str, Problem] = {problem.metadata["case"]: problem for problem in PROBLEMS}
Step = tuple[str, dict[str, Any]]


async def play(problem: Problem, *steps: Step, answer: str = "Done.") -> ScriptedEpisode:
    made = (calls(name, given, call_id=f"c{number}") for number, (name, given) in enumerate(steps))
    return await run_scripted(ORDERS, problem, plays(*made, says(answer)), backend=None)


def opening(problem: Problem) -> list[Step]:
    """Identification and lookups, as the oracle does them."""
    read = [message.tool_calls[0] for message in script(problem, writes=[]) if message.tool_calls]
    return [(call.name, json.loads(call.arguments)) for call in read]


def writes(problem: Problem) -> list[Step]:
    return [(write["name"], write["arguments"]) for write in problem.metadata["writes"]]


def broken(episode: ScriptedEpisode) -> set[str]:
    assert episode.verdict is not None
    return {
        check.id.removeprefix("rules/")
        for check in episode.verdict.checks
        if check.id.startswith("rules/") and not check.passed
    }


def test_there_are_many_problems_of_every_kind_and_all_are_well_formed() -> None:
    for split in ("train", "heldout"):
        found = list(islice(ORDERS.problems(split, seed=0), 260))
        assert len({problem.id for problem in found}) == len({problem.messages for problem in found}) == 260
        assert {problem.metadata["case"] for problem in found} == set(KINDS["default"])
    for problem in PROBLEMS:
        check_grading(problem)


@pytest.mark.parametrize("kind", sorted(KINDS["default"]))
async def test_the_right_end_scores_one_and_every_step_of_it_is_needed(kind: str) -> None:
    problem = BY_KIND[kind]
    right = problem.metadata["answer"] or "Done."
    whole = await play(problem, *opening(problem), *writes(problem), answer=f"Here it is.\n{right}")
    assert whole.score == 1.0, whole.verdict
    for index in range(len(writes(problem))):
        left = writes(problem)[:index] + writes(problem)[index + 1 :]
        assert (await play(problem, *opening(problem), *left, answer=right)).score == 0.0
    if problem.metadata["answer"] is not None:
        for wrong in ("", "Done.", f"{right} or so", f"{right}0", f"{right}\nAnything else?"):
            assert (await play(problem, *opening(problem), answer=wrong)).score == 0.0


async def test_writes_about_different_lines_may_come_in_any_order() -> None:
    problem = BY_KIND["return_all"]
    *returns, refund = writes(problem)
    assert len(returns) > 1
    assert (await play(problem, *opening(problem), *reversed(returns), refund)).score == 1.0


def order_of(problem: Problem) -> str:
    return str(problem.metadata["orders"][0])


def _without_identification(problem: Problem) -> list[Step]:
    return [*opening(problem)[1:], *writes(problem)]


def _money_first(problem: Problem) -> list[Step]:
    return [*opening(problem), writes(problem)[-1], *writes(problem)[:-1]]


def _other_method(problem: Problem) -> list[Step]:
    name, given = writes(problem)[-1]
    other = "card" if given["method"] == "transfer" else "transfer"
    return [*opening(problem), *writes(problem)[:-1], (name, {**given, "method": other})]


def _refund_loop(problem: Problem) -> list[Step]:
    return [*opening(problem), *writes(problem), *[writes(problem)[-1]] * 4]


def _late_return(problem: Problem) -> list[Step]:
    return [*opening(problem), ("register_return", {"order_id": order_of(problem), "line": 1, "quantity": 1})]


def _voucher(problem: Problem) -> list[Step]:
    return [*opening(problem), ("grant_voucher", {"order_id": order_of(problem)})]


def _voucher_twice(problem: Problem) -> list[Step]:
    return [*_voucher(problem), ("grant_voucher", {"order_id": order_of(problem)})]


def _address(problem: Problem) -> list[Step]:
    return [*opening(problem), ("change_address", {"order_id": order_of(problem), "address": "Mill Lane 1"})]


BREAKS: list[tuple[str, Callable[[Problem], list[Step]], set[str]]] = [
    ("cancel", _without_identification, {"identified_first"}),
    ("paid_total", _without_identification, {"identified_first"}),
    ("cancel", _money_first, {"refunds_are_owed"}),
    ("return_item", _money_first, {"refunds_are_owed"}),
    ("cancel", _other_method, {"refund_method"}),
    ("cancel", _refund_loop, {"refunds_are_owed", "refunds_within_payment"}),
    ("late_return", _late_return, {"return_window"}),
    ("cancel", _voucher, {"voucher_earned"}),
    ("voucher", _voucher_twice, {"one_voucher"}),
    ("address_shipped", _address, {"address_before_shipping"}),
]


@pytest.mark.parametrize(("kind", "steps", "rules"), BREAKS)
async def test_a_rule_of_the_policy_that_is_broken_is_named_and_costs_everything(
    kind: str, steps: Callable[[Problem], list[Step]], rules: set[str]
) -> None:
    problem = BY_KIND[kind]
    episode = await play(problem, *steps(problem), answer=problem.metadata["answer"] or "Done.")
    assert broken(episode) == rules
    assert episode.score == 0.0
    assert episode.verdict is not None
    for rule in rules:
        sentence = next(found.sentence for found in RULES if found.id == rule)
        assert f"rule {rule} is broken: {sentence}" in episode.verdict.evidence
    assert "  call " in episode.verdict.evidence


async def test_a_right_end_by_a_forbidden_path_has_the_right_state_and_no_reward() -> None:
    for kind in ("cancel", "return_item"):
        episode = await play(BY_KIND[kind], *_money_first(BY_KIND[kind]))
        assert episode.verdict is not None
        assert episode.verdict.components == {"state": 1.0, "rules": 0.0}
        assert episode.score == 0.0


async def test_a_stranger_who_is_identified_opens_only_their_own_orders() -> None:
    problem = BY_KIND["last_day"]
    shop = Shop(populate(problem.environment.settings["start"]["seed"]))
    other = next(row for row in shop.customers.values() if row["id"] != problem.metadata["customer"]["id"])
    mine = [order["id"] for order in shop.rows["orders"] if order["customer"] == other["id"]]
    identified: Step = ("identify_customer", {"email": str(other["email"]).upper(), "postcode": other["postcode"]})
    episode = await play(problem, *opening(problem), identified, ("get_order", {"order_id": mine[0]}), answer="x")
    assert broken(episode) == set()
    wrong: Step = ("identify_customer", {"email": other["email"], "postcode": "1"})
    episode = await play(problem, *opening(problem), wrong, ("get_order", {"order_id": mine[0]}), answer="x")
    assert broken(episode) == {"identified_first"}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("issue_refund", {"amount_cents": -500, "method": "card"}),
        ("issue_refund", {"amount_cents": 0, "method": "card"}),
        ("issue_refund", {"amount_cents": 10**12, "method": "card"}),
        ("issue_refund", {"amount_cents": "__import__('os').getpid()", "method": "card"}),
        ("register_return", {"line": 1, "quantity": -3}),
        ("register_return", {"line": 1, "quantity": 999}),
        ("register_return", {"line": 0, "quantity": 1}),
        ("cancel_order", {}),
        ("change_address", {"address": ""}),
    ],
)
async def test_negative_and_impossible_amounts_change_nothing(name: str, given: dict[str, Any]) -> None:
    problem = BY_KIND["return_item"]
    episode = await play(problem, (name, {"order_id": order_of(problem), **given}))
    assert episode.collected is not None
    (call,) = episode.collected.state["calls"]
    assert call["status"] == "error"
    history = logged(OrderDesk(), problem, episode.collected.state)
    assert history.end == history.start


async def test_invariants_would_see_what_the_desk_does_not_allow() -> None:
    """The tables forbid these, so the rules are shown states that only a broken desk could have."""
    problem = BY_KIND["return_item"]
    episode = await play(problem, *opening(problem), *writes(problem))
    assert episode.collected is not None
    history = logged(OrderDesk(), problem, episode.collected.state)
    rules = {rule.id: rule for rule in RULES}
    assert not [list(rule.broken(history)) for rule in RULES if list(rule.broken(history))]
    last = history.moments[-1]
    worse = {**last.after, "products": [{**row, "stock": -1} for row in last.after["products"]]}
    spoiled = type(history)(start=history.start, moments=(*history.moments[:-1], type(last)(**{**vars(last), "after": worse})))
    for name in ("nothing_negative", "goods_conserved"):
        assert {found.call for found in rules[name].broken(spoiled)} == {last.index}


def test_what_a_return_is_worth() -> None:
    assert [owed_for_return(999, delivered="2031-05-01", on=day) for day in ("2031-05-01", "2031-05-15", "2031-05-16")] == [
        999, 999, 799,
    ]  # fmt: skip
    assert [owed_for_return(999, delivered="2031-05-01", on=day) for day in ("2031-05-31", "2031-06-01")] == [799, 0]
    assert last_day("2031-05-01") == "2031-05-31"
    state = {
        "orders": [{"id": "O", "status": "delivered", "delivered_on": "2031-05-01"}],
        "items": [{"order_id": "O", "line": 1, "price_cents": 333}],
        "returns": [{"order_id": "O", "line": 1, "quantity": 3, "registered_at": "2031-05-20T09:00:00"}],
    }
    assert owed_to(state, "O") == 799


def test_a_shop_is_the_same_every_time_and_its_dates_are_past() -> None:
    for seed in range(40):
        start = populate(seed)
        populate.cache_clear()
        assert to_json(populate(seed)) == to_json(start)
        today = start.now[:10]
        days = [row[name] for row in start.rows["orders"] for name in ("placed_on", "shipped_on", "delivered_on") if row[name]]
        days += [str(row["granted_at"])[:10] for row in start.rows["vouchers"]]
        assert all(day < today for day in days)
        by_customer = [(row["customer"], row["placed_on"]) for row in start.rows["orders"]]
        assert len(set(by_customer)) == len(by_customer)  # "the order that I placed on ..." names one


def test_no_tool_takes_free_code_and_all_forbid_further_arguments() -> None:
    for operation in OPERATIONS:
        assert operation.spec.parameters["additionalProperties"] is False
        for name, schema in operation.spec.parameters["properties"].items():
            assert "enum" in schema or "maxLength" in schema or "maximum" in schema, name


async def test_the_verdict_reads_as_a_person_would_write_it() -> None:
    problem = BY_KIND["cancel"]
    episode = await play(problem, *opening(problem), writes(problem)[0])
    assert episode.verdict is not None
    text = episode.verdict.evidence
    order, cents = order_of(problem), writes(problem)[1][1]["amount_cents"]
    assert "the end differs from the expected one in 1 row" in text
    assert f"refunds: missing: id 'R{order[1:]}-1', order_id '{order}'" in text
    assert f"amount_cents {cents}" in text
    assert all(isinstance(check, Check) for check in episode.verdict.checks)

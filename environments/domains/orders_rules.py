"""The rules of the order desk, as its policy states them, over the audit log and the states on the way.

Each is one small function. Rules about single calls look at the state *before* the call; invariants look at every state. They
judge what was done, never what was refused: a call that the desk answered with an error changed nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any

from environments.application.base import Broken, Row, Rule, State
from environments.application.replay import History, invariant
from environments.domains.orders_world import RETURN_DAYS, is_late, owed_for_return

_BY_ORDER = ("get_order", "cancel_order", "register_return", "issue_refund", "grant_voucher", "change_address")


def _order(state: State, name: Any) -> Row:
    return next(row for row in state["orders"] if row["id"] == name)


def _of(state: State, table: str, order: Any) -> list[Row]:
    return [row for row in state[table] if row["order_id"] == order]


def _total(rows: list[Row]) -> int:
    return sum(row["amount_cents"] for row in rows)


def _identified_first(history: History) -> Iterator[Broken]:
    known: set[str] = set()
    for moment in history.done():
        if moment.name == "identify_customer":
            known.add(moment.result["customer_id"])
            continue
        if moment.name in _BY_ORDER:
            owner = _order(moment.before, moment.arguments["order_id"])["customer"]
        else:
            owner = moment.arguments["customer_id"]
        if owner not in known:
            yield Broken(call=moment.index, why=f"customer {owner} had not been identified")


def _refunds_are_owed(history: History) -> Iterator[Broken]:
    for moment in history.done("issue_refund"):
        name = moment.arguments["order_id"]
        given, owed = _total(_of(moment.after, "refunds", name)), owed_to(moment.before, name)
        if given > owed:
            yield Broken(call=moment.index, why=f"{given} cents were refunded for {name} by then, and {owed} were owed")


def owed_to(state: State, name: str) -> int:
    """Cents that the policy owes for what is cancelled or returned of an order."""
    order = _order(state, name)
    if order["status"] == "cancelled":
        return _total(_of(state, "payments", name))
    prices = {row["line"]: row["price_cents"] for row in _of(state, "items", name)}
    return sum(
        owed_for_return(
            prices[row["line"]] * row["quantity"], delivered=order["delivered_on"], on=row["registered_at"][:10]
        )
        for row in _of(state, "returns", name)
    )  # fmt: skip


def _refund_method(history: History) -> Iterator[Broken]:
    for moment in history.done("issue_refund"):
        paid = {row["method"] for row in _of(moment.before, "payments", moment.arguments["order_id"])}
        if moment.arguments["method"] not in paid:
            yield Broken(call=moment.index, why=f"the order was paid by {', '.join(sorted(paid))}")


def _return_window(history: History) -> Iterator[Broken]:
    for moment in history.done("register_return"):
        delivered = _order(moment.before, moment.arguments["order_id"])["delivered_on"]
        days = (date.fromisoformat(moment.now[:10]) - date.fromisoformat(delivered)).days
        if days > RETURN_DAYS:
            yield Broken(call=moment.index, why=f"it was delivered {days} days ago")


def _voucher_earned(history: History) -> Iterator[Broken]:
    for moment in history.done("grant_voucher"):
        order = _order(moment.before, moment.arguments["order_id"])
        placed, delivered = order["placed_on"], order["delivered_on"]
        if delivered is None or not is_late(date.fromisoformat(placed), date.fromisoformat(delivered)):
            yield Broken(call=moment.index, why=f"placed {placed}, delivered {delivered or 'not yet'}: not late")


def _address_before_shipping(history: History) -> Iterator[Broken]:
    for moment in history.done("change_address"):
        status = _order(moment.before, moment.arguments["order_id"])["status"]
        if status != "paid":
            yield Broken(call=moment.index, why=f"the order is {status}")


def _vouchers_twice(state: State) -> Iterator[str]:
    for name, count in Counter(row["order_id"] for row in state["vouchers"]).items():
        if count > 1:
            yield f"order {name} has {count} vouchers"


def _refunds_above_payment(state: State) -> Iterator[str]:
    for order in state["orders"]:
        paid, back = (_total(_of(state, table, order["id"])) for table in ("payments", "refunds"))
        if back > paid:
            yield f"{back} cents of {order['id']} went back, and {paid} were paid"


def _goods(state: State) -> Mapping[str, int]:
    """Pieces of every product in stock and with customers."""
    pieces = Counter({row["sku"]: row["stock"] for row in state["products"]})
    lines = {(row["order_id"], row["line"]): row["sku"] for row in state["items"]}
    live = {row["id"] for row in state["orders"] if row["status"] != "cancelled"}
    for row in state["items"]:
        pieces[row["sku"]] += row["quantity"] if row["order_id"] in live else 0
    for row in state["returns"]:
        pieces[lines[row["order_id"], row["line"]]] -= row["quantity"]
    return pieces


def _goods_conserved(history: History) -> Iterator[Broken]:
    known = _goods(history.start)
    for moment in history.done():
        if moment.after is not moment.before and (now := _goods(moment.after)) != known:
            changed = ", ".join(f"{sku} {known[sku]} -> {now[sku]}" for sku in sorted(known) if known[sku] != now[sku])
            yield Broken(call=moment.index, why=f"pieces in stock and with customers: {changed}")
            known = now


def _negative(state: State) -> Iterator[str]:
    for row in state["products"]:
        if row["stock"] < 0:
            yield f"stock of {row['sku']} is {row['stock']}"
    for table, column in (
        ("items", "quantity"),
        ("returns", "quantity"),
        ("refunds", "amount_cents"),
        ("vouchers", "amount_cents"),
    ):
        for row in state[table]:
            if row[column] <= 0:
                yield f"{column} {row[column]} in {table}, order {row['order_id']}"


RULES = (
    Rule(
        id="identified_first",
        sentence="An order is read or changed only after its own customer was identified.",
        broken=_identified_first,
    ),
    Rule(
        id="refunds_are_owed",
        sentence="Money goes back only after the cancellation or return that it is owed for, and never more than that.",
        broken=_refunds_are_owed,
    ),
    Rule(id="refund_method", sentence="Refunds go to the method that the order was paid by.", broken=_refund_method),
    Rule(id="return_window", sentence=f"Goods come back within {RETURN_DAYS} days after delivery.", broken=_return_window),
    Rule(id="voucher_earned", sentence="Only late orders earn a voucher.", broken=_voucher_earned),
    Rule(id="address_before_shipping", sentence="An address changes only before shipping.", broken=_address_before_shipping),
    invariant("one_voucher", "An order earns at most one voucher.", _vouchers_twice),
    invariant("refunds_within_payment", "Never more goes back than was paid.", _refunds_above_payment),
    Rule(id="goods_conserved", sentence="No goods appear or vanish.", broken=_goods_conserved),
    invariant("nothing_negative", "Stock, quantities and amounts are never negative.", _negative),
)

"""What customers ask the order desk for, read off the records of one shop: actions, requests to refuse, questions.

Each kind looks for the orders of a shop that fit it and says what the right end is: the writing calls that lead there, and the
final answer where one is asked for. A kind without a fitting order gives nothing, and the next shop is tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from environments.application.base import Row, Start
from environments.domains.orders_world import address, is_late, last_day, owed_for_return

Write = dict[str, Any]
"""{"name": operation, "arguments": {...}}"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request and its right end. `orders` are those that must be looked at."""

    kind: str
    customer: Row
    text: str
    orders: tuple[str, ...]
    difficulty: float
    writes: tuple[Write, ...] = ()
    answer: str | None = None
    number: bool = False
    """Whether the answer is a number of the records and not a text."""


class Shop:
    """The records of a beginning, looked up."""

    def __init__(self, start: Start) -> None:
        self.today = start.now[:10]
        self.rows: Mapping[str, Sequence[Row]] = start.rows
        self.customers = {row["id"]: row for row in self.rows["customers"]}
        self.products = {str(row["sku"]): str(row["name"]) for row in self.rows["products"]}

    def of(self, table: str, order: Row) -> list[Row]:
        return [row for row in self.rows[table] if row["order_id"] == order["id"]]

    def orders(self, *statuses: str) -> list[Row]:
        return [row for row in self.rows["orders"] if row["status"] in statuses]

    def owed(self, order: Row, item: Row, quantity: int) -> int:
        return owed_for_return(item["price_cents"] * quantity, delivered=order["delivered_on"], on=self.today)

    def returnable(self) -> list[Row]:
        return [row for row in self.orders("delivered") if last_day(row["delivered_on"]) >= self.today]

    def late(self, order: Row) -> bool:
        return is_late(date.fromisoformat(order["placed_on"]), date.fromisoformat(order["delivered_on"]))


def _named(rng: random.Random, order: Row) -> str:
    """An order as its customer names it; no customer has two orders of one day."""
    return rng.choice((f"order {order['id']}", f"the order that I placed on {order['placed_on']}"))


def _write(name: str, **arguments: Any) -> Write:
    return {"name": name, "arguments": arguments}


Kind = Callable[[random.Random, Shop], Iterator[Case]]


def _about(kind: str, shop: Shop, order: Row, text: str, difficulty: float, **more: Any) -> Case:
    return Case(
        kind=kind, customer=shop.customers[order["customer"]], text=text, orders=(order["id"],), difficulty=difficulty, **more
    )


def _pieces(quantity: int, product: str) -> str:
    return f"the {product}" if quantity == 1 else f"{quantity} pieces of the {product}"


# ------------------------------------------------------------------------------------------------------------------- actions


def _cancel(rng: random.Random, shop: Shop) -> Iterator[Case]:
    for order in shop.orders("paid"):
        (payment,) = shop.of("payments", order)
        refund = _write("issue_refund", order_id=order["id"], amount_cents=payment["amount_cents"], method=payment["method"])
        writes = (_write("cancel_order", order_id=order["id"]), refund)
        yield _about("cancel", shop, order, f"please cancel {_named(rng, order)}.", 0.4, writes=writes)


def _return_item(rng: random.Random, shop: Shop) -> Iterator[Case]:
    for order in shop.returnable():
        item = rng.choice(shop.of("items", order))
        quantity = rng.randint(1, item["quantity"])
        text = f"I want to send back {_pieces(quantity, shop.products[item['sku']])} of {_named(rng, order)}."
        yield _about("return_item", shop, order, text, 0.6, writes=_return(shop, order, [(item, quantity)]))


def _return_all(rng: random.Random, shop: Shop) -> Iterator[Case]:
    for order in shop.returnable():
        items = [(item, item["quantity"]) for item in shop.of("items", order)]
        if len(items) > 1:
            text = f"I want to send back everything of {_named(rng, order)}."
            yield _about("return_all", shop, order, text, 0.8, writes=_return(shop, order, items))


def _return(shop: Shop, order: Row, items: list[tuple[Row, int]]) -> tuple[Write, ...]:
    (payment,) = shop.of("payments", order)
    back = [_write("register_return", order_id=order["id"], line=item["line"], quantity=count) for item, count in items]
    cents = sum(shop.owed(order, item, count) for item, count in items)
    return (*back, _write("issue_refund", order_id=order["id"], amount_cents=cents, method=payment["method"]))


def _voucher(rng: random.Random, shop: Shop) -> Iterator[Case]:
    for order in shop.orders("delivered"):
        if shop.late(order) and not shop.of("vouchers", order):
            text = f"{_named(rng, order)} came late. I would like the voucher for that."
            yield _about("voucher", shop, order, text, 0.4, writes=(_write("grant_voucher", order_id=order["id"]),))


def _address(rng: random.Random, shop: Shop) -> Iterator[Case]:
    for order in shop.orders("paid"):
        new = address(rng)
        writes = (_write("change_address", order_id=order["id"], address=new),)
        yield _about("address", shop, order, f"please send {_named(rng, order)} to this address: {new}", 0.4, writes=writes)


# ------------------------------------------------------------------------------------------------------------------ refusals


def _late_return(rng: random.Random, shop: Shop) -> Iterator[Case]:
    for order in shop.orders("delivered"):
        if last_day(order["delivered_on"]) < shop.today:
            item = rng.choice(shop.of("items", order))
            text = f"I want to send back {_pieces(1, shop.products[item['sku']])} of {_named(rng, order)}."
            yield _about("late_return", shop, order, text, 0.6, answer=f"refused {last_day(order['delivered_on'])}")


def _cancel_shipped(rng: random.Random, shop: Shop) -> Iterator[Case]:
    for order in shop.orders("shipped"):
        text = f"please cancel {_named(rng, order)}."
        yield _about("cancel_shipped", shop, order, text, 0.5, answer=f"refused {order['shipped_on']}")


def _address_shipped(rng: random.Random, shop: Shop) -> Iterator[Case]:
    for order in shop.orders("shipped"):
        text = f"please send {_named(rng, order)} to this address: {address(rng)}"
        yield _about("address_shipped", shop, order, text, 0.5, answer=f"refused {order['shipped_on']}")


def _voucher_unearned(rng: random.Random, shop: Shop) -> Iterator[Case]:
    for order in shop.orders("delivered"):
        text = f"{_named(rng, order)} came late. I would like the voucher for that."
        if not shop.late(order):
            yield _about("voucher_unearned", shop, order, text, 0.5, answer=f"refused {order['delivered_on']}")
        elif granted := shop.of("vouchers", order):
            yield _about("voucher_unearned", shop, order, text, 0.6, answer=f"refused {granted[0]['granted_at'][:10]}")


# ----------------------------------------------------------------------------------------------------------------- questions


def _paid_total(rng: random.Random, shop: Shop) -> Iterator[Case]:
    for customer, mine in _customers(shop):
        cents = sum(row["amount_cents"] for order in mine for row in shop.of("payments", order))
        text = "how many cents did I pay in total for my orders, cancelled ones aside? Answer with only the number."
        yield _question("paid_total", customer, mine, text, 0.7, answer=str(cents), number=True)


def _pieces_bought(rng: random.Random, shop: Shop) -> Iterator[Case]:
    for customer, mine in _customers(shop):
        count = sum(item["quantity"] for order in mine for item in shop.of("items", order))
        text = "how many pieces did I order altogether, cancelled orders aside? Answer with only the number."
        yield _question("pieces_bought", customer, mine, text, 0.7, answer=str(count), number=True)


def _return_value(rng: random.Random, shop: Shop) -> Iterator[Case]:
    for order in shop.returnable():
        item = rng.choice(shop.of("items", order))
        text = (
            f"how many cents would I get back if I sent back {_pieces(1, shop.products[item['sku']])} of "
            f"{_named(rng, order)} today? Only tell me, change nothing. Answer with only the number."
        )
        cents = str(shop.owed(order, item, 1))
        yield _about("return_value", shop, order, text, 0.6, answer=cents, number=True)


def _last_day(rng: random.Random, shop: Shop) -> Iterator[Case]:
    for order in shop.returnable():
        text = f"until which day can I send back goods of {_named(rng, order)}? Answer with only the date, as YYYY-MM-DD."
        yield _about("last_day", shop, order, text, 0.4, answer=last_day(order["delivered_on"]))


def _customers(shop: Shop) -> Iterator[tuple[Row, list[Row]]]:
    for customer in shop.customers.values():
        mine = [
            order for order in shop.rows["orders"] if order["customer"] == customer["id"] and order["status"] != "cancelled"
        ]
        if mine:
            yield customer, mine


def _question(kind: str, customer: Row, orders: list[Row], text: str, difficulty: float, **more: Any) -> Case:
    names = tuple(order["id"] for order in orders)
    return Case(kind=kind, customer=customer, text=text, orders=names, difficulty=difficulty, **more)


ACTIONS: dict[str, Kind] = {
    "cancel": _cancel, "return_item": _return_item, "return_all": _return_all, "voucher": _voucher, "address": _address,
}  # fmt: skip
REFUSALS: dict[str, Kind] = {
    "late_return": _late_return, "cancel_shipped": _cancel_shipped, "address_shipped": _address_shipped,
    "voucher_unearned": _voucher_unearned,
}  # fmt: skip
QUESTIONS: dict[str, Kind] = {
    "paid_total": _paid_total, "pieces_bought": _pieces_bought, "return_value": _return_value, "last_day": _last_day,
}  # fmt: skip

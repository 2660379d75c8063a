"""The shop of one seed: products, customers, and what they ordered, paid and got, as rows of the order desk's tables.

Every date is counted from the seed's own today; money is in whole cents. A parcel is delivered `LATE_DAYS` after the order or
sooner, or late. No event lies on today itself, so that a date of the records is never the date of the day.
"""

from __future__ import annotations

import random
from datetime import date, timedelta
from functools import lru_cache
from typing import Any

from environments.application.base import Start

SHIPPING_CENTS = 490
LATE_DAYS, FULL_DAYS, RETURN_DAYS, KEPT_PERCENT = 7, 14, 30, 80
VOUCHER_CENTS = 500
_PRODUCTS = (
    ("desk lamp", 2490), ("office chair", 18900), ("paper tray", 1290), ("label printer", 7990), ("wall clock", 3450),
    ("whiteboard", 6590), ("stapler", 899), ("document shredder", 11990), ("monitor arm", 8790), ("foot rest", 3290),
    ("key cabinet", 4190), ("cable box", 1749), ("coat stand", 5290), ("waste bin", 1599), ("book ends", 1135),
)  # fmt: skip
_FIRST = ("Ada", "Bruno", "Carla", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kaya", "Lena", "Milan", "Nora")
_LAST = (
    "Abel",
    "Brandt",
    "Costa",
    "Dahl",
    "Ekman",
    "Fischer",
    "Gruber",
    "Hansen",
    "Ivanov",
    "Jensen",
    "Keller",
    "Lopez",
    "Moser",
)
_STREETS = ("Mill Lane", "Station Road", "Garden Street", "Harbour Way", "Church Square", "Long Row", "Hill Street")
_CITIES = ("Northfield", "Easton", "Westbrook", "Southgate", "Lindale", "Marburg", "Ravenhill")

Rows = dict[str, list[dict[str, Any]]]


@lru_cache(maxsize=256)
def populate(seed: int) -> Start:
    """The beginning of this seed; nobody changes its rows."""
    rng = random.Random(f"orders-world:{seed}")
    today = date(2031, 2, 1) + timedelta(days=rng.randrange(300))
    rows: Rows = {
        name: [] for name in ("products", "customers", "orders", "items", "payments", "refunds", "returns", "vouchers")
    }
    for number, (name, price) in enumerate(rng.sample(_PRODUCTS, 10), start=101):
        cents = price + 10 * rng.randrange(-9, 10)
        rows["products"].append({"sku": f"P{number}", "name": name, "price_cents": cents, "stock": rng.randrange(3, 40)})
    for number in range(201, 206):
        _customer(rng, rows, f"C{number}")
    numbers = iter(rng.sample(range(10_000, 100_000), 40))
    for customer in rows["customers"]:
        ages = sorted(rng.sample(range(2, 60), rng.randint(2, 4)), reverse=True)
        for age in ages:
            _order(rng, rows, f"O{next(numbers)}", customer, today=today, placed=today - timedelta(days=age))
    return Start(now=f"{today.isoformat()}T09:00:00", rows={name: tuple(found) for name, found in rows.items()})


def _customer(rng: random.Random, rows: Rows, name: str) -> None:
    taken = {row["email"] for row in rows["customers"]}
    while True:
        first, last = rng.choice(_FIRST), rng.choice(_LAST)
        email = f"{first}.{last}@mail.example".lower()
        if email not in taken:
            break
    postcode = f"{rng.randrange(10_000, 99_999)}"
    rows["customers"].append({"id": name, "name": f"{first} {last}", "email": email, "postcode": postcode})


def address(rng: random.Random) -> str:
    return f"{rng.choice(_STREETS)} {rng.randint(1, 99)}, {rng.randrange(10_000, 99_999)} {rng.choice(_CITIES)}"


def _order(rng: random.Random, rows: Rows, name: str, customer: dict[str, Any], *, today: date, placed: date) -> None:
    shipped, delivered, status = None, None, "paid"
    age = (today - placed).days
    if age >= 4 and rng.random() < 0.85:
        shipped = placed + timedelta(days=rng.randint(1, 3))
        status = "shipped"
        arrives = shipped + timedelta(days=rng.choice((1, 2, 3, 4, 8, 11)))
        if arrives < today:
            delivered, status = arrives, "delivered"
    elif rng.random() < 0.15:
        status = "cancelled"
    rows["orders"].append(
        {
            "id": name, "customer": customer["id"], "status": status, "placed_on": placed.isoformat(),
            "shipped_on": shipped and shipped.isoformat(), "delivered_on": delivered and delivered.isoformat(),
            "address": address(rng), "shipping_cents": SHIPPING_CENTS,
        }
    )  # fmt: skip
    total = SHIPPING_CENTS
    for line, product in enumerate(rng.sample(rows["products"], rng.randint(1, 3)), start=1):
        quantity = rng.choice((1, 1, 1, 2, 3))
        total += quantity * product["price_cents"]
        rows["items"].append(
            {"order_id": name, "line": line, "sku": product["sku"], "quantity": quantity, "price_cents": product["price_cents"]}
        )
    method = rng.choice(("card", "transfer"))
    rows["payments"].append({"id": f"Y{name[1:]}", "order_id": name, "method": method, "amount_cents": total})
    if status == "cancelled":
        at = f"{(placed + timedelta(days=1)).isoformat()}T10:00:00"
        rows["refunds"].append(
            {"id": f"R{name[1:]}-0", "order_id": name, "method": method, "amount_cents": total, "created_at": at}
        )
    if delivered and is_late(placed, delivered) and rng.random() < 0.4:
        at = f"{min(today - timedelta(days=1), delivered + timedelta(days=1)).isoformat()}T11:00:00"
        rows["vouchers"].append({"id": f"V{name[1:]}-0", "order_id": name, "amount_cents": VOUCHER_CENTS, "granted_at": at})


def is_late(placed: date, delivered: date) -> bool:
    return (delivered - placed).days > LATE_DAYS


def last_day(delivered: str) -> str:
    """The last day on which an item may be returned."""
    return (date.fromisoformat(delivered) + timedelta(days=RETURN_DAYS)).isoformat()


def owed_for_return(cents: int, *, delivered: str, on: str) -> int:
    """What the policy pays for returned goods of this price; 0 when the window is closed."""
    days = (date.fromisoformat(on) - date.fromisoformat(delivered)).days
    if days > RETURN_DAYS:
        return 0
    return cents if days <= FULL_DAYS else cents * KEPT_PERCENT // 100

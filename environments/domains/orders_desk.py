"""The order desk of a shop: its tables, its tools, and how little the tools check.

Like much real software, the tools check what the database needs and not what the policy says: a refund of any amount is booked,
a return is registered however old the order is, a voucher is granted twice. What must not happen is in `orders_rules`, which
reads the audit log; the tables forbid what can never be right (negative stock, quantities and amounts).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from data_contracts.records import ToolSpec
from environments.application.base import Application, Operation, Start, Table, Transaction
from environments.domains.orders_rules import RULES
from environments.domains.orders_world import VOUCHER_CENTS, populate
from environments.tools import ToolError

_SCHEMA = """
CREATE TABLE products (sku TEXT PRIMARY KEY, name TEXT NOT NULL, price_cents INTEGER NOT NULL CHECK (price_cents > 0),
    stock INTEGER NOT NULL CHECK (stock >= 0));
CREATE TABLE customers (id TEXT PRIMARY KEY, name TEXT NOT NULL, email TEXT NOT NULL UNIQUE, postcode TEXT NOT NULL);
CREATE TABLE orders (id TEXT PRIMARY KEY, customer TEXT NOT NULL REFERENCES customers,
    status TEXT NOT NULL CHECK (status IN ('paid', 'shipped', 'delivered', 'cancelled')),
    placed_on TEXT NOT NULL, shipped_on TEXT, delivered_on TEXT, address TEXT NOT NULL, shipping_cents INTEGER NOT NULL);
CREATE TABLE items (order_id TEXT NOT NULL REFERENCES orders, line INTEGER NOT NULL, sku TEXT NOT NULL REFERENCES products,
    quantity INTEGER NOT NULL CHECK (quantity > 0), price_cents INTEGER NOT NULL, PRIMARY KEY (order_id, line));
CREATE TABLE payments (id TEXT PRIMARY KEY, order_id TEXT NOT NULL REFERENCES orders, method TEXT NOT NULL,
    amount_cents INTEGER NOT NULL CHECK (amount_cents > 0));
CREATE TABLE refunds (id TEXT PRIMARY KEY, order_id TEXT NOT NULL REFERENCES orders, method TEXT NOT NULL,
    amount_cents INTEGER NOT NULL CHECK (amount_cents > 0), created_at TEXT NOT NULL);
CREATE TABLE returns (id TEXT PRIMARY KEY, order_id TEXT NOT NULL, line INTEGER NOT NULL,
    quantity INTEGER NOT NULL CHECK (quantity > 0), registered_at TEXT NOT NULL,
    FOREIGN KEY (order_id, line) REFERENCES items);
CREATE TABLE vouchers (id TEXT PRIMARY KEY, order_id TEXT NOT NULL REFERENCES orders,
    amount_cents INTEGER NOT NULL CHECK (amount_cents > 0), granted_at TEXT NOT NULL);
"""
_ORDER = {"type": "string", "maxLength": 20, "description": "for example O12345"}
_CENTS = {"type": "integer", "minimum": 1, "maximum": 10_000_000}
_METHOD = {"type": "string", "enum": ["card", "transfer"]}


def _spec(name: str, description: str, **properties: dict[str, Any]) -> ToolSpec:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return ToolSpec(name=name, description=description, parameters=schema)


class OrderDesk(Application):
    name = "orders"
    schema = _SCHEMA
    tables: ClassVar[dict[str, Table]] = {
        "products": Table(key=("sku",)),
        "customers": Table(key=("id",)),
        "orders": Table(key=("id",)),
        "items": Table(key=("order_id", "line")),
        "payments": Table(key=("id",)),
        "refunds": Table(key=("id",), ignore=("created_at",)),
        "returns": Table(key=("id",), ignore=("registered_at",)),
        "vouchers": Table(key=("id",), ignore=("granted_at",)),
    }
    rules = RULES

    def operations(self) -> Sequence[Operation]:
        return OPERATIONS

    def populate(self, seed: int) -> Start:
        return populate(seed)


# ---------------------------------------------------------------------------------------------------------------- operations


def _identify(desk: Transaction, given: dict[str, Any]) -> Any:
    found = desk.row(
        "SELECT id, name FROM customers WHERE email = ? AND postcode = ?", given["email"].lower(), given["postcode"]
    )
    if found is None:
        raise ToolError("no customer has this e-mail address and postcode")
    return {"customer_id": found["id"], "name": found["name"]}


def _list_orders(desk: Transaction, given: dict[str, Any]) -> Any:
    if desk.row("SELECT id FROM customers WHERE id = ?", given["customer_id"]) is None:
        raise ToolError(f"there is no customer {given['customer_id']!r}")
    sql = "SELECT id AS order_id, status, placed_on FROM orders WHERE customer = ? ORDER BY placed_on, id"
    return desk.rows(sql, given["customer_id"])


def _order(desk: Transaction, given: dict[str, Any]) -> dict[str, Any]:
    found = desk.row("SELECT * FROM orders WHERE id = ?", given["order_id"])
    if found is None:
        raise ToolError(f"there is no order {given['order_id']!r}")
    return found


def _numbered(desk: Transaction, letter: str, of: str) -> str:
    """Ids count within an order (returns: within a line), so that the order of calls about different ones does not matter."""
    return f"{letter}{of}-{desk.number(letter + of)}"


def _get_order(desk: Transaction, given: dict[str, Any]) -> Any:
    found, name = _order(desk, given), given["order_id"]
    items = (
        "SELECT line, sku, name AS product, quantity, items.price_cents FROM items JOIN products USING (sku) "
        "WHERE order_id = ? ORDER BY line"
    )
    return {
        **found,
        "items": desk.rows(items, name),
        "payments": desk.rows("SELECT method, amount_cents FROM payments WHERE order_id = ? ORDER BY id", name),
        "refunds": desk.rows("SELECT method, amount_cents, created_at FROM refunds WHERE order_id = ? ORDER BY id", name),
        "returns": desk.rows("SELECT line, quantity, registered_at FROM returns WHERE order_id = ? ORDER BY id", name),
        "vouchers": desk.rows("SELECT amount_cents, granted_at FROM vouchers WHERE order_id = ? ORDER BY id", name),
    }


def _cancel(desk: Transaction, given: dict[str, Any]) -> Any:
    found = _order(desk, given)
    if found["status"] != "paid":
        raise ToolError(f"the order is {found['status']} and cannot be cancelled")
    desk.run("UPDATE orders SET status = 'cancelled' WHERE id = ?", found["id"])
    for item in desk.rows("SELECT sku, quantity FROM items WHERE order_id = ?", found["id"]):
        desk.run("UPDATE products SET stock = stock + ? WHERE sku = ?", item["quantity"], item["sku"])
    return {"order_id": found["id"], "status": "cancelled"}


def _register_return(desk: Transaction, given: dict[str, Any]) -> Any:
    order = _order(desk, given)
    item = desk.row("SELECT * FROM items WHERE order_id = ? AND line = ?", order["id"], given["line"])
    if item is None:
        raise ToolError(f"order {order['id']} has no line {given['line']}")
    if order["status"] != "delivered":
        raise ToolError(f"the order is {order['status']}; only what was delivered comes back")
    sql = "SELECT coalesce(sum(quantity), 0) AS sent FROM returns WHERE order_id = ? AND line = ?"
    back = desk.rows(sql, order["id"], given["line"])[0]["sent"]
    if given["quantity"] > item["quantity"] - back:
        raise ToolError(f"{item['quantity']} were ordered and {back} came back already")
    name = _numbered(desk, "B", f"{order['id'][1:]}-{given['line']}")
    desk.run("INSERT INTO returns VALUES (?, ?, ?, ?, ?)", name, order["id"], given["line"], given["quantity"], desk.now)
    desk.run("UPDATE products SET stock = stock + ? WHERE sku = ?", given["quantity"], item["sku"])
    return {"return_id": name, "goods_cents": given["quantity"] * item["price_cents"]}


def _issue_refund(desk: Transaction, given: dict[str, Any]) -> Any:
    order = _order(desk, given)
    name = _numbered(desk, "R", order["id"][1:])
    desk.run("INSERT INTO refunds VALUES (?, ?, ?, ?, ?)", name, order["id"], given["method"], given["amount_cents"], desk.now)
    return {"refund_id": name, "amount_cents": given["amount_cents"], "method": given["method"]}


def _grant_voucher(desk: Transaction, given: dict[str, Any]) -> Any:
    order = _order(desk, given)
    name = _numbered(desk, "V", order["id"][1:])
    desk.run("INSERT INTO vouchers VALUES (?, ?, ?, ?)", name, order["id"], VOUCHER_CENTS, desk.now)
    return {"voucher_id": name, "amount_cents": VOUCHER_CENTS}


def _change_address(desk: Transaction, given: dict[str, Any]) -> Any:
    order = _order(desk, given)
    desk.run("UPDATE orders SET address = ? WHERE id = ?", given["address"], order["id"])
    return {"order_id": order["id"], "address": given["address"]}


_LINE = {"type": "integer", "minimum": 1, "maximum": 99}
_TEXT = {"type": "string", "minLength": 1, "maxLength": 120}
_IDENTIFY = _spec(
    "identify_customer", "Finds a customer by e-mail address and postcode; both must fit.", email=_TEXT, postcode=_TEXT
)
_LIST = _spec("list_orders", "All orders of a customer.", customer_id=_ORDER | {"description": "for example C201"})
_GET = _spec("get_order", "One order: items, payments, refunds, returns, vouchers.", order_id=_ORDER)
_CANCEL = _spec("cancel_order", "Cancels an order that is not shipped; the goods go back to stock.", order_id=_ORDER)
_RETURN = _spec(
    "register_return",
    "Books goods of one order line back into stock.",
    order_id=_ORDER,
    line=_LINE,
    quantity={"type": "integer", "minimum": 1, "maximum": 999},
)
_REFUND = _spec("issue_refund", "Pays money back.", order_id=_ORDER, amount_cents=_CENTS, method=_METHOD)
_VOUCHER = _spec("grant_voucher", f"Grants a voucher of {VOUCHER_CENTS} cents for an order.", order_id=_ORDER)
_ADDRESS = _spec("change_address", "Changes the delivery address of an order.", order_id=_ORDER, address=_TEXT)
OPERATIONS = (
    Operation(spec=_IDENTIFY, run=_identify),
    Operation(spec=_LIST, run=_list_orders),
    Operation(spec=_GET, run=_get_order),
    Operation(spec=_CANCEL, run=_cancel, writes=True),
    Operation(spec=_RETURN, run=_register_return, writes=True),
    Operation(spec=_REFUND, run=_issue_refund, writes=True),
    Operation(spec=_VOUCHER, run=_grant_voucher, writes=True),
    Operation(spec=_ADDRESS, run=_change_address, writes=True),
)

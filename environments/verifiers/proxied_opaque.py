"""Stand-ins of the candidate's objects in the process of the tests, for trust `proxied`. Shipped as data.

An `Opaque` can be called, walked, indexed, measured and shown: all of that runs over there and brings values back. It is never
compared, ordered or calculated with against a value of the tests: such an operation would tell the candidate what is
expected, or let it decide. It fails the test, even where the test would swallow the error. As a context manager it swallows
what a `raise` of the test threw, for tests of just that, and nothing else: no failed assertion.
"""

from __future__ import annotations

import dis
import reprlib
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from environments.verifiers.proxied_tests import Tests


class Opaque:
    """An object of the candidate's that did not cross by value."""

    __slots__ = ("_names", "_number", "_tests")

    def __init__(self, tests: Tests, number: int, names: list[str]) -> None:
        for name, value in (("_tests", tests), ("_number", number), ("_names", names)):
            object.__setattr__(self, name, value)

    def _ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        return self._tests.request(operation, self._number, *arguments, **keywords)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__qualname__"):
            raise AttributeError(name)
        return self._ask("attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set_attribute", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("set_item", key, value)

    def __delitem__(self, key: Any) -> None:
        self._ask("delete_item", key)

    def __iter__(self) -> Any:
        return self._ask("iter")

    def __next__(self) -> Any:
        return self._ask("next")

    def __contains__(self, wanted: Any) -> bool:
        return any(item is wanted or item == wanted for item in self)

    def __len__(self) -> int:
        return int(self._exact("len", int))

    def __bool__(self) -> bool:
        return bool(self._exact("bool", bool))

    def __str__(self) -> str:
        return str(self._exact("str", str))

    def __repr__(self) -> str:
        return str(self._exact("repr", str))

    def __float__(self) -> float:
        return float(self._exact("float", float))

    def __int__(self) -> int:
        return int(self._exact("int", int))

    def __index__(self) -> int:
        return int(self._exact("index", int))

    def __reversed__(self) -> Any:
        return self._ask("reversed")

    def __enter__(self) -> Any:
        return self._ask("enter")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        names = [] if kind is None else [base.__name__ for base in kind.__mro__]
        own = error is not None and _raised_by_statement(error)
        return self._ask("leave", names, str(error) if own else "") is True and own

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Opaque and self._ask("isinstance", value) is True

    def __eq__(self, other: object) -> bool:
        if other is self or other is None:
            return other is self
        raise self._tests.refuse(f"an object of the candidate's own class {self._names[0]} was compared")

    def __hash__(self) -> int:
        return hash(self._number)

    def _exact(self, operation: str, kind: type) -> Any:
        value = self._ask(operation)
        if type(value) is not kind:
            raise TypeError(f"{operation} of {self._names[0]} gave {type(value).__name__}, not {kind.__name__}")
        return value


def _raised_by_statement(error: BaseException) -> bool:
    """Whether the test code itself raised the error by `raise`: only that may a candidate's `with` swallow. A failed assertion
    never, and neither what the candidate raised, or made an expression of the test raise."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_filename != "tests.py" or not isinstance(error, Exception):
        return False
    raising = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raising and not isinstance(error, AssertionError)


def _refused(operation: str) -> Callable[..., Any]:
    def refused(self: Opaque, *others: Any) -> Any:
        raise self._tests.refuse(f"'{operation}' with an object of the candidate's own class {self._names[0]}")

    return refused


def _binary(operation: str) -> Callable[[Opaque, Any], Any]:
    def forwarded(self: Opaque, other: Any) -> Any:
        if type(other) is not Opaque:  # a value of the tests would tell what is expected
            raise self._tests.refuse(f"'{operation}' with an object of the candidate's own class {self._names[0]}")
        return self._tests.request(operation, None, self, other)

    return forwarded


for _name in ("lt", "le", "gt", "ge"):
    setattr(Opaque, f"__{_name}__", _refused(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul"):
    setattr(Opaque, f"__{_name}__", _binary({"and": "and_", "or": "or_"}.get(_name, _name)))
    setattr(Opaque, f"__r{_name}__", _refused(_name))
for _name in ("neg", "pos", "abs"):
    setattr(Opaque, f"__{_name}__", lambda self, operation=_name: self._tests.request(operation, None, self))


class Shown(reprlib.Repr):
    """Short texts for evidence, without asking the candidate."""

    def repr_Opaque(self, value: Opaque, level: int) -> str:  # noqa: N802  reprlib looks it up by this name
        return f"<{value._names[0]}>"


shown = Shown()
shown.maxstring = shown.maxother = 120

"""What values are between the process of the tests and the process of the candidate, for trust `proxied`. Shipped as data.

Values become JSON. One is an atom or a reference into a flat table of containers, so aliases and cycles survive and nothing
nests. Exact builtin types (and some of the standard library) cross by value; instances of the row's own helper classes cross
as their attributes; everything else stays where it is and crosses as a number. What no honest peer writes raises Violation.
Both sides use this file, but only the tests' side depends on its strictness: its peer runs candidate code and may send
anything. Standard library only.
"""

from __future__ import annotations

import datetime
import enum
import json
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_INT_DIGITS = 4000
_INT = re.compile(r"-?[0-9]{1,4000}")
_HEX = re.compile(r"(?:[0-9a-f]{2})*")
_MUTABLE: dict[str, Callable[[], Any]] = {
    "list": list, "dict": dict, "set": set, "bytearray": bytearray, "deque": deque, "Counter": Counter,
    "OrderedDict": OrderedDict, "defaultdict": defaultdict,
}  # fmt: skip
_CONTAINERS: dict[type, str] = {
    list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", dict: "dict", bytearray: "bytearray", deque: "deque",
    Counter: "Counter", OrderedDict: "OrderedDict", defaultdict: "defaultdict",
}  # fmt: skip
_MAPPINGS = {"dict", "Counter", "OrderedDict", "defaultdict"}
_TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "datetime": (datetime.datetime, lambda v: str(v.isoformat()), datetime.datetime.fromisoformat),
    "date": (datetime.date, lambda v: str(v.isoformat()), datetime.date.fromisoformat),
    "time": (datetime.time, lambda v: str(v.isoformat()), datetime.time.fromisoformat),
}
_BY_TYPE = {entry[0]: name for name, entry in _TEXTS.items()}
_KNOWN: tuple[type, ...] = (int, str, float, bool, bytes, complex, object, type(None), range, type, *_CONTAINERS, *_BY_TYPE)
_TYPES = {kind.__name__: kind for kind in _KNOWN}
_NAMES = {kind: name for name, kind in _TYPES.items()}


class Violation(BaseException):
    """The peer sent what no honest peer sends, or is gone: nothing it says counts any more."""


class Refused(TypeError):
    """A value or an operation that does not cross, and why."""


class Codec:
    """Values <-> JSON. `export` gives an atom for what stays here, `resolve` the value of such an atom of the peer's.

    `records`: the row's helper classes by name, as they exist in this process.
    """

    def __init__(self, export: Callable[[Any], list[Any]], resolve: Callable[[list[Any]], Any]) -> None:
        self.export, self.resolve = export, resolve
        self.records: Mapping[str, type] = {}
        self.sent_nan = self.got_nan = False
        """Whether a value that equals nothing has crossed."""

    def encode(self, root: Any, seeds: Sequence[Any] = ()) -> tuple[list[Any], list[Any]]:
        """[nodes, root] and the objects behind the nodes; `seeds` become the first nodes whether or not they are reached."""
        objects: list[Any] = []
        known: dict[int, int] = {}
        kinds: list[list[Any]] = []

        def place(value: Any) -> Any:
            kind = type(value)
            if value is None or kind is bool or kind is str:
                return value
            self.sent_nan = self.sent_nan or _is_nan(value)
            if kind is int:
                return value if -(2**53) < value < 2**53 else self._huge(value)
            if kind is float:
                return ["f", value.hex()]
            if kind is complex:
                return ["c", value.real.hex(), value.imag.hex()]
            if kind is bytes:
                return ["b", value.hex()]
            if kind is range:
                return ["r", *(self._huge(part) for part in (value.start, value.stop, value.step))]
            if kind is datetime.timedelta:
                return ["d", value.days, value.seconds, value.microseconds]
            if kind in _BY_TYPE:
                return ["n", _BY_TYPE[kind], _TEXTS[_BY_TYPE[kind]][1](value)]
            if isinstance(value, type) and value in _NAMES:
                return ["t", _NAMES[value]]
            if id(value) in known:
                return ["@", known[id(value)]]
            shape = self._shape(value)
            if shape is None:
                return self.export(value)
            if shape[0] == "enum":
                return ["e", shape[1], value._name_]
            known[id(value)] = len(objects)
            objects.append(value)
            kinds.append(shape)
            return ["@", known[id(value)]]

        nodes: list[Any] = []

        def drain() -> None:
            while len(nodes) < len(objects):
                kind, *name = kinds[len(nodes)]
                nodes.append([kind, *name, self._content(kind, objects[len(nodes)], place)])

        for seed in seeds:
            shape = self._shape(seed)
            known.setdefault(id(seed), len(objects))
            objects.append([] if shape is None else seed)
            kinds.append(shape or ["list"])
        drain()
        reference = place(root)
        drain()
        return [nodes, reference], objects

    @staticmethod
    def _huge(value: int) -> list[Any]:
        if value.bit_length() > MAX_INT_DIGITS * 3:
            raise Refused("an integer of more than 3,600 digits does not cross")
        return ["i", str(value)]

    def _shape(self, value: Any) -> list[Any] | None:
        kind = type(value)
        if kind in _CONTAINERS:
            return [_CONTAINERS[kind]]
        name = kind.__name__
        if self.records.get(name) is not kind:
            return None
        if issubclass(kind, enum.Enum):
            return ["enum", name]
        if issubclass(kind, tuple):
            return ["struct", name]
        return None if issubclass(kind, (int, float, str, bytes, list, dict, set)) else ["object", name]

    @staticmethod
    def _content(kind: str, value: Any, place: Callable[[Any], Any]) -> Any:
        if kind == "bytearray":
            return bytes(value).hex()
        if kind in _MAPPINGS:
            return [[place(key), place(item)] for key, item in list(value.items())]
        if kind == "object":
            return [[name, place(item)] for name, item in attributes(value).items()]
        if kind in ("set", "frozenset"):
            return sorted((place(item) for item in value), key=json.dumps)
        return [place(item) for item in list(value)]

    # ------------------------------------------------------------------------------------------------------------ decoding

    def decode(self, payload: Any, existing: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
        """The root and the objects of all nodes; mutable nodes below len(existing) are written into those objects."""
        try:
            nodes, root = payload
            return self._decode(nodes, root, existing)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise Violation(f"a value that cannot be read ({type(error).__name__})") from None

    def _decode(self, nodes: list[Any], root: Any, existing: Sequence[Any]) -> tuple[Any, list[Any]]:
        objects: list[Any] = [None] * len(nodes)
        late: list[int] = []
        for index, (kind, *_) in enumerate(nodes):
            old = existing[index] if index < len(existing) else None
            if kind in _MUTABLE:
                objects[index] = old if old is not None and _CONTAINERS.get(type(old)) == kind else _MUTABLE[kind]()
            elif kind == "object":
                made: Any = self.records[nodes[index][1]]
                objects[index] = old if type(old) is made else made.__new__(made)
            elif kind in ("tuple", "frozenset", "struct"):
                late.append(index)
            else:
                raise ValueError("a container of no known kind")

        def take(value: Any) -> Any:
            return self._atom(value, objects)

        waiting = set(late)
        for _ in range(len(late) + 1):  # one round when children come after their parents, as they mostly do
            for index in [i for i in reversed(late) if i in waiting]:
                kind, content = nodes[index][0], nodes[index][-1]
                if any(type(v) is list and v[0] == "@" and v[1] in waiting for v in content):
                    continue
                items = [take(item) for item in content]
                if kind == "struct":
                    objects[index] = tuple.__new__(self.records[nodes[index][1]], items)
                else:
                    objects[index] = tuple(items) if kind == "tuple" else frozenset(items)
                waiting.discard(index)
            if not waiting:
                break
        if waiting:
            raise ValueError("tuples that hold themselves")
        for early in (True, False):  # attributes and lists first: hashing a key may look at them
            for (kind, *_, content), target in zip(nodes, objects, strict=True):
                if (kind in ("object", "list", "deque", "bytearray")) is early and (kind in _MUTABLE or kind == "object"):
                    _fill(kind, target, content, take)
        return take(root), objects

    def _atom(self, value: Any, objects: list[Any]) -> Any:
        if value is None or type(value) in (bool, str, int):
            return value
        if type(value) is not list:
            raise TypeError("not an atom")
        tag, *rest = value
        if tag == "@":
            return objects[natural(rest[0])]
        if tag == "i":
            return _integer(value)
        if tag in ("f", "c", "n"):
            number = self._number(tag, rest)
            self.got_nan = self.got_nan or _is_nan(number)
            return number
        if tag == "b":
            return _bytes(rest[0])
        if tag == "r":
            return range(*(_integer(part) for part in rest))
        if tag == "d":
            return datetime.timedelta(*(int(part) for part in rest))
        if tag == "t":
            return _TYPES[rest[0]]
        if tag == "e":
            return self.records[rest[0]][rest[1]]  # type: ignore[index]
        return self.resolve(value)

    @staticmethod
    def _number(tag: str, rest: list[Any]) -> Any:
        if tag == "f":
            return float.fromhex(rest[0])
        if tag == "c":
            return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
        return _TEXTS[rest[0]][2](rest[1][:MAX_INT_DIGITS])


def _is_nan(value: Any) -> bool:
    kind = type(value)
    return bool(value != value) if kind in (float, complex) else kind is Decimal and bool(value.is_nan())


def attributes(value: Any) -> dict[str, Any]:
    """What an instance holds, slots included."""
    found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _fill(kind: str, target: Any, content: Any, take: Callable[[Any], Any]) -> None:
    if kind == "object":
        held = {str(name): take(item) for name, item in content}
        if any(name.startswith("__") or callable(getattr(type(target), name, None)) for name in held):
            raise ValueError("an attribute in the place of a method")
        for name in [name for name in attributes(target) if name not in held]:
            object.__delattr__(target, name)
        for name, item in held.items():
            object.__setattr__(target, name, item)
    elif kind == "bytearray":
        target[:] = _bytes(content)
    elif kind in _MAPPINGS:
        pairs = [(take(key), take(item)) for key, item in content]
        target.clear()
        for key, item in pairs:
            target[key] = item
    else:
        items = [take(item) for item in content]
        target.clear()
        (target.update if kind == "set" else target.extend)(items)


def natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("not an index")
    return value


def _integer(value: Any) -> int:
    if type(value) is list and len(value) == 2 and value[0] == "i" and _INT.fullmatch(value[1]):
        return int(value[1])
    raise TypeError("not an integer")


def _bytes(value: Any) -> bytes:
    if not _HEX.fullmatch(value):
        raise TypeError("not bytes")
    return bytes.fromhex(value)

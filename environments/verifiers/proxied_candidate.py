"""The process that holds the candidate, for trust `proxied`: imports its file, then does what the tests' process asks.

It knows neither the tests nor what they expect, and its descriptors 0, 1 and 2 are /dev/null. Before it imports the candidate
it tries to look into its parent, the process of the tests, and reports whether that worked: then this host cannot keep the
two apart, and nothing is graded. Candidate code owns this process from then on; all it can forge is what it may return anyway.
Shipped as data; standard library only.
"""

from __future__ import annotations

import asyncio
import builtins
import importlib.util
import inspect
import operator
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from environments.verifiers.proxied_peer import Peer, Pipe, builtin_exception
from environments.verifiers.proxied_wire import Violation

_OPERATORS = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "matmul", "neg", "pos", "abs")
}


class Remote:
    """A callable or an iterator of the tests: both run over there."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Candidate, number: int) -> None:
        self._peer, self._number = peer, number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._peer.request("call", self._number, *arguments, **keywords)

    def __iter__(self) -> Remote:
        return self

    def __next__(self) -> Any:
        return self._peer.request("next", self._number)


class Candidate(Peer):
    """Performs every operation on objects of the candidate's."""

    def __init__(self, pipe: Pipe, *, in_place: bool) -> None:
        super().__init__(pipe, in_place=in_place)
        self.module: ModuleType | None = None
        self.failure: BaseException | None = None

    def export(self, value: Any) -> list[Any]:
        if type(value) is Remote:
            return ["yours", value._number]
        number, kind, names = self.number(value), "object", [type(value).__name__]
        if isinstance(value, type) and issubclass(value, BaseException):
            kind, names = "exception", [base.__name__ for base in value.__mro__]
        elif inspect.iscoroutine(value):
            kind = "coroutine"
        return ["mine", number, kind, names]

    def resolve(self, atom: list[Any]) -> Any:
        tag, number, *_ = atom
        if tag == "yours":
            return self.exported(number)
        return Remote(self, number) if tag == "mine" else getattr(builtins, number)

    def exception_class(self, names: list[str]) -> type[BaseException]:
        return builtin_exception(names)

    def perform(self, operation: str, target: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if operation == "name":
            if self.failure is not None:
                raise self.failure
            return getattr(self.module, target)
        if operation in _OPERATORS:
            return _OPERATORS[operation](*arguments)
        return _PERFORM[operation](self.exported(target), *arguments, **keywords)


def _leave(held: Any, names: list[str], text: str) -> Any:
    if not names:
        return held.__exit__(None, None, None)
    error = builtin_exception(names)(text)
    return held.__exit__(type(error), error, None)


def _call(function: Any, /, *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)


_PERFORM: dict[str, Callable[..., Any]] = {
    "call": _call, "attribute": getattr, "set_attribute": setattr, "item": operator.getitem, "set_item": operator.setitem,
    "delete_item": operator.delitem, "iter": iter, "next": next, "len": len, "bool": bool, "str": str, "repr": repr,
    "float": float, "int": int, "index": operator.index, "reversed": reversed, "enter": lambda held: held.__enter__(),
    "leave": _leave, "isinstance": lambda kind, value: isinstance(value, kind), "await": asyncio.run,
}  # fmt: skip


def exposed(pid: int) -> str:
    """How this process could look into process `pid`; empty when it cannot."""
    for name in ("mem", "environ", "fd/0", "maps"):
        try:
            os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
        except OSError:
            continue
        return f"/proc/PID/{name} of the tests' process can be opened"
    return ""


def main(reading: int, writing: int) -> None:
    """Greets with what it could see of its parent, then reads one job frame and serves."""
    pipe = Pipe(reading, writing)
    pipe.send(["hello", exposed(os.getppid())])
    _, path, in_place, records = pipe.receive()
    peer = Candidate(pipe, in_place=in_place)
    sys.path.append(os.getcwd())
    try:
        name = Path(path).stem
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(path)  # noqa: TRY301  reported like any other failure to import
        peer.module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(peer.module)
        found = {name: getattr(peer.module, name, None) for name in records}
        peer.codec.records = {name: kind for name, kind in found.items() if isinstance(kind, type)}
    except BaseException as error:  # noqa: BLE001  candidate code may raise anything, SystemExit included
        peer.failure = error
    with suppress(Violation):
        peer.serve()

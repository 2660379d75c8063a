"""The conversation between the process of the tests and the process of the candidate, for trust `proxied`. Shipped as data.

Frames are length-prefixed JSON over a pair of pipes: ["ask", operation, target, arguments], ["returned", value],
["raised", class names, arguments, text]. An end that waits for an answer serves what the other asks meanwhile: calls nest.
"""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Sequence
from typing import Any

from environments.verifiers.proxied_wire import Codec, Refused, Violation, natural

MAX_FRAME = 4 * 1024 * 1024


class Pipe:
    """Whole frames over two descriptors. Raises Violation at the end of the stream and for a frame that is none."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._read, self._write = os.read, os.write

    def send(self, frame: Any) -> None:
        data = json.dumps(frame).encode("ascii")
        if len(data) > MAX_FRAME:
            raise Refused(f"a value of {len(data):,} bytes does not cross, at most {MAX_FRAME:,} do")
        view = memoryview(len(data).to_bytes(4, "big") + data)
        try:
            while view:
                view = view[self._write(self._writing, view) :]
        except OSError:
            raise Violation("the process has ended") from None

    def receive(self) -> list[Any]:
        size = int.from_bytes(self._exactly(4), "big")
        if size > MAX_FRAME:
            raise Violation("a frame beyond every cap")
        try:
            frame = json.loads(self._exactly(size), parse_float=_no_float, parse_constant=_no_float)
        except (ValueError, RecursionError):
            raise Violation("a frame that is not JSON") from None
        if type(frame) is not list or not frame or type(frame[0]) is not str:
            raise Violation("a frame of no known form")
        return frame

    def _exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            try:
                part = self._read(self._reading, min(size, 1 << 16))
            except OSError:
                part = b""
            if not part:
                raise Violation("the process has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _no_float(text: str) -> Any:
    raise ValueError(text[:20])


def describe(error: BaseException, codec: Codec) -> list[Any]:
    """["raised", class names from the most derived on, encoded arguments or None, text]."""
    names = [kind.__name__[:100] for kind in type(error).__mro__ if kind is not object]
    try:
        arguments = codec.encode(list(error.args))[0]
    except BaseException:  # noqa: BLE001  candidate objects may do anything
        arguments = None
    try:
        text = str(error)[:500]
    except BaseException:  # noqa: BLE001
        text = "an exception that cannot be shown"
    return ["raised", names, arguments, text]


def builtin_exception(names: Sequence[str]) -> type[BaseException]:
    """The builtin class nearest to the front of `names`; RuntimeError when there is none."""
    for name in names:
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    return RuntimeError


class Peer:
    """One end of the conversation. While it waits for an answer it serves what the other end asks (calls nest).

    Subclasses say what leaves by number (`export`), what such a number means (`resolve`), which operations they perform, and
    which classes exceptions of the other end are raised as.
    """

    def __init__(self, pipe: Pipe, *, in_place: bool) -> None:
        self.pipe, self.in_place = pipe, in_place
        self.codec = Codec(self.export, self.resolve)
        self._exports: list[Any] = []
        self._numbers: dict[int, int] = {}

    def number(self, value: Any) -> int:
        """The number under which the other end knows an object of ours; it lives as long as the conversation."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._exports)
            self._exports.append(value)
        return self._numbers[id(value)]

    def exported(self, number: Any) -> Any:
        return self._exports[natural(number)]

    def export(self, value: Any) -> list[Any]:
        raise NotImplementedError

    def resolve(self, atom: list[Any]) -> Any:
        raise NotImplementedError

    def perform(self, operation: str, target: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        raise NotImplementedError

    def exception_class(self, names: list[str]) -> type[BaseException]:
        raise NotImplementedError

    def request(self, operation: str, target: Any, *arguments: Any, **keywords: Any) -> Any:
        """What the other end's operation returns; raises what it raised."""
        payload, sent = self.codec.encode([list(arguments), keywords])
        self.pipe.send(["ask", operation, target, payload])
        while (frame := self.pipe.receive())[0] == "ask":
            self._answer(frame)
        if frame[0] == "returned" and len(frame) == 2:
            return self.codec.decode(frame[1], sent if self._carries_back(operation) else ())[0]
        if frame[0] != "raised" or len(frame) != 4:
            raise Violation("an answer of no known form")
        raise self._rebuilt(frame[1], frame[2], frame[3])

    def serve(self) -> None:
        """Answers until the other end hangs up."""
        while True:
            try:
                frame = self.pipe.receive()
            except Violation:
                return
            self._answer(frame)

    def _carries_back(self, operation: str) -> bool:
        return self.in_place and operation == "call"

    def _answer(self, frame: list[Any]) -> None:
        if len(frame) != 4 or frame[0] != "ask":
            raise Violation("a request of no known form")
        _, operation, target, payload = frame
        root, held = self.codec.decode(payload)
        try:
            arguments, keywords = root
            result = self.perform(operation, target, arguments, keywords)
            answer = self.codec.encode(result, held if self._carries_back(operation) else ())[0]
            self.pipe.send(["returned", answer])
        except Violation:
            raise
        except BaseException as error:  # noqa: BLE001  whatever it is, it is the other end's to see
            self.pipe.send(describe(error, self.codec))

    def _rebuilt(self, names: Any, arguments: Any, text: Any) -> BaseException:
        if type(names) is not list or not names or not all(type(name) is str for name in [*names, text]):
            raise Violation("an exception of no known form")
        kind = self.exception_class(names)
        values = [text] if arguments is None else self.codec.decode(arguments)[0]
        try:
            return kind(*values)
        except Exception:  # noqa: BLE001  some builtin exceptions want arguments of their own
            return RuntimeError(f"{names[0]}: {text}")

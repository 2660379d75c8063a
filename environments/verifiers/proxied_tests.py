"""The process that holds the tests, for trust `proxied`: runs given test code against stand-ins of the candidate's names.

Runs inside the grading box as a process of its own. The job, test code and nonce included, comes over standard input and is
never on the box's disk; the process is made undumpable before the candidate's process starts, so that one of the same user
can neither trace it nor read its memory, descriptors or environment. Nothing that the candidate can write is on its path.

The stand-ins: a function of the candidate is an `Opaque` whose calls run over there (proxied_opaque.py). What comes back by
value is an ordinary object of this process and is compared here. Shipped as data; standard library only.

Three things of the candidate's would decide a test without a comparison, and fail it unless the test code speaks of them by
name: an exception that ends iterations (`all(map(...))` over nothing is true), NaN (`not x > y` is true of it), and an
assertion that failed in a callback and was swallowed over there.
"""

from __future__ import annotations

import builtins
import ctypes
import inspect
import json
import linecache
import os
import random
import re
import signal
import subprocess
import sys
import traceback
import unittest
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

from environments.verifiers.proxied_opaque import Opaque, shown
from environments.verifiers.proxied_peer import Peer, Pipe, builtin_exception
from environments.verifiers.proxied_wire import Refused, Violation

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "HOME": "/nonexistent",
}
MAX_TEXT = 600
_ENDINGS = (StopIteration, StopAsyncIteration, GeneratorExit)
"""Exceptions that loops, `map`, `zip` and `all` take for an end: only `next` may raise them here."""
_NAN = re.compile("(?<![a-z])(?:is)?nan(?![a-z])", re.IGNORECASE)
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4


class Tests(Peer):
    """The tests' end. Offers callables and iterators of the tests, to be called and advanced, and nothing else."""

    def __init__(self, pipe: Pipe, *, in_place: bool, source: str) -> None:
        super().__init__(pipe, in_place=in_place)
        self.source = source
        self.lost = self.refusal = ""
        self.asked = 0
        self.calls: deque[str] = deque(maxlen=2)
        self.names: dict[str, Any] = {}
        self._known: dict[int, Any] = {}
        self._mirrors: dict[str, type[BaseException]] = {}
        self._mirrored: dict[type, int] = {}

    def refuse(self, what: str) -> Refused:
        """Remembered: a test that catches the error fails all the same."""
        self.refusal = self.refusal or f"{what}; it stays in the candidate's process: compare values of builtin types"
        return Refused(self.refusal)

    def request(self, operation: str, target: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.lost:
            raise Violation(self.lost)
        self.asked += 1
        call = operation
        if operation == "call":
            words = [shown.repr(a) for a in arguments] + [f"{key}={shown.repr(value)}" for key, value in keywords.items()]
            call = f"{self._label(target)}({', '.join(words)})"
        try:
            value = super().request(operation, target, *arguments, **keywords)
        except Violation as error:
            self.lost = str(error)
            self.calls.append(f"{call}: {error}")
            raise
        except BaseException as error:
            self.calls.append(f"{call} raised {type(error).__name__}: {str(error)[:120]}")
            ending = next((kind.__name__ for kind in _ENDINGS if isinstance(error, kind)), "")
            if ending and operation != "next" and ending not in self.source:
                raise RuntimeError(f"the candidate raised {ending} out of '{operation}'") from None
            raise
        if operation == "call":
            self.calls.append(f"{call} returned {shown.repr(value)}")
        self.require_comparable()
        return value

    def require_comparable(self) -> None:
        """Raises Refused once the candidate has sent NaN to tests that neither sent one nor mention it."""
        if self.codec.got_nan and not self.codec.sent_nan and not _NAN.search(self.source):
            self.refusal = self.refusal or "the candidate gave NaN, with which comparisons mean nothing"
            raise Refused(self.refusal)

    def _label(self, target: Any) -> str:
        names = [name for name, value in self.names.items() if type(value) is Opaque and value._number == target]
        return names[0] if names else "<object>"

    def export(self, value: Any) -> list[Any]:
        if type(value) is Opaque:
            return ["yours", value._number]
        if isinstance(value, type) and value in self._mirrored:
            return ["yours", self._mirrored[value]]
        name = getattr(value, "__name__", "")
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return ["u", name]
        if hasattr(value, "__next__") or callable(value):
            return ["mine", self.number(value)]
        if type(value).__module__ == "builtins" and hasattr(value, "__iter__"):
            return ["mine", self.number(iter(value))]
        raise self.refuse(f"an argument of type {type(value).__name__} cannot cross to the candidate")

    def resolve(self, atom: list[Any]) -> Any:
        tag, number, *about = atom
        if tag == "yours":
            return self.exported(number)
        kind, names = about
        if tag != "mine" or type(number) is not int or not names or not all(type(name) is str for name in names):
            raise ValueError(tag)
        if number not in self._known:
            if kind == "exception":
                found = self.exception_class(names)
                self._mirrored[found] = number
                self._known[number] = found
            else:
                opaque = Opaque(self, number, names)
                self._known[number] = _waiting(opaque) if kind == "coroutine" else opaque
        return self._known[number]

    def exception_class(self, names: list[str]) -> type[BaseException]:
        """A helper class of the row, a builtin class, or a stand-in with the candidate's name and its builtin base."""
        for name in names:
            record = self.codec.records.get(name)
            if record is not None and issubclass(record, BaseException):
                return record
        base = builtin_exception(names)
        if base.__name__ == names[0]:
            return base
        if names[0] not in self._mirrors:
            self._mirrors[names[0]] = type(names[0], (base,), {})
        return self._mirrors[names[0]]

    def perform(self, operation: str, target: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        try:
            held = self.exported(target)
        except (TypeError, IndexError):
            raise Violation("a request for something that was never handed out") from None
        self.require_comparable()
        if operation == "call" and callable(held):
            return self._called_back(held, arguments, keywords)
        if operation == "next" and hasattr(held, "__next__"):
            return self._called_back(next, [held], {})
        raise Violation(f"a request for '{operation}' of the tests")

    def _called_back(self, held: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        try:
            return held(*arguments, **keywords)
        except BaseException as error:  # over there it can be swallowed
            if isinstance(error, Exception) and not isinstance(error, AssertionError):
                raise
            self.refusal = self.refusal or f"an assertion failed in a function that the candidate called: {str(error)[:200]}"
            raise


async def _waiting(opaque: Opaque) -> Any:
    return opaque._ask("await")


# ---------------------------------------------------------------------------------------------------------------- the tests


class Namespace(ModuleType):
    """What `import solution` gives inside the tests: the candidate's names, fetched when asked for."""

    def __init__(self, name: str, tests: Tests) -> None:
        super().__init__(name)
        self.__dict__["_tests"] = tests

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["_tests"].request("name", name)


def load(job: dict[str, Any], tests: Tests) -> dict[str, Any]:
    """The namespace of the test code, the helpers of the row in it. Raises whatever they raise."""
    module = ModuleType("tests")
    scope = module.__dict__
    sys.modules["tests"] = module
    _execute(job["helpers"], "helpers.py", scope)
    tests.codec.records = {n: v for n, v in scope.items() if isinstance(v, type) and v.__module__ == "tests"}
    return scope


def _execute(source: str, name: str, scope: dict[str, Any]) -> None:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), scope)  # noqa: S102  given test code is what this process is for


def run(test: str, job: dict[str, Any], scope: dict[str, Any]) -> None:
    """One test by its id: `check`, `test_name`, or `Class.method`. Raises what it raises."""
    name, _, method = test.partition(".")
    if method:
        result = unittest.TestResult()
        unittest.TestSuite([scope[name](method)]).run(result)
        problems = [text for _, text in (*result.errors, *result.failures)]
        problems += [f"skipped: {reason}" for _, reason in result.skipped]
        if problems or result.testsRun != 1 or result.unexpectedSuccesses or result.expectedFailures:
            raise AssertionError(problems[0][-MAX_TEXT:] if problems else "the test did not run as a plain test")
        return
    function = scope[name]
    if name == "check":
        function(scope[job["entry_point"]])
        return
    result_ = function()
    if inspect.iscoroutine(result_):
        import asyncio

        asyncio.run(result_)


def explain(error: BaseException, tests: Tests) -> str:
    """Where the test failed and what the candidate did last."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests.py"]
    where = f"line {lines[-1].lineno}: {(lines[-1].line or '')[:200]} " if lines else ""
    try:
        text = str(error)[:200]
    except BaseException:  # noqa: BLE001
        text = "an exception that cannot be shown"
    kind = "the candidate's process" if isinstance(error, Violation) else type(error).__name__
    said = "; ".join([f"{kind}: {text}" if text else kind, *reversed(tests.calls)])
    return f"{where}({said})"[:MAX_TEXT]


def outcomes(job: dict[str, Any], tests: Tests) -> Iterator[tuple[str, str, str]]:
    """(id, passed | failed, why) for every expected test, or one ("import", ...) when nothing could be run."""
    try:
        scope = load(job, tests)
    except BaseException as error:  # noqa: BLE001
        yield "import", "failed", f"the row's helpers cannot be run: {type(error).__name__}: {error}"[:MAX_TEXT]
        return
    tests.pipe.send(["job", job["path"], tests.in_place, sorted(tests.codec.records)])
    stem = job["path"].rpartition("/")[2].removesuffix(".py")
    sys.modules[stem] = Namespace(stem, tests)
    for name in job["names"]:
        try:
            scope[name] = tests.request("name", name)
        except AttributeError:
            yield "import", "failed", f"the solution does not define '{name}'"
            return
        except BaseException as error:  # noqa: BLE001
            yield "import", "failed", f"importing the solution failed: {type(error).__name__}: {error}"[:MAX_TEXT]
            return
    tests.names = {name: scope[name] for name in job["names"]}
    try:
        random.seed(0)
        _execute(job["tests"], "tests.py", scope)
    except BaseException as error:  # noqa: BLE001
        yield "import", "failed", f"the tests cannot be loaded: {explain(error, tests)}"[:MAX_TEXT]
        return
    for test in job["expected"]:
        tests.calls.clear()
        tests.asked, why = 0, ""
        random.seed(0)
        try:
            run(test, job, scope)
        except BaseException as error:  # noqa: BLE001  SystemExit of a candidate crosses, too
            why = explain(error, tests)
        why = why if not tests.refusal else f"{tests.refusal}. {why}"[:MAX_TEXT]
        if not why and tests.lost:
            why = f"the candidate's process: {tests.lost}; {'; '.join(tests.calls)}"
        if not why and not tests.asked:
            why = "the test never asked the candidate for anything"
        yield test, "failed" if why else "passed", why


def undumpable() -> bool:
    """No process of this user may look into this one from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    return bool(libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0)


def main(launch: list[str]) -> None:
    """`launch`: argv of the candidate's process, to which the numbers of its two descriptors are added."""
    job = json.loads(sys.stdin.buffer.read())
    channel, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)

    def send(test: str, outcome: str, text: str) -> None:
        data = (json.dumps([job["nonce"], test, outcome, text]) + "\n").encode("ascii")
        while data:
            data = data[os.write(channel, data) :]

    hidden = undumpable()
    to_them, to_us = os.pipe(), os.pipe()
    theirs = (to_them[0], to_us[1])
    process = subprocess.Popen(
        [*launch, *map(str, theirs)], pass_fds=theirs, env=ENVIRONMENT, stdin=null, stdout=null, stderr=null,
        start_new_session=True,
    )  # fmt: skip
    for descriptor in theirs:
        os.close(descriptor)
    os.chdir("/")
    source = job["helpers"] + "\n" + job["tests"]
    tests = Tests(Pipe(to_us[0], to_them[1]), in_place=job["in_place"], source=source)
    try:
        _, seen = tests.pipe.receive()
        if seen or not hidden:
            send("isolation", "failed", seen or "the tests' process cannot be made undumpable")
            return
        for test, outcome, text in outcomes(job, tests):
            send(test, outcome, text)
    except Violation as error:
        send("import", "failed", f"the candidate's process: {error}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

"""Whether two formulas are equal, asked of a sympy process that is killed on its deadline. Candidate text is never evaluated.

Both texts go through symbolic_parse (a grammar of ours, with caps); only trees of allow-listed names reach symbolic_runner.py,
which runs in a process of its own, one child a question, with CPU_SECONDS of processor time and 1 GiB of memory. Identical
trees and plain numbers are decided here. A question that its child could not decide within its limits is no match: the limit
counts processor time, so a slow host does not change a verdict. What waits longer than `deadline_seconds` is an InfraError.

One process serves all verdicts of this Python process and ends with it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from fractions import Fraction
from pathlib import Path
from typing import Any

from data_contracts.errors import InfraError
from environments.verifiers.symbolic_parse import ParseError, Tree, parse

CPU_SECONDS = 3
ASSUMPTIONS = ("real", "positive", "integer", "natural")
_RUNNER = Path(__file__).with_name("symbolic_runner.py")


async def difference(
    expected: str,
    answer: str,
    *,
    variables: Collection[str] = (),
    assume: Mapping[str, str] | None = None,
    tolerance: float = 0.0,
    deadline_seconds: float,
) -> str:
    """Why `answer` does not equal `expected`; empty when it does. Raises ParseError for `expected` only, and InfraError."""
    names = {*variables, *(assume or {})}
    wanted = parse(expected, variables=names)
    try:
        found = parse(answer, variables=names)
    except ParseError as error:
        return f"the answer is no formula: {error}"
    if wanted == found:
        return ""
    numbers = plain_number(wanted), plain_number(found)
    if numbers[0] is not None and numbers[1] is not None:
        near = abs(numbers[0] - numbers[1]) <= Fraction(tolerance) * abs(numbers[0])
        return "" if near else "they differ"
    question = {"expected": wanted, "answer": found, "assume": dict(assume or {}), "tolerance": tolerance}
    return await _PROCESS.ask({**question, "cpu_seconds": CPU_SECONDS}, deadline_seconds=deadline_seconds)


def plain_number(tree: Tree) -> Fraction | None:
    """The value of a tree that is a number or a fraction of two, with signs; None for all else."""
    if tree[0] == "number":
        return Fraction(tree[1])
    if tree[0] == "neg":
        inner = plain_number(tree[1])
        return None if inner is None else -inner
    if tree[0] == "/":
        above, below = plain_number(tree[1]), plain_number(tree[2])
        return above / below if above is not None and below else None
    return None


class _Process:
    """The sympy process, started when first asked, and again when it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, Future[tuple[str, str]]] = {}
        self._last = 0

    async def ask(self, question: dict[str, Any], *, deadline_seconds: float) -> str:
        future = await asyncio.to_thread(self._send, question)
        try:
            async with asyncio.timeout(deadline_seconds):
                outcome, text = await asyncio.wrap_future(future)
        except TimeoutError:
            raise InfraError("grading_deadline", f"no answer from sympy within {deadline_seconds:g} s") from None
        return "" if outcome == "equal" else text if outcome == "different" else f"undecided: {text}"

    def _send(self, question: dict[str, Any]) -> Future[tuple[str, str]]:
        future: Future[tuple[str, str]] = Future()
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            self._last += 1
            self._waiting[self._last] = future
            line = json.dumps({"id": self._last, **question}).encode() + b"\n"
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except OSError as error:
                self._waiting.pop(self._last)
                raise InfraError("verifier_error", f"the sympy process ended: {error}") from error
        return future

    def _start(self) -> None:
        # PYTHONHASHSEED counts, so the interpreter is not isolated; its environment is exactly this.
        environment = {"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # what it did not read any more
                self._process.stdin.close()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", str(_RUNNER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd="/",
            start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(self._process,), daemon=True, name="sympy").start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            number, outcome, text = json.loads(line)
            with self._lock:
                future = self._waiting.pop(number, None)
            if future is not None and not future.cancelled():
                future.set_result((outcome, text))
        process.stdout.close()
        process.wait()
        with self._lock:
            mine = list(self._waiting.values()) if self._process is process else []
            if mine:
                self._waiting.clear()
        for future in mine:
            if not future.cancelled():
                future.set_exception(InfraError("verifier_error", "the sympy process ended before it answered"))

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait(10)


_PROCESS = _Process()
atexit.register(_PROCESS.close)

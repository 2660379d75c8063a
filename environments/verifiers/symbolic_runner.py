"""The process that compares formulas with sympy: it imports sympy once and forks for every question. Shipped as data.

Standard input carries one JSON line a question: `{id, expected, answer, assume, tolerance, cpu_seconds}`, the two formulas as
trees of symbolic_parse. Standard output answers `[id, outcome, text]`, outcome being "equal", "different" or "undecided". Each
question runs in a child of its own with limits of processor time and memory, so that 9^9^9^9 costs `cpu_seconds` and nothing
else; as many run at once as there are cores. The process ends when standard input does. No import of ours.

Two formulas are equal when they agree, to DIGITS digits, at SAMPLES fixed points of their free symbols (real ones of both
signs unless `assume` says positive, integer or natural). That is a test and no proof; points where both have no value are
passed over, and with fewer than half of them left the question is undecided.
"""

import json
import os
import random
import resource
import selectors
import signal
import sys
from fractions import Fraction
from typing import Any

import sympy

SAMPLES, DIGITS, WORKING_DIGITS = 16, 25, 50
MEMORY_BYTES = 1 << 30
MAX_ANSWER = 4096
MAX_BITS, MAX_FACTORIAL = 100_000, 5_000
_CALLS = {"abs": "Abs", "ceil": "ceiling", "min": "Min", "max": "Max"}


class Undecided(Exception):
    """Neither equal nor different can be said."""


def build(tree: list[Any]) -> Any:
    """The sympy expression of a tree of symbolic_parse."""
    kind, *rest = tree
    if kind == "number":
        return sympy.Rational(str(Fraction(rest[0])))
    if kind == "symbol":
        return sympy.Symbol(rest[0], real=True)
    if kind == "constant":
        return getattr(sympy, rest[0])
    if kind == "call":
        if rest[0] == "factorial" and is_large(build(rest[1]), MAX_FACTORIAL):
            raise Undecided("a factorial that large")
        return getattr(sympy, _CALLS.get(rest[0], rest[0]))(*[build(part) for part in rest[1:]])
    parts = [build(part) for part in rest]
    if kind == "+":
        return sympy.Add(*parts)
    if kind == "*":
        return sympy.Mul(*parts)
    if kind == "neg":
        return -parts[0]
    if kind == "/":
        return parts[0] / parts[1]
    if kind == "^":
        if parts[0].is_Rational and is_large(parts[1] * sympy.Integer(max(abs(parts[0].p), parts[0].q).bit_length()), MAX_BITS):
            raise Undecided("a power that large")
        return parts[0] ** parts[1]
    raise Undecided(f"a formula with {kind} inside")


def is_large(number: Any, limit: int) -> bool:
    """Whether this would be computed digit by digit for long; other bombs meet the limits of the process."""
    return bool(number.is_Rational and abs(number) > limit)


def value_at(expression: Any, point: dict[Any, Any]) -> Any:
    """A finite complex number, or None."""
    number = sympy.N(expression.subs(point), WORKING_DIGITS)
    if not number.is_number or number.has(sympy.nan, sympy.zoo, sympy.oo):
        return None
    real, imaginary = number.as_real_imag()
    return (sympy.N(real, WORKING_DIGITS), sympy.N(imaginary, WORKING_DIGITS))


def close(left: Any, right: Any, tolerance: float) -> bool:
    """Whether two complex numbers agree; the tolerance is relative to the left one, the expected."""
    size = max(abs(left[0]), abs(left[1]))
    allowed = tolerance * size if tolerance else sympy.Float(10, WORKING_DIGITS) ** -DIGITS * max(size, 1)
    return bool(abs(left[0] - right[0]) <= allowed and abs(left[1] - right[1]) <= allowed)


def points(symbols: list[Any], assume: dict[str, str]) -> list[dict[Any, Any]]:
    """Fixed points: the same for the same names, on every run."""
    found = []
    for index in range(SAMPLES if symbols else 1):
        point = {}
        for symbol in symbols:
            rng = random.Random(f"{symbol.name}:{index}")
            kind = assume.get(symbol.name, "real")
            sign = 1 if kind in ("positive", "natural") else rng.choice((-1, 1))
            whole = kind in ("integer", "natural")
            value = sympy.Integer(rng.randint(1, 12)) if whole else sympy.Rational(rng.randint(101, 3999), 997)
            point[symbol] = sign * value
        found.append(point)
    return found


def compare(expected: list[Any], answer: list[Any], assume: dict[str, str], tolerance: float) -> str:
    """What makes the two differ; empty when they are equal."""
    if expected[0] == "items":
        return compare_items(expected, answer, assume, tolerance)
    if expected[0] == "=":
        return compare_equations(expected, answer, assume) if answer[0] == "=" else "no equation"
    if (
        answer[0] == "="
        and answer[1][0] == "symbol"
        and sympy.Symbol(answer[1][1], real=True) not in build(expected).free_symbols
    ):
        answer = answer[2]  # "x = 5" for 5
    if answer[0] in ("items", "="):
        return "several values or an equation where one value was expected"
    left, right = build(expected), build(answer)
    if left in (sympy.oo, -sympy.oo):
        return "" if left == right else "not that infinity"
    symbols = sorted(left.free_symbols | right.free_symbols, key=lambda symbol: symbol.name)
    usable = 0
    for point in points(symbols, assume):
        a, b = value_at(left, point), value_at(right, point)
        if a is None and b is None:
            continue
        if a is None or b is None or not close(a, b, tolerance):
            return "they differ" + (f" at {shown(point)}" if point else "")
        usable += 1
    if usable < (SAMPLES // 2 if symbols else 1):
        raise Undecided("too few points where both have a value")
    return ""


def compare_equations(expected: list[Any], answer: list[Any], assume: dict[str, str]) -> str:
    """Equal when left - right of one is a constant, not zero, times that of the other."""
    left, right = (build(side[1]) - build(side[2]) for side in (expected, answer))
    symbols = sorted(left.free_symbols | right.free_symbols, key=lambda symbol: symbol.name)
    first = None
    usable = 0
    for point in points(symbols, assume):
        a, b = value_at(left, point), value_at(right, point)
        if a is None or b is None or not any(a) or not any(b):
            continue
        ratio = sympy.N((b[0] + sympy.I * b[1]) / (a[0] + sympy.I * a[1]), WORKING_DIGITS).as_real_imag()
        first = first or ratio
        if not close(first, ratio, 0.0):
            return f"the equations differ at {shown(point)}"
        usable += 1
    if usable < SAMPLES // 2:
        raise Undecided("too few points where both have a value")
    return ""


def compare_items(expected: list[Any], answer: list[Any], assume: dict[str, str], tolerance: float) -> str:
    """Tuples, lists and intervals in order, sets in any; a bare list may stand for either."""
    if answer[0] != "items":
        if len(expected) == 4 and expected[1] == "\\{":
            answer = ["items", "", "", answer]
        else:
            return "one value where several were expected"
    if answer[1:3] != expected[1:3] and answer[1:3] != ["", ""]:
        return f"{answer[1]}...{answer[2]} is not {expected[1]}...{expected[2]}"
    wanted, found = list(expected[3:]), list(answer[3:])
    if len(wanted) != len(found):
        return f"{len(found)} values where {len(wanted)} were expected"
    for item in wanted:
        candidates = found if expected[1] == "\\{" else found[:1]
        match = next((other for other in candidates if not compare(item, other, assume, tolerance)), None)
        if match is None:
            return "a value differs" if expected[1] != "\\{" else "a value is missing"
        found.remove(match)
    return ""


def shown(point: dict[Any, Any]) -> str:
    return ", ".join(f"{symbol.name} = {value}" for symbol, value in sorted(point.items(), key=lambda pair: pair[0].name))[:200]


def answer_question(question: dict[str, Any]) -> tuple[str, str]:
    """In the child: outcome and text."""
    cpu = max(1, int(question["cpu_seconds"]))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        difference = compare(question["expected"], question["answer"], question["assume"], float(question["tolerance"]))
    except Undecided as error:
        return "undecided", str(error)
    except MemoryError:
        return "undecided", "out of memory"
    except RecursionError:
        return "undecided", "nested too deeply"
    except Exception as error:  # noqa: BLE001  sympy raises many kinds for what it cannot do
        return "undecided", f"{type(error).__name__}"
    return ("different", difference) if difference else ("equal", "")


def fork(question: dict[str, Any]) -> tuple[int, int]:
    """Start the child; its pid and the end of its pipe to read from."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    try:
        outcome, text = answer_question(question)
        os.write(write_end, json.dumps([outcome, text[:300]]).encode()[:MAX_ANSWER])
    finally:
        os._exit(0)


def serve() -> None:
    """Answer questions until standard input ends; then end what still runs."""
    waiting: list[dict[str, Any]] = []
    running: dict[int, tuple[int, dict[str, Any]]] = {}
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    buffer, most = b"", os.cpu_count() or 1
    while True:
        while waiting and len(running) < most:
            question = waiting.pop(0)
            pid, pipe = fork(question)
            running[pipe] = (pid, question)
            selector.register(pipe, selectors.EVENT_READ)
        for key, _ in selector.select():
            pipe = key.fd
            if pipe == 0:
                data = os.read(0, 1 << 16)
                if not data:
                    for pid, _question in running.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                waiting += [json.loads(line) for line in lines]
                continue
            selector.unregister(pipe)
            pid, question = running.pop(pipe)
            data = os.read(pipe, MAX_ANSWER)
            os.close(pipe)
            _, status = os.waitpid(pid, 0)
            if data:
                outcome, text = json.loads(data)
            else:
                limit = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
                text = f"not decided within {question['cpu_seconds']:g} s of processor time" if limit else "sympy ended early"
                outcome = "undecided"
            os.write(1, json.dumps([question["id"], outcome, text]).encode() + b"\n")


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(5000)
    build(["+", ["call", "sin", ["number", "1.5"]], ["symbol", "x"]]).subs({}).evalf()  # what is lazy in sympy, once
    serve()

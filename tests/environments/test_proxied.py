"""Given tests in one process, the candidate in another, in real boxes: what works across, and what a candidate may try."""

# ruff: noqa: E501  the attempts are one a line

import hashlib
import textwrap
from typing import Any

import pytest

from data_contracts.errors import CapabilityError, InputError
from data_contracts.protocols import SandboxBackend, to_json
from data_contracts.records import Artifact, EnvironmentSpec, Message, Problem, Verdict, VerifierSpec
from environments.base import Collected
from environments.verifiers.proxied import Proxied
from environments.verifiers.proxied_rows import describe

ADD = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n"
GOOD = "def add(a, b):\n    return a + b\n"


def problem(tests: str = ADD, *, prompt: str = "", entry_point: str | None = "add", **settings: Any) -> Problem:
    code = describe(textwrap.dedent(tests), prompt=prompt, entry_point=entry_point)
    values = {
        "path": "solution.py", "names": list(code.names), "entry_point": code.entry_point, "helpers": code.helpers,
        "tests": code.tests, "expected": list(code.expected), "in_place": code.in_place, "seconds": 20.0, **settings,
    }  # fmt: skip
    made = Problem(
        id="d/train/1", domain="d", split="train", difficulty=0.5, messages=(Message(role="user", content="?"),),
        environment=EnvironmentSpec(kind="d"),
        verifier=VerifierSpec(kind="proxied", trust="proxied", settings=values, collect=("solution.py",)),
    )  # fmt: skip
    Proxied().check(made)
    return made


async def grade(backend: SandboxBackend, source: str, made: Problem) -> Verdict:
    content = textwrap.dedent(source).encode()
    artifact = Artifact(name="solution.py", sha256=hashlib.sha256(content).hexdigest(), size=len(content), content=content)
    collected = Collected(artifacts=(artifact,))
    return await Proxied().verify(made, collected, acquire=backend.acquire, deadline_seconds=60.0)


async def test_a_right_solution_passes_and_the_verdict_says_how(bubblewrap_backend: SandboxBackend) -> None:
    first, second = [await grade(bubblewrap_backend, GOOD, problem()) for _ in range(2)]
    assert (first.score, first.trust, first.tampering) == (1.0, "proxied", None)
    assert to_json(first) == to_json(second)


async def test_a_wrong_solution_fails_with_the_line_and_the_call(bubblewrap_backend: SandboxBackend) -> None:
    verdict = await grade(bubblewrap_backend, "def add(a, b):\n    return a * b\n", problem())
    assert verdict.score == 0.0
    assert "line 2: assert candidate(2, 3) == 5" in verdict.evidence
    assert "add(2, 3) returned 6" in verdict.evidence


PROMPT = '''
from dataclasses import dataclass

@dataclass
class Node:
    value: int
    next: "Node | None" = None

def shift(text):
    """A helper."""
    return "".join(chr(ord(c) + 1) for c in text)

def back(text):
    """To be written."""

def build(values):
    """To be written."""
'''
SEVERAL = """
    def check(candidate):
        for text in ("abc", "", "hello"):
            assert candidate(shift(text)) == text
        assert build([1, 2]) == Node(1, Node(2))
        assert build([]) is None
        chain = build(list(range(500)))
        assert chain.next.next.value == 2
"""
SOLVED = PROMPT + (
    "\ndef back(text):\n    return ''.join(chr(ord(c) - 1) for c in text)\n"
    "def build(values):\n    node = None\n    for value in reversed(values):\n        node = Node(value, node)\n    return node\n"
)


async def test_helpers_of_the_prompt_and_several_functions(bubblewrap_backend: SandboxBackend) -> None:
    made = problem(SEVERAL, prompt=PROMPT, entry_point="back")
    assert made.verifier.settings["names"] == ["back", "build"]
    assert (await grade(bubblewrap_backend, SOLVED, made)).score == 1.0, (
        await grade(bubblewrap_backend, SOLVED, made)
    ).evidence
    lying = SOLVED + "\nshift = back = lambda text: text\nNode.__eq__ = lambda self, other: True\n"
    assert (await grade(bubblewrap_backend, lying, made)).score == 0.0
    wrong = SOLVED + "\nNode.__eq__ = lambda self, other: True\nbuild = lambda values: Node(7)\n"
    assert (await grade(bubblewrap_backend, wrong, made)).score == 0.0


VALUES = """
    import math, collections, datetime, decimal, fractions
    def check(candidate):
        for value in (None, True, 1, -10**40, 2.5, 1j, "\\udc00 text", b"\\0", bytearray(b"x"), (1, [2, {3}]), frozenset({(1, 2)}),
                      {"a": {1: [None]}}, range(3), collections.deque([1]), collections.Counter("aab"), int, type(None),
                      collections.OrderedDict(a=1), decimal.Decimal("1.50"), fractions.Fraction(1, 3),
                      datetime.datetime(2020, 1, 2, 3), datetime.timedelta(1, 2), float("inf")):
            back = candidate(value)
            assert back == value and type(back) is type(value), value
        assert math.isnan(candidate(float("nan")))
        loop = [1]; loop.append(loop)
        assert candidate(loop)[1][1][0] == 1
        deep = ()
        for _ in range(3000): deep = (deep,)
        candidate(deep)
"""


async def test_values_cross_exactly(bubblewrap_backend: SandboxBackend) -> None:
    verdict = await grade(bubblewrap_backend, "def add(value): return value\n", problem(VALUES))
    assert verdict.score == 1.0, verdict.evidence


BACK_AND_FORTH = """
    import pytest
    from solution import Stack, Empty, numbers, twice

    def test_callables_and_iterators_are_called_back():
        seen = []
        assert twice(lambda x: x + 1, 3) == 5
        assert twice(seen.append, 3) is None and seen == [3, None]
        assert numbers(iter([1, 2])) == [1, 2]
        assert numbers(x * x for x in range(3)) == [0, 1, 4]
        assert twice(len, [1]) == "TypeError"

    def test_objects_stay_there():
        stack = Stack()
        stack.push(3); stack.push([4])
        assert len(stack) == 2 and list(stack) == [3, [4]] and stack.size == 2 and bool(stack)
        assert stack.pop() == [4] and 3 in stack and isinstance(stack, Stack) and not isinstance(5, Stack)
        with stack as same:
            assert same is stack
        assert str(stack) == "a stack"

    def test_exceptions_cross():
        with pytest.raises(Empty, match="nothing"):
            Stack().pop()
        with pytest.raises(LookupError):
            Stack().pop()
        with pytest.raises(KeyError) as caught:
            Stack().missing("k")
        assert caught.value.args == ("k",)
        with pytest.raises(SystemExit):
            Stack().leave()

    def test_generators_are_walked():
        from solution import count
        generator = count()
        assert [next(generator), next(generator)] == [0, 1]

    async def test_coroutines_are_awaited():
        from solution import later
        assert await later(4) == 5
"""
STACK = """
    class Empty(LookupError): pass
    class Stack:
        def __init__(self): self.items = []
        def push(self, item): self.items.append(item)
        def pop(self):
            if not self.items: raise Empty("nothing here")
            return self.items.pop()
        @property
        def size(self): return len(self.items)
        def missing(self, key): return {}[key]
        def leave(self): raise SystemExit(0)
        def __len__(self): return len(self.items)
        def __iter__(self): return iter(self.items)
        def __str__(self): return "a stack"
        def __enter__(self): return self
        def __exit__(self, *error): return None
    def numbers(source): return list(source)
    def twice(function, value):
        try: return function(function(value))
        except TypeError: return "TypeError"
    def count():
        number = 0
        while True:
            yield number
            number += 1
    async def later(value): return value + 1
"""


async def test_calls_back_objects_exceptions_generators(bubblewrap_backend: SandboxBackend) -> None:
    verdict = await grade(bubblewrap_backend, STACK, problem(BACK_AND_FORTH, entry_point=None))
    assert verdict.score == 1.0, verdict.evidence
    assert [check.id for check in verdict.checks][:2] == [
        "test_callables_and_iterators_are_called_back",
        "test_objects_stay_there",
    ]


async def test_unittest_classes_are_run_method_by_method(bubblewrap_backend: SandboxBackend) -> None:
    tests = """
        import unittest
        class TestAdd(unittest.TestCase):
            def setUp(self): self.one = 1
            def test_right(self): self.assertEqual(add(self.one, 2), 3)
            def test_wrong(self): self.assertEqual(add(self.one, 2), 4)
            @unittest.skip("no")
            def test_skipped(self): self.assertTrue(add(1, 1))
    """
    verdict = await grade(bubblewrap_backend, GOOD, problem(tests, entry_point=None))
    assert {check.id: check.passed for check in verdict.checks} == {
        "TestAdd.test_right": True,
        "TestAdd.test_wrong": False,
        "TestAdd.test_skipped": False,
    }
    assert verdict.score == 0.0


async def test_changes_in_place_are_carried_back_only_where_the_row_needs_them(bubblewrap_backend: SandboxBackend) -> None:
    tests = "def check(candidate):\n    xs = [3, 1, 2]\n    candidate(xs)\n    assert xs == [1, 2, 3]\n"
    made = problem(tests)
    assert made.verifier.settings["in_place"]
    assert (await grade(bubblewrap_backend, "def add(xs): xs.sort()\n", made)).score == 1.0
    plain = problem("def check(candidate):\n    xs = [3, 1, 2]\n    assert candidate(xs) == sorted(xs)\n")
    assert not plain.verifier.settings["in_place"]
    assert (await grade(bubblewrap_backend, "def add(xs):\n    xs.clear()\n    return []\n", plain)).score == 0.0


LIAR = """
    class Liar:
        def _yes(self, *others): return True
        __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _yes
        def __sub__(self, other): return 0
        __rsub__ = __add__ = __radd__ = __abs__ = __sub__
        def __hash__(self): return 0
    def add(*arguments): return Liar()
"""
SWALLOWS = "def check(candidate):\n    try:\n        assert candidate(2, 3) == 5\n    except BaseException:\n        pass\n"


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (ADD, "was compared"), ("def check(candidate):\n    assert abs(candidate(2, 3) - 5) < 1e-6\n", "'sub' with an object"),
        ("def check(candidate):\n    assert 5 - candidate(2, 3) == 0\n", "'sub' with an object"),
        ("def check(candidate):\n    assert candidate(2, 3) >= 5\n", "'ge' with an object"),
        ("def check(candidate):\n    assert 5 in candidate(2, 3)\n", "TypeError"),
        ("def check(candidate):\n    assert candidate(2, 3) in [4, 5]\n", "was compared"),
        ("def check(candidate):\n    assert [candidate(2, 3)] == [5]\n", "was compared"),
        ("def check(candidate):\n    assert candidate(2, 3) != 4\n", "was compared"), (SWALLOWS, "was compared"),
    ],
)  # fmt: skip
async def test_a_lying_object_is_never_compared(bubblewrap_backend: SandboxBackend, tests: str, why: str) -> None:
    verdict = await grade(bubblewrap_backend, LIAR, problem(tests))
    assert verdict.score == 0.0
    assert why in verdict.evidence, verdict.evidence


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import sys\nsys.exit(0)\n", "SystemExit"), ("import os\nos._exit(0)\n", "has ended"),
        ("def add(a, b):\n    import os\n    os._exit(0)\n", "has ended"), ("def other(): pass\n", "does not define 'add'"),
        ("def add(a, b)\n    return 5\n", "SyntaxError"), ("def add(a, b): raise SystemExit(0)\n", "SystemExit"),
        ("import os\nos.kill(os.getppid(), 9)\n", "ended without a record"),
        ("def add(a, b): return float('nan')\n", "returned nan"),
        ("class B(int):\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef add(a, b): return B()\n", "was compared"),
        ("import builtins\nbuiltins.all = builtins.any = lambda *a: True\ndef add(a, b): return '5'\n", "line 2"),
        ("import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.type = lambda v: int\ndef add(a, b): return '5'\n", "has ended"),
        ("import os, struct\nframe = b'[\"returned\", [[], ' + b'[' * 9000 + b']' * 9000 + b']]'\ndef add(a, b):\n    for d in range(3, 64):\n        try: os.write(d, struct.pack('!I', len(frame)) + frame)\n        except OSError: pass\n", "the candidate's process"),
        ("import os, struct\nframe = b'[\"ask\", \"call\", 0, [[[\"list\", []], [\"dict\", []], [\"list\", [[\"@\", 0], [\"@\", 1]]]], [\"@\", 2]]]'\ndef add(a, b):\n    for d in range(3, 64):\n        try: os.write(d, struct.pack('!I', len(frame)) + frame)\n        except OSError: pass\n    return 5\n", "never handed out"),
        ("import os, struct\ndef add(a, b):\n    for d in range(3, 64):\n        try: os.write(d, struct.pack('!I', 1 << 31) + b'x' * 100)\n        except OSError: pass\n    return 5\n", "beyond every cap"),
        ("while True: pass\n", "stopped after its time"), ("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\n", "stopped after its time"),
        ("x = []\nwhile True: x.append(bytearray(1 << 24))\n", ""),
    ],
)  # fmt: skip
async def test_attempts_score_nothing_and_say_why(bubblewrap_backend: SandboxBackend, source: str, why: str) -> None:
    verdict = await grade(bubblewrap_backend, source, problem(seconds=6.0))
    assert (verdict.score, verdict.passed) == (0.0, False)
    assert why in verdict.evidence, verdict.evidence
    assert len(to_json(verdict)) < 8_000


async def test_ending_the_process_is_no_way_out_of_a_test_that_catches_everything(bubblewrap_backend: SandboxBackend) -> None:
    source = "def add(a, b):\n    import os\n    os._exit(0)\n"
    assert "has ended" in (await grade(bubblewrap_backend, source, problem(SWALLOWS))).evidence


async def test_the_candidate_finds_neither_tests_nor_the_other_process(bubblewrap_backend: SandboxBackend) -> None:
    source = """
        import gc, os, subprocess, sys
        def add(a, b):
            parent, found = os.getppid(), []
            for name in ("mem", "environ", "maps", "fd/0", "fd/1", "fd/3", "root", "cwd", "stack", "syscall", "auxv"):
                try: open(f"/proc/{parent}/{name}", "rb").read(10); found.append(name)
                except IsADirectoryError: found.append(name)
                except OSError: pass
            text = subprocess.run(["grep", "-rslF", "candid" + "ate(2, 3)", "/work", "/tmp", "/dev/shm"], capture_output=True).stdout.decode()
            held = [t for t in gc.get_objects() if isinstance(t, str) and "candid" + "ate(2, 3)" in t]
            raise RuntimeError(repr((found, text, held, sorted(os.environ))))
    """
    evidence = (await grade(bubblewrap_backend, source, problem())).evidence
    assert "([], '', [], ['HOME', 'LANG', 'LC_ALL', 'PATH', 'PYTHONHASHSEED', 'TZ'])" in evidence


async def test_modules_that_the_candidate_writes_shadow_nothing_of_the_tests(bubblewrap_backend: SandboxBackend) -> None:
    source = """
        import os
        for name in ("string", "statistics", "colorsys", "tests"):
            for folder in (".", ".grader", "/tmp"):
                open(f"{folder}/{name}.py", "w").write("raise SystemExit(0)")
        def add(a, b): return 0
    """
    tests = "def check(candidate):\n    import colorsys, statistics, string\n    assert candidate(1, 2) == 3\n"
    assert "assert candidate(1, 2) == 3" in (await grade(bubblewrap_backend, source, problem(tests))).evidence


async def test_what_cannot_cross_is_refused_by_name(bubblewrap_backend: SandboxBackend) -> None:
    tests = "class Own:\n    pass\ndef check(candidate):\n    assert candidate(Own(), 1)\n"
    verdict = await grade(bubblewrap_backend, "def add(a, b): return True\n", problem(tests))
    assert "an argument of type Own cannot cross" in verdict.evidence


async def test_a_test_that_never_asks_the_candidate_fails(bubblewrap_backend: SandboxBackend) -> None:
    made = problem("def check(candidate):\n    assert str(1) == '1'\n")
    assert "never asked" in (await grade(bubblewrap_backend, GOOD, made)).evidence


async def test_the_same_on_docker(docker_backend: SandboxBackend) -> None:
    assert (await grade(docker_backend, GOOD, problem())).score == 1.0
    for source in (LIAR, "import os\nos.kill(os.getppid(), 9)\n", "def add(a, b): return 4\n"):
        assert (await grade(docker_backend, source, problem())).score == 0.0


async def test_a_backend_without_isolation_is_refused(fake_backend: SandboxBackend) -> None:
    with pytest.raises(CapabilityError, match="isolation"):
        await grade(fake_backend, GOOD, problem())


@pytest.mark.parametrize(
    ("tests", "entry_point", "field"),
    [
        ("def check(candidate):\n    candidate(1)\n", "add", "tests"), ("def check(candidate):\n    assert True\n", "add", "tests"),
        ("def check(candidate)\n", "add", "tests"), ("x = 1\n", "add", "expected"), (ADD, None, "entry_point"),
        ("def test_a(tmp_path):\n    assert add(1) == 2\n", None, "expected"), ("", "add", "expected"),
    ],
)  # fmt: skip
def test_tests_that_decide_nothing_are_refused_before_anything_runs(tests: str, entry_point: str | None, field: str) -> None:
    with pytest.raises(InputError) as caught:
        describe(tests, entry_point=entry_point)
    assert caught.value.field == field
    assert caught.value.remedy

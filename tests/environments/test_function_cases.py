"""What a candidate may do to its grader, in a real box; expected values are outside, so each attempt must score 0."""

# ruff: noqa: E501  the attempts are one a line

import hashlib
from typing import Any

import msgspec
import pytest

from data_contracts.errors import InputError
from data_contracts.protocols import SandboxBackend, to_json
from data_contracts.records import Artifact, Check, EnvironmentSpec, Message, Problem, Verdict, VerifierSpec
from environments.base import Collected
from environments.verifiers.function_cases import FunctionCases, read_results
from environments.verifiers.values import encode, equal, show

CASES = [((2, 3), 5), ((0, 0), 0), ((-1, 1), 0), ((10, 5), 15), ((2.5, 0.5), 3.0)]
GOOD = "def add(a, b):\n    return a + b\n"


def problem(cases: Any = CASES, **settings: Any) -> Problem:
    rows = [
        {"id": f"c{i}", "arguments": [encode(a) for a in arguments], "expected": encode(expected)}
        for i, (arguments, expected) in enumerate(cases)
    ]
    return Problem(
        id="d/train/1",
        domain="d",
        split="train",
        difficulty=0.5,
        messages=(Message(role="user", content="?"),),
        environment=EnvironmentSpec(kind="d"),
        verifier=VerifierSpec(
            kind="function_cases",
            settings={"path": "solution.py", "function": "add", "cases": rows, "seconds": 2.0, **settings},
        ),
    )


def artifact(source: str | bytes, name: str = "solution.py") -> Artifact:
    data = source.encode() if isinstance(source, str) else source
    return Artifact(name=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data), content=data)


async def grade(backend: SandboxBackend, source: str | bytes, posed: Problem | None = None) -> Verdict:
    collected = Collected(artifacts=(artifact(source),))
    return await FunctionCases().verify(posed or problem(), collected, acquire=backend.acquire, deadline_seconds=30)


async def test_a_right_function_passes_twice_the_same(bubblewrap_backend: SandboxBackend) -> None:
    first, second = await grade(bubblewrap_backend, GOOD), await grade(bubblewrap_backend, GOOD)
    assert first == second
    assert (first.score, first.passed, first.trust, first.components) == (1.0, True, "cases", {"cases": 1.0})
    assert first.checks == tuple(Check(id=f"c{i}", passed=True) for i in range(5))


async def test_printing_and_changing_arguments_do_no_harm(bubblewrap_backend: SandboxBackend) -> None:
    noisy = "import sys\nprint('x' * 100000)\ndef add(a, b):\n    print(a, file=sys.stderr)\n    return a + b\n"
    assert (await grade(bubblewrap_backend, noisy)).score == 1.0
    mutating = "def add(a, b):\n    a.append(b)\n    return len(a)\n"
    assert (await grade(bubblewrap_backend, mutating, problem([(([], 1), 1), (([1], 1), 2)]))).score == 1.0


async def test_every_character_of_an_argument_arrives(bubblewrap_backend: SandboxBackend) -> None:
    odd = "a\u2028b\u2029c\x85d\x0c\x1ee\r\n\U0001f600"
    assert (await grade(bubblewrap_backend, GOOD, problem([((odd, odd), odd + odd)]))).score == 1.0


@pytest.mark.parametrize("name", ["import", 5])
def test_the_id_of_a_case_is_never_taken_for_something_else(name: Any) -> None:
    posed = problem()
    posed.verifier.settings["cases"][0]["id"] = name
    posed = msgspec.structs.replace(posed, verifier=msgspec.structs.replace(posed.verifier, collect=("solution.py",)))
    with pytest.raises(InputError, match="other than 'import'"):
        FunctionCases().check(posed)


ATTEMPTS = {
    "wrong": "def add(a, b):\n    return a - b\n",
    "no function": "x = 1\n",
    "syntax error": "def add(a, b)\n",
    "not utf-8": b"\xff\xfe\x00add",
    "exit at import": "raise SystemExit(0)\n",
    "sys.exit in a call": "import sys\ndef add(a, b):\n    sys.exit(0)\n",
    "os._exit": "import os\nprint('5 passed')\nos._exit(0)\n",
    "atexit forges the code": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b):\n    raise KeyboardInterrupt\n",
    "kills everything": "import os, signal\ntry:\n    os.kill(-1, 9)\nfinally:\n    os.kill(os.getppid(), 9)\n",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n",
    "for ever": "def add(a, b):\n    while True:\n        pass\n",
    "recursion": "def add(a, b):\n    return add(a, b)\n",
    "memory": "def add(a, b):\n    x = bytearray(8 << 30)\n    return 5\n",
    "forks": "import os\ndef add(a, b):\n    while True:\n        try:\n            os.fork()\n        except OSError:\n            pass\n",
    "always equal": "class E(int):\n    def __eq__(self, o): return True\ndef add(a, b):\n    return E(a + b)\n",
    "nan": "def add(a, b):\n    return float('nan')\n",
    "bool for int": "def add(a, b):\n    return True if a + b == 1 else (False if a + b == 0 else a + b)\n",
    "float for int": "def add(a, b):\n    return float(a + b)\n",
    "cyclic": "def add(a, b):\n    x = []\n    x.append(x)\n    return x\n",
    "huge": "def add(a, b):\n    return 'x' * 50_000_000\n",
    "endless output": "import os\nwhile True:\n    os.write(1, b'x' * 65536)\n",
    "writes to every descriptor": "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'[\"x\"]' * 1000)\n        os.close(fd)\n    except OSError:\n        pass\ndef add(a, b):\n    return a + b\n",
    "bad exception": "class E(Exception):\n    def __str__(self): raise E\ndef add(a, b):\n    raise E\n",
    "forged records": (
        "import sys, os\nf, tag, cases = sys._getframe(), None, []\nwhile f:\n    tag = f.f_locals.get('tag', tag)\n"
        "    cases = f.f_locals.get('cases', cases)\n    f = f.f_back\n"
        "for fd in range(3, 64):\n    try:\n        for c in cases:\n"
        "            os.write(fd, ('[\"%s\", \"%s\", \"returned\", [\"int\", \"5\"]]\\n' % (tag, c['id'])).encode())\n"
        "    except OSError:\n        pass\ndef add(a, b):\n    return a + b\n"
    ),
    "reads expected values": (
        "import gc\ndef add(a, b):\n    for o in gc.get_objects():\n        if isinstance(o, dict) and 'expected' in o:\n"
        "            return a + b\n    return None\n"
    ),
    "reads expected values from files": (
        "import glob\ndef add(a, b):\n    for n in glob.glob('/work/**', recursive=True) + glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline'):\n"
        "        try:\n            if b'\"expec' + b'ted' in open(n, 'rb').read():\n                return a + b\n"
        "        except OSError:\n            pass\n    return None\n"
    ),
    "network": (
        "import socket\ndef add(a, b):\n    try:\n        socket.create_connection(('1.1.1.1', 53), 1)\n        return a + b\n"
        "    except OSError:\n        return None\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_attempts_score_zero(bubblewrap_backend: SandboxBackend, name: str) -> None:
    verdict = await grade(bubblewrap_backend, ATTEMPTS[name])
    assert verdict.score == 0.0, verdict.evidence
    assert not verdict.passed
    assert [check.id for check in verdict.checks] == ["c0", "c1", "c2", "c3", "c4"]
    assert verdict.evidence


async def test_forged_records_are_told_as_tampering(bubblewrap_backend: SandboxBackend) -> None:
    assert "more than one result" in ((await grade(bubblewrap_backend, ATTEMPTS["forged records"])).tampering or "")


async def test_a_missing_file_fails_without_a_box() -> None:
    async def no_box(spec: object) -> Any:
        raise AssertionError

    verdict = await FunctionCases().verify(problem(), Collected(), acquire=no_box, deadline_seconds=9)
    assert (verdict.score, len(verdict.checks)) == (0.0, 5)
    assert "was not collected" in verdict.evidence


async def test_the_world_of_a_candidate_is_pinned(bubblewrap_backend: SandboxBackend) -> None:
    source = (
        "import os, sys, time\ndef add():\n"
        "    return (sorted(os.environ), os.environ['TZ'], sys.flags.no_site, sys.flags.safe_path, hash('x') == hash('x'),"
        " '' in sys.path or '/work' in sys.path)\n"
    )
    names = ["HOME", "LANG", "LC_ALL", "PATH", "PYTHONHASHSEED", "TZ"]
    verdict = await grade(bubblewrap_backend, source, problem([((), (names, "UTC", 1, True, True, False))]))
    assert verdict.score == 1.0, verdict.evidence
    order = "def add():\n    return list({'a', 'b', 'c', 'd', 'e', 'f', 'g'})\n"
    runs = [await grade(bubblewrap_backend, order, problem([((), [])])) for _ in range(3)]
    assert len({run.checks[0].message for run in runs}) == 1


async def test_no_cases_never_pass(bubblewrap_backend: SandboxBackend) -> None:
    assert (await grade(bubblewrap_backend, GOOD, problem([]))).score == 0.0


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        (1, 1, True), (1, True, False), (1, 1.0, False), (0.0, -0.0, True), (float("nan"), float("nan"), False), ("a", "a", True),
        ((1, 2), [1, 2], False), ([1, [2]], [1, [2]], True), ({1: "a"}, {1: "a"}, True), ({1: "a"}, {True: "a"}, False),
        ({1, 2}, {2, 1}, True), ({1, 2}, {1, 3}, False), (None, None, True), (None, False, False), (float("inf"), float("inf"), True),
        (10**40, 10**40, True), ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True), ({"a": 1}, {}, False),
    ],
)  # fmt: skip
def test_values_are_compared_by_exact_type(expected: Any, actual: Any, same: bool) -> None:
    sent = msgspec.json.decode(msgspec.json.encode(encode(actual)))
    assert equal(encode(expected), sent) is same


@pytest.mark.parametrize(
    "junk",
    [
        None,
        [],
        ["int"],
        ["int", 5],
        ["int", "5 "],
        ["int", "+5"],
        ["int", "9" * 9999],
        {"int": "5"},
        ["float", "x"],
        [["int"], "5"],
    ],
)
def test_any_json_is_compared_without_an_error(junk: Any) -> None:
    for expected in (5, 5.0, "5", [5], {5: 5}, {5}, None):
        assert not equal(encode(expected), junk)


def test_float_tolerance_is_relative_and_never_for_ints() -> None:
    assert equal(encode(0.3), encode(0.1 + 0.2), tolerance=1e-9)
    assert not equal(encode(0.3), encode(0.1 + 0.2))
    assert not equal(encode(10**12), encode(10**12 + 1), tolerance=1e-9)
    assert not equal(encode(0.3), encode(float("nan")), tolerance=1e-9)


def test_records_of_unknown_cases_are_tampering_and_noise_is_not() -> None:
    assert read_results(b'noise\n["n","c0","returned",["int","1"]]\n[[[', "n", {"c0"}) == (
        {"c0": ["returned", ["int", "1"]]},
        None,
    )
    assert read_results(b'["other","c0","returned",1]', "n", {"c0"}) == ({}, None)
    assert "unknown case" in (read_results(b'["n","c9","returned",1]', "n", {"c0"})[1] or "")
    assert "more than one" in (read_results(b'["n","c0","returned",1]\n["n","c0","returned",1]', "n", {"c0"})[1] or "")


FORGE = """
import json, os, sys
frame = sys._getframe()
while frame and "tag" not in frame.f_locals:
    frame = frame.f_back
tag, channel = frame.f_locals["tag"], frame.f_locals["channel"]
os.write(channel, ('["%s", "c0", ' % tag + CONTENT + "]\\n").encode())
os._exit(0)
"""


@pytest.mark.parametrize(
    "content",
    [
        '\'"returned", \' + \'["list", [\' * 450 + "]]" * 450', '\'"returned", ["list", \' + "[" * 900 + "]" * 900 + "]"',
        '\'"returned", ["set", \' + "[" * 900 + "]" * 900 + "]"', '\'"raised", \' + "[" * 950 + "]" * 950',
        '"[" * 950 + "]" * 950 + ", 1"', '\'"raised", "\' + "x" * 60000 + \'"\'', '\'"\' + "x" * 60000 + \'", 1\'',
        '\'"raised", "\' + "x" * 2000000 + \'"\'', '\'"returned", ["other", {"a": \' + "[" * 900 + "]" * 900 + "}]"',
        '\'"returned", ["list", [\' + \'["int", "1"],\' * 4000 + \'["int", "1"]]]\'',
    ],
)  # fmt: skip
async def test_a_forged_record_cannot_break_the_verifier(bubblewrap_backend: SandboxBackend, content: str) -> None:
    """A verifier that raises is an infra_failure, which is no bad score: whatever comes, there is a small verdict."""
    verdict = await grade(bubblewrap_backend, FORGE.replace("CONTENT", content))
    assert verdict.score == 0.0
    assert len(to_json(verdict)) < 8_000


def test_values_are_shown_short_whatever_they_are() -> None:
    nested: Any = ["int", "1"]
    for _ in range(480):
        nested = ["list", [nested, nested]]
    assert len(show(nested)) < 20_000
    assert show(["dict", [[["str", "a"], ["tuple", [["int", "1"]]]]]]) == "{'a': (1)}"
    assert len(show(["list", [["int", "1"]] * 100_000])) < 300

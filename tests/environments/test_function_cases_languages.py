"""JavaScript, Bash and whole programs: the same rules as for Python functions, in real boxes of both backends."""

# ruff: noqa: E501  sources are one a line

from typing import Any

import msgspec
import pytest

from data_contracts.errors import CapabilityError, InfraError, InputError
from data_contracts.protocols import SandboxBackend, to_json
from data_contracts.records import EnvironmentSpec, Message, Problem, SandboxSpec, Verdict, VerifierSpec
from environments.base import Collected
from environments.sandbox.files import artifact
from environments.verifiers.function_cases import FunctionCases
from environments.verifiers.function_cases_languages import same_output
from environments.verifiers.values import encode, equal, for_javascript
from infra.rootfs import ensure_image, ensure_rootfs


@pytest.fixture(scope="session")
def node_rootfs(rootfs: object) -> None:
    ensure_rootfs("node", progress=print)


@pytest.fixture(params=["bubblewrap", "docker"])
def backend(request: pytest.FixtureRequest, node_rootfs: None) -> SandboxBackend:
    opened = request.getfixturevalue(f"{request.param}_backend")
    if request.param == "docker":
        ensure_image("node", progress=print)
    return opened


def problem(path: str, cases: list[dict[str, Any]], *, image: str = "base", **settings: Any) -> Problem:
    rows = [{"id": f"c{number}", **case} for number, case in enumerate(cases)]
    return Problem(
        id="d/train/1",
        domain="d",
        split="train",
        difficulty=0.5,
        messages=(Message(role="user", content="?"),),
        environment=EnvironmentSpec(kind="d"),
        verifier=VerifierSpec(
            kind="function_cases",
            settings={"path": path, "cases": rows, "seconds": 10.0, **settings},
            sandbox=SandboxSpec(image=image, needs=("exec", "files")),
            collect=(path,),
        ),
    )


def javascript(cases: list[tuple[tuple[Any, ...], Any]], **settings: Any) -> Problem:
    rows = [{"arguments": [encode(a) for a in arguments], "expected": encode(expected)} for arguments, expected in cases]
    return problem(settings.pop("path", "solution.js"), rows, image="node", language="javascript", function="f", **settings)


async def grade(backend: SandboxBackend, source: str, posed: Problem) -> Verdict:
    FunctionCases().check(posed)
    collected = Collected(artifacts=(artifact(posed.verifier.collect[0], source.encode()),))
    verdict = await FunctionCases().verify(posed, collected, acquire=backend.acquire, deadline_seconds=60)
    assert verdict.trust == "cases"
    assert len(to_json(verdict)) < 20_000
    return verdict


SAME: list[tuple[tuple[Any, ...], Any]] = [
    ((1,), 1), ((1.5,), 1.5), (("a\u00e9\U0001f600",), "a\u00e9\U0001f600"), ((None,), None), ((True,), True), (([1, [2.5, "x"]],), [1, [2.5, "x"]]),
    (({"a": 1, "b": [None]},), {"b": [None], "a": 1}), (({1, 2},), {2, 1}), (((1, 2),), (1, 2)), ((5e-324,), 5e-324),
    ((1.7976931348623157e308,), 1.7976931348623157e308), ((10**25,), 10**25), (({1: "a"},), {1: "a"}), ((-0.1,), -0.1), ((2**53,), 2**53),
]  # fmt: skip


async def test_javascript_values_come_back_as_they_went(backend: SandboxBackend) -> None:
    for source in (
        "function f(x) { return x }",
        "exports.f = async (x) => x;",
        "module.exports = (x) => x;",
        "const f = x => x; console.log('noise')",
    ):
        verdict = await grade(backend, source, javascript(SAME))
        assert verdict.score == 1.0, verdict.evidence
    assert (await grade(backend, "export const f = (x) => x;", javascript(SAME, path="solution.mjs"))).score == 1.0


ATTEMPTS = {
    "wrong": "const f = (a, b) => a - b;",
    "no function": "const g = 1;",
    "syntax error": "function f(a, b {",
    "exit at import": "process.exit(0);",
    "exit in a call": "function f() { process.exit(0) }",
    "abort": "function f() { process.abort() }",
    "endless": "function f() { for (;;); }",
    "never resolves": "function f() { return new Promise(() => {}) }",
    "throws": "function f() { throw new Proxy({}, { get() { throw 1 } }) }",
    "string for number": "const f = (a, b) => String(a + b);",
    "NaN": "const f = () => NaN;",
    "equal to everything": "class N extends Number { valueOf() { return 5 } } const f = () => new N(5);",
    "toJSON": "const f = (a, b) => ({ toJSON: () => ['float', '0x1.4p2'] });",
    "cyclic": "const f = () => { const x = []; x.push(x); return x };",
    "huge": "const f = () => 'x'.repeat(50_000_000);",
    "patched": "JSON.stringify = () => '[\"n\",\"c0\",\"returned\",[\"float\",\"0x1.4p2\"]]'; Array.isArray = () => true; const f = () => 0;",
    "forged line": "require('fs').writeSync(3, '[\"n\",\"c0\",\"returned\",[\"float\",\"0x1.4000000000000p2\"]]\\n'); const f = () => 0;",
    "closes the channel": "require('fs').closeSync(3); const f = (a, b) => a + b;",
    "reads expected values": "const f = () => { for (const n of require('fs').readdirSync('.grader')) if (/expected\"/.test(require('fs').readFileSync('.grader/' + n))) return 5; };",
    "network": "const f = () => new Promise((done) => require('net').connect(53, '1.1.1.1', () => done(5)).on('error', () => done(null)));",
    "child that lives on": "require('child_process').spawn('sleep', ['100'], { detached: true, stdio: 'ignore' }).unref(); const f = () => 0;",
}  # fmt: skip


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_javascript_attempts_score_zero(bubblewrap_backend: SandboxBackend, node_rootfs: None, name: str) -> None:
    posed = javascript([((2, 3), 5), ((0, 5), 5)], seconds=3.0)
    verdict = await grade(bubblewrap_backend, ATTEMPTS[name], posed)
    assert (verdict.score, len(verdict.checks)) == (0.0, 2), verdict.evidence
    assert verdict.evidence


BASH = 'greet() { read -r line; printf \'%s, %s!\\n\' "$1" "$line"; }\necho noise\nfalse\n'


async def test_a_bash_function_and_a_bash_program(backend: SandboxBackend) -> None:
    cases = [
        {"arguments": ["Hello"], "stdin": "you\n", "expected": "Hello, you!"},
        {"arguments": ["a b; rm -rf ."], "stdin": "$(id)\n", "expected": "a b; rm -rf ., $(id)!\n"},
    ]
    right = await grade(backend, BASH, problem("solution.sh", cases, language="bash", function="greet"))
    assert right.score == 1.0, right.evidence
    wrong = await grade(
        backend, "greet() { echo Hello, you!; }", problem("solution.sh", cases, language="bash", function="greet")
    )
    assert (wrong.score, wrong.components["cases"]) == (0.0, 0.5)
    script = 'sum=0; while read -r n; do sum=$((sum + n)); done; echo "$sum"; exit "${1:-0}"\n'
    codes = [
        {"arguments": [], "stdin": "1\n2\n", "expected": "3"},
        {"arguments": ["7"], "stdin": "4\n", "expected": "4", "exit_code": 7},
    ]
    assert (await grade(backend, script, problem("sum.sh", codes, language="bash", program=True))).score == 1.0


async def test_programs_in_python_and_javascript(backend: SandboxBackend) -> None:
    cases = [{"arguments": [], "stdin": "3 4\n", "expected": "5.0"}, {"arguments": [], "stdin": "5 12\n", "expected": "13.0"}]
    python = "import math\na, b = map(float, input().split())\nprint(math.hypot(a, b))\n"
    assert (await grade(backend, python, problem("p.py", cases, program=True))).score == 1.0
    node = "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number); console.log(Math.hypot(a, b));"
    posed = problem("p.js", cases, image="node", program=True, language="javascript", output="tokens")
    assert (await grade(backend, node, posed)).score == 1.0


PROGRAMS = {
    "prints nothing": "pass",
    "prints more": "print(5); print(6)",
    "exit code": "print(5); raise SystemExit(1)",
    "invalid UTF-8": "import os; os.write(1, b'\\xff5')",
    "endless output": "while True: print('5' * 1000)",
    "sleeps": "import time; time.sleep(60)",
    "kills everything": "import os; print(5, flush=True); os.kill(-1, 9)",
    "memory": "x = ['5' * 10**6 for _ in range(10**6)]",
    "stops itself": "import os, signal; print(5, flush=True); os.kill(os.getpid(), signal.SIGSTOP)",
    "huge line": "print('5' * 10**7)",
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_program_attempts_score_zero(bubblewrap_backend: SandboxBackend, name: str) -> None:
    posed = problem("p.py", [{"arguments": [], "expected": "5"}] * 2, program=True, seconds=3.0)
    verdict = await grade(bubblewrap_backend, PROGRAMS[name], posed)
    assert (verdict.score, len(verdict.checks)) == (0.0, 2), verdict.evidence


async def test_javascript_finds_the_box_s_clock_and_processors(backend: SandboxBackend) -> None:
    source = (
        "const os = require('os'), fs = require('fs');\n"
        "exports.f = () => [new Date().toISOString().slice(0, 16), fs.statSync('solution.js').mtime.toISOString().slice(0, 16),"
        " os.cpus().length];"
    )
    verdict = await grade(backend, source, javascript([((), ["2025-01-15T12:00", "2025-01-15T12:00", 1])]))
    assert verdict.passed, verdict.evidence


async def test_the_world_of_a_program_is_pinned_and_its_verdict_repeats(bubblewrap_backend: SandboxBackend) -> None:
    source = "import os\nprint(sorted(os.environ), list({'a', 'b', 'c', 'd', 'e'}))"
    posed = problem("p.py", [{"arguments": [], "expected": "?"}], program=True)
    verdicts = {to_json(await grade(bubblewrap_backend, source, posed)) for _ in range(3)}
    assert len(verdicts) == 1
    assert b"BESSEMER" not in verdicts.pop()


@pytest.mark.parametrize(
    ("rule", "expected", "output", "same"),
    [
        ("text", "a\nb\n", "a  \nb", True), ("text", "a\nb", "a\n\nb", False), ("text", "a", " a", False), ("exact", "a\n", "a\n", True),
        ("exact", "a\n", "a", False), ("tokens", "1.0 2", "1 2.00", True), ("tokens", "1 2", "1 2 3", False), ("tokens", "nan", "NaN", False),
        ("tokens", "0.3333", "0.33331", True), ("tokens", "a", "b", False), ("json", '{"a": [1, 2.0]}', '{"a":[1,2.0]}\n', True),
        ("json", "[1]", "[1.0]", False), ("json", "[1]", "[true]", False), ("json", "1", "1 2", False), ("json", "1", "[" * 100_000, False),
        ("json", '{"a": 1}', '{"a": 2, "a": 1}', False), ("json", "[1.0]", "[NaN]", False), ("json", "[1.0]", "[1e309]", False),
        ("json", "[1.0]", "[Infinity]", False), ("json", "1", "9" * 9999, False), ("json", "1", "\ufeff1", False),
        ("text", "", "", True), ("text", "", "x", False), ("tokens", "1e5", "100000", True), ("tokens", "5", "5" * 1000, False),
    ],
)  # fmt: skip
def test_ways_to_compare_output(rule: str, expected: str, output: str, same: bool) -> None:
    assert same_output({"output": rule, "tolerance": 1e-4 if rule == "tokens" else 0.0}, expected, output.encode()) is same


def test_a_whole_number_beyond_doubles_needs_a_bigint() -> None:
    assert equal(for_javascript(encode(10**25)), msgspec.json.decode(b'["int","10000000000000000000000000"]'))
    assert not equal(for_javascript(encode(10**25)), encode(1e25))
    assert not equal(for_javascript(encode(True)), encode(1.0))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"language": "cobol"}, "verifier.settings.language"), ({"language": "javascript"}, "verifier.sandbox.image"),
        ({"output": "fuzzy"}, "verifier.settings.output"), ({"tolerance": 2}, "verifier.settings.tolerance"),
        ({"program": False}, "verifier.settings.function"), ({"cases": [{"id": "a", "arguments": [1], "expected": "5"}]}, "verifier.settings.cases[0]"),
        ({"cases": [{"id": "a", "arguments": [], "expected": "5", "exit_code": "0"}]}, "verifier.settings.cases[0].exit_code"),
        ({"output": "json", "cases": [{"id": "a", "arguments": [], "expected": "{"}]}, "verifier.settings.cases[0].expected"),
    ],
)  # fmt: skip
def test_what_no_harness_could_run_is_named(change: dict[str, Any], field: str) -> None:
    posed = problem("p.py", [{"arguments": [], "expected": "5"}], program=True)
    posed.verifier.settings.update(change)
    with pytest.raises(InputError) as refused:
        FunctionCases().check(posed)
    assert refused.value.field == field


async def test_a_variant_that_is_not_built_is_named_with_its_command(
    backend: SandboxBackend,
) -> None:
    with pytest.raises(InfraError, match=r"python -m infra\.rootfs( --docker)? --variant base,sl"):
        await backend.acquire(SandboxSpec(image="base,sl"))
    with pytest.raises(CapabilityError, match="is declared; choose one of"):
        await backend.acquire(SandboxSpec(image="windows"))

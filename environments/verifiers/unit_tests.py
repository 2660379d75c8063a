"""Trust `in_process`: a given pytest suite over collected files, for suites whose tests must import the candidate.

`settings`: {"tests": {file name: source}, "expected": [test ids such as "test_a.py::test_x"], "seconds": limit}. The host's
copy of the test files wins over anything collected. A test passed when its setup, call and teardown each left exactly one
passed record; skipped, xfailed and missing tests failed. Canary tests with random names, which must fail, run before and
after the suite and inside its files (unit_tests_canaries.py): a canary that does not fail, an id nobody expects or a second
record for one phase is tampering, and the score is 0.

Residual risk, which is why the trust level is lower: candidate code runs in pytest's process. Code that walks the frames to the
recorder's channel can write records for the expected ids, leave the canaries alone and end the process; an object that lies
about an order or a membership passes an assertion about that. Prefer `function_cases` wherever values can cross a pipe.
"""

from __future__ import annotations

import secrets
from importlib.resources import files
from typing import Any

import msgspec

from data_contracts.errors import InputError, SandboxLost
from data_contracts.protocols import ExecRequest, ExecResult, Preload, to_json
from data_contracts.records import Check, Problem, SandboxSpec, Verdict
from environments.base import Acquire, Collected, Verifier
from environments.verifiers import unit_tests_canaries as canaries
from environments.verifiers.values import steady

RUNNER = ".grader/runner.py"
_PLUGINS = (
    "mark main runner fixtures helpconfig python terminal debugging unittest capture skipping legacypath tmpdir "
    "monkeypatch recwarn pastebin nose assertion junitxml doctest cacheprovider freeze_support setuponly setupplan "
    "stepwise unraisableexception threadexception warnings logging reports python_path faulthandler python_api "
    "assertion.rewrite assertion.util"
)
PRELOAD = Preload(options=("-P", "-s", "-B"), modules=("pytest", *(f"_pytest.{name}" for name in _PLUGINS.split())))
MAX_OUTPUT_BYTES = 4 * 1024 * 1024
DEFAULT_SECONDS = 20.0
_PHASES = ("setup", "call", "teardown")


class UnitTests(Verifier):
    """Grades collected files by a suite of the host's."""

    kind = "unit_tests"

    def check(self, problem: Problem) -> None:
        settings = problem.verifier.settings
        tests, expected = settings.get("tests"), settings.get("expected")
        if not isinstance(tests, dict) or not tests or not all(isinstance(source, str) for source in tests.values()):
            raise InputError("expected test files with their text", field="verifier.settings.tests", remedy="Add the tests")
        named = isinstance(expected, list) and all(isinstance(test, str) and test.split("::")[0] in tests for test in expected)
        if not expected or not named:
            raise InputError(
                "expected the ids of the tests that must pass, at least one, each in one of the files",
                field="verifier.settings.expected", remedy="Without one nothing would be tested",
            )  # fmt: skip

    async def verify(self, problem: Problem, collected: Collected, *, acquire: Acquire, deadline_seconds: float) -> Verdict:
        settings = problem.verifier.settings
        nonce, seconds = secrets.token_hex(16), min(float(settings.get("seconds", DEFAULT_SECONDS)), 0.8 * deadline_seconds)
        first, last = (f"{canaries.random_name()}.py" for _ in range(2))
        made = {name: canaries.plant(source, _names(settings["expected"], name)) for name, source in settings["tests"].items()}
        made |= {first: canaries.sole_file(), last: canaries.sole_file()}
        contents = {artifact.name: artifact.content for artifact in collected.artifacts}
        contents |= {name: source.encode() for name, (source, _) in made.items()}
        try:
            ran = await self._run(
                problem,
                contents,
                {"nonce": nonce, "files": [first, *settings["tests"], last]},
                acquire=acquire,
                seconds=seconds,
            )
        except SandboxLost:  # its text names the box, and verdicts hold only what repeats
            return self._verdict(settings, {}, note="the candidate destroyed the grading box", tampering=None)
        canary_ids = {f"{name}::{test}" for name, (_, tests) in made.items() for test in tests}
        records, tampering = _read(ran.stdout, nonce, set(settings["expected"]), canary_ids, set(settings["tests"]))
        note = "stopped after its time" if ran.timed_out else "out of memory" if ran.oom_killed else ""
        if not records and not note:
            note = f"no record; exit code {ran.exit_code}; {steady(ran.stderr[-300:].decode(errors='replace'))}"
        return self._verdict(settings, records, note=note, tampering=tampering)

    async def _run(
        self, problem: Problem, contents: dict[str, bytes], job: dict[str, Any], *, acquire: Acquire, seconds: float
    ) -> ExecResult:
        box = await acquire(problem.verifier.sandbox or SandboxSpec())
        try:
            await box.put_files({**contents, RUNNER: (files(__package__) / "unit_tests_runner.py").read_bytes()})
            argv = ("python3", "-I", "-P", RUNNER)
            return await box.exec(
                ExecRequest(
                    argv=argv,
                    deadline_seconds=seconds,
                    stdin=to_json(job),
                    max_output_bytes=MAX_OUTPUT_BYTES,
                    preload=PRELOAD,
                )
            )
        finally:
            await box.destroy()

    def _verdict(
        self, settings: dict[str, Any], records: dict[tuple[str, str], list[str]], *, note: str, tampering: str | None
    ) -> Verdict:
        checks = []
        for test in settings["expected"]:
            failed = [phase for phase in _PHASES if records.get((test, phase), ["missing", ""])[0] != "passed"]
            outcome, text = records.get((test, failed[0]), ["missing", note]) if failed else ["passed", ""]
            checks.append(
                Check(
                    id=test,
                    passed=not failed,
                    message=steady(f"{failed[0]} {outcome}: {text}"[:500]) if failed else "",
                )
            )
        share = sum(check.passed for check in checks) / len(checks) if checks else 0.0
        passed = bool(checks) and share == 1.0 and tampering is None
        evidence = [f"{sum(check.passed for check in checks)} of {len(checks)} expected tests passed", note]
        evidence += [f"{check.id}: {check.message}" for check in checks if not check.passed][:5]
        return Verdict(
            verifier=self.kind,
            trust="in_process",
            score=float(passed),
            passed=passed,
            checks=tuple(checks),
            components={"tests": 0.0 if tampering else share},
            evidence="\n".join(line for line in evidence if line),
            tampering=tampering,
        )


def _names(expected: list[str], file: str) -> set[str]:
    """The names of the expected tests in one file."""
    return {test.partition("::")[2] for test in expected if test.partition("::")[0] == file}


def _read(
    output: bytes, nonce: str, expected: set[str], must_fail: set[str], test_files: set[str]
) -> tuple[dict[tuple[str, str], list[str]], str | None]:
    """Records by (id, phase), and the first sign of tampering."""
    records: dict[tuple[str, str], list[str]] = {}
    for line in output.split(b"\n"):
        try:
            found, *fields = msgspec.json.decode(line, type=list[str])
        except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError):
            continue
        if found != nonce or len(fields) != 4:
            continue
        test, phase, outcome, text = fields
        known = test in expected or test in must_fail or (phase == "collect" and test in test_files)
        if not known:
            return {}, f"a record for an unexpected test {test[:80]!r}"
        if (test, phase) in records:
            return {}, f"more than one {phase[:20]!r} record for {test}"
        records[test, phase] = [outcome, text]
    for canary in sorted(must_fail):
        outcome = records.get((canary, "call"), records.get((canary, "setup"), ["missing", ""]))[0]
        if outcome == "missing" and not any(records.get((test, "call")) == ["passed", ""] for test in expected):
            continue  # nothing is claimed to have passed: a crash or a time-out, which scores 0 anyway
        if outcome != "failed":
            return records, f"a canary test that must fail {'is missing' if outcome == 'missing' else 'did not'}"
    return records, None

"""Trust `cases`: a function or program of a collected file, run on hidden inputs in a fresh box and compared out here.

`settings`: {"path": collected file, "function": name, "cases": [{"id", "arguments": [...], "expected": value}], "seconds":
limit of the whole run, "tolerance": relative, for floats}. Arguments and expected values are encoded as `values.encode` does,
which keeps tuples and exact types. Expected values never enter the box. "language" is python unless given; JavaScript, Bash and
whole programs with text in and out are described in function_cases_languages.py.

The score is 1 when every case passes, else 0: a broken function usually passes most cases, so a share would pay for nothing.
The share is in `components["cases"]`. A case without exactly one result record failed; a record for an unknown case, or two
for one case, is tampering, and the score is 0. A run that exceeds `seconds` or its box's memory is the policy's doing and
fails; only a fault of the backend raises (InfraError).
"""

from __future__ import annotations

import asyncio
import secrets
from importlib.resources import files
from typing import Any

import msgspec

from data_contracts.errors import InputError, SandboxLost
from data_contracts.protocols import ExecRequest, ExecResult, Preload, to_json
from data_contracts.records import Check, Problem, SandboxSpec, Verdict
from environments.base import Acquire, Collected, Verifier
from environments.verifiers import function_cases_languages as languages
from environments.verifiers import function_cases_programs as programs
from environments.verifiers.values import brief, show, steady

PRELOAD = Preload(options=("-P", "-S", "-s", "-B"), modules=("json", "importlib.util"))
MAX_OUTPUT_BYTES = 4 * 1024 * 1024
MAX_RECORD_BYTES = 64 * 1024
"""The runner writes no longer line; whatever is longer was forged, and is passed over unread."""
DEFAULT_SECONDS = 5.0


class FunctionCases(Verifier):
    """Grades one function by input and output."""

    kind = "function_cases"

    def check(self, problem: Problem) -> None:
        settings, where = problem.verifier.settings, "verifier.settings"
        if settings.get("path") not in problem.verifier.collect:
            raise InputError(
                "'path' is not among the collected files", field=f"{where}.path", remedy="Add it to verifier.collect"
            )
        if not settings.get("program") and not str(settings.get("function", "")).isidentifier():
            raise InputError("expected the name of a function", field=f"{where}.function", remedy="Name it")
        cases = settings.get("cases")
        whole = isinstance(cases, list) and all(
            isinstance(c, dict) and {"id", "arguments", "expected"} <= c.keys() for c in cases
        )
        if not cases or not whole or len({str(case["id"]) for case in cases}) < len(cases):
            raise InputError(
                "expected at least one case, each with its own id, arguments and an expected value",
                field=f"{where}.cases", remedy="Without a case nothing would be tested",
            )  # fmt: skip
        if any(case["id"] == "import" or not isinstance(case["id"], str) for case in cases):
            raise InputError(
                "the id of a case is a text other than 'import'", field=f"{where}.cases", remedy="Name it otherwise"
            )
        languages.check_language(settings, problem.verifier.sandbox)

    async def verify(self, problem: Problem, collected: Collected, *, acquire: Acquire, deadline_seconds: float) -> Verdict:
        settings = problem.verifier.settings
        candidate = next((artifact for artifact in collected.artifacts if artifact.name == settings["path"]), None)
        if candidate is None:
            return self._verdict(settings, {}, note=f"{settings['path']} was not collected as a regular file")
        nonce = secrets.token_hex(16)
        seconds = min(float(settings.get("seconds", DEFAULT_SECONDS)), 0.8 * deadline_seconds)
        if languages.is_program(settings):
            ran_all = await programs.run(problem, candidate.content, acquire=acquire, seconds=seconds)
            return self._summed(ran_all.checks, ran_all.messages, note=ran_all.note)
        try:
            ran = await self._run(problem, candidate.content, nonce, acquire=acquire, seconds=seconds)
        except SandboxLost:  # its text names the box, and verdicts hold only what repeats
            return self._verdict(settings, {}, note="the candidate destroyed the grading box")
        known = {case["id"] for case in settings["cases"]}
        results, tampering = await asyncio.to_thread(read_results, ran.stdout, nonce, known)
        note = "stopped after its time" if ran.timed_out else "out of memory" if ran.oom_killed else ""
        if not results and not note:
            note = f"no result; exit code {ran.exit_code}; {steady(ran.stderr[-300:].decode(errors='replace'))}"
        return await asyncio.to_thread(self._verdict, settings, results, note=note, tampering=tampering)

    async def _run(self, problem: Problem, source: bytes, nonce: str, *, acquire: Acquire, seconds: float) -> ExecResult:
        settings = problem.verifier.settings
        box = await acquire(problem.verifier.sandbox or SandboxSpec())
        try:
            harness = languages.harness(settings.get("language", "python"))
            runner = (files(__package__) / harness.source).read_bytes()
            await box.put_files({harness.path: runner, settings["path"]: source})
            job: list[dict[str, Any]] = [{"nonce": nonce, "path": settings["path"], "function": settings["function"]}]
            job += [{"id": case["id"], "arguments": case["arguments"]} for case in settings["cases"]]
            return await box.exec(
                ExecRequest(
                    argv=harness.argv,
                    deadline_seconds=seconds,
                    stdin=b"\n".join(map(to_json, job)) + b"\n",
                    max_output_bytes=MAX_OUTPUT_BYTES,
                    preload=PRELOAD if settings.get("language", "python") == "python" else None,
                )
            )
        finally:
            await box.destroy()

    def _verdict(
        self, settings: dict[str, Any], results: dict[str, list[Any]], *, note: str, tampering: str | None = None
    ) -> Verdict:
        checks, lines = [], []
        failed_import = results.get("import")
        for case in settings["cases"]:
            outcome, content = results.get(case["id"]) or failed_import or ["missing", note or "no result"]
            passed = outcome == "returned" and languages.same(settings, case["expected"], content)
            got = show(content) if outcome == "returned" else f"{_word(outcome)}: {_word(content)}"
            call = f"{settings['function']}({', '.join(map(show, case['arguments']))})"
            message = "" if passed else f"{call}: expected {show(case['expected'])}, got {got}"
            checks.append(Check(id=case["id"], passed=passed, message=message))
            lines += [message] if message else []
        return self._summed(checks, lines, note=note, tampering=tampering)

    def _summed(self, checks: list[Check], lines: list[str], *, note: str, tampering: str | None = None) -> Verdict:
        share = sum(check.passed for check in checks) / len(checks) if checks else 0.0
        passed_all = bool(checks) and share == 1.0 and tampering is None
        evidence = [f"{sum(check.passed for check in checks)} of {len(checks)} hidden cases passed", note, *lines[:5]]
        return Verdict(
            verifier=self.kind,
            trust="cases",
            score=float(passed_all),
            passed=passed_all,
            checks=tuple(checks),
            components={"cases": 0.0 if tampering else share},
            evidence="\n".join(line for line in evidence if line),
            tampering=tampering,
        )


def read_results(output: bytes, nonce: str, known: set[str]) -> tuple[dict[str, list[Any]], str | None]:
    """Result records by case id, and why they cannot be trusted (None when they can). Other output is passed over."""
    results: dict[str, list[Any]] = {}
    for line in output.split(b"\n"):
        if len(line) > MAX_RECORD_BYTES:
            continue
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            continue
        if not (isinstance(record, list) and len(record) == 4 and record[0] == nonce):
            continue
        case, outcome, content = record[1:]
        if not isinstance(case, str) or case not in known | {"import"}:
            return {}, f"a result for an unknown case {str(case)[:50]!r}"
        if case in results:
            return {}, f"more than one result for case {case}"
        results[case] = [outcome, content]
    return results, None


def _word(value: Any) -> str:
    return steady(value[:200]) if isinstance(value, str) else brief(value)

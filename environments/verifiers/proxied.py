"""Trust `proxied`: given test code, such as `check(candidate)`, in a process of its own, apart from the candidate's.

`settings`: {"path": collected file, "names": what the tests use of it, "entry_point": the one that `check` is given, "helpers":
code of the row's that the tests may use too (the functions and classes of its prompt), "tests": test code, "expected": ids,
"seconds": limit of the whole run, "in_place": whether changes that the candidate makes to its arguments are carried back,
"files": further files of the row's that the candidate may import or read}. An id is `check`, the name of a `test_` function
without parameters, or `Class.method` of a `unittest.TestCase`. `proxied_rows.describe` derives names and ids from test code.

One fresh box holds two processes of one user. The test code reaches the first over standard input only; it makes itself
undumpable before it starts the second, which never holds an assert: it verifies that it cannot open the first's memory,
environment or descriptors (where it can, nothing is graded: InfraError), then imports the candidate. Calls cross by exact
value (proxied_wire.py); objects of the candidate's own classes stay there and are never compared with anything
(proxied_tests.py). Helpers run in both processes, so a candidate that redefines one changes nothing for the tests.

A test passes with exactly one positive record, on the private channel, under the nonce that only the tests' process knows.
A test that asked the candidate for nothing fails, and so does one during which the candidate's process ended, whatever it
caught. The score is 1 when every expected test passes, else 0; the share is in `components["tests"]`.

Gaps: both processes share a kernel, a user and the limits of one box; a candidate can end or starve the tests' process, which
fails it. With `in_place` a candidate can change its arguments before the test reads them again, as it could by a plain call.
"""

from __future__ import annotations

import secrets
from importlib.resources import files
from typing import Any

from data_contracts.errors import InfraError, InputError, SandboxLost
from data_contracts.protocols import ExecRequest, ExecResult, to_json
from data_contracts.records import Check, Problem, SandboxSpec, Verdict
from environments.base import Acquire, Collected, Verifier
from environments.verifiers.function_cases import read_results
from environments.verifiers.proxied_rows import TestCode, check_tests
from environments.verifiers.values import steady

FOLDER = ".grader"
_PARTS = ("proxied_wire", "proxied_peer", "proxied_candidate", "proxied_opaque", "proxied_tests")
NEEDS = ("exec", "files", "isolation")
"""The fake backend has no isolation: a process of root's can look into any other."""
MAX_OUTPUT_BYTES = 1024 * 1024
MAX_SHOWN = 5
DEFAULT_SECONDS = 20.0


class Proxied(Verifier):
    """Grades one file by given test code that runs apart from it."""

    kind = "proxied"

    def check(self, problem: Problem) -> None:
        settings, where = problem.verifier.settings, "verifier.settings"
        if settings.get("path") not in problem.verifier.collect:
            raise InputError(
                "'path' is not among the collected files", field=f"{where}.path", remedy="Add it to verifier.collect"
            )
        if problem.verifier.trust != "proxied":
            raise InputError(
                f"found '{problem.verifier.trust}', this verifier gives 'proxied'",
                field="verifier.trust",
                remedy="Say 'proxied'",
            )
        if not isinstance(settings.get("seconds", 1.0), int | float) or not 0 < settings.get("seconds", 1.0) < 3600:
            raise InputError("expected seconds, above 0", field=f"{where}.seconds", remedy="Name the limit of the whole run")
        code = TestCode(
            tests=settings.get("tests", ""), helpers=settings.get("helpers", ""), names=tuple(settings.get("names", ())),
            expected=tuple(settings.get("expected", ())), entry_point=settings.get("entry_point"),
        )  # fmt: skip
        try:
            check_tests(code)
        except InputError as error:
            raise InputError(error.problem, field=f"{where}.{error.field}", remedy=error.remedy) from error

    async def verify(self, problem: Problem, collected: Collected, *, acquire: Acquire, deadline_seconds: float) -> Verdict:
        settings = problem.verifier.settings
        candidate = next((artifact for artifact in collected.artifacts if artifact.name == settings["path"]), None)
        if candidate is None:
            return self._verdict(settings, {}, note=f"{settings['path']} was not collected as a regular file")
        nonce = secrets.token_hex(16)
        seconds = min(float(settings.get("seconds", DEFAULT_SECONDS)), 0.8 * deadline_seconds)
        contents = {name: text.encode() for name, text in settings.get("files", {}).items()}
        contents |= {artifact.name: artifact.content for artifact in collected.artifacts}
        try:
            ran = await self._run(problem, contents, nonce, acquire=acquire, seconds=seconds)
        except SandboxLost:  # its text names the box, and verdicts hold only what repeats
            return self._verdict(settings, {}, note="the candidate destroyed the grading box")
        records, tampering = read_results(ran.stdout, nonce, {*settings["expected"], "isolation"})
        if "isolation" in records:
            raise InfraError("verifier_error", f"this box cannot keep tests and candidate apart: {records['isolation'][1]}")
        note = "stopped after its time" if ran.timed_out else "out of memory" if ran.oom_killed else ""
        if not records and not note:
            note = f"the tests' process ended without a record, exit code {ran.exit_code}"
        return self._verdict(settings, records, note=note, tampering=tampering)

    async def _run(
        self, problem: Problem, contents: dict[str, bytes], nonce: str, *, acquire: Acquire, seconds: float
    ) -> ExecResult:
        settings = problem.verifier.settings
        shipped = files(__package__)
        ours = {f"{FOLDER}/environments/verifiers/{name}.py": (shipped / f"{name}.py").read_bytes() for name in _PARTS}
        ours[f"{FOLDER}/__main__.py"] = (shipped / "proxied_runner.py").read_bytes()
        job: dict[str, Any] = {
            "nonce": nonce, "path": settings["path"], "names": settings["names"], "entry_point": settings.get("entry_point"),
            "helpers": settings.get("helpers", ""), "tests": settings["tests"], "expected": settings["expected"],
            "in_place": bool(settings.get("in_place", False)),
        }  # fmt: skip
        box = await acquire(problem.verifier.sandbox or SandboxSpec(needs=NEEDS))
        try:
            await box.put_files(contents | ours)
            return await box.exec(
                ExecRequest(
                    argv=("python3", "-I", "-P", FOLDER),
                    deadline_seconds=seconds,
                    stdin=to_json(job),
                    max_output_bytes=MAX_OUTPUT_BYTES,
                )
            )
        finally:
            await box.destroy()

    def _verdict(
        self, settings: dict[str, Any], records: dict[str, list[Any]], *, note: str, tampering: str | None = None
    ) -> Verdict:
        failed = records.get("import")
        checks = []
        for test in settings["expected"]:
            outcome, text = records.get(test) or failed or ["missing", note or "no record"]
            passed = outcome == "passed" and failed is None and tampering is None
            checks.append(Check(id=test, passed=passed, message="" if passed else steady(str(text))))
        share = sum(check.passed for check in checks) / len(checks) if checks else 0.0
        lines = [f"{sum(check.passed for check in checks)} of {len(checks)} tests passed (proxied)", note, tampering or ""]
        reasons = dict.fromkeys(f"{check.message}" for check in checks if not check.passed)
        lines += [f"{next(c.id for c in checks if c.message == reason)}: {reason}" for reason in list(reasons)[:MAX_SHOWN]]
        passed_all = bool(checks) and share == 1.0 and tampering is None
        return Verdict(
            verifier=self.kind,
            trust="proxied",
            score=float(passed_all),
            passed=passed_all,
            checks=tuple(checks),
            components={"tests": share},
            evidence="\n".join(line for line in lines if line),
            tampering=tampering,
        )

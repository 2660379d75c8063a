"""Program cases of `function_cases`: one process a case, all in one fresh box, text in and text out, compared out here.

The limit of seconds is that of all cases together. What a case leaves in the box (files, background processes) is there for
the next one; no expected value is, so nothing is gained by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from data_contracts.errors import SandboxLost
from data_contracts.protocols import ExecRequest, ExecResult
from data_contracts.records import Check, Problem, SandboxSpec
from environments.base import Acquire
from environments.verifiers import function_cases_languages as languages
from environments.verifiers.values import brief, steady


@dataclass
class Ran:
    """One check a case, in their order, and the messages of those that failed."""

    checks: list[Check] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    note: str = ""

    def add(self, case: dict[str, Any], message: str) -> None:
        self.checks.append(Check(id=case["id"], passed=not message, message=message))
        self.messages += [message] if message else []


async def run(problem: Problem, source: bytes, *, acquire: Acquire, seconds: float) -> Ran:
    """Raises InfraError for backend faults only."""
    settings, left, done = problem.verifier.settings, seconds, Ran()
    box = await acquire(problem.verifier.sandbox or SandboxSpec())
    try:
        await box.put_files({settings["path"]: source})
        for case in settings["cases"]:
            found = "stopped after its time"
            if left > 0:
                request = ExecRequest(
                    argv=languages.program(settings, case["arguments"]),
                    deadline_seconds=left,
                    stdin=str(case.get("stdin", "")).encode(),
                    max_output_bytes=languages.MAX_CASE_OUTPUT,
                )
                box.rewind()  # when a case starts does not depend on how long the others took
                ran = await box.exec(request)
                left -= ran.wall_seconds
                found = _unlike(settings, case, ran)
            done.add(case, f"{_called(settings, case)}: {found}" if found else "")
    except SandboxLost:  # its text names the box, and verdicts hold only what repeats
        done.note = "the candidate destroyed the grading box"
        for case in settings["cases"][len(done.checks) :]:
            done.add(case, done.note)
    finally:
        await box.destroy()
    return done


def _unlike(settings: dict[str, Any], case: dict[str, Any], ran: ExecResult) -> str:
    """Why a run is not what the case expects; empty when it is."""
    if ran.timed_out:
        return "stopped after its time"
    if ran.oom_killed:
        return "out of memory"
    wanted = case.get("exit_code", 0)
    if ran.exit_code != wanted:
        errors = steady(ran.stderr[-200:].decode(errors="replace")).strip()
        return f"exit code {ran.exit_code}, expected {wanted}" + (f": {errors}" if errors else "")
    if ran.stdout_truncated:
        return f"more than {languages.MAX_CASE_OUTPUT} bytes of output"
    if languages.same_output(settings, case["expected"], ran.stdout):
        return ""
    return f"expected {brief(case['expected'])}, got {brief(ran.stdout[:400].decode(errors='replace'))}"


def _called(settings: dict[str, Any], case: dict[str, Any]) -> str:
    """How a case was called, for people."""
    words = " ".join([str(settings.get("function") or settings["path"]), *map(str, case["arguments"])])
    return words[:200] + (f" < {brief(case['stdin'])}" if case.get("stdin") else "")

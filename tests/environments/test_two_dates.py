"""The same attempts, graded in two processes whose dates are a year and a half apart: the same bytes of verdict.

A test cannot move the kernel's clock, which boxes see moved by infra/box_view.c; so it moves the grader's own, and demands that
what candidates saw of the time is the declared date, not only the same in both runs.
"""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from data_contracts.records import Verdict
from environments.registry import domain_names


@pytest.mark.parametrize("backend", ["bubblewrap", "docker"])
def test_the_same_attempts_on_two_dates_give_the_same_bytes(backend: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(f"{backend}_backend")  # set up, or skipped
    outputs = []
    for days in ("0", "547"):
        command = [sys.executable, "-m", "tests.environments.two_dates", backend, days]
        done = subprocess.run(command, capture_output=True, check=False, timeout=300, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr.decode()
        outputs.append(done.stdout.decode().splitlines())
    assert outputs[0] == outputs[1]
    verdicts = [msgspec.json.decode(line, type=Verdict) for line in outputs[0] if line != "null"]
    assert {verdict.verifier for verdict in verdicts} >= {"exact_answer", "function_cases", "proxied", "unit_tests"}
    assert sum(verdict.score == 1.0 for verdict in verdicts) >= len(domain_names())  # the oracles
    assert sum("2025-01-15" in verdict.evidence for verdict in verdicts) >= 6, "\n".join(outputs[0])

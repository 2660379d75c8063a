"""A suite that imports the candidate: only exactly the expected ids count, and tampering with pytest is noticed."""

# ruff: noqa: E501  the attempts are one a line

import hashlib
from typing import Any

import pytest

from data_contracts.protocols import SandboxBackend
from data_contracts.records import Artifact, EnvironmentSpec, Message, Problem, Verdict, VerifierSpec
from environments.base import Collected
from environments.verifiers.unit_tests import UnitTests

SUITE = "import pytest\nfrom app import add\n\ndef test_add():\n    assert add(2, 3) == 5\n\n@pytest.mark.parametrize('x', [1, 2])\ndef test_zero(x):\n    assert add(x, 0) == x\n"
IDS = ["test_app.py::test_add", "test_app.py::test_zero[1]", "test_app.py::test_zero[2]"]
GOOD = {"app.py": "def add(a, b):\n    return a + b\n"}
BAD = "def add(a, b):\n    return 7\n"


def problem(**settings: Any) -> Problem:
    return Problem(
        id="d/train/1",
        domain="d",
        split="train",
        difficulty=0.5,
        messages=(Message(role="user", content="?"),),
        environment=EnvironmentSpec(kind="d"),
        verifier=VerifierSpec(
            kind="unit_tests",
            trust="in_process",
            settings={"tests": {"test_app.py": SUITE}, "expected": IDS, "seconds": 15.0, **settings},
        ),
    )


async def grade(backend: SandboxBackend, files: dict[str, str], **settings: Any) -> Verdict:
    artifacts = tuple(
        Artifact(name=n, sha256=hashlib.sha256(s.encode()).hexdigest(), size=len(s), content=s.encode())
        for n, s in files.items()
    )
    return await UnitTests().verify(
        problem(**settings), Collected(artifacts=artifacts), acquire=backend.acquire, deadline_seconds=60
    )


async def test_a_right_candidate_passes_and_a_wrong_one_fails_by_name(bubblewrap_backend: SandboxBackend) -> None:
    verdict = await grade(bubblewrap_backend, GOOD)
    assert (verdict.score, verdict.trust, verdict.tampering) == (1.0, "in_process", None), verdict.evidence
    assert [(c.id, c.passed) for c in verdict.checks] == [(test, True) for test in IDS]
    verdict = await grade(bubblewrap_backend, {"app.py": BAD})
    assert (verdict.score, verdict.tampering) == (0.0, None)
    assert "assert 7 == 5" in verdict.checks[0].message


ATTEMPTS: dict[str, dict[str, str]] = {
    "exits at import": {"app.py": "import os\nprint('3 passed')\nos._exit(0)\n"},
    "system exit": {"app.py": "raise SystemExit(0)\n"},
    "pytest.exit": {"app.py": "import pytest\npytest.exit('done', returncode=0)\n"},
    "replaces the tests": {"app.py": BAD, "test_app.py": "def test_add(): pass\n"},
    "conftest": {"app.py": BAD, "conftest.py": "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem): return True\n"},
    "ini": {"app.py": BAD, "pytest.ini": "[pytest]\naddopts = --co\n", "pyproject.toml": "[tool.pytest.ini_options]\naddopts='-k nothing'\n"},
    "shadows pytest": {"app.py": BAD, "pytest.py": "def main(*a, **k): return 0\n", "json.py": "raise SystemExit\n", "sitecustomize.py": "raise SystemExit\n"},
    "skips": {"app.py": "import pytest\ndef add(a, b):\n    pytest.skip('no')\n"},
    "xfails": {"app.py": "import pytest\ndef add(a, b):\n    pytest.xfail('no')\n"},
    "always equal": {"app.py": "import builtins\nclass E(int):\n    def __eq__(self, o): return False\ndef add(a, b): return E(0)\n"},
    "hangs": {"app.py": "while True: pass\n"},
}  # fmt: skip
TAMPERING = {
    "patches outcomes": "import pytest, _pytest.reports\nfor R in (_pytest.reports.TestReport,):\n    f = R.from_item_and_call.__func__\n    def g(cls, item, call, f=f):\n        r = f(cls, item, call)\n        r.outcome = 'passed'\n        return r\n    R.from_item_and_call = classmethod(g)\n",
    "patches the test call": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n",
    "writes records twice": "import sys, os, gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Recorder':\n        for t in ('test_app.py::test_add',):\n            for p in ('setup', 'call', 'teardown'):\n                o._send(t, p, 'passed', '')\n",
}  # fmt: skip


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_attempts_score_zero(bubblewrap_backend: SandboxBackend, name: str) -> None:
    verdict = await grade(bubblewrap_backend, ATTEMPTS[name], seconds=6.0)
    assert verdict.score == 0.0
    assert [check.id for check in verdict.checks] == IDS


@pytest.mark.parametrize("name", TAMPERING)
async def test_tampering_is_noticed_even_when_the_candidate_is_right(bubblewrap_backend: SandboxBackend, name: str) -> None:
    verdict = await grade(bubblewrap_backend, {"app.py": TAMPERING[name] + GOOD["app.py"]})
    assert verdict.score == 0.0
    assert verdict.tampering, verdict.evidence


async def test_a_missing_expected_test_failed(bubblewrap_backend: SandboxBackend) -> None:
    verdict = await grade(bubblewrap_backend, GOOD, expected=[*IDS, "test_app.py::test_gone"])
    assert verdict.score == 0.0
    assert "missing" in verdict.checks[-1].message

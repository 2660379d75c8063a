"""Grading without a model: files and answers, bad rows beside good ones, and outcomes that are nobody's score."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from data_contracts.errors import InfraError, InputError, MissingRequirement, SandboxLost
from data_contracts.protocols import SandboxBackend
from data_contracts.records import Problem, SandboxSpec
from environments.domains.mutations import source_of
from environments.registry import domain
from environments.sandbox.fake import FakeBackend
from tasks.grade import Boxes, Graded, Played, Solution, grade, grade_all
from tasks.grade_inputs import find_problems, read_calls, read_lines, read_solution, read_solutions, require_problem
from tasks.sources import read_each

ADD = next(domain("arithmetic").problems("train", seed=0))
REPAIR = next(domain("code_repair").problems("train", seed=0))
EXPECTED = ADD.verifier.settings["expected"]
GOOD = source_of(REPAIR.metadata["function"]).encode()
CANCEL = next(p for p in domain("orders").problems("train", seed=0) if p.metadata["case"] == "cancel")
ASKED = next(p for p in domain("orders").problems("train", seed=0) if p.metadata["case"] == "last_day")
KNOWN = {ADD.id: ADD, REPAIR.id: REPAIR, CANCEL.id: CANCEL, ASKED.id: ASKED}


class Unusable(FakeBackend):
    """A backend of a host that lacks what it needs."""

    async def check(self) -> None:
        raise MissingRequirement("no sandbox here; run: something")


class Broken(FakeBackend):
    """A backend whose boxes raise."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def _acquire(self, spec: SandboxSpec) -> Any:
        raise self.error


async def test_an_answer_that_needs_no_box_needs_no_sandbox() -> None:
    boxes = Boxes(Unusable())
    assert (await grade(ADD, EXPECTED, backend=boxes)).reward == 1.0
    assert (await grade(ADD, f"I think {EXPECTED}", backend=boxes)).reward == 0.5
    assert (await grade(ADD, "", backend=boxes)).reward == 0.0
    with pytest.raises(MissingRequirement, match="run: something"):
        await grade(REPAIR, {"solution.py": GOOD}, backend=boxes)


async def test_files_and_answers_of_a_problem_with_a_box(bubblewrap_backend: SandboxBackend) -> None:
    right = await grade(REPAIR, {"solution.py": GOOD}, backend=bubblewrap_backend)
    assert (right.outcome, right.reward, right.trust) == ("scored", 1.0, "cases")
    assert all(test.passed for test in right.tests)
    broken = REPAIR.environment.settings["broken"].encode()
    assert (await grade(REPAIR, {"solution.py": broken}, backend=bubblewrap_backend)).reward == 0.0
    assert (await grade(REPAIR, "Done.", backend=bubblewrap_backend)).reward == 0.0  # the untouched file
    large = await grade(REPAIR, {"solution.py": b"#" * 1_000_000}, backend=bubblewrap_backend)
    assert (large.reward, "was not collected" in large.evidence) == (0.0, True)
    with pytest.raises(InputError, match="collects"):
        await grade(REPAIR, {"../solution.py": GOOD}, backend=bubblewrap_backend)
    with pytest.raises(InputError, match="takes an answer"):
        await grade(ADD, {"solution.py": GOOD}, backend=bubblewrap_backend)


@pytest.mark.parametrize(
    ("error", "outcome", "reward"),
    [
        (InfraError("sandbox_backend", "the engine is gone"), "infra_failure", None),
        (SandboxLost("out of memory"), "policy_failure", 0.0),
        (ZeroDivisionError("a bug"), "infra_failure", None),
    ],
)
async def test_three_outcomes(error: Exception, outcome: str, reward: float | None) -> None:
    spec = msgspec.structs.replace(REPAIR.verifier, sandbox=SandboxSpec())
    posed = msgspec.structs.replace(REPAIR, verifier=spec)
    row = await grade(posed, {"solution.py": GOOD}, backend=Broken(error))
    if isinstance(error, SandboxLost):
        assert row.reward == 0.0  # acquiring is not the policy's, yet a lost box never earns anything
    else:
        assert (row.outcome, row.reward) == (outcome, reward)
        assert str(error) in row.evidence


def rows(*lines: Any) -> list[bytes]:
    return [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]


BAD: list[tuple[Any, str | None, str]] = [
    ({"problem_id": "nope", "solution": "x"}, "problem_id", "there is no problem 'nope'"),
    ({"problem_id": 5, "solution": "x"}, "problem_id", "expected `str`"),
    ({"problem_id": ADD.id}, "solution", "missing"),
    ({"problem_id": ADD.id, "solution": "5", "note": 1}, "note", "unknown field"),
    ({"problem_id": REPAIR.id, "solution": {"other.py": "x"}}, "solution", "is not a file that problem"),
    ({"problem_id": ADD.id, "solution": {"a.py": "x"}}, "solution", "takes an answer"),
    ({"problem_id": REPAIR.id, "solution": {"solution.py": 5}}, "solution", "expected `str`"),
    ({"problem_id": ADD.id, "solution": [{"name": "add", "arguments": {}}]}, "solution", "has no tools to call"),
    ({"problem_id": CANCEL.id, "solution": [{"name": "cancel_order"}]}, "arguments", "missing required field `arguments`"),
    (
        {"problem_id": CANCEL.id, "solution": [{"name": "x", "arguments": 5}]},
        "solution[0].arguments",
        "expected `str | object`",
    ),
    ({"problem_id": CANCEL.id, "solution": "done", "answer": "done"}, "answer", "not a list of calls"),
    (["not", "an", "object"], None, "expected `object`"),
    (b"not json", None, "is not JSON"),
    (b'{"problem_id": "\xff"}', None, "is not JSON"),
    (b'{"problem_id": ' + b"[" * 5000, "problem_id", "expected `str`"),
]


@pytest.mark.parametrize(("line", "field", "words"), BAD)
def test_a_bad_row_is_named_and_the_others_are_read(line: Any, field: str | None, words: str) -> None:
    lines = rows({"problem_id": ADD.id, "solution": "5"}, b"", line, {"problem_id": REPAIR.id, "solution": "x = 1"})
    read = list(read_solutions("s.jsonl", lines, KNOWN))
    assert read[0] == (ADD, "5")
    assert read[2] == (REPAIR, {"solution.py": b"x = 1"})
    bad = read[1]
    assert isinstance(bad, Graded)
    assert (bad.outcome, bad.reward) == ("invalid", None)
    assert bad.evidence.startswith("s.jsonl, row 3" + (f", field '{field}" if field else ""))
    assert words in bad.evidence


async def test_a_batch_keeps_its_order_and_its_bad_rows() -> None:
    lines = rows(*({"problem_id": ADD.id, "solution": EXPECTED if n % 2 else "no"} for n in range(50)), b"x")
    jobs = read_solutions("s.jsonl", lines, KNOWN)
    done = [row async for row in grade_all(jobs, backend=Boxes(Unusable()), concurrency=4)]
    assert [row.reward for row in done[:50]] == [0.0, 1.0] * 25
    assert [row.outcome for row in done[50:]] == ["invalid"]


async def test_a_batch_runs_so_many_at_once_and_no_more() -> None:
    class Counting(FakeBackend):
        now = most = 0

        async def _acquire(self, spec: SandboxSpec) -> Any:
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                raise InfraError("sandbox_backend", "none")
            finally:
                self.now -= 1

    posed = msgspec.structs.replace(REPAIR, verifier=msgspec.structs.replace(REPAIR.verifier, sandbox=SandboxSpec()))
    backend = Counting()
    jobs: Sequence[tuple[Problem, Solution] | Graded] = [(posed, {"solution.py": GOOD})] * 20
    done = [row async for row in grade_all(jobs, backend=backend, concurrency=3)]
    assert {row.outcome for row in done} == {"infra_failure"}
    assert backend.most <= 3


def test_problems_are_found_by_their_id() -> None:
    wanted = [*islice(domain("arithmetic").problems("heldout", seed=0, level="three_digit"), 2)]
    assert find_problems(domain("arithmetic"), [p.id for p in wanted]) == {p.id: p for p in wanted}
    with pytest.raises(InputError, match="An id looks like"):
        require_problem(domain("echo"), "echo/train/nothing")


def test_solutions_from_the_disk(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(GOOD)
    assert read_solution(tmp_path / "mine.py", REPAIR) == {"solution.py": GOOD}
    with pytest.raises(InputError, match=r"Expected solution\.py"):
        read_solution(tmp_path, REPAIR)
    (tmp_path / "solution.py").symlink_to(tmp_path / "mine.py")
    with pytest.raises(InputError, match="as regular files"):
        read_solution(tmp_path, REPAIR)
    (tmp_path / "answer.txt").write_text("5")
    assert read_solution(tmp_path / "answer.txt", ADD) == "5"
    with pytest.raises(InputError, match="Check the path"):
        read_solution(tmp_path / "none", ADD)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="has no rows"):
        read_lines(tmp_path / "empty.jsonl")


def test_a_problems_file_with_bad_rows_gives_the_good_ones(tmp_path: Path) -> None:
    good = msgspec.json.encode(ADD)
    other = msgspec.json.encode(msgspec.structs.replace(REPAIR, id="code_repair/train/other", domain="nowhere"))
    file = tmp_path / "p.jsonl"
    file.write_bytes(b"\n".join([good, b"{", good, other, msgspec.json.encode(REPAIR)]))
    found, wrong = read_each(str(file), domains=("arithmetic", "code_repair"))
    assert found == {ADD.id: ADD, REPAIR.id: REPAIR}
    assert [error.row for error in wrong] == [2, 3, 4]
    assert all(error.remedy for error in wrong)


def identify(problem: Problem) -> dict[str, Any]:
    customer = problem.metadata["customer"]
    return {"name": "identify_customer", "arguments": {"email": customer["email"], "postcode": customer["postcode"]}}


def look(problem: Problem) -> dict[str, Any]:
    return {"name": "get_order", "arguments": {"order_id": problem.metadata["orders"][0]}}


async def test_tool_calls_are_played_and_graded_by_what_they_did() -> None:
    writes = CANCEL.metadata["writes"]
    raw = [{"name": write["name"], "arguments": json.dumps(write["arguments"])} for write in writes]
    broken = {"name": "cancel_order", "arguments": "{"}
    right = ASKED.metadata["answer"]
    solutions: list[tuple[Problem, list[dict[str, Any]], str | None]] = [
        (CANCEL, [identify(CANCEL), *writes], None),
        (CANCEL, [broken, identify(CANCEL), *raw], "Done."),
        (CANCEL, writes, None),
        (CANCEL, [identify(CANCEL), *reversed(writes)], None),
        (CANCEL, [], None),
        (CANCEL, [identify(CANCEL)] * 21, None),
        (ASKED, [identify(ASKED), look(ASKED)], right),
        (ASKED, [identify(ASKED), look(ASKED)], None),
        (ASKED, [look(ASKED)], right),
        (ASKED, [], "done"),
    ]
    lines = rows(*({"problem_id": p.id, "solution": made, "answer": answer} for p, made, answer in solutions))
    jobs = list(read_solutions("s.jsonl", lines, KNOWN))
    done = [row async for row in grade_all(jobs, backend=Boxes(Unusable()), concurrency=4)]
    assert [row.reward for row in done] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert [row.outcome for row in done] == ["scored"] * 5 + ["policy_failure"] + ["scored"] * 4
    assert "tool_budget" in done[5].evidence
    assert "rule identified_first is broken" in done[2].evidence
    assert "rule refunds_are_owed is broken" in done[3].evidence
    assert "refunds: missing" in done[4].evidence
    assert {test.id for test in done[0].tests} >= {"state/orders", "rules/one_voucher"}
    with pytest.raises(InputError, match="no tools to call"):
        await grade(ADD, Played(calls=(("add", "{}"),)), backend=Boxes(Unusable()))


def test_calls_from_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    file.write_text(json.dumps([identify(CANCEL), {"name": "x", "arguments": "{"}]))
    assert read_calls(file, CANCEL, answer="ok") == Played(
        calls=(("identify_customer", json.dumps(identify(CANCEL)["arguments"], separators=(",", ":"))), ("x", "{")), answer="ok"
    )
    for text, words in (("{}", "Expected `array`"), ("[", "truncated"), ('[{"name": 1, "arguments": ""}]', r"name")):
        file.write_text(text)
        with pytest.raises(InputError, match=words):
            read_calls(file, CANCEL, answer=None)
    with pytest.raises(InputError, match="Check the path"):
        read_calls(tmp_path / "none", CANCEL, answer=None)

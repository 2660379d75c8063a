"""`bessemer grade` as people and scripts call it, and the same bytes on two dates."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from data_contracts.records import EnvironmentSpec, Problem, VerifierSpec
from environments.domains.mutations import source_of
from environments.registry import domain
from flows import cli

ADD = next(domain("arithmetic").problems("train", seed=0))
REPAIR = next(domain("code_repair").problems("train", seed=0))
EXPECTED = ADD.verifier.settings["expected"]
GOOD = source_of(REPAIR.metadata["function"])


def grade(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["grade", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_one_answer_with_its_evidence(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = grade(capsys, "--domain", "arithmetic", "--problem", ADD.id, "--answer", f"It is {EXPECTED}")
    assert code == 0
    assert all(words in out for words in ("0.500", "cases", "not strict", f"expected '{EXPECTED}'"))
    code, out, _ = grade(capsys, "--domain", "arithmetic", "--problem", ADD.id, "--answer", EXPECTED, "--json")
    row = json.loads(out)
    assert list(row) == ["problem_id", "outcome", "reward", "trust", "tests", "evidence"]
    assert (row["problem_id"], row["outcome"], row["reward"], row["trust"]) == (ADD.id, "scored", 1.0, "cases")


def test_one_file_and_one_folder(
    home: Path, tmp_path: Path, bubblewrap_backend: object, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "solution.py").write_text(GOOD)
    for place in (tmp_path / "solution.py", tmp_path):
        code, out, _ = grade(capsys, "-d", "code_repair", "--problem", REPAIR.id, "--solution", str(place), "--json")
        assert (code, json.loads(out)["reward"]) == (0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "say what to grade"),
        (("--problem", ADD.id), "one of --solution and --answer"),
        (("--problem", ADD.id, "--answer", "1", "--solution", "x"), "one of --solution and --answer"),
        (("--problem", ADD.id, "--calls", "x", "--solution", "x"), "one of --solution and --answer"),
        (("--problem", ADD.id, "--calls", "none.json"), "none.json: cannot be read"),
        (("--solutions", "x", "--calls", "x"), "grades a batch"),
        (("--problem", "arithmetic/train/none", "--answer", "1"), "makes no problem"),
        (("--problem", "nowhere/train/1", "--answer", "1"), "unknown domain 'nowhere'"),
        (("--solutions", "none.jsonl", "--domain", "echo"), "none.jsonl: cannot be read"),
        (("--solutions", "x", "--answer", "1"), "grades a batch"),
        (("--problem", ADD.id, "--answer", "1", "--set", "stack.sandbox.backend=dcoker"), "stack.sandbox.backend"),
    ],
)
def test_a_mistake_is_one_line(home: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    code, out, err = grade(capsys, *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert words in err


def test_tool_calls_of_a_stateful_problem(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = next(p for p in domain("orders").problems("heldout", seed=0) if p.metadata["case"] == "voucher")
    customer = problem.metadata["customer"]
    identify = {"name": "identify_customer", "arguments": {"email": customer["email"], "postcode": customer["postcode"]}}
    (tmp_path / "calls.json").write_text(json.dumps([identify, *problem.metadata["writes"]]))
    asked = ("--problem", problem.id, "--calls", str(tmp_path / "calls.json"))
    code, out, _ = grade(capsys, *asked, "--answer", "Done.", "--json")
    assert (code, json.loads(out)["reward"]) == (0, 1.0)
    file = solutions(
        tmp_path,
        {"problem_id": problem.id, "solution": [identify, *problem.metadata["writes"]], "answer": "Done."},
        {"problem_id": problem.id, "solution": problem.metadata["writes"] * 2},
        {"problem_id": problem.id, "solution": "Done."},
    )
    code, out, _ = grade(capsys, "--domain", "orders", "--solutions", str(file), "--json")
    assert (code, [json.loads(line)["reward"] for line in out.splitlines()]) == (0, [1.0, 0.0, 0.0])
    (tmp_path / "calls.json").write_text(json.dumps(problem.metadata["writes"] * 2))
    code, out, _ = grade(capsys, *asked)
    assert code == 0
    assert all(words in out for words in ("0.000", "one_voucher", "vouchers: not expected", "identified_first"))


def solutions(folder: Path, *rows: object) -> Path:
    file = folder / "solutions.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_a_batch_grades_the_good_rows_and_names_the_bad_ones(
    home: Path, tmp_path: Path, bubblewrap_backend: object, capsys: pytest.CaptureFixture[str]
) -> None:
    file = solutions(
        tmp_path,
        {"problem_id": REPAIR.id, "solution": GOOD},
        {"problem_id": REPAIR.id, "solution": {"solution.py": "x = 1"}},
        {"problem_id": REPAIR.id, "solution": {"x.py": ""}},
        "{",
        {"problem_id": "code_repair/train/none", "solution": ""},
    )
    code, out, err = grade(capsys, "--domain", "code_repair", "--solutions", str(file), "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 2
    assert [(row["outcome"], row["reward"]) for row in rows] == [("scored", 1.0), ("scored", 0.0), *[("invalid", None)] * 3]
    assert [f"row {number}" in line for number, line in zip((3, 4, 5), err.splitlines(), strict=True)] == [True] * 3
    code, out, err = grade(capsys, "--domain", "code_repair", "--solutions", str(file))
    assert (code, len(out.splitlines())) == (2, 2)
    assert "2 scored, 3 invalid; mean reward 0.500, 1 with all of it" in err


FORMULA = Problem(
    id="arithmetic/train/formula",
    domain="arithmetic",
    split="train",
    difficulty=0.5,
    messages=ADD.messages,
    environment=EnvironmentSpec(kind="arithmetic"),
    verifier=VerifierSpec(
        kind="exact_answer", settings={"rule": "symbolic", "expected": "(x+1)^2", "weights": {"correct": 1.0}}
    ),
)
DATED = """
import sys, time
real, ns = time.time, time.time_ns
time.time = lambda: real() + {days} * 86400
time.time_ns = lambda: ns() + {days} * 86400 * 10**9
from flows.cli import main
main(sys.argv[1:])
"""


def test_a_verdict_on_two_dates_has_the_same_bytes(tmp_path: Path, bubblewrap_backend: object) -> None:
    """Two processes a year and a half apart, as the grader sees it: nothing of date, process, box or nonce is in a verdict.

    What a candidate sees of the time is in tests/environments/test_two_dates.py.
    """
    problems = tmp_path / "problems.jsonl"
    problems.write_bytes(b"\n".join(msgspec.json.encode(problem) for problem in (ADD, REPAIR, FORMULA)))
    file = solutions(
        tmp_path,
        {"problem_id": ADD.id, "solution": EXPECTED},
        {"problem_id": ADD.id, "solution": "no"},
        {"problem_id": REPAIR.id, "solution": GOOD},
        {"problem_id": REPAIR.id, "solution": "def broken("},
        {"problem_id": REPAIR.id, "solution": "import os\nos._exit(0)\n"},
        {"problem_id": FORMULA.id, "solution": "x^2 + 2x + 1"},
        {"problem_id": FORMULA.id, "solution": "x^2 + 2x"},
        {"problem_id": FORMULA.id, "solution": "9^9^9^9"},
    )
    outputs = []
    for days in (0, 547):
        command = [sys.executable, "-c", DATED.format(days=days), "--home", str(tmp_path / "home"), "grade", "--json"]
        command += ["--problems", str(problems), "--solutions", str(file)]
        done = subprocess.run(command, capture_output=True, check=False, timeout=300, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr.decode()
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert [json.loads(line)["reward"] for line in outputs[0].splitlines()] == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]

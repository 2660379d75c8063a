"""The table of corrupted inputs: what is wrong, and the exact message a user gets. `python -m tests.tasks.bad_inputs` writes
docs/results/bad-input.md; a test keeps that page equal to what the code says."""

from __future__ import annotations

import io
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from data_contracts import gate, quarantine, tables
from data_contracts.errors import InputError
from data_contracts.protocols import to_json
from tasks.sources import read_sources
from tasks.trajectories import read_trajectories
from tests.data_contracts.samples import batch, episode, problem, score

PAGE = Path(__file__).parents[2] / "docs" / "results" / "bad-input.md"
DOMAINS = ("arithmetic", "calculator", "code_repair", "echo")


@dataclass(frozen=True)
class Case:
    """`data` is written as `file` and read by `read`; `row` and `field` are what the error must carry."""

    name: str
    file: str
    data: bytes
    row: int | None
    field: str | None
    read: Callable[[str], object] = lambda url: read_sources([url], domains=DOMAINS)


def row(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A valid row as JSON builtins; a change to None removes the field."""
    values = json.loads(to_json(problem(number))) | changes
    return {name: value for name, value in values.items() if value is not None}


def lines(*rows: dict[str, Any] | str) -> bytes:
    return "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows).encode()


def flat(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: json.dumps(v) if isinstance(v, (list, dict)) else v for name, v in one.items()} for one in rows]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def comma(*cells: str) -> str:
    return ",".join('"' + cell.replace('"', '""') + '"' for cell in cells) + "\r\n"


def csv_file(rows: list[dict[str, Any]]) -> bytes:
    return "".join([comma(*rows[0]), *(comma(*(str(cell) for cell in one.values())) for one in rows)]).encode()


def _scores(url: str) -> None:
    scores = tables.read_scores_table(Path(url).read_bytes(), file=url)
    quarantine.decide(gate.check_scores(scores), groups={s.group_id for s in scores}, file=url)


def _episodes(url: str) -> None:
    episodes = tables.read_group(Path(url).read_bytes(), file=url)
    quarantine.decide(gate.check_group(episodes), groups={e.group_id for e in episodes}, file=url)


def _column(data: bytes, name: str, values: list[Any]) -> bytes:
    table = pq.read_table(io.BytesIO(data))
    sink = io.BytesIO()
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, pa.array(values)), sink)
    return sink.getvalue()


def _with(**settings: Any) -> dict[str, Any]:
    graded = row(0)["verifier"]
    return graded | {"settings": graded["settings"] | settings}


def cases() -> list[Case]:
    one, graded = episode(), row(0)["verifier"]
    deep = lines(row(0)).replace(b'"metadata": {}', b'"metadata": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}")
    caseless = {"kind": "function_cases", "collect": ["a.py"], "settings": {"path": "a.py", "function": "f", "cases": []}}
    mayfly = {"kind": "arithmetic", "sandbox": {"limits": {"lifetime_seconds": 10.0}}}
    nan = (*one.logprobs_T[:-1], math.nan)
    return [
        Case("missing field", "p.jsonl", lines(row(0), row(1, messages=None)), 2, "messages"),
        Case("missing nested field", "p.jsonl", lines(row(0, verifier={"trust": "cases"})), 1, "verifier.kind"),
        Case("wrong type", "p.jsonl", lines(row(0, difficulty="hard")), 1, "difficulty"),
        Case(
            "wrong nested type", "p.jsonl", lines(row(0, messages=[{"role": "user", "content": 3}])), 1, "messages[0].content"
        ),
        Case("unknown role", "p.jsonl", lines(row(0, messages=[{"role": "robot", "content": "x"}])), 1, "messages[0].role"),
        Case("misspelt field", "p.jsonl", lines(row(0, diffculty=1.0)), 1, "diffculty"),
        Case("duplicate id", "p.jsonl", lines(row(0), row(1), row(0)), 3, "id"),
        Case("NaN", "p.jsonl", lines(row(0), row(1, difficulty=math.nan)), 2, "difficulty"),
        Case("NaN deep inside", "p.jsonl", lines(row(0, metadata={"a": [1, math.inf]})), 1, "metadata.a[1]"),
        Case("unknown domain", "p.jsonl", lines(row(0, domain="arithmetc", id="arithmetc/train/0")), 1, "domain"),
        Case("id of another split", "p.jsonl", lines(row(0, split="heldout")), 1, "id"),
        Case("id that leaves its folder", "p.jsonl", lines(row(0, id="arithmetic/train/../../x")), 1, "id"),
        Case("id with a line end", "p.jsonl", lines(row(0, id="arithmetic/train/a\nb")), 1, "id"),
        Case("nested without end", "p.jsonl", deep, 1, None),
        Case("number beyond any", "p.jsonl", lines(row(0, budgets={"max_turns": 10**30})), 1, "budgets"),
        Case("unknown verifier", "p.jsonl", lines(row(0, verifier={"kind": "exact_anwser"})), 1, "verifier.kind"),
        Case("code to import", "p.jsonl", lines(row(0, environment={"kind": "antigravity:x"})), 1, "environment.kind"),
        Case("verifier to import", "p.jsonl", lines(row(0, verifier={"kind": "antigravity:x"})), 1, "verifier.kind"),
        Case("collected path", "p.jsonl", lines(row(0, verifier=graded | {"collect": ["../x"]})), 1, "verifier.collect"),
        Case("empty expected answer", "p.jsonl", lines(row(0, verifier=_with(expected=""))), 1, "verifier.settings.expected"),
        Case(
            "misspelt weight", "p.jsonl", lines(row(0, verifier=_with(weights={"corect": 1}))), 1, "verifier.settings.weights"
        ),
        Case(
            "weights above 1", "p.jsonl", lines(row(0, verifier=_with(weights={"correct": 5}))), 1, "verifier.settings.weights"
        ),
        Case("no test case", "p.jsonl", lines(row(0, verifier=caseless)), 1, "verifier.settings.cases"),
        Case("box ends before the policy's time", "p.jsonl", lines(row(0, environment=mayfly)), 1, "budgets"),
        Case("empty prompt", "p.jsonl", lines(row(0, messages=[{"role": "user", "content": " "}])), 1, "messages"),
        Case("empty file", "p.jsonl", b"", None, None),
        Case("only blank lines", "p.jsonl", b"\n\r\n", None, None),
        Case("wrong encoding (latin-1)", "p.jsonl", lines(row(0)) + '{"id": "é"}\n'.encode("latin-1"), 2, None),
        Case("wrong encoding (UTF-16)", "p.jsonl", lines(row(0)).decode().encode("utf-16"), 1, None),
        Case("not JSON", "p.jsonl", lines(row(0), "id: 3"), 2, None),
        Case("JSON cut off", "p.jsonl", lines(row(0))[:-20], 1, None),
        Case("a JSON array", "p.jsonl", lines(json.dumps([row(0)])), 1, None),
        Case("huge line", "p.jsonl", lines(row(0, metadata={"x": "y" * (16 * 1024 * 1024)})), 1, None),
        Case("no such file", "absent.jsonl", b"", None, None),
        Case("unknown ending", "p.xlsx", b"PK", None, None),
        Case("CSV: missing column", "p.csv", csv_file(flat(row(0, split=None))), None, "split"),
        Case("CSV: misspelt column", "p.csv", csv_file(flat(row(0, spilt="train"))), None, "spilt"),
        Case("CSV: too few cells", "p.csv", csv_file(flat(row(0))) + b"a,b\r\n", 2, None),
        Case("CSV: unquoted commas", "p.csv", csv_file(flat(row(0))) + b"," * 20 + b"\r\n", 2, None),
        Case("CSV: not a number", "p.csv", csv_file(flat(row(0), row(1, difficulty="hard"))), 2, "difficulty"),
        Case("CSV: NaN", "p.csv", csv_file(flat(row(0, difficulty="nan"))), 1, "difficulty"),
        Case("CSV: nested cell not JSON", "p.csv", csv_file(flat(row(0, messages="What is 1 + 1?"))), 1, "messages"),
        Case("CSV: wrong encoding", "p.csv", csv_file(flat(row(0, metadata={"a": 1}))) + b"\xe9\r\n", 3, None),
        Case("Parquet: NaN", "p.parquet", parquet(flat(row(0), row(1, difficulty=math.nan))), 2, "difficulty"),
        Case("Parquet: empty cell", "p.parquet", parquet([*flat(row(0)), {**flat(row(1))[0], "domain": None}]), 2, "domain"),
        Case("Parquet: wrong type", "p.parquet", parquet(flat(row(0, difficulty="hard"))), 1, "difficulty"),
        Case("Parquet: structs", "p.parquet", parquet([{**flat(row(0))[0], "messages": row(0)["messages"]}]), None, "messages"),
        Case("Parquet: not a table", "p.parquet", b"PAR1 and nothing else", None, None),
        Case("trajectory: missing field", "t.jsonl", lines({"task": "t", "reward": 1.0}), 1, "trajectory", read_trajectories),
        Case(
            "trajectory: NaN reward",
            "t.jsonl",
            lines({"task": "t", "trajectory": [{"role": "assistant", "content": "x"}], "reward": math.nan}),
            1,
            "reward",
            read_trajectories,
        ),
        Case(
            "scores: NaN reward",
            "scores.parquet",
            tables.write_scores([score(one), replace(score(one, math.nan), episode_id="b")]),
            2,
            "reward",
            _scores,
        ),
        Case("scores: reward out of range", "scores.parquet", tables.write_scores([score(one, 7.0)]), 1, "reward", _scores),
        Case(
            "scores: duplicate episode",
            "scores.parquet",
            tables.write_scores([score(one), score(one)]),
            1,
            "episode_id",
            _scores,
        ),
        Case(
            "scores: wrong type",
            "scores.parquet",
            _column(tables.write_scores([score(one)]), "reward", ["high"]),
            None,
            "reward",
            _scores,
        ),
        Case("scores: empty file", "scores.parquet", b"", None, None, _scores),
        Case("scores: no rows", "scores.parquet", tables.write_scores([]), None, "rows", _scores),
        Case(
            "episodes: NaN log-probability",
            "group.parquet",
            tables.write_group([one, episode(0, 1, logprobs_T=nan)]),
            2,
            "logprobs_T",
            _episodes,
        ),
        Case(
            "episodes: duplicate id",
            "group.parquet",
            tables.write_group([one, episode(0, 1, id=one.id)]),
            1,
            "id",
            _episodes,
        ),
        Case(
            "episodes: unknown outcome",
            "group.parquet",
            _column(tables.write_group(batch(1, size=2)), "outcome", ["scored", "won"]),
            2,
            "outcome",
            _episodes,
        ),
    ]


def message(case: Case, folder: Path) -> InputError:
    """The error of a case, with its file written below `folder`. AssertionError when the input is accepted."""
    file = folder / case.file
    if not case.file.startswith("absent"):
        file.write_bytes(case.data)
    try:
        case.read(str(file))
    except InputError as error:
        return error
    raise AssertionError(f"'{case.name}' was accepted")


def render() -> str:
    """The page: one row a corrupted input, with the exact message (folders left out)."""
    head = (
        "# Bad input, and what Bessemer says\n\n"
        "Made by `python -m tests.tasks.bad_inputs`; `tests/tasks/test_sources.py` holds every row. Accepted on purpose:\n"
        "a UTF-8 byte order mark, CRLF line ends, blank lines, a missing last line end.\n\n"
        "| what is wrong | message |\n|---|---|\n"
    )
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for case in cases():
            text = str(message(case, Path(name))).replace(f"{name}/", "").replace("|", "\\|")
            rows.append(f"| {case.name} | {' '.join(text.split())} |\n")
    return head + "".join(rows)


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(render())

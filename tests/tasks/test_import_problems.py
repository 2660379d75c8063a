"""`bessemer data import`: rows in, a problem file and a quarantine out, nothing lost, and a campaign reads the result."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_contracts.config import CampaignConfig
from data_contracts.errors import ConfigError, InputError
from data_contracts.protocols import SandboxBackend
from environments.registry import domain_names
from flows.cli import main
from infra.store import MemoryStore
from tasks.curate import curate
from tasks.import_problems import import_problems, prove, write_import
from tasks.sources import read_problems
from tests.environments.test_code import CASES, FILES, HUMAN, LISTED, SUITE

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "your-own-problems.md"
GOOD = [HUMAN, LISTED, FILES, CASES, SUITE]
BAD: list[Any] = [
    {"prompt": "p"}, HUMAN | {"test": "def check("}, HUMAN, 3, {**HUMAN, "task_id": "a/../b"},
    FILES | {"id": "n", "path": "../x.py"},
]  # fmt: skip


def file_of(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def test_every_row_is_in_exactly_one_file(tmp_path: Path) -> None:
    rows = [*GOOD, *BAD, "{not json"]
    done = write_import(import_problems(file_of(tmp_path, rows), domain="code"), tmp_path / "out.jsonl")
    assert len(read_problems(str(done.problems), domains=domain_names())) == len(GOOD)
    assert done.quarantine is not None
    notes = [json.loads(line) for line in done.quarantine.read_text().splitlines()]
    assert [note["row"] for note in notes] == [6, 7, 8, 9, 10, 11, 12]
    assert [note["source"] for note in notes] == [*BAD, "{not json"]
    assert [note["field"] for note in notes] == ["test", "test", "id", None, "id", "path", None]
    assert all(note["problem"] and note["remedy"] and note["file"].endswith("rows.jsonl") for note in notes)


def test_mended_quarantine_is_imported_and_a_clean_import_leaves_none(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    first = write_import(import_problems(file_of(tmp_path, [HUMAN | {"test": "def check("}]), domain="code"), out)
    assert first.quarantine is not None
    note = json.loads(first.quarantine.read_text())
    note["source"]["test"] = HUMAN["test"]
    again = write_import(import_problems(file_of(tmp_path, [note], "mended.jsonl"), domain="code"), out)
    assert again.quarantine is None
    assert not first.quarantine.exists()
    assert read_problems(str(out), domains=domain_names())[0].id == "code/train/HumanEval/900"


def test_gzip_parquet_and_csv_give_the_same_problems(tmp_path: Path) -> None:
    expected = import_problems(file_of(tmp_path, GOOD[:2]), domain="code").problems
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(file_of(tmp_path, GOOD[:2])).read_bytes()))
    assert import_problems(str(packed), domain="code").problems == expected
    pq.write_table(pa.Table.from_pylist([HUMAN]), tmp_path / "rows.parquet")
    assert import_problems(str(tmp_path / "rows.parquet"), domain="code").problems == expected[:1]
    pq.write_table(pa.Table.from_pylist([FILES | {"solution": json.dumps(FILES["solution"])}]), tmp_path / "files.parquet")
    assert not import_problems(str(tmp_path / "files.parquet"), domain="code").refused
    quoted = ",".join('"' + str(value).replace('"', '""') + '"' for value in HUMAN.values())
    (tmp_path / "rows.csv").write_text(f"{','.join(HUMAN)}\n{quoted}\n", encoding="utf-8")
    assert import_problems(str(tmp_path / "rows.csv"), domain="code").problems == expected[:1]


def test_held_out_by_prompt_and_by_the_row(tmp_path: Path) -> None:
    rows = [HUMAN | {"task_id": str(i), "prompt": HUMAN["prompt"].replace("A helper", f"Helper {i}")} for i in range(40)]
    rows.append(HUMAN | {"task_id": "own", "split": "heldout"})
    splits = [p.split for p in import_problems(file_of(tmp_path, rows), domain="code", heldout_share=0.25).problems]
    assert splits[-1] == "heldout"
    assert 3 <= splits[:-1].count("heldout") <= 18
    assert splits == [p.split for p in import_problems(file_of(tmp_path, rows), domain="code", heldout_share=0.25).problems]


def test_a_domain_or_a_file_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not take rows"):
        import_problems(file_of(tmp_path, GOOD), domain="echo")
    for name, data in (
        ("no.jsonl", None),
        ("rows.txt", b"x"),
        ("empty.jsonl", b""),
        ("bad.parquet", b"x"),
        ("w.csv", b"\xff\xfe"),
    ):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError) as caught:
            import_problems(str(tmp_path / name), domain="code")
        assert caught.value.file
        assert caught.value.remedy


def test_a_campaign_curates_imported_rows(tmp_path: Path) -> None:
    done = write_import(import_problems(file_of(tmp_path, GOOD), domain="code"), tmp_path / "out.jsonl")
    config = CampaignConfig.model_validate(
        {
            "domains": [{"name": "code", "level": "imported", "heldout": 0}],
            "curate": {"groups": 5, "surplus": 0, "sources": [str(done.problems)]},
        }
    )
    made = curate(config, iteration=0, sampler_state={}, success={}, store=MemoryStore(), key="p.jsonl")
    assert made.drawn == {"code": 5}


async def test_wrong_solutions_flaky_tests_and_free_rewards_are_refused(
    tmp_path: Path, bubblewrap_backend: SandboxBackend
) -> None:
    free = HUMAN | {"task_id": "free", "test": "def check(candidate):\n    assert candidate(1) != 7\n"}
    wrong = HUMAN | {"task_id": "wrong", "canonical_solution": "    return 7\n"}
    done = import_problems(file_of(tmp_path, [HUMAN, wrong, free]), domain="code")
    errors = await prove(done, bubblewrap_backend)
    assert {index: error.field for index, error in errors.items()} == {1: "solution", 2: "test"}
    assert "assert candidate(half(6)) == 6" in str(errors[1])
    left = done.without(errors)
    assert (len(left.problems), [one.error.row for one in left.refused]) == (1, [2, 3])
    assert left.refused[0].source["task_id"] == "wrong"


def test_the_page_runs_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bubblewrap_backend: SandboxBackend
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.search(r"```json\n(.*?)```", text, flags=re.DOTALL)
    shown = re.search(r"```console\n\$ bessemer ([^\n]+)\n(.*?)```", text, flags=re.DOTALL)
    assert rows
    assert shown
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(rows[1], encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main([*shown[1].split(), "--backend", "bubblewrap"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == shown[2]
    with pytest.raises(SystemExit) as ended:
        main(["data", "import", file_of(tmp_path, [HUMAN, {"prompt": "p"}], "more.jsonl")])
    assert ended.value.code == 1
    assert "row 2, field 'test'" in capsys.readouterr().err
    assert (tmp_path / "more.quarantine.jsonl").exists()

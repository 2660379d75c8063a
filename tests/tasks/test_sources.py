from __future__ import annotations

import asyncio
import json
from pathlib import Path

import fsspec
import pytest

from data_contracts.errors import InputError
from environments.base import Collected
from environments.registry import domain, verifier
from tasks.sources import read_problems, read_sources
from tests.data_contracts.samples import problem
from tests.tasks.bad_inputs import DOMAINS, PAGE, Case, cases, csv_file, flat, lines, message, parquet, render, row


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_corrupted_input_names_file_row_field_and_remedy(case: Case, tmp_path: Path) -> None:
    error = message(case, tmp_path)
    assert case.file in str(error.file)
    assert (error.row, error.field) == (case.row, case.field)
    assert error.remedy
    assert len(str(error)) < 600


def test_the_page_of_bad_inputs_is_what_the_code_says() -> None:
    assert PAGE.read_text() == render(), "run: python -m tests.tasks.bad_inputs"


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("p.jsonl", lines(row(0), row(1))),
        ("p.jsonl", lines(row(0), row(1)).rstrip(b"\n")),
        ("p.jsonl", b"\xef\xbb\xbf" + lines(row(0), "", row(1)).replace(b"\n", b"\r\n")),
        ("p.ndjson", lines(row(0), row(1))),
        ("p.csv", csv_file(flat(row(0), row(1)))),
        ("p.csv", b"\xef\xbb\xbf" + csv_file(flat(row(0), row(1)))),
        ("p.parquet", parquet(flat(row(0), row(1)))),
    ],
)
def test_every_format_gives_the_same_problems(file: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(data)
    assert read_problems(str(tmp_path / file), domains=DOMAINS) == (problem(0), problem(1))


def test_the_example_of_the_howto_is_a_problem_that_its_oracle_solves(tmp_path: Path) -> None:
    page = (PAGE.parents[1] / "howto" / "problem-files.md").read_text()
    example = page[page.index('    {"id"') : page.index("- `id` is")]
    (tmp_path / "p.jsonl").write_bytes(lines(json.loads(example)))
    (made,) = read_problems(str(tmp_path / "p.jsonl"), domains=DOMAINS)
    answer = domain(made.domain).oracle(made)(made.messages)
    collected = Collected(state={"answer": answer.content})
    verdict = asyncio.run(verifier(made.verifier.kind).verify(made, collected, acquire=None, deadline_seconds=5))
    assert verdict.score == 1.0


def test_any_fsspec_url_and_ids_unique_over_files(tmp_path: Path) -> None:
    with fsspec.open("memory://bucket/a.jsonl", "wb") as stream:
        stream.write(lines(row(0)))
    (tmp_path / "b.jsonl").write_bytes(lines(row(1), row(0)))
    assert read_problems("memory://bucket/a.jsonl", domains=DOMAINS) == (problem(0),)
    with pytest.raises(InputError, match=r"b\.jsonl, row 2, field 'id': .* is already used in memory://bucket/a\.jsonl, row 1"):
        read_sources(["memory://bucket/a.jsonl", str(tmp_path / "b.jsonl")], domains=DOMAINS)


def test_an_unknown_protocol_is_explained() -> None:
    with pytest.raises(InputError, match=r"warp://x/p\.jsonl: cannot be read: Protocol not known"):
        read_problems("warp://x/p.jsonl", domains=DOMAINS)

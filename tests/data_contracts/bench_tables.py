"""Speed of tables and gate: `python -m tests.data_contracts.bench_tables` writes docs/results/tables.md."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from data_contracts import gate, tables
from data_contracts.records import Episode, VersionSpan
from tests.data_contracts.samples import batch, score

PAGE = Path(__file__).parents[2] / "docs" / "results" / "tables.md"
TOKENS, GROUPS, SIZE = 512, 32, 8


def episodes() -> list[Episode]:
    """256 episodes of 512 tokens, 448 of them the policy's."""
    made = []
    for e in batch(GROUPS, size=SIZE):
        ids = tuple((i * 7919 + e.member) % 49_000 for i in range(TOKENS))
        mask = (0,) * 64 + (1,) * (TOKENS - 64)
        logprobs = tuple(-1 / (1 + i % 97) if m else 0.0 for i, m in enumerate(mask))
        turn = replace(e.turns[0], token_start=64, token_stop=TOKENS)
        span = VersionSpan(start=64, stop=TOKENS, version=0)
        made.append(
            replace(e, token_ids_T=ids, loss_mask_T=mask, logprobs_T=logprobs, prompt_length=64, spans=(span,), turns=(turn,))
        )
    return made


def best(run: Callable[[], object], *, times: int = 5) -> float:
    """CPU seconds of the fastest of `times` runs."""
    seconds = []
    for _ in range(times):
        began = time.process_time()
        run()
        seconds.append(time.process_time() - began)
    return min(seconds)


def render() -> str:
    rows = episodes()
    groups = [rows[i : i + SIZE] for i in range(0, len(rows), SIZE)]
    stored = [tables.write_group(group) for group in groups]
    scores = [score(e) for e in rows]
    write = best(lambda: [tables.write_group(group) for group in groups])
    read = best(lambda: [tables.read_group(data) for data in stored])
    cheap = best(lambda: [gate.check_group(group) for group in groups])
    began = time.process_time()
    gate.warm()
    imported = time.process_time() - began
    with tempfile.TemporaryDirectory() as folder:
        report = gate.check_batch(folder, run_name="iteration 000000", episodes=rows, scores=scores)
        full = best(lambda: gate.check_batch(folder, run_name="iteration 000001", episodes=rows, scores=scores))
    assert not report.violations
    count = len(rows)
    rules = sum(table.expectations for table in report.tables)
    return (
        "# Tables and the gate: speed\n\n"
        "Made by `python -m tests.data_contracts.bench_tables` on a 2-core CPU machine, in CPU seconds (it was busy):\n"
        f"256 episodes of {TOKENS} tokens in {GROUPS} groups, the best of 5 runs.\n\n"
        "| what | figure |\n|---|---|\n"
        f"| write Parquet shards | {count / write:,.0f} episodes/s |\n"
        f"| read Parquet shards, every field checked | {count / read:,.0f} episodes/s |\n"
        f"| cheap contract of a group while it is sealed | {cheap / GROUPS * 1e3:.2f} ms a group of {SIZE} |\n"
        f"| Great Expectations: import, once a process | {imported:.1f} s |\n"
        f"| Great Expectations: {rules} expectations, 3 tables, Data Docs included | {full:.2f} s |\n"
    )


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(render())

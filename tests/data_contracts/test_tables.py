from __future__ import annotations

import io
import math
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from data_contracts import tables
from data_contracts.errors import ContractError
from data_contracts.records import BatchManifest, EpisodeTelemetry, GroupShard, Interval, Message
from tests.data_contracts.samples import TOOL, DictStore, batch, episode, infra_episode, problem, score


def test_a_group_comes_back_equal_from_equal_bytes() -> None:
    group = [episode(0, 0), episode(0, 1, tools=()), infra_episode(0, 2), episode(0, 3, final_state={})]
    data = tables.write_group(group)
    assert list(tables.read_group(data)) == group
    assert tables.write_group(tables.read_group(data)) == data


@given(
    logprobs=st.lists(st.floats(max_value=0, allow_nan=False), min_size=1, max_size=6),
    text=st.text(st.characters(exclude_categories=["Cs"])),
    schema=st.dictionaries(
        st.text(max_size=3), st.none() | st.integers() | st.dictionaries(st.text(max_size=3), st.booleans())
    ),
)
def test_any_values_come_back_exactly(logprobs: list[float], text: str, schema: dict[str, object]) -> None:
    size = len(logprobs)
    one = episode(
        prompt=(Message(role="user", content=text),),
        tools=(replace(TOOL, parameters={"type": "object", "properties": schema}),),
        token_ids_T=tuple(range(size)),
        loss_mask_T=(1,) * size,
        logprobs_T=tuple(logprobs),
    )
    assert tables.read_group(tables.write_group([one])) == (one,)


def test_broken_values_survive_so_that_quarantine_can_show_them() -> None:
    good = episode(0, 0)
    verdict = replace(good.verdict, score=math.nan, components={"a": math.inf})
    bad = replace(
        good,
        verdict=verdict,
        final_state={"path": "\ud83d", "x": [-math.inf]},
        prompt=(Message(role="user", content="\ud83d"),),
    )
    (back,) = tables.read_group(tables.write_group([bad]))
    assert back.verdict is not None
    assert math.isnan(back.verdict.score)
    assert back.verdict.components == {"a": math.inf}
    assert (back.final_state, back.prompt, back.artifacts) == (bad.final_state, bad.prompt, bad.artifacts)


def test_nested_values_are_json_text_so_arrow_cannot_fill_in_nulls() -> None:
    table = pq.read_table(io.BytesIO(tables.write_group([episode(0, 0), episode(0, 1, tools=())])))
    for name in ("prompt", "tools", "turns", "verdict", "artifacts", "final_state", "spans"):
        assert table.schema.field(name).type == pa.string()
    assert '"a":{"type":["number","null"]},"b":{"type":"number"}' in table.column("tools")[0].as_py()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["turns"]), r"shard.parquet, field 'turns': the column is missing"),
        (lambda t: t.append_column("extra", [[1]]), r"shard.parquet, field 'extra': is not a column of this table"),
        (lambda t: _set(t, "outcome", ["won"]), r"shard.parquet, row 1, field 'outcome': Invalid enum value 'won'"),
        (lambda t: _set(t, "member", ["x"]), r"field 'member': has type string, expected int64"),
        (lambda t: _set(t, "verdict", ['{"verifier": 3}']), r"row 1, field 'verdict.verifier': Expected `str`, got `int`"),
        (lambda t: _set(t, "turns", ["[{]"]), r"row 1, field 'turns': JSON is malformed"),
        (lambda t: _set(t, "id", pa.array([None], pa.string())), r"row 1, field 'id': Expected `str`, got `null`"),
        (lambda t: _set(t, "token_ids_T", pa.array([[1, None]], pa.list_(pa.int32()))), r"field 'token_ids_T'"),
    ],
)
def test_a_corrupted_shard_is_refused_by_file_row_and_field(change: object, message: str) -> None:
    table = pq.read_table(io.BytesIO(tables.write_group([episode()])))
    sink = io.BytesIO()
    pq.write_table(change(table), sink)  # type: ignore[operator]
    with pytest.raises(ContractError, match=message):
        tables.read_group(sink.getvalue(), file="shard.parquet")


def _set(table: pa.Table, name: str, values: object) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values) if isinstance(values, list) else values)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not parquet at all"])
def test_bytes_that_are_no_table_are_refused(data: bytes) -> None:
    with pytest.raises(ContractError, match=r"^s\.parquet: is not a readable Parquet table"):
        tables.read_scores_table(data, file="s.parquet")


def test_a_value_beyond_its_column_is_refused_when_written() -> None:
    with pytest.raises(ContractError, match="field 'token_ids_T': a value does not fit int32"):
        tables.write_group([episode(token_ids_T=(2**40,) * 11)])


def test_scores_keep_nan_so_that_the_gate_can_see_it() -> None:
    scores = [score(episode(0, 0)), replace(score(episode(0, 1)), reward=math.nan, components={"b": 1.0, "a": math.inf})]
    back = tables.read_scores_table(tables.write_scores(scores))
    assert back[0] == scores[0]
    assert math.isnan(back[1].reward)
    assert back[1].components == {"a": math.inf, "b": 1.0}


def test_a_sealed_batch_reads_back_and_every_changed_byte_is_caught() -> None:
    store, groups = DictStore(), [batch(3)[i : i + 4] for i in range(0, 12, 4)]
    refs = [tables.put_group(store, f"groups/{i}.parquet", group) for i, group in enumerate(groups)]
    shards = tuple(_shard(ref.uri, ref.sha256, group) for ref, group in zip(refs, groups, strict=True))
    manifest = BatchManifest(campaign="c", iteration=0, shards=shards, discarded=(), unused_problem_ids=())
    sealed = tables.put_manifest(store, "episodes.json", manifest)
    assert sealed.rows == 12
    assert tables.read_episodes(store, sealed) == [e for group in groups for e in group]
    store.put("groups/1.parquet", tables.write_group(groups[0]))
    with pytest.raises(ContractError, match=r"^groups/1\.parquet: its bytes changed after it was sealed"):
        tables.read_episodes(store, sealed)
    del store.objects["groups/1.parquet"]
    with pytest.raises(ContractError, match=r"^groups/1\.parquet: is missing from the store"):
        tables.read_episodes(store, sealed)
    store.put("episodes.json", store.get("episodes.json") + b" ")
    with pytest.raises(ContractError, match=r"^episodes\.json: its bytes changed"):
        tables.read_episodes(store, sealed)


def _shard(uri: str, sha256: str, group: list[object]) -> GroupShard:
    return GroupShard(
        group_id=uri,
        problem_id="p",
        domain="arithmetic",
        order=0,
        uri=uri,
        sha256=sha256,
        rows=len(group),
        telemetry_uri="",
        disposition="kept",
        rewards_G=(),
        outcomes_G=(),
        sampled_tokens=0,
    )


def test_the_first_write_wins_and_the_ref_describes_the_winner() -> None:
    store = DictStore()
    first = tables.put_group(store, "g.parquet", batch(1))
    late = tables.put_group(store, "g.parquet", batch(1, size=2))
    assert late == first
    assert len(tables.read_shard(store, late.uri, sha256=late.sha256)) == 4
    assert tables.put_scores(store, "s", [score(episode())]) == tables.put_scores(store, "s", [])
    assert tables.put_problems(store, "p", [problem(1)]) == tables.put_problems(store, "p", [])


def test_problems_and_telemetry_come_back() -> None:
    store, problems = DictStore(), (problem(1), problem(2, tools=(TOOL,)))
    ref = tables.put_problems(store, "problems.jsonl", problems)
    assert ref.rows == 2
    assert tables.read_problem_set(store, ref) == problems
    seen = EpisodeTelemetry(
        episode_id="e",
        attempt_id="a",
        attempt=0,
        worker="w",
        engine="x",
        started_at=1.5,
        finished_at=2.5,
        sampled_tokens=5,
        intervals=(Interval(kind="sampling", start=1.5, stop=2.0),),
    )
    assert tables.read_telemetry(tables.write_telemetry([seen])) == (seen,)


def test_records_and_tables_import_without_arrow() -> None:
    code = (
        "import sys, data_contracts.tables, data_contracts.gate; "
        "print({'pyarrow', 'great_expectations', 'pandas'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"

"""Records <-> stored tables: the only place that knows how a table's bytes look.

| table | format | one row is | module functions |
|---|---|---|---|
| group shard | Parquet (zstd) | an `Episode` | `write_group`, `read_group`, `put_group`, `read_shard` |
| scores | Parquet (zstd) | a `Score` | `write_scores`, `read_scores_table`, `put_scores`, `read_scores` |
| problems | JSON lines | a `Problem` | `write_problems`, `read_problems`, `put_problems`, `read_problem_set` |
| manifest | JSON | a `GroupShard` | `put_manifest`, `read_manifest`, `read_episodes` |
| telemetry | JSON | an `EpisodeTelemetry` | `write_telemetry`, `read_telemetry` |

Contract: the schemas are fixed, equal records give equal bytes (no timestamps, fixed compression, sorted JSON keys; the Parquet
footer names the Arrow version, so bytes may change with an upgrade of pyarrow, never between two runs), and reading gives
equal records. Tools, turns, verdicts and every other nested value are JSON strings: Arrow would fill missing struct fields with
nulls and corrupt heterogeneous tool schemas (json_cells.py says how NaN and odd text survive). Log-probabilities are float64
because samplers send them as JSON numbers, which float32 would not give back exactly. Rows are counted from 1 in every
message. `put_*`: the first write wins, and the Ref describes what the store holds, so a writer whose `sha256` differs lost to
an earlier attempt and reads that one back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from data_contracts.errors import ContractError
from data_contracts.json_cells import decoder, encode_cell
from data_contracts.protocols import Store, to_json
from data_contracts.records import (
    SCHEMA_VERSION,
    Artifact,
    BatchManifest,
    Budgets,
    Episode,
    EpisodesRef,
    EpisodeTelemetry,
    Failure,
    Message,
    Problem,
    ProblemsRef,
    Ref,
    Score,
    ScoresRef,
    ToolSpec,
    Turn,
    Verdict,
    VersionSpan,
)

if TYPE_CHECKING:
    import pyarrow as pa

R = TypeVar("R")

_TEXT = ("id", "group_id", "problem_id", "domain", "split", "campaign", "stop_reason", "outcome")
_NUMBERS = ("iteration", "member", "prompt_length")
_TOKENS = ("token_ids_T", "loss_mask_T", "logprobs_T")
_JSON: Mapping[str, Any] = {
    "prompt": tuple[Message, ...],
    "tools": tuple[ToolSpec, ...],
    "spans": tuple[VersionSpan, ...],
    "turns": tuple[Turn, ...],
    "failure": Failure | None,
    "verdict": Verdict | None,
    "artifacts": tuple[Artifact, ...],
    "budgets": Budgets,
    "final_state": dict[str, Any],
}
_EPISODE, _SCORE = partial(msgspec.convert, type=Episode), partial(msgspec.convert, type=Score)
_SCORE_TEXT = ("episode_id", "group_id", "problem_id", "domain")


def digest(data: bytes) -> str:
    """sha256 of `data` in hexadecimal: the `sha256` of every Ref and GroupShard."""
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------------------------------------------------------- episodes


def write_group(episodes: Sequence[Episode]) -> bytes:
    """One Parquet shard of the episodes of one group, in the given order. Equal episodes give equal bytes.

    Raises ContractError for a value that does not fit its column (a token id beyond int32, a mask beyond int8).
    """
    import pyarrow as pa

    schema = _episode_schema()
    columns: dict[str, list[Any]] = {name: [getattr(e, name) for e in episodes] for name in (*_TEXT, *_NUMBERS)}
    columns |= {name: [encode_cell(getattr(e, name)) for e in episodes] for name in _JSON}
    arrays: dict[str, Any] = {}
    for name in _TOKENS:
        arrays[name] = _list_array([getattr(e, name) for e in episodes], schema.field(name).type.value_type, field=name)
    for name, values in columns.items():
        try:
            arrays[name] = pa.array(values, type=schema.field(name).type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise ContractError(
                f"a value does not fit the column ({error})", file="episodes", field=name, remedy=_FIX_WRITER
            ) from error
    return _to_parquet(pa.table([arrays[name] for name in schema.names], schema=schema))


def read_group(data: bytes, *, file: str | None = None) -> tuple[Episode, ...]:
    """The episodes of a shard, in stored order, every field checked against its type.

    `file` names the shard in errors. Raises ContractError with file, row and field.
    """
    table = _from_parquet(data, _episode_schema(), file=file)
    columns: dict[str, list[Any]] = {name: table.column(name).to_pylist() for name in (*_TEXT, *_NUMBERS)}
    columns |= {name: _lists(table.column(name), file=file, field=name) for name in _TOKENS}
    for name, kind in _JSON.items():
        decode, cells = decoder(kind), table.column(name).to_pylist()
        columns[name] = [
            _row(decode, "null" if cell is None else cell, file=file, row=i, field=name) for i, cell in enumerate(cells, 1)
        ]
    names = tuple(columns)
    rows = zip(*columns.values(), strict=True)
    return tuple(
        _row(_EPISODE, dict(zip(names, values, strict=True)), file=file, row=i, field=None)
        for i, values in enumerate(rows, start=1)
    )


def put_group(store: Store, key: str, episodes: Sequence[Episode]) -> Ref:
    """Store one group shard; the first write wins (compare `sha256`, read the winner with `read_shard`)."""
    data, held = _put(store, key, write_group(episodes))
    return Ref(uri=key, sha256=digest(data), rows=len(episodes) if held else _parquet_rows(data))


def read_shard(store: Store, uri: str, *, sha256: str | None = None) -> tuple[Episode, ...]:
    """One group shard from the store; raises ContractError naming it when missing, changed or malformed."""
    return read_group(_get(store, uri, sha256), file=uri)


def put_manifest(store: Store, key: str, manifest: BatchManifest) -> EpisodesRef:
    """Seal a batch: `rows` counts the episodes of `shards` (the discarded are not part of it)."""
    data, _ = _put(store, key, to_json(manifest))
    held = _document(data, BatchManifest, file=key)
    return EpisodesRef(uri=key, sha256=digest(data), rows=sum(shard.rows for shard in held.shards))


def read_manifest(store: Store, ref: EpisodesRef) -> BatchManifest:
    """The manifest behind an EpisodesRef, its digest checked."""
    return _document(_get(store, ref.uri, ref.sha256), BatchManifest, file=ref.uri)


def read_episodes(store: Store, ref: EpisodesRef) -> list[Episode]:
    """Every episode of a sealed batch, in shard order. Digests and row counts of manifest and shards are checked."""
    episodes: list[Episode] = []
    for shard in read_manifest(store, ref).shards:
        group = read_shard(store, shard.uri, sha256=shard.sha256)
        _expect_rows(len(group), shard.rows, file=shard.uri)
        episodes.extend(group)
    _expect_rows(len(episodes), ref.rows, file=ref.uri)
    return episodes


# ------------------------------------------------------------------------------------------------------------------ scores


def write_scores(scores: Sequence[Score]) -> bytes:
    """Parquet of scores in the given order; components as a string -> float64 map with sorted keys (NaN survives)."""
    import pyarrow as pa

    schema = _score_schema()
    columns: list[list[Any]] = [[getattr(s, name) for s in scores] for name in (*_SCORE_TEXT, "reward")]
    columns.append([sorted(s.components.items()) for s in scores])
    try:
        arrays = [pa.array(values, type=field.type) for values, field in zip(columns, schema, strict=True)]
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ContractError(f"a value does not fit its column ({error})", file="scores", remedy=_FIX_WRITER) from error
    return _to_parquet(pa.table(arrays, schema=schema))


def read_scores_table(data: bytes, *, file: str | None = None) -> tuple[Score, ...]:
    """Scores of a Parquet table, types checked. Finite rewards and ranges are the gate's business."""
    table = _from_parquet(data, _score_schema(), file=file)
    rows = table.to_pylist(maps_as_pydicts="strict")
    return tuple(_row(_SCORE, row, file=file, row=i, field=None) for i, row in enumerate(rows, start=1))


def put_scores(store: Store, key: str, scores: Sequence[Score]) -> ScoresRef:
    data, held = _put(store, key, write_scores(scores))
    return ScoresRef(uri=key, sha256=digest(data), rows=len(scores) if held else _parquet_rows(data))


def read_scores(store: Store, ref: ScoresRef) -> list[Score]:
    """The scores of one sealed batch; raises ContractError when digest or row count differ."""
    scores = list(read_scores_table(_get(store, ref.uri, ref.sha256), file=ref.uri))
    _expect_rows(len(scores), ref.rows, file=ref.uri)
    return scores


# ---------------------------------------------------------------------------------------------------------------- problems


def write_problems(problems: Iterable[Problem]) -> bytes:
    """JSON lines, one canonical Problem a line, in the given order."""
    return b"".join(to_json(problem) + b"\n" for problem in problems)


def read_problems(data: bytes, *, file: str | None = None) -> tuple[Problem, ...]:
    """Problems from our own JSON lines, strictly; foreign files go through tasks/sources.py, which explains more."""
    decode = msgspec.json.Decoder(Problem).decode
    lines = data.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    return tuple(_row(decode, line, file=file, row=i, field=None) for i, line in enumerate(lines, start=1))


def put_problems(store: Store, key: str, problems: Sequence[Problem]) -> ProblemsRef:
    data, _ = _put(store, key, write_problems(problems))
    return ProblemsRef(uri=key, sha256=digest(data), rows=data.count(b"\n"))


def read_problem_set(store: Store, ref: ProblemsRef) -> tuple[Problem, ...]:
    """The curated problems of one iteration, in order; digest and row count are checked."""
    problems = read_problems(_get(store, ref.uri, ref.sha256), file=ref.uri)
    _expect_rows(len(problems), ref.rows, file=ref.uri)
    return problems


# --------------------------------------------------------------------------------------------------------------- telemetry


def write_telemetry(telemetry: Iterable[EpisodeTelemetry]) -> bytes:
    """A JSON array, one entry an episode: outside every digest (rule 9)."""
    return to_json(list(telemetry))


def read_telemetry(data: bytes, *, file: str | None = None) -> tuple[EpisodeTelemetry, ...]:
    return _document(data, tuple[EpisodeTelemetry, ...], file=file)


# ------------------------------------------------------------------------------------------------------- schemas and shells

_FIX_WRITER = "This is a fault of the stage that wrote the table; run `bessemer show` on the episode and report it"
_FIX_STORED = "Restore the object from a backup, or remove it and resume: the stage writes it again"


@cache
def _episode_schema() -> pa.Schema:
    import pyarrow as pa

    fields = [pa.field(name, pa.string(), nullable=False) for name in _TEXT]
    fields += [pa.field(name, pa.int64(), nullable=False) for name in _NUMBERS]
    for name, kind in zip(_TOKENS, (pa.int32(), pa.int8(), pa.float64()), strict=True):
        fields.append(pa.field(name, pa.list_(pa.field("item", kind, nullable=False)), nullable=False))
    fields += [pa.field(name, pa.string(), nullable=False) for name in _JSON]
    return pa.schema(fields, metadata={"bessemer.table": "episodes", "bessemer.schema_version": str(SCHEMA_VERSION)})


@cache
def _score_schema() -> pa.Schema:
    import pyarrow as pa

    fields = [pa.field(name, pa.string(), nullable=False) for name in _SCORE_TEXT]
    fields.append(pa.field("reward", pa.float64(), nullable=False))
    fields.append(pa.field("components", pa.map_(pa.string(), pa.float64()), nullable=False))
    return pa.schema(fields, metadata={"bessemer.table": "scores", "bessemer.schema_version": str(SCHEMA_VERSION)})


def _list_array(rows: Sequence[Sequence[Any]], kind: pa.DataType, *, field: str) -> pa.Array:
    """A list column from tuples through one flat array: about 20 times faster than Arrow's conversion of nested objects."""
    import pyarrow as pa

    offsets = [0]
    flat: list[Any] = []
    for row in rows:
        flat.extend(row)
        offsets.append(len(flat))
    try:
        values = pa.array(flat, type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise ContractError(
            f"a value does not fit {kind} ({error})", file="episodes", field=field, remedy=_FIX_WRITER
        ) from error
    if values.null_count:
        raise ContractError("holds an empty value", file="episodes", field=field, remedy=_FIX_WRITER)
    return pa.ListArray.from_arrays(
        pa.array(offsets, type=pa.int32()), values, type=pa.list_(pa.field("item", kind, nullable=False))
    )


def _lists(column: pa.ChunkedArray, *, file: str | None, field: str) -> list[list[Any]]:
    """The lists of a list column, through one flat array a chunk."""
    lists: list[list[Any]] = []
    for chunk in column.chunks:
        values = chunk.flatten()
        if chunk.null_count or values.null_count:
            raise ContractError("holds an empty value", file=file, field=field, remedy=_FIX_STORED)
        flat = values.to_numpy(zero_copy_only=False).tolist()
        ends = chunk.offsets.to_numpy()
        first = int(ends[0]) if len(ends) else 0
        lists.extend(flat[int(a) - first : int(b) - first] for a, b in pairwise(ends))
    return lists


def _to_parquet(table: pa.Table) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", compression_level=3, use_dictionary=False, version="2.6")
    return bytes(sink.getvalue().to_pybytes())


def _from_parquet(data: bytes, schema: pa.Schema, *, file: str | None) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(data), use_threads=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise ContractError(f"is not a readable Parquet table ({error})", file=file, remedy=_FIX_STORED) from error
    metadata = table.schema.metadata or {}
    version = metadata.get(b"bessemer.schema_version", b"").decode()
    if version and version != str(SCHEMA_VERSION):
        raise ContractError(
            f"has schema version {version}, this Bessemer reads {SCHEMA_VERSION}",
            file=file,
            remedy="Read it with the release that wrote it",
        )
    for name in schema.names:
        if name not in table.schema.names:
            raise ContractError("the column is missing", file=file, field=name, remedy=_FIX_STORED)
    for name in table.schema.names:
        if name not in schema.names:
            raise ContractError("is not a column of this table", file=file, field=name, remedy="Remove the column")
        found, wanted = table.schema.field(name).type, schema.field(name).type
        if found != wanted:
            raise ContractError(f"has type {found}, expected {wanted}", file=file, field=name, remedy=_FIX_STORED)
    return table.select(schema.names)


def _row(convert: Any, value: Any, *, file: str | None, row: int, field: str | None) -> Any:
    """Convert one row or cell; msgspec's message, which carries the path inside it, becomes a ContractError."""
    try:
        return convert(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        path = _path(str(error))
        place = ".".join(part for part in (field, path) if part) or None
        problem = str(error).split(" - at ")[0]
        raise ContractError(problem, file=file, row=row, field=place, remedy=_FIX_STORED) from error


def _path(message: str) -> str:
    """The field path that msgspec puts at the end of a message ("... - at `$.turns[0].index`")."""
    _, found, rest = message.partition(" - at `$")
    return rest.rstrip("`").lstrip(".") if found else ""


def _document(data: bytes, kind: type[R], *, file: str | None) -> R:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ContractError(
            str(error).split(" - at ")[0], file=file, field=_path(str(error)) or None, remedy=_FIX_STORED
        ) from error


def _put(store: Store, key: str, data: bytes) -> tuple[bytes, bool]:
    """The bytes that `key` holds now, and whether they are ours."""
    if store.put_if_absent(key, data):
        return data, True
    held = store.get(key)
    return held, held == data


def _get(store: Store, key: str, sha256: str | None) -> bytes:
    try:
        data = store.get(key)
    except FileNotFoundError as error:
        raise ContractError("is missing from the store", file=key, remedy=_FIX_STORED) from error
    if sha256 is not None and (found := digest(data)) != sha256:
        raise ContractError(
            f"its bytes changed after it was sealed (sha256 {found[:12]}, sealed as {sha256[:12]})",
            file=key,
            remedy=_FIX_STORED,
        )
    return data


def _expect_rows(found: int, wanted: int, *, file: str) -> None:
    if found != wanted:
        raise ContractError(f"holds {found} rows, its reference says {wanted}", file=file, remedy=_FIX_STORED)


def _parquet_rows(data: bytes) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    return int(pq.ParquetFile(pa.BufferReader(data)).metadata.num_rows)

"""Problems from files: JSON lines, Parquet or CSV on any fsspec URL, every row held to the contract before anything starts.

A row has the fields of `Problem`. In Parquet and CSV the nested ones (messages, tools, environment, verifier, budgets,
metadata) are cells of JSON text; Arrow structs are refused, because Arrow fills fields that a row lacks with nulls.
Every mistake is an InputError with file, row, field, what was expected and what to do. Rows count from 1: lines of a JSON lines
file (blank ones are passed over), records after the header of a CSV file, rows of a Parquet file.

UTF-8 only; a byte order mark and CRLF line ends are accepted. Remote files are read whole, once a call; a JSON line has at
most 16 MiB. Gap: Hugging Face data sets come as their Parquet files (`hf://datasets/...` where huggingface_hub is installed).
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, get_args

import fsspec  # type: ignore[import-untyped,unused-ignore]
import msgspec

from data_contracts import gate
from data_contracts.errors import ConfigError, InputError
from data_contracts.records import Problem, Role, Split, TrustLevel
from environments.registry import check_grading, verifier
from environments.sandbox.files import check_name

MAX_LINE_BYTES = 16 * 1024 * 1024
NESTED = ("messages", "tools", "environment", "verifier", "budgets", "metadata")
_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_UTF8_BOM = b"\xef\xbb\xbf"
_SAVE_UTF8 = "Save the file in UTF-8"


def read_problems(url: str, *, domains: Collection[str]) -> tuple[Problem, ...]:
    """All problems of one file, in its order; `domains` are the registered names. Raises InputError."""
    return read_sources([url], domains=domains)


def read_sources(urls: Sequence[str], *, domains: Collection[str]) -> tuple[Problem, ...]:
    """All problems of several files; an id may be used once over all of them. Raises InputError."""
    problems: list[Problem] = []
    places: dict[str, tuple[str, int]] = {}
    for url in urls:
        rows: list[int] = []
        start = len(problems)
        for row, problem in _rows(url, _read(url)):
            if problem.domain not in domains:
                remedy = f"{_closest(problem.domain, domains)}Known: {', '.join(sorted(domains))}"
                raise InputError(f"unknown domain '{problem.domain}'", file=url, row=row, field="domain", remedy=remedy)
            if problem.id in places:
                file, first = places[problem.id]
                where = f"row {first}" if file == url else f"{file}, row {first}"
                raise InputError(
                    f"the id '{problem.id}' is already used in {where}",
                    file=url,
                    row=row,
                    field="id",
                    remedy="Give every problem its own id, or remove the copy",
                )
            _check_grading(problem, domains, file=url, row=row)
            places[problem.id] = (url, row)
            problems.append(problem)
            rows.append(row)
        if not rows:
            raise InputError("has no problems", file=url, remedy="Write at least one row, or remove it from curate.sources")
        for found in gate.check_problems(problems[start:]):
            row = rows[found.row - 1] if found.row is not None else 0
            raise InputError(found.problem, file=url, row=row, field=found.field, remedy=found.remedy)
    return tuple(problems)


def read_each(url: str, *, domains: Collection[str]) -> tuple[dict[str, Problem], list[InputError]]:
    """The problems of a JSON lines file that hold their contract, by id, and the mistakes of the others.

    Raises InputError when the file itself cannot be read; a file of another format is read as a whole.
    """
    data = _read(url)
    if PurePosixPath(url.split("?")[0]).suffix.lower() not in (".jsonl", ".ndjson"):
        return {problem.id: problem for problem in read_problems(url, domains=domains)}, []
    rows: dict[str, int] = {}
    found: dict[str, Problem] = {}
    wrong: list[InputError] = []
    for row, line in enumerate(data.removeprefix(_UTF8_BOM).split(b"\n"), start=1):
        try:
            for _, problem in _json_lines(url, line):
                _check_alone(problem, domains, rows, file=url, row=row)
                rows[problem.id], found[problem.id] = row, problem
        except InputError as error:
            wrong.append(InputError(error.problem, file=url, row=row, field=error.field, remedy=error.remedy))
    checked = list(found.values())
    for mistake in gate.check_problems(checked):
        name = checked[mistake.row - 1].id if mistake.row is not None else ""
        if found.pop(name, None) is not None:
            wrong.append(InputError(mistake.problem, file=url, row=rows[name], field=mistake.field, remedy=mistake.remedy))
    return found, wrong


def _check_alone(problem: Problem, domains: Collection[str], rows: Mapping[str, int], *, file: str, row: int) -> None:
    """What is asked of a problem of one file; `rows` are those of the ids before."""
    if problem.id in rows:
        remedy = "Give every problem its own id, or remove the copy"
        raise InputError(f"the id '{problem.id}' is already used in row {rows[problem.id]}", field="id", remedy=remedy)
    if problem.domain not in domains:
        remedy = f"{_closest(problem.domain, domains)}Known: {', '.join(sorted(domains))}"
        raise InputError(f"unknown domain '{problem.domain}'", field="domain", remedy=remedy)
    _check_grading(problem, domains, file=file, row=row)


def _check_grading(problem: Problem, domains: Collection[str], *, file: str, row: int) -> None:
    """What would otherwise be found when the first episode is graded, or never."""
    kind, spec = problem.environment.kind, problem.verifier
    trusted = {name.partition(":")[0] for name in domains if ":" in name}
    for field, name in (("environment.kind", kind), ("verifier.kind", spec.kind)):
        if ":" in name and name.partition(":")[0] not in trusted:  # a file must not name code to import
            raise InputError(
                f"'{name[:80]}' names code that no domain of this campaign brings", file=file, row=row, field=field,
                remedy=f"Use an installed kind, or a module of {', '.join(sorted(domains))}",
            )  # fmt: skip
    try:
        verifier(spec.kind)
    except ConfigError as error:
        raise InputError(error.problem, file=file, row=row, field="verifier.kind", remedy=error.remedy) from error
    try:
        for name in spec.collect:
            check_name(name)
    except InputError as error:
        raise InputError(error.problem, file=file, row=row, field="verifier.collect", remedy=error.remedy) from error
    try:
        check_grading(problem)
    except InputError as error:
        raise InputError(error.problem, file=file, row=row, field=error.field, remedy=error.remedy) from error


def _read(url: str) -> bytes:
    try:
        with fsspec.open(url, "rb") as stream:
            data: bytes = stream.read()
    except FileNotFoundError:
        raise InputError("there is no such file", file=url, remedy="Check the path in curate.sources") from None
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"cannot be read: {error}", file=url, remedy="Check the URL and its credentials") from error
    if not data:
        raise InputError("is empty", file=url, remedy="Write at least one row, or remove it from curate.sources")
    return data


def _rows(url: str, data: bytes) -> Iterator[tuple[int, Problem]]:
    suffix = PurePosixPath(url.split("?")[0]).suffix.lower()
    readers: dict[str, Callable[[str, bytes], Iterator[tuple[int, Problem]]]] = {
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".csv": _csv,
        ".parquet": _parquet,
    }
    if suffix not in readers:
        raise InputError(f"has the ending '{suffix}'", file=url, remedy=f"Name the file by its format: {', '.join(readers)}")
    return readers[suffix](url, data)


# ----------------------------------------------------------------------------------------------------------------- formats


def _json_lines(url: str, data: bytes) -> Iterator[tuple[int, Problem]]:
    decoder = msgspec.json.Decoder(Problem)
    _refuse_utf16(url, data)
    for row, line in enumerate(data.removeprefix(_UTF8_BOM).split(b"\n"), start=1):
        if not line.strip():
            continue
        if len(line) > MAX_LINE_BYTES:
            raise InputError(
                f"the line has {len(line):,} bytes, expected at most {MAX_LINE_BYTES:,}",
                file=url,
                row=row,
                remedy="Write one problem a line; keep large files as artifacts of the environment",
            )
        text = _utf8(line, file=url, row=row)
        try:
            yield row, decoder.decode(text)
        except msgspec.ValidationError as error:
            raise _invalid(error, file=url, row=row) from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise _not_json(text, error, file=url, row=row) from error


def _csv(url: str, data: bytes) -> Iterator[tuple[int, Problem]]:
    _refuse_utf16(url, data)
    text = _utf8(data.removeprefix(_UTF8_BOM), file=url, row=None)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    csv.field_size_limit(MAX_LINE_BYTES)
    row = 0
    try:
        _check_columns(reader.fieldnames or (), file=url)
        for row, cells in enumerate(reader, start=1):
            if None in cells or None in cells.values():
                expected = len(reader.fieldnames or ())
                raise InputError(
                    f"has {'more' if None in cells else 'fewer'} cells than the header, expected {expected}",
                    file=url,
                    row=row,
                    remedy="Quote cells that hold commas or line ends, and double the quotes inside them",
                )
            values: dict[str, Any] = {name: cell for name, cell in cells.items() if cell != ""}
            if "difficulty" in values:
                values["difficulty"] = _number(values["difficulty"], file=url, row=row)
            yield row, _problem(values, file=url, row=row)
    except csv.Error as error:
        raise InputError(f"is not CSV: {error}", file=url, row=row + 1, remedy="Quote every cell of JSON text") from error


def _parquet(url: str, data: bytes) -> Iterator[tuple[int, Problem]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(data), use_threads=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(
            f"is not a readable Parquet file ({error})", file=url, remedy="Write it again; the file may be cut off"
        ) from error
    _check_columns(table.column_names, file=url)
    for name in NESTED:  # text may come as large_string or dictionary-encoded: other writers than Arrow's own do that
        if name in table.column_names and not _is_text(kind := table.schema.field(name).type):
            raise InputError(
                f"has type {kind}, expected JSON text",
                file=url,
                field=name,
                remedy="Store nested values as strings of JSON; Arrow structs fill missing fields with nulls",
            )
    for row, cells in enumerate(table.to_pylist(), start=1):
        yield row, _problem({name: cell for name, cell in cells.items() if cell is not None}, file=url, row=row)


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    inner = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(inner) or types.is_large_string(inner))


def _problem(cells: Mapping[str, Any], *, file: str, row: int) -> Problem:
    """A Problem from flat cells, the nested ones parsed from their JSON text."""
    values = dict(cells)
    for name in NESTED:
        if name in values:
            try:
                values[name] = msgspec.json.decode(values[name])
            except (msgspec.DecodeError, RecursionError) as error:
                raise _not_json(str(values[name]), error, file=file, row=row, field=name) from error
    try:
        problem = msgspec.convert(values, Problem)
    except msgspec.ValidationError as error:
        raise _invalid(error, file=file, row=row) from error
    if not math.isfinite(problem.difficulty):
        raise _not_finite(str(problem.difficulty), "difficulty", file=file, row=row)
    return problem


# ------------------------------------------------------------------------------------------------------------ explanations


def _check_columns(names: Collection[str], *, file: str) -> None:
    known = Problem.__struct_fields__
    for name in names:
        if name not in known:
            remedy = f"{_closest(name, known)}Known: {', '.join(known)}"
            raise InputError("is not a field of a problem", file=file, field=name, remedy=remedy)
    for field in msgspec.structs.fields(Problem):
        if field.required and field.name not in names:
            raise InputError("the column is missing", file=file, field=field.name, remedy="Add it to every row")


def _invalid(error: msgspec.ValidationError, *, file: str, row: int) -> InputError:
    """msgspec's message with its path as the field, and a remedy that fits."""
    problem, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    if missing := re.search(r"missing required field `(\w+)`", problem):
        name = f"{field}.{missing[1]}" if field else missing[1]
        return InputError("the field is missing", file=file, row=row, field=name, remedy=f"Add '{missing[1]}' to the row")
    if unknown := re.search(r"unknown field `(\w+)`", problem):
        name = f"{field}.{unknown[1]}" if field else unknown[1]
        known = Problem.__struct_fields__ if not field else ()
        remedy = f"{_closest(unknown[1], known)}Remove or rename it"
        return InputError("is not a field of a problem", file=file, row=row, field=name, remedy=remedy)
    problem = problem[:1].lower() + problem[1:]
    if problem.startswith("invalid enum value") and (known := _choices(field)):
        return InputError(problem, file=file, row=row, field=field, remedy=f"Use one of {', '.join(known)}")
    return InputError(problem, file=file, row=row, field=field or None, remedy="Write a value of the expected type")


def _choices(field: str) -> tuple[str, ...]:
    """The values that the field at a path like "messages[0].role" may have."""
    return {"split": get_args(Split), "role": get_args(Role), "trust": get_args(TrustLevel)}.get(field.split(".")[-1], ())


def _not_json(text: str, error: Exception, *, file: str, row: int, field: str | None = None) -> InputError:
    """Why text is no JSON: a NaN that Python would write, or a syntax error."""
    try:
        value = json.loads(text, parse_constant=_NotANumber)
    except (ValueError, RecursionError):
        detail = str(error).removeprefix("JSON is malformed: ")
        return InputError(
            f"is not JSON: {detail}", file=file, row=row, field=field, remedy="Write one JSON object a line, or fix that one"
        )
    for path, found in _walk(value, field or ""):
        if isinstance(found, _NotANumber):
            return _not_finite(found, path, file=file, row=row)
    return InputError(f"is not JSON: {error}", file=file, row=row, field=field, remedy="Write strict JSON")


class _NotANumber(str):
    """NaN, Infinity or -Infinity, as Python's json writes them."""

    __slots__ = ()


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    items: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, dict):
        items = ((f"{path}.{key}" if path else key, inner) for key, inner in value.items())
    elif isinstance(value, list):
        items = ((f"{path}[{index}]", inner) for index, inner in enumerate(value))
    else:
        yield path, value
    for place, inner in items:
        yield from _walk(inner, place)


def _not_finite(found: str, field: str, *, file: str, row: int) -> InputError:
    return InputError(
        f"found {found}, expected a finite number", file=file, row=row, field=field, remedy="Correct the value or drop the row"
    )


def _number(text: str, *, file: str, row: int) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(
            f"expected a number, got '{text[:40]}'", file=file, row=row, field="difficulty", remedy="Write a number"
        ) from None


def _refuse_utf16(url: str, data: bytes) -> None:
    encoding = _BOMS.get(data[:2])
    if encoding is not None:
        raise InputError(f"is {encoding}, expected UTF-8", file=url, row=1, remedy=_SAVE_UTF8)


def _utf8(data: bytes, *, file: str, row: int | None) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = row if row is not None else data[: error.start].count(b"\n") + 1
        bad = data[error.start]
        raise InputError(
            f"is not UTF-8: byte 0x{bad:02x} at position {error.start + 1}", file=file, row=line, remedy=_SAVE_UTF8
        ) from None


def _closest(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean '{close[0]}'? " if close else ""

"""Rows of somebody's file -> problems of a domain, as a file that `curate.sources` reads; what does not fit is quarantined.

Contract: every row of the input is in exactly one of two files. `<out>` has one Problem a line, in the order of the rows;
NAME.quarantine.jsonl (of NAME.problems.jsonl) has one line for every other row: {"file", "row", "field", "problem", "remedy",
"source"}, where `source` is the row as it was read (text for a line that is no JSON). Mend `source` there and import that
file. The problems were held to their contract, and read back as a campaign would.

JSON lines (also gzipped), Parquet or CSV on any fsspec URL. Cells of Parquet and CSV that hold JSON text for a list or an
object are parsed. A file that cannot be read at all raises InputError. What a row must have is the domain's to say: it offers
`problem_from_row(row, *, split)`. `prove` grades every oracle and every no-op in real boxes.
"""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec  # type: ignore[import-untyped,unused-ignore]
import msgspec

from data_contracts import gate
from data_contracts.errors import ConfigError, InputError
from data_contracts.protocols import SandboxBackend, to_json
from data_contracts.records import Problem, Split
from environments.base import Domain, Policy
from environments.registry import domain as find_domain
from environments.registry import domain_names, verifier
from environments.sandbox.files import check_name
from environments.scripted import run_scripted
from tasks.sources import MAX_LINE_BYTES, read_problems

_NO_CELL = ("", None)
Row = tuple[int, Any, InputError | None]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A row that became no problem, why, and the row itself."""

    error: InputError
    source: Any


@dataclass(frozen=True, kw_only=True)
class Import:
    """`rows[i]` is the row that `problems[i]` came from; `sources[i]` that row's fields."""

    url: str
    problems: tuple[Problem, ...]
    rows: tuple[int, ...]
    sources: tuple[Any, ...]
    refused: tuple[Refused, ...]

    def without(self, errors: Mapping[int, InputError]) -> Import:
        """The same with some problems refused after all; `errors`: index of a problem -> why."""
        kept = [index for index in range(len(self.problems)) if index not in errors]
        late = [
            Refused(error=_placed(error, self.url, self.rows[index]), source=self.sources[index])
            for index, error in errors.items()
        ]
        return Import(
            url=self.url,
            problems=tuple(self.problems[i] for i in kept),
            rows=tuple(self.rows[i] for i in kept),
            sources=tuple(self.sources[i] for i in kept),
            refused=tuple(sorted([*self.refused, *late], key=lambda one: one.error.row or 0)),
        )


@dataclass(frozen=True, kw_only=True)
class Written:
    """Where an import was written; `quarantine` is None when every row fitted."""

    problems: Path
    quarantine: Path | None


def import_problems(url: str, *, domain: str, split: Split = "train", heldout_share: float = 0.0) -> Import:
    """All rows of one file as problems of `domain`. A row's own `split` wins; without one, `heldout_share` of the rows, chosen
    by a digest of their prompts, is held out. Raises InputError for an unreadable file or a domain that takes no rows."""
    made = find_domain(domain)
    convert = getattr(made, "problem_from_row", None)
    if convert is None:
        raise ConfigError(
            f"the domain '{domain}' does not take rows", field="domain",
            remedy="Use --domain code, give the domain a problem_from_row(row, *, split), or write whole problems",
        )  # fmt: skip
    if not 0 <= heldout_share < 1:
        raise ConfigError(f"found {heldout_share}", field="heldout_share", remedy="Use 0 or more, below 1")
    problems: list[Problem] = []
    rows: list[int] = []
    sources: list[Any] = []
    refused: list[Refused] = []
    places: dict[str, int] = {}
    for row, values, error in _rows(url):
        found: Problem | InputError | None = error
        if found is None:
            chosen: Split = "heldout" if _share(values) < heldout_share else split
            found = _convert(convert, values, chosen, places)
        if isinstance(found, Problem):
            places[found.id] = row
            problems.append(found)
            rows.append(row)
            sources.append(values)
        elif found is not None:
            refused.append(Refused(error=_placed(found, url, row), source=values))
    if not problems and not refused:
        raise InputError("has no rows", file=url, remedy="Write at least one row")
    return Import(
        url=url, problems=tuple(problems), rows=tuple(rows), sources=tuple(sources), refused=tuple(refused)
    )  # fmt: skip


def write_import(done: Import, out: Path) -> Written:
    """Both files, whole or not at all; then the problems are read back. A quarantine file that is not needed any more goes."""
    quarantine = out.with_name(f"{out.name.removesuffix('.jsonl').removesuffix('.problems')}.quarantine.jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    _replace(out, [to_json(problem) for problem in done.problems])
    if done.problems:
        read_problems(str(out), domains=domain_names())
    if not done.refused:
        quarantine.unlink(missing_ok=True)
        return Written(problems=out, quarantine=None)
    _replace(quarantine, [_note(one) for one in done.refused])
    return Written(problems=out, quarantine=quarantine)


async def prove(
    done: Import, backend: SandboxBackend, *, progress: Callable[[int], None] = lambda count: None
) -> dict[int, InputError]:
    """Problem index -> what its grading showed: an oracle below 1, two verdicts that differ, or a no-op that earns.

    Rows without a solution are graded by their no-op alone. Raises InfraError as the backend does.
    """
    turns = asyncio.Semaphore(getattr(backend, "concurrency", 4))
    errors: dict[int, InputError] = {}
    finished = 0

    async def one(index: int, problem: Problem) -> None:
        nonlocal finished
        async with turns:
            error = await _proven(find_domain(problem.domain), problem, backend)
        finished += 1
        progress(finished)
        if error is not None:
            errors[index] = error

    await asyncio.gather(*(one(index, problem) for index, problem in enumerate(done.problems)))
    return dict(sorted(errors.items()))


async def _proven(domain: Domain, problem: Problem, backend: SandboxBackend) -> InputError | None:
    async def graded(policy: Policy) -> tuple[float, str, bytes]:
        seconds = float(problem.verifier.settings.get("seconds", 60.0))
        episode = await run_scripted(domain, problem, policy, backend=backend, deadline_seconds=max(60.0, 2 * seconds))
        verdict = episode.verdict
        return episode.score, verdict.evidence if verdict else episode.stop_reason, to_json({"verdict": verdict})

    if problem.metadata.get("solution"):
        score, evidence, first = await graded(domain.oracle(problem))
        if score < 1.0 - 1e-9:
            return InputError(
                f"its solution scores {score:g}: {evidence[:600]}", field="solution", remedy="Mend the solution or the tests"
            )
        if (await graded(domain.oracle(problem)))[2] != first:
            return InputError(
                "its solution was graded twice with different verdicts", field="test",
                remedy="Take clocks, unseeded draws and addresses out of the tests",
            )  # fmt: skip
    score, evidence, _ = await graded(domain.noop(problem))
    if score > 0.0:
        return InputError(f"doing nothing scores {score:g}: {evidence[:300]}", field="test", remedy="Add a test that it fails")
    return None


# ------------------------------------------------------------------------------------------------------------------ one row


def _convert(
    convert: Callable[..., Problem], values: Mapping[str, Any], split: Split, places: Mapping[str, int]
) -> Problem | InputError:
    try:
        problem = convert(values, split=split)
        problem = msgspec.json.decode(to_json(problem), type=Problem)  # what the file will say
        verifier(problem.verifier.kind).check(problem)
    except InputError as error:
        return error
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        return InputError(f"does not make a problem: {str(error)[:200]}", remedy="Compare the row with the documented fields")
    try:
        for name in problem.verifier.collect:
            check_name(name)
    except InputError as error:
        return InputError(error.problem, field="path" if name == values.get("path") else "files", remedy=error.remedy)
    if problem.id in places:
        return InputError(
            f"the id '{problem.id}' is already used in row {places[problem.id]}", field="id", remedy="Give every row its own id"
        )
    if broken := gate.check_problems([problem]):
        return InputError(broken[0].problem, field=broken[0].field, remedy=broken[0].remedy)
    if len(to_json(problem)) > MAX_LINE_BYTES:
        return InputError(f"makes a line of more than {MAX_LINE_BYTES:,} bytes", remedy="Make its files or tests smaller")
    return problem


def _share(values: Any) -> float:
    prompt = values.get("prompt") or values.get("text") if isinstance(values, dict) else ""
    return int.from_bytes(hashlib.sha256(str(prompt).encode()).digest()[:6], "big") / 2**48


def _placed(error: InputError, url: str, row: int) -> InputError:
    field = error.field.removeprefix("verifier.settings.") if error.field else None
    return InputError(error.problem, file=url, row=row, field=field, remedy=error.remedy)


def _note(one: Refused) -> bytes:
    error = one.error
    note = {"file": error.file, "row": error.row, "field": error.field, "problem": error.problem, "remedy": error.remedy}
    try:
        return msgspec.json.encode(note | {"source": one.source})
    except (TypeError, ValueError):  # a cell that JSON has no form for
        return msgspec.json.encode(note | {"source": repr(one.source)})


def _replace(path: Path, lines: Sequence[bytes]) -> None:
    aside = path.with_name(f".{path.name}.part")
    aside.write_bytes(b"".join(line + b"\n" for line in lines))
    aside.replace(path)


# ------------------------------------------------------------------------------------------------------------------ reading


def _rows(url: str) -> Iterator[Row]:
    suffixes = [suffix.lower() for suffix in PurePosixPath(url.split("?")[0]).suffixes]
    form = next((s for s in reversed(suffixes) if s not in (".gz", ".bz2", ".xz", ".zst")), "")
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv, ".parquet": _parquet}
    if form not in readers:
        raise InputError(f"has the ending '{form}'", file=url, remedy=f"Name the file by its format: {', '.join(readers)}")
    return readers[form](url, _read(url))


def _read(url: str) -> bytes:
    try:
        with fsspec.open(url, "rb", compression="infer") as stream:
            data: bytes = stream.read()
    except FileNotFoundError:
        raise InputError("there is no such file", file=url, remedy="Check the path") from None
    except (OSError, ValueError, ImportError, EOFError) as error:
        raise InputError(f"cannot be read: {error}", file=url, remedy="Check the URL, its credentials and the file") from error
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError("is UTF-16, expected UTF-8", file=url, remedy="Save the file in UTF-8")
    return data.removeprefix(b"\xef\xbb\xbf")


def _json_lines(url: str, data: bytes) -> Iterator[Row]:
    for row, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            values = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            detail = str(error).removeprefix("JSON is malformed: ")
            problem = InputError(f"is not JSON: {detail}", remedy="Write one JSON object a line, in UTF-8")
            yield row, line.decode(errors="replace"), problem
            continue
        if isinstance(values, dict) and {"source", "remedy", "problem"} <= values.keys():
            values = values["source"]  # a quarantined row, mended in place
        wrong = None if isinstance(values, dict) else InputError("is no JSON object", remedy="Write one object a line")
        yield row, values, wrong


def _csv(url: str, data: bytes) -> Iterator[Row]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError("is not UTF-8", file=url, row=line, remedy="Save the file in UTF-8") from None
    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    row = 0
    try:
        for row, cells in enumerate(reader, start=1):
            if None in cells or None in cells.values():
                expected = len(reader.fieldnames or ())
                wrong = InputError(
                    f"has {'more' if None in cells else 'fewer'} cells than the header, expected {expected}",
                    remedy="Quote cells that hold commas, quotes or line ends",
                )
                yield row, {str(name): cell for name, cell in cells.items()}, wrong
                continue
            yield row, {name: _cell(cell) for name, cell in cells.items() if cell not in _NO_CELL}, None
    except csv.Error as error:
        raise InputError(f"is not CSV: {error}", file=url, row=row + 1, remedy="Quote cells with line ends") from error


def _parquet(url: str, data: bytes) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(data), use_threads=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"is not a readable Parquet file ({error})", file=url, remedy="Write the file again") from error
    for row, cells in enumerate(table.to_pylist(), start=1):
        yield row, {name: _cell(cell) for name, cell in cells.items() if cell not in _NO_CELL}, None


def _cell(cell: Any) -> Any:
    """A cell of text that is JSON for a list or an object, as that."""
    if isinstance(cell, str) and cell[:1] in ("[", "{"):
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            return cell
    return cell

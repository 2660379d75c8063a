"""What `bessemer grade` grades, read from outside: solutions in JSON lines, files and folders, problems by their id.

A row of a solutions file is {"problem_id", "solution"}, the solution being text, {file name: text}, or a list of tool calls
[{"name", "arguments": object or text}, ...], beside which "answer" is the final message. A bad row never stops the
others: it becomes an `invalid` result whose evidence names file, row, field and remedy. Blank lines are passed over.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from data_contracts.errors import InputError
from data_contracts.records import Problem, Record, Split
from environments.base import Domain
from environments.sandbox.files import read_files
from tasks.grade import Graded, Played, Solution, as_solution, collected, invalid

MAX_SEARCHED = 50_000
"""Problems of one stream that are looked at for an id."""
SPLITS: tuple[Split, ...] = ("train", "heldout")


class CallRow(Record, frozen=True, kw_only=True):
    """One tool call; a text as arguments is what the policy would have written, well-formed or not."""

    name: str
    arguments: dict[str, Any] | str


class SolutionRow(Record, frozen=True, kw_only=True):
    """One line of a solutions file; `answer` only beside a list of calls."""

    problem_id: str
    solution: str | dict[str, str] | list[CallRow]
    answer: str | None = None


def read_solutions(
    file: str, lines: Iterable[bytes], problems: Mapping[str, Problem]
) -> Iterator[tuple[Problem, Solution] | Graded]:
    """The rows of a JSON lines file, lazily; a bad one becomes an `invalid` result that names file, row, field and remedy."""
    decoder = msgspec.json.Decoder(SolutionRow)
    for row, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _job(decoder, line.removeprefix(b"\xef\xbb\xbf") if row == 1 else line, problems)
        except InputError as error:
            yield invalid(id_of(line), InputError(error.problem, file=file, row=row, field=error.field, remedy=error.remedy))


def _job(decoder: msgspec.json.Decoder[SolutionRow], line: bytes, problems: Mapping[str, Problem]) -> tuple[Problem, Solution]:
    """One row's problem and solution. Raises InputError."""
    try:
        entry = decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad_row(error) from error
    problem = problems.get(entry.problem_id)
    if problem is None:
        remedy = f"Known are {_some(problems)}"
        raise InputError(f"there is no problem '{entry.problem_id[:80]}'", field="problem_id", remedy=remedy)
    if isinstance(entry.solution, list):
        return problem, _played(problem, entry.solution, entry.answer)
    if entry.answer is not None:
        raise InputError("stands beside a solution that is not a list of calls", field="answer", remedy="Leave one of them out")
    if isinstance(entry.solution, str):
        return problem, as_solution(problem, entry.solution)
    solution = {name: text.encode("utf-8", errors="replace") for name, text in entry.solution.items()}
    collected(problem, solution)
    return problem, solution


def _played(problem: Problem, found: Sequence[CallRow], answer: str | None) -> Played:
    if not problem.tools:
        raise InputError(f"problem {problem.id} has no tools to call", field="solution", remedy="Give an answer, or its files")
    made = [(call.name, call.arguments if isinstance(call.arguments, str) else _json(call.arguments)) for call in found]
    return Played(calls=tuple(made), answer=answer or "")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def read_calls(path: Path, problem: Problem, *, answer: str | None) -> Played:
    """A JSON file with a list of calls. Raises InputError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[CallRow])
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=str(path), remedy="Check the path") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(str(error), file=str(path), remedy='Write [{"name": text, "arguments": {...}}, ...]') from error
    return _played(problem, found, answer)


def read_lines(file: Path) -> list[bytes]:
    """The lines of a file. Raises InputError for one that cannot be read or holds nothing."""
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=str(file), remedy="Check the path") from error
    if not any(line.strip() for line in lines):
        raise InputError("has no rows", file=str(file), remedy='Write {"problem_id": ..., "solution": ...}, one a line')
    return lines


def _bad_row(error: Exception) -> InputError:
    if not isinstance(error, msgspec.ValidationError):
        return InputError(f"is not JSON: {error}", remedy="Write one JSON object a line, in UTF-8")
    problem, _, path = str(error).partition(" - at `$")
    named = problem.split("`")[1] if "field `" in problem else path.rstrip("`").lstrip(".")
    return InputError(
        problem[:1].lower() + problem[1:], field=named or None,
        remedy='Write {"problem_id": text, "solution": text, {file name: text}, or [{"name", "arguments"}, ...]}',
    )  # fmt: skip


def id_of(line: bytes) -> str:
    """The problem id of a row that is JSON but not as it should be."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    name = value.get("problem_id") if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


def _some(problems: Collection[str]) -> str:
    shown = ", ".join(islice(problems, 3))
    return f"{shown} and {len(problems) - 3} more" if len(problems) > 3 else shown or "none"


def find_problems(domain: Domain, ids: Collection[str], *, seed: int = 0) -> dict[str, Problem]:
    """The problems of these ids among a domain's own, level by level; what is not found is left out."""
    left, found = set(ids), {}
    for level in domain.levels:
        for split in SPLITS:
            mine = {name for name in left if f"/{split}/" in name}
            if not mine:
                continue
            for problem in islice(domain.problems(split, seed=seed, level=level), MAX_SEARCHED):
                if problem.id in mine:
                    found[problem.id] = problem
                    mine.discard(problem.id)
                    left.discard(problem.id)
                    if not mine:
                        break
    return found


def require_problem(domain: Domain, problem_id: str, *, seed: int = 0) -> Problem:
    """Raises InputError with an example of the domain's ids."""
    found = find_problems(domain, [problem_id], seed=seed)
    if problem_id in found:
        return found[problem_id]
    example = next(iter(domain.problems("train", seed=seed)), None)
    remedy = f"An id looks like {example.id}; try another --seed, or --problems FILE" if example else "It has no problems"
    raise InputError(f"domain '{domain.name}' makes no problem '{problem_id}'", field="problem", remedy=remedy)


def read_solution(path: Path, problem: Problem) -> Solution:
    """A file or folder as the solution of a problem. Raises InputError."""
    names = problem.verifier.collect
    if path.is_dir():
        if not names:
            raise InputError("is a folder, and the problem takes an answer", file=str(path), remedy="Give a file or --answer")
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = read_files(folder, names, max_bytes=problem.verifier.collect_max_bytes)
        finally:
            os.close(folder)
        if not found:
            raise InputError(
                "holds none of the files that the problem collects, as regular files", file=str(path),
                remedy=f"Expected {', '.join(names)}",
            )  # fmt: skip
        return {entry.name: entry.content for entry in found}
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=str(path), remedy="Check the path") from error
    if len(names) == 1:
        return {names[0]: content}
    if names:
        if path.name not in names:
            raise InputError(
                "is not a file that the problem collects", file=str(path), remedy=f"Give a folder with {', '.join(names)}"
            )
        return {path.name: content}
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 (byte {error.start})", file=str(path), remedy="Save the answer in UTF-8") from error

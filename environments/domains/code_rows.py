"""A row of somebody's file -> a problem of the domain `code`, without writing Python. Pure: a mapping in, a Problem out.

Fields of a row (all but the first two optional):

    prompt        the question: Python to be completed, or text          (also: text)
    test          test code, one string: `check(candidate)`, `test_` functions, or unittest.TestCase classes   -> `proxied`
    test_list     asserts, each its own test (with test_setup_code and test_imports before them)                -> `proxied`
    cases         [{"arguments": [...], "expected": ...}], plain data for `entry_point`                         -> `cases`
    test_files    {name: source} of a pytest suite, with `expected` where its ids cannot be read off            -> `in_process`
    id            unique name (also: task_id); else a digest of the row
    entry_point   the function that is asked for
    solution      the oracle (also: canonical_solution, code): a whole file, or what follows the prompt
    files         {name: text} that the policy finds in its box; the row becomes a multi-turn problem with file tools
    path          the file that is graded, default solution.py
    limits        {"seconds", "memory_mb", "disk_mb", "pids", "cpus"} of grading
    in_place      carry changes of arguments back to the tests (default: read off the tests; see verifiers/proxied.py)
    image         declared root file system variant with the packages that the tests import
    split, difficulty, budgets, metadata    as in a problem file

Exactly one kind of tests. Rows of HumanEval's and MBPP's shape are rows of this kind as they are. Fields that are not named
here are kept in `metadata["row"]`; a name that is close to one that is missing is taken for a mistake.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from data_contracts.errors import InputError
from data_contracts.protocols import to_json
from data_contracts.records import (
    Budgets,
    EnvironmentSpec,
    Message,
    Problem,
    SandboxLimits,
    SandboxSpec,
    Split,
    VerifierSpec,
)
from environments.domains.code_tools import TOOLS
from environments.verifiers.function_cases import DEFAULT_SECONDS as CASE_SECONDS
from environments.verifiers.proxied import DEFAULT_SECONDS, NEEDS
from environments.verifiers.proxied_rows import TestCode, defines, describe, free_names, test_ids
from environments.verifiers.values import encode

ALIASES = {"task_id": "id", "text": "prompt", "canonical_solution": "solution", "code": "solution"}
TEST_KINDS = ("test", "test_list", "cases", "test_files")
KNOWN = (
    "id", "prompt", "entry_point", "solution", *TEST_KINDS, "expected", "test_setup_code", "test_imports", "files", "path",
    "limits", "in_place", "image", "split", "difficulty", "budgets", "metadata",
)  # fmt: skip
LIMITS = ("seconds", "memory_mb", "disk_mb", "pids", "cpus")
COLLECT_BYTES = 256 * 1024
_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:(?:^|\n)[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def problem_of(row: Mapping[str, Any], *, split: Split = "train", domain: str = "code") -> Problem:
    """Raises InputError with the field and what to do."""
    values = _fields(row)
    prompt = _text(values, "prompt")
    path, entry_point = str(values.get("path") or "solution.py"), values.get("entry_point")
    if entry_point is not None and not (isinstance(entry_point, str) and entry_point.isidentifier()):
        raise InputError(f"found {entry_point!r}", field="entry_point", remedy="Name the function that is asked for")
    files = _texts(values, "files")
    solution = _solution(values, path)
    limits, seconds = _limits(values)
    verifier, entry_point = _verifier(values, prompt, path=path, entry_point=entry_point, files=files, seconds=seconds)
    code = _code(prompt, entry_point)
    if code and path in solution:
        solution[path] = completed(code, solution[path])
    box = SandboxSpec(image=str(values.get("image") or "base"), needs=("exec", "files"), limits=limits)
    if verifier.kind == "proxied":
        box = msgspec.structs.replace(box, needs=NEEDS)
    verifier = msgspec.structs.replace(
        verifier, sandbox=box, collect=(path, *(name for name in files if name != path)), collect_max_bytes=COLLECT_BYTES
    )
    split_ = values.get("split") or split
    extra = {name: value for name, value in row.items() if name not in KNOWN and name not in ALIASES and value is not None}
    return Problem(
        id=f"{domain}/{split_}/{_local_id(values, row)}",
        domain=domain,
        split=split_,
        difficulty=_difficulty(values),
        messages=(Message(role="user", content=_question(prompt, code, entry_point, path, files, solution)),),
        tools=TOOLS if files else (),
        environment=EnvironmentSpec(
            kind=domain,
            settings={"path": path, "code": code, "entry_point": entry_point, "files": files},
            sandbox=_policy_box(box) if files else None,
        ),
        verifier=verifier,
        budgets=_budgets(values, multi_turn=bool(files)),
        metadata={**(_mapping(values, "metadata") or {}), "solution": solution, **({"row": extra} if extra else {})},
    )


def completed(code: str, text: str) -> str:
    """A whole file from the prompt's code and what was written: its continuation, or definitions that come after it.

    The prompt stays in front, so that its imports and helpers are there whether or not they were repeated.
    """
    first = next((line for line in text.splitlines() if line.strip()), "")
    if not code or "from __future__" in text:
        return text
    return f"{code.rstrip()}\n{text}" if first[:1] in (" ", "\t") else f"{code.rstrip()}\n\n\n{text}"


def written(reply: str, *, code: str, entry_point: str | None) -> str:
    """The file that a reply amounts to; empty for an empty one. Looks at text only and runs in linear time."""
    blocks = [body for _, body in _FENCE.findall(reply)]
    if entry_point:
        definition = re.compile(rf"^(?:async[ \t]+)?(?:def|class)[ \t]+{re.escape(entry_point)}\b", re.MULTILINE)
        blocks = [body for body in blocks if definition.search(body)] or blocks
    text = blocks[-1] if blocks else reply
    return completed(code, text) if text.strip() else ""


# ------------------------------------------------------------------------------------------------------------------- fields


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in row.items():
        known = ALIASES.get(name, name)
        if value is None or known not in KNOWN:
            continue
        if known in values and known == name:  # the plain name wins over its other names
            values[known] = value
        values.setdefault(known, value)
    missing = [name for name in ("prompt", "test", "solution", "entry_point", "limits", "files") if name not in values]
    for name in row:
        if name not in KNOWN and name not in ALIASES and (close := difflib.get_close_matches(name, missing, n=1, cutoff=0.8)):
            raise InputError("is not a field of a row", field=name, remedy=f"Did you mean '{close[0]}'? Rename it")
    if "prompt" not in values:
        raise InputError("the field is missing", field="prompt", remedy="Add the question to the row")
    given = [name for name in TEST_KINDS if values.get(name)]
    if len(given) != 1:
        raise InputError(
            f"expected exactly one kind of tests, found {', '.join(given) or 'none'}", field=given[1] if given else "test",
            remedy=f"Give one of {', '.join(TEST_KINDS)}",
        )  # fmt: skip
    return values


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "")
    if not isinstance(value, str) or not value.strip():
        raise InputError(
            f"found {_brief(value)}, expected a text that is not empty", field=name, remedy="Write it as one string"
        )
    return value


def _texts(values: Mapping[str, Any], name: str) -> dict[str, str]:
    """{name: text}; also from pairs (an Arrow map) and from [{"name" or "path", "content"}]."""
    value = values.get(name) or {}
    if isinstance(value, list):
        pairs = [(v.get("name") or v.get("path"), v.get("content")) if isinstance(v, dict) else tuple(v) for v in value]
        value = dict(pairs) if all(len(pair) == 2 for pair in pairs) else None
    if not isinstance(value, dict):
        raise InputError(f"found {_brief(value)}, expected {{name: text}}", field=name, remedy="Write files by their names")
    found = {str(key): text for key, text in value.items() if text is not None}  # Arrow fills structs with nulls
    for key, text in found.items():
        if not isinstance(text, str):
            raise InputError(f"found {_brief(text)}, expected text", field=f"{name}.{key}", remedy="Only text files")
    return found


def _mapping(values: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    value = values.get(name)
    if value is not None and not isinstance(value, dict):
        raise InputError(f"found {_brief(value)}, expected an object", field=name, remedy="Write {name: value}")
    return value


def _solution(values: Mapping[str, Any], path: str) -> dict[str, str]:
    """The oracle's files; empty when the row has none."""
    value = values.get("solution")
    if value is None or value == "":
        return {}
    return {path: value} if isinstance(value, str) else _texts(values, "solution")


def _limits(values: Mapping[str, Any]) -> tuple[SandboxLimits, float | None]:
    given = _mapping(values, "limits") or {}
    for name, value in given.items():
        if name not in LIMITS:
            close = difflib.get_close_matches(name, LIMITS, n=1)
            remedy = f"{f'Did you mean {close[0]}? ' if close else ''}Limits are {', '.join(LIMITS)}"
            raise InputError("is not a limit", field=f"limits.{name}", remedy=remedy)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise InputError(f"found {_brief(value)}, expected a number above 0", field=f"limits.{name}", remedy="Correct it")
    seconds = given.get("seconds")
    plain = SandboxLimits()
    return SandboxLimits(
        memory_bytes=int(given.get("memory_mb", plain.memory_bytes >> 20)) << 20,
        disk_bytes=int(given.get("disk_mb", plain.disk_bytes >> 20)) << 20,
        pids=int(given.get("pids", plain.pids)),
        cpus=float(given.get("cpus", plain.cpus)),
        lifetime_seconds=max(plain.lifetime_seconds, 4 * float(seconds or 0)),
    ), None if seconds is None else float(seconds)


def _policy_box(box: SandboxSpec) -> SandboxSpec:
    limits = msgspec.structs.replace(box.limits, lifetime_seconds=max(900.0, box.limits.lifetime_seconds))
    return msgspec.structs.replace(box, needs=("exec", "files", "freeze"), limits=limits)


def _difficulty(values: Mapping[str, Any]) -> float:
    value = values.get("difficulty", 0.5)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"found {_brief(value)}, expected a number", field="difficulty", remedy="Write 0 (easy) to 1 (hard)")
    return float(value)


def _budgets(values: Mapping[str, Any], *, multi_turn: bool) -> Budgets:
    plain = {"max_turns": 1, "max_tokens_per_turn": 512, "max_episode_tokens": 4096}
    if multi_turn:
        plain |= {"max_turns": 12, "max_episode_tokens": 8192, "max_tool_calls": 24}
    try:
        return msgspec.convert(plain | (_mapping(values, "budgets") or {}), Budgets)
    except msgspec.ValidationError as error:
        raise InputError(str(error), field="budgets", remedy="Use the budgets of a problem file") from None


def _local_id(values: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    given = values.get("id")
    return str(given) if given not in (None, "") else f"row-{hashlib.sha256(to_json(dict(row))).hexdigest()[:12]}"


# -------------------------------------------------------------------------------------------------------------------- tests


def _verifier(
    values: Mapping[str, Any], prompt: str, *, path: str, entry_point: str | None, files: dict[str, str], seconds: float | None
) -> tuple[VerifierSpec, str | None]:
    if values.get("cases"):
        if entry_point is None:
            raise InputError("cases need the function to be called", field="entry_point", remedy="Name the function")
        settings = {"path": path, "function": entry_point, "cases": _cases(values), "seconds": seconds or CASE_SECONDS}
        return VerifierSpec(kind="function_cases", trust="cases", settings=settings), entry_point
    if values.get("test_files"):
        tests = _texts(values, "test_files")
        expected = values.get("expected") or [f"{n}::{t.replace('.', '::')}" for n, s in tests.items() for t in _suite(n, s)]
        settings = {"tests": tests, "expected": list(expected), "seconds": seconds or DEFAULT_SECONDS}
        return VerifierSpec(kind="unit_tests", trust="in_process", settings=settings), entry_point
    source = _listed(values) if values.get("test_list") else _text(values, "test")
    if entry_point is None:
        entry_point = _only_name(source, values, path)
    field = "test_list" if values.get("test_list") else "test"
    try:
        code = describe(source, prompt=_code(prompt, entry_point) or prompt, entry_point=entry_point)
    except InputError as error:
        place = field if error.field == "tests" else error.field
        raise InputError(error.problem, field=place, remedy=error.remedy) from error
    settings = _proxied_settings(code, path) | {"files": files, "seconds": seconds or DEFAULT_SECONDS}
    if values.get("in_place") is not None:
        settings["in_place"] = bool(values["in_place"])
    return VerifierSpec(kind="proxied", trust="proxied", settings=settings), entry_point


def _proxied_settings(code: TestCode, path: str) -> dict[str, Any]:
    return {
        "path": path, "names": list(code.names), "entry_point": code.entry_point, "helpers": code.helpers, "tests": code.tests,
        "expected": list(code.expected), "in_place": code.in_place,
    }  # fmt: skip


def _cases(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    cases = values["cases"]
    if not isinstance(cases, list):
        raise InputError(f"found {_brief(cases)}, expected a list", field="cases", remedy="Write a list of cases")
    found = []
    for index, case in enumerate(cases):
        if not isinstance(case, dict) or not isinstance(case.get("arguments"), list) or "expected" not in case:
            raise InputError(
                'expected {"arguments": [...], "expected": ...}', field=f"cases[{index}]", remedy="Write both fields"
            )
        arguments = [encode(argument) for argument in case["arguments"]]
        found.append({"id": f"case{index:02d}", "arguments": arguments, "expected": encode(case["expected"])})
    return found


def _suite(name: str, source: str) -> list[str]:
    try:
        return list(test_ids(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"is not Python: {error}", field=f"test_files.{name}", remedy="Correct the code") from None


def _listed(values: Mapping[str, Any]) -> str:
    """Asserts of a list as one test function each."""
    asserts = values["test_list"]
    if not isinstance(asserts, list) or not all(isinstance(one, str) for one in asserts):
        raise InputError(f"found {_brief(asserts)}, expected a list of asserts", field="test_list", remedy="Write strings")
    imports = values.get("test_imports") or []
    head = [str(values.get("test_setup_code") or ""), *(imports if isinstance(imports, list) else [str(imports)])]
    parts = ["\n".join(head)]
    for index, one in enumerate(asserts):
        try:
            body = ast.parse(one.strip()).body
        except (SyntaxError, ValueError, RecursionError) as error:
            raise InputError(f"is not Python: {error}", field=f"test_list[{index}]", remedy="Correct the assert") from None
        lines = [f"    {line}" for statement in body for line in ast.unparse(statement).splitlines()]
        parts.append("\n".join([f"def test_{index}():", *lines]))
    return "\n\n\n".join(part for part in parts if part.strip()) + "\n"


def _only_name(source: str, values: Mapping[str, Any], path: str) -> str | None:
    """The one function of the solution that the tests use, when there is exactly one."""
    try:
        names = free_names(source)
    except SyntaxError:
        return None
    solution = _solution(values, path).get(path, "")
    known = {name for name in names if defines(solution, name)} if solution else names
    return known.pop() if len(known) == 1 else None


# ------------------------------------------------------------------------------------------------------------------- prompt


def _code(prompt: str, entry_point: str | None) -> str:
    """The prompt as Python that defines the entry point; empty when it is no such thing."""
    candidates = (prompt, f"{prompt.rstrip()}\n    pass\n")  # a bare signature has no body yet
    return next((code for code in candidates if entry_point and defines(code, entry_point)), "")


def _question(
    prompt: str, code: str, entry_point: str | None, path: str, files: Mapping[str, str], solution: Mapping[str, str]
) -> str:
    if files:
        listed = "\n".join(f"- {name}" for name in sorted(files))
        asked = f"`{entry_point}` in {path}" if entry_point else path
        body = f"```python\n{code.rstrip()}\n```" if code else prompt.strip()
        return f"{body}\n\nFiles:\n{listed}\n\n{asked} will be graded. Edit the files, try them, and say done."
    if code:
        ask = f"Complete `{entry_point}`. Reply with the whole function in one ```python block."
        return f"{ask}\n\n```python\n{code.rstrip()}\n```"
    asked = _signature(solution.get(path, ""), entry_point) if entry_point else ""
    return f"{prompt.strip()}\n\n{f'Write `{asked}`. ' if asked else ''}Reply with the Python code in one ```python block."


def _signature(solution: str, entry_point: str) -> str:
    """`def name(parameters)`, which the tests presuppose and a text does not say."""
    if defines(solution, entry_point):
        for node in ast.parse(solution).body:
            if isinstance(node, ast.FunctionDef) and node.name == entry_point:
                return f"def {entry_point}({ast.unparse(node.args)})"
    return entry_point


def _brief(value: Any) -> str:
    return repr(value)[:60]

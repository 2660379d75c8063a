"""What differs between the languages of `function_cases`: harness, command, and how a returned value compares.

    language      function cases (values)                       program cases (text)
    python        function_cases_runner.py, exact types         python3 -P -s FILE ARGUMENTS
    javascript    function_cases_runner.js, numbers are one     node FILE ARGUMENTS
                  type and arrays too (values.for_javascript)
    bash          -                                             bash FILE ARGUMENTS, or the named function of the file

JavaScript needs the root file system variant "node" (VerifierSpec.sandbox.image); Python and Bash are in every variant.

A problem has program cases when it says "program": true, and always in Bash: {"id", "arguments": [text, ...], "stdin": text,
"expected": the whole of standard output as text, "exit_code": 0 unless given}. `output` says how text compares:

    "text" (default)   blanks at the ends of lines and empty lines at the end do not count
    "exact"            byte for byte
    "tokens"           word by word; words that are decimal numbers in both compare as numbers, within "tolerance" (relative)
    "json"             as one JSON value, by exact type (true is not 1, 1 is not 1.0), floats within "tolerance"; with
                       a repeated key, NaN or an infinity it is no JSON

Each case is a process of its own, started from outside the box, which sees standard output directly: nothing is left to forge.
Output that is not UTF-8, or was cut at MAX_CASE_OUTPUT bytes, never compares equal.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

from data_contracts.errors import InputError
from data_contracts.records import SandboxSpec
from environments.verifiers.values import Encoded, encode, equal, for_javascript

LANGUAGES = ("python", "javascript", "bash")
OUTPUTS = ("text", "exact", "tokens", "json")
MAX_CASE_OUTPUT = 256 * 1024
_DECIMAL = re.compile(r"[-+]?(?:[0-9]{1,300}(?:\.[0-9]{0,300})?|\.[0-9]{1,300})(?:[eE][-+]?[0-9]{1,3})?")
_ENVIRONMENT = ("PATH=/usr/bin:/bin", "LANG=C.UTF-8", "LC_ALL=C.UTF-8", "TZ=UTC", "HOME=/nonexistent", "PYTHONHASHSEED=0")
_SEALED = 'exec 3>&1 4<&0 </dev/null >/dev/null 2>&1; exec "$@"'
_BASH_FUNCTION = 'source "$0" </dev/null >/dev/null; "$@"'


class Harness(NamedTuple):
    """A file beside this one, where it goes in the box, and the command that starts it there."""

    source: str
    path: str
    argv: tuple[str, ...]


def harness(language: str) -> Harness:
    """What calls a function in this language."""
    if language == "javascript":
        path = ".grader/runner.cjs"
        argv = ("sh", "-c", _SEALED, "sh", "/usr/bin/env", "-i", *_ENVIRONMENT, "node", path)
        return Harness("function_cases_runner.js", path, argv)
    path = ".grader/runner.py"
    return Harness("function_cases_runner.py", path, ("python3", "-I", "-P", "-S", path))


def program(settings: dict[str, Any], arguments: list[str]) -> tuple[str, ...]:
    """The command of one program case."""
    start = ("/usr/bin/env", "-i", *_ENVIRONMENT)
    language, path = settings.get("language", "python"), str(settings["path"])
    if language == "python":
        return (*start, "python3", "-P", "-s", "-B", path, *arguments)  # -I would draw a hash seed
    if language == "javascript":
        return (*start, "node", path, *arguments)
    if settings.get("function"):
        return (*start, "bash", "--noprofile", "--norc", "-c", _BASH_FUNCTION, f"./{path}", settings["function"], *arguments)
    return (*start, "bash", "--noprofile", "--norc", path, *arguments)


def is_program(settings: dict[str, Any]) -> bool:
    """Whether the cases are programs with text in and out, instead of calls with values."""
    return bool(settings.get("program")) or settings.get("language", "python") == "bash"


def same(settings: dict[str, Any], expected: Encoded, content: Any) -> bool:
    """Whether a returned value is the expected one, by the rules of the language."""
    wanted = for_javascript(expected) if settings.get("language") == "javascript" else expected
    return equal(wanted, content, tolerance=float(settings.get("tolerance", 0.0)))


def same_output(settings: dict[str, Any], expected: str, output: bytes) -> bool:
    """Whether standard output is the expected one, by the rule that `output` names."""
    try:
        found = output.decode("utf-8")
    except UnicodeDecodeError:
        return False
    rule, tolerance = settings.get("output", "text"), float(settings.get("tolerance", 0.0))
    if rule == "exact":
        return found == expected
    if rule == "tokens":
        wanted, given = expected.split(), found.split()
        return len(wanted) == len(given) and all(map(_same_token, wanted, given, [tolerance] * len(wanted)))
    if rule == "json":
        try:
            return equal(encode(strict_json(expected)), encode(strict_json(found)), tolerance=tolerance)
        except (RecursionError, TypeError, ValueError):
            return False
    return _lines(found) == _lines(expected)


def strict_json(text: str) -> Any:
    """One JSON value. Raises ValueError for all that readers disagree on: a repeated key, NaN and infinities, also as 1e309."""
    return json.loads(text, object_pairs_hook=_distinct, parse_constant=_finite, parse_float=_finite)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_token(wanted: str, given: str, tolerance: float) -> bool:
    if wanted == given:
        return True
    if not (_DECIMAL.fullmatch(wanted) and _DECIMAL.fullmatch(given)):
        return False
    a, b = float(wanted), float(given)
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * abs(a)


def check_language(settings: dict[str, Any], spec: SandboxSpec | None) -> None:
    """Raises InputError for what no harness could run."""
    language = settings.get("language", "python")
    if language not in LANGUAGES:
        raise _wrong("language", f"found {str(language)[:40]!r}", f"Use one of {', '.join(LANGUAGES)}")
    if language == "javascript" and (spec is None or spec.image == "base"):
        raise InputError(
            "JavaScript does not run in the root file system 'base'", field="verifier.sandbox.image",
            remedy="Name a variant with nodejs, for example 'node'",
        )  # fmt: skip
    tolerance = settings.get("tolerance", 0.0)
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
        raise _wrong("tolerance", f"found {tolerance!r}", "Write a relative tolerance from 0 to below 1")
    if settings.get("output", "text") not in OUTPUTS:
        raise _wrong("output", f"found {str(settings['output'])[:40]!r}", f"Use one of {', '.join(OUTPUTS)}")
    if not isinstance(settings.get("program", False), bool):
        raise _wrong("program", f"found {str(settings['program'])[:40]!r}", "Write true or false")
    if is_program(settings):
        _check_cases(settings)


def _check_cases(settings: dict[str, Any]) -> None:
    for number, case in enumerate(settings["cases"]):
        arguments, exit_code = case["arguments"], case.get("exit_code", 0)
        texts = [*(arguments if isinstance(arguments, list) else [None]), case.get("stdin", ""), case["expected"]]
        if not all(isinstance(text, str) and "\0" not in text for text in texts):
            raise _wrong(
                f"cases[{number}]", "a program's arguments, stdin and expected output are texts", "Write them as texts"
            )
        if isinstance(exit_code, bool) or not isinstance(exit_code, int):
            raise _wrong(f"cases[{number}].exit_code", f"found {exit_code!r}", "Write a whole number")
        if settings.get("output") == "json":
            try:
                encode(strict_json(case["expected"]))
            except (ValueError, RecursionError, TypeError) as error:
                raise _wrong(f"cases[{number}].expected", f"is not JSON: {error}", "Write one JSON value") from error


def _wrong(field: str, problem: str, remedy: str) -> InputError:
    return InputError(problem, field=f"verifier.settings.{field}", remedy=remedy)

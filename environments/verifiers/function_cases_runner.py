"""Runs inside the grading box: calls a candidate's function on given inputs and writes what came back. Shipped as data.

Started as `python3 -I -P -S runner.py`, it starts itself again with exactly the environment below, so that nothing of the
box's environment reaches the candidate and the hash seed is fixed; forked from an interpreter that was started like this, it
takes that environment at once. Standard input carries one JSON line `{nonce, path,
function}` and one JSON line of encoded arguments a case; it is read to the end before the candidate is imported. Results leave
over a duplicate of standard output, tagged with the nonce; the candidate's own descriptors 0, 1 and 2 are /dev/null.

Candidate code shares this process and could write results itself. That gains nothing: no expected value is in this box, so
the most it can forge is a value, which is what it returns anyway. Values are encoded by their exact builtin type.
Standard library only; no import of ours.
"""

import importlib.util
import json
import os
import sys
from typing import Any

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "HOME": "/nonexistent",
}
MAX_LINE = 64 * 1024
MAX_DEPTH = 50


def encode(value: Any, depth: int = 0) -> list[Any]:
    """[type name, content] for exact builtin types; ["other", type name] for all else."""
    kind = type(value)
    if depth > MAX_DEPTH:
        return ["other", "nested too deeply"]
    if value is None or kind is bool or kind is str:
        return [kind.__name__, value]
    if kind is int:
        return ["int", str(value)] if value.bit_length() < 8192 else ["other", "huge int"]
    if kind is float:
        return ["float", value.hex()]
    if kind is list or kind is tuple:
        return [kind.__name__, [encode(item, depth + 1) for item in value]]
    if kind is set or kind is frozenset:
        return [kind.__name__, sorted((encode(item, depth + 1) for item in value), key=json.dumps)]
    if kind is dict:
        return ["dict", [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]]
    return ["other", kind.__name__[:100]]


def decode(pair: list[Any]) -> Any:
    """The value of [type name, content]."""
    kind, content = pair
    if kind == "int":
        return int(content)
    if kind == "float":
        return float.fromhex(content)
    if kind in ("list", "tuple", "set", "frozenset"):
        return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(item) for item in content)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    return content


def describe(error: BaseException) -> str:
    """A short text, whatever the exception's own methods do."""
    try:
        return f"{type(error).__name__}: {error}"[:200].encode("ascii", "replace").decode()
    except BaseException:  # noqa: BLE001
        return "an exception that cannot be shown"


def main() -> None:
    """One candidate, all cases, one process."""
    first, *rest = sys.stdin.buffer.read().split(b"\n")  # not splitlines, which splits at U+2028 as well
    job, cases = json.loads(first), [json.loads(line) for line in rest if line]
    channel, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    write, dumps, tag = os.write, json.dumps, job["nonce"]

    def send(case: str, outcome: str, content: Any) -> None:
        line = dumps([tag, case, outcome, content])
        if len(line) > MAX_LINE:
            line = dumps([tag, case, "other", "the result is too large"])
        data = (line + "\n").encode("ascii")
        while data:
            data = data[write(channel, data) :]

    try:
        spec = importlib.util.spec_from_file_location("candidate", job["path"])
        if spec is None or spec.loader is None:
            raise ImportError(job["path"])  # noqa: TRY301  reported like any other failure to import
        module = importlib.util.module_from_spec(spec)
        sys.modules["candidate"] = module
        spec.loader.exec_module(module)
        function = getattr(module, job["function"])
    except BaseException as error:  # noqa: BLE001  candidate code may raise anything, SystemExit included
        send("import", "raised", describe(error))
        return
    for case in cases:
        try:
            arguments = [decode(item) for item in case["arguments"]]
            send(case["id"], "returned", encode(function(*arguments)))
        except BaseException as error:  # noqa: BLE001
            send(case["id"], "raised", describe(error))


if __name__ == "__main__":
    if sys.flags.isolated:
        os.execve(sys.executable, [sys.executable, "-P", "-S", "-s", "-B", os.path.abspath(__file__)], ENVIRONMENT)  # noqa: S606
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    main()
    os._exit(0)

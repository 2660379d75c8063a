"""Write code that passes hidden tests: your own rows (`bessemer data import`), and a small collection of functions.

One reply, whose code block is the solution file; rows with files are multi-turn, with file tools in a box (code_tools.py).
What a row looks like: code_rows.py. The reply never runs where it was written: the file it amounts to is graded in a fresh
box, at the trust level that the row's tests allow (`proxied` for test code, `cases` for plain data, `in_process` for suites).

Levels: "default" streams the collection of repair_functions.py as rows of HumanEval's shape; "imported" streams nothing, so
that a campaign has only the problems of its `curate.sources`.
"""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from data_contracts.errors import ConfigError, InputError
from data_contracts.records import Artifact, Problem, Split
from environments.base import Collected, Domain, Environment, EnvironmentContext, Exploit, Policy
from environments.domains.code_exploits import EXPLOITS
from environments.domains.code_rows import problem_of, written
from environments.domains.code_tools import CodeFilesEnvironment
from environments.domains.mutations import hidden_arguments, source_of
from environments.domains.repair_functions import HELDOUT, REPAIRABLE
from environments.scripted import calls, plays, says
from environments.single_turn import SingleTurn

MAX_REPLY_CHARS = 64 * 1024


class CodeReplyEnvironment(SingleTurn):
    """One prompt, one reply; the code of the reply is collected as the solution file."""

    async def collect(self) -> Collected:
        settings = self.problem.environment.settings
        reply = (self._answer or "")[:MAX_REPLY_CHARS]
        text = written(reply, code=settings["code"], entry_point=settings["entry_point"])
        content = text.encode(errors="replace")
        made = Artifact(name=settings["path"], sha256=hashlib.sha256(content).hexdigest(), size=len(content), content=content)
        return Collected(artifacts=(made,) if text else (), state={"answer": self._answer})


class Code(Domain):
    name = "code"
    family = "code"
    summary = "write code that passes hidden tests; your own rows by `bessemer data import`"
    levels: ClassVar[dict[str, str]] = {
        "default": "a collection of small functions, from signature and docstring",
        "imported": "only the problems of curate.sources",
    }

    def problems(self, split: Split, *, seed: int, level: str = "default", **settings: Any) -> Iterator[Problem]:
        if level not in self.levels or settings:
            raise ConfigError(
                f"code has no level '{level}' or was given settings {sorted(settings)}",
                field="level",
                remedy=f"Levels: {', '.join(self.levels)}; no settings",
            )
        if level == "imported":
            return
        names = sorted(name for name in REPAIRABLE if (name in HELDOUT) == (split == "heldout"))
        for name in random.Random(f"code:{split}:{seed}").sample(names, len(names)):
            yield problem_of(_row(name), split=split)

    def problem_from_row(self, row: Mapping[str, Any], *, split: Split) -> Problem:
        """What `bessemer data import` calls. Raises InputError with the field."""
        return problem_of(row, split=split)

    def environment(self, problem: Problem, context: EnvironmentContext) -> Environment:
        return (CodeFilesEnvironment if problem.tools else CodeReplyEnvironment)(problem, context)

    def oracle(self, problem: Problem) -> Policy:
        """The row's solution. Raises InputError for a row without one."""
        solution = problem.metadata.get("solution")
        if not solution:
            raise InputError(f"problem {problem.id} has no solution", field="metadata.solution", remedy="Give the row one")
        if problem.tools:
            return plays(*(calls("write_file", {"path": n, "text": t}) for n, t in solution.items()), says("Done."))
        return plays(says(f"```python\n{solution[problem.environment.settings['path']]}\n```"))

    def noop(self, problem: Problem) -> Policy:
        """Defines what was asked for and does nothing."""
        entry, path = problem.environment.settings["entry_point"], problem.environment.settings["path"]
        text = f"def {entry}(*arguments, **keywords):\n    return None\n" if entry else "pass\n"
        if problem.tools:
            return plays(calls("write_file", {"path": path, "text": text}), says("Done."))
        return plays(says(f"```python\n{text}```"))

    def exploits(self) -> Sequence[Exploit]:
        return EXPLOITS


def _row(name: str) -> dict[str, Any]:
    """A function of the collection in HumanEval's shape."""
    source, function = source_of(name), REPAIRABLE[name].function
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    start = node.body[1].lineno - 1  # after the docstring
    lines = source.splitlines(keepends=True)
    shown = [f"    >>> {_call(name, arguments)}\n    {function(*arguments)!r}\n" for arguments in REPAIRABLE[name].visible]
    docstring = "".join(lines[1:start]).rstrip().removesuffix('"""')
    asserts = [f"    assert candidate{_call('', a)} == {function(*a)!r}\n" for a in hidden_arguments(name)]
    return {
        "task_id": name,
        "prompt": f'{lines[0]}{docstring}\n\n{"".join(shown)}    """\n',
        "entry_point": name,
        "canonical_solution": "".join(lines[start:]),
        "test": f"def check(candidate):\n{''.join(asserts)}",
    }


def _call(name: str, arguments: tuple[Any, ...]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"

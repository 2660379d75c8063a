"""A broken function and its failing tests: read, edit, run the tests in the box, read the error, try again.

The policy works on `solution.py` with file tools and `run_tests`, and ends the episode with any message without a call. Only
`solution.py` is collected; it is graded in a fresh box by hidden inputs (`function_cases`), so neither the visible tests nor
anything else in the first box matters. All or nothing: a broken function passes most cases, and a share would pay a no-op.

Train and held-out problems use different functions (`repair_functions.HELDOUT`). A stream is finite: every catalogued
mutant once, function by function in shuffled rounds.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from data_contracts.errors import ConfigError, InputError
from data_contracts.protocols import ExecRequest, ExecResult, Sandbox
from data_contracts.records import (
    Budgets,
    EnvironmentSpec,
    Message,
    Problem,
    SandboxLimits,
    SandboxSpec,
    Split,
    ToolSpec,
    VerifierSpec,
)
from environments.base import Collected, Domain, Environment, EnvironmentContext, Exploit, Policy
from environments.domains.mutations import Mutant, catalogue, hidden_arguments, source_of
from environments.domains.repair_exploits import EXPLOITS
from environments.domains.repair_functions import HELDOUT, REPAIRABLE
from environments.scripted import calls, plays, says
from environments.tools import Tool, ToolEnvironment, ToolError
from environments.verifiers.values import encode

SOLUTION, TESTS = "solution.py", "test_solution.py"
MAX_FILE_BYTES = 16 * 1024
MAX_SHOWN_CHARS = 1_200
SECONDS = 10.0
_PATH = {"type": "string", "pattern": r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,99}$", "description": "file name"}


def _spec(name: str, description: str, **properties: dict[str, Any]) -> ToolSpec:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return ToolSpec(name=name, description=description, parameters=schema)


_TEXT = {"type": "string"}
LIST_FILES = _spec("list_files", "Lists the files.")
READ_FILE = _spec("read_file", "Returns a file's text.", path=_PATH)
WRITE_FILE = _spec("write_file", "Writes a whole file.", path=_PATH, text=_TEXT)
REPLACE = _spec("replace", "Replaces the one occurrence of old by new in a file.", path=_PATH, old=_TEXT, new=_TEXT)
RUN_TESTS = _spec("run_tests", "Runs the tests and returns their report.")
TOOLS = (LIST_FILES, READ_FILE, WRITE_FILE, REPLACE, RUN_TESTS)


class CodeRepairEnvironment(ToolEnvironment):
    """One box with the broken file and the visible tests."""

    _box: Sandbox | None = None

    @property
    def box(self) -> Sandbox:
        if self._box is None:
            raise RuntimeError("reset() comes first")
        return self._box

    async def reset(self) -> tuple[Message, ...]:
        spec = self.problem.environment.sandbox
        if spec is None:
            raise InputError(f"problem {self.problem.id} has no sandbox", field="environment.sandbox", remedy="Give it one")
        self._box = await self.context.acquire(spec)
        settings = self.problem.environment.settings
        await self.box.put_files({SOLUTION: settings["broken"].encode(), TESTS: settings["tests"].encode()})
        return self.problem.messages

    def tools(self) -> Sequence[Tool]:
        return (
            Tool(spec=LIST_FILES, run=self._list),
            Tool(spec=READ_FILE, run=self._read),
            Tool(spec=WRITE_FILE, run=self._write),
            Tool(spec=REPLACE, run=self._replace),
            Tool(spec=RUN_TESTS, run=self._run_tests),
        )

    async def _list(self, arguments: dict[str, Any]) -> str:
        return await self._shown("sh", "-c", "find . -maxdepth 3 -type f -not -path '*/__pycache__/*' | sort")

    async def _read(self, arguments: dict[str, Any]) -> str:
        return (await self._text(arguments["path"])).decode(errors="replace")[:MAX_FILE_BYTES]

    async def _write(self, arguments: dict[str, Any]) -> str:
        return await self._put(arguments["path"], arguments["text"])

    async def _replace(self, arguments: dict[str, Any]) -> str:
        text = (await self._text(arguments["path"])).decode(errors="replace")
        count = text.count(arguments["old"]) if arguments["old"] else 0
        if count != 1:
            raise ToolError(f"'old' occurs {count} times in {arguments['path']}, it must occur exactly once")
        return await self._put(arguments["path"], text.replace(arguments["old"], arguments["new"]))

    async def _run_tests(self, arguments: dict[str, Any]) -> str:
        return await self._shown("python3", "-B", "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", TESTS)

    async def _put(self, path: str, text: str) -> str:
        try:
            data = text.encode()
        except UnicodeError as error:
            raise ToolError(f"the text is not valid Unicode: {error}") from None
        if len(data) > MAX_FILE_BYTES or ".." in path.split("/"):
            raise ToolError(
                f"the file would have {len(data)} bytes, at most {MAX_FILE_BYTES} are allowed, and no '..' in the path"
            )
        try:
            await self.box.put_files({path: data})
        except (InputError, OSError) as error:
            raise ToolError(f"cannot write {path}: {error}") from None
        return f"{path} written, {len(data)} bytes"

    async def _text(self, path: str) -> bytes:
        ran = await self._exec("head", "-c", str(MAX_FILE_BYTES), "--", path)
        if ran.exit_code != 0:
            raise ToolError(f"cannot read {path}: {ran.stderr[:200].decode(errors='replace').strip() or 'timed out'}")
        return ran.stdout

    async def _exec(self, *argv: str) -> ExecResult:
        """One command within what is left of the time; the wait for its turn is not the policy's."""
        request = ExecRequest(
            argv=argv, deadline_seconds=max(0.1, self.seconds_left()), env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        )
        began = time.monotonic()
        ran = await self.box.exec(request)
        self.queued(time.monotonic() - began - ran.wall_seconds)
        return ran

    async def _shown(self, *argv: str) -> str:
        ran = await self._exec(*argv)
        if ran.timed_out:
            raise ToolError("stopped: it ran too long")
        if ran.oom_killed:
            raise ToolError("stopped: out of memory")
        return reproducible((ran.stdout + ran.stderr).decode(errors="replace"))

    async def collect(self) -> Collected:
        """Raises SandboxLost when the policy destroyed its box; an oversized file is left out and noted in the state."""
        state = (await super().collect()).state
        await self.box.freeze()
        try:
            artifacts = await self.box.collect(self.problem.verifier.collect, max_bytes=self.problem.verifier.collect_max_bytes)
        except InputError as error:
            return Collected(state={**state, "not_collected": str(error)})
        return Collected(artifacts=artifacts, state=state)

    async def close(self) -> None:
        if self._box is not None:
            await self._box.destroy()


class CodeRepair(Domain):
    name = "code_repair"
    family = "code"
    summary = "multi-turn in a box: repair a broken function, run its tests, try again"
    levels: ClassVar[dict[str, str]] = {
        "default": "one wrong token, anywhere in the function",
        "hinted": "the same, and the prompt names the line",
    }

    def problems(self, split: Split, *, seed: int, level: str = "default", **settings: Any) -> Iterator[Problem]:
        if level not in self.levels or settings:
            raise ConfigError(
                f"code_repair has no level '{level}' or was given settings {sorted(settings)}",
                field="level",
                remedy=f"Levels: {', '.join(self.levels)}; no settings",
            )
        rng = random.Random(f"code_repair:{split}:{seed}")
        names = sorted(name for name in REPAIRABLE if (name in HELDOUT) == (split == "heldout"))
        left = {name: rng.sample(catalogue()[name], len(catalogue()[name])) for name in names}
        while left:
            for name in rng.sample(sorted(left), len(left)):
                if left[name]:
                    yield _problem(split, left[name].pop(), level)
                if not left[name]:
                    del left[name]

    def environment(self, problem: Problem, context: EnvironmentContext) -> Environment:
        return CodeRepairEnvironment(problem, context)

    def oracle(self, problem: Problem) -> Policy:
        source = source_of(problem.metadata["function"])
        return plays(calls("write_file", {"path": SOLUTION, "text": source}), says("Done."))

    def recovering(self, problem: Problem) -> Policy:
        """Malformed and failing calls first, then a wrong repair, then the right one."""
        source, name = source_of(problem.metadata["function"]), problem.metadata["function"]
        return plays(
            calls("write_file", '{"path": "solution.py", "text": ', call_id="a"),
            calls("read_file", {"path": "missing.py"}, call_id="b"),
            calls("write_file", {"path": SOLUTION, "text": f"def {name}(*arguments)\n    return None\n"}, call_id="c"),
            calls("run_tests", {}, call_id="d"),
            calls("write_file", {"path": SOLUTION, "text": source}, call_id="e"),
            calls("run_tests", {}, call_id="f"),
            says("Done."),
        )

    def exploits(self) -> Sequence[Exploit]:
        return EXPLOITS


def reproducible(report: str) -> str:
    """What a policy reads of a report: no timings or addresses (equal tokens give equal observations), no rulers, bounded.

    Every pattern is linear in the report, which the policy's code may have written: this runs on the worker's event loop.
    """
    text = re.sub(r"\b0x[0-9a-f]{6,}", "0x0", re.sub(r" in [0-9.]+s\b( \([0-9:]+\))?", "", report))
    text = re.sub(r"([=_!])\1{3,}", r"\1\1", re.sub(r"(?<![ \t])[ \t]+\[ *[0-9]+%\]", "", text)).strip()
    head = MAX_SHOWN_CHARS // 4
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:head]}\n...\n{text[head - MAX_SHOWN_CHARS :]}"


def visible_tests(name: str) -> str:
    """A pytest file with one test a visible case."""
    entry = REPAIRABLE[name]
    lines = [f"from solution import {name}\n"]
    for index, arguments in enumerate(entry.visible):
        call, expected = f"{name}({', '.join(map(repr, arguments))})", entry.function(*arguments)
        lines.append(f"\n\ndef test_{index}():\n    assert {call} == {expected!r}\n")
    return "".join(lines)


def _problem(split: Split, mutant: Mutant, level: str) -> Problem:
    name = mutant.function
    broken = mutant.apply(source_of(name))
    hint = f" The mistake is in line {mutant.line}." if level == "hinted" else ""
    prompt = f"{SOLUTION} fails its tests in {TESTS}. Repair it, run the tests, and say done.{hint}\n\n{broken}"
    cases = [
        {
            "id": f"case{index:02d}",
            "arguments": [encode(argument) for argument in arguments],
            "expected": encode(REPAIRABLE[name].function(*arguments)),
        }
        for index, arguments in enumerate(hidden_arguments(name))
    ]
    return Problem(
        id=f"code_repair/{split}/{mutant.id}",
        domain="code_repair",
        split=split,
        difficulty=0.6 if level == "hinted" else 0.8,
        messages=(Message(role="user", content=prompt),),
        tools=TOOLS,
        environment=EnvironmentSpec(
            kind="code_repair",
            settings={"broken": broken, "tests": visible_tests(name)},
            sandbox=SandboxSpec(needs=("exec", "files", "freeze"), limits=SandboxLimits(lifetime_seconds=900.0)),
        ),
        verifier=VerifierSpec(
            kind="function_cases",
            trust="cases",
            settings={"path": SOLUTION, "function": name, "cases": cases, "seconds": 5.0},
            sandbox=SandboxSpec(needs=("exec", "files")),
            collect=(SOLUTION,),
            collect_max_bytes=MAX_FILE_BYTES,
        ),
        budgets=Budgets(
            max_turns=8,
            max_tokens_per_turn=192,
            max_episode_tokens=2048,
            max_tool_calls=12,
            tool_call_seconds=SECONDS,
            tool_seconds_total=60.0,
        ),
        metadata={"function": name, "line": mutant.line, "swap": [mutant.before, mutant.after]},
    )

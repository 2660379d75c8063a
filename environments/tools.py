"""Tool calling: an allow-list of tools, arguments checked against their JSON schema, answers as JSON in `tool` messages.

A call is answered with `{"status": "ok", "result": ...}` or `{"status": "error", "message": ...}`; nothing a policy writes
raises. Names are looked up in a table and arguments are parsed as JSON, so neither is ever evaluated. A message without a
call ends the episode and is the answer.

The environment enforces the budgets it alone can see (`max_tool_calls`, `tool_seconds_total`); turns and tokens are the
caller's. It keeps the audit log that verifiers and rule validators read: `state = {"answer": ..., "calls": [...]}`.
Not here: parallel execution of the calls of one message (they run in order, because they may depend on each other).
"""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jsonschema
import msgspec

from data_contracts.errors import SandboxLost
from data_contracts.records import Message, Problem, ToolCall, ToolSpec
from environments.base import Action, Collected, Environment, EnvironmentContext, Step

MAX_ARGUMENT_CHARS = 64 * 1024
MAX_LOGGED_CHARS = 2_000
MAX_DEPTH = 64
"""Nesting of arguments: a bound of ours, because the interpreter's own depends on who calls and ends in an exception."""
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"?|[][{}]', re.DOTALL)


class ToolError(Exception):
    """What a tool answers when it cannot do what was asked; the text goes to the policy."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A declared tool and what runs it: validated arguments in, a JSON-able result out (or ToolError)."""

    spec: ToolSpec
    run: Callable[[dict[str, Any]], Awaitable[Any]]


def check_arguments(spec: ToolSpec, arguments: str, *, most: int = MAX_ARGUMENT_CHARS) -> dict[str, Any]:
    """The arguments of one call, or ToolError saying which one is wrong and what was expected."""
    if len(arguments) > most:
        raise ToolError(f"arguments have {len(arguments)} characters, at most {most} are read")
    if _depth(arguments) > MAX_DEPTH:
        raise ToolError(f"arguments are nested more than {MAX_DEPTH} levels deep")
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ToolError(f"arguments of {spec.name} are not valid JSON: {error}") from None
    found = sorted(jsonschema.Draft202012Validator(spec.parameters).iter_errors(value), key=lambda e: list(map(str, e.path)))
    if found:
        place = "/".join(map(str, found[0].path))
        raise ToolError(f"arguments of {spec.name}{f', {place}' if place else ''}: {found[0].message[:300]}")
    return dict(value)


def _depth(text: str) -> int:
    """How deep brackets outside strings nest, whether or not the text is JSON. Linear in its length."""
    depth = deepest = 0
    for found in _STRUCTURE.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        deepest = max(deepest, depth)
    return deepest


class ToolEnvironment(Environment):
    """A world that is acted on through tools; subclasses name the tools and add resources."""

    max_argument_chars: ClassVar[int] = MAX_ARGUMENT_CHARS

    def __init__(self, problem: Problem, context: EnvironmentContext) -> None:
        super().__init__(problem, context)
        self._answer: str | None = None
        self._calls: list[dict[str, Any]] = []
        self._tool_seconds = 0.0
        self._queued_seconds = 0.0

    @abstractmethod
    def tools(self) -> Sequence[Tool]:
        """The tools of this problem; their specs equal `problem.tools`."""

    async def reset(self) -> tuple[Message, ...]:
        return self.problem.messages

    def seconds_left(self) -> float:
        """Wall-clock seconds that the next tool call may take."""
        budgets = self.problem.budgets
        return max(0.0, min(budgets.tool_call_seconds, budgets.tool_seconds_total - self._tool_seconds))

    def queued(self, seconds: float) -> None:
        """A tool reports seconds in which it waited for the host: they are not the policy's (rule 3)."""
        self._queued_seconds += max(0.0, seconds)

    async def step(self, action: Action) -> Step:
        if not action.message.tool_calls and action.parse_error is None:
            self._answer = action.message.content
            return Step(done=True, stop_reason="answered")
        replies: list[Message] = []
        for call in action.message.tool_calls:
            if len(self._calls) >= self.problem.budgets.max_tool_calls:
                return Step(messages=tuple(replies), done=True, stop_reason="tool_budget")
            if self._tool_seconds >= self.problem.budgets.tool_seconds_total:
                return Step(messages=tuple(replies), done=True, stop_reason="time_budget")
            started, queued = time.monotonic(), self._queued_seconds
            try:
                replies.append(await self._reply(call))
            except SandboxLost:
                return Step(messages=tuple(replies), done=True, stop_reason="box_killed")
            finally:
                self._tool_seconds += time.monotonic() - started - (self._queued_seconds - queued)
        if action.parse_error is not None:
            replies.append(_message({"status": "error", "message": f"tool call not understood: {action.parse_error}"}))
        return Step(messages=tuple(replies))

    async def _reply(self, call: ToolCall) -> Message:
        noted: dict[str, Any] = {}
        try:
            tool = self._known(call.name)
            arguments = check_arguments(tool.spec, call.arguments, most=self.max_argument_chars)
            answer = {"status": "ok", "result": await tool.run(arguments)}
            noted = self.note(call.name, arguments)
        except ToolError as error:
            answer = {"status": "error", "message": str(error)}
        logged = {"name": call.name[:100], "arguments": call.arguments[:MAX_LOGGED_CHARS]}
        self._calls.append({**logged, **noted, **answer})
        return _message(answer, call=call)

    def _known(self, name: str) -> Tool:
        known = {tool.spec.name: tool for tool in self.tools()}
        if name not in known:
            raise ToolError(f"unknown tool '{name[:100]}'; the tools are {', '.join(sorted(known)) or 'none'}")
        return known[name]

    def note(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Further facts about a call that succeeded, for the audit log only."""
        return {}

    async def collect(self) -> Collected:
        return Collected(state={"answer": self._answer, "calls": list(self._calls)})

    async def close(self) -> None:
        """Nothing to give back."""


def _message(answer: dict[str, Any], *, call: ToolCall | None = None) -> Message:
    return Message(
        role="tool",
        content=msgspec.json.encode(answer).decode(),
        tool_call_id=call.call_id if call else None,
        name=call.name if call else None,
    )

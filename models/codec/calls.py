"""Tool calls in sampled text: two formats, read without ever raising.

`tags`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, text around them (Hermes, Qwen, and our
own codec). `bare`: the whole message is one JSON object with `name` and `parameters` (Llama 3). Arguments are kept as the JSON
text that the policy wrote. When anything is wrong the message keeps its full text, has no calls at all (nothing runs half), and
`parse_error` tells the policy what to fix.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from data_contracts.protocols import ParsedTurn
from data_contracts.records import Message, ToolCall, ToolSpec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SHAPE = OPEN + '{"name": "...", "arguments": {...}}' + CLOSE
_BARE_SHAPE = '{"name": "...", "parameters": {...}}'


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


class _Malformed(ValueError):
    """Says what is wrong with one call."""


def parse_tags(text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
    """Read every tagged call of `text`; content is what stands around them."""
    if OPEN not in text and CLOSE not in text:
        return ParsedTurn(message=Message(role="assistant", content=text))
    try:
        around, calls = _read_tags(text, tools)
    except _Malformed as error:
        return _failed(text, f"{error}. Write {_SHAPE}")
    content, extra = around[0].removesuffix("\n"), [part.strip() for part in around[1:] if part.strip()]
    content = "\n".join([content, *extra] if content else extra)
    return ParsedTurn(message=Message(role="assistant", content=content, tool_calls=tuple(calls)))


def _read_tags(text: str, tools: Sequence[ToolSpec]) -> tuple[list[str], list[ToolCall]]:
    around: list[str] = []
    calls: list[ToolCall] = []
    while OPEN in text or CLOSE in text:
        before, _, rest = text.partition(OPEN)
        if CLOSE in before:
            raise _Malformed(f"{CLOSE} without {OPEN} before it")
        body, closed, text = rest.partition(CLOSE)
        if not closed or OPEN in body:
            raise _Malformed(f"tool call {len(calls) + 1} is not closed with {CLOSE}")
        around.append(before)
        calls.append(_read(body, tools, index=len(calls)))
    return [*around, text], calls


def parse_bare(text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
    """Read a message that is one JSON call; anything that does not look like one is plain content."""
    body = text.strip()
    if not (tools and body.startswith("{") and '"name"' in body):
        return ParsedTurn(message=Message(role="assistant", content=text))
    try:
        call = _read(body, tools, index=0)
    except _Malformed as error:
        return _failed(text, f"{error}. Write only {_BARE_SHAPE}")
    return ParsedTurn(message=Message(role="assistant", content="", tool_calls=(call,)))


def call_id(index: int) -> str:
    """Ids are positions: the text of a call carries none, and equal tokens must give equal records."""
    return f"call_{index}"


def write_call(call: ToolCall) -> str:
    """The JSON object that stands between the tags."""
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}}}'


def _read(body: str, tools: Sequence[ToolSpec], *, index: int) -> ToolCall:
    try:
        call = msgspec.json.decode(body.encode("utf-8", "replace"), type=_Call)
        raw = bytes(call.arguments) or bytes(call.parameters) or b"{}"
        value = msgspec.json.decode(raw)
    except msgspec.ValidationError as error:
        raise _Malformed(f"tool call {index + 1} has the wrong shape: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise _Malformed(f"tool call {index + 1} is not valid JSON: {error}") from error
    if not any(tool.name == call.name for tool in tools):
        known = ", ".join(tool.name for tool in tools)
        raise _Malformed(f"unknown tool '{call.name}'; there is " + (known or "no tool here"))
    arguments = value if isinstance(value, str) else raw.decode("utf-8")  # some models write the arguments as a string
    return ToolCall(call_id=call_id(index), name=call.name, arguments=arguments)


def _failed(text: str, error: str) -> ParsedTurn:
    return ParsedTurn(message=Message(role="assistant", content=text), parse_error=error)

"""Our own tool codec, for templates that know no tools (SmolLM2, tiny): JSON calls between tags.

Tools are listed in the system message, one a line; the policy writes `<tool_call>{"name": ..., "arguments": ...}</tool_call>`
(the notation of the Hermes and Qwen families) and reads `<tool_response>...</tool_response>` in a user message. Consecutive
messages that are not the assistant's become one user message, so templates that insist on alternation work; a system message
that is not the first is read as user text; a template without a system role gets it at the top of the first user message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from data_contracts.protocols import ParsedTurn
from data_contracts.records import Message, ToolSpec
from models.codec import calls
from models.codec.template import ChatTemplate
from models.codec.turns import Turns

_INTRODUCTION = 'Call tools by writing <tool_call>{"name": "NAME", "arguments": {...}}</tool_call>. Tools:'

_RESPONSE_TAG = re.compile("<(?=/?tool_response>)")
_INERT = r"\\u003c"
"""What a tool returns must not look like another result: JSON's own escape, which reads the same inside its strings."""


class TaggedCodec:
    """Codec over a template that knows only system, user and assistant."""

    name = "tagged"

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._has_system = _takes_system(template)
        self._turns = Turns(template)
        self.stop_token_ids = self._turns.stop_token_ids

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return self.template.encode(self.template.render(self._plain(messages, tools), generation=True))

    def encode_observations(self, sampled: Sequence[int], messages: Sequence[Message]) -> list[int]:
        rendered = self.template.render(
            [
                *self._turns.canonical_start(),
                {"role": "assistant", "content": self._turns.sentinel},
                *self._plain(messages, ()),
            ],
            generation=True,
        )
        return self.template.encode(self._turns.suffix(rendered, sampled))

    def parse(self, sampled: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedTurn:
        return calls.parse_tags(self._turns.text(sampled), tools)

    def encode_assistant(self, message: Message) -> list[int]:
        return self.template.encode(self._assistant(message) + self._turns.close)

    def reference(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The whole conversation rendered at once and tokenised the ordinary way; the proof compares against it."""
        rendered = self.template.render(self._plain(messages, tools), generation=True)
        return self.template.encode_ordinary(self.template.unmask(rendered))

    def _assistant(self, message: Message) -> str:
        mask = self.template.mask
        written = [calls.OPEN + mask(calls.write_call(call)) + calls.CLOSE for call in message.tool_calls]
        return "\n".join([mask(message.content), *written] if message.content or not written else written)

    def _plain(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[dict[str, str]]:
        """Masked messages with the roles that the template knows."""
        mask = self.template.mask
        system = ""
        if messages and messages[0].role == "system":
            system, messages = mask(messages[0].content), messages[1:]
        if tools:
            lines = mask("\n".join(f"{tool.name}: {describe(tool)}" for tool in tools))
            listed = f"{_INTRODUCTION}\n{lines}"  # our own text, tags included, is not masked
            system = f"{system}\n\n{listed}" if system else listed
        turns: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        for message in messages:
            if message.role == "assistant":
                turns.append({"role": "assistant", "content": self._assistant(message)})
                continue
            text = mask(message.content)
            if message.role == "tool":
                result = mask(_RESPONSE_TAG.sub(_INERT, message.content))
                text = f"<tool_response>{result}</tool_response>"
            if turns and turns[-1]["role"] == "user":
                turns[-1]["content"] += "\n" + text
            else:
                turns.append({"role": "user", "content": text})
        if turns and turns[0]["role"] == "system" and not self._has_system:
            first, following = turns[0]["content"], turns[1:]
            if following and following[0]["role"] == "user":
                following[0]["content"] = f"{first}\n\n{following[0]['content']}"
                return following
            return [{"role": "user", "content": first}, *following]
        return turns


def describe(tool: ToolSpec) -> str:
    """One line: what the tool does and its arguments, for example `Adds. {"a": integer, "b": integer (optional)}`."""
    properties: Mapping[str, Any] = tool.parameters.get("properties") or {}
    required = set(tool.parameters.get("required") or ())
    parts = []
    for name, schema in properties.items():
        kind = schema.get("type", "any") if isinstance(schema, Mapping) else "any"
        if isinstance(schema, Mapping) and ("enum" in schema or kind in ("object", "array") or not isinstance(kind, str)):
            kind = json.dumps({key: value for key, value in schema.items() if key != "description"}, ensure_ascii=False)
        note = schema.get("description") if isinstance(schema, Mapping) else None
        optional = "" if name in required else " (optional)"
        parts.append(f'"{name}": {kind}{optional}' + (f" - {note}" if note else ""))
    return f"{tool.description} {{{', '.join(parts)}}}"


def _takes_system(template: ChatTemplate) -> bool:
    try:
        rendered = template.render(
            [{"role": "system", "content": "SYSTEMPROBE"}, {"role": "user", "content": "x"}], generation=True
        )
    except jinja2.TemplateError:
        return False
    return "SYSTEMPROBE" in rendered

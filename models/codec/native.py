"""The model's own tool format: its chat template renders tools, calls and results.

Ids of new environment text come from rendering a canonical conversation that ends in those messages and cutting after the
assistant's turn; they are appended to the sampled ids. Calls are read in the two formats of calls.py, chosen by looking at what
the template writes for a call.

Gap: a template that drops earlier reasoning when it renders a later turn is still appended to as sampled (rule 1).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import jinja2
import msgspec

from data_contracts.errors import ConfigError
from data_contracts.protocols import ParsedTurn
from data_contracts.records import Message, ToolCall, ToolSpec
from models.codec import calls
from models.codec.template import ChatTemplate
from models.codec.turns import Turns, unsupported

PROBE_TOOL = ToolSpec(
    name="zq_probe_tool",
    description="Probe.",
    parameters={"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)


class NativeCodec:
    """Codec over a template that knows tools and the tool role."""

    name = "native"

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._turns = Turns(template)
        self.stop_token_ids = self._turns.stop_token_ids
        self._format: Literal["tags", "bare"] = self._probe_format()

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return self.template.encode(self._render(messages, tools, generation=True))

    def encode_observations(self, sampled: Sequence[int], messages: Sequence[Message]) -> list[int]:
        answered = [message for message in messages if message.role == "tool"]
        turn: dict[str, Any] = {"role": "assistant", "content": self._turns.sentinel}
        if answered:
            turn["content"] = ""
            identifier, name = answered[0].tool_call_id or calls.call_id(0), answered[0].name or "tool"
            turn["tool_calls"] = [_call_dict(identifier, name, {"text": self._turns.sentinel})]
        rendered = self._render_dicts(
            [*self._turns.canonical_start(), turn, *(self._dict(message) for message in messages)], tools=(), generation=True
        )
        return self.template.encode(self._turns.suffix(rendered, sampled))

    def parse(self, sampled: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedTurn:
        text = self._turns.text(sampled)
        if self._format == "tags":
            return calls.parse_tags(text, tools)
        return calls.parse_bare(text.replace("<|python_tag|>", ""), tools)

    def encode_assistant(self, message: Message) -> list[int]:
        if not message.tool_calls:
            return self.template.encode(self.template.mask(message.content) + self._turns.close)
        return self.template.encode(self._call_body(message))

    def reference(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The whole conversation rendered at once and tokenised the ordinary way; the proof compares against it."""
        return self.template.encode_ordinary(self.template.unmask(self._render(messages, tools, generation=True)))

    # --------------------------------------------------------------------------------------------------------- rendering

    def _call_body(self, message: Message) -> str:
        """What the template writes between the generation prompt and the closing token for a message with calls.

        The calls are answered in the rendering, because some templates add reasoning marks to a message that is the last.
        """
        start = self._turns.canonical_start()
        results = [Message(role="tool", content="x", tool_call_id=call.call_id, name=call.name) for call in message.tool_calls]
        opening = self._render_dicts(start, tools=(), generation=True)
        whole = self._render_dicts([*start, *(self._dict(shown) for shown in (message, *results))], tools=(), generation=False)
        end = whole.find(self._turns.close_token, len(opening))
        if not whole.startswith(opening) or end < 0:
            raise unsupported(
                self.template, "a turn with a tool call does not begin with the generation prompt, or is not closed"
            )
        return whole[len(opening) : end] + self._turns.close_token

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool) -> str:
        return self._render_dicts([self._dict(message) for message in messages], tools=tools, generation=generation)

    def _render_dicts(self, messages: Sequence[dict[str, Any]], *, tools: Sequence[ToolSpec], generation: bool) -> str:
        mask = self.template.mask_deep
        listed = [
            {
                "type": "function",
                "function": {
                    "name": mask(tool.name),
                    "description": mask(tool.description),
                    "parameters": mask(tool.parameters),
                },
            }
            for tool in tools
        ]
        try:
            return self.template.render(messages, tools=listed, generation=generation)
        except jinja2.TemplateError as error:
            raise unsupported(self.template, f"it refuses a conversation: {error}") from error

    def _dict(self, message: Message) -> dict[str, Any]:
        mask = self.template.mask
        shown: dict[str, Any] = {"role": message.role, "content": mask(message.content)}
        if message.tool_calls:
            shown["tool_calls"] = [
                _call_dict(call.call_id, mask(call.name), self.template.mask_deep(_arguments(call)))
                for call in message.tool_calls
            ]
        if message.role == "tool":
            shown["tool_call_id"] = message.tool_call_id or calls.call_id(0)
            shown["name"] = mask(message.name or "tool")
        return shown

    def _probe_format(self) -> Literal["tags", "bare"]:
        call = ToolCall(call_id=calls.call_id(0), name=PROBE_TOOL.name, arguments='{"text": "hello"}')
        try:
            body = self.template.unmask(self._call_body(Message(role="assistant", content="", tool_calls=(call,))))
        except ConfigError as error:
            raise unsupported(self.template, f"it lists tools but cannot render a tool call ({error})") from error
        text = body.removesuffix(self._turns.close_token)
        for form, parse in (("tags", calls.parse_tags), ("bare", calls.parse_bare)):
            if parse(text.replace("<|python_tag|>", ""), [PROBE_TOOL]).message.tool_calls == (call,):
                return form  # type: ignore[return-value]
        raise unsupported(self.template, f"it writes tool calls in a format that Bessemer does not read: {text!r}")


def supports_tools(template: ChatTemplate) -> bool:
    """Whether the template shows tools that it is given."""
    shown = {"type": "function", "function": msgspec.to_builtins(PROBE_TOOL)}
    try:
        return PROBE_TOOL.name in template.render([{"role": "user", "content": "x"}], tools=[shown], generation=True)
    except jinja2.TemplateError:
        return False


def _call_dict(identifier: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(call: ToolCall) -> Any:
    try:
        return json.loads(call.arguments)
    except ValueError:
        return call.arguments

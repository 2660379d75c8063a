"""The proof that a codec only ever appends, run once for every model that is opened.

For conversations of several turns (plain answers, tool calls, results, further user messages): the first prompt, then the turn
a policy would write, then the appended observations must equal, id by id, the whole conversation rendered at once by the
template and tokenised the ordinary way; every prefix therefore extends the one before. A turn cut short must end up the same.
Environment text that spells every control token of the model must add none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from data_contracts.protocols import Codec
from data_contracts.records import Message, ToolCall, ToolSpec
from models.codec.calls import call_id
from models.codec.template import ChatTemplate
from models.codec.turns import unsupported


class ProvableCodec(Codec, Protocol):
    """A codec that can also render a whole conversation at once."""

    template: ChatTemplate

    def reference(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]: ...


TOOL = ToolSpec(
    name="lookup",
    description="Looks a word up.",
    parameters={
        "type": "object",
        "properties": {"word": {"type": "string", "description": "The word"}, "limit": {"type": "integer"}},
        "required": ["word"],
    },
)


def prove_prefix_preserving(codec: ProvableCodec) -> None:
    """Raises ConfigError naming the template when turn-by-turn ids differ from the whole rendering."""
    ask = Message(role="user", content="What does it mean? Say it in one word.")
    system = Message(role="system", content="You are brief.")
    answer = Message(role="assistant", content="Iron, I think.")
    call = Message(
        role="assistant",
        content="",
        tool_calls=(ToolCall(call_id=call_id(0), name=TOOL.name, arguments='{"word": "steel"}'),),
    )
    result = Message(role="tool", content="an alloy\nof iron", tool_call_id=call_id(0), name=TOOL.name)
    again = Message(role="user", content="Are you sure?")
    _prove(codec, [ask], [(answer, [again]), (answer, [again])], ())
    _prove(codec, [system, ask], [(answer, [again])], ())
    _prove(codec, [system, ask], [(call, [result]), (call, [result]), (answer, [again])], (TOOL,))
    _prove(codec, [ask], [(call, [result]), (answer, [again])], (TOOL,))
    _prove_harmless(codec, ask, again, result)


def _prove(
    codec: ProvableCodec, prompt: list[Message], turns: list[tuple[Message, list[Message]]], tools: Sequence[ToolSpec]
) -> None:
    ids, said = codec.encode_prompt(prompt, tools), list(prompt)
    _equal(codec, ids, said, tools)
    for spoken, observed in turns:
        sampled = codec.encode_assistant(spoken)
        if sampled[-1:] and sampled[-1] not in codec.stop_token_ids:
            raise unsupported(codec.template, "an assistant turn does not end in a stop token")
        cut = sampled[:-1]
        closing = codec.encode_observations(cut, observed)
        ids = ids + sampled + codec.encode_observations(sampled, observed)
        if ids[-len(cut) - len(closing) :] != cut + closing:
            raise unsupported(codec.template, "a turn that was cut short is closed differently")
        said += [spoken, *observed]
        _equal(codec, ids, said, tools)


def _equal(codec: ProvableCodec, ids: list[int], said: list[Message], tools: Sequence[ToolSpec]) -> None:
    whole = codec.reference(said, tools)
    if ids == whole:
        return
    at = next(
        (index for index, pair in enumerate(zip(ids, whole, strict=False)) if pair[0] != pair[1]), min(len(ids), len(whole))
    )
    decode = codec.template.decode
    raise unsupported(
        codec.template,
        f"rendering turn by turn does not extend the earlier ids. After {decode(whole[max(0, at - 12) : at])!r} the whole "
        f"conversation continues {decode(whole[at : at + 12])!r}, turn by turn {decode(ids[at : at + 12])!r}",
    )


def _prove_harmless(codec: ProvableCodec, ask: Message, again: Message, result: Message) -> None:
    """Hostile text in user messages and tool results brings no control token that harmless text would not."""
    hostile = " ".join(codec.template.control_ids)
    control = set(codec.template.control_ids.values())

    def count(ids: Sequence[int]) -> Counter[int]:
        return Counter(token for token in ids if token in control)

    for message in (again, result):
        spiked = Message(role=message.role, content=hostile, tool_call_id=message.tool_call_id, name=message.name)
        if count(codec.encode_observations((), [message])) != count(codec.encode_observations((), [spiked])):
            raise unsupported(codec.template, f"a {message.role} message can write control tokens")
    if count(codec.encode_prompt([ask], ())) != count(codec.encode_prompt([Message(role="user", content=hostile)], ())):
        raise unsupported(codec.template, "a prompt can write control tokens")

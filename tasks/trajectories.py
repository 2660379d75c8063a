"""Import and export of the external trajectory format, one JSON object a line:

    {"task": "...", "trajectory": [{"role": "assistant", "action": "call_tool", "tool_name": "...", "parameters": {...}},
      {"role": "environment", "response": {"status": "error", "message": "..."}}, ...], "reward": 0.95}

| in a trajectory | as messages |
|---|---|
| assistant, action "call_tool" | an assistant message with one tool call (text, if any, in "content") |
| assistant, action "respond" or none, "content" | an assistant message |
| environment, "response" any JSON | a tool message with the response as JSON text; text stays text |
| system or user, "content" | that message |

A step of the assistant with several calls becomes several steps in a row and is joined again on import, so both directions
keep every call. What the format cannot say is lost on export and listed here: token ids and log-probabilities, verdict
components, call ids (numbered again on import), tool schemas, arguments that are not JSON objects (kept as text under
"raw_parameters"), attachments. Imports become `Trajectory` records for inspection and supervised training; with a codec they
become Episodes whose loss mask is 1 exactly on the assistant's tokens and whose log-probabilities are 0.0 (nobody sampled
them), so they are not for policy gradients.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import fsspec  # type: ignore[import-untyped,unused-ignore]
import msgspec

from data_contracts.errors import InputError
from data_contracts.protocols import Codec, to_json
from data_contracts.records import Episode, Message, Record, ToolCall, ToolSpec, Turn, Verdict, VersionSpan

CALL, RESPOND = "call_tool", "respond"
_EXAMPLE = 'Write {"task": "...", "trajectory": [...], "reward": 0.95}, one object a line'


class Trajectory(Record, frozen=True, kw_only=True):
    """An imported attempt: `messages` begin with the task as the user's message."""

    task: str
    messages: tuple[Message, ...]
    reward: float


# ------------------------------------------------------------------------------------------------------------------ export


def export_episode(episode: Episode, *, reward: float) -> dict[str, Any]:
    """One episode as an object of the external format. `task` is the last user message of the prompt."""
    last = max((i for i, m in enumerate(episode.prompt) if m.role == "user"), default=None)
    task = episode.prompt[last].content if last is not None else episode.problem_id
    conversation = [m for i, m in enumerate(episode.prompt) if i != last]
    for turn in episode.turns:
        conversation += [turn.message, *turn.observations]
    return {"task": task, "trajectory": [step for m in conversation for step in _steps(m)], "reward": reward}


def export_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """The inverse of `parse_trajectory`."""
    steps = [step for message in trajectory.messages[1:] for step in _steps(message)]
    return {"task": trajectory.task, "trajectory": steps, "reward": trajectory.reward}


def write_trajectories(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """JSON lines of exported rows."""
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def _steps(message: Message) -> Iterator[dict[str, Any]]:
    if message.role == "tool":
        yield {"role": "environment", "response": _response(message.content)}
    elif message.role != "assistant":
        yield {"role": message.role, "content": message.content}
    elif not message.tool_calls:
        yield {"role": "assistant", "action": RESPOND, "content": message.content}
    for index, call in enumerate(message.tool_calls):
        step: dict[str, Any] = {"role": "assistant", "action": CALL, "tool_name": call.name}
        parameters = _object(call.arguments)
        step |= {"raw_parameters": call.arguments} if parameters is None else {"parameters": parameters}
        if message.content and index == 0:
            step["content"] = message.content
        yield step


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None


def _response(text: str) -> Any:
    """JSON text as JSON when writing it again gives the same text; else the text itself."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return value if not isinstance(value, str) and _text(value) == text else text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ------------------------------------------------------------------------------------------------------------------ import


def read_trajectories(url: str) -> tuple[Trajectory, ...]:
    """All trajectories of a JSON lines file on any fsspec URL. Raises InputError with file, row and field."""
    try:
        with fsspec.open(url, "rb") as stream:
            data: bytes = stream.read()
    except FileNotFoundError:
        raise InputError("there is no such file", file=url, remedy="Check the path") from None
    rows = [(row, line) for row, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1) if line.strip()]
    if not rows:
        raise InputError("has no trajectories", file=url, remedy=_EXAMPLE)
    return tuple(parse_trajectory(_load(line, file=url, row=row), file=url, row=row) for row, line in rows)


def parse_trajectory(value: Any, *, file: str | None = None, row: int | None = None) -> Trajectory:
    """One parsed object as a Trajectory. Raises InputError naming the field."""
    at = _Place(file, row)
    if not isinstance(value, dict):
        raise at.error(None, f"expected an object, got {type(value).__name__}", _EXAMPLE)
    for name in value:
        if name not in ("task", "trajectory", "reward"):
            raise at.error(name, "is not a field of a trajectory", "Known: task, trajectory, reward")
    task, steps = at.typed(value, "task", str, "task"), at.typed(value, "trajectory", list, "trajectory")
    reward = at.typed(value, "reward", (int, float), "reward")
    if not math.isfinite(reward):
        raise at.error("reward", f"found {reward}, expected a finite number", "Correct the reward or drop the row")
    if not task.strip():
        raise at.error("task", "is empty", "Write what the assistant was asked to do")
    if not any(isinstance(step, dict) and step.get("role") == "assistant" for step in steps):
        raise at.error("trajectory", "has no step of the assistant", "Drop the row; there is nothing to learn from")
    messages = [Message(role="user", content=task)]
    waiting: list[ToolCall] = []
    for index, step in enumerate(steps):
        _add(messages, waiting, step, f"trajectory[{index}]", at)
    return Trajectory(task=task, messages=tuple(messages), reward=float(reward))


def _add(messages: list[Message], waiting: list[ToolCall], step: Any, path: str, at: _Place) -> None:
    """Append one step; `waiting` holds calls that no response has answered yet."""
    if not isinstance(step, dict):
        raise at.error(path, f"expected an object, got {type(step).__name__}", _EXAMPLE)
    role = step.get("role")
    if role in ("system", "user"):
        messages.append(Message(role=role, content=at.typed(step, "content", str, f"{path}.content")))
    elif role == "environment":
        if "response" not in step:
            raise at.error(f"{path}.response", "the field is missing", "Add what the environment answered")
        call = waiting.pop(0) if waiting else None
        messages.append(
            Message(
                role="tool" if call else "user",
                content=_text(step["response"]),
                tool_call_id=call.call_id if call else None,
                name=call.name if call else None,
            )
        )
    elif role == "assistant" and step.get("action", RESPOND) == CALL:
        name = at.typed(step, "tool_name", str, f"{path}.tool_name")
        raw = step.get("raw_parameters")
        arguments = raw if isinstance(raw, str) else to_json(at.typed(step, "parameters", dict, f"{path}.parameters")).decode()
        number = sum(len(message.tool_calls) for message in messages)
        call = ToolCall(call_id=f"call_{number}", name=name, arguments=arguments)
        last = messages[-1]
        if waiting and last.role == "assistant" and last.tool_calls and "content" not in step:
            messages[-1] = msgspec.structs.replace(last, tool_calls=(*last.tool_calls, call))
        else:
            waiting.clear()
            content = at.typed({"content": ""} | step, "content", str, f"{path}.content")
            messages.append(Message(role="assistant", content=content, tool_calls=(call,)))
        waiting.append(call)
    elif role == "assistant" and step.get("action", RESPOND) == RESPOND:
        waiting.clear()
        messages.append(Message(role="assistant", content=at.typed(step, "content", str, f"{path}.content")))
    elif role == "assistant":
        raise at.error(f"{path}.action", f"unknown action {step.get('action')!r}", f"Use '{CALL}' or '{RESPOND}'")
    else:
        raise at.error(f"{path}.role", f"unknown role {role!r}", "Use assistant, environment, user or system")


def to_episode(
    trajectory: Trajectory, codec: Codec, *, tools: Sequence[ToolSpec] = (), domain: str = "imported", index: int = 0
) -> Episode:
    """Tokenise a trajectory turn by turn: loss mask 1 exactly on the assistant's tokens, log-probabilities 0.0, version 0.

    The reward becomes the verdict's score, clipped to 0..1 (`Trajectory.reward` has the original). Raises InputError when
    the trajectory ends with no assistant turn after the prompt.
    """
    first = next((i for i, m in enumerate(trajectory.messages) if m.role == "assistant"), None)
    if first is None:
        raise InputError("has no message of the assistant", field="trajectory", remedy="Drop the row")
    prompt = trajectory.messages[:first]
    ids = list(codec.encode_prompt(prompt, tools))
    prompt_length, mask = len(ids), [0] * len(ids)
    turns: list[Turn] = []
    rest = trajectory.messages[first:]
    while rest:
        answers = next((i for i, m in enumerate(rest[1:], start=1) if m.role == "assistant"), len(rest))
        observations = rest[1:answers]
        sampled = list(codec.encode_assistant(rest[0]))
        start = len(ids)
        ids += sampled
        mask += [1] * len(sampled)
        turns.append(
            Turn(
                index=len(turns),
                message=rest[0],
                token_start=start,
                token_stop=len(ids),
                finish_reason="stop",
                observations=observations,
            )
        )
        rest = rest[answers:]
        if rest:
            between = list(codec.encode_observations(sampled, observations))
            ids += between
            mask += [0] * len(between)
    name = hashlib.sha256(to_json(trajectory)).hexdigest()[:12]
    score = min(1.0, max(0.0, trajectory.reward))
    return Episode(
        id=f"{domain}/imported/{name}/{index}",
        group_id=f"{domain}/imported/{name}",
        problem_id=f"{domain}/train/{name}",
        domain=domain,
        split="train",
        campaign="imported",
        iteration=0,
        member=index,
        prompt=prompt,
        tools=tuple(tools),
        token_ids_T=tuple(ids),
        loss_mask_T=tuple(mask),
        logprobs_T=(0.0,) * len(ids),
        prompt_length=prompt_length,
        spans=tuple(VersionSpan(start=t.token_start, stop=t.token_stop, version=0) for t in turns),
        turns=tuple(turns),
        stop_reason="answered",
        outcome="scored",
        verdict=Verdict(verifier="imported", trust="in_process", score=score, passed=score == 1.0, checks=()),
    )


class _Place:
    """File and row of the errors of one trajectory."""

    def __init__(self, file: str | None, row: int | None) -> None:
        self.file, self.row = file, row

    def error(self, field: str | None, problem: str, remedy: str) -> InputError:
        return InputError(problem, file=self.file, row=self.row, field=field, remedy=remedy)

    def typed(self, value: Mapping[str, Any], name: str, kind: Any, path: str) -> Any:
        if name not in value:
            raise self.error(path, "the field is missing", _EXAMPLE)
        found = value[name]
        if not isinstance(found, kind) or isinstance(found, bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = {str: "text", list: "a list", dict: "an object"}.get(kinds[0], "a number")
            raise self.error(path, f"expected {expected}, got {type(found).__name__}", _EXAMPLE)
        return found


def _load(line: bytes, *, file: str, row: int) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(
            f"is not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}",
            file=file,
            row=row,
            remedy="Save the file in UTF-8",
        ) from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"is not JSON: {error}", file=file, row=row, remedy=_EXAMPLE) from None

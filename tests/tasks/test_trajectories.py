from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts import gate
from data_contracts.errors import InputError
from data_contracts.protocols import ParsedTurn
from data_contracts.records import Message, ToolSpec
from tasks.trajectories import (
    Trajectory,
    export_episode,
    export_trajectory,
    parse_trajectory,
    read_trajectories,
    to_episode,
    write_trajectories,
)
from tests.data_contracts.samples import episode

EXAMPLE: dict[str, Any] = {
    "task": "Refund order 7",
    "trajectory": [
        {"role": "assistant", "action": "call_tool", "tool_name": "refund", "parameters": {"order": "7"}},
        {"role": "environment", "response": {"status": "error", "message": "order must be a number"}},
        {"role": "assistant", "action": "call_tool", "tool_name": "refund", "parameters": {"order": 7}, "content": "Again."},
        {"role": "environment", "response": {"status": "ok", "amount": 1.5}},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "action": "respond", "content": "Refunded."},
    ],
    "reward": 0.95,
}


class LetterCodec:
    """One token a character, turns closed by 0: enough of a Codec to follow ids and masks by hand."""

    name = "letters"
    stop_token_ids = (0,)

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return [ord(c) for m in messages for c in m.content]

    def encode_observations(self, sampled: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return [ord(c) for m in messages for c in m.content]

    def parse(self, sampled: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedTurn:
        raise NotImplementedError

    def encode_assistant(self, message: Message) -> list[int]:
        return [ord(c) for c in message.content + "".join(call.arguments for call in message.tool_calls)] + [0]


def test_the_format_of_the_issue_comes_in_as_messages() -> None:
    trajectory = parse_trajectory(EXAMPLE)
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant", "tool", "user", "assistant"]
    call = trajectory.messages[1].tool_calls[0]
    assert (call.name, json.loads(call.arguments)) == ("refund", {"order": "7"})
    assert trajectory.messages[2].tool_call_id == call.call_id
    assert json.loads(trajectory.messages[2].content) == {"status": "error", "message": "order must be a number"}
    assert trajectory.messages[3].content == "Again."
    assert trajectory.reward == 0.95


def test_import_and_export_round_trip() -> None:
    assert export_trajectory(parse_trajectory(EXAMPLE)) == EXAMPLE
    row = export_episode(episode(), reward=0.5)
    assert row["task"] == "What is 1 + 1? é"
    assert row["trajectory"][0] == {
        "role": "assistant",
        "action": "call_tool",
        "tool_name": "add",
        "raw_parameters": '{"a": 1, "b": ',
    }
    assert export_trajectory(parse_trajectory(row)) == row


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | text, lambda inner: st.dictionaries(text, inner, max_size=3)
)
calls = st.builds(
    lambda name, parameters: {"role": "assistant", "action": "call_tool", "tool_name": name, "parameters": parameters},
    text,
    st.dictionaries(text, values, max_size=3),
)
answers = st.builds(
    lambda response: {"role": "environment", "response": response}, st.dictionaries(text, values, min_size=1, max_size=3)
)
rounds = st.lists(st.tuples(st.lists(calls, min_size=1, max_size=3), answers), min_size=1, max_size=4)


@given(rounds)
def test_any_calls_and_responses_round_trip(steps: list[Any]) -> None:
    flat = [step for asked, answer in steps for step in [*asked, *[answer] * len(asked)]]
    row = {"task": "t", "trajectory": flat, "reward": 1.0}
    assert export_trajectory(parse_trajectory(row)) == row


def test_an_imported_episode_keeps_the_contract_and_masks_the_assistant_only() -> None:
    done = to_episode(parse_trajectory(EXAMPLE), LetterCodec(), domain="refunds")
    assert gate.check_group([done]) == []
    written = "".join(chr(t) if t else "|" for t, m in zip(done.token_ids_T, done.loss_mask_T, strict=True) if m)
    assert written == '{"order":"7"}|Again.{"order":7}|Refunded.|'
    hidden = "".join(chr(t) for t, m in zip(done.token_ids_T, done.loss_mask_T, strict=True) if not m)
    assert hidden.startswith("Refund order 7{")
    assert hidden.endswith("And?")
    assert done.verdict is not None
    assert done.verdict.score == 0.95


def test_files_round_trip(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(write_trajectories([EXAMPLE, EXAMPLE]))
    read = read_trajectories(str(tmp_path / "t.jsonl"))
    assert read == (parse_trajectory(EXAMPLE),) * 2
    assert isinstance(read[0], Trajectory)


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({"task": None}, "task", "expected text, got NoneType"),
        ({"task": " "}, "task", "is empty"),
        ({"reward": "high"}, "reward", "expected a number, got str"),
        ({"reward": True}, "reward", "expected a number, got bool"),
        ({"reward": float("inf")}, "reward", "found inf, expected a finite number"),
        ({"extra": 1}, "extra", "is not a field of a trajectory"),
        ({"trajectory": []}, "trajectory", "has no step of the assistant"),
        ({"trajectory": [*EXAMPLE["trajectory"], "x"]}, "trajectory[6]", "expected an object, got str"),
        ({"trajectory": [*EXAMPLE["trajectory"], {"role": "robot"}]}, "trajectory[6].role", "unknown role 'robot'"),
        ({"trajectory": [*EXAMPLE["trajectory"], {"role": "environment"}]}, "trajectory[6].response", "the field is missing"),
        ({"trajectory": [{"role": "assistant", "action": "fly"}]}, "trajectory[0].action", "unknown action 'fly'"),
        ({"trajectory": [{"role": "assistant", "action": "call_tool"}]}, "trajectory[0].tool_name", "the field is missing"),
        (
            {"trajectory": [{"role": "assistant", "action": "call_tool", "tool_name": "f", "parameters": "x"}]},
            "trajectory[0].parameters",
            "expected an object, got str",
        ),
    ],
)
def test_bad_rows_name_row_field_and_remedy(change: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_trajectory(EXAMPLE | change, file="t.jsonl", row=4)
    assert (caught.value.row, caught.value.field, caught.value.problem) == (4, field, problem)
    assert caught.value.remedy

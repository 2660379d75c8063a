"""Valid records and a store in memory; tests change one field at a time with `msgspec.structs.replace`."""

from __future__ import annotations

import hashlib

from data_contracts.records import (
    Artifact,
    Check,
    EnvironmentSpec,
    Episode,
    Failure,
    Message,
    Problem,
    Score,
    ToolCall,
    ToolSpec,
    Turn,
    Verdict,
    VerifierSpec,
    VersionSpan,
)

TOOL = ToolSpec(
    name="add",
    description="adds",
    parameters={"type": "object", "properties": {"b": {"type": "number"}, "a": {"type": ["number", "null"]}}},
)


class DictStore:
    """The part of Store that tables and quarantine use."""

    root = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self.objects.setdefault(key, data) is data

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def get(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise FileNotFoundError(key) from None

    def exists(self, key: str) -> bool:
        return key in self.objects

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))


def problem(number: int = 0, **changes: object) -> Problem:
    fields: dict[str, object] = {
        "id": f"arithmetic/train/{number}",
        "domain": "arithmetic",
        "split": "train",
        "difficulty": 0.5,
        "messages": (Message(role="user", content=f"What is {number} + 1?"),),
        "environment": EnvironmentSpec(kind="single_turn"),
        "verifier": VerifierSpec(
            kind="exact_answer", settings={"rule": "number", "expected": str(number + 1), "weights": {"correct": 1.0}}
        ),
    }
    return Problem(**(fields | changes))  # type: ignore[arg-type]


def episode(group: int = 0, member: int = 0, **changes: object) -> Episode:
    """4 prompt tokens, 3 of the policy (a tool call), 2 of the tool, 2 of the policy."""
    call = ToolCall(call_id="c1", name="add", arguments='{"a": 1, "b": ')
    fields: dict[str, object] = {
        "id": f"c/0/{group}/{member}",
        "group_id": f"c/0/group-{group}",
        "problem_id": f"arithmetic/train/{group}",
        "domain": "arithmetic",
        "split": "train",
        "campaign": "c",
        "iteration": 0,
        "member": member,
        "prompt": (Message(role="user", content="What is 1 + 1? é"),),
        "tools": (TOOL,),
        "token_ids_T": (5, 6, 7, 8, 100 + member, 11, 12, 20, 21, 30, 31),
        "loss_mask_T": (0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1),
        "logprobs_T": (0.0, 0.0, 0.0, 0.0, -0.1, -0.123456789012345, -3.0, 0.0, 0.0, -0.5, -1e-9),
        "prompt_length": 4,
        "spans": (VersionSpan(start=4, stop=7, version=0), VersionSpan(start=9, stop=11, version=0)),
        "turns": (
            Turn(
                index=0,
                message=Message(role="assistant", content="", tool_calls=(call,)),
                token_start=4,
                token_stop=7,
                finish_reason="stop",
                observations=(Message(role="tool", content="error", tool_call_id="c1", name="add"),),
            ),
            Turn(
                index=1,
                message=Message(role="assistant", content="2"),
                token_start=9,
                token_stop=11,
                finish_reason="stop",
            ),
        ),
        "stop_reason": "answered",
        "outcome": "scored",
        "verdict": Verdict(
            verifier="exact_answer",
            trust="cases",
            score=1.0,
            passed=True,
            checks=(Check(id="answer", passed=True),),
            components={"format": 0.1 + 0.2},
        ),
        "artifacts": (Artifact(name="a.txt", sha256=hashlib.sha256(b"\xff\x00").hexdigest(), size=2, content=b"\xff\x00"),),
        "final_state": {"log": [1, {"deep": None}]},
    }
    return Episode(**(fields | changes))  # type: ignore[arg-type]


def infra_episode(group: int = 0, member: int = 0) -> Episode:
    """Stopped before its first token: no verdict, and that is legal."""
    return episode(
        group,
        member,
        token_ids_T=(),
        loss_mask_T=(),
        logprobs_T=(),
        prompt_length=0,
        spans=(),
        turns=(),
        artifacts=(),
        verdict=None,
        stop_reason="infra",
        outcome="infra_failure",
        failure=Failure(cause="engine_unreachable", detail="connection refused"),
    )


def batch(groups: int, *, size: int = 4) -> list[Episode]:
    return [episode(group, member) for group in range(groups) for member in range(size)]


def score(of: Episode, reward: float = 1.0) -> Score:
    return Score(
        episode_id=of.id,
        group_id=of.group_id,
        problem_id=of.problem_id,
        domain=of.domain,
        reward=reward,
        components={"verdict": reward},
    )

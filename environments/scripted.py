"""Runs a scripted policy through an environment and its verifier, without a model: admission and tests drive domains with it.

It is the episode loop reduced to what does not need tokens: turns are counted, tool budgets are the environment's, and the
same three outcomes come out. Not here: token budgets, deadlines of the episode and retries (tasks/ has those).
"""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Sequence

import msgspec

from data_contracts.errors import SandboxLost
from data_contracts.protocols import SandboxBackend
from data_contracts.records import Message, Outcome, Problem, StopReason, ToolCall, Verdict
from environments.base import Acquire, Action, Collected, Domain, EnvironmentContext, Policy
from environments.registry import verifier


class ScriptedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one scripted attempt; `score` is 0 for a policy_failure."""

    problem_id: str
    conversation: tuple[Message, ...]
    stop_reason: StopReason
    outcome: Outcome
    collected: Collected | None
    verdict: Verdict | None

    @property
    def score(self) -> float:
        return self.verdict.score if self.verdict else 0.0


async def run_scripted(
    domain: Domain, problem: Problem, policy: Policy, *, backend: SandboxBackend | None, deadline_seconds: float = 60.0
) -> ScriptedEpisode:
    """One attempt. Raises InfraError as the backend does; all that the policy did is in the result."""
    acquire = _acquire(backend)
    seed = int.from_bytes(hashlib.sha256(problem.id.encode()).digest()[:8], "big")
    environment = domain.environment(
        problem, EnvironmentContext(episode_id=f"scripted-{problem.id}", seed=seed, acquire=acquire)
    )
    conversation: list[Message] = []
    stop: StopReason = "turn_budget"
    try:
        conversation += await environment.reset()
        for _ in range(problem.budgets.max_turns):
            message = policy(tuple(conversation))
            conversation.append(message)
            step = await environment.step(Action(message=message))
            conversation += step.messages
            if step.done:
                stop = step.stop_reason or "environment_done"
                break
        if stop not in ("answered", "environment_done"):
            return _failed(problem, conversation, stop)
        collected = await environment.collect()
    except SandboxLost:
        return _failed(problem, conversation, "box_killed")
    finally:
        await environment.close()
    collected = msgspec.structs.replace(collected, transcript=tuple(conversation))
    judge = verifier(problem.verifier.kind)
    verdict = await judge.verify(problem, collected, acquire=acquire, deadline_seconds=deadline_seconds)
    return ScriptedEpisode(
        problem_id=problem.id,
        conversation=tuple(conversation),
        stop_reason=stop,
        outcome="scored",
        collected=collected,
        verdict=verdict,
    )


def _failed(problem: Problem, conversation: Sequence[Message], stop: StopReason) -> ScriptedEpisode:
    return ScriptedEpisode(
        problem_id=problem.id,
        conversation=tuple(conversation),
        stop_reason=stop,
        outcome="policy_failure",
        collected=None,
        verdict=None,
    )


def _acquire(backend: SandboxBackend | None) -> Acquire:
    if backend is not None:
        return backend.acquire

    async def refuse(spec: object) -> object:
        raise RuntimeError("this problem asks for a sandbox and none was given: pass backend=")

    return refuse  # type: ignore[return-value]


# -------------------------------------------------------------------------------------------------------- writing policies


def says(content: str) -> Message:
    """An assistant message without a call."""
    return Message(role="assistant", content=content)


def calls(name: str, arguments: str | dict[str, object], *, content: str = "", call_id: str = "call_0") -> Message:
    """An assistant message with one call; a string is taken as it is, so that malformed JSON can be written."""
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return Message(role="assistant", content=content, tool_calls=(ToolCall(call_id=call_id, name=name, arguments=text),))


def plays(*messages: Message) -> Policy:
    """A policy that writes these messages in order, and the last one again for ever."""

    def policy(conversation: Sequence[Message]) -> Message:
        turn = sum(1 for message in conversation if message.role == "assistant")
        return messages[min(turn, len(messages) - 1)]

    return policy


def random_policy(problem: Problem, *, seed: int) -> Policy:
    """Random calls of the problem's tools with random strings, then a random number or word."""
    rng = random.Random(f"{seed}:{problem.id}")

    def word() -> str:
        return "".join(rng.choices(string.ascii_letters + string.digits + " +-*/", k=rng.randint(1, 12)))

    script = []
    if problem.tools:
        for _ in range(max(0, min(3, problem.budgets.max_turns - 1))):
            tool = rng.choice(problem.tools)
            script.append(calls(tool.name, {name: word() for name in tool.parameters.get("properties", {})}))
    script.append(says(str(rng.randint(-999, 999)) if rng.random() < 0.5 else word()))
    return plays(*script)

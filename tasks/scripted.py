"""A sampler that writes a domain's scripted policy: oracle, no-op, or an exploit, as token ids through the real codec.

It lets the whole rollout path (codec, budgets, environments, grading, shards) be proven without a model. Its log-probabilities
are 0.0 and its version is the newest that the batch admits; such episodes teach nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from data_contracts.errors import ConfigError
from data_contracts.protocols import Codec
from data_contracts.records import Message, Problem, SampleRequest, SampleResult, VersionSpan
from environments.base import Policy
from environments.registry import domain_of


class ScriptedSampler:
    """Implements Sampler and `tasks.runtime.ConversationAware`."""

    def __init__(self, codec: Codec, *, policy: str) -> None:
        self._codec, self._policy = codec, policy
        self._pending: dict[str, tuple[Message, int]] = {}
        self._policies: dict[str, Policy] = {}

    def observe(self, session: str, problem: Problem, conversation: Sequence[Message], *, version: int) -> None:
        policy = self._policies.get(session)
        if policy is None:
            policy = self._policies[session] = _policy(problem, self._policy)
        self._pending[session] = policy(conversation), version

    async def sample(self, request: SampleRequest, *, deadline_seconds: float) -> SampleResult:
        del deadline_seconds
        message, version = self._pending.pop(request.session)
        ids = self._codec.encode_assistant(message)
        cut = tuple(ids[: request.max_tokens])
        return SampleResult(
            token_ids=cut,
            logprobs=(0.0,) * len(cut),
            spans=(VersionSpan(start=0, stop=len(cut), version=version),) if cut else (),
            finish_reason="stop" if len(cut) == len(ids) else "length",
            engine="scripted",
        )

    async def close(self) -> None:
        self._policies.clear()


def _policy(problem: Problem, name: str) -> Policy:
    known = domain_of(problem)
    if name == "oracle":
        return known.oracle(problem)
    if name == "noop":
        return known.noop(problem)
    exploits = {exploit.name: exploit.policy for exploit in known.exploits()}
    if name not in exploits:
        raise ConfigError(
            f"unknown scripted policy '{name}' of domain '{problem.domain}'",
            field="policy",
            remedy=f"Choose one of: oracle, noop, {', '.join(sorted(exploits))}",
        )
    return exploits[name](problem)

"""The smallest environment: one prompt, one reply, no box. The reply is the answer; nothing comes back.

`collect` gives `state = {"answer": text}`, text being None until the policy has replied.
"""

from __future__ import annotations

from data_contracts.records import Message
from environments.base import Action, Collected, Environment, Step


class SingleTurn(Environment):
    """One question and one answer."""

    _answer: str | None = None

    async def reset(self) -> tuple[Message, ...]:
        return self.problem.messages

    async def step(self, action: Action) -> Step:
        self._answer = action.message.content
        return Step(done=True, stop_reason="answered")

    async def collect(self) -> Collected:
        return Collected(state={"answer": self._answer})

    async def close(self) -> None:
        """Nothing to give back."""

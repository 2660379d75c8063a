"""Equal requests of one group as one engine call with n choices.

An engine spends milliseconds on every HTTP request, however short its answer: 216 one-token requests of a tiny model took 5 s,
nine requests of 24 choices 0.28 s (docs/results/serving.md). The members of a group whose episodes have a single
turn all ask for the same continuation at the same moment and are waited for together, so nobody loses by sharing a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Choice = TypeVar("Choice")
WINDOW_SECONDS = 0.005
"""Members of a group reach their first turn within a few event-loop rounds of each other."""


@dataclass(kw_only=True)
class _Call(Generic[Choice]):
    waiting: list[asyncio.Future[Choice]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class Together(Generic[Choice]):
    """Collects askers with equal keys for `WINDOW_SECONDS`, at most `most` of them, and asks once: `ask(n)` gives n choices.

    Which asker gets which choice is arbitrary: choices are independent draws. A caller that is cancelled leaves the others'
    call alone; the last one to leave cancels it. What `ask` raises, every asker gets. One event loop.
    """

    def __init__(self, *, most: int) -> None:
        self._most = max(1, most)
        self._open: dict[Any, _Call[Choice]] = {}

    async def one(self, key: Any, ask: Callable[[int], Awaitable[Sequence[Choice]]]) -> Choice:
        call = self._open.get(key)
        if call is None or len(call.waiting) >= self._most:
            call = self._open[key] = _Call()
            call.task = asyncio.create_task(self._run(key, call, ask))
        answer: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()
        call.waiting.append(answer)
        try:
            return await answer
        finally:
            if call.task is not None and all(other.done() for other in call.waiting):
                call.task.cancel()  # nobody is left to wait for it; without effect on one that has ended
                self._close(key, call)

    async def _run(self, key: Any, call: _Call[Choice], ask: Callable[[int], Awaitable[Sequence[Choice]]]) -> None:
        await asyncio.sleep(WINDOW_SECONDS)
        self._close(key, call)
        left = [answer for answer in call.waiting if not answer.done()]
        try:
            choices = await ask(len(left))
            pairs = list(zip(left, choices, strict=True))
        except Exception as error:  # noqa: BLE001  (raised in every asker)
            for answer in left:
                if not answer.done():
                    answer.set_exception(error)
            return
        for answer, choice in pairs:
            if not answer.done():
                answer.set_result(choice)

    def _close(self, key: Any, call: _Call[Choice]) -> None:
        """Nobody joins `call` from now on: it has been sent, or everybody has left it."""
        if self._open.get(key) is call:
            del self._open[key]

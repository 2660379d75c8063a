"""Boxes made ahead: a backend around another one that hands out its boxes without the wait for making them.

Contract: environments/sandbox/base.py, kept as the inner backend keeps it. A kind of box (an equal SandboxSpec) that is asked
for a second time gets a shelf of `warm` boxes; at most `KINDS` kinds are remembered, the one not asked for longest goes
first. A box is handed out once, and only after it was inspected again at that moment: alive, isolated and limited as asked.
A box taken from a full shelf is replaced a moment later, so that its command goes first.
Whoever finds the shelf empty waits for the next box, first come, first served; the makers are bounded, so that commands keep
half of the turns. A box is made to live SHELF_SECONDS longer than asked and its lifetime counts from the hand-out; one that
was on the shelf for longer is thrown away. A box that cannot be made is the error of one waiter; with nobody waiting, nothing
more is made ahead until a box was made again. `destroy` returns when the box is out of use; its removal goes on behind,
bounded, and `close` waits for it. What a crash leaves is the inner backend's `reap` to remove: boxes on a shelf carry the
same labels.
Gaps: one event loop at a time. Boxes on an idle shelf hold memory until their lifetime ends them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import msgspec

from data_contracts.errors import BessemerError, InfraError, InputError
from data_contracts.protocols import to_json
from data_contracts.records import SandboxSpec
from environments.sandbox.base import Backend, Box

KINDS = 4
SHELF_SECONDS = 300.0
REFILL_SECONDS = 0.3
"""How long after a box was taken from a shelf with more of them the next one is made: about a verdict's time."""
ATTEMPTS = 3
"""Fresh boxes that may fail their inspection in a row before the acquire fails."""
_log = logging.getLogger(__name__)


@dataclass
class _Shelf:
    """Boxes of one kind: `ready` or being made, and who waits for one."""

    spec: SandboxSpec
    asked: int = 0
    failing: bool = False
    ready: deque[Box] = field(default_factory=deque)
    waiters: deque[asyncio.Future[Box]] = field(default_factory=deque)
    makers: set[asyncio.Task[Box]] = field(default_factory=set)

    def missing(self, warm: int) -> int:
        ahead = warm if self.asked > 1 and not self.failing else 0
        return len(self.waiters) + max(ahead - len(self.ready), 0) - len(self.makers)


class WarmBackend(Backend):
    """`warm` boxes of a kind stand ready."""

    def __init__(self, inner: Backend, *, warm: int) -> None:
        super().__init__(concurrency=inner.concurrency)
        self.name, self.capabilities, self.boxes = inner.name, inner.capabilities, inner.boxes
        self.inner, self.warm = inner, warm
        self._most_makers = max(inner.concurrency // 2, 1)
        self._shelves: OrderedDict[bytes, _Shelf] = OrderedDict()
        self._removals: dict[Box, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(2 * inner.concurrency)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def check(self) -> None:
        await self.inner.check()
        self.capabilities = self.inner.capabilities

    def reap(self) -> int:
        return self.inner.reap()

    async def era(self) -> int:
        return await self.inner.era()

    def turn(self) -> asyncio.Semaphore:
        return self.inner.turn()

    async def prepare(self, spec: SandboxSpec) -> None:
        """Fill the shelf of a kind before it is asked for. Raises what making a box raises."""
        shelf = self._shelf(spec)
        shelf.asked, shelf.failing = 2, False
        self._refill()
        while len(shelf.ready) < self.warm and shelf.makers:
            await asyncio.wait(shelf.makers, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
        if len(shelf.ready) < self.warm:
            raise InfraError("sandbox_backend", "boxes cannot be made ahead; the log says why")

    async def acquire(self, spec: SandboxSpec) -> Box:
        shelf = self._shelf(spec)
        shelf.asked += 1
        for left in reversed(range(ATTEMPTS + len(shelf.ready))):
            box = await self._next(shelf)
            try:
                await box.probe()
            except asyncio.CancelledError:
                self._later(box)
                raise
            except BessemerError as error:
                _log.warning("a box was thrown away instead of handed out: %s", error)
                self._later(box)
                if left == 0:
                    raise
                continue
            box.hand_out(spec, self._bury)
            return box
        raise AssertionError

    async def close(self) -> None:
        await self.drain()
        await self.inner.close()

    async def drain(self) -> None:
        """Close the pool and remove what stands on its shelves, but leave the inner backend open."""
        self._closed = True
        shelves = list(self._shelves.values())
        self._shelves.clear()
        making = [task for shelf in shelves for task in shelf.makers]
        for task in making:
            task.cancel()
        if making:
            await asyncio.wait(making)
        for shelf in shelves:
            for waiter in shelf.waiters:
                if not waiter.done():
                    waiter.set_exception(InfraError("sandbox_backend", "the sandbox backend was closed"))
            for box in shelf.ready:
                self._later(box)
        if self._removals:
            await asyncio.wait(list(self._removals.values()))

    async def _acquire(self, spec: SandboxSpec) -> Box:
        return await self.inner.acquire(spec)

    # ----------------------------------------------------------------------------------------------------------- the shelves

    def _shelf(self, spec: SandboxSpec) -> _Shelf:
        self.inner.check_spec(spec)
        if self._closed:
            raise InputError("this sandbox backend was closed", remedy="Open another one")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and self._loop.is_running():
                raise InputError("a pool of boxes serves one event loop", remedy="Open one backend for each")
            self._loop, self._room = loop, asyncio.Semaphore(2 * self.concurrency)
            for left in self._shelves.values():  # what belonged to the loop that ended; boxes belong to none
                left.waiters.clear()
                left.makers.clear()
            self._removals.clear()
        key = to_json(spec)
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = _Shelf(spec)
            idle = [name for name, other in self._shelves.items() if not (other.waiters or other.makers) and name != key]
            for name in idle[: max(len(self._shelves) - KINDS, 0)]:
                for box in self._shelves.pop(name).ready:
                    self._later(box)
        self._shelves.move_to_end(key)
        return shelf

    async def _next(self, shelf: _Shelf) -> Box:
        while shelf.ready:
            box = shelf.ready.popleft()
            if box.age_seconds < SHELF_SECONDS:
                if shelf.ready:  # nobody waits for the next one: what was asked for now goes first
                    asyncio.get_running_loop().call_later(REFILL_SECONDS, self._refill)
                else:
                    self._refill()
                return box
            self._later(box)
        waiter: asyncio.Future[Box] = asyncio.get_running_loop().create_future()
        shelf.waiters.append(waiter)
        self._refill()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._offer(shelf, waiter.result())  # nobody has seen it
            raise

    def _offer(self, shelf: _Shelf, box: Box) -> None:
        while shelf.waiters:
            waiter = shelf.waiters.popleft()
            if not waiter.done():
                waiter.set_result(box)
                return
        if self._closed or shelf not in self._shelves.values():
            self._later(box)
        else:
            shelf.ready.append(box)

    def _refill(self) -> None:
        """Start makers: for those who wait first, then for the kinds asked for last."""
        newest = list(self._shelves.values())[::-1]
        shelves = [shelf for shelf in newest if shelf.waiters] + [shelf for shelf in newest if not shelf.waiters]
        free = self._most_makers - sum(len(shelf.makers) for shelf in shelves)
        for shelf in shelves:
            for _ in range(min(shelf.missing(self.warm), free)):
                limits = shelf.spec.limits
                longer = msgspec.structs.replace(limits, lifetime_seconds=limits.lifetime_seconds + SHELF_SECONDS)
                maker = asyncio.ensure_future(self.inner.acquire(msgspec.structs.replace(shelf.spec, limits=longer)))
                shelf.makers.add(maker)
                maker.add_done_callback(lambda task, shelf=shelf: self._made(shelf, task))  # type: ignore[misc]
                free -= 1

    def _made(self, shelf: _Shelf, maker: asyncio.Task[Box]) -> None:
        shelf.makers.discard(maker)
        if maker.cancelled():
            return
        if error := maker.exception():
            shelf.failing = True
            waiter = next((waiter for waiter in shelf.waiters if not waiter.done()), None)
            if waiter is not None:
                shelf.waiters.remove(waiter)
                waiter.set_exception(error)
            else:
                _log.warning("no box can be made ahead: %s", error)
        else:
            shelf.failing = False
            self._offer(shelf, maker.result())
        if not self._closed:
            self._refill()

    # ----------------------------------------------------------------------------------------------------- after their use

    async def _bury(self, box: Box) -> None:
        if box in self._removals:
            return
        if self._closed or asyncio.get_running_loop() is not self._loop:
            await box.remove()
            return
        await self._room.acquire()
        self._later(box).add_done_callback(lambda task: self._room.release())

    def _later(self, box: Box) -> asyncio.Task[None]:
        """Remove a box behind the scenes. One that cannot be removed now stays in `boxes`, for `close` to try again."""
        removal = self._removals[box] = asyncio.ensure_future(box.remove())
        removal.add_done_callback(lambda task: self._removed(box, task))
        return removal

    def _removed(self, box: Box, removal: asyncio.Task[None]) -> None:
        self._removals.pop(box, None)
        if not removal.cancelled() and (error := removal.exception()):
            _log.warning("a box could not be removed yet: %s", error)

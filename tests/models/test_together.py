"""Equal requests become one call, and nobody's trouble is another's."""

from __future__ import annotations

import asyncio

import pytest

from models.serving.together import Together


class Engine:
    """Answers 1, 2, 3, ... and keeps the sizes it was asked for."""

    def __init__(self, *, fails: Exception | None = None, holds: bool = False) -> None:
        self.sizes: list[int] = []
        self.cancelled = 0
        self._fails, self._holds, self._next = fails, holds, 0

    async def ask(self, n: int) -> list[int]:
        self.sizes.append(n)
        if self._holds:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self._fails:
            raise self._fails
        first, self._next = self._next + 1, self._next + n
        return list(range(first, first + n))


async def test_equal_requests_are_one_call_and_every_asker_gets_its_own_choice() -> None:
    engine, together = Engine(), Together[int](most=16)
    answers = await asyncio.gather(*(together.one("a", engine.ask) for _ in range(8)))
    assert sorted(answers) == list(range(1, 9))
    assert engine.sizes == [8]


async def test_a_call_is_never_larger_than_the_engine_takes() -> None:
    engine, together = Engine(), Together[int](most=3)
    answers = await asyncio.gather(*(together.one("a", engine.ask) for _ in range(8)))
    assert sorted(answers) == list(range(1, 9))
    assert sorted(engine.sizes) == [2, 3, 3]


async def test_other_requests_and_later_ones_are_other_calls() -> None:
    engine, together = Engine(), Together[int](most=16)
    await asyncio.gather(together.one("a", engine.ask), together.one("b", engine.ask), together.one("a", engine.ask))
    await together.one("a", engine.ask)
    assert sorted(engine.sizes) == [1, 1, 2]


async def test_a_failure_reaches_every_asker() -> None:
    engine, together = Engine(fails=ValueError("no")), Together[int](most=16)
    answers = await asyncio.gather(*(together.one("a", engine.ask) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [ValueError] * 3


async def test_too_few_choices_are_an_error_of_every_asker() -> None:
    async def short(n: int) -> list[int]:
        return [1] * (n - 1)

    together = Together[int](most=16)
    answers = await asyncio.gather(*(together.one("a", short) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [ValueError] * 3


async def test_who_leaves_takes_nobody_along_and_the_last_one_ends_the_call() -> None:
    engine, together = Engine(holds=True), Together[int](most=16)
    askers = [asyncio.create_task(together.one("a", engine.ask)) for _ in range(3)]
    await asyncio.sleep(0.05)
    askers[0].cancel()
    await asyncio.sleep(0.01)
    assert engine.cancelled == 0
    assert not askers[1].done()
    for asker in askers[1:]:
        asker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.gather(*askers[1:])
    await asyncio.sleep(0.01)
    assert engine.cancelled == 1


async def test_who_left_before_the_call_is_not_asked_for() -> None:
    engine, together = Engine(), Together[int](most=16)
    askers = [asyncio.create_task(together.one("a", engine.ask)) for _ in range(3)]
    await asyncio.sleep(0)
    askers[0].cancel()
    assert sorted(await asyncio.gather(*askers[1:])) == [1, 2]
    assert engine.sizes == [2]


async def test_who_comes_after_all_have_left_is_asked_for_anew() -> None:
    engine, together = Engine(), Together[int](most=16)
    left = asyncio.create_task(together.one("a", engine.ask))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    assert await asyncio.wait_for(together.one("a", engine.ask), timeout=5) == 1
    assert engine.sizes == [1]

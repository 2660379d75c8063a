"""Boxes made ahead: handed out once, inspected at that moment, made in bounded numbers, and nothing stays behind."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from data_contracts.config import SandboxConfig
from data_contracts.errors import CapabilityError, InfraError, InputError
from data_contracts.protocols import ExecRequest
from data_contracts.records import SandboxLimits, SandboxSpec
from environments.sandbox import open_backend, pool
from environments.sandbox.base import Backend, Box
from environments.sandbox.bubblewrap import BubblewrapBackend, BubblewrapBox
from environments.sandbox.conformance.lab import Lab, sh
from environments.sandbox.docker import DockerBackend, DockerBox
from environments.sandbox.fake import FakeBackend, FakeBox
from environments.sandbox.pool import WarmBackend


class SlowBackend(FakeBackend):
    """The shipped fake, whose boxes take a moment to make; it counts, and fails where it is told to."""

    def __init__(self, *, concurrency: int = 4, seconds: float = 0.02) -> None:
        super().__init__(concurrency=concurrency)
        self.seconds, self.made, self.making, self.most = seconds, 0, 0, 0
        self.failures = 0

    async def _acquire(self, spec: SandboxSpec) -> Box:
        self.making += 1
        self.most = max(self.most, self.making)
        try:
            await asyncio.sleep(self.seconds)
            if self.failures:
                self.failures -= 1
                raise InfraError("sandbox_backend", "the engine is away")
        finally:
            self.making -= 1
        self.made += 1
        return await super()._acquire(spec)


@asynccontextmanager
async def a_pool(inner: Backend, warm: int) -> AsyncIterator[WarmBackend]:
    opened = WarmBackend(inner, warm=warm)
    try:
        yield opened
    finally:
        await opened.close()
        assert not opened.boxes


async def settled(backend: WarmBackend, count: int) -> None:
    for _ in range(400):
        if len(backend.boxes) == count and not backend.inner.making:  # type: ignore[attr-defined]
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{len(backend.boxes)} boxes instead of {count}")


async def test_a_box_is_handed_out_once_and_the_shelf_is_filled_again() -> None:
    inner = SlowBackend()
    async with a_pool(inner, 3) as warm:
        await warm.prepare(SandboxSpec())
        assert inner.made == 3
        seen = [await warm.acquire(SandboxSpec()) for _ in range(12)]
        assert len({box.id for box in seen}) == 12
        for box in seen:
            assert (await sh(box, "ls; echo used > mark")).stdout == b""
            await box.destroy()
            await box.destroy()
            with pytest.raises(InputError, match="single use"):
                await sh(box, "true")
        await settled(warm, 3)


async def test_a_kind_asked_for_once_is_not_made_ahead() -> None:
    inner = SlowBackend()
    async with a_pool(inner, 3) as warm:
        await (await warm.acquire(SandboxSpec())).destroy()
        await asyncio.sleep(0.1)
        assert inner.made == 1
        await (await warm.acquire(SandboxSpec())).destroy()
        await settled(warm, 3)


async def test_kinds_do_not_mix_and_the_oldest_is_forgotten() -> None:
    inner = SlowBackend()
    async with a_pool(inner, 1) as warm:
        specs = [SandboxSpec(env={"KIND": str(number)}) for number in range(pool.KINDS + 2)]
        for spec in specs:
            await warm.prepare(spec)
        await settled(warm, pool.KINDS)
        for spec in specs:
            box = await warm.acquire(spec)
            assert box.spec == spec
            assert (await sh(box, "printf %s $KIND")).stdout.decode() == spec.env["KIND"]
            await box.destroy()


async def test_who_finds_it_dry_waits_for_the_next_box_and_makers_are_bounded() -> None:
    inner = SlowBackend(concurrency=4)
    order: list[int] = []
    async with a_pool(inner, 2) as warm:

        async def one(number: int) -> None:
            box = await warm.acquire(SandboxSpec())
            order.append(number)
            await box.destroy()

        await asyncio.gather(*(one(number) for number in range(20)))
        assert inner.most <= 2
        assert order == sorted(order)
        await settled(warm, 2)


async def test_commands_keep_running_while_boxes_are_made() -> None:
    inner = SlowBackend(concurrency=2, seconds=0.5)
    async with a_pool(inner, 2) as warm:
        box = await warm.acquire(SandboxSpec())
        waiting = [asyncio.ensure_future(warm.acquire(SandboxSpec())) for _ in range(4)]
        began = time.monotonic()
        await sh(box, "true")
        assert time.monotonic() - began < 0.4
        for other in waiting:
            await (await other).destroy()
        await box.destroy()


async def test_a_cancelled_waiter_takes_no_box_along() -> None:
    inner = SlowBackend()
    async with a_pool(inner, 1) as warm:
        for delay in (0.0, 0.01, 0.02, 0.021, 0.025, 0.03):
            waiter = asyncio.ensure_future(warm.acquire(SandboxSpec()))
            await asyncio.sleep(delay)
            waiter.cancel()
            with suppress(asyncio.CancelledError):
                await (await waiter).destroy()
        assert (await asyncio.wait_for(warm.acquire(SandboxSpec()), 5)).age_seconds < 5
    assert not inner.boxes


async def test_a_box_that_cannot_be_made_fails_one_waiter_and_is_not_tried_for_ever() -> None:
    inner = SlowBackend()
    async with a_pool(inner, 4) as warm:
        inner.failures = 1
        ends = await asyncio.gather(*(warm.acquire(SandboxSpec()) for _ in range(3)), return_exceptions=True)
        assert sorted(type(end).__name__ for end in ends) == ["FakeBox", "FakeBox", "InfraError"]
        await settled(warm, 6)
        inner.failures = 1 << 30
        for box in list(warm.boxes):
            assert isinstance(box, FakeBox)
            await box.destroy()
        with pytest.raises(InfraError):
            await warm.acquire(SandboxSpec())
        await asyncio.sleep(0.1)
        tried = (1 << 30) - inner.failures
        await asyncio.sleep(0.2)
        assert tried == (1 << 30) - inner.failures
        inner.failures = 0
        await (await warm.acquire(SandboxSpec())).destroy()
        await settled(warm, 4)


async def test_a_box_that_would_not_last_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SHELF_SECONDS", 0.3)
    inner = SlowBackend()
    spec = SandboxSpec(limits=SandboxLimits(lifetime_seconds=1.0))
    async with a_pool(inner, 2) as warm:
        await warm.prepare(spec)
        old = {box.id for box in warm.boxes}
        await asyncio.sleep(0.4)
        box = await warm.acquire(spec)
        assert box.id not in old
        assert box.spec.limits.lifetime_seconds == 1.0
        with pytest.raises(InfraError, match="lifetime"):
            await sh(box, "sleep 5")
        assert 0.9 < box.age_seconds < 3


async def test_shells_end_with_their_boxes_and_with_the_lifetime_that_was_asked_for() -> None:
    inner = SlowBackend()
    async with a_pool(inner, 2) as warm:
        await warm.prepare(SandboxSpec())
        box = await warm.acquire(SandboxSpec())
        shell = await box.shell()
        assert (await shell.run("x=1; echo $x", 20)).stdout == b"1\n"
        turn = asyncio.ensure_future(shell.run("sleep 60", 60))
        await asyncio.sleep(0.1)
        await box.destroy()
        assert not (await asyncio.wait_for(turn, 10)).alive
        await settled(warm, 2)
        with pytest.raises(InputError, match="single use"):
            await shell.run("echo $x", 20)
        brief = await warm.acquire(SandboxSpec(limits=SandboxLimits(lifetime_seconds=1.0)))
        shell = await brief.shell()
        with pytest.raises(InfraError, match="lifetime"):
            await shell.run("sleep 60", 60)
        assert 0.9 < brief.age_seconds < 5
        assert not shell.alive


async def test_what_changed_on_the_shelf_is_not_handed_out() -> None:
    inner = SlowBackend()
    async with a_pool(inner, 2) as warm:
        await warm.prepare(SandboxSpec())
        for box in list(warm.boxes):
            assert isinstance(box, FakeBox)
            shutil.rmtree(box._folder)
        fresh = await warm.acquire(SandboxSpec())
        assert (await sh(fresh, "echo fine")).stdout == b"fine\n"


async def test_close_ends_everything_in_the_middle_of_it() -> None:
    inner = SlowBackend(seconds=0.1)
    warm = WarmBackend(inner, warm=4)
    box = await warm.acquire(SandboxSpec())
    waiting = [asyncio.ensure_future(warm.acquire(SandboxSpec())) for _ in range(8)]
    await asyncio.sleep(0.15)
    await box.destroy()
    await warm.close()
    for end in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(end, Box | InfraError)
    assert not inner.boxes
    assert not inner.making
    with pytest.raises(InputError, match="closed"):
        await warm.acquire(SandboxSpec())


async def test_the_contract_is_the_inner_backends(fake_backend: Backend) -> None:
    warm = open_backend(SandboxConfig(backend="fake", warm=2))
    assert isinstance(warm, WarmBackend)
    assert (warm.name, warm.capabilities) == (fake_backend.name, fake_backend.capabilities)
    with pytest.raises(CapabilityError):
        await warm.acquire(SandboxSpec(needs=("isolation",)))
    await warm.close()


def test_a_pool_outlives_an_event_loop() -> None:
    warm = WarmBackend(SlowBackend(), warm=2)

    async def use() -> None:
        await warm.prepare(SandboxSpec())
        await (await warm.acquire(SandboxSpec())).destroy()

    asyncio.run(use())
    asyncio.run(use())
    asyncio.run(warm.close())
    assert not warm.boxes


@pytest.fixture(params=["bubblewrap", "docker"])
def inner(request: pytest.FixtureRequest) -> Backend:
    request.getfixturevalue(f"{request.param}_backend")
    return BubblewrapBackend(concurrency=4) if request.param == "bubblewrap" else DockerBackend(concurrency=4)


async def test_real_boxes_are_inspected_when_they_are_handed_out(inner: Backend) -> None:
    """A box that died or whose limits were loosened on the shelf is replaced; what is handed out is as good as a fresh one."""
    spec = SandboxSpec(limits=SandboxLimits(pids=20))
    async with a_pool(inner, 2) as warm:
        await warm.prepare(spec)
        dead, loosened = list(warm.boxes)
        for box, action in ((dead, "end"), (loosened, "loosen")):
            if isinstance(box, BubblewrapBox):
                if action == "end":
                    box._group.kill()
                else:
                    next(file for file in box._group._files(box.spec.limits) if file.name == "pids.max").write_text("max")
            elif isinstance(box, DockerBox):
                if action == "end":
                    box.container.kill()
                else:
                    box.container.update(mem_limit=1 << 30, memswap_limit=1 << 30)
        async with Lab(warm).box(pids=20) as box:
            assert box.id not in {dead.id, loosened.id}
            result = await box.exec(ExecRequest(argv=("sh", "-c", "id -u; echo kept > file"), deadline_seconds=20))
            assert result.stdout == b"1000\n"
            await box.freeze()
            assert [item.content for item in await box.collect(["file"], max_bytes=100)] == [b"kept\n"]

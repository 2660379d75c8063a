"""Docker's engine stopped, killed, restarted or hung while boxes live: never the policy's failure, and nothing stays behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from data_contracts.errors import InfraError, SandboxLost
from data_contracts.records import SandboxSpec
from environments.sandbox import docker_link
from environments.sandbox.base import Box
from environments.sandbox.conformance.lab import sh
from environments.sandbox.docker import DockerBackend, DockerBox
from environments.sandbox.pool import WarmBackend
from tests.plugins.engine import PrivateEngine

BOMB = "python3 -c 'x = bytearray(1 << 30)'"


@pytest.fixture
async def docker(private_engine: PrivateEngine) -> AsyncIterator[DockerBackend]:
    with private_engine.chosen():
        backend = DockerBackend(concurrency=4)
        yield backend
        private_engine.start()
        await backend.close()


async def blamed(box: Box, command: str = "true") -> InfraError:
    with pytest.raises(InfraError) as caught:
        await sh(box, command)
    return caught.value


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_boxes_that_ended_with_their_engine_are_nobodys_failure(
    how: str, docker: DockerBackend, private_engine: PrivateEngine
) -> None:
    """Even one whose policy ran out of memory before, so that the engine remembers a memory kill of it."""
    idle, bombed, busy = [await docker.acquire(SandboxSpec()) for _ in range(3)]
    assert (await sh(bombed, BOMB)).oom_killed
    era = await docker.era()
    running = asyncio.ensure_future(sh(busy, "sleep 50", seconds=60))
    await asyncio.sleep(0.5)
    getattr(private_engine, how)()
    with pytest.raises(InfraError):
        await asyncio.wait_for(running, 20)
    with pytest.raises(InfraError, match=r"sandbox_unreachable.*systemctl start docker"):
        await docker.era()
    with pytest.raises(InfraError):
        await busy.destroy()
    private_engine.start()
    for box in (idle, bombed):
        assert (await blamed(box)).cause == "sandbox_unreachable"
        with pytest.raises(InfraError):
            await box.freeze()
    assert await docker.era() != era
    fresh = await docker.acquire(SandboxSpec())
    assert (await sh(fresh, "echo again")).stdout == b"again\n"
    assert isinstance(fresh, DockerBox)
    fresh.container.kill()
    with pytest.raises(SandboxLost, match="policy's failure"):
        await sh(fresh, "true")
    for _ in range(100):
        if busy not in docker.boxes:
            break
        await asyncio.sleep(0.05)
    for box in (idle, bombed, fresh):
        await box.destroy()
    assert not docker.client.containers.list(all=True), "what could not be removed during the outage stayed"


async def test_an_engine_that_hangs_is_away_and_a_command_that_ended_meanwhile_is_not_late(
    docker: DockerBackend, private_engine: PrivateEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_link, "ANSWER_SECONDS", 1.0)
    box = await docker.acquire(SandboxSpec())
    command = asyncio.ensure_future(sh(box, "sleep 1; echo done", seconds=2))
    await asyncio.sleep(0.6)
    private_engine.pause()
    try:
        began = time.monotonic()
        with pytest.raises(InfraError, match="sandbox_unreachable"):
            await docker.era()
        assert time.monotonic() - began < 5
        await asyncio.sleep(1.5)
    finally:
        private_engine.go_on()
    ended = await command
    assert (ended.stdout, ended.timed_out, ended.exit_code) == (b"done\n", False, 0)
    await box.destroy()


async def test_boxes_on_a_shelf_that_ended_with_their_engine_are_not_handed_out(
    docker: DockerBackend, private_engine: PrivateEngine
) -> None:
    warm = WarmBackend(docker, warm=2)
    await warm.prepare(SandboxSpec())
    private_engine.kill()
    with pytest.raises(InfraError):
        await warm.acquire(SandboxSpec())
    private_engine.start()
    box = await warm.acquire(SandboxSpec())
    assert (await sh(box, "echo alive")).stdout == b"alive\n"
    await box.destroy()
    await warm.drain()

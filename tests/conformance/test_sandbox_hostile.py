"""What a policy may do to its box so that the next step of the control plane fails, and the bad score becomes an outage."""

from __future__ import annotations

import time

import pytest

from data_contracts.errors import SandboxLost
from environments.sandbox.base import Backend
from tests.conformance.sandbox_boxes import a_box, py, sh

STOPS_EVERYTHING = """
import os, signal
if os.fork():
    os._exit(0)
os.setsid()
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            try:
                os.kill(int(name), signal.SIG{kind})
            except OSError:
                pass
"""
FILLS_MEMORY_FOR_GOOD = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
while (segment := libc.shmget(0, ctypes.c_size_t(1 << 20), 0o1600)) >= 0:
    ctypes.memset(libc.shmat(segment, None, 0), 1, 1 << 20)
"""


@pytest.fixture(params=["bubblewrap", "docker"])
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.getfixturevalue(f"{request.param}_backend")
    return found


@pytest.mark.parametrize("kind", ["STOP", "KILL"])
async def test_a_daemon_that_signals_every_process_blocks_no_step(backend: Backend, kind: str) -> None:
    """An engine starts a command by a helper that takes the policy's user: stopped there, it would block the engine."""
    began = time.monotonic()
    async with a_box(backend) as box:
        await py(box, STOPS_EVERYTHING.replace("{kind}", kind))
        await box.put_files({"answer": b"x"})
        await sh(box, "echo hi", seconds=2.0)  # it may well be stopped or killed, which is a result
        await box.freeze()
        assert [found.content for found in await box.collect(("answer",), max_bytes=10)] == [b"x"]
    assert time.monotonic() - began < 45.0


async def test_memory_that_outlives_its_process_blocks_no_step(backend: Backend) -> None:
    async with a_box(backend, memory_bytes=96 << 20) as box:
        await py(box, FILLS_MEMORY_FOR_GOOD)
        await box.put_files({"answer": b"x"})
        assert (await sh(box, "echo hi")).stdout == b"hi\n"
        await box.freeze()
        assert [found.content for found in await box.collect(("answer",), max_bytes=10)] == [b"x"]


async def test_a_box_filled_with_files_to_its_memory_limit_is_the_policys_failure_or_no_failure(backend: Backend) -> None:
    async with a_box(backend, memory_bytes=24 << 20, disk_bytes=64 << 20) as box:
        try:
            await box.put_files({"answer": b"x"})
            await sh(box, "head -c 60000000 /dev/zero > full; head -c 30000000 /dev/zero > /tmp/full; true")
            await box.freeze()
            assert [found.name for found in await box.collect(("answer",), max_bytes=10)] == ["answer"]
        except SandboxLost:
            pass

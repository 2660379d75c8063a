"""Commands that enter a Docker box from its host: the same box as through the engine, and nothing of ours within its reach."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from data_contracts.errors import InfraError
from data_contracts.protocols import ExecRequest
from environments.sandbox import docker_entry
from environments.sandbox.conformance.lab import Lab, py, sh
from environments.sandbox.conformance.suite import checks, run_checks
from environments.sandbox.docker import DockerBackend, DockerBox
from environments.sandbox.docker_entry import find_entry
from environments.sandbox.docker_processes import policy_processes
from environments.sandbox.entering import SHARED_USERS
from environments.sandbox.owners import start_ticks
from infra.rootfs import BOX_UID
from tests.environments.sandbox.test_preload import LOOK

ENGINES_OWN = {"oom", "parent", "session", "hash"}
"""Of no account: the engine gives its commands a score of 500 for memory kills, we 1000; pids, and what is random."""


async def seen(box: DockerBox) -> dict[str, Any]:
    result = await py(box, LOOK.replace("__file__", "''"))
    assert result.exit_code == 0, result
    found: dict[str, Any] = json.loads(result.stdout)
    status = found["status"]
    assert status.pop("Groups") in {"", str(BOX_UID)}  # the engine names the group a second time
    status["SigIgn"] = int(status["SigIgn"], 16) & 0x7FFFFFFF  # it ignores signal 32, which is libc's own
    return {key: value for key, value in found.items() if key not in ENGINES_OWN}


def left(box: DockerBox) -> list[int]:
    assert box._oom_file is not None
    return policy_processes(box._oom_file.parent, box.init)


async def held(box: DockerBox, count: int) -> None:
    """Wait until the policy has so many processes."""
    for _ in range(400):
        if len(left(box)) == count:
            return
        await asyncio.sleep(0.025)
    pytest.fail(f"the policy has {len(left(box))} processes, not {count}")


async def test_a_command_that_entered_sees_what_one_of_the_engines_sees(docker_backend: DockerBackend) -> None:
    async with Lab(docker_backend).box() as box:
        assert isinstance(box, DockerBox)
        assert box.entry is not None
        entered = await seen(box)
        entry, box.entry = box.entry, None
        started = await seen(box)
        box.entry = entry
        assert entered == started
        assert not any(int(entered["status"][key], 16) for key in entered["status"] if key.startswith("Cap"))


async def test_the_engine_is_not_asked_to_run_a_command(docker_backend: DockerBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Lab(docker_backend).box() as box:
        with monkeypatch.context() as patch:
            patch.setattr(type(docker_backend.client.api), "_post", lambda *args, **kw: pytest.fail("the engine was asked"))
            assert (await sh(box, "echo here")).stdout == b"here\n"


async def test_a_container_that_the_engine_guards_otherwise_is_not_entered(docker_backend: DockerBackend) -> None:
    async with Lab(docker_backend).box() as box:
        assert isinstance(box, DockerBox)
        about = box.container.attrs
        entry = find_entry(about, box.init)
        assert entry is not None
        entry.close()
        assert find_entry({**about, "AppArmorProfile": "docker-default"}, box.init) is None
        assert find_entry({**about, "ProcessLabel": "system_u:system_r:container_t:s0:c1,c2"}, box.init) is None
        assert find_entry(about, os.getpid()) is None, "a process of another group"
        assert find_entry({**about, "Id": "0" * 64}, box.init) is None


async def test_a_host_that_forbids_it_has_the_engine_start_commands(
    docker_engine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(docker_entry.Entry, "descriptors", wrong_spaces)
    backend = DockerBackend()
    await backend.check()
    assert "cannot be entered" in caplog.text
    async with Lab(backend).box() as box:
        assert isinstance(box, DockerBox)
        assert box.entry is None
        assert (await sh(box, "echo here")).stdout == b"here\n"
    await backend.close()


@contextlib.contextmanager
def wrong_spaces(self: docker_entry.Entry) -> Iterator[list[int]]:
    """What setns refuses."""
    null = os.open("/dev/null", os.O_RDONLY)
    yield [null] * len(SHARED_USERS)
    os.close(null)


async def test_a_spawner_that_dies_is_an_outage_and_leaves_nothing_running(docker_engine: str) -> None:
    backend = DockerBackend()
    async with Lab(backend).box() as box:
        assert isinstance(box, DockerBox)
        running = asyncio.ensure_future(sh(box, "sleep 50 & sleep 50", seconds=60))
        await held(box, 3)  # the shell and both sleeps
        os.kill(backend.spawner.pid, signal.SIGKILL)
        with pytest.raises(InfraError, match="spawner died"):
            await asyncio.wait_for(running, 20)
        assert left(box) == []
        assert (await sh(box, "echo again")).stdout == b"again\n"
    spawner = backend.spawner.pid
    await backend.close()
    assert start_ticks(spawner) is None


async def test_a_command_that_is_late_at_once_does_not_start_afterwards(docker_backend: DockerBackend) -> None:
    async with Lab(docker_backend).box() as box:
        assert isinstance(box, DockerBox)
        for step in range(12):
            request = ExecRequest(argv=("sh", "-c", "sleep 50 & sleep 50"), deadline_seconds=0.0005 * (1 + step))
            result = await box.exec(request)
            assert (result.exit_code, result.timed_out) == (None, True)
            assert left(box) == []
        for step in range(6):
            call = asyncio.ensure_future(sh(box, "sleep 50 & sleep 50", seconds=60))
            await asyncio.sleep(0.004 * step)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert left(box) == []


WATCH = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
def enters(pid): return int(pid) != os.getpid() and b"spawner" in open(f"/proc/{pid}/cmdline", "rb").read()
met, reached, end = [], [], time.monotonic() + 20
while not met and time.monotonic() < end:
    met = [pid for pid in os.listdir("/proc") if pid.isdigit() and enters(pid)]
for pid in met:
    ways = {name: open for name in ("mem", "environ", "maps", "auxv", "io", "stack")}
    ways |= {name: os.listdir for name in ("fd", "map_files")}
    ways |= {name: os.readlink for name in ("root", "cwd", "exe", "ns/net", "ns/mnt", "fd/1")}
    for name, way in ways.items():
        try:
            way(f"/proc/{pid}/{name}"); reached.append(name)
        except OSError: pass
    reached += ["traced"] if libc.ptrace(0x4206, int(pid), 0, 0) == 0 else []
    try:
        os.kill(int(pid), 19); reached.append("stopped")
    except PermissionError: pass
    reached += [row for row in open(f"/proc/{pid}/status") if row.startswith("Uid") and row.split()[1] != "0"]
print(len(met), reached)
"""


async def test_who_enters_as_root_is_out_of_the_policys_reach(
    docker_backend: DockerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more group, a pipe that is full, holds the entering process where it is root and all of the box's groups are its."""
    async with Lab(docker_backend).box() as box:
        assert isinstance(box, DockerBox)
        assert box.entry is not None
        watching = asyncio.ensure_future(py(box, WATCH, seconds=30))
        await held(box, 1)
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(write_end, bytes(4096)):
                pass
        os.set_blocking(write_end, True)
        descriptors = box.entry.descriptors

        @contextlib.contextmanager
        def one_more() -> Iterator[list[int]]:
            with descriptors() as found:
                yield [*found, write_end]

        monkeypatch.setattr(box.entry, "descriptors", one_more)
        entering = asyncio.ensure_future(sh(box, "echo in"))
        assert (await watching).stdout == b"1 []\n", await watching
        os.read(read_end, 1 << 20)
        assert (await entering).stdout == b"in\n"
        for fd in (read_end, write_end):
            os.close(fd)


async def test_a_backend_that_does_not_enter_keeps_the_contract(docker_engine: str) -> None:
    """As with a remote engine."""
    backend = DockerBackend(concurrency=8, enters=False)
    async with Lab(backend).box() as box:
        assert isinstance(box, DockerBox)
        assert box.entry is None
    outcomes = await run_checks(Lab(backend), checks(["exits", "streams"]))
    assert {outcome.name: outcome.reason for outcome in outcomes if outcome.status != "pass"} == {}
    assert backend.spawner.pid == 0
    await backend.close()

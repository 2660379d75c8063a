"""Commands that enter a Docker box from its host: the same box as through the engine, and nothing of ours within its reach."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from data_contracts.errors import InfraError
from data_contracts.protocols import ExecRequest
from environments.sandbox.conformance.lab import Lab, py, sh
from environments.sandbox.conformance.suite import checks, run_checks
from environments.sandbox.docker import DockerBackend, DockerBox
from environments.sandbox.docker_entry import find_entry
from environments.sandbox.docker_processes import policy_processes
from environments.sandbox.owners import start_ticks
from tests.environments.sandbox.test_preload import LOOK

ENGINES_OWN = {"oom", "parent", "session", "hash"}
"""Of no account: the engine gives its commands a score of 500 for memory kills, we 1000; pids, and what is random."""


async def seen(box: DockerBox) -> dict[str, Any]:
    result = await py(box, LOOK.replace("__file__", "''"))
    assert result.exit_code == 0, result
    found: dict[str, Any] = json.loads(result.stdout)
    return {key: value for key, value in found.items() if key not in ENGINES_OWN}


def left(box: DockerBox) -> list[int]:
    assert box._oom_file is not None
    return policy_processes(box._oom_file.parent, box.init)


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


async def test_a_spawner_that_dies_is_an_outage_and_leaves_nothing_running(docker_engine: str) -> None:
    backend = DockerBackend()
    async with Lab(backend).box() as box:
        assert isinstance(box, DockerBox)
        running = asyncio.ensure_future(sh(box, "sleep 50 & sleep 50", seconds=60))
        for _ in range(200):
            if len(left(box)) == 3:  # the shell and both sleeps
                break
            await asyncio.sleep(0.05)
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
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def enters(pid): return int(pid) != os.getpid() and b"spawner" in open(f"/proc/{pid}/cmdline", "rb").read()
met, reached, end = set(), set(), time.monotonic() + 4
print("up", flush=True)
while time.monotonic() < end:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if not enters(pid): continue
        except OSError: continue
        met.add(pid)
        for name in ("mem", "environ", "maps", "fd", "root", "cwd", "exe", "ns/net"):
            path = f"/proc/{pid}/{name}"
            try: (os.listdir if name == "fd" else os.readlink if name in ("root", "cwd", "exe", "ns/net") else open)(path)
            except OSError: continue
            if enters(pid): reached.add(name)
        if libc.ptrace(0x4206, int(pid), 0, 0) == 0 and enters(pid): reached.add("trace")
print(len(met) > 0, sorted(reached))
"""


async def test_who_enters_is_out_of_the_policys_reach(docker_backend: DockerBackend) -> None:
    async with Lab(docker_backend).box() as box:
        watching = asyncio.ensure_future(py(box, WATCH, seconds=30))
        while not watching.done():
            await sh(box, "true")
        assert (await watching).stdout == b"up\nTrue []\n", await watching


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

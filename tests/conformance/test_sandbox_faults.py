"""Faults that no check may cause on a user's host: owners killed, boxes ended from outside, settings loosened, no tools."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_contracts.config import SandboxConfig
from data_contracts.errors import CapabilityError, InfraError, MissingRequirement, SandboxLost
from data_contracts.records import SandboxSpec
from environments.sandbox import open_backend
from environments.sandbox.base import Backend
from environments.sandbox.bubblewrap import BubblewrapBackend, BubblewrapBox
from environments.sandbox.conformance.hostview import pids
from environments.sandbox.conformance.lab import Lab, marker, sh
from environments.sandbox.docker import DockerBackend, DockerBox

real = pytest.mark.parametrize("backend", ["bubblewrap", "docker"], indirect=True)
OWNER = """
import asyncio, sys
from environments.sandbox import open_backend
from data_contracts.config import SandboxConfig
from data_contracts.records import SandboxSpec
from data_contracts.protocols import ExecRequest
async def main():
    backend = open_backend(SandboxConfig(backend=sys.argv[1]))
    box = await backend.acquire(SandboxSpec())
    await box.exec(ExecRequest(argv=("sh", "-c", f"sleep {sys.argv[2]} &"), deadline_seconds=20))
    spawner = getattr(backend, "spawner", None)
    print(box.id, spawner.pid if spawner else 0, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("backend", "both"), [("docker", False), ("bubblewrap", False), ("bubblewrap", True)], indirect=["backend"]
)
async def test_what_a_killed_owner_leaves_is_removed(backend: Backend, both: bool) -> None:
    """Killed alone, the owner's boxes die with it (bubblewrap) or at the next sweep; killed with its spawner, at the sweep."""
    mark = marker()
    async with Lab(backend).box() as bystander:
        command = [sys.executable, "-c", OWNER, backend.name, mark]
        owner = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)
        assert owner.stdout
        _, spawner = (await asyncio.to_thread(owner.stdout.readline)).split()
        if both:
            os.kill(int(spawner), signal.SIGSTOP)
        owner.kill()
        owner.wait()
        if both:
            os.kill(int(spawner), signal.SIGKILL)
        await asyncio.sleep(0.5)
        reaped = await asyncio.to_thread(backend.reap)
        assert reaped == (1 if both or backend.name == "docker" else 0)
        assert pids(mark) == []
        assert (await sh(bystander, "echo fine")).stdout == b"fine\n"
        owner.stdout.close()


@real
async def test_a_box_that_died_is_lost_by_the_policy(backend: Backend) -> None:
    async with Lab(backend).box() as box:
        if isinstance(box, BubblewrapBox):
            os.kill(box.pid, signal.SIGKILL)
        elif isinstance(box, DockerBox):
            box.container.kill()
        await asyncio.sleep(0.2)
        for _ in range(2):
            with pytest.raises(SandboxLost, match="policy's failure"):
                await sh(box, "true")


async def test_a_spawner_that_dies_is_an_infrastructure_failure(rootfs: Path) -> None:
    backend = BubblewrapBackend()
    async with Lab(backend).box() as box:
        os.kill(backend.spawner.pid, signal.SIGKILL)
        await asyncio.sleep(0.3)
        with pytest.raises(InfraError, match="spawner died"):
            await sh(box, "true")
        async with Lab(backend).box() as fresh:
            assert (await sh(fresh, "echo again")).stdout == b"again\n"
    await backend.close()


async def test_bubblewrap_boxes_have_users_of_their_own_on_the_host(bubblewrap_backend: Backend) -> None:
    lab = Lab(bubblewrap_backend)
    async with lab.box() as one, lab.box() as two:
        assert isinstance(one, BubblewrapBox)
        assert isinstance(two, BubblewrapBox)
        uids = {os.stat(f"/proc/{box.pid}").st_uid for box in (one, two)}
        assert len(uids) == 2
        assert 0 not in uids


async def test_a_host_without_the_tools_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingRequirement, match="apt-get install -y bubblewrap"):
        await BubblewrapBackend().check()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(MissingRequirement, match=r"infra\.rootfs --docker"):
        await DockerBackend().check()


@real
async def test_a_missing_root_file_system_is_an_infrastructure_failure(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(f"environments.sandbox.{backend.name}.rootfs_path", lambda image: tmp_path / "none", raising=False)
    monkeypatch.setattr(f"environments.sandbox.{backend.name}.image_name", lambda image: "bessemer-sandbox:none", raising=False)
    with pytest.raises(InfraError, match=r"image_missing.*python -m infra\.rootfs"):
        async with Lab(backend).box():
            pass


async def test_a_private_engine_setting_is_noticed(docker_backend: DockerBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    create = docker_backend.client.containers.create
    loosened = {"privileged": True, "network_mode": "host", "volumes": {"/var/run/docker.sock": {"bind": "/s", "mode": "ro"}}}
    for key, value in loosened.items():
        with monkeypatch.context() as patch:
            kind = type(docker_backend.client.containers)
            patch.setattr(
                kind,
                "create",
                lambda self, *args, _key=key, _value=value, **kw: create(*args, **{**kw, _key: _value}) if kw else None,
            )
            started = time.monotonic()
            with pytest.raises(InfraError, match="not handed out"):
                async with Lab(docker_backend).box():
                    pass
            assert time.monotonic() - started < 20


async def test_output_that_comes_with_the_engines_headers_is_kept(docker_engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy host a command has written before the SDK reads the answer's head, which then holds its first output."""
    begin = http.client.HTTPResponse.begin

    def late(self: http.client.HTTPResponse) -> None:
        time.sleep(0.5)
        begin(self)

    backend = DockerBackend(enters=False)
    async with Lab(backend).box() as box:
        monkeypatch.setattr(http.client.HTTPResponse, "begin", late)
        assert (await sh(box, "echo first; sleep 2; echo last")).stdout == b"first\nlast\n"
    await backend.close()


def test_the_fake_says_that_it_does_not_isolate_and_is_never_a_fall_back(fake_backend: Backend) -> None:
    assert not fake_backend.capabilities & {"isolation", "limits", "oom", "no_network"}
    with pytest.raises(CapabilityError, match="isolation"):
        asyncio.run(fake_backend.acquire(SandboxSpec(needs=("isolation",))))
    for name in ("bubblewrap", "docker", "fake"):
        assert open_backend(SandboxConfig(backend=name)).name == name  # type: ignore[arg-type]


def test_capabilities_are_declared(bubblewrap_backend: Backend, docker_backend: Backend) -> None:
    for backend in (bubblewrap_backend, docker_backend):
        assert backend.capabilities >= {"exec", "files", "freeze", "isolation", "limits", "oom", "no_network"}
        assert json.dumps(sorted(backend.capabilities))


async def test_concurrency_bounds_running_commands_not_boxes(fake_backend: Backend) -> None:
    backend = type(fake_backend)(concurrency=2)
    boxes = [await backend.acquire(SandboxSpec()) for _ in range(4)]
    started = time.monotonic()
    results = await asyncio.gather(*(sh(box, "sleep 0.3", seconds=0.6) for box in boxes))
    assert time.monotonic() - started >= 0.6
    assert not any(result.timed_out for result in results)
    await backend.close()
    assert not backend.boxes

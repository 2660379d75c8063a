"""Boxes made by Docker's engine, through its SDK (imported here and nowhere else, and only when a box is wanted).

Contract: environments/sandbox/base.py. Every box: read-only root, work folder on a tmpfs, no network, no capability, no new
privileges, the filter of system calls of seccomp.py (narrower than the engine's own), limits of memory (swap included), of
processes and CPU, an init, no log, owner labels, a lifetime inside the box. The container's own processes and the policy's
commands run under different users, both not root, so a policy cannot end the container by killing it. What was asked for is
read back from the engine before a box is handed out (docker_box.py). A box costs about 0.5 s: pool.py makes them ahead. Where
engine and worker share a host, a command is started by entering the box (docker_entry.py), and as there the Python scripts of
verifiers are forked from interpreters that have their modules imported; elsewhere, or when told not to enter, it is an exec of
the engine, which costs about 0.1 s. Whether the engine was away is told by docker_link.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import socket
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from data_contracts.errors import InfraError, MissingRequirement
from data_contracts.protocols import ExecRequest
from data_contracts.records import SandboxLimits, SandboxSpec
from data_contracts.services import ServiceSpec
from environments.sandbox.base import CONTRACT, IMAGE_SERVICES, ISOLATION, SCRATCH_BYTES, SERVICES, Backend, Box, inodes
from environments.sandbox.docker_box import INIT_UID, RESERVED_PIDS, SECURITY, DockerBox, remove
from environments.sandbox.docker_companion import ImageBox, image_settings, start_relay
from environments.sandbox.docker_link import EngineLink
from environments.sandbox.owners import PREFIX, Owner, this_process
from environments.sandbox.spawner_link import SpawnerLink
from infra.rootfs import BOX_UID, image_name

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container
    from docker.models.volumes import Volume

__all__ = ["DockerBackend", "DockerBox"]
T = TypeVar("T")
_log = logging.getLogger(__name__)
_SYSCTLS = {
    "kernel.shm_rmid_forced": "1",  # segments go with their last process
    "kernel.shmall": str(SCRATCH_BYTES // 4096),
    "kernel.msgmni": "8",
}
_PID_1 = ("/usr/bin/env", "--ignore-signal=CHLD", "/bin/sleep")
"""An init of our own: the kernel reaps what is orphaned to a process that ignores SIGCHLD, and lets no signal from inside reach
a pid 1 without handlers. The engine's own init costs some 25 ms of CPU for every box."""
_NEEDED = {"MemoryLimit": "memory", "SwapLimit": "swap", "PidsLimit": "processes", "CpuCfsQuota": "CPU time"}


class DockerBackend(Backend):
    name = "docker"
    capabilities = CONTRACT | ISOLATION | {SERVICES, IMAGE_SERVICES}

    def __init__(self, *, concurrency: int = 4, runtime: str | None = None, enters: bool = True) -> None:
        super().__init__(concurrency=concurrency)
        self.runtime, self.enters = runtime, enters
        self.spawner = SpawnerLink()
        self.link = EngineLink(connections=2 * concurrency + 8)
        self._era: int | None = None
        # The loop's default pool has a handful of threads, and an exec holds one until its deadline.
        self._threads = ThreadPoolExecutor(max_workers=2 * concurrency + 8, thread_name_prefix="docker-sandbox")

    @property
    def client(self) -> DockerClient:
        return self.link.client

    async def era(self) -> int:
        now = await asyncio.to_thread(self.link.era)  # not in our own threads: calls to an engine that hangs may hold them all
        if self._era not in (None, now):
            self.sweep()
        self._era = now
        return now

    async def run(self, function: Callable[[], T]) -> T:
        """A blocking call of the SDK, in a thread; its errors become ours."""
        return await self.thread(functools.partial(_translated, function))

    async def thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def check(self) -> None:
        try:
            await self.era()
            about = await self.run(self._info)
        except InfraError as error:
            raise MissingRequirement(error.detail) from error
        swap = about.get("SwapLimit") or about.get("CgroupVersion") == "2"
        if missing := [words for key, words in _NEEDED.items() if not (about.get(key) or (key == "SwapLimit" and swap))]:
            raise MissingRequirement(
                f"this Docker engine cannot limit {', '.join(missing)} of a container; turn the kernel's control groups on"
                " (boot options cgroup_enable=memory swapaccount=1), then run: docker info"
            )
        if not any(option.startswith("name=seccomp") for option in about.get("SecurityOptions") or []):
            raise MissingRequirement(
                "this Docker engine cannot filter system calls of a container (docker info names no seccomp): use a kernel with"
                " CONFIG_SECCOMP_FILTER and an engine built with seccomp"
            )
        if self.runtime and self.runtime not in about.get("Runtimes", {}):
            raise MissingRequirement(
                f"Docker knows no runtime '{self.runtime}' (it knows {', '.join(sorted(about.get('Runtimes', {})))});"
                " add it to /etc/docker/daemon.json, or leave stack.sandbox.runtime out"
            )
        await self.run(self.reap)
        try:
            box = await self.acquire(SandboxSpec(limits=SandboxLimits(lifetime_seconds=60)))
            await self._try_entry(box)
            result = await box.exec(ExecRequest(argv=("python3", "-I", "-c", "print('ok')"), deadline_seconds=30))
            if isinstance(box, DockerBox) and not box.on_this_host():
                self.capabilities = self.capabilities - {SERVICES, IMAGE_SERVICES}
            await box.destroy()
        except InfraError as error:
            raise MissingRequirement(f"Docker is here but cannot make a box: {error.detail}") from error
        if result.stdout != b"ok\n":
            raise MissingRequirement(
                f"python3 does not run in a box ({result.stderr[-300:]!r}); run: python -m infra.rootfs --docker"
            )

    async def _try_entry(self, box: Box) -> None:
        """A host may look as if its boxes could be entered, and forbid it; then the engine starts all commands."""
        if not isinstance(box, DockerBox) or box.entry is None:
            return
        try:
            entered = await box.exec(ExecRequest(argv=("true",), deadline_seconds=30))
            why = "" if entered.exit_code == 0 else f"exit code {entered.exit_code}, {entered.stderr[-200:]!r}"
        except InfraError as error:
            why = str(error)
        if why:
            _log.warning("commands go through Docker's engine, as its boxes cannot be entered on this host: %s", why)
            self.enters = False
            box.entry.close()
            box.entry = None

    def _info(self) -> dict[str, Any]:
        about: dict[str, Any] = self.client.info()
        return about

    def reap(self) -> int:
        """Blocks. Removes containers and volumes of dead owners of this host, whatever installation they belonged to."""
        ours: dict[str, str | list[str] | bool] = {"label": f"{PREFIX}pid"}
        containers = [
            container
            for container in self.client.containers.list(all=True, filters=ours, ignore_removed=True)
            if _orphaned(container.labels)
        ]
        with ThreadPoolExecutor(max_workers=8, thread_name_prefix="docker-reaper") as threads:
            list(threads.map(remove, containers))
        for volume in self.client.volumes.list(filters=ours):
            if _orphaned(volume.attrs.get("Labels") or {}):
                _remove_volume(volume)
        return len(containers)

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            await self.run(self.spawner.close)
            await self.run(self.link.close)

    async def _acquire(self, spec: SandboxSpec) -> Box:
        return await self._made(spec)

    async def _companion_box(self, service: ServiceSpec, spec: SandboxSpec) -> Box:
        return await self._made(spec, service if service.kind == "image" else None)

    async def relay(self, box: Box, companion: Box, port: int, target: int) -> socket.socket:
        assert isinstance(box, DockerBox)
        assert isinstance(companion, DockerBox)
        return await self.run(lambda: start_relay(box, companion, port, target))

    async def _made(self, spec: SandboxSpec, service: ServiceSpec | None = None) -> Box:
        """A started box, or the started container of an image service."""
        era = await self.run(self.link.era)
        creating = asyncio.ensure_future(self.run(lambda: self._create(spec, service)))
        try:
            container = await asyncio.shield(creating)
        except asyncio.CancelledError:  # what the engine makes nonetheless must not stay
            late = await creating
            await self.run(lambda: remove(late))
            raise
        except InfraError as error:
            if error.cause == "image_missing" and spec.image != "base":
                raise InfraError(error.cause, f"{error.detail} --variant {spec.image}") from error
            raise
        box = DockerBox(self, spec, container, era) if service is None else ImageBox(self, spec, container, era, service)
        try:
            await self.run(box.start)
        except BaseException:
            await box.destroy()
            raise
        return box

    def _create(self, spec: SandboxSpec, service: ServiceSpec | None = None) -> Container:
        import docker

        # The policy's own: some runtimes give a tmpfs the mode of the image's folder, whatever mode is asked for.
        mine, limits = f"uid={BOX_UID},gid={BOX_UID}", spec.limits
        scratch = f"rw,nosuid,nodev,exec,mode=1777,{mine},size={SCRATCH_BYTES},nr_inodes={inodes(limits)}"
        work = f"rw,nosuid,nodev,exec,mode=0700,{mine},size={limits.disk_bytes},nr_inodes={inodes(limits)}"
        own: dict[str, Any] = {
            "image": image_name(spec.image), "command": [*_PID_1, str(math.ceil(limits.lifetime_seconds))],
            "user": f"{INIT_UID}:{INIT_UID}", "hostname": "box", "working_dir": spec.workdir, "tmpfs": {spec.workdir: work},
            "log_config": docker.types.LogConfig(type="none"),
        }  # fmt: skip
        if service is not None:
            own = image_settings(self.client, service, work)
        # /dev/shm by a tmpfs of ours: the engine's own has a limit of bytes, but none of inodes.
        own["tmpfs"] = {"/tmp": scratch, "/dev/shm": scratch} | own["tmpfs"]  # noqa: S108
        return self.client.containers.create(
            **own,
            name=f"bessemer-{uuid.uuid4().hex[:12]}",
            labels=this_process().labels(),
            read_only=True,
            network_mode="none",
            dns=["127.0.0.1"],  # otherwise the box could read the host's name servers
            ipc_mode="private",
            cap_drop=["ALL"],
            security_opt=list(SECURITY),
            sysctls=_SYSCTLS,
            mem_limit=limits.memory_bytes,
            memswap_limit=limits.memory_bytes,
            pids_limit=limits.pids + RESERVED_PIDS,
            nano_cpus=int(limits.cpus * 1e9),
            ulimits=[
                docker.types.Ulimit(name="core", soft=0, hard=0),
                docker.types.Ulimit(name="nofile", soft=1024, hard=1024),
            ],
            oom_score_adj=500,
            init=service is not None,
            runtime=self.runtime,
        )


def _translated(function: Callable[[], T]) -> T:
    import docker
    import requests

    try:
        return function()
    except docker.errors.ImageNotFound as error:
        raise InfraError("image_missing", f"{error.explanation}; run: python -m infra.rootfs --docker") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise InfraError("sandbox_backend", f"Docker's engine: {error}") from error


def _orphaned(labels: dict[str, str]) -> bool:
    owner = Owner.from_labels(labels)
    return owner is not None and owner.alive() is False


def _remove_volume(volume: Volume) -> None:
    import docker

    with contextlib.suppress(docker.errors.NotFound):
        volume.remove(force=True)

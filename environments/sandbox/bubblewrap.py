"""Boxes made by bubblewrap: fast (tens of milliseconds), for Linux hosts where control groups can be written.

Contract: environments/sandbox/base.py. Isolation: all namespaces new, the shared root file system read-only, no capability, no
new privileges, no further user namespaces, a filter of system calls (seccomp.py), no network; the host's uid of a box is its
own (root drops to it before bubblewrap starts). The work folder is a tmpfs with limits of bytes and inodes; memory, processes
and CPU are limited by control groups. One small process, the spawner, starts all boxes and all commands in them (spawner.py);
the box itself is in bubblewrap_box.py. As root, the Python scripts of verifiers are forked from
interpreters that have their modules imported (preloaded.py): as isolated as an execve, without its price.
Gaps: the kernel is shared (choose the Docker backend with a sandboxed runtime against kernel exploits). Without root, boxes run
under the caller's own uid in a user namespace, and only in a delegated control group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import threading

from data_contracts.errors import InfraError, MissingRequirement
from data_contracts.protocols import ExecRequest
from data_contracts.records import SandboxLimits, SandboxSpec
from environments.sandbox import cgroups, seccomp
from environments.sandbox.base import CONTRACT, ISOLATION, SERVICES, Backend, Box
from environments.sandbox.bubblewrap_box import BubblewrapBox
from environments.sandbox.owners import this_process
from environments.sandbox.spawner_link import START_SECONDS, SpawnerLink
from infra.rootfs import rootfs_path

__all__ = ["BubblewrapBackend", "BubblewrapBox"]


class BubblewrapBackend(Backend):
    name = "bubblewrap"
    capabilities = CONTRACT | ISOLATION | {SERVICES}

    def __init__(self, *, concurrency: int = 4) -> None:
        super().__init__(concurrency=concurrency)
        self._lock = threading.Lock()
        self._tree: cgroups.Tree | None = None
        self.spawner = SpawnerLink()
        self._bwrap = ""

    async def check(self) -> None:
        await asyncio.to_thread(self._require)
        await asyncio.to_thread(self.reap)
        try:
            box = await self.acquire(SandboxSpec(limits=SandboxLimits(lifetime_seconds=60)))
            result = await box.exec(ExecRequest(argv=("python3", "-I", "-c", "print('ok')"), deadline_seconds=30))
            await box.destroy()
        except InfraError as error:
            raise MissingRequirement(
                f"bubblewrap is here but cannot make a box ({error.detail}); if user namespaces are off, run as root:"
                " sysctl -w user.max_user_namespaces=65536 kernel.unprivileged_userns_clone=1"
                " kernel.apparmor_restrict_unprivileged_userns=0"
            ) from error
        if result.stdout != b"ok\n":
            raise MissingRequirement(f"python3 does not run in a box ({result.stderr[-300:]!r}); run: python -m infra.rootfs")

    def _require(self) -> cgroups.Tree:
        """Everything but a trial box. Starts nothing."""
        with self._lock:
            if self._tree:
                return self._tree
            path = os.environ.get("PATH", "/usr/bin:/bin")
            self._bwrap = next((p for folder in path.split(":") if os.access(p := f"{folder}/bwrap", os.X_OK)), "")
            if not self._bwrap:
                raise MissingRequirement(
                    "sandboxes need bubblewrap, which is not on PATH; run as root: apt-get install -y bubblewrap"
                )
            offered = subprocess.run([self._bwrap, "--help"], capture_output=True, text=True, check=False, timeout=10)
            if "--disable-userns" not in offered.stdout + offered.stderr:
                raise MissingRequirement("bubblewrap is older than 0.8 and cannot limit a box's disk; install 0.8 or newer")
            seccomp.program()
            self._tree = cgroups.detect()
            return self._tree

    def reap(self) -> int:
        """Blocks. Removes the boxes of dead owners on this host."""
        tree, count = self._require(), 0
        for group in tree.orphans():
            if group.owner.exists():
                group.kill()
            group.remove()
            count += 1
        return count

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self.spawner.close)

    async def _acquire(self, spec: SandboxSpec) -> Box:
        tree = await asyncio.to_thread(self._require)
        root = rootfs_path(spec.image)
        if not root.is_dir():
            raise InfraError(
                "image_missing", f"no sandbox root file system at {root}; run: python -m infra.rootfs --variant {spec.image}"
            )
        claiming = asyncio.ensure_future(asyncio.to_thread(tree.claim, os.getpid(), this_process().start))
        try:
            group = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            await asyncio.shield(_give_back(claiming))
            raise
        except OSError as error:
            raise InfraError("sandbox_backend", f"cannot make a control group for a box: {error}") from error
        box = BubblewrapBox(self, spec, group)
        starting = asyncio.ensure_future(asyncio.to_thread(box.start, root, self._bwrap))
        try:
            async with asyncio.timeout(START_SECONDS):  # wait_for of Python 3.11 may swallow a cancellation
                await asyncio.shield(starting)
        except BaseException as error:
            await asyncio.shield(_abandon(box, group, starting))  # whoever cancels twice does not cut this short
            if isinstance(error, (OSError, TimeoutError)):
                raise InfraError("sandbox_backend", f"cannot start a box: {error!r}") from error
            raise
        return box

    async def relay(self, box: Box, companion: Box, port: int, target: int) -> socket.socket:
        assert isinstance(box, BubblewrapBox)
        assert isinstance(companion, BubblewrapBox)
        return await asyncio.to_thread(companion.relay_from, box, port, target)


async def _give_back(claiming: asyncio.Future[cgroups.Group]) -> None:
    """The caller is gone, but the thread claims nonetheless."""
    with contextlib.suppress(OSError, InfraError):
        await asyncio.to_thread((await claiming).remove)


async def _abandon(box: BubblewrapBox, group: cgroups.Group, starting: asyncio.Future[None]) -> None:
    """Cancelled or too late: the thread sees its pipes end, and must be done before its box is taken apart."""
    await asyncio.to_thread(group.kill)
    await asyncio.wait({starting}, timeout=START_SECONDS)
    if starting.done():
        starting.exception()  # of no interest any more
    await box.destroy()

"""Boxes made by Docker's engine, through its SDK (imported here and nowhere else, and only when a box is wanted).

Contract: environments/sandbox/base.py. Every box: read-only root, work folder on a tmpfs, no network, no capability, no new
privileges, limits of memory (swap included), processes and CPU, an init, no log, owner labels, a lifetime inside the box. The
container's own processes and the policy's commands run under different users, both not root, so a policy cannot end the
container by killing it. What was asked for is read back from the engine before a box is handed out.
The engine's exec has neither deadline nor cap: the stream is read here, with both. When a command has ended and no other
runs, or when one has timed out, *every* process of the policy is killed, background ones included. The engine starts an exec by
a helper that takes the policy's user before it executes; a process of the policy that stops or kills it would block the
engine, and that would look like an outage. The killing is done from the host (docker_processes.py), out of the policy's reach.
If it cannot be done, the container is destroyed, and the box is lost by the policy's own doing; so is a box whose memory is so
full that its files cannot be read. No memory outlives its processes but the files on the capped tmpfs.
Gaps: with a remote engine, or without root, the killing is an exec itself, which a hostile process can block until the engine's
call times out. A server that the policy starts in the background ends with its command. An exec costs about 0.1 s, a box about
0.5 s; warm pools are a later step.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from data_contracts.errors import InfraError, InputError, MissingRequirement, SandboxLost
from data_contracts.protocols import ExecRequest, ExecResult
from data_contracts.records import Artifact, SandboxLimits, SandboxSpec
from environments.sandbox import docker_files
from environments.sandbox.base import CONTRACT, ISOLATION, SCRATCH_BYTES, Backend, Box, inodes
from environments.sandbox.cgroups import oom_count, oom_file
from environments.sandbox.docker_processes import kill_policy, policy_processes
from environments.sandbox.docker_stream import pump
from environments.sandbox.files import IN_THE_WAY
from environments.sandbox.owners import PREFIX, Owner, this_process
from environments.sandbox.spawner import CANNOT_START, HeadTail
from infra.rootfs import BOX_UID, image_name

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

T = TypeVar("T")
_INIT_UID = 65532
"""User of the container's own two processes (init and the sleep that is its lifetime)."""
_RESERVED_PIDS = 2
_POLICY = f"{BOX_UID}:{BOX_UID}"
_KILL_ALL = ("/bin/sh", "-c", "kill -9 -1")
"""Signals everything the policy's user may signal, in one call of the kernel: no fork outruns it."""
_SYSCTLS = {
    "kernel.shm_rmid_forced": "1",  # segments go with their last process
    "kernel.shmall": str(SCRATCH_BYTES // 4096),
    "kernel.msgmni": "8",
}
_FILE_SECONDS = 60.0
_NEEDED = {"MemoryLimit": "memory", "SwapLimit": "swap", "PidsLimit": "processes", "CpuCfsQuota": "CPU time"}


class DockerBackend(Backend):
    name = "docker"
    capabilities = CONTRACT | ISOLATION

    def __init__(self, *, concurrency: int = 4, runtime: str | None = None) -> None:
        super().__init__(concurrency=concurrency)
        self.runtime = runtime
        self._lock = threading.Lock()
        self._client: DockerClient | None = None
        # The loop's default pool has a handful of threads, and an exec holds one until its deadline.
        self._threads = ThreadPoolExecutor(max_workers=2 * concurrency + 8, thread_name_prefix="docker-sandbox")

    @property
    def client(self) -> DockerClient:
        import docker

        with self._lock:
            if self._client is None:
                try:
                    self._client = docker.from_env(timeout=60, max_pool_size=2 * self.concurrency + 8)
                except docker.errors.DockerException as error:
                    raise InfraError("sandbox_backend", f"no Docker engine answers: {error}") from error
            return self._client

    async def run(self, function: Callable[[], T]) -> T:
        """A blocking call of the SDK, in a thread; its errors become ours."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, functools.partial(_translated, function))

    async def check(self) -> None:
        try:
            about = await self.run(self._info)
        except InfraError as error:
            raise MissingRequirement(f"{error.detail}; run: python -m infra.rootfs --docker") from error
        swap = about.get("SwapLimit") or about.get("CgroupVersion") == "2"
        if missing := [words for key, words in _NEEDED.items() if not (about.get(key) or (key == "SwapLimit" and swap))]:
            raise MissingRequirement(
                f"this Docker engine cannot limit {', '.join(missing)} of a container; turn the kernel's control groups on"
                " (boot options cgroup_enable=memory swapaccount=1), then run: docker info"
            )
        if self.runtime and self.runtime not in about.get("Runtimes", {}):
            raise MissingRequirement(
                f"Docker knows no runtime '{self.runtime}' (it knows {', '.join(sorted(about.get('Runtimes', {})))});"
                " add it to /etc/docker/daemon.json, or leave stack.sandbox.runtime out"
            )
        await self.run(self.reap)
        try:
            box = await self.acquire(SandboxSpec(limits=SandboxLimits(lifetime_seconds=60)))
            result = await box.exec(ExecRequest(argv=("python3", "-I", "-c", "print('ok')"), deadline_seconds=30))
            await box.destroy()
        except InfraError as error:
            raise MissingRequirement(f"Docker is here but cannot make a box: {error.detail}") from error
        if result.stdout != b"ok\n":
            raise MissingRequirement(
                f"python3 does not run in a box ({result.stderr[-300:]!r}); run: python -m infra.rootfs --docker"
            )

    def _info(self) -> dict[str, Any]:
        about: dict[str, Any] = self.client.info()
        return about

    def reap(self) -> int:
        """Blocks. Removes the containers of dead owners of this host, whatever installation they belonged to."""
        count = 0
        for container in self.client.containers.list(all=True, filters={"label": f"{PREFIX}pid"}, ignore_removed=True):
            owner = Owner.from_labels(container.labels)
            if owner is not None and owner.alive() is False:
                _remove(container)
                count += 1
        return count

    async def close(self) -> None:
        await super().close()
        if self._client is not None:
            await self.run(self._client.close)
            self._client = None

    async def _acquire(self, spec: SandboxSpec) -> Box:
        creating = asyncio.ensure_future(self.run(lambda: self._create(spec)))
        try:
            container = await asyncio.shield(creating)
        except asyncio.CancelledError:  # what the engine makes nonetheless must not stay
            late = await creating
            await self.run(lambda: _remove(late))
            raise
        box = DockerBox(self, spec, container)
        try:
            await self.run(box.start)
        except BaseException:
            await box.destroy()
            raise
        return box

    def _create(self, spec: SandboxSpec) -> Container:
        import docker

        # The policy's own: some runtimes give a tmpfs the mode of the image's folder, whatever mode is asked for.
        mine, limits = f"uid={BOX_UID},gid={BOX_UID}", spec.limits
        scratch = f"rw,nosuid,nodev,exec,mode=1777,{mine},size={SCRATCH_BYTES},nr_inodes={inodes(limits)}"
        work = f"rw,nosuid,nodev,exec,mode=0700,{mine},size={limits.disk_bytes},nr_inodes={inodes(limits)}"
        return self.client.containers.create(
            image_name(spec.image),
            ["/bin/sleep", str(math.ceil(limits.lifetime_seconds))],
            name=f"bessemer-{uuid.uuid4().hex[:12]}",
            labels=this_process().labels(),
            user=f"{_INIT_UID}:{_INIT_UID}",
            hostname="box",
            working_dir=spec.workdir,
            read_only=True,
            # /dev/shm by a tmpfs of ours: the engine's own has a limit of bytes, but none of inodes.
            tmpfs={spec.workdir: work, "/tmp": scratch, "/dev/shm": scratch},  # noqa: S108
            network_mode="none",
            dns=["127.0.0.1"],  # otherwise the box could read the host's name servers
            ipc_mode="private",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            sysctls=_SYSCTLS,
            mem_limit=limits.memory_bytes,
            memswap_limit=limits.memory_bytes,
            pids_limit=limits.pids + _RESERVED_PIDS,
            nano_cpus=int(limits.cpus * 1e9),
            ulimits=[
                docker.types.Ulimit(name="core", soft=0, hard=0),
                docker.types.Ulimit(name="nofile", soft=1024, hard=1024),
            ],
            oom_score_adj=500,
            init=True,
            log_config=docker.types.LogConfig(type="none"),
            runtime=self.runtime,
        )


class DockerBox(Box):
    def __init__(self, backend: DockerBackend, spec: SandboxSpec, container: Container) -> None:
        super().__init__(backend, spec, f"docker-{container.name}")
        self._host, self.container = backend, container
        self._oom_file: Path | None = None
        self._running = 0
        """Commands under way in this box; the last one to end takes what is left with it."""
        self._init = 0
        """The container's first process, as a host sees it that it shares with us."""

    def start(self) -> None:
        """Blocks. Starts the container and reads back that it is what was asked for."""
        self.container.start()
        self.container.reload()
        about = self.container.attrs
        host, limits = about["HostConfig"], self.spec.limits
        expected = {
            "Privileged": False, "ReadonlyRootfs": True, "NetworkMode": "none", "PidMode": "", "IpcMode": "private",
            "UTSMode": "", "CapDrop": ["ALL"], "CapAdd": None, "Binds": None, "Devices": [], "Memory": limits.memory_bytes,
            "MemorySwap": limits.memory_bytes, "PidsLimit": limits.pids + _RESERVED_PIDS, "NanoCpus": int(limits.cpus * 1e9),
        }  # fmt: skip
        faults = [f"{key}={host.get(key)!r}" for key, value in expected.items() if (host.get(key) or None) != (value or None)]
        faults += [f"mount {mount['Destination']}" for mount in about["Mounts"] if mount["Type"] != "tmpfs"]
        faults += [f"network {name}" for name in about["NetworkSettings"]["Networks"] if name != "none"]
        faults += [] if "no-new-privileges:true" in (host["SecurityOpt"] or []) else ["no no-new-privileges"]
        faults += [] if about["Config"]["User"].partition(":")[0] not in {"", "0", "root"} else ["user root"]
        if faults:
            raise InfraError(
                "sandbox_backend", f"box {self.id} differs from what was asked: {', '.join(faults)}; it was not handed out"
            )
        # The counter is readable only where engine and worker share a host; the id proves that the pid is the engine's.
        self._init = int(about["State"]["Pid"])
        found = oom_file(self._init) if self._init else None
        self._oom_file = found if found and str(self.container.id) in str(found) else None

    async def _exec(self, request: ExecRequest, env: Mapping[str, str]) -> ExecResult:
        if "=" in request.argv[0]:
            raise InputError(f"{request.argv[0]!r} cannot be a command's name", field="argv", remedy="Run it through sh -c")
        assignments = [f"{key}={value}" for key, value in env.items()]
        argv = ["/usr/bin/env", "-i", *assignments, *request.argv]
        abort = threading.Event()
        self._running += 1
        running = asyncio.ensure_future(self._host.run(lambda: self._measured(request, argv, abort)))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:  # the caller gets it when the command is dead, not before
            abort.set()
            await asyncio.wait({running})
            raise
        finally:
            self._running -= 1

    def _measured(self, request: ExecRequest, argv: list[str], abort: threading.Event) -> ExecResult:
        kills = self._oom_kills(None)
        began = time.monotonic()
        code, streams = self._stream(
            argv, request.stdin, request.deadline_seconds, request.max_output_bytes, self.folder(request), abort
        )
        wall = time.monotonic() - began
        if code is not None:
            if code == 137:  # killed: the engine may not know yet that the whole box has ended
                self._expired()
            self._raise_if_gone()
        if (code is None or (self._running <= 1 and self._survivors())) and not self._kill_all():
            with contextlib.suppress(Exception):
                self.container.kill()
            self._lost = f"box {self.id} was destroyed: its processes left no room to kill them; this is the policy's failure"
        return ExecResult(
            exit_code=code, stdout=streams[0].bytes(), stderr=streams[1].bytes(), stdout_truncated=streams[0].truncated,
            stderr_truncated=streams[1].truncated, timed_out=code is None, oom_killed=self._oom_kills(code) > kills,
            wall_seconds=wall,
        )  # fmt: skip

    def _oom_kills(self, code: int | None) -> int:
        """Memory kills so far. With a remote engine only a killed command (137) is worth the price of asking inside."""
        if self._oom_file is not None:
            try:
                return oom_count(self._oom_file.read_text())
            except OSError:  # the container died: only its memory limit or the engine ends it
                return 1 << 30 if code == 137 else 0
        if code != 137:
            return 0
        files = "/sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control"
        _, streams = self._stream(["/bin/sh", "-c", f"cat {files} 2>/dev/null"], b"", 10.0, 65536, "/", threading.Event())
        return oom_count(streams[0].bytes().decode(errors="replace"))

    def _stream(
        self, argv: Sequence[str], stdin: bytes, seconds: float, cap: int, cwd: str, abort: threading.Event
    ) -> tuple[int | None, tuple[HeadTail, HeadTail]]:
        """Run in the box as the policy's user. The exit code is None when the deadline or `abort` came first. Blocks."""
        import docker

        api, streams, kills = self._host.client.api, (HeadTail(cap), HeadTail(cap)), self._oom_kills(None)
        deadline = time.monotonic() + seconds
        try:
            run = api.exec_create(self.container.id, list(argv), stdin=bool(stdin), user=_POLICY, workdir=cwd)["Id"]
            wrapper: Any = api.exec_start(run, socket=True)
        except docker.errors.APIError as error:
            self._raise_if_gone(error)
            if "not found" in str(error).lower() or "no such file" in str(error).lower() or "chdir" in str(error).lower():
                streams[1].add(f"{argv[0]}: {error.explanation}\n".encode())
                return CANNOT_START, streams
            no_room = "resource temporarily unavailable" in str(error).lower() or "fork" in str(error).lower()
            if no_room or self._oom_kills(None) > kills:
                streams[1].add(b"the box has no room for another process\n")
                return CANNOT_START, streams
            raise
        sock: socket.socket = getattr(wrapper, "_sock", wrapper)
        try:
            if not pump(sock, stdin, streams, deadline, abort, lambda: _ended(api, run), early=_early(wrapper, sock)):
                return None, streams
        finally:
            _close(wrapper, sock)
        while (code := api.exec_inspect(run)["ExitCode"]) is None:
            if time.monotonic() > deadline:
                return None, streams
            time.sleep(0.005)
        return int(code), streams

    def _survivors(self) -> bool:
        """Whether anything but the container's own processes is left in it. Blocks."""
        if self._oom_file is not None:
            with contextlib.suppress(OSError):
                return bool(policy_processes(self._oom_file.parent, self._init))
        return len(self.container.top()["Processes"]) > _RESERVED_PIDS

    def _kill_all(self) -> bool:
        """Kill every process of the policy; True when none is seen any more. Blocks."""
        if self._oom_file is not None:
            with contextlib.suppress(OSError):
                if kill_policy(self._oom_file.parent, self._init):
                    return True
        for attempt in range(4):
            try:
                self._stream(_KILL_ALL, b"", 10.0, 4096, "/", threading.Event())
                if len(self.container.top()["Processes"]) <= _RESERVED_PIDS:
                    return True
            except (SandboxLost, InfraError):
                return False
            time.sleep(0.05 * (attempt + 1))
        return False

    def _raise_if_gone(self, cause: Exception | None = None) -> None:
        import docker

        try:
            self.container.reload()
        except docker.errors.NotFound as error:
            raise InfraError("sandbox_backend", f"the engine has no container for box {self.id} any more") from error
        state = self.container.attrs["State"]
        if not state["Running"]:
            self._gone(state, cause)

    def _gone(self, state: Mapping[str, Any], cause: Exception | None) -> NoReturn:
        self._expired()
        how = "its memory limit" if state.get("OOMKilled") else f"exit code {state.get('ExitCode')}"
        raise SandboxLost(f"box {self.id} is gone ({how}); this is the policy's failure") from cause

    async def _put(self, files: Mapping[str, bytes]) -> None:
        def write() -> None:
            code, streams = self._stream(
                docker_files.WRITE_COMMAND,
                docker_files.write_request(files),
                _FILE_SECONDS,
                4096,
                self.spec.workdir,
                threading.Event(),
            )
            if code != 0 or streams[0].bytes() != b"ok":
                reason = streams[1].bytes().decode(errors="replace").strip().rpartition("\n")[2]
                raise InputError(
                    f"cannot write {', '.join(files)} into the box: {reason or f'exit code {code}'}",
                    field="name",
                    remedy=IN_THE_WAY,
                )

        await self._host.run(write)

    async def _freeze(self) -> None:
        def kill() -> None:
            self._raise_if_gone()
            if not self._kill_all():
                self.container.kill()
                self._lost = (
                    f"box {self.id} could not be frozen: its processes left no room to kill them; this is the policy's failure"
                )
                raise SandboxLost(self._lost)

        await self._host.run(kill)

    async def _collect(self, names: Sequence[str], max_bytes: int) -> tuple[Artifact, ...]:
        def read() -> tuple[Artifact, ...]:
            kills = self._oom_kills(None)
            cap = max_bytes + 8 * len(names) + 256
            code, streams = self._stream(
                docker_files.READ_COMMAND,
                docker_files.read_request(names, max_bytes),
                _FILE_SECONDS,
                cap,
                self.spec.workdir,
                threading.Event(),
            )
            if code != 0:
                self._raise_if_gone()
                if self._oom_kills(code) > kills:
                    raise SandboxLost(f"box {self.id} is so full that its files cannot be read; this is the policy's failure")
                raise InfraError("sandbox_backend", f"collecting from box {self.id} failed: {streams[1].bytes()[-500:]!r}")
            return docker_files.read_answer(names, streams[0].bytes())

        return await self._host.run(read)

    async def _destroy(self) -> None:
        await asyncio.shield(self._host.run(lambda: _remove(self.container)))


def _translated(function: Callable[[], T]) -> T:
    import docker
    import requests

    try:
        return function()
    except docker.errors.ImageNotFound as error:
        raise InfraError("image_missing", f"{error.explanation}; run: python -m infra.rootfs --docker") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise InfraError("sandbox_backend", f"Docker's engine: {error}") from error


def _remove(container: Container) -> None:
    import docker

    # 404: gone already; 409: somebody else is removing it.
    with contextlib.suppress(docker.errors.NotFound):
        try:
            container.remove(force=True, v=True)
        except docker.errors.APIError as error:
            if error.status_code != 409:
                raise


def _ended(api: Any, run: str) -> bool:
    return not api.exec_inspect(run)["Running"]


def _early(wrapper: Any, sock: socket.socket) -> bytes:
    """Output that came together with the engine's headers: the SDK's buffered reader has it, the socket it gives us has not."""
    sock.setblocking(False)
    response = getattr(wrapper, "_response", None)
    reader = getattr(getattr(getattr(response, "raw", None), "_fp", None), "fp", None)
    return bytes(reader.peek(1)) if hasattr(reader, "peek") else b""


def _close(wrapper: Any, sock: socket.socket) -> None:
    """Closing the SDK's wrapper alone leaves the connection open, and the engine waiting for us to read."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    response = getattr(wrapper, "_response", None)
    if response is not None:
        response.close()
    wrapper.close()
    sock.close()

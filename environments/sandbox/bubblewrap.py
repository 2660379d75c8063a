"""Boxes made by bubblewrap: fast (tens of milliseconds), for Linux hosts where control groups can be written.

Contract: environments/sandbox/base.py. Isolation: all namespaces new, the shared root file system read-only, no capability, no
new privileges, no further user namespaces, no network; the host's uid of a box is its own (root drops to it before bubblewrap
starts). The work folder is a tmpfs with limits of bytes and inodes; memory, processes and CPU are limited by control groups. A
box keeps one idle pid 1, and every command enters its namespaces (spawner.py). Background processes of a command that ended
by itself live on until freeze or destroy; a timeout kills the command with all its descendants. Freezing kills everything:
the files stay readable through a descriptor of the work folder, which nothing in the box holds any more.
Gaps: the kernel is shared (choose the Docker backend with a sandboxed runtime against kernel exploits). Without root, boxes run
under the caller's own uid in a user namespace, and only in a delegated control group.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_contracts.errors import InfraError, MissingRequirement, SandboxLost
from data_contracts.protocols import ExecRequest, ExecResult
from data_contracts.records import Artifact, SandboxLimits, SandboxSpec
from environments.sandbox import cgroups, spawner
from environments.sandbox.base import CONTRACT, ISOLATION, SCRATCH_BYTES, Backend, Box, inodes
from environments.sandbox.files import acting_as, read_files, write_files
from environments.sandbox.owners import this_process
from infra.rootfs import BOX_UID, rootfs_path

START_SECONDS = 30.0
_NS_GET_USERNS = 0xB701
_PID_1 = "echo ready >&4; exec env --ignore-signal=CHLD sleep infinity 2>/dev/null 3>&- 4>&-"
"""Ignored SIGCHLD makes the kernel reap orphans; signals from inside the box do not reach a pid 1 without handlers."""


class BubblewrapBackend(Backend):
    name = "bubblewrap"
    capabilities = CONTRACT | ISOLATION

    def __init__(self, *, concurrency: int = 4) -> None:
        super().__init__(concurrency=concurrency)
        self._lock = threading.Lock()
        self._tree: cgroups.Tree | None = None
        self._control: socket.socket | None = None
        self._spawner: subprocess.Popen[bytes] | None = None
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
        with self._lock:
            control, process, self._control, self._spawner = self._control, self._spawner, None, None
        if control and process:
            control.close()
            await asyncio.to_thread(process.wait, 30)

    async def _acquire(self, spec: SandboxSpec) -> Box:
        tree = await asyncio.to_thread(self._require)
        root = rootfs_path(spec.image)
        if not root.is_dir():
            raise InfraError(
                "image_missing", f"no sandbox root file system at {root}; run: python -m infra.rootfs --variant {spec.image}"
            )
        try:
            group = await asyncio.to_thread(tree.claim, os.getpid(), this_process().start)
        except OSError as error:
            raise InfraError("sandbox_backend", f"cannot make a control group for a box: {error}") from error
        box = BubblewrapBox(self, spec, group)
        starting = asyncio.ensure_future(asyncio.to_thread(box.start, root, self._bwrap))
        try:
            await asyncio.wait_for(asyncio.shield(starting), START_SECONDS)
        except BaseException as error:
            # Cancelled or too late: the thread sees its pipes end, and must be done before its box is taken apart.
            await asyncio.to_thread(group.kill)
            await asyncio.wait({starting}, timeout=START_SECONDS)
            await box.destroy()
            if isinstance(error, (OSError, TimeoutError)):
                raise InfraError("sandbox_backend", f"cannot start a box: {error!r}") from error
            raise
        return box

    def send(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """One request to the spawner (started when there is none), whose pid is the answer. Blocks for a moment."""
        body = os.memfd_create("request")
        try:
            os.write(body, json.dumps(request).encode())
            with self._lock:
                if self._spawner is None or self._spawner.poll() is not None:
                    self._start_spawner()
                assert self._control is not None
                assert self._spawner is not None
                socket.send_fds(self._control, [b"r"], [body, *descriptors])
                return self._spawner.pid
        except OSError as error:
            raise InfraError("sandbox_backend", f"the sandbox spawner does not answer: {error}") from error
        finally:
            os.close(body)

    def spawner_alive(self, pid: int) -> bool:
        return self._spawner is not None and self._spawner.pid == pid and self._spawner.poll() is None

    def _start_spawner(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-I", "-S", spawner.__file__, str(theirs.fileno()), str(os.getpid())]
        self._spawner = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True, env={}, cwd="/"
        )
        theirs.close()
        if self._control:
            self._control.close()
        self._control = ours


class BubblewrapBox(Box):
    def __init__(self, backend: BubblewrapBackend, spec: SandboxSpec, group: cgroups.Group) -> None:
        super().__init__(backend, spec, f"bwrap-{group.slot}-{uuid.uuid4().hex[:8]}")
        self._host, self._group, self._commands = backend, group, 0
        root = os.geteuid() == 0
        self._uid, self._gid = (group.slot, group.slot) if root else (os.geteuid(), os.getegid())
        self._spawner_pid = self.pid = 0
        """pid 1 of the box, as the host sees it."""
        self._fds: dict[str, int] = {}

    def start(self, root: Path, bwrap: str) -> None:
        """Blocks until the box stands and was probed. Raises OSError or InfraError."""
        limits = self.spec.limits
        self._group.set_limits(limits)
        info, errors, ready = os.pipe(), os.pipe(), os.pipe()
        self._spawner_pid = self._host.send(
            {
                "op": "start", "argv": _command(bwrap, root, self.spec), "join": self._group.joins(), "uid": self._uid,
                "gid": self._gid, "lifetime": limits.lifetime_seconds, "groups": [str(path) for path in self._group.folders],
            },
            [info[1], errors[1], ready[1]],
        )  # fmt: skip
        for _, write_end in (info, errors, ready):
            os.close(write_end)
        with os.fdopen(info[0], "rb") as about, os.fdopen(errors[0], "rb") as problem, os.fdopen(ready[0], "rb") as signal_:
            if signal_.readline() != b"ready\n":
                raise InfraError(
                    "sandbox_backend", f"bubblewrap did not start: {problem.read(2000).decode(errors='replace').strip()}"
                )
            self.pid = int(json.loads(about.read(4096))["child-pid"])
        self._fds["pidfd"] = os.pidfd_open(self.pid)
        for name in spawner.NAMESPACES[1:]:
            self._fds[name] = os.open(f"/proc/{self.pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        self._fds["owner"] = fcntl.ioctl(self._fds["mnt"], _NS_GET_USERNS)
        self._remount(limits)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fds["work"] = os.open(f"/proc/{self.pid}/root{self.spec.workdir}", flags)
        self._probe()

    def _remount(self, limits: SandboxLimits) -> None:
        mounts = [
            (self.spec.workdir, f"size={limits.disk_bytes},nr_inodes={inodes(limits)}"),
            *((path, f"size={SCRATCH_BYTES},nr_inodes={inodes(limits)}") for path in ("/tmp", "/dev/shm")),  # noqa: S108
        ]
        read_end, write_end = os.pipe()
        request = {"op": "remount", "mounts": mounts, "uid": self._uid, "gid": self._gid}
        self._host.send(request, [write_end, *self._spaces()])
        os.close(write_end)
        with os.fdopen(read_end, "rb") as answer:
            text = answer.read(1000)
        if text != b"ok":
            raise InfraError("sandbox_backend", f"the box's disk cannot be limited: {text.decode(errors='replace')}")

    def _probe(self) -> None:
        """The box really is what was asked for: seen from the host, before anybody may use it."""
        status = dict(row.split(":\t", 1) for row in Path(f"/proc/{self.pid}/status").read_text().splitlines() if ":\t" in row)
        shared = [n for n in spawner.NAMESPACES[1:] if os.fstat(self._fds[n]).st_ino == os.stat(f"/proc/self/ns/{n}").st_ino]
        groups = Path(f"/proc/{self.pid}/cgroup").read_text()
        faults = [f"shares the host's namespace {name}" for name in shared]
        faults += [f"has {key}={status[key]}" for key in ("CapEff", "CapPrm", "CapBnd") if int(status[key], 16)]
        faults += [] if status["NoNewPrivs"].strip() == "1" else ["may gain privileges"]
        faults += [] if set(status["Uid"].split()) == {str(self._uid)} else [f"runs as uid {status['Uid']}"]
        faults += [] if self._group.owner.name in groups else ["is not in its control group"]
        if faults:
            raise InfraError("sandbox_backend", f"box {self.id} {', '.join(faults)}; it was not handed out")

    def _spaces(self) -> list[int]:
        return [self._fds[name] for name in spawner.NAMESPACES]

    def _alive(self) -> bool:
        """False as soon as pid 1 has ended, whoever has yet to wait for it."""
        if "pidfd" not in self._fds:
            return False
        poll = select.poll()
        poll.register(self._fds["pidfd"], select.POLLIN)
        return not poll.poll(0)

    def _require_alive(self) -> None:
        """Raises InfraError where we ended the box, SandboxLost otherwise."""
        if self._alive():
            return
        self._expired()
        if not self._host.spawner_alive(self._spawner_pid):
            raise InfraError("sandbox_backend", f"the sandbox spawner died, and box {self.id} with it")
        memory = " or by its memory limit" if self._group.oom_kills() else ""
        raise SandboxLost(f"box {self.id} is gone: its pid 1 was killed from inside{memory}; this is the policy's failure")

    async def _exec(self, request: ExecRequest, env: Mapping[str, str]) -> ExecResult:
        self._require_alive()
        self._commands += 1
        number, kills = self._commands, self._group.oom_kills()
        reader = await asyncio.to_thread(self._launch, number, request, env)
        timed_out, began = False, time.monotonic()
        stream = asyncio.StreamReader(limit=1 << 20)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), reader)
        try:
            reading = asyncio.ensure_future(stream.read())
            done, _ = await asyncio.wait({reading}, timeout=request.deadline_seconds)
            if not done:
                timed_out = True
                await asyncio.to_thread(self._group.kill, number)
            payload = await asyncio.wait_for(reading, 2 * spawner.BACKSTOP_SECONDS)
        except TimeoutError as error:
            raise InfraError("sandbox_backend", f"a command in box {self.id} was killed but its report never came") from error
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.to_thread(self._group.kill, number))
            raise
        finally:
            transport.close()
            self._group.forget(number)
        return await self._result(payload, timed_out, kills, time.monotonic() - began)

    def _launch(self, number: int, request: ExecRequest, env: Mapping[str, str]) -> Any:
        stdin = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        read_end, write_end = os.pipe()
        try:
            view = memoryview(request.stdin)
            while view:
                view = view[os.write(stdin, view) :]
            os.lseek(stdin, 0, os.SEEK_SET)
            fcntl.fcntl(
                stdin, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            )
            message = {
                "op": "exec", "argv": request.argv, "env": env, "cwd": self.folder(request), "uid": self._uid,
                "gid": self._gid, "cap": request.max_output_bytes, "seconds": request.deadline_seconds,
                "join": self._group.joins(number),
            }  # fmt: skip
            self._host.send(message, [write_end, stdin, *self._spaces()])
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(stdin)
            os.close(write_end)
        return os.fdopen(read_end, "rb", buffering=0)

    async def _result(self, payload: bytes, timed_out: bool, kills: int, wall: float) -> ExecResult:
        oom = self._group.oom_kills() > kills
        size = int.from_bytes(payload[:4], "big") if len(payload) >= 4 else 0
        header: dict[str, Any] = {"status": None, "error": "no report", "out": 0, "truncated": [False, False]}
        if size:
            header = json.loads(payload[4 : 4 + size])
        if header["status"] is None:
            # A box whose pid 1 is just ending refuses new processes a moment before it is seen to be gone.
            for _ in range(50):
                self._require_alive()
                await asyncio.sleep(0.02)
            raise InfraError("sandbox_backend", f"a command could not enter box {self.id}: {header['error']}")
        if not timed_out:
            self._require_alive()
        body, split = payload[4 + size :], header["out"]
        code = os.waitstatus_to_exitcode(header["status"])
        if code == -9 and not timed_out:  # the box may have ended a moment before it is seen to be gone
            self._expired()
        return ExecResult(
            exit_code=None if timed_out else code if code >= 0 else 128 - code,
            stdout=body[:split], stderr=body[split:], stdout_truncated=header["truncated"][0],
            stderr_truncated=header["truncated"][1], timed_out=timed_out, oom_killed=oom, wall_seconds=header.get("wall", wall),
        )  # fmt: skip

    async def _put(self, files: Mapping[str, bytes]) -> None:
        def write() -> None:
            with self._rights():
                write_files(self._fds["work"], files)

        await asyncio.to_thread(write)

    async def _freeze(self) -> None:
        self._require_alive()
        await asyncio.to_thread(self._group.kill)

    async def _collect(self, names: Sequence[str], max_bytes: int) -> tuple[Artifact, ...]:
        def read() -> tuple[Artifact, ...]:
            with self._rights():
                return read_files(self._fds["work"], names, max_bytes=max_bytes)

        return await asyncio.to_thread(read)

    def _rights(self) -> contextlib.AbstractContextManager[None]:
        return acting_as(self._uid, self._gid) if os.geteuid() == 0 else acting_as(None, None)

    async def _destroy(self) -> None:
        def remove() -> None:
            self._group.kill()
            while self._fds:
                os.close(self._fds.popitem()[1])
            self._group.remove()

        await asyncio.shield(asyncio.to_thread(remove))


def _command(bwrap: str, root: Path, spec: SandboxSpec) -> list[str]:
    """bubblewrap's command line. Descriptors: 3 information about the child, 4 the box is ready."""
    scratch, user = str(SCRATCH_BYTES), str(BOX_UID)
    isolation = [
        "--unshare-all",
        "--unshare-user",
        "--unshare-cgroup",
        "--disable-userns",
        "--cap-drop",
        "ALL",
        "--new-session",
    ]
    life = ["--die-with-parent", "--as-pid-1", "--info-fd", "3"]
    identity = ["--uid", user, "--gid", user, "--hostname", "box", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
    system = ["--ro-bind", str(root), "/", "--proc", "/proc", "--dev", "/dev"]
    shm = ["--perms", "1777", "--size", scratch, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]  # noqa: S108
    tmp = ["--perms", "1777", "--size", scratch, "--tmpfs", "/tmp"]  # noqa: S108
    work = ["--perms", "0700", "--size", str(spec.limits.disk_bytes), "--tmpfs", spec.workdir, "--chdir", spec.workdir]
    return [bwrap, *isolation, *life, *identity, *system, *shm, *tmp, *work, "/bin/sh", "-c", _PID_1]

"""What all backends share: the life of a box (open, frozen, destroyed), its environment, checks, one limit on concurrency.

Contract: the docstring of `Box`; its types are in data_contracts/protocols.py. A backend fills in the underscored methods and
inherits the rules, so that they cannot differ. The time a command queues for its turn is not part of its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
import posixpath
import socket
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import PurePosixPath

from data_contracts.errors import CapabilityError, InfraError, InputError, MissingRequirement, SandboxLost
from data_contracts.protocols import ExecRequest, ExecResult
from data_contracts.records import Artifact, SandboxLimits, SandboxSpec
from data_contracts.services import ServiceSpec
from environments.sandbox.companions import Companion, accompany, companion_spec
from environments.sandbox.files import check_name
from environments.sandbox.shell import BoxShell, Wire, stand
from environments.sandbox.surroundings import USER, clock, environment
from infra import box_view
from infra.rootfs import FOLDERS, packages_of

CONTRACT = frozenset({"exec", "files", "freeze", "shell"})
SERVICES, IMAGE_SERVICES = "services", "image_services"
"""Companion services of kinds command and recorded; those from Docker images."""
ISOLATION = frozenset({"isolation", "limits", "oom", "no_network", "clock"})
"""What a backend that may run a trained policy offers on top: the fake has none of it."""
SCRATCH_BYTES = 32 * 1024 * 1024
"""Cap of /tmp and of /dev/shm, each; the work folder has `limits.disk_bytes`. All three count as the box's memory."""
BYTES_PER_INODE = 4096
_log = logging.getLogger(__name__)


def inodes(limits: SandboxLimits) -> int:
    return max(limits.disk_bytes // BYTES_PER_INODE, 64)


def needs(spec: SandboxSpec) -> set[str]:
    """The capabilities that a spec asks for, by name and by what it declares."""
    kinds = {IMAGE_SERVICES if service.kind == "image" else SERVICES for service in spec.services}
    return {*spec.needs, *kinds, *((SERVICES,) if kinds else ())}


class Box(ABC):
    """One box: the contract that every backend keeps, and that its conformance checks ask for.

    Life. A box is made by `Backend.acquire`, serves one episode or one grading, may be frozen, and is destroyed. It is never
    used again. After `freeze` nothing runs in it and nothing can change in it, files can be collected; after `destroy` nothing
    is left of it: no process, mount, control group, container, volume, folder or descriptor. Both may be called twice.

    Commands. `exec` runs one command (argv, never a shell of ours) as the box's one user, who is not root and has no rights:
    another `user` is refused. Its working directory is `cwd` below `spec.workdir`. Its variables are a fixed list, the spec's
    and the request's, and none of the host's. Its stdin is what the request holds, then the end. `deadline_seconds` is wall
    clock from its start, kept from outside: at its end the command and everything it started is killed, daemons included,
    `timed_out` is set and `exit_code` is None. Otherwise the exit code is the command's own, 128 + n after signal n, 127 when
    it cannot be started; `oom_killed` says that the box's memory limit killed something meanwhile. stdout and stderr come back
    as bytes, each at most `max_output_bytes`: head and tail are kept, a line between says how much is gone, and it is flagged.
    Background processes of a command that ended by itself do not hold it up; whether they live on is the backend's (bubblewrap:
    until the freeze; Docker: until no other command or shell is open). A cancelled call returns when its command is dead.

    Shells. `shell` opens a session (data_contracts/protocols.py `Shell`): bash with its state kept between turns, each turn
    with a deadline and caps as above. No output can end a turn. Sessions end with the freeze of the box.

    Files. `put_files` writes regular files below workdir, creating folders; `collect` reads regular files after the freeze,
    under a cap. Names are relative and plain; neither follows a link, a FIFO or a folder that the policy made; what is not a
    regular file is missing.

    Services (capability "services", companions.py): what `spec.services` declares runs beside the box, each in a box of its
    own, healthy before the box is handed out, reached at 127.0.0.1:port, gone with the box.

    Isolation (capability "isolation"): nothing of the host's files, processes, sockets, users and devices is in reach; the root
    file system is read-only; only workdir, /tmp and /dev/shm can be written, each with a cap of bytes and inodes; no
    capability, no new privileges, no new namespace, and only the system calls of seccomp.py. "no_network": loopback alone,
    with the declared ports of the box's own services. "limits": memory with swap, processes, CPU time, disk; what a host cannot
    enforce is refused in `check`. "oom": memory kills are told apart.

    Whose fault. A command's failure is a result. `SandboxLost`: the box was destroyed from inside; it counts as the policy's
    failure. `InfraError`: the backend failed, or the box outlived `limits.lifetime_seconds` (somebody forgot it, or the host is
    too slow); never the policy's. `InputError`: the caller asked for what the contract does not allow. `CapabilityError`: the
    spec needs what this backend lacks; raised before anything is started.

    The same everywhere and every day (capability "clock"): the clock shows `spec.clock` when the first command starts, and runs
    on from there; times of files go with it; programs see ceil(`limits.cpus`) processors, and none is pinned to one. That is a
    library in every program (infra/box_view.c, with its gaps), which protects nothing: deadlines and all that is measured out
    here use the host's clock. Also time zone UTC, locale C.UTF-8, hash seed 0, umask, host name, user, paths. Not the same:
    fractions of a second, memory addresses, pids, inode numbers, the scheduling of threads, the kernel and its /proc.
    """

    def __init__(self, backend: Backend, spec: SandboxSpec, box_id: str) -> None:
        self.id, self.spec, self._backend = box_id, spec, backend
        self._frozen = self._destroyed = self._removed = False
        self._lost: str | None = None
        self._born = time.monotonic()
        self._began: float | None = None
        """The host's time at which the box's clock began."""
        self.shells: set[BoxShell] = set()
        self.companions: dict[str, Companion] = {}
        self._bury: Callable[[Box], Awaitable[None]] = Box.remove

    async def exec(self, request: ExecRequest) -> ExecResult:
        self._check_request(request)
        async with self._backend.turn():
            self.require_usable("run a command")
            async with self.living():
                return await self._exec(request, environment(self.spec, request.env))

    async def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> BoxShell:
        variables = environment(self.spec, env or {})
        async with self._backend.turn():
            self.require_usable("open a shell")
            async with self.living():
                wire = await self._shell(posixpath.join(self.spec.workdir, cwd or ""), variables)
                await stand(wire)
        shell = BoxShell(self, wire)
        self.shells.add(shell)
        return shell

    @asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        """Around whatever is done with the box. Ends it with the box's lifetime (one made ahead is built to last longer,
        pool.py), and remembers that the box was lost, and by whose doing: past its lifetime it was not the policy's."""
        try:
            async with asyncio.timeout(self._left()):
                yield
            self._require_companions()
        except TimeoutError:
            self._expired()
            raise
        except SandboxLost as error:
            self._lost = str(error)
            self._expired()
            raise

    def turn(self) -> asyncio.Semaphore:
        return self._backend.turn()

    async def probe(self) -> None:
        """Raises InfraError unless the box still is what was asked for: alive, isolated, limited. Before it is handed out."""
        self.require_usable("be handed out")
        await self._probe()
        for companion in self.companions.values():
            await companion.box.probe()

    @property
    def services(self) -> Mapping[str, Box]:
        """Where the box's companion services run, by name: for the control plane, never for the policy."""
        return {name: companion.box for name, companion in self.companions.items()}

    async def serve(self, request: ExecRequest, stop: asyncio.Event) -> ExecResult:
        """Run a companion's program in its box until it ends, or is killed because `stop` was set. It takes no turn."""
        self._check_request(request)
        self.require_usable("serve")
        return await self._serve(request, environment(self.spec, request.env), stop)

    async def own_health(self, seconds: float) -> str | None:
        """What a companion's own health check says within this time: empty when healthy. None where it has none."""
        return None

    def hand_out(self, spec: SandboxSpec, bury: Callable[[Box], Awaitable[None]]) -> None:
        """A box made ahead, with a longer life, becomes its user's: its lifetime counts from now; `bury` will remove it."""
        self.spec, self._born, self._bury = spec, time.monotonic(), bury
        for companion in self.companions.values():
            companion.box.hand_out(companion_spec(companion.spec, spec), Box.remove)

    def rewind(self) -> None:
        self._began = None

    def view(self) -> tuple[int, int]:
        """Soft and hard RLIMIT_LOCKS of a command: they show it processors and the box's clock, which the first call starts."""
        if self._began is None:
            self._began = time.clock_gettime(time.CLOCK_REALTIME)
        return box_view.limits(began=self._began, shown=clock(self.spec), cpus=self.spec.limits.cpus)

    async def put_files(self, files: Mapping[str, bytes]) -> None:
        for name in files:
            check_name(name)
        if (size := sum(map(len, files.values()))) > self.spec.limits.disk_bytes:
            raise InputError(
                f"{size} bytes of files do not fit into the box's disk of {self.spec.limits.disk_bytes} bytes",
                field="files", remedy="Raise limits.disk_bytes",
            )  # fmt: skip
        self.require_usable("write files")
        await self._put(files)

    async def freeze(self) -> None:
        if self._frozen and not self._destroyed:
            return
        self.require_usable("be frozen")
        await self._freeze()
        await self._close_shells()
        self._require_companions()
        for companion in self.companions.values():
            companion.unlink()
        self._frozen = True

    async def collect(self, names: Sequence[str], *, max_bytes: int) -> tuple[Artifact, ...]:
        for name in names:
            check_name(name)
        if self._destroyed or not self._frozen:
            raise InputError("files are collected from a frozen box only", remedy="Call freeze() first, and destroy() last")
        return await self._collect(names, max_bytes)

    async def destroy(self) -> None:
        if self._removed:
            return
        self._destroyed = True
        await self._bury(self)

    async def remove(self) -> None:
        """Take the box apart; nothing of it is left. Idempotent."""
        self._destroyed = True
        if self._removed:
            return
        await self._close_shells()
        ends = await asyncio.gather(*(one.remove() for one in self.companions.values()), return_exceptions=True)
        await self._destroy()
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        self._removed = True
        self._backend.boxes.discard(self)

    async def _close_shells(self) -> None:
        for shell in list(self.shells):
            await shell.close()

    def folder(self, request: ExecRequest) -> str:
        """Where the command runs: absolute, inside the box."""
        return posixpath.join(self.spec.workdir, request.cwd or "")

    def _check_request(self, request: ExecRequest) -> None:
        if not request.argv or any("\0" in word for word in request.argv):
            raise InputError(
                "a command needs at least one word and no NUL", field="argv", remedy="Pass argv as a tuple of words"
            )
        if not (math.isfinite(request.deadline_seconds) and request.deadline_seconds > 0):
            raise InputError(
                "a command needs a finite deadline above 0", field="deadline_seconds", remedy="Rule 5: every wait has one"
            )
        if request.max_output_bytes < 0:
            raise InputError("max_output_bytes is negative", field="max_output_bytes", remedy="Use 0 or more")
        if request.user != USER:
            raise InputError(
                f"a box has one user for commands, {USER!r}, not {request.user!r}: none has more rights, and none is root",
                field="user", remedy=f"Leave it out, or pass {USER!r}",
            )  # fmt: skip
        environment(self.spec, request.env)

    def require_usable(self, action: str) -> None:
        if self._destroyed or self._frozen:
            state = "destroyed" if self._destroyed else "frozen"
            raise InputError(
                f"box {self.id} is {state} and cannot {action}", remedy="Boxes are single use: acquire a fresh one"
            )
        self._expired()
        if self._lost:
            raise SandboxLost(self._lost)
        self._require_companions()

    def _require_companions(self) -> None:
        for companion in self.companions.values():
            companion.require()

    @property
    def left_behind(self) -> bool:
        """Destroyed for its user, but not gone from the host."""
        return self._destroyed and not self._removed

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self._born

    def _left(self) -> float:
        return max(self.spec.limits.lifetime_seconds - self.age_seconds, 0.0) + 0.001

    def _expired(self) -> None:
        if self.age_seconds > self.spec.limits.lifetime_seconds:
            raise InfraError(
                "sandbox_backend",
                f"box {self.id} outlived limits.lifetime_seconds={self.spec.limits.lifetime_seconds};"
                " raise it above the episode's deadline",
            )

    @abstractmethod
    async def _exec(self, request: ExecRequest, env: Mapping[str, str]) -> ExecResult: ...

    async def _serve(self, request: ExecRequest, env: Mapping[str, str], stop: asyncio.Event) -> ExecResult:
        raise CapabilityError(f"box {self.id} cannot run a companion service")

    @abstractmethod
    async def _shell(self, cwd: str, env: Mapping[str, str]) -> Wire: ...

    @abstractmethod
    async def _probe(self) -> None: ...

    @abstractmethod
    async def _put(self, files: Mapping[str, bytes]) -> None: ...

    @abstractmethod
    async def _freeze(self) -> None: ...

    @abstractmethod
    async def _collect(self, names: Sequence[str], max_bytes: int) -> tuple[Artifact, ...]: ...

    @abstractmethod
    async def _destroy(self) -> None: ...


class Backend(ABC):
    """Owns boxes; `concurrency` commands run at once, the rest waits for its turn."""

    name: str
    capabilities: frozenset[str]

    def __init__(self, *, concurrency: int = 4) -> None:
        self.concurrency = concurrency
        self.boxes: set[Box] = set()
        self._sweeping: set[asyncio.Future[None]] = set()
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    def turn(self) -> asyncio.Semaphore:
        """The running loop's semaphore: hold it while a command runs or a box starts."""
        return self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))

    async def acquire(self, spec: SandboxSpec) -> Box:
        self.check_spec(spec)
        async with self.turn():
            box = await self._acquire(spec)
        self.boxes.add(box)
        if spec.services:
            try:
                await accompany(self, box)
            except BaseException:
                await asyncio.shield(box.remove())
                raise
        return box

    async def companion_box(self, service: ServiceSpec, spec: SandboxSpec) -> Box:
        """Where `service` will run, nothing started yet."""
        async with self.turn():
            return await self._companion_box(service, spec)

    async def _companion_box(self, service: ServiceSpec, spec: SandboxSpec) -> Box:
        return await self._acquire(spec)

    async def relay(self, box: Box, companion: Box, port: int, target: int) -> socket.socket:
        """Start the relay from `box` to `companion`; the owner's end of its line (relay.py). Raises OSError, InfraError."""
        raise CapabilityError(f"the sandbox backend '{self.name}' has no companion services")

    async def era(self) -> int:
        """See data_contracts/protocols.py. Here for backends that cannot be away without this process."""
        return 0

    def sweep(self) -> None:
        """Try once more, behind the scenes, to remove the boxes that could not be removed when they were destroyed."""
        for box in [box for box in self.boxes if box.left_behind]:
            removal = asyncio.ensure_future(box.remove())
            self._sweeping.add(removal)
            removal.add_done_callback(self._swept)

    def _swept(self, removal: asyncio.Future[None]) -> None:
        self._sweeping.discard(removal)
        if not removal.cancelled() and (error := removal.exception()):
            _log.warning("a box could not be removed yet: %s", error)

    async def close(self) -> None:
        ends = await asyncio.gather(*(box.remove() for box in list(self.boxes)), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    @abstractmethod
    async def check(self) -> None: ...

    @abstractmethod
    def reap(self) -> int: ...

    @abstractmethod
    async def _acquire(self, spec: SandboxSpec) -> Box: ...

    def check_spec(self, spec: SandboxSpec) -> None:
        """Raises CapabilityError for a box that this backend cannot make."""
        if missing := sorted(needs(spec) - self.capabilities):
            raise CapabilityError(
                f"the sandbox backend '{self.name}' does not offer {', '.join(missing)}; it offers"
                f" {', '.join(sorted(self.capabilities))}: choose another stack.sandbox.backend, or leave this domain out"
            )
        if spec.workdir not in {f"/{folder}" for folder in FOLDERS} or str(PurePosixPath(spec.workdir)) != spec.workdir:
            raise CapabilityError(
                f"workdir {spec.workdir!r} is not a folder of the shared root file system; use one of"
                f" {', '.join(f'/{folder}' for folder in FOLDERS)}"
            )
        limits = spec.limits
        if min(limits.memory_bytes >> 23, limits.pids, limits.disk_bytes >> 12, limits.cpus * 100, limits.lifetime_seconds) < 1:
            raise CapabilityError(
                f"limits {limits} cannot be enforced: at least 8 MiB of memory, 1 process, 4 KiB of disk, 0.01 CPU, 1 s of life"
            )
        environment(spec, {})
        clock(spec)
        try:
            for image in (spec.image, *(one.image for one in spec.services if one.kind != "image")):
                packages_of(image)
        except MissingRequirement as error:
            raise CapabilityError(str(error)) from error

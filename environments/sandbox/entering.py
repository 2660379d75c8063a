"""What a forked child does to become a command in a box: takes the limits, enters the namespaces, gives up every right, runs.

Contract: standard library only, single-threaded, no file of the host is opened: it works in the spawner (spawner.py) and in an
interpreter that sees nothing but a box's root file system (preloaded.py). A middle process, outside the box but for the pid
namespace of its children, starts the command, reads and caps its output, and reports; it takes over descriptors (`fds`) in the
order that spawner.py lists. Inside, no capability is left, and the filter of system calls (seccomp.py) is the last thing before
the program. Method of entering: setns(2). A box with a user namespace of its own is entered by its unprivileged owner: the uid
is dropped before anything else. One without (Docker's) is entered by root: until the uid is dropped no file of the box is
opened or executed, its working directory included, and nobody in the box may trace the process or open it through /proc; the
middle process drops to the same uid as soon as the command is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import sys
import time
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from environments.sandbox import shell_agent
else:  # beside a script, or handed over as source: there are no packages
    import shell_agent

NAMESPACES = ("owner", "user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
SHARED_USERS = ("mnt", "pid", "net", "ipc", "uts", "cgroup")
"""Of a box that has no user namespace of its own; a request names them as its `spaces`."""
DESCRIPTORS = 48
"""More than one request ever passes: a container of version 1 control groups is in a dozen."""
CANNOT_START = 127
"""Exit code of a command that could not be executed, as shells have it."""
DRAIN_SECONDS = 0.2
"""How long output is still read after the command itself has ended while a child of it holds the pipe."""
BACKSTOP_SECONDS = 5.0
"""The owner enforces deadlines; this much later the middle process kills the command by itself."""

_RLIMIT_LOCKS = 10
"""Ignored by Linux, inherited by every process: tells the library in every program of a box its clock (infra/box_view.c)."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_CAP_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def read(body: int) -> dict[str, Any]:
    """The request in a memfd."""
    request: dict[str, Any] = json.loads(os.pread(body, os.fstat(body).st_size, 0))
    return request


def away(descriptors: list[int]) -> list[int]:
    """The same descriptors away from the low numbers, which the children put in place."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 32) for fd in descriptors]
    for fd in descriptors:
        os.close(fd)
    return moved


def join(groups: list[int]) -> None:
    for group in groups:
        os.write(group, b"0")


def drop(uid: int, gid: int) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def powerless() -> None:
    """No capability is left, in the user namespace that this process is in, and none can come back."""
    bound()
    head, data = (ctypes.c_uint32 * 2)(_CAP_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    checked(_libc.capset(head, data), "capset")


def bound() -> None:
    """No program that is executed from here on can gain a capability. Needs CAP_SETPCAP; without it nothing changes."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break


def die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def clean_signals() -> None:
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def setns(fd: int) -> None:
    checked(_libc.setns(fd, 0), "setns")


def enter(request: dict[str, Any], spaces: dict[str, int]) -> None:
    """The middle process takes the box's uid where it may, and its children the box's pid namespace."""
    if "owner" in spaces:
        drop(request["uid"], request["gid"])
    else:
        checked(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    die_with_parent()
    if "owner" in spaces:
        setns(spaces["owner"])
    setns(spaces["pid"])


def run_command(request: dict[str, Any], fds: list[int]) -> None:
    """Run one command, report and exit. With a `script`, that file is run in this very interpreter instead."""
    names = request.get("spaces", NAMESPACES)
    result, stdin, groups = fds[0], fds[1], fds[2 + len(names) :]
    spaces = dict(zip(names, fds[2 : 2 + len(names)], strict=True))
    captured = shell_agent.HeadTail(request["cap"]), shell_agent.HeadTail(request["cap"])
    header: dict[str, Any] = {"status": None, "wall": 0.0, "error": ""}
    try:
        enter(request, spaces)
        started = time.monotonic()
        pipes = os.pipe(), os.pipe()
        child = fork(request, spaces, groups, {0: stdin, 1: pipes[0][1], 2: pipes[1][1]})
        for _, write_end in pipes:
            os.close(write_end)
        if "owner" not in spaces:
            drop(request["uid"], request["gid"])
            die_with_parent()  # a change of users has undone it
        header["status"] = _watch(child, (pipes[0][0], pipes[1][0]), captured, started + request["seconds"])
        header["wall"] = time.monotonic() - started
    except OSError as error:
        header["error"] = str(error)
    payload = memoryview(shell_agent.answer(captured, **header))
    try:
        while payload:
            payload = payload[os.write(result, payload) :]
    except BrokenPipeError:  # the caller gave up
        pass
    os._exit(0)


def fork(request: dict[str, Any], spaces: dict[str, int], groups: list[int], descriptors: dict[int, int]) -> int:
    """Start the request's program in the box with these `descriptors` (number: ours); answer its pid."""
    child = os.fork()
    if child == 0:
        try:
            _become(request, spaces, groups, descriptors)
        finally:
            os._exit(CANNOT_START)
    return child


def _watch(
    child: int, streams: tuple[int, int], captured: tuple[shell_agent.HeadTail, shell_agent.HeadTail], deadline: float
) -> int:
    """Read both streams until the command has ended and they are at their end (or idle); answer the wait status."""
    handle = os.pidfd_open(child)
    poll = select.poll()
    for fd in (*streams, handle):
        poll.register(fd, select.POLLIN)
    left, status, limit = set(streams), None, deadline + BACKSTOP_SECONDS
    rounds = 0  # since the command ended; a round reads what was in the pipe, however late this process got to run
    while left or status is None:
        events = poll.poll(max(limit - time.monotonic(), 0) * 1000)
        if not events:
            if status is not None:
                break
            os.kill(child, signal.SIGKILL)
            limit = time.monotonic() + 1.0
        for fd, _ in events:
            if fd == handle:
                _, status = os.waitpid(child, 0)
                poll.unregister(handle)
                limit = min(limit, time.monotonic() + DRAIN_SECONDS)
                continue
            sink = captured[streams.index(fd)]
            data = os.read(fd, 65536)
            sink.add(data)
            if not data:
                poll.unregister(fd)
                left.discard(fd)
            elif sink.truncated:
                time.sleep(0.002)  # who floods waits, not the host
        rounds += status is not None
        if rounds > 2 and time.monotonic() > limit:
            break
    return status if status is not None else 0


def _become(request: dict[str, Any], spaces: dict[str, int], groups: list[int], descriptors: dict[int, int]) -> None:
    """In the box's pid namespace: join its limits and its other namespaces, give up every right, run."""
    os.dup2(descriptors[2], 2)
    try:
        join(groups)
        for name in ("cgroup", "uts", "ipc", "net", "mnt", "user"):
            if name in spaces:
                setns(spaces[name])
        if "user" not in spaces:
            for kind, pair in request["limits"]:
                resource.setrlimit(kind, tuple(pair))
            bound()
            drop(request["uid"], request["gid"])
        powerless()
        os.setsid()
        os.umask(0o022)
        os.chdir(request["cwd"])
        clean_signals()
        shell_agent.place(descriptors)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        resource.setrlimit(_RLIMIT_LOCKS, tuple(request["view"]))
        filter_calls(request["calls"])
        if request.get("script"):
            _run(request["script"], request["env"])
        else:
            _execute(request["argv"], request["env"])
    except OSError as error:
        os.write(2, f"{request['argv'][0]}: {error.strerror}\n".encode(errors="replace"))


def filter_calls(calls: bytes) -> None:
    """From here on, in this process and all it starts, for ever. Needs no_new_privs, which `drop` has set."""
    program = _Program(len(calls) // 8, calls)
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the filter of system calls is refused: {os.strerror(number)}")


def _execute(argv: list[str], environment: dict[str, str]) -> None:
    name = argv[0]
    if "/" in name:
        os.execve(name, argv, environment)  # noqa: S606
    failure = FileNotFoundError(2, "command not found")
    for folder in environment.get("PATH", "/usr/bin:/bin").split(":"):
        try:
            os.execve(f"{folder}/{name}", argv, environment)  # noqa: S606
        except (FileNotFoundError, NotADirectoryError):
            continue
    raise failure


def _run(path: str, environment: dict[str, str]) -> None:
    """Run the Python script at `path` in this process as a fresh interpreter would, then end the process."""
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # as after an execve
    _libc.bessemer_view()  # likewise
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    module, code = types.ModuleType("__main__"), 0
    module.__file__ = os.path.abspath(path)
    sys.modules["__main__"], sys.argv = module, [path]
    try:
        with open(path, "rb") as file:
            source = file.read()
        exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102  in the box, as its user
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code == 1 and end.code != 1:
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001  as an interpreter does
        sys.excepthook(*sys.exc_info())
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)

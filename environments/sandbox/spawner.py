"""The small process that starts boxes and commands in them. Run as a script; standard library only.

Contract: one a backend, single-threaded, started with an inherited SEQPACKET socket, the pid of its owner, and a memfd with the
filter of system calls (seccomp.py) that every box's first process and every command in a box gets. It forks so that nobody
forks a big multi-threaded worker, and it is the parent of every box: when it dies the kernel kills all of them, and when
its owner dies (socket closed or pid gone) it kills them and removes their control groups. It also ends a box at its lifetime.

A request is one packet: a memfd with JSON, then the descriptors that the operation names. Answers go through those descriptors:
    start    [info, stderr, ready]    forks, joins the groups, drops to the box's uid, executes bubblewrap
    remount  [result, ns...]          sets options of the box's file systems (bubblewrap cannot set an inode limit)
    exec     [result, stdin, ns...]   forks a middle process that enters the box, runs one command, caps its output
    shell    [channel, ns...]         the same for a shell, served until the channel closes (shell_agent.py)
ns... are descriptors of the box's namespaces in the order of NAMESPACES. The uid is dropped before anything of the box is
touched; inside, no capability is left, and the filter is the last thing before the program. Method of entering: setns(2),
owner user namespace first, as its unprivileged owner.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __name__ != "__main__":
    from environments.sandbox import shell_agent
else:  # as a script there are no packages, and none are wanted
    import importlib.util

    _spec = importlib.util.spec_from_file_location("shell_agent", os.path.join(os.path.dirname(__file__), "shell_agent.py"))
    shell_agent = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(shell_agent)

HeadTail = shell_agent.HeadTail
NAMESPACES = ("owner", "user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
CANNOT_START = 127
"""Exit code of a command that could not be executed, as shells have it."""
DRAIN_SECONDS = 0.2
"""How long output is still read after the command itself has ended while a child of it holds the pipe."""
BACKSTOP_SECONDS = 5.0
"""The owner enforces deadlines; this much later the middle process kills the command by itself."""

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 2, 4, 32
_CAP_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def main() -> None:
    control, owner = socket.socket(fileno=int(sys.argv[1])), os.pidfd_open(int(sys.argv[2]))
    calls = _read_filter(int(sys.argv[3]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    boxes: dict[int, tuple[float, list[str]]] = {}  # monitor pid -> (monotonic end of life, groups to remove)
    while True:
        now = time.monotonic()
        for pid in [pid for pid, (end, _) in boxes.items() if end <= now]:
            os.kill(pid, signal.SIGKILL)
            boxes[pid] = (float("inf"), boxes[pid][1])
        nearest = min((end for end, _ in boxes.values()), default=float("inf"))
        watched = [control.fileno(), owner, wake_read]
        readable, _, _ = select.select(watched, [], [], min(max(nearest - now, 0.0), 60.0))
        if wake_read in readable:
            os.read(wake_read, 65536)
        _reap(boxes)
        if owner in readable:
            break
        if control.fileno() in readable:
            packet, descriptors, _, _ = socket.recv_fds(control, 16, 16)
            if not packet:
                break
            _serve(control, descriptors, boxes, calls)
    _end(boxes)


def _read_filter(fd: int) -> bytes:
    program = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    if not program or len(program) % 8:
        raise SystemExit("the spawner was started without a filter of system calls")
    return program


def _reap(boxes: dict[int, tuple[float, list[str]]]) -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        boxes.pop(pid, None)


def _end(boxes: dict[int, tuple[float, list[str]]]) -> None:
    """The owner is gone: kill every box (its pid 1 dies with the monitor), then remove the groups, children first."""
    for pid in boxes:
        os.kill(pid, signal.SIGKILL)
    left = [path for _, groups in boxes.values() for path in groups]
    for _ in range(200):
        left = [path for path in left if os.path.isdir(path) and not _remove(path)]
        if not left:
            return
        time.sleep(0.01)


def _remove(path: str) -> bool:
    try:
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                _remove(entry.path)
        os.rmdir(path)
    except OSError:
        return False
    return True


def _serve(control: socket.socket, descriptors: list[int], boxes: dict[int, tuple[float, list[str]]], calls: bytes) -> None:
    # Away from the low numbers, which the children put in place.
    fds = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 32) for fd in descriptors]
    for fd in descriptors:
        os.close(fd)
    request = json.loads(os.pread(fds[0], os.fstat(fds[0]).st_size, 0))
    child = os.fork()
    if child == 0:
        try:
            control.close()
            signal.set_wakeup_fd(-1)
            operation = {"start": _start, "remount": _remount, "exec": _exec, "shell": _shell}[request["op"]]
            operation(request | {"calls": calls}, fds[1:])
        finally:
            os._exit(125)
    if request["op"] == "start":
        boxes[child] = (time.monotonic() + request["lifetime"], request["groups"])
    for fd in fds:
        os.close(fd)


# ------------------------------------------------------------------------------------------------ in the forked children


def _join(groups: list[int]) -> None:
    for group in groups:
        os.write(group, b"0")


def _open_groups(paths: list[str]) -> list[int]:
    return [os.open(os.path.join(path, "cgroup.procs"), os.O_WRONLY | os.O_CLOEXEC) for path in paths]


def _drop(uid: int, gid: int) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _clean_signals() -> None:
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _start(request: dict[str, Any], fds: list[int]) -> None:
    info, errors, ready = fds
    os.dup2(errors, 2)
    try:
        _join(_open_groups(request["join"]))
        _drop(request["uid"], request["gid"])
        null, calls = os.open("/dev/null", os.O_RDWR), os.memfd_create("calls")
        os.write(calls, request["calls"])
        os.lseek(calls, 0, os.SEEK_SET)
        shell_agent.place({0: null, 1: null, 2: errors, 3: info, 4: ready, 5: calls})
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _clean_signals()
        os.execve(request["argv"][0], request["argv"], {})  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot start {request['argv'][0]}: {error}".encode())


def _setns(fd: int) -> None:
    if _libc.setns(fd, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "setns")


def _remount(request: dict[str, Any], fds: list[int]) -> None:
    result, spaces = fds[0], dict(zip(NAMESPACES, fds[1:], strict=True))
    try:
        _drop(request["uid"], request["gid"])
        _setns(spaces["owner"])
        _setns(spaces["mnt"])
        for path, options in request["mounts"]:
            flags = _MS_REMOUNT | _MS_NOSUID | _MS_NODEV
            if _libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options.encode()) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), path)  # noqa: TRY301
        os.write(result, b"ok")
    except OSError as error:
        os.write(result, str(error).encode())
    os._exit(0)


def _enter(request: dict[str, Any], spaces: dict[str, int]) -> list[int]:
    """The middle process: outside the box but for the pid namespace of its children. Answers the groups for them to join."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # out of memory, in the box or on the host: commands go first, pid 1 stays
    groups = _open_groups(request["join"])
    _drop(request["uid"], request["gid"])
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _setns(spaces["owner"])
    _setns(spaces["pid"])
    return groups


def _exec(request: dict[str, Any], fds: list[int]) -> None:
    """Run one command, report and exit."""
    result, stdin, spaces = fds[0], fds[1], dict(zip(NAMESPACES, fds[2:], strict=True))
    captured = HeadTail(request["cap"]), HeadTail(request["cap"])
    header: dict[str, Any] = {"status": None, "wall": 0.0, "error": ""}
    try:
        groups = _enter(request, spaces)
        started = time.monotonic()
        pipes = os.pipe(), os.pipe()
        child = _fork(request, spaces, groups, {0: stdin, 1: pipes[0][1], 2: pipes[1][1]})
        for _, write_end in pipes:
            os.close(write_end)
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


def _shell(request: dict[str, Any], fds: list[int]) -> None:
    """Serve one shell until its owner closes the channel. Everything it starts is in the last of the groups."""
    channel, spaces = fds[0], dict(zip(NAMESPACES, fds[1:], strict=True))

    def start(out: int, err: int, text: int, control: int) -> int:
        groups = _enter(request, spaces)
        stdin = os.open("/dev/null", os.O_RDONLY)
        return _fork(request, spaces, groups, {0: stdin, 1: out, 2: err, shell_agent.TEXT: text, shell_agent.CONTROL: control})

    def others() -> set[int]:
        try:  # opened anew each time: version 1 answers an open file from a list that is up to a second old
            with open(os.path.join(request["join"][-1], "cgroup.procs"), "rb") as file:
                return {int(row) for row in file.read().split()} - {0}
        except FileNotFoundError:
            return set()

    shell_agent.serve(channel, channel, start, others)
    os._exit(0)


def _fork(request: dict[str, Any], spaces: dict[str, int], groups: list[int], descriptors: dict[int, int]) -> int:
    child = os.fork()
    if child == 0:
        try:
            _become(request, spaces, groups, descriptors)
        finally:
            os._exit(CANNOT_START)
    return child


def _watch(child: int, streams: tuple[int, int], captured: tuple[HeadTail, HeadTail], deadline: float) -> int:
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
    """In the box's pid namespace: join its limits and its other namespaces, give up every right, execute."""
    os.dup2(descriptors[2], 2)
    try:
        _join(groups)
        for name in ("cgroup", "uts", "ipc", "net", "mnt", "user"):
            _setns(spaces[name])
        for capability in range(64):
            if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                break
        head, data = (ctypes.c_uint32 * 2)(_CAP_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        if _libc.capset(head, data) != 0:
            raise OSError(ctypes.get_errno(), "capset")  # noqa: TRY301
        os.setsid()
        os.umask(0o022)
        os.chdir(request["cwd"])
        _clean_signals()
        shell_agent.place(descriptors)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        _filter_calls(request["calls"])
        _execute(request["argv"], request["env"])
    except OSError as error:
        os.write(2, f"{request['argv'][0]}: {error.strerror}\n".encode(errors="replace"))


def _filter_calls(calls: bytes) -> None:
    """From here on, in this process and all it starts, for ever. Needs no_new_privs, which `_drop` has set."""
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


if __name__ == "__main__":
    main()

"""The small process that starts boxes and commands in them. Run as a script; standard library only.

Contract: one a backend, single-threaded, started with an inherited SEQPACKET socket, the pid of its owner, and a memfd with the
filter of system calls (seccomp.py) that every box's first process and every command in a box gets. It forks so that nobody
forks a big multi-threaded worker, and it is the parent of every box: when it dies the kernel kills all of them, and when
its owner dies (socket closed or pid gone) it kills them and removes their control groups. It also ends a box at its lifetime.

A request is one packet: a memfd with JSON, then the descriptors that the operation names. Answers go through those descriptors:
    start    [info, stderr, ready, groups...]    forks, joins the groups, drops to the box's uid, executes bubblewrap
    remount  [result, ns...]                     sets options of the box's file systems (bubblewrap cannot limit inodes)
    exec     [result, stdin, ns..., groups...]   forks a middle process that enters the box, runs one command, caps its output
    shell    [channel, ns..., groups...]         the same for a shell, served until the channel closes (shell_agent.py)
    relay    [control, owner, net of the box, owner, net of the companion, groups...]   passes connections on (relay.py)
    preload  [control]                           starts an interpreter that is forked for scripts of verifiers (preloaded.py)
ns... are descriptors of the box's namespaces in the order of NAMESPACES, or of an exec's `spaces`; groups... the open
cgroup.procs of its control groups. How a box is entered, and what is given up on the way, is in entering.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from environments.sandbox import entering, preloaded, relay, shell_agent
else:  # as a script there are no packages, and none are wanted
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import entering
    import preloaded
    import relay
    import shell_agent

_EXPENDABLE = {"exec", "shell", "preload"}
"""Out of memory, in the box or on the host, these go first: a box's pid 1 stays."""
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 1 << 12, 1 << 14, 1 << 18
_CLONE_NEWNS, _CLONE_NEWNET, _MNT_DETACH = 1 << 17, 1 << 30, 2
_libc = ctypes.CDLL(None, use_errno=True)


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
            packet, descriptors, _, _ = socket.recv_fds(control, 16, entering.DESCRIPTORS)
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
    fds = entering.away(descriptors)
    request = entering.read(fds[0])
    child = os.fork()
    if child == 0:
        try:
            control.close()
            signal.set_wakeup_fd(-1)
            if request["op"] in _EXPENDABLE:
                with open("/proc/self/oom_score_adj", "w") as file:
                    file.write("1000")
            operations = {
                "start": _start, "remount": _remount, "exec": entering.run_command, "shell": _shell, "relay": _relay,
                "preload": _preload,
            }  # fmt: skip
            operations[request["op"]](request | {"calls": calls}, fds[1:])
        finally:
            os._exit(125)
    if request["op"] == "start":
        boxes[child] = (time.monotonic() + request["lifetime"], request["groups"])
    for fd in fds:
        os.close(fd)


# ------------------------------------------------------------------------------------------------ in the forked children


def _start(request: dict[str, Any], fds: list[int]) -> None:
    (info, errors, ready), groups = fds[:3], fds[3:]
    os.dup2(errors, 2)
    try:
        entering.join(groups)
        entering.drop(request["uid"], request["gid"])
        null, calls = os.open("/dev/null", os.O_RDWR), os.memfd_create("calls")
        os.write(calls, request["calls"])
        os.lseek(calls, 0, os.SEEK_SET)
        shell_agent.place({0: null, 1: null, 2: errors, 3: info, 4: ready, 5: calls})
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        entering.clean_signals()
        os.execve(request["argv"][0], request["argv"], {})  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot start {request['argv'][0]}: {error}".encode())


def _remount(request: dict[str, Any], fds: list[int]) -> None:
    result, spaces = fds[0], dict(zip(entering.NAMESPACES, fds[1:], strict=True))
    try:
        entering.drop(request["uid"], request["gid"])
        entering.setns(spaces["owner"])
        entering.setns(spaces["mnt"])
        for path, options in request["mounts"]:
            flags = _MS_REMOUNT | _MS_NOSUID | _MS_NODEV
            entering.checked(_libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options.encode()), path)
        os.write(result, b"ok")
    except OSError as error:
        os.write(result, str(error).encode())
    os._exit(0)


def _shell(request: dict[str, Any], fds: list[int]) -> None:
    """Serve one shell until its owner closes the channel. Everything it starts is in the last of the groups."""
    channel, spaces, groups = fds[0], dict(zip(entering.NAMESPACES, fds[1:9], strict=True)), fds[9:]

    def start(out: int, err: int, text: int, control: int) -> int:
        entering.enter(request, spaces)
        stdin = os.open("/dev/null", os.O_RDONLY)
        streams = {0: stdin, 1: out, 2: err, shell_agent.TEXT: text, shell_agent.CONTROL: control}
        return entering.fork(request, spaces, groups, streams)

    def others() -> set[int]:
        try:  # opened anew each time: version 1 answers an open file from a list that is up to a second old
            with open(request["listed"], "rb") as file:
                return {int(row) for row in file.read().split()} - {0}
        except FileNotFoundError:
            return set()

    shell_agent.serve(channel, channel, start, others)
    os._exit(0)


def _relay(request: dict[str, Any], fds: list[int]) -> None:
    """Become the relay of a companion: in its groups, under its uid, in its network; the listener comes from the box's."""
    control, (box_owner, box_net, owner, net), groups = socket.socket(fileno=fds[0]), fds[1:5], fds[5:]
    try:
        entering.die_with_parent()
        entering.join(groups)
        ours, theirs = socket.socketpair()
        helper = os.fork()
        if helper == 0:  # a process that has entered one box's user namespace cannot go on to another's
            answer = b"the box was not entered"
            try:
                entering.drop(request["box_uid"], request["box_gid"])
                entering.setns(box_owner)
                entering.setns(box_net)
                listener = relay.listen(request["port"])
                socket.send_fds(theirs, [relay.READY], [listener.fileno()])
                answer = b""
            except OSError as error:
                answer = str(error).encode()
            finally:
                if answer:
                    theirs.send(answer)
                os._exit(0)
        answer, descriptors, _, _ = socket.recv_fds(ours, 1000, 1)
        os.waitpid(helper, 0)
        if not descriptors:
            raise OSError(answer.decode(errors="replace"))  # noqa: TRY301
        entering.drop(request["uid"], request["gid"])
        entering.setns(owner)
        entering.setns(net)
        entering.powerless()
        entering.clean_signals()
        null = os.open("/dev/null", os.O_RDWR)
        shell_agent.place({0: null, 1: null, 2: 2, 3: control.detach(), 4: descriptors[0]})
        control = socket.socket(fileno=3)
        relay.run(socket.socket(fileno=4), control, request["target"], request["calls"], request["seconds"])
    except OSError as error:
        control.send(str(error).encode())
    os._exit(0)


def _preload(request: dict[str, Any], fds: list[int]) -> None:
    """Become the interpreter of the root file system `request["root"]`; see preloaded.py. Root only."""
    sources = {}
    for name in preloaded.SOURCES:
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")) as file:
            sources[name] = file.read()
    job, root = os.memfd_create("job"), request["root"].encode()
    with open(job, "w", closefd=False) as file:
        json.dump({"sources": sources, "modules": request["modules"], "calls": request["calls"].hex()}, file)
    os.lseek(job, 0, os.SEEK_SET)
    owner, null = os.pidfd_open(request["owner"]), os.open("/dev/null", os.O_RDWR)
    entering.die_with_parent()
    read_only = _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV
    entering.checked(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET), "unshare")
    entering.checked(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
    entering.checked(_libc.mount(root, root, None, _MS_BIND, None), "mount")
    entering.checked(_libc.mount(b"none", root, None, read_only, None), "mount")
    os.chdir(root)
    entering.checked(_libc.pivot_root(b".", b"."), "pivot_root")
    entering.checked(_libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")
    shell_agent.place({0: null, 1: null, 2: 2, preloaded.CONTROL: fds[0], preloaded.OWNER: owner, preloaded.JOB: job})
    argv = ["python3", *request["options"], "-c", preloaded.LOADER]
    os.execve("/usr/bin/python3", argv, request["env"])  # noqa: S606


if __name__ == "__main__":
    main()

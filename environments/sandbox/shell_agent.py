"""The process beside a stateful shell: hands it one command a turn, collects what it says, ends what runs too long.

Contract: standard library only, one source for all backends: bubblewrap's spawner calls `serve` outside the box, Docker and the
fake run this file in the box as the policy's user (there it cannot be traced or opened through /proc, only signalled). It talks
in frames with its owner: a request is a length and JSON {"command", "seconds", "cap"}; an answer a length and JSON (`answer`),
followed by both streams. When its owner is gone it kills the session.

The shell is bash with a driver of ours. A turn's text comes in a memfd, which the shell sources. The end of a turn comes
through a socket that commands do not inherit and cannot open through /proc: it counts only from the shell's own pid, as the
kernel tells it, and only with that turn's nonce, which the driver reads after the command has ended. Nothing printed can forge
it. What a policy does to its own shell (`exit`, `exec`, `kill`, closing its descriptors) ends or hangs its own session and
nothing else.

At its deadline everything that the turn started is killed, background jobs of earlier turns are not, and the shell is told by a
signal to leave the command: functions, loops and lists too. If it reports back in time, the session goes on.
Gaps: a shell that traps that signal, or sits in a builtin that no signal interrupts, is lost at its deadline. Children of an
earlier background job that started during the turn die with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

TEXT, CONTROL = 100, 101
"""Descriptors of the shell: its next command, and its line to us."""
STOP = signal.SIGRTMIN + 5
GRACE_SECONDS = 1.0
"""How long a shell may take to leave a command that reached its deadline, before the session is given up."""
START_SECONDS = 20.0
_FIRST_CAP = 64 * 1024
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_SCM_CREDENTIALS, _SCM_CREDENTIALS_KIND = struct.Struct("iII"), 2

DRIVER = f"""
_bessemer_turn() {{
    local _bessemer_status=$? _bessemer_line
    builtin trap '' {int(STOP)}
    IFS= builtin read -r -u {CONTROL} _bessemer_line || builtin exit
    builtin printf '%s %s\\n' "$_bessemer_line" "$_bessemer_status" >&{CONTROL}
    IFS= builtin read -r -u {CONTROL} _bessemer_line || builtin exit
    builtin trap 'return 124' {int(STOP)}
    return "$_bessemer_status"
}}
for ((;;)); do
    {{ _bessemer_turn; }} 2>/dev/null
    builtin source /dev/fd/{TEXT} {CONTROL}>&-
done
"""
ARGV = ("bash", "--norc", "--noprofile", "-c", DRIVER, "bash")

Starter = Callable[[int, int, int, int], int]
"""Start the shell with these as its stdout, stderr, TEXT and CONTROL; answer its pid."""
Lister = Callable[[], set[int]]
"""The pids of everything that the session holds now, the shell itself included."""


class HeadTail:
    """Keeps the first and the last bytes of a stream, at most `cap` in all, with a line between that says what is gone."""

    def __init__(self, cap: int) -> None:
        room = max(cap - 64, 0) if cap >= 256 else cap
        self._cap, self._head_room, self._tail_room = cap, room - room // 2, room // 2
        self._head, self._tail, self._total = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        if len(self._head) < self._cap:
            taken = self._cap - len(self._head)
            self._head += data[:taken]
            data = data[taken:]
        if data:
            self._tail += data
            del self._tail[: max(len(self._tail) - self._cap, 0)]

    @property
    def truncated(self) -> bool:
        return self._total > self._cap

    def bytes(self) -> bytes:
        if not self.truncated:
            return bytes(self._head)
        last = (bytes(self._head) + bytes(self._tail))[-self._tail_room :] if self._tail_room else b""
        dropped = self._total - self._head_room - self._tail_room
        marker = b"\n[... %d bytes dropped ...]\n" % dropped if self._cap >= 256 else b""
        return bytes(self._head[: self._head_room]) + marker + last


def answer(streams: tuple[HeadTail, HeadTail], **header: object) -> bytes:
    """A frame: `header`, the sizes of both streams and whether they were cut, then the streams."""
    out, err = (stream.bytes() for stream in streams)
    cut = [stream.truncated for stream in streams]
    header = {"out": len(out), "err": len(err), "truncated": cut} | header
    text = json.dumps(header).encode()
    return struct.pack("!I", len(text)) + text + out + err


class Session:
    """One shell and its turns; single-threaded, all waiting is in `_wait`."""

    def __init__(self, source: int, start: Starter, others: Lister) -> None:
        self._source, self._others = source, others
        self._left = False
        """The owner hung up in the middle of a turn."""
        self._control, theirs = socket.socketpair()
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._control.setblocking(False)
        self._text = os.memfd_create("turn")
        out, err = os.pipe(), os.pipe()
        self.pid = start(out[1], err[1], self._text, theirs.fileno())
        theirs.close()
        self._streams = out[0], err[0]
        for read_end, write_end in (out, err):
            os.close(write_end)
            os.set_blocking(read_end, False)
        self._handle = os.pidfd_open(self.pid)
        self.status: int | None = None
        """The shell's wait status, when it has ended."""
        self.kept = HeadTail(_FIRST_CAP), HeadTail(_FIRST_CAP)
        """What background jobs say between turns, until a turn takes it."""
        self._lines, self._known = bytearray(), set[int]()
        self._open = {*self._streams, self._control.fileno(), self._handle}

    def watch(self) -> None:
        """Wait for the owner's next request, reading what background jobs say meanwhile."""
        while not self._wait(self.kept, float("inf"), requests=True):
            pass

    def begin(self) -> bool:
        """The first report of a shell that has just been started."""
        return self._turn("", time.monotonic() + START_SECONDS, first=True) is not None

    def run(self, command: str, seconds: float, cap: int) -> bytes:
        began, streams = time.monotonic(), (HeadTail(cap), HeadTail(cap))
        cut = [old.truncated for old in self.kept]
        for old, new in zip(self.kept, streams, strict=True):
            new.add(old.bytes())
        self.kept = streams
        self._known = self._others()
        code = self._turn(command, began + seconds)
        timed_out = code is None and self.status is None
        alive = code is not None or (timed_out and not self._left and self._stop())
        if not alive:
            self.end()
            self._drain()
        self.kept = HeadTail(cap), HeadTail(cap)
        if timed_out:
            code = None
        elif code is None and self.status is not None:
            code = _exit_code(self.status)
        cut = [before or stream.truncated for before, stream in zip(cut, streams, strict=True)]
        return answer(streams, code=code, timed_out=timed_out, alive=alive, wall=time.monotonic() - began, truncated=cut)

    def end(self) -> None:
        """Kill everything the session holds, the shell first."""
        limit = time.monotonic() + 5.0
        while self.status is None or (self._others() and time.monotonic() < limit):
            self._kill(self._others() | ({self.pid} if self.status is None else set()))
            self._wait(self.kept, time.monotonic() + 0.005)
            if time.monotonic() > limit + 5.0:
                return

    def _turn(self, command: str, deadline: float, *, first: bool = False) -> int | None:
        """Hand over a command and wait for its report: its exit status; None when the shell or the deadline came first."""
        self._write_text(command)
        nonce = os.urandom(16).hex()
        with contextlib.suppress(OSError):  # the shell closed its end; whether it has ended, `_report` sees
            self._control.send(f"{nonce}\n".encode() if first else f"go\n{nonce}\n".encode())
        return self._report(nonce, deadline)

    def _report(self, nonce: str, deadline: float) -> int | None:
        while True:
            if (code := self._reported(nonce)) is not None:
                self._drain()
                return code
            if self.status is not None or self._left or time.monotonic() >= deadline:
                return None
            self._wait(self.kept, deadline)

    def _reported(self, nonce: str) -> int | None:
        *lines, rest = bytes(self._lines).split(b"\n")
        self._lines = bytearray(rest[-64:])
        for line in lines:
            word, _, code = line.partition(b" ")
            if word == nonce.encode() and code.isdigit():
                return int(code)
        return None

    def _stop(self) -> bool:
        """At the deadline: end what the turn started, have the shell leave the command; True when it reports back."""
        self._write_text("")
        nonce, limit = os.urandom(16).hex(), time.monotonic() + GRACE_SECONDS
        # Only a shell that has left the command reads these lines; their report shows that it is in step with us again.
        with contextlib.suppress(OSError):
            self._control.send(f"go\n{nonce}\n".encode())
        while self.status is None and self._control.fileno() in self._open and time.monotonic() < limit:
            self._kill(self._started())
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, STOP)
            if self._report(nonce, time.monotonic() + 0.02) is not None:
                while (left := self._started()) and time.monotonic() < limit:
                    self._kill(left)
                    self._wait(self.kept, time.monotonic() + 0.005)
                # A signal may have come after the first report: one more turn in step, and none is on its way any more.
                return not left and self._turn("", limit + GRACE_SECONDS) is not None
        return False

    def _started(self) -> set[int]:
        """What this turn has started and is still there."""
        return self._others() - self._known - {self.pid}

    def _kill(self, pids: set[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _write_text(self, command: str) -> None:
        os.ftruncate(self._text, 0)
        view, position = memoryview(command.encode("utf-8", "surrogateescape")), 0
        while position < len(view):
            position += os.pwrite(self._text, view[position:], position)

    def _drain(self) -> None:
        """What was written before the report is in the pipes by now, and a pipe holds no more than this."""
        for fd, sink in zip(self._streams, self.kept, strict=True):
            for _ in range(16):
                if fd not in self._open or not self._read(fd, sink):
                    break

    def _wait(self, sinks: tuple[HeadTail, HeadTail], deadline: float, *, requests: bool = False) -> bool:
        """One round of waiting and reading; True when the owner's line can be read, which is asked for with `requests`.

        Without, only its end is noticed: an owner that hangs up ends the turn.
        """
        poll = select.poll()
        for fd in self._open:
            poll.register(fd, select.POLLIN)
        if requests or not self._left:
            poll.register(self._source, select.POLLIN if requests else 0)
        left = None if deadline == float("inf") else max(deadline - time.monotonic(), 0.0) * 1000
        found = False
        for fd, _ in poll.poll(left):
            if fd == self._handle:
                _, self.status = os.waitpid(self.pid, 0)
                self._open.discard(fd)
            elif fd == self._control.fileno():
                self._read_control()
            elif fd == self._source:
                found, self._left = requests, not requests
            else:
                sink = sinks[self._streams.index(fd)]
                self._read(fd, sink)
                if sink.truncated:
                    time.sleep(0.002)  # who floods waits, not the host
        return found

    def _read(self, fd: int, sink: HeadTail) -> bool:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._open.discard(fd)
        sink.add(data)
        return bool(data)

    def _read_control(self) -> None:
        try:
            data, notes, _, _ = self._control.recvmsg(4096, socket.CMSG_SPACE(_SCM_CREDENTIALS.size))
        except BlockingIOError:
            return
        except OSError:
            data, notes = b"", []
        if not data:
            self._open.discard(self._control.fileno())
            return
        for level, kind, content in notes:
            if level == socket.SOL_SOCKET and kind == _SCM_CREDENTIALS_KIND and _SCM_CREDENTIALS.unpack(content)[0] == self.pid:
                self._lines += data


def serve(source: int, sink: int, start: Starter, others: Lister) -> None:
    """Start a shell and serve its turns until the owner closes `source`, or the shell has ended and that was told."""
    try:
        session = Session(source, start, others)
    except OSError as error:
        _write(sink, answer((HeadTail(0), HeadTail(0)), error=f"the shell did not start: {error}"))
        return
    try:
        if not session.begin():
            session.end()
            _write(sink, answer(session.kept, error=f"the shell did not start (wait status {session.status})"))
            return
        _write(sink, answer((HeadTail(0), HeadTail(0)), error=""))
        while session.status is None:
            session.watch()
            if (request := _request(source)) is None:
                return
            _write(sink, session.run(request["command"], request["seconds"], request["cap"]))
    except BrokenPipeError:
        return
    finally:
        session.end()


def place(descriptors: dict[int, int]) -> None:
    """In a forked child: put each descriptor at its number (target: source) and close all others."""
    high = {target: fcntl.fcntl(fd, fcntl.F_DUPFD, max(descriptors) + 1) for target, fd in descriptors.items()}
    for target, fd in high.items():
        os.dup2(fd, target, inheritable=True)
    start = 0
    for target in sorted(descriptors):
        if start < target:  # an empty range closes everything
            os.closerange(start, target)
        start = target + 1
    os.closerange(start, 1 << 16)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _request(source: int) -> dict[str, Any] | None:
    """The owner's next frame, whole: it sends without pause. None when it is gone."""
    size = _exactly(source, 4)
    text = _exactly(source, struct.unpack("!I", size)[0]) if size else None
    return None if text is None else json.loads(text)


def _exactly(source: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        block = os.read(source, size - len(data))
        if not block:
            return None
        data += block
    return bytes(data)


def _write(sink: int, payload: bytes) -> None:
    view = memoryview(payload)
    while view:
        view = view[os.write(sink, view) :]


# ---------------------------------------------------------------------------------- as a process of its own, inside a box


_shells: list[int] = []
"""The shell, whose end is waited for by its session."""


def _start(out: int, err: int, text: int, control: int) -> int:
    pid = os.fork()
    if pid:
        _shells.append(pid)
        return pid
    try:
        place({0: os.open(os.devnull, os.O_RDONLY), 1: out, 2: err, TEXT: text, CONTROL: control})
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(ARGV[0], ARGV, os.environ)  # noqa: S606
    finally:
        os._exit(127)


def _descendants() -> set[int]:
    """Every live process below this one: what loses its parent becomes its child. Reaps what has ended."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state not in {b"Z", b"X"}:
            parents[int(name)] = int(parent)
        elif int(parent) == os.getpid() and int(name) not in _shells:
            os.waitpid(int(name), os.WNOHANG)
    found, grew = {os.getpid()}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return found - {os.getpid()}


def main() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    serve(0, 1, _start, _descendants)


if __name__ == "__main__":
    main()

"""The process between a box and one companion service: it listens on the box's loopback and dials the companion's.

Contract: standard library only, single-threaded. It runs outside both boxes' process namespaces, so that neither can signal or
trace it; it holds a listening socket made in the box's network namespace and stays in the companion's, so that it can reach
one fixed port there and nothing else. Before the first byte it has given up every right and filters its own system calls. A
connection is passed on byte by byte, half-closed when one side is; a companion that refuses shows as a reset. At most
CONNECTIONS are open at once, the rest waits in the kernel's queue; buffers are bounded: who does not read is not served.
Its owner holds the other end of `control`: DIAL with a descriptor is a connection of the owner's to the companion, answered
first by OPEN or CLOSED, one byte; MUTE ends all connections and closes the port in the box; the relay ends when that line does.
Gaps: TCP alone; the companion is not told who connects.

As a script (the Docker backend): CONTROL CALLS BOX_NET COMPANION_NET WARD|-1 (descriptors), PORT TARGET UID SECONDS. WARD is a
pidfd that it kills when its owner is gone, or after SECONDS: a container of a given image has no lifetime of its own.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from environments.sandbox import entering
else:  # as a script there are no packages
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import entering

CONNECTIONS = 128
BUFFER_BYTES = 64 * 1024
OPEN, CLOSED = b"+", b"-"
READY, DIAL, MUTE = b"ready", b"d", b"m"
_RESET = struct.pack("ii", 1, 0)


class _Side:
    """One socket of a connection, and what waits to be written to it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.pending = sock, bytearray()
        self.read_ended = self.write_ended = False
        self.peer = self
        self.asked: bool | None = None
        """On the companion's side, until it is connected: whether the owner asked for it."""


class Relay:
    def __init__(self, listener: socket.socket, control: socket.socket, dial: Callable[[], socket.socket]) -> None:
        self._listener, self._control, self._dial = listener, control, dial
        self._selector = selectors.DefaultSelector()
        self._events: dict[_Side, int] = {}
        self._listening = self._muted = False
        listener.setblocking(False)
        control.setblocking(False)
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self, until: float) -> None:
        """Returns when the owner's line has ended, or at `until`."""
        while (left := until - time.monotonic()) > 0:
            if self._listening != (wanted := not self._muted and len(self._events) < 2 * CONNECTIONS):
                self._listening = wanted
                if wanted:
                    self._selector.register(self._listener, selectors.EVENT_READ)
                else:
                    self._selector.unregister(self._listener)
            for key, mask in self._selector.select(min(left, 60.0)):
                if key.fileobj is self._control:
                    if not self._from_owner():
                        return
                elif key.fileobj is self._listener:
                    with contextlib.suppress(OSError):
                        self._pair(self._listener.accept()[0], asked=False)
                elif key.data in self._events:
                    self._step(key.data, mask)

    def _from_owner(self) -> bool:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, 16, 4)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for fd in descriptors:
            self._pair(socket.socket(fileno=fd), asked=True)
        if packet == MUTE and not self._muted:
            self._mute()
        return bool(packet)

    def _mute(self) -> None:
        self._muted = True
        if self._listening:
            self._selector.unregister(self._listener)
            self._listening = False
        self._listener.close()
        for side in list(self._events):
            if side in self._events:
                self._drop(side, reset=True)

    def _pair(self, client: socket.socket, *, asked: bool) -> None:
        client.setblocking(False)
        try:
            server = self._dial()
        except OSError:
            client.close()
            return
        near, far = _Side(client), _Side(server)
        near.peer, far.peer, far.asked = far, near, asked
        for side in (near, far):
            self._events[side] = 0
        self._watch(far)

    def _watch(self, side: _Side) -> None:
        if side not in self._events:
            return
        wanted = 0
        if side.asked is not None:
            wanted = selectors.EVENT_WRITE
        elif side.peer.asked is None:
            room = not side.read_ended and len(side.peer.pending) < BUFFER_BYTES
            wanted = (selectors.EVENT_READ if room else 0) | (selectors.EVENT_WRITE if side.pending else 0)
        before, self._events[side] = self._events[side], wanted
        if wanted and before:
            self._selector.modify(side.sock, wanted, side)
        elif wanted:
            self._selector.register(side.sock, wanted, side)
        elif before:
            self._selector.unregister(side.sock)

    def _step(self, side: _Side, mask: int) -> None:
        try:
            if side.asked is not None:
                self._connected(side)
            else:
                if mask & selectors.EVENT_WRITE and side.pending:
                    del side.pending[: side.sock.send(side.pending)]
                if mask & selectors.EVENT_READ and not side.read_ended:
                    data = side.sock.recv(BUFFER_BYTES)
                    side.peer.pending += data
                    side.read_ended = not data
        except BlockingIOError:
            pass
        except OSError:
            self._drop(side, reset=True)
            return
        for one in (side, side.peer):
            if one.peer.read_ended and not one.pending and not one.write_ended:
                one.write_ended = True
                with contextlib.suppress(OSError):
                    one.sock.shutdown(socket.SHUT_WR)
        if side.write_ended and side.peer.write_ended:
            self._drop(side, reset=False)
            return
        self._watch(side)
        self._watch(side.peer)

    def _connected(self, side: _Side) -> None:
        asked, side.asked = side.asked, None
        failed = side.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        if asked:
            side.peer.pending += CLOSED if failed else OPEN
        if failed and asked:
            side.read_ended = side.peer.read_ended = True
        elif failed:
            self._drop(side, reset=True)

    def _drop(self, side: _Side, *, reset: bool) -> None:
        for one in (side, side.peer):
            if self._events.pop(one, 0):
                self._selector.unregister(one.sock)
            if reset:
                with contextlib.suppress(OSError):
                    one.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            one.sock.close()


def listen(port: int) -> socket.socket:
    """On the loopback of the network namespace that this process is in. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", port))
    listener.listen(CONNECTIONS)
    return listener


def dialer(target: int) -> Callable[[], socket.socket]:
    """Begins a connection to the target on the loopback of the network namespace that this process is in."""

    def dial() -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(("127.0.0.1", target))
        except BlockingIOError:
            pass
        except OSError:
            sock.close()
            raise
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    return dial


def run(listener: socket.socket, control: socket.socket, target: int, calls: bytes, seconds: float) -> None:
    """In the companion's network namespace, rights given up: say that we are ready, and serve."""
    until = time.monotonic() + seconds
    for number in (signal.SIGPIPE, signal.SIGINT):  # a peer that has gone is an error of that connection; Ctrl-C is the owner's
        signal.signal(number, signal.SIG_IGN)
    entering.filter_calls(calls)
    control.send(READY)
    Relay(listener, control, dialer(target)).serve(until)


def main() -> None:
    control_fd, calls_fd, box, companion, ward, port, target, uid = map(int, sys.argv[1:9])
    control = socket.socket(fileno=control_fd)
    try:
        calls = os.pread(calls_fd, os.fstat(calls_fd).st_size, 0)
        entering.setns(box)
        listener = listen(port)
        entering.setns(companion)
        entering.bound()
        entering.drop(uid, uid)
        entering.powerless()
        entering.clean_signals()
        run(listener, control, target, calls, float(sys.argv[9]))
    except OSError as error:
        with contextlib.suppress(OSError):
            control.send(f"{error}".encode())
    finally:
        if ward >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(ward, signal.SIGKILL)


if __name__ == "__main__":
    main()

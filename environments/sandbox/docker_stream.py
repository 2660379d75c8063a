"""The byte stream of one exec in Docker's engine: fed and read with a deadline, a cap and no trust in its end.

Contract: blocking, for a thread; `pump` returns when the stream ends, when the command has ended although a child of it holds
the stream, at the deadline, or when it is told to abort.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from environments.sandbox.entering import DRAIN_SECONDS
from environments.sandbox.shell_agent import HeadTail

ENGINE_SECONDS = 2.0
"""Silence after which the engine of an ended command is taken to have nothing more to deliver."""


def pump(
    sock: socket.socket,
    stdin: bytes,
    streams: tuple[HeadTail, HeadTail],
    deadline: float,
    abort: threading.Event,
    ended: Callable[[], bool],
    *,
    early: bytes = b"",
) -> bool:
    """Feed stdin and read the multiplexed stream until its end; False when `deadline` or `abort` came first.

    `early` is what was read from `sock` before. A background child may hold the stream open: in silence `ended` is asked
    whether the command itself is done. Then the engine gets some seconds more to deliver what it still holds, for without such
    a child the end of the stream must come.
    """
    sock.setblocking(False)
    view, buffer = memoryview(stdin), bytearray(early)
    demultiplex(buffer, streams)
    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if stdin else 0)
    quiet_since, done = time.monotonic(), False
    with selectors.DefaultSelector() as selector:
        selector.register(sock, events)
        while True:
            now = time.monotonic()
            if abort.is_set():
                return False
            if now > deadline and not done:
                if not ended():
                    return False
                done, quiet_since = True, time.monotonic()  # what it wrote may still be on its way
            ready = selector.select(0.1 if done else min(deadline - now, 0.1))
            if not ready and now - quiet_since > (ENGINE_SECONDS if done else DRAIN_SECONDS):
                if done:
                    return True
                done, quiet_since = ended(), time.monotonic()
            for _, mask in ready:
                if mask & selectors.EVENT_WRITE:
                    try:
                        view = view[sock.send(view) :]
                    except (BrokenPipeError, ConnectionResetError):
                        view = view[len(view) :]
                    if not view:
                        with contextlib.suppress(OSError):
                            sock.shutdown(socket.SHUT_WR)
                        selector.modify(sock, selectors.EVENT_READ)
                if mask & selectors.EVENT_READ:
                    quiet_since = now
                    data = sock.recv(65536)
                    if not data:
                        return True
                    buffer += data
                    demultiplex(buffer, streams)
                    if streams[0].truncated or streams[1].truncated:
                        time.sleep(0.002)  # who floods waits, not the host


def demultiplex(buffer: bytearray, streams: tuple[HeadTail, HeadTail]) -> None:
    """Take whole and partial frames (kind, 0, 0, 0, size) off the front; a partial one is split: memory stays bounded."""
    while len(buffer) > 8:
        kind, size = struct.unpack_from("!BxxxI", buffer)
        taken = min(size, len(buffer) - 8)
        streams[1 if kind == 2 else 0].add(bytes(buffer[8 : 8 + taken]))
        if taken == size:
            del buffer[: 8 + size]
            continue
        del buffer[: 8 + taken]
        buffer[:0] = struct.pack("!BxxxI", kind, size - taken)
        return


def early_output(wrapper: Any, sock: socket.socket) -> bytes:
    """Output that came together with the engine's headers: the SDK's buffered reader has it, the socket it gives us has not."""
    sock.setblocking(False)
    response = getattr(wrapper, "_response", None)
    reader = getattr(getattr(getattr(response, "raw", None), "_fp", None), "fp", None)
    return bytes(reader.peek(1)) if reader is not None and hasattr(reader, "peek") else b""


def close(wrapper: Any, sock: socket.socket) -> None:
    """Closing the SDK's wrapper alone leaves the connection open, and the engine waiting for us to read."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    response = getattr(wrapper, "_response", None)
    if response is not None:
        response.close()
    wrapper.close()
    sock.close()

"""The relay alone, between two sockets of this host: what goes through it, and what may not end it."""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from environments.sandbox import relay

Line = tuple[int, socket.socket, socket.socket]


@pytest.fixture
def line() -> Iterator[Line]:
    """The port in the box, the companion's listening socket, the owner's end of the control line."""
    listener, server = relay.listen(0), socket.create_server(("127.0.0.1", 0))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    port = listener.getsockname()[1]
    one = relay.Relay(listener, theirs, relay.dialer(server.getsockname()[1]))
    thread = threading.Thread(target=one.serve, args=(time.monotonic() + 60,))
    thread.start()
    server.settimeout(10)
    yield port, server, ours
    ours.close()
    thread.join(10)
    assert not thread.is_alive(), "the relay goes on although its owner is gone"
    for sock in (listener, server, theirs):
        sock.close()


def connected(port: int, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(("127.0.0.1", port), 10)
    there, _ = server.accept()
    there.settimeout(10)
    return client, there


def all_of(sock: socket.socket) -> bytes:
    data = b""
    while block := sock.recv(1 << 20):
        data += block
    return data


def test_both_directions_at_once_and_half_closed(line: Line) -> None:
    client, there = connected(*line[:2])
    data = hashlib.shake_256(b"x").digest(20_000_000)
    with client, there:
        senders = [threading.Thread(target=sock.sendall, args=(data,)) for sock in (client, there)]
        received: dict[str, bytes] = {}
        readers = [
            threading.Thread(target=lambda sock=sock, name=name: received.update({name: all_of(sock)}))  # type: ignore[misc]
            for name, sock in (("client", client), ("there", there))
        ]
        for thread in (*senders, *readers):
            thread.start()
        for sender, sock in zip(senders, (client, there), strict=True):
            sender.join(30)
            sock.shutdown(socket.SHUT_WR)
        for reader in readers:
            reader.join(30)
        assert received["client"] == data
        assert received["there"] == data


def test_who_does_not_read_is_not_served(line: Line) -> None:
    client, there = connected(*line[:2])
    with client, there:
        there.settimeout(1.0)
        sent = 0
        with suppress(TimeoutError):
            while sent < 200_000_000:
                sent += there.send(b"x" * 65536)
        assert sent < 50_000_000
        other, beside = connected(*line[:2])
        with other, beside:
            beside.sendall(b"still here")
            assert other.recv(100) == b"still here"


def test_a_broken_connection_ends_itself_alone(line: Line) -> None:
    for number in range(20):
        client, there = connected(*line[:2])
        client.sendall(b"x" * number)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with there:
            while True:
                try:
                    if not there.recv(100):
                        break
                except ConnectionResetError:
                    break
    client, there = connected(*line[:2])
    with client, there:
        client.sendall(b"fine")
        assert there.recv(100) == b"fine"


def met_by_a_reset(client: socket.socket, port: int) -> None:
    """It comes while the client connects, or with the first byte."""
    client.connect(("127.0.0.1", port))
    client.recv(1)


def test_a_companion_that_refuses_shows_as_a_reset(line: Line) -> None:
    port, server, control = line
    server.close()
    with socket.socket() as client:
        client.settimeout(10)
        with pytest.raises(ConnectionResetError):
            met_by_a_reset(client, port)
    with dial(control) as mine:
        assert mine.recv(10) == relay.CLOSED


def dial(control: socket.socket) -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(control, [relay.DIAL], [theirs.fileno()])
    ours.settimeout(10)
    return ours


def test_the_owner_dials_and_is_heard_after_the_box_is_not(line: Line) -> None:
    port, server, control = line
    client, there = connected(port, server)
    with client, there:
        control.send(relay.MUTE)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 10)
    mine = dial(control)
    theirs, _ = server.accept()
    with mine, theirs:
        theirs.sendall(b"answer")
        assert mine.recv(1) == relay.OPEN
        assert mine.recv(100) == b"answer"


def test_more_connections_than_allowed_wait_and_are_served_later(line: Line) -> None:
    port, server, _ = line
    pairs = [connected(port, server) for _ in range(relay.CONNECTIONS)]
    late = socket.create_connection(("127.0.0.1", port), 10)
    server.settimeout(0.5)
    with pytest.raises(TimeoutError):
        server.accept()
    for pair in pairs:
        for sock in pair:
            sock.close()
    server.settimeout(10)
    there, _ = server.accept()
    with late, there:
        late.sendall(b"at last")
        assert there.recv(100) == b"at last"

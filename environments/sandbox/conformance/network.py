"""There is no network: no route out, no name resolution, no host, no cloud's metadata; only the box's own loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from environments.sandbox.conformance.check import NotHere, check, holds, same
from environments.sandbox.conformance.lab import Lab, marker, said, sh

_REACH = """
import errno, json, socket, sys
BLOCKED = {"ENETUNREACH", "EHOSTUNREACH", "EADDRNOTAVAIL", "EACCES", "EPERM", "EAFNOSUPPORT", "EINVAL"}
found = []
for host, port in json.loads(sys.argv[1]):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.settimeout(1.0)
                probe.connect((host, port))
                probe.send(b"x")
            found.append(f"{host}:{port} is reached")
        except OSError as error:
            # A refusal is an answer, and even a silence went somewhere: only "no route" is no network.
            if errno.errorcode.get(error.errno) not in BLOCKED:
                found.append(f"{host}:{port} {error}")
print(json.dumps(found))
"""
"""Prints how each (host, port) could be reached, by TCP and by UDP."""


async def unreachable(lab: Lab, targets: list[tuple[str, int]]) -> None:
    async with lab.box() as box:
        same(json.loads(await said(box, _REACH, json.dumps(targets), seconds=60.0)), [], "what can be reached")


def gateways() -> list[str]:
    """Default gateways of this host, and the usual ones of container and machine networks."""
    rows = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    own = [".".join(str(byte) for byte in bytes.fromhex(row[2])[::-1]) for row in rows if row[1] == "00000000"]
    return [*own, "172.17.0.1", "10.0.2.2", "192.168.0.1", "192.168.65.2"]


def host_addresses() -> list[str]:
    families = {socket.AF_INET, socket.AF_INET6}
    found = [item.address for items in psutil.net_if_addrs().values() for item in items if item.family in families]
    return sorted({address.partition("%")[0] for address in found} - {"127.0.0.1", "::1"})


def name_servers() -> list[str]:
    try:
        rows = [line.split() for line in Path("/etc/resolv.conf").read_text().splitlines()]
    except OSError:
        return []
    return [row[1] for row in rows if len(row) > 1 and row[0] == "nameserver"]


@contextmanager
def listening(address: object, family: socket.AddressFamily) -> Iterator[socket.socket]:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind(address)  # type: ignore[arg-type]
        server.listen()
        yield server


@check("exec", "no_network")
async def interfaces(lab: Lab) -> None:
    """The only interface with an address is loopback, and no route leads anywhere."""
    async with lab.box() as box:
        program = (
            "import pathlib; print([p.name for p in pathlib.Path('/sys/class/net').glob('*')"
            " if (p / 'operstate').read_text().strip() == 'up'] if pathlib.Path('/sys/class/net').exists() else [])"
        )
        same((await said(box, program)).strip(), "[]", "interfaces that are up")
        routes = await sh(box, "tail -n +2 /proc/net/route; grep -v ' lo$' /proc/net/ipv6_route; true")
        same(routes.stdout, b"", "routes")


@check("exec", "no_network")
async def gateway(lab: Lab) -> None:
    """The host's gateways, and the usual ones of containers and machines, are unreachable."""
    await unreachable(lab, [(host, port) for host in await asyncio.to_thread(gateways) for port in (80, 2375)])


@check("exec", "no_network")
async def metadata(lab: Lab) -> None:
    """The metadata services of clouds are unreachable."""
    await unreachable(lab, [("169.254.169.254", 80), ("169.254.170.2", 80), ("fd00:ec2::254", 80), ("100.100.100.200", 80)])


@check("exec", "no_network")
async def public(lab: Lab) -> None:
    """Addresses of the internet are unreachable, by IPv4 and IPv6."""
    await unreachable(lab, [("8.8.8.8", 53), ("1.1.1.1", 443), ("2001:4860:4860::8888", 53), ("255.255.255.255", 9)])


@check("exec", "no_network")
async def names(lab: Lab) -> None:
    """No name is resolved, and the host's name servers are neither named in the box nor reachable."""
    servers = await asyncio.to_thread(name_servers)
    async with lab.box() as box:
        program = (
            "import socket\nfor name in ('example.org', 'metadata.google.internal', 'host.docker.internal'):\n"
            "    try: print(name, socket.getaddrinfo(name, 80)[0][4])\n    except OSError: pass"
        )
        same(await said(box, program, seconds=60.0), "", "names that resolve")
        told = (await sh(box, "cat /etc/resolv.conf /etc/hosts 2>/dev/null")).stdout.decode(errors="replace").split()
        remote = [server for server in servers if not server.startswith("127.") and server != "::1"]
        same([server for server in remote if server in told], [], "name servers of the host, named in the box")
    await unreachable(lab, [(server, 53) for server in remote])


@check("exec", "no_network")
async def host_ports(lab: Lab) -> None:
    """A server on the host is unreachable at every address of the host, loopback included."""
    addresses = await asyncio.to_thread(host_addresses)
    with listening(("0.0.0.0", 0), socket.AF_INET) as server:  # noqa: S104
        port = server.getsockname()[1]
        await unreachable(lab, [(address, port) for address in addresses])
        program = (
            "import socket, sys\ntry: socket.create_connection(('127.0.0.1', int(sys.argv[1])), 2); print('reached')\n"
            "except OSError: print('refused')"
        )
        async with lab.box() as box:
            same((await said(box, program, str(port))).strip(), "refused", "the host's port on the box's loopback")


@check("exec", "no_network")
async def abstract_sockets(lab: Lab) -> None:
    """A socket of the host without a file (in the abstract name space) is unreachable."""
    name = f"bessemer-{marker()}"
    if not hasattr(socket, "AF_UNIX"):
        raise NotHere("this host has no such sockets")
    with listening(f"\0{name}", socket.AF_UNIX):
        program = (
            "import socket, sys\ntry: socket.socket(socket.AF_UNIX).connect(chr(0) + sys.argv[1]); print('reached')\n"
            "except OSError: print('refused')"
        )
        async with lab.box() as box:
            same((await said(box, program, name)).strip(), "refused", "the host's abstract socket")


@check("exec", "no_network")
async def raw_sockets(lab: Lab) -> None:
    """No raw or packet socket can be made."""
    program = """
import socket
for family, kind, protocol in ((socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_PACKET, socket.SOCK_RAW, 3)):
    try: socket.socket(family, kind, protocol); print(family.name)
    except OSError: pass
"""
    async with lab.box() as box:
        same(await said(box, program), "", "raw sockets that can be made")


@check("exec", "no_network")
async def own_loopback(lab: Lab) -> None:
    """Processes of one command talk over the box's own loopback, so that a server can be tried inside."""
    program = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=lambda: server.accept()[0].sendall(b"hello"), daemon=True).start()
print(socket.create_connection(server.getsockname(), 5).recv(5).decode())
"""
    async with lab.box() as box:
        holds((await said(box, program)).strip() == "hello", "the loopback of the box does not work")

"""Companion services: reached where they are declared and nowhere else, fresh for every box, watched, gone with the box."""

from __future__ import annotations

import asyncio
import json
import time

from data_contracts.errors import CapabilityError, InfraError, SandboxLost
from data_contracts.records import SandboxSpec
from data_contracts.services import HealthCheck, ServiceLimits, ServiceSpec
from environments.sandbox.base import needs
from environments.sandbox.conformance import hostview
from environments.sandbox.conformance.check import check, holds, refused, same
from environments.sandbox.conformance.lab import Lab, marker, processes, said, sh, until

SHOP = """
import http.server, json, os, signal, socket, sqlite3, sys
db = sqlite3.connect("shop.db")
db.executescript(open("shop.sql").read())
hidden = socket.create_server(("127.0.0.1", 9191))
class Shop(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(db.execute("SELECT id, state FROM orders").fetchall())
    def do_POST(self):
        order = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path == "/die":
            os._exit(int(order))
        if self.path == "/eat":
            order = len(bytearray(int(order)))
        if self.path == "/echo":
            return self.reply(len(order))
        db.execute("INSERT INTO orders VALUES (?, 'new')", (order,))
        db.commit()
        self.reply("stored")
    def reply(self, thing):
        body = json.dumps(thing).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words):
        pass
print("the shop opens", flush=True)
http.server.HTTPServer(("127.0.0.1", 8080), Shop).serve_forever()
"""
"""An HTTP API with a database behind it, and a port that nobody declares."""
TABLE = "CREATE TABLE orders (id, state); INSERT INTO orders VALUES ('7', 'sent');"
_ASK = """
import json, sys, urllib.request, urllib.error
found = []
for path, body in json.loads(sys.argv[1]):
    try:
        with urllib.request.urlopen("http://127.0.0.1:" + path, body and body.encode(), timeout=20) as answer:
            found.append([answer.status, json.loads(answer.read())])
    except urllib.error.HTTPError as error:
        found.append([error.code, json.loads(error.read())])
    except OSError as error:
        found.append(["failed", type(error).__name__])
print(json.dumps(found))
"""
_CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)"


def shop(name: str = "shop", port: int = 80, **more: object) -> ServiceSpec:
    files = {"shop.py": SHOP, "shop.sql": TABLE}
    defaults = {"argv": ("python3", "-I", "shop.py"), "listens": 8080, "files": files, "health": HealthCheck(http="/")}
    return ServiceSpec(name=name, port=port, **(defaults | more))  # type: ignore[arg-type]


async def ask(box: object, *requests: tuple[str, str | None]) -> list[list[object]]:
    """Status and JSON of each request, made from inside the box."""
    answers: list[list[object]] = json.loads(await said(box, _ASK, json.dumps(requests)))  # type: ignore[arg-type]
    return answers


@check("exec", "services")
async def reached(lab: Lab) -> None:
    """Two services are reached at their declared ports, by an ordinary HTTP client, and keep their state apart."""
    async with lab.box(services=(shop(), shop("other", 81))) as box:
        found = await ask(box, ("80/", "8"), ("80/", None), ("81/", None))
        same(found, [[200, "stored"], [200, [["7", "sent"], ["8", "new"]]], [200, [["7", "sent"]]]], "answers")
        big = await ask(box, ("80/echo", "x" * 100_000))
        same(big, [[200, 100_000]], "the size of a large body")


@check("exec", "files", "freeze", "services")
async def recorded(lab: Lab) -> None:
    """Recorded HTTP answers by method, path and body; what was not recorded gets a 404 that says what is."""
    rows = (
        '{"path": "/a?x=1&y=2", "json": {"n": 1}}\n{"path": "/a?x=1&y=2", "json": {"n": 2}}\n'
        '{"method": "POST", "path": "/b", "request": {"k": [1, true]}, "status": 201, "json": "made"}\n'
    )
    service = ServiceSpec(name="api", port=8000, kind="recorded", files={"a.jsonl": rows})
    async with lab.box(services=(service,)) as box:
        found = await ask(box, *3 * [("8000/a?y=2&x=1", None)], ("8000/b", '{"k":[1,true]}'), ("8000/b", '{"k":[1,1]}'))
        same(found[:4], [[200, {"n": 1}], [200, {"n": 2}], [200, {"n": 2}], [201, "made"]], "answers")
        holds(found[4][0] == 404 and "GET /a?x=1&y=2" in str(found[4][1]), f"an unrecorded request is answered {found[4]}")
        await box.freeze()
        api = box.services["api"]
        await api.freeze()
        (log,) = await api.collect(("requests.jsonl",), max_bytes=10_000)
        same([json.loads(row)["recorded"] for row in log.content.splitlines()], [True] * 4 + [False], "what its log says")


@check("exec", "services")
async def declared_only(lab: Lab) -> None:
    """A port of a service that is not declared is out of reach, and so are its processes and files."""
    async with lab.box(services=(shop(),)) as box:
        for port in ("9191", "8080"):
            result = await sh(box, f'python3 -I -c "{_CONNECT}" {port}')
            holds(b"ConnectionRefusedError" in result.stderr, f"connecting to port {port}: {result.stderr[-200:]!r}")
        same([row for row in await processes(box) if "shop.py" in row], [], "processes of the service, seen in the box")
        same((await sh(box, "ls /work; find / -name 'shop.*' 2>/dev/null")).stdout, b"", "files of the service, in the box")


@check("exec", "services")
async def no_network(lab: Lab) -> None:
    """A service has no network and does not reach its box."""
    async with lab.box(services=(shop(),)) as box:
        listening = "import socket, time; s = socket.create_server(('127.0.0.1', 7777)); print(1, flush=True); time.sleep(60)"
        running = asyncio.ensure_future(sh(box, f'python3 -I -c "{listening}"', seconds=60))
        inside = box.services["shop"]

        async def stands() -> bool:
            return (await sh(box, f'python3 -I -c "{_CONNECT}" 7777')).exit_code == 0

        holds(await until(stands), "the box's own server is not reached in the box")
        result = await sh(inside, f'python3 -I -c "{_CONNECT}" 7777')
        holds(b"ConnectionRefusedError" in result.stderr, f"the service connects to its box: {result.stderr[-200:]!r}")
        routes = await sh(inside, "tail -n +2 /proc/net/route; grep -v ' lo$' /proc/net/ipv6_route; true")
        same(routes.stdout, b"", "routes of the service")
        running.cancel()
        await asyncio.wait({running})


@check("exec", "services")
async def fresh(lab: Lab) -> None:
    """Every box gets services of its own in their first state, at the same time and one after the other."""
    async with lab.box(services=(shop(),)) as one, lab.box(services=(shop(),)) as two:
        await ask(one, ("80/", "8"))
        same(await ask(two, ("80/", None)), [[200, [["7", "sent"]]]], "the other box's database")
    async with lab.box(services=(shop(),)) as later:
        same(await ask(later, ("80/", None)), [[200, [["7", "sent"]]]], "the next box's database")


@check("services")
async def unhealthy(lab: Lab) -> None:
    """A service that is not healthy in time, or ends first, is an infrastructure failure that quotes it; nothing is left."""
    mark = marker()
    late = shop(argv=("sh", "-c", f"echo still loading; sleep {mark}"), health=HealthCheck(http="/", deadline_seconds=2))
    began = time.monotonic()
    with refused(InfraError, "still loading", "a service that never answers"):
        await lab.backend.acquire(SandboxSpec(services=(late,)))
    holds(time.monotonic() - began < 30, "it took more than 30 s to notice")
    with refused(InfraError, "exit code 3", "a service that ends at once"):
        await lab.backend.acquire(SandboxSpec(services=(shop(argv=("sh", "-c", "exit 3")),)))
    with refused(InfraError, "no such table", "a service whose seed fails"):
        wrong = "import sqlite3; sqlite3.connect('shop.db').execute('SELECT 1 FROM absent')"
        await lab.backend.acquire(SandboxSpec(services=(shop(seed=("python3", "-c", wrong)),)))
    same(await asyncio.to_thread(hostview.pids, mark), [], "processes left")


@check("exec", "services")
async def ended(lab: Lab) -> None:
    """A service that ends is an infrastructure failure of its box, or the policy's where it is so declared."""
    kinds: tuple[tuple[str, type[InfraError | SandboxLost]], ...] = (("infra", InfraError), ("policy", SandboxLost))
    for end, kind in kinds:
        async with lab.box(services=(shop(end=end),)) as box:
            with refused(kind, "'shop' ended (exit code 5)", "a command after the end of a service"):
                await ask(box, ("80/die", "5"))
                await asyncio.sleep(1.0)  # a service's end is told a moment later
                await sh(box, "true")
            with refused(kind, "'shop' ended", "freezing a box whose service has ended"):
                await box.freeze()


@check("exec", "limits", "services")
async def memory(lab: Lab) -> None:
    """A service's memory is its own: what it eats ends it and leaves the box's commands alone."""
    small = ServiceLimits(memory_bytes=64 << 20)
    async with lab.box(services=(shop(limits=small), shop("other", 81))) as box:
        with refused(InfraError, "limits.memory_bytes=67108864", "a service out of its memory"):
            await ask(box, ("80/eat", str(512 << 20)))
            await asyncio.sleep(1.0)
            await sh(box, "true")
    eat = "x = bytearray(300 << 20); x[::4096] = b'1' * len(x[::4096]); print(len(x))"
    async with lab.box(services=(shop(limits=small),), memory_bytes=512 << 20) as box:
        same((await said(box, eat)).strip(), str(300 << 20), "what the box may still use beside its service")
        same(await ask(box, ("80/", None)), [[200, [["7", "sent"]]]], "the service's answer")


@check("exec", "isolation", "services")
async def out_of_reach(lab: Lab) -> None:
    """Neither kill -9 -1 in the box, nor broken connections, nor a flood of idle ones end a service; it answers afterwards."""
    async with lab.box(services=(shop(),)) as box:
        inside = (await sh(box, "readlink /proc/self/ns/pid; id -u")).stdout.decode().split()
        holds(len(inside) == 2 and inside[1] != "0", "the box's user is root; nothing hostile is run in it")
        await sh(box, "kill -9 -1")
        broken = (
            "import socket, struct\nfor n in range(60):\n    s = socket.create_connection(('127.0.0.1', 80), 5)\n"
            "    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))\n"
            "    s.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n' * (n % 3))\n    s.close()"
        )
        await said(box, broken)
        flood = (
            "import socket\nkept = []\ntry:\n"
            "    for n in range(900):\n        kept.append(socket.create_connection(('127.0.0.1', 80), 0.5))\n"
            "except OSError: pass\nprint(len(kept) > 100)"
        )
        same((await said(box, flood)).strip(), "True", "many connections")
        same(await ask(box, ("80/", None)), [[200, [["7", "sent"]]]], "the service's answer after it")


@check("exec", "freeze", "services", alone=True)
async def gone(lab: Lab) -> None:
    """A frozen box leaves its services to the owner's questions; a destroyed one leaves nothing of them."""
    mark = marker()
    listed = set(lab.backend.boxes)
    seen = await asyncio.to_thread(hostview.containers, lab.backend)
    owned = await asyncio.to_thread(hostview.own_groups)
    held = f"import subprocess; subprocess.Popen(['sleep', '{mark}'])\n" + SHOP
    service = shop(files={"shop.py": held, "shop.sql": TABLE})
    async with lab.box(services=(service,)) as box:
        await ask(box, ("80/", "8"))
        await box.freeze()
        count = "import sqlite3; print(sqlite3.connect('shop.db').execute('SELECT count(*) FROM orders').fetchone()[0])"
        same((await said(box.services["shop"], count)).strip(), "2", "rows in the frozen box's database")
    same(set(lab.backend.boxes) - listed, set(), "boxes listed")

    async def left() -> list[object]:
        groups = await asyncio.to_thread(hostview.own_groups) - owned
        containers = await asyncio.to_thread(hostview.containers, lab.backend) - seen
        return [*groups, *containers, *await asyncio.to_thread(hostview.pids, mark)]

    async def nothing() -> bool:
        return not await left()

    holds(await until(nothing, seconds=5.0), f"left of the services: {await left()}")


@check("isolation")
async def refused_where_missing(lab: Lab) -> None:
    """A box with a service that the backend does not offer is refused before anything starts."""
    image = ServiceSpec(name="api", port=80, kind="image", image="no-such-image:1")
    for spec in (SandboxSpec(services=(image,)), SandboxSpec(services=(shop(),))):
        if needs(spec) <= lab.backend.capabilities:
            continue
        with refused(CapabilityError, "services", "a box with services"):
            await lab.backend.acquire(spec)

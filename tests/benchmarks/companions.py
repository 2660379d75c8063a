"""What a companion service costs: seconds until a box with one is ready, memory, and the way through the relay.

    python -m tests.benchmarks.companions bubblewrap docker

Medians of ROUNDS boxes, made one after the other. Memory is the proportional set (PSS) of the service's processes and of its
relay, as /proc/PID/smaps_rollup has it, so run it as root. The redis root file system is built when it is missing.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path

import psutil

from data_contracts.config import SandboxConfig
from data_contracts.records import SandboxSpec
from data_contracts.services import HealthCheck, ServiceSpec
from environments.sandbox import open_backend
from environments.sandbox.base import Backend, Box
from environments.sandbox.bubblewrap import BubblewrapBox
from environments.sandbox.cgroups import _processes
from environments.sandbox.conformance.lab import said
from environments.sandbox.conformance.services import shop
from environments.sandbox.docker import DockerBox
from infra.rootfs import ensure_image, ensure_rootfs

ROUNDS = 7
REDIS = "base,redis-server"
KINDS: dict[str, tuple[ServiceSpec, ...]] = {
    "no service": (),
    "recorded HTTP": (ServiceSpec(name="rec", port=8080, kind="recorded", files={"a.jsonl": '{"path": "/", "json": []}'}),),
    "HTTP API in Python with sqlite": (shop("shop", 8080),),
    "redis": (
        ServiceSpec(
            name="redis", port=6379, image=REDIS, argv=("redis-server", "--bind", "127.0.0.1", "--save", ""),
            health=HealthCheck(command=("redis-cli", "ping")),
        ),
    ),
}  # fmt: skip
_LATENCY = """
import socket, statistics, sys, time
spent = []
s = socket.create_connection(("127.0.0.1", int(sys.argv[1]))); s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(1000):
    began = time.perf_counter(); s.sendall(b"PING\\r\\n"); s.recv(100); spent.append(time.perf_counter() - began)
print(statistics.median(spent) * 1e6)
"""


def pss(pids: list[int]) -> float:
    """MiB."""
    rows = [row.split() for pid in pids for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(row[1]) for row in rows if row[0] == "Pss:") / 1024


def inhabitants(box: Box) -> tuple[list[int], list[int]]:
    """Pids of a companion's own processes, and of its relay."""
    if isinstance(box, BubblewrapBox):
        found = _processes(box._group.owner)
        ours = [pid for pid in found if "spawner.py" in " ".join(psutil.Process(pid).cmdline())]
        return [pid for pid in found if pid not in ours], ours
    assert isinstance(box, DockerBox)
    assert box.relay_process
    inside = [int(row[1]) for row in box.container.top()["Processes"]]
    return inside, [box.relay_process.pid]


async def measure(backend: Backend) -> None:
    for name, services in KINDS.items():
        ready, ends, memory, relays = [], [], [], []
        for _ in range(ROUNDS):
            began = time.monotonic()
            box = await backend.acquire(SandboxSpec(services=services))
            ready.append(time.monotonic() - began)
            for companion in box.services.values():
                own, ours = await asyncio.to_thread(inhabitants, companion)
                memory.append(await asyncio.to_thread(pss, own))
                relays.append(await asyncio.to_thread(pss, ours))
            if name == "redis":
                through = float(await said(box, _LATENCY, "6379"))
                direct = float(await said(box.services["redis"], _LATENCY, "6379"))
            began = time.monotonic()
            await box.destroy()
            ends.append(time.monotonic() - began)
        row = f"{backend.name:10} {name:32} ready {statistics.median(ready):6.3f} s  destroyed {statistics.median(ends):6.3f} s"
        if memory:
            row += f"  service {statistics.median(memory):5.1f} MiB  relay {statistics.median(relays):4.1f} MiB"
        if name == "redis":
            row += f"  PING {through:.0f} us, without relay {direct:.0f} us"
        sys.stdout.write(row + "\n")
        sys.stdout.flush()


async def main(names: list[str]) -> None:
    await asyncio.to_thread(ensure_rootfs, REDIS)
    for name in names:
        if name == "docker":
            await asyncio.to_thread(ensure_image, REDIS)
        backend = open_backend(SandboxConfig(backend=name))  # type: ignore[arg-type]
        await backend.check()
        try:
            await measure(backend)
        finally:
            await backend.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or ["bubblewrap", "docker"]))

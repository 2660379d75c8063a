"""Companion services where no check on a user's host may go: a database server, images, the pool, owners and relays killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from data_contracts.config import SandboxConfig
from data_contracts.errors import CapabilityError, InfraError, InputError
from data_contracts.records import SandboxLimits, SandboxSpec
from data_contracts.services import HealthCheck, ServiceLimits, ServiceSpec
from environments.sandbox import cgroups, open_backend, relay
from environments.sandbox.base import Backend
from environments.sandbox.bubblewrap import BubblewrapBackend, BubblewrapBox
from environments.sandbox.companions import SPARE_SECONDS
from environments.sandbox.conformance import hostview
from environments.sandbox.conformance.lab import Lab, marker, said, sh, until
from environments.sandbox.conformance.services import TABLE, ask, shop
from environments.sandbox.docker import DockerBackend, DockerBox
from environments.sandbox.pool import WarmBackend
from infra.rootfs import ensure_image, ensure_rootfs

real = pytest.mark.parametrize("backend", ["bubblewrap", "docker"], indirect=True)
REDIS = "base,redis-server"


@pytest.fixture(scope="session")
def redis_rootfs(rootfs: Path) -> Path:
    return ensure_rootfs(REDIS, progress=print)


def redis(**more: Any) -> ServiceSpec:
    argv = ("redis-server", "--port", "6379", "--bind", "127.0.0.1", "--save", "", "--rename-command", "SHUTDOWN", "")
    health = HealthCheck(command=("redis-cli", "ping"))
    seed = ("redis-cli", "mset", "stock:7", "3", "stock:8", "0")
    return ServiceSpec(name="redis", port=6379, image=REDIS, argv=argv, health=health, seed=seed, **more)


@real
async def test_a_database_server_is_seeded_used_and_asked_afterwards(backend: Backend, redis_rootfs: Path) -> None:
    if isinstance(backend, DockerBackend):
        await asyncio.to_thread(ensure_image, REDIS)
    client = (
        "import socket\ns = socket.create_connection(('127.0.0.1', 6379))\nf = s.makefile('rwb')\n"
        "for line in ('DECR stock:7', 'GET stock:7', 'SHUTDOWN NOSAVE'):\n"
        "    f.write(line.encode() + b'\\r\\n'); f.flush(); print(f.readline().strip().decode()[:12])\n"
    )
    async with Lab(backend).box(services=(redis(end="policy"),)) as box:
        assert (await said(box, client)).split("\n")[:3] == [":2", "$1", "2"]
        await box.freeze()
        result = await sh(box.services["redis"], "redis-cli mget stock:7 stock:8")
        assert result.stdout.split() == [b"2", b"0"]


async def test_an_image_is_refused_by_bubblewrap(bubblewrap_backend: Backend, fake_backend: Backend) -> None:
    image = ServiceSpec(name="api", port=80, kind="image", image="api:1")
    with pytest.raises(CapabilityError, match="'bubblewrap' does not offer image_services"):
        await bubblewrap_backend.acquire(SandboxSpec(services=(image,)))
    with pytest.raises(CapabilityError, match="'fake' does not offer services"):
        await fake_backend.acquire(SandboxSpec(services=(shop(),)))
    for needed in ("services", "image_services"):
        with pytest.raises(CapabilityError, match=needed):
            await fake_backend.acquire(SandboxSpec(needs=(needed,)))


@pytest.fixture(scope="session")
def api_image(docker_engine: str, tmp_path_factory: pytest.TempPathFactory, docker_backend: DockerBackend) -> Iterator[str]:
    """An image as a company would build it: a server, a folder for its data, a health check. Built without a network."""
    from environments.sandbox.conformance.services import SHOP

    folder, name = tmp_path_factory.mktemp("image"), f"bessemer-test-api:{os.getpid()}"
    (folder / "shop.py").write_text("import os, shutil\nshutil.copy('/srv/shop.sql', '/data'); os.chdir('/data')\n" + SHOP)
    (folder / "shop.sql").write_text(TABLE)
    (folder / "Dockerfile").write_text(
        f"FROM {docker_engine}\nCOPY shop.py shop.sql /srv/\nVOLUME /data\nENV GREETING=hello\n"
        "HEALTHCHECK CMD python3 -c \"import urllib.request as r; r.urlopen('http://127.0.0.1:8080/')\"\n"
        'CMD ["python3", "/srv/shop.py"]\n'
    )
    docker_backend.client.images.build(path=str(folder), tag=name, rm=True)
    yield name
    docker_backend.client.images.remove(name, force=True)


def from_image(name: str, **more: Any) -> ServiceSpec:
    return ServiceSpec(name="api", port=80, listens=8080, kind="image", image=name, **more)


async def test_an_image_with_a_health_check_runs_beside_a_box(docker_backend: DockerBackend, api_image: str) -> None:
    async with Lab(docker_backend).box(services=(from_image(api_image, env={"EXTRA": "1"}),)) as box:
        assert await ask(box, ("80/", "8"), ("80/", None)) == [[200, "stored"], [200, [["7", "sent"], ["8", "new"]]]]
        api = box.services["api"]
        assert isinstance(api, DockerBox)
        said_ = (await sh(api, "echo $GREETING $EXTRA; id -u; touch /x /data/x; tail -n +2 /proc/net/route")).stdout
        assert said_ == b"hello 1\n1000\n"
        assert (await sh(api, "ls /x")).exit_code != 0
        with pytest.raises(InputError, match="no work folder"):
            await api.put_files({"x": b""})
        await box.freeze()
        assert (await sh(api, "ls /data/shop.db")).exit_code == 0


async def test_an_image_that_fails_is_told_apart(docker_backend: DockerBackend, api_image: str) -> None:
    lab = Lab(docker_backend)
    before = hostview.containers(docker_backend)
    with pytest.raises(InfraError, match=r"image_missing.*docker pull no-such:1"):
        async with lab.box(services=(from_image("no-such:1"),)):
            pass
    for argv, words in ((("sh", "-c", "echo bad configuration; exit 4"), "bad configuration"), (("/nowhere",), "nowhere")):
        with pytest.raises(InfraError, match=words):
            async with lab.box(services=(from_image(api_image, argv=argv),)):
                pass
    slow = from_image(api_image, argv=("sh", "-c", "echo loading; sleep 99"), health=HealthCheck(deadline_seconds=5))
    with pytest.raises(InfraError, match=r"(?s)not healthy within.*HEALTHCHECK .*loading"):
        async with lab.box(services=(slow,)):
            pass
    async with lab.box(services=(from_image(api_image),)) as box:
        await ask(box, ("80/die", "6"))
        await asyncio.sleep(1)
        with pytest.raises(InfraError, match=r"(?s)'api' ended.*exit code 6.*the shop opens"):
            await sh(box, "true")
    assert hostview.containers(docker_backend) == before


OWNER = """
import asyncio, sys, msgspec
from environments.sandbox import open_backend
from data_contracts.config import SandboxConfig
from data_contracts.records import SandboxSpec
async def main():
    backend = open_backend(SandboxConfig(backend=sys.argv[1]))
    box = await backend.acquire(msgspec.json.decode(sys.argv[2], type=SandboxSpec))
    print(*(one.container.id for one in box.services.values() if hasattr(one, "container")), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("backend", "image"), [("bubblewrap", False), ("docker", False), ("docker", True)], indirect=["backend"]
)
async def test_a_killed_owner_leaves_no_service(backend: Backend, image: bool, request: pytest.FixtureRequest) -> None:
    """Its relays end with it, and an image's container with its relay; the rest ends with it or goes at the next sweep."""
    service = from_image(request.getfixturevalue("api_image")) if image else shop()
    before = set(relays())
    spec = msgspec.json.encode(SandboxSpec(services=(service,))).decode()
    owner = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", OWNER, backend.name, spec], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout
    containers = (await asyncio.to_thread(owner.stdout.readline)).split()
    assert len(containers) == (backend.name == "docker")
    owner.kill()
    owner.wait()
    owner.stdout.close()

    async def ended() -> bool:
        return not set(await asyncio.to_thread(relays)) - before

    assert await until(ended)
    if isinstance(backend, BubblewrapBackend):  # the spawner takes its boxes along

        async def taken() -> bool:
            return not await asyncio.to_thread(lambda: list(backend._require().orphans()))

        assert await until(taken)
    if image:
        assert isinstance(backend, DockerBackend)
        container = backend.client.containers.get(containers[0])

        async def dead() -> bool:
            await asyncio.to_thread(container.reload)
            return container.status == "exited"

        assert await until(dead), "the image's container runs on without its owner"
    reaped = await asyncio.to_thread(backend.reap)
    assert reaped == (2 if backend.name == "docker" else 0)
    assert hostview.pids("shop.py") == []


def relays() -> list[int]:
    """Pids of relays that are scripts of their own (Docker)."""
    return [one.pid for one in psutil.process_iter(["cmdline"]) if relay.__file__ in (one.info["cmdline"] or ())]


@real
async def test_a_service_killed_from_outside_is_an_infrastructure_failure(backend: Backend) -> None:
    async with Lab(backend).box(services=(shop(),)) as box:
        one = box.services["shop"]
        if isinstance(one, BubblewrapBox):
            os.kill(one.pid, signal.SIGKILL)
        elif isinstance(one, DockerBox):
            one.container.kill()
        await asyncio.sleep(1)
        for _ in range(2):
            with pytest.raises(InfraError, match="service 'shop' ended"):
                await sh(box, "true")
        with pytest.raises(InfraError, match="service 'shop' ended"):
            await box.freeze()


def status(pid: int) -> dict[str, str]:
    return dict(row.split(":\t", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in row)


@real
async def test_a_relay_that_dies_is_an_infrastructure_failure(backend: Backend) -> None:
    before = set(relays())
    async with Lab(backend).box(services=(shop(),)) as box:
        one = box.services["shop"]
        if isinstance(one, BubblewrapBox):
            found = [
                pid for pid in cgroups._processes(one._group.owner) if "spawner" in " ".join(psutil.Process(pid).cmdline())
            ]
            found = [pid for pid in found if os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")]
            found = [pid for pid in found if os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{one.pid}/ns/net")]
        else:
            found = list(set(relays()) - before)
        assert len(found) == 1
        about = status(found[0])
        assert (int(about["CapEff"], 16), int(about["CapBnd"], 16), about["Seccomp"].strip()) == (0, 0, "2")
        assert "0" not in about["Uid"].split()
        os.kill(found[0], signal.SIGKILL)
        await asyncio.sleep(0.3)
        with pytest.raises(InfraError, match="the relay of service 'shop' ended"):
            await sh(box, "true")


@real
async def test_boxes_made_ahead_have_fresh_healthy_services_whose_life_begins_at_the_hand_out(backend: Backend) -> None:
    spec = SandboxSpec(services=(shop(),), limits=SandboxLimits(lifetime_seconds=100))
    warm = WarmBackend(backend, warm=1)
    try:
        await warm.prepare(spec)
        box = await warm.acquire(spec)
        assert box.services["shop"].spec.limits.lifetime_seconds == 100 + SPARE_SECONDS
        assert box.services["shop"].age_seconds < 5
        assert await ask(box, ("80/", "8")) == [[200, "stored"]]
        await box.destroy()
        shelf = next(iter(warm._shelves.values()))
        await until(lambda: asyncio.sleep(0, bool(shelf.ready)), seconds=30)
        waiting = shelf.ready[0]
        one = waiting.services["shop"]
        if isinstance(one, BubblewrapBox):
            os.kill(one.pid, signal.SIGKILL)
        elif isinstance(one, DockerBox):
            one.container.kill()
        await asyncio.sleep(1)
        second = await warm.acquire(spec)
        assert second is not waiting, "a box whose service has died was handed out"
        assert await ask(second, ("80/", None)) == [[200, [["7", "sent"]]]]
        await second.destroy()
    finally:
        await warm.drain()


@real
async def test_a_box_from_an_ended_event_loop_says_so(backend: Backend) -> None:
    def elsewhere() -> Any:
        return asyncio.run(backend.acquire(SandboxSpec(services=(shop(),))))

    box = await asyncio.to_thread(elsewhere)
    try:
        with pytest.raises(InfraError, match=r"'shop' .*event loop that has ended|'shop' ended"):
            await sh(box, "true")
    finally:
        await box.destroy()


@real
async def test_a_cancelled_start_leaves_nothing(backend: Backend) -> None:
    groups, containers, boxes = hostview.own_groups(), hostview.containers(backend), set(backend.boxes)
    mark = marker()
    slow = ServiceSpec(name="slow", port=8080, argv=("sleep", mark), health=HealthCheck(deadline_seconds=30))
    for after in (0.05, 0.4, 1.5):
        starting = asyncio.ensure_future(backend.acquire(SandboxSpec(services=(slow, shop()))))
        await asyncio.sleep(after)
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()
    assert set(backend.boxes) == boxes

    async def gone() -> bool:
        return not (hostview.own_groups() - groups or hostview.containers(backend) - containers or hostview.pids(mark))

    assert await until(gone)


@real
async def test_a_port_that_the_box_cannot_give_is_an_infrastructure_failure_that_names_it(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two relays at one port: the contract refuses it, so the check is taken away to see the second one fail."""
    monkeypatch.setattr("data_contracts.records.check_services", lambda services: None)
    with pytest.raises(InfraError, match=r"service '(a|b)' of a box cannot be reached at port 80.*[Aa]ddress"):
        await backend.acquire(SandboxSpec(services=(shop("a", 80), shop("b", 80))))


async def test_limits_and_date_of_a_service_are_those_declared(bubblewrap_backend: Backend) -> None:
    limits = ServiceLimits(memory_bytes=96 << 20, pids=17, cpus=0.5)
    async with Lab(bubblewrap_backend).box(services=(shop(limits=limits),)) as box:
        one = box.services["shop"]
        assert isinstance(one, BubblewrapBox)
        assert one._group.loosened(one.spec.limits) == []
        assert (one.spec.limits.memory_bytes, one.spec.limits.pids, one.spec.limits.cpus) == (96 << 20, 17, 0.5)
        assert (await sh(one, "date -u +%F")).stdout == (await sh(box, "date -u +%F")).stdout


async def test_open_backend_offers_what_the_backend_does() -> None:
    for kind, offered in (("bubblewrap", {"services"}), ("docker", {"services", "image_services"}), ("fake", set())):
        backend = open_backend(SandboxConfig(backend=kind, warm=2))  # type: ignore[arg-type]
        assert backend.capabilities & {"services", "image_services"} == offered

"""What a policy tries against its box, its neighbours and its host, on every backend that may run a trained policy."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_contracts.errors import InfraError, MissingRequirement, SandboxLost
from data_contracts.records import SandboxSpec
from environments.sandbox.base import Backend, Box
from environments.sandbox.bubblewrap import BubblewrapBackend, BubblewrapBox
from environments.sandbox.docker import DockerBackend, DockerBox
from tests.conformance.sandbox_boxes import a_box, py, sh


@pytest.fixture(params=["bubblewrap", "docker"])
def backend(request: pytest.FixtureRequest) -> Backend:
    found = request.getfixturevalue(f"{request.param}_backend")
    assert isinstance(found, Backend)
    return found


def host_processes() -> str:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


async def processes(box: Box) -> list[str]:
    """Command lines inside the box, but for the command that asks."""
    script = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f 2>/dev/null; echo; done"
    return [row.strip() for row in (await sh(box, script)).stdout.decode().splitlines() if row.strip() and "/proc/" not in row]


def host_state() -> dict[str, object]:
    """What a box must not leave behind on the host."""
    groups = [
        p
        for p in Path("/sys/fs/cgroup").glob("**/bessemer/[0-9]*")
        if any(f"o-{os.getpid()}-" in c.name for c in p.glob("o-*"))
    ]
    return {
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "groups": groups,
        "fds": len(os.listdir("/proc/self/fd")),
    }


async def test_the_policy_has_no_privilege(backend: Backend) -> None:
    async with a_box(backend) as box:
        status = (await sh(box, "cat /proc/self/status")).stdout.decode()
        rows = dict(row.split(":\t", 1) for row in status.splitlines() if ":\t" in row)
        assert set(rows["Uid"].split()) == {"1000"}
        assert not any(int(rows[key], 16) for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
        assert rows["NoNewPrivs"] == "1"
        assert (await sh(box, "find / -xdev -perm /6000 -type f 2>/dev/null")).stdout == b""
        assert (await sh(box, "unshare -Ur true")).exit_code != 0
        assert (await sh(box, "mount -t tmpfs none /tmp || umount /work")).exit_code != 0


async def test_the_root_file_system_cannot_be_changed(backend: Backend) -> None:
    async with a_box(backend) as box:
        script = (
            "for d in / /etc /usr /usr/lib/python3 /var /root /home /home/box /dev; do touch $d/x 2>/dev/null && echo $d; done"
        )
        assert (await sh(box, script)).stdout in {b"", b"/dev\n"[:0]}
        assert (await sh(box, "echo 1 > /proc/sys/kernel/hostname || echo 1 > /proc/sysrq-trigger")).exit_code != 0


async def test_there_is_no_network(backend: Backend) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
import socket
print(sorted(name for _, name in socket.if_nameindex()))
for host in ("127.0.0.1", "169.254.169.254", "8.8.8.8", "172.17.0.1", "10.0.2.2"):
    port = {server.getsockname()[1]} if host == "127.0.0.1" else 80
    try: socket.create_connection((host, port), timeout=1); print("reached", host)
    except OSError: pass
try: print("resolved", socket.getaddrinfo("example.org", 80))
except OSError: pass
"""
        async with a_box(backend) as box:
            seen = (await py(box, program)).stdout.decode()
            assert "'eth0'" not in seen
            assert "reached" not in seen
            assert "resolved" not in seen


async def test_the_hosts_files_sockets_and_processes_are_out_of_reach(backend: Backend, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o005)
    async with a_box(backend) as box:
        paths = f"{secret} /proc/1/root{secret} {Path.cwd()}/pyproject.toml /etc/shadow /root/.bashrc"
        assert (await sh(box, f"cat {paths} 2>/dev/null")).stdout == b""
        assert (
            await sh(box, "find / -xdev -type s 2>/dev/null; ls /var/run/docker.sock /run/docker.sock 2>/dev/null")
        ).stdout == b""
        assert (await sh(box, f"ls -d /proc/{os.getpid()}")).exit_code != 0
        assert len(await processes(box)) <= 3
        assert (await sh(box, "hostname")).stdout == b"box\n"


async def test_a_timeout_kills_daemons_too(backend: Backend) -> None:
    async with a_box(backend) as box:
        result = await sh(
            box, "setsid sh -c 'setsid sleep 1234 & sleep 1234' & (trap '' TERM; sleep 1234) & sleep 1234", seconds=1.0
        )
        assert result.timed_out
        assert not [row for row in await processes(box) if "1234" in row]
        assert (await sh(box, "echo usable")).stdout == b"usable\n"


async def test_a_memory_bomb_is_told_apart_from_a_timeout(backend: Backend) -> None:
    async with a_box(backend, memory_bytes=64 << 20) as box, a_box(backend) as neighbour:
        result = await py(box, "x = bytearray(1 << 30)")
        assert (result.oom_killed, result.timed_out, result.exit_code) == (True, False, 137)
        child = await sh(box, "python3 -c 'x = bytearray(1 << 30)'; echo survived")
        assert (child.oom_killed, child.stdout) == (True, b"survived\n")
        calm = await sh(box, "echo fine")
        assert (calm.oom_killed, calm.stdout) == (False, b"fine\n")
        assert (await sh(neighbour, "echo fine")).stdout == b"fine\n"


async def test_a_fork_bomb_hits_its_limit_and_only_its_own(backend: Backend) -> None:
    async with a_box(backend, pids=32) as box, a_box(backend) as neighbour:
        bomb = asyncio.ensure_future(sh(box, "b() { b | b & b; }; b; sleep 60", seconds=2.0))
        await asyncio.sleep(1.0)
        assert (await sh(neighbour, "echo fine")).stdout == b"fine\n"
        await bomb
        try:
            left = await processes(box)
        except SandboxLost:
            return  # the box was destroyed: nothing is left of it either
        assert len(left) <= 3


async def test_processes_are_counted(backend: Backend) -> None:
    async with a_box(backend, pids=20) as box:
        program = """
import os, time
made = 0
try:
    while made < 100:
        if os.fork() == 0: time.sleep(30); os._exit(0)
        made += 1
except OSError as error: print(made, error.errno)
"""
        made, number = map(int, (await py(box, program)).stdout.split())
        assert 8 <= made <= 20
        assert number == 11


async def test_disk_and_inodes_run_out_inside_only(backend: Backend) -> None:
    async with a_box(backend, disk_bytes=4 << 20) as box, a_box(backend) as neighbour:
        full = await sh(box, "head -c 20M /dev/zero > big; stat -c %s big; rm big")
        assert b"No space left" in full.stderr
        assert int(full.stdout) <= 4 << 20
        program = """
n = 0
try:
    while n < 50000: open(f"f{n}", "w").close(); n += 1
except OSError as error: print(n, error.errno)
"""
        made, number = map(int, (await py(box, program)).stdout.split())
        assert made <= 1024
        assert number == 28
        shm = await sh(
            box, "head -c 100M /dev/zero > /dev/shm/x; head -c 100M /dev/zero > /tmp/x; stat -c %s /dev/shm/x /tmp/x"
        )
        assert all(int(size) <= 32 << 20 for size in shm.stdout.split())
        assert (await sh(neighbour, "echo x > y && cat y")).stdout == b"x\n"


async def test_scratch_folders_can_be_written_and_have_limits(backend: Backend) -> None:
    async with a_box(backend) as box:
        assert (await sh(box, "echo a > /tmp/x && echo b > /dev/shm/x && cat /tmp/x /dev/shm/x")).stdout == b"a\nb\n"
        fill = "import os\nfor i in range(100_000):\n    open(f'/dev/shm/{i}', 'w').close()"
        assert b"No space left" in (await py(box, fill, seconds=60.0)).stderr


async def test_orphans_do_not_stay_as_zombies(backend: Backend) -> None:
    async with a_box(backend) as box:
        await sh(box, "for i in 1 2 3 4 5; do (sh -c 'sleep 0.1 &' &); done; sleep 0.5")
        assert (await sh(box, "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '")).stdout == b"0\n"


async def test_cpu_time_is_limited(backend: Backend) -> None:
    async with a_box(backend, cpus=0.25) as box:
        program = "import time\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
        assert float((await py(box, program)).stdout) < 0.9


async def test_deep_recursion_ends_its_own_process_only(backend: Backend) -> None:
    async with a_box(backend) as box:
        result = await py(box, "import sys; sys.setrecursionlimit(10**9)\ndef f(): return [f()]\nf()")
        assert result.exit_code not in {0, None}
        assert (await sh(box, "echo usable")).stdout == b"usable\n"


async def test_parallel_boxes_share_nothing(backend: Backend) -> None:
    async with a_box(backend) as one, a_box(backend) as two:
        await sh(one, "echo mine > /work/x; echo mine > /tmp/x; echo mine > /dev/shm/x")
        running = asyncio.create_task(sh(one, "sleep 4321", seconds=60.0))
        for _ in range(100):
            if [row for row in await processes(one) if "4321" in row]:
                break
            await asyncio.sleep(0.05)
        assert (await sh(two, "cat /work/x /tmp/x /dev/shm/x 2>/dev/null")).stdout == b""
        assert not [row for row in await processes(two) if "4321" in row]
        await sh(two, "kill -9 -1")
        assert [row for row in await processes(one) if "4321" in row]
        assert not running.done()
        running.cancel()
        await asyncio.wait({running})
        if isinstance(one, BubblewrapBox) and isinstance(two, BubblewrapBox):
            uids = {os.stat(f"/proc/{box.pid}").st_uid for box in (one, two)}
            assert len(uids) == 2
            assert 0 not in uids


async def test_killing_everything_inside_does_not_end_the_box(backend: Backend) -> None:
    async with a_box(backend) as box:
        await sh(box, "echo kept > file; kill -9 -1; kill -9 1; kill -STOP 1; kill -TERM 1")
        assert (await sh(box, "cat file")).stdout == b"kept\n"


async def test_a_box_that_died_is_lost_by_the_policy(backend: Backend) -> None:
    async with a_box(backend) as box:
        if isinstance(box, BubblewrapBox):
            os.kill(box.pid, signal.SIGKILL)
        elif isinstance(box, DockerBox):
            box.container.kill()
        await asyncio.sleep(0.2)
        for _ in range(2):
            with pytest.raises(SandboxLost, match="policy's failure"):
                await sh(box, "true")


async def test_a_box_ends_with_its_lifetime(backend: Backend) -> None:
    async with a_box(backend, lifetime_seconds=6.0) as box:
        with pytest.raises(InfraError, match="lifetime"):
            await sh(box, "sleep 6543", seconds=30.0)
        with pytest.raises(InfraError, match="lifetime"):
            await sh(box, "true")
        rows = host_processes()
        assert "sleep 6543" not in rows


async def test_nothing_is_left_behind(backend: Backend) -> None:
    async with a_box(backend) as box:
        await sh(box, "true")  # threads and connections of the first use
    before = host_state()
    async with a_box(backend) as box:
        await sh(box, "setsid sleep 7654 & echo x > file")
        await sh(box, "sleep 7654", seconds=0.3)
        await sh(box, "setsid sleep 7654 & true")
    after = host_state()
    assert after["fds"] <= before["fds"] + 2  # the SDK keeps a connection or two open  # type: ignore[operator]
    assert (after["mounts"], after["groups"]) == (before["mounts"], before["groups"])
    rows = host_processes()
    assert "sleep 7654" not in rows
    if isinstance(box, DockerBox) and isinstance(backend, DockerBackend):
        mine = [c.name for c in backend.client.containers.list(all=True) if c.labels.get("bessemer.pid") == str(os.getpid())]
        assert not mine
        assert box.container.name not in mine


OWNER = """
import asyncio, sys, time
from environments.sandbox import open_backend
from data_contracts.config import SandboxConfig
from data_contracts.records import SandboxSpec
from data_contracts.protocols import ExecRequest
async def main():
    backend = open_backend(SandboxConfig(backend=sys.argv[1]))
    box = await backend.acquire(SandboxSpec())
    await box.exec(ExecRequest(argv=("sh", "-c", "sleep 8765 &"), deadline_seconds=20))
    spawner = getattr(backend, "_spawner", None)
    print(box.id, spawner.pid if spawner else 0, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize(("kind", "both"), [("docker", False), ("bubblewrap", False), ("bubblewrap", True)])
async def test_what_a_killed_owner_leaves_is_removed(request: pytest.FixtureRequest, kind: str, both: bool) -> None:
    """Killed alone, the owner's boxes die with it (bubblewrap) or at the next sweep; killed with its spawner, at the sweep."""
    backend: Backend = request.getfixturevalue(f"{kind}_backend")
    async with a_box(backend) as bystander:
        command = [sys.executable, "-c", OWNER, backend.name]
        owner = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)
        assert owner.stdout
        _, spawner = (await asyncio.to_thread(owner.stdout.readline)).split()
        if both:
            os.kill(int(spawner), signal.SIGSTOP)
        owner.kill()
        owner.wait()
        if both:
            os.kill(int(spawner), signal.SIGKILL)
        await asyncio.sleep(0.5)
        reaped = await asyncio.to_thread(backend.reap)
        assert reaped == (1 if both or backend.name == "docker" else 0)
        rows = host_processes()
        assert "sleep 8765" not in rows
        assert (await sh(bystander, "echo fine")).stdout == b"fine\n"
        owner.stdout.close()


async def test_many_boxes_at_once(backend: Backend) -> None:
    async def one(number: int) -> bytes:
        async with a_box(backend) as box:
            await box.put_files({"n": str(number).encode()})
            return (await sh(box, "cat n")).stdout

    assert await asyncio.gather(*(one(number) for number in range(6))) == [str(number).encode() for number in range(6)]


async def test_grading_tools_are_in_the_box(backend: Backend) -> None:
    async with a_box(backend) as box:
        await box.put_files({"test_it.py": b"def test_ok(): assert 1 + 1 == 2\n"})
        result = await sh(box, "python3 -I -m pytest -q -p no:cacheprovider test_it.py")
        assert b"1 passed" in result.stdout


async def test_a_host_without_the_tools_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingRequirement, match="apt-get install -y bubblewrap"):
        await BubblewrapBackend().check()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(MissingRequirement, match=r"infra\.rootfs --docker"):
        await DockerBackend().check()


async def test_a_missing_root_file_system_is_an_infrastructure_failure(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(f"environments.sandbox.{backend.name}.rootfs_path", lambda image: tmp_path / "none", raising=False)
    monkeypatch.setattr(f"environments.sandbox.{backend.name}.image_name", lambda image: "bessemer-sandbox:none", raising=False)
    with pytest.raises(InfraError, match=r"image_missing.*python -m infra\.rootfs"):
        async with a_box(backend):
            pass


async def test_a_private_engine_setting_is_noticed(docker_backend: DockerBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    create = docker_backend.client.containers.create
    loosened = {"privileged": True, "network_mode": "host", "volumes": {"/var/run/docker.sock": {"bind": "/s", "mode": "ro"}}}
    for key, value in loosened.items():
        with monkeypatch.context() as patch:
            kind = type(docker_backend.client.containers)
            patch.setattr(
                kind,
                "create",
                lambda self, *args, _key=key, _value=value, **kw: create(*args, **{**kw, _key: _value}) if kw else None,
            )
            started = time.monotonic()
            with pytest.raises(InfraError, match="not handed out"):
                async with a_box(docker_backend):
                    pass
            assert time.monotonic() - started < 20


async def test_output_that_comes_with_the_engines_headers_is_kept(
    docker_backend: DockerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy host a command has written before the SDK reads the answer's head, which then holds its first output."""
    begin = http.client.HTTPResponse.begin

    def late(self: http.client.HTTPResponse) -> None:
        time.sleep(0.5)
        begin(self)

    async with a_box(docker_backend) as box:
        monkeypatch.setattr(http.client.HTTPResponse, "begin", late)
        assert (await sh(box, "echo first; sleep 2; echo last")).stdout == b"first\nlast\n"


def test_capabilities_are_declared(bubblewrap_backend: Backend, docker_backend: Backend) -> None:
    for backend in (bubblewrap_backend, docker_backend):
        assert backend.capabilities >= {"exec", "files", "freeze", "isolation", "limits", "oom", "no_network"}
        assert json.dumps(sorted(backend.capabilities))


@pytest.mark.parametrize("after", [0.0, 0.02, 0.3])
async def test_a_cancelled_acquire_leaves_no_box(backend: Backend, after: float) -> None:
    before = host_state()["groups"]
    acquiring = asyncio.ensure_future(backend.acquire(SandboxSpec()))
    await asyncio.sleep(after)
    if acquiring.cancel():
        with pytest.raises(asyncio.CancelledError):
            await acquiring
    else:
        await acquiring.result().destroy()
    assert host_state()["groups"] == before
    if isinstance(backend, DockerBackend):
        mine = [c.name for c in backend.client.containers.list(all=True) if c.labels.get("bessemer.pid") == str(os.getpid())]
        assert not mine


async def test_a_spawner_that_dies_is_an_infrastructure_failure(rootfs: Path) -> None:
    backend = BubblewrapBackend()
    async with a_box(backend) as box:
        assert isinstance(box, BubblewrapBox)

        assert backend._spawner
        backend._spawner.kill()
        await asyncio.sleep(0.3)
        with pytest.raises(InfraError, match="spawner died"):
            await sh(box, "true")
        async with a_box(backend) as fresh:
            assert (await sh(fresh, "echo again")).stdout == b"again\n"
    await backend.close()

"""A script forked from an interpreter with modules imported: as isolated as an executed one, with the same result."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from data_contracts.protocols import ExecRequest, ExecResult, Preload
from environments.sandbox import preloaded
from environments.sandbox.base import Backend, Box
from environments.sandbox.bubblewrap import BubblewrapBackend
from environments.sandbox.conformance.lab import Lab, sh
from environments.sandbox.docker import DockerBackend
from environments.sandbox.owners import start_ticks

pytestmark = pytest.mark.parametrize("backend", ["bubblewrap", "docker"], indirect=True)
OPTIONS = ("-P", "-s", "-B")
PRELOAD = Preload(options=OPTIONS, modules=("json", "fractions", "no_such_module"))

LOOK = """
import json, os, sys
status = dict(row.split(":\\t", 1) for row in open("/proc/self/status").read().splitlines() if ":\\t" in row)
keys = "Uid Gid Groups NoNewPrivs Seccomp CapInh CapPrm CapEff CapBnd CapAmb SigIgn SigBlk".split()
print(json.dumps({
    "status": {key: status.get(key, "").strip() for key in keys},
    "spaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")},
    "groups": open("/proc/self/cgroup").read(), "fds": sorted(os.listdir("/proc/self/fd")), "cwd": os.getcwd(),
    "environ": dict(os.environ), "root": sorted(os.listdir("/")), "argv": sys.argv, "name": __name__,
    "mounts": sorted(row.split()[1] for row in open("/proc/self/mounts")), "parent": os.getppid(), "session": os.getsid(0),
    "umask": os.umask(0), "limits": open("/proc/self/limits").read(), "oom": open("/proc/self/oom_score_adj").read(),
    "path": sys.path, "flags": str(sys.flags), "stdin": sys.stdin.read(), "hash": hash("x"), "file": __file__,
}))
"""


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    found = request.getfixturevalue(f"{request.param}_backend")
    assert isinstance(found, Backend)
    return found


async def script(
    box: Box, source: str, *, preload: Preload | None = PRELOAD, stdin: bytes = b"", seconds: float = 20
) -> ExecResult:
    await box.put_files({"script.py": source.encode()})
    argv = ("python3", *OPTIONS, "script.py")
    return await box.exec(ExecRequest(argv=argv, deadline_seconds=seconds, stdin=stdin, preload=preload, env={"MINE": "1"}))


async def look(box: Box, preload: Preload | None) -> dict[str, object]:
    result = await script(box, LOOK, preload=preload, stdin=b"input")
    assert result.exit_code == 0, result
    found: dict[str, object] = json.loads(result.stdout)
    return found


async def test_it_sees_what_an_executed_script_sees(backend: Backend) -> None:
    async with Lab(backend).box() as box:
        executed, forked = await look(box, None), await look(box, PRELOAD)
        for seen in (executed, forked):
            assert isinstance(seen["groups"], str)
            seen["groups"] = seen["groups"].rpartition("/x")[0]  # each command has its own
            seen["session"] = seen["session"] != os.getsid(0)
        assert forked == executed
        assert forked["stdin"] == "input"
        status = forked["status"]
        assert isinstance(status, dict)
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert not any(int(status[key], 16) for key in status if key.startswith("Cap"))


async def test_a_forked_script_is_filtered_and_finds_no_module_of_ours(backend: Backend) -> None:
    source = """
import ctypes, errno, importlib.util, sys
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x10000000, 0x00020000):
    print(libc.unshare(flags), errno.errorcode[ctypes.get_errno()])
print(sorted({"entering", "preloaded", "shell_agent", "spawner"} & set(sys.modules)))
import entering
print(entering.MINE)
"""
    async with Lab(backend).box() as box:
        await box.put_files({"entering.py": b"MINE = 1"})
        result = await script(box, "import sys; sys.path.append('.')" + source)
        assert result.stdout.decode().splitlines() == ["-1 EPERM", "-1 EPERM", "[]", "1"], result


async def test_exit_codes_errors_and_time_outs_are_the_same(backend: Backend) -> None:
    sources = (
        "print('out'); import sys; sys.exit(7)", "raise SystemExit('word')", "import nothing_like_it", "syntax error",
        "import os; os._exit(3)", "import os; os.kill(os.getpid(), 9)", "x = bytearray(1 << 30)",
    )  # fmt: skip
    for source in sources:
        ends = []
        for preload in (None, PRELOAD):
            async with Lab(backend).box(memory_bytes=64 << 20) as box:
                result = await script(box, source, preload=preload)
                ends.append((result.exit_code, result.stdout, result.oom_killed, result.timed_out, bool(result.stderr)))
        assert ends[0] == ends[1], source
    async with Lab(backend).box() as box:
        result = await script(box, "import os\nif os.fork(): os.setsid\nwhile True: pass", seconds=1.0)
        assert result.timed_out
        assert (await sh(box, "ps 2>/dev/null; ls /proc | grep -c '^[0-9]'")).stdout.split()[-1] < b"6"


async def test_nothing_of_the_host_or_of_another_verdict_is_in_its_memory(backend: Backend) -> None:
    search = """
import re
found = []
with open("/proc/self/mem", "rb", 0) as memory:
    for row in open("/proc/self/maps"):
        low, high = (int(word, 16) for word in row.split()[0].split("-"))
        if row.split()[1].startswith("r") and "[v" not in row:
            try:
                memory.seek(low); data = memory.read(high - low)
            except (OSError, OverflowError): continue
            found += re.findall(b"nonce-[0-9]" + b"{6}", data)
print(sorted(set(found)))
"""
    async with Lab(backend).box() as one, Lab(backend).box() as two:
        first = await script(one, "import sys; kept = sys.stdin.read() * 100; print(len(kept))", stdin=b"nonce-" + b"123456")
        assert first.stdout == b"1200\n"
        assert (await script(two, search, stdin=b"nonce-" + b"654321")).stdout == b"[]\n"
        escapes = """
import os
for path in ("/proc/1/root/root", "/proc/self/root/root/.bashrc", "/proc/self/cwd/../root/.bashrc", "/root"):
    try: print(path, os.listdir(path) if os.path.isdir(path) else open(path).read())
    except OSError: pass
try: os.setuid(0); print("root")
except OSError: pass
try: open(f"/proc/{os.getppid()}/mem", "rb").read(1); print("parent")
except OSError: pass
try: open("/usr/bin/python3", "r+b"); print("writable")
except OSError: pass
try: os.open("/proc/self/exe", os.O_RDWR); print("writable itself")
except OSError: pass
"""
        assert (await script(two, escapes)).stdout == b""


def children(spawner: int) -> list[int]:
    """The interpreters of a spawner."""
    found = Path(f"/proc/{spawner}/task/{spawner}/children").read_text().split()
    return [int(pid) for pid in found if preloaded.LOADER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_an_interpreter_that_was_killed_is_started_again(backend: Backend) -> None:
    own = type(backend)(concurrency=4)
    assert isinstance(own, BubblewrapBackend | DockerBackend)
    async with Lab(own).box() as box:
        assert (await script(box, "print(1)")).stdout == b"1\n"
        interpreters = children(own.spawner.pid)
        assert len(interpreters) == 1
        os.kill(interpreters[0], signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert (await script(box, "print(2)")).stdout == b"2\n"
        assert (await sh(box, "echo 3")).stdout == b"3\n"
    spawner = own.spawner.pid
    await own.close()
    assert start_ticks(spawner) is None

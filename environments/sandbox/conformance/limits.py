"""Every limit is really enforced, inside the box only: a neighbour keeps working, and the box stays usable."""

from __future__ import annotations

import asyncio

from data_contracts.errors import SandboxLost
from environments.sandbox.base import SCRATCH_BYTES
from environments.sandbox.conformance.check import check, holds, same
from environments.sandbox.conformance.lab import Lab, processes, py, said, sh

MIB = 1 << 20


@check("exec", "limits")
async def memory(lab: Lab) -> None:
    """A process cannot take more memory than the box has; a box beside it, and the box itself, go on."""
    async with lab.walled_box(memory_bytes=64 * MIB) as box, lab.box() as neighbour:
        result = await py(box, "x = bytearray(1 << 30); print('taken')")
        same((result.stdout, result.exit_code), (b"", 137), "stdout and exit code of a program that takes a GiB of 64 MiB")
        same((await sh(neighbour, "echo fine")).stdout, b"fine\n", "the neighbour")
        same((await sh(box, "echo usable")).stdout, b"usable\n", "the box itself")


@check("exec", "limits")
async def memory_in_parts(lab: Lab) -> None:
    """The limit of memory is the box's, not a process's: ten processes of 16 MiB do not fit into 96 MiB."""
    program = """
import os, signal, time
ends = []
for _ in range(10):
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        held = bytearray(os.urandom(1 << 20) * 16)
        os.write(write_end, b"x"); time.sleep(3); os._exit(0)
    os.close(write_end); ends.append(read_end)
print(sum(os.read(end, 1) == b"x" for end in ends))
"""
    async with lab.walled_box(memory_bytes=96 * MIB) as box:
        result = await py(box, program)
        taken = int(result.stdout) if result.stdout.strip().isdigit() else 0
        holds(taken < 6, f"{taken} processes of 16 MiB each fit into a box of 96 MiB at once")


@check("exec", "limits")
async def memory_of_files(lab: Lab) -> None:
    """Files on the box's disk count as its memory: a disk larger than the memory does not get round the limit."""
    async with lab.walled_box(memory_bytes=32 * MIB, disk_bytes=256 * MIB) as box:
        try:
            await sh(box, "head -c 200000000 /dev/zero > full")
            size = (await sh(box, "stat -c %s full")).stdout.strip()
            holds(not size.isdigit() or int(size) <= 32 * MIB, f"{size!r} bytes of files fit into 32 MiB of memory")
        except SandboxLost:
            pass  # its own doing, and nothing of it is left


@check("exec", "limits")
async def processes_counted(lab: Lab) -> None:
    """Processes and threads beyond the limit are refused with EAGAIN, and at least half of the limit is usable."""
    program = """
import os, time
made = 0
try:
    while made < 100:
        if os.fork() == 0: time.sleep(30); os._exit(0)
        made += 1
except OSError as error: print(made, error.errno)
"""
    threads = """
import threading, time
made = 0
try:
    while made < 100:
        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
        made += 1
except RuntimeError: pass
print(made)
"""
    async with lab.walled_box(pids=20) as box:
        made, number = (await said(box, program)).split()
        holds(8 <= int(made) <= 20 and number == "11", f"{made} forks worked under a limit of 20, then errno {number}")
    async with lab.walled_box(pids=20) as box:
        made = (await said(box, threads)).strip()
        holds(8 <= int(made) <= 20, f"{made} threads worked under a limit of 20")


@check("exec", "limits")
async def fork_bomb(lab: Lab) -> None:
    """A fork bomb hits its limit, leaves its neighbour working, and is gone at its deadline."""
    async with lab.walled_box(pids=32) as box, lab.box() as neighbour:
        bomb = asyncio.ensure_future(sh(box, "b() { b | b & b; }; b; sleep 60", seconds=2.0))
        await asyncio.sleep(1.0)
        same((await sh(neighbour, "echo fine")).stdout, b"fine\n", "the neighbour")
        await bomb
        try:
            left = await processes(box)
        except SandboxLost:
            return  # the box was destroyed: nothing is left of it either
        holds(len(left) <= 3, f"{len(left)} processes are left: {left[:5]}")


@check("exec", "limits")
async def disk(lab: Lab) -> None:
    """The work folder holds its limit of bytes and not more; what is removed can be used again."""
    async with lab.walled_box(disk_bytes=4 * MIB) as box:
        for _ in range(2):
            full = await sh(box, "head -c 20M /dev/zero > big; stat -c %s big; rm big")
            holds(b"No space left" in full.stderr, f"no complaint about 20 MiB on 4 MiB: {full.stderr!r}")
            holds(3 * MIB <= int(full.stdout) <= 4 * MIB, f"{int(full.stdout)} bytes fit into 4 MiB")


@check("exec", "limits")
async def inodes(lab: Lab) -> None:
    """Empty files run out as bytes do, in the work folder and in the scratch folders."""
    program = """
import os, sys
made = 0
try:
    while made < 50000: open(os.path.join(sys.argv[1], f"f{made}"), "w").close(); made += 1
except OSError as error: print(made, error.errno)
"""
    async with lab.walled_box(disk_bytes=4 * MIB) as box:
        for folder in ("/work", "/tmp", "/dev/shm"):  # noqa: S108
            made, number = [*(await said(box, program, folder)).split(), "-", "-"][:2]
            holds(
                made.isdigit() and int(made) <= 1024 and number == "28",
                f"{folder}: {made} files were made, then errno {number}",
            )


@check("exec", "limits")
async def scratch(lab: Lab) -> None:
    """The scratch folders, /tmp and /dev/shm, have limits of their own."""
    async with lab.walled_box() as box:
        for folder in ("/tmp", "/dev/shm"):  # noqa: S108
            script = f"head -c 100M /dev/zero > {folder}/x; stat -c %s {folder}/x; rm {folder}/x"
            size = int((await sh(box, script)).stdout)
            holds(SCRATCH_BYTES // 2 <= size <= SCRATCH_BYTES, f"{size} bytes fit into {folder}, of {SCRATCH_BYTES}")


@check("exec", "limits")
async def nowhere_else(lab: Lab) -> None:
    """There is no further place to write to: every writable mount is one of the limited ones."""
    program = """
import os
for line in open("/proc/self/mounts"):
    folder = line.split()[1].replace("\\\\040", " ")
    try:
        path = os.path.join(folder, ".probe")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT)); os.unlink(path); print(folder)
    except OSError: pass
"""
    async with lab.box() as box:
        found = set((await said(box, program)).split()) - {"/dev/mqueue"}  # few and small messages, bounded by the kernel
        same(found, {"/work", "/tmp", "/dev/shm"}, "mounts that can be written")  # noqa: S108


@check("exec", "limits")
async def cpu(lab: Lab) -> None:
    """A quarter of a CPU is no more than that, for two processes together as well."""
    program = """
import os, time
def burn():
    end = time.monotonic() + 1.5
    while time.monotonic() < end: pass
if os.fork() == 0: burn(); os._exit(0)
burn(); os.wait()
times = os.times()
print(times.user + times.system + times.children_user + times.children_system)
"""
    async with lab.box(cpus=0.25) as box:
        spent = float(await said(box, program))
        holds(spent < 1.0, f"two processes spent {spent:.2f} s of CPU in 1.5 s with a limit of 0.25")


@check("exec", "limits")
async def descriptors(lab: Lab) -> None:
    """A process opens at most 1,024 files, and cannot raise that."""
    program = """
import resource
try: resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 16, 1 << 16)); print("raised")
except (ValueError, OSError): pass
held = []
try:
    while len(held) < 5000: held.append(open("/dev/null"))
except OSError: pass
made = len(held)
held.clear()
print(made)
"""
    async with lab.box() as box:
        made = await said(box, program)
        holds(made.strip().isdigit() and int(made) <= 1024, f"opened {made!r} files")


@check("exec", "limits")
async def no_core_dumps(lab: Lab) -> None:
    """A crash leaves no core dump, in the box or for the host to write."""
    async with lab.box() as box:
        result = await sh(box, "ulimit -c; ulimit -c unlimited 2>/dev/null && ulimit -c; sh -c 'kill -SEGV $$'; ls")
        same(result.stdout, b"0\n", "the limit of core dumps, and the files left")


@check("exec", "limits")
async def recursion(lab: Lab) -> None:
    """Recursion without end costs its own process only."""
    async with lab.walled_box() as box:
        result = await py(box, "import sys; sys.setrecursionlimit(10**9)\ndef f(): return [f()]\nf()")
        holds(result.exit_code not in {0, None}, f"exit code {result.exit_code}")
        same((await sh(box, "echo usable")).stdout, b"usable\n", "the box afterwards")

"""What a policy may do to its box so that the next step of the control plane fails, and a bad score becomes an outage.

Every end but an `InfraError` is fine: the box goes on, or it is lost by the policy's own doing (`SandboxLost`).
"""

from __future__ import annotations

import time

from data_contracts.errors import SandboxLost
from environments.sandbox.base import Box
from environments.sandbox.conformance.check import check, holds, same
from environments.sandbox.conformance.lab import Lab, py, sh

_SIGNALS = """
import os, signal
if os.fork():
    os._exit(0)
os.setsid()
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            try:
                os.kill(int(name), signal.SIG{kind})
            except OSError:
                pass
"""
_SEGMENTS = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
while (segment := libc.shmget(0, ctypes.c_size_t(1 << 20), 0o1600)) >= 0:
    ctypes.memset(libc.shmat(segment, None, 0), 1, 1 << 20)
"""
MIB = 1 << 20


async def goes_on(box: Box) -> None:
    """Put, exec, freeze and collect all come to an end, and an unchanged file is what it was."""
    await box.put_files({"answer": b"x"})
    await sh(box, "echo hi", seconds=2.0)  # it may well be stopped or killed, which is a result
    await box.freeze()
    same([item.content for item in await box.collect(("answer",), max_bytes=10)], [b"x"], "the file collected")


async def _daemon(lab: Lab, kind: str) -> None:
    began = time.monotonic()
    async with lab.walled_box() as box:
        await py(box, _SIGNALS.replace("{kind}", kind))
        await goes_on(box)
    holds(time.monotonic() - began < 60, f"the steps took {time.monotonic() - began:.0f} s")


@check("exec", "files", "freeze", "isolation")
async def stops_everything(lab: Lab) -> None:
    """A daemon that stops every process it can see blocks no step."""
    await _daemon(lab, "STOP")


@check("exec", "files", "freeze", "isolation")
async def kills_everything(lab: Lab) -> None:
    """A daemon that kills every process it can see blocks no step."""
    await _daemon(lab, "KILL")


@check("exec", "files", "isolation")
async def kills_init(lab: Lab) -> None:
    """Killing, stopping and terminating all processes and the first one leaves the box and its files alone."""
    async with lab.walled_box() as box:
        await sh(box, "echo kept > file; kill -9 -1; kill -9 1; kill -STOP 1; kill -TERM 1")
        same((await sh(box, "kill -9 1; kill -STOP 1; kill -TERM 1; cat file")).stdout, b"kept\n", "the file")


@check("exec", "files", "freeze", "limits")
async def memory_without_process(lab: Lab) -> None:
    """Shared memory that outlives its process does not fill the box for good."""
    async with lab.walled_box(memory_bytes=96 * MIB) as box:
        await py(box, _SEGMENTS)
        same((await sh(box, "echo hi")).stdout, b"hi\n", "a command afterwards")
        await goes_on(box)


@check("exec", "files", "freeze", "limits")
async def full(lab: Lab) -> None:
    """A box filled with files to its memory limit is no failure, or the policy's own."""
    async with lab.walled_box(memory_bytes=24 * MIB, disk_bytes=64 * MIB) as box:
        try:
            await box.put_files({"answer": b"x"})
            await sh(box, "head -c 60000000 /dev/zero > full; head -c 30000000 /dev/zero > /tmp/full; true")
            await box.freeze()
            same([item.name for item in await box.collect(("answer",), max_bytes=10)], ["answer"], "files collected")
        except SandboxLost:
            pass


@check("exec", "files", "freeze", "limits")
async def no_room_for_processes(lab: Lab) -> None:
    """A box whose limit of processes is used up by daemons is no failure, or the policy's own."""
    async with lab.walled_box(pids=16) as box:
        try:
            await box.put_files({"answer": b"x"})
            await sh(box, "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18; do setsid sleep 60 & done; true")
            await sh(box, "echo hi")
            await box.freeze()
            same([item.content for item in await box.collect(("answer",), max_bytes=10)], [b"x"], "the file collected")
        except SandboxLost:
            pass


@check("exec", "files", "freeze", "isolation")
async def moved_folders(lab: Lab) -> None:
    """Folders that are renamed and replaced by links without end are no way out of the work folder."""
    async with lab.walled_box() as box:
        await box.put_files({"a/b/answer": b"x", "keep": b"y"})
        await sh(box, "(while :; do mv a z; ln -s /etc a; rm a; mv z a; done) > /dev/null 2>&1 & sleep 0.5")
        await box.freeze()
        found = await box.collect(("a/b/answer", "a/passwd", "keep"), max_bytes=10)
        holds(all(item.content in {b"x", b"y"} for item in found), f"collected {[item.name for item in found]} from elsewhere")


@check("exec", "files", "freeze", "isolation")
async def closed_folder(lab: Lab) -> None:
    """A work folder that its owner may not enter any more, and deep nesting in it, are no outage: nothing is found there."""
    async with lab.walled_box() as box:
        await sh(box, "mkdir -p d/d/d/d/d/d; echo x > answer; chmod 0 /work")
        await sh(box, "echo hi")
        await box.freeze()
        same(await box.collect(("answer", "d/d/x"), max_bytes=10), (), "files collected")

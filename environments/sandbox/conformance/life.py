"""The life of a box: open, frozen, destroyed; single use, with an end, and apart from every other box."""

from __future__ import annotations

import asyncio

from data_contracts.errors import CapabilityError, InfraError, InputError
from data_contracts.records import SandboxSpec
from environments.sandbox.conformance.check import check, holds, refused, same
from environments.sandbox.conformance.lab import Lab, marker, processes, sh, until


@check("exec", "files", "freeze")
async def frozen_files(lab: Lab) -> None:
    """After the freeze nothing changes a file any more: collecting twice gives the same bytes."""
    async with lab.box() as box:
        await sh(box, "(while :; do date +%N >> log; echo x > late; done) > /dev/null 2>&1 & sleep 0.3; echo x >> log")
        await box.freeze()
        first = await box.collect(("log", "late"), max_bytes=1 << 24)
        await asyncio.sleep(0.3)
        holds(first, "nothing was written before the freeze")
        holds(await box.collect(("log", "late"), max_bytes=1 << 24) == first, "a file changed after the freeze")


@check("exec", "freeze", "isolation")
async def frozen_processes(lab: Lab) -> None:
    """A freeze ends a running command and every daemon, whatever session it is in."""
    async with lab.box() as box:
        await sh(box, "setsid sh -c 'while :; do date +%N >> log; done' > /dev/null 2>&1 &")
        running = asyncio.ensure_future(sh(box, "while :; do date +%N >> log; sleep 0.01; done"))
        await asyncio.sleep(0.7)
        await box.freeze()
        first = await box.collect(("log",), max_bytes=1 << 24)
        await asyncio.wait({running}, timeout=15)
        holds(running.done(), "the command goes on after the freeze")
        running.exception()
        holds(first and await box.collect(("log",), max_bytes=1 << 24) == first, "the file changed after the freeze")


@check("exec", "files", "freeze")
async def frozen(lab: Lab) -> None:
    """A frozen box refuses commands and files; freezing again changes nothing."""
    async with lab.box() as box:
        await box.freeze()
        await box.freeze()
        with refused(InputError, "frozen", "a command in a frozen box"):
            await sh(box, "true")
        with refused(InputError, "frozen", "a file for a frozen box"):
            await box.put_files({"x": b""})


@check("files", "freeze")
async def freeze_first(lab: Lab) -> None:
    """Files are collected from a frozen box only."""
    async with lab.box() as box:
        with refused(InputError, "frozen box only", "collecting from an open box"):
            await box.collect(("x",), max_bytes=10)


@check("exec", "files", "freeze")
async def single_use(lab: Lab) -> None:
    """A destroyed box refuses everything, and may be destroyed again; its backend forgets it."""
    async with lab.box() as box:
        await box.destroy()
        await box.destroy()
        calls = {
            "a command": sh(box, "true"), "a file": box.put_files({"x": b""}), "a freeze": box.freeze(),
            "collecting": box.collect(("x",), max_bytes=1),
        }  # fmt: skip
        for what, call in calls.items():
            with refused(InputError, "", f"{what} after destroy"):
                await call
        holds(box not in lab.backend.boxes, "the backend still lists the box")


@check("exec", "isolation")
async def lifetime(lab: Lab) -> None:
    """A box that outlives its lifetime ends, as an infrastructure failure: never the policy's, never a silent success."""
    async with lab.box(lifetime_seconds=4.0) as box:
        with refused(InfraError, "lifetime", "a command beyond the lifetime"):
            await sh(box, "sleep 60")
        with refused(InfraError, "lifetime", "a command after the lifetime"):
            await sh(box, "true")


@check("exec", "isolation")
async def apart(lab: Lab) -> None:
    """Two boxes share no file, no process and no namespace; killing everything in one leaves the other alone."""
    mark = marker()
    async with lab.walled_box() as one, lab.walled_box() as two:
        await sh(one, "echo mine > /work/x; echo mine > /tmp/x; echo mine > /dev/shm/x")
        running = asyncio.ensure_future(sh(one, f"sleep {mark}", seconds=60.0))

        async def runs() -> bool:
            return any(mark in row for row in await processes(one))

        holds(await until(runs), "the command of the first box is not seen in it")
        same((await sh(two, "cat /work/x /tmp/x /dev/shm/x 2>/dev/null")).stdout, b"", "files of the first box, in the second")
        same([row for row in await processes(two) if mark in row], [], "processes of the first box, in the second")
        spaces = "readlink /proc/self/ns/pid /proc/self/ns/net /proc/self/ns/mnt /proc/self/ns/ipc /proc/self/ns/uts"
        first, second = [set((await sh(box, spaces)).stdout.split()) for box in (one, two)]
        same(first & second, set(), "namespaces of both boxes")
        await sh(two, "kill -9 -1")
        holds(await runs() and not running.done(), "kill -9 -1 in the second box ended a command of the first")
        running.cancel()
        await asyncio.wait({running})


@check("exec", "files")
async def many(lab: Lab) -> None:
    """Eight boxes at once each see their own file."""

    async def one(number: int) -> bytes:
        async with lab.box() as box:
            await box.put_files({"n": str(number).encode()})
            return (await sh(box, "cat n")).stdout

    found = await asyncio.gather(*(one(number) for number in range(8)))
    same(found, [str(number).encode() for number in range(8)], "what the boxes read")


@check("exec")
async def commands_at_once(lab: Lab) -> None:
    """Commands that run at once in one box do not mix their output."""
    async with lab.box() as box:
        script = "for i in 1 2 3 4 5; do echo {0}; sleep 0.05; done"
        results = await asyncio.gather(*(sh(box, script.format(number)) for number in range(4)))
        same([item.stdout for item in results], [f"{number}\n".encode() * 5 for number in range(4)], "stdout of each")


@check("isolation")
async def unknown_image(lab: Lab) -> None:
    """An image that nobody declared is refused with the declared ones, never replaced by another."""
    with refused(CapabilityError, "choose one of", "the image 'no-such-image'"):
        await lab.backend.acquire(SandboxSpec(image="no-such-image"))

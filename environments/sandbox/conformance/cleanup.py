"""Destroying a box leaves nothing on the host: no process, group, namespace, container, mount, descriptor or file."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

from data_contracts.records import SandboxSpec
from environments.sandbox.conformance import hostview
from environments.sandbox.conformance.check import NotHere, check, holds, same
from environments.sandbox.conformance.lab import Lab, marker, sh, until

_DAEMONS = "setsid sleep {0} & nohup sleep {0} & sleep {0} & echo x > file; sleep {0}"
BOXES = 4
"""A descriptor or file lost per box shows as this many; less is the engine's client keeping a connection."""


async def inhabited(lab: Lab, mark: str) -> tuple[set[Path], set[str], set[str], float]:
    """Fill a box, look at it from the host while it lives (groups, namespaces, mounts, the host's uptime), and destroy it."""
    before = await asyncio.to_thread(hostview.mounts)
    async with lab.box() as box:
        running = asyncio.ensure_future(sh(box, _DAEMONS.format(mark), seconds=60.0))

        async def runs() -> bool:
            return bool(await asyncio.to_thread(hostview.pids, mark))

        if not await until(runs, seconds=5.0):
            raise NotHere("the box's processes are not visible from here (a remote engine, or a kernel of its own)")
        found = await asyncio.to_thread(hostview.pids, mark)
        groups = {path for pid in found for path in await asyncio.to_thread(hostview.groups_of, pid)}
        namespaces = {link for pid in found for link in await asyncio.to_thread(hostview.namespaces_of, pid)}
        mounted, alive = await asyncio.to_thread(hostview.mounts) - before, time.clock_gettime(time.CLOCK_BOOTTIME)
    with suppress(Exception):
        await running
    return groups, namespaces, mounted, alive


@check("exec", "isolation")
async def processes(lab: Lab) -> None:
    """No process of a destroyed box is left, whatever session it made and whatever signal it ignored."""
    mark = marker()
    await inhabited(lab, mark)
    same(await asyncio.to_thread(hostview.pids, mark), [], "processes left")


@check("exec")
async def children(lab: Lab) -> None:
    """A background child of a command ends with the box."""
    mark = marker()
    async with lab.box() as box:
        await sh(box, f"sleep {mark} > /dev/null 2>&1 & true")

    async def gone() -> bool:
        return not await asyncio.to_thread(hostview.pids, mark)

    holds(await until(gone, seconds=5.0), "the child is still running")


@check("exec", "isolation")
async def groups(lab: Lab) -> None:
    """The control groups and namespaces of a destroyed box are gone, and no descriptor of ours holds one."""
    left, namespaces, _, alive = await inhabited(lab, marker())
    holds(left or namespaces, "the box had neither control groups nor namespaces of its own")

    async def gone() -> bool:
        return not [path for path in left if await asyncio.to_thread(path.is_dir)]

    holds(await until(gone, seconds=5.0), f"control groups are left: {sorted(map(str, left))[:3]}")
    same(await asyncio.to_thread(hostview.holders, namespaces, born_before=alive), [], "holders of the box's namespaces")


@check("exec", "isolation")
async def mounts(lab: Lab) -> None:
    """What was mounted on the host for a box is not mounted any more."""
    _, _, mounted, _ = await inhabited(lab, marker())

    async def gone() -> bool:
        return not mounted & await asyncio.to_thread(hostview.mounts)

    holds(await until(gone, seconds=20.0), f"still mounted: {sorted(mounted)[:3]}")


@check("exec", alone=True)
async def containers(lab: Lab) -> None:
    """No container of this owner is left after its boxes are destroyed, and the backend lists no box."""
    async with lab.box() as box:
        await sh(box, "true")
        alive = await asyncio.to_thread(hostview.containers, lab.backend)
        holds(lab.backend.name != "docker" or alive, "the box's container does not carry its owner's label")
    same(box in lab.backend.boxes, False, "the backend lists the box")
    left = await asyncio.to_thread(hostview.containers, lab.backend)
    same(alive & left if lab.backend.boxes else left, set(), "containers left")


@check("exec", alone=True)
async def descriptors(lab: Lab) -> None:
    """A box keeps no descriptor of its owner's, after timeouts, daemons and large output as well."""

    async def one() -> None:
        async with lab.box() as box:
            await sh(box, f"sleep {marker()}", seconds=0.3)
            await sh(box, "sleep 5 > /dev/null 2>&1 & head -c 300000 /dev/zero", stdin=b"x" * 300_000)

    await one()  # threads and connections of the first use
    before = await asyncio.to_thread(hostview.descriptors)
    for _ in range(BOXES):
        await one()
    grown = await asyncio.to_thread(hostview.descriptors) - before
    holds(grown < BOXES, f"{grown} descriptors more after {BOXES} boxes")


@check("exec", "files", "freeze", alone=True)
async def scratch_files(lab: Lab) -> None:
    """No temporary file or folder is left on the host."""
    before = await asyncio.to_thread(hostview.scratch_files)
    async with lab.box() as box:
        await box.put_files({"a/x": b"x"})
        await sh(box, "echo y > y; mkdir -p d/e; echo z > d/e/z; chmod 0 d")
        await box.freeze()
        await box.collect(("a/x", "y"), max_bytes=100)
    same(await asyncio.to_thread(hostview.scratch_files) - before, set(), "files of Bessemer in the folder for temporary ones")


@check("exec")
async def failures(lab: Lab) -> None:
    """A block that fails with its box open destroys the box on the way out."""
    mark = marker()
    with suppress(ZeroDivisionError):
        async with lab.box() as box:
            await sh(box, f"sleep {mark} > /dev/null 2>&1 & true")
            raise ZeroDivisionError
    same((box in lab.backend.boxes, await asyncio.to_thread(hostview.pids, mark)), (False, []), "listed, and processes left")


@check("exec", alone=True)
async def cancelled_acquire(lab: Lab) -> None:
    """A box whose request is cancelled, at whatever moment, is not left behind."""
    known = set(lab.backend.boxes)
    seen = await asyncio.to_thread(hostview.containers, lab.backend)
    owned = await asyncio.to_thread(hostview.own_groups)
    for after in (0.0, 0.02, 0.2):
        acquiring = asyncio.ensure_future(lab.backend.acquire(SandboxSpec()))
        await asyncio.sleep(after)
        acquiring.cancel()
        await asyncio.wait({acquiring})
        if not acquiring.cancelled():
            await acquiring.result().destroy()
        same(set(lab.backend.boxes) - known, set(), f"boxes listed, cancelled after {after} s")
        same(await asyncio.to_thread(hostview.containers, lab.backend) - seen, set(), f"containers, cancelled after {after} s")
        same(await asyncio.to_thread(hostview.own_groups) - owned, set(), f"control groups, cancelled after {after} s")


@check("exec")
async def sweep(lab: Lab) -> None:
    """The sweep for what dead owners left spares the boxes of the living."""
    async with lab.box() as box:
        await asyncio.to_thread(lab.backend.reap)
        same((await sh(box, "echo alive")).stdout, b"alive\n", "a command after the sweep")

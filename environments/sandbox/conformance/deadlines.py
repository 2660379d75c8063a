"""The deadline is wall clock, kept from outside, and takes the whole process tree with it."""

from __future__ import annotations

import asyncio
import time

from data_contracts.errors import InputError
from data_contracts.protocols import ExecRequest
from environments.sandbox.base import Box
from environments.sandbox.conformance.check import check, holds, refused, same
from environments.sandbox.conformance.lab import Lab, marker, processes, py, sh

SLACK = 15.0
"""Seconds within which a killed command must have come back, on a busy host."""
_DAEMONS = "setsid sh -c 'setsid sleep {0} & sleep {0}' & (trap '' TERM; sleep {0}) & nohup sleep {0} & sleep {0}"
_BEATS = "while :; do echo x >> beat; sleep 0.02; done"


async def timed(box: Box, script: str, *, seconds: float) -> None:
    """The command reaches its deadline and is back soon after."""
    began = time.monotonic()
    result = await sh(box, script, seconds=seconds)
    took = time.monotonic() - began
    same((result.timed_out, result.exit_code), (True, None), "timed out, and exit code")
    holds(seconds <= took < seconds + SLACK, f"a deadline of {seconds} s took {took:.1f} s")


async def beats(box: Box) -> int:
    return int((await sh(box, "wc -c < beat")).stdout or b"-1")


@check("exec", "isolation")
async def whole_tree(lab: Lab) -> None:
    """A timeout kills daemons in sessions of their own, and children that ignore signals; the box stays usable."""
    async with lab.box() as box:
        mark = marker()
        await timed(box, _DAEMONS.format(mark), seconds=1.0)
        same([row for row in await processes(box) if mark in row], [], "processes that outlive the timeout")
        same((await sh(box, "echo usable")).stdout, b"usable\n", "a command after the timeout")


@check("exec")
async def children(lab: Lab) -> None:
    """After a timeout a child of the command does nothing any more."""
    async with lab.box() as box:
        await timed(box, f"({_BEATS}) & sleep 60", seconds=1.0)
        before = await beats(box)
        await asyncio.sleep(0.3)
        holds(before > 0, "the child never ran")
        same(await beats(box), before, "beats of the child after the timeout")


@check("exec")
async def ignored_signals(lab: Lab) -> None:
    """A command that ignores every signal it can ends at its deadline."""
    async with lab.box() as box:
        await timed(box, "trap '' TERM INT HUP QUIT; while :; do sleep 60; done", seconds=0.8)


@check("exec")
async def stopped(lab: Lab) -> None:
    """A command that stops itself ends at its deadline."""
    async with lab.box() as box:
        await timed(box, "kill -STOP $$; sleep 60", seconds=0.8)


@check("exec")
async def endless_output(lab: Lab) -> None:
    """Endless output on one line ends at the deadline, within the cap."""
    async with lab.box() as box:
        began = time.monotonic()
        result = await sh(box, "yes | tr -d '\\n'", seconds=1.0, cap=4096)
        same((result.timed_out, result.exit_code, result.stdout_truncated), (True, None, True), "timed out, code, truncated")
        holds(len(result.stdout) <= 4096, f"{len(result.stdout)} bytes came back under a cap of 4096")
        holds(time.monotonic() - began < 1.0 + SLACK, f"it took {time.monotonic() - began:.1f} s")


@check("exec")
async def busy_loop(lab: Lab) -> None:
    """A command that only computes ends at its deadline, and the owner's event loop is never held."""
    async with lab.box() as box:
        command = asyncio.ensure_future(py(box, "while True: pass", seconds=1.0))
        longest, last = 0.0, time.monotonic()
        while not command.done():
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        same((await command).timed_out, True, "timed out")
        holds(longest < 2.0, f"the event loop stood still for {longest:.1f} s")


@check("exec")
async def background(lab: Lab) -> None:
    """A background child does not hold a command that has ended."""
    async with lab.box() as box:
        began = time.monotonic()
        result = await sh(box, "sleep 60 & echo done")
        same((result.exit_code, result.stdout, result.timed_out), (0, b"done\n", False), "code, stdout, timed out")
        holds(time.monotonic() - began < SLACK, f"it took {time.monotonic() - began:.1f} s")


@check("exec")
async def talking_child(lab: Lab) -> None:
    """A command that ended in time did not time out because its child goes on writing."""
    async with lab.box() as box:
        result = await sh(box, "(while sleep 0.05; do echo beat; done) & echo done", seconds=3.0)
        same((result.exit_code, result.timed_out), (0, False), "code and timed out")
        holds(b"done\n" in result.stdout, f"the command's own output is missing: {result.stdout!r}")


@check("exec")
async def cancelled(lab: Lab) -> None:
    """A command whose caller is cancelled is killed."""
    async with lab.box() as box:
        command = asyncio.ensure_future(sh(box, _BEATS))
        await asyncio.sleep(1.0)
        command.cancel()
        await asyncio.wait({command})
        holds(command.cancelled(), "the caller's cancellation did not come through")
        await asyncio.sleep(0.3)
        before = await beats(box)
        await asyncio.sleep(0.3)
        holds(before > 0, "the command never ran")
        same(await beats(box), before, "beats after the cancellation")


@check("exec")
async def finite(lab: Lab) -> None:
    """A deadline that is endless, zero, negative or no number is refused."""
    async with lab.box() as box:
        for seconds in (float("inf"), float("nan"), 0.0, -1.0):
            with refused(InputError, "deadline", f"a deadline of {seconds}"):
                await box.exec(ExecRequest(argv=("true",), deadline_seconds=seconds))


@check("exec", "isolation")
async def reaped(lab: Lab) -> None:
    """Orphans that end are reaped: no zombie stays to eat the limit of processes."""
    async with lab.box() as box:
        await sh(box, "for i in 1 2 3 4 5 6 7 8 9 10; do (sleep 0.1 &) ; done; sleep 0.5")
        states = await sh(box, "sleep 0.2; grep -h '^State' /proc/[0-9]*/status | grep -c Z; true")
        same(states.stdout.strip(), b"0", "zombies in the box")

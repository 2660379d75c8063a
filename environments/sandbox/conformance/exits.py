"""How a command ended: by itself, by a signal, by the deadline, by its memory limit, or not begun. Never mixed up."""

from __future__ import annotations

from data_contracts.protocols import ExecRequest, ExecResult
from environments.sandbox.conformance.check import check, holds, same
from environments.sandbox.conformance.lab import SECONDS, Lab, py, sh


def how(result: ExecResult) -> tuple[int | None, bool, bool]:
    return result.exit_code, result.timed_out, result.oom_killed


@check("exec")
async def codes(lab: Lab) -> None:
    """Exit codes come through; those that look like a timeout (124) or a kill (137, 143) are not taken for one."""
    async with lab.box() as box:
        for code in (0, 1, 124, 137, 143, 255):
            same(how(await sh(box, f"exit {code}")), (code, False, False), f"exit {code}: code, timed out, out of memory")


@check("exec")
async def signals(lab: Lab) -> None:
    """A command that dies by a signal ends with 128 and its number: 137 for KILL, 143 for TERM, 139 for SEGV."""
    async with lab.box() as box:
        for signal, code in (("KILL", 137), ("TERM", 143), ("SEGV", 139)):
            same(how(await sh(box, f"kill -{signal} $$")), (code, False, False), f"{signal}: code, timed out, out of memory")


@check("exec")
async def timeout(lab: Lab) -> None:
    """A command that reaches its deadline has no exit code, is flagged, and keeps what it had written."""
    async with lab.box() as box:
        result = await sh(box, "echo begun; echo worse >&2; sleep 60", seconds=1.0)
        same(how(result), (None, True, False), "code, timed out, out of memory")
        same((result.stdout, result.stderr), (b"begun\n", b"worse\n"), "stdout and stderr")


@check("exec", "oom")
async def out_of_memory(lab: Lab) -> None:
    """A command killed for its memory is 137 and flagged; one that is killed otherwise, or calm, is not flagged."""
    async with lab.walled_box(memory_bytes=64 << 20) as box:
        same(how(await py(box, "x = bytearray(1 << 30)")), (137, False, True), "bomb: code, timed out, out of memory")
        same(how(await sh(box, "kill -9 $$")), (137, False, False), "killed: code, timed out, out of memory")
        same(how(await sh(box, "true")), (0, False, False), "calm: code, timed out, out of memory")


@check("exec", "oom")
async def child_out_of_memory(lab: Lab) -> None:
    """A child's memory kill is flagged although its parent goes on and ends well."""
    async with lab.walled_box(memory_bytes=64 << 20) as box:
        result = await sh(box, "python3 -I -c 'x = bytearray(1 << 30)'; echo survived")
        same((result.stdout, how(result)), (b"survived\n", (0, False, True)), "stdout; code, timed out, out of memory")


@check("exec")
async def not_found(lab: Lab) -> None:
    """A command that does not exist is 127 with a message, by name and by path."""
    async with lab.box() as box:
        for name in ("no-such-command", "/usr/bin/no-such-command"):
            result = await box.exec(ExecRequest(argv=(name,), deadline_seconds=SECONDS))
            same(how(result), (127, False, False), f"{name}: code, timed out, out of memory")
            holds(result.stderr, f"{name}: nothing on stderr says why")


@check("exec", "files")
async def not_executable(lab: Lab) -> None:
    """A file without the right to execute, and a folder, are a result (126 or 127) with a message."""
    async with lab.box() as box:
        await box.put_files({"plain": b"#!/bin/sh\necho run\n", "folder/x": b""})
        for name in ("plain", "folder"):
            result = await box.exec(ExecRequest(argv=(f"{box.spec.workdir}/{name}",), deadline_seconds=SECONDS))
            holds(result.exit_code in {126, 127}, f"{name}: exit code {result.exit_code}")
            holds(result.stderr, f"{name}: nothing on stderr says why")

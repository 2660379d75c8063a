"""What a caller may not ask for is refused before anything runs, with a message that names it."""

from __future__ import annotations

from data_contracts.errors import CapabilityError, InputError
from data_contracts.protocols import ExecRequest
from data_contracts.records import SandboxLimits, SandboxSpec
from environments.sandbox.conformance.check import check, refused
from environments.sandbox.conformance.lab import Lab


@check()
async def capability(lab: Lab) -> None:
    """A need that the backend does not offer is refused by name."""
    with refused(CapabilityError, "teleport", "a box that needs 'teleport'"):
        await lab.backend.acquire(SandboxSpec(needs=("exec", "teleport")))


@check()
async def workdir(lab: Lab) -> None:
    """Only a folder that the root file system sets aside can be the work folder."""
    for folder in ("/etc", "/work/..", "work", "/", "/work/sub"):
        with refused(CapabilityError, "workdir", f"the work folder {folder!r}"):
            await lab.backend.acquire(SandboxSpec(workdir=folder))


@check()
async def limits(lab: Lab) -> None:
    """A limit that cannot be enforced (zero of anything) is refused, not ignored."""
    for wrong in (
        SandboxLimits(pids=0), SandboxLimits(memory_bytes=0), SandboxLimits(disk_bytes=0), SandboxLimits(cpus=0.0),
        SandboxLimits(lifetime_seconds=0.0),
    ):  # fmt: skip
        with refused(CapabilityError, "limits", f"{wrong}"):
            await lab.backend.acquire(SandboxSpec(limits=wrong))


@check()
async def clock(lab: Lab) -> None:
    """A clock that is no date and time with a zone is refused, and the message says how to write one."""
    for wrong in ("yesterday", "2025-01-15T12:00:00", "2025-13-01T00:00:00Z", "1950-01-01T00:00:00Z", ""):
        with refused(InputError, "sandbox.clock", f"the clock {wrong!r}"):
            await lab.backend.acquire(SandboxSpec(clock=wrong))


@check("exec")
async def variables(lab: Lab) -> None:
    """A variable whose name or value the kernel could misread is refused."""
    async with lab.box() as box:
        for name, value in (("A B", "x"), ("A=B", "x"), ("", "x"), ("A\n", "x"), ("A", "a\0b")):
            with refused(InputError, "environment variable", f"the variable {name!r}={value!r}"):
                await box.exec(ExecRequest(argv=("true",), deadline_seconds=10, env={name: value}))


@check("exec")
async def cap(lab: Lab) -> None:
    """A negative cap on output is refused."""
    async with lab.box() as box:
        with refused(InputError, "max_output_bytes", "a cap of -1"):
            await box.exec(ExecRequest(argv=("true",), deadline_seconds=10, max_output_bytes=-1))

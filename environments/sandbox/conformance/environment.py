"""What a command finds around it: its variables, its folder, its locale, time zone and hash seed; the same every time."""

from __future__ import annotations

import os

from data_contracts.protocols import ExecRequest
from environments.sandbox.base import Box
from environments.sandbox.conformance.check import check, holds, same
from environments.sandbox.conformance.lab import SECONDS, Lab, marker, sh

FIXED = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
OURS = {*FIXED, "PATH", "HOME", "TMPDIR", "USER"}


async def variables(box: Box, **extra: str) -> dict[str, str]:
    result = await box.exec(ExecRequest(argv=("/usr/bin/env", "-0"), deadline_seconds=SECONDS, env=extra))
    rows = result.stdout.decode(errors="replace").split("\0")
    return {name: value for name, _, value in (row.partition("=") for row in rows if row)}


async def python(box: Box, program: str) -> str:
    """As candidate code runs: with the variables, not isolated from them."""
    result = await box.exec(ExecRequest(argv=("python3", "-c", program), deadline_seconds=SECONDS))
    holds(result.exit_code == 0, f"python3 ended with {result.exit_code}: {result.stderr[-300:]!r}")
    return result.stdout.decode(errors="replace").strip()


@check("exec")
async def allowed(lab: Lab) -> None:
    """A command sees our fixed variables, the problem's and the request's, and none of the owner's."""
    name = f"OWNER_SECRET_{marker()}"
    os.environ[name] = "hunter2"
    try:
        async with lab.box(env={"FROM_SPEC": "a=b c"}) as box:
            found = await variables(box, FROM_REQUEST="1")
    finally:
        del os.environ[name]
    same(sorted(found), sorted({*OURS, "FROM_SPEC", "FROM_REQUEST"}), "names of variables")


@check("exec")
async def values(lab: Lab) -> None:
    """Values arrive as they are (spaces, lines, non-ASCII, empty); the request's wins over the problem's."""
    async with lab.box(env={"A": "spec", "B": "spec"}) as box:
        found = await variables(box, B="request", C='é 漢\n$HOME="x"', D="")
        same([found.get(name) for name in "ABCD"], ["spec", "request", 'é 漢\n$HOME="x"', ""], "A, B, C and D")


@check("exec")
async def fixed(lab: Lab) -> None:
    """Time zone, locale and hash seed are fixed."""
    async with lab.box() as box:
        found = await variables(box)
        same({name: found.get(name) for name in FIXED}, FIXED, "variables")


@check("exec")
async def repeatable(lab: Lab) -> None:
    """Hashes, the order of sets, the zone, the text encoding and the umask are equal in two boxes."""
    program = (
        "import os, sys, time; mask = os.umask(0)\n"
        "print(hash('seed'), list({'a', 'b', 'c', 'd'}), time.tzname, time.localtime(0).tm_hour,"
        " sys.getdefaultencoding(), sys.stdout.encoding, sys.getfilesystemencoding(), oct(mask))"
    )
    async with lab.box() as one, lab.box() as two:
        first, second = await python(one, program), await python(two, program)
        same(second, first, "what the second box prints")
        holds("('UTC', 'UTC') 0 utf-8 utf-8 utf-8" in first, f"zone and encodings are not UTC and UTF-8: {first}")


@check("exec", "files")
async def folder(lab: Lab) -> None:
    """A command runs in the work folder, or where the request says: below it, or by a whole path."""
    async with lab.box() as box:
        await box.put_files({"sub/deep/here": b"x"})
        for cwd, shown in ((None, "sub\n"), ("sub", "deep\n"), ("sub/deep", "here\n"), ("/work/sub", "deep\n")):
            result = await box.exec(ExecRequest(argv=("ls",), deadline_seconds=SECONDS, cwd=cwd))
            same(result.stdout.decode(), shown, f"what lies in the folder of cwd={cwd!r}")


@check("exec", "isolation")
async def other_workdir(lab: Lab) -> None:
    """A box may have another of the root file system's work folders, and is at home there."""
    async with lab.box(workdir="/workspace") as box:
        await box.put_files({"x": b"1"})
        result = await sh(box, "pwd; cat x; echo 2 > y && cat y; touch /work/z 2>/dev/null && echo open")
        same(result.stdout, b"/workspace\n12\n", "its folder, a file put, a file written, and /work as no work folder")


@check("exec")
async def missing_folder(lab: Lab) -> None:
    """A working folder that does not exist is a result with a message, as a shell's cd would be."""
    async with lab.box() as box:
        result = await box.exec(ExecRequest(argv=("true",), deadline_seconds=SECONDS, cwd="absent"))
        holds(result.exit_code not in {0, None}, f"exit code {result.exit_code}")
        holds(result.stderr + result.stdout, "nothing says why")


@check("exec", "isolation")
async def scratch(lab: Lab) -> None:
    """HOME and TMPDIR can be written, and a new box finds them and its work folder empty."""
    async with lab.box() as box:
        same((await sh(box, 'ls -A "$HOME" "$TMPDIR" /work /dev/shm | grep -v : | grep .')).stdout, b"", "files of a new box")
        same((await sh(box, 'echo 1 > "$HOME/h" && echo 2 > "$TMPDIR/t" && cat /tmp/h /tmp/t')).stdout, b"1\n2\n", "scratch")


@check("exec", "isolation")
async def no_terminal(lab: Lab) -> None:
    """A command has no terminal, so it can neither wait for one nor type into one."""
    async with lab.box() as box:
        result = await sh(box, "test -t 0 || test -t 1 || test -t 2 || (: > /dev/tty) 2>/dev/null || echo none")
        same(result.stdout, b"none\n", "terminals")


@check("exec", "files", "isolation")
async def tools(lab: Lab) -> None:
    """Python and pytest of the root file system run as the graders call them."""
    async with lab.box() as box:
        await box.put_files({"test_it.py": b"def test_ok(): assert 1 + 1 == 2\n"})
        result = await sh(box, "python3 -I -m pytest -q -p no:cacheprovider test_it.py")
        holds(b"1 passed" in result.stdout, f"pytest said {(result.stdout + result.stderr)[-300:]!r}")

"""What a command finds around it: variables, folder, locale, time zone, hash seed, clock, processors; the same every time."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime

from data_contracts.protocols import ExecRequest
from environments.sandbox.base import Box
from environments.sandbox.conformance.check import check, holds, same
from environments.sandbox.conformance.lab import SECONDS, Lab, marker, sh

CLOCK = datetime(2025, 1, 15, 12, 0, 0, tzinfo=UTC)
"""What the first command of a box finds unless the problem says otherwise."""
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


async def shown(box: Box, *argv: str) -> datetime:
    """The time that `date`, or another command, prints in seconds since 1970."""
    result = await box.exec(ExecRequest(argv=argv or ("date", "+%s"), deadline_seconds=SECONDS))
    holds(result.exit_code == 0, f"{argv} ended with {result.exit_code}: {result.stderr[-300:]!r}")
    return datetime.fromtimestamp(float(result.stdout), UTC)


def near(found: datetime, expected: datetime, what: str, *, seconds: float = SECONDS) -> None:
    """A time at most `seconds` after the expected one: a busy host is slow, and a clock runs."""
    holds(0 <= (found - expected).total_seconds() < seconds, f"{what}: expected {expected} or soon after, found {found}")


@check("exec", "clock")
async def clock(lab: Lab) -> None:
    """The first command finds the fixed date in every box, whatever program asks and with an emptied environment too."""
    programs = (
        ("date", "+%s"),
        ("env", "-i", "/bin/date", "+%s"),
        ("python3", "-I", "-c", "from datetime import *; print(datetime.now(timezone.utc).timestamp())"),
        ("bash", "-c", "echo $EPOCHSECONDS"),
        ("perl", "-e", "print time"),
    )
    async with lab.box() as box:
        for argv in programs:
            box.rewind()
            near(await shown(box, *argv), CLOCK, f"the time that {argv[0]} shows")


@check("exec", "clock")
async def clock_runs(lab: Lab) -> None:
    """The clock runs on from command to command, in shells too, and starts anew after a rewind."""
    async with lab.box() as box:
        first = await shown(box, "date", "+%s.%N")
        await asyncio.sleep(1.2)
        second = await shown(box, "date", "+%s.%N")
        near(second, first, "the time of a second command, 1.2 s later")
        holds((second - first).total_seconds() >= 1.1, f"1.2 s on the host were {second - first} in the box")
        turn = await (await box.shell()).run("date +%s.%N", deadline_seconds=SECONDS)
        near(datetime.fromtimestamp(float(turn.stdout), UTC), second, "the time in a shell")
        box.rewind()
        near(await shown(box), CLOCK, "the time after a rewind")


@check("exec", "clock")
async def clock_declared(lab: Lab) -> None:
    """A problem may declare another date, past or future, or the right time."""
    for text in ("1999-12-31T23:00:00-01:00", "2077-07-07T07:07:07Z"):
        async with lab.box(clock=text) as box:
            near(await shown(box), datetime.fromisoformat(text), "the time declared")
    async with lab.box(clock=None) as box:
        before = datetime.fromtimestamp(int(time.time()) - 5, UTC)  # an engine elsewhere has a clock of its own
        near(await shown(box), before, "the right time", seconds=SECONDS + 5)


@check("exec", "files", "clock")
async def file_times(lab: Lab) -> None:
    """Files are as old as the clock says: those put, those written, and those given a time; ages of the root's are real."""
    program = (
        "import os, time\n"
        "open('new', 'w').close()\n"
        "now, old = time.time(), os.stat('put')\n"
        "times = [os.stat('new').st_mtime, next(e for e in os.scandir() if e.name == 'new').stat().st_ctime, old.st_mtime]\n"
        "print(all(-0.1 < now - t < 60 for t in times), old.st_mtime <= os.stat('new').st_mtime)\n"
        "os.utime('new', (now + 1000, 86400)); again = os.stat('new')\n"
        "print(round(again.st_atime - now), again.st_mtime, 10 ** 8 < os.stat('/bin/sh').st_mtime)"
    )
    async with lab.box() as box:
        await box.put_files({"put": b"x"})
        same(await python(box, program), "True True\n1000 86400.0 True", "times of files")
        result = await sh(box, "stat -c %.10y put; touch -d 2025-01-15 day; stat -c %.10y day; find . -newermt 2025-01-16")
        same(result.stdout, b"2025-01-15\n2025-01-15\n", "days of files, and files newer than tomorrow")


@check("exec", "clock")
async def waits(lab: Lab) -> None:
    """Durations are real: sleeps, timed waits, and waits for a time of day, for programs with threads too."""
    program = (
        "import ctypes, threading, time\n"
        "libc, room = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "class Time(ctypes.Structure): _fields_ = [('s', ctypes.c_long), ('ns', ctypes.c_long)]\n"
        "def at(seconds): when = time.time() + seconds; return ctypes.byref(Time(int(when), int(when % 1 * 1e9)))\n"
        "def took(wait): a, b = time.monotonic(), time.time(); wait(); return time.monotonic() - a, time.time() - b\n"
        "libc.sem_init(room, 0, 0)\n"
        "thread = threading.Thread(target=time.sleep, args=(0.4,))\n"
        "waits = [lambda: time.sleep(0.4), lambda: threading.Event().wait(0.4), lambda: libc.sem_timedwait(room, at(0.4)),\n"
        "    lambda: libc.clock_nanosleep(0, 1, at(0.4), None), lambda: (thread.start(), thread.join())]\n"
        "print([[0.3 < spent < 20 for spent in took(wait)] for wait in waits])"
    )
    async with lab.box() as box:
        same(await python(box, program), str([[True, True]] * 5), "waits of 0.4 s by both clocks")


@check("exec", "clock")
async def processors(lab: Lab) -> None:
    """Programs see as many processors as the problem's limit of CPU time, rounded up, whatever the host has."""
    program = (
        "import os; print(os.cpu_count(), sorted(os.sched_getaffinity(0)), os.sysconf('SC_NPROCESSORS_CONF'),"
        " sum(row.startswith('processor') for row in open('/proc/cpuinfo')),"
        " sum(row.startswith('cpu') for row in open('/proc/stat')) - 1, open('/sys/devices/system/cpu/online').read().strip())"
    )
    for cpus, seen in ((1.0, 1), (0.3, 1), (min(1.5, os.cpu_count() or 1), min(2, os.cpu_count() or 1))):
        async with lab.box(cpus=cpus) as box:
            numbers = "0" if seen == 1 else "0-1"
            expected = f"{seen} {list(range(seen))} {seen} {seen} {seen} {numbers}"
            same(await python(box, program), expected, f"processors of a box with {cpus} CPUs")
            counts = await sh(box, "nproc; nproc --all; grep -c ^processor /proc/cpuinfo; getconf _NPROCESSORS_ONLN")
            same(counts.stdout.split(), [str(seen).encode()] * 4, f"what commands count with {cpus} CPUs")


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

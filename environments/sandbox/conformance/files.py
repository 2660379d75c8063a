"""Files into a box and out of it: regular ones by plain names, whole or refused, and nothing the policy made is followed."""

from __future__ import annotations

import hashlib
import time

from data_contracts.errors import InputError
from environments.sandbox.base import Box
from environments.sandbox.conformance.check import check, holds, refused, same
from environments.sandbox.conformance.lab import Lab, sh

BINARY = bytes(range(256))
ROOM = 1 << 20
ESCAPES = ("../x", "/etc/x", "a//b", "", ".", "..", "a/../b", "a/./b", "a/", "a\0b", "x" * 300, "yy/" * 1100 + "y", "\ud800")


async def contents(box: Box, *names: str) -> dict[str, bytes]:
    """Collect after a freeze."""
    await box.freeze()
    return {item.name: item.content for item in await box.collect(names, max_bytes=ROOM)}


@check("exec", "files", "freeze")
async def round_trip(lab: Lab) -> None:
    """Bytes put into a box are read by commands, and bytes written by commands are collected."""
    async with lab.box() as box:
        await box.put_files({"a/b/in.bin": BINARY, "a/other": b"1", "empty": b""})
        await sh(box, "cat a/b/in.bin a/other empty > out.bin; mkdir sub; echo x > sub/x")
        found = await contents(box, "out.bin", "sub/x", "empty")
        same(found, {"out.bin": BINARY + b"1", "sub/x": b"x\n", "empty": b""}, "collected files")


@check("files", "freeze")
async def large(lab: Lab) -> None:
    """Four MiB, and two hundred small files, go in and come out."""
    files = {f"many/{number}": str(number).encode() for number in range(200)} | {"large": BINARY * 16384}
    async with lab.box() as box:
        await box.put_files(files)
        await box.freeze()
        found = await box.collect(tuple(files), max_bytes=5 << 20)
        holds({item.name: item.content for item in found} == files, f"{len(found)} of {len(files)} files came back, or differ")


@check("files", "freeze")
async def described(lab: Lab) -> None:
    """A collected file comes with its name, size and SHA-256, in the order of the names asked for."""
    async with lab.box() as box:
        await box.put_files({"a": b"1", "b": BINARY})
        await box.freeze()
        found = await box.collect(("b", "missing", "a"), max_bytes=ROOM)
        digests = [(item.name, item.size, item.sha256) for item in found]
        expected = [(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in (("b", BINARY), ("a", b"1"))]
        same(digests, expected, "name, size and digest")


@check("exec", "files")
async def replaced(lab: Lab) -> None:
    """Putting a file again replaces it, and a command may change and remove it: it is the box user's own."""
    async with lab.box() as box:
        await box.put_files({"a/x": b"old and longer"})
        await box.put_files({"a/x": b"new"})
        same((await sh(box, "cat a/x; echo more >> a/x && rm a/x && rmdir a && ls")).stdout, b"new", "content, then nothing")


@check("files", "freeze")
async def names(lab: Lab) -> None:
    """`..`, absolute paths, empty parts, NULs and other names that are no plain relative path are refused both ways."""
    async with lab.box() as box:
        for name in ESCAPES:
            with refused(InputError, "file name", f"putting {name[:20]!r}"):
                await box.put_files({name: b""})
        await box.freeze()
        for name in ESCAPES:
            with refused(InputError, "file name", f"collecting {name[:20]!r}"):
                await box.collect((name,), max_bytes=ROOM)


@check("exec", "files", "freeze")
async def odd_names(lab: Lab) -> None:
    """Names with spaces, quotes, lines, dashes and non-ASCII are names, not options or commands."""
    files = {name: name.encode() for name in ("a b", "-rf", "$(id)", "two\nlines", "é漢", "'q\"", "*", "…/..x", "~")}
    async with lab.box() as box:
        await box.put_files(files)
        same(await contents(box, *files), files, "collected files")


@check("exec", "files", "freeze")
async def only_regular(lab: Lab) -> None:
    """Symlinks, FIFOs, sockets and folders are left out of what is collected, and none makes the collector wait."""
    script = (
        "echo s > real; ln -s real link; ln -s /etc/passwd absolute; ln -s loop loop; ln -s /proc/self/environ env;"
        " mkfifo fifo; mkdir folder; ln -s /dev/zero zero"
    )
    sock = "python3 -I -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'"
    async with lab.box() as box:
        await sh(box, f"{script}; {sock}")
        began = time.monotonic()
        found = await contents(box, "link", "absolute", "loop", "env", "fifo", "folder", "zero", "sock", "real")
        same(found, {"real": b"s\n"}, "collected files")
        holds(time.monotonic() - began < 15, f"collecting took {time.monotonic() - began:.1f} s")


@check("exec", "files", "freeze")
async def no_way_through_links(lab: Lab) -> None:
    """A folder that is a symlink is not walked through, wherever it leads."""
    async with lab.box() as box:
        await sh(box, "echo s > real; ln -s /etc etc; ln -s . here; ln -s .. up; ln -s /proc/self/root root")
        found = await contents(box, "etc/passwd", "here/real", "up/work/real", "root/etc/passwd", "real/deeper", "real")
        same(found, {"real": b"s\n"}, "collected files")


@check("exec", "files")
async def put_follows_nothing(lab: Lab) -> None:
    """Putting a file replaces a symlink or a FIFO instead of writing through it, and refuses a folder in the way."""
    async with lab.box() as box:
        await sh(box, "echo keep > target; ln -s target link; mkfifo fifo; mkdir d taken; ln -s d dlink; ln -s /etc elink")
        await box.put_files({"link": b"new\n", "fifo": b"new\n"})
        for name in ("dlink/x", "elink/x", "taken", "target/x"):
            with refused(InputError, "cannot write", f"putting {name!r}"):
                await box.put_files({name: b"new"})
        same((await sh(box, "cat target link fifo; ls d taken")).stdout, b"keep\nnew\nnew\nd:\n\ntaken:\n", "what lies there")


@check("exec", "files", "freeze")
async def capped(lab: Lab) -> None:
    """Files beyond the cap of a collection are refused as a whole, a sparse file of a TiB at once; just the cap is fine."""
    async with lab.box() as box:
        await sh(box, "head -c 600 /dev/zero > a; head -c 600 /dev/zero > b; truncate -s 1T huge")
        await box.freeze()
        same(len(await box.collect(("a", "b"), max_bytes=1200)), 2, "files of just the cap")
        for wanted in (("a", "b"), ("huge",)):
            with refused(InputError, "exceed the cap", f"collecting {wanted} under a cap of 1199"):
                await box.collect(wanted, max_bytes=1199)


@check("files")
async def room(lab: Lab) -> None:
    """More bytes than the box's disk holds are refused before anything is written."""
    async with lab.box(disk_bytes=1 << 16) as box:
        with refused(InputError, "limits.disk_bytes", "putting 64 KiB and one byte into 64 KiB"):
            await box.put_files({"x": b"0" * (1 << 15), "y": b"0" * ((1 << 15) + 1)})


@check("exec", "files", "freeze", "isolation")
async def unreadable(lab: Lab) -> None:
    """A file that its owner made unreadable is left out: the collector has no more rights than the box's user."""
    async with lab.box() as box:
        await sh(box, "echo s > locked; chmod 0 locked; mkdir d; echo s > d/x; chmod 0 d; echo s > real")
        same(await contents(box, "locked", "d/x", "real"), {"real": b"s\n"}, "collected files")

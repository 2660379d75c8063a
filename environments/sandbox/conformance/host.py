"""The host is out of reach: its files (by canaries in the places that matter), sockets, processes and variables."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from environments.sandbox.conformance.check import NotHere, check, holds, same
from environments.sandbox.conformance.lab import Lab, marker, processes, said, sh

PROJECT = Path(__file__).resolve().parents[3]
_LOOK = """
import glob, json, os, sys
path, name, secret = sys.argv[1:]
found = []
for root in ["", "/host", "/mnt", "/oldroot", "/newroot", *glob.glob("/proc/*/root"), *glob.glob("/proc/*/cwd")]:
    try:
        with open(root + path, "rb") as file:
            found.append(("read " if secret.encode() in file.read() else "opened ") + root + path)
    except OSError: pass
for folder, folders, names in os.walk("/") if not found else ():
    folders[:] = [item for item in folders if os.path.join(folder, item) not in ("/proc", "/sys")]
    found += [os.path.join(folder, item) for item in names if item == name]
print(json.dumps(found))
"""
"""Prints where a file of the host can be opened or seen: by its path, through every process, and anywhere in the tree."""


@contextmanager
def canary(folder: Path, mode: int) -> Iterator[tuple[Path, str]]:
    """A file with a secret in `folder`, gone at the end of the block."""
    secret = f"canary-{marker()}{marker()}"
    try:
        fd, name = tempfile.mkstemp(prefix=".bessemer-canary-", dir=folder)
    except OSError as error:
        raise NotHere(f"no file can be made in {folder} to look for: {error.strerror}") from error
    path = Path(name)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secret)
        path.chmod(mode)
        yield path, secret
    finally:
        path.unlink()


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.resolve()
    return folder if folder.is_dir() or folder == folder.parent else existing(folder.parent)


async def hidden(lab: Lab, folder: Path, mode: int = 0o600) -> None:
    """A file there cannot be read from a box, by whatever path, nor seen."""
    with canary(folder, mode) as (path, secret):
        async with lab.box() as box:
            found = json.loads(await said(box, _LOOK, str(path), path.name, secret, seconds=60.0))
            same(found, [], f"ways to a file of mode {mode:o} in {folder}")


@check("exec", "isolation")
async def canary_in_home(lab: Lab) -> None:
    """A 0600 file in the home of the owner (root's, where the owner is root) cannot be read."""
    await hidden(lab, Path(pwd.getpwuid(os.geteuid()).pw_dir))


@check("exec", "isolation")
async def canary_in_store(lab: Lab) -> None:
    """A 0600 file in the store, where episodes, expected values and weights lie, cannot be read."""
    await hidden(lab, await asyncio.to_thread(existing, lab.store))


@check("exec", "isolation")
async def canary_in_project(lab: Lab) -> None:
    """A 0600 file beside Bessemer's own code cannot be read."""
    await hidden(lab, PROJECT)


@check("exec", "isolation")
async def canary_in_scratch(lab: Lab) -> None:
    """Even a file that everybody on the host may read, in its folder for temporary files, cannot be read."""
    await hidden(lab, Path(tempfile.gettempdir()), 0o644)


@check("exec", "isolation")
async def secrets(lab: Lab) -> None:
    """Password hashes, the kernel's memory and log, and the host's machine id cannot be read."""
    own = await asyncio.to_thread(lambda: [path.read_text().strip() for path in (Path("/etc/machine-id"),) if path.is_file()])
    async with lab.box() as box:
        files = "/etc/shadow /etc/gshadow /proc/kcore /proc/kmsg /dev/mem /dev/kmsg /root/.ssh/id_rsa /root/.bash_history"
        script = f"for f in {files}; do head -c 1 $f > /dev/null 2>&1 && test -s $f && echo $f; done; cat /etc/machine-id"
        seen = (await sh(box, f"{script} 2>/dev/null; true")).stdout.decode(errors="replace").split()
        same([row for row in seen if row.startswith("/") or row in own], [], "what can be read")


@check("exec", "isolation")
async def sockets(lab: Lab) -> None:
    """No socket of an engine or of a system service is in the box: not Docker's, containerd's, D-Bus's or any other."""
    places = "/var/run/docker.sock /run/docker.sock /run/containerd /run/dbus /run/systemd /run/podman /run/user /tmp/.X11-unix"
    async with lab.box() as box:
        script = f"find / -path /proc -prune -o -type s -print 2>/dev/null; ls -d {places} 2>/dev/null"
        same((await sh(box, script)).stdout, b"", "sockets in the box")


@check("exec", "isolation")
async def invisible_processes(lab: Lab) -> None:
    """Processes of the host are not seen in the box, and few are: its own first ones and the command."""
    mark = marker()
    with await asyncio.to_thread(subprocess.Popen, ["sleep", mark]) as process:
        try:
            async with lab.box() as box:
                seen = await processes(box)
        finally:
            process.kill()
    same([row for row in seen if mark in row], [], "processes of the host")
    holds(len(seen) <= 3, f"{len(seen)} processes are in a new box: {seen}")


@check("exec", "isolation")
async def other_variables(lab: Lab) -> None:
    """The variables of the box's first processes tell nothing of the host."""
    name = f"OWNER_SECRET_{marker()}"
    os.environ[name] = "hunter2"
    try:
        async with lab.box() as box:
            script = "for f in /proc/[0-9]*/environ; do tr '\\0' '\\n' < $f 2>/dev/null; done | sort -u"
            seen = (await sh(box, script)).stdout.decode(errors="replace")
    finally:
        del os.environ[name]
    holds(name not in seen, "a variable of the owner is readable in the box")
    holds("DOCKER_HOST" not in seen and "PROXY" not in seen.upper(), f"variables of the host are readable: {seen[:200]}")


@check("exec", "isolation")
async def mounts(lab: Lab) -> None:
    """No folder of the host's disks is mounted for writing."""
    kinds = {"tmpfs", "proc", "sysfs", "devpts", "mqueue", "cgroup", "cgroup2", "devtmpfs"}
    async with lab.box() as box:
        rows = (await sh(box, "cat /proc/self/mountinfo")).stdout.decode(errors="replace").splitlines()
    disks = [row for row in rows if row.partition(" - ")[2].split()[0] not in kinds]
    writable = [row.split()[4] for row in disks if "rw" in row.split()[5].split(",")]
    same(writable, [], "writable mounts of the host's disks")

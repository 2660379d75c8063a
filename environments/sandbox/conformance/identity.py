"""Who a command is: a user without any right, on a root file system that it cannot change, in namespaces of its own."""

from __future__ import annotations

import asyncio
import os

from environments.sandbox.conformance.check import NotHere, check, holds, same
from environments.sandbox.conformance.hostview import pids, user_of
from environments.sandbox.conformance.lab import Lab, marker, said, sh, until


async def status(lab: Lab) -> dict[str, str]:
    async with lab.box() as box:
        rows = (await sh(box, "cat /proc/self/status")).stdout.decode(errors="replace").splitlines()
        return {name: value.strip() for name, _, value in (row.partition(":") for row in rows)}


@check("exec", "isolation")
async def not_root(lab: Lab) -> None:
    """A command runs as the box's user (1000), in its group, and in no other group of consequence."""
    rows = await status(lab)
    same((set(rows["Uid"].split()), set(rows["Gid"].split())), ({"1000"}, {"1000"}), "user and group ids")
    same(set(rows["Groups"].split()) - {"1000"}, set(), "further groups")


@check("exec", "isolation")
async def not_root_outside(lab: Lab) -> None:
    """On the host, too, the command's process is not root's."""
    mark = marker()
    async with lab.box() as box:
        running = asyncio.ensure_future(sh(box, f"sleep {mark}; true"))

        async def runs() -> bool:
            return bool(await asyncio.to_thread(pids, mark))

        seen = await until(runs, seconds=5.0)
        users = {user_of(pid) for pid in await asyncio.to_thread(pids, mark)}
        running.cancel()
        await asyncio.wait({running})
    if not seen:
        raise NotHere("the box's processes are not visible from here (a remote engine, or a kernel of its own)")
    holds(0 not in users, f"a process of the box runs as host user {users}")


@check("exec", "isolation")
async def no_capabilities(lab: Lab) -> None:
    """Every capability set is empty, the bounding set included."""
    rows = await status(lab)
    found = {name: rows[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") if int(rows[name], 16)}
    same(found, {}, "capability sets that are not empty")


@check("exec", "isolation")
async def no_new_privileges(lab: Lab) -> None:
    """No program can give more rights: the flag is set and no set-user-id file is in the box."""
    same((await status(lab))["NoNewPrivs"], "1", "NoNewPrivs")
    async with lab.box() as box:
        same((await sh(box, "find / -xdev -perm /6000 -type f 2>/dev/null")).stdout, b"", "set-id files")


@check("exec", "isolation")
async def no_namespaces(lab: Lab) -> None:
    """A command can make no user namespace, in which it would be root."""
    async with lab.box() as box:
        for flag in ("-Ur", "-m", "-n", "-p"):
            holds((await sh(box, f"unshare {flag} true")).exit_code not in {0, None}, f"unshare {flag} works")


@check("exec", "isolation")
async def no_mounts(lab: Lab) -> None:
    """Nothing can be mounted, unmounted or remounted, no device made, no root changed."""
    tries = (
        "mount -t tmpfs none /tmp", "mount -o remount,rw /", "umount /work", "umount -l /proc", "mknod /work/d b 8 0",
        "mknod /work/c c 1 1", "chroot / true",
    )  # fmt: skip
    async with lab.box() as box:
        script = "; ".join(f"({line}) 2>/dev/null && echo '{line}'" for line in tries)
        same((await sh(box, f"PATH=$PATH:/usr/sbin:/sbin; {script}; true")).stdout, b"", "what works and should not")


@check("exec", "isolation")
async def read_only_root(lab: Lab) -> None:
    """Nothing outside the work folder, /tmp and /dev/shm can be written, made or removed."""
    folders = "/ /etc /usr /usr/bin /usr/lib/python3 /var /root /home /home/box /dev /run /proc /sys /opt /mnt"
    async with lab.box() as box:
        script = f"for d in {folders}; do touch $d/x 2>/dev/null && echo $d; done; rm -f /bin/sh 2>/dev/null; ls /bin/sh"
        same((await sh(box, script)).stdout, b"/bin/sh\n", "folders that can be written; the shell")


@check("exec", "isolation")
async def read_only_kernel(lab: Lab) -> None:
    """Settings of the kernel and control groups cannot be changed."""
    kernel = "/proc/sys/kernel/"
    files = (f"{kernel}hostname", f"{kernel}core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches")
    program = """
import os, sys
found = [path for path in sys.argv[1:] if os.access(path, os.W_OK)]
for folder, _, names in os.walk("/sys/fs/cgroup"):
    found += [os.path.join(folder, name) for name in names if os.access(os.path.join(folder, name), os.W_OK)][:3]
for path in list(found):
    try: os.close(os.open(path, os.O_WRONLY))
    except OSError: found.remove(path)
print(found)
"""
    async with lab.box() as box:
        same((await said(box, program, *files)).strip(), "[]", "files that can be opened for writing")


@check("exec", "isolation")
async def own_namespaces(lab: Lab) -> None:
    """Processes, network, mounts, IPC and host name are the box's own, not the owner's."""
    kinds = ("pid", "net", "mnt", "ipc", "uts")
    async with lab.box() as box:
        found = (await sh(box, "; ".join(f"readlink /proc/self/ns/{kind}" for kind in kinds))).stdout.decode().split()
        ours = await asyncio.to_thread(lambda: [os.readlink(f"/proc/self/ns/{kind}") for kind in kinds])
        same((len(found), set(found) & set(ours)), (len(kinds), set()), "namespaces seen, and those shared with the owner")
        same((await sh(box, "hostname")).stdout, b"box\n", "host name")


@check("exec", "isolation")
async def devices(lab: Lab) -> None:
    """Only harmless devices are there: null, zero, full, random, urandom, tty and terminals."""
    harmless = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "console"}
    async with lab.box() as box:
        found = (await sh(box, "find /dev \\( -type b -o -type c \\) -not -path '/dev/pts/*' 2>/dev/null")).stdout.decode()
        same({row.removeprefix("/dev/") for row in found.split()} - harmless, set(), "further devices")

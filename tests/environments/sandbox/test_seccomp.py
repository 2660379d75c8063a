"""What a box's system calls reach: the filter's own arithmetic, and the kernel's answers from inside boxes."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.errors import MissingRequirement
from environments.sandbox import seccomp
from environments.sandbox.base import Backend
from environments.sandbox.conformance.lab import Lab, py, sh

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
X86_64, AARCH64 = (0xC000003E, "x86_64"), (0xC00000B7, "aarch64")


def verdict(machine: tuple[int, str], number: int, *arguments: int) -> int:
    """The filter's answer, computed as the kernel does."""
    words = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, machine[0], 0, *words)
    program = list(struct.iter_unpack("=HBBI", seccomp.program(machine[1])))
    at = accumulator = 0
    while True:
        operation, if_true, if_false, constant = program[at]
        at += 1
        if operation == 0x06:
            return int(constant)
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, constant)
        elif operation == 0x54:
            accumulator &= constant
        elif operation == 0x05:
            at += constant
        else:
            holds = {0x15: accumulator == constant, 0x35: accumulator >= constant, 0x45: bool(accumulator & constant)}
            at += if_true if holds[operation] else if_false


@pytest.mark.parametrize("machine", [X86_64, AARCH64])
def test_exactly_the_listed_calls_pass(machine: tuple[int, str]) -> None:
    column = 0 if machine is X86_64 else 1
    listed = {row[column] for row in seccomp.allowed().values()} - {None}
    looked_into = {56, 41, 53, 135} if machine is X86_64 else {220, 198, 199, 92}
    for number in range(463):
        if number == 435:
            assert verdict(machine, number) == ENOSYS
        elif number not in looked_into:
            assert verdict(machine, number) == (ALLOW if number in listed else EPERM), number


@given(st.integers(463, 0x3FFFFFFF), st.sampled_from([X86_64, AARCH64]))
def test_calls_newer_than_the_list_are_unknown(number: int, machine: tuple[int, str]) -> None:
    assert verdict(machine, number) == ENOSYS


@given(st.integers(0x40000000, 0xFFFFFFFF), st.sampled_from([X86_64, AARCH64]))
def test_x32_calls_and_skipped_ones_are_refused(number: int, machine: tuple[int, str]) -> None:
    assert verdict(machine, number) == EPERM


@given(st.integers(0, 0xFFFFFFFF), st.integers(0, 462))
def test_another_architecture_is_killed(architecture: int, number: int) -> None:
    for own, name in (X86_64, AARCH64):
        if architecture != own:
            assert verdict((architecture, name), number) == KILL


@given(st.integers(0, 0xFFFFFFFFFFFFFFFF), st.integers(0, 0xFFFFFFFFFFFFFFFF), st.integers(0, 0xFFFFFFFFFFFFFFFF))
def test_sockets_are_those_that_are_named(family: int, kind: int, protocol: int) -> None:
    low_family, low_kind, low_protocol = family & 0xFFFFFFFF, kind & 0xF, protocol & 0xFFFFFFFF
    internet = low_family in {2, 10} and (low_kind, low_protocol) in {(1, 0), (2, 0), (1, 6), (2, 17)}
    passes = low_family == 1 or internet or (low_family == 16 and low_protocol == 0)
    for machine, number in ((X86_64, 41), (AARCH64, 198)):
        assert verdict(machine, number, family, kind, protocol) == (ALLOW if passes else EPERM)


def test_the_sockets_that_programs_use_pass() -> None:
    flags = 0o2000000 | 0o4000
    for arguments in ((1, 1), (1, 5), (2, 1 | flags, 6), (2, 2, 17), (10, 1), (16, 3, 0)):
        assert verdict(X86_64, 41, *arguments) == ALLOW
    for arguments in ((40, 1), (38, 5), (17, 3), (2, 3), (2, 1, 132), (2, 5, 0), (2, 6, 33), (16, 3, 12), (16, 3, 15)):
        assert verdict(X86_64, 41, *arguments) == EPERM


@given(st.integers(0, 0xFFFFFFFFFFFFFFFF))
def test_a_clone_makes_no_namespace(flags: int) -> None:
    for machine, number in ((X86_64, 56), (AARCH64, 220)):
        assert verdict(machine, number, flags) == (EPERM if flags & 0x7E020000 else ALLOW)


def test_an_unknown_machine_is_refused_and_not_left_open() -> None:
    with pytest.raises(MissingRequirement, match="riscv64"):
        seccomp.program("riscv64")


def test_dockers_profile_is_the_same_list() -> None:
    profile = json.loads(seccomp.docker_profile())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert set(profile["syscalls"][0]["names"]) == set(seccomp.allowed())
    assert not {"keyctl", "bpf", "io_uring_setup", "unshare", "setns", "userfaultfd", "mount"} & set(seccomp.allowed())
    assert {name for rule in profile["syscalls"][1:] for name in rule["names"]} == {
        "socket", "socketpair", "personality", "clone", "clone3",
    }  # fmt: skip


@pytest.fixture(params=["bubblewrap", "docker"])
def backend(request: pytest.FixtureRequest) -> Backend:
    found = request.getfixturevalue(f"{request.param}_backend")
    assert isinstance(found, Backend)
    return found


CALLS = """
import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
column = 0 if platform.machine() == "x86_64" else 1
def call(number, *arguments):
    ctypes.set_errno(0)
    answer = libc.syscall(*(ctypes.c_long(word) for word in (number, *arguments)))
    return "ok" if answer >= 0 else errno.errorcode[ctypes.get_errno()]
"""


async def test_the_kernels_dangerous_calls_are_closed(backend: Backend) -> None:
    numbers = {
        "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
        "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "unshare": (272, 97),
        "setns": (308, 268), "mount": (165, 40), "open_by_handle_at": (304, 265), "kcmp": (312, 272),
        "pidfd_getfd": (438, 438), "fsopen": (430, 430), "move_mount": (429, 429), "open_tree": (428, 428),
        "fanotify_init": (300, 262), "kexec_load": (246, 104), "init_module": (175, 105), "clock_settime": (227, 112),
    }  # fmt: skip
    program = (
        CALLS
        + f"""
for name, pair in {numbers!r}.items(): print(name, call(pair[column], 0x10000000, 0, 0, 0, 0, 0))
print("clone", call((56, 220)[column], 0x10000000 | 17, 0, 0, 0, 0))
print("clone3", call(435, 0, 0)); print("newer", call(470, 0), flush=True)
if column == 0: print("x32", call(0x40000000 | 39))
"""
    )
    async with Lab(backend).box() as box:
        result = await py(box, program)
        seen = dict(row.split() for row in result.stdout.decode().splitlines())
        assert seen.pop("x32", "EPERM") == "EPERM"
        assert result.exit_code in {0, 159}  # Docker's library kills for an x32 call
        assert (seen.pop("clone3"), seen.pop("newer")) == ("ENOSYS", "ENOSYS")
        assert seen == dict.fromkeys((*numbers, "clone"), "EPERM")


async def test_only_plain_sockets_can_be_made(backend: Backend) -> None:
    program = """
import socket
for name, family, kind, protocol in (("vsock", 40, 1, 0), ("alg", 38, 5, 0), ("packet", 17, 3, 0), ("raw", 2, 3, 1),
    ("sctp", 2, 1, 132), ("dccp", 2, 6, 33), ("netfilter", 16, 3, 12), ("uevent", 16, 3, 15), ("bluetooth", 31, 1, 0),
    ("xdp", 44, 3, 0), ("tipc", 30, 1, 0), ("can", 29, 3, 1), ("rds", 21, 5, 0), ("key", 15, 3, 2), ("x25", 9, 5, 0)):
    try: socket.socket(family, kind, protocol); print(name)
    except PermissionError: pass
    except OSError as error: print(name, error)
left, right = socket.socketpair(); left.send(b"x"); assert right.recv(1) == b"x"
server = socket.create_server(("127.0.0.1", 0)); client = socket.create_connection(server.getsockname())
socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
print(socket.getaddrinfo("localhost", 80)[0][4][1], socket.if_nameindex()[0][1])
"""
    async with Lab(backend).box() as box:
        result = await py(box, program)
        assert result.stdout == b"80 lo\n", result


async def test_code_of_another_architecture_dies(backend: Backend) -> None:
    program = """
import ctypes, mmap, platform
if platform.machine() == "x86_64":
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))  # mov eax, getpid of i386; int 0x80; ret
    ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    print("survived")
"""
    async with Lab(backend).box() as box:
        result = await py(box, program)
        # 159 is SIGSYS; a kernel without 32-bit calls answers the instruction itself with SIGSEGV.
        assert (result.stdout, result.exit_code in {159, 139}) == (b"", True), result


async def test_every_way_into_a_box_is_filtered(backend: Backend) -> None:
    async with Lab(backend).box() as box:
        rows = (await sh(box, "cat /proc/1/status /proc/self/status | grep -w Seccomp:")).stdout.split()
        assert rows == [b"Seccomp:", b"2"] * 2
        async with await box.shell() as shell:
            turn = await shell.run("grep -w Seccomp: /proc/$$/status; grep NoNewPrivs /proc/$$/status; unshare -Ur true", 20)
            assert turn.stdout.split() == [b"Seccomp:", b"2", b"NoNewPrivs:", b"1"]
            assert turn.exit_code != 0


async def test_ordinary_programs_run_under_the_filter(backend: Backend) -> None:
    program = """
import asyncio, concurrent.futures, multiprocessing, os, signal, sqlite3, ssl, subprocess, tempfile, threading, time, zoneinfo
if __name__ == "__main__":
    assert subprocess.run(["bash", "-c", "echo $((6 * 7)) | tr 2 3"], capture_output=True, check=True).stdout == b"43\\n"
    with concurrent.futures.ThreadPoolExecutor(4) as pool: assert list(pool.map(abs, (-1, 2))) == [1, 2]
    with multiprocessing.get_context("fork").Pool(2) as pool: assert pool.map(abs, (-1, 2)) == [1, 2]
    async def echo():
        process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
        return (await process.communicate(b"hi"))[0]
    assert asyncio.run(echo()) == b"hi"
    assert sqlite3.connect("a.db").execute("select 1").fetchone() == (1,)
    child = os.fork()
    if child == 0: signal.pause()
    libc = __import__("ctypes").CDLL(None)
    assert libc.ptrace(16, child, 0, 0) == 0  # its own child, or a sibling of the same user: as in Docker
    os.kill(child, 9)
    print("fine")
"""
    test = b"def test_one(tmp_path, capsys):\n    print('x')\n    assert capsys.readouterr().out == 'x\\n'\n"
    async with Lab(backend).box(memory_bytes=1 << 29) as box:
        await box.put_files({"program.py": program.encode(), "test_one.py": test})
        result = await sh(box, "python3 program.py", seconds=60)
        assert (result.stdout, result.exit_code) == (b"fine\n", 0), result
        passed = await sh(box, "python3 -m pytest -q -p no:cacheprovider test_one.py", seconds=60)
        assert b"1 passed" in passed.stdout, passed
        node = await sh(box, "if command -v node; then node -e 'setTimeout(() => console.log(os.cpus().length > 0), 1)'; fi")
        assert node.stdout == b"" or node.stdout.endswith(b"true\n"), node

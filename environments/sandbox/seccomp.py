"""Which system calls a box may make: one list, as a kernel filter for bubblewrap boxes and as a profile for Docker's engine.

Contract: an allow-list in the spirit of Docker's default profile, and stricter. What is not listed fails with EPERM; `clone3`
and calls newer than this list fail with ENOSYS, so that libraries fall back. Closed are: keyrings, bpf, io_uring, userfaultfd,
perf_event_open, every way to a new or another namespace, mounting, modules, clocks, NUMA policy, fanotify, and taking
descriptors out of other processes. Sockets: AF_UNIX; TCP and UDP (a box has no network but its own loopback); AF_NETLINK for
NETLINK_ROUTE alone, because `getaddrinfo` and `if_nameindex` list interfaces by it. AF_VSOCK, AF_ALG, AF_PACKET, SCTP and all
the rest fail. A process of another architecture (32-bit code in a 64-bit box) is killed at its first call; x32 calls fail with
EPERM. Tracing one's own processes stays allowed, as in Docker. Gap: `ioctl` and `prctl` are not looked into.

`program()` is a classic BPF program, made here without libseccomp: a binary search over call numbers whose leaves look at
arguments where they must. Only the low words of arguments are compared: the kernel reads no more of them in these calls.
"""

from __future__ import annotations

import json
import platform
import struct
from collections.abc import Mapping

from data_contracts.errors import MissingRequirement

_ALLOWED = """
accept 43 202, accept4 288 242, access 21 -, adjtimex 159 171, alarm 37 -, arch_prctl 158 -, bind 49 200, brk 12 214,
cachestat 451 451, capget 125 90, capset 126 91, chdir 80 49, chmod 90 -, chown 92 -, clock_adjtime 305 266,
clock_getres 229 114, clock_gettime 228 113, clock_nanosleep 230 115, close 3 57, close_range 436 436, connect 42 203,
copy_file_range 326 285, creat 85 -, dup 32 23, dup2 33 -, dup3 292 24, epoll_create 213 -, epoll_create1 291 20,
epoll_ctl 233 21, epoll_pwait 281 22, epoll_pwait2 441 441, epoll_wait 232 -, eventfd 284 -, eventfd2 290 19, execve 59 221,
execveat 322 281, exit 60 93, exit_group 231 94, faccessat 269 48, faccessat2 439 439, fadvise64 221 223, fallocate 285 47,
fchdir 81 50, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, fchown 93 55, fchownat 260 54, fcntl 72 25, fdatasync 75 83,
fgetxattr 193 10, flistxattr 196 13, flock 73 32, fork 57 -, fremovexattr 199 16, fsetxattr 190 7, fstat 5 80,
fstatfs 138 44, fsync 74 82, ftruncate 77 46, futex 202 98, futex_requeue 456 456, futex_wait 455 455, futex_waitv 449 449,
futex_wake 454 454, futimesat 261 -, get_robust_list 274 100, getcpu 309 168, getcwd 79 17, getdents 78 -, getdents64 217 61,
getegid 108 177, geteuid 107 175, getgid 104 176, getgroups 115 158, getitimer 36 102, getpeername 52 205, getpgid 121 155,
getpgrp 111 -, getpid 39 172, getppid 110 173, getpriority 140 141, getrandom 318 278, getresgid 120 150, getresuid 118 148,
getrlimit 97 163, getrusage 98 165, getsid 124 156, getsockname 51 204, getsockopt 55 209, gettid 186 178,
gettimeofday 96 169, getuid 102 174, getxattr 191 8, inotify_add_watch 254 27, inotify_init 253 -, inotify_init1 294 26,
inotify_rm_watch 255 28, io_cancel 210 3, io_destroy 207 1, io_getevents 208 4, io_pgetevents 333 292, io_setup 206 0,
io_submit 209 2, ioctl 16 29, ioprio_get 252 31, ioprio_set 251 30, kill 62 129, landlock_add_rule 445 445,
landlock_create_ruleset 444 444, landlock_restrict_self 446 446, lchown 94 -, lgetxattr 192 9, link 86 -, linkat 265 37,
listen 50 201, listxattr 194 11, llistxattr 195 12, lremovexattr 198 15, lseek 8 62, lsetxattr 189 6, lstat 6 -,
madvise 28 233, map_shadow_stack 453 453, membarrier 324 283, memfd_create 319 279, mincore 27 232, mkdir 83 -,
mkdirat 258 34, mknod 133 -, mknodat 259 33, mlock 149 228, mlock2 325 284, mlockall 151 230, mmap 9 222, mprotect 10 226,
mq_getsetattr 245 185, mq_notify 244 184, mq_open 240 180, mq_timedreceive 243 183, mq_timedsend 242 182, mq_unlink 241 181,
mremap 25 216, mseal 462 462, msgctl 71 187, msgget 68 186, msgrcv 70 188, msgsnd 69 189, msync 26 227, munlock 150 229,
munlockall 152 231, munmap 11 215, name_to_handle_at 303 264, nanosleep 35 101, newfstatat 262 79, open 2 -, openat 257 56,
openat2 437 437, pause 34 -, pidfd_open 434 434, pidfd_send_signal 424 424, pipe 22 -, pipe2 293 59, pkey_alloc 330 289,
pkey_free 331 290, pkey_mprotect 329 288, poll 7 -, ppoll 271 73, prctl 157 167, pread64 17 67, preadv 295 69,
preadv2 327 286, prlimit64 302 261, process_mrelease 448 448, process_vm_readv 310 270, process_vm_writev 311 271,
pselect6 270 72, ptrace 101 117, pwrite64 18 68, pwritev 296 70, pwritev2 328 287, read 0 63, readahead 187 213,
readlink 89 -, readlinkat 267 78, readv 19 65, recvfrom 45 207, recvmmsg 299 243, recvmsg 47 212, remap_file_pages 216 234,
removexattr 197 14, rename 82 -, renameat 264 38, renameat2 316 276, restart_syscall 219 128, rmdir 84 -, rseq 334 293,
rt_sigaction 13 134, rt_sigpending 127 136, rt_sigprocmask 14 135, rt_sigqueueinfo 129 138, rt_sigreturn 15 139,
rt_sigsuspend 130 133, rt_sigtimedwait 128 137, rt_tgsigqueueinfo 297 240, sched_get_priority_max 146 125,
sched_get_priority_min 147 126, sched_getaffinity 204 123, sched_getattr 315 275, sched_getparam 143 121,
sched_getscheduler 145 120, sched_rr_get_interval 148 127, sched_setaffinity 203 122, sched_setattr 314 274,
sched_setparam 142 118, sched_setscheduler 144 119, sched_yield 24 124, seccomp 317 277, select 23 -, semctl 66 191,
semget 64 190, semop 65 193, semtimedop 220 192, sendfile 40 71, sendmmsg 307 269, sendmsg 46 211, sendto 44 206,
set_robust_list 273 99, set_tid_address 218 96, setfsgid 123 152, setfsuid 122 151, setgid 106 144, setgroups 116 159,
setitimer 38 103, setpgid 109 154, setpriority 141 140, setregid 114 143, setresgid 119 149, setresuid 117 147,
setreuid 113 145, setrlimit 160 164, setsid 112 157, setsockopt 54 208, setuid 105 146, setxattr 188 5, shmat 30 196,
shmctl 31 195, shmdt 67 197, shmget 29 194, shutdown 48 210, sigaltstack 131 132, signalfd 282 -, signalfd4 289 74,
splice 275 76, stat 4 -, statfs 137 43, statx 332 291, symlink 88 -, symlinkat 266 36, sync 162 81, sync_file_range 277 84,
syncfs 306 267, sysinfo 99 179, tee 276 77, tgkill 234 131, time 201 -, timer_create 222 107, timer_delete 226 111,
timer_getoverrun 225 109, timer_gettime 224 108, timer_settime 223 110, timerfd_create 283 85, timerfd_gettime 287 87,
timerfd_settime 286 86, times 100 153, tkill 200 130, truncate 76 45, umask 95 166, uname 63 160, unlink 87 -,
unlinkat 263 35, utime 132 -, utimensat 280 88, utimes 235 -, vfork 58 -, vmsplice 278 75, wait4 61 260, waitid 247 95,
write 1 64, writev 20 66
"""
"""name, number on x86_64, number on aarch64 ("-": the call does not exist there)."""
_NEWEST = 462
"""Calls above were unknown when the list was made (mseal was the last): ENOSYS, as from an older kernel."""
_LOOKED_INTO = {"clone": (56, 220), "socket": (41, 198), "socketpair": (53, 199), "personality": (135, 92)}
_CLONE3 = 435
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET; a time namespace is made by unshare and clone3 only."""
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
_TYPE_MASK, _STREAM, _DATAGRAM = 0xF, 1, 2
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_SOCKETS: tuple[tuple[int, int | None, int | None], ...] = (
    (_UNIX, None, None),
    *((family, kind, 0) for family in (_INET, _INET6) for kind in (_STREAM, _DATAGRAM)),
    *((family, _STREAM, 6) for family in (_INET, _INET6)),
    *((family, _DATAGRAM, 17) for family in (_INET, _INET6)),
    (_NETLINK, None, 0),
)
"""Family, type (without its flags; None: any), protocol (None: any). A type and protocol fixed, no module is loaded for a
box."""

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

Code = list[tuple[int, int, int, int]]
"""Instructions: operation, jump if true, jump if false, constant."""


def program(machine: str | None = None) -> bytes:
    """The filter as `struct sock_filter[]`, for this machine or the one named. Raises MissingRequirement for an unknown one."""
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        raise MissingRequirement(
            f"no list of system calls for machine '{machine}' (there is one for {', '.join(sorted(_AUDIT_ARCH))}); choose"
            " stack.sandbox.backend: docker, or add its numbers to environments/sandbox/seccomp.py"
        )
    column = 0 if machine == "x86_64" else 1
    numbers = {row[column] for row in allowed().values()}
    leaves: dict[int, Code] = {number: _returns(_ALLOW) for number in numbers if number is not None}
    leaves[_CLONE3] = _returns(_ENOSYS)
    for name, code in (("clone", _clone()), ("socket", _socket()), ("socketpair", _family()), ("personality", _personality())):
        leaves[_LOOKED_INTO[name][column]] = code
    ranges: list[tuple[int, Code]] = []
    for number in range(_NEWEST + 1):
        code = leaves.get(number, _returns(_EPERM))
        if not ranges or ranges[-1][1] != code:
            ranges.append((number, code))
    ranges.append((_NEWEST + 1, _returns(_ENOSYS)))
    ranges.append((_X32_BIT, _returns(_EPERM)))
    head: Code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in head + _search(ranges))


def docker_profile() -> str:
    """The same list as Docker's JSON. The engine adds ENOSYS for calls newer than the list by itself."""
    rules: list[dict[str, object]] = [_rule(sorted(allowed()))]
    rules += [_rule(["socket"], *_socket_conditions(*socket)) for socket in _SOCKETS]
    rules += [_rule(["socketpair"], _condition(0, "EQ", _UNIX))]
    rules += [_rule(["personality"], _condition(0, "EQ", value)) for value in _PERSONALITIES]
    rules += [_rule(["clone"], _condition(0, "MASKED_EQ", _NEW_NAMESPACES, 0))]
    rules += [{"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}]
    architectures = [f"SCMP_ARCH_{machine.upper()}" for machine in _AUDIT_ARCH]
    return json.dumps(
        {
            "defaultAction": "SCMP_ACT_ERRNO",
            "archMap": [{"architecture": name, "subArchitectures": []} for name in architectures],
            "syscalls": rules,
        }
    )


def allowed() -> Mapping[str, tuple[int | None, int | None]]:
    """Calls allowed whatever their arguments: name -> numbers on x86_64 and aarch64."""
    rows = [row.split() for row in _ALLOWED.replace("\n", " ").split(",")]
    return {name: (_number(first), _number(second)) for name, first, second in rows}


def _number(word: str) -> int | None:
    return None if word == "-" else int(word)


def _returns(value: int) -> Code:
    return [(_RETURN, 0, 0, value)]


def _search(ranges: list[tuple[int, Code]]) -> Code:
    """The call's number is loaded; each range reaches from its start to the next one's."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    low, high = _search(ranges[:middle]), _search(ranges[middle:])
    if len(low) < 256:
        return [(_JUMP_GREATER_EQUAL, len(low), 0, ranges[middle][0]), *low, *high]
    # A conditional jump reaches 255 instructions; an unconditional one (0x05) as far as one likes.
    return [(_JUMP_GREATER_EQUAL, 0, 1, ranges[middle][0]), (0x05, 0, 0, len(low)), *low, *high]


def _argument(index: int) -> int:
    """Where the low word of an argument is; both machines are little-endian."""
    return _ARGUMENTS + 8 * index


def _clone() -> Code:
    return [(_LOAD, 0, 0, _argument(0)), (_JUMP_SET, 0, 1, _NEW_NAMESPACES), *_returns(_EPERM), *_returns(_ALLOW)]


def _family() -> Code:
    return [(_LOAD, 0, 0, _argument(0)), (_JUMP_EQUAL, 0, 1, _UNIX), *_returns(_ALLOW), *_returns(_EPERM)]


def _personality() -> Code:
    code: Code = [(_LOAD, 0, 0, _argument(0))]
    for value in _PERSONALITIES:
        code += [(_JUMP_EQUAL, 0, 1, value), *_returns(_ALLOW)]
    return [*code, *_returns(_EPERM)]


def _socket() -> Code:
    code: Code = []
    for family, kind, protocol in _SOCKETS:
        checks: list[Code] = [[(_LOAD, 0, 0, _argument(0))]]
        wanted = [family]
        if kind is not None:
            checks.append([(_LOAD, 0, 0, _argument(1)), (_AND, 0, 0, _TYPE_MASK)])
            wanted.append(kind)
        if protocol is not None:
            checks.append([(_LOAD, 0, 0, _argument(2))])
            wanted.append(protocol)
        block: Code = _returns(_ALLOW)
        for load, value in reversed(list(zip(checks, wanted, strict=True))):
            block = [*load, (_JUMP_EQUAL, 0, len(block), value), *block]
        code += block
    return [*code, *_returns(_EPERM)]


def _condition(index: int, operator: str, value: int, second: int = 0) -> dict[str, object]:
    return {"index": index, "op": f"SCMP_CMP_{operator}", "value": value, "valueTwo": second}


def _socket_conditions(family: int, kind: int | None, protocol: int | None) -> list[dict[str, object]]:
    conditions = [_condition(0, "EQ", family)]
    conditions += [] if kind is None else [_condition(1, "MASKED_EQ", _TYPE_MASK, kind)]
    return conditions + ([] if protocol is None else [_condition(2, "EQ", protocol)])


def _rule(names: list[str], *conditions: dict[str, object]) -> dict[str, object]:
    rule: dict[str, object] = {"names": names, "action": "SCMP_ACT_ALLOW"}
    return rule | ({"args": list(conditions)} if conditions else {})

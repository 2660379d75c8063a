"""Files of a Docker box: its work folder as the host sees it, or, where the host does not, programs that run inside.

Contract: as files.py; from inside, as the box's user, in the pristine interpreter of the read-only image (`python3 -I -S`):
this works with a remote engine too, and Docker's own copy call does not see tmpfs folders. Reading happens after the freeze,
when nothing of the policy runs any more. What comes back is parsed strictly.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_contracts.errors import InfraError, InputError, SandboxLost
from data_contracts.records import Artifact, SandboxSpec
from environments.sandbox.files import IN_THE_WAY, artifact, check_name, too_large
from infra.rootfs import BOX_UID

if TYPE_CHECKING:
    from environments.sandbox.docker_box import DockerBox

_SECONDS = 60.0
_MISSING, _TOO_LARGE = -1, -2

_WALK = """
import json, os, stat, struct, sys
source, sink = sys.stdin.buffer, sys.stdout.buffer
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
def walk(parts, make):
    folder = os.open(".", FOLDER)
    for part in parts:
        if make:
            try: os.mkdir(part, 0o755, dir_fd=folder)
            except FileExistsError: pass
        folder = os.open(part, FOLDER, dir_fd=folder)
    return folder
(size,) = struct.unpack("!q", source.read(8))
header = json.loads(source.read(size))
"""

_WRITE = (
    _WALK
    + """
for parts, size in header:
    content = source.read(size)
    folder = walk(parts[:-1], True)
    try: os.unlink(parts[-1], dir_fd=folder)
    except FileNotFoundError: pass
    fd = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    with os.fdopen(fd, "wb") as file: file.write(content)
sink.write(b"ok")
"""
)

_READ = (
    _WALK
    + """
names, left = header
for parts in names:
    content, size = b"", -1
    try:
        fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=walk(parts[:-1], False))
        about = os.fstat(fd)
        if stat.S_ISREG(about.st_mode):
            size = -2 if about.st_size > left else about.st_size
            if size >= 0:
                with os.fdopen(fd, "rb") as file: content = file.read(size)
                size = len(content)
                left -= size
    except OSError: pass
    sink.write(struct.pack("!q", size) + content)
"""
)

WRITE_COMMAND = ("/usr/bin/python3", "-I", "-S", "-c", _WRITE)
READ_COMMAND = ("/usr/bin/python3", "-I", "-S", "-c", _READ)


def open_work(init: int, container: str, spec: SandboxSpec) -> int:
    """A descriptor of the work folder of a box whose first process the host knows as `init`; -1 where it cannot be reached.

    To be called before anything of the policy runs. Only for runtimes that share the host's kernel, and only as root.
    """
    try:
        work = os.open(f"/proc/{init}/root{spec.workdir}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return -1
    size = (room := os.fstatvfs(work)).f_blocks * room.f_frsize
    ours = container in Path(f"/proc/{init}/cgroup").read_text()
    if ours and os.fstat(work).st_uid == BOX_UID and abs(size - spec.limits.disk_bytes) < 65536:
        return work
    os.close(work)
    return -1


def write_inside(box: DockerBox, files: Mapping[str, bytes]) -> None:
    """By a command in the box. Blocks. Raises InputError."""
    code, streams, _ = box.stream(WRITE_COMMAND, write_request(files), _SECONDS, 4096, box.spec.workdir, threading.Event())
    if code != 0 or streams[0].bytes() != b"ok":
        box.raise_if_gone()
        reason = streams[1].bytes().decode(errors="replace").strip().rpartition("\n")[2]
        raise InputError(
            f"cannot write {', '.join(files)} into the box: {reason or f'exit code {code}'}", field="name", remedy=IN_THE_WAY
        )


def read_inside(box: DockerBox, names: Sequence[str], max_bytes: int) -> tuple[Artifact, ...]:
    """By a command in the box. Blocks. Raises SandboxLost for a box that its policy has filled, InfraError."""
    kills, cap = box.oom_kills(), max_bytes + 8 * len(names) + 256
    words = READ_COMMAND, read_request(names, max_bytes), _SECONDS, cap, box.spec.workdir
    code, streams, _ = box.stream(*words, threading.Event())
    if code != 0:
        box.raise_if_gone()
        if box.oom_kills(code) > kills:
            raise SandboxLost(f"box {box.id} is so full that its files cannot be read; this is the policy's failure")
        raise InfraError("sandbox_backend", f"collecting from box {box.id} failed: {streams[1].bytes()[-500:]!r}")
    return read_answer(names, streams[0].bytes())


def write_request(files: Mapping[str, bytes]) -> bytes:
    header = json.dumps([(check_name(name), len(content)) for name, content in files.items()]).encode()
    return struct.pack("!q", len(header)) + header + b"".join(files.values())


def read_request(names: Sequence[str], max_bytes: int) -> bytes:
    header = json.dumps([[check_name(name) for name in names], max_bytes]).encode()
    return struct.pack("!q", len(header)) + header


def read_answer(names: Sequence[str], answer: bytes) -> tuple[Artifact, ...]:
    """Raises InputError for too much, InfraError for an answer that is not whole."""
    found: list[Artifact] = []
    position = 0
    for name in names:
        if len(answer) < position + 8:
            raise InfraError("sandbox_backend", f"collecting {name!r}: the box's answer ends early")
        (size,) = struct.unpack_from("!q", answer, position)
        position += 8
        if size == _TOO_LARGE:
            raise too_large(name)
        if size == _MISSING:
            continue
        if size < 0 or len(answer) < position + size:
            raise InfraError("sandbox_backend", f"collecting {name!r}: the box's answer is not whole")
        found.append(artifact(name, answer[position : position + size]))
        position += size
    return tuple(found)

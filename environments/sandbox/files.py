"""Files into and out of a box's work folder, from outside, without following anything the policy made.

Contract: names are relative, of plain components; every component is opened with O_NOFOLLOW from the folder above it, so
neither ".." nor a symlink nor a race leads outside; only regular files are written and read. All functions block: use a thread.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from data_contracts.errors import InputError
from data_contracts.records import Artifact

IN_THE_WAY = "A folder or a full disk in the box is in the way; put files before running commands, or raise disk_bytes"
_libc = ctypes.CDLL(None, use_errno=True)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENXIO, errno.EISDIR}


def check_name(name: str) -> tuple[str, ...]:
    """The components of a file name relative to the work folder. Raises InputError for anything unusual."""
    parts = tuple(name.split("/"))
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        sizes = [0]
    if (
        "\0" in name
        or any(part in {"", ".", ".."} for part in parts)
        or min(sizes) == 0
        or max(sizes) > 255
        or sum(sizes) > 2048
    ):
        raise InputError(
            f"{name!r} is not a file name inside the work folder",
            field="name",
            remedy="Use a relative path of plain components, without '..', '.', empty parts or a leading '/'",
        )
    return parts


@contextmanager
def acting_as(uid: int | None, gid: int | None) -> Iterator[None]:
    """File rights of this thread become those of `uid`; None changes nothing. Must not span an await."""
    if uid is None or gid is None:
        yield
        return
    gid_before, uid_before = _libc.setfsgid(gid), _libc.setfsuid(uid)
    try:
        if _libc.setfsuid(-1) != uid:
            raise PermissionError(errno.EPERM, f"cannot act as uid {uid}")
        yield
    finally:
        _libc.setfsuid(uid_before)
        _libc.setfsgid(gid_before)


def write_files(root: int, files: Mapping[str, bytes]) -> None:
    """Write below the folder descriptor `root`, creating folders; what was there under a name (file or link) is replaced."""
    for name, content in files.items():
        *folders, last = check_name(name)
        try:
            with ExitStack() as stack:
                folder = root
                for part in folders:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=folder)
                    folder = os.open(part, _FOLDER, dir_fd=folder)
                    stack.callback(os.close, folder)
                with suppress(FileNotFoundError):
                    os.unlink(last, dir_fd=folder)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(last, flags, 0o644, dir_fd=folder)
                with os.fdopen(fd, "wb") as file:
                    file.write(content)
        except OSError as error:
            raise InputError(
                f"cannot write {name!r} into the box: {error.strerror}",
                field="name",
                remedy=IN_THE_WAY,
            ) from error


def read_files(root: int, names: Sequence[str], *, max_bytes: int) -> tuple[Artifact, ...]:
    """The regular files among `names`; everything else counts as missing. More than `max_bytes` in all raises InputError."""
    found: list[Artifact] = []
    left = max_bytes
    for name in names:
        content = _read(root, check_name(name), left, name)
        if content is not None:
            left -= len(content)
            found.append(artifact(name, content))
    return tuple(found)


def artifact(name: str, content: bytes) -> Artifact:
    return Artifact(name=name, sha256=hashlib.sha256(content).hexdigest(), size=len(content), content=content)


def too_large(name: str) -> InputError:
    return InputError(
        f"the collected files exceed the cap of bytes at {name!r}",
        field="name",
        remedy="Raise collect_max_bytes, or write less",
    )


def _read(root: int, parts: tuple[str, ...], limit: int, name: str) -> bytes | None:
    with ExitStack() as stack:
        folder = root
        try:
            for part in parts[:-1]:
                folder = os.open(part, _FOLDER, dir_fd=folder)
                stack.callback(os.close, folder)
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            fd = os.open(parts[-1], flags, dir_fd=folder)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise
        stack.callback(os.close, fd)
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            return None
        if about.st_size > limit:
            raise too_large(name)
        with os.fdopen(fd, "rb", closefd=False) as file:
            content = file.read(limit + 1)
    if len(content) > limit:
        raise too_large(name)
    return content

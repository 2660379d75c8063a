"""Where the tables lie: immutable objects by key in a local folder, on object storage, or in memory.

Contract (held by tests/infra/test_store.py over all three): a reader sees all of an object or none of it, `put_if_absent` has
one winner however many race, `publish_folder` shows a folder only when it is finished, and kill -9 leaves no half object.
Keys are relative, "/"-separated, without empty, "." or ".." parts. A prefix is a whole key or a folder of keys: "a/b" covers
"a/b" and "a/b/c", never "a/bc". `exists` speaks of objects, not of folders.

| store | put_if_absent is atomic because | tried |
|---|---|---|
| `LocalStore` (a path, `file://`) | link(2) of a synced temporary file (exFAT has no links: refused) | here |
| `FsspecStore` `s3://` | s3fs sends If-None-Match: * (AWS, MinIO and R2 honour it; an older gateway may not) | read |
| `FsspecStore` `gs://` | gcsfs sends ifGenerationMatch=0 | read |
| `FsspecStore` `memory://` | a lock in this process | here |
| `MemoryStore` | a lock in this process | here |

Any other fsspec protocol only checks and then writes, so two writers could both win: `FsspecStore` refuses it.
Gaps: object storage has no folder rename, so `publish_folder` uploads manifest.json last and readers wait for that object;
`delete` of a folder is one step for readers of `LocalStore` and object by object elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped,unused-ignore]

from data_contracts.errors import ConfigError, MissingRequirement
from data_contracts.protocols import Store
from infra import paths

MANIFEST = "manifest.json"
ATOMIC_CREATE = frozenset({"s3", "s3a", "gs", "gcs", "memory"})
_TEMPORARY = ".tmp"
_EXCLUSIVE = threading.Lock()  # memory:// checks before it writes; the lock makes that one step within this process


def check_key(key: str) -> str:
    """`key` without a trailing "/". Raises ValueError for an absolute key or one with empty, "." or ".." parts."""
    cleaned = key[:-1] if key.endswith("/") else key
    parts = cleaned.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in key or "\0" in key or parts[0] == _TEMPORARY:
        raise ValueError(
            f"store key {key!r} is not allowed: keys are relative, '/'-separated, without empty, '.' or '..' parts "
            f"and do not start with '{_TEMPORARY}'; build it from a campaign and names, never from outside input"
        )
    return cleaned


def open_store(url: str) -> Store:
    """The store behind a folder path or an fsspec URL; "" is `<state folder>/store`. Raises ConfigError for a protocol
    without atomic create or whose driver is not installed."""
    if not url:
        return LocalStore(paths.home() / "store")
    if url.startswith("file://"):
        return LocalStore(url.removeprefix("file://"))
    return FsspecStore(url) if "://" in url else LocalStore(url)


def _absent(key: str, root: str) -> FileNotFoundError:
    return FileNotFoundError(f"no object {key!r} in the store {root}")


# ------------------------------------------------------------------------------------------------------------------- local


class LocalStore:
    """A folder. Temporary files live in `<root>/.tmp`, on the same file system; `sweep` removes what dead writers left."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root).absolute()
        self.root = str(self._root)
        self._temporary_folder = self._root / _TEMPORARY
        self._temporary_folder.mkdir(parents=True, exist_ok=True)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        target = self._root / check_key(key)
        if target.exists():
            return False
        temporary = self._write(data)
        try:
            self._place(os.link, temporary, target)
        except FileExistsError:
            return False
        except PermissionError as error:
            raise MissingRequirement(
                f"the store {self.root} cannot hold {key!r}: its file system refused a hard link ({error}), which atomic "
                "create needs; move the store: set stack.store to a folder on ext4, xfs or NFS"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
        sync(target.parent)
        return True

    def put(self, key: str, data: bytes) -> None:
        target = self._root / check_key(key)
        self._place(os.replace, self._write(data), target)
        sync(target.parent)

    def get(self, key: str) -> bytes:
        try:
            return (self._root / check_key(key)).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise _absent(key, self.root) from None

    def exists(self, key: str) -> bool:
        return (self._root / check_key(key)).is_file()

    def list(self, prefix: str) -> list[str]:
        top = self._root / check_key(prefix) if prefix else self._root
        if top.is_file():
            return [check_key(prefix)]
        found: list[str] = []
        for folder, names, files in os.walk(top):
            if Path(folder) == self._root and _TEMPORARY in names:
                names.remove(_TEMPORARY)
            found += [str(Path(folder, name).relative_to(self._root)) for name in files]
        return sorted(found)

    def delete(self, prefix: str) -> int:
        target = self._root / check_key(prefix)
        doomed = self._temporary()
        try:
            os.rename(target, doomed)  # one step: a reader finds the whole folder or nothing
        except (FileNotFoundError, NotADirectoryError):
            return 0
        if doomed.is_file():
            doomed.unlink()
            return 1
        count = sum(len(files) for _, _, files in os.walk(doomed))
        shutil.rmtree(doomed, ignore_errors=True)
        return count

    def local_path(self, key: str) -> str:
        path = self._root / check_key(key)
        if not path.exists():
            raise _absent(key, self.root)
        return str(path)

    def publish_folder(self, folder: str, key: str) -> None:
        """Without a manifest at `key`, an older folder there is replaced (Data Docs). Moves within one file system, copies
        first from another."""
        target, source = self._root / check_key(key), Path(folder)
        if not source.is_dir():
            raise FileNotFoundError(f"cannot publish {folder!r} as {key!r}: it is not a folder on this machine")
        if (target / MANIFEST).exists():
            return
        if os.stat(source).st_dev != os.stat(self._root).st_dev:
            copy = self._temporary()
            shutil.copytree(source, copy)
            source = copy
        for path in source.rglob("*"):
            sync(path)
        while True:
            try:
                self._place(os.rename, source, target)
                break
            except OSError:
                if not target.is_dir():
                    raise
                if (target / MANIFEST).exists():  # another publisher of the same key was first
                    return
                self.delete(key)
        sync(target.parent)
        shutil.rmtree(folder, ignore_errors=True)  # only still there after a copy

    def sweep(self, *, older_than: float) -> int:
        """Remove temporary files that writers killed more than `older_than` seconds ago left; returns how many."""
        count = 0
        for entry in os.scandir(self._temporary_folder):
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > older_than:
                count += 1
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    Path(entry.path).unlink(missing_ok=True)
        return count

    def _temporary(self) -> Path:
        return self._temporary_folder / f"{os.getpid()}-{uuid.uuid4().hex}"

    def _write(self, data: bytes) -> Path:
        path = self._temporary()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return path

    @staticmethod
    def _place(step: Any, source: Path, target: Path) -> None:
        for _ in range(3):  # a concurrent delete may take the parent folder away between the two calls
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                step(source, target)
            except FileNotFoundError:
                continue
            return
        step(source, target)


def sync(path: Path) -> None:
    """fsync of a file or folder, so that a power cut cannot undo what was reported as done."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------------------ fsspec


class FsspecStore:
    """Objects behind an fsspec URL such as `s3://bucket/bessemer`; credentials come from the driver's own environment.

    `cache` is where `local_path` fetches to. A fetched folder is used again while its manifest is unchanged.
    """

    def __init__(self, url: str, *, cache: str | os.PathLike[str] | None = None) -> None:
        protocol = url.partition("://")[0]
        if protocol not in ATOMIC_CREATE:
            raise ConfigError(
                f"a store on {protocol}:// has no atomic create, so two writers could both win a ledger event",
                field="stack.store",
                remedy=f"Use a folder, or one of {', '.join(sorted(ATOMIC_CREATE))}.",
            )
        self.root = url.rstrip("/")
        try:
            self._fs, self._base = fsspec.core.url_to_fs(self.root, use_listings_cache=False)
        except ImportError as error:
            raise ConfigError(
                f"the driver of {protocol}:// is not installed ({error})",
                field="stack.store",
                remedy=f"pip install 'fsspec[{protocol}]'",
            ) from error
        self._base = self._base.rstrip("/")
        digest = hashlib.sha256(self.root.encode()).hexdigest()[:12]
        self._cache = Path(cache) if cache else paths.cache() / "store" / digest

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with _EXCLUSIVE:
            try:
                self._fs.pipe_file(self._path(key), data, mode="create")
            except OSError as error:
                if _lost_the_race(error):
                    return False
                raise
        return True

    def put(self, key: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(key), data)

    def get(self, key: str) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._path(key)))
        except (FileNotFoundError, IsADirectoryError):
            raise _absent(key, self.root) from None

    def exists(self, key: str) -> bool:
        return bool(self._fs.isfile(self._path(key)))

    def list(self, prefix: str) -> list[str]:
        top = self._path(prefix) if prefix else self._base
        found = self._fs.find(top)
        return sorted(str(path)[len(self._base) + 1 :] for path in found)

    def delete(self, prefix: str) -> int:
        keys = self.list(check_key(prefix))
        # the manifest goes first: a folder without one counts as absent, so no reader meets a half-deleted checkpoint
        for key in sorted(keys, key=lambda key: (not key.endswith(f"/{MANIFEST}"), key)):
            try:
                self._fs.rm_file(self._path(key))
            except FileNotFoundError:
                continue
        return len(keys)

    def local_path(self, key: str) -> str:
        cleaned = check_key(key)
        keys = self.list(cleaned)
        if not keys:
            raise _absent(key, self.root)
        target = self._cache / cleaned
        manifest = f"{cleaned}/{MANIFEST}"
        if manifest in keys and (target / MANIFEST).is_file() and (target / MANIFEST).read_bytes() == self.get(manifest):
            for late in (name for name in keys if not (self._cache / name).is_file()):  # as a trainer's state, saved at stop
                self._fetch(late, self._cache / late)
            return str(target)
        fetched = self._cache / _TEMPORARY / f"{os.getpid()}-{uuid.uuid4().hex}"
        for name in keys:
            self._fetch(name, fetched / name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        os.replace(fetched / cleaned, target)
        shutil.rmtree(fetched, ignore_errors=True)
        return str(target)

    def publish_folder(self, folder: str, key: str) -> None:
        cleaned, source = check_key(key), Path(folder)
        if not source.is_dir():
            raise FileNotFoundError(f"cannot publish {folder!r} as {key!r}: it is not a folder on this machine")
        if self.exists(f"{cleaned}/{MANIFEST}"):
            return
        files = [path for path in source.rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: (path == source / MANIFEST, path)):
            self._fs.put_file(str(path), self._path(f"{cleaned}/{path.relative_to(source)}"))
        shutil.rmtree(source)

    def _fetch(self, key: str, path: Path) -> None:
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(self.get(key))
        os.replace(partial, path)

    def _path(self, key: str) -> str:
        return f"{self._base}/{check_key(key)}"


def _lost_the_race(error: OSError) -> bool:
    """Drivers differ in what a failed precondition becomes: some FileExistsError, some EINVAL around the HTTP answer (412, or
    S3's 409 for two conditional writes at once)."""
    if isinstance(error, FileExistsError):
        return True
    answer = getattr(error.__cause__, "response", None)
    codes = ("PreconditionFailed", "ConditionalRequestConflict", "412")
    return isinstance(answer, dict) and str(answer.get("Error", {}).get("Code")) in codes


# ------------------------------------------------------------------------------------------------------------------ memory


class MemoryStore:
    """The shipped fake: one process, many threads. `local_path` needs `folder`, where it writes copies for readers."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.root = f"memory-store-{id(self):x}"
        self._folder = Path(folder) if folder else None
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._lock:
            if check_key(key) in self._objects:
                return False
            self._objects[check_key(key)] = bytes(data)
        return True

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[check_key(key)] = bytes(data)

    def get(self, key: str) -> bytes:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise _absent(key, self.root) from None

    def exists(self, key: str) -> bool:
        return check_key(key) in self._objects

    def list(self, prefix: str) -> list[str]:
        cleaned = check_key(prefix) if prefix else ""
        with self._lock:
            return sorted(key for key in self._objects if not cleaned or key == cleaned or key.startswith(f"{cleaned}/"))

    def delete(self, prefix: str) -> int:
        doomed = self.list(check_key(prefix))
        with self._lock:
            return sum(self._objects.pop(key, None) is not None for key in doomed)

    def local_path(self, key: str) -> str:
        keys = self.list(check_key(key))
        if not keys:
            raise _absent(key, self.root)
        if self._folder is None:
            raise MissingRequirement(f"a MemoryStore has no files for {key!r}; give it a folder: MemoryStore(folder=tmp_path)")
        for name in keys:
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.get(name))
        return str(self._folder / check_key(key))

    def publish_folder(self, folder: str, key: str) -> None:
        cleaned, source = check_key(key), Path(folder)
        if not source.is_dir():
            raise FileNotFoundError(f"cannot publish {folder!r} as {key!r}: it is not a folder on this machine")
        found = {f"{cleaned}/{path.relative_to(source)}": path.read_bytes() for path in source.rglob("*") if path.is_file()}
        with self._lock:
            if f"{cleaned}/{MANIFEST}" in self._objects:
                return
            self._objects = {name: data for name, data in self._objects.items() if not name.startswith(f"{cleaned}/")} | found
        shutil.rmtree(source)

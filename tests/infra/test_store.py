"""One conformance suite over every store, and kill -9 in the middle of a write."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import pytest

from data_contracts.errors import ConfigError
from data_contracts.protocols import Store
from infra.store import FsspecStore, LocalStore, MemoryStore, open_store


@pytest.fixture(params=["local", "fsspec", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path / "store")
    if request.param == "fsspec":
        return FsspecStore(f"memory://{uuid.uuid4().hex}/bessemer", cache=tmp_path / "cache")
    return MemoryStore(tmp_path / "files")


def folder(tmp_path: Path, **files: str) -> str:
    path = tmp_path / uuid.uuid4().hex
    for name, text in files.items():
        target = path / name.replace("__", "/").replace("_json", ".json")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return str(path)


def test_is_a_store(store: Store) -> None:
    assert isinstance(store, Store)


def test_first_put_if_absent_wins_and_its_bytes_stay(store: Store) -> None:
    assert store.put_if_absent("a/b.json", b"first")
    assert not store.put_if_absent("a/b.json", b"second")
    assert store.get("a/b.json") == b"first"


def test_put_replaces(store: Store) -> None:
    store.put("a/b", b"old")
    store.put("a/b", b"new")
    assert store.get("a/b") == b"new"


def test_empty_and_binary_objects(store: Store) -> None:
    assert store.put_if_absent("empty", b"")
    assert store.put_if_absent("binary", bytes(range(256)))
    assert (store.get("empty"), store.get("binary")) == (b"", bytes(range(256)))


def test_missing_object_names_the_key(store: Store) -> None:
    store.put("folder/object", b"x")
    for key in ("folder/none", "folder", "none/at/all", "folder/object/below"):
        with pytest.raises(FileNotFoundError, match=key):
            store.get(key)
        assert not store.exists(key)
    with pytest.raises(FileNotFoundError, match="none/at/all"):
        store.local_path("none/at/all")


def test_list_is_sorted_recursive_and_by_whole_folder(store: Store) -> None:
    for key in ("c/2/x", "c/10", "c/1", "cc/1", "d"):
        store.put(key, b"x")
    assert store.list("c") == store.list("c/") == ["c/1", "c/10", "c/2/x"]
    assert store.list("c/1") == ["c/1"]
    assert store.list("none") == []
    assert store.list("") == ["c/1", "c/10", "c/2/x", "cc/1", "d"]


def test_delete_counts_and_takes_the_whole_prefix_only(store: Store) -> None:
    for key in ("c/1", "c/2/x", "c/2/manifest.json", "cc/1"):
        store.put(key, b"x")
    assert store.delete("c/1") == 1
    assert store.delete("c/1") == 0
    assert store.delete("c") == 2
    assert store.list("") == ["cc/1"]
    assert store.put_if_absent("c/1", b"again")


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../up", "a/../b", "a//b", "./a", "a/.", ".tmp/x", "a\\b", "a\0b"])
def test_bad_keys_are_refused(store: Store, key: str) -> None:
    for call in (store.get, store.exists, store.delete, store.local_path):
        with pytest.raises(ValueError, match="not allowed"):
            call(key)
    with pytest.raises(ValueError, match="not allowed"):
        store.put(key, b"x")
    with pytest.raises(ValueError, match="not allowed"):
        store.put_if_absent(key, b"x")


def test_published_folder_reads_back_and_its_manifest_keeps_it(store: Store, tmp_path: Path) -> None:
    store.publish_folder(folder(tmp_path, manifest_json="{}", weights__w="one"), "ck/v1")
    local = Path(store.local_path("ck/v1"))
    assert (local / "weights" / "w").read_text() == "one"
    second = folder(tmp_path, manifest_json="{}", weights__w="two")
    store.publish_folder(second, "ck/v1")
    assert store.get("ck/v1/weights/w") == b"one"
    assert Path(second).is_dir(), "a no-op must not eat the caller's folder"


def test_publishing_takes_the_source_away(store: Store, tmp_path: Path) -> None:
    source = folder(tmp_path, manifest_json="{}")
    store.publish_folder(source, "ck/v1")
    assert not Path(source).exists()
    with pytest.raises(FileNotFoundError, match="not a folder"):
        store.publish_folder(source, "ck/v2")


def test_local_path_of_one_object(store: Store) -> None:
    store.put("a/b.txt", b"text")
    assert Path(store.local_path("a/b.txt")).read_bytes() == b"text"


def test_one_winner_among_racing_threads(store: Store) -> None:
    for attempt in range(10):
        barrier, wins = threading.Barrier(8), []

        def race(
            number: int, key: str = f"race/{attempt}", barrier: threading.Barrier = barrier, wins: list[int] = wins
        ) -> None:
            barrier.wait()
            if store.put_if_absent(key, b"%d" % number):
                wins.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(wins) == 1
        assert store.get(f"race/{attempt}") == b"%d" % wins[0]


def test_open_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BESSEMER_HOME", str(tmp_path / "home"))
    assert open_store("").root == str(tmp_path / "home" / "store")
    assert isinstance(open_store(str(tmp_path / "s")), LocalStore)
    assert open_store(f"file://{tmp_path}/s").root == str(tmp_path / "s")
    assert isinstance(open_store("memory://x/y"), FsspecStore)
    with pytest.raises(ConfigError, match="no atomic create"):
        open_store("http://example.org/store")


def test_stores_travel_to_workers_by_pickle(tmp_path: Path) -> None:
    local = LocalStore(tmp_path)
    local.put("a", b"x")
    assert pickle.loads(pickle.dumps(local)).get("a") == b"x"
    remote = FsspecStore(f"memory://{uuid.uuid4().hex}")
    remote.put("a", b"x")
    assert pickle.loads(pickle.dumps(remote)).get("a") == b"x"


class HttpError(Exception):
    response = {"Error": {"Code": "PreconditionFailed"}}


def test_a_driver_that_reports_a_lost_race_as_einval(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(f"memory://{uuid.uuid4().hex}")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(22, "At least one of the pre-conditions did not hold") from HttpError()

    monkeypatch.setattr(store._fs, "pipe_file", refuse)
    assert not store.put_if_absent("a", b"x")


def test_an_unchanged_manifest_is_fetched_once(tmp_path: Path) -> None:
    store = FsspecStore(f"memory://{uuid.uuid4().hex}", cache=tmp_path / "cache")
    store.put("ck/w", b"one")
    store.put("ck/manifest.json", b"1")
    assert Path(store.local_path("ck"), "w").read_bytes() == b"one"
    store.put("ck/w", b"two")
    assert Path(store.local_path("ck"), "w").read_bytes() == b"one"
    store.put("ck/manifest.json", b"2")
    assert Path(store.local_path("ck"), "w").read_bytes() == b"two"


def test_what_was_written_beside_a_manifest_later_is_fetched_too(tmp_path: Path) -> None:
    """A trainer that stops saves its optimizer beside a checkpoint that others on the machine have fetched already."""
    store = FsspecStore(f"memory://{uuid.uuid4().hex}", cache=tmp_path / "cache")
    store.put("ck/w", b"one")
    store.put("ck/manifest.json", b"1")
    store.local_path("ck")
    store.put("ck/optimizer.pt", b"state")
    assert Path(store.local_path("ck"), "optimizer.pt").read_bytes() == b"state"
    assert sorted(path.name for path in Path(store.local_path("ck")).iterdir()) == ["manifest.json", "optimizer.pt", "w"]


def test_a_folder_without_manifest_is_replaced(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.publish_folder(folder(tmp_path, index="one", old="x"), "docs")
    store.publish_folder(folder(tmp_path, index="two"), "docs")
    assert store.list("docs") == ["docs/index"]
    assert store.get("docs/index") == b"two"


KILL = """
import os, signal, sys
from infra import store as module
store = module.LocalStore(sys.argv[1])
def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
"""

POINTS = {
    "half written": """
class Half:
    def __init__(self, descriptor): self.descriptor = descriptor
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def write(self, data): os.write(self.descriptor, data[: len(data) // 2]); die()
module.os.fdopen = lambda descriptor, mode: Half(descriptor)
""",
    "before sync": "module.os.fsync = die",
    "before link": "module.os.link = module.os.replace = die",
    "after link": """
link, replace = os.link, os.replace
module.os.link = lambda a, b: (link(a, b), die())
module.os.replace = lambda a, b: (replace(a, b), die())
""",
}


@pytest.mark.parametrize("method", ["put", "put_if_absent"])
@pytest.mark.parametrize("point", POINTS)
def test_kill_9_in_a_write_shows_all_or_nothing(tmp_path: Path, point: str, method: str) -> None:
    data = b"0123456789" * 1000
    script = textwrap.dedent(KILL) + POINTS[point] + f"\nstore.{method}('a/b', b'0123456789' * 1000)\n"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    store = LocalStore(tmp_path)
    assert store.list("") == (["a/b"] if point == "after link" else [])
    assert store.put_if_absent("a/b", data) == (point != "after link")
    assert store.get("a/b") == data
    time.sleep(0.01)
    assert store.sweep(older_than=0) == (method != "put" or point != "after link")
    assert store.sweep(older_than=0) == 0
    assert store.get("a/b") == data


def test_sweep_leaves_young_files(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (tmp_path / ".tmp" / "writing").write_text("x")
    assert store.sweep(older_than=60) == 0
    os.utime(tmp_path / ".tmp" / "writing", (0, 0))
    assert store.sweep(older_than=60) == 1

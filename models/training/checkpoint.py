"""Checkpoints in the store: a folder that vLLM can serve as it is, with a manifest of digests written last.

`manifest.json` names only what the same tokens reproduce (weights, config, tokenizer files, lineage), so equal runs have equal
manifests and the manifest's sha256 *is* the checkpoint's identity. Beside it lie files outside that digest: `record.json`
(the job's answer, with timings) and, every K iterations, `optimizer.pt` with its own digest in `optimizer.json`.
A folder is built aside and published in one step: a reader sees all of it or none. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from data_contracts.errors import InputError, TrainerError
from data_contracts.protocols import Store, to_json
from data_contracts.records import SCHEMA_VERSION, CheckpointRef, Record
from infra.paths import home
from infra.store import sync

MANIFEST, RECORD, OPTIMIZER, OPTIMIZER_DIGEST = "manifest.json", "record.json", "optimizer.pt", "optimizer.json"
_OUTSIDE = frozenset({MANIFEST, RECORD, OPTIMIZER, OPTIMIZER_DIGEST})
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json")
_LEFT_OUT = (".bin", ".bin.index.json", ".gguf", ".pt", ".pth", ".msgpack", ".h5", ".onnx")


class FileDigest(Record, frozen=True, kw_only=True):
    """One file of a checkpoint folder."""

    name: str
    sha256: str
    size: int


class Manifest(Record, frozen=True, kw_only=True):
    """What a checkpoint is: `parent` is the parent manifest's sha256 and `key` the training job's; both None for a base."""

    campaign: str
    version: int
    iteration: int | None
    parent: str | None
    key: str | None
    files: tuple[FileDigest, ...]
    schema_version: int = SCHEMA_VERSION


def checkpoint_uri(campaign: str, version: int) -> str:
    """Store key prefix of a policy version."""
    return f"campaigns/{campaign}/checkpoints/v{version:06d}"


def file_digest(path: Path) -> FileDigest:
    """Name, sha256 and size of a file."""
    with path.open("rb") as file:
        return FileDigest(name=path.name, sha256=hashlib.file_digest(file, "sha256").hexdigest(), size=path.stat().st_size)


def _digests(paths: list[Path]) -> tuple[FileDigest, ...]:
    """Digests of files that will be published: publishing flushes them, which takes as long as the digest and needs no CPU."""
    with ThreadPoolExecutor(1, thread_name_prefix="flush") as pool:
        flushing = [pool.submit(sync, path) for path in paths]
        digests = tuple(map(file_digest, paths))
        for flushed in flushing:
            flushed.result()
    return digests


def _workshop() -> Path:
    return home() / "trainer"


def sweep_aside() -> int:
    """Remove folders that processes killed while they built a checkpoint left on this machine; returns how many."""
    count = 0
    for folder in _workshop().glob("aside-*-*"):
        if not Path("/proc", folder.name.split("-")[1]).exists():
            shutil.rmtree(folder, ignore_errors=True)
            count += 1
    return count


@contextmanager
def aside() -> Iterator[Path]:
    """A private folder below the state folder to build a checkpoint in; removed afterwards if it was not published."""
    top = _workshop()
    top.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"aside-{os.getpid()}-", dir=top))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def seal(folder: Path, *, campaign: str, version: int, iteration: int | None, parent: str | None, key: str | None) -> Manifest:
    """Digest every file of a finished folder, bring it to disk meanwhile, and write the manifest, last."""
    files = _digests([path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in _OUTSIDE])
    manifest = Manifest(campaign=campaign, version=version, iteration=iteration, parent=parent, key=key, files=files)
    (folder / MANIFEST).write_bytes(to_json(manifest))
    return manifest


def reference(store: Store, uri: str) -> CheckpointRef:
    """The ref of a published checkpoint. Raises FileNotFoundError when there is none."""
    data = store.get(f"{uri.rstrip('/')}/{MANIFEST}")
    manifest = msgspec.json.decode(data, type=Manifest)
    size = sum(file.size for file in manifest.files)
    return CheckpointRef(uri=uri, sha256=hashlib.sha256(data).hexdigest(), version=manifest.version, size=size)


def read_manifest(store: Store, ref: CheckpointRef) -> Manifest:
    """The manifest behind a ref. Raises TrainerError when it is missing or not the one that the ref names."""
    try:
        data = store.get(f"{ref.uri.rstrip('/')}/{MANIFEST}")
    except FileNotFoundError as error:
        raise TrainerError(f"checkpoint {ref.uri} is not in the store {store.root}; was it removed by retention?") from error
    found = hashlib.sha256(data).hexdigest()
    if found != ref.sha256:
        raise TrainerError(f"checkpoint {ref.uri} has manifest {found[:12]}, expected {ref.sha256[:12]}; restore it or go back")
    return msgspec.json.decode(data, type=Manifest)


def verify(store: Store, ref: CheckpointRef) -> Path:
    """The checkpoint's folder on this machine, every file's size and sha256 checked. Raises TrainerError naming the file."""
    manifest = read_manifest(store, ref)
    folder = Path(store.local_path(ref.uri))
    for expected in manifest.files:
        path = folder / expected.name
        if not path.is_file():
            raise TrainerError(f"checkpoint {ref.uri} lacks {expected.name}; restore it or go back to an earlier version")
        if path.stat().st_size != expected.size or file_digest(path).sha256 != expected.sha256:
            raise TrainerError(f"checkpoint {ref.uri}: {expected.name} differs from its manifest; restore it or go back")
    return folder


def full_state(folder: Path) -> bool:
    """Whether a folder holds a complete optimizer state, its digest checked."""
    note = folder / OPTIMIZER_DIGEST
    if not note.is_file() or not (folder / OPTIMIZER).is_file():
        return False
    return file_digest(folder / OPTIMIZER) == msgspec.json.decode(note.read_bytes(), type=FileDigest)


def seal_full_state(folder: Path) -> None:
    """Write the digest of `optimizer.pt`, last."""
    (digest,) = _digests([folder / OPTIMIZER])
    (folder / OPTIMIZER_DIGEST).write_bytes(to_json(digest))


def companions(source: Path, target: Path, *, weights: bool = False) -> None:
    """Bring config and tokenizer files (with `weights`, the safetensors too) from one checkpoint folder to another.

    Weight files are hard links where the file system allows it: checkpoints are immutable.
    """
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.name in _OUTSIDE or path.name.startswith(".") or path.name.endswith(_LEFT_OUT):
            continue
        heavy = path.name.endswith(_WEIGHT_FILES)
        if heavy and not weights:
            continue
        _place(path, target / path.name, link=heavy)


def _place(source: Path, target: Path, *, link: bool) -> None:
    if link:
        try:
            os.link(source.resolve(), target)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, target)
    else:
        shutil.copyfile(source, target)


def import_base(model_folder: Path, *, store: Store, campaign: str) -> CheckpointRef:
    """Publish a base model as version 0 of a campaign; a no-op when it is there. Raises InputError unless it is untied."""
    uri = checkpoint_uri(campaign, 0)
    if store.exists(f"{uri}/{MANIFEST}"):
        return reference(store, uri)
    check_untied(model_folder)
    with aside() as folder:
        companions(model_folder, folder, weights=True)
        seal(folder, campaign=campaign, version=0, iteration=None, parent=None, key=None)
        store.publish_folder(str(folder), uri)
    return reference(store, uri)


def check_untied(folder: Path) -> None:
    """Refuse a model without its own output head: with tied embeddings an engine's reload can leave the head stale."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise InputError("is missing", file=str(folder / "config.json"), remedy="Point at a model folder") from error
    names: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            names |= set(json.loads(file.read(length)))
    remedy = "Resolve the model through models.base_model, which unties it"
    if not names:
        raise InputError("has no safetensors weights", file=str(folder), remedy=remedy)
    if config.get("tie_word_embeddings", True) or not any(name.endswith("lm_head.weight") for name in names):
        raise InputError("ties its output head to its embeddings", file=str(folder), field="tie_word_embeddings", remedy=remedy)

"""Checkpoints: whole or absent, named by what they hold, and refused when anything differs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from data_contracts.errors import InputError, TrainerError
from infra.store import LocalStore
from models.training import checkpoint as files
from models.training.learner import Learner
from tests.models.training_parts import small_folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BESSEMER_HOME", str(tmp_path / "home"))
    return tmp_path


def test_a_base_model_becomes_version_0_once(home: Path) -> None:
    store, model = LocalStore(home / "store"), small_folder(home / "model")
    (model / "pytorch_model.bin").write_bytes(b"old format")
    ref = files.import_base(model, store=store, campaign="c")
    assert (ref.uri, ref.version) == ("campaigns/c/checkpoints/v000000", 0)
    folder = files.verify(store, ref)
    assert {path.name for path in folder.iterdir()} >= {"model.safetensors", "config.json", "tokenizer.json", "manifest.json"}
    assert not (folder / "pytorch_model.bin").exists()
    assert ref.size == sum(path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json")
    assert files.import_base(model, store=store, campaign="c") == ref
    assert list((home / "home" / "trainer").iterdir()) == []


def test_equal_models_have_equal_manifests_in_any_store(home: Path) -> None:
    model = small_folder(home / "model")
    refs = [files.import_base(model, store=LocalStore(home / name), campaign="c") for name in ("one", "two")]
    assert refs[0] == refs[1]


@pytest.mark.parametrize("how", ["flag", "head"])
def test_a_tied_model_is_refused(home: Path, how: str) -> None:
    model = small_folder(home / "model")
    if how == "flag":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    else:
        tensors = load_file(model / "model.safetensors")
        tensors.pop("lm_head.weight")
        save_file(tensors, model / "model.safetensors")
    with pytest.raises(InputError, match="ties its output head"):
        files.import_base(model, store=LocalStore(home / "store"), campaign="c")


def test_a_folder_without_a_model_is_refused(home: Path) -> None:
    (home / "empty").mkdir()
    with pytest.raises(InputError, match=r"config\.json"):
        files.import_base(home / "empty", store=LocalStore(home / "store"), campaign="c")


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_refused_by_file(home: Path, damage: str) -> None:
    store = LocalStore(home / "store")
    ref = files.import_base(small_folder(home / "model"), store=store, campaign="c")
    path = Path(store.local_path(ref.uri)) / "tokenizer.json"
    if damage == "flip":
        path.write_text("[]")
    elif damage == "truncate":
        path.write_text("{")
    else:
        path.unlink()
    with pytest.raises(TrainerError, match=r"tokenizer\.json"):
        files.verify(store, ref)


def test_a_ref_to_another_manifest_or_to_nothing_is_refused(home: Path) -> None:
    store = LocalStore(home / "store")
    ref = files.import_base(small_folder(home / "model"), store=store, campaign="c")
    with pytest.raises(TrainerError, match="expected dead"):
        files.verify(store, msgspec.structs.replace(ref, sha256="dead" * 16))
    with pytest.raises(TrainerError, match="not in the store"):
        files.verify(store, msgspec.structs.replace(ref, uri="campaigns/c/checkpoints/v000009"))


def test_weights_and_full_state_come_back_bit_for_bit(home: Path) -> None:
    learner = Learner(small_folder(home / "model"))
    for parameter in learner.parameters:
        parameter.grad = torch.ones_like(parameter)
    learner.optimizer.param_groups[0]["lr"] = 1e-3
    learner.step()
    folder = small_folder(home / "saved", seed=1)
    learner.save_weights(folder)
    learner.save_optimizer(folder)
    assert not files.full_state(folder)  # no digest yet: a kill here leaves no state
    files.seal_full_state(folder)
    assert files.full_state(folder)
    other = Learner(home / "model")
    assert other.load(folder)
    other.load_optimizer(folder)
    assert other.holds(folder)
    assert other.steps == 1
    for one, two in zip(learner.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert torch.equal(one["exp_avg"], two["exp_avg"])
    (folder / "optimizer.pt").write_bytes(b"torn")
    assert not files.full_state(folder)


def test_the_optimizer_state_is_outside_the_manifest(home: Path) -> None:
    folder = small_folder(home / "model")
    plain = files.seal(folder, campaign="c", version=1, iteration=0, parent="p", key="k")
    for name in ("optimizer.pt", "optimizer.json", "record.json"):
        (folder / name).write_text("x")
    assert files.seal(folder, campaign="c", version=1, iteration=0, parent="p", key="k") == plain


def test_an_unpublished_folder_leaves_nothing(home: Path) -> None:
    seen: list[Path] = []

    def killed() -> None:
        with files.aside() as folder:
            seen.append(folder)
            (folder / "model.safetensors").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        killed()
    assert not seen[0].exists()


def test_what_a_killed_process_left_is_swept_and_nothing_else(home: Path) -> None:
    workshop = home / "home" / "trainer"
    for name in (f"aside-{os.getpid()}-x", "aside-999999999-x", "other"):
        (workshop / name).mkdir(parents=True)
    assert files.sweep_aside() == 1
    assert sorted(path.name for path in workshop.iterdir()) == [f"aside-{os.getpid()}-x", "other"]

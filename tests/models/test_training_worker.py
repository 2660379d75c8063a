"""The real trainer process: idempotent keys, epochs, kill -9, resume, and two ranks that equal one."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from safetensors.torch import load_file

from data_contracts.config import AlgorithmConfig, TrainConfig
from data_contracts.errors import ConfigError, StaleWriter, TrainerError
from data_contracts.records import CheckpointRef, TrainJob, TrainResult
from infra.store import LocalStore
from models.base_model import resolve
from models.training.checkpoint import checkpoint_uri, full_state, import_base, read_manifest, verify
from models.training.learner import load_model
from tests.models.training_parts import store_batch
from tests.plugins.trainer import TrainerProcess, running_trainer


def make_job(store: LocalStore, parent: CheckpointRef, iteration: int, *, campaign: str = "c", **changes: Any) -> TrainJob:
    episodes, scores = store_batch(store, iteration=iteration, rewards=changes.pop("rewards", None))
    fields: dict[str, Any] = {
        "key": f"{campaign}-{iteration}",
        "campaign": campaign,
        "iteration": iteration,
        "epoch": 1,
        "parent": parent,
        "episodes": episodes,
        "scores": scores,
        "new_version": iteration + 1,
        "checkpoint_uri": checkpoint_uri(campaign, iteration + 1),
        "save_full_state": False,
        "train": {
            "train": TrainConfig(learning_rate=1e-3, micro_batch_tokens=64, seconds=120).model_dump(mode="json"),
            "algorithm": AlgorithmConfig().model_dump(mode="json"),
            "temperature": 0.9,
        },
    }
    return TrainJob(**(fields | changes))


def base(store: LocalStore, campaign: str = "c") -> CheckpointRef:
    return import_base(resolve("tiny"), store=store, campaign=campaign)


def weights(store: LocalStore, ref: CheckpointRef) -> dict[str, torch.Tensor]:
    return load_file(verify(store, ref) / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run_chain(trainer: TrainerProcess, count: int, *, start: CheckpointRef | None = None, first: int = 0) -> list[TrainResult]:
    parent, results = start or base(trainer.store), []
    for iteration in range(first, first + count):
        results.append(trainer.client.train(make_job(trainer.store, parent, iteration)))
        parent = results[-1].checkpoint
    return results


@pytest.fixture(scope="module")
def uninterrupted(trainer_process: TrainerProcess) -> tuple[LocalStore, list[TrainResult]]:
    """Four iterations in one go in one life of one process: what every interrupted run must equal."""
    return trainer_process.store, run_chain(trainer_process, 4)


def test_a_job_trains_and_its_key_answers_from_record(trainer_process: TrainerProcess) -> None:
    store, campaign = trainer_process.store, "record"
    parent = base(store, campaign)
    job = make_job(store, parent, 0, campaign=campaign)
    result = trainer_process.client.train(job)
    assert result.outcome == "trained"
    assert result.metrics["grad_norm"] > 0
    assert result.intervals[0].kind == "train_step"
    assert not equal(weights(store, parent), weights(store, result.checkpoint))
    manifest = read_manifest(store, result.checkpoint)
    assert (manifest.version, manifest.parent, manifest.key) == (1, parent.sha256, job.key)
    again = trainer_process.client.train(msgspec.structs.replace(job, epoch=2))
    assert again == result
    status = trainer_process.client.status()
    assert (status["checkpoint"], status["version"], status["busy"]) == (result.checkpoint.sha256, 1, False)


def test_the_published_folder_loads_as_a_model(trainer_process: TrainerProcess) -> None:
    store, campaign = trainer_process.store, "folder"
    result = trainer_process.client.train(make_job(store, base(store, campaign), 0, campaign=campaign))
    folder = verify(store, result.checkpoint)
    assert {path.name for path in resolve("tiny").iterdir() if path.name.startswith("token")} <= {
        p.name for p in folder.iterdir()
    }
    assert load_model(folder).config.tie_word_embeddings is False


def test_a_passed_epoch_is_refused(trainer_process: TrainerProcess) -> None:
    store, campaign = trainer_process.store, "fence"
    parent = base(store, campaign)
    first = trainer_process.client.train(make_job(store, parent, 0, campaign=campaign, epoch=7))
    with pytest.raises(StaleWriter, match=r"epoch is 6, 7 was seen"):
        trainer_process.client.train(make_job(store, first.checkpoint, 1, campaign=campaign, epoch=6))


def test_nothing_to_learn_publishes_the_same_weights(trainer_process: TrainerProcess) -> None:
    store, campaign = trainer_process.store, "flat"
    parent = base(store, campaign)
    result = trainer_process.client.train(make_job(store, parent, 50, campaign=campaign, rewards=[0.5] * 12))
    assert result.outcome == "no_signal"
    assert equal(weights(store, parent), weights(store, result.checkpoint))


def test_logprobs_of_current_and_parent_weights(trainer_process: TrainerProcess) -> None:
    store, campaign = trainer_process.store, "logprobs"
    parent = base(store, campaign)
    child = trainer_process.client.train(make_job(store, parent, 0, campaign=campaign)).checkpoint
    sequences = [[1, 2, 3, 4, 5], [7], [], [9, 9, 9]]
    for ref in (child, parent, child):
        found = trainer_process.client.logprobs(ref, sequences)
        assert [len(one) for one in found] == [5, 1, 0, 3]
        model = load_model(verify(store, ref))
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([sequences[0]])).logits[0].log_softmax(-1)
        wanted = [0.0] + [expected[t - 1, sequences[0][t]].item() for t in range(1, 5)]
        assert found[0] == pytest.approx(wanted, abs=2e-5)


def test_bad_jobs_are_refused_by_name_and_leave_the_trainer_alive(trainer_process: TrainerProcess) -> None:
    store, campaign = trainer_process.store, "bad"
    parent = base(store, campaign)
    job = make_job(store, parent, 0, campaign=campaign)
    with pytest.raises(ConfigError, match=r"train\.learning_rate"):
        trainer_process.client.train(msgspec.structs.replace(job, train={"train": {"learning_rate": -1}}))
    with pytest.raises(TrainerError, match="expected dead"):
        trainer_process.client.train(msgspec.structs.replace(job, parent=msgspec.structs.replace(parent, sha256="dead" * 16)))
    answer = httpx.post(f"{trainer_process.client.address}/train", content=b'{"key": 3}', trust_env=False)
    assert answer.status_code == 422
    assert "$.key" in answer.json()["message"]
    assert trainer_process.client.train(job).outcome == "trained"


def test_two_posts_of_one_key_train_once(trainer_process: TrainerProcess) -> None:
    store, campaign = trainer_process.store, "twice"
    job = make_job(store, base(store, campaign), 0, campaign=campaign)
    results: list[TrainResult] = []
    threads = [threading.Thread(target=lambda: results.append(trainer_process.client.train(job))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 3
    assert results[0] == results[1] == results[2]


def wait_for(mark: Path) -> None:
    deadline = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < deadline, f"{mark} did not appear"
        time.sleep(0.02)


def test_killed_restarted_and_stopped_it_equals_the_uninterrupted_run(
    tmp_path: Path, uninterrupted: tuple[LocalStore, list[TrainResult]]
) -> None:
    """kill -9 between step and checkpoint, a client that waits for the restart, a replay, a shutdown, a resume from state."""
    full_store, full = uninterrupted
    store, hold = LocalStore(tmp_path / "store"), tmp_path / "hold"
    waited: list[TrainResult] = []
    with running_trainer(store, tmp_path, env={"BESSEMER_TRAINER_HOLD": str(hold)}) as trainer:
        results = run_chain(trainer, 2)
        hold.mkdir()
        job = make_job(store, results[-1].checkpoint, 2)
        waiting = threading.Thread(target=lambda: waited.append(trainer.client.train(job)))
        waiting.start()
        wait_for(hold / "reached")
        os.kill(trainer.worker_pid(), signal.SIGKILL)
        trainer.process.wait(timeout=30)
        shutil.rmtree(hold)
        assert not store.exists(f"{job.checkpoint_uri}/manifest.json")
        port = int(trainer.client.address.rsplit(":", 1)[1])
    with running_trainer(store, tmp_path, port=port) as trainer:  # knows nothing: it repeats iterations 0 and 1, then trains 2
        waiting.join(timeout=90)
        (result,) = waited
        assert result.metrics["replayed_jobs"] == 2
        assert result.metrics["replay_exact"] == 1.0
        assert result.checkpoint == full[2].checkpoint  # the manifest's digest: equal weights, bit for bit
        assert trainer.client.shutdown()
        assert trainer.process.wait(timeout=60) == 0
    assert full_state(Path(store.local_path(result.checkpoint.uri)))
    with running_trainer(store, tmp_path) as trainer:
        last = trainer.client.train(make_job(store, result.checkpoint, 3, epoch=2))
    assert (last.metrics["restored"], last.metrics["replayed_jobs"]) == (1.0, 0.0)
    assert last.checkpoint == full[3].checkpoint
    assert equal(weights(store, last.checkpoint), weights(full_store, full[3].checkpoint))


def test_a_missing_record_is_completed_from_the_checkpoint(trainer_process: TrainerProcess) -> None:
    store, campaign = trainer_process.store, "record-lost"
    job = make_job(store, base(store, campaign), 0, campaign=campaign)
    result = trainer_process.client.train(job)
    store.delete(f"campaigns/{campaign}/training/{job.key}.json")
    written = Path(store.local_path(result.checkpoint.uri)) / "model.safetensors"
    os.utime(written, (1, 1))
    assert trainer_process.client.train(job) == result
    assert written.stat().st_mtime == 1  # not trained again


def test_another_jobs_checkpoint_is_not_taken_for_this_ones(trainer_process: TrainerProcess) -> None:
    store, campaign = trainer_process.store, "other"
    job = make_job(store, base(store, campaign), 0, campaign=campaign)
    trainer_process.client.train(job)
    with pytest.raises(TrainerError, match="was trained by job other-0, not changed"):
        trainer_process.client.train(msgspec.structs.replace(job, key="changed"))


def test_two_ranks_equal_one(tmp_path: Path, uninterrupted: tuple[LocalStore, list[TrainResult]]) -> None:
    full_store, full = uninterrupted
    store = LocalStore(tmp_path / "store")
    with running_trainer(store, tmp_path, processes=2) as trainer:
        assert trainer.client.status()["processes"] == 2
        results = run_chain(trainer, 2)
        with pytest.raises(ConfigError):
            trainer.client.train(make_job(store, results[-1].checkpoint, 2, train={"temperature": 0}))
        results += run_chain(trainer, 1, start=results[-1].checkpoint, first=2)
        trainer.client.shutdown()
        assert trainer.process.wait(timeout=60) == 0
    for one, two in zip(full, results, strict=False):
        for name in ("loss", "grad_norm", "entropy", "kl_sampler", "ratio_max", "trained_tokens", "sampler_ratio_max"):
            assert two.metrics[name] == pytest.approx(one.metrics[name], rel=1e-3, abs=2e-6), name
    ours, theirs = weights(store, results[0].checkpoint), weights(full_store, full[0].checkpoint)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=2e-5, rtol=0)

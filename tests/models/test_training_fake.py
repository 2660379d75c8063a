"""The shipped fake keeps the trainer's promises: keys, epochs, records, crash safety; and the plan of a replay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from data_contracts.config import AlgorithmConfig, TrainConfig
from data_contracts.errors import ConfigError, StaleWriter, TrainerError
from data_contracts.protocols import Store, Trainer
from data_contracts.records import CheckpointRef, TrainJob
from infra.store import LocalStore, MemoryStore
from models.training import transactions
from models.training.checkpoint import checkpoint_uri, read_manifest
from models.training.command import trainer_command
from models.training.fake import FakeTrainer, fake_base
from tests.models.training_parts import store_batch


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BESSEMER_HOME", str(tmp_path / "home"))


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(tmp_path / "store") if request.param == "local" else MemoryStore(tmp_path / "memory")


def make_job(store: Store, parent: CheckpointRef, iteration: int, **changes: Any) -> TrainJob:
    episodes, scores = store_batch(store, iteration=iteration, rewards=changes.pop("rewards", None))
    fields: dict[str, Any] = {
        "key": f"k{iteration}",
        "campaign": "c",
        "iteration": iteration,
        "epoch": 1,
        "parent": parent,
        "episodes": episodes,
        "scores": scores,
        "new_version": iteration + 1,
        "checkpoint_uri": checkpoint_uri("c", iteration + 1),
        "save_full_state": False,
        "train": {},
    }
    return TrainJob(**(fields | changes))


def test_a_key_is_trained_once_and_answers_for_ever(store: Store) -> None:
    trainer: Trainer = FakeTrainer(store)
    job = make_job(store, fake_base(store, "c"), 0)
    result = trainer.train(job)
    again = FakeTrainer(store)
    assert again.train(job) == result
    assert again.trained == []
    manifest = read_manifest(store, result.checkpoint)
    assert (manifest.version, manifest.key, manifest.parent) == (1, "k0", job.parent.sha256)


def test_equal_histories_have_equal_checkpoints(tmp_path: Path) -> None:
    ends = []
    for name in ("one", "two"):
        store = LocalStore(tmp_path / name)
        ref = fake_base(store, "c")
        for iteration in range(3):
            ref = FakeTrainer(store).train(make_job(store, ref, iteration)).checkpoint
        ends.append(ref)
    assert ends[0] == ends[1]


def test_a_kill_before_the_checkpoint_costs_only_the_work(store: Store) -> None:
    class Killed(BaseException):
        pass

    def kill(job: TrainJob) -> None:
        raise Killed

    job = make_job(store, fake_base(store, "c"), 0)
    with pytest.raises(Killed):
        FakeTrainer(store, between=kill).train(job)
    assert transactions.finished(store, job) is None
    trainer = FakeTrainer(store)
    assert trainer.train(msgspec.structs.replace(job, epoch=2)).outcome == "trained"
    assert trainer.trained == ["k0"]


def test_a_kill_before_the_record_costs_nothing(store: Store) -> None:
    trainer = FakeTrainer(store)
    job = make_job(store, fake_base(store, "c"), 0)
    result = trainer.train(job)
    store.delete("campaigns/c/training/k0.json")
    assert trainer.train(job) == result
    assert trainer.trained == ["k0"]


def test_a_writer_that_was_passed_while_it_worked_publishes_nothing(store: Store) -> None:
    job = make_job(store, fake_base(store, "c"), 0)
    trainer = FakeTrainer(store, between=lambda job: transactions.fence(store, "c", 2))
    with pytest.raises(StaleWriter, match="epoch is 1, 2 was seen"):
        trainer.train(job)
    assert not store.exists(f"{job.checkpoint_uri}/manifest.json")


def test_epochs_are_per_campaign_and_only_rise(store: Store) -> None:
    transactions.fence(store, "c", 3)
    transactions.fence(store, "d", 1)
    transactions.fence(store, "c", 3)
    with pytest.raises(StaleWriter):
        transactions.fence(store, "c", 2)


def test_a_batch_without_variance_is_no_signal(store: Store) -> None:
    trainer, base = FakeTrainer(store), fake_base(store, "c")
    result = trainer.train(make_job(store, base, 0, rewards=[0.5] * 12))
    assert result.outcome == "no_signal"
    assert trainer.logprobs(result.checkpoint, [[1, 2, 3]]) == trainer.logprobs(base, [[1, 2, 3]])


def test_logprobs_depend_on_weights_and_past(store: Store) -> None:
    trainer, base = FakeTrainer(store), fake_base(store, "c")
    child = trainer.train(make_job(store, base, 0)).checkpoint
    ((first, *rest), other, empty) = trainer.logprobs(base, [[1, 2, 3], [1, 2, 4], []])
    assert first == 0.0
    assert all(-8 <= value <= 0 for value in rest)
    assert (other[1], empty) == (rest[0], [])
    assert trainer.logprobs(child, [[1, 2, 3]]) != [[first, *rest]]


def test_a_replay_starts_at_the_last_full_state(store: Store) -> None:
    trainer = FakeTrainer(store)
    refs, jobs = [fake_base(store, "c")], []
    for iteration in range(4):
        jobs.append(make_job(store, refs[-1], iteration))
        refs.append(trainer.train(jobs[-1]).checkpoint)
    known = transactions.lineage(store, "c")
    assert transactions.replay_plan(store, refs[4], known, lambda ref: False) == (refs[0], jobs)
    assert transactions.replay_plan(store, refs[4], known, lambda ref: ref == refs[2]) == (refs[2], jobs[2:])
    assert transactions.replay_plan(store, refs[2], known, lambda ref: ref == refs[2]) == (refs[2], [])
    store.delete(f"campaigns/c/training/{jobs[1].key}.json")
    with pytest.raises(TrainerError, match=f"record of job {jobs[1].key} is needed"):
        transactions.replay_plan(store, refs[4], transactions.lineage(store, "c"), lambda ref: False)
    store.delete(refs[2].uri)
    with pytest.raises(TrainerError, match="v000002 is needed"):
        transactions.replay_plan(store, refs[4], known, lambda ref: ref == refs[2])


@pytest.mark.parametrize(
    ("train", "field"),
    [
        ({"train": {"betas": "x"}}, r"train\.betas"),
        ({"algorithm": {"name": "ppo"}}, r"algorithm\.name"),
        ({"algorithm": {"clip": 1}}, r"algorithm\.clip"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"sampler": {}}, r"train\.sampler"),
    ],
)
def test_bad_settings_name_the_field(store: Store, train: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        FakeTrainer(store).train(make_job(store, fake_base(store, "c"), 0, train=train))


def test_settings_survive_json(store: Store) -> None:
    wanted = TrainConfig(betas=(0.8, 0.9)), AlgorithmConfig(name="rloo")
    train = {"train": wanted[0].model_dump(mode="json"), "algorithm": wanted[1].model_dump(mode="json"), "temperature": 0.5}
    found = transactions.settings(make_job(store, fake_base(store, "c"), 0, train=train))
    assert (found.train, found.algorithm, found.temperature) == (*wanted, 0.5)


def test_the_command_line_of_one_and_of_several_ranks() -> None:
    argv, env = trainer_command(store="/s", port=1234, threads=2)
    assert {"--cpu", "--num_processes=1", "--store=/s", "--port=1234", "--threads=2"} <= set(argv)
    assert env["ACCELERATE_USE_CPU"] == "true"
    several, _ = trainer_command(store="/s", port=1, processes=2)
    assert {"--multi_gpu", "--num_processes=2", "--cpu"} <= set(several)
    gpu, env = trainer_command(store="/s", port=1, cpu=False)
    assert "--cpu" not in gpu
    assert "ACCELERATE_USE_CPU" not in env

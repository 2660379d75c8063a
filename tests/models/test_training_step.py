"""One update: split-invariant, blind to masked positions, honest about having nothing to learn, and never half done."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from data_contracts.config import AlgorithmConfig, TrainConfig
from data_contracts.errors import ContractError, TrainerError
from data_contracts.records import Episode, Failure
from models.training.batch import TrainBatch, build_batch
from models.training.learner import Learner, load_model
from models.training.step import StepResult, train_step
from tests.models.training_parts import make_episode, make_group, make_scores, small_folder

TRAIN = TrainConfig(learning_rate=1e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("model"))


def episodes_of(*groups: str, **changes: Any) -> list[Episode]:
    return [episode for group in groups for episode in make_group(group, **changes)]


def batch_of(episodes: list[Episode], algorithm: AlgorithmConfig, rewards: list[float] | None = None) -> TrainBatch:
    return build_batch(episodes, make_scores(episodes, rewards=rewards), algorithm=algorithm)


def update(
    folder: Path, batch: TrainBatch, algorithm: AlgorithmConfig, train: TrainConfig = TRAIN, **more: Any
) -> tuple[StepResult, torch.Tensor, Learner]:
    learner = Learner(folder)
    result = train_step(learner, batch, train=train, algorithm=algorithm, **more)
    return result, torch.cat([parameter.detach().flatten().clone() for parameter in learner.parameters]), learner


def gradient(
    folder: Path, batch: TrainBatch, algorithm: AlgorithmConfig, train: TrainConfig = TRAIN, **more: Any
) -> torch.Tensor:
    """The unclipped gradient of one step, read before the optimizer uses it."""
    learner = Learner(folder)
    kept: list[torch.Tensor] = []
    learner.step = lambda: kept.extend(p.grad.flatten().clone() for p in learner.parameters)  # type: ignore[method-assign]
    train_step(learner, batch, train=train.model_copy(update={"max_grad_norm": 1e9}), algorithm=algorithm, **more)
    return torch.cat(kept)


def same(one: torch.Tensor, other: torch.Tensor, tolerance: float = 5e-6) -> None:
    assert (one - other).norm() <= tolerance * one.norm()


ALGORITHMS = [
    AlgorithmConfig(),
    AlgorithmConfig(name="dr_grpo", aggregation="dr_grpo", aggregation_length=16),
    AlgorithmConfig(name="rloo", aggregation="sequence_mean_token_mean", tis_cap=None),
    AlgorithmConfig(aggregation="sequence_mean_token_sum", dual_clip=3.0, entropy_coef=0.01, kl_coef=0.1),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.name}-{a.aggregation}")
def test_micro_batches_and_sharing_change_nothing(folder: Path, algorithm: AlgorithmConfig) -> None:
    batch = batch_of(episodes_of("a", "b", "c", turns=2), algorithm)
    reference = load_model(folder)
    whole = gradient(folder, batch, algorithm, reference=reference)
    for budget, share in ((64, True), (64, False), (4096, False)):
        split = gradient(folder, batch, algorithm, TrainConfig(micro_batch_tokens=budget), share=share, reference=reference)
        same(whole, split)


def test_the_gradient_is_that_of_the_formula_written_out(folder: Path) -> None:
    algorithm = AlgorithmConfig()
    batch = batch_of(episodes_of("a", "b"), algorithm)
    model = load_model(folder)
    total, count = torch.zeros(()), int(batch.lengths.sum())
    for sequence, advantage in zip(batch.sequences_E, batch.advantages_E, strict=True):
        ids = torch.from_numpy(sequence.token_ids)
        logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)[sequence.targets - 1, ids[sequence.targets]]
        weight = (logp.detach() - torch.from_numpy(sequence.logprobs).float()).exp().clamp(max=2.0)
        total = total - (weight * (logp - logp.detach()).exp() * float(advantage)).sum() / count
    total.backward()
    same(torch.cat([p.grad.flatten() for p in model.parameters()]), gradient(folder, batch, algorithm))
    result, _, _ = update(folder, batch, algorithm)
    assert result.metrics["loss"] == pytest.approx(total.item(), abs=1e-6)


def test_permuting_the_batch_changes_nothing(folder: Path) -> None:
    algorithm = AlgorithmConfig()
    episodes = episodes_of("a", "b")
    scores = {score.episode_id: score for score in make_scores(episodes)}
    shuffled = [episodes[i] for i in np.random.default_rng(0).permutation(len(episodes))]
    plain = build_batch(episodes, list(scores.values()), algorithm=algorithm)
    other = build_batch(shuffled, [scores[e.id] for e in reversed(episodes)], algorithm=algorithm)
    same(gradient(folder, plain, algorithm), gradient(folder, other, algorithm))


def test_masked_positions_never_matter_even_when_they_are_nan(folder: Path) -> None:
    algorithm = AlgorithmConfig()
    episodes = episodes_of("a", "b", turns=2)
    poisoned = [
        msgspec.structs.replace(
            e, logprobs_T=tuple(p if m else math.nan for p, m in zip(e.logprobs_T, e.loss_mask_T, strict=True))
        )
        for e in episodes
    ]
    assert torch.equal(
        gradient(folder, batch_of(episodes, algorithm), algorithm), gradient(folder, batch_of(poisoned, algorithm), algorithm)
    )


def test_trailing_observation_tokens_change_nothing(folder: Path) -> None:
    algorithm = AlgorithmConfig()
    episodes = episodes_of("a", "b")
    longer = [
        msgspec.structs.replace(
            e,
            token_ids_T=(*e.token_ids_T, 90, 91),
            loss_mask_T=(*e.loss_mask_T, 0, 0),
            logprobs_T=(*e.logprobs_T, 0.0, 0.0),
        )
        for e in episodes
    ]
    assert torch.equal(
        gradient(folder, batch_of(episodes, algorithm), algorithm), gradient(folder, batch_of(longer, algorithm), algorithm)
    )


def test_a_zero_advantage_group_counts_in_the_denominator_and_nowhere_else(folder: Path) -> None:
    algorithm = AlgorithmConfig()
    rewards = [1.0, 0, 0, 1, 0.5, 0.5, 0.5, 0.5]
    mixed = batch_of(episodes_of("a", "b"), algorithm, rewards)
    alone = batch_of(episodes_of("a"), algorithm, rewards[:4])
    scale = float(alone.lengths.sum() / mixed.lengths.sum())
    same(gradient(folder, alone, algorithm) * scale, gradient(folder, mixed, algorithm))
    result, _, _ = update(folder, mixed, algorithm)
    assert result.metrics["zero_advantage_share"] == 0.5
    assert result.metrics["trained_tokens"] == alone.lengths.sum()
    assert result.metrics["tokens"] == mixed.lengths.sum()


@pytest.mark.parametrize("term", ["kl_coef", "entropy_coef"])
def test_with_other_terms_zero_advantage_is_not_skipped(folder: Path, tmp_path: Path, term: str) -> None:
    algorithm = AlgorithmConfig(**{term: 0.1})  # type: ignore[arg-type]
    batch = batch_of(episodes_of("a"), algorithm, [0.5] * 4)
    reference = load_model(small_folder(tmp_path, seed=1))
    assert gradient(folder, batch, algorithm, reference=reference).norm() > 0


def test_no_signal_leaves_weights_and_optimizer_alone(folder: Path) -> None:
    algorithm = AlgorithmConfig()
    learner = Learner(folder)
    train_step(learner, batch_of(episodes_of("a"), algorithm, [1.0, 0, 0, 0]), train=TRAIN, algorithm=algorithm)
    before = torch.cat([p.detach().flatten().clone() for p in learner.parameters])
    result = train_step(learner, batch_of(episodes_of("a"), algorithm, [0.3] * 4), train=TRAIN, algorithm=algorithm)
    assert result.outcome == "no_signal"  # momentum alone would have moved the weights
    assert torch.equal(before, torch.cat([p.detach().flatten() for p in learner.parameters]))
    assert learner.steps == 1
    assert result.metrics["loss"] == 0.0
    assert result.metrics["reward_mean"] == pytest.approx(0.3)


def test_an_empty_batch_is_no_signal(folder: Path) -> None:
    result, _, _ = update(folder, build_batch([], [], algorithm=AlgorithmConfig()), AlgorithmConfig())
    assert result.outcome == "no_signal"
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_metrics_are_named_finite_and_right(folder: Path) -> None:
    algorithm = AlgorithmConfig(kl_coef=0.1)
    batch = batch_of(episodes_of("a", "b"), algorithm)
    result, _, _ = update(folder, batch, algorithm, TrainConfig(epochs=2), reference=load_model(folder))
    wanted = {
        "loss", "kl_sampler", "kl_sampler_k3", "kl_reference", "entropy", "ratio_mean", "ratio_max", "clip_fraction",
        "sampler_ratio_mean", "sampler_ratio_max", "grad_norm", "learning_rate", "tokens", "trained_tokens", "forward_tokens",
        "tokens_per_second", "reward_mean", "reward_std", "zero_advantage_share", "step_seconds",
    }  # fmt: skip
    assert wanted <= set(result.metrics)
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.metrics["kl_reference"] == pytest.approx(0, abs=1e-9)  # first epoch: the policy is the reference
    model = load_model(folder)
    logp = []
    for sequence in batch.sequences_E:
        ids = torch.from_numpy(sequence.token_ids)
        with torch.no_grad():
            logp.append(model(input_ids=ids[None]).logits[0].log_softmax(-1)[sequence.targets - 1, ids[sequence.targets]])
    difference = np.concatenate([s.logprobs for s in batch.sequences_E]) - torch.cat(logp).numpy()
    assert result.metrics["kl_sampler"] == pytest.approx(difference.mean(), abs=1e-4)
    assert result.metrics["kl_sampler_k3"] == pytest.approx((np.exp(-difference) + difference - 1).mean(), rel=1e-3)


def test_a_second_epoch_moves_the_ratio_and_steps_again(folder: Path) -> None:
    algorithm = AlgorithmConfig()
    batch = batch_of(episodes_of("a", "b"), algorithm)
    one, _, _ = update(folder, batch, algorithm)
    two, _, learner = update(folder, batch, algorithm, TrainConfig(learning_rate=1e-2, epochs=2))
    assert one.metrics["ratio_max"] == pytest.approx(1.0)
    assert two.metrics["ratio_max"] > 1.001
    assert learner.steps == 2


def test_warm_up_scales_the_learning_rate(folder: Path) -> None:
    algorithm = AlgorithmConfig()
    batch = batch_of(episodes_of("a"), algorithm, [1.0, 0, 0, 0])
    learner = Learner(folder)
    train = TrainConfig(learning_rate=1e-3, warmup_steps=4)
    rates = [train_step(learner, batch, train=train, algorithm=algorithm).metrics["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


def test_the_update_raises_the_probability_of_what_was_rewarded(folder: Path) -> None:
    algorithm = AlgorithmConfig()
    good, bad = [1, 2, 3, 4], [1, 2, 3, 5]
    episodes = [make_episode(good if m % 2 else bad, [0, 0, 0, 1], group="a", member=m) for m in range(4)]
    batch = batch_of(episodes, algorithm, [0.0, 1, 0, 1])
    learner = Learner(folder)
    for _ in range(5):
        train_step(learner, batch, train=TRAIN, algorithm=algorithm)
    with torch.no_grad():
        probabilities = learner.model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1].softmax(-1)
        before = load_model(folder)(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1].softmax(-1)
    assert probabilities[4] > before[4]
    assert probabilities[5] < before[5]


def test_a_non_finite_loss_takes_no_step(folder: Path) -> None:
    algorithm = AlgorithmConfig(tis_cap=None)
    learner = Learner(folder)
    with torch.no_grad():
        learner.model.lm_head.weight[3, 0] = math.inf
    before = [p.detach().clone() for p in learner.parameters]
    with pytest.raises(TrainerError, match="not taken"):
        train_step(learner, batch_of(episodes_of("a"), algorithm, [1.0, 0, 0, 0]), train=TRAIN, algorithm=algorithm)
    assert all(torch.equal(b, p) for b, p in zip(before, learner.parameters, strict=True))
    assert learner.steps == 0


def test_kl_without_reference_is_refused(folder: Path) -> None:
    algorithm = AlgorithmConfig(kl_coef=0.1)
    with pytest.raises(TrainerError, match="reference"):
        update(folder, batch_of(episodes_of("a"), algorithm), algorithm)


def test_infra_failures_leave_before_the_baseline() -> None:
    algorithm = AlgorithmConfig(name="dr_grpo")
    episodes = make_group("a")
    lost = make_episode(
        [1, 2],
        [0, 1],
        group="a",
        member=9,
        outcome="infra_failure",
        failure=Failure(cause="node_lost", detail=""),
        verdict=None,
    )
    batch = build_batch([lost, *episodes], make_scores(episodes, rewards=[1.0, 0, 0, 0]), algorithm=algorithm)
    assert batch.advantages_E.tolist() == [0.75, -0.25, -0.25, -0.25]


def _replace(episode: Episode, **changes: Any) -> Episode:
    return msgspec.structs.replace(episode, **changes)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda es, ss: (es, ss[1:]), "no score for episode 'a/0'"),
        (lambda es, ss: (es[1:], ss), "a score for 'a/0'"),
        (lambda es, ss: (es, [*ss, ss[0]]), "two scores for episode 'a/0'"),
        (lambda es, ss: ([*es, es[1]], ss), "episode 'a/1' appears twice"),
        (lambda es, ss: (es, [msgspec.structs.replace(ss[0], reward=math.nan), *ss[1:]]), "reward of 'a/0' is nan"),
        (lambda es, ss: ([_replace(es[0], loss_mask_T=es[0].loss_mask_T[:-1]), *es[1:]], ss), "mask entries"),
        (lambda es, ss: ([_replace(es[0], loss_mask_T=(1, *es[0].loss_mask_T[1:])), *es[1:]], ss), "first token"),
        (lambda es, ss: ([_replace(es[0], loss_mask_T=(*es[0].loss_mask_T[:-1], 2)), *es[1:]], ss), "neither 0 nor 1"),
        (lambda es, ss: ([_replace(es[0], logprobs_T=(*es[0].logprobs_T[:-1], math.inf)), *es[1:]], ss), "non-finite"),
    ],
)
def test_a_broken_batch_names_episode_and_fault(break_it: Any, words: str) -> None:
    episodes = make_group("a")
    broken, scores = break_it(episodes, make_scores(episodes))
    with pytest.raises(ContractError, match=words):
        build_batch(broken, scores, algorithm=AlgorithmConfig())

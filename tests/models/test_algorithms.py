"""The numbers every implementation must reproduce, and the invariances, as property tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.config import AlgorithmConfig
from models.algorithms import losses
from models.algorithms.advantages import advantages
from models.algorithms.aggregation import MODES, aggregate, episode_weights

ONES = [1.0, 0, 0, 1, 0, 0, 0, 0]


def close(found: object, expected: object, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(np.asarray(found, dtype=np.float64), np.asarray(expected), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("config", "one", "zero"),
    [
        (AlgorithmConfig(eps=1e-4), 1.619835, -0.539945),
        (AlgorithmConfig(eps=1e-6), 1.620182, -0.540061),
        (AlgorithmConfig(ddof=0, eps=1e-6), 1.732047, -0.577349),
        (AlgorithmConfig(name="dr_grpo"), 0.75, -0.25),
        (AlgorithmConfig(name="rloo"), 0.857143, -0.285714),
    ],
)
def test_advantages_of_two_in_eight(config: AlgorithmConfig, one: float, zero: float) -> None:
    close(advantages(ONES, ["g"] * 8, config), [one if r else zero for r in ONES])


def test_rloo_over_groups_of_different_sizes() -> None:
    found = advantages([6, 3, 9, 12, 1], ["a", "a", "b", "b", "c"], AlgorithmConfig(name="rloo"))
    close(found, [3, -3, -3, 3, 0])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(
    rewards=st.lists(st.floats(-10, 10), min_size=1, max_size=12),
    seed=st.integers(0, 2**16),
)
def test_permuting_a_batch_permutes_its_advantages(name: str, rewards: list[float], seed: int) -> None:
    config = AlgorithmConfig(name=name)  # type: ignore[arg-type]
    rng = np.random.default_rng(seed)
    groups = [f"g{i}" for i in rng.integers(0, 3, len(rewards))]
    order = rng.permutation(len(rewards))
    plain = advantages(rewards, groups, config)
    permuted = advantages([rewards[i] for i in order], [groups[i] for i in order], config)
    np.testing.assert_allclose(permuted, plain[order], rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e9])
def test_equal_rewards_give_exact_zeros(name: str, reward: float) -> None:
    config = AlgorithmConfig(name=name)  # type: ignore[arg-type]
    assert (advantages([reward] * 7 + [3.0], ["g"] * 7 + ["alone"], config) == 0).all()


def test_advantages_need_one_key_an_episode() -> None:
    with pytest.raises(ValueError, match="2 rewards for 1"):
        advantages([1, 0], ["g"], AlgorithmConfig())


def test_ppo_clip() -> None:
    loss = losses.ppo_clip(torch.tensor([0.5, 1, 1.5]), torch.tensor([1.0, -1, 2]), low=0.2, high=0.2)
    close(loss, [-0.5, 1, -2.4])
    close(loss.mean(), -0.633333, 1e-5)


def test_dual_clip() -> None:
    ratio, advantage = torch.tensor([2, 2, 0.5]), torch.tensor([2.0, -2, 2])
    loss = losses.dual_clip(losses.ppo_clip(ratio, advantage, low=0.2, high=0.2), advantage, c=1.5)
    close(loss, [-2.4, 3.0, -1.0])


def test_kl_estimators() -> None:
    logp, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    close(
        [losses.k1(logp, reference).item(), losses.k2(logp, reference).item(), losses.k3(logp, reference).item()],
        [0.5, 0.125, 0.106531],
    )


def test_truncated_importance_sampling() -> None:
    close(losses.truncated_importance(torch.tensor([0.1, -0.2, 1.5]), torch.zeros(3), cap=2), [1.105171, 0.818731, 2])


def test_entropy_of_uniform_and_certain() -> None:
    close(losses.entropy(torch.tensor([[0.0] * 8, [50.0] + [0.0] * 7])), [math.log(8), 0])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token_mean", 2.5), ("sequence_mean_token_mean", 3.0), ("sequence_mean_token_sum", 5.0), ("dr_grpo", 1.666667)],
)
def test_aggregation(mode: str, expected: float) -> None:
    table, mask = torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    close(aggregate(table, mask, mode=mode, longest=3), expected)
    padded = torch.cat([table, torch.full((1, 3), math.nan)]), torch.cat([mask, torch.zeros(1, 3, dtype=mask.dtype)])
    close(aggregate(*padded, mode=mode, longest=3), expected)  # a fully masked sequence leaves the denominator


@pytest.mark.parametrize("mode", MODES)
def test_nothing_unmasked_gives_zero_loss_and_zero_gradient(mode: str) -> None:
    table = torch.full((2, 3), 7.0, requires_grad=True)
    loss = aggregate(table, torch.zeros(2, 3), mode=mode)
    loss.backward()
    assert loss.item() == 0
    assert table.grad is not None
    assert (table.grad == 0).all()


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 2**16))
def test_masked_values_and_inserted_observations_never_matter(mode: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(3, 6))
    mask = rng.integers(0, 2, size=(3, 6))
    plain = aggregate(torch.from_numpy(table), torch.from_numpy(mask), mode=mode)
    poisoned = np.where(mask == 1, table, np.nan)
    column = int(rng.integers(0, 7))  # an observation of two tokens, inserted in every sequence
    poisoned = np.insert(poisoned, [column, column], np.nan, axis=1)
    wider = np.insert(mask, [column, column], 0, axis=1)
    close(aggregate(torch.from_numpy(poisoned), torch.from_numpy(wider), mode=mode), plain, 1e-12)


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 2**16), cut=st.integers(0, 5))
def test_splitting_a_batch_changes_nothing(mode: str, seed: int, cut: int) -> None:
    rng = np.random.default_rng(seed)
    table, mask = rng.normal(size=(5, 4)), rng.integers(0, 2, size=(5, 4))
    weights = episode_weights(mode, mask.sum(1), longest=8)  # from the whole batch, before any split
    whole = aggregate(torch.from_numpy(table), torch.from_numpy(mask), mode=mode, longest=8)
    parts = sum((table * mask * weights[:, None])[rows].sum() for rows in (slice(0, cut), slice(cut, 5)))
    close(parts, whole, 1e-12)


def test_token_loss_composes_clip_dual_clip_weight_kl_and_entropy() -> None:
    config = AlgorithmConfig(dual_clip=1.5, tis_cap=2.0, kl_coef=0.5, entropy_coef=0.25)
    logp = torch.log(torch.tensor([2, 2, 0.5]))
    found = losses.token_loss(
        config,
        logp=logp,
        logp_old=torch.zeros(3),
        logp_sampler=-torch.tensor([0.1, -0.2, 1.5]),
        advantage=torch.tensor([2.0, -2, 2]),
        reference=logp - 0.5,
        entropy=torch.tensor([1.0, 2, 3]),
    )
    clip, weight = np.array([-2.4, 3.0, -1.0]), np.array([1.105171, 0.818731, 2])
    close(found, clip * weight + 0.5 * 0.106531 - 0.25 * np.array([1, 2, 3]), 1e-5)


def test_importance_weight_and_old_log_probabilities_carry_no_gradient() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    loss = losses.token_loss(
        AlgorithmConfig(), logp=torch.zeros(3), logp_old=leaf, logp_sampler=leaf - 0.1, advantage=torch.ones(3)
    )
    assert not loss.requires_grad


@pytest.mark.parametrize(("field", "word"), [("kl_coef", "reference"), ("entropy_coef", "entropy")])
def test_missing_ingredients_are_named(field: str, word: str) -> None:
    zeros = torch.zeros(2)
    with pytest.raises(ValueError, match=word):
        losses.token_loss(
            AlgorithmConfig(**{field: 0.1}),  # type: ignore[arg-type]
            logp=zeros,
            logp_old=zeros,
            logp_sampler=zeros,
            advantage=zeros,
        )


@pytest.mark.parametrize("field", ["kl_coef", "entropy_coef"])
def test_zero_advantage_may_be_skipped_only_without_other_terms(field: str) -> None:
    assert losses.proportional_to_advantage(AlgorithmConfig())
    assert not losses.proportional_to_advantage(AlgorithmConfig(**{field: 0.1}))  # type: ignore[arg-type]


def test_clipped_marks_where_the_gradient_is_cut() -> None:
    ratio = torch.tensor([1.3, 1.3, 0.7, 0.7, 1.0], requires_grad=True)
    advantage = torch.tensor([1.0, -1, 1, -1, 1])
    losses.ppo_clip(ratio, advantage, low=0.2, high=0.2).sum().backward()
    assert ratio.grad is not None
    assert torch.equal(losses.clipped(ratio, advantage, low=0.2, high=0.2), ratio.grad == 0)

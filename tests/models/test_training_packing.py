"""A packed shared-prefix row equals separate rows: log-probabilities, entropy, loss and gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.config import AlgorithmConfig
from data_contracts.errors import TrainerError
from data_contracts.records import Episode
from models.training.batch import TrainBatch, build_batch
from models.training.forward import check_supported, target_logprobs
from models.training.packing import micro_batches, pack
from tests.models.training_parts import VOCABULARY, make_episode, make_group, make_scores, small_model


def batch_of(episodes: list[Episode]) -> TrainBatch:
    return build_batch(episodes, make_scores(episodes), algorithm=AlgorithmConfig())


def reference_logprobs(model: Any, batch: TrainBatch, temperature: float = 1.0) -> list[torch.Tensor]:
    """One plain forward pass a sequence, as the model's own code does it."""
    found = []
    for sequence in batch.sequences_E:
        logits = model(input_ids=torch.from_numpy(sequence.token_ids)[None]).logits[0] / temperature
        logp = logits.log_softmax(-1)
        targets = torch.from_numpy(sequence.targets)
        found.append(logp[targets - 1, torch.from_numpy(sequence.token_ids)[targets]])
    return found


def packed_logprobs(
    model: Any, batch: TrainBatch, *, budget: int, share: bool = True, temperature: float = 1.0
) -> tuple[list[torch.Tensor], int]:
    rows = pack(batch.sequences_E, range(len(batch.sequences_E)), budget=budget, share=share)
    parts: list[list[tuple[int, torch.Tensor]]] = [[] for _ in batch.sequences_E]
    nodes = 0
    for micro in micro_batches(rows, budget=budget):
        nodes += micro.ids_BS.size
        logp, _ = target_logprobs(model, micro, temperature=temperature)
        for value, episode, offset in zip(logp, micro.episodes_N, micro.offsets_N, strict=True):
            parts[episode].append((int(offset), value))
    return [torch.stack([value for _, value in sorted(part, key=lambda pair: pair[0])]) for part in parts if part], nodes


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("budget", [64, 4096])
def test_packed_rows_equal_plain_forward_passes(budget: int, turns: int, share: bool, temperature: float) -> None:
    model, batch = small_model(), batch_of(make_group("a", turns=turns) + make_group("b", size=3, prompt=20, turns=turns))
    expected = reference_logprobs(model, batch, temperature)
    found, _ = packed_logprobs(model, batch, budget=budget, share=share, temperature=temperature)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def test_far_rows_that_see_no_early_block_stay_exact() -> None:
    """Attention kernels work in blocks: a row whose first blocks are wholly masked (nothing shared) must not turn NaN."""
    rng = np.random.default_rng(0)
    episodes = [make_episode([i, *rng.integers(0, 97, 350).tolist()], [0] + [1] * 350, group="a", member=i) for i in range(5)]
    episodes.append(make_episode(rng.integers(0, 97, 9).tolist(), [0] + [1] * 8, group="b", member=9))
    model, batch = small_model(), batch_of(episodes)
    found, _ = packed_logprobs(model, batch, budget=8192)
    for one, other in zip(found, reference_logprobs(model, batch), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def test_gradients_of_packed_and_plain_agree() -> None:
    batch = batch_of(make_group("a", turns=2) + make_group("b", turns=2))
    weights = [torch.from_numpy(np.random.default_rng(i).normal(size=len(s.targets))) for i, s in enumerate(batch.sequences_E)]
    gradients = []
    for way in ("plain", "packed"):
        model = small_model()
        found = reference_logprobs(model, batch) if way == "plain" else packed_logprobs(model, batch, budget=4096)[0]
        torch.stack([(logp * weight).sum() for logp, weight in zip(found, weights, strict=True)]).sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() / gradients[0].norm() < 2e-6


def test_sharing_saves_the_prompt_and_equal_completions() -> None:
    prompt = list(range(30))
    episodes = [make_episode([*prompt, 1, 2, 3], [0] * 30 + [1] * 3, group="a", member=m) for m in range(7)]
    episodes.append(make_episode([*prompt, 1, 9, 3], [0] * 30 + [1] * 3, group="a", member=7))
    batch = batch_of(episodes)
    (row,) = pack(batch.sequences_E, range(8), budget=4096)
    assert len(row.ids) == 30 + 2 + 1  # prompt, then "1 2" once and "9"; the last token of each is only predicted
    assert len(row.nodes) == 24
    assert sum(len(r.ids) for r in pack(batch.sequences_E, range(8), budget=4096, share=False)) == 8 * 32


@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=2, max_size=9), st.integers(0, 2**9)), min_size=1, max_size=8),
    budget=st.integers(4, 40),
)
def test_every_target_is_predicted_by_its_own_past_and_nothing_else(data: list[tuple[list[int], int]], budget: int) -> None:
    episodes = [
        make_episode(ids, [0] + [(bits >> i) & 1 for i in range(1, len(ids))], group=f"g{len(ids) % 2}", member=member)
        for member, (ids, bits) in enumerate(data)
    ]
    batch = batch_of(episodes)
    rows = pack(batch.sequences_E, range(len(episodes)), budget=budget)
    seen = set()
    for micro in micro_batches(rows, budget=budget):
        for b, node, token, episode, offset in zip(
            micro.rows_N, micro.nodes_N, micro.tokens_N, micro.episodes_N, micro.offsets_N, strict=True
        ):
            sequence = batch.sequences_E[episode]
            target = sequence.targets[offset]
            visible = [j for j in range(node + 1) if node < micro.ends_BS[b, j]]
            assert micro.ids_BS[b, visible].tolist() == sequence.token_ids[:target].tolist()
            assert micro.positions_BS[b, visible].tolist() == list(range(target))
            assert token == sequence.token_ids[target]
            seen.add((int(episode), int(offset)))
    assert len(seen) == batch.lengths.sum()


def test_micro_batches_keep_the_budget_unless_one_sequence_is_longer() -> None:
    batch = batch_of([e for g in "abcdef" for e in make_group(g)])
    for budget in (24, 64, 200):
        for micro in micro_batches(pack(batch.sequences_E, range(24), budget=budget), budget=budget):
            assert micro.ids_BS.size <= budget
    (row,) = pack(batch.sequences_E, [0], budget=2)
    assert len(row.ids) > 2


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    model, batch = small_model(), batch_of(make_group("a"))
    (micro,) = micro_batches(pack(batch.sequences_E, range(4), budget=4096), budget=4096)
    _, plain = target_logprobs(model, micro, temperature=0.5)
    _, graded = target_logprobs(model, micro, temperature=0.5, entropy_gradient=True)
    torch.testing.assert_close(plain, graded.detach(), atol=1e-5, rtol=0)
    assert graded.requires_grad
    assert not plain.requires_grad
    assert 0 < plain.max() <= np.log(VOCABULARY)


def test_models_with_logit_scaling_are_refused() -> None:
    model = small_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(TrainerError, match="final_logit_softcapping"):
        check_supported(model)

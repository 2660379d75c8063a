"""One update of the policy on one batch: GRPO-family losses over packed rows, one optimizer step an epoch.

Old log-probabilities are the trainer's own, from the first forward pass of this step, so the first epoch needs no extra pass
and its ratio is 1; the distance to the sampler is corrected by truncated importance sampling instead. Denominators come from
the whole batch before any split, so micro-batches and ranks change nothing. Gradients are summed over ranks, clipped, applied.
A non-finite loss or gradient raises on every rank and steps nowhere. Without anything to train, nothing is touched.

Episodes with advantage 0 are skipped when every active term is proportional to the advantage; they stay in the denominators,
and are absent from the token statistics (KL to the sampler, entropy, ratio), which are over `trained_tokens`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_contracts.config import AlgorithmConfig, TrainConfig
from data_contracts.errors import TrainerError
from data_contracts.records import TrainOutcome
from models.algorithms import losses
from models.algorithms.aggregation import episode_weights
from models.training.batch import TrainBatch
from models.training.forward import target_logprobs
from models.training.learner import Learner
from models.training.packing import MicroBatch, micro_batches, pack
from models.training.ranks import Alone, Ranks, sum_gradients


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """`metrics` are finite numbers; those of tokens are missing when no token was trained."""

    outcome: TrainOutcome
    metrics: dict[str, float]


def train_step(
    learner: Learner,
    batch: TrainBatch,
    *,
    train: TrainConfig,
    algorithm: AlgorithmConfig,
    temperature: float = 1.0,
    reference: Any | None = None,
    ranks: Ranks | None = None,
    share: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> StepResult:
    """Update `learner` in place, once an epoch. `reference` is the base model, needed when kl_coef > 0.

    Raises TrainerError for a non-finite loss or gradient; the weights are then as after the last finite step.
    """
    began, ranks = clock(), ranks or Alone()
    metrics = batch_metrics(batch)
    skip = losses.proportional_to_advantage(algorithm)
    chosen = [
        index
        for index, sequence in enumerate(batch.sequences_E)
        if len(sequence.targets) and not (skip and batch.advantages_E[index] == 0)
    ]
    if not chosen:
        return StepResult(outcome="no_signal", metrics=metrics | {"loss": 0.0, "grad_norm": 0.0, "trained_tokens": 0.0})
    if algorithm.kl_coef > 0 and reference is None:
        raise TrainerError("kl_coef > 0 needs the base checkpoint as reference; it was not found in the store")
    rows = pack(batch.sequences_E, chosen, budget=train.micro_batch_tokens, share=share)
    micros = micro_batches(rows[ranks.index :: ranks.count], budget=train.micro_batch_tokens)
    weights_E = episode_weights(algorithm.aggregation, batch.lengths, longest=algorithm.aggregation_length)
    parts = [_Part(micro, batch, weights_E, learner.model.device) for micro in micros]
    for epoch in range(train.epochs):
        figures = _epoch(learner, parts, algorithm=algorithm, temperature=temperature, reference=reference, ranks=ranks)
        sum_gradients(learner.parameters, ranks)
        norm = float(torch.nn.utils.clip_grad_norm_(learner.parameters, train.max_grad_norm))
        if not np.isfinite(figures["loss"]) or not np.isfinite(norm):
            learner.optimizer.zero_grad(set_to_none=True)
            raise TrainerError(
                f"loss {figures['loss']} and gradient norm {norm} in epoch {epoch}: the step was not taken; "
                "look at kl_sampler and the rewards of this batch, lower train.learning_rate or set algorithm.tis_cap"
            )
        learner.configure(train)
        learner.step()
        first = epoch == 0
        metrics |= {k: v for k, v in figures.items() if first or k in ("loss", "ratio_mean", "ratio_max", "clip_fraction")}
        metrics |= {"grad_norm": norm, "learning_rate": float(learner.optimizer.param_groups[0]["lr"])}
    seconds = max(clock() - began, 1e-9)
    nodes = float(ranks.sum(torch.tensor([float(sum(micro.ids_BS.size for micro in micros))]))[0])
    return StepResult(
        outcome="trained",
        metrics=metrics
        | {
            "forward_tokens": nodes,
            "tokens_per_second": metrics["trained_tokens"] * train.epochs / seconds,
            "step_seconds": seconds,
        },
    )


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Reward statistics, token counts, and the share of groups without any advantage."""
    groups: dict[str, bool] = {}
    for group, advantage in zip(batch.groups, batch.advantages_E, strict=True):
        groups[group] = groups.get(group, False) or bool(advantage != 0)
    rewards_E = batch.rewards_E if len(batch.rewards_E) else np.zeros(1)
    return {
        "tokens": float(batch.lengths.sum()),
        "episodes": float(len(batch.sequences_E)),
        "groups": float(len(groups)),
        "reward_mean": float(rewards_E.mean()),
        "reward_std": float(rewards_E.std()),
        "reward_min": float(rewards_E.min()),
        "reward_max": float(rewards_E.max()),
        "zero_advantage_share": sum(not any_ for any_ in groups.values()) / max(len(groups), 1),
    }


class _Part:
    """One micro-batch with what its targets carry, shape (N,), on the model's device; `old` and `reference` fill up."""

    def __init__(self, micro: MicroBatch, batch: TrainBatch, weights_E: Any, device: torch.device) -> None:
        self.micro = micro
        sampler = np.array(
            [batch.sequences_E[e].logprobs[o] for e, o in zip(micro.episodes_N, micro.offsets_N, strict=True)], dtype=np.float32
        )
        self.sampler = torch.from_numpy(sampler).to(device)
        self.advantage = torch.from_numpy(batch.advantages_E[micro.episodes_N].astype(np.float32)).to(device)
        self.weight = torch.from_numpy(weights_E[micro.episodes_N].astype(np.float32)).to(device)
        self.old: Tensor | None = None
        self.reference: Tensor | None = None


_SUMS = ("loss", "tokens", "k1", "k3", "entropy", "ratio", "clipped", "sampler_ratio", "reference_k3")


def _epoch(
    learner: Learner, parts: list[_Part], *, algorithm: AlgorithmConfig, temperature: float, reference: Any, ranks: Ranks
) -> dict[str, float]:
    """Forward and backward over this rank's parts; returns the figures of all ranks."""
    sums = torch.zeros(len(_SUMS), dtype=torch.float64)
    largest = torch.zeros(2, dtype=torch.float64)
    for part in parts:
        logp, entropy = target_logprobs(
            learner.model, part.micro, temperature=temperature, entropy_gradient=algorithm.entropy_coef > 0
        )
        part.old = logp.detach() if part.old is None else part.old
        if algorithm.kl_coef > 0 and part.reference is None:
            with torch.no_grad():
                part.reference, _ = target_logprobs(reference, part.micro, temperature=temperature)
        loss = losses.token_loss(
            algorithm,
            logp=logp,
            logp_old=part.old,
            logp_sampler=part.sampler,
            advantage=part.advantage,
            reference=part.reference,
            entropy=entropy,
        )
        total = (loss * part.weight).sum()
        total.backward()
        with torch.no_grad():
            ratio = (logp - part.old).exp()
            sampler_ratio = (logp - part.sampler).exp()
            cut = losses.clipped(ratio, part.advantage, low=algorithm.clip_low, high=algorithm.clip_high)
            drift = losses.k3(logp, part.reference) if part.reference is not None else torch.zeros_like(logp)
            figures = (
                losses.k1(part.sampler, logp),
                losses.k3(part.sampler, logp),
                entropy,
                ratio,
                cut,
                sampler_ratio,
                drift,
            )
            sums += torch.stack([total.detach().double().cpu(), torch.tensor(float(len(logp)), dtype=torch.float64)]
                                + [figure.double().sum().cpu() for figure in figures])  # fmt: skip
            largest = torch.maximum(largest, torch.stack([ratio.max(), sampler_ratio.max()]).double().cpu())
    sums, largest = ranks.sum(sums), ranks.max(largest)
    value = dict(zip(_SUMS, sums.tolist(), strict=True))
    count = value["tokens"]
    result = {
        "loss": value["loss"],
        "trained_tokens": count,
        "kl_sampler": value["k1"] / count,
        "kl_sampler_k3": value["k3"] / count,
        "entropy": value["entropy"] / count,
        "ratio_mean": value["ratio"] / count,
        "ratio_max": float(largest[0]),
        "clip_fraction": value["clipped"] / count,
        "sampler_ratio_mean": value["sampler_ratio"] / count,
        "sampler_ratio_max": float(largest[1]),
    }
    return result | ({"kl_reference": value["reference_k3"] / count} if algorithm.kl_coef > 0 else {})

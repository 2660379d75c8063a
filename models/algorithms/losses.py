"""Per-token losses over the flat axis N of policy-written tokens; every argument is a tensor of shape (N,).

rho = exp(logp - logp_old), `A` the episode's advantage on each of its tokens. A lower loss is better. The trainer gathers only
tokens with loss mask 1, so nothing that lies at a masked position (even NaN) can enter. `token_loss` composes what a config
asks for: PPO clip, then dual clip, times the truncated importance weight, plus KL, minus the entropy bonus.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data_contracts.config import AlgorithmConfig


def ppo_clip(ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> Tensor:
    """max(-A rho, -A clip(rho, 1 - low, 1 + high)) (Schulman et al. 2017)."""
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def dual_clip(loss: Tensor, advantage: Tensor, *, c: float) -> Tensor:
    """Bound the loss by c |A| where A < 0 (Ye et al. 2020)."""
    return torch.where(advantage < 0, torch.minimum(loss, c * advantage.abs()), loss)


def truncated_importance(logp_old: Tensor, logp_sampler: Tensor, *, cap: float) -> Tensor:
    """min(exp(logp_old - logp_sampler), cap), token form: corrects for a sampler whose numbers differ from the trainer's."""
    return (logp_old - logp_sampler).exp().clamp(max=cap).detach()


def k1(logp: Tensor, reference: Tensor) -> Tensor:
    """KL estimator -d with d = reference - logp (Schulman 2020): unbiased, high variance."""
    return logp - reference


def k2(logp: Tensor, reference: Tensor) -> Tensor:
    """KL estimator d^2 / 2."""
    return 0.5 * (reference - logp) ** 2


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    """KL estimator e^d - d - 1: unbiased and never negative."""
    difference = reference - logp
    return torch.expm1(difference) - difference


def entropy(logits_NV: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) over V, shape (N,)."""
    logp_NV = logits_NV.log_softmax(-1)
    return -(logp_NV.exp() * logp_NV).sum(-1)


def clipped(ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> Tensor:
    """Where PPO's clip cuts the gradient (boolean): rho above 1 + high with A > 0, or below 1 - low with A < 0."""
    return ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))


def proportional_to_advantage(config: AlgorithmConfig) -> bool:
    """Whether a token with advantage 0 has loss and gradient 0, so that it may be skipped."""
    return config.kl_coef == 0 and config.entropy_coef == 0


def token_loss(
    config: AlgorithmConfig,
    *,
    logp: Tensor,
    logp_old: Tensor,
    logp_sampler: Tensor,
    advantage: Tensor,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Tensor:
    """The loss of each token. `reference` is needed when kl_coef > 0, `entropy` (with gradient) when entropy_coef > 0."""
    ratio = (logp - logp_old.detach()).exp()
    loss = ppo_clip(ratio, advantage, low=config.clip_low, high=config.clip_high)
    if config.dual_clip is not None:
        loss = dual_clip(loss, advantage, c=config.dual_clip)
    if config.tis_cap is not None:
        loss = loss * truncated_importance(logp_old, logp_sampler, cap=config.tis_cap)
    if config.kl_coef > 0:
        if reference is None:
            raise ValueError("kl_coef > 0 needs the reference's log-probabilities")
        loss = loss + config.kl_coef * k3(logp, reference)
    if config.entropy_coef > 0:
        if entropy is None:
            raise ValueError("entropy_coef > 0 needs the policy's entropy")
        loss = loss - config.entropy_coef * entropy
    return loss

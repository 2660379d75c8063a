"""How token losses become one number over the *global* batch: a weight for each episode's tokens.

All four modes weigh every token of one episode alike, so a mode is a vector weights_E, computed once from the mask lengths of
the whole batch; the loss is sum_t m_t w_e(t) L_t. Any split into micro-batches or ranks then sums to the same loss by
construction. A fully masked episode leaves the denominator; a batch without unmasked tokens has loss and gradient 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Lengths = NDArray[np.int64]


def _token_mean(lengths_E: Lengths, longest: int) -> Floats:
    weights_E: Floats = np.full(len(lengths_E), 1.0 / max(int(lengths_E.sum()), 1))
    return weights_E


def _sequence_mean_token_sum(lengths_E: Lengths, longest: int) -> Floats:
    weights_E: Floats = np.full(len(lengths_E), 1.0 / max(int((lengths_E > 0).sum()), 1))
    return weights_E


def _sequence_mean_token_mean(lengths_E: Lengths, longest: int) -> Floats:
    weights_E: Floats = _sequence_mean_token_sum(lengths_E, longest) / np.maximum(lengths_E, 1)
    return weights_E


def _dr_grpo(lengths_E: Lengths, longest: int) -> Floats:
    weights_E: Floats = _sequence_mean_token_sum(lengths_E, longest) / longest
    return weights_E


MODES: Mapping[str, Callable[[Lengths, int], Floats]] = {
    "token_mean": _token_mean,
    "sequence_mean_token_mean": _sequence_mean_token_mean,
    "sequence_mean_token_sum": _sequence_mean_token_sum,
    "dr_grpo": _dr_grpo,
}


def episode_weights(mode: str, lengths_E: Lengths, *, longest: int) -> Floats:
    """Weight of each unmasked token of each episode. `lengths_E` counts unmasked tokens; `longest` is L_max of dr_grpo."""
    return MODES[mode](np.asarray(lengths_E, dtype=np.int64), longest)


def aggregate(losses_BT: Tensor, mask_BT: Tensor, *, mode: str, longest: int = 1024) -> Tensor:
    """Padded form, for whoever holds a whole batch at once: one scalar. Masked positions may hold anything, even NaN."""
    kept_BT = torch.where(mask_BT.bool(), losses_BT, torch.zeros_like(losses_BT))
    weights_B = episode_weights(mode, mask_BT.bool().sum(1).cpu().numpy(), longest=longest)
    return (kept_BT * torch.from_numpy(weights_B).to(losses_BT)[:, None]).sum()

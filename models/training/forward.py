"""One packed micro-batch through a causal language model: log-probability (and entropy) of every target.

The transformer body runs over B x S nodes under the subtree mask; the output head, the costly part with a large vocabulary,
runs on target nodes only. Works for decoders whose head is a plain linear map of the last hidden state (Llama, Qwen, Mistral,
SmolLM). Gaps: logit soft-capping or scaling, and attention kernels that take no 4-d mask, are refused or unsupported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from data_contracts.errors import TrainerError
from models.algorithms import losses
from models.training.packing import MicroBatch


def check_supported(model: Any) -> None:
    """Refuse models whose logits are more than a linear map of the hidden state. Raises TrainerError."""
    config = model.config
    for field in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, field, None) not in (None, 1, 1.0):
            raise TrainerError(f"model type '{config.model_type}' sets {field}, which this trainer does not apply; use another")


def target_logprobs(
    model: Any, micro: MicroBatch, *, temperature: float = 1.0, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """(logp_N, entropy_N) of one micro-batch in float32; the logits are divided by `temperature` first.

    The entropy carries a gradient only with `entropy_gradient`. Runs on the model's device.
    """
    device = model.device
    ends_BS = torch.from_numpy(micro.ends_BS).to(device)
    index_S = torch.arange(ends_BS.shape[1], device=device)
    # (B, 1, S, S): node i sees node j when j <= i < end_j
    mask = (index_S[None, None, :] <= index_S[None, :, None]) & (index_S[None, :, None] < ends_BS[:, None, :])
    hidden_BSD = model.base_model(
        input_ids=torch.from_numpy(micro.ids_BS).to(device),
        position_ids=torch.from_numpy(micro.positions_BS).to(device),
        attention_mask=mask[:, None],
        use_cache=False,
    ).last_hidden_state
    flat_N = torch.from_numpy(micro.rows_N * ends_BS.shape[1] + micro.nodes_N).to(device)
    hidden_ND = hidden_BSD.flatten(0, 1).index_select(0, flat_N)
    logits_NV = model.get_output_embeddings()(hidden_ND).float()
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    tokens_N = torch.from_numpy(micro.tokens_N).to(device)
    normaliser_N = logits_NV.logsumexp(-1)
    logp_N = logits_NV.gather(1, tokens_N[:, None])[:, 0] - normaliser_N
    if entropy_gradient:
        return logp_N, losses.entropy(logits_NV)
    with torch.no_grad():
        logits_NV = logits_NV.detach()
        weighted_N = torch.einsum("nv,nv->n", (logits_NV - normaliser_N[:, None]).exp_(), logits_NV)
        return logp_N, normaliser_N.detach() - weighted_N

"""The resident pair of weights and AdamW state, and how it is read from and written to folders.

Weights are float32 and stay at the same addresses: a later load copies into them, so a resumed run computes on equally aligned
memory and is bit for bit the uninterrupted one. Dropout is off (the ratio would be noise otherwise). Gap: one replica of the
whole model a rank; sharded weights (FSDP) replace this file and `ranks.sum_gradients` together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from data_contracts.config import TrainConfig
from data_contracts.errors import TrainerError
from models.training.forward import check_supported

OPTIMIZER_FILE = "optimizer.pt"


def load_model(folder: Path, *, device: str | torch.device = "cpu") -> Any:
    """A causal language model in float32 evaluation mode. Raises TrainerError for a model that cannot be trained here."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    check_supported(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # own, aligned memory instead of a view of the file
    return model.to(device).eval()


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files, by name."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


class Learner:
    """Weights, optimizer state and the number of optimizer steps taken; `steps` drives the warm-up."""

    def __init__(self, folder: Path, *, device: str | torch.device = "cpu") -> None:
        self.model = load_model(folder, device=device)
        self._config = (folder / "config.json").read_bytes()
        self.parameters: list[torch.nn.Parameter] = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=True)
        self.steps = 0

    def load(self, folder: Path) -> bool:
        """Copy a folder's weights in, in place, and forget the optimizer state. False when the architecture differs."""
        if (folder / "config.json").read_bytes() != self._config:
            return False
        self._copy(read_weights(folder))
        self.reset_optimizer()
        return True

    def holds(self, folder: Path) -> bool:
        """Whether the resident weights equal a folder's, bit for bit."""
        stored = read_weights(folder)
        return all(
            name in stored and torch.equal(stored[name].to(tensor.dtype), tensor.cpu())
            for name, tensor in self._named().items()
        )

    def restore_weights(self, folder: Path) -> None:
        """Copy a folder's weights in and keep the optimizer state."""
        self._copy(read_weights(folder))

    def reset_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=True)
        self.steps = 0

    def load_optimizer(self, folder: Path) -> None:
        """Read the full state that `save_optimizer` wrote."""
        state = torch.load(folder / OPTIMIZER_FILE, weights_only=True, map_location="cpu")
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = int(state["steps"])

    def save_optimizer(self, folder: Path) -> None:
        torch.save({"optimizer": self.optimizer.state_dict(), "steps": self.steps}, folder / OPTIMIZER_FILE)

    def save_weights(self, folder: Path) -> None:
        """One safetensors file in the names that `from_pretrained` and vLLM read, output head included."""
        tensors = {name: tensor.contiguous() for name, tensor in self._named().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def configure(self, train: TrainConfig) -> None:
        """Put the job's settings and the warm-up's learning rate into the optimizer for the next step."""
        warm = min(1.0, (self.steps + 1) / train.warmup_steps) if train.warmup_steps else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = train.learning_rate * warm
            group["betas"] = tuple(train.betas)
            group["weight_decay"] = train.weight_decay

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1

    def _named(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())

    def _copy(self, stored: dict[str, torch.Tensor]) -> None:
        own = self._named()
        if missing := sorted(set(own) - set(stored)):
            raise TrainerError(
                f"the checkpoint lacks {len(missing)} tensors, among them '{missing[0]}'; "
                "it must be untied and hold every weight: import the base model again"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(stored[name])

"""What the step needs to know about its fellow workers: who am I, how many are we, and two reductions.

`Alone` is one process. `accelerate_ranks` adapts Accelerate, whose launcher and process group carry the real worker group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Ranks(Protocol):
    """Every rank calls the same reductions in the same order."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, on every rank."""

    def max(self, tensor: Tensor) -> Tensor:
        """Element-wise maximum over ranks, on every rank."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's picklable value, on every rank; what the others pass is ignored."""


@dataclass(frozen=True)
class Alone:
    """One process: nothing to reduce."""

    index: int = 0
    count: int = 1

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast(self, value: Any) -> Any:
        return value


class AccelerateRanks:
    """Ranks of an `accelerate.Accelerator` with more than one process."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.index: int = accelerator.process_index
        self.count: int = accelerator.num_processes

    def sum(self, tensor: Tensor) -> Tensor:
        summed: Tensor = self._accelerator.reduce(tensor, reduction="sum")
        return summed

    def max(self, tensor: Tensor) -> Tensor:
        gathered: Tensor = self._accelerator.gather(tensor[None])
        return gathered.amax(0)

    def broadcast(self, value: Any) -> Any:
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]


def accelerate_ranks(accelerator: Any) -> Ranks:
    """The fitting Ranks for an Accelerator."""
    return Alone() if accelerator.num_processes == 1 else AccelerateRanks(accelerator)


def sum_gradients(parameters: list[torch.nn.Parameter], ranks: Ranks) -> None:
    """Add up the gradients of all ranks in place; a rank without work contributes zeros."""
    if ranks.count == 1:
        return
    for parameter in parameters:
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        parameter.grad = ranks.sum(gradient)

"""A model whose matrices are divided among ranks (`worker.engines.transformers.load.tensor_parallel_plan`), traced.

Rank 0 stands for all ranks: it has the sampler beside what the others have, and tensors that cannot be divided are the
same on each.
"""

from typing import Any

import torch
from torch import nn

from worker.engines.transformers.load import tensor_parallel_plan
from worker.engines.transformers.load.tensor_parallel_plan import RankShare, RankSlice
from worker.estimate import meta_model
from worker.estimate.meta_model import StoredTensors
from worker.protocol.argv import ModelOptions


class FakeGroup:
    """A process group with one rank: results have the right sizes and no content."""

    def __init__(self, count: int):
        self._count = count

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.empty_like(tensor) for _ in range(self._count)], dim=-1)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def divide(model: nn.Module, ranks: int) -> RankShare:
    """Leave the slices of rank 0 in `model`, with memory of their own, as the loader does. Raises StartError for a
    model that cannot be divided."""
    share = RankSlice(0, ranks), FakeGroup(ranks)
    tensor_parallel_plan.divide(model, share)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.untyped_storage().nbytes() > parameter.nbytes:
                copy = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(copy, requires_grad=False)
    return share


def loading_bytes(options: ModelOptions, config: Any, model: nn.Module, dtype: torch.dtype) -> int:
    """Return the further bytes while a rank loads `model`, which is not divided yet."""
    if options.load_format == "dummy":
        return meta_model.tensor_bytes(model)
    largest = max(parameter.nbytes for parameter in model.parameters())
    return max(2 * largest, StoredTensors(options).stacked(config) * dtype.itemsize)

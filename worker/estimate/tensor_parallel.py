"""The traced bytes of one rank of a model whose matrices are divided among ranks
(`worker.engines.transformers.load.tensor_parallel_plan`).

Rank 0 stands for all ranks: it has the sampler beside what the others have, and tensors that cannot be divided are the
same on each.
"""

from typing import Any

import torch
from torch import nn

from worker.engines.transformers.load import architectures, snapshot, tensor_parallel_plan
from worker.engines.transformers.load.tensor_parallel_plan import RankSlice
from worker.engines.transformers.loop import requests
from worker.engines.transformers.run import backends
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.runner import PagedRunner
from worker.estimate import meta_model
from worker.estimate.largest_steps import CPU, GenerationSteps, looping_peak
from worker.estimate.memory_tracer import peak_bytes
from worker.estimate.meta_model import StoredTensors, Traced
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


def trace(options: ModelOptions, config: Any, ranks: int) -> Traced:
    """Return the bytes of one rank. Raises StartError for a model that cannot be divided."""
    ctx_size = requests.context_size(options, architectures.positions(config))
    stored = StoredTensors(options)
    dtype = stored.dtype(options, config)
    with meta_model.no_memory():
        model = meta_model.build(snapshot.model_class(options, config, embeds=False), config, dtype, embeds=False)
        whole = meta_model.tensor_bytes(model)
        largest = max(parameter.nbytes for parameter in model.parameters())
        share = RankSlice(0, ranks), FakeGroup(ranks)
        tensor_parallel_plan.divide(model, share)
        _copy_slices(model)
        weights = meta_model.tensor_bytes(model)
        runner, capacity = meta_model.make_runner(model, config, options, ctx_size, ranks=ranks)
        adapters = backends.make_adapters(runner, model, options, CPU, copies=0, share=share)
        if adapters is not None:
            weights += adapters.bytes
        context = runner.bytes
        meta_model.shorten(model)
        if isinstance(runner, AlignedRunner):
            runner.shorten()
        adapter = adapters.pretend() if adapters is not None else None
        steps = GenerationSteps(runner, capacity, options, ctx_size, adapter)
        looping = looping_peak(steps)
        peaks = [looping] if looping is not None else [peak_bytes(step) for step in steps.largest()]
        if options.devices == ("cpu",) and isinstance(runner, PagedRunner):
            heads = config.get_text_config(decoder=True).num_attention_heads // ranks
            peaks += [peak_bytes(step) for step in steps.short_rows(heads)]
    loading = whole if options.load_format == "dummy" else max(2 * largest, stored.stacked(config) * dtype.itemsize)
    return Traced(
        weights,
        context,
        max(peaks),
        on_device=meta_model.repeated_bytes(config, ctx_size, dtype) // ranks,
        loading=loading,
        staged=loading,
    )


def _copy_slices(model: nn.Module) -> None:
    """Give slices of parameters their own memory, as the loader does."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.untyped_storage().nbytes() > parameter.nbytes:
                copy = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(copy, requires_grad=False)

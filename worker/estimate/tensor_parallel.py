"""The exact figure of a model whose matrices are divided among ranks
(`worker.engines.transformers.load.tensor_parallel_plan`).

As `worker.estimate.estimate` of one that is whole: the slices of one rank are built without memory, its share of the
cache is made, its largest steps are run on fake tensors. Rank 0 stands for all: it has the sampler beside what the
others have, and whatever cannot be divided is the same on each. On accelerators each rank has one of its own; on the
CPU all take of the same memory.
"""

import itertools
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from worker.engines.transformers.device import memory
from worker.engines.transformers.load import architectures, snapshot, tensor_parallel_plan
from worker.engines.transformers.load.tensor_parallel_plan import RankSlice
from worker.engines.transformers.loop import requests
from worker.engines.transformers.run.runner import PagedRunner
from worker.engines.transformers.sample import grammar
from worker.estimate import estimate
from worker.estimate.memory_tracer import peak_bytes
from worker.protocol.argv import Estimate, ModelOptions
from worker.protocol.events import Estimated
from worker.protocol.memory import (
    ATTENTION_TILE_BYTES,
    FIRST_STEPS_BYTES,
    GLOO_BYTES,
    HEAP_FACTOR,
    NCCL_BYTES,
    STAGING_BYTES,
)


class Pretended:
    """A group of ranks of which there is only one: sums and parts have their sizes, and no content."""

    def __init__(self, count: int):
        self._count = count

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def put_together(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.empty_like(tensor) for _ in range(self._count)], dim=-1)


def divided_estimate(options: Estimate) -> Estimated:
    """As `worker.estimate.estimate.estimate`. Raises StartError for what `serve` would refuse before it reads
    weights."""
    torch.set_num_threads(options.threads)
    memory.keep_small()
    config = snapshot.load_config(options)
    ranks = tensor_parallel_plan.requested_ranks(options, config)
    bare = memory.resident()
    tokenizer = snapshot.load_tokenizer(options)
    grown = max(0, memory.resident() - bare)
    device = torch.device(options.devices[0])
    dtype = estimate.dtype_of(options, config, estimate.stored_tensors(options), device)
    grammars = grammar.vocabulary_bytes(tokenizer, config.get_text_config(decoder=True).vocab_size)
    runtime = estimate.resident_bytes(dtype) if device.type == "cpu" else estimate.host_overhead(options)
    inherited = ranks * memory.inheritance.bytes()  # now: what the trace writes to is shared no longer
    del tokenizer  # alive until here: on the CPU its memory is part of the runtime's, of followers too, who have none
    weights, context, compute, loading = trace(options, config, dtype, ranks)
    if device.type == "cpu":
        kept = HEAP_FACTOR * compute + options.threads * ATTENTION_TILE_BYTES
        return Estimated(
            weights=[ranks * weights],
            context=[ranks * context],
            compute=[ranks * max(kept, loading - context)],
            runtime=[ranks * (runtime + FIRST_STEPS_BYTES + GLOO_BYTES) + grammars],
            inherited=inherited,
        )
    repeated = estimate.repeated_bytes(config, requests.context_size(options, architectures.positions(config)), dtype)
    step = compute + repeated // ranks
    host = runtime + STAGING_BYTES + loading
    return Estimated(
        weights=[weights] * ranks,
        context=[context] * ranks,
        compute=[step] * ranks,
        runtime=[estimate.device_overhead(options, step) + NCCL_BYTES] * ranks,
        host=ranks * host + grown + grammars,
    )


def trace(options: ModelOptions, config: Any, dtype: torch.dtype, ranks: int) -> tuple[int, int, int, int]:
    """Of one rank, in bytes: weights, cache, what is alive at once in the largest step beside them, and what loading
    needs in main memory for a moment. Raises StartError for what cannot be served so."""
    cls = snapshot.model_class(options, config, embeds=False)
    ctx_size = requests.context_size(options, architectures.positions(config))
    with FakeTensorMode():
        # of the processor's kind, for the reason in `worker.estimate.estimate.trace`
        model = estimate.build(cls, config, dtype, embeds=False)
        whole = estimate.tensor_bytes(model)
        largest = max(each.nbytes for each in model.parameters())
        tensor_parallel_plan.divide(model, RankSlice(0, ranks), Pretended(ranks))
        _own(model)
        weights = estimate.tensor_bytes(model)
        runner, capacity = estimate.make_runner(model, config, options, ctx_size, ranks=ranks)
        estimate.shorten(model)
        steps = estimate.generation_steps(runner, capacity, options, ctx_size)
        if options.devices == ("cpu",) and isinstance(runner, PagedRunner):
            heads = config.get_text_config(decoder=True).num_attention_heads // ranks
            steps = itertools.chain(steps, estimate.spread_steps(runner, capacity, options, ctx_size, heads))
        compute = max(peak_bytes(step) for step in steps)
    return weights, runner.bytes, compute, whole if options.load_format == "dummy" else 2 * largest


def _own(model: nn.Module) -> None:
    """Slices in memory of their own, as the loader has them."""
    for module in model.modules():
        for name, each in module._parameters.items():
            if each is not None and each.untyped_storage().nbytes() > each.nbytes:
                module._parameters[name] = nn.Parameter(torch.empty(each.shape, dtype=each.dtype), requires_grad=False)

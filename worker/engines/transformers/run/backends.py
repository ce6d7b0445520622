"""Backends: the choice between the paged and the aligned runner, and the allocation of its cache and adapters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from worker.engines.transformers.attention import kv_pool, paged
from worker.engines.transformers.attention.kv_pool import QuantizedKvPool
from worker.engines.transformers.attention.quantized_kv_types import KvStorageType
from worker.engines.transformers.load import architectures
from worker.engines.transformers.load.layer_split import LayerSplit, SplitKvPools, tail_of
from worker.engines.transformers.load.lora import LoraAdapters
from worker.engines.transformers.load.snapshot import encodes
from worker.engines.transformers.load.tensor_parallel_plan import RankShare
from worker.engines.transformers.run import self_check
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.runner import PagedRunner
from worker.engines.transformers.run.vision import VisionTower
from worker.engines.transformers.schedule.kv_cache import BlockAllocator, RowAllocator, pool_blocks
from worker.errors import StartError, UnsupportedByModel
from worker.protocol.architectures import VERIFIED
from worker.protocol.argv import ModelOptions
from worker.protocol.events import Exit

# Names under which transformers finds the attention of the paged runner, by the value of `attention`.
ATTENTION = {"auto": paged.SDPA, "sdpa": paged.SDPA, "eager": paged.EAGER}


def implementation(options: ModelOptions, config: Any) -> str | None:
    """Transformers' name of the attention implementation; None for the model's own default.

    Raises StartError if `attention` has an unknown value.
    """
    check_attention(options)
    if architectures.backend(config) == "paged" and not encodes(options, config):
        return ATTENTION[options.attention]
    return None if options.attention == "auto" else options.attention


def check_attention(options: ModelOptions) -> None:
    """Raise StartError if `attention` has an unknown value."""
    if options.attention not in ATTENTION:
        raise StartError(
            f"attention = {options.attention} is none of {', '.join(ATTENTION)}; set attention = auto, which uses"
            " PyTorch's FlashAttention kernel where the device has one",
            Exit.USAGE,
        )


def make_blocks(options: ModelOptions, ctx_size: int, *, caches: bool) -> BlockAllocator:
    """The blocks of `options`. Raises StartError if a request of `ctx_size` tokens would not fit."""
    if 0 < options.kv_tokens < ctx_size:
        raise StartError(
            f"kv-tokens {options.kv_tokens} is less than the {ctx_size} tokens that one request may have (ctx-size);"
            " raise kv-tokens or lower ctx-size"
        )
    contexts = options.contexts or options.parallel
    return BlockAllocator(options.parallel, pool_blocks(contexts, ctx_size, options.kv_tokens), caches=caches)


def make_pool(
    config: Any,
    blocks: BlockAllocator,
    dtype: torch.dtype,
    device: torch.device,
    *,
    layers: int | None = None,
    ranks: int = 1,
    kv_dtype: str = "auto",
) -> kv_pool.KvPool:
    """Allocate the keys and values of `blocks`. Raises StartError if `kv_dtype` does not suit the model.

    layers: the number of layers; None: all of the model.
    ranks: tensor-parallel ranks that share the heads.
    kv_dtype: as the option `kv_cache_dtype`.
    """
    shape = architectures.CacheShape.of(config)
    count, heads = shape.layers if layers is None else layers, shape.kv_heads // ranks
    kind = KvStorageType.of(kv_dtype, heads, shape.head_dim, dtype)
    if kind is not None:
        return QuantizedKvPool(kind, layers=count, rows=blocks.rows, blocks=blocks.count, device=device)
    return kv_pool.KvPool(
        layers=count,
        kv_heads=heads,
        head_dim=shape.head_dim,
        rows=blocks.rows,
        blocks=blocks.count,
        dtype=dtype,
        device=device,
    )


def make_runner(
    model: Any,
    config: Any,
    options: ModelOptions,
    ctx_size: int,
    device: torch.device,
    *,
    caches: bool,
    tower: VisionTower | None = None,
    split: LayerSplit | None = None,
    ranks: int = 1,
    paged_runner: Callable[..., PagedRunner] = PagedRunner,
    aligned_runner: Callable[..., AlignedRunner] = AlignedRunner,
) -> tuple[PagedRunner | AlignedRunner, RowAllocator]:
    """The runner of this architecture with its cache allocated, and the capacity of the cache.

    caches: keep prefixes for later requests. Needs blocks; an aligned cache has rows instead, as many as `kv_tokens`
        has room for.
    tower: the vision tower of a model that takes images; these are all aligned.
    split: of a model whose layers lie on several devices.
    ranks: of a tensor-parallel model.
    paged_runner, aligned_runner: the classes of the runners.

    Raises StartError if a request would not fit, UnsupportedCache if the model's cache is of an unknown kind.
    """
    blocks = make_blocks(options, ctx_size, caches=caches)
    if architectures.backend(config) == "paged":
        pool_of = partial(make_pool, config, blocks, model.dtype, kv_dtype=options.kv_cache_dtype)
        if split is None:
            return paged_runner(model, pool_of(device, ranks=ranks), blocks, device), blocks
        # One block table for all devices: block n has its layers' part in the pool of each device.
        parts = zip(split.devices, split.layers, strict=True)
        pools = SplitKvPools([pool_of(at, layers=count) for at, count in parts], split)
        return PagedRunner(model, pools, blocks, device, tail_of(model, split)), blocks
    rows = aligned_rows(options, ctx_size)
    chunk = min(options.prefill_chunk, ctx_size)
    runner = aligned_runner(
        model,
        rows=rows,
        ctx_size=ctx_size,
        chunk=chunk,
        device=device,
        tower=tower,
        layer_devices=split.by_layer if split is not None else None,
        kv_dtype=options.kv_cache_dtype,
    )
    return runner, RowAllocator(rows, ctx_size)


def aligned_rows(options: ModelOptions, ctx_size: int) -> int:
    """Rows of an aligned cache. It is one tensor `[rows, ctx_size]` per layer, so `kv_tokens` buys whole rows only."""
    contexts = options.kv_tokens // ctx_size if options.kv_tokens else options.contexts or options.parallel
    return min(options.parallel, contexts)


def make_adapters(
    runner: PagedRunner | AlignedRunner,
    model: Any,
    options: ModelOptions,
    device: torch.device,
    *,
    copies: int,
    share: RankShare | None = None,
) -> LoraAdapters | None:
    """Allocate the adapter slots of `options` for `runner`. None without adapters. `share`: of a tensor-parallel model.
    Raises StartError."""
    if not options.max_loras:
        return None
    try:
        runner.adapters = LoraAdapters(
            model, slots=options.max_loras, lora_rank=options.max_lora_rank, copies=copies, device=device, share=share
        )
    except UnsupportedByModel as error:
        raise StartError(f"{error.message}; set enable-lora = off") from None
    return runner.adapters


def check_cache(runner: PagedRunner | AlignedRunner, config: Any, ctx_size: int) -> None:
    """Check an aligned cache with the model, unless the tests cover its architecture. Raises UnsupportedCache.

    States are always checked: the kernels that continue them differ between machines.
    """
    if isinstance(runner, PagedRunner) or ctx_size < self_check.CHECK_TOKENS:
        return
    if config.model_type not in VERIFIED or runner.has_states:
        runner.run_self_check(self_check.check, tokens=self_check.CHECK_TOKENS)

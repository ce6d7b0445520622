"""Which backend runs a model, made and proved."""

from functools import partial
from typing import Any

import torch

from worker.engines.transformers.attention import kv_pool, paged
from worker.engines.transformers.attention.quantized_kv_pool import CompactPool
from worker.engines.transformers.attention.quantized_kv_types import CacheType
from worker.engines.transformers.load import architectures
from worker.engines.transformers.load.layer_split import Pools, Split, tail_of
from worker.engines.transformers.load.lora import Adapters
from worker.engines.transformers.run import self_check
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.runner import PackedRunner
from worker.engines.transformers.run.vision import Tower
from worker.engines.transformers.schedule.kv_cache import Blocks, Capacity, Rows, pool_blocks
from worker.errors import StartError, UnsupportedByModel
from worker.protocol.argv import ModelOptions
from worker.protocol.exits import Exit

__all__ = [
    "ATTENTION",
    "check_attention",
    "implementation",
    "make_adapters",
    "make_blocks",
    "make_pool",
    "make_runner",
    "prove",
]

ATTENTION = {"auto": paged.SDPA, "sdpa": paged.SDPA, "eager": paged.EAGER}
"""The name under which transformers finds the packed backend's attention, by the value of `attention`."""


def implementation(asked: str, config: Any) -> str | None:
    """Return transformers' name of the attention; None: what the model's own code prefers.

    Raises StartError if `asked` is not a value of `attention`.
    """
    check_attention(asked)
    if architectures.backend(config) == "paged":
        return ATTENTION[asked]
    return None if asked == "auto" else asked


def check_attention(asked: str) -> None:
    """Raise StartError unless `asked` is a value of `attention`."""
    if asked not in ATTENTION:
        raise StartError(
            f"attention = {asked} is none of {', '.join(ATTENTION)}; set attention = auto, which uses PyTorch's"
            " FlashAttention kernel where the device has one",
            Exit.USAGE,
        )


def make_blocks(options: ModelOptions, ctx_size: int, *, caches: bool) -> Blocks:
    """The blocks that `options` ask for. Raises StartError if a request of `ctx_size` tokens would not fit."""
    if 0 < options.kv_tokens < ctx_size:
        raise StartError(
            f"kv-tokens {options.kv_tokens} is less than the {ctx_size} tokens that one request may have (ctx-size);"
            " raise kv-tokens or lower ctx-size"
        )
    return Blocks(options.parallel, pool_blocks(options.parallel, ctx_size, options.kv_tokens), caches=caches)


def make_pool(
    config: Any,
    blocks: Blocks,
    dtype: torch.dtype,
    device: torch.device,
    *,
    layers: int | None = None,
    ranks: int = 1,
    kept_as: str = "auto",
) -> kv_pool.Pool:
    """Memory for `blocks` of a model's keys and values; of so many of its `layers`, None: of all; of one of `ranks`
    that each have as many of its heads. `kept_as`: in which numbers (`cache_types`). Raises StartError if they cannot
    be kept so."""
    shape = architectures.CacheShape.of(config)
    count, heads = shape.layers if layers is None else layers, shape.kv_heads // ranks
    kind = CacheType.of(kept_as, heads, shape.head_dim, dtype)
    if kind is not None:
        return CompactPool(kind, layers=count, rows=blocks.rows, blocks=blocks.count, device=device)
    return kv_pool.Pool(
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
    tower: Tower | None = None,
    split: Split | None = None,
    ranks: int = 1,
) -> tuple[PackedRunner | AlignedRunner, Capacity]:
    """The backend of this architecture, its cache allocated, and what that has room for.

    `caches`: prefixes are kept for whoever begins alike, where there are blocks to keep. An aligned cache has rows in
    place of blocks: as many as `kv_tokens` has room for, and keeps no prefixes. `tower`: of a model that takes images,
    which are all aligned. `split`: of a model on several devices; `ranks`: of one that is divided among so many. Raises
    StartError if a request would not fit, Unsupported if the model's cache is not one that we know.
    """
    blocks = make_blocks(options, ctx_size, caches=caches)
    if architectures.backend(config) == "paged":
        pool_of = partial(make_pool, config, blocks, model.dtype, kept_as=options.kv_cache_dtype)
        if split is None:
            return PackedRunner(model, pool_of(device, ranks=ranks), blocks, device), blocks
        each = zip(split.devices, split.layers, strict=True)
        pools = Pools([pool_of(at, layers=count) for at, count in each], split)
        return PackedRunner(model, pools, blocks, device, tail_of(model, split)), blocks
    rows = min(options.parallel, options.kv_tokens // ctx_size) if options.kv_tokens else options.parallel
    chunk = min(options.prefill_chunk, ctx_size)
    runner = AlignedRunner(
        model,
        rows=rows,
        ctx_size=ctx_size,
        chunk=chunk,
        device=device,
        tower=tower,
        homes=split.by_layer if split is not None else None,
        kept_as=options.kv_cache_dtype,
    )
    return runner, Rows(rows, ctx_size)


def make_adapters(
    runner: PackedRunner | AlignedRunner,
    model: Any,
    options: ModelOptions,
    device: torch.device,
    *,
    copies: int,
) -> Adapters | None:
    """The slots that `options` ask for, allocated, and used by `runner`. Raises StartError where there can be none."""
    if not options.max_loras:
        return None
    try:
        runner.adapters = Adapters(
            model, slots=options.max_loras, rank=options.max_lora_rank, copies=copies, device=device
        )
    except UnsupportedByModel as error:
        raise StartError(f"{error.message}; set enable-lora = off") from None
    return runner.adapters


def prove(runner: PackedRunner | AlignedRunner, config: Any, ctx_size: int) -> None:
    """Try an aligned cache on the model, unless our tests have done so. States are tried in any case, as the kernels
    that carry them on differ from machine to machine. Raises Unsupported."""
    if isinstance(runner, PackedRunner) or ctx_size < self_check.LONGEST:
        return
    if config.model_type not in architectures.VERIFIED or runner.has_states:
        runner.tried_by(self_check.trial, tokens=self_check.LONGEST)

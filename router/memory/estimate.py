"""The static estimate: bytes by shard and segment, from checkpoint and preset, in milliseconds and without torch. PURE.

    weights   parameters in memory, in the dtype of the computation
    context   the KV cache, allocated at load: the least one, for one request of `ctx_size` tokens (see `granted`)
    compute   a bound on the activations of one prefill chunk or one decode step
    runtime   process overhead: the process itself on main memory; context and libraries of the device on an accelerator

The first three are in router/memory/segments.py. Every figure rounds up: it is never below the exact one. If only the
weights are known, they are multiplied by a stated factor, and the estimate has a note. If not even they are known,
`UnknownArchitecture` is raised; the remedy is the key `required-memory`.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Literal, NamedTuple

from router.config.presets import Preset
from router.memory.checkpoint_facts import (
    AUTO_CTX,
    DTYPE_BYTES,
    Checkpoint,
    UnknownArchitecture,
    compute_dtype,
    effective_ctx,
    serves_embeddings,
    takes_images,
)
from router.memory.segments import (
    KvRange,
    adapter_bytes,
    bits_on_load,
    check_quantization,
    compute_bytes,
    is_mapped,
    kv_range,
    part_bytes,
    weight_bytes,
)
from worker.protocol.events import Estimated
from worker.protocol.memory import (
    ATTENTION_TILE_BYTES,
    CUBLAS_WORKSPACE_BYTES,
    DEVICE_LIBRARIES_HOST_BYTES,
    DEVICE_PROCESS_BYTES,
    DEVICE_PROCESS_HOST_BYTES,
    FIRST_STEPS_BYTES,
    GRAMMAR_BYTES,
    GRAMMAR_ENTRY_BYTES,
    HEAP_FACTOR,
    HELD_BYTES,
    KERNEL_CODE_BYTES,
    KERNEL_CODES,
    MIB,
    OPENING_BYTES,
    STAGING_BYTES,
    UNUSABLE_SHARE,
)


@functools.cache
def version(distribution: str) -> str:
    """Return the version of an installed distribution without importing it; "" if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


# Resident bytes of a worker process on main memory beside its model. Measured: 395 MiB of imports (torch 2.13 for the
# CPU, transformers 5.23, Python 3.11; a third of it mapped libraries) and 15 more until it is ready. A worker with a
# model of 1.8 MiB had 410 MiB when ready and 433 in service; with tokenizer and kernels, the estimate was 484. A build
# of torch for accelerators has larger libraries: 494 MiB with the same model.
RUNTIME_HOST = (420 if version("torch").endswith("+cpu") else 500) * MIB

# The same for a forked worker, without data and libraries that it shares with its fork server. Measured: 28 MiB when
# ready and 33 in service with a model of half a MiB. 2 % of the 266 MiB of shared data are added for pages
# written to later. The other 18 MiB are a guess for other models.
RUNTIME_FORKED = 56 * MIB

# Growth of a process after its imports. Measured: 15 MiB until it is ready with a small model, 10 to 45 in service.
SERVING_HOST = 64 * MIB

# Part of the pages shared with the fork server during an estimate that a worker shares permanently. Measured: a worker
# shares as much when it is ready (308 of 305 MiB), and copies up to 7 MiB of it later, grammars included.
INHERITED_SHARE = 0.97

# Bytes of a loaded tokenizer for each entry of the vocabulary. Measured with tokenizers 0.23 on byte-pair tokenizers of
# 32,000 and 128,000 entries: 32 and 124 MiB.
TOKENIZER_BYTES = 1100

# Factor for the bytes of the weights if nothing else of a model is known. A guess, as the note of the estimate states.
SAFETY_FACTOR = 2

# Least bytes beside weights and cache in that case; an eighth of the cache is added.
LEAST_BESIDE = 512 * MIB

# The source of an estimate. `weights`: the bytes of the weights times a factor, because nothing else is known.
Source = Literal["static", "weights", "exact", "learned", "preset"]

# Resident bytes of a method's library once it is imported. Measured: gptqmodel 7.6 100 MiB, bitsandbytes 0.50 39,
# compressed-tensors 0.20 13.
LIBRARY_BYTES: Mapping[str, int] = {
    "gptq": 112 * MIB, "awq": 112 * MIB, "bnb-4bit": 44 * MIB, "bnb-8bit": 44 * MIB, "compressed-tensors": 16 * MIB,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Overhead:
    """Measured bytes of a process without a model; 0: not measured yet."""

    device: int = 0  # of each accelerator, beyond what torch's allocator holds: context and libraries
    # Of main memory, once a process has its imports and its device; of a forked process only the latter, because it
    # shares the imports with its fork server.
    host: int = 0

    @property
    def on_device(self) -> int:
        """Bytes to count on each accelerator."""
        return self.device or DEVICE_PROCESS_BYTES

    def on_host(self, *, forked: bool) -> int:
        """Return the bytes to count for a worker on main memory, without its tokenizer."""
        if forked:
            return RUNTIME_FORKED
        return self.host + SERVING_HOST if self.host else RUNTIME_HOST

    def beside_device(self, *, forked: bool) -> int:
        """Return the bytes of main memory to count for a worker on accelerators, without its tokenizer."""
        if not self.host:
            return DEVICE_PROCESS_HOST_BYTES
        return self.host + DEVICE_LIBRARIES_HOST_BYTES + (RUNTIME_FORKED if forked else SERVING_HOST)


UNKNOWN = Overhead()


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of a model by shard and segment, and on main memory beside its shards."""

    weights: tuple[int, ...]
    context: tuple[int, ...]
    compute: tuple[int, ...]
    runtime: tuple[int, ...]
    host: int = 0  # bytes of main memory beside the shards; 0 for a model whose shard is main memory
    source: Source = "static"
    reserved: int = 0  # bytes of each shard's runtime that only the preset asked for (`reserved-memory`)
    note: str = ""  # how the figure was made, for users
    layers: tuple[int, ...] = ()  # number of layers of each shard; empty: not split by layers
    overhead: Overhead = UNKNOWN  # process overhead measured before on this type of device
    process: int = 0  # bytes of `host` for the process, or for all ranks, for any model: measured before, or assumed
    # The range of the KV cache. `context` is the least one; the most is `kv_steps` steps larger. 0 steps: it is fixed.
    kv_step: tuple[int, ...] = ()  # bytes of one step, by shard; empty: fixed
    kv_steps: int = 0
    kv_tokens: int = 0  # tokens of the least cache; 0: not stated
    step_tokens: int = 0  # tokens of one step: a block, or one row of `ctx_size` of the aligned cache

    @property
    def shards(self) -> tuple[int, ...]:
        """All segments together, by shard."""
        return tuple(map(sum, zip(self.weights, self.context, self.compute, self.runtime, strict=True)))

    @property
    def total(self) -> int:
        """All shards and main memory together."""
        return sum(self.shards) + self.host

    def granted(self, steps: int) -> "MemoryEstimate":
        """Return the estimate of a worker whose KV cache is `steps` larger than the least: a fixed estimate."""
        context = self.context
        if steps:
            context = tuple(size + steps * step for size, step in zip(self.context, self.kv_step, strict=True))
        tokens = self.kv_tokens + steps * self.step_tokens
        return replace(self, context=context, kv_step=(), kv_steps=0, kv_tokens=tokens, step_tokens=0)

    @property
    def is_exact(self) -> bool:
        """True if eviction and refusal may rely on it. A static bound may be several times too high."""
        return self.source not in ("static", "weights")


def from_trace(
    traced: Estimated, preset: Preset, *, forked: bool = False, first: MemoryEstimate | None = None
) -> MemoryEstimate:
    """Return the estimate of a trace by `worker estimate`, with `reserved-memory` of the preset on top.

    `forked`: subtract memory that a forked worker shares with its fork server, as far as the estimating process was
    forked and could measure it. `first`: the static estimate; its layers, overhead and process figure stay valid, and
    it states the range of the KV cache. The trace is of the largest cache, because the largest step needs that.
    """
    extra = preset.reserved_memory
    shared = int(INHERITED_SHARE * traced.inherited) if forked else 0
    runtime = tuple(max(0, size - shared) + extra for size in traced.runtime)
    segments = tuple(traced.weights), tuple(traced.context), tuple(traced.compute), runtime
    found = MemoryEstimate(*segments, traced.host, "exact", extra)
    if first is None:
        return found
    found = replace(found, layers=first.layers, overhead=first.overhead, process=first.process)
    return _with_range(found, first) if first.kv_steps else replace(found, kv_tokens=first.kv_tokens)


def _with_range(largest: MemoryEstimate, static: MemoryEstimate) -> MemoryEstimate:
    """Return the estimate with the range of `static`, in which the most is the cache of `largest`.

    The cache grows by equal steps above what does not grow (buffers, states of all sequences). The trace has their sum
    and the static estimate the other part, so the bytes of a step follow. They differ from the static ones only where a
    split model has layers of two kinds, whose order no file states.
    """
    present = static.kv_tokens // static.step_tokens  # steps in the least cache
    caches = zip(largest.context, static.context, static.kv_step, strict=True)
    step = tuple(max(0, most - (least - present * size)) // (present + static.kv_steps) for most, least, size in caches)
    context = tuple(most - static.kv_steps * size for most, size in zip(largest.context, step, strict=True))
    return replace(
        largest,
        context=context,
        kv_step=step,
        kv_steps=static.kv_steps,
        kv_tokens=static.kv_tokens,
        step_tokens=static.step_tokens,
    )


def refreshed(known: MemoryEstimate, first: MemoryEstimate) -> MemoryEstimate:
    """Return a `known` exact estimate from before with the layers, the range of the KV cache and the process overhead
    of the static one (`first`), which may be measured better by now. Exact estimates are kept with the largest cache,
    without its tokens.
    """
    known = replace(known, layers=first.layers, overhead=first.overhead, kv_tokens=first.kv_tokens)
    if first.kv_steps and not known.kv_steps:
        known = _with_range(known, first)
    if not first.host:
        return known
    host = known.host - known.process + first.process if known.process else known.host
    return replace(known, runtime=first.runtime, host=host, process=first.process)


def estimate(
    facts: Checkpoint,
    preset: Preset,
    *,
    layers: tuple[int, ...] = (),
    on_host: bool,
    threads: int = 0,
    forked: bool = False,
    overhead: Overhead = UNKNOWN,
) -> MemoryEstimate:
    """Return the estimate of a worker of `preset` on one accelerator, on main memory (`on_host`), or on several
    accelerators with so many `layers` each.

    `overhead`: measured memory of a process without a model, forked or executed. `threads`: torch threads, if the
    preset does not set them. `required-memory` replaces the figures, `reserved-memory` is added. Raises EstimateError.
    """
    check_quantization(facts, preset, on_host=on_host)
    preset = replace(preset, threads=preset.threads or threads)
    libraries = facts.vocab_size * TOKENIZER_BYTES + grammar_bytes(facts, preset) + picture_bytes(facts, preset)
    libraries += LIBRARY_BYTES.get(facts.quantization or preset.quantization, 0)
    runtime = overhead.on_host(forked=forked) + libraries if on_host else overhead.on_device
    process = 0 if on_host else overhead.beside_device(forked=forked)
    beside = 0 if on_host else process + libraries + _staged_bytes(facts, preset)
    extra = preset.reserved_memory
    shards = len(layers) or 1
    required = required_shards(preset, shards=shards, on_host=on_host)
    if required is not None:
        none = (0,) * shards
        host = 0 if on_host else preset.required_memory.get("cpu", beside)
        own = (extra,) * shards
        return MemoryEstimate(required, none, none, own, host, "preset", extra, layers=layers, overhead=overhead)
    of_model = _split_segments(facts, preset, layers) if layers else _whole_segments(facts, preset, on_host=on_host)
    return MemoryEstimate(
        weights=of_model.weights,
        context=of_model.context,
        compute=of_model.compute,
        runtime=tuple(runtime + (0 if on_host else beside_steps(step)) + extra for step in of_model.compute),
        host=beside,
        source="weights" if of_model.note else "static",
        reserved=extra,
        note=of_model.note,
        layers=layers,
        overhead=overhead,
        process=process,
        **range_fields(of_model.caches),
    )


class _Segments(NamedTuple):
    """The bytes of a model by shard, without its process."""

    weights: tuple[int, ...]
    context: tuple[int, ...]
    compute: tuple[int, ...]
    caches: tuple[KvRange, ...]
    note: str = ""  # that they are a guess, and why; empty: they are not


def _split_segments(facts: Checkpoint, preset: Preset, layers: tuple[int, ...]) -> _Segments:
    """Return the segments of a model with so many `layers` on each accelerator."""
    tokens = effective_ctx(facts, preset)
    whole = weight_bytes(facts, preset, on_host=False)
    caches = tuple(kv_range(_part(facts, count), preset, tokens, on_host=False) for count in layers)
    head = 0 if facts.tied else len(layers) - 1  # the shard with the output head, and so with the logits
    compute = tuple(
        compute_bytes(facts, preset, tokens, on_host=False, part="head" if shard == head else "layers")
        for shard in range(len(layers))
    )
    context = tuple(cache.least for cache in caches)
    return _Segments(_weights_by_shard(facts, preset, whole, layers), context, compute, caches)


def _whole_segments(facts: Checkpoint, preset: Preset, *, on_host: bool) -> _Segments:
    """Return the segments of a model on one device: a guess from the weights if its architecture is unknown."""
    tokens = effective_ctx(facts, preset)
    whole = weight_bytes(facts, preset, on_host=on_host)
    try:
        cache = kv_range(facts, preset, tokens, on_host=on_host)
        step = compute_bytes(facts, preset, tokens, on_host=on_host)
        step = kept_bytes(facts, preset, step, cache.least) if on_host else step
    except UnknownArchitecture as unknown:
        if not whole:
            raise
        # The guess is for all of the cache. Without facts there are no bytes of a step, so it has no range.
        context, step = _guess(facts, preset, whole, tokens, on_host=on_host)
        note = (
            f"weights x {SAFETY_FACTOR}, or more where a cache of hidden size would need it, and"
            f" {LEAST_BESIDE // MIB} MiB beside them at least: {unknown.fact}; required-memory would replace this"
        )
        return _Segments((whole,), (context,), (step,), (KvRange(),), note)
    return _Segments((whole,), (cache.least,), (step,), (cache,))


def range_fields(caches: Sequence[KvRange]) -> dict[str, Any]:
    """Return the fields of an estimate that state the range of its KV cache. `caches`: by shard."""
    first = caches[0]
    if not first.steps or not any(cache.step for cache in caches):
        return {"kv_tokens": first.tokens}
    return {
        "kv_step": tuple(cache.step for cache in caches),
        "kv_steps": first.steps,
        "kv_tokens": first.tokens,
        "step_tokens": first.step_tokens,
    }


def _guess(facts: Checkpoint, preset: Preset, weights: int, tokens: int, *, on_host: bool) -> tuple[int, int]:
    """Return the bytes of KV cache and activations of an unknown architecture, from the bytes of its `weights`."""
    cache = _widest_context(facts, preset, tokens, on_host=on_host)
    compute = max((SAFETY_FACTOR - 1) * weights - cache, LEAST_BESIDE + cache // 8)
    if facts.hidden and facts.vocab_size:  # the bound on activations holds although the cache is unknown
        step = compute_bytes(replace(facts, kv_heads=facts.kv_heads or facts.heads), preset, tokens, on_host=on_host)
        compute = max(compute, kept_bytes(facts, preset, step, cache) if on_host else step)
    return cache, compute


def beside_steps(compute: int) -> int:
    """Return the bytes on an accelerator of its libraries, and of fragmentation in the allocator of torch for a step of
    `compute` bytes."""
    return CUBLAS_WORKSPACE_BYTES + int(UNUSABLE_SHARE * compute)


def _widest_context(facts: Checkpoint, preset: Preset, tokens: int, *, on_host: bool) -> int:
    """Return the bytes of a KV cache with keys and values as wide as the model, in as many layers as the tensor names
    show; 0 if these do not show any. More than a model with shared heads or a compressed cache needs."""
    if serves_embeddings(facts, preset):
        return 0
    layers = facts.layers or facts.named_layers
    cached = preset.kv_tokens or preset.contexts * tokens
    return 2 * facts.hidden * layers * cached * DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]


def _weights_by_shard(facts: Checkpoint, preset: Preset, total: int, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Split `total` bytes of weights: each shard has its layers, the last one also what follows them, the first one the
    rest."""
    slots = _adapter_share(facts, preset)
    first, sizes = 0, []
    for count in layers:
        parts = facts.by_layer[first : first + count]
        sizes.append(sum(part_bytes(facts, preset, part) for part in parts) + count * slots)
        first += count
    sizes[-1] += part_bytes(facts, preset, facts.behind)
    sizes[0] += max(0, total - sum(sizes))
    return tuple(sizes)


def _adapter_share(facts: Checkpoint, preset: Preset) -> int:
    """Return the bytes of the LoRA slots of one layer."""
    size = DTYPE_BYTES[compute_dtype(facts, preset, on_host=False)]
    return -(-adapter_bytes(facts, preset, size) // max(1, len(facts.by_layer)))


def _part(facts: Checkpoint, layers: int) -> Checkpoint:
    """Return the facts of a part of the model with so many `layers`. If there are several kinds, each is rounded up,
    because the files do not state their order."""
    attending = facts.layers - facts.state_layers - facts.cacheless
    states, others, hybrids, cacheless = (
        -(-count * layers // facts.layers) for count in (facts.state_layers, attending, facts.hybrids, facts.cacheless)
    )
    return replace(facts, layers=states + others + cacheless, state_layers=states, hybrids=hybrids, cacheless=cacheless)


def layer_costs(facts: Checkpoint, preset: Preset) -> tuple[int, ...]:
    """Return the bytes of weights and least context of each layer on an accelerator. Raises EstimateError."""
    context = kv_range(facts, preset, effective_ctx(facts, preset), on_host=False).least
    share = -(-context // max(1, len(facts.by_layer))) + _adapter_share(facts, preset)
    return tuple(part_bytes(facts, preset, part) + share for part in facts.by_layer)


def reason_for_one_device(facts: Checkpoint, preset: Preset) -> str:
    """Return the reason for which the model has to be on one device, by layer split or tensor parallelism; empty if
    there is none."""
    if serves_embeddings(facts, preset):
        return "it embeds or scores texts"
    if facts.cross_attention:
        return "it has an encoder and a decoder"
    if "vision" in facts.capabilities:
        return "it takes images"
    if facts.draft is not None:
        return "it has a draft model"
    return ""


def reason_not_to_split(facts: Checkpoint, preset: Preset) -> str:
    """Return the reason for which the layers cannot be split over several devices; empty if they can."""
    return reason_for_one_device(facts, preset) or (
        "" if facts.by_layer else "its tensor names do not identify the layers"
    )


def prepared_bytes(facts: Checkpoint, found: MemoryEstimate, *, on_host: bool, forked: bool) -> int:
    """Return the bytes of main memory, at most, of a worker that is prepared up to its weights: process and tokenizer,
    as far as `found` includes them."""
    most = found.shards[0] if on_host else found.host
    return min(most, found.overhead.on_host(forked=forked) + facts.vocab_size * TOKENIZER_BYTES)


def kept_bytes(facts: Checkpoint, preset: Preset, compute: int, context: int) -> int:
    """Return the bytes of main memory beside weights and cache: heap that malloc keeps after steps, workspaces of
    threads and compiled kernels. If loading needs more, that peak, which is over before the cache exists."""
    refreshed = HEAP_FACTOR * compute + FIRST_STEPS_BYTES + KERNEL_CODES * KERNEL_CODE_BYTES
    refreshed += max(preset.threads, 1) * ATTENTION_TILE_BYTES
    itemsize = DTYPE_BYTES[compute_dtype(facts, preset, on_host=True)]
    loading = 0 if is_mapped(facts, preset) else facts.largest  # tensors are converted one at a time
    if bits_on_load(facts, preset) or (facts.stacked and not facts.quantization):
        # All plain tensors stay until the last one is quantized. Tensors of single experts stay until those of all
        # layers are stacked, and those of one layer exist once more.
        elements = sum(tally.elements for tally in facts.tensors.values())
        loading = max(loading, (elements + elements // max(facts.layers, 1)) * itemsize)
    return max(refreshed, loading - context)


def grammar_bytes(facts: Checkpoint, preset: Preset) -> int:
    """Return the bytes of main memory for guided decoding, which any request may use."""
    return 0 if serves_embeddings(facts, preset) else GRAMMAR_BYTES + facts.vocab_size * GRAMMAR_ENTRY_BYTES


def picture_bytes(facts: Checkpoint, preset: Preset) -> int:
    """Return the bytes of main memory for images of requests: one that is opened, and all that are prepared."""
    if not takes_images(facts, preset):
        return 0
    ctx_size = preset.ctx_size if preset.ctx_size > 0 else facts.max_positions or AUTO_CTX
    most = min(preset.limit_images, max(ctx_size // max(facts.picture_tokens, 1), 1))
    return OPENING_BYTES + max(HELD_BYTES, most * facts.picture_elements * DTYPE_BYTES["float32"])


def request_bytes(facts: Checkpoint, preset: Preset) -> int:
    """Return the bytes that requests take in a worker on main memory beside steps and grammars: images, and slots of
    adapters."""
    size = DTYPE_BYTES[compute_dtype(facts, preset, on_host=True)]
    return picture_bytes(facts, preset) + adapter_bytes(facts, preset, size)


def _staged_bytes(facts: Checkpoint, preset: Preset) -> int:
    """Return the bytes of main memory for weights on their way to an accelerator: buffers, and all weights if they are
    converted or drawn there."""
    dtype = compute_dtype(facts, preset, on_host=False)
    if preset.load_format == "dummy":
        return STAGING_BYTES + weight_bytes(facts, preset, on_host=False)
    if bits_on_load(facts, preset):
        return facts.file_bytes
    if all(stored == dtype for stored in facts.tensors if stored in DTYPE_BYTES):
        return STAGING_BYTES
    return STAGING_BYTES + weight_bytes(facts, preset, on_host=False)


def required_shards(preset: Preset, *, shards: int, on_host: bool) -> tuple[int, ...] | None:
    """Return the figures of `required-memory` by shard; None unless the preset states them for all shards."""
    stated = preset.required_memory
    if not stated:
        return None
    if on_host:
        names = ["cpu"]
    elif preset.device:
        names = list(preset.device[:shards])
    else:
        names = [name for name in stated if name not in ("", "cpu")][:shards]
    names += [""] * (shards - len(names))
    values = [stated.get(name, stated.get("")) for name in names]
    return None if None in values else tuple(value for value in values if value is not None)

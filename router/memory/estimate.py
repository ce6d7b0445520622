"""Checkpoint and preset to a static estimate: bytes by shard, in milliseconds and without torch.

    weights   parameters as they will sit in memory, whatever dtype the files have
    context   the cache pool, which the engine makes at load for `parallel` sequences of `ctx_size` tokens
    compute   a bound on one prefill chunk or one decode step, beyond those two (router/memory/activations.py)
    runtime   the process itself on main memory; the device's context and libraries on an accelerator

Law: PURE. A figure here is never below the truth: what is not known exactly rounds up. Where nothing but the weights
is known, they are multiplied with a stated factor, and the estimate says so; where not even they are,
`UnknownArchitecture` is raised (the way out is the key `required-memory`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from router.config import kv_types
from router.config.presets import Preset
from router.memory.activations import compute_bytes
from router.memory.checkpoint_facts import (
    AUTO_CTX,
    DTYPE_BYTES,
    Checkpoint,
    ContextTooLarge,
    UnknownArchitecture,
    compute_dtype,
    effective_ctx,
    embeds,
    sees,
)
from router.memory.process import UNKNOWN, Overhead
from router.memory.weights import check_quantization, is_mapped, on_load, weight_bytes
from worker.protocol.events import Estimated
from worker.protocol.memory import (
    ATTENTION_TILE_BYTES,
    BLOCK_TOKENS,
    CUBLAS_WORKSPACE_BYTES,
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

INHERITED_SHARE = 0.85
"""Of what a forked process shares with its nursery while it estimates, what a worker will share for good."""

TOKENIZER_BYTES = 1100
"""Of each entry of the vocabulary in a loaded tokenizer; measured on byte-pair tokenizers of 32,000 and 128,000 entries
with tokenizers 0.23: 32 and 124 MiB."""

SAFETY_FACTOR = 2
"""What the bytes of weights are multiplied with where nothing else of a model is known. A guess, and stated as such."""

LEAST_BESIDE = 512 * MIB
"""Added to weights and cache at least in that case, with an eighth of that cache: steps take some of either."""

Source = Literal["static", "weights", "exact", "learned", "preset"]
"""Where a figure comes from. `weights`: their bytes times a factor, as nothing else is known."""

LIBRARY_BYTES: Mapping[str, int] = {
    "gptq": 112 * MIB, "awq": 112 * MIB, "bnb-4bit": 44 * MIB, "bnb-8bit": 44 * MIB, "compressed-tensors": 16 * MIB,
}  # fmt: skip
"""Resident bytes of a method's library once it is imported. Measured: gptqmodel 7.6 100 MiB, bitsandbytes 0.50 39,
compressed-tensors 0.20 13."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that a model will occupy, by shard and segment, and on main memory beside its shards."""

    weights: tuple[int, ...]
    context: tuple[int, ...]
    compute: tuple[int, ...]
    runtime: tuple[int, ...]
    host: int = 0
    """Bytes of main memory beside the shards; 0 for a model whose shard is main memory."""
    source: Source = "static"
    reserved: int = 0
    """Bytes of each shard's runtime that only the preset asked for (`reserved-memory`)."""
    note: str = ""
    """What a person should know of how the figure came about."""
    layers: tuple[int, ...] = ()
    """How many each shard has; empty: there is one shard, which has them all."""
    overhead: Overhead = UNKNOWN
    """What of it had been measured before on this type of device, whatever the model."""
    process: int = 0
    """Bytes of `host` that are the process's, or all ranks', whatever the model: measured before, or assumed."""

    @property
    def shards(self) -> tuple[int, ...]:
        """All segments together, by shard."""
        return tuple(map(sum, zip(self.weights, self.context, self.compute, self.runtime, strict=True)))

    @property
    def total(self) -> int:
        """All shards and main memory together."""
        return sum(self.shards) + self.host

    @property
    def lowered_by(self) -> str:
        """The keys of a preset that make it smaller."""
        return "required-memory" if self.source == "preset" else "ctx-size or parallel"

    @property
    def sure(self) -> bool:
        """Whether somebody may be evicted or refused on it."""
        return self.source not in ("static", "weights")


def exact(said: Estimated, preset: Preset, *, forked: bool = False, first: Estimate | None = None) -> Estimate:
    """What `worker estimate` said, with the preset's `reserved-memory` on top; on main memory of a worker that will be
    `forked` without what it will share with its nursery, as far as the estimating process was forked and could tell.
    `first`: the estimate before, whose layers it has, and of whose process it was told."""
    extra = preset.reserved_memory
    shared = int(INHERITED_SHARE * said.inherited) if forked else 0
    runtime = tuple(max(0, each - shared) + extra for each in said.runtime)
    segments = tuple(said.weights), tuple(said.context), tuple(said.compute), runtime
    found = Estimate(*segments, said.host, "exact", extra)
    return replace(found, layers=first.layers, overhead=first.overhead, process=first.process) if first else found


def learned(about: Estimate, shards: tuple[int, ...], host: int) -> Estimate:
    """`about` with its segments made to sum to what was measured (`shards` and `host`, in bytes) and what the preset
    adds to that. Weights and context are known best, so the difference shows as compute and runtime.
    """
    shards = tuple(each + about.reserved for each in shards)
    weights = tuple(map(min, about.weights, shards))
    context = tuple(map(min, about.context, _minus(shards, weights)))
    compute = tuple(map(min, about.compute, _minus(shards, weights, context)))
    return Estimate(
        weights,
        context,
        compute,
        _minus(shards, weights, context, compute),
        host,
        "learned",
        about.reserved,
        layers=about.layers,
        overhead=about.overhead,
    )


def kept(known: Estimate, first: Estimate) -> Estimate:
    """An estimate from before, of a worker for which now the `first` one would be this: with its layers, and what is
    known by now of a process without a model on its device."""
    known = replace(known, layers=first.layers, overhead=first.overhead)
    if known.source != "exact" or not first.host:
        return known
    host = known.host - known.process + first.process if known.process else known.host
    return replace(known, runtime=first.runtime, host=host, process=first.process)


def _minus(wholes: tuple[int, ...], *parts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(whole - sum(each) for whole, *each in zip(wholes, *parts, strict=True))


def estimate(
    facts: Checkpoint,
    preset: Preset,
    *,
    layers: tuple[int, ...] = (),
    on_host: bool,
    threads: int = 0,
    forked: bool = False,
    overhead: Overhead = UNKNOWN,
) -> Estimate:
    """What a worker of `preset` will occupy on a device, or on main memory (`on_host`); or on several devices, of which
    each has so many of its `layers`.

    `overhead`: what is known of a process without a model there, of one that is `forked` from a nursery or of one that
    is executed. `threads`: the worker's torch threads, where the preset leaves them open. `required-memory` replaces
    the figures, `reserved-memory` is added to them. Raises EstimateError.
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
        return Estimate(required, none, none, own, host, "preset", extra, layers=layers, overhead=overhead)
    tokens = effective_ctx(facts, preset)
    weights = weight_bytes(facts, preset, on_host=on_host)
    if layers:
        head = head_shard(facts, layers)
        steps = [
            compute_bytes(facts, preset, tokens, on_host=False, part="head" if shard == head else "layers")
            for shard in range(shards)
        ]
        return Estimate(
            weights=_weights_by_shard(facts, preset, weights, layers),
            context=tuple(context_bytes(_part(facts, count), preset, tokens, on_host=False) for count in layers),
            compute=tuple(steps),
            runtime=tuple(runtime + beside_steps(each) + extra for each in steps),
            host=beside,
            reserved=extra,
            layers=layers,
            overhead=overhead,
            process=process,
        )
    source: Source = "static"
    note = ""
    try:
        context = context_bytes(facts, preset, tokens, on_host=on_host)
        compute = compute_bytes(facts, preset, tokens, on_host=on_host)
    except UnknownArchitecture as unknown:
        if not weights:
            raise
        source, context = "weights", _widest_context(facts, preset, tokens, on_host=on_host)
        compute = max((SAFETY_FACTOR - 1) * weights - context, LEAST_BESIDE + context // 8)
        if facts.hidden and facts.vocab_size:  # steps are bounded, though the cache is not known
            widest = replace(facts, kv_heads=facts.kv_heads or facts.heads)
            largest = compute_bytes(widest, preset, tokens, on_host=on_host)
            compute = max(compute, kept_bytes(facts, preset, largest, context) if on_host else largest)
        note = (
            f"weights x {SAFETY_FACTOR}, or more where a cache of hidden size would need it, and"
            f" {LEAST_BESIDE // MIB} MiB beside them at least: {unknown.fact}; required-memory would replace this"
        )
    else:
        compute = kept_bytes(facts, preset, compute, context) if on_host else compute
    runtime += 0 if on_host else beside_steps(compute)
    return Estimate(
        weights=(weights,),
        context=(context,),
        compute=(compute,),
        runtime=(runtime + extra,),
        host=beside,
        source=source,
        reserved=extra,
        note=note,
        overhead=overhead,
        process=process,
    )


def beside_steps(compute: int) -> int:
    """Bytes of an accelerator that its libraries have, and torch's allocator beside the `compute` of a step."""
    return CUBLAS_WORKSPACE_BYTES + int(UNUSABLE_SHARE * compute)


def _widest_context(facts: Checkpoint, preset: Preset, tokens: int, *, on_host: bool) -> int:
    """Bytes of keys and values if each is as wide as the model, in as many layers as the tensors' names tell of: more
    than a model caches whose heads share them, or that caches a compressed row. 0 where not even that is known."""
    if embeds(facts, preset):
        return 0
    layers = facts.layers or facts.named_layers
    cached = preset.kv_tokens or preset.parallel * tokens
    return 2 * facts.hidden * layers * cached * DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]


def head_shard(facts: Checkpoint, layers: tuple[int, ...]) -> int:
    """Which shard has the head, and so the logits: the last; a head that is the embedding stays there, in the first."""
    return 0 if facts.tied else len(layers) - 1


def _weights_by_shard(facts: Checkpoint, preset: Preset, total: int, layers: tuple[int, ...]) -> tuple[int, ...]:
    """`total` bytes of weights: of each shard its layers, of the last what is behind them, of the first the rest."""
    each = DTYPE_BYTES[compute_dtype(facts, preset, on_host=False)]
    first, sizes = 0, []
    for count in layers:
        sizes.append(sum(facts.by_layer[first : first + count]) * each)
        first += count
    sizes[-1] += facts.behind * each
    sizes[0] += max(0, total - sum(sizes))
    return tuple(sizes)


def _part(facts: Checkpoint, layers: int) -> Checkpoint:
    """A model of so many of its layers; of two kinds as many of each as their share is, rounded up: the files do not
    say which is which."""
    states, others, hybrids = (
        -(-count * layers // facts.layers)
        for count in (facts.state_layers, facts.layers - facts.state_layers, facts.hybrids)
    )
    return replace(facts, layers=states + others, state_layers=states, hybrids=hybrids)


def layer_costs(facts: Checkpoint, preset: Preset) -> tuple[int, ...]:
    """Bytes of weights and context of each layer on an accelerator. Raises EstimateError."""
    each = DTYPE_BYTES[compute_dtype(facts, preset, on_host=False)]
    context = context_bytes(facts, preset, effective_ctx(facts, preset), on_host=False)
    share = -(-context // max(1, len(facts.by_layer)))
    return tuple(elements * each + share for elements in facts.by_layer)


def kept_whole(facts: Checkpoint, preset: Preset) -> str:
    """Why the model lies on one device, whichever way it would be divided; empty: nothing forbids it."""
    if embeds(facts, preset):
        return "it embeds or scores texts"
    if facts.cross_attention:
        return "it has an encoder and a decoder"
    if "vision" in facts.capabilities:
        return "it sees images"
    if facts.quantization or on_load(facts, preset):
        return "its weights are quantised"
    if preset.adapter_slots:
        return "requests may name adapters"
    return ""


def indivisible(facts: Checkpoint, preset: Preset) -> str:
    """Why the model's layers cannot lie on several devices; empty: they can."""
    return kept_whole(facts, preset) or ("" if facts.by_layer else "its files do not tell its layers from the rest")


def prepared_bytes(facts: Checkpoint, found: Estimate, *, on_host: bool, forked: bool) -> int:
    """Bytes of main memory, at most, of a worker that has done all it can before its weights: the process itself and
    its tokenizer, as far as they are part of what was `found`."""
    most = found.shards[0] if on_host else found.host
    return min(most, found.overhead.on_host(forked=forked) + facts.vocab_size * TOKENIZER_BYTES)


def kept_bytes(facts: Checkpoint, preset: Preset, compute: int, context: int) -> int:
    """Bytes beside weights and pool that main memory has to hold: those that steps leave with malloc, the threads'
    workspaces and compiled kernels; or, if they are more, those of loading, which is over before there is a pool."""
    kept = HEAP_FACTOR * compute + FIRST_STEPS_BYTES + KERNEL_CODES * KERNEL_CODE_BYTES
    kept += max(preset.threads, 1) * ATTENTION_TILE_BYTES
    itemsize = DTYPE_BYTES[compute_dtype(facts, preset, on_host=True)]
    loading = 0 if is_mapped(facts, preset) else facts.largest  # tensors are converted one at a time
    if on_load(facts, preset):  # all are there until the last is packed
        loading = max(loading, sum(tally.elements for tally in facts.tensors.values()) * itemsize)
    stacking = 0 if facts.quantization else facts.stacked * itemsize
    # single experts are here twice until all of a layer are put together, and those of one layer once more
    loading = max(loading, stacking + stacking // max(facts.layers, 1))
    return max(kept, loading - context)


def grammar_bytes(facts: Checkpoint, preset: Preset) -> int:
    """Bytes of main memory that a worker takes once an answer has to follow a grammar: any request may ask for that."""
    return 0 if embeds(facts, preset) else GRAMMAR_BYTES + facts.vocab_size * GRAMMAR_ENTRY_BYTES


def picture_bytes(facts: Checkpoint, preset: Preset) -> int:
    """Main memory for images on their way to the model: one that is opened, and all that are prepared."""
    if not sees(facts, preset):
        return 0
    ctx_size = preset.ctx_size if preset.ctx_size > 0 else facts.max_positions or AUTO_CTX
    most = min(preset.limit_images, max(ctx_size // max(facts.picture_tokens, 1), 1))
    return OPENING_BYTES + max(HELD_BYTES, most * facts.picture_elements * DTYPE_BYTES["float32"])


def _staged_bytes(facts: Checkpoint, preset: Preset) -> int:
    """Bytes of main memory that hold weights on their way to an accelerator: buffers, and all weights if they are
    converted, or drawn there."""
    dtype = compute_dtype(facts, preset, on_host=False)
    if preset.load_format == "dummy":
        return STAGING_BYTES + weight_bytes(facts, preset, on_host=False)
    if on_load(facts, preset):
        return facts.file_bytes
    if all(stored == dtype for stored in facts.tensors if stored in DTYPE_BYTES):
        return STAGING_BYTES
    return STAGING_BYTES + weight_bytes(facts, preset, on_host=False)


def context_bytes(facts: Checkpoint, preset: Preset, tokens: int, *, on_host: bool) -> int:
    """Bytes of the pool of keys and values: blocks for `kv_tokens`, or for `parallel` sequences of `tokens` each.

    Sum over layers of kv_heads x (key + value elements of a head) x dtype bytes (Kwon et al. 2023, section 3), or what
    these take as `kv-cache-dtype` keeps them. The engine caps no layer at its window. A state layer costs the same
    whatever the length, and is kept twice, in float32 if the model's code wants that. With an encoder each layer keeps
    the prompt's keys and values as well, in as many columns. The aligned cache has rows, as many as `kv_tokens` leaves,
    in place of blocks, and moves one of a layer through a buffer of that size. An embedder has no pool.
    Raises UnknownArchitecture if the layers are unstated, ContextTooLarge if one request would not fit.
    """
    if embeds(facts, preset):
        return 0
    if 0 < preset.kv_tokens < tokens:
        raise ContextTooLarge(
            f"{preset.id}: kv-tokens {preset.kv_tokens} is less than the {tokens} tokens that one request may have"
            " (ctx-size); raise kv-tokens or lower ctx-size"
        )
    attending = facts.attending
    if facts.layers <= 0 or (attending and not (facts.kv_heads and facts.head_dim)):
        raise UnknownArchitecture(
            preset.id,
            f"config.json of {facts.model_type or 'this model'} does not state its layers, key-value heads and head"
            " size",
        )
    each = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    attending *= 2 if facts.cross_attention else 1
    sizes = [
        facts.kv_heads * kv_types.head_bytes(preset.kv_cache_dtype, elements, each)
        for elements in (facts.head_dim, facts.value_dim or facts.head_dim)
    ]
    per_token = attending * sum(sizes)
    state = facts.state_elements * max(each, 4)
    if facts.aligned:
        rows = min(preset.parallel, preset.kv_tokens // tokens) if preset.kv_tokens else preset.parallel
        one = tokens * max(sizes) if attending else 0
        return rows * (tokens * per_token + 2 * facts.state_layers * state) + max(one, state)
    blocks = -(-preset.kv_tokens // BLOCK_TOKENS) if preset.kv_tokens else preset.parallel * -(-tokens // BLOCK_TOKENS)
    return blocks * BLOCK_TOKENS * per_token + preset.parallel * facts.state_layers * state


def required_shards(preset: Preset, *, shards: int, on_host: bool) -> tuple[int, ...] | None:
    """What the preset itself says that each shard needs; None if it does not say so for all of them."""
    said = preset.required_memory
    if not said:
        return None
    if on_host:
        names = ["cpu"]
    elif preset.device:
        names = list(preset.device[:shards])
    else:
        names = [name for name in said if name not in ("", "cpu")][:shards]
    names += [""] * (shards - len(names))
    values = [said.get(name, said.get("")) for name in names]
    return None if None in values else tuple(value for value in values if value is not None)

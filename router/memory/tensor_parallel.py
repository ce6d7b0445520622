"""Tensor parallelism: conditions for it and the estimate of one rank. PURE.

Each rank has a part of every matrix of the layers, and of an output head that is not tied to the embeddings. Small
tensors, layers with states and the embeddings are kept whole by each rank. A rank caches keys and values of its own
heads, and states and compressed keys as a whole. On accelerators each rank has a device; on main memory all ranks share
it.
"""

from dataclasses import replace

from router.config.presets import Preset
from router.memory.checkpoint_facts import DTYPE_BYTES, Checkpoint, compute_dtype, effective_ctx, rows
from router.memory.estimate import (
    TOKENIZER_BYTES,
    UNKNOWN,
    MemoryEstimate,
    Overhead,
    beside_steps,
    grammar_bytes,
    kept_bytes,
    range_fields,
    reason_for_one_device,
    required_shards,
)
from router.memory.estimate import estimate as estimate_whole
from router.memory.segments import bits_on_load, compute_bytes, kv_range, most_drafted, weight_bytes
from worker.protocol.architectures import DIVISIBLE
from worker.protocol.memory import GLOO_BYTES, NCCL_BYTES, STAGING_BYTES


def reason_not_to_divide_by(facts: Checkpoint, preset: Preset, ranks: int) -> str:
    """Return the reason for which the model cannot be divided among `ranks`; empty if it can."""
    if why := reason_for_one_device(facts, preset):
        return why
    if facts.quantization or bits_on_load(facts, preset):
        return "its weights are quantized"
    if facts.model_type not in DIVISIBLE:
        return f"this version divides {', '.join(sorted(DIVISIBLE))}, and this is {facts.model_type or 'unknown'}"
    for number, what in (
        (facts.heads, "attention heads"),
        (0 if facts.has_latent_keys else facts.kv_heads, "heads of keys and values"),
        *((width, f"columns in its {part}") for part, width in facts.mlp_widths.items()),
    ):
        if number % ranks:
            return f"it has {number} {what}, which {ranks} does not divide"
    if not facts.matrix_elements:
        return "its tensor names do not identify the layers"
    return ""


def estimate(
    facts: Checkpoint,
    preset: Preset,
    ranks: int,
    *,
    on_host: bool,
    threads: int = 0,
    forked: bool = False,
    overhead: Overhead = UNKNOWN,
) -> MemoryEstimate:
    """Return the estimate of a model that is divided among `ranks`, each on its own device or all on main memory.
    Raises EstimateError."""
    shards = 1 if on_host else ranks
    if required_shards(preset, shards=shards, on_host=on_host) is not None:
        parts = () if on_host else (1,) * ranks
        stated = estimate_whole(facts, preset, layers=parts, on_host=on_host, forked=forked, overhead=overhead)
        return replace(stated, layers=())
    facts = _with_divided_adapters(facts, ranks)
    # Tensor parallelism has neither CUDA graphs nor reordered weights.
    preset = replace(preset, threads=preset.threads or threads, enforce_eager=True)
    tokens = effective_ctx(facts, preset)
    each = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    part = _part_of_rank(facts, ranks)
    whole = weight_bytes(facts, preset, on_host=on_host)
    divided = divided_elements(facts, ranks) * each
    weights = whole - divided + -(-divided // ranks)
    cache = kv_range(part, preset, tokens, on_host=on_host)
    context = cache.least
    # Parts of the ranks, and the gathered ones.
    logits = 2 * (rows(facts, preset) + 16 + most_drafted(facts, preset)) * facts.vocab_size * each
    compute = compute_bytes(part, preset, tokens, on_host=on_host) + logits
    libraries = facts.vocab_size * TOKENIZER_BYTES + grammar_bytes(facts, preset)
    stacked = (facts.stacked + facts.stacked // max(facts.layers, 1)) * each  # as in `kept_bytes`, on each rank
    loading = whole if preset.load_format == "dummy" else max(2 * facts.largest, stacked)
    extra = preset.reserved_memory
    if on_host:
        kept = max(kept_bytes(facts, preset, compute, context), loading - context)
        runtime = ranks * (overhead.on_host(forked=forked) + GLOO_BYTES) + libraries + extra
        return MemoryEstimate(
            (ranks * weights,),
            (ranks * context,),
            (ranks * kept,),
            (runtime,),
            reserved=extra,
            overhead=overhead,
            **range_fields([replace(cache, step=ranks * cache.step)]),
        )
    process = overhead.beside_device(forked=forked)
    return MemoryEstimate(
        weights=(weights,) * ranks,
        context=(context,) * ranks,
        compute=(compute,) * ranks,
        runtime=(overhead.on_device + NCCL_BYTES + beside_steps(compute) + extra,) * ranks,
        host=ranks * (process + STAGING_BYTES + loading) + libraries,
        reserved=extra,
        overhead=overhead,
        process=ranks * process,
        **range_fields([cache] * ranks),
    )


def _with_divided_adapters(facts: Checkpoint, ranks: int) -> Checkpoint:
    """Return the facts with the elements of LoRA adapters that one rank has."""
    if facts.aligned:  # an upper bound: some of its layers are not divided
        return facts
    # One end of each linear layer is the hidden state, which is not divided: A or B of an adapter is whole there.
    undivided = facts.linears.count * facts.hidden
    lora_elements = undivided + -(-(facts.linears.lora_elements - undivided) // ranks)
    return replace(facts, linears=replace(facts.linears, lora_elements=lora_elements))


def _part_of_rank(facts: Checkpoint, ranks: int) -> Checkpoint:
    """Return the facts with the heads and widths of one rank, for its KV cache and activations."""
    return replace(
        facts,
        heads=facts.heads // ranks,
        kv_heads=facts.kv_heads if facts.has_latent_keys else facts.kv_heads // ranks,
        attention_elements=facts.attention_elements // ranks,
        intermediate=facts.intermediate // ranks,
    )


def divided_elements(facts: Checkpoint, ranks: int) -> int:
    """Return the number of weights that are divided; the others are on each rank."""
    head = 0 if facts.tied or facts.vocab_size % ranks else facts.vocab_size * facts.hidden
    behind = sum(tally.elements for tally in facts.behind.tensors.values())
    return facts.matrix_elements + (head if behind >= head else 0)

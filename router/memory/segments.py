"""The bytes of a model by segment: weights, KV cache ("context") and activations ("compute"). PURE.

Weights and KV cache are exact. Activations are one upper bound for the largest step (`compute_bytes`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from router.config.presets import Preset
from router.memory.checkpoint_facts import (
    DTYPE_BYTES,
    Checkpoint,
    ContextTooLarge,
    Part,
    UnknownArchitecture,
    WrongQuantization,
    compute_dtype,
    prefill_chunk,
    quantized_numbers,
    rows,
    serves_embeddings,
    takes_images,
)
from worker.protocol.architectures import (
    DEQUANTIZED,
    DEQUANTIZED_ON_CPU,
    DEQUANTIZED_WITHOUT,
    FUSED_GROUPS,
    USUAL_GROUP,
)
from worker.protocol.memory import (
    BLOCK_TOKENS,
    DEQUANTIZED_ELEMENT_BYTES,
    DEQUANTIZED_KV_BYTES,
    DRAFT_LOGITS,
    DRAW_BYTES,
    GATHERED_BYTES,
    GRAPH_BYTES,
    MIB,
    PROMPT_LOGITS,
    SLICE_BYTES,
    kv_group_size,
)

# Bits of an element of a checkpoint that is quantized while it is loaded.
ON_LOAD: Mapping[str, int] = {"bnb-8bit": 8, "bnb-4bit": 4}

# Methods that the worker loads (worker/engines/transformers/load/quantization.py).
SERVED = ("awq", "bnb-4bit", "bnb-8bit", "compressed-tensors", "fp8", "gptq", "mxfp4")

# Growth of scales, zero points and orders on main memory, whose kernel has them in 16 bits and side by side
# (worker/estimate/quantized.py): 8 bytes in place of 2.5.
ARRANGED: Mapping[str, float] = {"gptq": 3.2, "awq": 3.2}

# The same without that kernel: orders and zero points are kept once more, in wider numbers. 1.7 with a scale for each
# 128 inputs, 2.4 with one for all inputs.
WIDENED = 2.4

KV_ELEMENT_BYTES: Mapping[str, int] = {"f32": 4, "f16": 2, "bf16": 2}  # by `kv-cache-dtype`
KV_GROUP_BYTES: Mapping[str, int] = {"int8": 2, "int4": 4}  # of a group's scale and, for int4, its minimum

# Activations. The exact estimate (`worker estimate`) alone decides evictions and refusals; the bound stands in until it
# is there. It is a product of a few numbers of model and preset, not a copy of how transformers computes a layer: such
# formulas had to be changed with each release of the library. Each factor is above the largest traced value.

# Tensors of each width (hidden, queries, MLP, state) that a layer has at once. They have the type of the model, but 4
# bytes at least in a quantized model and for states. Traced: at most 4 of the hidden size, 5 of the queries and 5 of
# the MLP's width, and never the last two at once; 5 states (Mamba).
COPIES = 8

# Bytes for each pair of a token in the step and a position that it may see: two masks (a model may have windows in some
# layers) in float32, and the comparisons that they are made from.
MASK_BYTES = 12

# Bytes for each score where attention keeps all of them: four float32 tensors. Traced: at most 4 (BLOOM, gpt-oss).
SCORE_BYTES = 16

# Added to each bound: positions, tables and indices, and on main memory the scores of short rows that attend together
# and the keys that they widen (SPREAD_SCORES, WIDENED_BYTES). It matters only in the smallest models.
LEAST_BYTES = 16 * MIB


def weight_bytes(facts: Checkpoint, preset: Preset, *, on_host: bool) -> int:
    """Return the bytes of all tensors in memory.

    Plain floating-point tensors take the dtype of the computation. Quantized integers, and 8-bit floats of a quantized
    checkpoint, stay as they are stored if there are kernels for them. Linear layers are quantized if the preset
    quantizes on load. On main memory, a file whose tensors all have the dtype of the computation is mapped and made
    resident as a whole, with tensors that the model does not use. Layers behind an embedder are float32.
    """
    size = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    total = _tensor_bytes(facts, preset, facts, on_host=on_host)
    total = max(total, facts.file_bytes) if on_host and is_mapped(facts, preset) else total
    if facts.model_type == "gpt_bigcode":  # its model builds a causal mask of all positions, a byte each
        total += facts.max_positions**2
    total += facts.head_elements * DTYPE_BYTES["float32"] + adapter_bytes(facts, preset, size)
    if facts.draft is not None:
        total += weight_bytes(facts.draft, draft_preset(preset), on_host=on_host)
    return total


def part_bytes(facts: Checkpoint, preset: Preset, part: Part) -> int:
    """Return the bytes of the tensors of one layer, or of what stands behind the layers, on an accelerator."""
    return _tensor_bytes(facts, preset, part, on_host=False)


def _tensor_bytes(facts: Checkpoint, preset: Preset, part: Checkpoint | Part, *, on_host: bool) -> int:
    """Return the bytes in memory of the tensors of `part`: the model itself, or a part of it."""
    size = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    dequantizes = is_dequantized(facts, on_host=on_host)
    total = sum(quantized_and_kept(facts, preset, part, on_host=on_host))
    for stored, tally in part.tensors.items():
        if _is_plain(stored, facts):
            continue
        total += tally.elements * quantized_numbers(stored, facts.bits) * size if dequantizes else tally.bytes
    return total


def draft_preset(preset: Preset) -> Preset:
    """Return the settings of the draft model of `preset`, as in worker/engines/transformers/load_draft.py."""
    return replace(
        preset, model_draft="", spec_type="none", quantization="auto", max_loras=0, enable_lora="off", limit_images=0,
        enforce_eager=True,
    )  # fmt: skip


def adapter_bytes(facts: Checkpoint, preset: Preset, size: int) -> int:
    """Return the bytes of the LoRA slots with elements of `size` bytes: A and B of every linear layer (Hu et al. 2021,
    section 4.1)."""
    return preset.adapter_slots * preset.max_lora_rank * facts.linears.lora_elements * size


def quantized_and_kept(facts: Checkpoint, preset: Preset, part: Checkpoint | Part, *, on_host: bool) -> tuple[int, int]:
    """Return the bytes of quantized tensors of `part` (or scales of a quantized checkpoint) and the bytes of what stays
    in plain floating point.

    8 bits: a byte for each element, a float32 for each row (Dettmers et al. 2022, section 3). 4 bits: half a byte, a
    float32 for each 64 elements, and a table of 16 for each layer (Dettmers et al. 2023, section 3; the default of
    bitsandbytes, without double quantisation).
    """
    size = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    plain = sum(tally.elements * size for stored, tally in part.tensors.items() if _is_plain(stored, facts))
    linears, bits = part.linears, bits_on_load(facts, preset)
    if not bits:  # dequantized weights have no scales any more
        times = 1.0
        if on_host and facts.quantization in ARRANGED:
            times = ARRANGED[facts.quantization] if is_fused(facts) else WIDENED
        return 0 if is_dequantized(facts, on_host=on_host) else int(times * part.scale_bytes), plain
    quantized = linears.elements + 4 * linears.rows
    if bits == 4:
        quantized = -(-linears.elements // 2) + 4 * linears.blocks + 64 * linears.count
    return quantized, max(0, plain - linears.elements * size)


def is_fused(facts: Checkpoint) -> bool:
    """Return whether main memory has a kernel for these quantized weights."""
    return facts.bits in (0, 4) and (facts.group or USUAL_GROUP) in FUSED_GROUPS


def is_dequantized(facts: Checkpoint, *, on_host: bool) -> bool:
    """Return whether the weights of a quantized checkpoint become plain floating point while they are loaded."""
    return (
        facts.quantization in (DEQUANTIZED_ON_CPU if on_host else DEQUANTIZED_WITHOUT)
        or facts.quantization in DEQUANTIZED
    )


def bits_on_load(facts: Checkpoint, preset: Preset) -> int:
    """Return the bits to which linear layers are quantized on load; 0 if they are not."""
    return 0 if facts.quantization else ON_LOAD.get(preset.quantization, 0)


def check_quantization(facts: Checkpoint, preset: Preset, *, on_host: bool) -> None:
    """Raise WrongQuantization if the method of the checkpoint is not supported, or if the preset states another one
    than the checkpoint has."""
    asked, is_ = preset.quantization, facts.quantization
    if is_ and is_ not in SERVED:
        raise WrongQuantization(
            f"{preset.id}: the checkpoint is quantized with {is_}, which this version cannot load; take one that is not"
            f" quantized, or quantized with {', '.join(SERVED)}"
        )
    if on_host and is_ == "awq" and not is_fused(facts):
        group = facts.group if facts.group > 0 else "all"
        raise WrongQuantization(
            f"{preset.id}: the checkpoint is quantized with awq in {facts.bits or 4} bits and groups of {group} inputs,"
            " which this version computes on an accelerator only; on main memory it takes 4 bits and groups of"
            f" {', '.join(map(str, sorted(FUSED_GROUPS)))}"
        )
    if asked == "auto" or (asked == "none" and not is_) or bits_on_load(facts, preset) or (is_ and asked == is_):
        return
    if is_.startswith("bnb") and asked.startswith("bnb"):
        return  # bitsandbytes loads the stored bits
    fact = f"quantized with {is_}" if is_ else "not quantized"
    raise WrongQuantization(f"{preset.id}: quantization = {asked}, but the checkpoint is {fact}; leave the key out")


def _is_plain(stored: str, facts: Checkpoint) -> bool:
    return stored in DTYPE_BYTES or (stored.startswith("float8") and not facts.quantization)


def is_mapped(facts: Checkpoint, preset: Preset) -> bool:
    """Return whether a worker on main memory maps the files instead of copying them: each tensor has the dtype of the
    computation."""
    if facts.quantization or bits_on_load(facts, preset):
        return False
    dtype = compute_dtype(facts, preset, on_host=True)
    return bool(facts.file_bytes) and all(stored == dtype for stored in facts.tensors if stored in DTYPE_BYTES)


@dataclass(frozen=True, slots=True)
class KvRange:
    """The KV cache of one device, from the least to the most: `least` + 0 to `steps` times `step` bytes."""

    least: int = 0
    step: int = 0
    steps: int = 0  # 0: the size is fixed
    tokens: int = 0  # of the least cache
    step_tokens: int = 0

    @property
    def most(self) -> int:
        return self.least + self.steps * self.step


def kv_range(facts: Checkpoint, preset: Preset, tokens: int, *, on_host: bool) -> KvRange:
    """Return the range of the KV cache: the least is one request of `tokens`, the most is `contexts` of them, and a
    step is one block, or one row of the aligned cache. `kv-tokens` and `parallel` = 1 fix the size.

    Sum over layers of kv_heads x (key + value elements of a head) x dtype bytes (Kwon et al. 2023, section 3), with the
    dtype of `kv-cache-dtype`. The engine does not limit a layer to its attention window. A state layer has a constant
    size; its state is kept twice, in float32 if the code of the model needs that. A decoder with an encoder also caches
    keys and values of the prompt in each layer. The aligned cache has rows in place of blocks, as many as `kv_tokens`
    allows, and moves rows of one layer through a buffer of that size. An embedder has no cache.

    Raises UnknownArchitecture if the layers are not stated, ContextTooLarge if one request would not fit.
    """
    if serves_embeddings(facts, preset):
        return KvRange()
    if 0 < preset.kv_tokens < tokens:
        raise ContextTooLarge(
            f"{preset.id}: kv-tokens {preset.kv_tokens} is less than the {tokens} tokens that one request may have"
            " (ctx-size); raise kv-tokens or lower ctx-size"
        )
    attending = facts.attention_layers
    if facts.layers <= 0 or (attending and not (facts.kv_heads and facts.head_dim)):
        raise UnknownArchitecture(
            preset.id,
            f"config.json of {facts.model_type or 'this model'} does not state its layers, key-value heads and head"
            " size",
        )
    element = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    attending *= 2 if facts.cross_attention else 1
    sizes = [
        facts.kv_heads * head_bytes(preset.kv_cache_dtype, elements, element)
        for elements in (facts.head_dim, facts.value_dim or facts.head_dim)
    ]
    sizes.append(facts.index_dim * element)  # never quantized
    per_token = attending * sum(sizes)
    draft_block = 0
    if facts.draft is not None:
        draft_block = kv_range(facts.draft, draft_preset(preset), tokens, on_host=on_host).step
    state, blocks = facts.state_elements * max(element, 4), -(-tokens // BLOCK_TOKENS)
    if facts.aligned:
        unit, units = tokens, 1
        step = tokens * per_token + 2 * facts.state_layers * state + blocks * draft_block
        one_layer = tokens * max(sizes) if attending else 0
        base = max(one_layer, state)
        most = preset.contexts
        stated = min(preset.contexts, preset.kv_tokens // tokens)
    else:
        unit, units = BLOCK_TOKENS, blocks
        step = BLOCK_TOKENS * per_token + draft_block
        base = rows(facts, preset) * facts.state_layers * state  # each sequence that may run at once has its states
        most = preset.contexts * units
        stated = -(-preset.kv_tokens // BLOCK_TOKENS)
    if preset.kv_tokens:
        units = most = stated
    return KvRange(base + units * step, step, most - units, units * unit, unit)


def head_bytes(name: str, elements: int, element: int) -> int:
    """Return the bytes of the keys (or values) of one head and one token, as the worker stores them
    (worker/engines/transformers/attention/quantized_kv_types.py). `name`: the kv-cache-dtype; `element`: bytes of an
    element of the model's own type."""
    if name == "auto" or not elements:
        return elements * element
    if name in KV_ELEMENT_BYTES:
        return elements * KV_ELEMENT_BYTES[name]
    codes = elements if name == "int8" else -(-elements // 2)
    return codes + elements // kv_group_size(elements) * KV_GROUP_BYTES[name]


def kv_type_differs(name: str, dtype: str) -> bool:
    """Return whether the KV cache has another type than the model, whose `dtype` is a name of torch."""
    return name != "auto" and {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(name) != dtype


def compute_bytes(
    facts: Checkpoint, preset: Preset, tokens: int, *, on_host: bool, part: Literal["whole", "layers", "head"] = "whole"
) -> int:
    """Return an upper bound on the bytes of one step beside weights and KV cache, with `tokens` of context per request.

    `part` of "layers" or "head": a device with some of the layers, or with some of them and the head, without CUDA
    graphs. Raises UnknownArchitecture if the config does not state hidden size and vocabulary.
    """
    if not facts.hidden or not facts.vocab_size:
        raise UnknownArchitecture(
            preset.id,
            f"config.json of {facts.model_type or 'this model'} does not state its hidden size and vocabulary",
        )
    size = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    places, only_encodes = rows(facts, preset), serves_embeddings(facts, preset)
    is_whole_prompt = only_encodes or facts.cross_attention  # encoders do not compute prompts in chunks
    drafted = most_drafted(facts, preset)
    chunk = prefill_chunk(facts, preset, on_host=on_host)
    step = (max(chunk, tokens) if is_whole_prompt else min(chunk, places * tokens)) + places + drafted
    bound = LEAST_BYTES + _layer_bytes(facts, preset, step, size)
    bound += _attention_bytes(facts, preset, step, tokens, size, on_host)
    if takes_images(facts, preset):  # one layer of the vision tower, and the features of one image for each row
        bound += (facts.vision_elements + places * facts.picture_tokens * facts.hidden) * size
    if only_encodes or part == "layers":
        return bound
    bound += facts.vocab_size * (places + PROMPT_LOGITS + drafted) * DRAW_BYTES
    if on_host and not preset.enforce_eager:  # the CPU kernel reorders linear layers between steps, by slices
        bound += min(facts.hidden * max(facts.vocab_size, facts.intermediate) * size, SLICE_BYTES)
    if not (on_host or preset.enforce_eager or facts.aligned or part == "head"):
        bound += _graph_bytes(facts, preset, tokens, size)
    if facts.draft is not None:  # its steps come before those of the target
        bound = max(bound, compute_bytes(facts.draft, draft_preset(preset), tokens, on_host=on_host))
    return bound


def most_drafted(facts: Checkpoint, preset: Preset) -> int:
    """Return the most tokens that one step drafts."""
    return min(DRAFT_LOGITS, rows(facts, preset) * preset.draft_max) if preset.speculates else 0


def _layer_bytes(facts: Checkpoint, preset: Preset, step: int, size: int) -> int:
    """Return the bytes of the tensors of one layer for a step of `step` tokens. `size`: bytes of an element."""
    queries = max(facts.attention_elements // 2, facts.hidden)
    widths = facts.hidden + queries + facts.intermediate
    is_quantized = bool(facts.quantization or bits_on_load(facts, preset))
    # Each token counts a state of its own. Models whose tokens share one in blocks have products of tokens instead.
    per_token = widths * (max(size, 4) if is_quantized else size) + facts.state_elements * 4
    # A quantized model dequantizes one matrix at a time.
    dequantized = facts.hidden * max(facts.intermediate, queries) * DEQUANTIZED_ELEMENT_BYTES if is_quantized else 0
    return step * COPIES * per_token + dequantized


def _attention_bytes(facts: Checkpoint, preset: Preset, step: int, tokens: int, size: int, on_host: bool) -> int:
    """Return the bytes of masks, scores and gathered keys and values, for `step` tokens that attend to `tokens`
    positions at most."""
    only_encodes = serves_embeddings(facts, preset)
    pairs = step * (tokens + step)  # a window is widened by the step
    bound = pairs * MASK_BYTES
    if preset.attention == "eager" or (facts.aligned and not only_encodes):
        bound += pairs * facts.heads * SCORE_BYTES
    # Keys and values of one row in one piece, and once more repeated for each query head. On the aligned backend each
    # decoding row repeats its own.
    cached = tokens * facts.kv_heads * (facts.head_dim + facts.value_dim) * size
    bound += 2 * (1 + preset.contexts * facts.aligned) * max(tokens * facts.attention_elements * size, cached)
    is_converted = kv_type_differs(preset.kv_cache_dtype, compute_dtype(facts, preset, on_host=on_host))
    if is_converted and not only_encodes:  # a step converts the cache of all its rows, in parts
        bound += 2 * min(rows(facts, preset) * cached, DEQUANTIZED_KV_BYTES["cpu" if on_host else "cuda"])
    return bound


def _graph_bytes(facts: Checkpoint, preset: Preset, tokens: int, size: int) -> int:
    """Return the bytes that CUDA graphs of decode steps keep: one step of all rows, gathered keys and values, and the
    graphs themselves, one for each power of two of rows and of context."""
    places = rows(facts, preset)
    cached = tokens * facts.kv_heads * (facts.head_dim + facts.value_dim) * size
    step = _layer_bytes(facts, preset, places, size) + places * facts.vocab_size * (size + 8)
    graphs = (places.bit_length() + 1) * ((tokens // 256).bit_length() + 1)
    return step + min(places * cached, GATHERED_BYTES) + places * tokens * MASK_BYTES + graphs * GRAPH_BYTES

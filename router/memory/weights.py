"""Bytes of the weights of a checkpoint in memory, quantized ones included. PURE."""

from collections.abc import Mapping

from router.config.presets import Preset
from router.memory.checkpoint_facts import DTYPE_BYTES, Checkpoint, WrongQuantization, compute_dtype
from worker.protocol.architectures import FUSED_GROUPS, UNPACKED, UNPACKED_ON_CPU, UNPACKED_WITHOUT, USUAL_GROUP

# Bits of an element, where a checkpoint that is not quantised is packed while it is loaded.
ON_LOAD: Mapping[str, int] = {"bnb-8bit": 8, "bnb-4bit": 4}

# Methods that the worker loads (worker/engines/transformers/load/quantization.py).
SERVED = ("awq", "bnb-4bit", "bnb-8bit", "compressed-tensors", "fp8", "gptq", "mxfp4")

# Times their stored bytes that scales, zero points and orders take on main memory, whose kernel has them in 16 bits
# and side by side (worker/estimate/quantized.py): 8 bytes in place of 2.5.
ARRANGED: Mapping[str, float] = {"gptq": 3.2, "awq": 3.2}

# The same without that kernel, which keeps orders and zero points once more, in wider numbers: 1.7 times with a scale
# for each 128 inputs, 2.4 with one for all of them.
WIDENED = 2.4


def weight_bytes(facts: Checkpoint, preset: Preset, *, on_host: bool) -> int:
    """Return the bytes of all tensors in memory.

    Plain floating-point tensors take the dtype of the computation. Packed integers, and 8-bit floats of a quantized
    checkpoint, stay as they are stored if there are kernels for them. Linear layers are packed if the preset quantizes
    on load. On main memory, a file whose tensors all have the dtype of the computation is mapped and made resident as a
    whole, with tensors that the model does not use. Layers behind an embedder are float32.
    """
    each = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    packed, kept = packing(facts, preset, on_host=on_host)
    unpacks = is_unpacked(facts, on_host=on_host)
    total = packed + kept
    for stored, tally in facts.tensors.items():
        if _is_plain(stored, facts):
            continue
        total += tally.elements * numbers(stored, facts.bits) * each if unpacks else tally.bytes
    total = max(total, facts.file_bytes) if on_host and is_mapped(facts, preset) else total
    if facts.model_type == "gpt_bigcode":  # its model builds a causal mask of all positions, a byte each
        total += facts.max_positions**2
    return total + facts.head_elements * DTYPE_BYTES["float32"] + adapter_bytes(facts, preset, each)


def adapter_bytes(facts: Checkpoint, preset: Preset, each: int) -> int:
    """Return the bytes of the LoRA slots with elements of `each` bytes: A and B of every linear layer (Hu et al. 2021,
    section 4.1)."""
    return preset.adapter_slots * preset.max_lora_rank * facts.linears.ends * each


def packing(facts: Checkpoint, preset: Preset, *, on_host: bool) -> tuple[int, int]:
    """Return the bytes of quantized tensors (or scales of a quantized checkpoint) and the bytes of what stays in plain
    floating point.

    8 bits: a byte for each element, a float32 for each row (Dettmers et al. 2022, section 3). 4 bits: half a byte, a
    float32 for each 64 elements, and a table of 16 for each layer (Dettmers et al. 2023, section 3; the default of
    bitsandbytes, without double quantisation).
    """
    each = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    plain = sum(tally.elements * each for stored, tally in facts.tensors.items() if _is_plain(stored, facts))
    linears, bits = facts.linears, bits_on_load(facts, preset)
    if not bits:  # unpacked weights have no scales any more
        times = 1.0
        if on_host and facts.quantization in ARRANGED:
            times = ARRANGED[facts.quantization] if is_fused(facts) else WIDENED
        return 0 if is_unpacked(facts, on_host=on_host) else int(times * facts.scale_bytes), plain
    packed = linears.elements + 4 * linears.rows
    if bits == 4:
        packed = -(-linears.elements // 2) + 4 * linears.blocks + 64 * linears.count
    return packed, max(0, plain - linears.elements * each)


def is_fused(facts: Checkpoint) -> bool:
    """Return whether main memory has a kernel for these packed weights."""
    return facts.bits in (0, 4) and (facts.group or USUAL_GROUP) in FUSED_GROUPS


def is_unpacked(facts: Checkpoint, *, on_host: bool) -> bool:
    """Return whether the weights of a quantized checkpoint become plain floating point while they are loaded."""
    return facts.quantization in (UNPACKED_ON_CPU if on_host else UNPACKED_WITHOUT) or facts.quantization in UNPACKED


def numbers(stored: str, bits: int) -> int:
    """Return how many numbers of `bits` bits one element of the stored type holds."""
    word = {"int32": 32, "uint32": 32, "uint8": 8, "int8": 8}.get(stored, 0)
    return max(1, word // bits) if word and bits else 1


def bits_on_load(facts: Checkpoint, preset: Preset) -> int:
    """Return the bits to which linear layers are quantized on load; 0 if they are not."""
    return 0 if facts.quantization else ON_LOAD.get(preset.quantization, 0)


def packed_bits(facts: Checkpoint, preset: Preset) -> int:
    """Return the bits of linear layers that bitsandbytes packs on load or has packed; 0 if it does not."""
    return bits_on_load(facts, preset) or ON_LOAD.get(facts.quantization, 0)


def check_quantization(facts: Checkpoint, preset: Preset, *, on_host: bool) -> None:
    """Raise WrongQuantization if the method of the checkpoint is not supported, or if the preset states another one
    than the checkpoint has."""
    asked, is_ = preset.quantization, facts.quantization
    if is_ and is_ not in SERVED:
        raise WrongQuantization(
            f"{preset.id}: the checkpoint is quantised with {is_}, which this version cannot load; take one that is not"
            f" quantised, or quantised with {', '.join(SERVED)}"
        )
    if on_host and is_ == "awq" and not is_fused(facts):
        group = facts.group if facts.group > 0 else "all"
        raise WrongQuantization(
            f"{preset.id}: the checkpoint is quantised with awq in {facts.bits or 4} bits and groups of {group} inputs,"
            " which this version computes on an accelerator only; on main memory it takes 4 bits and groups of"
            f" {', '.join(map(str, sorted(FUSED_GROUPS)))}"
        )
    if asked == "auto" or (asked == "none" and not is_) or bits_on_load(facts, preset) or (is_ and asked == is_):
        return
    if is_.startswith("bnb") and asked.startswith("bnb"):
        return  # bitsandbytes loads the stored bits
    fact = f"quantised with {is_}" if is_ else "not quantised"
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

"""Bytes of keys and values in the KV cache by data type. Pure functions.

The formula is that of worker/engines/transformers/attention/quantized_kv_types.py.
"""

from collections.abc import Mapping

from worker.protocol.memory import LEAST_GROUPED, MOST_GROUPED

ELEMENT_BYTES: Mapping[str, int] = {"f32": 4, "f16": 2, "bf16": 2}  # by `kv-cache-dtype`
GROUP_BYTES: Mapping[str, int] = {"int8": 2, "int4": 4}  # of a group's scale and, for int4, its minimum


def head_bytes(name: str, elements: int, each: int) -> int:
    """Bytes of the keys (or values) of one head and one token. `name`: the kv-cache-dtype; `each`: bytes of an element
    of the model's own type."""
    if name == "auto" or not elements:
        return elements * each
    if name in ELEMENT_BYTES:
        return elements * ELEMENT_BYTES[name]
    sizes = range(min(MOST_GROUPED, elements), LEAST_GROUPED - 1, -1)
    # The largest allowed group size that divides the head, else one group for the whole head.
    size = next((size for size in sizes if elements % size == 0), elements)
    codes = elements if name == "int8" else -(-elements // 2)
    return codes + elements // size * GROUP_BYTES[name]


def is_compact(name: str, dtype: str) -> bool:
    """Whether the KV cache has another type than the model, whose `dtype` is a name of torch."""
    return name != "auto" and {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(name) != dtype

"""Bytes that keys and values take in the cache, by the type that a preset keeps them in.

The formula is that of worker/engines/transformers/attention/quantized_kv_types.py. Law: PURE.
"""

from collections.abc import Mapping

from worker.protocol.memory import LEAST_GROUPED, MOST_GROUPED

PLAIN: Mapping[str, int] = {"f32": 4, "f16": 2, "bf16": 2}
"""Bytes of an element, by `kv-cache-dtype`."""

BESIDE: Mapping[str, int] = {"int8": 2, "int4": 4}
"""Bytes of each group's scale, and minimum."""


def head_bytes(name: str, elements: int, each: int) -> int:
    """Of one head's keys, or values, of one token in the cache of a model of `each` bytes."""
    if name == "auto" or not elements:
        return elements * each
    if name in PLAIN:
        return elements * PLAIN[name]
    sizes = range(min(MOST_GROUPED, elements), LEAST_GROUPED - 1, -1)
    size = next((size for size in sizes if elements % size == 0), elements)
    codes = elements if name == "int8" else -(-elements // 2)
    return codes + elements // size * BESIDE[name]


def is_compact(name: str, dtype: str) -> bool:
    """Whether they are kept in another type than the model's own `dtype`, as torch names it."""
    return name != "auto" and {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(name) != dtype

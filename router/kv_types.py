"""What keys and values take by the type that a preset keeps them in: bytes in the cache, and while they are read.

The formulas are those of worker/engine/cache_types.py and worker/engine/compact.py, restated. Law: PURE.
"""

from collections.abc import Mapping
from fractions import Fraction

PLAIN: Mapping[str, int] = {"f32": 4, "f16": 2, "bf16": 2}
"""Bytes of an element, by `kv-cache-dtype`."""

MOST_GROUPED, LEAST_GROUPED = 32, 8
"""Elements of a head that share a scale: as many up to the first as divide a head; if fewer than the second, all."""

BESIDE: Mapping[str, int] = {"int8": 2, "int4": 4}
"""Bytes of each group's scale, and minimum."""

UNPACKED_BYTES = {True: 4 << 20, False: 128 << 20}
"""Of keys and values that a step has unpacked at once, on main memory and on an accelerator."""

WHILE_UNPACKING, WHILE_GATHERING = Fraction(9, 8), Fraction(5, 4)
"""What is alive at most, of what is unpacked: codes on their way, of the values alone, and scales."""


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


def unpacked_bytes(row: int, rows: int, *, on_host: bool) -> int:
    """Alive at once while `rows` are read that decode, each of `row` bytes as it is read: never less than one."""
    most = max(row, min(rows * row, UNPACKED_BYTES[on_host]))
    return int(WHILE_UNPACKING * most)

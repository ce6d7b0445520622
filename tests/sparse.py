"""Sparse safetensors files, of any size and no content."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}
Tensors = Mapping[str, tuple[str, list[int]]]


def write_weights(file: Path, tensors: Tensors, *, missing: int = 0, padding: int = 0) -> None:
    """A sparse safetensors file of zeros, `missing` bytes short, with `padding` bytes of metadata in its header."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", "padding": "x" * padding}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = SIZES[dtype]
        for each in shape:
            size *= each
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(table).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + end - missing)

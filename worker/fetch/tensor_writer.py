"""Safetensors files that are written one tensor after the other, so that memory never holds all of them."""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from worker.engines.transformers.load import safetensors
from worker.errors import StartError

# A caught parameter by the id of its module and its name there, because its full name is unknown until the model is
# complete; a buffer by its full name.
TensorKey = str | tuple[int, str]

_WRITE_BYTES = 16 << 20
# Bytes between two syncs to disk. Unsynced bytes are dirty pages, which other processes cannot use as memory.
_SYNC_BYTES = 256 << 20
_HEADER_ALIGNMENT = 64  # of the first tensor in the file; aligned tensors are faster to read


class TensorWriter:
    """A safetensors file whose tensors are written in the order of their arrival, and whose header is written last,
    into space reserved for it. Written bytes are synced piece by piece."""

    def __init__(self, path: Path, max_tensors: int, on_sync: Callable[[int], None]):
        """`on_sync` receives the bytes written so far after each sync."""
        # bytes before the first tensor: 512 per name are enough in practice, and `finish` checks it
        self._header_bytes = -(-(8 + 512 + 512 * max_tensors) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT
        self._path = path
        self._on_sync = on_sync
        self._end = 0
        self._synced = 0
        self._places: dict[TensorKey, tuple[int, torch.dtype, tuple[int, ...]]] = {}  # offset, type and shape
        self._descriptor = -1

    def __enter__(self) -> "TensorWriter":
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def write(self, key: TensorKey, tensor: torch.Tensor) -> None:
        if key in self._places:
            name = key if isinstance(key, str) else key[1]
            raise StartError(f"{name} was assigned twice while the model was loaded")
        self._places[key] = (self._end, tensor.dtype, tuple(tensor.shape))
        if not tensor.numel():
            return
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, len(flat), _WRITE_BYTES):
            stretch = flat[start : start + _WRITE_BYTES]
            self._write_at(self._header_bytes + self._end, stretch.numpy().data)
            self._end += len(stretch)
            if self._end - self._synced >= _SYNC_BYTES:
                os.fdatasync(self._descriptor)
                self._synced = self._end
                self._on_sync(self._synced)

    def _write_at(self, offset: int, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:  # a write may be cut short
            count = os.pwrite(self._descriptor, rest, offset)
            rest, offset = rest[count:], offset + count

    def elements_by_type(self) -> Counter[torch.dtype]:
        elements = Counter[torch.dtype]()
        for _, dtype, shape in self._places.values():
            elements[dtype] += prod(shape)
        return elements

    def finish(self, paths: Mapping[int, str]) -> int:
        """Write the header and sync the file. Return the bytes of the tensors. `paths`: the modules' paths by id."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for key, (start, dtype, shape) in self._places.items():
            name = key if isinstance(key, str) else f"{paths[key[0]]}.{key[1]}".removeprefix(".")
            offsets = [start, start + prod(shape) * dtype.itemsize]
            header[name] = {"dtype": safetensors.NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        size = self._header_bytes - 8
        if len(text) > size:
            raise StartError(f"the names of {len(self._places)} tensors need {len(text)} bytes, more than {size}")
        self._write_at(0, size.to_bytes(8, "little") + text.ljust(size))
        os.fsync(self._descriptor)
        return self._end

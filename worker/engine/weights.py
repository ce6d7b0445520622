"""Weights as they lie on disk: safetensors files, mapped, each tensor a view.

Nothing is copied: a page of the file becomes memory when it is first touched, is shared with every other process that
maps it, and may be dropped and read again. Pickled weights are never opened.
Format: https://huggingface.co/docs/safetensors, "Format": 8 bytes little-endian length, JSON header, tensors.
"""

import json
import mmap
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from worker.contract import Exit
from worker.errors import StartError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LARGEST_HEADER = 100_000_000
"""Bytes; the reference implementation refuses longer ones, too."""
_STRETCH = 16 << 20
"""Bytes that are made resident between two reports of progress."""
_MADV_POPULATE_READ = 22
"""linux/mman.h; since Linux 5.14. Python names it only from 3.14 on."""


def files(snapshot: Path) -> list[Path]:
    """The safetensors files of a snapshot. Raises StartError if there are none, or one of the index is missing."""
    index = snapshot / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StartError(f"{index} is damaged ({type(error).__name__}); download it again", Exit.DAMAGED) from error
        missing = [name for name in names if "/" in name or not (snapshot / name).is_file()]
        if missing:
            raise StartError(
                f"{snapshot} lacks {missing[0]} ({len(missing)} of {len(names)} weight files); download it again",
                Exit.DAMAGED,
            )
        return [snapshot / name for name in names]
    if (snapshot / SINGLE).is_file():
        return [snapshot / SINGLE]
    if any(next(snapshot.glob(pattern), None) for pattern in _PICKLES):
        raise StartError(
            f"{snapshot} has pickled weights only, and loading those runs code from the file;"
            " take a revision with safetensors, or convert it once with save_pretrained"
        )
    raise StartError(f"{snapshot} has no {SINGLE}; is it a complete snapshot?")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor: where it begins in the file and what it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class WeightFile:
    """One safetensors file, mapped. Raises StartError if it is damaged, before anything of it is used."""

    def __init__(self, path: Path):
        self.path = path
        self.size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > min(_LARGEST_HEADER, self.size - 8):
                raise self._damaged("its header is cut short")
            try:
                header: dict[str, Any] = json.loads(file.read(length))
                header.pop("__metadata__", None)
                self._entries = [self._entry(name, entry, 8 + length) for name, entry in header.items()]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise self._damaged(f"its header cannot be read ({type(error).__name__})") from error
            # private and writable: torch wants writable memory; a write would copy the page and leave the file alone
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def _entry(self, name: str, entry: dict[str, Any], base: int) -> _Entry:
        begin, end = entry["data_offsets"]
        dtype, shape = _DTYPES.get(entry["dtype"]), tuple(entry["shape"])
        if dtype is None:
            raise StartError(f"{self.path}: {name} has type {entry['dtype']!r}, which this version cannot load")
        if begin < 0 or end - begin != prod(shape) * dtype.itemsize or base + end > self.size:
            raise self._damaged(f"{name} does not fit into its {self.size} bytes; the download was cut short")
        return _Entry(name, dtype, shape, base + begin, end - begin)

    def _damaged(self, why: str) -> StartError:
        return StartError(f"{self.path} is damaged: {why}; delete it and download it again", Exit.DAMAGED)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and views. Views keep the file mapped."""
        for entry in self._entries:
            yield entry.name, self._view(entry)

    def _view(self, entry: _Entry) -> torch.Tensor:
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
        if entry.offset % entry.dtype.itemsize:
            raw = raw.clone()  # written without alignment: kernels expect it
        return raw.view(entry.dtype).view(entry.shape)

    def populate(self, report: Callable[[int], None]) -> None:
        """Make the whole file resident; `report` gets the bytes of each stretch. Without the system's help: nothing."""
        for start in range(0, self.size, _STRETCH):
            length = min(_STRETCH, self.size - start)
            with suppress(OSError, ValueError):
                self._map.madvise(_MADV_POPULATE_READ, start, length)
            report(length)

    def converted(self, dtype: torch.dtype, report: Callable[[int], None]) -> Iterator[tuple[str, torch.Tensor]]:
        """As `tensors`, floating point in `dtype`; the file's pages are let go as soon as they were read."""
        for entry in sorted(self._entries, key=lambda entry: entry.offset):
            view = self._view(entry)
            yield entry.name, (view.to(dtype, copy=True) if view.is_floating_point() else view.clone())
            report(entry.nbytes)
            self._let_go(entry)

    def keep_only(self, used: Set[int]) -> None:
        """Let go of the pages of all tensors whose views do not begin at one of the addresses `used`."""
        for entry in self._entries:
            if self._view(entry).data_ptr() not in used:
                self._let_go(entry)

    def _let_go(self, entry: _Entry) -> None:
        start = -(-entry.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (entry.offset + entry.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            with suppress(OSError, ValueError):
                self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    @property
    def floating(self) -> torch.dtype | None:
        """Type of its first floating-point tensor."""
        return next((entry.dtype for entry in self._entries if entry.dtype.is_floating_point), None)

"""Safetensors files: memory-mapped, with each tensor a view.

Nothing is copied. A page of a file becomes memory on first access, is shared with other processes that map the file,
and may be dropped and read again by the kernel. Pickled weights are never opened here: worker/fetch/convert.py makes
safetensors files of them.
Format: https://huggingface.co/docs/safetensors, "Format": 8 bytes little-endian length, JSON header, tensors.
"""

import json
import mmap
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch

from worker.engines.transformers.device.lazy_pages import LazyPages, populate
from worker.engines.transformers.load.page_cache import READERS, STRETCH, cached, read
from worker.errors import StartError
from worker.protocol.events import Exit
from worker.protocol.pickled_weights import PICKLED_SUFFIXES
from worker.protocol.snapshot_files import (
    INDEX,
    MAX_HEADER_BYTES,
    TORCH_DTYPES,
    WEIGHTS,
    shard_names,
    single_weights_in,
)

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, of_torch) for name, of_torch in TORCH_DTYPES.items()}
NAMES = {dtype: name for name, dtype in _DTYPES.items()}  # names of torch's types in the format
_WARM = 0.9  # cached share of the files from which two threads are enough; a guess, since some pages are often evicted
_AROUND = 1 << 16  # bytes that the kernel maps per page fault if cached (default of fault_around_bytes)
_SAMPLE = 1 << 20  # bytes checked of each part
# linux/mman.h; the second since Linux 5.14. Python 3.11 has no names for them.
_MADV_HUGEPAGE, _MADV_POPULATE_READ, _MAP_NORESERVE = 14, 22, 0x4000


def files(snapshot: Path) -> list[Path]:
    """The safetensors files of a snapshot. Raises StartError if there are none or one of the index is missing."""
    index = snapshot / INDEX
    if index.is_file():
        try:
            names = shard_names(index.read_bytes())
        except ValueError as error:
            raise StartError(f"{index} {error}; download it again", Exit.DAMAGED) from error
        missing = [name for name in names if not (snapshot / name).is_file()]
        if missing:
            raise StartError(
                f"{snapshot} lacks {missing[0]} ({len(missing)} of {len(names)} weight files); download it again",
                Exit.DAMAGED,
            )
        return [snapshot / name for name in names]
    single = single_weights_in(snapshot)
    if single.is_file():
        return [single]
    if any(next(snapshot.glob(f"*{suffix}"), None) for suffix in PICKLED_SUFFIXES):
        raise StartError(
            f"{snapshot} has pickled weights only, which are converted before a load; this conversion has failed, or"
            " --no-prepare, `python` or trust-remote-code prevents it; take a revision with safetensors"
        )
    raise StartError(f"{snapshot} has no {WEIGHTS}; is it a complete snapshot?")


@dataclass(frozen=True, slots=True)
class _Entry:
    """Location and type of one tensor in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class WeightFile:
    """One memory-mapped safetensors file. The constructor raises StartError if the file is damaged."""

    def __init__(self, path: Path):
        self.path = path
        self.size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > min(MAX_HEADER_BYTES, self.size - 8):
                raise self._damaged("its header is cut short")
            try:
                header: dict[str, Any] = json.loads(file.read(length))
                header.pop("__metadata__", None)
                self._entries = [self._entry(name, entry, 8 + length) for name, entry in header.items()]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise self._damaged(f"its header cannot be read ({type(error).__name__})") from error
            # Private and writable: torch requires writable memory. A write would copy the page, not change the file.
            # Nothing is reserved for such copies: the kernel would refuse a file larger than main memory and swap.
            self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)
            self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        # Pages of 2 MiB where the file system has them, also for later mappings of the file: 2.3 GB are then mapped in
        # 3 ms instead of 52 (measured on ext4).
        with suppress(OSError, ValueError):
            self._map.madvise(_MADV_HUGEPAGE)

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
        """Names and views. A view keeps the file mapped."""
        for entry in self._entries:
            yield entry.name, self._view(entry)

    def listed(self) -> Iterator[tuple[str, torch.dtype, int]]:
        """Names, dtypes and numbers of elements from the header."""
        for entry in self._entries:
            yield entry.name, entry.dtype, prod(entry.shape)

    def _view(self, entry: _Entry) -> torch.Tensor:
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
        if entry.offset % entry.dtype.itemsize:
            raw = raw.clone()  # unaligned in the file, but kernels expect alignment
        return raw.view(entry.dtype).view(entry.shape)

    @property
    def bytes(self) -> torch.Tensor:
        """The whole file as a view `[size]`."""
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def converted(self, dtype: torch.dtype, report: Callable[[int], None]) -> Iterator[tuple[str, torch.Tensor]]:
        """As `tensors`, with floating point in `dtype`. Pages of the file are released as soon as they are
        converted."""
        for entry in sorted(self._entries, key=lambda entry: entry.offset):
            view = self._view(entry)
            yield entry.name, (view.to(dtype, copy=True) if view.is_floating_point() else view.clone())
            report(entry.nbytes)
            self._release(entry.offset, entry.nbytes)

    def keep_only(self, used: Set[int]) -> None:
        """Release the pages of all tensors whose views do not begin at one of the addresses `used`."""
        for entry in self._entries:
            if self._view(entry).data_ptr() not in used:
                self._release(entry.offset, entry.nbytes)

    def offset(self, view: torch.Tensor) -> int | None:
        """Offset of a view in the file; None if it belongs to other memory."""
        offset = view.data_ptr() - self._address
        return offset if 0 <= offset < self.size else None

    def release_pages(self, view: torch.Tensor) -> bool:
        """Release the pages of a view; later access reads the file again. False if the view is not part of this
        file."""
        offset = self.offset(view)
        if offset is None:
            return False
        self._release(offset, view.nbytes)
        return True

    def _release(self, offset: int, nbytes: int) -> None:
        # Only pages that lie entirely inside the view: the first and last may belong to neighbours, too.
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            with suppress(OSError, ValueError):
                self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def converts_to(self, dtype: torch.dtype) -> bool:
        """True if a model in `dtype` needs other numbers than the file has."""
        return any(entry.dtype.is_floating_point and entry.dtype != dtype for entry in self._entries)

    @property
    def is_aligned(self) -> bool:
        """True if all tensors can be used in place."""
        return not any(entry.nbytes and entry.offset % entry.dtype.itemsize for entry in self._entries)

    @property
    def floating(self) -> torch.dtype | None:
        """Type of the first floating-point tensor."""
        return next((entry.dtype for entry in self._entries if entry.dtype.is_floating_point), None)


class ReadAhead:
    """Reads files and maps their pages in background threads for the length of a block.

    Cached parts are only mapped, by two threads, because mapping takes no longer than reading one byte per page. Other
    parts are read by several threads, in file order.
    """

    def __init__(self, files: Sequence[WeightFile], copied: Set[WeightFile] = frozenset()):
        """`copied`: files that are only read into the page cache and not mapped, because the caller copies their
        tensors one by one."""
        self.total = sum(file.size for file in files)
        self._files, self._copied = files, copied
        self._parts: list[Future[int]] = []
        self._end = ExitStack()

    def __enter__(self) -> Self:
        descriptors = {file: self._end.enter_context(file.path.open("rb")).fileno() for file in self._files}
        here = sum(cached(descriptor, 0, file.size) for file, descriptor in descriptors.items())
        pool = ThreadPoolExecutor(2 if here > _WARM * self.total else READERS, "read-ahead")
        self._end.callback(pool.shutdown, cancel_futures=True)
        self._parts = [
            pool.submit(self._have, file, descriptor, start)
            for file, descriptor in descriptors.items()
            for start in range(0, file.size, STRETCH)
        ]
        return self

    def __exit__(self, *error: object) -> None:
        self._end.close()

    def finish(self, report: Callable[[int], None]) -> None:
        """Wait until everything is read. `report` is called regularly with the bytes done so far."""
        done = 0
        for part in self._parts:
            done += part.result()
            report(done)

    def _have(self, file: WeightFile, descriptor: int, start: int) -> int:
        """Bring a part of a file into memory. Return its bytes."""
        length = min(STRETCH, file.size - start)
        is_cached = cached(descriptor, start, length) >= length
        if file in self._copied:
            if not is_cached:
                read(descriptor, start, length)
        elif is_cached:
            _touch(file.bytes[start : start + length])
        else:
            populate(file.bytes[start : start + length], _MADV_POPULATE_READ)
        return length


def are_cached(files: Sequence[WeightFile]) -> bool:
    """True if all files are in the page cache.

    Checks a sample, because the kernel evicts pages in long runs. Checking each of 560,000 pages takes 5 ms (measured).
    """
    for file in files:
        with file.path.open("rb") as opened:
            for start in range(0, file.size, STRETCH):
                length = min(_SAMPLE, file.size - start)
                if cached(opened.fileno(), start, length) < length:
                    return False
    return True


def unmapped_views(files: Sequence[WeightFile], views: Sequence[torch.Tensor]) -> LazyPages:
    """The pages of `views`, which are in the page cache. The model can be used while they are mapped.

    The order of the views should be the order of use: a page used earlier is mapped by its page fault. Mapping takes
    some tens of milliseconds. Views that belong to none of the files are ignored.
    """
    pages = LazyPages()
    for view in views:
        for file in files:
            if (at := file.offset(view)) is not None:
                pages.add(file.bytes[at : at + view.nbytes], _touch)
    return pages


def _touch(stretch: torch.Tensor) -> None:
    """Map cached pages. Reading one byte per fault-around window takes no mmap lock; madvise would block threads that
    map memory."""
    stretch[::_AROUND].max()

"""Weights as they lie on disk: safetensors files, mapped, each tensor a view.

Nothing is copied: a page of the file becomes memory when it is first touched, is shared with every other process that
maps it, and may be dropped and read again. Pickled weights are never opened.
Format: https://huggingface.co/docs/safetensors, "Format": 8 bytes little-endian length, JSON header, tensors.
"""

import ctypes
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch

from worker.engines.transformers.load.page_cache import READERS, STRETCH, Reading, cached, read
from worker.errors import StartError
from worker.protocol.exits import Exit
from worker.protocol.snapshot_files import INDEX, WEIGHTS, shard_names

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""What the format calls torch's types."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LARGEST_HEADER = 100_000_000
"""Bytes; the reference implementation refuses longer ones, too."""
_WARM = 0.9
"""Share of the files in the page cache above which one thread does: a guess; a few pages have often been taken."""
_AROUND = 1 << 16
"""Bytes that the kernel maps with one fault where they are in the page cache (fault_around_bytes, its default)."""
_SAMPLE = 1 << 20
"""Bytes of each stretch that are asked for."""
_MADV_HUGEPAGE, _MADV_POPULATE_READ = 14, 22
"""linux/mman.h; the latter since Linux 5.14. Python names it only from 3.14 on."""
_libc = ctypes.CDLL(None, use_errno=True)


def files(snapshot: Path) -> list[Path]:
    """The safetensors files of a snapshot. Raises StartError if there are none, or one of the index is missing."""
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
    if (snapshot / WEIGHTS).is_file():
        return [snapshot / WEIGHTS]
    if any(next(snapshot.glob(pattern), None) for pattern in _PICKLES):
        raise StartError(
            f"{snapshot} has pickled weights only, and loading those runs code from the file;"
            " take a revision with safetensors, or convert it once with save_pretrained"
        )
    raise StartError(f"{snapshot} has no {WEIGHTS}; is it a complete snapshot?")


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
            self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        # What is read for this mapping comes in pages of 2 MiB where the file system has such, and stays so for whoever
        # maps the file next: to make 2.3 GB resident takes 3 ms instead of 52 (measured on ext4).
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
        """Names and views. Views keep the file mapped."""
        for entry in self._entries:
            yield entry.name, self._view(entry)

    def listed(self) -> Iterator[tuple[str, torch.dtype, int]]:
        """Names, types and numbers of elements, without a look at any of them."""
        for entry in self._entries:
            yield entry.name, entry.dtype, prod(entry.shape)

    def _view(self, entry: _Entry) -> torch.Tensor:
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
        if entry.offset % entry.dtype.itemsize:
            raw = raw.clone()  # written without alignment: kernels expect it
        return raw.view(entry.dtype).view(entry.shape)

    @property
    def bytes(self) -> torch.Tensor:
        """The whole file, a view `[size]`."""
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def converted(self, dtype: torch.dtype, report: Callable[[int], None]) -> Iterator[tuple[str, torch.Tensor]]:
        """As `tensors`, floating point in `dtype`; the file's pages are let go as soon as they were read."""
        for entry in sorted(self._entries, key=lambda entry: entry.offset):
            view = self._view(entry)
            yield entry.name, (view.to(dtype, copy=True) if view.is_floating_point() else view.clone())
            report(entry.nbytes)
            self._let_go(entry.offset, entry.nbytes)

    def keep_only(self, used: Set[int]) -> None:
        """Let go of the pages of all tensors whose views do not begin at one of the addresses `used`."""
        for entry in self._entries:
            if self._view(entry).data_ptr() not in used:
                self._let_go(entry.offset, entry.nbytes)

    def offset(self, view: torch.Tensor) -> int | None:
        """Where in the file a view begins; None if it is none of this file."""
        offset = view.data_ptr() - self._address
        return offset if 0 <= offset < self.size else None

    def let_go(self, view: torch.Tensor) -> bool:
        """Let go of the pages of a view, which is read from the file again if need be; False if it is none of this
        file."""
        offset = self.offset(view)
        if offset is None:
            return False
        self._let_go(offset, view.nbytes)
        return True

    def _let_go(self, offset: int, nbytes: int) -> None:
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            with suppress(OSError, ValueError):
                self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def converts_to(self, dtype: torch.dtype) -> bool:
        """Whether a model in `dtype` needs other numbers than the file has."""
        return any(entry.dtype.is_floating_point and entry.dtype != dtype for entry in self._entries)

    @property
    def is_aligned(self) -> bool:
        """Whether all tensors can be used where they lie."""
        return not any(entry.nbytes and entry.offset % entry.dtype.itemsize for entry in self._entries)

    @property
    def floating(self) -> torch.dtype | None:
        """Type of its first floating-point tensor."""
        return next((entry.dtype for entry in self._entries if entry.dtype.is_floating_point), None)


class ReadAhead:
    """Files read, and their pages mapped, while others work: threads for the length of the block.

    What is in the page cache is only mapped, by one thread and whoever waits for the end, since that takes no more than
    looking at it; what is not is read by several, each a large stretch at a time, in the order of the files.
    """

    def __init__(self, files: Sequence[WeightFile], copied: Set[WeightFile] = frozenset()):
        """`copied`: of those the pages do not become part of this process: they are only brought into the page cache,
        for whoever copies them piece by piece."""
        self.total = sum(file.size for file in files)
        self._files = files
        self._copied = copied
        self._done = 0
        self._lock = threading.Lock()
        self._reading = Reading(((file, at) for file in files for at in range(0, file.size, STRETCH)), self._have)
        self._descriptors: dict[WeightFile, int] = {}

    def __enter__(self) -> Self:
        self._descriptors = {file: os.open(file.path, os.O_RDONLY | os.O_CLOEXEC) for file in self._files}
        here = sum(cached(self._descriptors[file], 0, file.size) for file in self._files)
        others = 1 if here > _WARM * self.total else READERS
        self._reading.start(others if self.total > STRETCH else 0)
        return self

    def __exit__(self, *error: object) -> None:
        self._reading.stop()
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def finish(self, report: Callable[[int], None]) -> None:
        """Returns once all is read, with this thread's help; `report` gets the bytes done so far, now and then."""
        while self._reading.one():
            report(self._done)
        self._reading.finish(lambda: report(self._done))
        report(self.total)

    def _have(self, stretch: tuple[WeightFile, int]) -> None:
        file, start = stretch
        length = min(STRETCH, file.size - start)
        descriptor = self._descriptors[file]
        is_cached = cached(descriptor, start, length) >= length
        if file in self._copied:
            if not is_cached:
                read(descriptor, start, length)
        elif is_cached:
            # a look at one byte each: this way threads that map other memory need not wait, as they must for madvise
            file.bytes[start : start + length : _AROUND].max()
        else:
            _populate(file.bytes[start : start + length])
        with self._lock:
            self._done += length


def are_cached(files: Sequence[WeightFile]) -> bool:
    """Whether all of them is in the page cache, so that it only has to be mapped.

    A sample says so: the kernel takes pages in long runs, and what it took in between is read when it is used. To ask
    for each of 560,000 pages takes 5 ms (measured)."""
    for file in files:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start in range(0, file.size, STRETCH):
                length = min(_SAMPLE, file.size - start)
                if cached(descriptor, start, length) < length:
                    return False
        finally:
            os.close(descriptor)
    return True


class Prefault:
    """The pages of weights that are in the page cache, mapped behind the back of whoever computes with them already.

    A thread looks at them once, in the order of the views, which should be that of use; a page that is met before is
    mapped then. It is over in some tens of milliseconds.
    """

    def __init__(self, files: Sequence[WeightFile], views: Sequence[torch.Tensor]):
        """Views of none of the files are left out."""
        places = ((file, file.offset(view), view.nbytes) for view in views for file in files)
        self._stretches = [file.bytes[at : at + size] for file, at, size in places if at is not None]
        self.left = sum(map(len, self._stretches))
        """Bytes that it has not come to yet."""
        self._is_over = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """To be called once."""
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Returns once all is mapped, if it was started."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Returns once nothing is mapped any more, however far it is: what was not is mapped when it is used."""
        self._is_over = True
        self.finish()
        self.left = 0

    def _run(self) -> None:
        for stretch in self._stretches:
            for start in range(0, len(stretch), STRETCH):
                if self._is_over:
                    return
                some = stretch[start : start + STRETCH]
                some[::_AROUND].max()
                self.left -= len(some)


def _populate(stretch: torch.Tensor) -> None:
    """Have the pages of `stretch` mapped, which begins with one; where the kernel does not know how, nothing: they
    will come when they are used. The interpreter is free meanwhile, which `mmap.madvise` would hold."""
    _libc.madvise(
        ctypes.c_void_p(stretch.data_ptr()), ctypes.c_size_t(stretch.nbytes), ctypes.c_int(_MADV_POPULATE_READ)
    )


__all__ = ["NAMES", "Prefault", "ReadAhead", "WeightFile", "are_cached", "files"]

"""What this process occupies, and how its allocators are told to keep to it."""

import ctypes
import json
import math
import mmap
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from worker.engines.transformers.device.cuda_errors import is_exhausted as is_exhausted
from worker.engines.transformers.device.cuda_errors import is_sticky as is_sticky
from worker.engines.transformers.device.cuda_errors import one_line as one_line
from worker.engines.transformers.device.process_overhead import overhead
from worker.errors import StartError
from worker.protocol.exits import Exit

_LOOK_INTERVAL = 10.0
"""Seconds between two looks at what is shared with a nursery."""
_MOST_STRETCHES = 64
"""Of memory that are looked at for that; they hold all but a few hundred kilobytes of what a nursery has (measured)."""
_PART_PAGES, _LOOKED_AT = 64, 4
"""Pages that are looked at one behind another, and of how many such parts that is one."""
_PAGE_PRESENT, _PAGE_OF_FILE, _PAGE_EXCLUSIVE = np.uint64(1 << 63), np.uint64(1 << 61), np.uint64(1 << 56)
_PAGE_FLAGS = _PAGE_PRESENT | _PAGE_OF_FILE | _PAGE_EXCLUSIVE
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""malloc.h. A second arena for each thread keeps freed memory that no other thread can use."""
_OMP_PAUSE_HARD = 2
"""omp.h."""
_KEPT_BLOCK = 32 << 20
"""Bytes: the largest block that glibc takes from its heap when asked to (mallopt(3); DEFAULT_MMAP_THRESHOLD_MAX)."""


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A one-dimensional tensor on `device`; the host does not wait for what the device is doing."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype).to(device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def measured(devices: Sequence[str]) -> dict[str, int]:
    """Peak bytes by name, of `devices` and of `cpu`, which every process needs: its resident bytes, mapped files
    included; without what a forked one shares with its nursery, which nobody gets back when it ends."""
    peaks = {"cpu": max(0, _peak_resident() - inheritance.bytes())}
    for name in devices:
        if name != "cpu":
            peaks[name] = torch.cuda.max_memory_reserved(torch.device(name)) + overhead.bytes(name)
    return peaks


def resident() -> int:
    """Bytes of main memory that this process has now, shared ones included."""
    return _status("VmRSS")


def mapped() -> int:
    """Bytes of files among its resident ones: weights as they lie on disk, and libraries."""
    return _status("RssFile")


def _peak_resident() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    """Bytes, as the kernel counts them (proc_pid_status(5)); 0 where it does not."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


class Inheritance:
    """Memory that a process has for its children: where it lies, and how much of it a child has not written to.

    A walk over all pages (smaps_rollup) would say the same, but it takes as long as they are many: 90 ms for the pages
    of a model of 2 GB, in the middle of its load. So only the largest stretches that held something of the parent's own
    when it forked are looked at, and of those one part in four, as what a child writes to lies all over them: 1 ms for
    300 MB, where the whole would take 4.
    """

    def __init__(self) -> None:
        self._stretches: list[tuple[int, int]] = []
        """First address and bytes."""
        self.modules = 0
        """As many were imported when this process was forked: the first ones of `sys.modules`."""
        self._pagemap = -1
        self._bytes = 0
        self._looked_at = -math.inf

    def survey(self) -> None:
        """In the parent, before it forks: find what its children will share. Without the kernel's figures: nothing."""
        sizes: dict[tuple[int, int], int] = {}
        stretch = (0, 0)
        with suppress(OSError), open("/proc/self/smaps", encoding="ascii", errors="replace") as areas:
            for line in areas:
                first, _, rest = line.partition(" ")
                if not first.endswith(":"):
                    begin, end = (int(address, 16) for address in first.split("-"))
                    stretch = (begin, end - begin)
                elif first == "Anonymous:":
                    sizes[stretch] = int(rest.split()[0]) * 1024
        largest = sorted(sizes, key=lambda each: sizes[each], reverse=True)[:_MOST_STRETCHES]
        self._stretches = [stretch for stretch in largest if sizes[stretch]]

    def take(self) -> None:
        """In the child, while it may still look at itself: a worker that nobody may debug cannot open this file."""
        self.modules = len(sys.modules)
        with suppress(OSError):
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def is_heir(self) -> bool:
        """Whether this process was forked, and can tell."""
        return self._pagemap >= 0

    def bytes(self) -> int:
        """Still shared with the parent; not older than some seconds."""
        if self._pagemap >= 0 and time.monotonic() - self._looked_at > _LOOK_INTERVAL:
            self._bytes = mmap.PAGESIZE * sum(self._shared(*stretch) for stretch in self._stretches)
            self._looked_at = time.monotonic()  # last: until then the other threads look for themselves
        return self._bytes

    def _shared(self, begin: int, length: int) -> int:
        """Pages there that are in memory, no part of a file, and not this process's alone: 8 bytes for each page
        (Documentation/admin-guide/mm/pagemap.rst)."""
        first, pages = begin // mmap.PAGESIZE, length // mmap.PAGESIZE
        found = bytearray()
        with suppress(OSError):
            for page in range(0, pages, _LOOKED_AT * _PART_PAGES):
                found += os.pread(self._pagemap, 8 * min(_PART_PAGES, pages - page), (first + page) * 8)
        flags = np.frombuffer(found, np.uint64)
        shared = int(np.count_nonzero((flags & _PAGE_FLAGS) == _PAGE_PRESENT))
        return shared * pages // max(len(flags), 1)


inheritance = Inheritance()
"""Of this process, or of the one that it was forked from."""


def yet_to_copy() -> int:
    """Bytes that this process shares with its nursery and may come to have for itself, as it writes to them."""
    return inheritance.bytes() // 10


def keep_small() -> None:
    """Keep libraries from holding on to ever more memory. Let all threads share malloc's arenas: what one frees another
    uses. Only glibc has this; elsewhere nothing.

    And let what a step frees be there for the next: glibc comes to that by itself, but only behind a block of
    _KEPT_BLOCK. Until then it gives back what lies on top, and a step of 500 tokens spends a quarter of its time on
    finding its pages again (110 M parameters, 60,000 pages of 4 KiB, measured).

    cuDNN's attention, which torch prefers on some cards (Hopper's, for one), makes a plan for each shape that it meets,
    and keeps them all: steps have ever other lengths, so that each would wait for a plan of its own.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 2)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _KEPT_BLOCK)


def end_helpers() -> None:
    """End the threads that OpenMP keeps for this one's parallel regions; it makes new ones when it needs them.

    GNU's library has its threads spin until the next region begins, but only while all threads of a process have no
    more of them than there are cores. Else they sleep and have to be woken: beside the helpers that a load had left,
    each product of a step took 1.1 to 1.3 times as long (768 x 2048, 1 and 4 rows, 2 cores, measured).
    LLVM's library would end those of all threads, and is left alone.
    """
    with suppress(OSError, AttributeError):
        libraries = ctypes.CDLL(None)
        if not hasattr(libraries, "__kmpc_fork_call"):
            libraries.omp_pause_resource_all(_OMP_PAUSE_HARD)


def give_back() -> None:
    """Let go of what was freed and lies in malloc's arenas: after a load that copied, far more than steps will need.
    Only glibc has this; elsewhere nothing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def take_handles(devices: Sequence[torch.device]) -> None:
    """Have what CUDA's libraries keep for each thread, and torch for each of those: handles, and a workspace for each.
    Else the thread's first step takes them, when all has been counted."""
    for device in devices:
        square = torch.ones(16, 16, device=device)
        torch.nn.functional.linear(square @ square, square, square[0])
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def cap(devices: Sequence[str], reserved: str) -> None:
    """Hold the CUDA allocator to what the router reserved, so that a wrong estimate hurts only this worker.

    `reserved`: JSON object, bytes by device name; empty: no cap. Raises StartError if it is no such object.
    """
    if not reserved:
        return
    try:
        bytes_by_device = {str(name): int(size) for name, size in json.loads(reserved).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise StartError(f"--reserved wants a JSON object of bytes by device, not {reserved!r}") from error
    for name in devices:
        if name != "cpu" and name in bytes_by_device:
            device = torch.device(name)
            total = torch.cuda.get_device_properties(device).total_memory
            share = allocator_share(bytes_by_device[name], overhead.bytes(name), total)
            torch.cuda.set_per_process_memory_fraction(share, device)


def allocator_share(reserved: int, beside: int, total: int) -> float:
    """Of a device of `total` bytes, what torch's allocator may have so that the process keeps to `reserved` with what
    it takes `beside` that. Never nothing: a worker that gets nowhere at all could not even say so."""
    return min(max((reserved - beside) / total, 0.01), 1.0)


def start_error(what: str, device: torch.device, error: BaseException) -> StartError:
    """What to end with if there was no room for `what`."""
    exit = Exit.HOST_MEMORY if device.type == "cpu" else Exit.DEVICE_MEMORY
    return StartError(
        f"no memory for {what} on {device}: {one_line(error)}; lower ctx-size, parallel or kv-tokens, or free memory",
        exit,
    )

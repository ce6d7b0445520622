"""Memory of this process: measurement, the cap of the CUDA allocator, and settings of malloc and OpenMP."""

import ctypes
import json
import math
import mmap
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from worker.engines.transformers.device.cuda_errors import one_line
from worker.engines.transformers.device.process_overhead import overhead
from worker.errors import StartError
from worker.protocol.events import Exit

# Shared pages are counted again after this number of page faults of this process and its fork server together: a copied
# page is one fault, and the old page of the fork server may then belong to this process. They are also counted after
# this number of seconds: the last other worker that shares a page may copy it.
_MOST_FAULTS, _COUNT_INTERVAL = 64, 10.0
_PAGES_AT_ONCE = 4096  # of the page map in one read
# Upper limits of the data that a worker shares with its fork server and then copies by writing, as 1/N of the data.
# Measured: 3 to 4 % until the load is prepared; afterwards 1.0 to 1.3 % by 1,500 varied requests. With grammars it is
# 2.6 %, but their memory is announced (`MemoryNeed`).
_COPIED_BY_LOAD, _COPIED_BY_REQUESTS = 16, 56
# Upper limit of the data that a worker copies between two pulses without an announced step. Measured: 0.2 MiB by 40
# requests. A worker also comes to own pages that others copy: 0.4 to 0.9 MiB when the fork server prebuilds a model,
# and up to 2.1 MiB when another worker loads. These may exceed its reservation until its next pulse. A larger limit
# would be more than 5 % of what small workers hold.
COPIED_BETWEEN_PULSES = 1 << 20
# Main memory that the first requests take besides copied pages, after the largest steps of a small model were computed:
# Python's heap and code of libraries. Measured: 5.0 to 6.3 MiB with the copied pages, half of it by the first request.
TAKEN_BY_REQUESTS = 4 << 20
# Main memory that a forked worker takes between the count of its shared pages and its first pulse: its HTTP server, the
# router's first connection, and pages that the fork server copies. Measured: 1.4 to 2.9 MiB.
TAKEN_WHEN_READY = 3 << 20
# malloc.h. With one arena per thread, memory freed by one thread could not be used by others.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_OMP_PAUSE_HARD = 2  # omp.h
_KEPT_BLOCK = 32 << 20  # largest block on glibc's heap (mallopt(3), DEFAULT_MMAP_THRESHOLD_MAX)
# Bits 63, 61 and 56 of an entry of the page map, in its highest byte.
_PAGE_PRESENT, _PAGE_OF_FILE, _PAGE_EXCLUSIVE = 0x80, 0x20, 0x01
# Kinds of pages.
_OTHER, _DATA, _LIBRARY = range(3)


def _page_kind(flags: int) -> int:
    if flags & _PAGE_PRESENT and flags & _PAGE_OF_FILE:
        return _LIBRARY
    return _DATA if flags & _PAGE_PRESENT and not flags & _PAGE_EXCLUSIVE else _OTHER


_PAGE_KINDS = bytes(map(_page_kind, range(256)))


def upload(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Copy values to a one-dimensional tensor on `device`, without waiting for work queued on the device."""
    if device.type == "cpu" and device.index:
        # A fake one of an estimate. `to` would keep one element on the first CPU: torch has its value (2.13).
        return torch.empty(len(values), dtype=dtype, device=device)
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype).to(device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def measured(devices: Sequence[str]) -> dict[str, int]:
    """Peak bytes by device name, of `devices` and of `cpu`.

    `cpu` is the resident memory including mapped files, but without data and libraries that a forked process shares
    with its fork server, because they are not freed when it exits.
    """
    peaks = {"cpu": max(0, _status("VmHWM") - inheritance.bytes())}
    for name in devices:
        if name != "cpu":
            peaks[name] = torch.cuda.max_memory_reserved(torch.device(name)) + overhead.bytes(name)
    return peaks


def prepared() -> int:
    """Peak bytes of a process that has prepared a load, before it maps weights. In a forked one it is an upper
    bound."""
    inheritance.estimate()
    with inheritance.last_count():
        return measured(())["cpu"]


def resident() -> int:
    """Resident bytes of this process, including shared pages."""
    return _status("VmRSS")


def held() -> int:
    """Resident bytes of this process now, without pages that it shares with its fork server."""
    return max(0, resident() - inheritance.bytes())


def mapped() -> int:
    """Resident bytes of mapped files: weights, and libraries that are not shared with the fork server."""
    _, libraries = inheritance.count()
    return max(0, _status("RssFile") - libraries)


def _status(name: str) -> int:
    """A value of /proc/self/status in bytes (proc_pid_status(5)); 0 if the kernel has none."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


class Inheritance:
    """Memory shared with the parent process: its data that this process has not written to, and libraries.

    A library's pages count as shared whether the parent has used them or not: any other worker may have. The fork
    server is charged for them (`LIBRARY_CODE_BYTES`).

    Only areas of the parent are counted, which takes 7 to 12 ms. smaps_rollup would walk over all pages: 90 ms for a
    model of 2 GB, in the middle of its load. A sample of a quarter of the largest areas took 6 ms and was wrong by up
    to 4 MiB (measured).
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # first page and end
        self._data = 0  # bytes of data before the fork
        self._data_when_loaded = 0  # those that were shared when `yet_to_copy` was first called
        self.modules = 0  # modules imported before this process was forked: the first ones of `sys.modules`
        self._pagemap = self._parent_stat = -1  # descriptors of /proc files
        self._shared = 0, 0  # bytes of data and of libraries
        self._counted_at, self._faults = -math.inf, 0  # monotonic seconds, and `_page_faults` then
        self._keeps_count = False
        # Several threads measure. With the lock, one count serves all threads that wait for it.
        self._lock = threading.Lock()

    def survey(self) -> None:
        """In the parent before it forks: find the areas that children share. Does nothing without /proc/self/smaps.

        Weights of a prebuilt model are not among them: the parent has mapped them without reading them, so their pages
        are memory of the worker that reads them.
        """
        self._ranges, self._data = [], 0
        begin = end = 0
        is_file = is_weights = False
        with suppress(OSError), open("/proc/self/smaps", encoding="ascii", errors="replace") as areas:
            for line in areas:
                first, _, rest = line.partition(" ")
                if not first.endswith(":"):
                    begin, end = (int(address, 16) // mmap.PAGESIZE for address in first.split("-"))
                    is_file, is_weights = rest.split()[3] != "0", ".safetensors" in rest  # the inode, and the path
                elif first == "Rss:" and not is_weights and (is_file or int(rest.split()[0])):
                    if self._ranges and self._ranges[-1][1] == begin:  # 900 areas are 60 ranges
                        begin = self._ranges.pop()[0]
                    self._ranges.append((begin, end))
                elif first == "Anonymous:":
                    self._data += int(rest.split()[0]) * 1024

    def take(self) -> None:
        """In the child: open its page map while it still may. A worker that cannot be debugged cannot open this
        file."""
        self.modules = len(sys.modules)
        with suppress(OSError):
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            self._parent_stat = os.open(f"/proc/{os.getppid()}/stat", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def is_forked(self) -> bool:
        """True if this process was forked and can measure what it shares."""
        return self._pagemap >= 0

    def bytes(self) -> int:
        """Bytes shared with the parent, as they were last counted."""
        return sum(self.count())

    def estimate(self) -> None:
        """Use a lower bound until the first count, which would take 7 to 12 ms of each swap. It is for a process that
        has mapped no weights: all its mapped files are libraries."""
        if self.is_forked:
            self._shared = self._data - self._data // _COPIED_BY_LOAD, _status("RssFile")

    def yet_to_copy(self) -> int:
        """Upper limit of the bytes of shared data that requests write to, so that this process then owns them. First
        called when the model is loaded; bytes that were copied since then are not part of it."""
        data, _ = self.count()
        self._data_when_loaded = self._data_when_loaded or data
        limit = self._data_when_loaded // _COPIED_BY_REQUESTS
        return min(limit, max(COPIED_BETWEEN_PULSES, limit - (self._data_when_loaded - data)))

    @contextmanager
    def one_count(self) -> Iterator[None]:
        """Take all figures inside the block from one count, which is made at its start if it is due."""
        self.count()
        with self.last_count():
            yield

    @contextmanager
    def last_count(self) -> Iterator[None]:
        """Take all figures inside the block from the last count or estimate, or from a count that another thread is
        making. The first request of a swap would wait for a new one. Library pages used since then count as memory of
        this process."""
        with self._lock:
            self._keeps_count = any(self._shared)
        try:
            yield
        finally:
            self._keeps_count = False

    def count(self) -> tuple[int, int]:
        """The parts of `bytes`: data, which this process would copy by writing to it, and libraries in mapped files.

        8 bytes per page (Documentation/admin-guide/mm/pagemap.rst).
        """
        if self._pagemap < 0 or self._keeps_count:
            return self._shared
        with self._lock:
            faults = self._page_faults()
            is_old = time.monotonic() - self._counted_at > _COUNT_INTERVAL
            if is_old or faults > self._faults + _MOST_FAULTS:
                data = libraries = 0
                with suppress(OSError):
                    for begin, end in self._ranges:
                        for first in range(begin, end, _PAGES_AT_ONCE):
                            entries = os.pread(self._pagemap, 8 * min(_PAGES_AT_ONCE, end - first), first * 8)
                            # The highest byte has all flags that matter. numpy took longer.
                            kinds = entries[7::8].translate(_PAGE_KINDS)
                            data, libraries = data + kinds.count(_DATA), libraries + kinds.count(_LIBRARY)
                self._shared = data * mmap.PAGESIZE, libraries * mmap.PAGESIZE
                self._counted_at, self._faults = time.monotonic(), faults
            return self._shared

    def _page_faults(self) -> int:
        """Page faults of this process and of its parent so far."""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        with suppress(OSError):  # the parent has ended
            # Field 10 (proc_pid_stat(5)). The second one, a name in brackets, may contain blanks.
            faults += int(os.pread(self._parent_stat, 1024, 0).rpartition(b")")[2].split()[7])
        return faults


inheritance = Inheritance()  # of this process, or of the one that it was forked from


def keep_small() -> None:
    """Configure malloc and cuDNN so that memory does not grow. malloc settings exist in glibc only.

    Threads share malloc's arenas, so that memory freed by one is used by others. Memory freed by a step is kept for the
    next one: glibc does that by itself only after it has freed a block of _KEPT_BLOCK bytes. Until then it returns the
    top of the heap to the system, and a step of 500 tokens spends a quarter of its time on page faults (110 M
    parameters, 60,000 pages of 4 KiB, measured).

    cuDNN's attention, which torch prefers on some GPUs (Hopper), builds and keeps a plan for each shape. Step lengths
    differ all the time, so every step would wait for a new plan.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 2)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _KEPT_BLOCK)


def end_helpers() -> None:
    """End the idle OpenMP threads of the calling thread. OpenMP starts new ones when needed.

    GNU OpenMP threads spin until the next parallel region, but only while all threads of a process have no more of them
    than there are cores. Otherwise they sleep and must be woken: with the threads left by a load, each product of a
    step took 1.1 to 1.3 times as long (768 x 2048, 1 and 4 rows, 2 cores, measured). LLVM OpenMP would end the threads
    of all callers, so it is left alone.
    """
    with suppress(OSError, AttributeError):
        libraries = ctypes.CDLL(None)
        if not hasattr(libraries, "__kmpc_fork_call"):
            libraries.omp_pause_resource_all(_OMP_PAUSE_HARD)


def give_back() -> None:
    """Return freed memory in malloc's arenas to the system (glibc only). After a load it is far more than steps
    need."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def take_handles(devices: Sequence[torch.device]) -> None:
    """Create the per-thread handles and workspaces of CUDA libraries and torch now. The thread's first step would
    create them otherwise, after memory has been measured."""
    for device in devices:
        square = torch.ones(16, 16, device=device)
        torch.nn.functional.linear(square @ square, square, square[0])
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def cap(devices: Sequence[str], reserved: str) -> None:
    """Limit the CUDA allocator to the reservation, so that a wrong estimate hurts only this worker.

    `reserved`: JSON object with bytes by device name; empty: no limit. Raises StartError if it is invalid.
    """
    if not reserved:
        return
    try:
        bytes_by_device = {str(name): int(size) for name, size in json.loads(reserved).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise StartError(f"--reserved must be a JSON object of bytes by device, not {reserved!r}") from error
    for name in devices:
        if name != "cpu" and name in bytes_by_device:
            device = torch.device(name)
            total = torch.cuda.get_device_properties(device).total_memory
            share = allocator_share(bytes_by_device[name], overhead.bytes(name), total)
            torch.cuda.set_per_process_memory_fraction(share, device)


def allocator_share(reserved: int, overhead_bytes: int, total: int) -> float:
    """Share of a device of `total` bytes for torch's allocator, so that the process keeps to `reserved` including its
    memory outside the allocator. At least 1 %: with nothing a worker could not even report the error."""
    return min(max((reserved - overhead_bytes) / total, 0.01), 1.0)


def start_error(what: str, device: torch.device, error: BaseException) -> StartError:
    """The error for a lack of memory for `what`."""
    exit = Exit.HOST_MEMORY if device.type == "cpu" else Exit.DEVICE_MEMORY
    return StartError(
        f"no memory for {what} on {device}: {one_line(error)}; lower ctx-size, parallel or kv-tokens, or free memory",
        exit,
    )

"""Allocation of main memory whose pages are populated in the background.

A KV cache is gigabytes of zeros, and the kernel provides about 5 GB per second. The first token needs few of these
pages, so a load does not wait for the rest: inside `claiming`, a background thread populates them without changing what
is written meanwhile. `Claims.left` has the bytes still to come, which count as used memory.
"""

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

_HUGE_PAGE = 2 << 20
_STRETCH = 16 << 20  # bytes populated per call
# linux/mman.h; the latter since Linux 5.14. Python has names for them only from 3.14 on.
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_libc = ctypes.CDLL(None, use_errno=True)


class LazyPages:
    """Memory allocated inside one `claiming` block."""

    def __init__(self) -> None:
        self._areas: list[torch.Tensor] = []
        self.taken = self.left = 0  # bytes, and those of them that are not populated yet
        self._thread: threading.Thread | None = None

    def add(self, area: torch.Tensor) -> None:
        """Add page-aligned bytes `[size]`."""
        self._areas.append(area)
        self.taken += len(area)
        self.left += len(area)

    def start(self, behind: Callable[[], None] = lambda: None) -> None:
        """Start to populate in a background thread, after `behind` has returned there. Call once."""
        if self._areas:
            self._thread = threading.Thread(target=self._run, args=(behind,), name="claims", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait until everything is populated, if started."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, behind: Callable[[], None]) -> None:
        behind()
        while self._areas:
            area = self._areas.pop(0)
            for start in range(0, len(area), _STRETCH):
                some = area[start : start + _STRETCH]
                _populate(some)  # pages that fail are populated by the first write
                self.left -= len(some)


_claims: LazyPages | None = None  # of the current block


@contextmanager
def claiming() -> Iterator[LazyPages]:
    """Allocations of this thread in the block may be unpopulated at its end. `Claims.start` populates them."""
    global _claims
    before, _claims = _claims, LazyPages()
    try:
        yield _claims
    finally:
        _claims = before


def claim(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros `[*size]`, populated now, or later inside `claiming`.

    Uses pages of 2 MiB on the CPU where the system allows it: a gigabyte takes 0.09 s instead of 0.4 with small pages
    (measured). New pages are zero, so touching one byte of each is enough.
    """
    tensor = torch.empty(size, dtype=dtype, device=device)
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.nbytes < _HUGE_PAGE:
        return tensor.zero_()  # torch.zeros would leave the pages unpopulated until the first write
    area = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # freed with its last view
    with suppress(OSError):
        area.madvise(_MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    if _claims is not None and _populate(whole[: mmap.PAGESIZE]):
        _claims.add(whole)
    else:
        whole[:: mmap.PAGESIZE].zero_()
    return whole.view(dtype).view(size)


def _populate(stretch: torch.Tensor) -> bool:
    """Populate the pages of `stretch` (page-aligned) without changing their content. False if the kernel does not
    support it. Releases the GIL."""
    address, size = ctypes.c_void_p(stretch.data_ptr()), ctypes.c_size_t(stretch.nbytes)
    return bool(_libc.madvise(address, size, ctypes.c_int(_MADV_POPULATE_WRITE)) == 0)

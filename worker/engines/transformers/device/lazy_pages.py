"""Main memory that a process takes for itself: all of it is charged at once, and its pages come as soon as may be.

A cache of keys and values is gigabytes of zeros, and the kernel makes 5 GB of them in a second. A first token needs few
of them, so that a load need not wait for the rest: inside `claiming` pages come behind the back of whoever computes
already, on a thread that changes nothing of what is written meanwhile. What has not come yet is `Claims.left`, and
counts like memory that is taken.
"""

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

_HUGE_PAGE = 2 << 20
_STRETCH = 16 << 20
"""Bytes that are had at a time."""
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
"""linux/mman.h; the latter since Linux 5.14. Python names it only from 3.14 on."""
_libc = ctypes.CDLL(None, use_errno=True)


class Claims:
    """What was claimed inside one `claiming`."""

    def __init__(self) -> None:
        self._areas: list[torch.Tensor] = []
        self.taken = self.left = 0
        """Bytes, and those of them whose pages have not come by themselves yet."""
        self._thread: threading.Thread | None = None

    def add(self, area: torch.Tensor) -> None:
        """Bytes `[size]` that begin with a page."""
        self._areas.append(area)
        self.taken += len(area)
        self.left += len(area)

    def start(self, behind: Callable[[], None] = lambda: None) -> None:
        """Have the pages come from now on, once `behind` returns, which is called on their thread; to be called
        once."""
        if self._areas:
            self._thread = threading.Thread(target=self._run, args=(behind,), name="claims", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Returns once all have come, if it was started."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, behind: Callable[[], None]) -> None:
        behind()
        while self._areas:
            area = self._areas.pop(0)
            for start in range(0, len(area), _STRETCH):
                some = area[start : start + _STRETCH]
                _populate(some)  # what fails is had by the first write
                self.left -= len(some)


_claims: Claims | None = None
"""Of the block that this process is in."""


@contextmanager
def claiming() -> Iterator[Claims]:
    """What is claimed in the block, on the thread that loads, need not be there at its end; `Claims.start` goes on."""
    global _claims
    before, _claims = _claims, Claims()
    try:
        yield _claims
    finally:
        _claims = before


def claim(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros `[*size]` in memory that is this process's from now on, or soon, inside `claiming`.

    On the CPU in pages of 2 MiB, where the system has such for those who ask: with small ones a gigabyte takes 0.4 s,
    with these 0.09 (measured). They come as zeros, so that a byte of each is touched and no more is written."""
    tensor = torch.empty(size, dtype=dtype, device=device)
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.nbytes < _HUGE_PAGE:
        return tensor.zero_()  # zeros() would leave the pages to be claimed by the first write
    area = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # gone with its last view
    with suppress(OSError):
        area.madvise(_MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    if _claims is not None and _populate(whole[: mmap.PAGESIZE]):
        _claims.add(whole)
    else:
        whole[:: mmap.PAGESIZE].zero_()
    return whole.view(dtype).view(size)


def _populate(stretch: torch.Tensor) -> bool:
    """Have the pages of `stretch`, which begins with one, without a change to what is in them; false where the kernel
    does not know how. The interpreter is free meanwhile."""
    address, size = ctypes.c_void_p(stretch.data_ptr()), ctypes.c_size_t(stretch.nbytes)
    return bool(_libc.madvise(address, size, ctypes.c_int(_MADV_POPULATE_WRITE)) == 0)

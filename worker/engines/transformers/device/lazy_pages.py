"""Main memory whose pages are mapped in the background.

A KV cache is gigabytes of zeros, and the kernel provides about 5 GB per second. The first token needs few of these
pages, so a load does not wait for the rest: inside `claiming`, pages are only noted, and a background thread populates
them later without changing what is written meanwhile. The pages of cached weights are mapped in the same way.
`LazyPages.left` has the bytes still to come, which count as used memory.
"""

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

_HUGE_PAGE = 2 << 20
_STRETCH = 16 << 20  # bytes mapped per call
# linux/mman.h; the latter since Linux 5.14. Python has names for them only from 3.14 on.
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_libc = ctypes.CDLL(None, use_errno=True)


class LazyPages:
    """Pages that a background thread maps in the order in which they were added."""

    def __init__(self, after: "LazyPages | None" = None) -> None:
        """`after`: more urgent pages, which are started and counted along with these."""
        self._after = after
        self._areas: deque[tuple[torch.Tensor, Callable[[torch.Tensor], object]]] = deque()
        self.taken = self._left = 0  # bytes, and those of them that are not mapped yet
        self._is_over = False
        self._thread: threading.Thread | None = None

    def add(self, area: torch.Tensor, touch: Callable[[torch.Tensor], object]) -> None:
        """Add bytes `[size]`. `touch` maps the pages of a part of them."""
        self._areas.append((area, touch))
        self.taken += len(area)
        self._left += len(area)

    @property
    def left(self) -> int:
        """Bytes that are not mapped yet."""
        return self._left + (self._after.left if self._after is not None else 0)

    def start(self) -> None:
        """Start the thread. Call once."""
        if self._after is not None:
            self._after.start()
        if self._areas:
            self._thread = threading.Thread(target=self._run, name="lazy-pages", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait until everything is mapped, if started."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Stop early and wait for the thread. The rest is mapped on first use."""
        self._is_over = True
        self.finish()
        self._left = 0

    def _run(self) -> None:
        if self._after is not None:
            self._after.finish()
        while self._areas:
            area, touch = self._areas.popleft()  # memory that is freed meanwhile must not stay referenced here
            for start in range(0, len(area), _STRETCH):
                if self._is_over:
                    return
                some = area[start : start + _STRETCH]
                touch(some)
                self._left -= len(some)


_claims: LazyPages | None = None  # of the current block


@contextmanager
def claiming(after: LazyPages | None = None) -> Iterator[LazyPages]:
    """Allocations of this thread in the block may be unpopulated at its end. `LazyPages.start` populates them, behind
    the pages of `after`."""
    global _claims
    before, _claims = _claims, LazyPages(after)
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
    if _claims is not None and populate(whole[: mmap.PAGESIZE]):
        _claims.add(whole, populate)  # pages that fail are populated by the first write
    else:
        whole[:: mmap.PAGESIZE].zero_()
    return whole.view(dtype).view(size)


def populate(stretch: torch.Tensor, advice: int = _MADV_POPULATE_WRITE) -> bool:
    """Populate the pages of `stretch` (page-aligned) without changing their content. False if the kernel does not
    support it; pages are then mapped on first use. Calls libc directly, because `mmap.madvise` holds the GIL."""
    address, size = ctypes.c_void_p(stretch.data_ptr()), ctypes.c_size_t(stretch.nbytes)
    return bool(_libc.madvise(address, size, ctypes.c_int(advice)) == 0)

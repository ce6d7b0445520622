"""Main memory that this process is about to take, announced to the router before it is taken."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Growth:
    """The announced bytes. A pulse is composed and sent under `lock`: one that was composed before an announcement and
    sent after it would revoke it.
    """

    def __init__(self, announce: Callable[[], None] = lambda: None):
        """`announce`: send a `MemoryNeed`, which contains `bytes`."""
        self.lock = threading.Lock()
        self.step_bytes = 0  # those of the steps until the next pulse, which sets it to 0
        self._block_bytes = 0
        self._announce = announce

    @property
    def bytes(self) -> int:
        return self._block_bytes + self.step_bytes

    def announce_steps(self, size: int) -> None:
        """Announce that the steps until the next pulse may take `size` bytes. Without effect if they are announced."""
        if self.step_bytes or not size:
            return
        with self.lock:
            self.step_bytes = size
            self._announce()

    @contextmanager
    def announced(self, size: int) -> Iterator[None]:
        """Announce that the block may take `size` bytes. From any thread. The next pulse after the block revokes it and
        has the bytes that were taken."""
        with self.lock:
            self._block_bytes += size
            self._announce()
        try:
            yield
        finally:
            with self.lock:
                self._block_bytes -= size

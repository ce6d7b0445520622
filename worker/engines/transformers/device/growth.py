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
        self.step_bytes = 0  # those of the steps until the next pulse
        self.running_bytes = 0  # of main memory that running requests may take, announced or not
        self._request_bytes = 0  # those of requests until the next pulse
        self._block_bytes = 0
        self._announce = announce

    @property
    def bytes(self) -> int:
        return self._block_bytes + self.step_bytes + self._request_bytes

    def settle(self) -> None:
        """Revoke what the pulse that is composed now contains. No step runs, and running requests may take more."""
        self.step_bytes = 0
        self._request_bytes = self.running_bytes if self._request_bytes else 0

    def announce_steps(self, size: int) -> None:
        """Announce that the steps until the next pulse may take `size` bytes. Without effect if they are announced."""
        if self.step_bytes or not size:
            return
        with self.lock:
            self.step_bytes = size
            self._announce()

    def announce_requests(self, size: int) -> None:
        """Announce that requests may take `size` bytes until the next pulse, and as much again for further ones, so
        that few requests need an announcement. Without effect if they are announced."""
        if size <= self._request_bytes:
            return
        with self.lock:
            self._request_bytes = 2 * size
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

"""Files of weights in main memory: read ahead of a load, or locked for sleeping models.

A helper process reads the files and locks their pages (mlock), so that the kernel does not evict them when memory is
short. It is a process of its own because locked pages count as memory of the process that locked them, and because
reads block: the router must neither grow nor stall, nor be what the kernel kills when memory runs out.
"""

import asyncio
import contextlib
import json
import resource
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from router.launch.interface import NotLocked

CLOSE_TIMEOUT = 5.0
# Bytes of orders that the process has not read. More of them mean that it waits for a disk that does not answer, or is
# stopped; it is then replaced.
MAX_UNSENT = 1 << 20
_CAP_IPC_LOCK = 14  # linux/capability.h
_PROGRAM = Path(__file__).with_name("programs") / "page_locker.py"


def lockable() -> int | None:
    """Bytes that a process of this user may lock; None: no limit (getrlimit(2), capabilities(7))."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("CapEff:") and int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1:
                return None
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return None if hard == resource.RLIM_INFINITY else hard


class Order:
    """Files that the process was ordered to read or to lock. Implements `LockedFiles`."""

    def __init__(self, process: Process):
        loop = asyncio.get_running_loop()
        self.process = process
        self.size: asyncio.Future[int] = loop.create_future()  # bytes, once all is read or locked
        self._lost: asyncio.Future[None] = loop.create_future()

    async def lost(self) -> NotLocked:
        await asyncio.shield(self._lost)
        return NotLocked("the process that locked the files has ended")

    def fail(self) -> None:
        """Its process has exited."""
        if not self.size.done():
            self.size.set_exception(NotLocked("the page locker has exited"))
        if not self._lost.done():
            self._lost.set_result(None)


class PageLocker:
    """Controls one page locker process, which is started when it is first needed, and again if it died.

    The process is in the router's session, so it counts as no orphan and asyncio reaps it. It ends with its parent.
    """

    def __init__(self) -> None:
        self._process: Process | None = None
        self._starting = asyncio.Lock()
        self._readers: set[asyncio.Task[None]] = set()  # one for each process that is not reaped yet
        self._last_id = 0
        self._orders: dict[int, Order] = {}

    @property
    def pid(self) -> int | None:
        """The process id of the page locker; None: none runs."""
        return self._process.pid if self._process is not None else None

    async def read(self, files: Sequence[str]) -> int:
        """Read all of `files` into the page cache and return their bytes.

        Raises NotLocked. Cancelling stops it.
        """
        async with self._order(files, lock=False) as order:
            return order.size.result()

    @asynccontextmanager
    async def lock(self, files: Sequence[str]) -> AsyncIterator[Order]:
        """Lock all of `files` in main memory for the length of the block. Entering returns once they are locked.

        Raises NotLocked.
        """
        async with self._order(files, lock=True) as order:
            yield order

    async def close(self) -> None:
        """End all processes that were started. Returns within some seconds."""
        if self._process is not None:
            self._kill(self._process)
        if self._readers:
            # A process that waits for a disk which does not answer exits when that does; nothing waits for it.
            await asyncio.wait(self._readers, timeout=CLOSE_TIMEOUT)

    @asynccontextmanager
    async def _order(self, files: Sequence[str], *, lock: bool) -> AsyncIterator[Order]:
        """Entering returns once the process has done the work."""
        process = await self._started()
        self._last_id += 1
        id = self._last_id
        order = self._orders[id] = Order(process)
        try:
            self._send(process, {"id": id, "files": list(files), "lock": lock})
            await order.size
            yield order
        finally:
            del self._orders[id]
            if self._process is process:
                with contextlib.suppress(NotLocked):
                    self._send(process, {"id": id})

    def _send(self, process: Process, order: dict[str, Any]) -> None:
        """Never waits. Raises NotLocked, after killing the process, if it does not read its orders."""
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        if process.stdin.transport.get_write_buffer_size() > MAX_UNSENT:
            self._kill(process)
            raise NotLocked("the page locker cannot be used: it does not answer")

    async def _started(self) -> Process:
        """The process, which is started if none runs. Raises NotLocked."""
        async with self._starting:
            if self._process is None:
                argv = (sys.executable, "-I", "-S", str(_PROGRAM))
                try:
                    self._process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
                except OSError as error:
                    raise NotLocked(f"the page locker cannot be used: {error.strerror or error}") from None
                reader = asyncio.create_task(self._read_replies(self._process), name="page locker")
                self._readers.add(reader)
                reader.add_done_callback(self._readers.discard)
            return self._process

    def _kill(self, process: Process) -> None:
        """End the process. `_read_replies` fails its orders."""
        if self._process is process:
            self._process = None
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    async def _read_replies(self, process: Process) -> None:
        """Read replies until the process has exited, then fail all orders that depend on it."""
        assert process.stdout is not None
        while (line := await process.stdout.readline()).endswith(b"\n"):
            reply = json.loads(line)
            order = self._orders.get(reply["id"])
            if order is None or order.size.done():
                continue
            if "error" in reply:
                order.size.set_exception(NotLocked(reply["error"]))
            else:
                order.size.set_result(reply["done"])
        if self._process is process:
            self._process = None
        for order in self._orders.values():
            if order.process is process:
                order.fail()
        await process.wait()

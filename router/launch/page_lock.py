"""The page locker: a small process that reads files of weights into main memory and locks their pages.

It reads ahead what a load is about to map, and locks what sleeping models keep, so that the kernel does not evict those
pages. It is a process of its own because locked pages count as memory of the process that locked them, and because
reads block: the router must neither grow nor stall, nor be what the kernel kills when memory runs out.

This file is also the program of that process, run as a script without the rest of the router (`python -I -S`): standard
library only, and few modules of it. Orders and replies are JSON objects, one per line.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

CHUNK = 16 << 20  # bytes that are read, or locked, at a time; orders are read between two chunks
CLOSE_TIMEOUT = 5.0
# Bytes of orders that the process has not read. More of them mean that it waits for a disk that does not answer, or is
# stopped; it is then replaced.
MAX_UNSENT = 1 << 20
OOM_SCORE = "1000"  # the first process for the OOM killer to end: all that it holds can be read again
_CAP_IPC_LOCK = 14  # linux/capability.h
_PR_SET_PDEATHSIG = 1
_PROT_READ, _MAP_SHARED = 1, 1


def lockable() -> int | None:
    """Bytes that a process of this user may lock; None: no limit (getrlimit(2), capabilities(7))."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("CapEff:") and int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1:
                return None
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return None if hard == resource.RLIM_INFINITY else hard


# The program


class _File:
    """One file, mapped."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self.descriptor).st_size
        # For files of other users the kernel reports all pages as resident (mincore(2)).
        self._residency_is_known = os.geteuid() in (0, os.fstat(self.descriptor).st_uid) or os.access(path, os.W_OK)
        self.base = None
        if self.size:
            self.base = _libc.mmap(None, self.size, _PROT_READ, _MAP_SHARED, self.descriptor, 0)
            if self.base == ctypes.c_void_p(-1).value:
                os.close(self.descriptor)
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        """Unlock its pages."""
        if self.base is not None:
            _libc.munmap(self.base, self.size)
        os.close(self.descriptor)

    def read(self, start: int, length: int) -> None:
        """Read these bytes into memory, unless they are there.

        By large sequential reads, which is the fastest way for disks, and not by page faults.
        """
        if self._is_resident(start, length):
            return
        end = start + length
        while start < end and (got := os.preadv(self.descriptor, [memoryview(_buffer)[: end - start]], start)):
            start += got

    def lock(self, start: int, length: int) -> None:
        """Lock these bytes. Raises OSError."""
        if self.base is not None and _libc.mlock(self.base + start, length) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _is_resident(self, start: int, length: int) -> bool:
        if self.base is None or not self._residency_is_known:
            return False
        pages = -(-length // resource.getpagesize())
        seen = ctypes.create_string_buffer(pages)
        found = _libc.mincore(self.base + start, length, seen) == 0
        return found and all(byte & 1 for byte in seen.raw[:pages])


@dataclass
class _Job:
    """An order to have files in memory."""

    id: int
    locks: bool
    paths: list[str]
    files: list[_File] = field(default_factory=list)
    done: int = 0

    def steps(self) -> Iterator[None]:
        """Do the work, one chunk for each `next`. Raises OSError."""
        for path in self.paths:
            file = _File(path)
            self.files.append(file)
            for start in range(0, file.size, CHUNK):
                length = min(CHUNK, file.size - start)
                file.read(start, length)
                if self.locks:
                    file.lock(start, length)
                self.done += length
                yield
            if not self.locks:
                self.files.pop().close()

    def close(self) -> None:
        for file in self.files:
            file.close()
        self.files.clear()


class _Program:
    """The work of the process: orders in, chunks, replies out."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._steps: deque[tuple[_Job, Iterator[None]]] = deque()
        self._rest = b""

    def run(self) -> None:
        """Return at the end of stdin, when the router has exited."""
        while True:
            ready, _, _ = select.select([0], [], [], 0 if self._steps else None)
            if ready and not self._read_orders():
                return
            if self._steps:
                self._step()

    def _read_orders(self) -> bool:
        """Returns False at the end of stdin."""
        data = os.read(0, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            id = order["id"]
            if "files" in order:
                job = self._jobs[id] = _Job(id, order["lock"], order["files"])
                # A load waits for files that are only read, so they go first.
                (self._steps.append if job.locks else self._steps.appendleft)((job, job.steps()))
            elif id in self._jobs:
                dropped = self._jobs.pop(id)
                self._steps = deque((job, steps) for job, steps in self._steps if job is not dropped)
                dropped.close()
        return bool(data)

    def _step(self) -> None:
        job, steps = self._steps[0]
        try:
            next(steps)
            return
        except StopIteration:
            reply: dict[str, Any] = {"id": job.id, "done": job.done}
        except OSError as error:
            job.close()
            reply = {"id": job.id, "error": error.strerror or str(error)}
        self._steps.popleft()
        if not job.locks:
            del self._jobs[job.id]
        os.write(1, json.dumps(reply).encode() + b"\n")


def _main() -> None:
    global _libc, _buffer
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    for name in ("munmap", "mlock"):
        getattr(_libc, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    _buffer = bytearray(CHUNK)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(OOM_SCORE)
    _Program().run()


_libc: Any = None
_buffer = bytearray()


# The router's end


class PageLockFailed(Exception):
    """Files could not be read into memory or locked; the message has the reason."""


class PageLocker:
    """Controls one page locker process, which is started when it is first needed, and again if it died."""

    def __init__(self, on_start: Callable[[int], None], on_reaped: Callable[[int], None]):
        """`on_start`: called with the id of each process that is started, `on_reaped` with that of each that is
        gone.
        """
        self._on_start = on_start
        self._on_reaped = on_reaped
        self._process: subprocess.Popen[bytes] | None = None
        self._last_id = 0
        self._replies: dict[int, asyncio.Future[int]] = {}
        self._lost: dict[int, asyncio.Future[None]] = {}  # for each lock: done once the files are no longer locked
        self._rest = b""
        # Processes that were killed and are not reaped yet, with their pidfds. One that waits for a disk which does not
        # answer exits when that does; nothing waits for it.
        self._dying: dict[subprocess.Popen[bytes], int] = {}
        # Bytes of orders for which its pipe had no room. It reads orders between two chunks; the router never blocks.
        self._unsent = bytearray()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def read(self, files: Sequence[str]) -> int:
        """Read all of `files` into the page cache and return their bytes.

        Raises PageLockFailed. Cancelling stops it.
        """
        id = self._order(files, lock=False)
        try:
            return await self._replies[id]
        finally:
            if not self._replies.pop(id).done():
                self._drop(id)

    @contextlib.asynccontextmanager
    async def lock(self, files: Sequence[str]) -> AsyncIterator["asyncio.Future[None]"]:
        """Lock all of `files` in main memory for the length of the block.

        Entering returns once they are locked; raises PageLockFailed. The future is done if they are no longer locked,
        because the process has died.
        """
        id = self._order(files, lock=True)
        lost = self._lost[id] = asyncio.get_running_loop().create_future()
        try:
            await self._replies[id]
            yield lost
        finally:
            del self._lost[id], self._replies[id]
            self._drop(id)

    def close(self) -> None:
        """End all processes that were started. Returns within some seconds."""
        if self._process is not None:
            self._discard()
        for process in tuple(self._dying):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_TIMEOUT)
            self._reap(process)

    def _order(self, files: Sequence[str], *, lock: bool) -> int:
        self._last_id += 1
        self._replies[self._last_id] = asyncio.get_running_loop().create_future()
        try:
            if self._process is None:
                self._start()
            self._send({"id": self._last_id, "files": list(files), "lock": lock})
        except OSError as error:
            del self._replies[self._last_id]
            raise PageLockFailed(f"the page locker cannot be used: {error.strerror or error}") from None
        return self._last_id

    def _drop(self, id: int) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._send({"id": id})

    def _send(self, order: dict[str, Any]) -> None:
        """Raises OSError; TimeoutError, after killing the process, if it does not read its orders."""
        self._unsent += json.dumps(order).encode() + b"\n"
        self._write()
        if len(self._unsent) > MAX_UNSENT:
            self._discard()
            raise TimeoutError("it does not answer")

    def _write(self) -> None:
        """Write what the pipe has room for now, and the rest later. Raises OSError."""
        assert self._process is not None
        assert self._process.stdin is not None
        loop, pipe = asyncio.get_running_loop(), self._process.stdin.fileno()
        loop.remove_writer(pipe)
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: os.write(pipe, self._unsent)]
            return
        loop.add_writer(pipe, self._write_on)

    def _write_on(self) -> None:
        try:
            self._write()
        except OSError:  # it has exited; `_read_replies` is about to find that out
            self._unsent.clear()

    def _start(self) -> None:
        """Raises OSError."""
        process = self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={"PATH": os.environ.get("PATH", "")},
            close_fds=True,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        asyncio.get_running_loop().add_reader(process.stdout.fileno(), self._read_replies)
        self._on_start(process.pid)

    def _read_replies(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            data = os.read(self._process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._discard()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            reply = json.loads(line)
            waiting = self._replies.get(reply["id"])
            if waiting is None or waiting.done():
                continue
            if "error" in reply:
                waiting.set_exception(PageLockFailed(reply["error"]))
            else:
                waiting.set_result(reply["done"])

    def _discard(self) -> None:
        """Kill the process, if it has not exited, and fail all orders that depend on it."""
        process, self._process, self._rest = self._process, None, b""
        self._unsent.clear()
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.stdout.fileno())
        loop.remove_writer(process.stdin.fileno())
        self._dying[process] = pidfd = os.pidfd_open(process.pid)
        process.kill()  # reaps it if it has exited, so the pidfd must be opened before: the id may be reused after this
        process.stdin.close()
        process.stdout.close()
        loop.add_reader(pidfd, self._reap, process)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(PageLockFailed("the page locker has exited"))
                reply.exception()  # mark it as retrieved, as its caller may have been cancelled
        for lost in self._lost.values():
            if not lost.done():
                lost.set_result(None)

    def _reap(self, process: "subprocess.Popen[bytes]") -> None:
        pidfd = self._dying.pop(process)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        process.poll()
        self._on_reaped(process.pid)


if __name__ == "__main__":
    _main()

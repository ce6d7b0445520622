"""The page locker's program: reads files into main memory and locks their pages. See `router.launch.page_lock`.

Orders on stdin and replies on stdout are JSON objects, one per line: `{"id": 1, "files": [...], "lock": true}` is
answered by `{"id": 1, "done": BYTES}` or `{"id": 1, "error": "..."}`. `{"id": 1}` ends the order and unlocks its files.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CHUNK = 16 << 20  # bytes that are read, or locked, at a time; orders are read between two chunks
OOM_SCORE = "1000"  # the first process for the OOM killer to end: all that it holds can be read again
_PR_SET_PDEATHSIG = 1
_PROT_READ, _MAP_SHARED = 1, 1

_buffer = bytearray(CHUNK)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


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
        self._incomplete = b""

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
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
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


if __name__ == "__main__":
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write(OOM_SCORE)
    _Program().run()

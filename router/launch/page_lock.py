"""The keeper: a small process that has files of weights in main memory before a worker maps them, or after one did.

It reads ahead what somebody waits for, and holds what is to stay: reads it and locks its pages, so that the kernel
takes them from nobody else. It is a process of its own since locked pages count as those of who locked them, and since
reads block: the router must neither grow nor stall, and whoever the kernel kills for want of memory is not the router.

Law: standard library only, and little of it: this file is also the keeper's program, run without anything of ours.
Orders and answers are JSON objects, one a line.
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

CHUNK = 16 << 20
"""Bytes that are read, or locked, at a time; orders are heard in between."""
CLOSE_TIMEOUT = 5.0
MOST_UNHEARD = 1 << 20
"""Bytes of orders that a keeper has not heard: one that has so many waits for a disk that does not answer, or was
stopped, and is replaced."""
OOM_SCORE = "1000"
"""Whatever it holds can be read again."""
_CAP_IPC_LOCK = 14
"""linux/capability.h."""
_PR_SET_PDEATHSIG = 1
_PROT_READ, _MAP_SHARED = 1, 1


def lockable() -> int | None:
    """Bytes that a process of ours may lock; None: as many as there are (getrlimit(2), capabilities(7))."""
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
        # of files that are not ours the kernel does not say what is in memory: that all is, it answers (mincore(2))
        self._tells = os.geteuid() in (0, os.fstat(self.descriptor).st_uid) or os.access(path, os.W_OK)
        self.base = None
        if self.size:
            self.base = _libc.mmap(None, self.size, _PROT_READ, _MAP_SHARED, self.descriptor, 0)
            if self.base == ctypes.c_void_p(-1).value:
                os.close(self.descriptor)
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        """Its pages may go again."""
        if self.base is not None:
            _libc.munmap(self.base, self.size)
        os.close(self.descriptor)

    def read(self, start: int, length: int) -> None:
        """Have these bytes in memory: by large sequential reads, which is how disks are fast, unless they are there."""
        if self._is_resident(start, length):
            return
        end = start + length
        while start < end and (got := os.preadv(self.descriptor, [memoryview(_buffer)[: end - start]], start)):
            start += got

    def lock(self, start: int, length: int) -> None:
        """Raises OSError."""
        if self.base is not None and _libc.mlock(self.base + start, length) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _is_resident(self, start: int, length: int) -> bool:
        if self.base is None or not self._tells:
            return False
        pages = -(-length // resource.getpagesize())
        seen = ctypes.create_string_buffer(pages)
        found = _libc.mincore(self.base + start, length, seen) == 0
        return found and all(byte & 1 for byte in seen.raw[:pages])


@dataclass
class _Job:
    """Files that are to be in memory."""

    id: int
    locks: bool
    paths: list[str]
    files: list[_File] = field(default_factory=list)
    done: int = 0

    def steps(self) -> Iterator[None]:
        """One for each chunk. Raises OSError."""
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
    """The keeper's own work."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._steps: deque[tuple[_Job, Iterator[None]]] = deque()
        self._rest = b""

    def run(self) -> None:
        """Returns at the end of stdin."""
        while True:
            ready, _, _ = select.select([0], [], [], 0 if self._steps else None)
            if ready and not self._hear():
                return
            if self._steps:
                self._step()

    def _hear(self) -> bool:
        data = os.read(0, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            id = order["id"]
            if "files" in order:
                job = self._jobs[id] = _Job(id, order["lock"], order["files"])
                # somebody waits for what is only read
                (self._steps.append if job.locks else self._steps.appendleft)((job, job.steps()))
            elif id in self._jobs:
                over = self._jobs.pop(id)
                self._steps = deque((each, steps) for each, steps in self._steps if each is not over)
                over.close()
        return bool(data)

    def _step(self) -> None:
        job, steps = self._steps[0]
        try:
            next(steps)
            return
        except StopIteration:
            answer: dict[str, Any] = {"id": job.id, "done": job.done}
        except OSError as error:
            job.close()
            answer = {"id": job.id, "error": error.strerror or str(error)}
        self._steps.popleft()
        if not job.locks:
            del self._jobs[job.id]
        os.write(1, json.dumps(answer).encode() + b"\n")


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


# Our end


class KeeperFailed(Exception):
    """Files could not be had in memory: the message says why."""


class Keeper:
    """Our end: one process, started when it is first needed, and again if it died."""

    def __init__(self, born: Callable[[int], None], gone: Callable[[int], None]):
        """`born` is told the number of each process that is started, `gone` of each that was reaped."""
        self._born = born
        self._gone = gone
        self._process: subprocess.Popen[bytes] | None = None
        self._ids = 0
        self._answers: dict[int, asyncio.Future[int]] = {}
        self._lost: dict[int, asyncio.Future[None]] = {}
        """Of what is held: done once it is no longer."""
        self._rest = b""
        self._dying: dict[subprocess.Popen[bytes], int] = {}
        """Those that were killed and are not reaped yet, and what is readable once they may be (pidfd_open(2)): one
        that waits for a disk which does not answer ends when that does, and nobody waits for it."""
        self._untold = bytearray()
        """Of orders that its pipe had no room for: it hears them between two chunks, and we never wait for it."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def read(self, files: Sequence[str]) -> int:
        """Returns once all bytes of `files` have been read into the page cache: how many. Raises KeeperFailed.

        Cancelling stops it.
        """
        id = self._order(files, lock=False)
        try:
            return await self._answers[id]
        finally:
            if not self._answers.pop(id).done():
                self._drop(id)

    @contextlib.asynccontextmanager
    async def hold(self, files: Sequence[str]) -> AsyncIterator["asyncio.Future[None]"]:
        """All bytes of `files` in main memory for the length of the block. Entering returns once they are; raises
        KeeperFailed. The future is done if they are held no longer, because the keeper has died."""
        id = self._order(files, lock=True)
        lost = self._lost[id] = asyncio.get_running_loop().create_future()
        try:
            await self._answers[id]
            yield lost
        finally:
            del self._lost[id], self._answers[id]
            self._drop(id)

    def close(self) -> None:
        """Returns once all that were started have ended; at most some seconds."""
        if self._process is not None:
            self._bury()
        for process in tuple(self._dying):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_TIMEOUT)
            self._reap(process)

    def _order(self, files: Sequence[str], *, lock: bool) -> int:
        self._ids += 1
        self._answers[self._ids] = asyncio.get_running_loop().create_future()
        try:
            if self._process is None:
                self._start()
            self._tell({"id": self._ids, "files": list(files), "lock": lock})
        except OSError as error:
            del self._answers[self._ids]
            raise KeeperFailed(f"the keeper cannot be told: {error.strerror or error}") from None
        return self._ids

    def _drop(self, id: int) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._tell({"id": id})

    def _tell(self, order: dict[str, Any]) -> None:
        """Raises OSError."""
        self._untold += json.dumps(order).encode() + b"\n"
        self._write()
        if len(self._untold) > MOST_UNHEARD:
            self._bury()
            raise TimeoutError("it does not answer")

    def _write(self) -> None:
        """As much as there is room for; the rest once there is. Raises OSError."""
        assert self._process is not None
        assert self._process.stdin is not None
        loop, pipe = asyncio.get_running_loop(), self._process.stdin.fileno()
        loop.remove_writer(pipe)
        with contextlib.suppress(BlockingIOError):
            while self._untold:
                del self._untold[: os.write(pipe, self._untold)]
            return
        loop.add_writer(pipe, self._write_on)

    def _write_on(self) -> None:
        try:
            self._write()
        except OSError:  # it has ended, and is about to be buried
            self._untold.clear()

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
        asyncio.get_running_loop().add_reader(process.stdout.fileno(), self._hear)
        self._born(process.pid)

    def _hear(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            data = os.read(self._process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._bury()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            answer = self._answers.get(said["id"])
            if answer is None or answer.done():
                continue
            if "error" in said:
                answer.set_exception(KeeperFailed(said["error"]))
            else:
                answer.set_result(said["done"])

    def _bury(self) -> None:
        """It has ended, or is to end: whoever counted on it hears so."""
        process, self._process, self._rest = self._process, None, b""
        self._untold.clear()
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.stdout.fileno())
        loop.remove_writer(process.stdin.fileno())
        self._dying[process] = watch = os.pidfd_open(process.pid)
        process.kill()  # which reaps it, if it has ended: its id means nothing after that
        process.stdin.close()
        process.stdout.close()
        loop.add_reader(watch, self._reap, process)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(KeeperFailed("the keeper has ended"))
                answer.exception()  # whoever asked may have left
        for lost in self._lost.values():
            if not lost.done():
                lost.set_result(None)

    def _reap(self, process: "subprocess.Popen[bytes]") -> None:
        watch = self._dying.pop(process)
        asyncio.get_running_loop().remove_reader(watch)
        os.close(watch)
        process.poll()
        self._gone(process.pid)


if __name__ == "__main__":
    _main()

"""Files of weights in main memory: read ahead of a load, or locked for sleeping models.

A helper process reads the files, or locks their pages (mlock), so that the kernel does not evict them when memory is
short. It is a process of its own because locked pages count as memory of the process that locked them, and because
reads block: the router must neither grow nor stall, nor be what the kernel kills when memory runs out. There is one for
each read and each lock, so ending the process is all that it takes to cancel or to unlock.

The process is in the router's session, so it counts as no orphan and asyncio reaps it. It ends with its parent.
"""

import asyncio
import contextlib
import json
import os
import resource
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from router.launch.interface import NotLocked
from router.launch.process import uncancelled

END_TIMEOUT = 5.0  # seconds from SIGKILL. A process that waits for a disk which does not answer exits when that does.
_PIPES = 5  # uvloop opens 9 descriptors for a process
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


class Locked:
    """Files that a process has locked. Implements `LockedFiles`."""

    def __init__(self, process: Process):
        self._process = process

    async def lost(self) -> NotLocked:
        await self._process.wait()
        return NotLocked("the process that locked the files has ended")


async def read(files: Sequence[str]) -> int:
    """Read all of `files` into the page cache and return their bytes. Raises NotLocked. Cancelling stops it."""
    async with _running("read", files) as process:
        return await _bytes_of(process)


@asynccontextmanager
async def lock(files: Sequence[str]) -> AsyncIterator[Locked]:
    """Lock all of `files` in main memory for the length of the block. Entering returns once they are locked.

    Raises NotLocked.
    """
    async with _running("lock", files) as process:
        await _bytes_of(process)
        yield Locked(process)


@asynccontextmanager
async def _running(task: str, files: Sequence[str]) -> AsyncIterator[Process]:
    """A page locker with its task, for the length of the block. Raises NotLocked."""
    argv = (sys.executable, "-I", "-S", str(_PROGRAM), task, *files)
    try:
        _check_descriptors()
        process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    except OSError as error:
        raise NotLocked(f"the page locker cannot be started: {error.strerror or error}") from None
    try:
        yield process
    finally:
        await uncancelled(_end(process))


def _check_descriptors() -> None:
    """Raise OSError unless there are descriptors for a process. If there are not, uvloop reports an error -1 and never
    closes those that it had opened (read in version 0.23)."""
    with contextlib.ExitStack() as opened:
        for _ in range(_PIPES):
            for end in os.pipe():
                opened.callback(os.close, end)


async def _bytes_of(process: Process) -> int:
    """Return the bytes of all files once the process has done its work. Raises NotLocked."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise NotLocked("the page locker has exited")
    reply = json.loads(line)
    if "error" in reply:
        raise NotLocked(reply["error"])
    return int(reply["done"])


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_TIMEOUT):
            await process.wait()

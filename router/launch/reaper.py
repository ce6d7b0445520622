"""Processes that a worker left behind: found, killed and reaped.

When a process dies, its children pass to the nearest ancestor that asked for them. The router asks, so that nobody whom
a worker started can live on unseen, not even in a session of its own, which a signal to the worker's group misses.

Law: nobody is killed but descendants of the worker that ended. A child of ours is one if it lives in the worker's
session, or says so itself (the environment variable `TAG`, the socket on its command line), or cannot be asked: then it
is some worker's fork, as these are not readable. Children that the router started are `known` and never touched, nor
is anybody in the router's session. A zombie tells nothing but its session: it is reaped if it was seen alive, or if no
process started by us could look so.
"""

import asyncio
import contextlib
import ctypes
import os
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from router.launch.environment import TAG

KILL_TIMEOUT = 5.0
"""Seconds from SIGKILL until a process counts as stuck."""

known: set[int] = set()
"""Children of this process that somebody here started and will reap. A process has but one such set."""

_adopted: set[int] = set()
"""Orphans that were seen alive, and told by more than their session."""

# include/uapi/linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


@dataclass(frozen=True, slots=True)
class Orphan:
    """A child of ours that we did not start."""

    pid: int
    session: int
    is_zombie: bool
    tag: str | None
    """The run that it belongs to; empty: none; None: it cannot be read."""

    @property
    def is_adopted(self) -> bool:
        """Whether it came to us from a worker, for all that can be seen. A process that some other part of this
        program started in a session of its own leads that session."""
        return self.session != self.pid or self.pid in _adopted

    def is_of(self, leader: int, tag: str) -> bool:
        """Whether it descends from the worker whose process was `leader` and whose run is `tag`."""
        if self.session == leader:
            return True
        return self.session not in known and self.tag in (tag, None) and self.is_adopted


def adopt(*, whether: bool = True) -> bool:
    """Begin (or end) to adopt orphaned descendants; returns what was the case before. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    for option, value in ((_PR_GET_CHILD_SUBREAPER, ctypes.byref(before)), (_PR_SET_CHILD_SUBREAPER, int(whether))):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")
    return bool(before.value)


async def end(leader: int, tag: str) -> list[int]:
    """Kill and reap what is left of the worker whose process, reaped by now, was `leader`.

    Returns once nobody is left, and who would not die within `KILL_TIMEOUT` (none, as a rule). To kill a process may
    orphan its own children, so it looks again until there are no more.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + KILL_TIMEOUT
    while left := [orphan for orphan in find() if orphan.is_of(leader, tag)]:
        for orphan in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan.pid, signal.SIGKILL)
        await asyncio.gather(*(_ended(orphan.pid, deadline - loop.time()) for orphan in left))
        if reap(orphan.pid for orphan in left) == 0 and loop.time() >= deadline:
            return [orphan.pid for orphan in left]
    return []


def reap(pids: Iterable[int]) -> int:
    """How many of these children of ours have ended and are reaped now; never waits."""
    reaped = 0
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                _adopted.discard(pid)
                reaped += 1
    return reaped


def reap_ended() -> int:
    """Reap every orphan that has ended by itself."""
    return reap(orphan.pid for orphan in find() if orphan.is_zombie and orphan.is_adopted)


def find() -> list[Orphan]:
    """All orphans that are ours at present."""
    own_session = os.getsid(0)
    found = (_look(pid) for pid in _children() if pid not in known)
    return [orphan for orphan in found if orphan is not None and orphan.session != own_session]


def _children() -> Iterator[int]:
    """Our children; from the kernel's list, or where it keeps none, from all processes."""
    tasks = Path("/proc/self/task")
    try:
        for task in tasks.iterdir():
            with contextlib.suppress(ProcessLookupError):
                yield from map(int, (task / "children").read_text().split())
    except FileNotFoundError:
        own = os.getpid()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (stat := _stat(int(entry.name))) and int(stat[1]) == own:
                yield int(entry.name)


def _look(pid: int) -> Orphan | None:
    stat = _stat(pid)
    if stat is None:
        return None
    if stat[0] == "Z":
        return Orphan(pid, int(stat[3]), True, None)
    tag = _tag(pid)
    if tag != "":
        _adopted.add(pid)
    return Orphan(pid, int(stat[3]), False, tag)


def _stat(pid: int) -> list[str] | None:
    """Fields 3 (state), 4 (parent), 5 (group), 6 (session), ... of `/proc/PID/stat`; None if there is no such process.

    Field 2 is the name in brackets, which may hold blanks and brackets itself.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _tag(pid: int) -> str | None:
    """The run that process `pid` belongs to, as its environment says, or its command line where that cannot be read:
    a worker's fork has the worker's own, with the socket that is named after the run."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return _tag_of_socket(pid)
    mark = f"{TAG}=".encode()
    return next((entry[len(mark) :].decode() for entry in environ.split(b"\0") if entry.startswith(mark)), "")


def _tag_of_socket(pid: int) -> str | None:
    try:
        found = re.search(rb"/([0-9a-f]{12})\.sock", Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return None
    return found[1].decode() if found else None


async def _ended(pid: int, seconds: float) -> None:
    """Returns once child `pid` has ended, or after `seconds`."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop.add_reader(watch, ended.set)
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await ended.wait()
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(watch)
        os.close(watch)

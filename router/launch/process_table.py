"""All child processes of one router, and what they leave: nothing outlives the router.

A worker exits with its router by itself, but its own children do not. After a crash of the router, the guard kills
them: a process that gets the number of every process group before that group's worker may begin. So there are no
records on disk from which the next router could kill survivors: their process ids might have been reused.

When a process dies, its children pass to the nearest ancestor that is a subreaper (prctl(2)). The router is one, so
that no process of a worker's can live on unseen, not even in a session of its own, which a signal to the worker's group
misses.

Only descendants of the worker that ended are killed. A child of ours counts as one in three cases: it lives in the
worker's session; it names the worker's run, in the environment variable `TAG` or by the socket on its command line; or
it cannot be examined, as only forks of workers cannot. Children that the router itself started (`started_pids`) are
never touched, nor is any process in the router's session. Of a zombie only the session is known. One that leads its
session may have been started by a library in the router, so it is reaped only if it was examined while it lived.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from router.errors import RouterError
from router.launch.process import KILL_TIMEOUT, Child, started_pids
from worker.protocol.memory import SOCKET_PATH_BYTES

log = logging.getLogger("router.launch.process_table")

CLOSE_TIMEOUT = 5.0  # seconds that killed processes get to be reaped before the table is left anyway
_TAG_DIGITS = 12
TAG = "FLEET_WORKER"  # the variable that names the run that a process belongs to; its descendants inherit it
_GUARD_PROGRAM = Path(__file__).with_name("programs") / "guard.py"
_GUARD_TIMEOUT = 1.0

# Orphans that were identified, while they lived, by more than their session.
_adopted: set[int] = set()

# include/uapi/linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


class RunFolderError(RouterError):
    """This router cannot use the folder; the message is for people."""


class ProcessTable:
    """The running child processes."""

    def __init__(self, runtime_dir: Path):
        self.folder = RunFolder(runtime_dir)
        self._children: dict[str, Child] = {}
        self._guard: Guard | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Take the runtime folder and run the guard, for the length of the block. Raises RunFolderError, OSError."""
        with contextlib.ExitStack() as stack:
            self.folder.open()
            stack.callback(self.folder.close)
            stack.callback(adopt_orphans, enabled=adopt_orphans())
            self._guard = Guard()
            stack.callback(self._guard.close)
            yield

    def add(self, tag: str, child: Child, worker: str) -> None:
        """Register a new process. Call it before the process gets its token.

        From then on the guard knows its group. If that fails, this is logged and the process runs on: it also ends by
        itself when the router dies.
        """
        self._children[tag] = child
        assert self._guard is not None, "the table is not open"
        try:
            self._guard.add(child.pid)
        except OSError as error:
            log.warning("%s: cannot register process %d with the guard: %s", worker, child.pid, error)

    async def end(self, tag: str) -> None:
        """Return once the process of that tag, its group and its orphans are gone. Does nothing for an unknown tag.

        Must not be cancelled half-way; callers wrap it in `uncancelled`.
        """
        child = self._children.get(tag)
        if child is None:
            return
        await child.end()
        # Only now: orphans pass to this process when their parent has ended.
        for pid in await end_orphans(child.pid, tag):
            log.error("process %d, left by a worker, is stuck: SIGKILL did not end it", pid)
        del self._children[tag]
        assert self._guard is not None
        try:
            self._guard.remove(child.pid)
            self.folder.socket(tag).unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove what process %d left: %s", child.pid, error)

    def kill(self, except_pid: int = 0) -> None:
        """Send SIGKILL to all groups but that of the process `except_pid`. Tasks that wait in `end` then return."""
        for child in self._all_but(except_pid):
            child.kill()

    async def wait_for_exits(self, except_pid: int = 0) -> None:
        """Return once all processes but `except_pid` are reaped, or after `CLOSE_TIMEOUT`."""
        if children := self._all_but(except_pid):
            await asyncio.wait({child.exited for child in children}, timeout=CLOSE_TIMEOUT)

    def _all_but(self, pid: int) -> Sequence[Child]:
        return [child for child in self._children.values() if child.pid != pid]


class RunFolder:
    """The runtime folder of one router, from `open` to `close`: locked, private, with the sockets of its workers."""

    def __init__(self, path: Path):
        self.path = path.absolute()
        self._lock = -1
        self._salt = secrets.token_hex(8)
        self._tags = 0

    def open(self) -> None:
        """Create and lock the folder, and remove what an earlier router left in it.

        Raises RunFolderError if another router uses it, or if it cannot be used.
        """
        longest = len(os.fsencode(self.path / f"{'0' * _TAG_DIGITS}.sock"))
        if longest > SOCKET_PATH_BYTES:
            raise RunFolderError(
                f"the runtime folder's path is {longest - SOCKET_PATH_BYTES} bytes too long for sockets in it:"
                f" {self.path}; give a shorter --runtime-dir"
            )
        try:
            self._take()
            self.path.chmod(0o700)
            for file in self.path.glob("*.sock"):
                file.unlink(missing_ok=True)
        except OSError as error:
            self.close()
            raise RunFolderError(
                f"cannot use the runtime folder {self.path}: {error.strerror or error}; give another --runtime-dir"
            ) from None

    def close(self) -> None:
        """Give the folder up; its files stay."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def tag(self, model: str, worker: str) -> str:
        """Twelve hex digits for one run of one process. No two runs get the same ones."""
        self._tags += 1
        text = "\0".join((self._salt, model, worker, str(self._tags)))
        return hashlib.sha256(text.encode()).hexdigest()[:_TAG_DIGITS]

    def socket(self, tag: str) -> Path:
        """The path on which the worker of this run listens."""
        return self.path / f"{tag}.sock"

    def restore(self) -> None:
        """Create the folder again if it was deleted, as services that clean /tmp do. If that fails, this is logged."""
        if (self.path / "lock").exists():
            return
        log.warning("the content of the runtime folder %s was deleted; creating it again", self.path)
        self.close()
        try:
            self._take()
        except (OSError, RunFolderError) as error:
            log.warning("cannot use the runtime folder %s: %s", self.path, error)

    def _take(self) -> None:
        """Create the folder if it is missing, and lock it. Raises OSError, RunFolderError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            self.close()
            raise RunFolderError(
                f"another router (process {holder or 'unknown'}) uses the runtime folder {self.path};"
                " stop it, or give this one a --runtime-dir of its own"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)


# Orphans


@dataclass(frozen=True, slots=True)
class Orphan:
    """A child of ours that we did not start."""

    pid: int
    session: int
    is_zombie: bool
    tag: str | None  # the run that it belongs to; empty: none; None: it cannot be read

    @property
    def is_adopted(self) -> bool:
        """True if it came from a worker, as far as can be seen.

        A process that a library in this program started in a session of its own leads that session.
        """
        return self.session != self.pid or self.pid in _adopted

    def is_of(self, leader: int, tag: str) -> bool:
        """True if it descends from the worker whose process was `leader` and whose run is `tag`."""
        if self.session == leader:
            return True
        return self.session not in started_pids and self.tag in (tag, None) and self.is_adopted


def adopt_orphans(*, enabled: bool = True) -> bool:
    """Become a subreaper, or stop being one. Returns the setting before. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    for option, value in ((_PR_GET_CHILD_SUBREAPER, ctypes.byref(before)), (_PR_SET_CHILD_SUBREAPER, int(enabled))):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")
    return bool(before.value)


def process_stat(pid: int) -> list[str] | None:
    """Fields 3 (state), 4 (parent), 5 (group), 6 (session), ... of `/proc/PID/stat` (proc_pid_stat(5)).

    None if there is no such process. Field 2 is the name in parentheses, which may itself contain blanks and
    parentheses.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


async def end_orphans(leader: int, tag: str) -> list[int]:
    """Kill and reap what is left of the worker whose process, reaped by now, was `leader`.

    Returns the processes that did not die within `KILL_TIMEOUT` (usually none). Killing a process may orphan its own
    children, so the search is repeated until it finds nothing.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + KILL_TIMEOUT
    while left := [orphan for orphan in find_orphans() if orphan.is_of(leader, tag)]:
        for orphan in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan.pid, signal.SIGKILL)
        await asyncio.gather(*(_wait_for_exit(orphan.pid, deadline - loop.time()) for orphan in left))
        if reap(orphan.pid for orphan in left) == 0 and loop.time() >= deadline:
            return [orphan.pid for orphan in left]
    return []


def reap(pids: Iterable[int]) -> int:
    """Reap those of these children that have exited, and return their number. Never waits."""
    reaped = 0
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                _adopted.discard(pid)
                reaped += 1
    return reaped


def reap_ended_orphans() -> int:
    """Reap every orphan that has exited by itself, and return their number."""
    return reap(orphan.pid for orphan in find_orphans() if orphan.is_zombie and orphan.is_adopted)


def find_orphans() -> list[Orphan]:
    """All orphans that are children of this process now."""
    own_session = os.getsid(0)
    found = (_examine(pid) for pid in _children() if pid not in started_pids)
    return [orphan for orphan in found if orphan is not None and orphan.session != own_session]


def _children() -> Iterator[int]:
    """Our children, from the kernel's list. A kernel without CONFIG_PROC_CHILDREN has none; then from all processes."""
    tasks = Path("/proc/self/task")
    try:
        for task in tasks.iterdir():
            with contextlib.suppress(ProcessLookupError):
                yield from map(int, (task / "children").read_text().split())
    except FileNotFoundError:
        own = os.getpid()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (fields := process_stat(int(entry.name))) and int(fields[1]) == own:
                yield int(entry.name)


def _examine(pid: int) -> Orphan | None:
    fields = process_stat(pid)
    if fields is None:
        return None
    if fields[0] == "Z":
        return Orphan(pid, int(fields[3]), True, None)
    tag = _tag(pid)
    if tag != "":
        _adopted.add(pid)
    return Orphan(pid, int(fields[3]), False, tag)


def _tag(pid: int) -> str | None:
    """The run that process `pid` belongs to, by its environment, or by its command line if that cannot be read.

    A fork of a worker has the worker's command line, with the socket that is named after the run.
    """
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


async def _wait_for_exit(pid: int, seconds: float) -> None:
    """Return once child `pid` has exited, or after `seconds`."""
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop.add_reader(pidfd, exited.set)
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await exited.wait()
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


class Guard:
    """The guard process. It is replaced if it dies. Signals to the router's group do not reach it."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def add(self, group: int) -> None:
        """Have `group` killed when this process exits. Raises OSError if no guard can be started."""
        self._groups.add(group)
        self._send(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forget `group`, which is gone: its number may be reused. Ignores unknown groups. Raises OSError."""
        if group in self._groups:
            self._groups.remove(group)
            self._send(f"-{group}\n")

    def close(self) -> None:
        """End the guard. Returns once it has killed what is left and is reaped, after a second at most."""
        self._end()
        self._groups.clear()  # a block that is left after this has nothing to remove

    def _end(self) -> None:
        self._orders.close()
        try:
            self._process.wait(_GUARD_TIMEOUT)
        except subprocess.TimeoutExpired:  # it is stopped (SIGSTOP)
            self._process.kill()
            self._process.wait()
        started_pids.discard(self.pid)

    def _send(self, line: str) -> None:
        try:
            is_sent = self._orders.write(line.encode()) is not None
        except (BrokenPipeError, ValueError):  # it died, or the last attempt to replace it failed
            is_sent = False
        # The pipe is full only if the guard has been stopped for thousands of lines. Waiting for it would block the
        # loop.
        if not is_sent:
            self._process.kill()
            self._end()
            self._start()
            self._orders.write("".join(f"+{group}\n" for group in self._groups).encode())

    def _start(self) -> None:
        """Start a guard. Returns once it is ready (about 15 ms). Raises OSError if it cannot be started."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders = self._process.stdin
        os.set_blocking(self._orders.fileno(), False)
        with self._process.stdout as reply:
            if not reply.read(1):
                self._orders.close()
                raise OSError(f"the guard process exited with code {self._process.wait()} at its start")
        started_pids.add(self.pid)

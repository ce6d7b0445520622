"""The connection of a worker process to its router: events on a private stdout, token and orders on stdin, and the end
of the process when the router ends.

Attaching is the first thing that a worker does, before any large import, so that it cannot outlive the router at any
time. Two independent mechanisms end it, because each one has a gap. The kernel's parent-death signal is not sent if the
parent died before it was set; `getppid` is checked for that. A thread that waits for end of file on stdin cannot run
while C code holds the interpreter lock.

Imports only a few small modules of the standard library; everything else is imported at first use.
"""

import ctypes
import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.protocol.events import Event

ORPHANED = 7  # Exit.ORPHANED as a number: importing the enum takes longer than this whole module
MAX_TOKEN_BYTES = 4096
MAX_LINE_BYTES = 1 << 16  # of the line that may follow the token
OOM_SCORE = 500  # of 1000, added to the process's score: the kernel kills a worker before the router

# include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38


@contextmanager
def importing() -> Iterator[None]:
    """Import large libraries in the block, with few collections of garbage and no full ones.

    Imports make a million objects and little garbage, so full collections take a seventh of their time and find
    nothing. Without any collection the process would keep 8 MB more. transformers imports scipy, if it is installed,
    for a loss of object detection: 35 MB and a tenth of the time. It does without.
    """
    before = gc.get_threshold()
    gc.set_threshold(10_000, 10, 1_000)
    hides = "scipy" not in sys.modules
    if hides:
        sys.modules["scipy"] = None  # type: ignore[assignment]  # the import system takes this for a missing module
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if hides:
            del sys.modules["scipy"]


class RouterChannel:
    """The messages between this process and its router. `send` is the only way to reach the router."""

    def __init__(self, events: int, *, token: str = "", supervised: bool = False):
        """`events`: file descriptor for event lines, non-blocking if `supervised`."""
        self.token = token
        self.supervised = supervised
        self._line = b""
        self._has_line = threading.Event()
        self._events = events
        self._lock = threading.Lock()
        self._is_open = True

    def send(self, event: "Event") -> None:
        """Write `event` as one whole line. Thread-safe.

        Returns once the line is in the pipe. While the pipe is full (the router is stopped), events wait. Pulses are
        dropped instead, because waiting would block the step loop. If the pipe has no reader, a supervised process
        exits at once; a process started by hand continues without events.
        """
        from worker.protocol.events import Pulse, encode  # late: see the module's docstring

        may_drop = isinstance(event, Pulse)
        line = encode(event)
        if not self._lock.acquire(blocking=not may_drop):
            return
        try:
            if self._is_open:
                self._write(line, may_drop=may_drop)
        finally:
            self._lock.release()

    def put_line(self, line: bytes) -> None:
        """Store `line`, which the router has sent. Only the first one after the token has a meaning."""
        if not self._has_line.is_set():
            self._line = line
            self._has_line.set()

    def receive_line(self) -> bytes:
        """Wait for the line after the token and return it. Signals are handled meanwhile."""
        self._has_line.wait()
        return self._line

    def _write(self, line: bytes, *, may_drop: bool) -> None:
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._events, rest) :]
            except BlockingIOError:
                if may_drop and len(rest) == len(line):  # never after a partial write: lines stay whole
                    return
                writable = select.poll()
                writable.register(self._events, select.POLLOUT)
                writable.poll()
            except BrokenPipeError:
                if self.supervised:
                    os._exit(ORPHANED)
                self._is_open = False
                return


def attach(*, supervised: bool, parent_pid: int = 0) -> RouterChannel:
    """Open this process's event channel. If `supervised`, tie its lifetime to that of process `parent_pid`.

    Afterwards descriptor 1 is stderr, so that output of libraries is log. If supervised, returns once the token line
    has been read from stdin. Ends the process with exit code 7 if the parent is not `parent_pid`, or if stdin ends, now
    or later.
    """
    events = os.dup(1)
    os.dup2(2, 1)
    if not supervised:
        return RouterChannel(events)
    die_with_parent(parent_pid)
    _restrict()
    # A private copy of stdin: child processes and libraries of this process must not read the router's lines.
    router_input = os.dup(0)
    _detach_stdin()
    token = _read_token(router_input)
    os.set_blocking(events, False)
    channel = RouterChannel(events, token=token, supervised=True)
    threading.Thread(target=_await_end, args=(router_input, channel), name="router input", daemon=True).start()
    return channel


def attach_rank(leader: int) -> None:
    """Prepare a tensor-parallel rank that process `leader` has just forked: it ends with the leader, ignores signals to
    stop, has no stdin and no event channel."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Signals reach the whole process group. The leader finishes running requests and needs its ranks until then.
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(leader)
    _detach_stdin()
    os.dup2(2, 1)
    _restrict()


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG).

    Ends the process with exit code 7 if its parent is not process `parent_pid` (any more).
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(ORPHANED)


def _detach_stdin() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _read_token(router_input: int) -> str:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(router_input, 1)
        if not byte or len(line) > MAX_TOKEN_BYTES:
            os._exit(ORPHANED)
        line += byte
    return line.decode("ascii", errors="replace").strip()


def _await_end(router_input: int, channel: RouterChannel) -> None:
    """Read lines from the router until end of file, then end the process."""
    rest = b""
    while data := os.read(router_input, 4096):
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[:MAX_LINE_BYTES]
        for line in lines:
            channel.put_line(line)
    os._exit(ORPHANED)


def _restrict() -> None:
    """Offer this process to the OOM killer, and forbid new privileges and core dumps."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            score = min(1000, int(file.read()) + OOM_SCORE)
            file.seek(0)
            file.write(str(score))
    except OSError as error:
        # Not fatal: only the kernel's choice of a victim under memory pressure is worse.
        print(f"worker: cannot raise oom_score_adj: {error}", file=sys.stderr)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)  # last: a process that is not dumpable cannot write its own score


def _prctl(option: int, value: int) -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")

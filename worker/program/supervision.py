"""Our end of the contract: private stdout, token, the parent's death.

Taking the leash is the first thing a worker does, before anything heavy is imported, so that no moment of its life
escapes the spawner: whoever dies first, nothing is left behind. Two independent layers see to that, since each has a
hole: the kernel's parent-death signal is silent when the parent died before it was set (hence the look at
`getppid`), and a thread that waits for the end of stdin cannot run while C code holds the interpreter lock.

Law: few and cheap modules of the standard library; whatever needs more is imported when first used.
"""

import ctypes
import os
import select
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.protocol.events import Event

ORPHANED = 7  # Exit.ORPHANED, written out: importing the contract takes longer than everything here
MAX_TOKEN_BYTES = 4096
MAX_WORD_BYTES = 1 << 16
"""Of the line that may follow the token."""
OOM_SCORE = 500  # of 1000; added, so that the kernel takes a worker before the router

# include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38


class Leash:
    """What ties this process to its spawner; `say` is the only way to speak to it."""

    def __init__(self, events: int, *, token: str = "", leashed: bool = False):
        """`events`: file descriptor for event lines, non-blocking if `leashed`."""
        self.token = token
        self.leashed = leashed
        self._told = b""
        self._has_heard = threading.Event()
        self._events = events
        self._lock = threading.Lock()
        self._heard = True

    def say(self, event: "Event") -> None:
        """Write `event` as one whole line; any thread may call.

        Returns once the line is in the pipe. While the pipe is full (the router is stopped) events wait, but for
        pulses: a pulse is dropped rather than hold up the step loop. A spawner that no longer reads is gone: a
        leashed process ends at once; one started by hand goes on in silence.
        """
        from worker.protocol.events import Pulse, encode  # late: see the law above

        may_drop = isinstance(event, Pulse)
        line = encode(event)
        if not self._lock.acquire(blocking=not may_drop):
            return
        try:
            if self._heard:
                self._write(line, may_drop=may_drop)
        finally:
            self._lock.release()

    def hear(self, line: bytes) -> None:
        """The spawner said `line`; only the first one after the token means something."""
        if not self._has_heard.is_set():
            self._told = line
            self._has_heard.set()

    def told(self) -> bytes:
        """What the spawner said after the token; returns once it has. Signals are handled meanwhile."""
        self._has_heard.wait()
        return self._told

    def _write(self, line: bytes, *, may_drop: bool) -> None:
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._events, rest) :]
            except BlockingIOError:
                if may_drop and len(rest) == len(line):
                    return
                room = select.poll()
                room.register(self._events, select.POLLOUT)
                room.poll()
            except BrokenPipeError:
                if self.leashed:
                    os._exit(ORPHANED)
                self._heard = False
                return


def take(*, leashed: bool, spawner: int = 0) -> Leash:
    """Give this process its event channel and, if `leashed`, bind its life to that of process `spawner`.

    From here on descriptor 1 is stderr: whatever a library prints is log. Leashed, the call returns once the token
    line has been read from stdin. Ends the process with exit code 7 if the spawner is not the parent (any more), or
    closes stdin, now or later.
    """
    events = os.dup(1)
    os.dup2(2, 1)
    if not leashed:
        return Leash(events)
    bind(spawner)
    # In this order: a process that is not dumpable cannot write its own score.
    _volunteer_for_the_oom_killer()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)
    # A private copy, so that nothing this process starts or loads can read the line meant for us.
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    token = _read_token(lifeline)
    os.set_blocking(events, False)
    tied = Leash(events, token=token, leashed=True)
    threading.Thread(target=_await_end, args=(lifeline, tied), name="lifeline", daemon=True).start()
    return tied


def follow(leader: int) -> None:
    """Give this process, which `leader` has just forked, to the leader: it lives as long, is asked to stop by nobody
    else, has nothing on stdin and no event channel."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the whole group gets them, and the leader has answers to finish
    bind(leader)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    _volunteer_for_the_oom_killer()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)


def bind(spawner: int) -> None:
    """From here on the kernel kills this process as soon as the thread that started it has ended.

    Ends the process with exit code 7 if its parent is not (any more) process `spawner`.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != spawner:
        os._exit(ORPHANED)


def _read_token(lifeline: int) -> str:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(lifeline, 1)
        if not byte or len(line) > MAX_TOKEN_BYTES:
            os._exit(ORPHANED)
        line += byte
    return line.decode("ascii", errors="replace").strip()


def _await_end(lifeline: int, tied: Leash) -> None:
    """Listen to the router: it says one line more at most; its end is ours."""
    rest = b""
    while data := os.read(lifeline, 4096):
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[:MAX_WORD_BYTES]
        for line in lines:
            tied.hear(line)
    os._exit(ORPHANED)


def _volunteer_for_the_oom_killer() -> None:
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            score = min(1000, int(file.read()) + OOM_SCORE)
            file.seek(0)
            file.write(str(score))
    except OSError as error:
        # Without it only the choice of victim under memory pressure is worse.
        print(f"worker: cannot raise oom_score_adj: {error}", file=sys.stderr)


def _prctl(option: int, value: int) -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")

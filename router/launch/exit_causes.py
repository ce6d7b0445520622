"""Reasons for the loss of a process: its exit code, our verdict on it, a failed start, the kernel's OOM killer."""

import contextlib
import errno
import signal
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from router.launch.environment import Verb
from router.launch.heartbeat import Verdict
from router.launch.interface import Cause, Program, WorkerLost
from worker.protocol.events import PERMANENT_EXITS, Exit

_NOUNS: Mapping[Verb, str] = {
    "download": "download", "convert": "conversion", "estimate": "estimate", "serve": "worker",
}  # fmt: skip
_MEANINGS: Mapping[int, str] = {
    Exit.OK: "although it was not asked to stop",
    Exit.USAGE: "wrong usage",
    Exit.UNUSABLE: "the model cannot be used",
    Exit.DEVICE_MEMORY: "out of device memory",
    Exit.POISONED: "its device failed",
    Exit.HOST_MEMORY: "out of main memory",
    Exit.ORPHANED: "it lost its router",
    Exit.NETWORK: "network trouble",
    Exit.DISK_FULL: "the disk is full",
    Exit.DAMAGED: "damaged content",
}
# errno values of exec(2) that mean a wrong `python` in the preset, and not a lack of resources.
_NOT_A_PROGRAM = frozenset({errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOEXEC, errno.EISDIR})


def lost_by_exit(program: Program, verb: Verb, code: int, last_message: str, *, oom_killed: bool) -> WorkerLost:
    """The error for a process that exited with `code`, after the log line or event `last_message`."""
    memory: Literal["", "device", "host"] = ""
    if code == Exit.DEVICE_MEMORY:
        memory = "device"
    elif code == Exit.HOST_MEMORY or oom_killed:
        memory = "host"
    cause: Cause = "crashed"
    if verb == "download":
        cause = "download_failed"
    elif memory:
        cause = "oom"
    elif code in PERMANENT_EXITS:
        cause = "load_failed"
    message = f"{program.model}: the {_NOUNS[verb]} {describe_exit(code, last_message, oom_killed=oom_killed)}"
    return WorkerLost(message, cause=cause, exit=code, memory=memory)


def lost_by_verdict(program: Program, verb: Verb, verdict: Verdict, last_message: str) -> WorkerLost:
    """The error for a process that was killed because of `verdict`."""
    message = f"{program.model}: the {_NOUNS[verb]} {verdict.reason} and was killed{_last(last_message)}"
    cause: Cause = "download_failed" if verb == "download" else verdict.cause
    return WorkerLost(message, cause=cause)


def lost_at_spawn(program: Program, verb: Verb, executable: str, error: OSError) -> WorkerLost:
    """The error for a process that could not be started."""
    reason = error.strerror or str(error)
    cause: Cause = "download_failed" if verb == "download" else "load_failed"
    if error.errno in _NOT_A_PROGRAM:
        message = f"{program.model}: cannot run {executable} ({reason}); correct `python` in its preset"
        return WorkerLost(message, cause=cause, exit=Exit.USAGE)
    return WorkerLost(f"{program.model}: cannot start a process ({reason})", cause=cause)


def describe_exit(code: int, last_message: str, *, oom_killed: bool) -> str:
    """The exit as a clause for messages. `last_message`, its last message, is the cause unless a signal killed it."""
    if oom_killed:
        return f"was killed by the kernel because main memory ran out (SIGKILL){_last(last_message)}"
    if code < 0:
        return f"was killed by {_signal(-code)}{_last(last_message)}"
    meaning = _MEANINGS.get(code, "")
    return (
        f"ended with exit code {code}"
        + (f" ({meaning})" if meaning else "")
        + (f": {last_message}" if last_message else "")
    )


def _signal(number: int) -> str:
    if number == signal.SIGBUS:
        return "SIGBUS: a file that it had mapped was cut short, or cannot be read from its disk"
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _last(last_message: str) -> str:
    return f"; it last said: {last_message}" if last_message else ""


RECENT = 5.0  # seconds for which an OOM kill explains a SIGKILL; a guess


class OomKills:
    """Samples of the kernel's counter of OOM kills. Times are seconds of a monotonic clock.

    A process that the OOM killer ends cannot report it, and SIGKILL may also come from a person. A recent rise of the
    counter tells the two apart.
    """

    def __init__(self, count: Callable[[], int]):
        """`count`: returns the counter, like `counted`."""
        self._count = count
        self._samples: deque[tuple[float, int]] = deque()

    def sample(self, now: float) -> None:
        """Remember the counter. Call it about once a second."""
        self._samples.append((now, self._count()))
        while len(self._samples) > 1 and self._samples[1][0] <= now - RECENT:
            self._samples.popleft()

    def happened(self, now: float) -> bool:
        """True if the counter rose within RECENT seconds."""
        self.sample(now)
        return self._samples[-1][1] > self._samples[0][1]


def counted(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """OOM kills in our control group, or if it has no counter, in the whole machine; 0 if there is no counter."""
    for file in (*_own_group(proc, cgroup), proc / "vmstat"):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdigit():
                return int(value)
    return 0


def _own_group(proc: Path, cgroup: Path) -> list[Path]:
    """Files of the memory controller, cgroup version 2 and 1. A container may see its own group at the root."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    files: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files += (cgroup / path.strip("/") / "memory.events", cgroup / "memory.events")
        elif "memory" in controllers.split(","):
            root = cgroup / "memory"
            files += (root / path.strip("/") / "memory.oom_control", root / "memory.oom_control")
    return files


__all__ = ["OomKills", "counted", "describe_exit", "lost_at_spawn", "lost_by_exit", "lost_by_verdict"]

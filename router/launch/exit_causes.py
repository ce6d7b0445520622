"""What was lost with a process that ended, and why: by its exit code, our verdict, or how its start failed."""

import contextlib
import errno
import signal
from collections.abc import Mapping
from typing import Literal

from router.launch.environment import Verb
from router.launch.heartbeat import Verdict
from router.launch.interface import Cause, Program, WorkerLost
from worker.protocol.events import PERMANENT_EXITS, Exit

_NOUNS: Mapping[Verb, str] = {
    "download": "download", "convert": "conversion", "estimate": "estimate", "serve": "worker",
}  # fmt: skip
_MEANINGS: Mapping[int, str] = {
    Exit.OK: "although nobody asked it to",
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
_NOT_A_PROGRAM = frozenset({errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOEXEC, errno.EISDIR})


def lost_by_exit(program: Program, verb: Verb, code: int, said: str, *, oom_killed: bool) -> WorkerLost:
    """What the exit code of a process means: what was lost, why, and whether memory ran out."""
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
    message = f"{program.model}: the {_NOUNS[verb]} {how_it_ended(code, said, oom_killed=oom_killed)}"
    return WorkerLost(message, cause=cause, exit=code, memory=memory)


def lost_by_verdict(program: Program, verb: Verb, verdict: Verdict, said: str) -> WorkerLost:
    """What it means that we killed a process."""
    message = f"{program.model}: the {_NOUNS[verb]} {verdict.reason} and was killed{_last(said)}"
    cause: Cause = "download_failed" if verb == "download" else verdict.cause
    return WorkerLost(message, cause=cause)


def lost_at_birth(program: Program, verb: Verb, executable: str, error: OSError) -> WorkerLost:
    """What it means that no process could be started."""
    reason = error.strerror or str(error)
    cause: Cause = "download_failed" if verb == "download" else "load_failed"
    if error.errno in _NOT_A_PROGRAM:
        message = f"{program.model}: cannot run {executable} ({reason}); correct `python` in its preset"
        return WorkerLost(message, cause=cause, exit=Exit.USAGE)
    return WorkerLost(f"{program.model}: cannot start a process ({reason})", cause=cause)


def how_it_ended(code: int, said: str, *, oom_killed: bool) -> str:
    """By its exit code. What it `said` last is why, unless it was killed: then it is only what came before."""
    if oom_killed:
        return f"was killed by the kernel because main memory ran out (SIGKILL){_last(said)}"
    if code < 0:
        return f"was killed by {_signal(-code)}{_last(said)}"
    meaning = _MEANINGS.get(code, "")
    return f"ended with exit code {code}" + (f" ({meaning})" if meaning else "") + (f": {said}" if said else "")


def _signal(number: int) -> str:
    if number == signal.SIGBUS:
        return "SIGBUS: a file that it had mapped was cut short, or cannot be read from its disk"
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _last(said: str) -> str:
    return f"; it last said: {said}" if said else ""


__all__ = ["how_it_ended", "lost_at_birth", "lost_by_exit", "lost_by_verdict"]

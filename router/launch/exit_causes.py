"""Reasons for the loss of a process: its exit code, our verdict on it, a failed start."""

import contextlib
import errno
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from router.launch.interface import Cause, Program, Verb, WorkerLost
from router.launch.process import UNKNOWN_EXIT
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
# The remedy where a limit prevents the start of a process, by errno.
_LIMITS = {
    errno.EMFILE: "raise `ulimit -n`, or LimitNOFILE= of a systemd unit",
    errno.EAGAIN: "raise `ulimit -u`, or TasksMax= of a systemd unit",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reason to kill a process; `reason` is the text for people."""

    cause: Literal["load_timeout", "stalled"]
    reason: str


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
    return WorkerLost(message, cause=cause, exit=None if code == UNKNOWN_EXIT else code, memory=memory)


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
    remedy = f"; {_LIMITS[error.errno]}" if error.errno in _LIMITS else ""
    return WorkerLost(f"{program.model}: cannot start a process ({reason}){remedy}", cause=cause)


def describe_exit(code: int, last_message: str, *, oom_killed: bool) -> str:
    """The exit as a clause for messages. `last_message`, its last message, is the cause unless a signal killed it."""
    if oom_killed:
        return f"was killed by the kernel because main memory ran out (SIGKILL){_last(last_message)}"
    if code < 0:
        return f"was killed by {_signal(-code)}{_last(last_message)}"
    meaning = _MEANINGS.get(code, "")
    return (
        f"ended with {'an unknown exit code' if code == UNKNOWN_EXIT else f'exit code {code}'}"
        + (f" ({meaning})" if meaning else "")
        + (f": {last_message}" if last_message else "")
    )


def _signal(number: int) -> str:
    if number == signal.SIGBUS:
        return "SIGBUS: a file that it had mapped was cut short, or cannot be read from its disk"
    if number == signal.SIGKILL:
        return "SIGKILL: another program sent it, or the kernel, because memory ran out (dmesg shows that)"
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _last(last_message: str) -> str:
    return f"; its last line: {last_message}" if last_message else ""

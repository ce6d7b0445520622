"""The guard: a tiny process that outlives the router by a moment and kills the process groups that it leaves behind.

A worker exits with the router by itself, but its own children do not. So the guard gets the number of every process
group before that group's worker may begin, and again after its end. When the pipe closes, because the router has
exited, it kills every group that is left, and exits.

This file is also the guard's program, run as a script without the rest of the router (`python -I -S`): standard library
only, and few modules of it, so that it starts in 15 ms. It does not share a module with the reaper for that reason.
"""

import contextlib
import os
import signal
import subprocess
import sys

_CLOSE_TIMEOUT = 1.0


def run(pipe: int) -> None:
    """The guard's own work: read `+PID` and `-PID`, one per line, until the end of the pipe. Then kill what is left."""
    groups: set[int] = set()
    rest = b""
    while data := os.read(pipe, 4096):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


class Guard:
    """The router's end. The process is replaced if it dies. Signals to the router's group do not reach it."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process = self._start()

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
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:  # it is stopped (SIGSTOP)
            self._process.kill()
            self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            is_sent = self._process.stdin.write(line.encode()) is not None
        except (BrokenPipeError, ValueError):  # it died, or the last attempt to replace it failed
            is_sent = False
        # The pipe is full only if the guard has been stopped for thousands of lines. Waiting for it would block the
        # loop.
        if not is_sent:
            self._process.kill()
            self.close()
            self._process = self._start()
            groups = "".join(f"+{group}\n" for group in self._groups)
            assert self._process.stdin is not None
            self._process.stdin.write(groups.encode())

    def _start(self) -> "subprocess.Popen[bytes]":
        """Start a guard. Returns once it is ready (about 15 ms). Raises OSError if it cannot be started."""
        process = subprocess.Popen(
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
        with process.stdout as reply:
            if not reply.read(1):
                process.stdin.close()
                raise OSError(f"the guard process exited with code {process.wait()} at its start")
        return process


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, b"!")
    os.close(1)
    run(0)

"""The guard: a tiny process that outlives the router by a moment and kills the groups that it leaves behind.

A worker ends with the router by itself; its own children do not, and nobody would be left to kill them. So the guard
learns of every group before that group's worker may begin, and of its end. When the pipe closes, because the router is
gone or done, it kills every group that it still knows, and exits.

Law: standard library only, and little of it: this file is also the guard's program, run without anything of ours.
"""

import contextlib
import os
import signal
import subprocess
import sys

_CLOSE_TIMEOUT = 1.0


def watch(pipe: int) -> None:
    """The guard's own work: `+PID` and `-PID`, one a line, until the end of the file."""
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
    """Our end. It is replaced if it dies; it does not die of what a terminal or `kill` of our group sends."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def add(self, group: int) -> None:
        """From now on `group` dies with us. Returns once the guard has been told; raises OSError if there is none."""
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """`group` is gone; its number may become somebody else's. Unknown groups are allowed. Raises OSError."""
        if group in self._groups:
            self._groups.remove(group)
            self._tell(f"-{group}\n")

    def close(self) -> None:
        """Returns once the guard has killed what is left and is reaped; waits a second at most."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:  # somebody stopped it
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            is_told = self._process.stdin.write(line.encode()) is not None
        except (BrokenPipeError, ValueError):  # it died; or it had, and no new one could be started then
            is_told = False
        if not is_told:  # or it was stopped thousands of lines ago, and whoever waited for it would stand still, too
            self._process.kill()
            self.close()
            self._process = self._start()
            everyone = "".join(f"+{group}\n" for group in self._groups)
            assert self._process.stdin is not None
            self._process.stdin.write(everyone.encode())

    def _start(self) -> "subprocess.Popen[bytes]":
        """Returns once the guard is up (about 15 ms). Raises OSError if it cannot be started."""
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
        with process.stdout as answer:
            if not answer.read(1):
                process.stdin.close()
                raise OSError(f"the guard process ended with exit code {process.wait()} at its start")
        return process


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, b"!")
    os.close(1)
    watch(0)

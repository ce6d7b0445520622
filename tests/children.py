"""Real child processes under a deadline: lines and events as they come, exit codes, what a process group leaves behind.

Waiting is for facts (a line, an end of file, an exit), never for time; the deadline only ends a broken test.
"""

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from router.launch.process import decode_event
from worker.protocol.events import Event

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 180.0
"""Seconds; far above what anything here takes on a busy machine."""
TOKEN = "a-token-of-this-test"

AnyEvent = TypeVar("AnyEvent", bound=Event)


def python(*words: str) -> list[str]:
    """argv of this interpreter, as a worker is started: nothing of the current directory is importable."""
    return [sys.executable, "-P", *words]


def environment(**extra: str) -> dict[str, str]:
    """This checkout importable, one thread, warnings as usual; nothing of the caller's secrets or proxies."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


class Child:
    """One child in a session of its own; leaving the block kills what is left of it and reaps it."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        pass_fds: Sequence[int] = (),
    ):
        """`stdin`: written at once, and the pipe stays open until `close_stdin`; None: nothing to read at all."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(environment() if env is None else env),
            start_new_session=True,
            pass_fds=pass_fds,
        )
        self.pid = self._process.pid
        if stdin is not None and self._process.stdin is not None:
            self._process.stdin.write(stdin)
            self._process.stdin.flush()
        self._buffer = b""
        self._ended = False

    @property
    def log(self) -> str:
        """All of stderr so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def line(self, timeout: float = DEADLINE) -> str | None:
        """The next line of stdout; None at its end. Raises TimeoutError."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer and not self._ended:
            _readable(self._process.stdout.fileno(), deadline, f"no line on stdout; stderr:\n{self.log}")
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            self._ended = not more
            self._buffer += more
        line, separator, self._buffer = self._buffer.partition(b"\n")
        return line.decode() if line or separator else None

    def event(self, kind: type[AnyEvent], timeout: float = DEADLINE) -> AnyEvent:
        """The next event of `kind`; others are passed over. Raises AssertionError if stdout ends before."""
        deadline = time.monotonic() + timeout
        while (line := self.line(deadline - time.monotonic())) is not None:
            event = decode_event(line.encode())
            if isinstance(event, kind):
                return event
        raise AssertionError(f"stdout ended without {kind.__name__}; stderr:\n{self.log}")

    def events(self, timeout: float = DEADLINE) -> list[Event]:
        """All further events, up to the end of stdout."""
        deadline = time.monotonic() + timeout
        found = []
        while (line := self.line(deadline - time.monotonic())) is not None:
            event = decode_event(line.encode())
            assert event is not None, f"not an event: {line!r}"
            found.append(event)
        return found

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def send(self, data: bytes) -> None:
        """Say something more on its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def close_stdin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close_stdout(self) -> None:
        """Read no more; the child's next line breaks its pipe."""
        assert self._process.stdout is not None
        self._process.stdout.close()

    def exit(self, timeout: float = DEADLINE) -> int:
        """The exit code, negative for a signal; returns once the child is reaped."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still alive after {timeout:.0f} s; stderr:\n{self.log}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()


def memory(pid: int, field: str) -> int:
    """Bytes of a field of /proc/PID/status."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def await_end(pid: int, timeout: float = DEADLINE) -> None:
    """Returns once process `pid`, no child of ours, has ended. Raises TimeoutError."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        _readable(watch, time.monotonic() + timeout, f"process {pid} is still alive after {timeout:.1f} s")
    finally:
        os.close(watch)


def _readable(descriptor: int, deadline: float, message: str) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError(message)

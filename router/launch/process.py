"""One child process: start by exec, pipes, events and log lines, exit, stopping it.

Processes are spawned from the thread that runs the event loop, which must be the program's main thread: the kernel ends
a worker with the *thread* that started it (PR_SET_PDEATHSIG, prctl(2)).

A child is reaped in one place, `Child._on_exit`. Its whole process group is killed first, while the leader is still a
zombie, so that its number cannot belong to another process. The parent reaps it: this process or a fork server. Pipes
are read until the end, so that a child never blocks on writing.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from math import inf
from typing import Any, TypeVar

import msgspec

from worker.protocol.events import EVENTS, MAX_EVENT_BYTES, Event, Failed, RequestEnded

T = TypeVar("T")

_READ_BYTES = 1 << 16
MAX_LOG_BYTES = 8192  # of one line of stderr; the rest of the line is cut
# Lines of one child that are logged at once, and per second. Further ones are only counted. Both are guesses.
LOG_BURST = 100
LOG_RATE = 20.0
KILL_TIMEOUT = 5.0  # seconds from SIGKILL until a process counts as stuck
# Seconds. A check that is later than this proves no silence: events may not have been read either.
MAX_LATENESS = 1.0
# Seconds for which `request` events are collected while they follow each other closely. Waking for each of them would
# be one more wake-up per request than its response needs. A pipe has room for the events of this time.
EVENT_BATCH_INTERVAL = 0.005
# A pipe holds 64 KiB, so its content arrives with one or two reads. More are needed only while a process keeps writing.
_READS_AT_ONCE = 32

# Children of this process that the router started and reaps elsewhere. Global, as children belong to the process.
started_pids: set[int] = set()


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which runs to its end even if the caller is cancelled; the cancellation is raised
    after it.

    For work that must not stop half-way: reaping a process, returning memory. `asyncio.shield` is not enough, as it
    lets the caller go on at once.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()


@contextlib.asynccontextmanager
async def tasks_of(*work: Awaitable[Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run each of `work` in a task for the length of the block. Tasks that are left at its end are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Lines:
    """Splits bytes as they arrive into lines without their ends.

    A line longer than `limit` is cut to its first `limit` + 1 bytes: the caller can see that it is too long, and memory
    stays bounded.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._incomplete = b""
        self._skips = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes."""
        *whole, rest = (self._incomplete + data).split(b"\n")
        lines = [line[: self._limit + 1] for line in whole[self._skips :]]
        if whole:
            self._skips = False
        if self._skips:
            rest = b""
        elif len(rest) > self._limit:
            lines.append(rest[: self._limit + 1])
            rest, self._skips = b"", True
        self._incomplete = rest
        return lines

    def end(self) -> list[bytes]:
        """The last line, if it has no line end."""
        rest, self._incomplete = self._incomplete, b""
        return [rest] if rest and not self._skips else []


class Log:
    """The stderr of one child, forwarded to the logger `worker.<model>` line by line, with a limit on the rate.

    Control characters are escaped, one line stays one log record, and `secrets` are masked.
    """

    def __init__(self, model: str, name: str, *, secrets: Sequence[str] = ()):
        """`name`: the prefix of each line."""
        self._logger = logging.getLogger(f"worker.{model}")
        self._name = name
        self._secrets = sorted(secrets, key=len, reverse=True)  # longest first: one may contain another
        self.last = ""  # the last line that is not empty
        self._allowed = float(LOG_BURST)
        self._at = 0.0
        self._left_out = 0

    def add(self, line: bytes, now: float) -> None:
        """Log one line of stderr. `now`: seconds of a monotonic clock."""
        text = self.clean(line[:MAX_LOG_BYTES].decode(errors="replace")).strip()
        if text:
            self.last = text
            self._write(logging.INFO, text, now)

    def note(self, text: str, now: float) -> None:
        """Log a remark of the router about this child."""
        self._write(logging.WARNING, self.clean(text), now)

    def _write(self, level: int, text: str, now: float) -> None:
        # A token bucket: LOG_RATE tokens per second, at most LOG_BURST.
        self._allowed = min(LOG_BURST, self._allowed + (now - self._at) * LOG_RATE)
        self._at = now
        if self._allowed < 1.0:
            self._left_out += 1
            return
        self._allowed -= 1.0
        self.flush()
        self._logger.log(level, "%s: %s", self._name, text)

    def flush(self) -> None:
        """Log how many lines were left out since the last one."""
        if self._left_out:
            self._logger.warning("%s: %d lines left out, as they arrived too fast", self._name, self._left_out)
            self._left_out = 0

    def clean(self, text: str) -> str:
        """`text` without secrets and control characters."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return "".join(char if char.isprintable() or char == "\t" else repr(char)[1:-1] for char in text)


class _EventKind(msgspec.Struct):
    """The member of an event that names its kind."""

    event: str


_KIND_DECODER = msgspec.json.Decoder(_EventKind)
_EVENT_DECODERS = {name: msgspec.json.Decoder(kind) for name, kind in EVENTS.items()}


def decode_event(line: bytes) -> Event | None:
    """The event in `line`, with all fields of the right types; None if the line contains none."""
    try:
        event: Event = _EVENT_DECODERS[_KIND_DECODER.decode(line).event].decode(line)
    except (msgspec.DecodeError, KeyError, UnicodeDecodeError, RecursionError):
        return None
    return event


UNKNOWN_EXIT = 256  # in place of an exit code that could not be read; exit codes end with 255
# Reaps the child with a process id, which has exited, and calls the function with its exit code (negative: a signal),
# now or later.
Reap = Callable[[int, Callable[[int], None]], None]


class Pipes:
    """The three pipes of a child, both ends; all close on exec."""

    def __init__(self) -> None:
        """Raises OSError if no descriptors are left."""
        self._open: list[int] = []
        try:
            for _ in range(3):
                self._open += os.pipe()
        except OSError:
            self.close()
            raise
        child_in, self.stdin, self.stdout, child_out, self.stderr, child_err = self._open
        self.child_ends = (child_in, child_out, child_err)  # the child's descriptors 0, 1 and 2

    def close_child_ends(self) -> None:
        """Close the child's ends, once it has its own copies. Otherwise its pipes would never reach their end."""
        self._close(self.child_ends)

    def close(self) -> None:
        self._close(tuple(self._open))

    def _close(self, ends: Sequence[int]) -> None:
        for end in ends:
            if end in self._open:
                self._open.remove(end)
                os.close(end)


class Child:
    """One process in a session and group of its own, from its start until it is reaped."""

    def __init__(self, pid: int, pipes: Pipes, name: str, log: Log, reap: Reap, *, forked: bool = False):
        """Takes over the process `pid`, running or a zombie, and our ends of its pipes.

        Must be called in the loop's thread. Raises OSError if no descriptor is left; then nothing was taken over.
        """
        self.batch_interval = EVENT_BATCH_INTERVAL
        self._pipes = pipes
        self._name = name
        self._log = log
        self._reap = reap
        self._loop = asyncio.get_running_loop()
        self._stdin = pipes.stdin
        self._events, self._lines = pipes.stdout, Lines(MAX_EVENT_BYTES)
        self._stderr, self._text = pipes.stderr, Lines(MAX_LOG_BYTES)
        # The pipes that are open, and the receiver of their bytes.
        self._reads: dict[int, Callable[[bytes], None]] = {
            self._events: self._on_stdout,
            self._stderr: self._on_stderr,
        }
        self.pid = pid
        self.forked = forked  # by the fork server, not executed
        self.exited: asyncio.Future[int] = self._loop.create_future()  # the exit code (negative: a signal), once reaped
        self.on_event: Callable[[Event], None] = lambda event: None
        self.failed: Failed | None = None  # the cause of its exit, if it reported one
        self._has_exited = False  # it is a zombie, or reaped
        self._had_request = False  # the last bytes of stdout contained a `request` event
        self._request_at = -inf  # when such an event last arrived before batching
        self._is_batching = False  # stdout is read once per EVENT_BATCH_INTERVAL instead of whenever it is readable
        self._pidfd = os.pidfd_open(pid)
        started_pids.add(pid)
        self._loop.add_reader(self._pidfd, self._on_exit)
        for pipe in self._reads:
            os.set_blocking(pipe, False)
            self._loop.add_reader(pipe, self._read, pipe, 1)

    @classmethod
    def spawn(
        cls,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        name: str,
        log: Log,
        private: bool,
        pass_fds: Sequence[int] = (),
    ) -> "Child":
        """Start a process by exec.

        `name`: for messages. `private`: only its user may read the files that it creates. `pass_fds`: descriptors that
        it inherits besides its pipes, under the same numbers.

        Raises OSError if there is no such program, or no room for another process.
        """
        pipes = Pipes()
        try:
            stdin, stdout, stderr = pipes.child_ends
            process = subprocess.Popen(
                list(argv),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=dict(env),
                cwd=_folder(),
                close_fds=True,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
                umask=0o077 if private else -1,
            )
        except BaseException:
            pipes.close()
            raise
        pipes.close_child_ends()

        def reap(pid: int, report: Callable[[int], None]) -> None:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            process.returncode = code  # or Popen would wait for it again when it is collected
            report(code)

        try:
            return cls(process.pid, pipes, name, log, reap)
        except OSError:
            process.kill()
            process.wait()
            pipes.close()
            raise

    def send(self, line: bytes) -> None:
        """Write a line to its stdin. Never blocks: few and short lines are sent, and the pipe has room for them."""
        if self.exited.done():  # its pipes are closed, and their numbers may be in use for other files
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stdin, line)

    @property
    def cause(self) -> str:
        """The cause of its exit, as it reported it: its `failed` event, else the last line of its log."""
        return self._log.clean(self.failed.message) if self.failed is not None else self._log.last

    def read(self) -> None:
        """Read what is in its pipes now, instead of when the loop gets to it."""
        for pipe in tuple(self._reads):
            self._read(pipe, _READS_AT_ONCE)

    def kill(self) -> None:
        """Send SIGKILL to its group, if it has not exited."""
        self._signal(signal.SIGKILL)

    async def stop(self, stop_timeout: float) -> None:
        """Send SIGTERM to its group, after `stop_timeout` seconds SIGKILL. Returns once it is reaped. See `end`."""
        self._signal(signal.SIGTERM)
        if not await self._exits_within(stop_timeout):
            self._log.note(f"did not stop within {stop_timeout:g} s of SIGTERM; killed", self._loop.time())
            await self.end()

    async def end(self, kill_timeout: float = KILL_TIMEOUT) -> None:
        """Send SIGKILL to its group. Returns once it is reaped.

        A process that survives SIGKILL (a system call that never returns) is logged as stuck after `kill_timeout`
        seconds and waited for, for as long as it takes: until then its memory is not free. The same holds for one that
        has exited and that its fork server does not reap.
        """
        self.kill()
        if not await self._exits_within(kill_timeout):
            problem = (
                "has ended, but the fork server that forked it has not reaped it within"
                if self._has_exited
                else "is stuck: it did not end within"
            )
            logging.getLogger("router.launch.process").error(
                "%s: process %d %s %g s of SIGKILL; its memory stays reserved",
                self._name,
                self.pid,
                problem,
                kill_timeout,
            )
            await asyncio.wait({self.exited})

    async def _exits_within(self, seconds: float) -> bool:
        await asyncio.wait({self.exited}, timeout=seconds)
        return self.exited.done()

    def _signal(self, number: signal.Signals) -> None:
        if self._has_exited or self.exited.done():
            return  # its number may soon belong to another process
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # forked a moment ago: it does not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _on_exit(self) -> None:
        """The leader is a zombie: kill its group, and have it reaped. Called once, when the pidfd becomes readable."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._has_exited = True
        self._reap(self.pid, self._on_reaped)

    def _on_reaped(self, code: int) -> None:
        """It is gone: read what it wrote last, and close its pipes."""
        started_pids.discard(self.pid)
        self.read()
        for pipe in tuple(self._reads):
            self._close(pipe)
        self._pipes.close()
        self._log.flush()
        self.exited.set_result(code)

    def _read(self, pipe: int, times: int) -> None:
        for _ in range(times):
            try:
                data = os.read(pipe, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._close(pipe)
                return
            self._reads[pipe](data)

    def _read_batch(self) -> None:
        """Read the events since the last batch. Batching ends with one that has no `request` event."""
        if self._events not in self._reads:
            return
        self._had_request = False
        self._read(self._events, 1)
        if self._had_request:
            self._loop.call_later(self.batch_interval, self._read_batch)
        elif self._events in self._reads:
            self._is_batching = False
            self._loop.add_reader(self._events, self._read, self._events, 1)

    def _close(self, pipe: int) -> None:
        """Stop reading `pipe`. Its descriptor stays open until the process is reaped."""
        self._loop.remove_reader(pipe)
        del self._reads[pipe]
        lines = self._lines if pipe == self._events else self._text
        for line in lines.end():
            self._on_line(pipe, line)

    def _on_stdout(self, data: bytes) -> None:
        self._had_request = False
        for line in self._lines.feed(data):
            self._on_line(self._events, line)
        if self._had_request and not self._is_batching:
            # Two such events within EVENT_BATCH_INTERVAL: requests end quickly one after the other, so begin batching.
            before, self._request_at = self._request_at, self._loop.time()
            if self._request_at - before < self.batch_interval:
                self._is_batching = True
                self._loop.remove_reader(self._events)
                self._loop.call_later(self.batch_interval, self._read_batch)

    def _on_stderr(self, data: bytes) -> None:
        for line in self._text.feed(data.replace(b"\r", b"\n")):  # progress bars overwrite their line
            self._on_line(self._stderr, line)

    def _on_line(self, pipe: int, line: bytes) -> None:
        if pipe == self._stderr:
            self._log.add(line, self._loop.time())
            return
        if len(line) > MAX_EVENT_BYTES:
            self._log.note(f"skipped a line on stdout of more than {MAX_EVENT_BYTES} bytes", self._loop.time())
            return
        event = decode_event(line)
        if event is None:
            start = line[:200].decode(errors="replace")
            self._log.note(f"skipped a line on stdout that is no event: {start}", self._loop.time())
            return
        if type(event) is RequestEnded:
            self._had_request = True
        elif isinstance(event, Failed):
            self.failed = event
        self.on_event(event)


def _folder() -> str | None:
    """The current folder of a child: our own (None), to which variables like PYTHONPATH may be relative.

    If that has been deleted, the root: a program with oneMKL does not start in a deleted folder.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None

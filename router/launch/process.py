"""One child: pipes, events, exit, the stop ladder; spawning by exec.

Laws. Spawn from the thread that runs the loop, and let that be the program's main thread: the kernel ends a worker with
the *thread* that started it. A child is reaped in one place, `Child._on_exit`, where its whole group is killed first,
while the leader is still a zombie and its number can belong to nobody else; who reaps it is whoever is its parent, this
process or a nursery. Its pipes are always drained.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import inf
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from router.launch import reaper
from worker.protocol.events import MAX_EVENT_BYTES, Event, Failed, RequestEnded, decode

T = TypeVar("T")

MAX_LOG_BYTES = 8192
"""Of one line of stderr; the rest of it is cut."""
KEPT_LOG_BYTES = 1 << 16
"""Of the end of stderr."""
LOG_BURST = 100
LOG_RATE = 20.0
"""Lines of one child that are logged at once, and per second; others are only counted."""
_READ_BYTES = 1 << 16
ROUND = 0.005
"""Seconds in which ended requests of one worker are heard of together, where one comes behind another: each by itself
would wake this process once more than its answer does. A pipe has room for what a worker says in this time."""
_READS_AT_ONCE = 32
"""A pipe holds 64 KiB, so all that was in it comes with one or two reads; more only if somebody goes on writing."""

_FIELDS: Mapping[type, tuple[tuple[str, frozenset[type], Any], ...]] = {
    kind: tuple(
        (name, frozenset({hint, *get_args(hint)} & {str, int, float, NoneType}), hint)
        for name, hint in get_type_hints(kind).items()
        if get_origin(hint) in (None, UnionType)
    )
    + tuple(
        (name, frozenset(), hint)
        for name, hint in get_type_hints(kind).items()
        if get_origin(hint) not in (None, UnionType)
    )
    for kind in get_args(Event)
}
"""Of each kind of event: name, types that are right at a glance, and the hint, of every field."""


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which runs to its end whatever is cancelled meanwhile; a cancellation is raised after it.

    For what must not stop half-way: reaping a process, giving memory back.
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


class Lines:
    """Bytes as they come, to lines without their ends. A line longer than `limit` comes as its first `limit` + 1
    bytes: longer than any allowed one, and yet bounded."""

    def __init__(self, limit: int):
        self._limit = limit
        self._rest = b""
        self._skips = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [line[: self._limit + 1] for line in whole[self._skips :]]
        if whole:
            self._skips = False
        if self._skips:
            rest = b""
        elif len(rest) > self._limit:
            lines.append(rest[: self._limit + 1])
            rest, self._skips = b"", True
        self._rest = rest
        return lines

    def end(self) -> list[bytes]:
        """What was left without an end, if anything."""
        rest, self._rest = self._rest, b""
        return [rest] if rest and not self._skips else []


class Log:
    """What one child writes for people: handed on to `worker.<model>`, line by line and not too fast; its end is kept.

    Control characters are escaped, one line stays one record, and `secrets` never appear.
    """

    def __init__(self, model: str, name: str, *, secrets: Sequence[str] = ()):
        """`name` stands before each line."""
        self._logger = logging.getLogger(f"worker.{model}")
        self._name = name
        self._secrets = sorted(secrets, key=len, reverse=True)
        self._kept: deque[str] = deque()
        self._kept_bytes = 0
        self._allowed = float(LOG_BURST)
        self._at = 0.0
        self._left_out = 0

    def add(self, line: bytes, now: float) -> None:
        """One line of its stderr. `now`: seconds of a monotonic clock."""
        text = self.clean(line[:MAX_LOG_BYTES].decode(errors="replace")).strip()
        if text:
            self._keep(text)
            self._write(logging.INFO, text, now)

    def note(self, text: str, now: float) -> None:
        """Something that we have to say about it."""
        self._write(logging.WARNING, self.clean(text), now)

    def _write(self, level: int, text: str, now: float) -> None:
        self._allowed = min(LOG_BURST, self._allowed + (now - self._at) * LOG_RATE)
        self._at = now
        if self._allowed < 1.0:
            self._left_out += 1
            return
        self._allowed -= 1.0
        self.flush()
        self._logger.log(level, "%s: %s", self._name, text)

    def flush(self) -> None:
        """Say how many lines were left out since the last one."""
        if self._left_out:
            self._logger.warning("%s: %d lines left out, as they came too fast", self._name, self._left_out)
            self._left_out = 0

    def clean(self, text: str) -> str:
        """`text` without secrets and control characters."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return "".join(char if char.isprintable() or char == "\t" else repr(char)[1:-1] for char in text)

    @property
    def last(self) -> str:
        """The last line; empty if there was none."""
        return self._kept[-1] if self._kept else ""

    @property
    def kept(self) -> str:
        """The last lines."""
        return "\n".join(self._kept)

    def _keep(self, text: str) -> None:
        self._kept.append(text)
        self._kept_bytes += len(text)
        while self._kept_bytes > KEPT_LOG_BYTES:
            self._kept_bytes -= len(self._kept.popleft())


Reap = Callable[[int, Callable[[int], None]], None]
"""Reaps the child of that number, which has ended, and calls what it is given with the exit code (negative: a signal),
now or later."""


class Pipes:
    """The three pipes of a child, both ends; all close on exec."""

    def __init__(self) -> None:
        """Raises OSError if there are no descriptors left."""
        self._open: list[int] = []
        try:
            for _ in range(3):
                self._open += os.pipe()
        except OSError:
            self.close()
            raise
        theirs_in, self.stdin, self.stdout, theirs_out, self.stderr, theirs_err = self._open
        self.theirs = (theirs_in, theirs_out, theirs_err)
        """For the child: its descriptors 0, 1 and 2."""

    def close_theirs(self) -> None:
        """Once the child has its own copies: else nobody would see that it has ended."""
        self._close(self.theirs)

    def close(self) -> None:
        self._close(tuple(self._open))

    def _close(self, ends: Sequence[int]) -> None:
        for end in ends:
            if end in self._open:
                self._open.remove(end)
                os.close(end)


class Child:
    """One process in a session and group of its own, from its birth to its reaping."""

    def __init__(self, pid: int, pipes: Pipes, name: str, log: Log, reap: Reap, *, pause: float = ROUND):
        """Takes process `pid` over, with our ends of its pipes: it is running or a zombie. Must be called in the loop's
        thread. `pause`: seconds, see ROUND. Raises OSError if there is no descriptor left; then nothing was taken
        over."""
        self._pause = pause
        self._pipes = pipes
        self._name = name
        self._log = log
        self._reap = reap
        self._loop = asyncio.get_running_loop()
        self._stdin = pipes.stdin
        self._events, self._lines = pipes.stdout, Lines(MAX_EVENT_BYTES)
        self._stderr, self._text = pipes.stderr, Lines(MAX_LOG_BYTES)
        self._reads: dict[int, Callable[[bytes], None]] = {self._events: self._heard, self._stderr: self._logged}
        self.pid = pid
        self.exited: asyncio.Future[int] = self._loop.create_future()
        """The exit code, negative for a signal, once it is reaped."""
        self.on_event: Callable[[Event], None] = lambda event: None
        self.failed: Failed | None = None
        """The cause, if it gave one."""
        self._has_ended = False
        self._one_ended = False
        """What was heard last had the end of a request in it."""
        self._ended_at = -inf
        """When one was last heard of between rounds."""
        self._has_rounds = False
        """Nobody waits for events: they are asked for each round."""
        self._watch = os.pidfd_open(pid)
        reaper.known.add(pid)
        self._loop.add_reader(self._watch, self._on_exit)
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
        pause: float = ROUND,
    ) -> "Child":
        """A new process of `argv`. `name` is for messages; `private`: only its user may read the files that it makes;
        `pass_fds`: descriptors that it is to have besides its pipes, under the same numbers; `pause`: see ROUND.

        Raises OSError if there is no such program, or no room for another process.
        """
        pipes = Pipes()
        try:
            stdin, stdout, stderr = pipes.theirs
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
        pipes.close_theirs()

        def reap(pid: int, tell: Callable[[int], None]) -> None:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            process.returncode = code  # so that Popen does not wait for it once more
            tell(code)

        try:
            return cls(process.pid, pipes, name, log, reap, pause=pause)
        except OSError:
            process.kill()
            process.wait()
            pipes.close()
            raise

    def send_token(self, token: str) -> None:
        """The first line that it reads; from then on its stdin stands open as long as we live."""
        self.send(token.encode() + b"\n")

    def send(self, line: bytes) -> None:
        """A line for its stdin, which has room for what little is said there."""
        if self.exited.done():  # its pipes are closed, and their numbers may be somebody else's
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stdin, line)

    @property
    def said(self) -> str:
        """The cause of its end, as far as it told: its `failed` event, else the last line of its log."""
        return self._log.clean(self.failed.message) if self.failed is not None else self._log.last

    def read(self) -> None:
        """Read now what waits in its pipes, instead of when the loop comes to it."""
        for pipe in tuple(self._reads):
            self._read(pipe, _READS_AT_ONCE)

    def kill(self) -> None:
        """SIGKILL to its group, if it has not ended."""
        self._signal(signal.SIGKILL)

    async def stop(self, stop_timeout: float) -> None:
        """Returns once it is reaped: SIGTERM to its group, after `stop_timeout` seconds SIGKILL. See `end`."""
        self._signal(signal.SIGTERM)
        if not await self._exits_within(stop_timeout):
            self._log.note(f"did not stop within {stop_timeout:g} s of SIGTERM; killed", self._loop.time())
            await self.end()

    async def end(self, kill_timeout: float = reaper.KILL_TIMEOUT) -> None:
        """Returns once it is reaped, after SIGKILL to its group.

        A process that does not even die of that (a call in the kernel that never returns) is logged as stuck after
        `kill_timeout` seconds and waited for, for as long as it takes: until then its memory is not free. So is one
        that has died, and whose nursery does not reap it.
        """
        self.kill()
        if not await self._exits_within(kill_timeout):
            what = (
                "has ended, but the nursery that forked it has not reaped it within"
                if self._has_ended
                else "is stuck: it did not end within"
            )
            logging.getLogger("router.launch.interface").error(
                "%s: process %d %s %g s of SIGKILL; its memory stays reserved",
                self._name,
                self.pid,
                what,
                kill_timeout,
            )
            await asyncio.wait({self.exited})

    async def _exits_within(self, seconds: float) -> bool:
        await asyncio.wait({self.exited}, timeout=seconds)
        return self.exited.done()

    def _signal(self, number: signal.Signals) -> None:
        if self._has_ended or self.exited.done():
            return  # its number may soon belong to somebody else
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # forked a moment ago, it does not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _on_exit(self) -> None:
        """The leader is a zombie: kill its group, and have it reaped."""
        self._loop.remove_reader(self._watch)
        os.close(self._watch)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._has_ended = True
        self._reap(self.pid, self._reaped)

    def _reaped(self, code: int) -> None:
        """It is gone: hear its last words."""
        reaper.known.discard(self.pid)
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

    def _round(self) -> None:
        """Read what was said since the last one; without any end of a request, events are waited for again."""
        if self._events not in self._reads:
            return
        self._one_ended = False
        self._read(self._events, 1)
        if self._one_ended:
            self._loop.call_later(self._pause, self._round)
        elif self._events in self._reads:
            self._has_rounds = False
            self._loop.add_reader(self._events, self._read, self._events, 1)

    def _close(self, pipe: int) -> None:
        """No more comes from `pipe`; its descriptor stays ours until the end."""
        self._loop.remove_reader(pipe)
        del self._reads[pipe]
        lines = self._lines if pipe == self._events else self._text
        for line in lines.end():
            self._take(pipe, line)

    def _heard(self, data: bytes) -> None:
        self._one_ended = False
        for line in self._lines.feed(data):
            self._take(self._events, line)
        if self._one_ended and not self._has_rounds:
            before, self._ended_at = self._ended_at, self._loop.time()
            if self._ended_at - before < self._pause:
                self._has_rounds = True
                self._loop.remove_reader(self._events)
                self._loop.call_later(self._pause, self._round)

    def _logged(self, data: bytes) -> None:
        for line in self._text.feed(data.replace(b"\r", b"\n")):  # a progress bar draws over itself
            self._take(self._stderr, line)

    def _take(self, pipe: int, line: bytes) -> None:
        if pipe == self._stderr:
            self._log.add(line, self._loop.time())
            return
        if len(line) > MAX_EVENT_BYTES:
            bound = MAX_EVENT_BYTES
            self._log.note(f"skipped a line on stdout of more than {bound} bytes", self._loop.time())
            return
        event = _decode(line)
        if event is None:
            start = line[:200].decode(errors="replace")
            self._log.note(f"skipped a line on stdout that is no event: {start}", self._loop.time())
            return
        if type(event) is RequestEnded:
            self._one_ended = True
        elif isinstance(event, Failed):
            self.failed = event
        self.on_event(event)


_ENDED = b'{"event":"request",'
"""How the event begins that comes with every request, and that is read without a detour."""
_ENDED_DECODER = msgspec.json.Decoder(RequestEnded)


def _folder() -> str | None:
    """Where a child begins: in our own folder, from which variables may name others; in the root where that has been
    deleted, as no program with oneMKL starts in a folder that is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None


def _decode(line: bytes) -> Event | None:
    """The event in `line`, all of whose fields have the types that they should have; None if there is none."""
    if line.startswith(_ENDED):
        try:
            return _ENDED_DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
    event = decode(line)
    return event if event is not None and _is_sound(event) else None


def _is_sound(event: Event) -> bool:
    """Whether every field of a decoded event has the type that it should have."""
    for name, kinds, hint in _FIELDS[type(event)]:
        value = getattr(event, name)
        if type(value) not in kinds and not _has_type(value, hint):
            return False
    return True


def _has_type(value: object, hint: Any) -> bool:
    """For the types that events are made of: int, float, str, lists and dictionaries of them, and alternatives."""
    if hint is float:
        return isinstance(value, int | float)
    if isinstance(hint, type) and not get_args(hint):
        return isinstance(value, hint)
    kind, parts = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(_has_type(value, part) for part in parts)
    if not isinstance(value, kind):
        return False
    if isinstance(value, list):
        return all(_has_type(each, parts[0]) for each in value)
    if isinstance(value, dict):
        return all(_has_type(key, parts[0]) and _has_type(each, parts[1]) for key, each in value.items())
    return True

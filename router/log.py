"""Log lines: one per transition, rendered from the event log. Text and JSON have the same fields.

Handlers run on the event loop, where a write to stderr would block every request while nothing reads it (a stopped
terminal, a pager, a stuck log collector). So records go into a bounded queue, and a thread writes them.
"""

import asyncio
import contextlib
import copy
import functools
import itertools
import json
import logging
import logging.handlers
import os
import queue
import select
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TextIO

from router.events import Event, EventLog
from worker.protocol.memory import MIB

log = logging.getLogger("router.fleet.fleet")

KEPT = 2000  # lines in the ring behind /router/logs
LONGEST = 2000  # characters of a line in the ring
QUEUE_SIZE = 4000  # lines that wait to be written. Further ones are dropped and counted.
GATHER = 0.05  # seconds for which lines below the level WARNING are gathered, to be written together. A guess.
# Seconds at exit to write the lines that wait. A reader that does not read must not keep the router from ending.
EXIT_TIMEOUT = 1.0
GIB = 1 << 30
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127)}


@dataclass(slots=True)
class Line:
    """One log line. Immutable. `id` rises, `time` is in seconds since 1970."""

    id: int
    time: float
    level: str
    logger: str
    message: str

    def is_about(self, model: str) -> bool:
        """True if the line is of this model's worker, or of the router about it."""
        if self.logger == f"worker.{model}":
            return True
        words = f" {self.message}"
        return any(f" {name}" in words for name in (f"{model}#", f"{model}: ", f"model={model} "))


def set_up(level: str, form: str) -> None:
    """Send all log records and Python warnings to stderr, as text or one JSON object per line."""
    handler = LogQueue(sys.stderr.fileno())
    handler.setFormatter(_Json() if form == "json" else _Text())
    # No line shows these fields, and every request makes a record: see "Optimization" in the documentation of logging.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "aiohttp.access", "aiohttp.server", "aiohttp.web", "watchfiles.main"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    warnings.showwarning = _warn


def _warn(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    file: TextIO | None = None, line: str | None = None,
) -> None:  # fmt: skip
    logging.getLogger("router").warning("%s: %s", category.__name__, message)


def follow(events: EventLog) -> None:
    """Render every event that has a log line from now on."""
    events.subscribe(_log_event, unrecorded=False)


def _log_event(event: Event) -> None:
    data = event.data
    match event.kind:
        case "state":
            level = logging.WARNING if "error" in data else logging.INFO
            log.log(level, "%s", state_line(event))
        case "refused":
            many = f"{data['count']} requests" if data["count"] > 1 else "a request"
            log.info("%s: %s refused (%s): %s", event.model, many, data["reason"], data["message"])
        case "back_off":
            log.warning("%s", pause_line(event))
        case "plan" if data["decision"] != "start":
            log.info("%s", plan_line(event))
        case "estimate":
            total = sum(map(sum, (data["weights"], data["context"], data["compute"], data["runtime"])))
            parts = " ".join(f"{name}={size(sum(data[name]))}" for name in ("weights", "context", "compute", "runtime"))
            if (cache := data.get("kv_cache")) and cache["most"] != cache["least"]:
                parts += f" kv_tokens={cache['least']['tokens']}..{cache['most']['tokens']}"
            log.info("%s#%s estimate=%s source=%s %s", event.model, data["worker"], size(total), data["source"], parts)
        case "converted":
            log.log(logging.WARNING if "error" in data else logging.INFO, "%s", converted_line(event))
        case "sleeping_weights":
            why = f" reason={data['reason']}" if "reason" in data else ""
            log.info("%s#%s weights %s %s%s", event.model, data["id"], data["state"], size(data["bytes"]), why)
        case "config_refused":
            log.error("presets not reloaded, the old ones still apply: %s", "; ".join(data["errors"]))
        case "config":
            changes = " ".join(f"{word}={','.join(ids)}" for word, ids in data.items() if ids)
            log.info("presets reloaded: %s", changes or "no model has changed")


def converted_line(event: Event) -> str:
    """`mixtral converted: weights 90214MiB in 212.3s`."""
    data = event.data
    if "error" in data:
        return f"{event.model}: conversion failed ({data['outcome']}): {data['error']}"
    done = f"weights {size(data['bytes'])}" if data["bytes"] else "nothing to convert"
    return f"{event.model} converted: {done} in {data['seconds']:.1f}s"


def state_line(event: Event) -> str:
    """`demo-a#3 starting→ready load_seconds=3.2 measured=512MiB@cpu`."""
    data = dict(event.data)
    was = data.pop("was", None)
    data.pop("extra_worker", None)
    worker, state = data.pop("worker"), data.pop("state")
    moved = f"{was}→{state}" if was else ("draining" if data.pop("draining", False) else state)
    fields = []
    for name, value in data.items():
        if name in ("stages", "spent"):
            digits = 1 if name == "stages" else 3
            value = ",".join(f"{stage}:{seconds:.{digits}f}s" for stage, seconds in value.items())
        elif isinstance(value, Mapping):
            value = ",".join(f"{size(count)}@{device}" for device, count in value.items())
        elif isinstance(value, str) and (" " in value or not value):
            value = json.dumps(value, ensure_ascii=False) if value else ""
        if value != "":
            fields.append(f"{name}={value}")
    return " ".join([f"{event.model}#{worker}", moved, *fields])


def pause_line(event: Event) -> str:
    """A back-off: `demo-a#3 failed (crashed): next attempt in 2.1 s, at 12:03:04Z`. The state line before has the full
    reason."""
    data = event.data
    until = time.strftime("%H:%M:%SZ", time.gmtime(data["until"]))  # in UTC, as the times of all lines are
    sooner = " unless its preset or its files change" if data["final"] else ""
    when = f"next attempt in {data['seconds']:.1f} s, at {until}{sooner}"
    return f"{event.model}#{data['worker']} failed ({data['cause']}): {when}"


def plan_line(event: Event) -> str:
    """A plan in one line: `evict demo-a#1 for demo-c: needs 700MiB, …`."""
    data = event.data
    name = f"{event.model}#{data['worker']}"
    need = " ".join(
        f"{device}:used={size(row['used'])},foreign={size(row['foreign'])},margin={size(row['margin'])}"
        + (f",limit={size(row['limit'])}" if row["limit"] is not None else "")
        for device, row in data.get("devices", {}).items()
        if device != "slots"
    )
    needs = f" needs={size(sum(data['needs']))}({data['source']})" if "needs" in data else ""
    if data["decision"] == "evict":
        frees = ",".join(f"{size(count)}@{device}" for device, count in data["frees"].items())
        asker = f" for={data['for']}" if data["for"] else ""
        return f"evict {name} reason={data['reason']}{asker} idle={data['idle_seconds']}s frees={frees}{needs} {need}"
    if data["decision"] != "wait":  # A rejected request, or a dropped replica.
        return f"{data['decision']} {name}{needs} {need}"
    on = f" on={','.join(data['on'])}" if data["on"] else ""
    return f"wait {name} cause={data['cause']}{on} position={data['position']}{needs} {need}"


def size(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / GIB:.1f}GiB" if count >= 10 * GIB else f"{count / MIB:.0f}MiB"


class Ring(logging.Handler):
    """The newest lines, for /router/logs."""

    def __init__(self, *, first: int = 1):
        """`first`: id of the first line; see `EventLog`."""
        super().__init__()
        self.lines: deque[Line] = deque(maxlen=KEPT)
        self._ids = itertools.count(first)
        self._followers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = escaped(record.getMessage())
        except (TypeError, ValueError):
            return  # The other handler reports this.
        self.take(record.created, record.name, text, record.levelname.lower())

    def take(self, now: float, name: str, message: str, level: str = "info") -> None:
        """Append a line from logger `name`, without control characters."""
        self.lines.append(Line(next(self._ids), now, level, name, message[:LONGEST]))
        if self._followers:
            for news, loop in tuple(self._followers.items()):
                loop.call_soon_threadsafe(news.set)  # Records come from any thread.

    async def follow(self, after: int) -> AsyncIterator[Line]:
        """Every line after the id `after`, as it is written, without end. A follower slower than the ring misses
        lines."""
        news = asyncio.Event()
        self._followers[news] = asyncio.get_running_loop()
        try:
            while True:
                news.clear()
                for line in [line for line in tuple(self.lines) if line.id > after]:
                    after = line.id
                    yield line
                await news.wait()
        finally:
            del self._followers[news]


class LogQueue(logging.handlers.QueueHandler):
    """The bounded queue in front of a file descriptor, which a thread of its own writes to. Dropped lines are counted,
    and the count is a line of the log."""

    formatter: "_Text | _Json"

    def __init__(self, descriptor: int, *, size: int = QUEUE_SIZE):
        self._waiting: queue.SimpleQueue[logging.LogRecord | str | None] = queue.SimpleQueue()
        self._size = size
        self._dropped = 0
        self._writing = _Writer(self._waiting, descriptor)
        self._writing.start()  # before `logging` knows this handler, which it closes at the exit: a start may fail
        super().__init__(self._waiting)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Render the line now, since its arguments may change. A thread that renders would take the interpreter from
        the event loop for up to its switch interval of 5 ms."""
        line = copy.copy(record)  # other handlers get the record, too
        line.msg, line.args = self.format(record), None
        return line

    def take(self, now: float, name: str, message: str) -> None:
        """Queue a line of level INFO from logger `name`, without control characters."""
        self.enqueue(self.formatter.line(now, "INFO", name, message))

    def enqueue(self, record: logging.LogRecord | str) -> None:
        if self._waiting.qsize() >= self._size:
            self._dropped += 1
            return
        if self._dropped:
            self._report()
        self._waiting.put(record)

    def close(self) -> None:
        """Write what waits, for EXIT_TIMEOUT at most. Runs at every normal exit, by `logging.shutdown`."""
        if self._dropped:
            self._report()
        self._writing.stop(EXIT_TIMEOUT)
        super().close()

    def _report(self) -> None:
        message = f"{self._dropped} log lines were dropped here: the log was not read in time"
        self._dropped = 0
        self._waiting.put(self.prepare(logging.LogRecord(__name__, logging.WARNING, "", 0, message, None, None)))


class _Writer(logging.handlers.QueueListener):
    """The thread that writes lines to a descriptor, all that wait at once. Its end does not wait for a blocked write.

    A StreamHandler would not do: the interpreter aborts at its end if a thread is blocked inside the lock of
    `sys.stderr`.
    """

    _thread: threading.Thread | None

    def __init__(self, waiting: "queue.SimpleQueue[logging.LogRecord | str | None]", descriptor: int) -> None:
        super().__init__(waiting)
        self._waiting = waiting
        self._descriptor = descriptor

    def handle(self, record: logging.LogRecord | str) -> None:
        """Write the line with all that follow soon: a wake-up and a write for each line would cost more than its
        text."""
        if isinstance(record, str) or record.levelno < logging.WARNING:
            time.sleep(GATHER)
        records = [record, *(self._waiting.get() for _ in range(self._waiting.qsize()))]
        if None in records:
            self._waiting.put(None)  # the end
        lines = [record if isinstance(record, str) else record.msg for record in records if record is not None]
        with contextlib.suppress(OSError):  # The reader has closed its end, or the disk is full.
            self._write(("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # Another process has made the terminal non-blocking.
                select.select((), (self._descriptor,), ())

    def stop(self, timeout: float | None = None) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self.enqueue_sentinel()
            thread.join(timeout)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = self.line(record.created, record.levelname, record.name, escaped(record.getMessage()))
        return line + "\n" + self.formatException(record.exc_info) if record.exc_info else line

    def line(self, now: float, level: str, name: str, message: str) -> str:
        return f"{_stamp(int(now * 1000))} {level} {name} {message}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        return self.line(record.created, record.levelname, record.name, record.getMessage(), traceback)

    def line(self, now: float, level: str, name: str, message: str, traceback: str = "") -> str:
        body = {"time": _stamp(int(now * 1000)), "level": level, "logger": name, "message": message}
        if traceback:
            body["traceback"] = traceback
        return json.dumps(body, ensure_ascii=False)


def escaped(message: str) -> str:
    """`message` with control characters escaped."""
    return message if message.isprintable() else message.translate(CONTROL)


@functools.lru_cache(maxsize=2)  # a router under load writes many lines in a millisecond
def _stamp(milliseconds: int) -> str:
    return f"{_second(milliseconds // 1000)}.{milliseconds % 1000:03d}Z"


@functools.lru_cache(maxsize=2)
def _second(of: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(of))

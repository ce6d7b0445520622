"""Log lines: one per transition, rendered from the event log; text and JSON carry the same fields."""

import asyncio
import functools
import itertools
import json
import logging
import os
import select
import stat
import sys
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from router.events import Event, EventLog

log = logging.getLogger("router.fleet")
_root = logging.getLogger()

KEPT = 2000
"""Lines that can be looked at later."""
LONGEST = 2000
"""Characters of one of them."""
MOMENT = 0.01
"""Seconds that a line waits for others, to be written with them."""
UNREAD = 1 << 18
"""Bytes that are kept for whoever reads too slowly; of what comes beyond them, only the number of lines is."""
RETRY = 0.25
"""Seconds until they are offered again."""
GIB, MIB = 1 << 30, 1 << 20
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127)}


@dataclass(slots=True)
class Line:
    """One log line, which nobody changes. `id` rises, `time` is in seconds since 1970."""

    id: int
    time: float
    level: str
    logger: str
    message: str

    def is_about(self, model: str) -> bool:
        """Whether it is a word of this model's worker, or of the router about it."""
        return self.logger == f"worker.{model}" or f"{model}#" in self.message or f"model={model} " in self.message


def set_up(level: str, form: str) -> None:
    """Send all log records, and what Python and libraries warn of, to stderr, as text or one JSON object a line."""
    handler = Spool(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # in no line, and not for nothing
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "aiohttp.access", "aiohttp.server", "aiohttp.web"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    warnings.showwarning = _warn


def _warn(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    file: TextIO | None = None, line: str | None = None,
) -> None:  # fmt: skip
    logging.getLogger("router").warning("%s: %s", category.__name__, message)


def line(logger: logging.Logger, message: str) -> None:
    """As `logger.info(message)`, for what comes with every request: our own handlers need no record of it."""
    if not logger.isEnabledFor(logging.INFO):
        return
    now, shown = time.time(), _shown(message)
    for handler in _root.handlers:
        if isinstance(handler, _OWN):
            handler.take(now, logger.name, shown)
        else:
            record = logger.makeRecord(logger.name, logging.INFO, "", 0, message, (), None)
            if record.levelno >= handler.level:
                handler.handle(record)


def follow(events: EventLog) -> None:
    """Render every event that people want to see from now on."""
    events.fold(_tell, mentions=False)


def _tell(event: Event) -> None:
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
            log.info("%s#%s estimate=%s source=%s %s", event.model, data["worker"], size(total), data["source"], parts)
        case "clerk":
            log.log(logging.WARNING if "error" in data else logging.INFO, "%s", clerk_line(event))
        case "prepared":
            log.log(logging.WARNING if data["why"] else logging.INFO, "%s", prepared_line(event))
        case "holding":
            why = f" reason={data['reason']}" if "reason" in data else ""
            log.info("%s#%s weights %s %s%s", event.model, data["id"], data["state"], size(data["bytes"]), why)
        case "config_refused":
            log.error("presets not reloaded, the old ones still are: %s", "; ".join(data["errors"]))
        case "config":
            log.info("presets reloaded: %s", " ".join(f"{word}={','.join(ids)}" for word, ids in data.items() if ids))


def clerk_line(event: Event) -> str:
    """`mixtral#clerk2 ready pid=4711 load_seconds=0.3`: a process that only counts for a model that is not loaded."""
    data = dict(event.data)
    fields = (f"{name}={value}" for name, value in data.items() if name not in ("clerk", "state", "was"))
    return " ".join([f"{event.model}#clerk{data['clerk']}", data["state"], *fields])


def prepared_line(event: Event) -> str:
    """`mixtral prepared: weights 88.1GiB, estimate in 212.3s`."""
    data = event.data
    if data["why"]:
        again = f"; tried again in {data['again']:.0f} s" if data["again"] is not None else ""
        return f"{event.model} is not prepared ({data['outcome']}), and loads as it came: {data['why']}{again}"
    parts = [f"weights {size(data['bytes'])}"] if data["bytes"] else []
    parts += ["tokenizer"] * data["tokenizer"] + ["estimate"] * data["estimated"]
    return f"{event.model} prepared: {', '.join(parts)} in {data['seconds']:.1f}s"


def state_line(event: Event) -> str:
    """`demo-a#3 starting→ready load_seconds=3.2 measured=512MiB@cpu`."""
    data = dict(event.data)
    was = data.pop("was", None)
    data.pop("beside", None)
    worker, state = data.pop("worker"), data.pop("state")
    moved = f"{was}→{state}" if was else ("draining" if data.pop("draining", False) else state)
    fields = []
    for name, value in data.items():
        if name in ("stages", "spent"):
            digits = 1 if name == "stages" else 3
            value = ",".join(f"{stage}:{seconds:.{digits}f}s" for stage, seconds in value.items())
        elif isinstance(value, Mapping):
            value = ",".join(f"{size(each)}@{device}" for device, each in value.items())
        elif isinstance(value, str) and (" " in value or not value):
            value = json.dumps(value, ensure_ascii=False) if value else ""
        if value != "":
            fields.append(f"{name}={value}")
    return " ".join([f"{event.model}#{worker}", moved, *fields])


def pause_line(event: Event) -> str:
    """`demo-a#3 failed (crashed): next attempt in 2.1 s, at 12:03:04`; the state before says why in full."""
    data = event.data
    until = time.strftime("%H:%M:%S", time.localtime(data["until"]))
    sooner = " unless its preset or its files change" if data["final"] else ""
    when = f"next attempt in {data['seconds']:.1f} s, at {until}{sooner}"
    return f"{event.model}#{data['worker']} failed ({data['cause']}): {when}"


def plan_line(event: Event) -> str:
    """`evict demo-a#1 for demo-c: needs 700MiB, …` in one line."""
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
        frees = ",".join(f"{size(each)}@{device}" for device, each in data["frees"].items())
        asker = f" for={data['for']}" if data["for"] else ""
        return f"evict {name} reason={data['reason']}{asker} idle={data['idle_seconds']}s frees={frees}{needs} {need}"
    if data["decision"] != "wait":  # refused, or a copy that is dropped
        return f"{data['decision']} {name}{needs} {need}"
    on = f" on={','.join(data['on'])}" if data["on"] else ""
    return f"wait {name} cause={data['cause']}{on} position={data['position']}{needs} {need}"


def size(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / GIB:.1f}GiB" if count >= 10 * GIB else f"{count / MIB:.0f}MiB"


class Ring(logging.Handler):
    """The newest lines, for people who look from elsewhere."""

    def __init__(self, size: int = KEPT, *, first: int = 1):
        """`first`: id of the first line; see `EventLog`."""
        super().__init__()
        self.lines: deque[Line] = deque(maxlen=size)
        self._ids = itertools.count(first)
        self._followers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage().translate(CONTROL)[:LONGEST]
        except (TypeError, ValueError):
            return  # whoever wrote it hears so from the other handler
        self._add(record.created, record.levelname.lower(), record.name, text)

    def take(self, now: float, name: str, message: str) -> None:
        """A line of level info without control characters, that the logger `name` said at `now`, in seconds since
        1970."""
        self._add(now, "info", name, message[:LONGEST])

    def _add(self, now: float, level: str, name: str, text: str) -> None:
        self.lines.append(Line(next(self._ids), now, level, name, text))
        if self._followers:
            for news, loop in tuple(self._followers.items()):
                loop.call_soon_threadsafe(news.set)  # lines come from any thread

    async def follow(self, after: int) -> AsyncIterator[Line]:
        """Every line after that of this id, as they come, for ever. A follower too slow for the ring misses some."""
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


class Spool(logging.Handler):
    """Writes what is logged within MOMENT together; what warns, or comes from another thread, at once.

    Law: a reader that does not read holds up nobody. A terminal that is stopped, a pager, a collector that hangs: what
    they do not take is kept as far as UNREAD goes, and counted beyond.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: list[str | tuple[float, str, str]] = []
        """As text, or as `take` got them."""
        self._reader = _reader(stream)
        self._unread = bytearray()
        self._missing = 0
        """Lines."""
        self._is_due = False
        """What is unread is offered again."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record) + "\n")
            if record.levelno >= logging.WARNING:
                self.flush()
            else:
                self._flush_soon()
        except Exception:  # noqa: BLE001  # as every handler does: a line that cannot be written harms nobody
            self.handleError(record)

    def take(self, now: float, name: str, message: str) -> None:
        """A line of level info without control characters, that the logger `name` said at `now`, in seconds since
        1970. It is made into text with those that it is written with."""
        self._lines.append((now, name, message))
        if len(self._lines) == 1:
            self._flush_soon()

    def _flush_soon(self) -> None:
        loop = asyncio._get_running_loop()
        if loop is None:
            self.flush()
        elif len(self._lines) == 1:
            loop.call_later(MOMENT, self.flush)

    def flush(self) -> None:
        with self.lock or nullcontext():
            lines, self._lines = self._lines, []
            text = "".join([line if isinstance(line, str) else self._text(*line) for line in lines])
            with suppress(ValueError, OSError):  # nobody reads any more
                if self._reader is not None:
                    self._offer(self._reader, text, len(lines))
                elif text:
                    self._stream.write(text)
                    self._stream.flush()

    def _offer(self, reader: select.poll, text: str, lines: int) -> None:
        """Write as much as `reader` takes at once."""
        if len(self._unread) > UNREAD:
            self._missing += lines
        else:
            if lines and self._missing:
                said = f"{self._missing} lines are missing here: nobody read them in time"
                notice = logging.makeLogRecord({"name": __name__, "levelname": "WARNING", "msg": said})
                text = f"{self.format(notice)}\n{text}"
                self._missing = 0
            self._unread += text.encode(self._stream.encoding, "backslashreplace")
        try:
            while self._unread and reader.poll(0):
                del self._unread[: os.write(self._stream.fileno(), self._unread[: select.PIPE_BUF])]
        except BrokenPipeError:
            self._unread.clear()
        if self._unread and not self._is_due and (loop := asyncio._get_running_loop()) is not None:
            self._is_due = True
            loop.call_later(RETRY, self._again)

    def _again(self) -> None:
        self._is_due = False
        self.flush()

    def _text(self, now: float, name: str, message: str) -> str:
        form = self.formatter
        return form.line(now, "INFO", name, message) + "\n" if isinstance(form, _Text | _Json) else ""


def _reader(stream: TextIO) -> "select.poll | None":
    """Tells when whoever reads `stream` has room for PIPE_BUF bytes; None: nobody reads it, as it is a file."""
    try:
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)):
        return None
    reader = select.poll()
    reader.register(descriptor, select.POLLOUT)
    return reader


_OWN = Ring, Spool


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = self.line(record.created, record.levelname, record.name, record.getMessage())
        return line + "\n" + self.formatException(record.exc_info) if record.exc_info else line

    @staticmethod
    def line(now: float, level: str, name: str, message: str) -> str:
        return f"{_stamp(now)} {level} {name} {_shown(message)}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        body = self._body(record.created, record.levelname, record.name, record.getMessage())
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body, ensure_ascii=False)

    @staticmethod
    def _body(now: float, level: str, name: str, message: str) -> dict[str, Any]:
        return {"time": _stamp(now), "level": level, "logger": name, "message": message}

    def line(self, now: float, level: str, name: str, message: str) -> str:
        return json.dumps(self._body(now, level, name, message), ensure_ascii=False)


def _shown(message: str) -> str:
    """Without control characters."""
    return message if message.isprintable() else message.translate(CONTROL)


def _stamp(now: float) -> str:
    second = int(now)
    return f"{_second(second)}.{int((now - second) * 1000):03d}Z"


@functools.lru_cache(maxsize=2)
def _second(of: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(of))

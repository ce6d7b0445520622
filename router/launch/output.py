"""The output of a child process: lines, events on stdout, log lines on stderr."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from worker.protocol.events import Event, RequestEnded, decode

MAX_LOG_BYTES = 8192  # of one line of stderr; the rest of the line is cut
KEPT_LOG_BYTES = 1 << 16  # the last bytes of stderr that are kept
# Lines of one child that are logged at once, and per second. Further ones are only counted. Both are guesses.
LOG_BURST = 100
LOG_RATE = 20.0

# For each kind of event the fields: name, types that need no further check, type hint.
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


class Lines:
    """Splits bytes as they arrive into lines without their ends.

    A line longer than `limit` is cut to its first `limit` + 1 bytes: the caller can see that it is too long, and memory
    stays bounded.
    """

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
        """The last line, if it has no line end."""
        rest, self._rest = self._rest, b""
        return [rest] if rest and not self._skips else []


class Log:
    """The stderr of one child, forwarded to the logger `worker.<model>` line by line, with a limit on the rate.

    The last lines are kept. Control characters are escaped, one line stays one log record, and `secrets` are masked.
    """

    def __init__(self, model: str, name: str, *, secrets: Sequence[str] = ()):
        """`name`: the prefix of each line."""
        self._logger = logging.getLogger(f"worker.{model}")
        self._name = name
        self._secrets = sorted(secrets, key=len, reverse=True)  # longest first: one may contain another
        self._kept: deque[str] = deque()
        self._kept_bytes = 0
        self._allowed = float(LOG_BURST)
        self._at = 0.0
        self._left_out = 0

    def add(self, line: bytes, now: float) -> None:
        """Log one line of stderr. `now`: seconds of a monotonic clock."""
        text = self.clean(line[:MAX_LOG_BYTES].decode(errors="replace")).strip()
        if text:
            self._keep(text)
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


# The start of the event that comes with every request. It has a decoder of its own, which is faster than the general
# one.
_REQUEST_START = b'{"event":"request",'
_REQUEST_DECODER = msgspec.json.Decoder(RequestEnded)


def decode_event(line: bytes) -> Event | None:
    """The event in `line`, with all fields of the right types; None if the line contains none."""
    if line.startswith(_REQUEST_START):
        try:
            return _REQUEST_DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
    event = decode(line)
    return event if event is not None and _has_right_types(event) else None


def _has_right_types(event: Event) -> bool:
    """True if every field of a decoded event has the right type; `decode` does not check them."""
    for name, kinds, hint in _FIELDS[type(event)]:
        value = getattr(event, name)
        if type(value) not in kinds and not _has_type(value, hint):
            return False
    return True


def _has_type(value: object, hint: Any) -> bool:
    """True if `value` has the type `hint`: int, float, str, lists and dictionaries of them, and unions."""
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
        return all(_has_type(item, parts[0]) for item in value)
    if isinstance(value, dict):
        return all(_has_type(key, parts[0]) and _has_type(item, parts[1]) for key, item in value.items())
    return True


__all__ = ["LOG_BURST", "MAX_LOG_BYTES", "Lines", "Log", "decode_event"]

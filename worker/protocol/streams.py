"""Framing of streams in each dialect: headers, comments, error frames and the end of a response."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from worker.protocol.dialects import Dialect
from worker.protocol.errors import ReportedError, error_body


@dataclass(frozen=True, slots=True)
class StreamFraming:
    """The framing of the streams of one dialect."""

    headers: Mapping[str, str]
    end: bytes  # ends a frame and never occurs inside one
    first: bytes  # start of a line with data, perhaps the second line of a frame; comments have no such line
    error: bytes | tuple[bytes, ...]  # start of an error frame
    last: bytes | tuple[bytes, ...]  # start of the last frame of a complete response
    ending: bytes | tuple[bytes, ...] = b""  # end of that frame

    def is_error(self, frames: bytes) -> bool:
        """True if the last of these complete frames is an error."""
        return self._last(frames).startswith(self.error)

    def is_whole(self, frames: bytes) -> bool:
        """True if the last of these complete frames ends a complete response."""
        return frames.endswith(self.ending) and self._last(frames).startswith(self.last)

    def has_data(self, frames: bytes) -> bool:
        """True if these frames contain more than comments."""
        return frames.startswith(self.first) or b"\n" + self.first in frames

    def _last(self, frames: bytes) -> bytes:
        before = frames.rfind(self.end, 0, -len(self.end))
        return frames if before < 0 else frames[before + len(self.end) :]


_EVENTS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}
_STREAM = StreamFraming(_EVENTS, b"\n\n", b"data: ", b'data: {"error":', b"data: [DONE]")
_STREAMS: Mapping[Dialect, StreamFraming] = {
    Dialect.ANTHROPIC: StreamFraming(_EVENTS, b"\n\n", b"data: ", b"event: error\n", b"event: message_stop\n"),
    Dialect.RESPONSES: StreamFraming(
        _EVENTS,
        b"\n\n",
        b"data: ",
        b"event: error\n",
        (b"event: response.completed\n", b"event: response.incomplete\n"),
    ),
    Dialect.LMI: StreamFraming(
        {**_EVENTS, "Content-Type": "application/jsonlines"},
        b"\n",
        b"{",
        b'{"token":{"id":-1,"text":"","log_prob":-1,',
        b'{"generated_text":',
    ),
    Dialect.FASTCHAT: StreamFraming(
        {**_EVENTS, "Content-Type": "application/octet-stream"},
        b"\0",
        b'{"text":',
        (b'{"error_code":4', b'{"error_code":5'),
        b'{"text":',
        (b'"finish_reason":"stop"}\0', b'"finish_reason":"length"}\0'),
    ),
    Dialect.OLLAMA: StreamFraming(
        {**_EVENTS, "Content-Type": "application/x-ndjson"}, b"\n", b"{", b'{"error":', b"{", b'"done":true}\n'
    ),
}


def stream(dialect: Dialect) -> StreamFraming:
    """Return the framing of streams in `dialect`."""
    return _STREAMS.get(dialect, _STREAM)


def error_frame(dialect: Dialect, error: ReportedError, *, request_id: str = "") -> bytes:
    """Return the frame that reports an error after the stream has begun."""
    body = error_body(dialect, error, request_id=request_id)
    return error_body_frame(
        dialect, json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    )


def error_body_frame(dialect: Dialect, body: bytes) -> bytes:
    """Return the body of an error as a frame of a stream that has begun."""
    if dialect is Dialect.OLLAMA:
        return body.replace(b"\n", b" ") + b"\n"
    if dialect is Dialect.FASTCHAT:
        return body.removesuffix(b"\0") + b"\0"
    if dialect is Dialect.LMI:
        token = {"id": -1, "text": "", "log_prob": -1, "special_token": True, "error_msg": json.loads(body)["message"]}
        line = {"token": token, "generated_text": "", "details": {"finish_reason": "error"}}
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"
    if dialect is Dialect.RESPONSES:  # an event; its sequence number is unknown here
        error = json.loads(body)["error"]
        event_body = {"type": "error", "code": error["type"], "message": error["message"], "param": error["param"]}
        body = json.dumps({**event_body, "sequence_number": -1, "error": error}, ensure_ascii=False).encode(
            errors="replace"
        )
    event = b"event: error\n" if dialect in (Dialect.ANTHROPIC, Dialect.RESPONSES) else b""
    return event + b"data: " + body.replace(b"\n", b" ") + b"\n\n"


def keepalive_frame(dialect: Dialect, text: str, *, has_begun: bool, model: str) -> bytes:
    """Return a frame that keeps an idle stream alive: the comment `text`, or the dialect's own frame for it.
    `has_begun`: part of the response has been sent."""
    if dialect is Dialect.OLLAMA:  # JSON lines have no comments: an empty line for both chats and completions
        line = {"model": model, "created_at": timestamp(), "message": {"role": "assistant", "content": ""}}
        return json.dumps({**line, "response": "", "done": False}, separators=(",", ":")).encode() + b"\n"
    if dialect is Dialect.LMI or (dialect is Dialect.FASTCHAT and has_begun):
        return b""  # FastChat's clients would replace the text so far by the empty text
    if dialect is Dialect.FASTCHAT:
        return b'{"error_code":0,"text":"","usage":null,"finish_reason":null}\0'
    if dialect is Dialect.ANTHROPIC and has_begun:
        return b'event: ping\ndata: {"type":"ping"}\n\n'
    return f": {text}\n\n".encode()


def timestamp() -> str:
    """Return the current time in the format of RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")

"""Frames of streams in each dialect: headers, comments, errors and the end of an answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from worker.protocol.dialects import Dialect
from worker.protocol.errors import error_body


@dataclass(frozen=True, slots=True)
class Stream:
    """The framing of the streams of one dialect."""

    headers: Mapping[str, str]
    end: bytes
    """What ends a frame, and stands nowhere within one."""
    first: bytes
    """How a line begins that says something, after perhaps another one of the same frame; comments have none."""
    error: bytes | tuple[bytes, ...]
    """How an error frame begins."""
    last: bytes | tuple[bytes, ...]
    """How the last frame of a whole answer begins."""
    ending: bytes | tuple[bytes, ...] = b""
    """How it ends."""

    def is_error(self, frames: bytes) -> bool:
        """Whether the last of these whole frames is an error."""
        return self._last(frames).startswith(self.error)

    def is_whole(self, frames: bytes) -> bool:
        """Whether the last of these whole frames ends a whole answer."""
        return frames.endswith(self.ending) and self._last(frames).startswith(self.last)

    def says(self, frames: bytes) -> bool:
        """Whether there is more than comments."""
        return frames.startswith(self.first) or b"\n" + self.first in frames

    def _last(self, frames: bytes) -> bytes:
        before = frames.rfind(self.end, 0, -len(self.end))
        return frames if before < 0 else frames[before + len(self.end) :]


_EVENTS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}
_STREAM = Stream(_EVENTS, b"\n\n", b"data: ", b'data: {"error":', b"data: [DONE]")
_STREAMS: Mapping[Dialect, Stream] = {
    Dialect.ANTHROPIC: Stream(_EVENTS, b"\n\n", b"data: ", b"event: error\n", b"event: message_stop\n"),
    Dialect.RESPONSES: Stream(
        _EVENTS,
        b"\n\n",
        b"data: ",
        b"event: error\n",
        (b"event: response.completed\n", b"event: response.incomplete\n"),
    ),
    Dialect.LMI: Stream(
        {**_EVENTS, "Content-Type": "application/jsonlines"},
        b"\n",
        b"{",
        b'{"token":{"id":-1,"text":"","log_prob":-1,',
        b'{"generated_text":',
    ),
    Dialect.FASTCHAT: Stream(
        {**_EVENTS, "Content-Type": "application/octet-stream"},
        b"\0",
        b'{"text":',
        (b'{"error_code":4', b'{"error_code":5'),
        b'{"text":',
        (b'"finish_reason":"stop"}\0', b'"finish_reason":"length"}\0'),
    ),
    Dialect.OLLAMA: Stream(
        {**_EVENTS, "Content-Type": "application/x-ndjson"}, b"\n", b"{", b'{"error":', b"{", b'"done":true}\n'
    ),
}


def stream(dialect: Dialect) -> Stream:
    """How `dialect` streams."""
    return _STREAMS.get(dialect, _STREAM)


def error_frame(
    dialect: Dialect,
    *,
    status: int,
    type: str,
    reason: str,
    message: str,
    param: str | None = None,
    request_id: str = "",
) -> bytes:
    """The bytes that tell a client in mid-stream that its answer will not be complete."""
    body = error_body(
        dialect, status=status, type=type, reason=reason, message=message, param=param, request_id=request_id
    )
    return refusal_frame(dialect, json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())


def refusal_frame(dialect: Dialect, body: bytes) -> bytes:
    """An error's body as a frame of a stream that has already begun."""
    if dialect is Dialect.OLLAMA:
        return body.replace(b"\n", b" ") + b"\n"
    if dialect is Dialect.FASTCHAT:
        return body.removesuffix(b"\0") + b"\0"
    if dialect is Dialect.LMI:
        token = {"id": -1, "text": "", "log_prob": -1, "special_token": True, "error_msg": json.loads(body)["message"]}
        line = {"token": token, "generated_text": "", "details": {"finish_reason": "error"}}
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    if dialect is Dialect.RESPONSES:  # as an event: which number it has only its own stream would know
        told = json.loads(body)["error"]
        event_body = {"type": "error", "code": told["type"], "message": told["message"], "param": told["param"]}
        body = json.dumps({**event_body, "sequence_number": -1, "error": told}, ensure_ascii=False).encode()
    event = b"event: error\n" if dialect in (Dialect.ANTHROPIC, Dialect.RESPONSES) else b""
    return event + b"data: " + body.replace(b"\n", b" ") + b"\n\n"


def silence(dialect: Dialect, text: str, *, has_begun: bool, model: str) -> bytes:
    """What keeps a stream alive that has nothing to say: a comment, `text`, where the dialect has none of its own.
    `has_begun`: something of the answer has been said."""
    if dialect is Dialect.OLLAMA:  # no comments in JSON lines: one that adds nothing, to a chat or to a text
        line = {"model": model, "created_at": timestamp(), "message": {"role": "assistant", "content": ""}}
        return json.dumps({**line, "response": "", "done": False}, separators=(",", ":")).encode() + b"\n"
    if dialect is Dialect.LMI or (dialect is Dialect.FASTCHAT and has_begun):
        return b""  # FastChat's clients would take an empty text for the text so far
    if dialect is Dialect.FASTCHAT:
        return b'{"error_code":0,"text":"","usage":null,"finish_reason":null}\0'
    if dialect is Dialect.ANTHROPIC and has_begun:
        return b'event: ping\ndata: {"type":"ping"}\n\n'
    return f": {text}\n\n".encode()


def timestamp() -> str:
    """Now, as RFC 3339 has it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")

"""One request and its response: bounded writes, the statistics of its end, the frames of a stream, and the rendering
of errors."""

import asyncio
import contextlib
import logging
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import orjson
from aiohttp import web

from worker.api.call import GenerationCall, JsonAnswer
from worker.errors import NotFound, RequestError
from worker.interface import ChoiceTimings, PrefillProgress
from worker.protocol.dialects import Dialect
from worker.protocol.events import RequestEnded
from worker.protocol.routes import REQUEST_ID_HEADER, ignored_fields
from worker.protocol.streams import error_frame, keepalive_frame, stream
from worker.server.bodies import MAX_BODY_BYTES
from worker.server.merge import ArrivedDeltas, MergedDeltas

ID = web.RequestKey("id", str)
DIALECT = web.RequestKey("dialect", Dialect)
_log = logging.getLogger(__name__)
WRITE_TIMEOUT = 30.0  # seconds of one write to a client


class ClientGone(Exception):
    """The client has disconnected, or has not read for too long."""


class BodyTooLarge(RequestError):
    status, type, reason = 413, "invalid_request_error", "too_large"


class WrongMethod(RequestError):
    status, type, reason = 405, "not_found_error", "method"


class ServerExchange:
    """One request in progress: the writes of its response, and the counts for its `RequestEnded` event.

    Every write ends within `write_timeout` seconds (None: unbounded) or raises ClientGone. aiohttp has no such bounds:
    a write blocks for ever once the buffers are full, and a handler that returns ends the response in order, with the
    terminal chunk.
    """

    def __init__(self, request: web.Request, write_timeout: float | None):
        self.id: str = request[ID]
        self.request = request
        self._write_timeout = write_timeout
        self.began = time.monotonic()
        self.prompt_tokens = 0
        self.is_broken = False  # the stream ended in an error frame, so the connection must be aborted
        self.outcome = "ok"
        self.keep_alive: float | None = None
        self._cached_tokens = 0
        # Tokens by generation and choice. Of a finished choice: all computed tokens, as `usage` reports them.
        self._tokens: Counter[tuple[int, int]] = Counter()
        self._ttft = 0.0
        self._prefill_seconds = 0.0
        self._later_tokens = 0  # after the first one of each choice
        self._later_seconds = 0.0

    def count(self, batch: ArrivedDeltas) -> None:
        for number, delta in batch:
            if delta.tokens and not self._tokens:
                self._ttft = time.monotonic() - self.began
            if delta.tokens:
                self._tokens[number, delta.index] += len(delta.tokens)
            if delta.finish is not None and delta.timings is not None:
                self._tokens[number, delta.index] = delta.timings.completion_tokens
                self._add(delta.index, delta.timings)

    def _add(self, index: int, timings: ChoiceTimings) -> None:
        """Add the timings of a finished choice."""
        if index == 0:
            self._cached_tokens += timings.cached_tokens
            self._prefill_seconds += timings.prefill_seconds
        if timings.completion_tokens > 1:
            self._later_tokens += timings.completion_tokens - 1
            self._later_seconds += timings.decode_seconds

    def to_event(self) -> RequestEnded:
        return RequestEnded(
            id=self.id,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._tokens.total(),
            outcome=self.outcome,
            ttft=self._ttft,
            token_seconds=self._later_seconds / self._later_tokens if self._later_tokens else 0.0,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._later_seconds,
            keep_alive=self.keep_alive,
        )

    def headers(self, ignored: Sequence[str] = ()) -> dict[str, str]:
        return {REQUEST_ID_HEADER: self.id, **ignored_fields(ignored)}

    async def begin(self, response: web.StreamResponse) -> None:
        """Fix status and headers. They are sent with the first write."""
        async with self._bounded():
            await response.prepare(self.request)

    async def write(self, response: web.StreamResponse, data: bytes) -> None:
        async with self._bounded():
            await response.write(data)

    async def send(self, response: web.Response) -> web.StreamResponse:
        """Write a complete response."""
        response.headers.update(self.headers())
        async with self._bounded():
            await response.prepare(self.request)
            await response.write_eof()
        return response

    def abort(self) -> None:
        """Close the connection without the terminal chunk, so that the client recognizes an incomplete response."""
        transport = self.request.transport
        if transport is not None:
            if self._write_timeout is not None:
                asyncio.get_running_loop().call_later(self._write_timeout, transport.abort)
            transport.close()

    @contextlib.asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._write_timeout):
                yield
        except (TimeoutError, ConnectionError):
            if self.request.transport is not None:
                self.request.transport.abort()
            raise ClientGone from None

    async def send_result(self, result: JsonAnswer) -> web.StreamResponse:
        """Send the result of a request that generates no tokens."""
        self.prompt_tokens, self.keep_alive = result.prompt_tokens, result.keep_alive
        response = json_response(result.body, result.ignored)
        if result.stream:
            response.body = orjson.dumps(result.body) + b"\n"
            del response.headers["Content-Type"]
            response.headers.update(stream(self.request[DIALECT]).headers)
        return await self.send(response)

    def error_frame(self, error: RequestError) -> bytes:
        return error_frame(self.request[DIALECT], error, request_id=self.id)


class StreamFrames:
    """The frames of a streamed response: those of the deltas, and a comment after each silent ping interval."""

    def __init__(self, call: GenerationCall, dialect: Dialect, model: str):
        self._call = call
        self._dialect = dialect
        self._model = model
        self._has_begun = False  # a frame with a part of the response has been produced
        self._began = asyncio.get_running_loop().time()
        self._prompts: dict[int, PrefillProgress] = {}  # prefill progress by generation, from its first choice

    async def first(self, deltas: MergedDeltas, exchange: ServerExchange) -> bytes | None:
        """Wait for the first frames, which commit the status 200. These are frames with tokens, or a comment once a
        prompt is being computed for a ping interval. Every failure before that gets a status of its own."""
        interval, due = self._call.ping_interval, None
        while True:
            batch = await _next_deltas(due, deltas)
            if batch is None:
                return self._comment()
            frames = self._frames(batch, exchange)
            if not batch or frames or any(delta.progress is None for _, delta in batch):
                return frames
            due = None if interval is None else self._began + interval

    async def next(self, deltas: MergedDeltas, exchange: ServerExchange) -> bytes | None:
        """Wait for the next frames; None at the end."""
        interval = self._call.ping_interval
        due = None if interval is None else asyncio.get_running_loop().time() + interval
        while True:
            batch = await _next_deltas(due, deltas)
            if batch is None:
                return self._comment()
            if not batch:
                return None
            if frames := self._frames(batch, exchange):
                return frames

    def _frames(self, batch: ArrivedDeltas, exchange: ServerExchange) -> bytes:
        exchange.count(batch)
        for number, delta in batch:
            if delta.progress is not None and delta.index == 0:
                self._prompts[number] = delta.progress
        frames = b"".join(self._call.reply.frames(number, delta) for number, delta in batch)
        self._has_begun = self._has_begun or bool(frames)
        return frames

    def _comment(self) -> bytes:
        """A keepalive comment: `: prefill done=512 total=2048` over all started prompts, or a ping."""
        done = sum(prompt.done for prompt in self._prompts.values())
        total = sum(prompt.total for prompt in self._prompts.values())
        text = "ping" if done == total else f"prefill done={done} total={total}"
        return keepalive_frame(self._dialect, text, has_begun=self._has_begun, model=self._model)


async def _next_deltas(due: float | None, deltas: MergedDeltas) -> ArrivedDeltas | None:
    """The next deltas; None if none arrives before `due` (the loop's clock; None: unbounded)."""
    try:
        async with asyncio.timeout_at(due):
            return await deltas.next_deltas()
    except TimeoutError:
        return None


def json_response(
    body: Any, ignored: Sequence[str] = (), *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    merged = {**(headers or {}), **ignored_fields(ignored)}
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json", headers=merged)


def public_error(exchange: ServerExchange, error: Exception) -> RequestError:
    """Return the error that the client may see. Unexpected errors are logged without their message, because it may
    quote the prompt."""
    if isinstance(error, web.HTTPException):
        return from_http_exception(error)
    if isinstance(error, RequestError):
        return error
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("request %s failed: %s\n%s", exchange.id, type(error).__name__, frames)
    return RequestError("internal error; the worker's log has the cause")


def from_http_exception(error: web.HTTPException) -> RequestError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return WrongMethod("this method is not allowed; the Allow header lists the methods of this path")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return BodyTooLarge(f"the request body has more than {MAX_BODY_BYTES} bytes; send less at once")
    return NotFound("File Not Found")

"""Responses to clients: headers and errors that all of them share, and a worker's response as far as it is sent."""

import asyncio
import contextlib
import fcntl
import json
import math
import socket
import struct
import termios
import time
from collections.abc import Awaitable, Mapping
from typing import Any

import orjson

from router import __version__
from router.config.settings import Settings
from router.errors import ApiError
from router.fleet.admission import Lease
from router.fleet.worker import State
from router.http.request import ForwardedRequest, Outlet
from worker.protocol.dialects import Dialect
from worker.protocol.errors import error_body, to_openai_error
from worker.protocol.streams import error_body_frame, error_frame, keepalive_frame, stream

SERVER = f"router/{__version__}"


def own_headers(id: str) -> dict[str, str]:
    """The headers of every response; `id` is the request's."""
    return {"Server": SERVER, "X-Request-Id": id, "request-id": id}


def json_bytes(value: Any) -> bytes:
    """JSON of `value`. orjson writes nearly everything. It raises for what files of a hostile model may contain: half a
    surrogate pair, which becomes a question mark, and integers of more than 64 bits."""
    try:
        return orjson.dumps(value)
    except TypeError:
        plain = json.loads(json.dumps(value), parse_constant=lambda _: None)  # no NaN and infinity, like orjson
        return json.dumps(plain, ensure_ascii=False).encode(errors="replace")


def render_error(error: ApiError, dialect: Dialect, request_id: str) -> tuple[dict[str, str], bytes]:
    """Headers, without `own_headers`, and body of an error response."""
    headers = {
        **error.headers,
        "X-Should-Retry": "true" if error.should_retry else "false",
        "Content-Type": "application/json; charset=utf-8",
    }
    if error.retry_after is not None:
        headers["Retry-After"] = str(whole_seconds(error.retry_after))
    return headers, json_bytes(error_body(dialect, error, request_id=request_id))


def whole_seconds(seconds: float) -> int:
    """The value of Retry-After: rounded up and at least 1, so that a client that obeys it is not too early."""
    return max(1, math.ceil(round(seconds, 3)))


class ClientGone(ConnectionError):
    """The client has closed its connection, or has not read for `write_stall` seconds."""


async def wait_for_client(outlet: Outlet, pending: Awaitable[None] | None, write_stall: float) -> None:
    """Wait for a write of `outlet` (None: it is done), at most `write_stall` seconds. Raises ClientGone, after aborting
    the connection if the client does not read."""
    if pending is None:
        return
    try:
        async with asyncio.timeout(write_stall):
            await pending
    except TimeoutError:
        if outlet.transport is not None:
            outlet.transport.abort()  # close() would wait without limit for the client to read
        raise ClientGone(f"disconnected: the client read nothing for {write_stall:g} s (--write-stall)") from None
    except ConnectionError:
        raise ClientGone("the client is gone") from None


class ProxiedResponse:
    """A worker's response to one client, as far as it has been sent."""

    status: int | None = None  # the status that was sent; None: nothing was sent yet
    # When the first byte of the worker's response was sent, without comments. Until then the request can be retried.
    first_byte: float | None = None
    # Seconds from the request's last byte until it is sent to the worker, without the wait for the worker.
    overhead: float | None = None
    events_sent = b""  # the last events that were forwarded
    failed: int | None = None  # the status of an error that came after the status line
    lease: Lease | None = None  # of the current or last attempt
    profile = ""  # the request profile that the worker applies; empty: none
    # Seconds that the last attempt waited in the queue, and for its model's load; None: not over yet.
    queued: float | None = None
    loaded: float | None = None

    def __init__(self, outlet: Outlet, request: ForwardedRequest, settings: Settings, headers: dict[str, str]):
        self.outlet = outlet
        self.request = request
        self.headers = headers
        self._dialect = request.stream_dialect or request.route.dialect
        self.form = stream(self._dialect)
        self._write_stall = settings.write_stall

    @property
    def is_complete(self) -> bool:
        """True if the last event of a complete stream has been forwarded."""
        return bool(self.events_sent) and self.form.is_whole(self.events_sent)

    @property
    def ends_with_error(self) -> bool:
        """True if the last event was the worker's own error frame."""
        return bool(self.events_sent) and self.form.is_error(self.events_sent)

    @property
    def waited(self) -> float:
        """Seconds until the model was loaded."""
        return (self.queued or 0.0) + (self.loaded or 0.0)

    @property
    def committed(self) -> bool:
        """True once the status line is sent."""
        return self.status is not None

    @property
    def phase(self) -> str:
        """The phase that a disconnect is counted under: queued, starting, streaming."""
        state = self.lease.worker.state if self.lease is not None else State.QUEUED
        if state >= State.READY:
            return "streaming"
        return "starting" if state is State.STARTING else "queued"

    async def commit(self, status: int = 200, headers: Mapping[str, str] | None = None, data: bytes = b"") -> None:
        """Send the status line, headers (default: those of a stream) and `data`. Raises ClientGone like `write`."""
        self.status = status
        of_stream = self.form.headers if headers is None else headers
        await self._wait_for(self.outlet.begin(status, {**self.headers, **of_stream}, data))

    async def send_whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send status line, headers and the whole body. Raises ClientGone like `write`."""
        self.status = status
        await self._wait_for(self.outlet.begin(status, {**self.headers, **headers}, body, is_whole=True))

    async def write(self, data: bytes) -> None:
        """Send more of the body. Raises ClientGone, after aborting the connection, if the client does not read."""
        await self._wait_for(self.outlet.write(data))

    async def finish(self) -> None:
        """Send the orderly end of the body. Raises ClientGone like `write`."""
        await self._wait_for(self.outlet.end())

    async def _wait_for(self, pending: Awaitable[None] | None) -> None:
        await wait_for_client(self.outlet, pending, self._write_stall)

    async def comment(self, text: str) -> None:
        """Send a comment in the stream's own form, after the status line if that is not sent yet."""
        frame = keepalive_frame(self._dialect, text, has_begun=False, model=self.request.model)
        if not self.committed:
            await self.commit(data=frame)
        elif frame:
            await self.write(frame)

    async def abort(self, error: ApiError) -> None:
        """Send one error frame, then end the connection without the end of the body."""
        frame = error_frame(self._dialect, error, request_id=self.request.request_id)
        with contextlib.suppress(ClientGone):
            await self.write(frame)
        await self.break_off()

    def refusal(self, body: bytes) -> bytes:
        """A worker's error body as a frame of this stream."""
        in_own_dialect = self.request.stream_dialect is None
        return error_body_frame(self._dialect, body if in_own_dialect else to_openai_error(body))

    async def break_off(self) -> None:
        """End the connection so that the client cannot take what it has for the whole response.

        In HTTP/1.1 the missing last chunk shows that. In HTTP/1.0 an orderly end would mean "complete", so the
        connection is reset once everything has left this machine's send queue.
        """
        transport = self.outlet.transport
        if transport is None:
            return
        limit = time.monotonic() + self._write_stall
        sock: socket.socket | None = transport.get_extra_info("socket")
        old = self.outlet.is_old and sock is not None and sock.family != socket.AF_UNIX
        while time.monotonic() < limit and not transport.is_closing():
            if transport.get_write_buffer_size() == 0 and not (old and sock is not None and _unsent(sock)):
                break
            await asyncio.sleep(0.01)  # polling, as no event signals an empty kernel send queue
        if old and sock is not None:
            with contextlib.suppress(OSError):  # SO_LINGER with 0 seconds: close() sends RST instead of FIN
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if old or transport.get_write_buffer_size():  # close() would wait without limit for a client that does not read
            transport.abort()
        else:
            transport.close()


def _unsent(sock: socket.socket) -> int:
    """Bytes in the kernel's send queue that the peer has not acknowledged (SIOCOUTQ, tcp(7))."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
    except OSError:
        return 0

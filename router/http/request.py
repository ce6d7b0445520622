"""One HTTP request and the response to it: the facts of the request, the seam to the transport, the progress of the
response.

`Incoming` is a request on its way through the pipeline. `ForwardedRequest` is what the proxy needs of it, once a worker
is to answer. `ProxiedResponse` is the response of a worker, as far as it has been sent. All write through an `Outlet`,
which a transport implements.
"""

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from router.config.settings import ApiKey
from router.errors import ApiError
from router.fleet.admission import Lease
from router.fleet.worker import State
from router.registry.auth import NO_KEY
from worker.protocol.dialects import Dialect
from worker.protocol.errors import to_openai_error
from worker.protocol.routes import Route
from worker.protocol.streams import error_body_frame, error_frame, keepalive_frame, stream

FLUSH_TIMEOUT = 30.0  # seconds to flush the end of a broken response, if writes have no limit of their own


class Outlet(Protocol):
    """One request as its transport has read it, and the way back to the client for one response.

    `begin`, `write` and `end` write at once if the transport can. They return None then, and otherwise an awaitable:
    it ends when there is room again and raises ConnectionError if the client is gone. Returning it, instead of being
    coroutines, lets the streaming path write without a task switch. The first design had a second set of methods for
    that, which each transport had to keep equal to the first.
    """

    @property
    def headers(self) -> Mapping[str, str]:
        """The request's headers, by lower-case name."""

    @property
    def is_old(self) -> bool:
        """True for HTTP/1.0: a response without a length ends with the connection."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """None once the client is gone."""

    @property
    def has_begun(self) -> bool:
        """True once the status line is written."""

    @property
    def content_length(self) -> int | None:
        """The stated length of the request's body; None if it is not stated."""

    def check_framing(self) -> None:
        """Reject a request that another server could frame or route differently. Raises ApiError."""

    def received(self) -> bytes | None:
        """The request's body if all of it has arrived, else None."""

    def parts(self) -> AsyncIterator[bytes]:
        """The request's body as it arrives. Raises BadRequest."""

    def has_room(self, size: int) -> bool:
        """True if `size` bytes can be written now, without waiting."""

    def begin(
        self, status: int, headers: Mapping[str, str], data: bytes = b"", *, is_whole: bool = False
    ) -> Awaitable[None] | None:
        """Write the head and the first `data` of the body. `is_whole`: there is no more, and the length is stated."""

    def write(self, data: bytes, chunk: bytes = b"") -> Awaitable[None] | None:
        """Write more of the body. `chunk`: the same bytes in the framing of one HTTP/1.1 chunk, where that is known."""

    def end(self) -> Awaitable[None] | None:
        """Write the end of the body."""


@dataclass(slots=True, kw_only=True)
class ForwardedRequest:
    """One request for a worker. `model` is its id, `body` the client's bytes. Not modified after it is made; it is not
    declared frozen because that makes construction five times slower."""

    route: Route
    model: str
    body: bytes
    stream: bool
    autoload: bool | None  # None: the preset's setting
    request_id: str
    arrived: float
    read: float  # when the last byte had arrived, by the clock of `arrived`
    timeout: float  # seconds for the whole request; 0.0: no limit
    adapter: str = ""  # the adapter that is named outside the body
    asked: str = ""  # the model's name as the client wrote it, if the body does not contain it
    stream_dialect: Dialect | None = None  # the API whose frames the stream has; None: that of the path


@dataclass(slots=True, eq=False, kw_only=True)
class Incoming:
    """One HTTP request. The transport fills in the facts; the pipeline adds what its steps find out."""

    outlet: Outlet
    method: str
    path: str
    client: str  # its address; empty for a unix socket
    id: str  # the value of X-Request-Id in the response and in the log
    arrived: float
    route: Route | None  # None: no route has this path and method
    path_id: str | None = None  # the model named in the path
    query: Mapping[str, str] = field(default_factory=dict)  # parameters that the route declares; others are ignored
    changes_state: bool = True  # False for a GET that triggers nothing; any web page may send such requests
    # Found out by the pipeline:
    key: ApiKey = NO_KEY
    body: bytes = b""
    held: int = 0  # bytes of its body that are counted in `Bodies.held`
    model: str = "unknown"  # the id of the model
    response: "ProxiedResponse | None" = None  # set once the proxy works on it
    stage: str = "queued"  # see `phase`, while there is no `response`
    ignored: Mapping[str, str] = field(default_factory=dict)  # the header that lists unknown body fields
    status: int = 499  # the outcome, which can differ from the status line; 499: the client disconnected

    @property
    def phase(self) -> str:
        """The phase that a disconnect is counted under: queued, starting, streaming, events."""
        return self.response.phase if self.response is not None else self.stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Time limits of a response, in seconds."""

    commit: float = 10.0  # until a waiting stream gets its status line
    ping: float = 15.0  # between the comments of a waiting stream
    write_stall: float = 30.0  # for one write


class ClientGone(Exception):
    """The client has closed its connection, or has not read for `write_stall` seconds."""


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

    def __init__(self, outlet: Outlet, request: ForwardedRequest, pace: Pace, headers: Mapping[str, str]):
        self.outlet = outlet
        self.request = request
        self.headers = dict(headers)
        self._dialect = request.stream_dialect or request.route.dialect
        self.form = stream(self._dialect)
        self._pace = pace

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
        await self._sent(self.outlet.begin(status, {**self.headers, **of_stream}, data))

    async def send_whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send status line, headers and the whole body. Raises ClientGone like `write`."""
        self.status = status
        await self._sent(self.outlet.begin(status, {**self.headers, **headers}, body, is_whole=True))

    async def write(self, data: bytes) -> None:
        """Send more of the body. Raises ClientGone, after aborting the connection, if the client does not read."""
        await self._sent(self.outlet.write(data))

    async def finish(self) -> None:
        """Send the orderly end of the body. Raises ClientGone like `write`."""
        await self._sent(self.outlet.end())

    async def _sent(self, pending: Awaitable[None] | None) -> None:
        """Wait for a write of the outlet, at most `write_stall` seconds."""
        if pending is None:  # the usual case: written already, so no timer is needed
            return
        try:
            async with asyncio.timeout(self._pace.write_stall or None):
                await pending
        except TimeoutError:
            if self.outlet.transport is not None:
                self.outlet.transport.abort()
            raise ClientGone from None
        except ConnectionError:
            raise ClientGone from None

    async def comment(self, text: str) -> None:
        """Send a comment in the stream's own form, after the status line if that is not sent yet."""
        frame = keepalive_frame(self._dialect, text, has_begun=False, model=self.request.model)
        if not self.committed:
            await self.commit(data=frame)
        elif frame:
            await self.write(frame)

    async def abort(self, error: ApiError) -> None:
        """Send one error frame, then end the connection without the end of the body."""
        frame = error_frame(
            self._dialect,
            status=error.status,
            type=error.type,
            reason=error.reason,
            message=error.message,
            param=error.param,
            request_id=self.request.request_id,
        )
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
        limit = time.monotonic() + (self._pace.write_stall or FLUSH_TIMEOUT)
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


__all__ = ["ClientGone", "ForwardedRequest", "Incoming", "Outlet", "Pace", "ProxiedResponse"]

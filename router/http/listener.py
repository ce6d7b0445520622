"""The listener, which accepts clients, and its reader of plain POSTs: the transport of nearly all requests.

A plain request is a POST in HTTP/1.1 to the path of a route that workers answer, with printable ASCII in its head, no
header twice, a Content-Length and a body that arrives within a moment. The first request of a connection that is
anything else is handed with its connection to aiohttp's server, before a byte of it has been answered. So aiohttp stays
the only place that rejects malformed HTTP.

The alternative is to let aiohttp read everything. This reader stays because it saves CPU: user plus system time of the
router's process for a whole request, with the two taking turns by the rounds of scripts/bench_proxy on a busy machine.
Two runs gave 35 % and 19 % less (medians; the least disturbed rounds 33 % and 25 %) at 1 connection, and 43 % and 43 %
(40 % and 39 %) at 16.

Rules: one answer at a time, in the order of the requests; a connection whose answer is incomplete is closed.

As many clients are accepted as there are file descriptors for; others wait in the backlog, and idle connections are
closed early. A client takes one descriptor, its request another one to a worker, and an earlier request may have left a
third one open. If clients could take the last descriptor, no worker could be started and no file read for the requests
that are running. So descriptors are counted before a connection is accepted. The alternative, accepting and then
rejecting with 503, needs a descriptor itself.
"""

import asyncio
import contextlib
import functools
import logging
import math
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, ClassVar, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from worker.protocol.routes import Route

log = logging.getLogger("router.connections")

# Descriptors that clients never get: 64 for processes and files, and 128 that a router with twenty workers keeps open.
RESERVED = 192
PER_CLIENT = 3  # descriptors for a client: see above
LEAST, MOST = 16, 1 << 16  # bounds of the number of clients; both are guesses
AT_ONCE = 64  # connections accepted in one pass of the event loop, so that running requests get their turn
RETRY_INTERVAL = 1.0  # seconds until the next try after accept(2) failed
WARNING_INTERVAL = 60.0  # seconds between two log lines with the same message

LONGEST_HEAD = 1 << 14  # bytes of a request's head that this reader accepts; aiohttp takes over longer ones
# Bytes of a body that this reader accepts. aiohttp takes over longer ones, which arrive in parts that are counted.
LONGEST_BODY = 1 << 18
SWEEP = 1.0  # seconds between two checks of all connections, and within which a request must arrive completely
KEEP_ALIVE = 75.0  # seconds that a connection may be idle between requests
# The same while clients wait in the backlog. Idle connections of pools are closed, so that these clients are accepted.
# A client with a request every few seconds keeps its connection. A guess.
CROWDED_KEEP_ALIVE = 5.0
PRINTABLE = bytes(range(32, 127))
# Headers that make a request other than plain.
SPECIAL_HEADERS = frozenset({"transfer-encoding", "content-encoding", "expect", "upgrade", "origin", "sec-fetch-site"})
# By the value of the request's Connection header: True if the connection stays open. Other values are not plain.
STAYS_OPEN = {"": True, "keep-alive": True, "close": False}
# Bytes that `has_room` allows in the write buffer: half of asyncio's high-water mark, above which it pauses writing.
WRITE_BUFFER = 1 << 15


@dataclass(slots=True, eq=False)
class PlainRequest:
    """One plain request, and the way back to its client. Implements `router.http.request.Outlet`."""

    connection: "_PlainConnection"
    route: Route
    path: str
    headers: Mapping[str, str]  # by lower-case name
    body: bytes
    stays_open: bool  # the connection is used again after the response
    arrived: float = field(default_factory=time.monotonic)
    has_begun: bool = False
    is_complete: bool = False  # the whole response has been written
    _chunked: bool = False
    is_old: ClassVar[bool] = False

    @property
    def transport(self) -> asyncio.Transport | None:
        return self.connection.transport

    @property
    def content_length(self) -> int | None:
        return len(self.body)

    def check_framing(self) -> None:
        """Nothing to reject: `_read_head` has handed over every request that is not plain."""

    def received(self) -> bytes | None:
        return self.body

    async def parts(self) -> AsyncIterator[bytes]:
        yield self.body

    def has_room(self, size: int) -> bool:
        connection = self.connection
        transport = connection.transport
        return (
            transport is not None
            and connection.full is None
            and not transport.is_closing()
            and transport.get_write_buffer_size() + size < WRITE_BUFFER
        )

    def begin(
        self, status: int, headers: Mapping[str, str], data: bytes = b"", *, is_whole: bool = False
    ) -> Awaitable[None] | None:
        if is_whole:
            head = self._head(status, headers, b"" if status == 204 else b"Content-Length: %d\r\n" % len(data))
            self.is_complete = True
            return self._write(head + data)
        self._chunked = "Content-Length" not in headers
        head = self._head(status, headers, b"Transfer-Encoding: chunked\r\n" if self._chunked else b"")
        return self._write(head + self._framed(data) if data else head)

    def write(self, data: bytes) -> Awaitable[None] | None:
        return self._write(self._framed(data)) if data else None  # an empty chunk would be the end of the response

    def end(self) -> Awaitable[None] | None:
        self.is_complete = True
        return self._write(b"0\r\n\r\n") if self._chunked else None

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _head(self, status: int, headers: Mapping[str, str], framing: bytes) -> bytes:
        """Status line and headers. Raises ValueError if a header contains a line end (response splitting)."""
        if headers.get("Connection") == "close":
            self.stays_open = False
        # One check for all headers: as many line ends as headers means that no value contains one.
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if not lines.count("\n") == lines.count("\r") == len(headers):
            raise ValueError("a response header contains a line end")
        if not self.stays_open and "Connection" not in headers:
            lines += "Connection: close\r\n"
        return (_status_line(status) + lines).encode() + framing + _date(int(time.time()))

    def _write(self, data: bytes) -> Awaitable[None] | None:
        connection = self.connection
        transport = connection.transport
        if transport is None or transport.is_closing():
            return _gone()
        self.has_begun = True
        transport.write(data)
        return None if connection.full is None else asyncio.shield(connection.full)


async def _gone() -> None:
    raise ConnectionResetError("the client is gone")


@functools.lru_cache(maxsize=64)
def _status_line(status: int) -> str:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n"


@functools.lru_cache(maxsize=2)
def _date(second: int) -> bytes:
    """The last line of a head, and its end. Cached, as it changes once a second."""
    return f"Date: {formatdate(second, usegmt=True)}\r\n\r\n".encode()


def capacity() -> int:
    """The number of clients that this process can have at once, by its limit of descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if limit == resource.RLIM_INFINITY else max(LEAST, (limit - RESERVED) // PER_CLIENT)


class Fallback(asyncio.Protocol):
    """A protocol that takes over a connection."""

    def check(self, now: float, keep_alive: float) -> None:
        """Close the connection if it has waited for the head of a request for `keep_alive` seconds. Abort one whose
        client does not read the end of its response."""


class Listener:
    """All connections to one router.

    `routes`: the routes whose plain requests `serve` answers, by path. `serve` raises only CancelledError, when the
    client is gone. `make_fallback`: creates the protocol that takes over a connection with any other request; the
    protocol calls the given function when the connection is lost. `most`: clients at once (default: `capacity`).
    `unread_timeout`: seconds until a connection is aborted whose client does not read the end of its response.
    """

    def __init__(
        self,
        routes: Mapping[bytes, Route],
        serve: Callable[[PlainRequest], Coroutine[Any, Any, None]],
        make_fallback: Callable[[Callable[[], None]], Fallback],
        most: int | None = None,
        unread_timeout: float = KEEP_ALIVE,
    ):
        self.routes = routes
        self.serve = serve
        self.make_fallback = make_fallback
        self.most = most or capacity()
        self.unread_timeout = unread_timeout
        self.loop = asyncio.get_running_loop()
        self.clients: set[object] = set()  # the connections of all clients, also those that aiohttp has taken over
        self.connections: set[_PlainConnection] = set()  # those that this module reads
        self.handed_over: set[Fallback] = set()  # those that aiohttp reads
        self._sockets: list[socket.socket] = []
        self._accepts = True
        self._connecting: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._warned: dict[str, float] = {}
        self.closing = False
        self._timer = self.loop.call_later(SWEEP, self._sweep)

    def listen(self, sock: socket.socket, backlog: int = 1024) -> None:
        """Accept clients from `sock`, which must be bound and is closed by `close`. Raises OSError."""
        sock.setblocking(False)
        sock.listen(backlog)
        self._sockets.append(sock)
        if self._accepts:
            self.loop.add_reader(sock.fileno(), self._accept, sock)

    def left(self, client: object, fallback: Fallback | None = None) -> None:
        """Stop counting a client whose connection is lost, and accept a waiting one in its place."""
        self.clients.discard(client)
        if fallback is not None:
            self.handed_over.discard(fallback)
        if not self._accepts and self._retry is None and len(self.clients) < self.most:
            self._resume()

    async def close(self, grace: float) -> None:
        """Accept no more clients and close all connections.

        Idle ones are closed at once, others when their request is answered, at the latest after `grace` seconds.
        """
        self._pause()
        for timer in (self._retry, self._timer):
            if timer is not None:
                timer.cancel()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
        self.closing = True
        for connection in tuple(self.connections):
            connection.close_if_idle()
        tasks = [connection.task for connection in self.connections if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        for connection in tuple(self.connections):
            connection.abort()
        if tasks := [task for task in tasks if not task.done()]:
            await asyncio.wait(tasks, timeout=grace)

    def _sweep(self) -> None:
        now = self.loop.time()
        is_full = not self._accepts and self._retry is None
        for connection in tuple(self.connections):
            connection.check(now, CROWDED_KEEP_ALIVE if is_full else KEEP_ALIVE)
        for fallback in tuple(self.handed_over):
            fallback.check(now, CROWDED_KEEP_ALIVE if is_full else math.inf)  # aiohttp itself waits for KEEP_ALIVE
        self._timer = self.loop.call_later(SWEEP, self._sweep)

    # Accepting

    def _resume(self) -> None:
        self._accepts, self._retry = True, None
        for sock in self._sockets:
            self.loop.add_reader(sock.fileno(), self._accept, sock)

    def _pause(self) -> None:
        self._accepts = False
        for sock in self._sockets:
            self.loop.remove_reader(sock.fileno())

    def _accept(self, sock: socket.socket) -> None:
        """Accept waiting clients while there is room."""
        for _ in range(AT_ONCE):
            if len(self.clients) >= self.most:
                # The listening socket stays readable, so its reader is removed; otherwise the loop would spin.
                self._pause()
                self._warn(f"{self.most} clients are connected, which is as many as there are descriptors for")
                return
            try:
                client, _ = sock.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # it disconnected while it was in the backlog
                continue
            except OSError as error:  # no descriptor or memory left after all, or a broken network (accept(2))
                self._pause()
                self._retry = self.loop.call_later(RETRY_INTERVAL, self._resume)
                self._warn(f"no client can be accepted ({error.strerror or error})")
                return
            connection = _PlainConnection(self)
            self.clients.add(connection)
            task = self.loop.create_task(self._connect(client, connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, client: socket.socket, connection: asyncio.Protocol) -> None:
        try:
            client.setblocking(False)
            if client.family != socket.AF_UNIX:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self.loop.connect_accepted_socket(lambda: connection, client)
        except OSError:  # it disconnected meanwhile
            client.close()
            self.left(connection)

    def _warn(self, message: str) -> None:
        now = self.loop.time()
        if now - self._warned.get(message, -WARNING_INTERVAL) >= WARNING_INTERVAL:
            self._warned[message] = now
            log.warning("%s; others wait in the backlog (raise `ulimit -n` for more)", message)


class _PlainConnection(asyncio.Protocol):
    """One connection. The parser gets the head and body of one request at a time, and calls the methods `on_...`."""

    def __init__(self, listener: Listener):
        self._listener = listener
        self.transport: asyncio.Transport | None = None
        self.client = ""
        self.full: asyncio.Future[None] | None = None  # done when the write buffer has room again; None: it has room
        self.task: asyncio.Task[None] | None = None  # answers the requests, from the first one on
        self.is_busy = False  # a request is being answered
        self._idle: asyncio.Future[PlainRequest] | None = None  # the next request; awaited while the connection is idle
        self._parser: HttpRequestParser | None = HttpRequestParser(self)  # a reference cycle: None in the end
        self._data = b""  # received bytes that belong to no request that was taken
        # Bytes of the head of the request that is arriving, once that is parsed, and of the whole request.
        self._head = self._length = 0
        self._since = 0.0  # when the last response ended, or the first byte of the request that is arriving came
        self._route: Route | None = None
        self._stays_open = True
        self._paused = False
        self._clear()

    def _clear(self) -> None:
        self._target = b""
        self._headers: dict[str, str] = {}
        self._plain = True
        self._complete = False

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.client = str(peer[0]) if isinstance(peer, tuple) else ""
        if sock := transport.get_extra_info("socket"):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._since = self._listener.loop.time()
        self._listener.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.connections.discard(self)
        self._listener.left(self)
        self.transport = self._parser = None
        self.resume_writing()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self.full = self._listener.loop.create_future()

    def resume_writing(self) -> None:
        if self.full is not None and not self.full.done():
            self.full.set_result(None)
        self.full = None

    def data_received(self, data: bytes) -> None:
        if not self.is_busy:
            if self._data:
                self._data += data
            else:
                self._data = data
                self._since = self._listener.loop.time()
            self._next()
            return
        # Pipelining: the next request has arrived before this one is answered. It waits, and reading pauses when it is
        # longer than a head, so that a client cannot fill the memory.
        self._data += data
        if len(self._data) > LONGEST_HEAD and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()

    # Requests

    def _next(self) -> None:
        """Take the next request, if all of it has arrived."""
        data = self._data
        if not self._length:
            head = data.find(b"\r\n\r\n") + 4
            if head < 4:
                if len(data) > LONGEST_HEAD:
                    self._hand_over()
                return
            length = self._read_head(data[:head])
            if length is None:
                self._hand_over()
                return
            self._head, self._length = head, head + length
        if len(data) < self._length:
            return
        body, self._data = data[self._head : self._length], data[self._length :]
        self._length = 0
        route, target, headers = self._route, self._target, self._headers
        assert route is not None
        assert self._parser is not None
        try:
            self._parser.feed_data(body)
        except HttpParserError:
            # The body is cut out by its length, so its content cannot confuse the framing. A parser that fails here is
            # only replaced.
            self._parser = HttpRequestParser(self)
        self._clear()
        request = PlainRequest(self, route, target.decode("ascii"), headers, body, self._stays_open)
        self.is_busy = True
        if self._idle is None:
            self.task = self._listener.loop.create_task(self._answer_requests(request))
        else:
            self._idle.set_result(request)
            self._idle = None

    def _read_head(self, head: bytes) -> int | None:
        """Parse the head of a request. Returns the length of its body, or None if the request is not plain."""
        # Only printable ASCII and CRLF: everything on which HTTP parsers are known to differ is left to aiohttp.
        if len(head) > LONGEST_HEAD or head.translate(None, PRINTABLE) != b"\r\n" * head.count(b"\n"):
            return None
        assert self._parser is not None
        try:
            self._parser.feed_data(head)
        except (HttpParserError, HttpParserUpgrade):
            return None
        headers = self._headers
        route = self._listener.routes.get(self._target)
        length = headers.get("content-length", "")
        stays_open = STAYS_OPEN.get(headers.get("connection", "").lower())
        if (
            not (self._plain and self._complete)
            or route is None
            or stays_open is None
            or "host" not in headers
            or not (length.isdigit() and len(length) < 10 and int(length) <= LONGEST_BODY)
            or not SPECIAL_HEADERS.isdisjoint(headers)
            or self._parser.get_method() != route.method.encode()
            or self._parser.get_http_version() != "1.1"
        ):
            return None
        self._route, self._stays_open = route, stays_open
        return int(length)

    async def _answer_requests(self, request: PlainRequest) -> None:
        """Answer `request` and the following ones of the connection, one after the fallback."""
        listener = self._listener
        try:
            while True:
                await listener.serve(request)
                transport = self.transport
                if transport is None or not (request.is_complete and request.stays_open) or listener.closing:
                    return
                if transport.is_closing():
                    return
                self._since = listener.loop.time()
                self.is_busy = False
                self._idle = idle = listener.loop.create_future()
                del request  # frees its body while the connection is idle
                if self._paused:
                    self._paused = False
                    transport.resume_reading()
                if self._data:
                    self._next()
                request = await idle
        finally:
            self.task = self._idle = None
            self.is_busy = False
            self._since = listener.loop.time()
            if self.transport is not None:
                self.transport.close()

    def _hand_over(self) -> None:
        """Give the connection to aiohttp, with all bytes that belong to no answered request."""
        transport, data = self.transport, self._data
        assert transport is not None
        self._listener.connections.discard(self)
        self.transport = self._parser = None
        if self._idle is not None:
            self._idle.cancel()
        fallback = self._listener.make_fallback(lambda: self._listener.left(self, fallback))
        self._listener.handed_over.add(fallback)
        transport.set_protocol(fallback)
        fallback.connection_made(transport)
        if self.full is not None:
            fallback.pause_writing()
        if data:
            fallback.data_received(data)

    def check(self, now: float, keep_alive: float = KEEP_ALIVE) -> None:
        """Hand over a request that arrives slowly; close a connection that has been idle for `keep_alive` seconds."""
        if self.is_busy or self.transport is None:
            return
        if self.transport.is_closing():  # which takes until the client has read its response
            if now - self._since > self._listener.unread_timeout:
                self.transport.abort()
        elif self._data:
            if now - self._since > SWEEP:
                self._hand_over()
        elif now - self._since > keep_alive:
            self.close_if_idle()

    def close_if_idle(self) -> None:
        if not self.is_busy and self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # The parser

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        if key in self._headers:  # which of two equal headers counts differs between servers
            self._plain = False
        self._headers[key] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        self._complete = True

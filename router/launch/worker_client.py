"""HTTP client for one worker: requests over connections that are kept open, one at a time on each.

It supports only what the contract with the worker needs: HTTP/1.1, responses that state their end (a length, or
chunks), no redirects, decompression or cookies. It costs a third of what a general client does (benchmarks/proxy.md).

A response is complete only where its framing shows that. A connection on which anything unexpected arrived is never
used again, so that no byte of one response can reach the client of another.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Mapping
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

# Seconds until the next attempt to connect to a worker whose backlog is full. A unix socket does not wait then
# (connect(2), EAGAIN), and nothing signals when the backlog has room.
RETRY_INTERVAL = 0.05
MAX_RETRIES = 400  # 20 s: a worker that has accepted no connection for so long accepts none
KEEP_IDLE = 15.0  # seconds for which an idle connection is used again: less than workers allow, so that none closes it
LONGEST_HEAD = 1 << 16  # bytes of a response's headers, and of its trailer
MAX_INTERIM = 8  # responses of status 1xx before the final one
MAX_UNREAD = 1 << 18  # bytes of a response that wait for their reader before reading from the socket pauses
WRITE_BYTES = 1 << 16  # bytes of a request's body that are written at once
# errno values of connect(2) that mean that no process listens at the address any more (unix(7)).
NOT_LISTENING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ECONNREFUSED})


class WorkerClientError(Exception):
    """The exchange with a worker failed."""


class ConnectionBroken(WorkerClientError):
    """There was no connection, it ended before the response did, or the exchange was closed."""


class Unreachable(ConnectionBroken):
    """No process accepts connections at the worker's address. Nothing was sent."""


class NotHttp(WorkerClientError):
    """The worker's bytes are not an HTTP/1.1 response that states its end."""


class Exchange:
    """One request and its response.

    Must be closed in any case, which ends its connection if the response is incomplete.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.status = 0
        # By lower-case name; of several with one name, the last. Complete once `head` has returned.
        self.headers: dict[str, str] = {}
        self.connection: _WorkerConnection | None = None  # while the response is incomplete
        self.connecting: asyncio.Task[None] | None = None  # sends the request, if that takes time
        # Called with arriving bytes instead of waking the reader, until it returns False: `read` then returns those
        # bytes and the following ones. It raises nothing.
        self.sink: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._unread = 0
        self._ended = False
        self._error: WorkerClientError | None = None

    @property
    def has_head(self) -> bool:
        return self.status != 0

    @property
    def at_end(self) -> bool:
        """True if the whole response has arrived and was read."""
        return self._ended and not self._parts

    async def head(self) -> None:
        """Return once status and headers are known. Raises WorkerClientError."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self) -> bytes:
        """Return the bytes that have arrived since the last call, waiting for some; empty at the end.

        Raises WorkerClientError. One reader at a time.
        """
        while not self._parts:
            if self._ended:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        data = self._unread_bytes()
        self._mark_read()
        return data

    async def whole(self) -> bytes:
        """Return the whole body, once `head` is known. Raises WorkerClientError."""
        await self.head()
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    def _unread_bytes(self) -> bytes:
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def _mark_read(self) -> None:
        self._parts.clear()
        self._unread = 0
        if self.connection is not None:
            self.connection.resume_reading()

    def close(self) -> None:
        """End it: a waiting reader gets ConnectionBroken.

        The worker sees its connection end, and cancels the request.
        """
        if not self._ended:
            self.fail(ConnectionBroken("closed"))

    def _wait(self) -> asyncio.Future[None]:
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: the reader was cancelled
            waiter.set_result(None)

    # Called by the connection

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers
        self._wake()

    def on_body(self, data: bytes) -> bool:
        """Returns False if so many bytes are unread that reading should pause."""
        self._parts.append(data)
        self._unread += len(data)
        if self.sink is None:
            self._wake()
        return self._unread < MAX_UNREAD

    def flush(self) -> None:
        """Pass the unread bytes to the sink, as the bytes of one read from the socket are parsed."""
        if not self._parts or self.sink is None:
            return
        if self.sink(self._unread_bytes()):
            self._mark_read()
        else:
            self.sink = None
            self._wake()

    def end(self) -> None:
        self._ended = True
        self.connection = None
        self._wake()

    def fail(self, error: WorkerClientError) -> None:
        """Fail with `error`, unless the response is complete."""
        if self._error is None and not self._ended:
            self._error = error
            self._wake()
        if self.connecting is not None:
            self.connecting.cancel()
        if self.connection is not None:
            connection, self.connection = self.connection, None
            connection.drop()


class WorkerClient:
    """All connections to the worker at `address`: unix:PATH."""

    def __init__(self, address: str) -> None:
        self._path = address.removeprefix("unix:")
        self._loop = asyncio.get_running_loop()
        self._idle: list[_WorkerConnection] = []
        self._open: set[_WorkerConnection] = set()
        self._exchanges: set[Exchange] = set()  # those without a connection yet
        self.closed = False
        self.unreachable = asyncio.Event()  # set when no new connection could be made; open ones may go on

    def begin(self, method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> Exchange:
        """Send a request. The exchange returns the response, and raises every error.

        `target` and the headers' values must be ASCII without line ends.
        """
        # Not a coroutine: with a kept connection and a short body the request is written before the caller's next line.
        exchange = Exchange(self._loop)
        if self.closed:
            exchange.fail(ConnectionBroken("the worker is gone"))
            return exchange
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        length = f"Content-Length: {len(body)}\r\n" if body or method != "GET" else ""
        head = f"{method} {target} HTTP/1.1\r\nHost: worker\r\n{lines}{length}\r\n".encode("ascii")
        connection = self._take_idle()
        if connection is not None and len(body) < WRITE_BYTES:
            connection.begin(exchange)
            connection.write(head + body)
        else:
            self._exchanges.add(exchange)
            exchange.connecting = self._loop.create_task(self._send(exchange, connection, head, body))
        return exchange

    def close(self) -> None:
        """End all exchanges and connections."""
        self.closed = True
        for exchange in tuple(self._exchanges):
            exchange.fail(ConnectionBroken("the worker is gone"))
        for connection in tuple(self._open):
            connection.fail(ConnectionBroken("the worker is gone"))
        self._idle.clear()

    def _take_idle(self) -> "_WorkerConnection | None":
        now = self._loop.time()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since < KEEP_IDLE and connection.is_open:
                return connection
            connection.drop()
        return None

    async def _send(self, exchange: Exchange, connection: "_WorkerConnection | None", head: bytes, body: bytes) -> None:
        """Do the work of `begin` if a connection must be made first or the body is long."""
        try:
            if connection is None:
                connection = await self._connect()
            connection.begin(exchange)
            exchange.connecting = None
            await connection.write_all(head, body)
        except OSError as error:
            exchange.connecting = None
            if connection is None and error.errno in NOT_LISTENING:
                self.unreachable.set()
                exchange.fail(Unreachable(f"no process listens at its socket ({error.strerror})"))
            else:
                exchange.fail(ConnectionBroken(str(error)))
        finally:
            self._exchanges.discard(exchange)
            if connection is not None and connection.exchange is None:
                connection.drop()  # the exchange was closed meanwhile

    async def _connect(self) -> "_WorkerConnection":
        """Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            # Never blocks: a unix socket connects at once or not at all.
            for _ in range(MAX_RETRIES):
                with contextlib.suppress(BlockingIOError):
                    sock.connect(self._path)
                    break
                await asyncio.sleep(RETRY_INTERVAL)
            else:
                raise BlockingIOError(errno.EAGAIN, "it accepts no connections")
            _, connection = await self._loop.create_unix_connection(lambda: _WorkerConnection(self), sock=sock)
        except BaseException:
            sock.close()
            raise
        return connection

    # Called by connections

    def opened(self, connection: "_WorkerConnection") -> None:
        self._open.add(connection)

    def keep(self, connection: "_WorkerConnection") -> None:
        connection.idle_since = self._loop.time()
        self._idle.append(connection)

    def forget(self, connection: "_WorkerConnection") -> None:
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)


class _WorkerConnection(asyncio.Protocol):
    """One connection. The parser calls the methods `on_...`."""

    def __init__(self, client: WorkerClient) -> None:
        self._client = client
        self._parser: HttpResponseParser | None = HttpResponseParser(self)  # a reference cycle: None in the end
        self._transport: asyncio.Transport | None = None
        self._drained: asyncio.Future[None] | None = None
        self.exchange: Exchange | None = None  # the one whose response is expected or arriving
        self.idle_since = 0.0
        self._sending = False
        self._paused = False
        self._clear()

    def _clear(self) -> None:
        """Reset the state of one response."""
        self._headers: dict[str, str] = {}
        self._head_bytes = 0  # of names and values so far
        self._overhead = 0  # bytes of framing since the last bytes of a body
        self._has_head = self._had_content = self._complete = self._stays_open = False
        self._interim = 0
        self._problem = ""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, exchange: Exchange) -> None:
        """Carry `exchange` from now on."""
        self.exchange = exchange
        exchange.connection = self

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    async def write_all(self, head: bytes, body: bytes) -> None:
        """Write a request with a long body. Returns once all is written, or the exchange has ended."""
        self.write(head + body[:WRITE_BYTES])
        if len(body) <= WRITE_BYTES:
            return
        exchange, self._sending = self.exchange, True
        rest = memoryview(body)[WRITE_BYTES:]
        while rest and self.exchange is exchange and self.is_open:
            assert self._transport is not None
            self._transport.write(rest[:WRITE_BYTES])
            rest = rest[WRITE_BYTES:]
            if self._drained is not None:
                await asyncio.shield(self._drained)
        self._sending = False

    def resume_reading(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def drop(self) -> None:
        """End the connection at once, without reporting it to an exchange."""
        self.exchange = None
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: WorkerClientError) -> None:
        """End the connection, and fail the exchange on it."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.fail(error)
        self.drop()

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._client.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.forget(self)
        self.resume_writing()
        self._transport = self._parser = None
        self.fail(ConnectionBroken("the connection ended" if error is None else str(error)))

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:  # bytes without a request
            self.drop()
            return
        assert self._parser is not None
        self._had_content = False
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self._problem = "it switches the protocol"
        except HttpParserError as error:
            self._problem = self._problem or str(error)
        if exchange.sink is not None:
            exchange.flush()
        self._overhead = 0 if self._had_content else self._overhead + len(data)
        if self._complete:
            self._end()
        elif self._overhead > LONGEST_HEAD:
            self.fail(NotHttp(f"more than {LONGEST_HEAD} bytes of headers or framing"))
        elif self._problem:
            self.fail(NotHttp(self._problem))

    def _end(self) -> None:
        """The response is complete. Keep the connection, unless something about it was unexpected."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.end()
        if self._problem or self._sending or not self._stays_open or not self.is_open:
            self.drop()
            return
        self.resume_reading()
        self._clear()
        self._client.keep(self)

    # The parser

    def on_message_begin(self) -> None:
        if self._complete:
            self._problem = "bytes after the end"

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > LONGEST_HEAD:
            self._problem = f"headers of more than {LONGEST_HEAD} bytes"
        elif not self._has_head:  # trailers are ignored
            self._headers[name.decode("latin-1").lower()] = value.decode("utf-8", "surrogateescape")

    def on_headers_complete(self) -> None:
        if self._complete or self._parser is None:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._interim += 1
            if self._interim > MAX_INTERIM:
                self._problem = f"more than {MAX_INTERIM} responses of status 1xx"
            self._headers = {}
            return
        coding = self._headers.get("transfer-encoding")
        if coding is None:
            stated = "content-length" in self._headers or status in (204, 304)
        else:
            stated = coding.strip().lower() == "chunked"
        if not stated:
            self._problem = "its end is not stated"
        if self._parser.get_http_version() != "1.1":
            self._problem = f"HTTP/{self._parser.get_http_version()}"
        if self._problem:
            return
        self._has_head = self._had_content = True
        self._head_bytes = 0
        if self.exchange is not None:
            self.exchange.on_head(status, self._headers)

    def on_body(self, body: bytes) -> None:
        if self._problem or not self._has_head or self.exchange is None:
            return
        self._had_content = True
        if not self.exchange.on_body(body) and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._has_head and not self._complete and self._parser is not None:
            self._complete = True
            self._stays_open = self._parser.should_keep_alive()  # read it now: the next message resets it

"""HTTP to one worker: requests over connections that are kept, one at a time on each.

A client for what the contract allows and no more: HTTP/1.1, answers that state their end (a length, or chunks), nothing
redirected, decoded or remembered. It costs a third of what a general client does (benchmarks/proxy.md).

Law: an answer ends well only where its framing says so, and a connection on which anything unexpected was seen is
never used again: no byte of one answer can reach another's client.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Mapping
from typing import Literal, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

CONNECT_TIMEOUT = 5.0
"""Seconds."""
CROWDED = 0.05
"""Seconds until a worker is knocked at again whose backlog is full: a unix socket is not connected then (connect(2),
EAGAIN), and nobody tells when it could be."""
KNOCKS = 400
"""How often at most: a worker that has not taken a connection for so long takes none."""
KEPT = 15.0
"""Seconds for which an idle connection is used again: less than workers grant, so that none closes it meanwhile."""
LONGEST_HEAD = 1 << 16
"""Bytes of an answer's header, and of its trailer."""
MOST_INTERIM = 8
"""Answers of status 1xx before the one that counts."""
PILE = 1 << 18
"""Bytes of an answer that wait for their reader before no more are read."""
PIECE = 1 << 16
"""Bytes of a request's body that are written at once."""
NOBODY = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ECONNREFUSED})
"""Why there is no connection to somebody who is not there: what stands at its address is gone, is something else, or is
nobody's any more (unix(7))."""


class WireError(Exception):
    """The exchange with a worker failed."""


class Broken(WireError):
    """There was no connection, it ended before the answer did, or the exchange was closed."""


class Unreachable(Broken):
    """Nobody takes connections at its address, where a worker that is ready does. Nothing was sent."""


class NotHttp(WireError):
    """What came is not an answer in HTTP/1.1 whose end is stated."""


class Exchange:
    """One request and its answer. Must be closed, however it ends; that ends its connection unless all is said."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.status = 0
        self.headers: dict[str, str] = {}
        """By lower-case name; of several with one name, the last. Complete once `head` has returned."""
        self.connection: _Connection | None = None
        """While the answer is not complete."""
        self.connecting: asyncio.Task[None] | None = None
        """Sends the request, where that takes time."""
        self.sink: Callable[[bytes], bool] | None = None
        """Called with arriving bytes instead of waking the reader, until it returns False: `read` then returns those
        bytes and the following ones. It raises nothing."""
        self.chunk_sink: Callable[[bytes, int], bool] | None = None
        """Called before `sink` with a chunk that arrives alone, in its framing, and the offset of its content. If it
        returns False, the chunk goes to `sink`. It raises nothing."""
        self._waiter: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._piled = 0
        self._ended = False
        self._error: WireError | None = None

    @property
    def has_head(self) -> bool:
        return self.status != 0

    @property
    def at_end(self) -> bool:
        """Whether everything has come and was read."""
        return self._ended and not self._parts

    async def head(self) -> None:
        """Returns once status and headers are known. Raises WireError."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._more()

    async def read(self) -> bytes:
        """What has come since the last call, once there is something; nothing at the end. Raises WireError.

        One reader at a time.
        """
        while not self._parts:
            if self._ended:
                return b""
            if self._error is not None:
                raise self._error
            await self._more()
        data = self._take_all()
        if self.connection is not None:
            self.connection.go_on()
        return data

    def _take_all(self) -> bytes:
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._piled = 0
        return data

    def close(self) -> None:
        """Nobody wants more of it: whoever waits gets Broken, and the worker sees the connection end."""
        if not self._ended:
            self.fail(Broken("closed"))

    async def _more(self) -> None:
        self._waiter = waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What a connection tells

    def headed(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers
        self._wake()

    def take(self, data: bytes) -> bool:
        """False if there is so much by now that no more should come."""
        self._parts.append(data)
        self._piled += len(data)
        if self.sink is None:
            self._wake()
        return self._piled < PILE

    def pour(self) -> None:
        """For now no more comes: what has come goes into the sink."""
        if not self._parts or self.sink is None:
            return
        if not self.sink(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)):
            self.sink = self.chunk_sink = None
            self._wake()
            return
        self._parts.clear()
        self._piled = 0
        if self.connection is not None:
            self.connection.go_on()

    def end(self) -> None:
        self._ended = True
        self.connection = None
        self._wake()

    def fail(self, error: WireError) -> None:
        """Nothing happens to an answer that is complete."""
        if self._error is None and not self._ended:
            self._error = error
            self._wake()
        if self.connecting is not None:
            self.connecting.cancel()
        if self.connection is not None:
            connection, self.connection = self.connection, None
            connection.drop()


class Wire:
    """All connections to the worker at `address`, which is written as in the contract: unix:PATH or tcp:HOST:PORT."""

    def __init__(self, address: str) -> None:
        kind, _, self._where = address.partition(":")
        self._kind: Literal["unix", "tcp"] = "unix" if kind == "unix" else "tcp"
        self._loop = asyncio.get_running_loop()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._exchanges: set[Exchange] = set()
        """Those without a connection yet."""
        self.closed = False
        self.unreachable = asyncio.Event()
        """Somebody has found that no new connection can be made; those that stand may go on."""

    def begin(self, method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> Exchange:
        """Send a request; the answer comes through the exchange, and so does whatever goes wrong.

        `target` and the headers' values are ASCII without line ends.
        """
        exchange = Exchange(self._loop)
        if self.closed:
            exchange.fail(Broken("the worker is gone"))
            return exchange
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        length = f"Content-Length: {len(body)}\r\n" if body or method != "GET" else ""
        head = f"{method} {target} HTTP/1.1\r\nHost: worker\r\n{lines}{length}\r\n".encode("ascii")
        connection = self._kept()
        if connection is not None and len(body) < PIECE:
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
            exchange.fail(Broken("the worker is gone"))
        for connection in tuple(self._open):
            connection.lost("the worker is gone")
        self._idle.clear()

    def _kept(self) -> "_Connection | None":
        now = self._loop.time()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since < KEPT and connection.is_open:
                return connection
            connection.drop()
        return None

    async def _send(self, exchange: Exchange, connection: "_Connection | None", head: bytes, body: bytes) -> None:
        """What `begin` does, where a connection must be made first or the body is long."""
        try:
            if connection is None:
                connection = await self._connect()
            connection.begin(exchange)
            exchange.connecting = None
            await connection.write_all(head, body)
        except (OSError, TimeoutError) as error:
            exchange.connecting = None
            if connection is None and error.errno in NOBODY:
                self.unreachable.set()
                exchange.fail(Unreachable(f"nobody listens at its socket ({error.strerror})"))
            else:
                exchange.fail(Broken(str(error) or "no connection in time"))
        finally:
            self._exchanges.discard(exchange)
            if connection is not None and connection.exchange is None:
                connection.drop()  # whoever asked has left meanwhile

    async def _connect(self) -> "_Connection":
        """Raises OSError, TimeoutError."""
        if self._kind == "tcp":
            host, _, port = self._where.rpartition(":")
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, connection = await self._loop.create_connection(lambda: _Connection(self), host, int(port))
            return connection
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            for knock in range(KNOCKS):
                try:
                    sock.connect(self._where)  # without blocking: a unix socket connects at once or not
                    break
                except BlockingIOError:
                    if knock == KNOCKS - 1:
                        raise
                await asyncio.sleep(CROWDED)
            _, connection = await self._loop.create_unix_connection(lambda: _Connection(self), sock=sock)
        except BaseException:
            sock.close()
            raise
        return connection

    # What a connection tells

    def opened(self, connection: "_Connection") -> None:
        self._open.add(connection)

    def keep(self, connection: "_Connection") -> None:
        connection.idle_since = self._loop.time()
        self._idle.append(connection)

    def forget(self, connection: "_Connection") -> None:
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    """One connection. The parser calls the methods that begin with `on_`."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._parser: HttpResponseParser | None = HttpResponseParser(self)  # it refers to us: None in the end
        self._transport: asyncio.Transport | None = None
        self._drained: asyncio.Future[None] | None = None
        self.exchange: Exchange | None = None
        """Whose answer is expected or comes."""
        self.idle_since = 0.0
        self._sending = False
        self._paused = False
        self._clear()

    def _clear(self) -> None:
        """Of what one answer leaves."""
        self._headers: dict[str, str] = {}
        self._head_bytes = self._silent = 0
        """Of names and values so far; bytes since the last of a body."""
        self._headed = self._spoke = self._complete = self._lasts = False
        self._between = False
        """The parser has seen the end of one chunk, and nothing of the next."""
        self._interim = 0
        self._wrong = ""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, exchange: Exchange) -> None:
        """Carry `exchange`. Drops nothing and sends nothing."""
        self.exchange = exchange
        exchange.connection = self

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    async def write_all(self, head: bytes, body: bytes) -> None:
        """Returns once everything is on its way, or nobody wants it any more."""
        self.write(head + body[:PIECE])
        if len(body) <= PIECE:
            return
        exchange, self._sending = self.exchange, True
        rest = memoryview(body)[PIECE:]
        while rest and self.exchange is exchange and self.is_open:
            assert self._transport is not None
            self._transport.write(rest[:PIECE])
            rest = rest[PIECE:]
            if self._drained is not None:
                await asyncio.shield(self._drained)
        self._sending = False

    def go_on(self) -> None:
        """Read more."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def drop(self) -> None:
        """End the connection at once, without a word to anybody."""
        self.exchange = None
        if self._transport is not None:
            self._transport.abort()

    def lost(self, why: str) -> None:
        """End the connection, and the exchange on it."""
        self._refuse(Broken(why))

    def _refuse(self, error: WireError) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.fail(error)
        self.drop()

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._wire.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._wire.forget(self)
        self.resume_writing()
        self._transport = self._parser = None
        self.lost("the connection ended" if error is None else str(error))

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:  # nobody has asked
            self.drop()
            return
        if self._between and exchange.chunk_sink is not None:
            at = start_of_lone_chunk(data)
            if at and exchange.chunk_sink(data, at):
                self._silent = 0
                return  # the parser is where it was: between two chunks
        assert self._parser is not None
        self._spoke = False
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self._wrong = "it changes the protocol"
        except HttpParserError as error:
            self._wrong = self._wrong or str(error)
        if self._between and not data.endswith(b"\r\n"):
            self._between = False  # the next chunk's size has begun
        if exchange.sink is not None:
            exchange.pour()
        self._silent = 0 if self._spoke else self._silent + len(data)
        if self._complete:
            self._end()
        elif self._silent > LONGEST_HEAD:
            self._refuse(NotHttp(f"a header, or something else around a body, of more than {LONGEST_HEAD} bytes"))
        elif self._wrong:
            self._refuse(NotHttp(self._wrong))

    def _end(self) -> None:
        """The answer is complete; the connection goes on if nothing speaks against it."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.end()
        if self._wrong or self._sending or not self._lasts or not self.is_open:
            self.drop()
            return
        self.go_on()
        self._clear()
        self._wire.keep(self)

    # The parser

    def on_message_begin(self) -> None:
        if self._complete:
            self._wrong = "bytes behind the end"

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > LONGEST_HEAD:
            self._wrong = f"headers of more than {LONGEST_HEAD} bytes"
        elif not self._headed:  # no trailer
            self._headers[name.decode("latin-1").lower()] = value.decode("utf-8", "surrogateescape")

    def on_headers_complete(self) -> None:
        if self._complete or self._parser is None:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._interim += 1
            if self._interim > MOST_INTERIM:
                self._wrong = f"more than {MOST_INTERIM} answers of status 1xx"
            self._headers = {}
            return
        coding = self._headers.get("transfer-encoding")
        if coding is None:
            stated = "content-length" in self._headers or status in (204, 304)
        else:
            stated = coding.strip().lower() == "chunked"
        if not stated:
            self._wrong = "its end is not stated"
        if self._parser.get_http_version() != "1.1":
            self._wrong = f"HTTP/{self._parser.get_http_version()}"
        if self._wrong:
            return
        self._headed = self._spoke = True
        self._head_bytes = 0
        if self.exchange is not None:
            self.exchange.headed(status, self._headers)

    def on_body(self, body: bytes) -> None:
        if self._wrong or not self._headed or self.exchange is None:
            return
        self._spoke = True
        if not self.exchange.take(body) and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_message_complete(self) -> None:
        if self._headed and not self._complete and self._parser is not None:
            self._complete = True
            self._lasts = self._parser.should_keep_alive()  # only now: the parser forgets it with the message


def start_of_lone_chunk(data: bytes) -> int:
    """Where the content begins, if `data` is exactly one chunk in the plainest form; else 0.

    The size is not read but compared with what it has to be, so that nothing can be taken for a size that is none."""
    start = data.find(b"\n", 0, 10) + 1
    size = len(data) - start - 2
    return start if size > 0 and data.startswith(b"%x\r\n" % size) and data.endswith(b"\r\n") else 0


__all__ = ["Broken", "Exchange", "NotHttp", "Unreachable", "Wire", "WireError"]

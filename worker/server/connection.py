"""Writes to one client's connection, each bounded in time, and an end that a client cannot mistake for a complete
response.

Reasons are measured properties of aiohttp: a write without timeout blocks for ever once the buffers are full;
returning from a handler writes the terminal chunk; a reset with data in flight overtakes that data.
"""

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import AsyncIterator

from aiohttp import HttpVersion11, web

WRITE_TIMEOUT = 30.0  # seconds of one write to a client
_POLL_INTERVAL = 0.01


class ClientGone(Exception):
    """The client has disconnected, or has not read for too long."""


class ClientConnection:
    """Writes responses to the client of `request`. Every write ends within `write_timeout` seconds (None: unbounded) or
    raises ClientGone."""

    def __init__(self, request: web.Request, write_timeout: float | None):
        self._request = request
        self._write_timeout = write_timeout

    async def begin(self, response: web.StreamResponse) -> None:
        """Fix status and headers. They are sent with the first write."""
        async with self._bounded():
            await response.prepare(self._request)

    async def write(self, response: web.StreamResponse, data: bytes) -> None:
        async with self._bounded():
            await response.write(data)

    async def send(self, response: web.Response) -> None:
        """Write a complete response."""
        async with self._bounded():
            await response.prepare(self._request)
            await response.write_eof()

    async def abort(self) -> None:
        """Close the connection so that the client recognizes an incomplete response.

        HTTP/1.1: close without the terminal chunk. HTTP/1.0 has no chunks and a close means completeness: reset the
        connection, once the kernel has sent everything.
        """
        transport = self._request.transport
        if transport is None:
            return
        connection: socket.socket | None = transport.get_extra_info("socket")
        if self._request.version >= HttpVersion11 or connection is None or connection.family == socket.AF_UNIX:
            if self._write_timeout is not None:
                asyncio.get_running_loop().call_later(self._write_timeout, transport.abort)
            transport.close()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._write_timeout):
                while transport.get_write_buffer_size() or _unsent_bytes(connection):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_INTERVAL)  # the kernel has no event for an empty queue
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()

    @contextlib.asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._write_timeout):
                yield
        except (TimeoutError, ConnectionError):
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone from None


def _unsent_bytes(connection: socket.socket) -> int:
    """Bytes in the kernel's queue that the peer has not acknowledged (SIOCOUTQ, tcp(7))."""
    count: int = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
    return count

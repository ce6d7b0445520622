"""One client's connection as an answer sees it: bounded writes, and ends that cannot be mistaken.

Measured rules of aiohttp behind this: a bare write blocks for ever once the buffers are full; returning from a handler
writes the terminal chunk; a reset with data in flight overtakes that data.
"""

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import AsyncIterator

from aiohttp import HttpVersion11, web

WRITE_STALL = 30.0
"""Seconds that one write to a client may take."""
_POLL = 0.01


class ClientGone(Exception):
    """The client has left, or has not read for too long; there is nobody to answer."""


class Connection:
    """Writes answers to `request`'s client; every write ends within `write_stall` seconds, if there are any, or raises
    ClientGone."""

    def __init__(self, request: web.Request, write_stall: float | None):
        self._request = request
        self._write_stall = write_stall

    async def begin(self, response: web.StreamResponse) -> None:
        """Decide status and headers; they travel with the first write."""
        async with self._bounded():
            await response.prepare(self._request)

    async def write(self, response: web.StreamResponse, data: bytes) -> None:
        async with self._bounded():
            await response.write(data)

    async def send(self, response: web.Response) -> None:
        """Write a whole answer."""
        async with self._bounded():
            await response.prepare(self._request)
            await response.write_eof()

    async def break_off(self) -> None:
        """End the connection so that nobody takes what was sent for a complete answer.

        HTTP/1.1: a close without the terminal chunk. HTTP/1.0 has no chunks and takes a close for completeness: a
        reset, once the kernel has sent everything.
        """
        transport = self._request.transport
        if transport is None:
            return
        connection: socket.socket | None = transport.get_extra_info("socket")
        if self._request.version >= HttpVersion11 or connection is None or connection.family == socket.AF_UNIX:
            if self._write_stall is not None:
                asyncio.get_running_loop().call_later(self._write_stall, transport.abort)
            transport.close()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._write_stall):
                while transport.get_write_buffer_size() or _unsent_bytes(connection):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL)  # the kernel has no event for an empty queue
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()

    @contextlib.asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._write_stall):
                yield
        except (TimeoutError, ConnectionError):
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone from None


def _unsent_bytes(connection: socket.socket) -> int:
    """Bytes in the kernel's queue that the peer has not acknowledged (SIOCOUTQ, tcp(7))."""
    count: int = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
    return count

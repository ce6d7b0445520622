"""Writes to one client's connection, each bounded in time, and the abort of an incomplete response.

aiohttp has no such bounds: a write blocks for ever once the buffers are full, and a handler that returns ends the
response in order, with the terminal chunk.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

WRITE_TIMEOUT = 30.0  # seconds of one write to a client


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

    def abort(self) -> None:
        """Close the connection without the terminal chunk, so that the client recognizes an incomplete response."""
        transport = self._request.transport
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
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone from None

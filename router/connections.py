"""What aiohttp does for clients: all calls but the plain ones of `router.listener`.

Its protocol gets our own words for requests that are not HTTP: it answers those before any route or middleware sees
them, as text that quotes what was sent.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from router import __version__
from router.errors import ApiError, BadRequest, Internal
from router.listener import ROOM
from worker.protocol.dialects import Dialect
from worker.protocol.errors import error_body


class Connection(web.RequestHandler):
    """One client's connection."""

    def __init__(self, manager: web.Server, ended: Callable[[], None], **options: Any):
        """Takes what aiohttp's takes. `ended` is called once the client is gone."""
        super().__init__(manager, **options)
        self._ended = ended

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._ended()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what could not be read, or to a failure that nobody else has answered. Raises ConnectionError
        if an answer has begun; the connection closes in any case."""
        super().handle_error(request, status, exc, message)  # logs it, and looks whether an answer has begun
        error: ApiError = Internal("internal error; the router's log has the cause")
        if status < 500:
            error = BadRequest(
                "the request is not valid HTTP: its first line, a header or its framing is malformed or too long"
            )
        body = error_body(
            Dialect.OPENAI, status=error.status, type=error.type, reason=error.reason, message=error.message, param=None
        )
        id = f"req_{secrets.token_hex(12)}"
        headers = {"Server": f"router/{__version__}", "X-Request-Id": id, "request-id": id, "X-Should-Retry": "false"}
        response = web.Response(
            body=orjson.dumps(body), status=error.status, headers=headers, content_type="application/json"
        )
        response.force_close()
        return response


class Reply:
    """A request as aiohttp has it, and the way back to whoever sent it (`router.proxy.Outlet`)."""

    def __init__(self, request: web.Request):
        self._request = request
        self.response: web.StreamResponse | None = None
        """The answer, once it has begun."""

    @property
    def headers(self) -> Mapping[str, str]:
        return self._request.headers

    @property
    def is_old(self) -> bool:
        return self._request.version < (1, 1)

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._request.transport

    def has_room(self, size: int) -> bool:
        """Whether so many bytes can be written without waiting."""
        transport = self._request.transport
        if transport is None or self._request.protocol.writing_paused:
            return False
        return transport.get_write_buffer_size() + size < ROOM

    async def say(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """All of an answer."""
        self.response = response = web.Response(status=status, headers=headers, body=body)
        await response.prepare(self._request)
        await response.write_eof()

    async def begin(self, status: int, headers: Mapping[str, str], data: bytes = b"") -> None:
        """The head of an answer, and what is known of its body."""
        self.response = response = web.StreamResponse(status=status, headers=headers)
        if "Content-Length" in headers:
            response.content_length = int(headers["Content-Length"])
        elif not self.is_old:
            response.enable_chunked_encoding()
        await response.prepare(self._request)
        if data:
            await response.write(data)

    async def write(self, data: bytes) -> None:
        """Some more of the body."""
        assert self.response is not None
        await self.response.write(data)

    def put(self, data: bytes) -> bool:
        """aiohttp writes nothing but in a coroutine."""
        return False

    def put_chunk(self, framed: bytes) -> bool:
        """Likewise."""
        return False

    def put_all(self, status: int, headers: Mapping[str, str], body: bytes) -> bool:
        """Likewise."""
        return False

    async def end(self) -> None:
        """There is no more."""
        assert self.response is not None
        await self.response.write_eof()


__all__ = ["Connection", "Reply"]

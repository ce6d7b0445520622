"""aiohttp's server as a transport of the pipeline, for all requests but the plain ones of `router.http.listener`.

aiohttp's protocol class is replaced because of requests that are not valid HTTP. aiohttp answers those before any route
or middleware sees them, with text that quotes the client's bytes; here they get the router's error body.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

from aiohttp import web

from router.errors import ApiError, BadRequest, EncodingUnsupported, Internal
from router.http.listener import KEEP_ALIVE, Fallback
from router.http.request import CLOSE
from router.http.response import own_headers, render_error
from worker.protocol.dialects import Dialect


class AiohttpConnection(web.RequestHandler, Fallback):
    """One client's connection."""

    def __init__(
        self,
        manager: web.Server,
        ended: Callable[[], None],
        unread_timeout: float = KEEP_ALIVE,
        **options: Any,
    ):
        """The arguments of aiohttp's class. `ended` is called when the connection is lost; `unread_timeout` as for
        `Listener`."""
        super().__init__(manager, **options)
        self._ended = ended
        self._unread_timeout = unread_timeout
        self._connection: asyncio.Transport  # aiohttp drops its own reference when it closes the connection
        self._closing_since: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection = cast("asyncio.Transport", transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._ended()

    def check(self, now: float, keep_alive: float) -> None:
        if self._connection.is_closing():  # which takes until the client has read its response
            if self._closing_since is None:
                self._closing_since = now
            elif now - self._closing_since > self._unread_timeout:
                self._connection.abort()
            return
        # The wait is since the connection was made, or since the last response.
        since = self._next_keepalive_close_time - self._keepalive_timeout
        # It is done once a request has arrived, which begins in the next pass of the event loop.
        if self._waiter is not None and not self._waiter.done() and now - since > keep_alive:
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to bytes that are not HTTP, or to a failure outside the pipeline. Closes the connection.

        Raises ConnectionError if a response has begun.
        """
        super().handle_error(request, status, exc, message)  # logs, and checks whether a response has begun
        error: ApiError = Internal("internal error; the router's log has the cause")
        if status < 500:
            error = BadRequest(
                "the request is not valid HTTP: its first line, a header or its framing is malformed or too long"
            )
        id = f"req_{secrets.token_hex(12)}"
        headers, body = render_error(error, Dialect.OPENAI, id)
        response = web.Response(body=body, status=error.status, headers={**own_headers(id), **headers})
        response.force_close()
        return response


class AiohttpOutlet:
    """A request that aiohttp has read, and the way back to its client (`router.http.request.Outlet`)."""

    def __init__(self, request: web.Request):
        self._request = request
        self.response: web.StreamResponse | None = None  # once it has begun
        self.has_begun = False

    def began(self, response: web.StreamResponse) -> None:
        """Note that aiohttp writes the status line of `response` now, which a route of the router itself has made."""
        self.response, self.has_begun = response, True

    @property
    def headers(self) -> Mapping[str, str]:
        return self._request.headers

    @property
    def is_old(self) -> bool:
        return self._request.version < (1, 1)

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._request.transport

    @property
    def content_length(self) -> int | None:
        return self._request.content_length

    def check_framing(self) -> None:
        """Reject a request that another server could frame or route differently (request smuggling).

        Raises BadRequest, EncodingUnsupported.
        """
        headers = self._request.headers
        hosts = headers.getall("Host", [])
        if len(hosts) > 1 or (not hosts and not self.is_old):
            raise BadRequest("exactly one Host header is needed")
        coding = headers.get("Transfer-Encoding", "chunked").strip()
        if not coding:
            raise BadRequest("the Transfer-Encoding header is empty", headers=CLOSE)
        if coding.casefold() != "chunked":
            raise EncodingUnsupported("send the body with no Transfer-Encoding but chunked", headers=CLOSE)

    def received(self) -> bytes | None:
        content = self._request.content
        if not content.is_eof() or "Expect" in self._request.headers:
            return None
        return content.read_nowait()

    async def parts(self) -> AsyncIterator[bytes]:
        await self._invite()
        try:
            async for part in self._request.content.iter_any():
                yield part
        except web.RequestPayloadError:
            raise BadRequest("the body's framing is broken", headers=CLOSE) from None

    async def _invite(self) -> None:
        """Ask for the body of a client that sent `Expect: 100-continue` (RFC 9110, section 10.1.1)."""
        request = self._request
        if not self.is_old and request.headers.get("Expect", "").casefold() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # these bytes are no part of the response

    def has_room(self, size: int) -> bool:
        return False  # aiohttp writes only inside a coroutine

    async def begin(
        self, status: int, headers: Mapping[str, str], data: bytes = b"", *, is_whole: bool = False
    ) -> None:
        if is_whole:
            self.response = whole = web.Response(status=status, headers=headers, body=data)
            if headers.get("Connection") == "close":
                whole.force_close()  # the header alone does not close the connection
            await self.send(whole)
            return
        self.response = response = web.StreamResponse(status=status, headers=headers)
        if "Content-Length" in headers:
            response.content_length = int(headers["Content-Length"])
        elif not self.is_old:
            response.enable_chunked_encoding()
        await response.prepare(self._request)
        if data:
            await response.write(data)

    async def send(self, whole: web.Response) -> None:
        await whole.prepare(self._request)
        await whole.write_eof()

    async def write(self, data: bytes) -> None:
        assert self.response is not None
        await self.response.write(data)

    async def end(self) -> None:
        assert self.response is not None
        await self.response.write_eof()


async def send_no_continue(request: web.Request) -> None:
    """Replace aiohttp's `Expect` handler, which sends `100 Continue` as soon as the head arrives.

    `AiohttpOutlet.parts` sends it once the request is admitted, so that the client of a rejected one sends no body.
    """

"""Connections of clients: aiohttp's protocol, with our own words for requests that are not HTTP.

aiohttp answers those before any route or middleware sees them, as text that quotes what was sent.
"""

import asyncio
import secrets
import socket
from typing import Any

import orjson
from aiohttp import web

from router import __version__
from router.errors import ApiError, BadRequest, Internal
from worker.routes import Face, error_body


class Connection(web.RequestHandler):
    """One client's connection."""

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
            error = BadRequest("the request is not valid HTTP: its first line, a header or its framing is malformed")
        body = error_body(
            Face.OPENAI, status=error.status, type=error.type, reason=error.reason, message=error.message, param=None
        )
        id = f"req_{secrets.token_hex(12)}"
        headers = {"Server": f"router/{__version__}", "X-Request-Id": id, "request-id": id, "X-Should-Retry": "false"}
        response = web.Response(
            body=orjson.dumps(body), status=error.status, headers=headers, content_type="application/json"
        )
        response.force_close()
        return response


async def listen(runner: web.AppRunner, sock: socket.socket, **options: Any) -> asyncio.Server:
    """Serve `runner`'s application, which is set up, on `sock`; `options` as of aiohttp's protocol.

    To be closed before the runner is cleaned up.
    """
    server, loop = runner.server, asyncio.get_running_loop()
    assert server is not None
    return await loop.create_server(lambda: Connection(server, loop=loop, **options), sock=sock, backlog=1024)

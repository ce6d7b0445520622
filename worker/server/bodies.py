"""Reading of request bodies, with a bound on the memory of all large bodies that are in progress.

A body takes about three times its size until it has become a request: its bytes, the parsed JSON, and texts made from
it. So only BUDGET bytes of large bodies are read at once. The others wait in the sockets, in the order of arrival.
Small bodies do not wait.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from worker.errors import InvalidJson, RequestError

MAX_BODY_BYTES = 512 << 20  # the router's limit is far lower; this one protects a worker that is started by hand
LARGE = 1 << 20  # bytes from which a body is large
BUDGET = 64 << 20  # bytes of large bodies that are read at once, the router's usual limit of one body


class EncodedBody(RequestError):
    status, type, reason = 415, "invalid_request_error", "encoding"


class LargeBodies:
    """The large bodies in progress. After the last one, the memory that they took is given back to the system."""

    def __init__(self, budget: int = BUDGET):
        self._budget = self._free = budget
        self._first = asyncio.Lock()  # held by the first body that waits; the others queue for it in their order
        self._returned = asyncio.Event()
        self._giving_back: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def admit(self, request: web.Request) -> AsyncIterator[None]:
        """Wait until the body of `request` may be read. It counts until the end of the block."""
        stated = request.content_length
        if stated is not None and stated < LARGE:
            yield
            return
        size = self._budget if stated is None else min(stated, self._budget)  # a chunked body may have any length
        async with self._first:
            while size > self._free:
                self._returned.clear()
                await self._returned.wait()
            self._free -= size
        try:
            yield
        finally:
            self._free += size
            self._returned.set()
            if self._free == self._budget and (self._giving_back is None or self._giving_back.done()):
                self._giving_back = asyncio.get_running_loop().create_task(asyncio.to_thread(_give_back))


async def read(request: web.Request) -> bytearray:
    """Read the whole body. aiohttp notices a closed connection only after that.

    Raise RequestError, and HTTPRequestEntityTooLarge. `web.Request.read` would keep the bytes as long as the request.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise EncodedBody("compressed bodies are not accepted; send the body without Content-Encoding")
    body = bytearray()
    try:
        while chunk := await request.content.readany():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise web.HTTPRequestEntityTooLarge(max_size=MAX_BODY_BYTES, actual_size=len(body))
    except web.RequestPayloadError:
        raise InvalidJson("the request body is incomplete or its framing is invalid") from None
    return body


def _give_back() -> None:
    from worker.engines.transformers.device import memory  # late: it imports torch, and other engines need none

    memory.give_back()

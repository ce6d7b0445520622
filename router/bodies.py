"""Bodies of requests: read whole, bounded in size, time and sum, and looked into as little as can be."""

import asyncio
from typing import Any

import msgspec
import orjson
from aiohttp import web

from router.errors import BadRequest, BodyTimeout, EncodingUnsupported, QueueFull, TooLarge
from router.noted import BUFFERED, IGNORED, ROUTE
from router.site import Site
from worker.protocol.dialects.lmi import OPENAIS
from worker.protocol.headers import ignored_fields
from worker.protocol.routes import unknown_fields

BUFFERED_IN_ALL = 512 << 20
"""Bytes of request bodies held at once; more are refused."""
CLOSE = {"Connection": "close"}


class Peek(msgspec.Struct):
    """All that the router reads of a body; the decoder checks and skips the rest."""

    model: Any = None
    stream: Any = None
    name: Any = None
    """What Ollama's clients once called the model."""


_DECODER = msgspec.json.Decoder(Peek)
_OPENAIS = msgspec.json.Decoder(msgspec.defstruct("_Openais", [(name, msgspec.Raw, msgspec.Raw()) for name in OPENAIS]))


def peek(body: bytes) -> Peek:
    """`model` and `stream` of a JSON object. Raises BadRequest (invalid_json) if it is none."""
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        raise BadRequest(f"the body is not a JSON object: {str(bad)[:200]}", reason="invalid_json") from None


def is_openais(body: bytes) -> bool:
    """Whether a body that `peek` has read says what OpenAI's do, at a path of LMI's."""
    found = _OPENAIS.decode(body)
    return any(bytes(getattr(found, name)) for name in OPENAIS)


class Bodies:
    """All that are here."""

    def __init__(self, site: Site, most: int = BUFFERED_IN_ALL):
        self._site = site
        self.held = 0
        """Bytes of those whose requests have not ended."""
        self.most = most
        """Bytes that may be held; more are refused."""

    async def read(self, request: web.Request) -> bytes:
        """The whole body, bounded in size, time and sum, and counted until the request ends. Raises ApiError."""
        settings = self._site.settings
        if request.headers.get("Content-Encoding", "identity").casefold() not in ("", "identity"):
            raise EncodingUnsupported("send the body without Content-Encoding")
        limit = settings.max_body_size
        if request.content_length is not None and request.content_length > limit:
            raise TooLarge(f"the body has {request.content_length} bytes, {limit} are allowed", headers=CLOSE)
        if request.content.is_eof() and "Expect" not in request.headers:  # all of it came with the head
            body = request.content.read_nowait()
            self._count(request, len(body))
            return body
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(settings.body_timeout or None):
                await _invite(request)
                async for chunk in request.content.iter_any():
                    self._count(request, len(chunk))
                    parts.append(chunk)
        except TimeoutError:
            seconds = f"{settings.body_timeout:g}"
            raise BodyTimeout(f"the body did not arrive within {seconds} s (--body-timeout)", headers=CLOSE) from None
        return b"".join(parts)

    def _count(self, request: web.Request, more: int) -> None:
        """Raises TooLarge, QueueFull."""
        self.held += more
        request[BUFFERED] = size = request.get(BUFFERED, 0) + more
        limit = self._site.settings.max_body_size
        if size > limit:
            raise TooLarge(f"the body has more than the {limit} bytes that are allowed", headers=CLOSE)
        if self.held > self.most:
            raise QueueFull("too many bytes of requests are waiting", retry_after=1, headers=CLOSE)

    async def object(self, request: web.Request) -> dict[str, Any]:
        """The body as a JSON object, for calls that the router itself answers."""
        body = await self.read(request)
        peek(body)
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError as bad:
            raise BadRequest(f"the body is not a JSON object: {bad.msg[:200]}", reason="invalid_json") from None
        assert isinstance(found, dict)
        strange = unknown_fields(request[ROUTE], found)
        if strange and self._site.settings.strict_fields:
            raise BadRequest(
                "this field is unknown; leave it out, or serve without strict-fields to have it ignored",
                reason="unknown_parameter",
                param=strange[0][:128],
            )
        request[IGNORED] = ignored_fields(strange)
        return found


async def expect(request: web.Request) -> None:
    """Promise nothing before it is known that the body is wanted: `_invite` does."""


async def _invite(request: web.Request) -> None:
    """Ask for the body of a client that waits to be asked (RFC 9110, section 10.1.1)."""
    if request.version >= (1, 1) and request.headers.get("Expect", "").casefold() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # these bytes are no part of the answer

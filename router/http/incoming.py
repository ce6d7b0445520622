"""One HTTP request on its way through the pipeline, and the reading of its body.

Bodies are read whole and bounded in size, time and total bytes. Only `model` and `stream` are looked at; everything
else is the worker's to parse.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson
from aiohttp import web

from router.config.settings import ApiKey
from router.errors import BadRequest, BodyTimeout, EncodingUnsupported, QueueFull, TooLarge
from router.http.proxy import Answer, Outlet
from router.registry.auth import NO_KEY
from router.registry.registry import Registry
from worker.protocol.dialects.lmi import OPENAI_FIELDS
from worker.protocol.routes import Route, ignored_fields, query, unknown_fields

BUFFERED_IN_ALL = 512 << 20
"""Bytes of request bodies held at once; more are refused."""
CLOSE = {"Connection": "close"}
NO_QUERY: Mapping[str, str] = {}


@dataclass(slots=True, eq=False, kw_only=True)
class Incoming:
    """One HTTP request. The transport fills in the facts; the pipeline adds what its steps find out."""

    outlet: Outlet
    method: str
    path: str
    client: str
    """Its address; empty for a unix socket."""
    id: str
    """The value of X-Request-Id in its answer and in the log."""
    arrived: float
    route: Route | None
    """None: no route has this path and method."""
    path_id: str | None = None
    """The model named in the path."""
    query: Mapping[str, str] = field(default_factory=dict)
    """The parameters that the route declares; others are ignored."""
    changes_state: bool = True
    """False for a GET that triggers nothing; such requests may come from any web page."""
    # Found out by the pipeline:
    key: ApiKey = NO_KEY
    body: bytes = b""
    held: int = 0  # bytes of its body that are counted in `Bodies.held`
    model: str = "unknown"  # the id of the model
    answer: Answer | None = None  # set once the proxy works on it
    stage: str = "queued"  # see `phase`, while there is no `answer`
    ignored: Mapping[str, str] = field(default_factory=dict)  # the header that lists unknown body fields
    status: int = 499  # how it ended, which the status line need not show; 499: the client disconnected

    @property
    def phase(self) -> str:
        """The phase that a disconnect is counted under: queued, starting, streaming, events."""
        return self.answer.phase if self.answer is not None else self.stage


INCOMING = web.RequestKey("incoming", Incoming)
ROUTE = web.RequestKey("route", Route)
PHASE = web.RequestKey("phase", str)
"""The phase of a request that the router answers itself, if it is not `queued`."""


def asked_of(request: web.Request, route: Route | None = None) -> Mapping[str, str]:
    """The query parameters that the request's route declares."""
    if "?" not in request.raw_path:  # aiohttp builds a multidict for `request.query`, which costs more than this look
        return NO_QUERY
    known = query(request[ROUTE] if route is None else route)
    return {name: request.query[name] for name in known if name in request.query}


class Peek(msgspec.Struct):
    """The body fields that the router reads; the decoder validates and skips the rest."""

    model: Any = None
    stream: Any = None
    name: Any = None
    """The old name of `model` in Ollama's API."""


_DECODER = msgspec.json.Decoder(Peek)
_OPENAIS = msgspec.json.Decoder(
    msgspec.defstruct("_Openais", [(name, msgspec.Raw, msgspec.Raw()) for name in OPENAI_FIELDS])
)


def peek(body: bytes) -> Peek:
    """`model` and `stream` of a JSON object. Raises BadRequest (invalid_json) if it is none."""
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        raise BadRequest(f"the body is not a JSON object: {str(bad)[:200]}", reason="invalid_json") from None


def is_openais(body: bytes) -> bool:
    """True if a body that `peek` has read has fields of OpenAI's API, at a path of LMI's."""
    found = _OPENAIS.decode(body)
    return any(bytes(getattr(found, name)) for name in OPENAI_FIELDS)


class Bodies:
    """The bodies of all running requests."""

    def __init__(self, registry: Registry, most: int = BUFFERED_IN_ALL):
        self._registry = registry
        self.held = 0
        """Bytes of those whose requests have not ended."""
        self.most = most
        """Bytes that may be held; more are refused."""

    async def read(self, incoming: Incoming) -> bytes:
        """The whole body, bounded in size, time and sum, and counted until the request ends. Raises ApiError."""
        settings, outlet = self._registry.settings, incoming.outlet
        if outlet.headers.get("content-encoding", "identity").casefold() not in ("", "identity"):
            raise EncodingUnsupported("send the body without Content-Encoding")
        limit, stated = settings.max_body_size, outlet.content_length
        if stated is not None and stated > limit:
            raise TooLarge(f"the body has {stated} bytes, {limit} are allowed", headers=CLOSE)
        body = outlet.received()
        if body is not None:  # nothing to wait for, so no timer
            self._count(incoming, len(body))
            return body
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(settings.body_timeout or None):
                async for part in outlet.parts():
                    self._count(incoming, len(part))
                    parts.append(part)
        except TimeoutError:
            seconds = f"{settings.body_timeout:g}"
            raise BodyTimeout(f"the body did not arrive within {seconds} s (--body-timeout)", headers=CLOSE) from None
        return b"".join(parts)

    def _count(self, incoming: Incoming, more: int) -> None:
        """Raises TooLarge, QueueFull."""
        self.held += more
        incoming.held += more
        limit = self._registry.settings.max_body_size
        if incoming.held > limit:
            raise TooLarge(f"the body has more than the {limit} bytes that are allowed", headers=CLOSE)
        if self.held > self.most:
            raise QueueFull("too many bytes of requests are waiting", retry_after=1, headers=CLOSE)

    def forget(self, incoming: Incoming) -> None:
        """Stop counting the body of a request that has ended."""
        self.held -= incoming.held

    async def object(self, request: web.Request) -> dict[str, Any]:
        """The body as a JSON object, for routes that the router answers itself."""
        incoming = request[INCOMING]
        body = await self.read(incoming)
        peek(body)
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError as bad:
            raise BadRequest(f"the body is not a JSON object: {bad.msg[:200]}", reason="invalid_json") from None
        assert isinstance(found, dict)
        strange = unknown_fields(request[ROUTE], found)
        if strange and self._registry.settings.strict_fields:
            raise BadRequest(
                "this field is unknown; leave it out, or serve without strict-fields to have it ignored",
                reason="unknown_parameter",
                param=strange[0][:128],
            )
        incoming.ignored = ignored_fields(strange)
        return found


__all__ = [
    "BUFFERED_IN_ALL", "CLOSE", "INCOMING", "NO_QUERY", "PHASE", "ROUTE", "Bodies", "Incoming", "Peek", "asked_of",
    "is_openais", "peek",
]  # fmt: skip

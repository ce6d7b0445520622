"""The steps that every HTTP request takes, in their order, whichever transport has read it.

    admit         the host and the origin of the request
    authenticate  its key, and the key's right to use the route
    respond       answered by the router itself, or forwarded: read the body, find the model and the adapter, proxy
    refuse        an error of any step, in the error format of the route's API
    count, log    one access log line and one counter

`Pipeline.run` is this sequence. The transports are aiohttp's server (`router.http.aiohttp_transport`) and the reader of plain
POSTs (`router.http.listener`). Both give it an `Incoming` with an `Outlet`, and neither repeats a step.
"""

import asyncio
import difflib
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from random import getrandbits

import orjson

from router import __version__
from router.api import ollama
from router.api.request_log import RequestLog, RequestRecord
from router.errors import ApiError, BadRequest, Internal
from router.http.incoming import BUFFERED_IN_ALL, Bodies, Incoming, Peek, is_openais, peek
from router.http.listener import PlainRequest
from router.http.metrics import Metrics
from router.http.proxy import Answer, Call, Proxy
from router.registry.registry import Registry, flag
from worker.protocol.dialects import Dialect
from worker.protocol.errors import error_body
from worker.protocol.routes import FLAGS, ROUTES, AccessLevel, LoadPolicy, Route, dialect_of, error_response

log = logging.getLogger("router.http.app")
access_log = logging.getLogger("router.registry.auth")

Respond = Callable[[Incoming], Awaitable[int]]
"""Answers an admitted request and returns how it ended, which can differ from the status line of a stream. Raises
ApiError while nothing has been sent."""

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
JSON = {"Content-Type": "application/json; charset=utf-8"}
SERVER = f"router/{__version__}"
LMI_ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"
LATEST = 60
"""The largest Retry-After, in seconds: official clients give up on much larger ones."""
LONGEST_SUGGESTED = 100
"""Characters of a path that is compared with the routes, or repeated in a message."""
_PATHS = tuple(dict.fromkeys(route.path for route in ROUTES if "{" not in route.path))
_CONTROL = dict.fromkeys((*range(32), 127), "?")


class Pipeline:
    """The request pipeline of one router."""

    def __init__(self, registry: Registry, proxy: Proxy, metrics: Metrics, *, most_buffered: int = BUFFERED_IN_ALL):
        self._registry = registry
        self._proxy = proxy
        self._metrics = metrics
        self.bodies = Bodies(registry, most_buffered)
        self.requests = RequestLog()
        registry.events.fold(self.requests.on_event)

    async def serve(self, plain: PlainRequest) -> None:
        """Take a plain request through all steps; all of them are for a worker. Raises like `run`."""
        incoming = Incoming(
            outlet=plain,
            method="POST",
            path=plain.path,
            client=plain.client,
            id=request_id(plain.headers),
            arrived=plain.arrived,
            route=plain.route,
        )
        await self.run(incoming, self.forward)

    async def run(self, incoming: Incoming, respond: Respond) -> None:
        """Take one request through all steps. Raises CancelledError, and nothing else, if the client is gone."""
        try:
            try:
                self._admit(incoming)
                if incoming.method == "OPTIONS":  # before routing and keys: browsers send preflights without a key
                    await self._write(incoming, 200, {}, b"")
                    incoming.status = 200
                    return
                self._authenticate(incoming)
                incoming.status = await respond(incoming)
            except ApiError as error:
                await self._refuse(incoming, error)
            except (ConnectionError, asyncio.CancelledError):
                raise
            except Exception:
                log.exception("%s: %s %s failed in the router", incoming.id, incoming.method, incoming.path)
                await self._refuse(incoming, Internal("the router failed on this request; its log says how"))
        except (ConnectionError, asyncio.CancelledError):
            self._metrics.disconnects.labels(incoming.phase).inc()
            raise asyncio.CancelledError from None
        finally:
            self.bodies.forget(incoming)
            self._count_and_log(incoming)

    def _admit(self, incoming: Incoming) -> None:
        """Raises BadRequest, EncodingUnsupported, Forbidden."""
        access, outlet = self._registry.access, incoming.outlet
        outlet.check_framing()
        access.check_host(outlet)
        if incoming.method != "OPTIONS":  # a preflight is how a browser asks; the answer's CORS headers decide
            access.check_origin(outlet, changes_state=incoming.changes_state)

    def _authenticate(self, incoming: Incoming) -> None:
        """Raises Unauthorized, Forbidden; BadRequest for a flag in the query that is neither true nor false."""
        route, query = incoming.route, incoming.query
        if route is None:  # the 404 or 405 that follows needs no key
            return
        plane = AccessLevel.ADMIN if any(query.get(name) for name in route.admin_query) else route.plane
        incoming.key = self._registry.access.authorize(incoming.outlet, plane)
        for name in FLAGS if query else ():
            flag(query, name)  # rejected here even where the route would not come to use it

    # Requests for a worker

    async def forward(self, incoming: Incoming) -> int:
        """Have a worker answer (`Respond`)."""
        incoming.body = body = await self.bodies.read(incoming)
        read = time.monotonic()
        seen = peek(body)
        id, name, named = self._find_model(incoming, seen)
        incoming.model = id
        adapter = self._choose_adapter(incoming, id, name)
        call = self._call(incoming, seen, id, adapter, read=read, asked="" if named else name)
        shown = f"{id}@{adapter}" if adapter else id
        headers = {"X-Router-Model": shown, **own_headers(incoming.id)}
        return await self._proxied(incoming, self._proxy.answer(incoming.outlet, call, headers))

    def _find_model(self, incoming: Incoming, seen: Peek) -> tuple[str, str, bool]:
        """Id of the model, its name as the client wrote it, and True if the body has that name. Raises BadRequest,
        ModelNotFound."""
        assert incoming.route is not None
        is_ollamas = incoming.route.dialect is Dialect.OLLAMA
        named = seen.name if seen.model is None and is_ollamas else seen.model
        if named is not None and not isinstance(named, str):
            raise BadRequest("model must be a string", param="model")
        if is_ollamas and named is not None:
            named = ollama.known(self._registry, incoming.key, named)
        id, name = self._registry.choose(incoming.key, path=incoming.path_id, body=named, query=incoming.query)
        return id, name, named is not None

    def _choose_adapter(self, incoming: Incoming, id: str, name: str) -> str:
        """The adapter that a request names outside its body: as part of the model's name, in the query or in LMI's
        header. Raises BadRequest for two that differ, ModelNotFound."""
        assert incoming.route is not None
        adapter = self._registry.names.adapter(name)
        other = incoming.query.get("adapter", "")
        if incoming.route.dialect is Dialect.LMI:
            other = other or incoming.outlet.headers.get(LMI_ADAPTER_HEADER, "")
        if not other:
            return adapter
        if adapter and adapter != other:
            raise BadRequest(
                f"the model's name means adapter '{adapter}', and '{other[:100]}' is named beside it",
                reason="model_conflict",
                param="adapter",
            )
        self._registry.check_adapter(id, other)
        return other

    def _call(self, incoming: Incoming, seen: Peek, id: str, adapter: str, *, read: float, asked: str) -> Call:
        """The request as the proxy forwards it."""
        route = incoming.route
        assert route is not None
        autoload = flag(incoming.query, "autoload") if incoming.query else None
        if autoload is None and route.loads is not LoadPolicy.FOLLOWS:
            autoload = False
        preset = self._registry.shared_workers.find(id).preset
        timeout = self._registry.settings.timeout if preset.request_timeout is None else preset.request_timeout
        streams = _streams(route, seen)
        return Call(
            route=route,
            model=id,
            body=incoming.body,
            stream=streams,
            autoload=autoload,
            request_id=incoming.id,
            arrived=incoming.arrived,
            read=read,
            timeout=max(0.0, timeout),
            adapter=adapter,
            asked=asked,
            speaks=Dialect.OPENAI if streams and route.dialect is Dialect.LMI and is_openais(incoming.body) else None,
        )

    async def _proxied(self, incoming: Incoming, answer: Answer) -> int:
        """Forward within the limits of the key, and keep a record of the request. How it ended."""
        id, key, arrived = incoming.model, incoming.key, incoming.arrived
        record = RequestRecord(incoming.id, id, answer.call.route.name, incoming.client, key.name, time.time(), arrived)
        self.requests.began(record)
        try:
            with self._registry.access.running(key, lambda: self._registry.shared_workers.turnover(id)):
                incoming.answer = record.answer = answer
                await self._proxy.forward(answer)
            assert answer.status is not None
            record.status = answer.failed or answer.status
        except ApiError as error:
            record.status = error.status
            if error.reason == "key_concurrency":  # the fleet records all other rejections
                about = {"key": key.name, "limit": key.max_concurrent}
                self._registry.fleet.rejections.append(id, error, **about)
            raise
        finally:
            self.requests.ended(record)
        if answer.first_byte is not None:
            self._metrics.ttft.observe(answer.first_byte - arrived, id)
        if answer.overhead is not None:
            self._metrics.overhead.observe(answer.overhead)
        return record.status

    # Errors, and the end of every request

    async def _refuse(self, incoming: Incoming, error: ApiError) -> None:
        """Answer with `error`. Raises ConnectionError if the client is gone or does not read."""
        incoming.status = error.status
        if incoming.outlet.has_begun:
            # A second status line would be read as part of the first answer's body. The connection is closed without
            # the end of that answer, so that the client does not take it for complete.
            if incoming.outlet.transport is not None:
                incoming.outlet.transport.close()
            return
        headers, body = self._rendered(incoming, error)
        await self._write(incoming, error.status, {**own_headers(incoming.id), **headers}, body)

    async def _write(self, incoming: Incoming, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Write a whole answer of the router. Raises ConnectionError if the client is gone or does not read."""
        pending = incoming.outlet.begin(status, headers, body, is_whole=True)
        if pending is None:
            return
        try:
            async with asyncio.timeout(self._registry.settings.write_stall or None):
                await pending
        except TimeoutError:
            raise ConnectionError("the client does not read") from None

    def _rendered(self, incoming: Incoming, error: ApiError) -> tuple[dict[str, str], bytes]:
        """Headers and body of an error, which is counted."""
        route, path = incoming.route, incoming.path
        if error.status in (401, 429, 503, 507):
            self._metrics.rejections.labels("auth" if error.status == 401 else error.reason).inc()
        dialect = (
            route.dialect if route is not None else dialect_of(path.removeprefix(self._registry.settings.api_prefix))
        )
        body = error_body(
            dialect,
            status=error.status,
            type=error.type,
            reason=error.reason,
            message=error.message.encode("utf-8", "replace").decode(),
            param=error.param,
            extra=error.extra,
            request_id=incoming.id,
        )
        headers = {**error.headers, "X-Should-Retry": "true" if error.should_retry else "false", **JSON}
        if error.retry_after is not None:
            headers["Retry-After"] = str(min(LATEST, whole_seconds(error.retry_after)))
        data = orjson.dumps(body)
        if route is not None and route.always_streams:
            headers["Content-Type"], data = error_response(route.path, data)
        return headers, data

    def _count_and_log(self, incoming: Incoming) -> None:
        route, status, model = incoming.route, incoming.status, incoming.model
        self._metrics.requests.add(model, route.name if route is not None else "unknown", str(status))
        logged = self._registry.settings.access_log
        if logged == "all" or (logged == "errors" and status >= 400):
            client, took = incoming.client or "-", time.monotonic() - incoming.arrived
            path = printable(incoming.path)
            access_log.info(f"{client} {incoming.method} {path} {status} {took:.3f}s model={model} rid={incoming.id}")


def whole_seconds(seconds: float) -> int:
    """The value of Retry-After: rounded up and at least 1, so that a client that obeys it is not too early."""
    return max(1, math.ceil(round(seconds, 3)))


def request_id(headers: Mapping[str, str]) -> str:
    """The client's X-Request-Id if it is well-formed, else a new one."""
    asked = headers.get("x-request-id")
    return asked if asked and REQUEST_ID.fullmatch(asked) else f"req_{getrandbits(96):024x}"


def own_headers(id: str) -> dict[str, str]:
    """The headers of every answer; `id` is the request's."""
    return {"Server": SERVER, "X-Request-Id": id, "request-id": id}


def not_found(path: str) -> str:
    """The 404 message for `path`, printable and without the prefix, with the nearest known route as a suggestion."""
    if len(path) > LONGEST_SUGGESTED:
        return "File Not Found"
    near = next(iter(difflib.get_close_matches(path, _PATHS, n=1, cutoff=0.75)), "")
    hint = f"did you mean {near}?" if near else "GET /openapi.json lists what is"
    return f"File Not Found: {path} is no path of this server; {hint}"


def printable(text: str) -> str:
    """Text from a client as one line of at most 300 printable characters."""
    if text.isascii() and text.isprintable():
        return text[:300]
    return text.encode("ascii", "backslashreplace").decode().translate(_CONTROL)[:300]


def _streams(route: Route, seen: Peek) -> bool:
    """True if the answer is a stream of events."""
    if seen.stream is None:
        return route.streams_by_default
    return route.always_streams or (route.streams and seen.stream is True)


__all__ = ["Pipeline", "Respond", "not_found", "own_headers", "printable", "request_id", "whole_seconds"]

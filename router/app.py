"""Routes and middlewares: how an HTTP request finds its handler, and how an error finds its status."""

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from random import getrandbits
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from router import __version__
from router.access import ANYBODY, SAFE_METHODS
from router.bodies import BUFFERED_IN_ALL, CLOSE, Bodies, Peek, expect, is_openais, peek
from router.connections import Connection, Reply
from router.dispatch import Dispatcher, Work
from router.errors import (
    ApiError,
    BadRequest,
    EncodingUnsupported,
    Internal,
    MethodNotAllowed,
    PathNotFound,
    QueueFull,
    TooLarge,
)  # fmt: skip
from router.faces import ollama
from router.faces.call import Services
from router.hub import Hub
from router.listener import KEEP_ALIVE, Asked, Listener
from router.metrics import Metrics
from router.noted import ARRIVED, BUFFERED, ID, IGNORED, MODEL, PHASE, ROUTE, STATUS, asked_of
from router.paths import not_found
from router.proxy import Answer, Call, Outlet, Proxy
from router.requests import Record, Requests
from router.settings import Key
from router.site import Site, flag
from worker.protocol.dialects import Dialect
from worker.protocol.errors import error_body
from worker.protocol.routes import (
    FLAGS,
    ROUTES,
    Loads,
    Plane,
    Route,
    dialect_of,
    refusal,  # fmt: skip
)

log = logging.getLogger("router.app")
access_log = logging.getLogger("router.access")

LINGERING = 2.0
"""Seconds for which the rest of a refused body is read and thrown away, so that its sender gets to see why."""
PROTOCOL: Mapping[str, Any] = {"auto_decompress": False, "lingering_time": LINGERING}
"""What connections of this application need, as options of aiohttp's protocol."""
NAMED, OTHER_NAMED = "(?s:.+)", "(?!(?:load|unload)$)(?s:.+)"
"""A model in a path; without /v1 two names are calls, and GET of them is a wrong method."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class App:
    """The HTTP side of one router."""

    def __init__(self, site: Site, proxy: Proxy, metrics: Metrics, *, most_buffered: int = BUFFERED_IN_ALL):
        self._site = site
        self._prefix = site.settings.api_prefix
        self._requests = Requests()
        site.events.fold(self._requests.hear)
        self._proxy = proxy
        self._metrics = metrics
        self._bodies = Bodies(site, most_buffered)
        self._dispatcher = Dispatcher(Services(site, Hub(site), self._bodies, self._requests, metrics))

    def build(self) -> web.Application:
        """The aiohttp application; its routes are those of `worker.protocol.routes` and no others."""
        logging.getLogger("aiohttp.server").addFilter(_quote_nothing)
        app = web.Application(
            middlewares=[self._outermost],
            client_max_size=0,
            handler_args=PROTOCOL,
        )
        for route in ROUTES:
            other = OTHER_NAMED if route.path.startswith("/models/{id}") else NAMED
            path = route.path.replace("/{id}", f"/{{id:{other}}}").replace("/{adapter}", "/{adapter:[^/]+}")
            work = self._forward if route.worker else self._dispatcher.handler(route)
            handler = self._guarded(route, work)
            for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
                app.router.add_route(method, self._prefix + path, handler, expect_handler=expect)
        app.on_response_prepare.append(self._add_headers)
        return app

    def end_streams(self) -> None:
        """End all event streams, so that the server can close."""
        self._dispatcher.end_streams()

    # Around every request

    @web.middleware
    async def _outermost(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request[ID] = _request_id(request.headers)
        request[ARRIVED] = time.monotonic()
        status = 499
        try:
            response = await self._answer(request, handler)
            status = request.get(STATUS, response.status)
            return response
        except asyncio.CancelledError:
            self._metrics.disconnects.labels(request.get(PHASE, "queued")).inc()
            raise
        finally:
            self._bodies.held -= request.get(BUFFERED, 0)
            route = request.get(ROUTE)
            endpoint = route.name if route is not None else "unknown"
            took = time.monotonic() - request[ARRIVED]
            model, client = request.get(MODEL, "unknown"), request.remote or ""
            self._tell(client, request.method, request.path, status, took, endpoint, model, request[ID])

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._site.access.check_host(request)
            coding = request.headers.get("Transfer-Encoding", "chunked").strip()
            if not coding:
                raise BadRequest("the Transfer-Encoding header is empty", headers=CLOSE)
            if coding.casefold() != "chunked":
                raise EncodingUnsupported("send the body with no Transfer-Encoding but chunked", headers=CLOSE)
            if request.method == "OPTIONS":
                return web.Response()
            self._site.access.check_origin(request, changes_state=_changes_state(request))
            return await handler(request)
        except ApiError as error:
            return self._error(request, error)
        except web.HTTPMethodNotAllowed as wrong:
            allowed = ", ".join(sorted({*wrong.allowed_methods, "OPTIONS"}))
            message = f"{request.method} is not allowed here; use {allowed}"
            return self._error(request, MethodNotAllowed(message, headers={"Allow": allowed}))
        except web.HTTPNotFound:
            return self._error(request, PathNotFound(not_found(_clean(request.path.removeprefix(self._prefix)))))
        except web.HTTPException as other:
            if other.status < 400:
                raise
            return self._error(request, BadRequest(other.reason or "bad request"))
        except web.RequestPayloadError:
            return self._error(request, BadRequest("the body's framing is broken", headers=CLOSE))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("%s: %s %s failed in the router", request[ID], request.method, request.path)
            return self._error(request, Internal("the router failed on this request; its log says how"))

    def _error(self, request: web.Request, error: ApiError) -> web.Response:
        headers, body = self._refusal(request.get(ROUTE), request.path, request[ID], error)
        response = web.Response(status=error.status, headers=headers, body=body)
        if headers.get("Connection") == "close":
            response.force_close()  # the header alone says so and does nothing
        return response

    def _refusal(self, route: Route | None, path: str, id: str, error: ApiError) -> tuple[dict[str, str], bytes]:
        """Headers and body of an error, which is counted."""
        if error.status in (401, 429, 503, 507):
            self._metrics.rejections.labels("auth" if error.status == 401 else error.reason).inc()
        dialect = route.dialect if route is not None else dialect_of(path.removeprefix(self._prefix))
        body = error_body(
            dialect,
            status=error.status,
            type=error.type,
            reason=error.reason,
            message=error.message.encode("utf-8", "replace").decode(),
            param=error.param,
            extra=error.extra,
            request_id=id,
        )
        headers = {**error.headers, "X-Should-Retry": "true" if error.should_retry else "false", **JSON}
        if error.retry_after is not None:
            headers["Retry-After"] = str(min(LATEST, whole_seconds(error.retry_after)))
        data = orjson.dumps(body)
        if route is not None and route.always_streams:
            headers["Content-Type"], data = refusal(route.path, data)
        return headers, data

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = SERVER
        if ID in request:
            response.headers.update(_own_headers(request[ID]))
            response.headers.update(request.get(IGNORED, {}))
        response.headers.update(self._site.access.cors_headers(request))

    def _tell(
        self, client: str, method: str, path: str, status: int, took: float, endpoint: str, model: str, id: str
    ) -> None:
        """Count a request that is over and log it."""
        self._metrics.requests.add(model, endpoint, str(status))
        quiet = self._site.settings.access_log
        if quiet == "all" or (quiet == "errors" and status >= 400):
            access_log.info(f"{client or '-'} {method} {_clean(path)} {status} {took:.3f}s model={model} rid={id}")

    def _guarded(self, route: Route, work: Work) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            request[ROUTE] = route
            asked = asked_of(request)
            plane = Plane.ADMIN if any(asked.get(name) for name in route.admin_query) else route.plane
            key = self._site.access.authorize(request, plane)
            for name in FLAGS if asked else ():
                flag(asked, name)  # a parameter that a call knows is checked whether or not it comes to matter
            return await work(request, key)

        return handle

    # Work for workers

    async def _forward(self, request: web.Request, key: Key) -> web.StreamResponse:
        body = await self._bodies.read(request)
        reply = Reply(request)
        errand = Errand(
            reply,
            request[ROUTE],
            key,
            request[ID],
            request[ARRIVED],
            request.remote or "",
            body,
            path_id=request.match_info.get("id"),
            query=asked_of(request),
        )
        try:
            request[STATUS] = await self._send(errand)
        except asyncio.CancelledError:
            request[PHASE] = errand.phase
            raise
        finally:
            request[MODEL] = errand.model
        assert reply.response is not None
        return reply.response

    async def _send(self, errand: "Errand") -> int:
        """Have a worker answer; how that really ended, which may not be what the status line says. Raises ApiError
        while nothing has been sent."""
        route, key, arrived = errand.route, errand.key, errand.arrived
        read = time.monotonic()
        seen = peek(errand.body)
        named = seen.model
        if named is None and route.dialect is Dialect.OLLAMA:
            named = seen.name
        if named is not None and not isinstance(named, str):
            raise BadRequest("model must be a string", param="model")
        asked = errand.query
        if route.dialect is Dialect.OLLAMA and named is not None:
            named = ollama.known(self._site, key, named)
        id, name = self._site.choose(key, path=errand.path_id, body=named, query=asked)
        errand.model = id
        adapter = self._adapter(errand, id, name)
        autoload = flag(asked, "autoload") if asked else None
        if autoload is None and route.loads is not Loads.FOLLOWS:
            autoload = False
        preset = self._site.members.find(id).preset
        timeout = self._site.settings.timeout if preset.request_timeout is None else preset.request_timeout
        streams = _streams(route, seen)
        call = Call(
            route=route,
            model=id,
            body=errand.body,
            stream=streams,
            autoload=autoload,
            request_id=errand.id,
            arrived=arrived,
            read=read,
            timeout=max(0.0, timeout),
            adapter=adapter,
            asked=name if named is None else "",
            speaks=Dialect.OPENAI if streams and route.dialect is Dialect.LMI and is_openais(errand.body) else None,
        )
        shown = f"{id}@{adapter}" if adapter else id
        headers = {"X-Router-Model": shown, **_own_headers(errand.id)}
        record = Record(errand.id, id, route.name, errand.client, key.name, time.time(), arrived)
        self._requests.began(record)
        try:
            with self._site.access.running(key, lambda: self._site.members.turnover(id)):
                errand.answer = record.answer = answer = self._proxy.answer(errand.outlet, call, headers)
                await self._proxy.forward(answer)
            assert answer.status is not None
            record.status = answer.failed or answer.status
        except ApiError as error:
            record.status = error.status
            if error.reason == "key_concurrency":  # what else is refused, the fleet tells
                fleet, about = self._site.fleet, {"key": key.name, "limit": key.max_concurrent}
                fleet.refusals.tell(id, error, **about)
            raise
        finally:
            self._requests.ended(record)
        if answer.first_byte is not None:
            self._metrics.ttft.observe(answer.first_byte - arrived, id)
        if answer.overhead is not None:
            self._metrics.overhead.observe(answer.overhead)
        return record.status

    # Plain calls

    def listener(self, runner: web.AppRunner, *, keep_alive: float = KEEP_ALIVE, most: int | None = None) -> Listener:
        """Of this application: plain calls are answered by it, all others by aiohttp. `runner` has been set up, and is
        to be cleaned up after the listener is closed. `keep_alive`: seconds that aiohttp waits for a request's head.
        `most`: as of `Listener`."""
        server, loop = runner.server, asyncio.get_running_loop()
        assert server is not None
        routes = {
            (self._prefix + route.path).encode(): route
            for route in ROUTES
            if route.worker and "{" not in route.path and route.method == "POST"
        }
        options = {**PROTOCOL, "access_log": None, "keepalive_timeout": keep_alive}
        return Listener(routes, self._serve, lambda ended: Connection(server, ended, loop=loop, **options), most)

    async def _serve(self, asked: Asked) -> None:
        """One plain call: what `_outermost` and the rest do for others."""
        asked.id = _request_id(asked.headers)
        errand = Errand(asked, asked.route, ANYBODY, asked.id, asked.arrived, asked.client, asked.body)
        size, status = len(asked.body), 499
        self._bodies.held += size
        try:
            try:
                status = await self._admit(asked, errand)
            except ApiError as error:
                status = error.status
                await self._refuse(asked, error)
            except (ConnectionError, asyncio.CancelledError):
                raise
            except Exception:
                log.exception("%s: POST %s failed in the router", asked.id, asked.path)
                status = 500
                if errand.answer is None or not errand.answer.committed:  # else the connection ends here
                    await self._refuse(asked, Internal("the router failed on this request; its log says how"))
        except (ConnectionError, asyncio.CancelledError):
            self._metrics.disconnects.labels(errand.phase).inc()
            raise asyncio.CancelledError from None
        finally:
            self._bodies.held -= size
            took = time.monotonic() - asked.arrived
            self._tell(asked.client, "POST", asked.path, status, took, asked.route.name, errand.model, asked.id)

    async def _refuse(self, asked: Asked, error: ApiError) -> None:
        """Raises ConnectionError if the client is gone, or does not read."""
        headers, body = self._refusal(asked.route, asked.path, asked.id, error)
        try:
            async with asyncio.timeout(self._site.settings.write_stall or None):
                await asked.say(error.status, {**_own_headers(asked.id), **headers}, body)
        except TimeoutError:
            raise ConnectionError("the client does not read") from None

    async def _admit(self, asked: Asked, errand: "Errand") -> int:
        access = self._site.access
        access.check_name(asked.headers["host"])
        errand.key = access.authorize(asked, asked.route.plane)
        if len(asked.body) > (limit := self._site.settings.max_body_size):
            raise TooLarge(f"the body has {len(asked.body)} bytes, {limit} are allowed", headers=CLOSE)
        if self._bodies.held > self._bodies.most:
            raise QueueFull("too many bytes of requests are waiting", retry_after=1, headers=CLOSE)
        return await self._send(errand)

    def _adapter(self, errand: "Errand", id: str, name: str) -> str:
        """The adapter that a request names beside its body: behind its model's name, or as LMI's clients do. Raises
        BadRequest for two that differ, ModelNotFound."""
        adapter = self._site.names.adapter(name)
        said = errand.query.get("adapter", "")
        if errand.route.dialect is Dialect.LMI:
            said = said or errand.outlet.headers.get(LMI_ADAPTER_HEADER, "")
        if not said:
            return adapter
        if adapter and adapter != said:
            raise BadRequest(
                f"the model's name means adapter '{adapter}', and '{said[:100]}' is named beside it",
                reason="model_conflict",
                param="adapter",
            )
        self._site.check_adapter(id, said)
        return said


@dataclass(slots=True)
class Errand:
    """One request for a worker, whose body is here."""

    outlet: Outlet
    route: Route
    key: Key
    id: str
    arrived: float
    client: str
    body: bytes
    path_id: str | None = None
    """The model that its path names."""
    query: Mapping[str, str] = field(default_factory=dict)
    model: str = "unknown"
    """Its id, once that is found."""
    answer: Answer | None = None
    """Once it is on its way."""

    @property
    def phase(self) -> str:
        """See PHASE."""
        return self.answer.phase if self.answer is not None else "queued"


def whole_seconds(seconds: float) -> int:
    """As Retry-After says them, 1 at least: who comes back then must not be too early."""
    return max(1, math.ceil(round(seconds, 3)))


JSON = {"Content-Type": "application/json; charset=utf-8"}
SERVER = f"router/{__version__}"
LMI_ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"
LATEST = 60
"""Seconds that a client is told to wait at most: official clients give up where it is much more."""


def _request_id(headers: Mapping[str, str]) -> str:
    asked = headers.get("x-request-id")
    return asked if asked and REQUEST_ID.fullmatch(asked) else f"req_{getrandbits(96):024x}"


def _own_headers(id: str) -> dict[str, str]:
    """What every answer has; `id` is its request's."""
    return {"Server": SERVER, "X-Request-Id": id, "request-id": id}


def _streams(route: Route, seen: Peek) -> bool:
    """Whether an answer comes frame by frame."""
    if seen.stream is None:
        return route.streams_unless_told
    return route.always_streams or (route.streams and seen.stream is True)


def _changes_state(request: web.Request) -> bool:
    return request.method not in SAFE_METHODS or bool({"reload", "autoload"} & set(request.query))


def _quote_nothing(record: logging.LogRecord) -> bool:
    """Keep what malformed requests said, keys among it, out of the log: aiohttp would quote it in a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
        record.msg += f": {type(error).__name__}"
    return True


_CONTROL = dict.fromkeys((*range(32), 127), "?")


def _clean(text: str) -> str:
    """One line, whatever a client put into it."""
    if text.isascii() and text.isprintable():
        return text[:300]
    return text.encode("ascii", "backslashreplace").decode().translate(_CONTROL)[:300]

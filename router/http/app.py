"""The HTTP application: the routes, the two transports that feed the pipeline, and the call of API functions."""

import asyncio
import difflib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from router.api.call import ApiCall, ApiFunction, ApiResult, FrameStream, JsonReply, Services
from router.api.metrics import Metrics
from router.config.settings import MAX_BUFFERED
from router.errors import BadRequest, MethodNotAllowed, PathNotFound
from router.http.aiohttp_transport import AiohttpConnection, AiohttpOutlet, send_no_continue
from router.http.listener import KEEP_ALIVE, Listener
from router.http.pipeline import Pipeline, Respond, peek, printable, request_id
from router.http.proxy import Proxy
from router.http.request import Incoming
from router.http.response import SERVER, json_bytes, own_headers, wait_for_client
from router.registry.auth import SAFE_METHODS
from router.registry.pulls import HubModels
from router.registry.registry import Registry
from worker.protocol import json_faults
from worker.protocol.routes import ROUTES, Route, ignored_fields, offered, query, unknown_fields
from worker.protocol.streams import stream

API = "router.api"  # the package of the functions that routes name
LINGERING = 30.0  # seconds (nginx's) to read the rest of a rejected body, so that its sender can read the response
# Options of aiohttp's protocol class.
PROTOCOL: Mapping[str, Any] = {"auto_decompress": False, "lingering_time": LINGERING}
# The pattern of a model in a path. Without /v1, `load` and `unload` are routes of their own, and a GET of them has the
# wrong method.
NAMED, OTHER_NAMED = "(?s:.+)", "(?!(?:load|unload)$)(?s:.+)"
MAX_SUGGESTED = 100  # characters of a path that is compared with the routes, or repeated in a message
NO_QUERY: Mapping[str, str] = {}
_PATHS = tuple(dict.fromkeys(route.path for route in ROUTES if "{" not in route.path))

INCOMING = web.RequestKey("incoming", Incoming)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class App:
    """The HTTP side of one router."""

    def __init__(self, registry: Registry, proxy: Proxy, metrics: Metrics, *, most_buffered: int = MAX_BUFFERED):
        self._registry = registry
        self._prefix = registry.settings.api_prefix
        self._pipeline = Pipeline(registry, proxy, metrics, most_buffered=most_buffered)
        self._services = Services(registry, HubModels(registry), self._pipeline.requests, metrics)
        self._routes: dict[web.AbstractRoute, Route] = {}  # the declaration of each of aiohttp's routes
        self._streams: set[asyncio.Task[Any]] = set()

    def build(self) -> web.Application:
        """The aiohttp application; its routes are those of `worker.protocol.routes` and no others."""
        logging.getLogger("aiohttp.server").addFilter(_without_client_bytes)
        app = web.Application(
            middlewares=[self._through_pipeline],
            client_max_size=0,
            handler_args=PROTOCOL,
        )
        for route in offered(lmi_management=self._registry.settings.lmi_management):
            other = OTHER_NAMED if route.path.startswith("/models/{id}") else NAMED
            path = route.path.replace("/{id}", f"/{{id:{other}}}").replace("/{adapter}", "/{adapter:[^/]+}")
            handler = _forwarded if route.worker else self._handler(route)
            for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
                added = app.router.add_route(method, self._prefix + path, handler, expect_handler=send_no_continue)
                self._routes[added] = route
        app.on_response_prepare.append(self._add_headers)
        return app

    def end_streams(self) -> None:
        """End all event streams, so that the server can close."""
        for task in self._streams:
            task.cancel()

    # Requests that aiohttp has read

    @web.middleware
    async def _through_pipeline(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        route = self._routes.get(request.match_info.route)
        outlet = AiohttpOutlet(request)
        request[INCOMING] = incoming = Incoming(
            outlet=outlet,
            method=request.method,
            path=request.path,
            client=request.remote or "",
            id=request_id(request.headers),
            arrived=time.monotonic(),
            route=route,
            path_id=request.match_info.get("id"),
            query=NO_QUERY if route is None else declared_query(request, route),
            changes_state=request.method not in SAFE_METHODS or bool({"reload", "autoload"} & set(request.query)),
        )
        is_forwarded = route is not None and route.worker
        respond: Respond = self._pipeline.forward if is_forwarded else partial(self._answer, request, handler, outlet)
        await self._pipeline.run(incoming, respond)
        assert outlet.response is not None
        return outlet.response

    async def _answer(self, request: web.Request, handler: Handler, outlet: AiohttpOutlet, incoming: Incoming) -> int:
        """Answer in the router itself, with a 404 or 405 if no route matches. A `Respond` with further arguments."""
        try:
            outlet.response = response = await handler(request)
        except web.HTTPMethodNotAllowed as wrong:
            allowed = ", ".join(sorted({*wrong.allowed_methods, "OPTIONS"}))
            message = f"{request.method} is not allowed here; use {allowed}"
            raise MethodNotAllowed(message, headers={"Allow": allowed}) from None
        except web.HTTPNotFound:
            raise PathNotFound(not_found(printable(request.path.removeprefix(self._prefix)))) from None
        except web.HTTPException as other:
            raise BadRequest(other.reason or "bad request") from None
        if isinstance(response, web.Response):  # aiohttp would write it without a time limit
            await wait_for_client(outlet, outlet.send(response), self._registry.settings.write_stall)
        return response.status

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers of every response. aiohttp calls this also for responses to malformed requests."""
        response.headers["Server"] = SERVER
        if INCOMING in request:
            incoming = request[INCOMING]
            response.headers.update(own_headers(incoming.id))
            response.headers.update(incoming.ignored)
            if isinstance(incoming.outlet, AiohttpOutlet):
                incoming.outlet.began(response)
        response.headers.update(self._registry.access.cors_headers(request))

    # Plain requests

    def listener(self, runner: web.AppRunner, *, keep_alive: float = KEEP_ALIVE, most: int | None = None) -> Listener:
        """The listener of this application: it reads plain requests itself and hands other connections to aiohttp.

        `runner` must be set up, and cleaned up after the listener is closed. `keep_alive`: seconds that aiohttp waits
        for a request's head. `most`: see `Listener`.
        """
        server, loop = runner.server, asyncio.get_running_loop()
        assert server is not None
        routes = {
            (self._prefix + route.path).encode(): route
            for route in ROUTES
            if route.worker and "{" not in route.path and route.method == "POST"
        }
        options = {**PROTOCOL, "access_log": None, "keepalive_timeout": keep_alive}
        unread_timeout = max(KEEP_ALIVE, self._registry.settings.write_stall)

        def make_fallback(ended: Callable[[], None]) -> AiohttpConnection:
            return AiohttpConnection(server, ended, unread_timeout, loop=loop, **options)

        return Listener(routes, self._pipeline.serve, make_fallback, most, unread_timeout)

    # API functions

    def _handler(self, route: Route) -> Handler:
        """The aiohttp handler of a route that the router answers itself."""
        function = function_of(route)

        async def handle(request: web.Request) -> web.StreamResponse:
            incoming = request[INCOMING]
            body = partial(self._json_object, incoming, route)
            call = ApiCall(request, route, incoming.query, incoming.key, self._services, body)
            return await self._respond(request, await function(call))

        return handle

    async def _json_object(self, incoming: Incoming, route: Route) -> dict[str, Any]:
        """The body as a JSON object. Notes the unknown fields, or raises BadRequest for them with strict-fields."""
        body = await self._pipeline.bodies.read(incoming)
        peek(body)  # the same error message as for forwarded requests
        found = _parse(body)
        unknown = unknown_fields(route, found)
        if unknown and self._registry.settings.strict_fields:
            raise BadRequest(
                "this field is unknown; leave it out, or serve without strict-fields to have it ignored",
                reason="unknown_parameter",
                param=unknown[0][:128],
            )
        incoming.ignored = ignored_fields(unknown)
        return found

    async def _respond(self, request: web.Request, result: ApiResult) -> web.StreamResponse:
        if isinstance(result, web.Response):
            return result
        if isinstance(result, FrameStream):
            return await self._stream(request, result)
        reply = result if isinstance(result, JsonReply) else JsonReply(result)
        return web.Response(
            body=json_bytes(reply.body),
            status=reply.status,
            headers=reply.headers,
            content_type="application/json",
            charset="utf-8",
        )

    async def _stream(self, request: web.Request, result: FrameStream) -> web.StreamResponse:
        """Send frames until the client disconnects or stops reading."""
        request[INCOMING].phase = "events"
        response = web.StreamResponse(headers=stream(result.dialect).headers)
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        outlet, write_stall = request[INCOMING].outlet, self._registry.settings.write_stall
        try:
            await response.prepare(request)
            if request.method == "HEAD":
                return response
            await response.write(result.first)
            async for frame in result.frames:
                await wait_for_client(outlet, response.write(frame), write_stall)
        except ConnectionError:
            if request.transport is not None:
                request.transport.abort()
        except asyncio.CancelledError:
            if not self._registry.closing:  # `end_streams` cancels as well; the response then ends in good order
                raise
        finally:
            self._streams.discard(task)
            await result.frames.aclose()  # type: ignore[attr-defined]
        return response


def _parse(body: bytes) -> dict[str, Any]:
    """The JSON object in a body that `peek` has accepted. Raises BadRequest.

    Do not call it in another thread: glibc keeps the memory that such a thread allocated, 56 MB after a body of 51 MB.
    """
    if fault := json_faults.too_many_values(body):
        raise BadRequest(fault)
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as bad:
        fault = json_faults.describe(body, bad.msg[:200])
        raise BadRequest(f"the body is not a JSON object: {fault}", reason="invalid_json") from None
    assert isinstance(found, dict)
    return found


def function_of(route: Route) -> ApiFunction:
    """The API function that `route` names. Raises ImportError or AttributeError if there is none."""
    module, _, name = route.handler.partition(".")
    function: ApiFunction = getattr(import_module(f"{API}.{module}"), name)
    return function


def declared_query(request: web.Request, route: Route) -> Mapping[str, str]:
    """The query parameters that the request's route declares."""
    if "?" not in request.raw_path:  # `request.query` builds a multidict, which costs more than this check
        return NO_QUERY
    return {name: request.query[name] for name in query(route) if name in request.query}


def not_found(path: str) -> str:
    """The 404 message for `path` (printable, without the prefix), with the nearest known route as a suggestion."""
    if len(path) > MAX_SUGGESTED:
        return "File Not Found"
    # Some clients add a prefix: /openai/v1/models. /completion is not meant by /v1/chat/completion.
    near = max((known for known in _PATHS if known.count("/") > 1 and path.endswith(known)), key=len, default="")
    if not near:
        near = next(iter(difflib.get_close_matches(path, _PATHS, n=1, cutoff=0.75)), "")
    if not near and path[1:]:
        near = next((known for known in _PATHS if known.endswith(path)), "")  # /load for /models/load
    hint = f"did you mean {near}?" if near else "GET /openapi.json lists what is"
    return f"File Not Found: {path} is no path of this server; {hint}"


async def _forwarded(request: web.Request) -> web.StreamResponse:
    """Never called: aiohttp's table needs a handler, but the middleware gives requests for workers to the pipeline."""
    raise AssertionError(f"{request.path} is forwarded")


def _without_client_bytes(record: logging.LogRecord) -> bool:
    """Keep the bytes of malformed requests, which may contain keys, out of the log: aiohttp's traceback quotes them.

    A filter of `aiohttp.server`'s logger; it changes the record and lets it pass.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
        record.msg += f": {type(error).__name__}"
    return True

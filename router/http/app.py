"""The HTTP application: the routes, and the two transports that give their requests to the pipeline."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from router.api.call import Services
from router.errors import BadRequest, MethodNotAllowed, PathNotFound
from router.http.aiohttp_transport import AiohttpOutlet, Connection, expect
from router.http.dispatch import Dispatcher, Work
from router.http.incoming import BUFFERED_IN_ALL, INCOMING, NO_QUERY, PHASE, ROUTE, Incoming, asked_of
from router.http.listener import KEEP_ALIVE, Listener
from router.http.metrics import Metrics
from router.http.pipeline import SERVER, Pipeline, Respond, not_found, own_headers, printable, request_id
from router.http.proxy import Proxy
from router.registry.auth import SAFE_METHODS
from router.registry.pulls import HubModels
from router.registry.registry import Registry
from worker.protocol.routes import ROUTES, Route

LINGERING = 2.0
"""Seconds for which the rest of a rejected body is read and discarded, so that its sender can read the answer."""
PROTOCOL: Mapping[str, Any] = {"auto_decompress": False, "lingering_time": LINGERING}
"""Options of aiohttp's protocol class."""
NAMED, OTHER_NAMED = "(?s:.+)", "(?!(?:load|unload)$)(?s:.+)"
"""A model in a path; without /v1 two names are calls, and GET of them is a wrong method."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class App:
    """The HTTP side of one router."""

    def __init__(self, registry: Registry, proxy: Proxy, metrics: Metrics, *, most_buffered: int = BUFFERED_IN_ALL):
        self._registry = registry
        self._prefix = registry.settings.api_prefix
        self._pipeline = Pipeline(registry, proxy, metrics, most_buffered=most_buffered)
        services = Services(registry, HubModels(registry), self._pipeline.requests, metrics)
        self._dispatcher = Dispatcher(services, self._pipeline.bodies)
        self._routes: dict[web.AbstractRoute, Route] = {}
        """The declaration of each of aiohttp's routes."""

    def build(self) -> web.Application:
        """The aiohttp application; its routes are those of `worker.protocol.routes` and no others."""
        logging.getLogger("aiohttp.server").addFilter(_quote_nothing)
        app = web.Application(
            middlewares=[self._through_pipeline],
            client_max_size=0,
            handler_args=PROTOCOL,
        )
        for route in ROUTES:
            other = OTHER_NAMED if route.path.startswith("/models/{id}") else NAMED
            path = route.path.replace("/{id}", f"/{{id:{other}}}").replace("/{adapter}", "/{adapter:[^/]+}")
            handler = _forwarded if route.worker else _handler(self._dispatcher.handler(route))
            for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
                added = app.router.add_route(method, self._prefix + path, handler, expect_handler=expect)
                self._routes[added] = route
        app.on_response_prepare.append(self._add_headers)
        return app

    def end_streams(self) -> None:
        """End all event streams, so that the server can close."""
        self._dispatcher.end_streams()

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
            query=NO_QUERY if route is None else asked_of(request, route),
            changes_state=request.method not in SAFE_METHODS or bool({"reload", "autoload"} & set(request.query)),
        )
        if route is not None:
            request[ROUTE] = route

        is_workers = route is not None and route.worker
        respond: Respond = self._pipeline.forward if is_workers else partial(self._answer, request, handler, outlet)
        await self._pipeline.run(incoming, respond)
        assert outlet.response is not None
        return outlet.response

    async def _answer(self, request: web.Request, handler: Handler, outlet: AiohttpOutlet, incoming: Incoming) -> int:
        """Have the router itself answer (`router.http.pipeline.Respond`), with a 404 or 405 where no route matches."""
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
        finally:
            incoming.stage = request.get(PHASE, "queued")
        return response.status

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers of every answer. aiohttp calls this for all responses, those to malformed requests too."""
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
        """The listener of this application: it reads plain calls itself and hands all other connections to aiohttp.

        `runner` has been set up, and is to be cleaned up after the listener is closed. `keep_alive`: seconds that
        aiohttp waits for a request's head. `most`: see `Listener`."""
        server, loop = runner.server, asyncio.get_running_loop()
        assert server is not None
        routes = {
            (self._prefix + route.path).encode(): route
            for route in ROUTES
            if route.worker and "{" not in route.path and route.method == "POST"
        }
        options = {**PROTOCOL, "access_log": None, "keepalive_timeout": keep_alive}
        return Listener(
            routes, self._pipeline.serve, lambda ended: Connection(server, ended, loop=loop, **options), most
        )


async def _forwarded(request: web.Request) -> web.StreamResponse:
    """Never called: aiohttp's table needs a handler, and the middleware gives requests for workers to the pipeline."""
    raise AssertionError(f"{request.path} is forwarded")


def _handler(work: Work) -> Handler:
    """A route that the router answers itself, as aiohttp calls it."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await work(request, request[INCOMING].key)

    return handle


def _quote_nothing(record: logging.LogRecord) -> bool:
    """Keep the bytes of malformed requests, which may contain keys, out of the log: aiohttp's traceback quotes them."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
        record.msg += f": {type(error).__name__}"
    return True


__all__ = ["App"]

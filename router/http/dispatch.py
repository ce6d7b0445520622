"""The adapter between aiohttp and API functions: it finds the function of a route, calls it and sends its result."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from typing import Any

import orjson
from aiohttp import web

from router.api.call import ApiCall, ApiFunction, ApiResult, FrameStream, JsonReply, Services
from router.config.settings import ApiKey
from router.http.incoming import PHASE, Bodies, asked_of
from worker.protocol.dialects import Dialect
from worker.protocol.routes import Route
from worker.protocol.streams import stream

API = "router.api"
"""The package of the functions that routes name."""
Work = Callable[[web.Request, ApiKey], Awaitable[web.StreamResponse]]


def function_of(route: Route) -> ApiFunction:
    """The API function that `route` names. Raises ImportError or AttributeError if there is none."""
    module, _, name = route.handler.partition(".")
    function: ApiFunction = getattr(import_module(f"{API}.{module}"), name)
    return function


class Dispatcher:
    """Answers requests with API functions."""

    def __init__(self, services: Services, bodies: Bodies):
        self._services = services
        self._bodies = bodies
        self._streams: set[asyncio.Task[Any]] = set()

    def handler(self, route: Route) -> Work:
        """The handler of a route that the router answers itself."""
        function = function_of(route)

        async def work(request: web.Request, key: ApiKey) -> web.StreamResponse:
            return await self._respond(request, await function(self._call(request, route, key)))

        return work

    def _call(self, request: web.Request, route: Route, key: ApiKey) -> ApiCall:
        body = partial(self._bodies.object, request)
        return ApiCall(request, route, asked_of(request, route), key, self._services, body)

    def end_streams(self) -> None:
        """End all event streams, so that the server can close."""
        for task in self._streams:
            task.cancel()

    async def _respond(self, request: web.Request, result: ApiResult) -> web.StreamResponse:
        if isinstance(result, web.Response):
            return result
        if isinstance(result, FrameStream):
            return await self._stream(request, result)
        reply = result if isinstance(result, JsonReply) else JsonReply(result)
        return web.Response(
            body=orjson.dumps(reply.body),
            status=reply.status,
            headers=reply.headers,
            content_type="application/json",
            charset="utf-8",
        )

    async def _stream(self, request: web.Request, result: FrameStream) -> web.StreamResponse:
        """Send frames until the client disconnects or stops reading."""
        request[PHASE] = "events"
        response = web.StreamResponse(headers=stream(result.dialect).headers)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        registry = self._services.registry
        try:
            if result.dialect is Dialect.ADMIN:
                await response.write(b": open\n\n")
            async for frame in result.frames:
                async with asyncio.timeout(registry.settings.write_stall or None):
                    await response.write(frame)
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        except asyncio.CancelledError:
            if not registry.closing:
                raise
        finally:
            self._streams.discard(task)
            await result.frames.aclose()  # type: ignore[attr-defined]
        return response

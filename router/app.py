"""Routes and middlewares: how an HTTP request finds its face, and how an error finds its status."""

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from random import getrandbits
from typing import Any

import msgspec
import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from router import __version__, page
from router.access import ANYBODY, SAFE_METHODS
from router.connections import Connection, Reply
from router.errors import (
    ApiError,
    BadRequest,
    BodyTimeout,
    EncodingUnsupported,
    Forbidden,
    Internal,
    MethodNotAllowed,
    NotOffered,
    PathNotFound,
    QueueFull,
    TooLarge,
)  # fmt: skip
from router.faces import admin, fastchat, llama_server, lmi, lmi_adapters, ollama
from router.hub import Hub
from router.listener import KEEP_ALIVE, Asked, Listener
from router.log import line
from router.metrics import CONTENT_TYPE, Metrics
from router.openapi import document
from router.paths import not_found
from router.proxy import Answer, Call, Outlet, Proxy
from router.requests import Record, Requests
from router.settings import Key
from router.site import Site, flag
from worker.routes import (
    FLAGS,
    ROUTES,
    Face,
    Loads,
    Plane,
    Route,
    error_body,
    face_of,
    ignored_fields,
    query,
    refusal,
    stream,
    unknown_fields,
)  # fmt: skip

log = logging.getLogger("router.app")
access_log = logging.getLogger("router.access")

BUFFERED_IN_ALL = 512 << 20
"""Bytes of request bodies held at once; more are refused."""
LINGERING = 2.0
"""Seconds for which the rest of a refused body is read and thrown away, so that its sender gets to see why."""
PROTOCOL: Mapping[str, Any] = {"auto_decompress": False, "lingering_time": LINGERING}
"""What connections of this application need, as options of aiohttp's protocol."""
ID, OTHER_ID = "(?s:.+)", "(?!(?:load|unload)$)(?s:.+)"
"""A model in a path; without /v1 two names are calls, and GET of them is a wrong method."""
NO_QUERY: Mapping[str, str] = {}
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ID = web.RequestKey("id", str)
_ARRIVED = web.RequestKey("arrived", float)
_ROUTE = web.RequestKey("route", Route)
PHASE = web.RequestKey("phase", str)
"""How far a request had come when its client left: queued, starting, streaming; events."""
_BUFFERED = web.RequestKey("buffered", int)
_IGNORED = web.RequestKey("ignored", dict[str, str])
"""The header that names fields of the body which nobody knows, if there are any."""
_MODEL = web.RequestKey("model", str)
_STATUS = web.RequestKey("status", int)
"""How it really ended, where that is not what the status line says."""
EVENTS = stream(Face.ADMIN)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Peek(msgspec.Struct):
    """All that the router reads of a body; the decoder checks and skips the rest."""

    model: Any = None
    stream: Any = None
    name: Any = None
    """What Ollama's clients once called the model."""


class App:
    """The HTTP side of one router."""

    def __init__(self, site: Site, proxy: Proxy, metrics: Metrics, *, most_buffered: int = BUFFERED_IN_ALL):
        self._site = site
        self._prefix = site.settings.api_prefix
        self._hub = Hub(site)
        self._requests = Requests()
        site.events.fold(self._requests.hear)
        self._proxy = proxy
        self._metrics = metrics
        self._buffered = 0
        self._most_buffered = most_buffered
        self._document = b""
        """The API's description, once somebody has asked for it."""
        self._streams: set[asyncio.Task[Any]] = set()

    def build(self) -> web.Application:
        """The aiohttp application; its routes are those of `worker.routes` and no others."""
        logging.getLogger("aiohttp.server").addFilter(_quote_nothing)
        app = web.Application(
            middlewares=[self._outermost],
            client_max_size=0,
            handler_args=PROTOCOL,
        )
        own = {
            "models": self._models,
            "model": self._model,
            "models_sse": self._models_sse,
            "fetch": self._fetch,
            "delete": self._delete,
            "load": self._load,
            "unload": self._unload,
            "health": self._health,
            "ready": self._ready,
            "metrics": self._render_metrics,
            "props": self._props,
            "state": self._state,
            "plan": self._plan,
            "events": self._events,
            "reload": self._reload,
            "pin": self._pin,
            "config": self._config,
            "logs": self._logs,
            "logs_sse": self._logs_sse,
            "requests": self._list_requests,
            "cancel": self._cancel,
            "index": self._index,
            "style": self._page_part,
            "script": self._page_part,
            "ping": self._ping,
            "lmi_list": self._lmi_list,
            "lmi_register": self._lmi_register,
            "lmi_describe": self._lmi_describe,
            "lmi_scale": self._lmi_scale,
            "lmi_unregister": self._lmi_unregister,
            "fastchat_status": self._fastchat_status,
            "fastchat_details": self._fastchat_details,
            "fastchat_check": self._fastchat_check,
            "ollama_tags": self._ollama_tags,
            "ollama_ps": self._ollama_ps,
            "ollama_version": self._ollama_version,
            "ollama_show": self._ollama_show,
            "ollama_pull": self._ollama_pull,
            "ollama_delete": self._ollama_delete,
            "slots": self._slots,
            "streams_lookup": self._streams_lookup,
            "disabled": self._disabled,
            "not_offered": self._not_offered,
            "openapi": self._openapi,
            "lora_adapters": self._lora_adapters,
            "adapter_register": self._adapter_register,
            "adapter_update": self._adapter_update,
            "adapter_unregister": self._adapter_unregister,
            "adapter_list": self._adapter_list,
            "adapter_describe": self._adapter_describe,
        }
        for route in ROUTES:
            other = OTHER_ID if route.path.startswith("/models/{id}") else ID
            path = route.path.replace("/{id}", f"/{{id:{other}}}").replace("/{adapter}", "/{adapter:[^/]+}")
            work = self._forward if route.worker else own[route.name]
            handler = self._guarded(route, work)
            for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
                app.router.add_route(method, self._prefix + path, handler, expect_handler=_expect)
        app.on_response_prepare.append(self._add_headers)
        return app

    def end_streams(self) -> None:
        """End all event streams, so that the server can close."""
        for task in self._streams:
            task.cancel()

    # Around every request

    @web.middleware
    async def _outermost(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request[_ID] = _request_id(request.headers)
        request[_ARRIVED] = time.monotonic()
        status = 499
        try:
            response = await self._answer(request, handler)
            status = request.get(_STATUS, response.status)
            return response
        except asyncio.CancelledError:
            self._metrics.disconnects.labels(request.get(PHASE, "queued")).inc()
            raise
        finally:
            self._buffered -= request.get(_BUFFERED, 0)
            route = request.get(_ROUTE)
            endpoint = route.name if route is not None else "unknown"
            took = time.monotonic() - request[_ARRIVED]
            model, client = request.get(_MODEL, "unknown"), request.remote or ""
            self._tell(client, request.method, request.path, status, took, endpoint, model, request[_ID])

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
            log.exception("%s: %s %s failed in the router", request[_ID], request.method, request.path)
            return self._error(request, Internal("the router failed on this request; its log says how"))

    def _error(self, request: web.Request, error: ApiError) -> web.Response:
        headers, body = self._refusal(request.get(_ROUTE), request.path, request[_ID], error)
        response = web.Response(status=error.status, headers=headers, body=body)
        if headers.get("Connection") == "close":
            response.force_close()  # the header alone says so and does nothing
        return response

    def _refusal(self, route: Route | None, path: str, id: str, error: ApiError) -> tuple[dict[str, str], bytes]:
        """Headers and body of an error, which is counted."""
        if error.status in (401, 429, 503, 507):
            self._metrics.rejections.labels("auth" if error.status == 401 else error.reason).inc()
        face = route.face if route is not None else face_of(path.removeprefix(self._prefix))
        body = error_body(
            face,
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
        if _ID in request:
            response.headers.update(_own_headers(request[_ID]))
            response.headers.update(request.get(_IGNORED, {}))
        response.headers.update(self._site.access.cors_headers(request))

    def _tell(
        self, client: str, method: str, path: str, status: int, took: float, endpoint: str, model: str, id: str
    ) -> None:
        """Count a request that is over and log it."""
        self._metrics.requests.add(model, endpoint, str(status))
        quiet = self._site.settings.access_log
        if quiet == "all" or (quiet == "errors" and status >= 400):
            line(access_log, f"{client or '-'} {method} {_clean(path)} {status} {took:.3f}s model={model} rid={id}")

    def _guarded(self, route: Route, work: Callable[[web.Request, Key], Awaitable[web.StreamResponse]]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            request[_ROUTE] = route
            plane = Plane.ADMIN if route.name == "models" and request.query.get("reload") else route.plane
            key = self._site.access.authorize(request, plane, route.name)
            asked = _asked(request)
            for name in FLAGS if asked else ():
                flag(asked, name)  # a parameter that a call knows is checked whether or not it comes to matter
            return await work(request, key)

        return handle

    # Bodies

    async def _read(self, request: web.Request) -> bytes:
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
        self._buffered += more
        request[_BUFFERED] = size = request.get(_BUFFERED, 0) + more
        limit = self._site.settings.max_body_size
        if size > limit:
            raise TooLarge(f"the body has more than the {limit} bytes that are allowed", headers=CLOSE)
        if self._buffered > self._most_buffered:
            raise QueueFull("too many bytes of requests are waiting", retry_after=1, headers=CLOSE)

    async def _object(self, request: web.Request) -> dict[str, Any]:
        """The body as a JSON object, for calls that the router itself answers."""
        body = await self._read(request)
        peek(body)
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError as bad:
            raise BadRequest(f"the body is not a JSON object: {bad.msg[:200]}", reason="invalid_json") from None
        assert isinstance(found, dict)
        strange = unknown_fields(request[_ROUTE], found)
        if strange and self._site.settings.strict_fields:
            raise BadRequest(
                "this field is unknown; leave it out, or serve without strict-fields to have it ignored",
                reason="unknown_parameter",
                param=strange[0][:128],
            )
        request[_IGNORED] = ignored_fields(strange)
        return found

    # Work for workers

    async def _forward(self, request: web.Request, key: Key) -> web.StreamResponse:
        body = await self._read(request)
        reply = Reply(request)
        errand = Errand(
            reply,
            request[_ROUTE],
            key,
            request[_ID],
            request[_ARRIVED],
            request.remote or "",
            body,
            path_id=request.match_info.get("id"),
            query=_asked(request),
        )
        try:
            request[_STATUS] = await self._send(errand)
        except asyncio.CancelledError:
            request[PHASE] = errand.phase
            raise
        finally:
            request[_MODEL] = errand.model
        assert reply.response is not None
        return reply.response

    async def _send(self, errand: "Errand") -> int:
        """Have a worker answer; how that really ended, which may not be what the status line says. Raises ApiError
        while nothing has been sent."""
        route, key, arrived = errand.route, errand.key, errand.arrived
        read = time.monotonic()
        seen = peek(errand.body)
        named = seen.model
        if named is None and route.face is Face.OLLAMA:
            named = seen.name
        if named is not None and not isinstance(named, str):
            raise BadRequest("model must be a string", param="model")
        asked = errand.query
        if route.face is Face.OLLAMA and named is not None:
            named = ollama.known(self._site, key, named)
        id, name = self._site.choose(key, path=errand.path_id, body=named, query=asked)
        errand.model = id
        adapter = self._adapter(errand, id, name)
        autoload = flag(asked, "autoload") if asked else None
        if autoload is None and route.loads is not Loads.FOLLOWS:
            autoload = False
        preset = self._site.members.find(id).preset
        timeout = self._site.settings.timeout if preset.request_timeout is None else preset.request_timeout
        call = Call(
            route=route,
            model=id,
            body=errand.body,
            stream=_streams(route, seen),
            autoload=autoload,
            request_id=errand.id,
            arrived=arrived,
            read=read,
            timeout=max(0.0, timeout),
            adapter=adapter,
            asked=name if named is None else "",
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
        self._buffered += size
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
            self._buffered -= size
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
        errand.key = access.authorize(asked, asked.route.plane, asked.route.name)
        if len(asked.body) > (limit := self._site.settings.max_body_size):
            raise TooLarge(f"the body has {len(asked.body)} bytes, {limit} are allowed", headers=CLOSE)
        if self._buffered > self._most_buffered:
            raise QueueFull("too many bytes of requests are waiting", retry_after=1, headers=CLOSE)
        return await self._send(errand)

    def _adapter(self, errand: "Errand", id: str, name: str) -> str:
        """The adapter that a request names beside its body: behind its model's name, or as LMI's clients do. Raises
        BadRequest for two that differ, ModelNotFound."""
        adapter = self._site.names.adapter(name)
        said = errand.query.get("adapter", "")
        if errand.route.name == "invocations":
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

    # Answers of the router itself

    async def _models(self, request: web.Request, key: Key) -> web.StreamResponse:
        is_openai = request[_ROUTE].face is Face.OPENAI
        return _json(await llama_server.models(self._site, key, _asked(request), adapters=is_openai))

    async def _model(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await llama_server.model(self._site, key, request.match_info["id"]))

    async def _fetch(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await llama_server.fetch(self._hub, await self._object(request)))

    async def _delete(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await llama_server.delete(self._hub, key, _asked(request)))

    async def _load(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await llama_server.load(self._site, key, await self._object(request), _asked(request)))

    async def _unload(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await llama_server.unload(self._site, key, await self._object(request), _asked(request)))

    async def _health(self, request: web.Request, key: Key) -> web.StreamResponse:
        status, body = llama_server.health(self._site, key, _asked(request))
        return _json(body, status=status, headers=None if status == 200 else COME_BACK)

    async def _ready(self, request: web.Request, key: Key) -> web.StreamResponse:
        status, body = llama_server.ready(self._site)
        return _json(body, status=status, headers=None if status == 200 else COME_BACK)

    async def _render_metrics(self, request: web.Request, key: Key) -> web.StreamResponse:
        name = _asked(request).get("model")
        if not name and key.models:
            raise Forbidden("this key may see some models only; name one with ?model=")
        about: tuple[str, ...] = ()
        if name:
            listed = self._site.model(key, name)
            about = listed.id, listed.model.preset.id
        return web.Response(body=self._metrics.render(*about), headers={"Content-Type": CONTENT_TYPE})

    async def _props(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await llama_server.props(self._site, key, _asked(request)))

    async def _slots(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await llama_server.slots(self._site, key, _asked(request)))

    async def _streams_lookup(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json([])  # no stream outlives its connection

    async def _lora_adapters(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(llama_server.lora_adapters(self._site, key, _asked(request).get("model")))

    def _with_adapters(self, request: web.Request, key: Key) -> str:
        """The model whose adapters a call is about."""
        id, _ = self._site.choose(key, path=request.match_info.get("id"), body=None, query=NO_QUERY)
        return id

    async def _adapter_register(self, request: web.Request, key: Key) -> web.StreamResponse:
        id = self._with_adapters(request, key)
        return _json(await lmi_adapters.register(self._site, id, _asked(request)))

    async def _adapter_update(self, request: web.Request, key: Key) -> web.StreamResponse:
        id, name = self._with_adapters(request, key), request.match_info["adapter"]
        return _json(await lmi_adapters.update(self._site, id, name, _asked(request)))

    async def _adapter_unregister(self, request: web.Request, key: Key) -> web.StreamResponse:
        id, name = self._with_adapters(request, key), request.match_info["adapter"]
        return _json(await lmi_adapters.unregister(self._site, id, name))

    async def _adapter_list(self, request: web.Request, key: Key) -> web.StreamResponse:
        id = self._with_adapters(request, key)
        return _json(lmi_adapters.listed(self._site, key, id, _asked(request)))

    async def _adapter_describe(self, request: web.Request, key: Key) -> web.StreamResponse:
        id, name = self._with_adapters(request, key), request.match_info["adapter"]
        return _json(lmi_adapters.described(self._site, key, id, name))

    async def _openapi(self, request: web.Request, key: Key) -> web.StreamResponse:
        if not self._document:
            self._document = await asyncio.to_thread(lambda: orjson.dumps(document(prefix=self._prefix)))
        return web.Response(body=self._document, content_type="application/json", charset="utf-8")

    async def _disabled(self, request: web.Request, key: Key) -> web.StreamResponse:
        raise Forbidden(f"{request.path} is disabled: this server fetches and runs nothing", reason="feature_disabled")

    async def _not_offered(self, request: web.Request, key: Key) -> web.StreamResponse:
        route: Route = request[_ROUTE]
        raise NotOffered(f"{route.method} {route.path} is not offered; use {route.instead}")

    async def _state(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(admin.state(self._site))

    async def _plan(self, request: web.Request, key: Key) -> web.StreamResponse:
        id, _ = self._site.choose(key, path=None, body=None, query=_asked(request))
        return _json(await admin.plan(self._site, id))

    async def _reload(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await self._site.reload())

    async def _pin(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(admin.pin(self._site, key, await self._object(request)))

    async def _config(self, request: web.Request, key: Key) -> web.StreamResponse:
        id, _ = self._site.choose(key, path=None, body=None, query=_asked(request))
        return _json(admin.config(self._site, id))

    async def _logs(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(admin.logs(self._site, key, _asked(request)))

    async def _logs_sse(self, request: web.Request, key: Key) -> web.StreamResponse:
        return await self._stream(request, admin.follow_logs(self._site, key, _asked(request), _last_event_id(request)))

    async def _list_requests(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(admin.requests(self._site, self._requests, key, _asked(request)))

    async def _cancel(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json({"success": True, "cancelled": self._requests.cancel(request.match_info["request"])})

    async def _fastchat_status(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(fastchat.status(self._site, key))

    async def _fastchat_details(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await fastchat.details(self._site, key, await self._object(request)))

    async def _fastchat_check(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await fastchat.token_check(self._site, key, await self._object(request)))

    async def _ping(self, request: web.Request, key: Key) -> web.StreamResponse:
        status, body = lmi.ping(self._site)
        return _json(body, status=status)

    async def _lmi_list(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(lmi.listed(self._site, key, _asked(request)))

    async def _lmi_register(self, request: web.Request, key: Key) -> web.StreamResponse:
        status, body = await lmi.register(self._site, _asked(request))
        return _json(body, status=status, headers=_ignored(request))

    async def _lmi_describe(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(lmi.described(self._site, key, request.match_info["id"]))

    async def _lmi_scale(self, request: web.Request, key: Key) -> web.StreamResponse:
        status, body = await lmi.scale(self._site, key, request.match_info["id"], _asked(request))
        return _json(body, status=status, headers=_ignored(request))

    async def _lmi_unregister(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(lmi.unregister(self._site, key, request.match_info["id"]))

    async def _ollama_tags(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await ollama.tags(self._site, key))

    async def _ollama_ps(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await ollama.ps(self._site, key))

    async def _ollama_version(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json({"version": __version__})

    async def _ollama_show(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await ollama.show(self._site, key, await self._object(request)))

    async def _ollama_pull(self, request: web.Request, key: Key) -> web.StreamResponse:
        wants_stream, lines = await ollama.pull(self._hub, key, await self._object(request))
        if wants_stream:
            return await self._stream(request, ollama.told(lines), headers=stream(Face.OLLAMA).headers)
        return _json(await ollama.last(lines))

    async def _ollama_delete(self, request: web.Request, key: Key) -> web.StreamResponse:
        await ollama.delete(self._hub, key, await self._object(request))
        return web.Response(text="")

    async def _models_sse(self, request: web.Request, key: Key) -> web.StreamResponse:
        snapshot = bool(flag(_asked(request), "snapshot"))
        frames = llama_server.sse(self._site, key, _last_event_id(request), snapshot=snapshot)
        return await self._stream(request, frames)

    async def _events(self, request: web.Request, key: Key) -> web.StreamResponse:
        return await self._stream(request, admin.events(self._site, _last_event_id(request)))

    async def _index(self, request: web.Request, key: Key) -> web.StreamResponse:
        if page.wants(request.headers.get("Accept", "")):
            return _sheet(request, "page.html")
        at = f"{self._prefix}/v1"
        return _json({"message": f"the router is running; its API is at {at}", "version": __version__})

    async def _page_part(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _sheet(request, request[_ROUTE].path.rpartition("/")[2])

    async def _stream(
        self, request: web.Request, frames: AsyncIterator[bytes], headers: Mapping[str, str] = EVENTS.headers
    ) -> web.StreamResponse:
        """Send frames for as long as the client listens and reads."""
        request[PHASE] = "events"
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            if headers is EVENTS.headers:
                await response.write(b": open\n\n")
            async for frame in frames:
                async with asyncio.timeout(self._site.settings.write_stall or None):
                    await response.write(frame)
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        except asyncio.CancelledError:
            if not self._site.closing:
                raise
        finally:
            self._streams.discard(task)
            await frames.aclose()  # type: ignore[attr-defined]
        return response


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


CLOSE = {"Connection": "close"}
JSON = {"Content-Type": "application/json; charset=utf-8"}
SERVER = f"router/{__version__}"
LMI_ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"
LATEST = 60
"""Seconds that a client is told to wait at most: official clients give up where it is much more."""
COME_BACK = {"X-Should-Retry": "true", "Retry-After": "1"}
_DECODER = msgspec.json.Decoder(Peek)


def peek(body: bytes) -> Peek:
    """`model` and `stream` of a JSON object. Raises BadRequest (invalid_json) if it is none."""
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        raise BadRequest(f"the body is not a JSON object: {str(bad)[:200]}", reason="invalid_json") from None


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


def _asked(request: web.Request) -> Mapping[str, str]:
    """What the query says, as far as the table knows its call to read it."""
    if "?" not in request.raw_path:  # the query itself costs more to make than to look for
        return NO_QUERY
    known = query(request[_ROUTE])
    return {name: request.query[name] for name in known if name in request.query}


def _ignored(request: web.Request) -> dict[str, str]:
    """The header that says which parameters made no difference."""
    return ignored_fields(name for name in lmi.NO_EFFECT if name in request.query)


def _changes_state(request: web.Request) -> bool:
    return request.method not in SAFE_METHODS or bool({"reload", "autoload"} & set(request.query))


async def _expect(request: web.Request) -> None:
    """Promise nothing before it is known that the body is wanted: `_invite` does."""


async def _invite(request: web.Request) -> None:
    """Ask for the body of a client that waits to be asked (RFC 9110, section 10.1.1)."""
    if request.version >= (1, 1) and request.headers.get("Expect", "").casefold() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # these bytes are no part of the answer


def _quote_nothing(record: logging.LogRecord) -> bool:
    """Keep what malformed requests said, keys among it, out of the log: aiohttp would quote it in a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
        record.msg += f": {type(error).__name__}"
    return True


def _last_event_id(request: web.Request) -> int | None:
    text = request.headers.get("Last-Event-ID", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


_CONTROL = dict.fromkeys((*range(32), 127), "?")


def _clean(text: str) -> str:
    """One line, whatever a client put into it."""
    if text.isascii() and text.isprintable():
        return text[:300]
    return text.encode("ascii", "backslashreplace").decode().translate(_CONTROL)[:300]


def _json(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(body), status=status, headers=headers, content_type="application/json", charset="utf-8"
    )


def _sheet(request: web.Request, name: str) -> web.Response:
    """A part of the page, or word that the browser has it already."""
    sheet = page.sheet(name)
    if request.headers.get("If-None-Match") == sheet.tag:
        return web.Response(
            status=304, headers={name: sheet.headers[name] for name in ("ETag", "Cache-Control", "Vary")}
        )
    return web.Response(body=sheet.body, headers=sheet.headers)


__all__ = ["App", "Peek", "peek"]

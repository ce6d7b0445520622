"""Calls that the router answers itself: each hands what was asked to its face, and back what that says."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from router import __version__, page
from router.bodies import Bodies
from router.errors import Forbidden, NotOffered
from router.faces import admin, anthropic, fastchat, llama_server, lmi, lmi_adapters, model_events, ollama
from router.hub import Hub
from router.metrics import CONTENT_TYPE, Metrics
from router.noted import NO_QUERY, PHASE, ROUTE, asked_of
from router.openapi import document
from router.requests import Requests
from router.settings import Key
from router.site import Site, flag
from worker.protocol.dialects import Dialect
from worker.protocol.headers import ignored_fields
from worker.protocol.routes import Route
from worker.protocol.streams import stream

EVENTS = stream(Dialect.ADMIN)
COME_BACK = {"X-Should-Retry": "true", "Retry-After": "1"}
Work = Callable[[web.Request, Key], Awaitable[web.StreamResponse]]


class Calls:
    """Those of one router."""

    def __init__(self, site: Site, bodies: Bodies, requests: Requests, metrics: Metrics):
        self._site = site
        self._prefix = site.settings.api_prefix
        self._hub = Hub(site)
        self._bodies = bodies
        self._requests = requests
        self._metrics = metrics
        self._document = b""
        """The API's description, once somebody has asked for it."""
        self._streams: set[asyncio.Task[Any]] = set()
        self.by_name: Mapping[str, Work] = {
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
            "version": self._version,
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
        """Each by the name of its route."""

    def end_streams(self) -> None:
        """End all event streams, so that the server can close."""
        for task in self._streams:
            task.cancel()

    async def _models(self, request: web.Request, key: Key) -> web.StreamResponse:
        is_openai = request[ROUTE].dialect is Dialect.OPENAI
        told = await llama_server.models(self._site, key, asked_of(request), adapters=is_openai)
        return _json(anthropic.listed(told) if anthropic.VERSION in request.headers else told)

    async def _model(self, request: web.Request, key: Key) -> web.StreamResponse:
        told = await llama_server.model(self._site, key, request.match_info["id"])
        return _json(anthropic.described(told) if anthropic.VERSION in request.headers else told)

    async def _fetch(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await llama_server.fetch(self._hub, await self._bodies.object(request)))

    async def _delete(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await llama_server.delete(self._hub, key, asked_of(request)))

    async def _load(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await llama_server.load(self._site, key, await self._bodies.object(request), asked_of(request)))

    async def _unload(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await llama_server.unload(self._site, key, await self._bodies.object(request), asked_of(request)))

    async def _health(self, request: web.Request, key: Key) -> web.StreamResponse:
        status, body = llama_server.health(self._site, key, asked_of(request))
        return _json(body, status=status, headers=None if status == 200 else COME_BACK)

    async def _ready(self, request: web.Request, key: Key) -> web.StreamResponse:
        status, body = llama_server.ready(self._site)
        return _json(body, status=status, headers=None if status == 200 else COME_BACK)

    async def _render_metrics(self, request: web.Request, key: Key) -> web.StreamResponse:
        name = asked_of(request).get("model")
        if not name and key.models:
            raise Forbidden("this key may see some models only; name one with ?model=")
        about: tuple[str, ...] = ()
        if name:
            listed = self._site.model(key, name)
            about = listed.id, listed.model.preset.id
        return web.Response(body=self._metrics.render(*about), headers={"Content-Type": CONTENT_TYPE})

    async def _props(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await llama_server.props(self._site, key, asked_of(request)))

    async def _slots(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await llama_server.slots(self._site, key, asked_of(request)))

    async def _streams_lookup(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json([])  # no stream outlives its connection

    async def _lora_adapters(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(llama_server.lora_adapters(self._site, key, asked_of(request).get("model")))

    def _with_adapters(self, request: web.Request, key: Key) -> str:
        """The model whose adapters a call is about."""
        id, _ = self._site.choose(key, path=request.match_info.get("id"), body=None, query=NO_QUERY)
        return id

    async def _adapter_register(self, request: web.Request, key: Key) -> web.StreamResponse:
        id = self._with_adapters(request, key)
        return _json(await lmi_adapters.register(self._site, id, asked_of(request)))

    async def _adapter_update(self, request: web.Request, key: Key) -> web.StreamResponse:
        id, name = self._with_adapters(request, key), request.match_info["adapter"]
        return _json(await lmi_adapters.update(self._site, id, name, asked_of(request)))

    async def _adapter_unregister(self, request: web.Request, key: Key) -> web.StreamResponse:
        id, name = self._with_adapters(request, key), request.match_info["adapter"]
        return _json(await lmi_adapters.unregister(self._site, id, name))

    async def _adapter_list(self, request: web.Request, key: Key) -> web.StreamResponse:
        id = self._with_adapters(request, key)
        return _json(lmi_adapters.listed(self._site, key, id, asked_of(request)))

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
        route: Route = request[ROUTE]
        raise NotOffered(f"{route.method} {route.path} is not offered; use {route.instead}")

    async def _state(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(admin.state(self._site))

    async def _plan(self, request: web.Request, key: Key) -> web.StreamResponse:
        id, _ = self._site.choose(key, path=None, body=None, query=asked_of(request))
        return _json(await admin.plan(self._site, id))

    async def _reload(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await self._site.reload())

    async def _pin(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(admin.pin(self._site, key, await self._bodies.object(request)))

    async def _config(self, request: web.Request, key: Key) -> web.StreamResponse:
        id, _ = self._site.choose(key, path=None, body=None, query=asked_of(request))
        return _json(admin.config(self._site, id))

    async def _logs(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(admin.logs(self._site, key, asked_of(request)))

    async def _logs_sse(self, request: web.Request, key: Key) -> web.StreamResponse:
        return await self._stream(
            request, admin.follow_logs(self._site, key, asked_of(request), _last_event_id(request))
        )

    async def _list_requests(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(admin.requests(self._site, self._requests, key, asked_of(request)))

    async def _cancel(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json({"success": True, "cancelled": self._requests.cancel(request.match_info["request"])})

    async def _fastchat_status(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(fastchat.status(self._site, key))

    async def _fastchat_details(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await fastchat.details(self._site, key, await self._bodies.object(request)))

    async def _fastchat_check(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await fastchat.token_check(self._site, key, await self._bodies.object(request)))

    async def _ping(self, request: web.Request, key: Key) -> web.StreamResponse:
        status, body = lmi.ping(self._site)
        return _json(body, status=status)

    async def _lmi_list(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(lmi.listed(self._site, key, asked_of(request)))

    async def _lmi_register(self, request: web.Request, key: Key) -> web.StreamResponse:
        status, body = await lmi.register(self._site, asked_of(request))
        return _json(body, status=status, headers=_ignored(request))

    async def _lmi_describe(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(lmi.described(self._site, key, request.match_info["id"]))

    async def _lmi_scale(self, request: web.Request, key: Key) -> web.StreamResponse:
        status, body = await lmi.scale(self._site, key, request.match_info["id"], asked_of(request))
        return _json(body, status=status, headers=_ignored(request))

    async def _lmi_unregister(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(lmi.unregister(self._site, key, request.match_info["id"]))

    async def _ollama_tags(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await ollama.tags(self._site, key))

    async def _ollama_ps(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await ollama.ps(self._site, key))

    async def _ollama_version(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json({"version": ollama.VERSION})

    async def _version(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json({"version": __version__})

    async def _ollama_show(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _json(await ollama.show(self._site, key, await self._bodies.object(request)))

    async def _ollama_pull(self, request: web.Request, key: Key) -> web.StreamResponse:
        wants_stream, lines = await ollama.pull(self._hub, key, await self._bodies.object(request))
        if wants_stream:
            return await self._stream(request, ollama.told(lines), headers=stream(Dialect.OLLAMA).headers)
        return _json(await ollama.last(lines))

    async def _ollama_delete(self, request: web.Request, key: Key) -> web.StreamResponse:
        await ollama.delete(self._hub, key, await self._bodies.object(request))
        return web.Response(text="")

    async def _models_sse(self, request: web.Request, key: Key) -> web.StreamResponse:
        snapshot = bool(flag(asked_of(request), "snapshot"))
        frames = model_events.sse(self._site, key, _last_event_id(request), snapshot=snapshot)
        return await self._stream(request, frames)

    async def _events(self, request: web.Request, key: Key) -> web.StreamResponse:
        return await self._stream(request, admin.events(self._site, _last_event_id(request)))

    async def _index(self, request: web.Request, key: Key) -> web.StreamResponse:
        if page.wants(request.headers.get("Accept", "")):
            return _sheet(request, "page.html")
        at = f"{self._prefix}/v1"
        return _json({"message": f"the router is running; its API is at {at}", "version": __version__})

    async def _page_part(self, request: web.Request, key: Key) -> web.StreamResponse:
        return _sheet(request, request[ROUTE].path.rpartition("/")[2])

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


def _ignored(request: web.Request) -> dict[str, str]:
    """The header that says which parameters made no difference."""
    return ignored_fields(name for name in lmi.NO_EFFECT if name in request.query)


def _last_event_id(request: web.Request) -> int | None:
    text = request.headers.get("Last-Event-ID", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


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

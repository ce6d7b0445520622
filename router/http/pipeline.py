"""The steps that every HTTP request takes, in their order, whichever transport has read it.

    admit         check the host and the origin of the request
    authenticate  check the key, and its right to use the route
    respond       the router answers itself, or forwards: read the body, find the model and the adapter, proxy
    refuse        turn an error of any step into a response in the error format of the route's API
    count, log    write one access log line and count the request once

`Pipeline.run` is this sequence. The transports are aiohttp's server (`router.http.aiohttp_transport`) and the reader of
plain POSTs (`router.http.listener`). Both give it an `Incoming` with an `Outlet`, and neither repeats a step.

Bodies are read whole and bounded in size, time and total bytes. Only `model` and `stream` are decoded; the worker
parses everything else.
"""

import asyncio
import contextlib
import ctypes
import logging
import re
import time
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from random import getrandbits
from typing import Any, NamedTuple

import msgspec

from router.api import lmi, ollama
from router.api.call import flag
from router.api.metrics import Metrics
from router.api.request_log import RequestLog, RequestRecord, request_line
from router.config.settings import MAX_BUFFERED
from router.errors import ApiError, BadRequest, BodyTimeout, EncodingUnsupported, Internal, QueueFull, TooLarge
from router.http.listener import PlainRequest
from router.http.proxy import Proxy
from router.http.request import CLOSE, ForwardedRequest, Incoming
from router.http.response import ProxiedResponse, own_headers, render_error, wait_for_client
from router.registry.registry import Registry
from worker.protocol import json_faults
from worker.protocol.dialects import Dialect
from worker.protocol.dialects.lmi import OPENAI_FIELDS
from worker.protocol.routes import FLAGS, AccessLevel, Route, dialect_of, error_response

log = logging.getLogger("router.http.app")
access_log = logging.getLogger("router.http.access")

# Answers an admitted request and returns the status to log, which can differ from the status line of a stream. Raises
# ApiError while nothing has been sent.
Respond = Callable[[Incoming], Awaitable[int]]

LARGE_BODY = 1 << 20  # bytes of a body whose memory is given back to the system
GIVE_BACK_DELAY = 1.0  # seconds after the end of a large body, so that several are given back together
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
LMI_ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"
_CONTROL = dict.fromkeys((*range(32), 127), "?")


class Peek(NamedTuple):
    """The body fields that the router reads. None for one that is missing, an empty list for an array or object."""

    model: Any
    stream: Any
    name: Any  # the old name of `model` in Ollama's API


class _RawPeek(msgspec.Struct):
    """The fields of `Peek` as JSON text. The decoder validates and skips all other fields."""

    model: msgspec.Raw = msgspec.Raw(b"null")
    stream: msgspec.Raw = msgspec.Raw(b"null")
    name: msgspec.Raw = msgspec.Raw(b"null")


_DECODER = msgspec.json.Decoder(_RawPeek)
_OPENAI_FIELDS = msgspec.json.Decoder(
    msgspec.defstruct("_OpenaiFields", [(name, msgspec.Raw, msgspec.Raw()) for name in OPENAI_FIELDS])
)


def peek(body: bytes) -> Peek:
    """The fields `model` and `stream` of a JSON object. Raises BadRequest (invalid_json) if `body` is none."""
    try:
        found = _DECODER.decode(body)
        return Peek(_scalar(found.model), _scalar(found.stream), _scalar(found.name))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        fault = json_faults.describe(body, str(bad)[:200])
        raise BadRequest(f"the body is not a JSON object: {fault}", reason="invalid_json") from None


def _scalar(raw: msgspec.Raw) -> Any:
    """Decode the JSON text of one field. An array or object is not decoded, as 60 MB of members take seconds."""
    return [] if memoryview(raw)[0] in b"[{" else msgspec.json.decode(raw)


def has_openai_fields(body: bytes) -> bool:
    """True if a body for a path of LMI's API has fields of OpenAI's API. `peek` must have accepted the body."""
    found = _OPENAI_FIELDS.decode(body)
    return any(bytes(getattr(found, name)) for name in OPENAI_FIELDS)


class Bodies:
    """Reads request bodies, and counts the bytes of those whose requests have not ended."""

    def __init__(self, registry: Registry, most: int = MAX_BUFFERED):
        self._registry = registry
        self.buffered = 0  # bytes of all bodies in memory
        self._limit = most  # the limit of `buffered`; more are rejected
        self._small = most >> 13  # 64 KiB: about what each connection may take in any case
        self._gives_back = False  # a call of `_give_back` is scheduled

    async def read(self, incoming: Incoming) -> bytes:
        """The whole body, bounded in size, time and sum, and counted until the request ends. Raises ApiError.

        A byte order mark is left out. Windows PowerShell writes one into files, and llama-server and vLLM ignore it.
        """
        settings, outlet = self._registry.settings, incoming.outlet
        if outlet.headers.get("content-encoding", "identity").casefold() not in ("", "identity"):
            raise EncodingUnsupported("send the body without Content-Encoding")
        limit, stated = settings.max_body_size, outlet.content_length
        if stated is not None and stated > limit:
            raise TooLarge(f"the body has {stated} bytes, {limit} are allowed", headers=CLOSE)
        body = outlet.received()
        if body is not None:  # nothing to wait for, so no timer
            self._count(incoming, len(body))
            return body.removeprefix(BOM_UTF8)
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(settings.body_timeout):
                async for part in outlet.parts():
                    self._count(incoming, len(part))
                    parts.append(part)
        except TimeoutError:
            seconds = f"{settings.body_timeout:g}"
            raise BodyTimeout(f"the body did not arrive within {seconds} s (--body-timeout)", headers=CLOSE) from None
        return b"".join(parts).removeprefix(BOM_UTF8)

    def _count(self, incoming: Incoming, more: int) -> None:
        """Raises TooLarge, QueueFull."""
        # Counted before the checks: `forget` subtracts `incoming.buffered`, so both must change together.
        self.buffered += more
        incoming.buffered += more
        limit = self._registry.settings.max_body_size
        if incoming.buffered > limit:
            raise TooLarge(f"the body has more than the {limit} bytes that are allowed", headers=CLOSE)
        # A small body is admitted all the same: a few clients with large ones must not lock out the others.
        if self.buffered > self._limit and incoming.buffered > self._small:
            raise QueueFull("too many bytes of requests are waiting", retry_after=1, headers=CLOSE)

    def forget(self, incoming: Incoming) -> None:
        """Release the body of a request that has ended, and stop counting it.

        aiohttp's request and `incoming` refer to each other, so the body would stay until the garbage collector runs.
        That counts objects, not bytes: twelve bodies of 30 MB did not make it run.
        """
        self.buffered -= incoming.buffered
        incoming.body = b""
        if incoming.buffered >= LARGE_BODY and not self._gives_back:
            self._gives_back = True
            asyncio.get_running_loop().call_later(GIVE_BACK_DELAY, self._give_back)

    def _give_back(self) -> None:
        """Return memory of ended bodies to the system. glibc keeps the freed pieces in which they arrived."""
        self._gives_back = False
        asyncio.get_running_loop().run_in_executor(None, _trim_heap)


def _trim_heap() -> None:
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


class Pipeline:
    """The request pipeline of one router."""

    def __init__(self, registry: Registry, proxy: Proxy, metrics: Metrics, *, most_buffered: int = MAX_BUFFERED):
        self._registry = registry
        self._proxy = proxy
        self._metrics = metrics
        self.bodies = Bodies(registry, most_buffered)
        self.requests = RequestLog()
        registry.events.subscribe(self.requests.on_event)

    def serve(self, plain: PlainRequest) -> Coroutine[Any, Any, None]:
        """Take a plain request, which is always for a worker, through all steps. Raises like `run`."""
        incoming = Incoming(
            outlet=plain,
            method="POST",
            path=plain.path,
            client=plain.connection.client,
            id=request_id(plain.headers),
            arrived=plain.arrived,
            route=plain.route,
        )
        return self.run(incoming, self.forward)

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
                raise  # the client is gone; the next clause would log it as a failure of the router
            except Exception:
                log.exception("%s: %s %s failed in the router", incoming.id, incoming.method, incoming.path)
                await self._refuse(incoming, Internal("the router failed on this request; its log has the cause"))
        except (ConnectionError, asyncio.CancelledError):
            if incoming.status == 499:
                self._metrics.disconnects.labels(incoming.phase).inc()
            # For aiohttp both mean the same; one exception keeps its log free of tracebacks.
            raise asyncio.CancelledError from None
        finally:
            self.bodies.forget(incoming)
            self._count_and_log(incoming)

    def _admit(self, incoming: Incoming) -> None:
        """Raises BadRequest, EncodingUnsupported, Forbidden."""
        access, outlet = self._registry.access, incoming.outlet
        outlet.check_framing()
        access.check_host(outlet.headers)
        if incoming.method != "OPTIONS":  # a preflight asks for permission; the CORS headers of its response decide
            access.check_origin(outlet.headers, changes_state=incoming.changes_state)

    def _authenticate(self, incoming: Incoming) -> None:
        """Raises Unauthorized, Forbidden; BadRequest for a flag in the query that is neither true nor false."""
        route, query = incoming.route, incoming.query
        if route is None:  # the 404 or 405 that follows needs no key
            return
        level = AccessLevel.ADMIN if query and any(query.get(name) for name in route.admin_query) else route.access
        incoming.key = self._registry.access.authorize(incoming.outlet.headers, level)
        for name in FLAGS if query else ():
            flag(query, name)  # rejected even where the route does not use it

    # Requests for a worker

    async def forward(self, incoming: Incoming) -> int:
        """Have a worker answer. This is a `Respond`."""
        incoming.body = body = await self.bodies.read(incoming)
        read = time.monotonic()
        seen = peek(body)
        id, name, named = self._find_model(incoming, seen)
        incoming.model = id
        if answer := self._unload_answer(incoming, id, name):
            await self._write(incoming, 200, {"Content-Type": "application/json", **own_headers(incoming.id)}, answer)
            return 200
        adapter = self._choose_adapter(incoming, id, name)
        request = self._forwarded(incoming, seen, id, adapter, read=read, outside_name="" if named else name)
        shown = f"{id}@{adapter}" if adapter else id
        headers = {"X-Router-Model": shown, **own_headers(incoming.id)}
        return await self._proxied(
            incoming, ProxiedResponse(incoming.outlet, request, self._registry.settings, headers)
        )

    def _find_model(self, incoming: Incoming, seen: Peek) -> tuple[str, str, bool]:
        """The model's id, its name as the client wrote it, and True if the body contains that name.

        Raises BadRequest, ModelNotFound.
        """
        assert incoming.route is not None
        named = seen.name if seen.model is None and incoming.route.dialect is Dialect.OLLAMA else seen.model
        if named is not None and not isinstance(named, str):
            raise BadRequest("model must be a string", param="model")
        path, query = incoming.path_id, incoming.query
        if incoming.route.dialect is Dialect.LMI:
            headers, version = incoming.outlet.headers, query.get("model_version", "")
            lmi.check_headers(headers)
            if target := lmi.target_model(headers):
                query = {"model": target, **query}
            if path or version:
                path = path or self._registry.choose(incoming.key, path=None, body=named, query=query)[1]
                path = lmi.name_in_path(self._registry, incoming.key, path, version)
        id, name = self._registry.choose(incoming.key, path=path, body=named, query=query)
        return id, name, named is not None

    def _unload_answer(self, incoming: Incoming, id: str, name: str) -> bytes | None:
        """The answer to a request of Ollama's API that unloads a model that is not loaded. Else None.

        Its worker would have to load the model first, and other models might be evicted for that.
        """
        route = incoming.route
        if route is None or route.dialect is not Dialect.OLLAMA or not route.streams:
            return None
        is_loaded = self._registry.shared_workers.find(id).model.open is not None
        return None if is_loaded else ollama.unload_answer(name, incoming.body)

    def _choose_adapter(self, incoming: Incoming, id: str, name: str) -> str:
        """The adapter that a request names outside its body: in the model's name, the query or LMI's header.

        Raises BadRequest if two of them differ, ModelNotFound.
        """
        assert incoming.route is not None
        adapter = self._registry.names.adapter(name)
        other = incoming.query.get("adapter", "")
        if incoming.route.dialect is Dialect.LMI:
            other = other or incoming.outlet.headers.get(LMI_ADAPTER_HEADER, "")
        if not other:
            return adapter
        if adapter and adapter != other:
            raise BadRequest(
                f"the model's name selects adapter '{adapter}', but the request also names '{other[:100]}'",
                reason="model_conflict",
                param="adapter",
            )
        self._registry.check_adapter(id, other)
        return other

    def _forwarded(
        self, incoming: Incoming, seen: Peek, id: str, adapter: str, *, read: float, outside_name: str
    ) -> ForwardedRequest:
        """The request as the proxy forwards it."""
        route = incoming.route
        assert route is not None
        preset = self._registry.shared_workers.find(id).preset
        timeout = self._registry.settings.timeout if preset.request_timeout is None else preset.request_timeout
        streams = _streams(route, seen)
        # LMI streams OpenAI's frames when the body is in OpenAI's form.
        is_openai = streams and route.dialect is Dialect.LMI and has_openai_fields(incoming.body)
        return ForwardedRequest(
            route=route,
            model=id,
            body=incoming.body,
            stream=streams,
            autoload=flag(incoming.query, "autoload") if incoming.query else None,
            request_id=incoming.id,
            arrived=incoming.arrived,
            read=read,
            timeout=max(0.0, timeout),
            adapter=adapter,
            outside_name=outside_name,
            stream_dialect=Dialect.OPENAI if is_openai else None,
        )

    async def _proxied(self, incoming: Incoming, response: ProxiedResponse) -> int:
        """Forward within the limits of the key, and record the request. Returns the status to log."""
        id, key, arrived = incoming.model, incoming.key, incoming.arrived
        record = RequestRecord(
            incoming.id, id, response.request.route.name, incoming.client, key.name, time.time(), arrived
        )
        self.requests.began(record)
        try:
            with self._registry.access.running(key, lambda: self._registry.shared_workers.turnover(id)):
                record.answer = response
                await self._proxy.forward(response)
            assert response.status is not None
            record.status = response.failed or response.status
        except ApiError as error:
            record.status = error.status
            if error.reason == "key_concurrency":  # the fleet records all other rejections
                about = {"key": key.name, "limit": key.max_concurrent}
                self._registry.fleet.rejections.append(id, error, **about)
            raise
        except asyncio.CancelledError:
            if response.is_complete and response.status is not None:  # Codex does not wait for the end of the body
                record.status = incoming.status = response.status
            raise
        finally:
            self.requests.ended(record)
            incoming.phase = record.phase
        if response.first_byte is not None:
            self._metrics.ttft.observe(response.first_byte - arrived, id)
        if response.overhead is not None:
            self._metrics.overhead.observe(response.overhead)
        return record.status

    # Errors and the end of every request

    async def _refuse(self, incoming: Incoming, error: ApiError) -> None:
        """Count `error` and answer with it. Raises ClientGone."""
        incoming.status = error.status
        if incoming.outlet.has_begun:
            # A second status line would be read as part of the first response's body. The connection is closed without
            # the end of that response, so that the client does not take it for complete.
            if incoming.outlet.transport is not None:
                incoming.outlet.transport.close()
            return
        route, path = incoming.route, incoming.path
        if error.status in (401, 429, 503, 507):
            self._metrics.rejections.labels("auth" if error.status == 401 else error.reason).inc()
        dialect = (
            route.dialect if route is not None else dialect_of(path.removeprefix(self._registry.settings.api_prefix))
        )
        headers, body = render_error(error, dialect, incoming.id)
        if route is not None and route.always_streams:
            headers["Content-Type"], body = error_response(route.path, body)
        await self._write(incoming, error.status, {**own_headers(incoming.id), **headers}, body)

    async def _write(self, incoming: Incoming, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Write a whole response of the router. Raises ClientGone."""
        pending = incoming.outlet.begin(status, headers, body, is_whole=True)
        await wait_for_client(incoming.outlet, pending, self._registry.settings.write_stall)

    def _count_and_log(self, incoming: Incoming) -> None:
        route, status, model = incoming.route, incoming.status, incoming.model
        name = route.name if route is not None else "unknown"
        # The series of a model that was removed meanwhile would come back and stay.
        listed = model if model in self._registry.shared_workers.listed else "unknown"
        self._metrics.requests.add(listed, name, str(status))
        logged = self._registry.settings.access_log
        if logged == "all" or (logged == "errors" and status >= 400):
            client, took = incoming.client or "-", time.monotonic() - incoming.arrived
            path = printable(incoming.path)
            line = f"{client} {incoming.method} {path} {status} {took:.3f}s model={model} rid={incoming.id}"
            request_line(access_log, line)


def request_id(headers: Mapping[str, str]) -> str:
    """The client's X-Request-Id if it is well-formed, else a new one."""
    given = headers.get("x-request-id")
    return given if given and REQUEST_ID.fullmatch(given) else f"req_{getrandbits(96):024x}"


def printable(text: str) -> str:
    """Text from a client as one line of at most 300 printable characters."""
    if text.isascii() and text.isprintable():
        return text[:300]
    return text.encode("ascii", "backslashreplace").decode().translate(_CONTROL)[:300]


def _streams(route: Route, seen: Peek) -> bool:
    """True if the response is a stream of events."""
    if seen.stream is None:
        return route.streams_by_default
    return route.always_streams or (route.streams and seen.stream is True)

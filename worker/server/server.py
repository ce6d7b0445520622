"""The worker's HTTP server: authentication, health, the API routes, adapters and profiles.

The status of a response is fixed before its first byte; a stream begins with its first delta. A later failure ends in
an error frame and an aborted connection, never in a clean end. A client that disconnects cancels its generations.
"""

import asyncio
import contextlib
import hmac
import math
import re
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING
from urllib.parse import unquote

import orjson
from aiohttp import web

from worker.api.call import GenerationCall, JsonAnswer
from worker.api.served_model import ServedModel
from worker.errors import Draining, InvalidValue, QueueFull, RequestError, StartError, Unauthorized
from worker.interface import AdapterChoice, Engine
from worker.prompt.body_reader import Json, parse
from worker.protocol.argv import AdapterSource, Profile, Serve
from worker.protocol.dialects import Dialect
from worker.protocol.errors import error_body
from worker.protocol.events import Event
from worker.protocol.routes import (
    ADAPTER_HEADER,
    ADAPTERS_PATH,
    DIALECTS,
    MODEL_HEADER,
    PROFILE_HEADER,
    PROFILES_PATH,
    REQUEST_ID_HEADER,
    ROUTES,
    TOKEN_HEADER,
    WAITED_HEADER,
    Route,
    error_response,
)
from worker.protocol.streams import stream
from worker.server import listen
from worker.server.bodies import MAX_BODY_BYTES, LargeBodies, read
from worker.server.exchange import (
    DIALECT,
    ID,
    WRITE_TIMEOUT,
    ClientGone,
    ServerExchange,
    StreamFrames,
    from_http_exception,
    json_response,
    public_error,
)
from worker.server.merge import ArrivedDeltas, MergedDeltas

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHUTDOWN_TIMEOUT = 2.0
KEEPALIVE_TIMEOUT = 75.0
# Main memory for each byte of a body until its texts are tokens, and for one body at most: a text that is too long is
# rejected before. Measured: 225 for one text, 400 for 600 texts of two words. The most is a guess.
TEXT_BYTES, MOST_TEXT_BYTES = 512, 128 << 20
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RETRYABLE = (429, 503)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# An API function: takes the body, the model and, for a route that reports the load time, its seconds as `waited`.
ApiFunction = Callable[..., Awaitable[GenerationCall | JsonAnswer]]
API = "worker.api"  # the package of the functions that routes name


def function_of(route: Route) -> ApiFunction:
    """Return the API function that `route` names. Raises ImportError or AttributeError if there is none."""
    module, _, name = route.handler.partition(".")
    function: ApiFunction = getattr(import_module(f"{API}.{module}"), name)
    return function


# Resolved on import, so that the fork server has all API modules.
_FUNCTIONS = {route.handler: function_of(route) for route in ROUTES if route.worker}


class Server:
    """Serves one loaded model over HTTP."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: "PreTrainedTokenizerBase",
        options: Serve,
        *,
        token: str | None,
        announce: Callable[[Event], None],
        write_timeout: float = WRITE_TIMEOUT,
    ):
        """`token`: required from every request; None: no token, on loopback only. `announce` receives the event of each
        request's end. `write_timeout`: seconds of one write, to clients without a token. Raises StartError for options
        that cannot be served."""
        self._model = ServedModel(engine, tokenizer, options)
        self._profiles: dict[str, ServedModel] = {}  # the model under each profile, by name
        self._address = options.listen
        self._token = token
        self._announce = announce
        # A client with a token is a router. It bounds the stalls of its own clients and closes its connections.
        self._write_timeout = None if token else write_timeout
        self._running: set[MergedDeltas] = set()
        self._requests = 0
        self._bodies = LargeBodies()
        self._is_closing = False
        self._usual_seconds = 1.0  # moving average of a request's duration, for Retry-After
        self._runner = web.AppRunner(
            self._application(),
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            keepalive_timeout=KEEPALIVE_TIMEOUT,
            shutdown_timeout=SHUTDOWN_TIMEOUT,
        )

    @property
    def capabilities(self) -> list[str]:
        """Of chat, completion, embedding and rerank."""
        return self._model.capabilities

    async def start(self) -> str:
        """Listen. Returns the address with the actual port. Raises StartError for an unusable address, and for a preset
        whose grammar cannot be compiled."""
        await self._model.check_grammar()
        return await listen.listen(self._runner, self._address, has_token=self._token is not None)

    async def close(self) -> None:
        """Stop listening and end running requests with Draining. Returns once every connection is closed."""
        self._is_closing = True
        for deltas in self._running:
            deltas.fail(_draining())
        await self._runner.cleanup()
        self.unlink()

    @property
    def is_idle(self) -> bool:
        """True if no request is in progress, so that the process may exit without `close`."""
        return self._requests == 0

    def unlink(self) -> None:
        """Remove the file of the socket, before the process exits."""
        listen.unlink(self._address)

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        for route in ROUTES:
            if route.worker and not route.upstream:
                application.router.add_route(route.method, route.path, self._handler(route))
        application.router.add_get("/health", self._health)
        application.router.add_put(ADAPTERS_PATH, self._put_adapters)
        application.router.add_put(PROFILES_PATH, self._put_profile)
        return application

    # Every request

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token, then run the handler. Errors become responses here."""
        given = request.headers.get(REQUEST_ID_HEADER, "")
        request[DIALECT] = DIALECTS.get(request.path, Dialect.OPENAI)
        request[ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        try:
            self._check_token(request)
            if self._is_closing:
                raise _draining()
            return await handler(request)
        except RequestError as error:
            return self._error_response(request, error)
        except web.HTTPException as error:
            return self._error_response(request, from_http_exception(error), error.headers.get("Allow"))

    def _check_token(self, request: web.Request) -> None:
        if self._token is None:
            return
        scheme, _, given = request.headers.get(TOKEN_HEADER, "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), self._token.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise Unauthorized("Invalid API Key")

    def _error_response(self, request: web.Request, error: RequestError, allow: str | None = None) -> web.Response:
        is_retryable = error.status in _RETRYABLE
        headers = {REQUEST_ID_HEADER: request[ID], "X-Should-Retry": "true" if is_retryable else "false"}
        if is_retryable:
            headers["Retry-After"] = str(self._retry_after(error))
        if isinstance(error, Unauthorized):
            headers["WWW-Authenticate"] = "Bearer"
        if allow is not None:
            headers["Allow"] = allow
        body = error_body(request.get(DIALECT, Dialect.OPENAI), error, request_id=request[ID])
        response = json_response(body, status=error.status, headers=headers)
        response.content_type, response.body = error_response(request.path, orjson.dumps(body))
        return response

    def _retry_after(self, error: RequestError) -> int:
        """Seconds, 1 to 60, until a place in the queue is probably free, from the usual duration of a request."""
        if not isinstance(error, QueueFull):
            return 1
        ahead = self._model.engine.occupancy.waiting / max(1, self._model.options.parallel)
        return min(60, max(1, math.ceil(self._usual_seconds * (1 + ahead))))

    # Routes between router and worker

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return json_response({"status": "ok"})

    async def _put_adapters(self, request: web.Request) -> web.StreamResponse:
        """Replace the list of adapters that requests may name."""
        body = parse(await read(request))
        try:
            sources = [AdapterSource(**fields) for fields in body["adapters"]]
            problems = await self._model.engine.set_adapters(sources, str(body.get("default", "")))
        except (KeyError, TypeError):
            raise InvalidValue("adapters must be an array of {name, path, scale, pinned}", param="adapters") from None
        return json_response({"problems": dict(problems)})

    async def _put_profile(self, request: web.Request) -> web.StreamResponse:
        """Set the request defaults of one name of the model."""
        body = parse(await read(request))
        try:
            profile = Profile(**body)
            model = self._model.with_profile(profile)
            await model.check_grammar()
        except TypeError:
            raise InvalidValue("a profile has a name, and options of the worker", param="name") from None
        except StartError as wrong:
            raise InvalidValue(str(wrong), param="name") from None
        self._profiles[profile.name] = model
        return json_response({})

    # API routes

    def _handler(self, route: Route) -> Handler:
        """Return the handler of an API route. Each request ends with exactly one `RequestEnded` event."""
        function = _FUNCTIONS[route.handler]

        async def handle(request: web.Request) -> web.StreamResponse:
            exchange = ServerExchange(request, self._write_timeout)
            waited = _load_time(request) if route.reports_load_time else {}
            self._requests += 1
            try:
                response = await self._answer(exchange, function, waited)
                if exchange.is_broken:
                    exchange.abort()
                return response
            except asyncio.CancelledError:
                exchange.outcome = "cancelled"
                raise
            except (ClientGone, ConnectionError):
                exchange.outcome = "cancelled"
                return web.Response()  # never sent: the connection is closed
            except Exception as error:  # noqa: BLE001 - every error becomes a response
                exchange.outcome = "error"
                return self._error_response(request, public_error(exchange, error))
            finally:
                self._requests -= 1
                self._usual_seconds += 0.1 * (time.monotonic() - exchange.began - self._usual_seconds)
                self._announce(exchange.to_event())

        return handle

    async def _answer(
        self, exchange: ServerExchange, function: ApiFunction, waited: dict[str, float]
    ) -> web.StreamResponse:
        """Call the API function, run its generations and write the response. Raises errors that have a status."""
        request = exchange.request
        model = self._model_of(request)
        text_bytes = min(TEXT_BYTES * (request.content_length or 0), MOST_TEXT_BYTES)
        async with self._bodies.admit(request):
            with model.engine.announced(text_bytes):
                call = await function(await _body(request), model, **waited)
        if isinstance(call, JsonAnswer):
            return await exchange.send_result(call)
        # The engine has its own default, which replaced adapters may change.
        default = "" if model is self._model else model.options.default_adapter
        call = _with_adapter(call, unquote(request.headers.get(ADAPTER_HEADER, "")), default)
        exchange.keep_alive = call.keep_alive
        exchange.prompt_tokens = sum(len(generation.prompt) for generation in call.generations)
        async with self._deltas(call) as deltas:
            if call.stream:
                return await self._stream(exchange, call, deltas, model.options.name)
            collected: ArrivedDeltas = []
            while batch := await deltas.next_deltas():
                exchange.count(batch)
                collected += batch
        return await exchange.send(json_response(call.reply.full_body(collected), call.ignored))

    def _model_of(self, request: web.Request) -> ServedModel:
        """Return the model under the request's profile. Raises InvalidValue for an unknown profile."""
        name = unquote(request.headers.get(PROFILE_HEADER, ""))
        model = self._profiles.get(name) if name else self._model
        if model is None:
            raise InvalidValue(f"this worker has no profile '{name[:100]}'", param="model")
        return model

    @contextlib.asynccontextmanager
    async def _deltas(self, call: GenerationCall) -> AsyncIterator[MergedDeltas]:
        options = self._model.options
        room = options.parallel + options.queue_size
        async with MergedDeltas(self._model.engine, call.generations, room=room) as deltas:
            self._running.add(deltas)
            try:
                yield deltas
            finally:
                self._running.discard(deltas)

    async def _stream(
        self, exchange: ServerExchange, call: GenerationCall, deltas: MergedDeltas, name: str
    ) -> web.StreamResponse:
        """Write the response frame by frame. Raises errors that occur before the first frame: they have a status."""
        dialect = call.frame_dialect or exchange.request[DIALECT]
        stream_frames = StreamFrames(call, dialect, name)
        response = web.StreamResponse(headers={**stream(dialect).headers, **exchange.headers(call.ignored)})
        frames = await stream_frames.first(deltas, exchange)
        exchange.request[DIALECT] = dialect
        await exchange.begin(response)
        try:
            while frames is not None:
                if frames:
                    await exchange.write(response, frames)
                frames = await stream_frames.next(deltas, exchange)
            await exchange.write(response, call.reply.closing_frames())
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - every error becomes a frame
            exchange.outcome, exchange.is_broken = "error", True
            await exchange.write(response, exchange.error_frame(public_error(exchange, error)))
        return response


async def _body(request: web.Request) -> Json:
    """The JSON object of the request, with the name of the model even if the request has it elsewhere. Raises
    RequestError."""
    body = parse(await read(request))
    name = request.headers.get(MODEL_HEADER, "")
    if name and body.get("model") is None:
        body["model"] = unquote(name)
    return body


def _load_time(request: web.Request) -> dict[str, float]:
    """The argument `waited` of an API function: the seconds of the load, 0.0 if the header is missing or invalid."""
    try:
        seconds = float(request.headers.get(WAITED_HEADER, 0.0))
    except ValueError:
        seconds = 0.0
    return {"waited": seconds if 0.0 <= seconds < math.inf else 0.0}


def _with_adapter(call: GenerationCall, named: str, default: str) -> GenerationCall:
    """Apply the adapter that the request names outside its body, or else the default of its profile. Raises
    InvalidValue if the body names another one."""
    if not (named or default):
        return call
    generations = []
    for generation in call.generations:
        if named and generation.adapter not in (None, AdapterChoice(named)):
            raise InvalidValue(
                f"the request names adapter '{named[:100]}' outside its body and another one in it; name one",
                param="adapters",
            )
        adapter = generation.adapter or AdapterChoice(named or default)
        generations.append(replace(generation, adapter=adapter))
    return replace(call, generations=tuple(generations))


def stop_requested() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set from now on. Requires a running loop."""
    event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


def _draining() -> Draining:
    return Draining("this worker is stopping; send the request again")

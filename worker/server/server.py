"""The worker's socket: token, health, faces. Who leaves takes the work along.

The status of an answer is decided before its first byte: a stream begins with its first delta. What fails later ends
in one error frame and a broken connection, never in a clean end.
"""

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import logging
import math
import os
import re
import signal
import time
import traceback
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import orjson
from aiohttp import web

from worker.api.call import GenerationCall, JsonAnswer
from worker.api.served_model import ServedModel
from worker.errors import (
    Draining,
    InvalidJson,
    InvalidValue,
    NotFound,
    QueueFull,
    RequestError,
    StartError,
    Unauthorized,
)
from worker.interface import AdapterChoice, ChoiceTimings, Engine, GenerationRequest, PrefillProgress
from worker.prompt.body_reader import Json, parse
from worker.protocol.argv import AdapterSource, Profile, Serve
from worker.protocol.dialects import Dialect
from worker.protocol.errors import error_body
from worker.protocol.events import Event, Request
from worker.protocol.exits import Exit
from worker.protocol.headers import (
    ADAPTER_HEADER,
    ADAPTERS_PATH,
    ASKED_HEADER,
    PROFILE_HEADER,
    PROFILES_PATH,
    REQUEST_ID_HEADER,
    TOKEN_HEADER,
    WAITED_HEADER,
    ignored_fields,
)
from worker.protocol.routes import DIALECTS, ROUTES, Route, refusal
from worker.protocol.streams import error_frame, silence, stream
from worker.server.connection import WRITE_STALL, ClientGone, Connection
from worker.server.merge import Batch, Deltas

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_BODY_BYTES = 512 << 20
"""The router bounds bodies far below; this keeps a worker served by hand from being filled."""
MAX_PATH_BYTES = 107
"""Of a unix socket (sun_path, Linux)."""
SHUTDOWN_TIMEOUT = 2.0
KEEPALIVE_TIMEOUT = 75.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ID = web.RequestKey("id", str)
_DIALECT = web.RequestKey("dialect", Dialect)
_RETRIED = (429, 503)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
API = "worker.api"
"""The package of the functions that routes name."""
_log = logging.getLogger(__name__)


Function = Callable[..., Awaitable[GenerationCall | JsonAnswer]]
"""An API function: takes the body, the model and, of a route that tells the load, the seconds that it took."""


def function_of(route: Route) -> Function:
    """The API function that `route` names. Raises ImportError or AttributeError if there is none."""
    module, _, name = route.handler.partition(".")
    function: Function = getattr(import_module(f"{API}.{module}"), name)
    return function


_FUNCTIONS = {route.handler: function_of(route) for route in ROUTES if route.worker}
"""Resolved on import, so that the fork server has all their modules."""


class Encoded(RequestError):
    status, type, reason = 415, "invalid_request_error", "encoding"


class TooLarge(RequestError):
    status, type, reason = 413, "invalid_request_error", "too_large"


class WrongMethod(RequestError):
    status, type, reason = 405, "not_found_error", "method"


class _Exchange:
    """One request on its way, and what is announced at its end."""

    def __init__(self, request: web.Request, write_stall: float | None):
        self.id: str = request[_ID]
        self.request = request
        self.connection = Connection(request, write_stall)
        self.began = time.monotonic()
        self.prompt_tokens = 0
        self.is_broken = False
        """It ended in an error frame; the connection must end so, too."""
        self.outcome = "ok"
        self.keep_alive: float | None = None
        self._cached_tokens = 0
        self._shown: Counter[tuple[int, int]] = Counter()
        """Tokens by generation and choice; of those that have ended, all that were computed, as `usage` has them."""
        self._ttft = 0.0
        self._further_tokens = 0
        self._further_seconds = 0.0

    def count(self, batch: Batch) -> None:
        for number, delta in batch:
            if delta.tokens and not self._shown:
                self._ttft = time.monotonic() - self.began
            if delta.tokens:
                self._shown[number, delta.index] += len(delta.tokens)
            if delta.finish is not None and delta.timings is not None:
                self._shown[number, delta.index] = delta.timings.completion_tokens
                self._add(delta.index, delta.timings)

    def _add(self, index: int, timings: ChoiceTimings) -> None:
        """Another choice has ended."""
        if index == 0:
            self._cached_tokens += timings.cached_tokens
        if timings.completion_tokens > 1:
            self._further_tokens += timings.completion_tokens - 1
            self._further_seconds += timings.decode_seconds

    def to_event(self) -> Request:
        return Request(
            id=self.id,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._shown.total(),
            outcome=self.outcome,
            ttft=self._ttft,
            token_seconds=self._further_seconds / self._further_tokens if self._further_tokens else 0.0,
            keep_alive=self.keep_alive,
        )


class _Told:
    """What a stream says: frames of deltas, and a comment wherever it says nothing for the ping interval."""

    def __init__(self, call: GenerationCall, dialect: Dialect, model: str):
        self._call = call
        self._dialect = dialect
        self._model = model
        self._has_begun = False
        """Something of the answer has been said."""
        self._began = asyncio.get_running_loop().time()
        self._prompts: dict[int, PrefillProgress] = {}
        """How far they are, by generation; of several choices, the first one's."""

    async def first(self, deltas: Deltas, exchange: _Exchange) -> bytes | None:
        """The first frames, which commit the stream. Waits for something to say: a token, or, once a prompt is being
        computed, what tells how far it is. Until then whatever fails has a status of its own."""
        interval, due = self._call.ping_interval, None
        while True:
            batch = await _until(due, deltas)
            if batch is None:
                return self._comment()
            frames = self._frames(batch, exchange)
            if not batch or frames or any(delta.progress is None for _, delta in batch):
                return frames
            due = None if interval is None else self._began + interval

    async def next(self, deltas: Deltas, exchange: _Exchange) -> bytes | None:
        """What to write next, perhaps nothing; None at the end."""
        interval = self._call.ping_interval
        due = None if interval is None else asyncio.get_running_loop().time() + interval
        while True:
            batch = await _until(due, deltas)
            if batch is None:
                return self._comment()
            if not batch:
                return None
            if frames := self._frames(batch, exchange):
                return frames

    def _frames(self, batch: Batch, exchange: _Exchange) -> bytes:
        exchange.count(batch)
        for number, delta in batch:
            if delta.progress is not None and delta.index == 0:
                self._prompts[number] = delta.progress
        frames = b"".join(self._call.reply.frames(number, delta) for number, delta in batch)
        self._has_begun = self._has_begun or bool(frames)
        return frames

    def _comment(self) -> bytes:
        """Why it is still silent: `: prefill done=512 total=2048`, of all prompts that have begun, or a ping."""
        done = sum(prompt.done for prompt in self._prompts.values())
        total = sum(prompt.total for prompt in self._prompts.values())
        text = "ping" if done == total else f"prefill done={done} total={total}"
        return silence(self._dialect, text, has_begun=self._has_begun, model=self._model)


async def _until(due: float | None, deltas: Deltas) -> Batch | None:
    """What arrives next; None if nothing does before `due` (seconds of the loop's clock; None: however long)."""
    try:
        async with asyncio.timeout_at(due):
            return await deltas.some()
    except TimeoutError:
        return None


class Server:
    """Answers HTTP for one loaded model."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: "PreTrainedTokenizerBase",
        options: Serve,
        *,
        token: str | None,
        announce: Callable[[Event], None],
        write_stall: float = WRITE_STALL,
    ):
        """`token`: what every request must bear; None: none, on loopback only. `announce` is told of each request's
        end. `write_stall`: seconds that a write may take, to clients without a token. Raises StartError if the options
        cannot be served."""
        self._model = ServedModel(engine, tokenizer, options)
        self._profiles: dict[str, ServedModel] = {}
        """The model under each profile that it was told of, by name."""
        self._listen = options.listen
        self._token = token
        self._announce = announce
        self._write_stall = None if token else write_stall
        """Who has a token is a router: it bounds how long its own clients may not read, and closes what they leave."""
        self._running: set[Deltas] = set()
        self._requests = 0
        self._is_closing = False
        self._usual_seconds = 1.0
        """How long a request takes, for Retry-After."""
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
        """Of chat, completion, embedding, rerank."""
        return self._model.capabilities

    async def start(self) -> str:
        """Bind and answer; returns the real address. Raises StartError for an address that cannot be used."""
        kind, _, place = self._listen.partition(":")
        if kind not in ("unix", "tcp") or not place:
            raise StartError("--listen must be unix:PATH or tcp:HOST:PORT", Exit.USAGE)
        await self._runner.setup()
        try:
            return await (self._bind_unix(place) if kind == "unix" else self._bind_tcp(place))
        except OSError as error:
            await self._runner.cleanup()
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            way, exit = ("make room there", Exit.DISK_FULL) if is_full else ("choose another --listen", Exit.USAGE)
            raise StartError(f"cannot listen on {self._listen}: {why}; {way}", exit) from None
        except StartError:
            await self._runner.cleanup()
            raise

    async def close(self) -> None:
        """Stop listening and end what runs with Draining; returns once every connection is closed."""
        self._is_closing = True
        for deltas in self._running:
            deltas.fail(_draining())
        await self._runner.cleanup()
        self.leave()

    @property
    def is_idle(self) -> bool:
        """Nobody waits for an answer, so that there is nothing to end in good order."""
        return self._requests == 0

    def leave(self) -> None:
        """Take the socket's name away; for a process that ends."""
        kind, _, path = self._listen.partition(":")
        if kind == "unix":
            with contextlib.suppress(OSError):
                os.unlink(path)

    async def _bind_unix(self, path: str) -> str:
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise StartError(f"--listen: a socket's path has at most {MAX_PATH_BYTES} bytes; shorten it", Exit.USAGE)
        if self._token is not None:  # the folder is its router's, and somebody may have deleted that since it was born
            os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        await web.UnixSite(self._runner, path, backlog=1024).start()
        os.chmod(path, 0o600)
        return f"unix:{path}"

    async def _bind_tcp(self, place: str) -> str:
        host, _, port = place.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
            raise StartError("--listen must be tcp:HOST:PORT with a port between 0 and 65535", Exit.USAGE)
        if self._token is None and not _is_loopback(host):
            raise StartError(
                f"--listen: without a token only loopback is served, and {host} is not; use tcp:127.0.0.1:{port}",
                Exit.USAGE,
            )
        await web.TCPSite(self._runner, host, int(port), backlog=1024).start()
        bound = self._runner.addresses[0]
        return f"tcp:[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"tcp:{bound[0]}:{bound[1]}"

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        for route in ROUTES:
            if route.worker and not route.upstream:
                application.router.add_route(route.method, route.path, self._answering(route))
        application.router.add_get("/health", self._health)
        application.router.add_put(ADAPTERS_PATH, self._adapt)
        application.router.add_put(PROFILES_PATH, self._take_profile)
        return application

    # A request's life

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Nobody without the token comes further; whatever happens behind, there is one answer."""
        given = request.headers.get(REQUEST_ID_HEADER, "")
        request[_DIALECT] = DIALECTS.get(request.path, Dialect.OPENAI)
        request[_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        try:
            self._check_token(request)
            if self._is_closing:
                raise _draining()
            return await handler(request)
        except RequestError as error:
            return self._refusal(request, error)
        except web.HTTPException as error:
            return self._refusal(request, _to_request_error(error), error.headers.get("Allow"))

    def _check_token(self, request: web.Request) -> None:
        if self._token is None:
            return
        scheme, _, given = request.headers.get(TOKEN_HEADER, "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), self._token.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise Unauthorized("Invalid API Key")

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return _json({"status": "ok"})

    async def _adapt(self, request: web.Request) -> web.StreamResponse:
        """PUT of the adapters that may be named from now on."""
        body = parse(await _read(request))
        try:
            sources = [AdapterSource(**each) for each in body["adapters"]]
            problems = await self._model.engine.set_adapters(sources, str(body.get("default", "")))
        except (KeyError, TypeError):
            raise InvalidValue("adapters must be an array of {name, path, scale, pinned}", param="adapters") from None
        return _json({"problems": dict(problems)})

    async def _take_profile(self, request: web.Request) -> web.StreamResponse:
        """PUT of what holds for requests by one name from now on."""
        body = parse(await _read(request))
        try:
            profile = Profile(**body)
            self._profiles[profile.name] = self._model.under(profile)
        except TypeError:
            raise InvalidValue("a profile has a name, and options of the worker", param="name") from None
        except StartError as wrong:
            raise InvalidValue(str(wrong), param="name") from None
        return _json({})

    def _under(self, request: web.Request) -> ServedModel:
        """The model as the request's profile wants it. Raises InvalidValue for one that was never told."""
        name = unquote(request.headers.get(PROFILE_HEADER, ""))
        model = self._profiles.get(name) if name else self._model
        if model is None:
            raise InvalidValue(f"this worker was not told of the profile '{name[:100]}'", param="model")
        return model

    def _answering(self, route: Route) -> Handler:
        """The handler of `route`, which may generate tokens."""
        function = _FUNCTIONS[route.handler]

        async def generate(exchange: _Exchange) -> web.StreamResponse:
            model, beside = self._under(exchange.request), _beside(exchange.request, tells_load=route.tells_load)
            call = await function(await _body(exchange.request), model, **beside)
            if isinstance(call, JsonAnswer):
                return await _finish(exchange, call)
            call = _adapted(call, exchange.request)
            if model is not self._model:
                call = replace(call, generations=tuple(_profiled(each, model.options) for each in call.generations))
            exchange.keep_alive = call.keep_alive
            exchange.prompt_tokens = sum(len(generation.prompt) for generation in call.generations)
            async with self._deltas(call) as deltas:
                if call.stream:
                    return await self._stream(exchange, call, deltas, model.options.name)
                collected: Batch = []
                while batch := await deltas.some():
                    exchange.count(batch)
                    collected += batch
            return await _send(exchange, _json(call.reply.full_body(collected), call.ignored))

        return self._living(generate)

    def _living(self, work: Callable[[_Exchange], Awaitable[web.StreamResponse]]) -> Handler:
        """A request from its arrival to its announced end, however it ends."""

        async def live(request: web.Request) -> web.StreamResponse:
            exchange = _Exchange(request, self._write_stall)
            self._requests += 1
            try:
                response = await work(exchange)
                if exchange.is_broken:
                    await exchange.connection.break_off()
                return response
            except asyncio.CancelledError:
                exchange.outcome = "cancelled"
                raise
            except (ClientGone, ConnectionError):
                exchange.outcome = "cancelled"
                return web.Response()  # to nobody: the connection is closed
            except Exception as error:  # noqa: BLE001 - the end of a request's life: delivered to its client
                exchange.outcome = "error"
                return self._refusal(request, _known(exchange, error))
            finally:
                self._requests -= 1
                self._usual_seconds += 0.1 * (time.monotonic() - exchange.began - self._usual_seconds)
                self._announce(exchange.to_event())

        return live

    @contextlib.asynccontextmanager
    async def _deltas(self, call: GenerationCall) -> AsyncIterator[Deltas]:
        async with Deltas(self._model.engine, call.generations) as deltas:
            self._running.add(deltas)
            try:
                yield deltas
            finally:
                self._running.discard(deltas)

    async def _stream(self, exchange: _Exchange, call: GenerationCall, deltas: Deltas, name: str) -> web.StreamResponse:
        """The answer frame by frame. Raises what fails before there is anything to say: it still has its own
        status."""
        dialect = call.frame_dialect or exchange.request[_DIALECT]
        told = _Told(call, dialect, name)
        connection = exchange.connection
        response = web.StreamResponse(headers={**stream(dialect).headers, **_headers(exchange, call.ignored)})
        frames = await told.first(deltas, exchange)
        exchange.request[_DIALECT] = dialect
        await connection.begin(response)
        try:
            while frames is not None:
                if frames:
                    await connection.write(response, frames)
                frames = await told.next(deltas, exchange)
            await connection.write(response, call.reply.closing_frames())
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - the end of a request's life: delivered to its client
            exchange.outcome, exchange.is_broken = "error", True
            await connection.write(response, _frame(exchange, _known(exchange, error)))
        return response

    def _refusal(self, request: web.Request, error: RequestError, allow: str | None = None) -> web.Response:
        is_retried = error.status in _RETRIED
        headers = {REQUEST_ID_HEADER: request[_ID], "X-Should-Retry": "true" if is_retried else "false"}
        if is_retried:
            headers["Retry-After"] = str(self._retry_after(error))
        if isinstance(error, Unauthorized):
            headers["WWW-Authenticate"] = "Bearer"
        if allow is not None:
            headers["Allow"] = allow
        body = error_body(
            request.get(_DIALECT, Dialect.OPENAI),
            status=error.status,
            type=error.type,
            reason=error.reason,
            message=error.message,
            param=error.param,
            extra=error.extra,
            request_id=request[_ID],
        )
        response = _json(body, status=error.status, headers=headers)
        response.content_type, response.body = refusal(request.path, orjson.dumps(body))
        return response

    def _retry_after(self, error: RequestError) -> int:
        """Seconds, 1 to 60, until a place in the queue should be free, by the usual length of a request."""
        if not isinstance(error, QueueFull):
            return 1
        ahead = self._model.engine.occupancy.waiting / max(1, self._model.options.parallel)
        return min(60, max(1, math.ceil(self._usual_seconds * (1 + ahead))))


async def _read(request: web.Request) -> bytes:
    """The whole body, so that from now on a closed connection is noticed."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Encoded("compressed bodies are not accepted; send it without Content-Encoding")
    try:
        return await request.read()
    except web.RequestPayloadError:
        raise InvalidJson("the request body is broken off or badly framed") from None


async def _body(request: web.Request) -> Json:
    """The request's JSON object; the model's name is in it even if it was said elsewhere. Raises RequestError."""
    body = parse(await _read(request))
    asked = request.headers.get(ASKED_HEADER, "")
    if asked and body.get("model") is None:
        body["model"] = unquote(asked)
    return body


def _beside(request: web.Request, *, tells_load: bool) -> dict[str, float]:
    """Further arguments of an API function: `waited`, the seconds of the load, if the route tells them."""
    if not tells_load:
        return {}
    try:
        seconds = float(request.headers.get(WAITED_HEADER, 0.0))
    except ValueError:
        seconds = 0.0
    return {"waited": seconds if 0.0 <= seconds < math.inf else 0.0}


def _profiled(generation: GenerationRequest, options: Serve) -> GenerationRequest:
    """The generation with what its request left open, as its profile has it: what the engine itself was started with
    is of no profile."""
    if generation.max_tokens is None and options.n_predict >= 0:
        generation = replace(generation, max_tokens=options.n_predict)
    if generation.sampling.seed is None and options.seed >= 0:
        generation = replace(generation, sampling=replace(generation.sampling, seed=options.seed))
    if generation.adapter is None and options.default_adapter:
        generation = replace(generation, adapter=AdapterChoice(options.default_adapter))
    return generation


def _adapted(call: GenerationCall, request: web.Request) -> GenerationCall:
    """The call with the adapter that was named beside its body. Raises InvalidValue if the body names another one."""
    name = unquote(request.headers.get(ADAPTER_HEADER, ""))
    if not name:
        return call
    for each in call.generations:
        if each.adapter is not None and each.adapter != AdapterChoice(name):
            raise InvalidValue(
                f"the request names adapter '{name[:100]}' beside its body, and another one in it; name one",
                param="adapters",
            )
    return replace(call, generations=tuple(replace(each, adapter=AdapterChoice(name)) for each in call.generations))


async def _finish(exchange: _Exchange, made: JsonAnswer) -> web.StreamResponse:
    exchange.prompt_tokens, exchange.keep_alive = made.prompt_tokens, made.keep_alive
    response = _json(made.body, made.ignored)
    if made.stream:
        response.body = orjson.dumps(made.body) + b"\n"
        del response.headers["Content-Type"]
        response.headers.update(stream(exchange.request[_DIALECT]).headers)
    return await _send(exchange, response)


async def _send(exchange: _Exchange, response: web.Response) -> web.StreamResponse:
    response.headers.update(_headers(exchange))
    await exchange.connection.send(response)
    return response


def _known(exchange: _Exchange, error: Exception) -> RequestError:
    """The error as clients may see it. One that nobody foresaw is logged, without its message: that may quote the
    prompt."""
    if isinstance(error, web.HTTPException):
        return _to_request_error(error)
    if isinstance(error, RequestError):
        return error
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("request %s failed: %s\n%s", exchange.id, type(error).__name__, frames)
    return RequestError("internal error; the worker's log has the cause")


def _to_request_error(error: web.HTTPException) -> RequestError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return WrongMethod("this path has other methods; see the Allow header")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return TooLarge(f"the request body has more than {MAX_BODY_BYTES} bytes; send less at once")
    return NotFound("File Not Found")


def asked_to_stop() -> asyncio.Event:
    """Set once a signal asks this process, whose loop runs, to stop in good order."""
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    return asked


def _draining() -> Draining:
    return Draining("this worker is stopping; send the request again")


def _frame(exchange: _Exchange, error: RequestError) -> bytes:
    return error_frame(
        exchange.request[_DIALECT],
        status=error.status,
        type=error.type,
        reason=error.reason,
        message=error.message,
        param=error.param,
        request_id=exchange.id,
    )


def _json(
    body: Any, ignored: Sequence[str] = (), *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    every = {**(headers or {}), **ignored_fields(ignored)}
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json", headers=every)


def _headers(exchange: _Exchange, ignored: Sequence[str] = ()) -> dict[str, str]:
    return {REQUEST_ID_HEADER: exchange.id, **ignored_fields(ignored)}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""Forward one request to a worker and stream its response back.

Bodies of requests and responses are forwarded byte for byte. The status line is sent when the worker's is known, or
when a stream has waited `commit` seconds. After that, silence is filled with comments. A failure then becomes an error
frame of the API and an aborted connection, never a clean end, which a client would take for success.

From top to bottom: `Proxy.forward` sets the time limit, `_attempts` retries once, `_attempt` leases a worker and waits
until it is ready, `_exchange` sends the request, `_relay` sends the response whole, or `EventRelay` event by event.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar
from urllib.parse import quote

from router.errors import ApiError, ModelNotFound, ModelNotLoaded, RequestTimeout, WorkerCrashed
from router.fleet.admission import Lease
from router.fleet.failures import lost_error
from router.fleet.fleet import Fleet
from router.fleet.worker import State
from router.http.event_relay import EventRelay
from router.http.response import ClientGone, ProxiedResponse
from router.launch.interface import WorkerProcess
from router.launch.worker_client import Exchange, NotHttp, WorkerClientError
from router.registry import shared_workers
from router.registry.shared_workers import SharedWorkers, with_name
from worker.protocol.dialects import Dialect
from worker.protocol.routes import (
    ADAPTER_HEADER,
    MODEL_HEADER,
    PROFILE_HEADER,
    REQUEST_HEADERS,
    REQUEST_ID_HEADER,
    RESPONSE_HEADERS,
    TOKEN_HEADER,
    WAITED_HEADER,
)

log = logging.getLogger("router.http.proxy")
T = TypeVar("T")

# Responses up to this many bytes are read whole, so that the loss of a worker in the middle still gets a status.
BUFFERED_BYTES = 1 << 20
EXIT_WAIT = 2.0  # seconds to wait, after a connection to a worker broke, for the worker's exit
# Time limits longer than this, in seconds, are checked by one timer for all requests, so that a request needs no timer
# of its own.
LONG_LIMIT = 10.0
LIMIT_INTERVAL = 1.0  # seconds between two of these checks


class Unanswered(Exception):
    """The worker was lost before the client got the first byte of its response; the request may be tried again."""

    def __init__(self, error: ApiError):
        super().__init__(error.message)
        self.error = error


class _Limit:
    """The time limit of the current task for one request, like `asyncio.timeout`, but without a timer for each."""

    __slots__ = ("_passed", "_task", "timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        task = asyncio.current_task(loop)
        assert task is not None
        self._task = task
        self._passed = False
        self.timer: asyncio.TimerHandle | None = None

    def expire(self) -> None:
        """Cancel the task."""
        self._passed = True
        self._task.cancel()

    def end(self) -> bool:
        """Stop the limit. Return True if it cancelled the task and nothing else did. Call it once."""
        if self.timer is not None:
            self.timer.cancel()
        # uncancel() counts down the cancellations; more than ours means that the client disconnected, too.
        return self._passed and self._task.uncancel() == 0


class Proxy:
    """Forwards requests to the workers of one fleet."""

    def __init__(self, shared_workers: SharedWorkers):
        self._loop = asyncio.get_running_loop()
        self._shared_workers = shared_workers
        self._fleet = shared_workers.fleet
        self._settings = settings = self._fleet.settings
        # Seconds between two comments in a silent stream; None: no comments.
        self._ping = settings.sse_ping_interval if settings.sse_ping_interval > 0 else None
        self._limits: dict[_Limit, float] = {}  # long time limits: when each expires, by the loop's clock
        self._limit_timer: asyncio.TimerHandle | None = None

    async def forward(self, response: ProxiedResponse) -> None:
        """Return when the response is complete, or broken off with an error frame.

        Raises ApiError while nothing has been sent, CancelledError if the client is gone. Cancelling this coroutine
        returns the lease and closes the connection to the worker, which cancels the worker's computation.
        """
        request = response.request
        limit = _Limit(self._loop)
        if request.timeout:
            self._start_limit(limit, max(0.0, request.arrived + request.timeout - time.monotonic()))
        late = False
        try:
            # Not asyncio.timeout(): its timer for each request took 6 to 25 % more CPU of a whole request, in four
            # pairs of runs of scripts/bench_proxy on a busy machine. Almost none expires (`_start_limit`).
            try:
                await self._attempts(response)
            finally:
                self._limits.pop(limit, None)
                late = limit.end()
        except asyncio.CancelledError:
            if not late:  # the client has disconnected, or the router stops: an error would not be read
                raise
            await _fail(response, RequestTimeout(f"no complete answer within {request.timeout:g} s (request-timeout)"))
        except ClientGone as gone:
            log.info("%s: %s", request.request_id, gone)
            raise asyncio.CancelledError from None
        except ApiError as error:
            lease = response.lease
            await _fail(response, error if lease is None else with_name(error, lease.model.preset.id, request.model))

    def _start_limit(self, limit: "_Limit", left: float) -> None:
        """Make `limit` expire in `left` seconds; a long one expires up to LIMIT_INTERVAL later."""
        if left < LONG_LIMIT:
            limit.timer = self._loop.call_later(left, limit.expire)
            return
        self._limits[limit] = self._loop.time() + left
        if self._limit_timer is None:
            self._limit_timer = self._loop.call_later(LIMIT_INTERVAL, self._check_limits)

    def _check_limits(self) -> None:
        now = self._loop.time()
        for limit in [limit for limit, when in self._limits.items() if when <= now]:
            del self._limits[limit]
            limit.expire()
        self._limit_timer = self._loop.call_later(LIMIT_INTERVAL, self._check_limits) if self._limits else None

    async def _attempts(self, response: ProxiedResponse) -> None:
        """Try again on a new lease: once if the worker is lost before the client has a byte of its response, and each
        time that the name got another worker while the request waited.

        More than one retry after a loss would turn a request that crashes workers into a loop of loads.
        """
        lost: ApiError | None = None
        while True:
            try:
                await self._attempt(response)
                return
            except Unanswered as unanswered:
                if lost is not None:
                    raise unanswered.error from None
                lost = unanswered.error
                log.info("%s: %s; retrying once", response.request.request_id, lost.message)
            except ModelNotFound:
                found = self._shared_workers.find(response.request.model).model
                if response.lease is None or found is response.lease.model:
                    raise
            except ModelNotLoaded:
                if lost is None:
                    raise
                raise lost from None  # autoload is off: report the lost worker, which is the cause

    async def _attempt(self, response: ProxiedResponse) -> None:
        request = response.request
        with self._shared_workers.lease(request.model, autoload=request.autoload) as lease:
            response.lease = lease
            before = time.monotonic()
            process = await self._with_comments(lease.ready, lambda: lease.worker.ready.done(), lease, response)
            try:
                profile = await self._shared_workers.prepare(lease.worker, request.model)
                if lease.worker.preset.adapter_slots:
                    await shared_workers.send_adapters(lease.worker, self._fleet.files)
            except WorkerCrashed:
                cause = await _lost_cause(lease)
                if lease.worker.ended.is_set():
                    raise Unanswered(cause) from None
                raise
            response.profile = "" if profile is None else profile.name
            waited = time.monotonic() - before
            load = min(waited, lease.worker.load_seconds) if waited > 0.001 else 0.0
            response.queued, response.loaded = waited - load, load
            if not response.committed:
                stages = process.ready.seconds if load else {}
                response.headers["Server-Timing"] = server_timing(waited - load, load, stages)
            if response.overhead is None:
                response.overhead = max(0.0, time.monotonic() - request.read - waited)
            await self._exchange(lease, process, response)

    async def _with_comments(
        self, work: Callable[[], Awaitable[T]], is_over: Callable[[], bool], lease: Lease, response: ProxiedResponse
    ) -> T:
        """Return the result of `work`. Meanwhile a stream gets its status line after `commit` seconds, and comments.

        For each comment, `work` is cancelled and begun again, which costs less than a task for it. `is_over`: the
        result is known, so no comment may come before it.
        """
        if is_over() or not response.request.stream:
            return await work()
        wait = self._ping
        if not response.committed:
            wait = max(0.0, response.request.arrived + self._settings.stream_commit_seconds - time.monotonic())
        while True:
            try:
                async with asyncio.timeout(wait):
                    return await work()
            except TimeoutError:
                if not is_over():
                    await response.comment(status_comment(self._fleet, lease))
                wait = self._ping

    async def _exchange(self, lease: Lease, process: WorkerProcess, response: ProxiedResponse) -> None:
        if lease.aborted is not None:
            raise lease.aborted
        route = response.request.route
        headers = _request_headers(response, process.token)
        exchange = process.worker_client.begin(
            route.method, route.upstream or route.path, headers, response.request.body
        )
        lease.on_abort = exchange.close
        try:
            await self._head(exchange, lease, response)
            await self._relay(exchange, response)
        except WorkerClientError as error:
            # The connection broke, but the last event of the stream was complete: the client lacks nothing.
            if response.is_complete:
                await response.finish()
                return
            # The worker reported the error itself and then closed the connection. A second error frame would repeat it.
            if response.ends_with_error and lease.aborted is None:
                response.failed = 500
                await response.break_off()
                return
            cause = await _lost_cause(lease)
            # A worker whose response is not HTTP would answer the same way again, so only a lost one is retried.
            if response.first_byte is None and isinstance(cause, WorkerCrashed) and not isinstance(error, NotHttp):
                raise Unanswered(cause) from None
            raise cause from None
        finally:
            lease.on_abort = None
            exchange.close()

    async def _head(self, exchange: Exchange, lease: Lease, response: ProxiedResponse) -> None:
        """Return when the head of the worker's response has arrived."""
        try:
            await self._with_comments(exchange.head, lambda: exchange.has_head, lease, response)
        except NotHttp:
            raise lease.aborted or WorkerCrashed(
                f"{response.request.model}: its worker's answer was not HTTP; ask again"
            ) from None

    async def _relay(self, exchange: Exchange, response: ProxiedResponse) -> None:
        headers = _response_headers(exchange)
        if _streams(exchange, response):
            await EventRelay(exchange, response).run({**headers, **response.form.headers})
            return
        body = await exchange.read()
        if not exchange.at_end:
            body += await _read_up_to(exchange, BUFFERED_BYTES)
        lease = response.lease
        if exchange.status == 503 and lease is not None and lease.worker.state is State.READY and lease.aborted is None:
            # A worker answers 503 while it stops. The router has not stopped this one: another program sent a signal.
            cause = await _lost_cause(lease)
            if lease.worker.ended.is_set():
                raise Unanswered(cause)
        response.first_byte = time.monotonic()
        if response.committed:  # the client has a stream's status line, so the worker's error becomes a frame
            response.failed = exchange.status
            await response.write(response.refusal(body))
            await response.break_off()
            return
        if exchange.at_end:
            headers.pop("Content-Length", None)  # the outlet states it
            await response.send_whole(exchange.status, headers, body)
            return
        await response.commit(exchange.status, headers, body)
        while chunk := await exchange.read():
            await response.write(chunk)
        await response.finish()


def server_timing(queue: float, load: float, stages: Mapping[str, float]) -> str:
    """The value of the Server-Timing header (W3C Server Timing, section 3), in milliseconds; arguments are in seconds.

    `stages`: the parts of `load`. They can add up to more, as a load may have begun while the request was queued."""
    parts = {"queue": queue, "load": load, **{f"load-{stage}": seconds for stage, seconds in stages.items()}}
    return ", ".join(f"{name};dur={seconds * 1000:.1f}" for name, seconds in parts.items())


_FORWARDED_RESPONSE = {name.lower(): name for name in RESPONSE_HEADERS}
_FORWARDED_REQUEST = tuple((name, name.lower()) for name in REQUEST_HEADERS)


def _response_headers(exchange: Exchange) -> dict[str, str]:
    """The headers of a worker's response that are forwarded."""
    return {
        _FORWARDED_RESPONSE[lower]: value
        for lower, value in exchange.headers.items()
        if lower in _FORWARDED_RESPONSE and _is_forwardable(value)
    }


def _streams(exchange: Exchange, response: ProxiedResponse) -> bool:
    """True if a worker's response is a stream of events and not an error."""
    type_ = exchange.headers.get("content-type", "")
    return exchange.status == 200 and type_.startswith(response.form.headers["Content-Type"])


def status_comment(fleet: Fleet, lease: Lease) -> str:
    """The text of a comment in a stream that waits: the cause and the progress of the wait."""
    worker = lease.worker
    progress = worker.load.latest
    match worker.state:
        case State.QUEUED:
            cause = worker.queue.waits_for or "memory"
            eta = round(fleet.queue.eta(lease.model))
            return f"queued position={worker.queue.ahead + 1} waiting_for={cause} eta_s={eta}"
        case State.DOWNLOADING | State.STARTING:
            word = "downloading" if worker.state is State.DOWNLOADING else "loading"
            if progress is None:
                return word
            percent = f" percent={100 * progress.done // progress.total}" if progress.total else ""
            return f"{word}{percent} stage={progress.stage}"
    return "ping"


async def _fail(response: ProxiedResponse, error: ApiError) -> None:
    """Raise `error` if nothing has been sent, else report it in mid-stream."""
    if not response.committed:
        raise error
    response.failed = error.status
    if response.request.stream:
        await response.abort(error)
    else:
        await response.break_off()


async def _lost_cause(lease: Lease) -> ApiError:
    """The reason for a broken connection: the worker's exit, if that is known within EXIT_WAIT seconds.

    The socket closes a moment before the exit code is known. Without the wait, an out-of-memory exit would be reported
    as a lost connection.
    """
    if lease.aborted is None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_WAIT):
                await lease.worker.ended.wait()
    return lease.aborted or lost_error(lease.worker)


async def _read_up_to(exchange: Exchange, limit: int) -> bytes:
    """The rest of a body, or at least `limit` bytes of it."""
    parts, size = [], 0
    while size < limit and (data := await exchange.read()):
        parts.append(data)
        size += len(data)
    return b"".join(parts)


def _request_headers(response: ProxiedResponse, token: str) -> dict[str, str]:
    received = response.outlet.headers
    headers = {
        name: received[lower]
        for name, lower in _FORWARDED_REQUEST
        if lower in received and _is_forwardable(received[lower])
    }
    headers[REQUEST_ID_HEADER] = response.request.request_id
    headers[TOKEN_HEADER] = f"Bearer {token}"
    if response.request.adapter:
        headers[ADAPTER_HEADER] = quote(response.request.adapter, safe="")
    if response.profile:
        headers[PROFILE_HEADER] = quote(response.profile, safe="")
    if response.request.outside_name:
        headers[MODEL_HEADER] = quote(response.request.outside_name, safe="")
    if response.loaded and response.request.route.dialect is Dialect.OLLAMA:
        headers[WAITED_HEADER] = f"{response.waited:.6f}"
    headers["Accept-Encoding"] = "identity"
    headers.setdefault("Content-Type", "application/json")
    return headers


def _is_forwardable(value: str) -> bool:
    """True if a header's value may be forwarded: printable ASCII, which all HTTP parsers read the same way."""
    return value.isascii() and value.isprintable()

"""Forward one request to a worker and stream its answer back.

Bodies of requests and answers are forwarded byte for byte. The status line is sent when the worker's is known, or when
a stream has waited `commit` seconds. After that, silence is filled with comments. A failure then becomes an error frame
of the API and an aborted connection, never a clean end, which a client would take for success.

From top to bottom: `Proxy.forward` sets the time limit, `_attempts` retries once, `_attempt` leases a worker and waits
until it is ready, `_exchange` sends the request, `_relay` returns the answer whole or `_relay_events` event by event.
"""

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import termios
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar
from urllib.parse import quote

from router.errors import ApiError, ModelNotFound, ModelNotLoaded, RequestTimeout, WorkerCrashed
from router.fleet.admission import Lease
from router.fleet.fleet import Fleet
from router.fleet.lifecycle import lost_error
from router.fleet.worker import State
from router.launch.interface import WorkerProcess
from router.launch.worker_client import Exchange, NotHttp, WireError
from router.registry import shared_workers
from router.registry.shared_workers import SharedWorkers, with_name
from worker.protocol.dialects import Dialect
from worker.protocol.errors import to_openai_error
from worker.protocol.routes import (
    ADAPTER_HEADER,
    IGNORED_FIELDS_HEADER,
    MODEL_HEADER,
    PROFILE_HEADER,
    REQUEST_HEADERS,
    REQUEST_ID_HEADER,
    RESPONSE_HEADERS,
    TOKEN_HEADER,
    WAITED_HEADER,
    Route,
)
from worker.protocol.streams import error_body_frame, error_frame, keepalive_frame, stream

log = logging.getLogger("router.http.proxy")
T = TypeVar("T")

BUFFERED = 1 << 20
"""Answers up to this many bytes are read whole, so that the loss of a worker in mid-answer still gets a status."""
LONGEST_TAIL = 1 << 20
"""The largest incomplete event that is held back, in bytes."""
LAST_WORDS = 30.0
"""Seconds to flush the end of a broken answer, if writes have no limit of their own."""
FATE_KNOWN = 2.0
"""Seconds to wait, after a connection to a worker broke, for the worker's exit."""
FAR = 10.0
"""Longer time limits than this, in seconds, are checked once per second by one timer for all requests, so that a
request needs no timer of its own."""
LOOK = 1.0
"""Seconds between two of these checks."""


@dataclass(slots=True, kw_only=True)
class Call:
    """One request for a worker. `model` is its id, `body` the client's bytes. Not modified after it is made; it is not
    declared frozen because that makes construction five times slower."""

    route: Route
    model: str
    body: bytes
    stream: bool
    autoload: bool | None
    request_id: str
    arrived: float
    read: float
    """When its last byte had arrived, by the clock of `arrived`."""
    timeout: float
    """Seconds in all; 0.0: no limit."""
    adapter: str = ""
    """The adapter that is named outside the body."""
    asked: str = ""
    """The model's name as the client wrote it, if that is not in the body."""
    speaks: Dialect | None = None
    """The API whose frames the stream has, if that is not the API of the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds: until a waiting stream gets its status line; between its comments; that one write may take."""

    commit: float = 10.0
    ping: float = 15.0
    write_stall: float = 30.0


class Unanswered(Exception):
    """The worker was lost before the client got the first byte of its answer; the request may be tried again."""

    def __init__(self, error: ApiError):
        super().__init__(error.message)
        self.error = error


class ClientGone(Exception):
    """The client has closed its connection, or has not read for `write_stall` seconds."""


class Outlet(Protocol):
    """One request as its transport has read it, and the way back to the client for one answer.

    `begin`, `write` and `end` write at once if the transport can. They return None then, and otherwise an awaitable:
    it ends when there is room again and raises ConnectionError if the client is gone. Returning it, instead of being
    coroutines, lets the streaming path write without a task switch. The first design had a second set of methods for
    that, which each transport had to keep equal to the first.
    """

    @property
    def headers(self) -> Mapping[str, str]:
        """The request's headers, by lower-case name."""

    @property
    def is_old(self) -> bool:
        """True for HTTP/1.0: an answer without a length ends with the connection."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """None once the client is gone."""

    @property
    def has_begun(self) -> bool:
        """True once the status line is written."""

    @property
    def content_length(self) -> int | None:
        """The stated length of the request's body; None if it is not stated."""

    def check_framing(self) -> None:
        """Reject a request that another server could frame or route differently. Raises ApiError."""

    def received(self) -> bytes | None:
        """The request's body if all of it is here, else None."""

    def parts(self) -> AsyncIterator[bytes]:
        """The request's body as it arrives. Raises BadRequest."""

    def has_room(self, size: int) -> bool:
        """True if `size` bytes can be written now, without waiting."""

    def begin(
        self, status: int, headers: Mapping[str, str], data: bytes = b"", *, is_whole: bool = False
    ) -> Awaitable[None] | None:
        """Write the head and the first `data` of the body. `is_whole`: there is no more, and the length is stated."""

    def write(self, data: bytes, chunk: bytes = b"") -> Awaitable[None] | None:
        """Write more of the body. `chunk`: the same bytes in the framing of one HTTP/1.1 chunk, where that is known."""

    def end(self) -> Awaitable[None] | None:
        """Write the end of the body."""


class Answer:
    """The answer to one client, as far as it has been sent."""

    status: int | None = None
    """The status that was sent; None: nothing was sent yet."""
    first_byte: float | None = None
    """When the first byte of a worker's answer was sent, without comments. Until then the request can be retried."""
    overhead: float | None = None
    """Seconds from the request's last byte until it is sent to the worker, without the wait for the worker."""
    events_sent = b""
    """The last events that were forwarded."""
    failed: int | None = None
    """The status of an error that came after the status line."""
    lease: Lease | None = None
    """The lease of the current or last attempt."""
    profile = ""
    """The request profile that the worker applies; empty: none."""
    queued: float | None = None
    loaded: float | None = None
    """Seconds that the last attempt waited in the queue, and for its model's load; None: not over yet."""

    def __init__(self, outlet: Outlet, call: Call, pace: Pace, headers: Mapping[str, str]):
        self.outlet = outlet
        self.call = call
        self.headers = dict(headers)
        self._face = call.speaks or call.route.dialect
        self.form = stream(self._face)
        self._pace = pace

    @property
    def finished(self) -> bool:
        """The last event of a complete stream has been forwarded."""
        return bool(self.events_sent) and self.form.is_whole(self.events_sent)

    @property
    def told(self) -> bool:
        """True if the last event was the worker's own error frame."""
        return bool(self.events_sent) and self.form.is_error(self.events_sent)

    @property
    def waited(self) -> float:
        """Seconds until its model was loaded."""
        return (self.queued or 0.0) + (self.loaded or 0.0)

    @property
    def committed(self) -> bool:
        return self.status is not None

    @property
    def phase(self) -> str:
        """The phase that a disconnect is counted under: queued, starting, streaming."""
        state = self.lease.worker.state if self.lease is not None else State.QUEUED
        if state >= State.READY:
            return "streaming"
        return "starting" if state is State.STARTING else "queued"

    async def commit(self, status: int = 200, headers: Mapping[str, str] | None = None, data: bytes = b"") -> None:
        """Send the status line, headers (without any, those of a stream) and `data`. Raises ClientGone like `write`."""
        self.status = status
        of_stream = self.form.headers if headers is None else headers
        await self._sent(self.outlet.begin(status, {**self.headers, **of_stream}, data))

    async def say(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole answer. Raises ClientGone like `write`."""
        self.status = status
        await self._sent(self.outlet.begin(status, {**self.headers, **headers}, body, is_whole=True))

    async def write(self, data: bytes) -> None:
        """Raises ClientGone, after aborting the connection, if the client does not read."""
        await self._sent(self.outlet.write(data))

    async def finish(self) -> None:
        """The orderly end of the answer. Raises ClientGone like `write`."""
        await self._sent(self.outlet.end())

    async def _sent(self, pending: Awaitable[None] | None) -> None:
        """Wait for a write of the outlet, at most `write_stall` seconds."""
        if pending is None:  # the usual case: written already, so no timer is needed
            return
        try:
            async with asyncio.timeout(self._pace.write_stall or None):
                await pending
        except TimeoutError:
            if self.outlet.transport is not None:
                self.outlet.transport.abort()
            raise ClientGone from None
        except ConnectionError:
            raise ClientGone from None

    async def comment(self, text: str) -> None:
        told = keepalive_frame(self._face, text, has_begun=False, model=self.call.model)
        if not self.committed:
            await self.commit(data=told)
        elif told:
            await self.write(told)

    async def abort(self, error: ApiError) -> None:
        """One error frame, then the end of the connection without the end of the answer."""
        frame = error_frame(
            self._face,
            status=error.status,
            type=error.type,
            reason=error.reason,
            message=error.message,
            param=error.param,
            request_id=self.call.request_id,
        )
        with contextlib.suppress(ClientGone):
            await self.write(frame)
        await self.break_off()

    def refusal(self, body: bytes) -> bytes:
        """A worker's error as a frame of this stream."""
        return error_body_frame(self._face, body if self.call.speaks is None else to_openai_error(body))

    async def break_off(self) -> None:
        """End the connection so that the client cannot take what it has for the whole answer.

        In HTTP/1.1 the missing last chunk says so. In HTTP/1.0 an orderly end would mean "complete", so the
        connection is reset once everything has left this machine's send queue.
        """
        transport = self.outlet.transport
        if transport is None:
            return
        limit = time.monotonic() + (self._pace.write_stall or LAST_WORDS)
        sock: socket.socket | None = transport.get_extra_info("socket")
        old = self.outlet.is_old and sock is not None and sock.family != socket.AF_UNIX
        while time.monotonic() < limit and not transport.is_closing():
            if transport.get_write_buffer_size() == 0 and not (old and sock is not None and _unsent(sock)):
                break
            await asyncio.sleep(0.01)  # polling, as no event signals an empty kernel send queue
        if old and sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if old or transport.get_write_buffer_size():  # close() would wait without limit for a client that does not read
            transport.abort()
        else:
            transport.close()


AT_ONCE = "queue;dur=0.0, load;dur=0.0"


def server_timing(queue: float, load: float, stages: Mapping[str, float]) -> str:
    """Where the time before the worker went, in seconds here and in milliseconds there (W3C Server Timing, section 3).
    What a load is made of may have begun while the request was still in the queue."""
    if queue < 0.00005 and load < 0.00005 and not stages:
        return AT_ONCE
    parts = {"queue": queue, "load": load, **{f"load-{stage}": seconds for stage, seconds in stages.items()}}
    return ", ".join(f"{name};dur={seconds * 1000:.1f}" for name, seconds in parts.items())


class _Limit:
    """The time limit of the current task for one request, like `asyncio.timeout`, but without a timer for each."""

    __slots__ = ("_passed", "_task", "timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        task = asyncio.current_task(loop)
        assert task is not None
        self._task = task
        self._passed = False
        self.timer: asyncio.TimerHandle | None = None

    def passes(self) -> None:
        """The time is up: cancel the task."""
        self._passed = True
        self._task.cancel()

    def end(self) -> bool:
        """Stop the limit. Return True if it cancelled the task and nothing else did. Call it once."""
        if self.timer is not None:
            self.timer.cancel()
        return self._passed and self._task.uncancel() == 0


class Proxy:
    """Forwards calls to the workers of one fleet."""

    def __init__(self, shared_workers: SharedWorkers, pace: Pace):
        self._loop = asyncio.get_running_loop()
        self._shared_workers = shared_workers
        self._fleet = shared_workers.fleet
        self._pace = pace
        self._limits: dict[_Limit, float] = {}
        """When each long time limit is up, by the loop's clock."""
        self._look: asyncio.TimerHandle | None = None

    def answer(self, outlet: Outlet, call: Call, headers: Mapping[str, str]) -> Answer:
        """A new answer for `forward`. `headers`: those that the router adds to the worker's."""
        return Answer(outlet, call, self._pace, headers)

    async def forward(self, answer: Answer) -> None:
        """Return when the answer is complete, or broken off with an error frame.

        Raises ApiError while nothing has been sent, CancelledError if the client is gone. Cancelling this coroutine
        returns the lease and closes the connection to the worker, which cancels the worker's computation.
        """
        call = answer.call
        limit = _Limit(self._loop)
        if call.timeout:
            self._watch(limit, max(0.0, call.arrived + call.timeout - time.monotonic()))
        late = False
        try:
            try:
                await self._attempts(answer)
            finally:
                self._limits.pop(limit, None)
                late = limit.end()
        except asyncio.CancelledError:
            if not late:
                raise
            await _fail(answer, RequestTimeout(f"no complete answer within {call.timeout:g} s (request-timeout)"))
        except ClientGone:
            log.info("%s: the client is gone", call.request_id)
            raise asyncio.CancelledError from None
        except ApiError as error:
            lease = answer.lease
            await _fail(answer, error if lease is None else with_name(error, lease.model.preset.id, call.model))

    def _watch(self, limit: "_Limit", left: float) -> None:
        """Make `limit` pass in `left` seconds; a long one passes up to LOOK later."""
        if left < FAR:
            limit.timer = self._loop.call_later(left, limit.passes)
            return
        self._limits[limit] = self._loop.time() + left
        if self._look is None:
            self._look = self._loop.call_later(LOOK, self._look_at_limits)

    def _look_at_limits(self) -> None:
        now = self._loop.time()
        for limit in [limit for limit, when in self._limits.items() if when <= now]:
            del self._limits[limit]
            limit.passes()
        self._look = self._loop.call_later(LOOK, self._look_at_limits) if self._limits else None

    async def _attempts(self, answer: Answer) -> None:
        """Try once more on a new lease if the worker is lost before the client has a byte of its answer, or if the name
        got another worker while the request waited.

        More than one retry would turn a request that crashes workers into a loop of loads."""
        lost: ApiError
        try:
            await self._attempt(answer)
            return
        except Unanswered as unanswered:
            lost = unanswered.error
            log.info("%s: %s; sent once more", answer.call.request_id, lost.message)
        except ModelNotFound as gone:
            if answer.lease is None or self._shared_workers.find(answer.call.model).model is answer.lease.model:
                raise
            lost = gone
        try:
            await self._attempt(answer)
        except Unanswered as unanswered:
            raise unanswered.error from None
        except ModelNotLoaded:
            raise lost from None  # autoload is off: report the lost worker, which is the cause

    async def _attempt(self, answer: Answer) -> None:
        call = answer.call
        with self._shared_workers.lease(call.model, autoload=call.autoload) as lease:
            answer.lease = lease
            before = time.monotonic()
            process = await self._ready(lease, answer)
            answer.profile = call.model if await self._shared_workers.prepare(lease.worker, call.model) else ""
            if lease.worker.preset.adapter_slots:
                await shared_workers.send_adapters(lease.worker, self._fleet.files)
            waited = time.monotonic() - before
            load = min(waited, lease.worker.load_seconds) if waited > 0.001 else 0.0
            answer.queued, answer.loaded = waited - load, load
            if not answer.committed:
                stages = process.ready.seconds if load else {}
                answer.headers["Server-Timing"] = server_timing(waited - load, load, stages)
            if answer.overhead is None:
                answer.overhead = max(0.0, time.monotonic() - call.read - waited)
            await self._exchange(lease, process, answer)

    async def _ready(self, lease: Lease, answer: Answer) -> WorkerProcess:
        if lease.worker.state is State.READY:
            return await lease.ready()
        return await self._patiently(lease.ready(), lease, answer)

    async def _patiently(self, work: Awaitable[T], lease: Lease, answer: Answer) -> T:
        """The result of `work`; meanwhile a stream gets its status line after `commit` seconds, and comments."""
        waiting = asyncio.ensure_future(work)
        try:
            if not answer.call.stream:
                return await waiting
            if not answer.committed:
                left = answer.call.arrived + self._pace.commit - time.monotonic()
                await asyncio.wait({waiting}, timeout=max(0.0, left))
            while not waiting.done():
                await answer.comment(status_comment(self._fleet, lease))
                await asyncio.wait({waiting}, timeout=self._pace.ping if self._pace.ping > 0 else None)
            return waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait({waiting})
            if not waiting.cancelled():
                waiting.exception()  # retrieved, or asyncio logs it when the client is gone

    async def _exchange(self, lease: Lease, process: WorkerProcess, answer: Answer) -> None:
        if lease.aborted is not None:
            raise lease.aborted
        route = answer.call.route
        headers = _onward_headers(answer, process.token)
        exchange = process.wire.begin(route.method, route.upstream or route.path, headers, answer.call.body)
        lease.on_abort = exchange.close
        try:
            await self._head(exchange, lease, answer)
            await self._relay(exchange, answer)
        except WireError as error:
            if answer.finished:
                await answer.finish()
                return
            if answer.told and lease.aborted is None:
                answer.failed = 500
                await answer.break_off()
                return
            fate = await _fate(lease)
            if answer.first_byte is None and isinstance(fate, WorkerCrashed) and not isinstance(error, NotHttp):
                raise Unanswered(fate) from None
            raise fate from None
        finally:
            lease.on_abort = None
            exchange.close()

    async def _head(self, exchange: Exchange, lease: Lease, answer: Answer) -> None:
        """Return when the head of the worker's answer has arrived."""
        try:
            if answer.call.stream:
                await self._patient_head(exchange, lease, answer)
            else:
                await exchange.head()
        except NotHttp:
            raise lease.aborted or WorkerCrashed(
                f"{answer.call.model}: its worker's answer was not HTTP; ask again"
            ) from None

    async def _patient_head(self, exchange: Exchange, lease: Lease, answer: Answer) -> None:
        """As `_patiently`: comments meanwhile."""
        pause = self._pace.ping if self._pace.ping > 0 else None
        wait = pause if answer.committed else max(0.0, answer.call.arrived + self._pace.commit - time.monotonic())
        while not exchange.has_head:
            try:
                async with asyncio.timeout(wait):
                    await exchange.head()
            except TimeoutError:
                if not exchange.has_head:
                    await answer.comment(status_comment(self._fleet, lease))
                wait = pause

    async def _relay(self, exchange: Exchange, answer: Answer) -> None:
        headers = _passed(exchange)
        if _streams(exchange, answer):
            await self._relay_events(exchange, answer, {**headers, **answer.form.headers})
            return
        body = await _read_up_to(exchange, BUFFERED)
        answer.first_byte = time.monotonic()
        if answer.committed:  # the client has a stream's status line, so the worker's error becomes a frame
            answer.failed = exchange.status
            await answer.write(answer.refusal(body))
            await answer.break_off()
            return
        if exchange.at_end:
            headers.pop("Content-Length", None)  # the outlet states it
            await answer.say(exchange.status, headers, body)
            return
        await answer.commit(exchange.status, headers, body)
        while chunk := await exchange.read():
            await answer.write(chunk)
        await answer.finish()

    async def _relay_events(self, exchange: Exchange, answer: Answer, headers: dict[str, str]) -> None:
        """Forward whole events; hold back what is not one yet."""
        form, tail = answer.form, b""
        ignored = exchange.headers.get(IGNORED_FIELDS_HEADER.lower(), "")
        if answer.committed and ignored:
            await answer.comment(f"ignored-fields {ignored}")
        outlet, end, longest = answer.outlet, form.end, LONGEST_TAIL

        # The loop at the end handles every event. Two callbacks take over from it while the client keeps up: the
        # worker's connection calls them as bytes arrive, and they write to the client's connection without waking
        # this coroutine. A task switch for each event is most of the cost of a stream of short ones. Each callback
        # returns False, having written nothing, where it would have to wait or decide; the bytes then go through the
        # loop. (A whole answer has no such callback: in a run of 15
        # rounds it saved 8 % of a request's CPU at 1 connection and 1 % at 16, by medians on a busy machine.)

        def pour(data: bytes) -> bool:
            """Forward the whole events in `data` and keep the rest."""
            nonlocal tail
            seen = tail + data if tail else data
            at = seen.rfind(end) + len(end)
            if at < len(end):
                if len(seen) > longest:
                    return False
                tail = seen
                return True
            events = seen if at == len(seen) else seen[:at]
            if not outlet.has_room(len(events)):
                return False
            outlet.write(events)
            if answer.first_byte is None and form.has_data(events):
                answer.first_byte = time.monotonic()
            answer.events_sent, tail = events, seen[at:]
            return True

        end_of_chunk = end + b"\r\n"

        def put_chunk(chunk: bytes, start: int) -> bool:
            """Forward one chunk of whole events in the worker's own framing, which saves parsing and framing it."""
            if tail or not chunk.endswith(end_of_chunk) or not outlet.has_room(len(chunk)):
                return False
            events = chunk[start:-2]
            outlet.write(events, chunk)
            answer.events_sent = events
            return True

        while chunk := await exchange.read():
            tail = tail + chunk if tail else chunk
            at = tail.rfind(end) + len(end)
            if at < len(end):
                if len(tail) > longest:
                    raise WorkerCrashed(f"{answer.call.model}: its worker sent an event that does not end")
                continue
            events, tail = tail[:at], tail[at:]
            if answer.first_byte is None and form.has_data(events):
                answer.first_byte = time.monotonic()  # a comment is no answer yet
            if answer.committed:
                await answer.write(events)
            else:
                await answer.commit(exchange.status, headers, events)
            answer.events_sent = events
            exchange.sink = pour
            if answer.first_byte is not None:  # `put_chunk` does not look for the first token
                exchange.chunk_sink = put_chunk
        if not answer.committed:
            await answer.commit(exchange.status, headers)
        if tail:
            await answer.write(tail)
        await answer.finish()


_PASSED = tuple((name, name.lower()) for name in RESPONSE_HEADERS)
_ONWARD = tuple((name, name.lower()) for name in REQUEST_HEADERS)


def _passed(exchange: Exchange) -> dict[str, str]:
    """The headers of a worker's answer that are forwarded."""
    theirs = exchange.headers
    return {name: theirs[lower] for name, lower in _PASSED if lower in theirs and _is_fit(theirs[lower])}


def _streams(exchange: Exchange, answer: Answer) -> bool:
    """True if a worker's answer is a stream of events and not an error."""
    type_ = exchange.headers.get("content-type", "")
    return exchange.status == 200 and type_.startswith(answer.form.headers["Content-Type"])


def status_comment(fleet: Fleet, lease: Lease) -> str:
    """The text of a comment in a stream that waits: why it waits."""
    worker = lease.worker
    progress = worker.progress
    match worker.state:
        case State.QUEUED:
            cause = worker.waits_for or "memory"
            eta = round(fleet.eta(lease.model))
            return f"queued position={worker.ahead + 1} waiting_for={cause} eta_s={eta}"
        case State.DOWNLOADING | State.STARTING:
            word = "downloading" if worker.state is State.DOWNLOADING else "loading"
            if progress is None:
                return word
            percent = f" percent={100 * progress.done // progress.total}" if progress.total else ""
            return f"{word}{percent} stage={progress.stage}"
    return "ping"


async def _fail(answer: Answer, error: ApiError) -> None:
    """Raise `error` if nothing has been sent, else report it in mid-stream."""
    if not answer.committed:
        raise error
    answer.failed = error.status
    if answer.call.stream:
        await answer.abort(error)
    else:
        await answer.break_off()


async def _fate(lease: Lease) -> ApiError:
    """Why the connection broke: the worker's exit, if that is known within FATE_KNOWN seconds."""
    if lease.aborted is None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FATE_KNOWN):
                await lease.worker.ended.wait()
    return lease.aborted or lost_error(lease.worker)


async def _read_up_to(exchange: Exchange, limit: int) -> bytes:
    """All of an answer, or at least `limit` bytes."""
    data = await exchange.read()
    if exchange.at_end:
        return data
    parts, size = [data], len(data)
    while size < limit and (data := await exchange.read()):
        parts.append(data)
        size += len(data)
    return b"".join(parts)


def _onward_headers(answer: Answer, token: str) -> dict[str, str]:
    asked = answer.outlet.headers
    headers = {name: asked[lower] for name, lower in _ONWARD if lower in asked and _is_fit(asked[lower])}
    headers[REQUEST_ID_HEADER] = answer.call.request_id
    headers[TOKEN_HEADER] = f"Bearer {token}"
    if answer.call.adapter:
        headers[ADAPTER_HEADER] = quote(answer.call.adapter, safe="")
    if answer.profile:
        headers[PROFILE_HEADER] = quote(answer.profile, safe="")
    if answer.call.asked:
        headers[MODEL_HEADER] = quote(answer.call.asked, safe="")
    if answer.loaded and answer.call.route.dialect is Dialect.OLLAMA:
        headers[WAITED_HEADER] = f"{answer.waited:.6f}"
    headers["Accept-Encoding"] = "identity"
    headers.setdefault("Content-Type", "application/json")
    return headers


def _is_fit(value: str) -> bool:
    """True if a header's value may be forwarded: printable ASCII, which all HTTP parsers read the same way."""
    return value.isascii() and value.isprintable()


def _unsent(sock: socket.socket) -> int:
    """Bytes in the kernel's send queue that the peer has not acknowledged (SIOCOUTQ, tcp(7))."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
    except OSError:
        return 0

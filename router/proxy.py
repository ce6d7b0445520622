"""One request to a worker, its answer streamed back.

The body goes on byte for byte and so does the answer. No status line is sent until it is known to be true, or until a
stream has waited `commit` seconds; from then on silence is filled with comments, and a failure becomes the dialect's
error frame and an aborted connection, never a clean end that a client would take for success.
"""

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import termios
import time
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar
from urllib.parse import quote

from router import adapters
from router.errors import ApiError, ModelNotFound, ModelNotLoaded, RequestTimeout, WorkerCrashed
from router.fleet import Fleet
from router.launchers import WorkerProcess
from router.lease import Lease
from router.life import lost_error
from router.lifecycle import State
from router.members import Members, by_name
from router.wire import Exchange, NotHttp, WireError
from worker.protocol.dialects import Dialect
from worker.protocol.errors import in_openais_words
from worker.protocol.headers import (
    ADAPTER_HEADER,
    ASKED_HEADER,
    IGNORED_FIELDS_HEADER,
    PROFILE_HEADER,
    REQUEST_HEADERS,
    REQUEST_ID_HEADER,
    RESPONSE_HEADERS,
    TOKEN_HEADER,
    WAITED_HEADER,
)
from worker.protocol.routes import Route
from worker.protocol.streams import error_frame, refusal_frame, silence, stream

log = logging.getLogger("router.proxy")
T = TypeVar("T")

BUFFERED = 1 << 20
"""Answers up to this many bytes are read whole, so that a worker's death in mid-answer still gets its status."""
LONGEST_TAIL = 1 << 20
"""Bytes of an incomplete event that are held back at most."""
LAST_WORDS = 30.0
"""Seconds that the end of a broken answer may take to leave, if writes have no limit of their own."""
FATE_KNOWN = 2.0
"""Seconds to wait, after a connection broke, for word of what became of its worker."""
FAR = 10.0
"""Seconds from which on a request's limit needs no timer of its own: one look each second at all of them will do."""
LOOK = 1.0
"""Seconds between two of these."""


@dataclass(slots=True, kw_only=True)
class Call:
    """One request for a worker. `model` is its id, `body` the client's bytes. Nobody changes one: frozen it would say
    so, and be made five times as slowly."""

    route: Route
    model: str
    body: bytes
    stream: bool
    autoload: bool | None
    request_id: str
    arrived: float
    read: float
    """When its last byte was here, by the clock of `arrived`."""
    timeout: float
    """Seconds in all; 0.0: no limit."""
    adapter: str = ""
    """The adapter that it names beside its body."""
    asked: str = ""
    """The model's name as the client said it, where that is not in the body."""
    speaks: Dialect | None = None
    """In whose frames it streams, where those are not its path's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds: until a waiting stream gets its status line; between its comments; that one write may take."""

    commit: float = 10.0
    ping: float = 15.0
    write_stall: float = 30.0


class Unanswered(Exception):
    """The worker was lost before the client got the first byte of its answer."""

    def __init__(self, error: ApiError):
        super().__init__(error.message)
        self.error = error


class ClientGone(Exception):
    """The client has closed its connection, or has not read for `write_stall` seconds."""


class Outlet(Protocol):
    """A request, and the way back to whoever sent it, for one answer.

    What writes returns once there is room again, and raises ConnectionError if the client is gone.
    """

    @property
    def headers(self) -> Mapping[str, str]:
        """The request's; asked for by lower-case names."""

    @property
    def is_old(self) -> bool:
        """It speaks HTTP/1.0: an answer without a length ends with the connection."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """None once the client is gone."""

    def has_room(self, size: int) -> bool:
        """Whether so many bytes can be written without waiting."""

    async def say(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """All of an answer."""

    async def begin(self, status: int, headers: Mapping[str, str], data: bytes = b"") -> None:
        """The head of an answer, and what is known of its body; `headers` have its length if it is known at all."""

    async def write(self, data: bytes) -> None:
        """Some more of the body."""

    def put(self, data: bytes) -> bool:
        """Likewise, if it can be written without waiting; whether it was."""

    def put_chunk(self, framed: bytes) -> bool:
        """As `put`, for one chunk of HTTP/1.1 in its framing; never if the answer is not made of such."""

    def put_all(self, status: int, headers: Mapping[str, str], body: bytes) -> bool:
        """As `say`, if it can be written without waiting; whether it was."""

    async def end(self) -> None:
        """There is no more."""


class Answer:
    """What has been sent to one client so far."""

    status: int | None = None
    """That the client was sent; None: nothing was yet."""
    first_byte: float | None = None
    """When the client was sent the first of a worker's answer, comments not counted; until then another may answer."""
    overhead: float | None = None
    """Seconds from the request's last byte to its being handed on, waits for the worker not counted."""
    events_sent = b""
    """The last of a stream that were forwarded at once."""
    failed: int | None = None
    """The status of what went wrong after the status line had been sent."""
    lease: Lease | None = None
    """The hold of the attempt that runs, or ran last."""
    profile = ""
    """Under which its worker is to answer it; empty: under none."""
    queued: float | None = None
    loaded: float | None = None
    """Seconds that the last attempt waited for others, and for its own load; None: it waits, or never did."""

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
        """The last event was the worker's own error frame."""
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
        """How far it has come, or had when its client left: queued, starting, streaming."""
        state = self.lease.worker.state if self.lease is not None else State.QUEUED
        if state >= State.READY:
            return "streaming"
        return "starting" if state is State.STARTING else "queued"

    async def commit(self, status: int = 200, headers: Mapping[str, str] | None = None, data: bytes = b"") -> None:
        """Send the status line, headers (without any, those of a stream) and `data`. Raises ClientGone like `write`."""
        self.status = status
        await self._reach(
            self.outlet.begin(status, {**self.headers, **(self.form.headers if headers is None else headers)}, data),
            len(data),
        )

    async def say(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """All of an answer at once. Raises ClientGone like `write`."""
        self.status = status
        await self._reach(self.outlet.say(status, {**self.headers, **headers}, body), len(body))

    async def write(self, data: bytes) -> None:
        """Raises ClientGone, after aborting the connection, if the client does not read."""
        await self._reach(self.outlet.write(data), len(data))

    async def finish(self) -> None:
        """The orderly end of the answer. Raises ClientGone like `write`."""
        await self._reach(self.outlet.end())

    async def _reach(self, sending: Coroutine[object, object, None], size: int = 0) -> None:
        """Send `size` bytes and what goes around them."""
        try:
            if self.outlet.has_room(size):  # then nothing waits, and nothing needs to be timed
                await sending
                return
            async with asyncio.timeout(self._pace.write_stall or None):
                await sending
        except TimeoutError:
            if self.outlet.transport is not None:
                self.outlet.transport.abort()
            raise ClientGone from None
        except ConnectionError:
            raise ClientGone from None

    async def comment(self, text: str) -> None:
        told = silence(self._face, text, has_begun=False, model=self.call.model)
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
        return refusal_frame(self._face, body if self.call.speaks is None else in_openais_words(body))

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
            await asyncio.sleep(0.01)  # the kernel tells nobody when its send queue is empty
        if old and sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if old or transport.get_write_buffer_size():  # closing would wait for this reader for ever
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
    """The time that the current task has for a request. As `asyncio.timeout`, and with one timer for many."""

    __slots__ = ("_passed", "_task", "timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        task = asyncio.current_task(loop)
        assert task is not None
        self._task = task
        self._passed = False
        self.timer: asyncio.TimerHandle | None = None

    def passes(self) -> None:
        """It is over: the task is cancelled."""
        self._passed = True
        self._task.cancel()

    def end(self) -> bool:
        """It does not pass any more. Whether it has, and nothing else cancelled the task: to be asked once."""
        if self.timer is not None:
            self.timer.cancel()
        return self._passed and self._task.uncancel() == 0


class Proxy:
    """Forwards calls to the workers of one fleet, and to the clerks beside it."""

    def __init__(self, members: Members, pace: Pace):
        self._loop = asyncio.get_running_loop()
        self._members = members
        self._fleet = members.fleet
        self._pace = pace
        self._limits: dict[_Limit, float] = {}
        """Those of requests whose time is up in a while, and when that is."""
        self._look: asyncio.TimerHandle | None = None

    def answer(self, outlet: Outlet, call: Call, headers: Mapping[str, str]) -> Answer:
        """To be forwarded. `headers`: what its head has besides the worker's."""
        return Answer(outlet, call, self._pace, headers)

    async def forward(self, answer: Answer) -> None:
        """Returns once the answer is complete, or broken off with an error frame.

        Raises ApiError while nothing has been sent, CancelledError if the client has left. Cancelling, which is how
        that is told otherwise, gives the lease back and closes the connection to the worker: that cancels its work.
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
            await _fail(answer, error if lease is None else by_name(error, lease.model.preset.id, call.model))

    def _watch(self, limit: "_Limit", left: float) -> None:
        """Have `limit` pass in `left` seconds, or where that is far, up to LOOK later."""
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
        """One resend on a new lease if a worker is lost before the client has anything of its answer, or its name came
        to be served by another one while it waited."""
        lost: ApiError
        try:
            await self._attempt(answer)
            return
        except Unanswered as unanswered:
            lost = unanswered.error
            log.info("%s: %s; sent once more", answer.call.request_id, lost.message)
        except ModelNotFound as gone:
            if answer.lease is None or self._members.find(answer.call.model).model is answer.lease.model:
                raise
            lost = gone
        try:
            await self._attempt(answer)
        except Unanswered as unanswered:
            raise unanswered.error from None
        except ModelNotLoaded:
            raise lost from None  # it was, and may not be loaded again without being told to

    async def _attempt(self, answer: Answer) -> None:
        call = answer.call
        with self._members.lease(call.model, autoload=call.autoload, counts=call.route.counts) as lease:
            answer.lease = lease
            before = time.monotonic()
            process = await self._ready(lease, answer)
            answer.profile = call.model if await self._members.prepare(lease.worker, call.model) else ""
            if lease.worker.preset.adapter_slots:
                await adapters.tell(lease.worker, self._fleet.files)
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
        """The result of `work`; a stream that waits for it gets its status line in time, and comments."""
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
                waiting.exception()  # whoever left does not hear it

    async def _exchange(self, lease: Lease, process: WorkerProcess, answer: Answer) -> None:
        if lease.aborted is not None:
            raise lease.aborted
        route = answer.call.route
        headers = _onward_headers(answer, process.token)
        exchange = process.wire.begin(route.method, route.upstream or route.path, headers, answer.call.body)
        lease.on_abort = exchange.close
        if not answer.call.stream:
            exchange.on_end = partial(_say_at_once, exchange, answer)
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
            lease.on_abort = exchange.on_end = None
            exchange.close()

    async def _head(self, exchange: Exchange, lease: Lease, answer: Answer) -> None:
        """Returns with the head of the worker's answer."""
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
        if answer.committed and not answer.call.stream:
            return  # it was said at once
        headers = _passed(exchange)
        if _streams(exchange, answer):
            await self._relay_events(exchange, answer, {**headers, **answer.form.headers})
            return
        body = await _read_up_to(exchange, BUFFERED)
        answer.first_byte = time.monotonic()
        if answer.committed:  # the worker refused what is a stream to the client by now
            answer.failed = exchange.status
            await answer.write(answer.refusal(body))
            await answer.break_off()
            return
        if exchange.at_end:
            headers.pop("Content-Length", None)  # it is that of the body
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

        def pour(chunk: bytes) -> bool:
            """What comes while the client keeps up, from one connection straight into the other."""
            nonlocal tail
            seen = tail + chunk if tail else chunk
            at = seen.rfind(end) + len(end)
            if at < len(end):
                if len(seen) > longest:
                    return False
                tail = seen
                return True
            events = seen if at == len(seen) else seen[:at]
            if not outlet.put(events):
                return False
            if answer.first_byte is None and form.says(events):
                answer.first_byte = time.monotonic()
            answer.events_sent, tail = events, seen[at:]
            return True

        end_of_chunk = end + b"\r\n"

        def put_chunk(framed: bytes, start: int) -> bool:
            """What comes while the worker writes whole events, one at a time, as they are to leave."""
            if tail or not framed.endswith(end_of_chunk) or not outlet.put_chunk(framed):
                return False
            answer.events_sent = framed[start:-2]
            return True

        while chunk := await exchange.read():
            tail = tail + chunk if tail else chunk
            at = tail.rfind(end) + len(end)
            if at < len(end):
                if len(tail) > longest:
                    raise WorkerCrashed(f"{answer.call.model}: its worker sent an event that does not end")
                continue
            events, tail = tail[:at], tail[at:]
            if answer.first_byte is None and form.says(events):
                answer.first_byte = time.monotonic()  # a comment is no answer yet
            if answer.committed:
                await answer.write(events)
            else:
                await answer.commit(exchange.status, headers, events)
            answer.events_sent = events
            exchange.sink = pour
            if answer.first_byte is not None:  # else somebody has to look out for it
                exchange.chunk_sink = put_chunk
        if not answer.committed:
            await answer.commit(exchange.status, headers)
        if tail:
            await answer.write(tail)
        await answer.finish()


_PASSED = tuple((name, name.lower()) for name in RESPONSE_HEADERS)
_ONWARD = tuple((name, name.lower()) for name in REQUEST_HEADERS)


def _passed(exchange: Exchange) -> dict[str, str]:
    """What of the headers of a worker's answer is handed on."""
    theirs = exchange.headers
    return {name: theirs[lower] for name, lower in _PASSED if lower in theirs and _is_fit(theirs[lower])}


def _streams(exchange: Exchange, answer: Answer) -> bool:
    """Whether a worker's answer is a stream of events, and no refusal in the form of one."""
    type_ = exchange.headers.get("content-type", "")
    return exchange.status == 200 and type_.startswith(answer.form.headers["Content-Type"])


def _say_at_once(exchange: Exchange, answer: Answer) -> None:
    """Hand on an answer whose last byte has just come, before anything else happens, if the client takes it."""
    if exchange.piled > BUFFERED or answer.committed or _streams(exchange, answer):
        return
    headers, body = _passed(exchange), exchange.take_all()
    headers.pop("Content-Length", None)  # it is that of the body
    if answer.outlet.put_all(exchange.status, {**answer.headers, **headers}, body):
        answer.status, answer.first_byte = exchange.status, time.monotonic()
    else:
        exchange.take(body)  # as if it were still to be read


def status_comment(fleet: Fleet, lease: Lease) -> str:
    """Why a stream is still silent, for people who look at it."""
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
    """Answer with `error`: by raising it while that is possible, else in mid-stream."""
    if not answer.committed:
        raise error
    answer.failed = error.status
    if answer.call.stream:
        await answer.abort(error)
    else:
        await answer.break_off()


async def _fate(lease: Lease) -> ApiError:
    """Why the connection broke: as soon as it is known, or as far as it is after a moment."""
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
        headers[ASKED_HEADER] = quote(answer.call.asked, safe="")
    if answer.loaded and answer.call.route.dialect is Dialect.OLLAMA:
        headers[WAITED_HEADER] = f"{answer.waited:.6f}"
    headers["Accept-Encoding"] = "identity"
    headers.setdefault("Content-Type", "application/json")
    return headers


def _is_fit(value: str) -> bool:
    """Whether a header's value may be handed on: no byte that two readers could take for different things."""
    return value.isascii() and value.isprintable()


def _unsent(sock: socket.socket) -> int:
    """Bytes in the kernel's send queue that the peer has not acknowledged (SIOCOUTQ, tcp(7))."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
    except OSError:
        return 0

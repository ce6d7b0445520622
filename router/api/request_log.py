"""The log of forwarded requests: running ones, which can be cancelled, and the last ended ones."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from router.errors import Cancelled, RequestNotFound
from router.events import Event
from router.fleet.admission import Lease
from router.log import LogQueue, Ring, escaped

MAX_ENDED = 1000  # ended requests in the log; a guess


class ForwardedAnswer(Protocol):
    """The answer to a forwarded request. The proxy updates it while the request runs."""

    @property
    def phase(self) -> str:
        """`queued`, `starting` or `streaming`."""

    queued: float | None  # seconds in the admission queue
    loaded: float | None  # seconds of waiting for the load of the model
    first_byte: float | None  # monotonic time
    lease: Lease | None


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request. Times that are not known (yet) are None."""

    id: str
    model: str
    endpoint: str
    client: str
    key: str
    began: float  # arrival in seconds since 1970
    arrived: float  # arrival by the monotonic clock
    answer: ForwardedAnswer | None = None  # from forwarding to the end
    seconds: float | None = None  # total duration; None while it runs
    status: int = 499  # of the response; 499: the client disconnected
    phase: str = "queued"  # the last phase: queued, starting, streaming
    queued: float | None = None  # seconds in the admission queue
    loaded: float | None = None  # seconds of waiting for the load of the model
    ttft: float | None = None  # seconds until the first byte
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    token_seconds: float | None = None

    def update(self) -> None:
        """Copy the current phase and times from the answer."""
        answer = self.answer
        if answer is None:
            return
        self.phase, self.queued, self.loaded = answer.phase, answer.queued, answer.loaded
        if answer.first_byte is not None:
            self.ttft = answer.first_byte - self.arrived

    def as_dict(self, now: float) -> dict[str, Any]:
        """The request as a JSON object. `now` is a monotonic time."""
        self.update()
        running = self.seconds is None
        return {
            "id": self.id,
            "model": self.model,
            "endpoint": self.endpoint,
            "client": self.client,
            "key": self.key,
            "arrived": round(self.began, 3),
            "phase": self.phase,
            "status": None if running else self.status,
            "seconds": round(now - self.arrived if self.seconds is None else self.seconds, 4),
            "queue_seconds": _rounded(self.queued),
            "load_seconds": _rounded(self.loaded),
            "ttft": _rounded(self.ttft),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "tokens_per_second": round(1 / self.token_seconds, 1) if self.token_seconds else None,
        }


class RequestLog:
    """The running and ended requests of one router."""

    def __init__(self) -> None:
        self._running: dict[RequestRecord, None] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=MAX_ENDED)
        self._by_id: dict[str, RequestRecord] = {}

    def began(self, record: RequestRecord) -> None:
        """Add a running request. The caller calls `ended` later."""
        self._running[record] = None
        self._by_id[record.id] = record

    def ended(self, record: RequestRecord) -> None:
        """Move a request to the ended ones. The caller has set its status."""
        record.update()
        record.seconds, record.answer = time.monotonic() - record.arrived, None
        del self._running[record]
        # The oldest one drops out of the log, so it must leave the index as well, unless a later request reused its id.
        if len(self._ended) == MAX_ENDED and self._by_id.get(self._ended[0].id) is self._ended[0]:
            del self._by_id[self._ended[0].id]
        self._ended.append(record)

    def on_event(self, event: Event) -> None:
        """Add the token counts of a worker's `request` event, which may come after the end of the response."""
        if event.kind != "request":
            return
        record = self._by_id.get(event.data["id"])
        if record is None:
            return
        data = event.data
        record.prompt_tokens, record.cached_tokens = data["prompt_tokens"], data["cached_tokens"]
        record.completion_tokens = data["completion_tokens"]
        record.token_seconds = data["token_seconds"] or None

    def as_dict(self, *, may_see: Callable[[str], bool]) -> dict[str, Any]:
        """Running requests, oldest first, and ended ones, newest first, of models for which `may_see` is true."""
        now = time.monotonic()
        return {
            "running": [record.as_dict(now) for record in self._running if may_see(record.model)],
            "ended": [record.as_dict(now) for record in reversed(self._ended) if may_see(record.model)],
        }

    def cancel(self, id: str) -> int:
        """Abort the running requests with this id, and return their number. Raises RequestNotFound."""
        found = [record for record in self._running if record.id == id]
        for record in found:
            if record.answer is not None and record.answer.lease is not None:
                record.answer.lease.abort(Cancelled("an administrator has cancelled this request"))
        if not found:
            raise RequestNotFound(f"no request '{id}' is running; GET /router/requests lists running requests")
        return len(found)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def request_line(logger: logging.Logger, message: str) -> None:
    """Do as `logger.info(message)`. Our own handlers get the text without a LogRecord: to make and pass on a record
    for every request took a fifth of its CPU."""
    if not logger.isEnabledFor(logging.INFO):
        return
    now, shown = time.time(), escaped(message)
    for handler in logging.root.handlers:
        if isinstance(handler, (Ring, LogQueue)):
            handler.take(now, logger.name, shown)
        else:
            handler.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, message, (), None))

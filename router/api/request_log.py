"""Requests for workers: those that run and the last that ended, and how one is ended before its time."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from router.errors import Cancelled, RequestNotFound
from router.events import Event
from router.fleet.admission import Lease

KEPT = 1000
"""Ended requests that are remembered."""


class ForwardedAnswer(Protocol):
    """The answer to a forwarded request, as the proxy fills it in."""

    @property
    def phase(self) -> str:
        """`queued`, `starting` or `streaming`."""

    queued: float | None
    loaded: float | None
    first_byte: float | None
    lease: Lease | None


@dataclass(slots=True, eq=False)
class Record:
    """One request. `began` and `arrived`: when it came, in seconds since 1970 and by the monotonic clock."""

    id: str
    model: str
    endpoint: str
    client: str
    key: str
    began: float
    arrived: float
    answer: ForwardedAnswer | None = None
    """What its client has got so far, while it runs and once it is forwarded."""
    seconds: float | None = None
    """That it took in all."""
    status: int = 499
    """How it ended; 499: the client left."""
    phase: str = "queued"
    """How far it came: queued, starting, streaming."""
    queued: float | None = None
    loaded: float | None = None
    """Seconds that it waited for others, and for its own model's load."""
    ttft: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    token_seconds: float | None = None

    def look(self) -> None:
        """Take over how far the answer is."""
        answer = self.answer
        if answer is None:
            return
        self.phase, self.queued, self.loaded = answer.phase, answer.queued, answer.loaded
        if answer.first_byte is not None:
            self.ttft = answer.first_byte - self.arrived

    def told(self, now: float) -> dict[str, Any]:
        """For people and programs; null where it is not known (yet). `now`: by the monotonic clock."""
        self.look()
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


class Requests:
    """Those of one router."""

    def __init__(self) -> None:
        self._running: dict[Record, None] = {}
        self._ended: deque[Record] = deque(maxlen=KEPT)
        self._by_id: dict[str, Record] = {}

    def began(self, record: Record) -> None:
        """Keep it among those that run until it has `ended`."""
        self._running[record] = None
        self._by_id[record.id] = record

    def ended(self, record: Record) -> None:
        """It runs no longer; its status has been set."""
        record.look()
        record.seconds, record.answer = time.monotonic() - record.arrived, None
        del self._running[record]
        if len(self._ended) == KEPT and self._by_id.get(self._ended[0].id) is self._ended[0]:
            del self._by_id[self._ended[0].id]
        self._ended.append(record)

    def hear(self, event: Event) -> None:
        """What a worker says of a request at its end; it may come a little later than that."""
        if event.kind != "request":
            return
        record = self._by_id.get(event.data["id"])
        if record is None:
            return
        data = event.data
        record.prompt_tokens, record.cached_tokens = data["prompt_tokens"], data["cached_tokens"]
        record.completion_tokens = data["completion_tokens"]
        record.token_seconds = data["token_seconds"] or None

    def told(self, *, may_see: Callable[[str], bool]) -> dict[str, Any]:
        """All of the models that `may_see`: those that run, oldest first, and those that ended, newest first."""
        now = time.monotonic()
        return {
            "running": [record.told(now) for record in self._running if may_see(record.model)],
            "ended": [record.told(now) for record in reversed(self._ended) if may_see(record.model)],
        }

    def cancel(self, id: str) -> int:
        """End the running requests of that id, each with an error; how many there were. Raises RequestNotFound."""
        found = [record for record in self._running if record.id == id]
        for record in found:
            if record.answer is not None and record.answer.lease is not None:
                record.answer.lease.abort(Cancelled("this request was ended by an administrator"))
        if not found:
            raise RequestNotFound(f"no request '{id}' is running; GET /router/requests lists them")
        return len(found)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


__all__ = ["Record", "Requests"]

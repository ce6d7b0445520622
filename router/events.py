"""The event log: append, read since an id, follow.

Log lines, server-sent events, metrics and the web page are rendered from this one record. A ring holds the newest
events. Ids start at 1 and rise.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("router.events")


@dataclass(slots=True)
class Event:
    """One event. Immutable. `time` is wall-clock seconds, for display; the order is by `id`.

    Kinds:
        state, progress, estimate, back_off, oversized   of a worker and its load
        plan, refused                                    a decision and its figures; rejected requests
        waited, request                                  a request got its worker; it ended
        converted, prefetch, sleeping_weights            of files
        config, config_refused, listed, removed          of the list of models
        shutdown
    """

    id: int
    time: float
    kind: str
    model: str
    data: Mapping[str, Any] = field(default_factory=dict)


class EventLog:
    """A ring of the newest `size` events. `append` never blocks and never raises."""

    def __init__(self, size: int = 1000, *, first: int = 1):
        """`first`: id of the first event. It lies above the ids of an earlier run, so that a reconnected client notices
        that it missed events."""
        self._ring: deque[Event] = deque(maxlen=size)
        self._first = self._next = first
        self._changed: asyncio.Future[None] | None = None
        self._subscribers: list[Callable[[Event], None]] = []
        self._unrecorded_subscribers: list[Callable[[Event], None]] = []  # those that also get unrecorded events

    @property
    def last_id(self) -> int:
        """Id of the newest event; one less than the first id if there is none."""
        return self._next - 1

    def append(self, kind: str, model: str = "", /, **data: Any) -> Event:
        """Record one event and wake all followers."""
        event = Event(self._next, time.time(), kind, model, data)
        self._next += 1
        self._ring.append(event)
        self._call(self._subscribers, event)
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None
        return event

    def notify(self, kind: str, model: str = "", /, **data: Any) -> None:
        """Pass an unrecorded event to the subscribers: one without a place in the ring and without an id of its own.

        Every request causes such events. In the ring they would displace all others.
        """
        self._call(self._unrecorded_subscribers, Event(self._next - 1, time.time(), kind, model, data))

    @staticmethod
    def _call(subscribers: list[Callable[[Event], None]], event: Event) -> None:
        for subscriber in subscribers:
            try:
                subscriber(event)
            except Exception:
                log.exception("an event could not be rendered: %s %s", event.kind, event.model)

    def subscribe(self, subscriber: Callable[[Event], None], *, unrecorded: bool = True) -> None:
        """Call `subscriber` with every event from now on, at once and in order. It must not block; its exceptions are
        logged. `unrecorded`: also with the events of `notify`."""
        self._subscribers.append(subscriber)
        if unrecorded:
            self._unrecorded_subscribers.append(subscriber)

    def since(self, id: int) -> list[Event] | None:
        """Events after `id`, oldest first. None if some of them have left the ring or never existed."""
        oldest = self._ring[0].id if self._ring else self._first
        if not oldest - 1 <= id <= self.last_id:
            return None
        return [event for event in self._ring if event.id > id]

    async def follow(self, after: int) -> AsyncIterator[Event]:
        """Every event after the id `after`, as it is appended, without end. A follower slower than the ring misses
        events."""
        while True:
            events = self.since(after)
            if events is None:
                events = list(self._ring)
            for event in events:
                after = event.id
                yield event
            if after < self.last_id:
                continue
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._changed)

"""The event log: what happened, with ids; append, since, follow.

Everything that people and programs see of the fleet (log lines, SSE, metrics, dashboards) is rendered from this one
record. A ring holds the newest events; ids start at 1 and only rise.
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
    """One thing that happened, which nobody changes. `time` is wall-clock seconds, for people; order is by `id`.

    Kinds: `state` (a worker moved on), `progress` (a long step goes on), `plan` (a decision and its numbers),
    `request` (one has ended), `config` (presets changed), `listed` (one model did, or is new), `removed` (one is
    listed no longer), `holding` (a sleeper's weights are held, or given back), `prepared` (what could be done once for
    a model was, or not), `shutdown`.
    """

    id: int
    time: float
    kind: str
    model: str
    data: Mapping[str, Any] = field(default_factory=dict)


class EventLog:
    """A ring of the newest `size` events. Law: `append` never blocks and never raises into its caller."""

    def __init__(self, size: int = 1000, *, first: int = 1):
        """`first`: id of the first event; above all that a log of an earlier run has told, a client that comes back
        hears that it missed something."""
        self._ring: deque[Event] = deque(maxlen=size)
        self._first = self._next = first
        self._changed: asyncio.Future[None] | None = None
        self._folds: list[Callable[[Event], None]] = []
        self._also_mentioned: list[Callable[[Event], None]] = []
        """Those of them that are shown what has no place in the ring, too."""

    @property
    def last_id(self) -> int:
        """Id of the newest event; one less than the first: there was none."""
        return self._next - 1

    def append(self, kind: str, model: str = "", /, **data: Any) -> Event:
        """Record one event and wake whoever follows."""
        event = Event(self._next, time.time(), kind, model, data)
        self._next += 1
        self._ring.append(event)
        self._show(event, self._folds)
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None
        return event

    def mention(self, kind: str, model: str = "", /, **data: Any) -> None:
        """Show the folds something that is not worth a place in the ring; it has no id of its own."""
        self._show(Event(self._next - 1, time.time(), kind, model, data), self._also_mentioned)

    @staticmethod
    def _show(event: Event, folds: list[Callable[[Event], None]]) -> None:
        for fold in folds:
            try:
                fold(event)
            except Exception:
                log.exception("an event could not be rendered: %s %s", event.kind, event.model)

    def fold(self, into: Callable[[Event], None], *, mentions: bool = True) -> None:
        """Call `into` with every event from now on, at once and in order; it must not block. What it raises is
        logged. `mentions`: with what is only mentioned, too, which comes with every request."""
        self._folds.append(into)
        if mentions:
            self._also_mentioned.append(into)

    def since(self, id: int) -> list[Event] | None:
        """Events after `id`, oldest first; None if some of them have left the ring (or never were)."""
        oldest = self._ring[0].id if self._ring else self._first
        if not oldest - 1 <= id <= self.last_id:
            return None
        return [event for event in self._ring if event.id > id]

    async def follow(self, after: int) -> AsyncIterator[Event]:
        """Every event after `after`, as they come, for ever. A follower too slow for the ring misses some."""
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

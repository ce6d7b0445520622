"""Tells of requests that are turned away: of the first one at once, of a storm of them once a second and how many."""

import asyncio
from dataclasses import dataclass
from typing import Any

from router.errors import ApiError
from router.events import EventLog

PAUSE = 1.0
"""Seconds from one event to the next of the same model and reason: a storm must not push all others out of the log."""


@dataclass(slots=True)
class _Untold:
    """Since the last event of a kind."""

    count: int
    error: ApiError
    numbers: dict[str, Any]


class Refusals:
    """Those of one router."""

    def __init__(self, events: EventLog, loop: asyncio.AbstractEventLoop):
        self._events, self._loop = events, loop
        self._pauses: dict[tuple[str, str], _Untold | None] = {}
        """By model and reason, of what an event was told less than a pause ago."""

    def tell(self, model: str, error: ApiError, **numbers: Any) -> None:
        """One request for `model` hears `error`; `numbers` are what was compared."""
        kind = model, error.reason
        if kind not in self._pauses:
            self._append(kind, _Untold(1, error, numbers))
            return
        before = self._pauses[kind]
        self._pauses[kind] = _Untold(before.count + 1 if before else 1, error, numbers)

    def _append(self, kind: tuple[str, str], untold: _Untold) -> None:
        self._pauses[kind] = None
        self._loop.call_later(PAUSE, self._go_on, kind)
        model, reason = kind
        self._events.append(
            "refused",
            model,
            reason=reason,
            message=untold.error.message,
            retry_after=untold.error.retry_after,
            count=untold.count,
            **untold.numbers,
        )

    def _go_on(self, kind: tuple[str, str]) -> None:
        untold = self._pauses.pop(kind)
        if untold is not None:
            self._append(kind, untold)


__all__ = ["PAUSE", "Refusals"]

"""Tells of requests that are turned away: of the first one at once, of a storm of them once a second and how many."""

from typing import Any

from router.errors import ApiError
from router.events import EventLog

PAUSE = 1.0
"""Seconds from one event to the next of the same model and reason: a storm must not push all others out of the log."""


class Refusals:
    """Those of one router. Times are seconds of one monotonic clock."""

    def __init__(self, events: EventLog):
        self._events = events
        self._told: dict[tuple[str, str], float] = {}
        """When it was told last, by model and reason."""
        self._untold: dict[tuple[str, str], int] = {}

    def tell(self, model: str, error: ApiError, now: float, **numbers: Any) -> None:
        """One request for `model` hears `error`; `numbers` are what was compared."""
        kind = model, error.reason
        count = self._untold.get(kind, 0) + 1
        if now - self._told.get(kind, -PAUSE) < PAUSE:
            self._untold[kind] = count
            return
        self._told[kind], self._untold[kind] = now, 0
        self._events.append(
            "refused",
            model,
            reason=error.reason,
            message=error.message,
            retry_after=error.retry_after,
            count=count,
            **numbers,
        )


__all__ = ["PAUSE", "Refusals"]

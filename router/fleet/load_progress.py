"""The progress of one load: its stages, their times, and the rate of the current stage. It reads no clock."""

from math import inf
from typing import Any

from worker.protocol.events import Progress

PROGRESS_INTERVAL = 0.1  # seconds between two `progress` events of one load
# The unit of progress by stage. Other stages have no countable steps.
UNITS = {"download": "bytes", "weights": "bytes", "warmup": "tokens"}
# Share of the whole load at begin and end of each stage. A guess: weights take nearly all time.
PARTS = {"start": (0.0, 0.0), "weights": (0.0, 0.9), "warmup": (0.9, 1.0)}


def load_share(stage: str, share: float) -> float:
    """Return the share of the whole load, 0 to 1, at `share` of `stage`. A download is counted on its own."""
    begin, end = PARTS.get(stage, (0.0, 1.0))
    return begin + (end - begin) * share


class LoadProgress:
    """The stages of one load in order: download, convert, wait, start, weights, warmup. Times are arguments."""

    def __init__(self) -> None:
        self.latest: Progress | None = None  # the last report of the process in this state
        self._shown_at = -inf  # time of the last report for which an event was made
        self._stage = ""
        self._since = 0.0
        self._over: list[tuple[str, float, float]] = []  # ended stages with begin and end
        self._done = self._total = 0
        # Time and steps of the first report in this stage. The rate excludes steps that were done before.
        self._first: tuple[float, int] | None = None
        self._rate = 0.0

    def begin(self, stage: str, now: float) -> None:
        """End the current stage and begin `stage`. Without effect if it is the current one."""
        if stage == self._stage:
            return
        self.end(now)
        self._stage, self._since = stage, now
        self._done = self._total = 0
        self._first, self._rate = None, 0.0

    def update(self, stage: str, done: int, total: int, now: float) -> None:
        """Record `done` of `total` steps (0: unknown) of `stage`, and begin it if it is not the current one."""
        self.begin(stage, now)
        self._done, self._total = done, total
        at, before = self._first = self._first or (now, done)
        if now > at:
            self._rate = max(0.0, (done - before) / (now - at))

    def report(self, event: Progress, now: float) -> bool:
        """Record a report of the process. Return whether it is worth an event: for a new stage, for the end of a stage,
        or PROGRESS_INTERVAL after the last event."""
        before, self.latest = self.latest, event
        self.update(event.stage, event.done, event.total, now)
        is_same = before is not None and before.stage == event.stage
        is_end = before is not None and before.done < event.done == event.total
        if is_same and not is_end and now - self._shown_at < PROGRESS_INTERVAL:
            return False
        self._shown_at = now
        return True

    def end(self, now: float) -> None:
        """End the current stage."""
        if self._stage:
            self._over.append((self._stage, self._since, now))
        self._stage = ""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each ended stage, in order."""
        return self.between(-inf, inf)

    def between(self, since: float, until: float) -> dict[str, float]:
        """Return the seconds of each ended stage within a time range."""
        found: dict[str, float] = {}
        for stage, began, ended in self._over:
            if (seconds := min(ended, until) - max(began, since)) >= 0:
                found[stage] = found.get(stage, 0.0) + seconds
        return found

    @property
    def share(self) -> float:
        """Progress of the current stage, 0 to 1; 0 while its total is unknown."""
        return min(1.0, self._done / self._total) if self._total else 0.0

    @property
    def left(self) -> float | None:
        """Remaining seconds of the current stage at its rate so far; None if unknown."""
        return (self._total - self._done) / self._rate if self._rate and self._total else None

    def as_dict(self) -> dict[str, Any]:
        """Return the current stage as JSON values: `rate` in units per second, `eta` in seconds; None if unknown."""
        return {
            "stage": self._stage,
            "done": self._done,
            "total": self._total,
            "unit": UNITS.get(self._stage),
            "rate": round(self._rate, 1) if self._rate else None,
            "eta": round(self.left, 1) if self.left is not None else None,
        }

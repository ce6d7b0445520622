"""How far a load is: its stages, how long each took, how fast the current one goes.

Law: PURE; time is an argument, in seconds of a monotonic clock.
"""

from math import inf
from typing import Any

UNITS = {"download": "bytes", "weights": "bytes", "warmup": "tokens"}
"""What the steps of a stage are; those of the others cannot be counted."""

PARTS = {"start": (0.0, 0.0), "weights": (0.0, 0.9), "warmup": (0.9, 1.0)}
"""Of a load as a whole, from where to where each stage takes it: a guess, nearly all of it being the weights."""


def whole(stage: str, share: float) -> float:
    """Of a load, 0 to 1, that is at `share` of `stage`: never less than in the stages before. A download is apart."""
    begin, end = PARTS.get(stage, (0.0, 1.0))
    return begin + (end - begin) * share


class Stages:
    """The stages of one load, one behind another: download, wait, start, weights, warmup."""

    def __init__(self) -> None:
        self._stage = ""
        self._since = 0.0
        self._over: list[tuple[str, float, float]] = []
        """Those that are over, when they began and ended."""
        self._done = self._total = 0
        self._first: tuple[float, int] | None = None
        """When something of this stage was done first, and how much that was: what was there before took no time."""
        self._rate = 0.0

    def begin(self, stage: str, now: float) -> None:
        """The stage before is over. Nothing happens if it is this one already."""
        if stage == self._stage:
            return
        self.end(now)
        self._stage, self._since = stage, now
        self._done = self._total = 0
        self._first, self._rate = None, 0.0

    def hear(self, stage: str, done: int, total: int, now: float) -> None:
        """`done` of `total` (0: unknown) steps of `stage` are made, which begins if it has not."""
        self.begin(stage, now)
        self._done, self._total = done, total
        at, before = self._first = self._first or (now, done)
        if now > at:
            self._rate = max(0.0, (done - before) / (now - at))

    def end(self, now: float) -> None:
        """No stage is current any more."""
        if self._stage:
            self._over.append((self._stage, self._since, now))
        self._stage = ""

    @property
    def seconds(self) -> dict[str, float]:
        """How long each stage took that is over, in their order."""
        return self.between(-inf, inf)

    def between(self, since: float, until: float) -> dict[str, float]:
        """Seconds of each stage that is over, as far as they lie between two moments."""
        found: dict[str, float] = {}
        for stage, began, ended in self._over:
            if (seconds := min(ended, until) - max(began, since)) >= 0:
                found[stage] = found.get(stage, 0.0) + seconds
        return found

    @property
    def share(self) -> float:
        """Of the current stage, 0 to 1; 0 while its total is unknown."""
        return min(1.0, self._done / self._total) if self._total else 0.0

    @property
    def left(self) -> float | None:
        """Seconds of the current stage that are still to come, by its rate so far; None where that would be a guess."""
        return (self._total - self._done) / self._rate if self._rate and self._total else None

    def told(self) -> dict[str, Any]:
        """The current stage for people and programs. `rate` is in units per second and `eta` in seconds; null where
        they would be guesses."""
        return {
            "stage": self._stage,
            "done": self._done,
            "total": self._total,
            "unit": UNITS.get(self._stage),
            "rate": round(self._rate, 1) if self._rate else None,
            "eta": round(self.left, 1) if self.left is not None else None,
        }

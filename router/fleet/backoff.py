"""When a model that failed may be tried again.

    would fail the same way again     after FINAL_PAUSE; sooner if its preset or its files change, or somebody loads it
    few crashes within WINDOW         PAUSE after a failed start, at once after one that had served
    more                              a pause that doubles with each further crash, then one trial

Service for CALM seconds and a complete answer wipe the slate. Law: PURE; times are seconds of one monotonic clock.
"""

from collections import deque
from dataclasses import dataclass

PAUSE = 1.0
FINAL_PAUSE = 600.0
LONGEST_PAUSE = 300.0
WINDOW = 600.0
CALM = 60.0
SPREAD = (0.8, 1.2)
"""Pauses that grow are multiplied with something between, so that models that failed together part."""
_MOST_DOUBLINGS = 9


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a model's last worker ended in error, and until when no new one is begun by itself."""

    cause: str
    message: str
    exit: int | None
    final: bool
    at: float
    until: float
    files: object = None
    """What its files looked like, if the failure may be theirs."""


class Crashes:
    """Those of one model that count: within WINDOW, and since it last served well."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._doublings = 0

    def forget(self) -> None:
        """It has served well."""
        self._recent.clear()
        self._doublings = 0

    def pause(self, now: float, *, allowed: int, served: bool, spread: float) -> float:
        """One more, now: seconds until the next trial. `allowed`: crashes within WINDOW that cost next to nothing;
        `served`: it had been ready; `spread`: a number of SPREAD."""
        while self._recent and self._recent[0] < now - WINDOW:
            self._recent.popleft()
        if not self._recent:
            self._doublings = 0
        self._recent.append(now)
        if self._doublings or len(self._recent) > allowed:
            self._doublings = min(_MOST_DOUBLINGS, self._doublings + 1)
            return min(LONGEST_PAUSE, PAUSE * 2.0**self._doublings) * spread
        return 0.0 if served else PAUSE


__all__ = ["CALM", "FINAL_PAUSE", "LONGEST_PAUSE", "PAUSE", "SPREAD", "WINDOW", "Crashes", "Failure"]

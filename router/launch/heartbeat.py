"""Signs of life of one process: when is silence death?

Law: PURE; time is an argument, in seconds of a monotonic clock. Time in which nobody could listen counts for nothing.
"""

from dataclasses import dataclass
from typing import Literal

from worker.protocol.events import Event, Prepared, Progress, Pulse


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a process must be killed; `reason` is for a person."""

    cause: Literal["load_timeout", "stalled"]
    reason: str


class Vitals:
    """What one process has said, judged by `verdict`.

    Before `serving` it must show progress, an event that says something new, every `start_timeout` seconds (with
    `repeats_count`, any event at all), but for the time in which it stands by. After it, a pulse every
    `stall_timeout`, and within that time a step whenever something runs.
    """

    def __init__(self, now: float, *, start_timeout: float, stall_timeout: float, repeats_count: bool = False):
        self._start_timeout = start_timeout
        self._stall_timeout = stall_timeout
        self._repeats_count = repeats_count
        self._said: dict[type[Event], Event] = {}
        self._stage = ""
        self._serving = False
        self._stands_by = False
        self._progress_at = now
        self._pulse_at = now
        self._step_at = now
        self._steps = -1
        self._running = 0

    @property
    def shortest_timeout(self) -> float:
        return min(self._start_timeout, self._stall_timeout)

    def hear(self, event: Event, now: float) -> None:
        if self._repeats_count or self._said.get(type(event)) != event:
            self._progress_at = now
        self._said[type(event)] = event
        if isinstance(event, Progress):
            self._stage = f"{event.stage}, {event.done} of {event.total}" if event.total else event.stage
        if isinstance(event, Prepared):
            self._stands_by = True
        if isinstance(event, Pulse):
            self._pulse_at = now
            if event.steps != self._steps or not event.running:
                self._step_at = now
            self._steps, self._running = event.steps, event.running

    def go(self, now: float) -> None:
        """It was told to go: if it stood by, which is no silence, it does so no longer."""
        self._stands_by = False
        self._progress_at = now

    def serving(self, now: float) -> None:
        """From now on it is judged by its pulse."""
        self._serving = True
        self._pulse_at = self._step_at = now

    def excuse(self, seconds: float) -> None:
        """So long nobody listened: it does not count as silence."""
        self._progress_at += seconds
        self._pulse_at += seconds
        self._step_at += seconds

    def verdict(self, now: float) -> Verdict | None:
        if self._stands_by:
            return None
        if not self._serving:
            if now - self._progress_at < self._start_timeout:
                return None
            stage = f" (last: {self._stage})" if self._stage else ""
            return Verdict("load_timeout", f"made no progress for {self._start_timeout:g} s{stage}")
        if now - self._pulse_at >= self._stall_timeout:
            return Verdict("stalled", f"gave no pulse for {self._stall_timeout:g} s")
        if self._running and now - self._step_at >= self._stall_timeout:
            return Verdict("stalled", f"took no step for {self._stall_timeout:g} s with {self._running} running")
        return None

"""Failures and back-off: the errors of failed models, and the time at which each may be started again.

    the failure would repeat      after FINAL_PAUSE; earlier if the preset or the files change, or after a load command
    few crashes within WINDOW     PAUSE after a failed start, at once after a worker that was ready
    more crashes                  a pause that doubles with each crash, then one attempt

A worker that has been ready for CALM seconds and has completed an answer resets the count. Times are seconds of one
monotonic clock.
"""

from __future__ import annotations

import random
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.errors import ApiError, LoadBackoff, LoadFailed
from router.events import EventLog
from router.fleet.explain import RejectionLog
from router.fleet.worker import Worker
from router.launch.interface import WorkerLost
from worker.protocol.events import Exit

if TYPE_CHECKING:  # both import this module
    from router.fleet.interfaces import Files
    from router.fleet.model import Model

# All of these are guesses, in seconds.
PAUSE = 1.0
FINAL_PAUSE = 600.0
LONGEST_PAUSE = 300.0
WINDOW = 600.0
CALM = 60.0
SPREAD = (
    0.8,
    1.2,
)  # range of a random factor on growing pauses, so that models that failed together do not retry together
_MOST_DOUBLINGS = 9


@dataclass(frozen=True, slots=True)
class Failure:
    """The error of a model's last worker, and the time until which no worker is started by a request."""

    cause: str
    message: str
    exit: int | None
    final: bool
    at: float
    until: float
    files: object = None  # the state of the files at a final failure, to notice changes


class Crashes:
    """The crashes of one model within WINDOW since it last served well."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._doublings = 0

    def forget(self) -> None:
        """Reset the count after good service."""
        self._recent.clear()
        self._doublings = 0

    def pause(self, now: float, *, allowed: int, served: bool, spread: float) -> float:
        """Record a crash and return the seconds until the next attempt.

        `allowed`: crashes within WINDOW without a growing pause. `served`: the worker had been ready. `spread`: within
        SPREAD.
        """
        while self._recent and self._recent[0] < now - WINDOW:
            self._recent.popleft()
        if not self._recent:
            self._doublings = 0
        self._recent.append(now)
        if self._doublings or len(self._recent) > allowed:
            self._doublings = min(_MOST_DOUBLINGS, self._doublings + 1)
            return min(LONGEST_PAUSE, PAUSE * 2.0**self._doublings) * spread
        return 0.0 if served else PAUSE


class Failures:
    """The failure policy of a fleet. Failures are stored with their models."""

    def __init__(self, *, files: Files, events: EventLog, rejections: RejectionLog, now: Callable[[], float]):
        self._files = files
        self._events = events
        self._rejections = rejections
        self._now = now

    def check(self, model: Model) -> None:
        """Raises LoadBackoff or LoadFailed while requests may not start a worker of `model`."""
        if (refusal := self.refusal(model)) is not None:
            self._rejections.append(model.preset.id, refusal)
            raise refusal
        if model.failure is not None and self._now() < model.failure.until:
            model.failure = None  # its files have changed

    def refusal(self, model: Model) -> ApiError | None:
        """Return the error of a request for a failed model; None if the model may be started."""
        failure, now = model.failure, self._now()
        if failure is None or now >= failure.until:
            return None
        if failure.final and self._files.look(model.preset) != failure.files:
            return None
        message = f"{model.preset.id} failed: {failure.message}"
        if failure.final:
            return LoadFailed(
                f"{message} (it is not tried again before the preset or its files change, or POST /models/load)"
            )
        return LoadBackoff(f"{message}; next attempt in {failure.until - now:.0f} s", retry_after=failure.until - now)

    def remember(self, model: Model, worker: Worker) -> bool:
        """Record the end of a worker. Return True if its load failed and is not retried at once."""
        now, lost = self._now(), worker.lost
        served = worker.ready_at is not None
        is_curable = lost is not None and not served and (lost.memory != "" or lost.from_outside)
        model.failed_attempts = int(is_curable and worker.attempt == 0)
        # A worker gets SIGBUS when a file that it has mapped cannot be read or was truncated.
        if lost is not None and lost.exit in (Exit.DAMAGED, -signal.SIGBUS):
            model.maybe_damaged = True
        elif served:
            model.maybe_damaged = False
        if worker.ready_at is not None and worker.answered and now - worker.ready_at > CALM:
            model.crashes.forget()
        if lost is None and worker.refused is not None:
            model.failure = Failure("load_failed", worker.refused.message, None, final=False, at=now, until=now)
        elif lost is None:
            if worker.ready_at is not None and model.failure is not None and model.failure.at < worker.ready_at:
                model.failure = None
        elif not model.failed_attempts:
            model.failure = self._failure(model, lost, served=served)
            self._append_back_off(model.failure, worker)
        return not served and (worker.refused is not None or (lost is not None and not model.failed_attempts))

    def _failure(self, model: Model, lost: WorkerLost, *, served: bool) -> Failure:
        now, before = self._now(), model.failure
        repeated = before is not None and before.exit == lost.exit
        # The first report of damage causes a clean download. If that is damaged too, another download does not help.
        final = lost.final or (repeated and lost.exit == Exit.DAMAGED)
        if final:
            pause, files = FINAL_PAUSE, self._files.look(model.preset)
        else:
            spread = random.uniform(*SPREAD)
            pause = model.crashes.pause(now, allowed=model.preset.max_restarts, served=served, spread=spread)
            files = None
        return Failure(lost.cause, lost.message, lost.exit, final, now, now + pause, files)

    def _append_back_off(self, failure: Failure, worker: Worker) -> None:
        """Append a `back_off` event, unless the next worker may start at once."""
        pause = failure.until - self._now()
        if pause > 0:
            self._events.append(
                "back_off",
                worker.preset.id,
                worker=worker.id,
                cause=failure.cause,
                error=failure.message,
                exit_code=failure.exit,
                final=failure.final,
                seconds=round(pause, 3),
                until=round(time.time() + pause, 3),
            )


__all__ = ["CALM", "FINAL_PAUSE", "LONGEST_PAUSE", "PAUSE", "SPREAD", "WINDOW", "Crashes", "Failure", "Failures"]

"""Failures and back-off: the errors of failed models and workers, and the time at which each may be started again.

    the failure would repeat      after FINAL_PAUSE; earlier if the preset or the files change, or after a load command
    few crashes within WINDOW     PAUSE after a failed start, at once after a worker that was ready
    more crashes                  a pause that doubles with each crash, then one attempt

A worker that has been ready for CALM seconds and has completed an answer resets the count. Times are seconds of one
monotonic clock.
"""

from __future__ import annotations

import logging
import random
import signal
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.errors import ApiError, Draining, LoadBackoff, LoadFailed, Stalled, WorkerCrashed, without_name
from router.fleet.worker import Worker
from router.launch.interface import WorkerLost
from worker.protocol.events import Exit

if TYPE_CHECKING:  # both import this module
    from router.fleet.fleet import Fleet
    from router.fleet.model import Model

log = logging.getLogger("router.fleet.failures")

# All of these are guesses, in seconds.
PAUSE = 1.0
FINAL_PAUSE = 600.0
LONGEST_PAUSE = 300.0
WINDOW = 600.0
CALM = 60.0
# Range of a random factor on growing pauses, so that models that failed together do not retry together.
JITTER = (0.8, 1.2)
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

    def pause(self, now: float, *, allowed: int, served: bool, jitter: float) -> float:
        """Record a crash and return the seconds until the next attempt.

        `allowed`: crashes within WINDOW without a growing pause. `served`: the worker had been ready. `jitter`: within
        JITTER.
        """
        while self._recent and self._recent[0] < now - WINDOW:
            self._recent.popleft()
        if not self._recent:
            self._doublings = 0
        self._recent.append(now)
        if self._doublings or len(self._recent) > allowed:
            self._doublings = min(_MOST_DOUBLINGS, self._doublings + 1)
            return min(LONGEST_PAUSE, PAUSE * 2.0**self._doublings) * jitter
        return 0.0 if served else PAUSE


class Failures:
    """The failure policy of a fleet. Failures are stored with their models."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet

    def check(self, model: Model) -> None:
        """Raises LoadBackoff or LoadFailed while requests may not start a worker of `model`."""
        if (refusal := self.refusal(model)) is not None:
            self._fleet.rejections.append(model.preset.id, refusal)
            raise refusal
        if model.failure is not None and self._fleet.now() < model.failure.until:
            model.failure = None  # its files have changed

    def refusal(self, model: Model) -> ApiError | None:
        """Return the error of a request for a failed model; None if the model may be started."""
        failure, now = model.failure, self._fleet.now()
        if failure is None or now >= failure.until:
            return None
        if failure.final and self._fleet.files.fingerprint(model.preset) != failure.files:
            return None
        message = f"{model.preset.id} failed: {without_name(model.preset.id, failure.message)}"
        if failure.final:
            return LoadFailed(
                f"{message} (it is not tried again before the preset or its files change, or POST /models/load)"
            )
        return LoadBackoff(f"{message}; next attempt in {failure.until - now:.0f} s", retry_after=failure.until - now)

    def remember(self, model: Model, worker: Worker) -> bool:
        """Record the end of a worker. Return True if its load failed and is not retried at once."""
        now, lost = self._fleet.now(), worker.lost
        served = worker.ready_at is not None
        is_retryable = lost is not None and not served and (lost.memory != "" or lost.from_outside)
        model.failed_attempts = int(is_retryable and worker.attempt == 0)
        # A worker gets SIGBUS when a file that it has mapped cannot be read or was truncated.
        if lost is not None and lost.exit in (Exit.DAMAGED, -signal.SIGBUS):
            model.maybe_damaged = True
        elif served:
            model.maybe_damaged = False
        if worker.ready_at is not None and worker.usage.has_answered and now - worker.ready_at > CALM:
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
        now, before = self._fleet.now(), model.failure
        repeated = before is not None and before.exit == lost.exit
        # The first report of damage causes a clean download. If that is damaged too, another download does not help.
        final = lost.final or (repeated and lost.exit == Exit.DAMAGED)
        if final:
            pause, files = FINAL_PAUSE, self._fleet.files.fingerprint(model.preset)
        else:
            jitter = random.uniform(*JITTER)
            pause = model.crashes.pause(now, allowed=model.preset.max_restarts, served=served, jitter=jitter)
            files = None
        return Failure(lost.cause, lost.message, lost.exit, final, now, now + pause, files)

    def _append_back_off(self, failure: Failure, worker: Worker) -> None:
        """Append a `back_off` event, unless the next worker may start at once."""
        pause = failure.until - self._fleet.now()
        if pause > 0:
            self._fleet.events.append(
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


# The errors of leases


class NextWorker(Exception):
    """This worker has ended, and its leases move to the model's next worker."""


def error_of_retirement(worker: Worker) -> ApiError | NextWorker:
    """Return the error of leases that wait for a worker which was retired before it was ready."""
    if worker.reason == "config_changed":
        return NextWorker()  # a worker with the new settings
    if worker.reason == "shutdown":
        return Draining("the router is shutting down", retry_after=5)
    return Draining(f"{worker.preset.id} was unloaded while it was loading; try again", retry_after=1)


def with_retry_time(error: LoadBackoff, failure: Failure, now: float) -> ApiError:
    """Return `error` with the time of the next attempt; a LoadFailed if there is none."""
    if failure.final:
        return LoadFailed(error.message)
    return LoadBackoff(error.message, retry_after=failure.until - now)


def error_after_loss(worker: Worker, fleet: Fleet, lost: WorkerLost) -> ApiError | NextWorker:
    """Return the error of leases that wait for a lost worker."""
    name = worker.preset.id
    why = without_name(name, lost.message)
    if lost.memory and worker.costs is not None:
        raised = fleet.learned_estimates.record_out_of_memory(worker.costs.key, worker.costs.estimate, lost.memory)
        when = "while loading" if worker.ready_at is None else "in service"
        log.warning("%s ran out of %s memory %s; its estimate is raised", worker, lost.memory, when)
        if worker.attempt == 0:
            return NextWorker()
        needs = sum(raised.shards)
        return LoadBackoff(
            f"{name} ran out of {lost.memory} memory while loading, twice; it is now expected to need "
            f"{needs / 2**20:.0f} MiB. Lower kv-tokens, parallel or ctx-size, or free memory: {why}",
            retry_after=1,
        )
    if lost.final:
        return LoadFailed.of(name, why)
    if lost.from_outside and worker.attempt == 0 and worker.ready_at is None:
        log.warning("%s: %s; its requests wait for another worker", worker, lost.message)
        return NextWorker()
    return LoadBackoff(f"{name} failed to load: {why}", retry_after=1)


def lost_error(worker: Worker) -> ApiError:
    """Return the error of a request whose worker was lost while it ran."""
    lost, name = worker.lost, worker.preset.id
    if lost is None:
        return WorkerCrashed(f"{name}: the connection to its worker broke; try again")
    why = without_name(name, lost.message)
    if lost.cause == "stalled":
        return Stalled(f"{name} stopped making progress and was killed: {why}")
    return WorkerCrashed(f"{name}: its worker exited during the response: {why}; try again")

"""Models that failed: what the end of one life means for the next, and what requests hear until one may begin."""

import random
import signal
import time
from collections.abc import Callable

from router.errors import ApiError, LoadBackoff, LoadFailed
from router.events import EventLog
from router.fleet import backoff
from router.fleet.backoff import Failure
from router.fleet.interfaces import Files
from router.fleet.model import Model
from router.fleet.rejection_log import Refusals
from router.fleet.worker import Worker
from router.launch.interface import WorkerLost
from worker.protocol.exits import Exit


class Failures:
    """Those of one fleet's models, each of which stands with its model."""

    def __init__(self, *, files: Files, events: EventLog, refusals: Refusals, now: Callable[[], float]):
        self._files = files
        self._events = events
        self._refusals = refusals
        self._now = now

    def check(self, model: Model) -> None:
        """Raises LoadBackoff, LoadFailed, as long as no life of it may begin by itself."""
        if (refusal := self.refusal(model)) is not None:
            self._refusals.tell(model.preset.id, refusal)
            raise refusal
        if model.failure is not None and self._now() < model.failure.until:
            model.failure = None  # its files have changed

    def refusal(self, model: Model) -> ApiError | None:
        """What a request hears whose model has failed; None: it may be tried again."""
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
        """What this end means for the model's next life; whether it was not even loaded, and is not tried
        again at once."""
        now, lost = self._now(), worker.lost
        served = worker.ready_at is not None
        is_curable = lost is not None and not served and (lost.memory != "" or lost.from_outside)
        model.cut_short = int(is_curable and worker.attempt == 0)
        if lost is not None and lost.exit in (Exit.DAMAGED, -signal.SIGBUS):
            model.doubtful = True
        elif served:
            model.doubtful = False
        if worker.ready_at is not None and worker.answered and now - worker.ready_at > backoff.CALM:
            model.crashes.forget()
        if lost is None and worker.refused is not None:
            model.failure = Failure("load_failed", worker.refused.message, None, final=False, at=now, until=now)
        elif lost is None:
            if worker.ready_at is not None and model.failure is not None and model.failure.at < worker.ready_at:
                model.failure = None
        elif not model.cut_short:
            model.failure = self._failure(model, lost, served=served)
            self._tell_pause(model.failure, worker)
        return not served and (worker.refused is not None or (lost is not None and not model.cut_short))

    def _failure(self, model: Model, lost: WorkerLost, *, served: bool) -> Failure:
        now, before = self._now(), model.failure
        again = before is not None and before.exit == lost.exit
        final = lost.final or (again and lost.exit == Exit.DAMAGED)  # one clean refetch may help, and did not
        if final:
            pause, files = backoff.FINAL_PAUSE, self._files.look(model.preset)
        else:
            spread = random.uniform(*backoff.SPREAD)
            pause = model.crashes.pause(now, allowed=model.preset.max_restarts, served=served, spread=spread)
            files = None
        return Failure(lost.cause, lost.message, lost.exit, final, now, now + pause, files)

    def _tell_pause(self, failure: Failure, worker: Worker) -> None:
        """Why and until when no further life of the model begins by itself; nothing if one may begin at once."""
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

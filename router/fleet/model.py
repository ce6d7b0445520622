"""What the fleet knows of one preset, whether or not it has workers; and when it wants a further one.

The oldest open worker of a model is a need, all further ones are copies: luxuries, which begin where memory is free,
make room for anybody's need, and end when they idle. If the need leaves, the oldest copy takes its place.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from router.config.presets import Preset
from router.fleet.backoff import Crashes, Failure
from router.fleet.sleeping_weights import Holding, Wish
from router.fleet.state import State
from router.fleet.worker import Worker

COPY_PAUSE = 15.0
"""Seconds until a further copy is thought of again after one found no room, or failed."""
WEIGHT = 0.2
"""Of the latest in a mean of how long requests take."""
SECONDS = 5.0
"""That a load is thought to take before there was any."""
PAUSES, FEWEST_PAUSES = 8, 4
"""So many of the latest pauses, but not fewer than those, say how soon a model is asked for again."""
SOON = 0.25
"""Its clients count on it after a pause if that was so short in this share of all."""


@dataclass(slots=True)
class Model:
    """One preset and its workers. Times are seconds of the fleet's clock."""

    preset: Preset
    created: int
    """When it was first listed, in whole seconds of wall-clock time."""
    workers: list[Worker] = field(default_factory=list)
    """All that are not stopped, the newest last."""
    failure: Failure | None = None
    crashes: Crashes = field(default_factory=Crashes)
    cut_short: int = 0
    """How many lives in a row ended before they were ready, by what one more may cure (`Worker.attempt`): 0 or 1."""
    doubtful: bool = False
    """Its files may be damaged: its last worker found them so, or could not read what it had mapped of them."""
    reason: str = ""
    """Why its last worker ended."""
    since: float | None = None
    """When its last worker ended."""
    holding: Holding | None = None
    """Its weights in main memory, without a worker or while one is being loaded: without one, the model sleeps."""
    company_is_called: bool = False
    """Its companions were begun since it became ready; not once more before it has gone."""
    wish: Wish | None = None
    """Its last worker has just left room: what might be held from now on."""
    no_copy_before: float = 0.0
    asked: float = -inf
    """When it was last asked for."""
    spell: float = -inf
    """Since when it has been in use, with no pause as long as `replica-idle-seconds`."""
    left: float | None = None
    """When the last of its requests ended; None while one runs."""
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=PAUSES))
    """Seconds from the end of its last request to the next one, whether it was still here or not."""
    load_seconds: float | None = None
    """What its last load took."""
    request_seconds: float | None = None
    """What a request holds a ready worker for, about."""

    @property
    def open(self) -> Worker | None:
        """The worker that takes the next lease: of those that are ready the least loaded, else the oldest."""
        ours = self.all_open
        return min(ours, key=_load, default=None) if len(ours) != 1 else ours[0]

    @property
    def all_open(self) -> list[Worker]:
        """Those that may take leases, the oldest first."""
        return [worker for worker in self.workers if worker.open]

    @property
    def shown(self) -> Worker | None:
        """The worker that its status is read off: the open one, else the last that still drains or stops."""
        return self.open or (self.workers[-1] if self.workers else None)

    @property
    def sleeps(self) -> bool:
        """Whether its weights are held, and nothing else of it is here."""
        return self.holding is not None and not self.workers and not self.holding.released.is_set()

    @property
    def leases(self) -> int:
        """Requests that hold any of its workers."""
        return sum(len(worker.leases) for worker in self.workers)

    @property
    def request_interval(self) -> float | None:
        """The pause that one in four is not longer than; None: not known yet."""
        if len(self.pauses) < FEWEST_PAUSES:
            return None
        return sorted(self.pauses)[int(SOON * (len(self.pauses) - 1))]

    def wants_copy(self, now: float) -> bool:
        """Whether a further worker is to begin, if there is room: one at a time, up to the least number of `replicas`
        while the model is in use, and to the most while each has more to do than `parallel`. Nothing begins by itself
        of a model that idles, whatever becomes of its copies."""
        least, most = self.preset.replicas
        if most == 1 or now < self.no_copy_before:
            return False
        if not self.leases and now - self.asked >= self.preset.replica_idle:
            return False
        ours = self.all_open
        if not 0 < len(ours) < most or any(worker.state is not State.READY for worker in ours):
            return False
        return len(ours) < least or self.is_crowded

    @property
    def is_crowded(self) -> bool:
        """Whether each of its workers has more to do than `parallel`."""
        return all(len(worker.leases) > self.preset.parallel for worker in self.all_open)

    def wished(self, now: float) -> float:
        """Since when there has been the wish for one more worker: that for the least number is as old as its use is.
        So of two models that cannot both have theirs one has it for good, and they do not take it from each other."""
        return now if self.is_crowded else self.spell

    def surplus(self) -> list[Worker]:
        """Copies beyond the least number, the newest first: they end when they idle."""
        return self.all_open[: self.preset.replicas[0] - 1 : -1]

    def promote(self) -> None:
        """Somebody must be the need: the oldest that is open."""
        ours = self.all_open
        if ours and all(worker.best_effort for worker in ours):
            ours[0].best_effort = False

    def took(self, seconds: float) -> None:
        """One request held a ready worker for so long."""
        before = self.request_seconds
        self.request_seconds = seconds if before is None else before + WEIGHT * (seconds - before)

    def asked_at(self, now: float) -> None:
        """Somebody asks for it."""
        if self.asked == -inf or (self.left is not None and now - self.asked >= self.preset.replica_idle):
            self.spell = now
        self.asked = now
        if self.left is not None:
            self.pauses.append(now - self.left)
            self.left = None

    def expected_load(self) -> float:
        """Seconds of its next load, from its history."""
        worker = self.open
        known = worker.costs.load_seconds if worker is not None and worker.costs is not None else 0.0
        return known or self.load_seconds or SECONDS


def _load(worker: Worker) -> tuple[bool, int, bool, int]:
    return worker.state is not State.READY, len(worker.leases), worker.best_effort, worker.id


__all__ = ["COPY_PAUSE", "Model"]

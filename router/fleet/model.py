"""The models of the fleet: each with its preset, workers and failures, and the changes of the list by new presets.

The oldest open worker of a model is required. All further workers are replicas. They are best-effort: they start where
memory is free, are evicted for any demand, and exit when idle. If the required worker exits, the oldest replica becomes
the required one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from router.config.presets import Preset, same_load
from router.errors import ApiError
from router.fleet.failures import Crashes, Failure
from router.fleet.sleeping_weights import SleepingWeights, SleepRequest
from router.fleet.worker import State, Worker

if TYPE_CHECKING:  # it imports this module
    from router.fleet.fleet import Fleet

# All of these are guesses.
REPLICA_PAUSE = 15.0  # seconds without a new replica after one found no room, or failed
MEAN_WEIGHT = 0.2  # weight of the latest request in the moving mean of request durations
FIRST_LOAD_SECONDS = 5.0  # expected duration of a load before any was measured
PAUSES, FEWEST_PAUSES = 8, 4  # number of recent pauses between requests that are kept, and needed for a prediction
RETURN_QUANTILE = 0.25  # a model comes back within the pause that this share of its recent pauses does not exceed


@dataclass(slots=True)
class Model:
    """One preset and its workers. Times are seconds of the fleet's clock."""

    preset: Preset
    workers: list[Worker] = field(default_factory=list)  # all running workers, the newest last
    failure: Failure | None = None
    crashes: Crashes = field(default_factory=Crashes)
    failed_attempts: int = 0  # consecutive workers that failed before ready in a way that a retry may cure: 0 or 1
    ran_out_of_memory: bool = False  # the last worker did: the next one gets the least KV cache of its range
    maybe_damaged: bool = False  # the last worker found damaged files: a download verifies them before the next load
    reason: str = ""  # of the last worker's end
    since: float | None = None  # when the last worker ended
    sleeping: SleepingWeights | None = None  # also while a new worker loads them
    sleep_request: SleepRequest | None = None  # of a worker that has just ended; decided at the next plan
    has_prefetched: bool = False  # the models under `prefetch` were started since this one became ready
    no_replica_before: float = 0.0
    last_request: float = -inf
    in_use_since: float = -inf  # start of the use that had no pause of `replica-idle-seconds`
    idle_since: float | None = None  # None while a request runs
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=PAUSES))  # seconds between requests
    load_seconds: float | None = None  # of the last load
    request_seconds: float | None = None  # moving mean of the time for which a request leases a ready worker

    @property
    def open(self) -> Worker | None:
        """The worker for the next lease: the least loaded of the ready ones, else the oldest."""
        workers = self.all_open
        return min(workers, key=_load_order, default=None) if len(workers) != 1 else workers[0]

    @property
    def all_open(self) -> list[Worker]:
        """Workers that may take leases, the oldest first."""
        return [worker for worker in self.workers if worker.open]

    @property
    def shown(self) -> Worker | None:
        """The worker whose status is shown for the model: the open one, else the last that is stopping."""
        return self.open or (self.workers[-1] if self.workers else None)

    @property
    def sleeps(self) -> bool:
        """The model has sleeping weights and no worker."""
        return self.sleeping is not None and not self.workers and not self.sleeping.released.is_set()

    @property
    def is_ready(self) -> bool:
        return any(worker.state is State.READY for worker in self.workers)

    @property
    def leases(self) -> int:
        return sum(len(worker.leases) for worker in self.workers)

    @property
    def request_interval(self) -> float | None:
        """Seconds of idleness after which the next request is expected; None if unknown."""
        if len(self.pauses) < FEWEST_PAUSES:
            return None
        return sorted(self.pauses)[int(RETURN_QUANTILE * (len(self.pauses) - 1))]

    def wants_replica(self, now: float) -> bool:
        """One more worker should start if there is room.

        The minimum of `replicas` is kept while the model is in use. The maximum is used while each worker has more
        requests than one step has sequences. Replicas start one at a time, and none starts for an idle model.
        """
        least, most = self.preset.replicas
        if most == 1 or now < self.no_replica_before:
            return False
        if not self.leases and now - self.last_request >= self.preset.replica_idle:
            return False
        workers = self.all_open
        if not 0 < len(workers) < most or any(worker.state is not State.READY for worker in workers):
            return False
        return len(workers) < least or self.is_crowded

    @property
    def is_crowded(self) -> bool:
        """Each worker has more requests than one step has sequences."""
        return all(len(worker.leases) > worker.rows for worker in self.all_open)

    def wanted_since(self, now: float) -> float:
        """Return the time since which a replica is wanted.

        For the minimum of `replicas` it is the start of the model's use. With the present time, two models that cannot
        both have their minimum would evict each other's replica in turn.
        """
        return now if self.is_crowded else self.in_use_since

    def excess_replicas(self) -> list[Worker]:
        """Return replicas beyond the minimum, the newest first. They exit when idle."""
        return self.all_open[: self.preset.replicas[0] - 1 : -1]  # from the end down to the first beyond the minimum

    def promote(self) -> None:
        """Make the oldest open worker the required one if there is none."""
        workers = self.all_open
        if workers and all(worker.best_effort for worker in workers):
            workers[0].best_effort = False

    def request_ended(self, seconds: float) -> None:
        """Record that a request has leased a ready worker for `seconds`."""
        before = self.request_seconds
        self.request_seconds = seconds if before is None else before + MEAN_WEIGHT * (seconds - before)

    def request_arrived(self, now: float) -> None:
        idle_long = self.idle_since is not None and now - self.last_request >= self.preset.replica_idle
        if self.last_request == -inf or idle_long:
            self.in_use_since = now
        self.last_request = now
        if self.idle_since is not None:
            self.pauses.append(now - self.idle_since)
            self.idle_since = None

    def expected_load(self) -> float:
        """Return the expected seconds of the next load."""
        worker = self.open
        known = worker.costs.load_seconds if worker is not None and worker.costs is not None else 0.0
        return known or self.load_seconds or FIRST_LOAD_SECONDS


def _load_order(worker: Worker) -> tuple[bool, int, bool, int]:
    return worker.state is not State.READY, len(worker.leases), worker.best_effort, worker.id


class ModelList(dict[str, Model]):
    """All models by id. Presets add, change and remove them."""

    def __init__(self, fleet: Fleet, presets: Mapping[str, Preset]):
        super().__init__()
        self._fleet = fleet
        for preset in presets.values():
            self.add(preset)

    def add(self, preset: Preset) -> None:
        self[preset.id] = Model(preset)

    def apply(self, presets: Mapping[str, Preset]) -> None:
        """Replace all presets: add new models, change others, and remove those that have no preset any more."""
        for id in [id for id in self if id not in presets]:
            self.remove(id, "config_changed")
        for id, preset in presets.items():
            if id not in self:
                self.add(preset)
            elif preset != self[id].preset:
                self._change(self[id], preset)
        self._fleet.scheduler.plan_soon()

    def remove(self, id: str, reason: str) -> list[Worker]:
        """Remove a model. Return its workers, which drain and stop."""
        fleet, model = self._fleet, self.pop(id)
        fleet.sleeping_weights.release_model(model, reason)
        workers = list(model.workers)
        for worker in workers:
            fleet.retire(worker, reason, drain=fleet.settings.drain_timeout)
        if not workers:
            fleet.events.append("removed", id)
        return workers

    def _change(self, model: Model, preset: Preset) -> None:
        """Apply a preset. Workers are retired if the new settings need another load."""
        fleet, applies_to_workers = self._fleet, same_load(preset, model.preset)
        model.preset = preset
        if applies_to_workers:
            for worker in model.workers:
                worker.preset = preset
            return
        fleet.sleeping_weights.release_model(model, "config_changed")
        model.failure, model.failed_attempts = None, 0
        model.crashes.forget()
        before = model.open
        for worker in list(model.workers):
            fleet.retire(worker, "config_changed", drain=fleet.settings.drain_timeout)
        if before is not None and (preset.pin or (before.leases and before.state < State.READY)):
            with suppress(ApiError):  # the queue may be full; then the next request loads it
                fleet.ensure_loaded(preset.id)

    # Prefetch

    def to_prefetch(self, model: Model) -> list[Model]:
        """Return the models under `prefetch` that have files here, no worker and no failure."""
        found = [self._by_name(name) for name in model.preset.prefetch]
        return [
            other for other in found if other is not None and not other.workers and other.failure is None
            and other is not model and self._fleet.files.find(other.preset) is not None
        ]  # fmt: skip

    def _by_name(self, name: str) -> Model | None:
        return self.get(name) or next((model for model in self.values() if name in model.preset.aliases), None)

    def has_ready_worker(self, model: Model) -> bool:
        """A listed model is in use: a worker is ready that was not itself started by a prefetch."""
        is_listed = self.get(model.preset.id) is model
        return is_listed and any(worker.state is State.READY and not worker.prefetched for worker in model.workers)

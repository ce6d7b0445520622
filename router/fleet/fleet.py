"""The fleet: all models and workers, and the leases that connect them.

A request leases a worker of its model. The fleet begins workers and retires them; the scheduler decides which of them
get memory, and worker lifecycles carry that out.
"""

import asyncio
import logging
from collections.abc import Mapping
from itertools import count

from router.config.presets import Preset
from router.config.settings import Settings
from router.errors import AlreadyRunning, Draining, ModelNotFound, ModelNotLoaded, NotRunning
from router.events import EventLog
from router.fleet.admission import AdmissionQueue, Lease
from router.fleet.explain import RejectionLog
from router.fleet.failures import Failure, Failures
from router.fleet.lifecycle import end, run
from router.fleet.model import REPLICA_PAUSE, Model, ModelList
from router.fleet.prefetch import Prefetcher
from router.fleet.scheduler import FleetScheduler
from router.fleet.sleeping_weights import AllSleepingWeights, SleepingWeights
from router.fleet.worker import State, Worker, append_state
from router.launch.interface import Launcher
from router.launch.process import tasks_of
from router.memory.learned import LearnedEstimates
from router.planner.ledger import Ledger
from router.store.snapshots import Snapshots

log = logging.getLogger("router.fleet.fleet")

# Seconds from the end of a worker's last request to the next plan, if no demand waits. A guess.
IDLE_LOOK = 0.05


class Fleet:
    """All models and workers. No method awaits between reading state and recording a decision that depends on it."""

    def __init__(
        self,
        *,
        launcher: Launcher,
        learned_estimates: LearnedEstimates,
        events: EventLog,
        files: Snapshots,
        ledger: Ledger,
        settings: Settings,
        presets: Mapping[str, Preset],
    ):
        self._loop = asyncio.get_running_loop()
        self.launcher = launcher
        self.learned_estimates = learned_estimates
        self.events = events
        self.files = files
        self.settings = settings
        self.closing = False
        self.running: dict[int, Worker] = {}  # all that are not stopped, those of removed models included; oldest first
        self.loads: dict[asyncio.Task[None], Lease] = {}  # leases of load commands, which are not requests
        self.tasks: set[asyncio.Task[None]] = set()  # of worker lifecycles and sleeping weights
        self.ids = count(1)  # of workers and sleeping weights
        self.models = ModelList(self, presets)
        self.rejections = RejectionLog(events, self._loop)
        self.failures = Failures(self)
        self.queue = AdmissionQueue(self)
        self.prefetcher = Prefetcher(self)
        self.sleeping_weights = AllSleepingWeights(self)
        self.scheduler = FleetScheduler(self, ledger)

    def now(self) -> float:
        return self._loop.time()

    def workers(self) -> list[Worker]:
        """Return all workers that are not stopped, oldest first, those of removed models included."""
        return list(self.running.values())

    def model(self, id: str) -> Model:
        """Raises ModelNotFound."""
        try:
            return self.models[id]
        except KeyError:
            raise ModelNotFound(f"model '{id}' not found") from None

    # Leases

    def lease(self, id: str, *, autoload: bool | None = None) -> Lease:
        """Lease a worker of model `id` for a `with` block; `await lease.ready()` waits until it is ready.

        Starts a worker if the model has none that is open. Raises ModelNotFound, ModelNotLoaded, QueueFull,
        LoadBackoff, LoadFailed, Draining.
        """
        model = self.model(id)
        worker = model.open
        if autoload is None:
            autoload = model.preset.autoload if model.preset.autoload is not None else self.settings.models_autoload
        self._check_open()
        if not autoload and not model.sleeps and (worker is None or worker.state is State.DOWNLOADING):
            raise ModelNotLoaded(f"model '{id}' is not loaded; load it with POST /models/load or turn autoload on")
        self.queue.admit(model, worker)
        if worker is None:
            self.failures.check(model)
            worker = self._begin(model)
            if presets := [other.preset for other in self.models.to_prefetch(model)]:
                self.prefetcher.read_files(presets, self.scheduler.observe())
        return self._take(worker)

    def _check_open(self) -> None:
        if self.closing:
            raise Draining("the router is shutting down", retry_after=5)

    def _take(self, worker: Worker) -> Lease:
        now, model = self.now(), worker.model
        lease = Lease(self, worker, now)
        worker.leases.add(lease)
        model.request_arrived(now)
        if worker.best_effort:
            model.promote()  # a prefetched worker becomes required with its first request
        self._consider_replica(model, now)
        return lease

    def give_back(self, lease: Lease) -> None:
        """End a lease."""
        worker = lease.worker
        worker.leases.discard(lease)
        worker.leases_changed.set()
        model, now = lease.model, self.now()
        if worker.state is State.READY:
            worker.usage.last_used = now
            model.request_ended(now - max(lease.arrived, worker.ready_at or 0.0))
        if worker.leases:
            return
        if not model.leases:
            model.idle_since = now
        # If all workers are ready, one plan after IDLE_LOOK serves many requests that end until then: it only finds the
        # time at which idle workers expire.
        at_once = worker.retired or worker.usage.keep_alive == 0 or model.preset.replicas[1] > 1
        at_once = at_once or worker.state is not State.READY
        if at_once or any(other.state is not State.READY for other in self.running.values()):
            self.scheduler.plan_soon()
        else:
            self.scheduler.plan_within(IDLE_LOOK)

    def move(self, lease: Lease) -> None:
        """Move a lease to the model's next worker; start one if needed. Raises ApiError if that is not possible."""
        model, worker = lease.model, lease.model.open
        lease.worker.leases.discard(lease)
        lease.worker.leases_changed.set()
        if worker is None:
            self._check_open()
            if self.models.get(model.preset.id) is not model:
                raise ModelNotFound(f"model '{model.preset.id}' was removed while it was loading")
            self.failures.check(model)
            worker = self._begin(model)
        lease.worker = worker
        worker.leases.add(lease)

    # Workers

    def usable_snapshot(self, model: Model) -> str | None:
        """The folder of a model's files; None if they must be downloaded first."""
        # A download verifies the files that are here, so a model with damaged files is downloaded again.
        if model.maybe_damaged and self.files.can_download_again(model.preset):
            return None
        return self.files.find(model.preset)

    def _begin(self, model: Model, *, best_effort: bool = False) -> Worker:
        snapshot = self.usable_snapshot(model)
        is_here = snapshot is not None and not self.files.must_convert(model.preset, snapshot)
        state = State.QUEUED if is_here else State.DOWNLOADING
        worker = Worker(next(self.ids), model, state, self.now(), best_effort=best_effort)
        model.workers.append(worker)
        self.running[worker.id] = worker
        append_state(worker, self.events, was=None)
        worker.task = self._loop.create_task(run(worker, self), name=str(worker))
        self.tasks.add(worker.task)
        worker.task.add_done_callback(lambda task: self._task_over(worker, task))
        return worker

    def _task_over(self, worker: Worker, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not worker.stopped.is_set():  # cancelled before its first step
            end(worker, self, None)

    def record_end(self, worker: Worker) -> Failure | None:
        """Record the end of a worker, before its leases get the outcome. Return the failure of its model, if any."""
        del self.running[worker.id]
        model = worker.model
        model.workers.remove(worker)
        if worker.best_effort:
            model.no_replica_before = self.now() + REPLICA_PAUSE
        else:
            model.reason, model.since = worker.reason, self.now()
            if self.failures.remember(model, worker):
                self.sleeping_weights.release_model(model, "load_failed")  # its next load would fail, too
        model.ran_out_of_memory = worker.lost is not None and worker.lost.memory != ""
        model.load_seconds = worker.load_seconds or model.load_seconds
        if self.settings.sleep_memory and not model.workers and not self.closing:
            model.sleep_request = worker.sleep_request(self.files.weights(worker.snapshot))
        model.promote()
        if not model.workers:
            model.has_prefetched = False
            if worker.preset.id not in self.models:
                self.events.append("removed", worker.preset.id)
        return model.failure

    def retire(self, worker: Worker, reason: str, *, drain: float | None, made_room_for: str = "") -> None:
        """Drain and stop a worker: no new leases; running requests are aborted after `drain` seconds (None: never).

        A worker that is not ready yet is stopped at once.
        """
        if worker.state > State.READY:
            return  # it is stopping already; the first reason stays
        deadline = None if drain is None else self.now() + drain
        if worker.retired:
            if deadline is not None and (worker.retirement.deadline is None or deadline < worker.retirement.deadline):
                worker.retirement.deadline = deadline
                worker.leases_changed.set()
            return
        worker.reason = reason
        worker.retirement.since, worker.retirement.deadline = self.now(), deadline
        worker.retirement.made_room_for = made_room_for
        worker.retirement.began.set()
        worker.leases_changed.set()
        if worker.id in self.running:
            if worker.best_effort:
                worker.model.no_replica_before = self.now() + REPLICA_PAUSE
            worker.model.promote()
        if worker.state < State.READY and worker.task is not None:
            worker.task.cancel()
        elif worker.leases:
            append_state(worker, self.events, was=None, draining=True, active=len(worker.leases), reason=reason)
        self.scheduler.plan_soon()

    def replace(self, worker: Worker) -> None:
        """Drain a ready worker whose process runs but does not accept connections."""
        log.warning("%s does not accept connections at its socket; it is replaced", worker)
        self.retire(worker, "unreachable", drain=self.settings.drain_timeout)
        worker.ended.set()

    def replace_oversized(self, worker: Worker) -> None:
        """Stop an idle worker that keeps memory beyond its reservation. The next request starts a new one."""
        if worker.retired or worker.pulse is None:
            return
        figures = {"resident": worker.pulse.resident, "reserved": worker.host_use.usual}
        self.events.append("oversized", worker.preset.id, worker=worker.id, **figures)
        log.warning(
            "%s keeps %d MiB of main memory, %d MiB were reserved; it is replaced",
            worker, figures["resident"] >> 20, figures["reserved"] >> 20,
        )  # fmt: skip
        self.retire(worker, "oversized", drain=self.settings.drain_timeout)

    # Best-effort workers

    def update_replicas(self) -> None:
        """Mark replicas that exit when idle, and queue replicas that are wanted."""
        for model in self._models_with_workers():
            if model.preset.replicas[1] == 1 and len(model.workers) <= 1:
                continue
            excess = model.excess_replicas()
            for worker in model.workers:
                worker.is_excess = worker in excess
            self._consider_replica(model, self.now())

    def _consider_replica(self, model: Model, now: float) -> None:
        """Queue a replica of a model if its load calls for one. It is best-effort: dropped unless it fits at once."""
        if not self.closing and model.wants_replica(now) and self.models.get(model.preset.id) is model:
            since = model.wanted_since(now)
            self._begin(model, best_effort=True).wanted_since = since

    def start_prefetched(self) -> None:
        """Queue best-effort workers for the models under `prefetch` of each model that has become ready."""
        for model in self._models_with_workers():
            if model.preset.prefetch and not model.has_prefetched and self.models.has_ready_worker(model):
                model.has_prefetched = True
                for other in self.models.to_prefetch(model):
                    self._begin(other, best_effort=True).prefetched = True

    def _models_with_workers(self) -> list[Model]:
        """Return models with workers, removed ones included. Few, even where thousands of models are listed."""
        return list({id(worker.model): worker.model for worker in self.running.values()}.values())

    # Explicit control

    def load(self, id: str) -> asyncio.Task[None]:
        """Start the model without a request. Raises AlreadyRunning, ModelNotFound, QueueFull, Draining."""
        model = self.model(id)
        if model.open is not None or model.sleeps:
            raise AlreadyRunning(f"model '{id}' is already running")
        return self.ensure_loaded(id)

    def ensure_loaded(self, id: str) -> asyncio.Task[None]:
        """Return a task that leases model `id` until it is ready. Its outcome is that of the load.

        A back-off is ignored. Raises ModelNotFound, QueueFull, Draining.
        """
        model = self.model(id)
        self._check_open()
        worker = model.open
        if worker is None:
            self.queue.admit_to_wait(model)
            model.failure = None
            worker = self._begin(model)
        lease = self._take(worker)
        task = self._loop.create_task(_wait_until_ready(lease), name=f"load {id}")
        self.loads[task] = lease
        task.add_done_callback(self._load_over)
        return task

    def _load_over(self, task: asyncio.Task[None]) -> None:
        self.give_back(self.loads.pop(task))
        if not task.cancelled():
            task.exception()  # mark it as read: the caller may not await the task

    async def load_queued(self, id: str) -> None:
        """As `load`; return once the model is downloading, queued on a reliable estimate, or starting.

        Raises the errors of the load that are known by then: DoesNotFit, LoadFailed, LoadBackoff.
        """
        task = self.load(id)
        worker = self.model(id).open
        if worker is None or worker.state is State.DOWNLOADING:
            return
        async with tasks_of(worker.queue.considered.wait()) as (considered,):
            await asyncio.wait({considered, task}, return_when=asyncio.FIRST_COMPLETED)
        if worker.stopped.is_set() and not task.done():
            # The task gets the outcome in a later pass of the event loop. It has none yet if its lease moves to another
            # worker.
            await asyncio.wait([task], timeout=1.0)
        if task.done():
            task.result()

    def fetch(self, id: str) -> Worker:
        """Download the files of `id` without loading it. Raises ModelNotFound, Draining."""
        model = self.model(id)
        self._check_open()
        model.failure = None
        worker = model.open or self._begin(model)
        worker.fetch_only = True
        return worker

    def unload(self, id: str, *, force: bool = False) -> list[Worker | SleepingWeights]:
        """Retire all workers of `id`, release its sleeping weights, and return both. Raises NotRunning,
        ModelNotFound."""
        model = self.model(id)
        workers = list(model.workers)
        ending = [worker.retired and worker.retirement.deadline is not None for worker in workers]
        sleeping = [] if model.sleeping is None else [model.sleeping]
        if all(ending) and not (workers and force) and not model.sleeps:
            raise NotRunning(f"model '{id}' is not running")
        self.sleeping_weights.release_model(model, "requested")
        for worker in workers:
            self.retire(worker, "requested", drain=0.0 if force else self.settings.drain_timeout)
        return [*workers, *sleeping]

    async def close(self, *, force: bool = False) -> None:
        """Retire all workers and wait until their processes are reaped. `force` aborts requests at once."""
        self.closing = True
        for weights in self.sleeping_weights.all.values():
            weights.release("shutdown")
        self.prefetcher.cancel()
        for worker in self.workers():
            self.retire(worker, "shutdown", drain=0.0 if force else self.settings.drain_timeout)
            if force:
                worker.abort_leases(Draining("the router is shutting down; the answer was cut", retry_after=5))
        await self.scheduler.close()
        while left := {*self.tasks, *self.loads, *self.prefetcher.tasks}:
            await asyncio.wait(left)


async def _wait_until_ready(lease: Lease) -> None:
    await lease.ready()

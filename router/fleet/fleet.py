"""The fleet: all models and workers, their leases, and the plans that start and evict them.

A request leases a worker. `arrange` collects all residents and demands, calls the planner, and records its plan; worker
lifecycles carry it out. It runs at most once per pass of the event loop, whenever an input of the plan changes: a
demand arrives, a worker becomes idle, ready or stopped, a device reading changes, or a point in time is reached.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

from router.config.presets import Preset, same_load
from router.errors import (
    AlreadyRunning,
    ApiError,
    Draining,
    LoadFailed,
    ModelNotFound,
    ModelNotLoaded,
    NotRunning,
    QueueTimeout,
)  # fmt: skip
from router.events import EventLog
from router.fleet import early_start
from router.fleet.admission import AdmissionQueue, Lease, Limits
from router.fleet.early_start import Phase
from router.fleet.explain import RejectionLog, does_not_fit, evicted, numbers, preview, refused, shortages
from router.fleet.failures import Failure, Failures
from router.fleet.interfaces import Files
from router.fleet.lifecycle import end, run, take_place
from router.fleet.load_cost import weigh
from router.fleet.model import REPLICA_PAUSE, Model
from router.fleet.prefetch import Prefetcher
from router.fleet.sleeping_weights import Sleepers, SleepingWeights
from router.fleet.worker import State, Worker, append_state
from router.launch.interface import Launcher
from router.memory.checkpoint_facts import EstimateError
from router.memory.learned import LearnedEstimates
from router.planner import planner
from router.planner.ledger import HOST, LOCAL, SLOTS, Device, DeviceId, Ledger, Reading, Resident
from router.planner.types import Eviction, Plan, Policy, Start

log = logging.getLogger("router.fleet.fleet")

MIB = 1 << 20
# Seconds from the end of a worker's last request to the next plan, if no demand waits. A guess.
IDLE_LOOK = 0.05
# Seconds between two plans for each queued worker beyond FEW_WAITING. A plan takes about a tenth of that per queued
# worker (benchmarks/scheduler.md), so a long queue leaves the event loop to the requests that are served.
PLAN_PAUSE = 0.001
FEW_WAITING = 4
PLAN_AGAIN = 1.0  # seconds until a plan that raised an exception is made again
MOST_FAILED_PLANS = 10  # in a row, after which the fleet is reported as broken


class Fleet:
    """All models and workers. No method awaits between reading state and recording a decision that depends on it."""

    def __init__(
        self,
        *,
        launcher: Launcher,
        calibration: LearnedEstimates,
        events: EventLog,
        files: Files,
        ledger: Ledger,
        limits: Limits,
        presets: Mapping[str, Preset],
    ):
        self._loop = asyncio.get_running_loop()
        self.launcher = launcher
        self.calibration = calibration
        self.events = events
        self.rejections = RejectionLog(events, self._loop)
        self.files = files
        self.limits = limits
        self.models: dict[str, Model] = {}
        self.devices: list[Device] = []
        self.closing = False
        self.broken = asyncio.Event()  # MOST_FAILED_PLANS plans in a row have failed
        self.last_plan: Plan | None = None
        self.breaches: Counter[DeviceId] = Counter()  # readings with less free memory than the margin
        self._readings: Sequence[Reading] = ()
        self._planned_at, self._planned_for = 0.0, 0  # time and queue length of the last plan
        self._is_fresh = False  # the devices were read for the next plan
        self._looking: asyncio.Task[None] | None = None
        self._ledger = ledger
        self._ids = count(1)
        self._arranging = False
        self._failed_plans = 0
        self._timer: asyncio.TimerHandle | None = None
        self._running: dict[int, Worker] = {}  # all that are not stopped, those of removed models included
        self._model_by_worker: dict[int, Model] = {}
        self._prefetcher = Prefetcher(launcher, files, self._in_queue)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sleepers = Sleepers(
            launcher=launcher,
            events=events,
            budget=limits.sleep_memory,
            ids=self._ids,
            tasks=self._tasks,
            now=self.now,
            changed=self.changed,
        )
        self._loads: dict[asyncio.Task[None], Lease] = {}  # leases of load commands, which are not requests
        self._failures = Failures(files=files, events=events, rejections=self.rejections, now=self.now)
        self._queue = AdmissionQueue(
            running=self._running,
            model_by_worker=self._model_by_worker,
            loads=self._loads.values(),
            limits=limits,
            rejections=self.rejections,
            now=self.now,
        )
        self._reported_waits: dict[int, str] = {}  # by worker: the cause in its last `plan` event
        for preset in presets.values():
            self.models[preset.id] = Model(preset, int(time.time()))

    # The lifecycles' view of the fleet (interfaces.World)

    def now(self) -> float:
        return self._loop.time()

    def changed(self) -> None:
        if self._arranging:
            return
        self._arranging = True
        pause = self._planned_at + PLAN_PAUSE * (self._planned_for - FEW_WAITING) - self.now()
        if pause > 0:
            self._loop.call_later(pause, self._arrange_soon)
        else:
            self._loop.call_soon(self._arrange_soon)

    def min_residency(self, preset: Preset) -> float:
        return preset.min_residency if preset.min_residency >= 0 else min(10.0, self.limits.patience)

    def capacities(self) -> dict[DeviceId, int]:
        devices = {device.id: device for device in self._ledger.observe(self.launcher.readings(), self._residents())}
        return {id: devices[device.pool or id].capacity for id, device in devices.items()}

    def never_fits(self, worker: Worker) -> bool:
        if not self.limits.memory:
            return False
        assert worker.costs is not None
        floor = replace(worker.demand(), shards=worker.costs.estimate.weights, host=0, is_exact=True)
        devices = self._ledger.observe(self.launcher.readings(), self._residents())
        return floor.id in planner.plan([floor], [], devices, self.now(), self._policy()).refuse

    # Leases

    def model(self, id: str) -> Model:
        """Raises ModelNotFound."""
        try:
            return self.models[id]
        except KeyError:
            raise ModelNotFound(f"model '{id}' not found") from None

    def lease(self, id: str, *, autoload: bool | None = None) -> Lease:
        """Lease a worker of model `id` for a `with` block; `await lease.ready()` waits until it is ready.

        Starts a worker if the model has none that is open. Raises ModelNotFound, ModelNotLoaded, QueueFull,
        LoadBackoff, LoadFailed, Draining.
        """
        model = self.model(id)
        worker = model.open
        if autoload is None:
            autoload = model.preset.autoload if model.preset.autoload is not None else self.limits.autoload
        if self.closing:
            raise Draining("the router is shutting down", retry_after=5)
        if not autoload and not model.sleeps and (worker is None or worker.state is State.DOWNLOADING):
            raise ModelNotLoaded(f"model '{id}' is not loaded; load it with POST /models/load or turn autoload on")
        self._queue.admit(model)
        if worker is None:
            self._failures.check(model)
            worker = self._begin(model)
            if presets := [other.preset for other in self._to_prefetch(model)]:
                devices = self._ledger.observe(self.launcher.readings(), self._residents())
                self._prefetcher.read_files(presets, devices)
        return self._take(model, worker)

    def _take(self, model: Model, worker: Worker) -> Lease:
        now = self.now()
        lease = Lease(self, model, worker, now)
        worker.leases.add(lease)
        model.request_arrived(now)
        if worker.best_effort:
            model.promote()  # a prefetched worker becomes required with its first request
        self._consider_replica(model, now)
        return lease

    def _consider_replica(self, model: Model, now: float) -> None:
        """Queue one more worker of a model that wants it. It is best-effort: it is dropped unless it fits at once."""
        if not self.closing and model.wants_replica(now) and self.models.get(model.preset.id) is model:
            since = model.wanted_since(now)
            self._begin(model, best_effort=True).wanted_since = since

    def _to_prefetch(self, model: Model) -> list[Model]:
        """Return the models under `prefetch` that have files here, no worker and no failure."""
        found = (self._by_name(name) for name in model.preset.prefetch)
        return [
            other for other in found if other is not None and not other.workers and other.failure is None
            and other is not model and self.files.find(other.preset) is not None
        ]  # fmt: skip

    def _by_name(self, name: str) -> Model | None:
        return self.models.get(name) or next(
            (model for model in self.models.values() if name in model.preset.aliases), None
        )

    def _start_prefetched(self) -> None:
        """Queue best-effort workers for the models under `prefetch` of each model that has become ready."""
        for model in self._models_with_workers():
            if model.preset.prefetch and not model.has_prefetched and self._is_in_use(model):
                model.has_prefetched = True
                for other in self._to_prefetch(model):
                    self._begin(other, best_effort=True).prefetched = True

    def _models_with_workers(self) -> list[Model]:
        """Return models with workers, removed ones included. Few, even where thousands of models are listed."""
        return list({id(model): model for model in self._model_by_worker.values()}.values())

    def _is_in_use(self, model: Model) -> bool:
        is_listed = self.models.get(model.preset.id) is model
        return is_listed and any(worker.state is State.READY and not worker.prefetched for worker in model.workers)

    def give_back(self, lease: Lease) -> None:
        worker = lease.worker
        worker.leases.discard(lease)
        worker.leases_changed.set()
        model, now = lease.model, self.now()
        if worker.state is State.READY:
            worker.last_used = now
            model.request_ended(now - max(lease.arrived, worker.ready_at or 0.0))
        if worker.leases:
            return
        if not model.leases:
            model.idle_since = now
        self._worker_idle(model, worker, now)

    def _worker_idle(self, model: Model, worker: Worker, now: float) -> None:
        """Request a plan. If all workers are ready, one plan after IDLE_LOOK serves many requests that end until then:
        it only finds the time at which idle workers expire."""
        at_once = worker.retired.is_set() or worker.keep_alive == 0 or model.preset.replicas[1] > 1
        if (
            at_once
            or worker.state is not State.READY
            or any(w.state is not State.READY for w in self._running.values())
        ):
            self.changed()
        elif self._timer is None:
            self._timer = self._loop.call_later(IDLE_LOOK, self.changed)
        elif self._timer.when() > (soon := now + IDLE_LOOK):
            self._timer.cancel()
            self._timer = self._loop.call_at(soon, self.changed)

    def move(self, lease: Lease) -> None:
        """Move a lease to the model's next worker; start one if needed. Raises ApiError if that is not possible."""
        model, worker = lease.model, lease.model.open
        lease.worker.leases.discard(lease)
        lease.worker.leases_changed.set()
        if worker is None:
            if self.closing:
                raise Draining("the router is shutting down", retry_after=5)
            if self.models.get(model.preset.id) is not model:
                raise ModelNotFound(f"model '{model.preset.id}' was removed while it was loading")
            self._failures.check(model)
            worker = self._begin(model)
        lease.worker = worker
        worker.leases.add(lease)

    def eta(self, model: Model) -> float:
        """Return the seconds until a request for `model` is expected to run."""
        return self._queue.eta(model)

    def turnover(self, id: str) -> float:
        """Return the seconds until a request of the model is expected to end. Raises ModelNotFound."""
        return self._queue.turnover(self.model(id))

    def queue_timeout(self, worker: Worker) -> QueueTimeout:
        waits = f" ({worker.waits_for})" if worker.waits_for else ""
        others = ", ".join(
            f"{device.foreign >> 20} MiB of {device.id}"
            for device in self.devices
            if device.id in worker.devices and device.foreign >= MIB
        )
        held = f"; other programs hold {others}" if others and worker.waits_for == "memory" else ""
        error = QueueTimeout(
            f"{worker.preset.id} waited {self.limits.queue_timeout:g} s for memory{waits}{held}; try again later",
            retry_after=self.eta(self.models.get(worker.preset.id) or Model(worker.preset, 0)),
        )
        facts = {"cause": worker.waits_for, "position": worker.ahead + 1, "limit_seconds": self.limits.queue_timeout}
        self.rejections.append(worker.preset.id, error, **facts)
        return error

    # Workers

    def _begin(self, model: Model, *, best_effort: bool = False) -> Worker:
        # A download verifies the files that are here, so a model with damaged files is downloaded again.
        verify = model.maybe_damaged and self.files.can_download_again(model.preset)
        is_here = self.files.find(model.preset) is not None and not verify
        state = State.QUEUED if is_here else State.DOWNLOADING
        worker = Worker(
            next(self._ids), model.preset, state, self.now(), attempt=model.failed_attempts, best_effort=best_effort
        )
        worker.siblings = model.workers
        model.workers.append(worker)
        self._running[worker.id] = worker
        self._model_by_worker[worker.id] = model
        append_state(worker, self.events, was=None)
        worker.task = self._loop.create_task(run(worker, self), name=str(worker))
        self._tasks.add(worker.task)
        worker.task.add_done_callback(lambda task: self._task_over(worker, task))
        return worker

    def _task_over(self, worker: Worker, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not worker.stopped.is_set():  # cancelled before its first step
            end(worker, self, None)

    def over(self, worker: Worker) -> Failure | None:
        del self._running[worker.id]
        self._reported_waits.pop(worker.id, None)
        model = self._model_by_worker.pop(worker.id)
        model.workers.remove(worker)
        if worker.best_effort:
            model.no_replica_before = self.now() + REPLICA_PAUSE
        else:
            model.reason, model.since = worker.reason, self.now()
            if self._failures.remember(model, worker):
                self._sleepers.let_go(model, "load_failed")  # its next load would fail, too
        model.load_seconds = worker.load_seconds or model.load_seconds
        if self.limits.sleep_memory and not model.workers and not self.closing:
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
        if worker.retired.is_set():
            if deadline is not None and (worker.deadline is None or deadline < worker.deadline):
                worker.deadline = deadline
                worker.leases_changed.set()
            return
        worker.reason, worker.made_room_for, worker.deadline = reason, made_room_for, deadline
        worker.leaving_since = self.now()
        worker.retired.set()
        worker.leases_changed.set()
        if model := self._model_by_worker.get(worker.id):
            if worker.best_effort:
                model.no_replica_before = self.now() + REPLICA_PAUSE
            model.promote()
        if worker.state < State.READY and worker.task is not None:
            worker.task.cancel()
        elif worker.leases:
            append_state(worker, self.events, was=None, draining=True, active=len(worker.leases), reason=reason)
        self.changed()

    def replace(self, worker: Worker) -> None:
        """Drain a worker whose process runs but does not accept connections. See `World`."""
        log.warning("%s does not accept connections at its socket; it is replaced", worker)
        self.retire(worker, "unreachable", drain=self.limits.drain_timeout)
        worker.ended.set()

    # Explicit control

    def load(self, id: str) -> asyncio.Task[None]:
        """Start the model without a request. Raises AlreadyRunning, ModelNotFound, QueueFull, Draining."""
        model = self.model(id)
        if model.open is not None or model.sleeps:
            raise AlreadyRunning(f"model '{id}' is already running")
        return self.wanted(id)

    def wanted(self, id: str) -> asyncio.Task[None]:
        """Return a task that leases model `id` until it is ready. Its outcome is that of the load.

        A back-off is ignored. Raises ModelNotFound, QueueFull, Draining.
        """
        model = self.model(id)
        if self.closing:
            raise Draining("the router is shutting down", retry_after=5)
        worker = model.open
        if worker is None:
            self._queue.admit_to_wait(model)
            model.failure = None
            worker = self._begin(model)
        lease = self._take(model, worker)
        task = self._loop.create_task(_hold(lease), name=f"load {id}")
        self._loads[task] = lease
        task.add_done_callback(lambda done: self._load_over(done, lease))
        return task

    def _load_over(self, task: asyncio.Task[None], lease: Lease) -> None:
        del self._loads[task]
        self.give_back(lease)
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
        considered = asyncio.ensure_future(worker.considered.wait())
        either: set[asyncio.Future[Any]] = {considered, task}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            considered.cancel()
        if worker.stopped.is_set() and not task.done():
            await asyncio.wait([task], timeout=1.0)
        if task.done():
            task.result()

    def fetch(self, id: str) -> Worker:
        """Download the files of `id` without loading it. Raises ModelNotFound, Draining."""
        model = self.model(id)
        if self.closing:
            raise Draining("the router is shutting down", retry_after=5)
        model.failure = None
        worker = model.open or self._begin(model)
        worker.fetch_only = True
        return worker

    def add(self, preset: Preset) -> None:
        """Add a model that is not in the presets."""
        self.models[preset.id] = Model(preset, int(time.time()))

    def unload(self, id: str, *, force: bool = False) -> list[Worker | SleepingWeights]:
        """Retire all workers of `id`, release its sleeping weights, and return both. Raises NotRunning,
        ModelNotFound."""
        model = self.model(id)
        workers = list(model.workers)
        ending = [worker.retired.is_set() and worker.deadline is not None for worker in workers]
        sleeping = [] if model.sleeping is None else [model.sleeping]
        if all(ending) and not (workers and force) and not model.sleeps:
            raise NotRunning(f"model '{id}' is not running")
        self._sleepers.let_go(model, "requested")
        for worker in workers:
            self.retire(worker, "requested", drain=0.0 if force else self.limits.drain_timeout)
        return [*workers, *sleeping]

    def apply(self, presets: Mapping[str, Preset]) -> dict[str, list[str]]:
        """Apply new presets and retire workers of changed and removed ones. Return ids by what was done."""
        result: dict[str, list[str]] = {"added": [], "changed": [], "restarted": [], "removed": []}
        for id in [id for id in self.models if id not in presets]:
            self.remove(id, "config_changed")
            result["removed"].append(id)
        for id, preset in presets.items():
            model = self.models.get(id)
            if model is None:
                self.models[id] = Model(preset, int(time.time()))
                result["added"].append(id)
            elif preset != model.preset:
                result["changed"].append(id)
                if self._change(model, preset):
                    result["restarted"].append(id)
        self.events.append("config", "*", **result)
        self.changed()
        return result

    def remove(self, id: str, reason: str) -> list[Worker]:
        """Remove a model. Return its workers, which drain and stop."""
        model = self.models.pop(id)
        self._sleepers.let_go(model, reason)
        workers = list(model.workers)
        for worker in workers:
            self.retire(worker, reason, drain=self.limits.drain_timeout)
        if not workers:
            self.events.append("removed", id)
        return workers

    def change(self, preset: Preset) -> None:
        """Apply new settings to one model. Raises ModelNotFound."""
        model = self.model(preset.id)
        if preset != model.preset:
            self._change(model, preset)
            self.changed()

    def _change(self, model: Model, preset: Preset) -> bool:
        """Apply a preset; return True if a worker is retired because the new settings need another load."""
        applies_to_workers = same_load(preset, model.preset)
        model.preset = preset
        if applies_to_workers:
            for worker in model.workers:
                worker.preset = preset
            return False
        self._sleepers.let_go(model, "config_changed")
        model.failure, model.failed_attempts = None, 0
        model.crashes.forget()
        before = model.open
        for worker in list(model.workers):
            self.retire(worker, "config_changed", drain=self.limits.drain_timeout)
        if before is not None and (preset.pin or (before.leases and before.state < State.READY)):
            with suppress(ApiError):  # the queue may be full; then the next request loads it
                self.wanted(preset.id)
        return before is not None

    async def close(self, *, force: bool = False) -> None:
        """Retire all workers and wait until their processes are reaped. `force` aborts requests at once."""
        self.closing = True
        for weights in self.sleeping_weights:
            weights.release("shutdown")
        self._prefetcher.cancel()
        for worker in self.workers():
            self.retire(worker, "shutdown", drain=0.0 if force else self.limits.drain_timeout)
            if force:
                worker.cut(Draining("the router is shutting down; the answer was cut", retry_after=5))
        if self._timer is not None:
            self._timer.cancel()
        if self._looking is not None:
            await asyncio.wait({self._looking})
        while left := {*self._tasks, *self._loads, *self._prefetcher.tasks}:
            await asyncio.wait(left)

    # Plans

    def workers(self) -> list[Worker]:
        """Return all workers that are not stopped, oldest first, those of removed models included."""
        return list(self._running.values())

    def _residents(self) -> list[Resident]:
        models = self._model_by_worker
        workers = [worker for worker in self.workers() if worker.holds_memory]
        return [
            *(worker.resident(models[worker.id].request_interval) for worker in workers),
            *(weights.resident() for weights in self.sleeping_weights),
        ]

    def reserved(self, id: DeviceId) -> int:
        """Return the reserved bytes of a device: workers, early starts and sleeping weights."""
        return sum(resident.reserved.get(id, 0) for resident in self._residents())

    @property
    def sleeping_weights(self) -> Sequence[SleepingWeights]:
        return tuple(self._sleepers.all.values())

    def _policy(self) -> Policy:
        return Policy(patience=self.limits.patience, memory=self.limits.memory)

    def _arrange_soon(self) -> None:
        self._arranging = False
        self.arrange()

    def arrange(self) -> None:
        """Plan once. An exception is a bug: it is logged, and the plan is made again after PLAN_AGAIN."""
        try:
            self._arrange()
            self._failed_plans = 0
        except Exception:
            log.exception("internal error in a plan; it is made again in %.0f s", PLAN_AGAIN)
            self._failed_plans += 1
            if self._failed_plans == MOST_FAILED_PLANS:
                self.broken.set()
            self._timer = self._loop.call_later(PLAN_AGAIN, self.changed)

    def _arrange(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.closing:
            return
        now = self.now()
        workers = self.workers()
        # 1. Retire queued workers whose clients have disconnected, so that no eviction is made for them.
        for worker in [w for w in workers if w.state < State.STARTING and not w.leases and not w.retired.is_set()]:
            if not worker.best_effort and not (worker.fetch_only and worker.state is State.DOWNLOADING):
                self.retire(worker, "abandoned", drain=0.0)
        self._update_replicas()
        # 2. Read the devices and collect residents and demands.
        queued = self._planned_workers()
        residents = self._residents()
        readings = self.launcher.readings()
        self.devices = self._ledger.observe(readings, residents)
        if readings is not self._readings:
            self._readings = readings
            self.breaches.update(d.id for d in self.devices if d.id.index != SLOTS and d.total - d.used < d.margin)
        devices = self.cautious_devices()
        by_id = {worker.id: worker for worker in workers}
        # A demand whose exact estimate is being made is planned last, and gets no early start.
        estimated = [worker for worker in queued if not worker.refine.is_set()]
        waiting = [worker.demand() for worker in estimated]
        refining = [worker.demand() for worker in queued if worker.refine.is_set()]
        plan = planner.plan(waiting + refining, residents, devices, now, self._policy())
        self._planned_at, self._planned_for = now, len(queued)
        fresh, self._is_fresh = self._is_fresh, False
        if (plan.start or plan.evict) and not fresh:
            self._refresh_then_plan()
            return
        self.last_plan = plan
        # 3. Record the plan. Lifecycles carry it out after this method has returned.
        candidates = [worker.candidate(demand) for worker, demand in zip(estimated, waiting, strict=True)]
        decision = early_start.decide(plan, candidates, residents, devices)
        self._record(plan, by_id, queued)
        if plan.start:
            self.changed()  # started workers are residents from now on
        self._record_early_starts(decision, by_id)
        self._prefetcher.begin(plan, queued, self.devices)
        self._start_prefetched()
        if self.limits.sleep_memory:
            spare = early_start.spare(plan, waiting + refining, residents, devices)
            self._sleepers.put_to_sleep(self.models.values(), spare - sum(decision.begin.values()))
        if plan.look_again is not None:
            self._timer = self._loop.call_later(max(0.0, plan.look_again - now) + 0.001, self.changed)

    def _in_queue(self) -> list[Worker]:
        """Return queued workers, those without an estimate included."""
        return [worker for worker in self._running.values() if worker.state is State.QUEUED]

    def _planned_workers(self) -> list[Worker]:
        """Return queued workers with an estimate that wait for a place."""
        return [
            worker for worker in self.workers()
            if worker.state is State.QUEUED and worker.costs is not None
            and not (worker.retired.is_set() or worker.room.done())
        ]  # fmt: skip

    def cautious_devices(self) -> list[Device]:
        """Return the devices of the last plan, with the memory that early starts have not yet allocated in use."""
        starts = [worker.early for worker in self.workers() if worker.state is State.QUEUED]
        return early_start.cautious(self.devices, sum(start.held for start in starts if not start.is_measured))

    def _refresh_then_plan(self) -> None:
        """Read the devices, then plan again.

        Without this, a worker could start in memory that another program has taken since the last reading, or be
        evicted for memory that another program has freed.
        """

        async def look() -> None:
            try:
                await self.launcher.refresh()
            finally:  # plan even if the reading failed: demands wait
                self._is_fresh = True
                self.changed()

        if self._looking is None or self._looking.done():
            self._looking = self._loop.create_task(look(), name="refresh before a plan")

    def _update_replicas(self) -> None:
        """Mark replicas that exit when idle, and queue replicas that are wanted."""
        for model in self._models_with_workers():
            if model.preset.replicas[1] == 1 and len(model.workers) <= 1:
                continue
            excess = model.excess_replicas()
            for worker in model.workers:
                worker.is_excess = worker in excess
            self._consider_replica(model, self.now())

    def _record(self, plan: Plan, by_id: Mapping[int, Worker], queued: Sequence[Worker]) -> None:
        for id, refusal in plan.refuse.items():
            worker = by_id[id]
            if not worker.room.done():
                self._append_plan(
                    "refuse", worker, {**numbers(worker, self.devices), "shortage": shortages(refusal.devices)}
                )
                worker.room.set_exception(does_not_fit(worker, refusal))
        for worker in [by_id[id] for id in plan.drop]:
            self._append_plan("drop", worker, numbers(worker, self.devices))
            self.retire(worker, "no_room", drain=0.0)
        for id in plan.refine:
            by_id[id].refine.set()
        for id, eviction in plan.evict.items():
            if (weights := self._sleepers.all.get(id)) is not None:
                self._sleepers.release(weights, eviction.reason)
            else:
                self._evict(by_id[id], eviction, by_id, plan)
        for id, start in plan.start.items():
            self._start(by_id[id], start)
        order = sorted(queued, key=lambda worker: (worker.best_effort, -worker.preset.priority, worker.since))
        for ahead, worker in enumerate(worker for worker in order if worker.id not in plan.start):
            worker.ahead = ahead
            if worker.id not in plan.refine and worker.id not in plan.refuse and not worker.refine.is_set():
                worker.considered.set()  # a refused worker is considered when it ends, with its error
            wait = plan.waits.get(worker.id)
            if wait is not None:
                worker.waits_for, worker.waits_until = wait.cause, wait.until
                worker.waits_for_slot = bool(wait.shortage) and all(id.index == SLOTS for id in wait.shortage)
            if wait is not None and self._reported_waits.get(worker.id) != wait.cause:
                self._reported_waits[worker.id] = wait.cause
                on = [by_id[id].preset.id for id in wait.on if id in by_id]
                why = {"cause": wait.cause, "on": on, "position": ahead + 1}
                self._append_plan("wait", worker, {**why, **numbers(worker, self.devices)})

    def _record_early_starts(self, decision: early_start.Decision, by_id: Mapping[int, Worker]) -> None:
        for id in decision.end:
            by_id[id].early.advance(Phase.ENDING)
            self.changed()  # its memory counts as leaving, so the next plan may evict further victims at once
        for id, held in decision.begin.items():
            worker = by_id[id]
            if worker.retired.is_set():
                continue
            worker.reserved[DeviceId(LOCAL, HOST)] = held
            worker.early.reserve(held)
            self._append_plan("early_start", worker, numbers(worker, self.devices))

    def _start(self, worker: Worker, start: Start) -> None:
        worker.reserved = dict(start.claim)
        take_place(worker)
        worker.place = start.place
        worker.waits_for, worker.ahead, worker.progress = "", 0, None
        was, worker.state, worker.since = worker.state, State.STARTING, self.now()
        worker.considered.set()
        self._append_plan("start", worker, numbers(worker, self.devices))
        append_state(worker, self.events, was=was)
        worker.room.set_result(start)

    def _evict(self, worker: Worker, eviction: Eviction, by_id: Mapping[int, Worker], plan: Plan) -> None:
        for_worker = by_id.get(eviction.for_demand) if eviction.for_demand is not None else None
        wait = plan.waits.get(for_worker.id) if for_worker is not None else None
        limit = self.limits.evict_timeout
        why = evicted(worker, eviction, for_worker, wait, self.now())
        self._append_plan("evict", worker, {**why, **(numbers(for_worker, self.devices) if for_worker else {})})
        drain = None if limit < 0 else limit
        self.retire(worker, eviction.reason, drain=drain, made_room_for=for_worker.preset.id if for_worker else "")

    def _append_plan(self, decision: str, worker: Worker, facts: Mapping[str, Any]) -> None:
        self.events.append("plan", worker.preset.id, decision=decision, worker=worker.id, **facts)

    async def preview(self, id: str) -> dict[str, Any]:
        """Return the effect that a request for `id` would have now. Raises ApiError if its files are not usable."""
        model = self.model(id)
        worker = model.open
        if (full := self._queue.refusal(model)) is not None:
            return refused(full)
        if worker is not None and worker.state >= State.STARTING:
            return {"decision": "none", "message": f"{id} is {worker.state.name.lower()} already"}
        if worker is None and (refusal := self._failures.refusal(model)) is not None:
            return refused(refusal)
        if worker is None or worker.costs is None:
            snapshot = self.files.find(model.preset)
            if snapshot is None:
                what = "are not here yet; load it once" if worker is None else "are being downloaded"
                return {"decision": "unknown", "message": f"the files of {id} {what}"}
            worker = Worker(0, model.preset, State.QUEUED, self.now())
            worker.snapshot = self.files.loads_from(model.preset, snapshot)
            try:
                await weigh(worker, self)
            except EstimateError as unknown:
                raise LoadFailed.of(id, unknown.message) from None
        demand = replace(worker.demand(), best_effort=False)  # a requested model is required
        queue = [demand, *(other.demand() for other in self._planned_workers() if other.id != worker.id)]
        residents = self._residents()
        devices = self._ledger.observe(self.launcher.readings(), residents)
        found = planner.plan(queue, residents, devices, self.now(), self._policy())
        present: list[Worker | SleepingWeights] = [*self.workers(), *self.sleeping_weights]
        names = {resident.id: resident.preset.id for resident in present}
        return preview(demand, queue, found, names, numbers(worker, devices))


async def _hold(lease: Lease) -> None:
    await lease.ready()

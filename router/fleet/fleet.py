"""All workers: leases, the queue, arranging. The fleet decides and records; lives act.

A request leases a worker. `arrange` looks at all who are here and all who wait, asks the planner, and records its
answer; it never awaits. It runs, at most once per pass of the loop, whenever something that a plan depends on is
different: a demand joins, a worker falls idle, is ready or stopped, a reading changes, or time alone changes the
answer.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from router.fleet.admission import Queue
from router.fleet.backoff import Failure
from router.fleet.errand import Errand
from router.fleet.explain import does_not_fit, evicted, numbers, preview, refused, shortages
from router.fleet.failures import Failures
from router.fleet.interfaces import Files
from router.fleet.lease import Lease
from router.fleet.lifecycle import end, live, take
from router.fleet.limits import Limits
from router.fleet.load_cost import weigh
from router.fleet.model import COPY_PAUSE, Model
from router.fleet.prefetch import ReadingAhead
from router.fleet.rejection_log import Refusals
from router.fleet.sleep import Sleepers
from router.fleet.sleeping_weights import Holding
from router.fleet.state import State
from router.fleet.worker import Worker, tell
from router.launch.interface import Launcher
from router.memory.checkpoint_facts import EstimateError
from router.memory.learned import LearnedEstimates
from router.planner import planner
from router.planner.ledger import HOST, LOCAL, SLOTS, Device, DeviceId, Ledger, Reading, Resident
from router.planner.types import Eviction, Plan, Policy, Start

log = logging.getLogger("router.fleet.fleet")

MIB = 1 << 20
IDLE_LOOK = 0.05
"""Seconds until it is looked at when a worker that fell idle may go, where nobody wants its room."""
PLAN_PAUSE = 0.001
"""Seconds from one plan to the next, for each worker in the queue beyond a few: it is about ten times what a plan takes
(benchmarks/scheduler.md), so that with a long queue the loop is there for those who are served, too."""
FEW_WAITING = 4
PLAN_AGAIN = 1.0
"""Seconds until a plan that failed is made again."""
MOST_FAILED_PLANS = 10
"""In a row: then the fleet is broken."""


class Fleet:
    """Law: no method awaits between reading a state and writing what follows from it."""

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
        self.refusals = Refusals(events, self._loop)
        self.files = files
        self.limits = limits
        self.models: dict[str, Model] = {}
        self.devices: list[Device] = []
        self.closing = False
        self.broken = asyncio.Event()
        """Plans keep failing: nobody will start any more."""
        self.last_plan: Plan | None = None
        self.breaches: Counter[DeviceId] = Counter()
        """Readings by which less than the margin was free."""
        self._readings: Sequence[Reading] = ()
        self._planned_at, self._planned_for = 0.0, 0
        """When the last plan was made, and for how many who wait."""
        self._is_fresh = False
        """The readings were begun for the next plan."""
        self._looking: asyncio.Task[None] | None = None
        self._ledger = ledger
        self._ids = count(1)
        self._arranging = False
        self._failed_plans = 0
        self._timer: asyncio.TimerHandle | None = None
        self._alive: dict[int, Worker] = {}
        """All workers that are not stopped, those of removed models too."""
        self._homes: dict[int, Model] = {}
        self._ahead = ReadingAhead(launcher, files, self._in_queue)
        self._errands: dict[int, Errand] = {}
        """All that are not stopped."""
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
        self._loads: dict[asyncio.Task[None], Lease] = {}
        """What holds a lease and asks nothing: no request, so it takes nobody's place in a queue."""
        self._failures = Failures(files=files, events=events, refusals=self.refusals, now=self.now)
        self._queue = Queue(
            alive=self._alive,
            homes=self._homes,
            loads=self._loads.values(),
            limits=limits,
            refusals=self.refusals,
            now=self.now,
        )
        self._said: dict[int, str] = {}
        for preset in presets.values():
            self.models[preset.id] = Model(preset, int(time.time()))

    # What lives ask for (life.World)

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
        devices = {each.id: each for each in self._ledger.observe(self.launcher.readings(), self._residents())}
        return {id: devices[each.pool or id].capacity for id, each in devices.items()}

    def hopeless(self, worker: Worker) -> bool:
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
        """Hold a worker of model `id` for the length of a `with`; `await lease.ready()` waits for it.

        A model without an open worker begins a new life, if it may. Raises ModelNotFound, ModelNotLoaded, QueueFull,
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
            if prefetch := [each.preset for each in self._companions(model)]:
                devices = self._ledger.observe(self.launcher.readings(), self._residents())
                self._ahead.call(prefetch, devices)
        return self._take(model, worker)

    def _take(self, model: Model, worker: Worker) -> Lease:
        now = self.now()
        lease = Lease(self, model, worker, now)
        worker.leases.add(lease)
        model.asked_at(now)
        if worker.best_effort:
            model.promote()  # a companion is nobody's need before somebody asks for it
        self._consider_copy(model, now)
        return lease

    def _consider_copy(self, model: Model, now: float) -> None:
        """Begin a further worker of a model that wants one, if there is room at once: a luxury, which nobody awaits."""
        if not self.closing and model.wants_copy(now) and self.models.get(model.preset.id) is model:
            wished = model.wished(now)
            self._begin(model, best_effort=True).wished = wished

    def _companions(self, model: Model) -> list[Model]:
        """Those of a model's companions that are not here, and could be."""
        found = (self._by_name(name) for name in model.preset.prefetch)
        return [
            each for each in found if each is not None and not each.workers and each.failure is None
            and each is not model and self.files.find(each.preset) is not None
        ]  # fmt: skip

    def _by_name(self, name: str) -> Model | None:
        return self.models.get(name) or next(
            (model for model in self.models.values() if name in model.preset.aliases), None
        )

    def _bring_companions(self) -> None:
        """Begin the companions of who has just become ready, if there is room at once: luxuries, in nobody's way."""
        for model in self._inhabited():
            if model.preset.prefetch and not model.company_is_called and self._is_in_use(model):
                model.company_is_called = True
                for each in self._companions(model):
                    self._begin(each, best_effort=True).is_prefetch = True

    def _inhabited(self) -> list[Model]:
        """The models with workers, those that were removed too: few, however many there are."""
        return list({id(model): model for model in self._homes.values()}.values())

    def _is_in_use(self, model: Model) -> bool:
        here = self.models.get(model.preset.id) is model
        return here and any(worker.state is State.READY and not worker.is_prefetch for worker in model.workers)

    def give_back(self, lease: Lease) -> None:
        worker = lease.worker
        worker.leases.discard(lease)
        worker.stirred.set()
        model, now = lease.model, self.now()
        if worker.state is State.READY:
            worker.last_used = now
            model.took(now - max(lease.arrived, worker.ready_at or 0.0))
        if worker.leases:
            return
        if not model.leases:
            model.left = now
        self._fell_idle(model, worker, now)

    def _fell_idle(self, model: Model, worker: Worker, now: float) -> None:
        """Plan, if that could change anything now: with nobody on the way and nobody to leave it is enough to see
        before long when its time is up, however many requests come and go until then."""
        at_once = worker.retired.is_set() or worker.keep_alive == 0 or model.preset.replicas[1] > 1
        if at_once or worker.state is not State.READY or any(w.state is not State.READY for w in self._alive.values()):
            self.changed()
        elif self._timer is None:
            self._timer = self._loop.call_later(IDLE_LOOK, self.changed)
        elif self._timer.when() > (soon := now + IDLE_LOOK):
            self._timer.cancel()
            self._timer = self._loop.call_at(soon, self.changed)

    def move(self, lease: Lease) -> None:
        """Carry a lease over to the model's next life. Raises ApiError if there will be none."""
        model, worker = lease.model, lease.model.open
        lease.worker.leases.discard(lease)
        lease.worker.stirred.set()
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
        """Seconds until a request for `model` can expect its turn."""
        return self._queue.eta(model)

    def turnover(self, id: str) -> float:
        """Seconds until one of the requests of a model can be expected to end. Raises ModelNotFound."""
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
            f"{worker.preset.id} waited {self.limits.queue_timeout:g} s for room{waits}{held}; try again later",
            retry_after=self.eta(self.models.get(worker.preset.id) or Model(worker.preset, 0)),
        )
        facts = {"cause": worker.waits_for, "position": worker.ahead + 1, "limit_seconds": self.limits.queue_timeout}
        self.refusals.tell(worker.preset.id, error, **facts)
        return error

    # Lives

    def _begin(self, model: Model, *, best_effort: bool = False) -> Worker:
        is_here = self.files.find(model.preset) is not None and not (
            model.doubtful and self.files.can_download_again(model.preset)  # a download looks at what is here
        )
        state = State.QUEUED if is_here else State.DOWNLOADING
        worker = Worker(
            next(self._ids), model.preset, state, self.now(), attempt=model.cut_short, best_effort=best_effort
        )
        worker.family = model.workers
        model.workers.append(worker)
        self._alive[worker.id] = worker
        self._homes[worker.id] = model
        tell(worker, self.events, was=None)
        worker.task = self._loop.create_task(live(worker, self), name=str(worker))
        self._tasks.add(worker.task)
        worker.task.add_done_callback(lambda task: self._task_over(worker, task))
        return worker

    def _task_over(self, worker: Worker, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not worker.stopped.is_set():  # cancelled before its first step
            end(worker, self, None)

    def over(self, worker: Worker) -> Failure | None:
        del self._alive[worker.id]
        self._said.pop(worker.id, None)
        model = self._homes.pop(worker.id)
        model.workers.remove(worker)
        if worker.best_effort:
            model.no_copy_before = self.now() + COPY_PAUSE
        else:
            model.reason, model.since = worker.reason, self.now()
            if self._failures.remember(model, worker):
                self._sleepers.let_go(model, "load_failed")  # it cannot be woken
        model.load_seconds = worker.load_seconds or model.load_seconds
        if self.limits.sleep_memory and not model.workers and not self.closing:
            model.wish = worker.wish(self.files.weights(worker.snapshot))
        model.promote()
        if not model.workers:
            model.company_is_called = False
            if worker.preset.id not in self.models:
                self.events.append("removed", worker.preset.id)
        return model.failure

    def retire(self, worker: Worker, reason: str, *, drain: float | None, made_room_for: str = "") -> None:
        """Take no new leases; running ones end, or are cut after `drain` seconds (None: never).

        A worker that is not ready yet is stopped at once.
        """
        if worker.state > State.READY:
            return  # it is leaving already, and why stands
        deadline = None if drain is None else self.now() + drain
        if worker.retired.is_set():
            if deadline is not None and (worker.deadline is None or deadline < worker.deadline):
                worker.deadline = deadline
                worker.stirred.set()
            return
        worker.reason, worker.made_room_for, worker.deadline = reason, made_room_for, deadline
        worker.leaving_since = self.now()
        worker.retired.set()
        worker.stirred.set()
        if model := self._homes.get(worker.id):
            if worker.best_effort:
                model.no_copy_before = self.now() + COPY_PAUSE
            model.promote()
        if worker.state < State.READY and worker.task is not None:
            worker.task.cancel()
        elif worker.leases:
            tell(worker, self.events, was=None, draining=True, active=len(worker.leases), reason=reason)
        self.changed()

    def replace(self, worker: Worker) -> None:
        """See `World`."""
        log.warning("%s lives, and nobody listens at its socket; another one takes its place", worker)
        self.retire(worker, "unreachable", drain=self.limits.drain_timeout)
        worker.ended.set()

    # Explicit control

    def load(self, id: str) -> asyncio.Task[None]:
        """Queue a load like a request that asks nothing. Raises AlreadyRunning, ModelNotFound, QueueFull, Draining."""
        model = self.model(id)
        if model.open is not None or model.sleeps:
            raise AlreadyRunning(f"model '{id}' is already running")
        return self.wanted(id)

    def wanted(self, id: str) -> asyncio.Task[None]:
        """A task that holds a lease on `id` until it is ready; its outcome is that of the load.

        What failed before is tried again at once. Raises ModelNotFound, QueueFull, Draining.
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
            task.exception()  # whoever asked has heard it, or did not care to

    async def load_queued(self, id: str) -> None:
        """Like `load`; returns once the model is downloading, in the queue or starting.

        Raises what a load raises that can be told by then: DoesNotFit, LoadFailed, LoadBackoff.
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
        """Bring the files of `id`, which are not here, without loading it. Raises ModelNotFound, Draining."""
        model = self.model(id)
        if self.closing:
            raise Draining("the router is shutting down", retry_after=5)
        model.failure = None
        worker = model.open or self._begin(model)
        worker.fetches = True
        return worker

    def add(self, preset: Preset) -> None:
        """One more model, beside those that are applied."""
        self.models[preset.id] = Model(preset, int(time.time()))

    def unload(self, id: str, *, force: bool = False) -> list[Worker | Holding]:
        """Retire all workers of `id`, let its weights go if it sleeps, and return them. Raises NotRunning,
        ModelNotFound."""
        model = self.model(id)
        workers = list(model.workers)
        ending = [worker.retired.is_set() and worker.deadline is not None for worker in workers]
        holdings = [] if model.holding is None else [model.holding]
        if all(ending) and not (workers and force) and not model.sleeps:
            raise NotRunning(f"model '{id}' is not running")
        self._sleepers.let_go(model, "requested")
        for worker in workers:
            self.retire(worker, "requested", drain=0.0 if force else self.limits.drain_timeout)
        return [*workers, *holdings]

    def apply(self, presets: Mapping[str, Preset]) -> dict[str, list[str]]:
        """Take over new presets: changed and removed ones retire. Returns ids by what became of them."""
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
        """Strike a model off; its workers, which drain and stop."""
        model = self.models.pop(id)
        self._sleepers.let_go(model, reason)
        workers = list(model.workers)
        for worker in workers:
            self.retire(worker, reason, drain=self.limits.drain_timeout)
        if not workers:
            self.events.append("removed", id)
        return workers

    def change(self, preset: Preset) -> None:
        """One model has other settings from now on. Raises ModelNotFound."""
        model = self.model(preset.id)
        if preset != model.preset:
            self._change(model, preset)
            self.changed()

    def _change(self, model: Model, preset: Preset) -> bool:
        """Whether a worker must make room for one with the new settings."""
        live = same_load(preset, model.preset)
        model.preset = preset
        if live:
            for worker in model.workers:
                worker.preset = preset
            return False
        self._sleepers.let_go(model, "config_changed")
        model.failure, model.cut_short = None, 0
        model.crashes.forget()
        worker_ = model.open
        for each in list(model.workers):
            self.retire(each, "config_changed", drain=self.limits.drain_timeout)
        if worker_ is not None and (preset.pin or (worker_.leases and worker_.state < State.READY)):
            with suppress(ApiError):  # nobody may wait any more: it is loaded by its next request
                self.wanted(preset.id)
        return worker_ is not None

    async def close(self, *, force: bool = False) -> None:
        """Retire everybody; returns once all their processes are reaped. A second call with `force` cuts at once."""
        self.closing = True
        for holding in self.holdings:
            holding.release("shutdown")
        self._ahead.cancel()
        for worker in self.workers():
            self.retire(worker, "shutdown", drain=0.0 if force else self.limits.drain_timeout)
            if force:
                worker.cut(Draining("the router is shutting down; the answer was cut", retry_after=5))
        if self._timer is not None:
            self._timer.cancel()
        if self._looking is not None:
            await asyncio.wait({self._looking})
        while left := {*self._tasks, *self._loads, *self._ahead.tasks}:
            await asyncio.wait(left)

    # Arranging

    def workers(self) -> list[Worker]:
        """All that are not stopped, oldest first; those of removed models too."""
        return list(self._alive.values())

    def _residents(self) -> list[Resident]:
        homes = self._homes
        return [
            *(each.resident(homes[each.id].request_interval) for each in self.workers() if each.state.holds_memory),
            *(worker.standby() for worker in self.workers() if worker.state is State.QUEUED and worker.standing.held),
            *(holding.resident() for holding in self._sleepers.holdings.values()),
            *(errand.resident() for errand in self._errands.values()),
        ]

    def reserved(self, id: DeviceId) -> int:
        """Bytes of a device that are set aside for what is ours: workers, standbys, errands, weights of those who
        sleep."""
        return sum(one.reserved.get(id, 0) for one in self._residents())

    @contextmanager
    def errand(self, preset: Preset, size: int) -> Iterator[Errand]:
        """Charge main memory with `size` bytes for what is done in the block, which is to end once they are wanted."""
        errand = Errand(next(self._ids), preset, size, self.now())
        self._errands[errand.id] = errand
        self.changed()
        try:
            yield errand
        finally:
            del self._errands[errand.id]
            self.changed()

    @property
    def holdings(self) -> Sequence[Holding]:
        return tuple(self._sleepers.holdings.values())

    def _policy(self) -> Policy:
        return Policy(patience=self.limits.patience, memory=self.limits.memory)

    def _arrange_soon(self) -> None:
        self._arranging = False
        self.arrange()

    def arrange(self) -> None:
        """Look, plan, record; never awaits. What fails here is our own fault: it is told, and tried again soon."""
        try:
            self._arrange()
            self._failed_plans = 0
        except Exception:
            log.exception("a plan failed in the router; it is made again in %.0f s", PLAN_AGAIN)
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
        for worker in [w for w in workers if w.state < State.STARTING and not w.leases and not w.retired.is_set()]:
            if not worker.best_effort and not (worker.fetches and worker.state is State.DOWNLOADING):
                self.retire(worker, "abandoned", drain=0.0)
        self._mark_surplus()
        queued = self._in_line()
        residents = self._residents()
        readings = self.launcher.readings()
        self.devices = self._ledger.observe(readings, residents)
        if readings is not self._readings:
            self._readings = readings
            self.breaches.update(d.id for d in self.devices if d.id.index != SLOTS and d.total - d.used < d.margin)
        devices = self.cautious_devices()
        by_id = {worker.id: worker for worker in workers}
        weighed = [worker for worker in queued if not worker.refine.is_set()]
        waiting = [worker.demand() for worker in weighed]
        refining = [worker.demand() for worker in queued if worker.refine.is_set()]
        plan = planner.plan(waiting + refining, residents, devices, now, self._policy())
        self._planned_at, self._planned_for = now, len(queued)
        fresh, self._is_fresh = self._is_fresh, False
        if (plan.start or plan.evict) and not fresh:
            self._look()
            return
        self.last_plan = plan
        candidates = [worker.candidate(demand) for worker, demand in zip(weighed, waiting, strict=True)]
        decision = early_start.decide(plan, candidates, residents, devices)
        self._record(plan, by_id, queued)
        if plan.start:
            self.changed()  # who starts is a resident from now on, and counts as one
        self._stand_by(decision, by_id)
        self._ahead.begin(plan, queued, self.devices)
        self._bring_companions()
        if self.limits.sleep_memory:
            spare = early_start.spare(plan, waiting + refining, residents, devices)
            self._sleepers.put_to_sleep(self.models.values(), spare - sum(decision.begin.values()))
        if plan.look_again is not None:
            self._timer = self._loop.call_later(max(0.0, plan.look_again - now) + 0.001, self.changed)

    def _in_queue(self) -> list[Worker]:
        """Those who wait for room, or for what they would cost."""
        return [worker for worker in self._alive.values() if worker.state is State.QUEUED]

    def _in_line(self) -> list[Worker]:
        """Those who wait for room, and whose costs are known."""
        return [
            worker for worker in self.workers()
            if worker.state is State.QUEUED and worker.costs is not None
            and not (worker.retired.is_set() or worker.room.done())
        ]  # fmt: skip

    def cautious_devices(self) -> list[Device]:
        """The devices as they were read for the last plan, as if nothing of what standbys may still take were used."""
        standings = [worker.standing for worker in self.workers() if worker.state is State.QUEUED]
        return early_start.cautious(self.devices, sum(each.held for each in standings if not each.is_prepared))

    def _look(self) -> None:
        """Read the devices, then plan again: nobody starts in memory that another program has taken by now, nor leaves
        for memory that it has given back."""

        async def look() -> None:
            try:
                await self.launcher.refresh()
            finally:  # whatever became of it: somebody waits
                self._is_fresh = True
                self.changed()

        if self._looking is None or self._looking.done():
            self._looking = self._loop.create_task(look(), name="a look before a plan is carried out")

    def _mark_surplus(self) -> None:
        """Say which copies end when they idle, and begin those that are wanted."""
        for model in self._inhabited():
            if model.preset.replicas[1] == 1 and len(model.workers) <= 1:
                continue
            surplus = model.surplus()
            for worker in model.workers:
                worker.surplus = worker in surplus
            self._consider_copy(model, self.now())

    def _record(self, plan: Plan, by_id: Mapping[int, Worker], queued: Sequence[Worker]) -> None:
        for id, refusal in plan.refuse.items():
            worker = by_id[id]
            if not worker.room.done():
                self._tell_plan(
                    "refuse", worker, {**numbers(worker, self.devices), "shortage": shortages(refusal.devices)}
                )
                worker.room.set_exception(does_not_fit(worker, refusal))
        for worker in [by_id[id] for id in plan.drop]:
            self._tell_plan("drop", worker, numbers(worker, self.devices))
            self.retire(worker, "no_room", drain=0.0)
        for id in plan.refine:
            by_id[id].refine.set()
        for id, eviction in plan.evict.items():
            if (holding := self._sleepers.holdings.get(id)) is not None:
                self._sleepers.release(holding, eviction.reason)
            elif (errand := self._errands.get(id)) is not None:
                errand.released.set()
                self.changed()  # likewise in nobody's way
            else:
                self._evict(by_id[id], eviction, by_id, plan)
        for id, start in plan.start.items():
            self._start(by_id[id], start)
        order = sorted(queued, key=lambda worker: (worker.best_effort, -worker.preset.priority, worker.since))
        for ahead, worker in enumerate(worker for worker in order if worker.id not in plan.start):
            worker.ahead = ahead
            if worker.id not in plan.refine and worker.id not in plan.refuse and not worker.refine.is_set():
                worker.considered.set()  # of one refused its end says so, once everybody who waits can hear why
            wait = plan.waits.get(worker.id)
            if wait is not None:
                worker.waits_for, worker.waits_until = wait.cause, wait.until
                worker.waits_for_slot = bool(wait.shortage) and all(id.index == SLOTS for id in wait.shortage)
            if wait is not None and self._said.get(worker.id) != wait.cause:
                self._said[worker.id] = wait.cause
                on = [by_id[id].preset.id for id in wait.on if id in by_id]
                why = {"cause": wait.cause, "on": on, "position": ahead + 1}
                self._tell_plan("wait", worker, {**why, **numbers(worker, self.devices)})

    def _stand_by(self, decision: early_start.Decision, by_id: Mapping[int, Worker]) -> None:
        for id in decision.end:
            by_id[id].standing.dismissed.set()
            self.changed()  # whoever waits for its end can have others leave meanwhile
        for id, held in decision.begin.items():
            worker = by_id[id]
            if worker.retired.is_set():
                continue
            worker.reserved[DeviceId(LOCAL, HOST)] = worker.standing.held = held
            worker.standing.wanted.set()
            self._tell_plan("prepare", worker, numbers(worker, self.devices))

    def _start(self, worker: Worker, start: Start) -> None:
        worker.reserved = dict(start.claim)
        take(worker)
        worker.place = start.place
        worker.waits_for, worker.ahead, worker.progress = "", 0, None
        was, worker.state, worker.since = worker.state, State.STARTING, self.now()
        worker.considered.set()
        self._tell_plan("start", worker, numbers(worker, self.devices))
        tell(worker, self.events, was=was)
        worker.room.set_result(start)

    def _evict(self, worker: Worker, eviction: Eviction, by_id: Mapping[int, Worker], plan: Plan) -> None:
        asker = by_id.get(eviction.for_demand) if eviction.for_demand is not None else None
        wait = plan.waits.get(asker.id) if asker is not None else None
        limit = self.limits.evict_timeout
        why = evicted(worker, eviction, asker, wait, self.now())
        self._tell_plan("evict", worker, {**why, **(numbers(asker, self.devices) if asker else {})})
        drain = None if limit < 0 else limit
        self.retire(worker, eviction.reason, drain=drain, made_room_for=asker.preset.id if asker else "")

    def _tell_plan(self, decision: str, worker: Worker, facts: Mapping[str, Any]) -> None:
        self.events.append("plan", worker.preset.id, decision=decision, worker=worker.id, **facts)

    async def preview(self, id: str) -> dict[str, Any]:
        """What would become of a request for `id` now; changes nothing. Raises ApiError if its files are not usable."""
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
                what = "are not here yet; load it once" if worker is None else "are being fetched"
                return {"decision": "unknown", "message": f"the files of {id} {what}"}
            worker = Worker(0, model.preset, State.QUEUED, self.now())
            worker.snapshot = self.files.loads_from(model.preset, snapshot)
            try:
                await weigh(worker, self)
            except EstimateError as unknown:
                raise LoadFailed.of(id, unknown.message) from None
        demand = replace(worker.demand(), best_effort=False)  # whoever is asked for is a need
        line = [demand, *(each.demand() for each in self._in_line() if each.id != worker.id)]
        residents = self._residents()
        devices = self._ledger.observe(self.launcher.readings(), residents)
        found = planner.plan(line, residents, devices, self.now(), self._policy())
        here: list[Worker | Holding | Errand] = [*self.workers(), *self.holdings, *self._errands.values()]
        names = {each.id: each.preset.id for each in here}
        return preview(demand, line, found, names, numbers(worker, devices))


async def _hold(lease: Lease) -> None:
    await lease.ready()

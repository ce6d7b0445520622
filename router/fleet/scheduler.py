"""The scheduler: collects residents and demands, calls the planner, and records its plan.

A plan is made at most once per pass of the event loop, whenever one of its inputs changes: a demand arrives, a worker
becomes idle, ready or stopped, a device reading changes, or a point in time is reached. Worker lifecycles carry the
recorded plan out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from router.errors import LoadFailed
from router.fleet import early_start
from router.fleet.early_start import Candidate, Decision, Phase
from router.fleet.explain import PlanInputs, does_not_fit, evicted, preview, refused, shortages
from router.fleet.load_cost import estimate_costs
from router.fleet.worker import State, Worker, enter, kv_cache
from router.memory.checkpoint_facts import EstimateError
from router.memory.estimate import prepared_bytes
from router.planner.ledger import HOST, MAIN_MEMORY, WORKER_SLOTS, Device, DeviceId, Ledger, Reading, Resident
from router.planner.planner import plan, queue_order
from router.planner.types import Demand, Eviction, Plan, Policy, Start
from worker.protocol.argv import ENGINES

if TYPE_CHECKING:  # it imports this module
    from router.fleet.fleet import Fleet

log = logging.getLogger("router.fleet.scheduler")

# Seconds between two plans for each queued worker beyond FEW_WAITING. A plan takes about a tenth of that per queued
# worker (benchmarks/scheduler.md), so a long queue leaves the event loop to the requests that are served.
PLAN_PAUSE = 0.001
FEW_WAITING = 4
PLAN_AGAIN = 1.0  # seconds until a plan that raised an exception is made again
# Largest headroom that workers share: a quarter of the default margin, from which all but the first take it if several
# workers announce it at once.
MOST_SHARED_HEADROOM = 256 << 20
MOST_FAILED_PLANS = 10  # in a row, after which the fleet is reported as broken


class FleetScheduler:
    """The planning pass of one fleet. It does not await between reading the state and recording the plan."""

    def __init__(self, fleet: Fleet, ledger: Ledger):
        self.devices: list[Device] = []  # of the last plan
        self.last_plan: Plan | None = None
        self.breaches: Counter[DeviceId] = Counter()  # readings with less free memory than the margin
        self.broken = asyncio.Event()  # MOST_FAILED_PLANS plans in a row have failed
        self._fleet = fleet
        self._ledger = ledger
        self._policy = Policy(patience=fleet.settings.swap_patience, memory=fleet.settings.limits_memory)
        self._loop = asyncio.get_running_loop()
        self._is_requested = False
        self._timer: asyncio.TimerHandle | None = None
        self._planned_at, self._planned_for = 0.0, 0  # time and queue length of the last plan
        self._failed_plans = 0
        self._readings: Sequence[Reading] = ()
        self._is_fresh = False  # the devices were read for the next plan
        self._refresh: asyncio.Task[None] | None = None

    # When to plan

    def plan_soon(self) -> None:
        """Request a plan, because one of its inputs has changed."""
        if self._is_requested:
            return
        self._is_requested = True
        pause = self._planned_at + PLAN_PAUSE * (self._planned_for - FEW_WAITING) - self._loop.time()
        if pause > 0:
            self._loop.call_later(pause, self.plan_now)
        else:
            self._loop.call_soon(self.plan_now)

    def plan_within(self, seconds: float) -> None:
        """Request a plan at that time at the latest, so that one plan serves many changes until then."""
        latest = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > latest:
            self._set_timer(latest)

    def _set_timer(self, when: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if when is None else self._loop.call_at(when, self.plan_soon)

    def plan_now(self) -> None:
        """Plan once. An exception is a bug: it is logged, and the plan is made again after PLAN_AGAIN."""
        self._is_requested = False
        self._set_timer(None)
        if self._fleet.closing:
            return
        try:
            self._plan()
            self._failed_plans = 0
        except Exception:
            log.exception("internal error in a plan; it is made again in %.0f s", PLAN_AGAIN)
            self._failed_plans += 1
            if self._failed_plans == MOST_FAILED_PLANS:
                self.broken.set()
            self._set_timer(self._loop.time() + PLAN_AGAIN)

    async def close(self) -> None:
        """Stop planning."""
        self._set_timer(None)
        if self._refresh is not None:
            await asyncio.wait({self._refresh})

    def _refresh_then_plan(self) -> None:
        """Read the devices, then plan again.

        Without this, a worker could start in memory that another program has taken since the last reading, or be
        evicted for memory that another program has freed.
        """

        async def refresh() -> None:
            try:
                await self._fleet.launcher.refresh()
            finally:  # plan even if the reading failed: demands wait
                self._is_fresh = True
                self.plan_soon()

        if self._refresh is None or self._refresh.done():
            self._refresh = self._loop.create_task(refresh(), name="refresh before a plan")

    # Inputs of the plan

    def residents(self) -> list[Resident]:
        """Return all that occupies memory: workers, early starts and sleeping weights.

        The worker with the largest headroom gets it on top of its reservation, and so keeps it free for the others too.
        Once it is evicted, the next largest counts. A headroom above MOST_SHARED_HEADROOM is kept free for each worker.
        """
        workers = [worker for worker in self._fleet.workers() if worker.holds_memory]
        first = max(workers, key=lambda worker: worker.headroom, default=None)
        return [
            *(
                _with_headroom(worker)
                if worker is first or worker.headroom > MOST_SHARED_HEADROOM
                else resident_of(worker)
                for worker in workers
            ),
            *(weights.resident() for weights in self._fleet.sleeping_weights.all.values()),
        ]

    def reserved(self, id: DeviceId) -> int:
        """Return the reserved bytes of a device."""
        return sum(resident.reserved.get(id, 0) for resident in self.residents())

    def observe(self) -> list[Device]:
        """Return the devices as they are now."""
        return self._ledger.observe(self._fleet.launcher.readings(), self.residents())

    def capacities(self) -> dict[DeviceId, int]:
        """Return the bytes that are usable on each device when no worker runs."""
        devices = {device.id: device for device in self.observe()}
        return {id: devices[device.pool or id].capacity for id, device in devices.items()}

    def never_fits(self, worker: Worker, *, weights_only: bool = False) -> bool:
        """The worker, or its weights alone, do not fit on empty devices."""
        if not self._policy.memory:
            return False
        assert worker.costs is not None
        demand = replace(demand_of(worker), is_exact=True, best_effort=False)
        if weights_only:
            demand = replace(demand, shards=worker.costs.estimate.weights, host=0)
        return demand.id in plan([demand], [], self.observe(), self._loop.time(), self._policy).refuse

    def cautious_devices(self) -> list[Device]:
        """Return the devices of the last plan, with the memory that early starts have not yet allocated in use."""
        starts = [worker.early for worker in self._fleet.workers() if worker.state is State.QUEUED]
        return early_start.add_unallocated(
            self.devices, sum(start.reserved for start in starts if not start.is_measured)
        )

    def _in_queue(self) -> list[Worker]:
        """Return queued workers with an estimate that wait for a place."""
        return [
            worker
            for worker in self._fleet.workers()
            if worker.state is State.QUEUED
            and worker.costs is not None
            and not (worker.retired or worker.queue.granted.done())
        ]

    # The plan

    def _plan(self) -> None:
        fleet, now = self._fleet, self._loop.time()
        # 1. Retire queued workers whose clients have disconnected, so that no eviction is made for them.
        for worker in fleet.workers():
            is_idle = worker.state < State.STARTING and not worker.leases and not worker.retired
            if is_idle and not worker.best_effort and not (worker.fetch_only and worker.state is State.DOWNLOADING):
                fleet.retire(worker, "abandoned", drain=0.0)
        fleet.update_replicas()
        # 2. Read the devices and collect residents and demands.
        queued = self._in_queue()
        residents = self.residents()
        readings = fleet.launcher.readings()
        self.devices = self._ledger.observe(readings, residents)
        if readings is not self._readings:
            self._readings = readings
            self.breaches.update(
                d.id for d in self.devices if d.id.index != WORKER_SLOTS and d.total - d.used < d.margin
            )
        devices = self.cautious_devices()
        # A demand whose exact estimate is being made is planned last, and gets no early start.
        estimated = [worker for worker in queued if not worker.queue.refine.is_set()]
        waiting = [demand_of(worker) for worker in estimated]
        refining = [demand_of(worker) for worker in queued if worker.queue.refine.is_set()]
        inputs = PlanInputs(waiting + refining, residents, devices, now)
        found = plan(inputs.waiting, inputs.residents, inputs.devices, inputs.now, self._policy)
        self._planned_at, self._planned_for = now, len(queued)
        is_fresh, self._is_fresh = self._is_fresh, False
        if (found.start or found.evict) and not is_fresh:
            self._refresh_then_plan()
            return
        self.last_plan = found
        # 3. Record the plan. Lifecycles carry it out after this method has returned.
        candidates = [candidate_of(worker, demand) for worker, demand in zip(estimated, waiting, strict=True)]
        decision = early_start.decide(found, candidates, residents, devices)
        by_id = {worker.id: worker for worker in fleet.workers()}
        self._record(inputs, found, by_id)
        in_order = [by_id[demand.id] for demand in sorted(inputs.waiting, key=queue_order)]
        self._record_waits(found, by_id, in_order)
        self._record_early_starts(decision, by_id)
        if found.waits:
            fleet.prefetcher.begin([worker for worker in in_order if worker.id in found.waits], self.devices)
        fleet.start_prefetched()
        if fleet.settings.sleep_memory:
            spare = early_start.spare_memory(found, waiting + refining, residents, devices)
            fleet.sleeping_weights.put_to_sleep(fleet.models.values(), spare - sum(decision.begin.values()))
        if found.look_again is not None:
            # A moment later, so that `now` of that plan is not before `look_again` by rounding.
            self._set_timer(max(now, found.look_again) + 0.001)

    def _record(self, inputs: PlanInputs, found: Plan, by_id: Mapping[int, Worker]) -> None:
        for id, refusal in found.refuse.items():
            worker = by_id[id]
            if not worker.queue.granted.done():
                self._append_event("refuse", worker, worker, shortage=shortages(refusal.devices, inputs))
                worker.queue.granted.set_exception(does_not_fit(worker, refusal, inputs, self.capacities()))
        for worker in [by_id[id] for id in found.drop]:
            self._append_event("drop", worker, worker)
            self._fleet.retire(worker, "no_room", drain=0.0)
        for id in found.refine:
            by_id[id].queue.refine.set()
        for id, eviction in found.evict.items():
            if (weights := self._fleet.sleeping_weights.all.get(id)) is not None:
                self._fleet.sleeping_weights.release(weights, eviction.reason)
            else:
                self._evict(by_id[id], eviction, by_id, found)
        for id, start in found.start.items():
            self._start(by_id[id], start)
        if found.start:
            self.plan_soon()  # started workers are residents from now on

    def _record_waits(self, found: Plan, by_id: Mapping[int, Worker], in_order: Sequence[Worker]) -> None:
        for ahead, worker in enumerate(worker for worker in in_order if worker.id not in found.start):
            queue = worker.queue
            queue.ahead = ahead
            is_refining = worker.id in found.refine or queue.refine.is_set()
            if not (is_refining or worker.id in found.refuse):
                queue.considered.set()  # a refused worker is considered when it ends, with its error
            wait = found.waits.get(worker.id)
            if wait is None:
                continue
            cause = "estimate" if is_refining else wait.cause
            queue.waits_for, queue.waits_until = cause, wait.until
            queue.waits_for_slot = bool(wait.shortage) and all(id.index == WORKER_SLOTS for id in wait.shortage)
            if queue.reported != cause:
                queue.reported = cause
                on = [by_id[id].preset.id for id in wait.on if id in by_id]
                self._append_event("wait", worker, worker, cause=cause, on=on, position=ahead + 1)

    def _record_early_starts(self, decision: Decision, by_id: Mapping[int, Worker]) -> None:
        for id in decision.end:
            by_id[id].early.advance(Phase.ENDING)
            self.plan_soon()  # its memory counts as leaving, so the next plan may evict further victims at once
        for id, size in decision.begin.items():
            worker = by_id[id]
            if not worker.retired:
                worker.reserved[MAIN_MEMORY] = size
                worker.early.reserve(size)
                self._append_event("early_start", worker, worker)

    def _start(self, worker: Worker, start: Start) -> None:
        worker.reserved = dict(start.claim)
        early_start.take_place(worker)
        worker.place = start.place
        assert worker.costs is not None
        if worker.costs.estimate.kv_steps:
            worker.kv_range, worker.kv_steps = worker.costs.estimate, start.steps
            worker.costs = replace(worker.costs, estimate=worker.kv_range.granted(start.steps))
        worker.queue.waits_for, worker.queue.ahead, worker.load.latest = "", 0, None
        worker.queue.considered.set()
        self._append_event("start", worker, worker, **_with_cache(worker, worker.kv_steps))
        enter(worker, State.STARTING, self._fleet.events, self._loop.time())
        worker.queue.granted.set_result(start)

    def _evict(self, worker: Worker, eviction: Eviction, by_id: Mapping[int, Worker], found: Plan) -> None:
        for_worker = by_id.get(eviction.for_demand) if eviction.for_demand is not None else None
        wait = found.waits.get(for_worker.id) if for_worker is not None else None
        facts = evicted(worker, eviction, for_worker, wait, self._loop.time())
        self._append_event("evict", worker, for_worker, **facts)
        limit = self._fleet.settings.evict_timeout
        name = for_worker.preset.id if for_worker is not None else ""
        if for_worker is not None:
            for_worker.queue.inherit(worker.preset.priority)
        self._fleet.retire(worker, eviction.reason, drain=None if limit < 0 else limit, made_room_for=name)

    def _append_event(self, decision: str, worker: Worker, for_worker: Worker | None, **facts: Any) -> None:
        """Append a `plan` event with the needed and the free bytes of `for_worker`."""
        facts |= _arithmetic(for_worker, self.devices) if for_worker is not None else {}
        self._fleet.events.append("plan", worker.preset.id, decision=decision, worker=worker.id, **facts)

    async def preview(self, name: str) -> dict[str, Any]:
        """Return the effect that a request for a model would have now. Raises ApiError if its files are not usable."""
        fleet, model = self._fleet, self._fleet.model(name)
        worker = model.open
        if (full := fleet.queue.refusal(model)) is not None:
            return refused(full)
        if worker is not None and worker.state >= State.STARTING:
            return {"decision": "none", "message": f"{name} is {worker.state.name.lower()} already"}
        if worker is None and (refusal := fleet.failures.refusal(model)) is not None:
            return refused(refusal)
        if worker is None or worker.costs is None:
            snapshot = fleet.files.find(model.preset)
            if snapshot is None:
                what = "are not here yet; load it once" if worker is None else "are being downloaded"
                return {"decision": "unknown", "message": f"the files of {name} {what}"}
            worker = Worker(0, model, State.QUEUED, self._loop.time())
            worker.snapshot = fleet.files.loads_from(model.preset, snapshot)
            try:
                await estimate_costs(worker, fleet)
            except EstimateError as unknown:
                raise LoadFailed.of(name, unknown.message) from None
        demand = replace(demand_of(worker), best_effort=False)  # a requested model is required
        queue = [demand, *(demand_of(other) for other in self._in_queue() if other.id != worker.id)]
        inputs = PlanInputs(queue, self.residents(), self.observe(), self._loop.time())
        found = plan(inputs.waiting, inputs.residents, inputs.devices, inputs.now, self._policy)
        names = {worker.id: worker.preset.id for worker in fleet.workers()}
        names |= {id: weights.preset.id for id, weights in fleet.sleeping_weights.all.items()}
        granted = found.start[demand.id].steps if demand.id in found.start else None
        numbers = _arithmetic(worker, inputs.devices) | _with_cache(worker, granted)
        return preview(demand, inputs, found, names, numbers)


# The planner's view of workers


def demand_of(worker: Worker) -> Demand:
    """Return the planner's view of a queued worker with known costs, less the memory of its early start."""
    costs = worker.costs
    assert costs is not None
    demand = Demand(
        id=worker.id,
        model=worker.preset.id,
        shards=costs.estimate.shards,
        host=0 if worker.on_host else costs.estimate.host,
        growth=costs.estimate.kv_step,
        # After a worker that ran out of memory, the next one gets the least.
        steps=0 if worker.model.ran_out_of_memory else costs.estimate.kv_steps,
        shard_limits=costs.device_limits,
        since=worker.wanted_since if worker.best_effort else worker.since,
        priority=worker.queue.raised(worker.preset.priority),
        best_effort=worker.best_effort,
        is_exact=costs.is_exact,
        exclusive=ENGINES[worker.preset.engine].exclusive,
        devices=costs.choice.devices,
        place=costs.choice.place,
        load_seconds=costs.load_seconds,
    )
    return early_start.subtract_early_start(demand, worker.early.reserved) if worker.early.is_charged else demand


def candidate_of(worker: Worker, demand: Demand) -> Candidate:
    """Return the facts for the early-start decision of a queued worker with known costs and this demand."""
    costs, facts = worker.costs, worker.facts
    assert costs is not None
    assert facts is not None
    traits = ENGINES[worker.preset.engine]
    # Tensor-parallel followers get their options when they are spawned, so such a worker cannot start early.
    may_start = costs.choice.ranks == 1 and worker.early.phase is Phase.NONE
    may_start = may_start and not (worker.best_effort or traits.exclusive)
    runtime = 0
    if may_start:
        runtime = prepared_bytes(facts, costs.estimate, on_host=worker.on_host, forked=costs.forked)
    return Candidate(demand=demand, runtime=runtime, started_early=worker.early.is_charged)


def resident_of(worker: Worker) -> Resident:
    """Return the planner's view of a worker that holds memory.

    It is cached, because plans are made much more often than the values change.
    """
    if worker.state is State.QUEUED:
        return _early_resident(worker)
    usage, request_interval = worker.usage, worker.model.request_interval
    made_from = (
        worker.preset, worker.state, worker.retired, bool(worker.leases),
        usage.last_used, usage.residency_ends, usage.keep_alive,
        worker.retirement.since, worker.best_effort, worker.is_excess,
        worker.load_seconds, worker.process, worker.pulse,
        worker.reserved.copy(), {**worker.measured}, request_interval,  # copies: both mappings change in place
    )  # fmt: skip
    if worker.resident is None or worker.resident[0] != made_from:
        worker.resident = made_from, _resident(worker, request_interval)
    return worker.resident[1]


def _with_headroom(worker: Worker) -> Resident:
    resident = resident_of(worker)
    if not worker.headroom:
        return resident
    reserved = {**resident.reserved, MAIN_MEMORY: resident.reserved.get(MAIN_MEMORY, 0) + worker.headroom}
    return replace(resident, reserved=reserved)


def _early_resident(worker: Worker) -> Resident:
    """The early start of a queued worker. Pinned, because `early_start.decide` ends it, not an eviction."""
    early, process = worker.early, worker.early.process
    return Resident(
        id=worker.id,
        model=worker.preset.id,
        reserved={MAIN_MEMORY: early.reserved},
        measured=process.measured if process is not None and early.is_measured else {},
        starting=not early.is_measured,
        leaving=not early.is_charged,
        leaving_since=worker.since,
        pinned=True,
    )


def _resident(worker: Worker, request_interval: float | None) -> Resident:
    preset, usage = worker.preset, worker.usage
    ttl = worker.time_to_live
    if worker.is_excess:
        ttl = min(ttl, preset.replica_idle) if ttl >= 0 else preset.replica_idle
    return Resident(
        id=worker.id,
        model=preset.id,
        reserved=worker.reserved.copy(),
        measured={**worker.driver_visible},
        last_used=usage.last_used,
        busy=bool(worker.leases),
        leaving=worker.retired or worker.state is State.STOPPING,
        leaving_since=worker.retirement.since or worker.since,
        pinned=preset.pin and not worker.best_effort,
        priority=preset.priority,
        best_effort=worker.best_effort,
        starting=worker.state is State.STARTING,
        exclusive=ENGINES[preset.engine].exclusive,
        residency_ends=usage.residency_ends,
        expires=usage.last_used + ttl if ttl >= 0 and worker.state is State.READY else None,
        idle_grace=preset.idle_grace if preset.idle_grace >= 0 else None,
        request_interval=request_interval,
        load_seconds=worker.load_seconds,
    )


def device_figures(device: Device) -> dict[str, Any]:
    """Return the bytes of a device as JSON values."""
    return {name: getattr(device, name) for name in ("total", "used", "foreign", "margin", "limit")}


def _arithmetic(worker: Worker, devices: Sequence[Device]) -> dict[str, Any]:
    """Return the needed and the free bytes by device, for events and previews."""
    if worker.costs is None:
        return {}
    concerned = [each for each in devices if each.id in worker.devices or each.id.index in (HOST, WORKER_SLOTS)]
    rows = {str(device.id): device_figures(device) for device in concerned}
    estimate = worker.costs.estimate
    note = {"note": estimate.note} if estimate.note else {}
    return {"needs": list(estimate.shards), "source": estimate.source, **note, "devices": rows}


def _with_cache(worker: Worker, granted: int | None = None) -> dict[str, Any]:
    """Return the field `kv_cache` of an event or a preview (see `kv_cache`); empty without a known KV cache."""
    figures = kv_cache(worker, granted)
    return {"kv_cache": figures} if figures else {}

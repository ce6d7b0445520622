"""The cost of a load: the bytes that it needs on each device, estimated before the load and measured after it.

The first estimate is the best one that is available at once: preset, learned, exact from an earlier load, or static.
The exact estimate is made when the planner needs it, because it runs the worker program for seconds.

Measurements raise the reservation. They become learned figures as far as the engine's own memory explains them
(router/memory/learned.py). A learned figure never refuses a model: one that would is left out, and the load is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from router.config.presets import Preset
from router.errors import DoesNotFit
from router.fleet.worker import Costs, Worker, kv_cache
from router.fleet.worker_argv import estimate_command, exceeds_warmup, program_of, threads
from router.launch.interface import Program, WorkerLost
from router.memory import estimate as estimates
from router.memory import sharding
from router.memory.estimate import MemoryEstimate, Overhead
from router.memory.remedies import Remedies, remedies
from router.memory.sharding import allowed_devices, best_estimate, device_order, first_fitting, record_key
from router.planner.ledger import HOST, MAIN_MEMORY, DeviceId
from worker.protocol.argv import Estimate

if TYPE_CHECKING:  # it imports this module
    from router.fleet.fleet import Fleet

log = logging.getLogger("router.fleet.load_cost")

# Estimates before the load


async def estimate_costs(worker: Worker, fleet: Fleet) -> None:
    """Set facts, devices and costs of a worker with a snapshot. Raises EstimateError, LoadFailed, DoesNotFit."""
    worker.facts = await fleet.files.read(worker.snapshot, worker.preset)
    readings = fleet.launcher.readings()
    worker.pools = {reading.id: reading.pool for reading in readings if reading.pool is not None}
    worker.devices = allowed_devices(worker.preset, readings)
    _estimate(worker, fleet)
    assert worker.costs is not None
    unused = sharding.unused_settings(worker.preset, worker.facts, readings, worker.devices)
    for warning in (*unused, worker.costs.choice.note):
        if warning:
            log.warning("%s: %s", worker.preset.id, warning)


def _estimate(worker: Worker, fleet: Fleet, *, no_exact: str | None = None, learns: bool = True) -> None:
    """Choose the fewest devices on which the worker fits, with the best estimate that is available at once.

    `no_exact`: the reason why no exact estimate will follow. Without `learns`, learned figures are left out. Raises
    EstimateError, LoadFailed, DoesNotFit.
    """
    is_last = no_exact is not None
    preset, facts, readings = worker.preset, worker.facts, fleet.launcher.readings()
    assert facts is not None
    forked = fleet.launcher.forks(program_of(preset, str(worker)))
    bounds = _bounds(worker, fleet)
    order = device_order(preset, readings, worker.devices)
    room = sharding.within_utilization(preset, readings, fleet.scheduler.capacities())

    def estimate_of(choice: sharding.Choice) -> MemoryEstimate:
        thread_count = threads(preset, on_host=worker.on_host, ranks=choice.ranks)
        records = fleet.learned_estimates
        return best_estimate(
            choice, facts, preset, readings, records, forked=forked, threads=thread_count, learns=learns
        )

    choice, found = first_fitting(
        sharding.choices(facts, preset, worker.devices, order, room),
        estimate_of,
        bounds,
        can_wait=lambda estimate: not (is_last or estimate.is_exact),
    )
    key = record_key(choice, facts, preset, readings, forked=forked)
    worker.costs = costs = Costs(
        estimate=found,
        choice=choice,
        is_exact=is_last or found.is_exact,
        no_exact="" if found.is_exact else no_exact or "",
        key=key,
        load_seconds=fleet.learned_estimates.load_seconds(key) or 0.0,
        forked=forked and found.source != "preset",  # a figure of the preset holds for executed workers, too
        device_limits=bounds if sharding.limiting_keys(preset, on_host=worker.on_host) else {},
    )
    if found.source == "learned" and (
        not sharding.fits(choice, found.shards, bounds) or fleet.scheduler.never_fits(worker)
    ):
        # It may be wrong, and a model that is never loaded is never measured again.
        return _estimate(worker, fleet, no_exact=no_exact, learns=False)
    if costs.device_limits:
        _check_bounds(worker, fleet, costs, bounds)
    if not costs.is_exact and fleet.scheduler.never_fits(worker, weights_only=True):
        worker.costs = replace(worker.costs, is_exact=True)


def _check_bounds(worker: Worker, fleet: Fleet, costs: Costs, bounds: Mapping[DeviceId, int]) -> None:
    """Apply the preset's limits per device. Raises DoesNotFit if the worker needs more than these allow, and would fit
    without them. If it would not, the planner refuses it with the real cause."""
    choice, shards, capacities = costs.choice, costs.estimate.shards, fleet.scheduler.capacities()
    if sharding.fits(choice, shards, bounds):
        if choice.shards == 1:
            devices = frozenset(id for id in choice.devices if bounds[id] >= shards[0])
            worker.costs = replace(costs, choice=replace(choice, devices=devices))
    elif sharding.fits(choice, shards, capacities) and (
        costs.is_exact or not sharding.fits(choice, sharding.least_shards(costs.estimate), bounds)
    ):
        preset, keys = worker.preset, sharding.limiting_keys(worker.preset, on_host=worker.on_host)
        most = ", ".join(f"{size >> 20} MiB of {device}" for device, size in bounds.items())
        needs = " + ".join(f"{size >> 20} MiB" for size in shards)
        found = remedies_for(worker, costs, {**capacities, **bounds})
        raise DoesNotFit(
            f"{preset.id}: it needs at least {needs}{costs.bound}, but {keys} and the device sizes allow {most};"
            f" raise {keys.replace(' and ', ' or ')}" + (f", or {found}" if found.settings else "")
        )


def remedies_for(worker: Worker, costs: Costs, room: Mapping[DeviceId, int]) -> Remedies:
    """Return the keys with which a worker that does not fit would fit into `room`."""
    assert worker.facts is not None
    thread_count = threads(worker.preset, on_host=worker.on_host, ranks=costs.choice.ranks)
    return remedies(
        worker.facts, worker.preset, costs.choice, costs.estimate, room, threads=thread_count, forked=costs.forked
    )


def _bounds(worker: Worker, fleet: Fleet) -> dict[DeviceId, int]:
    """Return the usable bytes of each device that the preset allows."""
    readings = fleet.launcher.readings()
    order = device_order(worker.preset, readings, worker.devices)
    return sharding.within_gpu_split(
        worker.preset, order, sharding.within_utilization(worker.preset, readings, fleet.scheduler.capacities())
    )


async def trace_unknown(worker: Worker, fleet: Fleet, program: Program) -> None:
    """Make the exact estimate before the first plan if the first estimate is a guess.

    It is one if only the weights are known, or if it exceeds the preset's limits per device.
    """
    while (costs := worker.costs) is not None and not costs.is_exact and _is_a_guess(worker, fleet, costs):
        command = estimate_command(worker)
        worker.costs = None  # a worker without costs is not planned
        await _make_exact(worker, fleet, program, command, costs)


def _is_a_guess(worker: Worker, fleet: Fleet, costs: Costs) -> bool:
    if costs.estimate.source == "weights":
        return True
    return bool(costs.device_limits) and not sharding.fits(costs.choice, costs.estimate.shards, _bounds(worker, fleet))


async def refine(worker: Worker, fleet: Fleet, program: Program) -> None:
    """Replace the estimate by the exact one. If that fails, the present one counts as exact."""
    assert worker.costs is not None
    if await _make_exact(worker, fleet, program, estimate_command(worker), worker.costs):
        append_estimate(worker, fleet)


async def _make_exact(worker: Worker, fleet: Fleet, program: Program, command: Estimate, costs: Costs) -> bool:
    """Set the exact estimate in place of `costs`; return whether it could be made."""
    try:
        exact = await fleet.launcher.estimate(program, command)
    except WorkerLost as lost:
        if worker.queue.granted.done():
            return False  # it starts on the estimate that its place was granted for
        if lost.final:
            raise
        note, source = costs.estimate.note, costs.estimate.source
        in_use = f"the estimate in use is {note}" if note else f"the {source} estimate is used"
        log.warning("%s: no exact estimate (%s); %s", worker, lost.message, in_use)
        _estimate(worker, fleet, no_exact=lost.message.removeprefix(f"{worker.preset.id}: "))
        return False
    estimate = estimates.from_trace(exact, worker.preset, forked=costs.forked, first=costs.estimate)
    fleet.learned_estimates.store_exact(costs.key, estimate)
    if worker.queue.granted.done():
        return False
    worker.costs = replace(costs, estimate=estimate, is_exact=True)
    if not sharding.fits(costs.choice, estimate.shards, _bounds(worker, fleet)):
        _estimate(worker, fleet)  # it needs more devices, so begin again with a first estimate for those
    return True


def append_estimate(worker: Worker, fleet: Fleet) -> None:
    """Append an `estimate` event."""
    assert worker.costs is not None
    found = worker.costs.estimate
    fleet.events.append(
        "estimate",
        worker.preset.id,
        worker=worker.id,
        source=found.source,
        weights=list(found.weights),
        context=list(found.context),
        compute=list(found.compute),
        runtime=list(found.runtime),
        host=found.host,
        note="; ".join(filter(None, (worker.costs.choice.note, found.note))),
        **({"kv_cache": figures} if (figures := kv_cache(worker)) else {}),
    )


# Measurements after the load


def record_load(worker: Worker, fleet: Fleet) -> None:
    """Record the time and the memory of a worker that is about to be ready."""
    costs, process = worker.costs, worker.process
    assert costs is not None
    assert process is not None
    assert worker.facts is not None
    if process.forked != costs.forked:  # learned estimates are kept apart for forked and executed workers
        readings = fleet.launcher.readings()
        key = record_key(costs.choice, worker.facts, worker.preset, readings, forked=process.forked)
        worker.costs = costs = replace(costs, key=key, forked=process.forked)
    fleet.learned_estimates.record_load(costs.key, worker.load_seconds)
    settle_reservation(worker)
    worker.host_use.usual = worker.reserved.get(MAIN_MEMORY, 0) + worker.headroom
    _learn_overhead(worker, fleet)
    learn(worker, fleet)


def settle_reservation(worker: Worker) -> None:
    """Raise a ready worker's reservation to its measurement plus the main memory that it may still allocate.

    It is not lowered: the pools are allocated, but a longer prompt may still need more activations. A forked worker in
    main memory is the exception. Its estimate is made for any model, and several times what a small one takes, so its
    reservation follows the measurement (`_least_forked`), and memory that it announces is reserved from then on.
    """
    for device, size in worker.occupied.items():
        least = _least_forked(worker) if device.index == HOST else None
        if device.index == HOST:
            worker.headroom = 0 if least is None else worker.unannounced
            size += worker.expected_growth + worker.unannounced - worker.headroom
        worker.reserved[device] = max(worker.reserved.get(device, 0) if least is None else least, size)
    if worker.process is not None:
        host = worker.reserved.get(MAIN_MEMORY, 0) + worker.headroom
        worker.process.reserve({**worker.reserved, MAIN_MEMORY: host})


def _least_forked(worker: Worker) -> int | None:
    """Return the bytes to reserve at least for a ready, forked worker in main memory; None for any other, and for one
    whose steps may be larger than those of the warmup, if it does not announce them.

    If it has computed its largest steps, or announces them: what it occupies and expects to take. Otherwise: what it
    had taken when it was ready, and the estimated steps. In both cases at most the estimate, less the memory that it
    announces before it takes it.
    """
    process, costs, facts = worker.process, worker.costs, worker.facts
    if process is None or costs is None or facts is None or costs.estimate.source == "preset":
        return None
    if not (process.forked and worker.on_host):
        return None
    if exceeds_warmup(worker.preset, facts) and not process.ready.steps:
        return None
    ready, estimate = process.ready, costs.estimate
    most = sum(estimate.shards) - ready.unannounced  # the estimate may include learned steps
    if ready.has_warmed_up or ready.steps:
        taken = worker.occupied.get(MAIN_MEMORY, 0) + worker.expected_growth
    else:
        announced = max(0, ready.unannounced - worker.unannounced)  # it takes this beside the steps
        taken = ready.measured.get("cpu", 0) + ready.later + sum(estimate.compute) + announced
        most += announced
    return min(taken + estimate.reserved, most)


def learn(worker: Worker, fleet: Fleet) -> None:
    """Record a worker's memory as a learned figure. Called when it is ready and when it stops.

    On accelerators it is the peak of the engine's allocator so far. On main memory it is what the worker took until it
    was ready: later it also contains memory that requests did not free.
    """
    costs, process, facts = worker.costs, worker.process, worker.facts
    if costs is None or process is None or facts is None or costs.estimate.source == "preset" or not worker.place:
        return
    ready, main = process.ready, DeviceId(worker.place[0].node, HOST)
    host = ready.measured.get("cpu", 0)
    host += ready.later + ready.unannounced - ready.steps if host else 0  # `steps` are learned already
    host += estimates.request_bytes(facts, worker.preset) if host and worker.on_host else 0
    shards = tuple(host if device == main else worker.measured.get(device, 0) for device in worker.place)
    if all(shards):
        if ready.steps:  # the figure is an upper bound, and earlier loads were measured exactly
            shards = tuple(map(min, shards, costs.estimate.shards))
        if ready.has_warmed_up and exceeds_warmup(worker.preset, facts):
            known = (size - costs.estimate.reserved for size in costs.estimate.shards)
            shards = tuple(map(max, shards, known))
        beside = host if main not in worker.place and costs.estimate.host else 0
        fleet.learned_estimates.record(costs.key, costs.estimate, shards, beside, steps=ready.has_warmed_up)


async def forget_learned(preset: Preset, fleet: Fleet) -> int:
    """Drop the learned figures of the preset's files, for all settings; return their number. Raises EstimateError."""
    snapshot = fleet.files.find(preset)
    if snapshot is None:
        return 0
    facts = await fleet.files.read(fleet.files.loads_from(preset, snapshot), preset)
    return fleet.learned_estimates.forget(facts)


def _learn_overhead(worker: Worker, fleet: Fleet) -> None:
    """Record the process overhead, which does not depend on the model. A worker reports it once, when ready."""
    process = worker.process
    if process is None or not process.ready.overhead:
        return
    ready, host = process.ready, process.ready.overhead.get("cpu", 0)
    names = {reading.id: reading.name for reading in fleet.launcher.readings()}
    for shard, device in enumerate(worker.place):
        is_host = device.index == HOST
        measured = Overhead(0 if is_host else ready.overhead.get(f"cuda:{shard}", 0), host)
        name = "cpu" if is_host else names.get(device, "")
        fleet.learned_estimates.record_overhead(name, measured, forked=process.forked, is_own=ready.overhead_is_own)

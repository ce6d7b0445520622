"""The cost of a load: its devices, the bytes on each, and the source of the estimate.

The first estimate is the best one that is available at once: preset, learned, exact from an earlier load, or static.
The exact estimate is made when the planner needs it, because it runs the worker program for seconds.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from router.config.presets import Preset
from router.errors import LoadFailed
from router.fleet.interfaces import World
from router.fleet.worker import Costs, Worker
from router.fleet.worker_argv import program_of, question, threads
from router.launch.interface import Program, WorkerLost
from router.memory import estimate as estimates
from router.memory import learned, sharding
from router.memory.estimate import Estimate
from router.planner.ledger import HOST, DeviceId, Reading
from worker.protocol.events import Estimated

log = logging.getLogger("router.fleet.load_cost")


async def weigh(worker: Worker, world: World) -> None:
    """Set facts, devices and costs of a worker with a snapshot. Raises EstimateError, LoadFailed."""
    worker.facts = await world.files.read(worker.snapshot, worker.preset)
    _choose_devices(worker, world.launcher.readings())
    _estimate(worker, world)


def _choose_devices(worker: Worker, readings: Sequence[Reading]) -> None:
    worker.pools = {reading.id: reading.pool for reading in readings if reading.pool is not None}
    worker.devices = devices_of(worker.preset, readings)


def devices_of(preset: Preset, readings: Sequence[Reading]) -> frozenset[DeviceId]:
    """Return the devices that the preset allows: those it names, else all accelerators, else main memory.

    Raises LoadFailed for one that is not here.
    """
    accelerators = [reading for reading in readings if reading.id.index >= 0]
    if not preset.device:
        chosen = {reading.id for reading in accelerators}
        return frozenset(chosen or {reading.id for reading in readings if reading.id.index == HOST})
    by_name = {str(reading.id): reading.id for reading in readings}
    by_name |= {reading.uuid: reading.id for reading in accelerators if reading.uuid}
    missing = [name for name in preset.device if name not in by_name]
    if missing:
        known = ", ".join(sorted(by_name))
        raise LoadFailed(f"{preset.id}: device {', '.join(missing)} does not exist, only {known}; change `device`")
    devices = frozenset(by_name[name] for name in preset.device)
    if len({device.index == HOST for device in devices}) > 1:
        raise LoadFailed(f"{preset.id}: `device` mixes cpu and accelerators; name one kind")
    return devices


def _estimate(worker: Worker, world: World, *, stands: bool = False) -> None:
    """Choose the fewest devices on which the worker fits, with the best estimate that is available at once.

    `stands`: no better estimate will follow. While an estimate is not sure and its lower bound fits, no further
    devices are chosen: that has to wait for the exact estimate. Raises EstimateError.
    """
    preset, facts = worker.preset, worker.facts
    assert facts is not None
    order = in_order(preset, world.launcher.readings(), worker.devices)
    room = world.capacities()
    bounds = sharding.bounded(preset, order, room)
    for choice in sharding.choices(facts, preset, worker.devices, order, room):
        worker.choice = choice
        worker.costs = costs = _cost(worker, world, stands=stands)
        could = sharding.fits(choice, sharding.floor(costs.estimate), bounds)
        if sharding.fits(choice, costs.estimate.shards, bounds) or (could and not costs.is_exact):
            break
    assert worker.costs is not None
    if preset.gpu_split and not worker.on_host:
        _hold_to(bounds, worker, worker.costs)
    if not worker.costs.is_exact and world.never_fits(worker):
        worker.costs = replace(worker.costs, is_exact=True)


def _hold_to(bounds: Mapping[DeviceId, int], worker: Worker, costs: Costs) -> None:
    """Apply the preset's limits per device. Raises LoadFailed if the worker needs more."""
    choice, shards = worker.choice, costs.estimate.shards
    if sharding.fits(choice, shards, bounds):
        if choice.shards == 1:
            worker.choice = replace(choice, devices=frozenset(id for id in choice.devices if bounds[id] >= shards[0]))
    elif costs.is_exact or not sharding.fits(choice, sharding.floor(costs.estimate), bounds):
        most = ", ".join(f"{size >> 20} MiB of {device}" for device, size in bounds.items())
        needs = " + ".join(f"{size >> 20} MiB" for size in shards)
        raise LoadFailed(
            f"{worker.preset.id}: it needs {needs}, but gpu-split and the device sizes allow {most};"
            " raise gpu-split or lower ctx-size"
        )


def _cost(worker: Worker, world: World, *, stands: bool) -> Costs:
    """Return the cost of the chosen placement."""
    preset, facts, on_host = worker.preset, worker.facts, worker.on_host
    assert facts is not None
    forked = world.launcher.forks(program_of(preset, str(worker)))
    key = key_of(worker, world, forked=forked)
    seconds = world.calibration.load_seconds(key) or 0.0
    thread_count = threads(preset, on_host=on_host, ranks=worker.choice.ranks)
    overhead = world.calibration.overhead(type_of(worker.choice, _names(world)), forked=forked)
    static = sharding.cost(
        worker.choice, facts, preset, on_host=on_host, threads=thread_count, forked=forked, overhead=overhead
    )
    if static.source == "preset":  # holds for forked and executed workers
        return Costs(static, True, key, seconds)
    found = best_figure(static, [world.calibration.learned(key), world.calibration.exact(key)], worker.choice)
    return Costs(found, stands or found.is_exact, key, seconds, forked)


def best_figure(static: Estimate, known: Sequence[Estimate | None], choice: sharding.Choice) -> Estimate:
    """Return the estimate for a placement: the preset's, else the first of `known` for as many shards, else `static`.

    `known` lists the learned estimate before the exact one. `router estimate` uses this function, too.
    """
    if static.source == "preset":
        return static
    for each in known:
        if each is not None and len(each.shards) == choice.shards:
            return estimates.refreshed(each, static)
    return static


def in_order(preset: Preset, readings: Sequence[Reading], devices: frozenset[DeviceId]) -> list[DeviceId]:
    """Return the devices in the order of the preset's `device`, else in the driver's order."""
    if not preset.device:
        return sorted(devices)
    by_name = {str(reading.id): reading.id for reading in readings}
    by_name |= {reading.uuid: reading.id for reading in readings if reading.uuid}
    return list(dict.fromkeys(by_name[name] for name in preset.device if name in by_name))


def key_of(worker: Worker, world: World, *, forked: bool) -> str:
    """Return the key of the worker's learned estimates."""
    assert worker.facts is not None
    kinds = kinds_of(worker.choice, _names(world))
    return learned.key(worker.facts, worker.preset, kinds, forked=forked)


def _names(world: World) -> dict[DeviceId, str]:
    """Return the driver's names of accelerators."""
    return {reading.id: reading.name for reading in world.launcher.readings() if reading.id.index != HOST}


def type_of(choice: sharding.Choice, names: Mapping[DeviceId, str]) -> str:
    """Return the device type of a placement, by its first device. `names`: of accelerators."""
    first = min(choice.devices)
    return "cpu" if first.index == HOST else names.get(first, "")


def kinds_of(choice: sharding.Choice, names: Mapping[DeviceId, str]) -> list[str]:
    """Return, by shard, the device type and the number of layers or ranks: learned estimates hold for equal ones only.

    `names`: of accelerators.
    """
    name = type_of(choice, names)
    if choice.ranks > 1:
        return [f"{name}, of {choice.ranks} ranks"] * choice.shards
    return [f"{name}, {count} layers" for count in choice.layers] or [name]


async def refine(worker: Worker, world: World, program: Program) -> None:
    """Replace the estimate by the exact one; keep the present one as sure if that fails."""
    assert worker.costs is not None
    try:
        exact = await world.launcher.estimate(program, question(worker))
    except WorkerLost as lost:
        if lost.final:
            raise
        log.warning("%s: no exact estimate (%s); %s", worker, lost.message, _estimate_in_use(worker.costs.estimate))
        worker.costs = replace(worker.costs, is_exact=True)
        _estimate(worker, world, stands=True)
        return
    _keep_exact(worker, world, worker.costs, exact)
    append_estimate(worker, world)


def _keep_exact(worker: Worker, world: World, costs: Costs, exact: Estimated) -> None:
    """Use the exact estimate. If it needs more devices, begin again with a first estimate for those."""
    estimate = estimates.from_trace(exact, worker.preset, forked=costs.forked, first=costs.estimate)
    world.calibration.store_exact(costs.key, estimate)
    worker.costs = replace(costs, estimate=estimate, is_exact=True)
    if not sharding.fits(worker.choice, estimate.shards, _bounds(worker, world)):
        _estimate(worker, world)


async def trace_unknown(worker: Worker, world: World, program: Program) -> None:
    """Make the exact estimate before the first plan if the first estimate is a guess.

    It is one if only the weights are known, or if it exceeds the preset's limits per device.
    """
    while (costs := worker.costs) is not None and not costs.is_exact and _is_a_guess(worker, world, costs.estimate):
        command = question(worker)
        worker.costs = None
        try:
            exact = await world.launcher.estimate(program, command)
        except WorkerLost as lost:
            if lost.final:
                raise
            log.warning("%s: no exact estimate (%s); %s", worker, lost.message, _estimate_in_use(costs.estimate))
            _estimate(worker, world, stands=True)
            return
        _keep_exact(worker, world, costs, exact)


def _is_a_guess(worker: Worker, world: World, estimate: Estimate) -> bool:
    if estimate.source == "weights":
        return True
    is_bound = bool(worker.preset.gpu_split) and not worker.on_host
    return is_bound and not sharding.fits(worker.choice, estimate.shards, _bounds(worker, world))


def _bounds(worker: Worker, world: World) -> dict[DeviceId, int]:
    """Return the usable bytes of each device that the preset allows."""
    order = in_order(worker.preset, world.launcher.readings(), worker.devices)
    return sharding.bounded(worker.preset, order, world.capacities())


def _estimate_in_use(estimate: Estimate) -> str:
    return f"the estimate in use is {estimate.note}" if estimate.note else f"the {estimate.source} estimate is used"


def append_estimate(worker: Worker, world: World) -> None:
    """Append an `estimate` event."""
    assert worker.costs is not None
    found = worker.costs.estimate
    world.events.append(
        "estimate",
        worker.preset.id,
        worker=worker.id,
        source=found.source,
        weights=list(found.weights),
        context=list(found.context),
        compute=list(found.compute),
        runtime=list(found.runtime),
        host=found.host,
        note=found.note,
    )


__all__ = [
    "append_estimate",
    "best_figure",
    "devices_of",
    "in_order",
    "key_of",
    "kinds_of",
    "refine",
    "trace_unknown",
    "type_of",
    "weigh",
]  # fmt: skip

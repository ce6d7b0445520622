"""What loading a worker costs: on which devices, how many bytes on each, and how sure that is.

The best figure that can be had at once comes first: the preset's word, learned, exact from before, or static. An exact
one is worked out when the planner asks for it.
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
    """Fill in facts, devices and costs of a worker whose snapshot is here. Raises EstimateError, LoadFailed."""
    worker.facts = await world.files.read(worker.snapshot, worker.preset)
    _choose_devices(worker, world.launcher.readings())
    _estimate(worker, world)


def _choose_devices(worker: Worker, readings: Sequence[Reading]) -> None:
    worker.pools = {reading.id: reading.pool for reading in readings if reading.pool is not None}
    worker.devices = devices_of(worker.preset, readings)


def devices_of(preset: Preset, readings: Sequence[Reading]) -> frozenset[DeviceId]:
    """The devices that this model may take: those it names, else all accelerators, else main memory.

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
        raise LoadFailed(f"{preset.id}: there is no device {', '.join(missing)} here, only {known}; change `device`")
    devices = frozenset(by_name[name] for name in preset.device)
    if len({device.index == HOST for device in devices}) > 1:
        raise LoadFailed(f"{preset.id}: `device` mixes cpu and accelerators; name one kind")
    return devices


def _estimate(worker: Worker, world: World, *, stands: bool = False) -> None:
    """On how few devices it fits, and the best figure for that which can be had at once: the preset's word, learned,
    exact from before, or static. `stands`: there will be no better one.

    Where it is not sure that it does not fit, the figure for more devices has to wait for an exact one. Raises
    EstimateError.
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
        if sharding.fits(choice, costs.estimate.shards, bounds) or (could and not costs.sure):
            break
    assert worker.costs is not None
    if preset.gpu_split and not worker.on_host:
        _hold_to(bounds, worker, worker.costs)
    if not worker.costs.sure and world.hopeless(worker):
        worker.costs = replace(worker.costs, sure=True)


def _hold_to(bounds: Mapping[DeviceId, int], worker: Worker, costs: Costs) -> None:
    """What the preset allows of single devices binds, though there be room. Raises LoadFailed for what needs more."""
    choice, shards = worker.choice, costs.estimate.shards
    if sharding.fits(choice, shards, bounds):
        if choice.shards == 1:
            worker.choice = replace(choice, devices=frozenset(id for id in choice.devices if bounds[id] >= shards[0]))
    elif costs.sure or not sharding.fits(choice, sharding.floor(costs.estimate), bounds):
        most = ", ".join(f"{size >> 20} MiB of {device}" for device, size in bounds.items())
        needs = " + ".join(f"{size >> 20} MiB" for size in shards)
        raise LoadFailed(
            f"{worker.preset.id}: it needs {needs}, and gpu-split and the devices' sizes let it have {most};"
            " raise gpu-split or lower ctx-size"
        )


def _cost(worker: Worker, world: World, *, stands: bool) -> Costs:
    """What the chosen way to place it costs."""
    preset, facts, on_host = worker.preset, worker.facts, worker.on_host
    assert facts is not None
    forked = world.launcher.forks(program_of(preset, str(worker)))
    key = key_of(worker, world, forked=forked)
    seconds = world.calibration.load_seconds(key) or 0.0
    threaded = threads(preset, on_host=on_host, ranks=worker.choice.ranks)
    overhead = world.calibration.overhead(type_of(worker.choice, _names(world)), forked=forked)
    static = sharding.cost(
        worker.choice, facts, preset, on_host=on_host, threads=threaded, forked=forked, overhead=overhead
    )
    if static.source == "preset":  # holds for whatever is started
        return Costs(static, True, key, seconds)
    found = best_figure(static, [world.calibration.learned(key), world.calibration.exact(key)], worker.choice)
    return Costs(found, stands or found.sure, key, seconds, forked)


def best_figure(static: Estimate, known: Sequence[Estimate | None], choice: sharding.Choice) -> Estimate:
    """The figure that is used for a model placed by `choice`, here and by `router estimate`: the preset's own, else the
    first of those `known` (learned before exact) that is for as many shards, else the static one. Pure."""
    if static.source == "preset":
        return static
    for each in known:
        if each is not None and len(each.shards) == choice.shards:
            return estimates.kept(each, static)
    return static


def in_order(preset: Preset, readings: Sequence[Reading], devices: frozenset[DeviceId]) -> list[DeviceId]:
    """The devices as its preset's lists count them: as `device` names them, else as the driver does."""
    if not preset.device:
        return sorted(devices)
    by_name = {str(reading.id): reading.id for reading in readings}
    by_name |= {reading.uuid: reading.id for reading in readings if reading.uuid}
    return list(dict.fromkeys(by_name[name] for name in preset.device if name in by_name))


def key_of(worker: Worker, world: World, *, forked: bool) -> str:
    """Of what is learned about this worker, were it forked or executed."""
    assert worker.facts is not None
    kinds = kinds_of(worker.choice, _names(world))
    return learned.key(worker.facts, worker.preset, kinds, forked=forked)


def _names(world: World) -> dict[DeviceId, str]:
    """Of accelerators, as the driver calls them."""
    return {reading.id: reading.name for reading in world.launcher.readings() if reading.id.index != HOST}


def type_of(choice: sharding.Choice, names: Mapping[DeviceId, str]) -> str:
    """The type of device of such a placement; of several devices that of the first. `names`: of accelerators."""
    first = min(choice.devices)
    return "cpu" if first.index == HOST else names.get(first, "")


def kinds_of(choice: sharding.Choice, names: Mapping[DeviceId, str]) -> list[str]:
    """What kinds of device a figure for such a placement holds for, and how many layers each has, or of how many ranks
    it is one. `names`: of accelerators."""
    name = type_of(choice, names)
    if choice.ranks > 1:
        return [f"{name}, of {choice.ranks} ranks"] * choice.shards
    return [f"{name}, {count} layers" for count in choice.layers] or [name]


async def refine(worker: Worker, world: World, program: Program) -> None:
    """Replace an estimate by the exact one; if that cannot be had, stand by the one there is."""
    assert worker.costs is not None
    try:
        exact = await world.launcher.estimate(program, question(worker))
    except WorkerLost as lost:
        if lost.final:
            raise
        log.warning("%s: no exact estimate (%s); %s", worker, lost.message, _what_stands(worker.costs.estimate))
        worker.costs = replace(worker.costs, sure=True)
        _estimate(worker, world, stands=True)
        return
    _keep_exact(worker, world, worker.costs, exact)
    tell_estimate(worker, world)


def _keep_exact(worker: Worker, world: World, costs: Costs, exact: Estimated) -> None:
    """The exact figure stands from now on; if it says that one device more is needed, a first figure for that."""
    estimate = estimates.exact(exact, worker.preset, forked=costs.forked, first=costs.estimate)
    world.calibration.store_exact(costs.key, estimate)
    worker.costs = replace(costs, estimate=estimate, sure=True)
    if not sharding.fits(worker.choice, estimate.shards, _bounds(worker, world)):
        _estimate(worker, world)


async def trace_unknown(worker: Worker, world: World, program: Program) -> None:
    """Where nothing but the weights is known, or a first figure is beyond what the preset allows of single devices, ask
    for the exact figure before anybody plans with a guess."""
    while (costs := worker.costs) is not None and not costs.sure and _is_a_guess(worker, world, costs.estimate):
        command = question(worker)
        worker.costs = None
        try:
            exact = await world.launcher.estimate(program, command)
        except WorkerLost as lost:
            if lost.final:
                raise
            log.warning("%s: no exact estimate (%s); %s", worker, lost.message, _what_stands(costs.estimate))
            _estimate(worker, world, stands=True)
            return
        _keep_exact(worker, world, costs, exact)


def _is_a_guess(worker: Worker, world: World, estimate: Estimate) -> bool:
    if estimate.source == "weights":
        return True
    is_bound = bool(worker.preset.gpu_split) and not worker.on_host
    return is_bound and not sharding.fits(worker.choice, estimate.shards, _bounds(worker, world))


def _bounds(worker: Worker, world: World) -> dict[DeviceId, int]:
    """What it may have of each device that it may use."""
    order = in_order(worker.preset, world.launcher.readings(), worker.devices)
    return sharding.bounded(worker.preset, order, world.capacities())


def _what_stands(estimate: Estimate) -> str:
    return f"what stands is {estimate.note}" if estimate.note else f"the {estimate.source} one stands"


def tell_estimate(worker: Worker, world: World) -> None:
    """One `estimate` event, with the figure that stands."""
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
    "best_figure", "devices_of", "in_order", "key_of", "kinds_of", "refine", "tell_estimate", "trace_unknown",
    "type_of", "weigh",
]  # fmt: skip

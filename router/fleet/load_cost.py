"""What loading a worker costs: on which devices, how many bytes on each, and how sure that is.

The best figure that can be had at once comes first: the preset's word, learned, exact from before, or static. An exact
one is worked out when the planner asks for it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from router.errors import LoadFailed
from router.fleet.interfaces import World
from router.fleet.worker import Costs, Worker
from router.fleet.worker_argv import program_of, question, threads
from router.launch.interface import Program, WorkerLost
from router.memory import estimate as estimates
from router.memory import sharding
from router.memory.best_estimate import allowed_devices, best_estimate, device_order, first_fitting, record_key
from router.memory.estimate import Estimate
from router.planner.ledger import DeviceId, Reading
from worker.protocol.events import Estimated

log = logging.getLogger("router.fleet.load_cost")


async def weigh(worker: Worker, world: World) -> None:
    """Fill in facts, devices and costs of a worker whose snapshot is here. Raises EstimateError, LoadFailed."""
    worker.facts = await world.files.read(worker.snapshot, worker.preset)
    _choose_devices(worker, world.launcher.readings())
    _estimate(worker, world)


def _choose_devices(worker: Worker, readings: Sequence[Reading]) -> None:
    worker.pools = {reading.id: reading.pool for reading in readings if reading.pool is not None}
    worker.devices = allowed_devices(worker.preset, readings)


def _estimate(worker: Worker, world: World, *, stands: bool = False) -> None:
    """On how few devices it fits, and the best figure for that which can be had at once: the preset's word, learned,
    exact from before, or static. `stands`: there will be no better one.

    Where it is not sure that it does not fit, the figure for more devices has to wait for an exact one. Raises
    EstimateError.
    """
    preset, facts = worker.preset, worker.facts
    assert facts is not None
    order = device_order(preset, world.launcher.readings(), worker.devices)
    room = world.capacities()
    bounds = sharding.bounded(preset, order, room)
    worker.choice, found = first_fitting(
        sharding.choices(facts, preset, worker.devices, order, room),
        lambda choice: _best_estimate(worker, world, choice),
        bounds,
        can_wait=lambda found: not (stands or found.is_exact),
    )
    forked = world.launcher.forks(program_of(preset, str(worker)))
    key = key_of(worker, world, forked=forked)
    seconds = world.calibration.load_seconds(key) or 0.0
    # The figure of a preset holds for every way to start, so nothing is subtracted for a forked worker.
    worker.costs = Costs(found, stands or found.is_exact, key, seconds, forked and found.source != "preset")
    if preset.gpu_split and not worker.on_host:
        _hold_to(bounds, worker, worker.costs)
    if not worker.costs.is_exact and world.hopeless(worker):
        worker.costs = replace(worker.costs, is_exact=True)


def _hold_to(bounds: Mapping[DeviceId, int], worker: Worker, costs: Costs) -> None:
    """What the preset allows of single devices binds, though there be room. Raises LoadFailed for what needs more."""
    choice, shards = worker.choice, costs.estimate.shards
    if sharding.fits(choice, shards, bounds):
        if choice.shards == 1:
            worker.choice = replace(choice, devices=frozenset(id for id in choice.devices if bounds[id] >= shards[0]))
    elif costs.is_exact or not sharding.fits(choice, sharding.floor(costs.estimate), bounds):
        most = ", ".join(f"{size >> 20} MiB of {device}" for device, size in bounds.items())
        needs = " + ".join(f"{size >> 20} MiB" for size in shards)
        raise LoadFailed(
            f"{worker.preset.id}: it needs {needs}, and gpu-split and the devices' sizes let it have {most};"
            " raise gpu-split or lower ctx-size"
        )


def _best_estimate(worker: Worker, world: World, choice: sharding.Choice) -> Estimate:
    """Return the best estimate that is available at once if the worker is placed by `choice`."""
    preset, facts = worker.preset, worker.facts
    assert facts is not None
    return best_estimate(
        choice,
        facts,
        preset,
        world.launcher.readings(),
        world.calibration,
        forked=world.launcher.forks(program_of(preset, str(worker))),
        threads=threads(preset, on_host=worker.on_host, ranks=choice.ranks),
    )


def key_of(worker: Worker, world: World, *, forked: bool) -> str:
    """Return the key under which the estimates of this worker are kept, if it is forked or executed."""
    assert worker.facts is not None
    return record_key(worker.choice, worker.facts, worker.preset, world.launcher.readings(), forked=forked)


async def refine(worker: Worker, world: World, program: Program) -> None:
    """Replace an estimate by the exact one; if that cannot be had, stand by the one there is."""
    assert worker.costs is not None
    try:
        exact = await world.launcher.estimate(program, question(worker))
    except WorkerLost as lost:
        if lost.final:
            raise
        log.warning("%s: no exact estimate (%s); %s", worker, lost.message, _what_stands(worker.costs.estimate))
        worker.costs = replace(worker.costs, is_exact=True)
        _estimate(worker, world, stands=True)
        return
    _keep_exact(worker, world, worker.costs, exact)
    tell_estimate(worker, world)


def _keep_exact(worker: Worker, world: World, costs: Costs, exact: Estimated) -> None:
    """The exact figure stands from now on; if it says that one device more is needed, a first figure for that."""
    estimate = estimates.from_trace(exact, worker.preset, forked=costs.forked, first=costs.estimate)
    world.calibration.store_exact(costs.key, estimate)
    worker.costs = replace(costs, estimate=estimate, is_exact=True)
    if not sharding.fits(worker.choice, estimate.shards, _bounds(worker, world)):
        _estimate(worker, world)


async def trace_unknown(worker: Worker, world: World, program: Program) -> None:
    """Where nothing but the weights is known, or a first figure is beyond what the preset allows of single devices, ask
    for the exact figure before anybody plans with a guess."""
    while (costs := worker.costs) is not None and not costs.is_exact and _is_a_guess(worker, world, costs.estimate):
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
    order = device_order(worker.preset, world.launcher.readings(), worker.devices)
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


__all__ = ["key_of", "refine", "tell_estimate", "trace_unknown", "weigh"]

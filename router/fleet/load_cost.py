"""The cost of a load: the bytes that it needs on each device, estimated before the load and measured after it.

The first estimate is the best one that is available at once: preset, learned, exact from an earlier load, or static.
The exact estimate is made when the planner needs it, because it runs the worker program for seconds.

Measurements raise the reservation, and become learned estimates. A worker has its peak memory only after its largest
possible step. Until then a share of the estimated activations, by the static formula, is added to the measurement. The
share shrinks as the model is used. It is 0 once a worker has had a whole prompt chunk, a full batch and a full context.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from router.errors import LoadFailed
from router.fleet.worker import Costs, Worker
from router.fleet.worker_argv import program_of, question, threads
from router.launch.interface import Program, WorkerLost
from router.memory import estimate as estimates
from router.memory import sharding
from router.memory.checkpoint_facts import Checkpoint, UnknownArchitecture, effective_ctx
from router.memory.estimate import Estimate, Overhead
from router.memory.segments import compute_bytes
from router.memory.sharding import allowed_devices, best_estimate, device_order, first_fitting, record_key
from router.planner.ledger import HOST, DeviceId
from worker.protocol.argv import Estimate as EstimateCommand

if TYPE_CHECKING:  # it imports this module
    from router.fleet.fleet import Fleet

log = logging.getLogger("router.fleet.load_cost")

NEGLIGIBLE = 0.05
"""A step this close to the largest one counts as it: a prompt is never quite as long as the context. A guess."""


# Estimates before the load


async def weigh(worker: Worker, fleet: Fleet) -> None:
    """Set facts, devices and costs of a worker with a snapshot. Raises EstimateError, LoadFailed."""
    worker.facts = await fleet.files.read(worker.snapshot, worker.preset)
    readings = fleet.launcher.readings()
    worker.pools = {reading.id: reading.pool for reading in readings if reading.pool is not None}
    worker.devices = allowed_devices(worker.preset, readings)
    _estimate(worker, fleet)


def _estimate(worker: Worker, fleet: Fleet, *, is_last: bool = False) -> None:
    """Choose the fewest devices on which the worker fits, with the best estimate that is available at once.

    `is_last`: no better estimate will follow. Raises EstimateError, LoadFailed.
    """
    preset, facts, readings = worker.preset, worker.facts, fleet.launcher.readings()
    assert facts is not None
    forked = fleet.launcher.forks(program_of(preset, str(worker)))
    bounds = _bounds(worker, fleet)
    order = device_order(preset, readings, worker.devices)
    room = sharding.limited(preset, readings, fleet.scheduler.capacities())

    def estimate_of(choice: sharding.Choice) -> Estimate:
        thread_count = threads(preset, on_host=worker.on_host, ranks=choice.ranks)
        records = fleet.learned_estimates
        return best_estimate(choice, facts, preset, readings, records, forked=forked, threads=thread_count)

    choice, found = first_fitting(
        sharding.choices(facts, preset, worker.devices, order, room),
        lambda choice: _largest(estimate_of(choice)),
        bounds,
        can_wait=lambda estimate: not (is_last or estimate.is_exact),
    )
    key = record_key(choice, facts, preset, readings, forked=forked)
    worker.costs = costs = Costs(
        estimate=found,
        choice=choice,
        is_exact=is_last or found.is_exact,
        key=key,
        load_seconds=fleet.learned_estimates.load_seconds(key) or 0.0,
        forked=forked and found.source != "preset",  # a figure of the preset holds for executed workers, too
    )
    if preset.gpu_split and not worker.on_host:
        _check_bounds(worker, costs, bounds)
    if not costs.is_exact and fleet.scheduler.never_fits(worker):
        worker.costs = replace(worker.costs, is_exact=True)


def _largest(estimate: Estimate) -> Estimate:
    """Return the estimate with the most of its KV cache. Less of the range is not granted yet."""
    return estimate.granted(estimate.kv_steps)


def _check_bounds(worker: Worker, costs: Costs, bounds: Mapping[DeviceId, int]) -> None:
    """Apply the preset's limits per device. Raises LoadFailed if the worker needs more."""
    choice, shards = costs.choice, costs.estimate.shards
    if sharding.fits(choice, shards, bounds):
        if choice.shards == 1:
            devices = frozenset(id for id in choice.devices if bounds[id] >= shards[0])
            worker.costs = replace(costs, choice=replace(choice, devices=devices))
    elif costs.is_exact or not sharding.fits(choice, sharding.floor(costs.estimate), bounds):
        most = ", ".join(f"{size >> 20} MiB of {device}" for device, size in bounds.items())
        needs = " + ".join(f"{size >> 20} MiB" for size in shards)
        raise LoadFailed(
            f"{worker.preset.id}: it needs {needs}, but gpu-split and the device sizes allow {most};"
            " raise gpu-split or lower ctx-size"
        )


def _bounds(worker: Worker, fleet: Fleet) -> dict[DeviceId, int]:
    """Return the usable bytes of each device that the preset allows."""
    readings = fleet.launcher.readings()
    order = device_order(worker.preset, readings, worker.devices)
    return sharding.bounded(
        worker.preset, order, sharding.limited(worker.preset, readings, fleet.scheduler.capacities())
    )


async def trace_unknown(worker: Worker, fleet: Fleet, program: Program) -> None:
    """Make the exact estimate before the first plan if the first estimate is a guess.

    It is one if only the weights are known, or if it exceeds the preset's limits per device.
    """
    while (costs := worker.costs) is not None and not costs.is_exact and _is_a_guess(worker, fleet, costs):
        command = question(worker)
        worker.costs = None  # a worker without costs is not planned
        await _make_exact(worker, fleet, program, command, costs)


def _is_a_guess(worker: Worker, fleet: Fleet, costs: Costs) -> bool:
    if costs.estimate.source == "weights":
        return True
    is_bound = bool(worker.preset.gpu_split) and not worker.on_host
    return is_bound and not sharding.fits(costs.choice, costs.estimate.shards, _bounds(worker, fleet))


async def refine(worker: Worker, fleet: Fleet, program: Program) -> None:
    """Replace the estimate by the exact one. If that fails, the present one counts as exact."""
    assert worker.costs is not None
    if await _make_exact(worker, fleet, program, question(worker), worker.costs):
        append_estimate(worker, fleet)


async def _make_exact(worker: Worker, fleet: Fleet, program: Program, command: EstimateCommand, costs: Costs) -> bool:
    """Set the exact estimate in place of `costs`; return whether it could be made."""
    try:
        exact = await fleet.launcher.estimate(program, command)
    except WorkerLost as lost:
        if lost.final:
            raise
        note, source = costs.estimate.note, costs.estimate.source
        in_use = f"the estimate in use is {note}" if note else f"the {source} estimate is used"
        log.warning("%s: no exact estimate (%s); %s", worker, lost.message, in_use)
        _estimate(worker, fleet, is_last=True)
        return False
    estimate = estimates.from_trace(exact, worker.preset, forked=costs.forked, first=costs.estimate)
    estimate = _largest(estimate)
    fleet.learned_estimates.store_exact(costs.key, estimate)
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
        note=found.note,
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
    _learn_overhead(worker, fleet)
    learn(worker, fleet)


def settle_reservation(worker: Worker) -> None:
    """Raise a ready worker's reservation to its measurement plus the main memory that it may still allocate.

    It is never lowered: the pools are allocated, but a longer prompt may still need more activations.
    """
    later = _later(worker)
    for device, size in worker.occupied.items():
        size += later if device.index == HOST else 0
        worker.reserved[device] = max(worker.reserved.get(device, 0), size)


def learn(worker: Worker, fleet: Fleet) -> None:
    """Record a worker's measurement as a learned estimate. Called when it is ready and when it stops."""
    costs = worker.costs
    if costs is None or costs.estimate.source == "preset" or not worker.place:
        return
    shards, host = _peaks(worker, costs)
    if all(shards):
        share = _share_to_come(worker)
        worker.has_peaked = share == 0
        fleet.learned_estimates.record(costs.key, costs.estimate, shards, host, share_to_come=share)


def learn_at_peak(worker: Worker, fleet: Fleet) -> None:
    """Record the measurement after the largest step, so that it is not lost if the router is killed."""
    if not worker.has_peaked and _share_to_come(worker) == 0:
        learn(worker, fleet)


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


def _share_to_come(worker: Worker) -> float:
    """Return the share of activations still to come: 1.0 before any step, 0.0 after the largest one."""
    facts, preset = worker.facts, worker.preset
    prompt, rows, end = (worker.pulse.largest if worker.pulse is not None else None) or (0, 0, 0)
    if facts is None or not prompt:
        return 1.0
    tokens = effective_ctx(facts, preset)
    seen = replace(
        preset,
        prefill_chunk=min(prompt, preset.chunk),
        max_prefill_tokens=0,
        parallel=max(rows, 1),
    )
    seen_facts = _with_images_seen(facts, worker, seen.parallel, tokens)
    try:
        so_far = compute_bytes(seen_facts, seen, min(end, tokens), on_host=worker.on_host)
        at_most = compute_bytes(facts, preset, tokens, on_host=worker.on_host)
    except UnknownArchitecture:  # without a formula, a whole prompt chunk counts as the largest step
        return 0.0 if prompt >= min(preset.chunk, tokens - 1) else 1.0
    share = 1 - so_far / at_most
    return share if share > NEGLIGIBLE else 0.0


def _with_images_seen(facts: Checkpoint, worker: Worker, rows: int, tokens: int) -> Checkpoint:
    """Return the facts with the largest image that the worker has processed, and as many images per batch of `rows`.

    `tokens`: the context length, which bounds an image.
    """
    image, images = (worker.pulse.seen if worker.pulse is not None else None) or (0, 0)
    largest = min(facts.picture_tokens, tokens)
    if not largest or image >= (1 - NEGLIGIBLE) * largest:
        image = facts.picture_tokens
    tower = facts.tower * image // max(facts.picture_tokens, 1)
    return replace(facts, tower=tower, picture_tokens=image * min(images, rows) // rows)


def _later(worker: Worker) -> int:
    """Return the bytes of main memory that the worker may still allocate."""
    if worker.pulse is not None:
        return worker.pulse.later
    return worker.process.ready.later if worker.process is not None else 0


def _peaks(worker: Worker, costs: Costs) -> tuple[tuple[int, ...], int]:
    """Return the peak bytes by shard (0: not measured), and of main memory beside them with what may be allocated."""
    main, later = DeviceId(worker.place[0].node, HOST), _later(worker)
    shards = tuple(worker.measured.get(device, 0) for device in worker.place)
    if main in worker.place:  # the only shard
        return tuple(size and size + later for size in shards), 0
    beside = costs.estimate.host
    measured = worker.measured.get(main, 0)
    return shards, measured + later if beside and measured else beside


__all__ = [
    "append_estimate",
    "learn",
    "learn_at_peak",
    "record_load",
    "refine",
    "settle_reservation",
    "trace_unknown",
    "weigh",
]

"""Measurements of workers: they raise the reservation, and become learned estimates.

A worker has its peak memory only after its largest possible step. Until then a share of the estimated activations, by
the static formula, is added to the measurement. The share shrinks as the model is used. It is 0 once a worker has had a
whole prompt chunk, a full batch and a full context.
"""

from dataclasses import replace

from router.fleet.interfaces import World
from router.fleet.worker import Worker
from router.memory.checkpoint_facts import Checkpoint, UnknownArchitecture, effective_ctx
from router.memory.estimate import Overhead
from router.memory.segments import compute_bytes
from router.planner.ledger import HOST, DeviceId

NEGLIGIBLE = 0.05
"""A step this close to the largest one counts as it: a prompt is never quite as long as the context. A guess."""


def settle_reservation(worker: Worker) -> None:
    """Raise a ready worker's reservation to its measurement plus the main memory that it may still allocate.

    It is never lowered: the pools are allocated, but a longer prompt may still need more activations.
    """
    later = _later(worker)
    for device, size in worker.occupied.items():
        size += later if device.index == HOST else 0
        worker.reserved[device] = max(worker.reserved.get(device, 0), size)


def learn(worker: Worker, world: World) -> None:
    """Record a worker's measurement as a learned estimate. Called when it is ready and when it stops."""
    if worker.ready_at is None:
        _learn_overhead(worker, world)
    costs = worker.costs
    if costs is None or costs.estimate.source == "preset" or not worker.place:
        return
    shards, host = _peaks(worker)
    if all(shards):
        share = _share_to_come(worker)
        worker.has_peaked = share == 0
        world.calibration.record(costs.key, costs.estimate, shards, host, share_to_come=share)


def learn_at_peak(worker: Worker, world: World) -> None:
    """Record the measurement after the largest step, so that it is not lost if the router is killed."""
    if not worker.has_peaked and _share_to_come(worker) == 0:
        learn(worker, world)


def _learn_overhead(worker: Worker, world: World) -> None:
    """Record the process overhead, which does not depend on the model. A worker reports it once, when ready."""
    process = worker.process
    if process is None or not process.ready.overhead:
        return
    ready, host = process.ready, process.ready.overhead.get("cpu", 0)
    names = {reading.id: reading.name for reading in world.launcher.readings()}
    for shard, device in enumerate(worker.place):
        is_host = device.index == HOST
        measured = Overhead(0 if is_host else ready.overhead.get(f"cuda:{shard}", 0), host)
        name = "cpu" if is_host else names.get(device, "")
        world.calibration.record_overhead(name, measured, forked=process.forked, is_own=ready.overhead_is_own)


def _share_to_come(worker: Worker) -> float:
    """Return the share of activations still to come: 1.0 before any step, 0.0 after the largest one."""
    facts, preset = worker.facts, worker.preset
    prompt, rows, end = (worker.pulse.largest if worker.pulse is not None else None) or (0, 0, 0)
    if facts is None or not prompt:
        return 1.0
    tokens = effective_ctx(facts, preset)
    had = replace(
        preset,
        prefill_chunk=min(prompt, preset.chunk),
        max_prefill_tokens=0,
        parallel=max(rows, 1),
    )
    try:
        steps = [
            compute_bytes(known, one, length, on_host=worker.on_host)
            for known, one, length in (
                (_as_far_as_seen(facts, worker, had.parallel, tokens), had, min(end, tokens)),
                (facts, preset, tokens),
            )
        ]
    except UnknownArchitecture:  # without a formula, a whole prompt chunk counts as the largest step
        return 0.0 if prompt >= min(preset.chunk, tokens - 1) else 1.0
    share = 1 - steps[0] / steps[1]
    return share if share > NEGLIGIBLE else 0.0


def _as_far_as_seen(facts: Checkpoint, worker: Worker, rows: int, tokens: int) -> Checkpoint:
    """Return the facts with the largest image that the worker has processed, and as many images per batch of `rows`.

    `tokens`: the context length, which bounds an image.
    """
    one, images = (worker.pulse.seen if worker.pulse is not None else None) or (0, 0)
    largest = min(facts.picture_tokens, tokens)
    if not largest or one >= (1 - NEGLIGIBLE) * largest:
        one = facts.picture_tokens
    tower = facts.tower * one // max(facts.picture_tokens, 1)
    return replace(facts, tower=tower, picture_tokens=one * min(images, rows) // rows)


def _later(worker: Worker) -> int:
    """Return the bytes of main memory that the worker may still allocate."""
    if worker.pulse is not None:
        return worker.pulse.later
    return worker.process.ready.later if worker.process is not None else 0


def _peaks(worker: Worker) -> tuple[tuple[int, ...], int]:
    """Return the peak bytes by shard (0: not measured), and of main memory beside them with what may be allocated."""
    assert worker.costs is not None
    main, later = DeviceId(worker.place[0].node, HOST), _later(worker)
    shards = tuple(worker.measured.get(device, 0) for device in worker.place)
    if main in worker.place:  # the only shard
        return tuple(size and size + later for size in shards), 0
    beside = worker.costs.estimate.host
    measured = worker.measured.get(main, 0)
    return shards, measured + later if beside and measured else beside


__all__ = ["learn", "learn_at_peak", "settle_reservation"]

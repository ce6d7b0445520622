"""What a worker has measured: it is charged with it, and it teaches the next one.

One that has not computed its largest step yet has not been at its peak. What that step would take beyond those it has
had is a share of its estimate's compute, by the static formula, and is added to what was measured. The share shrinks as
a model is used, and is gone once a worker had a whole chunk of a prompt, a full batch and a full context.
"""

from dataclasses import replace

from router.fleet.interfaces import World
from router.fleet.worker import Worker
from router.memory.activations import compute_bytes
from router.memory.checkpoint_facts import Checkpoint, UnknownArchitecture, effective_ctx
from router.memory.process import Overhead
from router.planner.ledger import HOST, DeviceId

NEGLIGIBLE = 0.05
"""Of a largest step: so close to it is as good as there. A prompt is never quite as long as the context, say."""


def settle_reservation(worker: Worker) -> None:
    """Once ready, a worker is charged its estimate, or what it measures and may yet take of main memory, whichever is
    more: its pools are allocated, but what a longer prompt computes may still come."""
    later = _later(worker)
    for device, size in worker.occupied.items():
        size += later if device.index == HOST else 0
        worker.reserved[device] = max(worker.reserved.get(device, 0), size)


def learn(worker: Worker, world: World) -> None:
    """Keep what a worker has measured: when it is ready, and when it leaves."""
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
    """The same as soon as its largest step lies behind it, so that a router that is killed has learned."""
    if not worker.has_peaked and _share_to_come(worker) == 0:
        learn(worker, world)


def _learn_overhead(worker: Worker, world: World) -> None:
    """What a process takes there whatever its model: it says so once, when it is ready."""
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
    """1.0 of a worker that has computed nothing, 0.0 of one that has had its largest step."""
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
    except UnknownArchitecture:  # a whole chunk is all that can be asked for
        return 0.0 if prompt >= min(preset.chunk, tokens - 1) else 1.0
    share = 1 - steps[0] / steps[1]
    return share if share > NEGLIGIBLE else 0.0


def _as_far_as_seen(facts: Checkpoint, worker: Worker, rows: int, tokens: int) -> Checkpoint:
    """A model whose largest image is the largest that its worker has seen, with as many at once as it had in `rows`;
    `tokens`: of a whole context, which no image is longer than."""
    one, images = (worker.pulse.seen if worker.pulse is not None else None) or (0, 0)
    largest = min(facts.picture_tokens, tokens)
    if not largest or one >= (1 - NEGLIGIBLE) * largest:
        one = facts.picture_tokens
    tower = facts.tower * one // max(facts.picture_tokens, 1)
    return replace(facts, tower=tower, picture_tokens=one * min(images, rows) // rows)


def _later(worker: Worker) -> int:
    """Bytes of main memory that it does not take yet, and may at any time."""
    if worker.pulse is not None:
        return worker.pulse.later
    return worker.process.ready.later if worker.process is not None else 0


def _peaks(worker: Worker) -> tuple[tuple[int, ...], int]:
    """Peak bytes by shard (0: not measured), and of main memory beside them, with what it may yet take of that."""
    assert worker.costs is not None
    main, later = DeviceId(worker.place[0].node, HOST), _later(worker)
    shards = tuple(worker.measured.get(device, 0) for device in worker.place)
    if main in worker.place:  # it is the only shard
        return tuple(size and size + later for size in shards), 0
    beside = worker.costs.estimate.host
    measured = worker.measured.get(main, 0)
    return shards, measured + later if beside and measured else beside


__all__ = ["learn", "learn_at_peak", "settle_reservation"]

"""Sharding: the devices of a model, the layers or the part of each matrix on each of them, and the best estimate.

A model that fits on one device is not split, unless its preset asks for it. Otherwise its layers go to the fewest
devices that hold them: those with the most memory, all equally full. Tensor parallelism is used only if the preset asks
for it. A model that it does not divide is split by layers instead, or is on one device if that is impossible, too. A
preset with figures for single devices (gpu-split, tensor-split) also selects these devices.

Live loads (router.fleet.load_cost) and the command `router estimate` share these functions, so both place a model on
the same devices and show the same figure. They differ in one rule only: a live worker may wait for an exact estimate,
which `first_fitting` gets as an argument.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from router.config.presets import ALL_DEVICES, ALL_LAYERS, Preset
from router.errors import LoadFailed
from router.memory import learned, tensor_parallel
from router.memory.checkpoint_facts import Checkpoint, EstimateError, UnknownArchitecture
from router.memory.estimate import (
    UNKNOWN,
    MemoryEstimate,
    Overhead,
    estimate,
    layer_costs,
    reason_not_to_split,
    refreshed,
)
from router.planner.ledger import HOST, DeviceId, Ledger, Reading

BISECTIONS = 60  # of a binary search: as exact as a float


class Indivisible(EstimateError):
    """The preset asks for several devices, and the model or the machine does not allow it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to place a model."""

    layers: tuple[int, ...] = ()  # of each shard; empty: each has all, or a part of all
    devices: frozenset[DeviceId] = frozenset()  # those that its shards may take
    place: tuple[DeviceId, ...] = ()  # the device of each shard; empty: any of `devices`
    ranks: int = 1  # among how many each matrix is divided: as many shards, or one shard if that is main memory
    note: str = ""  # a warning if it is not the way that the preset asks for

    @property
    def on_host(self) -> bool:
        return all(device.index == HOST for device in self.devices)

    @property
    def shards(self) -> int:
        return len(self.layers) or (1 if self.on_host else self.ranks)


def choices(
    facts: Checkpoint,
    preset: Preset,
    devices: Collection[DeviceId],
    order: Sequence[DeviceId],
    room: Mapping[DeviceId, int],
) -> Iterator[Choice]:
    """Yield the ways to place a model on some of `devices`, those on fewest devices first.

    `order`: the same devices in the order in which lists of the preset count them. `room`: bytes that could ever be
    free on each. Raises Indivisible if the preset asks for something impossible.
    """
    if preset.gpu_layers < min(facts.layers, ALL_LAYERS) and any(device.index != HOST for device in devices):
        raise Indivisible(
            f"{preset.id}: n-gpu-layers = {preset.gpu_layers} leaves {facts.layers - preset.gpu_layers} of"
            f" {facts.layers} layers in host memory, which the engine {preset.engine} cannot do; remove it, or write 0"
        )
    if preset.tensor_parallel > 1 or preset.split_mode == "tensor":
        yield from _tensor_parallel(facts, preset, devices, order, room)
        return
    on_host = all(device.index == HOST for device in devices)
    least, most = _counts(preset, 0 if on_host else len(devices))
    if on_host or most == 1:
        yield Choice(devices=frozenset(devices))
        return
    bounds = within_gpu_split(preset, order, room)
    why = _reason_not_to_split(facts, preset)
    if why and least > 1:
        raise Indivisible(
            f"{preset.id}: {least} devices are asked for, and it cannot be split over several: {why};"
            " remove pipeline-parallel, split-mode and tensor-split"
        )
    if least == 1:  # one device comes first: each further one adds copies between layers to every step
        yield Choice(devices=frozenset(bounds))
    if why:
        return
    if preset.tensor_split:
        place = tuple(device for device, share in zip(order, preset.tensor_split, strict=False) if share)
        if len(place) < least:
            raise Indivisible(
                f"{preset.id}: tensor-split is for {least} devices, and there are {len(place)}; change it"
            )
        costs = layer_costs(facts, preset)
        shares = [share for share in preset.tensor_split if share]
        yield Choice(balanced_layers(costs, [0] * least, shares), frozenset(place), place)
        return
    if len(bounds) < least:
        raise Indivisible(
            f"{preset.id}: pipeline-parallel = {least} needs {least} devices, and it may use {len(bounds)}; lower it"
        )
    if len(facts.by_layer) < least:
        raise Indivisible(f"{preset.id}: it has {len(facts.by_layer)} layers for {least} devices; lower the number")
    yield from _by_layers(facts, preset, bounds, order, range(max(2, least), most + 1))


def _by_layers(
    facts: Checkpoint,
    preset: Preset,
    bounds: Mapping[DeviceId, int],
    order: Sequence[DeviceId],
    counts: Iterable[int],
) -> Iterator[Choice]:
    """Yield the layer split over each number of devices in `counts` for which there are devices and layers."""
    for count in counts:
        place = _roomiest(bounds, order, count)
        layers = _layers(facts, preset, [bounds[device] for device in place]) if len(place) == count else ()
        if layers:
            is_given = len(preset.gpu_split) > 1
            yield Choice(layers, frozenset(place if is_given else bounds), place if is_given else ())


def _roomiest(bounds: Mapping[DeviceId, int], order: Sequence[DeviceId], count: int) -> tuple[DeviceId, ...]:
    """Return the `count` devices with the most room, in the order of the preset's lists; fewer if there are fewer."""
    chosen = sorted(bounds, key=lambda device: (-bounds[device], order.index(device)))[:count]
    return tuple(device for device in order if device in chosen)


def _tensor_parallel(
    facts: Checkpoint,
    preset: Preset,
    devices: Collection[DeviceId],
    order: Sequence[DeviceId],
    room: Mapping[DeviceId, int],
) -> Iterator[Choice]:
    """Yield the ways of tensor parallelism on some of `devices`, the fewest first; the ways of layer split or one
    device, with a note, if the model cannot be divided. Raises Indivisible if there are too few devices."""
    ranks, on_host = preset.tensor_parallel, all(device.index == HOST for device in devices)
    if on_host:
        yield _on_host(facts, preset, ranks, frozenset(devices))
        return
    bounds = within_gpu_split(preset, order, room)
    offered = len(bounds)
    _check_ranks(preset, offered)
    # Asked for without a number (`split-mode = tensor`): the fewest ranks that fit, since each adds communication.
    counts = range(2, offered + 1) if ranks == 1 else [offered if ranks == ALL_DEVICES else ranks]
    if offered < 2:
        yield Choice(devices=frozenset(bounds))
        return
    reasons = {count: tensor_parallel.reason_not_to_divide_by(facts, preset, count) for count in counts}
    if all(reasons.values()):
        yield from _fallback(facts, preset, bounds, order, reasons)
        return
    for count in (count for count, why in reasons.items() if not why):
        place = _roomiest(bounds, order, count) if len(preset.gpu_split) > 1 else ()
        yield Choice(ranks=count, devices=frozenset(place or bounds), place=place)


def _check_ranks(preset: Preset, offered: int) -> None:
    ranks = preset.tensor_parallel
    if ranks != ALL_DEVICES and ranks > offered:
        raise Indivisible(
            f"{preset.id}: tensor-parallel = {ranks} needs {ranks} accelerators, and there are {offered} that it may"
            " use; lower it"
        )


def _on_host(facts: Checkpoint, preset: Preset, ranks: int, devices: frozenset[DeviceId]) -> Choice:
    """Return the way of tensor parallelism on main memory, where only a number of processes asks for it."""
    if ranks == 1:
        return Choice(devices=devices)
    if ranks == ALL_DEVICES:
        note = "tensor-parallel = max counts accelerators, and it is on the CPU, so one process computes it"
        return Choice(devices=devices, note=note)
    why = tensor_parallel.reason_not_to_divide_by(facts, preset, ranks)
    note = f"tensor-parallel = {ranks} is not possible, so one process computes it: {why}" if why else ""
    return Choice(devices=devices, ranks=1 if why else ranks, note=note)


def _fallback(
    facts: Checkpoint,
    preset: Preset,
    bounds: Mapping[DeviceId, int],
    order: Sequence[DeviceId],
    reasons: Mapping[int, str],
) -> Iterator[Choice]:
    """Yield what replaces tensor parallelism over the numbers of devices in `reasons`: a split of the layers over as
    many, else one device."""
    ranks = preset.tensor_parallel
    key = "split-mode = tensor" if ranks == 1 else f"tensor-parallel = {'max' if ranks == ALL_DEVICES else ranks}"
    fewest = min(reasons)
    why_whole = _reason_not_to_split(facts, preset)
    counts = {min(count, len(facts.by_layer)) for count in reasons}
    if not why_whole:
        found = list(_by_layers(facts, preset, bounds, order, sorted(counts - {0, 1})))
        for choice in found:
            over = f"its layers are split over {choice.shards} accelerators"
            yield replace(choice, note=f"{key} is not possible, so {over}: {reasons[fewest]}")
        if found:
            return
    # The reason against layers holds for tensor parallelism, too, but for required-memory.
    why = reasons[fewest] + (f"; {why_whole}" if why_whole not in (reasons[fewest], "") else "")
    yield Choice(devices=frozenset(bounds), note=f"{key} is not possible, so it is on one accelerator: {why}")


def static_estimate(
    choice: Choice,
    facts: Checkpoint,
    preset: Preset,
    *,
    threads: int,
    forked: bool,
    overhead: Overhead = UNKNOWN,
) -> MemoryEstimate:
    """Return the static estimate of a model that is placed by `choice`; see `router.memory.estimate.estimate`."""
    process: dict[str, Any] = {"on_host": choice.on_host, "threads": threads, "forked": forked, "overhead": overhead}
    if choice.ranks > 1:
        return tensor_parallel.estimate(facts, preset, choice.ranks, **process)
    return estimate(facts, preset, layers=choice.layers, **process)


def within_gpu_split(preset: Preset, order: Sequence[DeviceId], room: Mapping[DeviceId, int]) -> dict[DeviceId, int]:
    """Return the devices that gpu-split allows, with the bytes that the model may have on each."""
    stated = preset.gpu_split
    if not stated:
        return {device: room.get(device, 0) for device in order}
    given = stated * len(order) if len(stated) == 1 else stated
    return {device: min(room.get(device, 0), bound) for device, bound in zip(order, given, strict=False) if bound}


def within_utilization(
    preset: Preset, readings: Sequence[Reading], room: Mapping[DeviceId, int]
) -> dict[DeviceId, int]:
    """Return the `room` on each device within gpu-memory-utilization."""
    most = {reading.id: int(preset.gpu_memory_utilization * reading.total) for reading in readings}
    return {device: min(size, most.get(device, size)) for device, size in room.items()}


def limiting_keys(preset: Preset, *, on_host: bool) -> str:
    """Return the names of the keys that limit the memory of the model on a device, for messages; empty: none."""
    keys = {
        "gpu-split": bool(preset.gpu_split) and not on_host,
        "gpu-memory-utilization": preset.gpu_memory_utilization < 1,
    }
    return " and ".join(key for key, is_set in keys.items() if is_set)


def check_count(preset: Preset, devices: Collection[DeviceId]) -> None:
    """Raise Indivisible if the preset is for more accelerators than there are among `devices`."""
    on_host = all(device.index == HOST for device in devices)
    if preset.tensor_parallel <= 1:
        _counts(preset, 0 if on_host else len(devices))
    elif not on_host:  # there its ranks are processes
        _check_ranks(preset, len(devices))


def _counts(preset: Preset, offered: int) -> tuple[int, int]:
    """Return the fewest and the most devices that the preset allows, of `offered` accelerators."""
    if preset.tensor_split:
        wanted = sum(1 for share in preset.tensor_split if share)
    else:
        wanted = offered if preset.pipeline_parallel == ALL_DEVICES else preset.pipeline_parallel
    if wanted > max(1, offered):
        key = "tensor-split" if preset.tensor_split else "pipeline-parallel"
        there = f"there are {offered}" if offered else "there is none"
        raise Indivisible(f"{preset.id}: {key} is for {wanted} accelerators, and {there} that it may use; change it")
    if wanted > 1:
        return wanted, wanted
    if preset.split_mode == "none":
        return 1, 1
    return (min(2, max(1, offered)) if preset.split_mode == "layer" else 1), max(1, offered)


def _reason_not_to_split(facts: Checkpoint, preset: Preset) -> str:
    asks_for_several = preset.pipeline_parallel > 1 or preset.tensor_parallel > 1 or preset.tensor_split
    if preset.required_memory and not asks_for_several:
        return "required-memory gives its memory on one device"
    try:
        layer_costs(facts, preset)
    except UnknownArchitecture as unknown:
        return unknown.fact
    return reason_not_to_split(facts, preset)


def _layers(facts: Checkpoint, preset: Preset, room: Sequence[int]) -> tuple[int, ...]:
    """Return the number of layers on each device, all equally full; empty if there are fewer layers than devices."""
    costs = layer_costs(facts, preset)
    count = len(room)
    if len(costs) < count:
        return ()
    first = (1,) * (count - 1) + (len(costs) - count + 1,)
    found = estimate(facts, preset, layers=first, on_host=False)
    other_bytes, at = [], 0
    for shard, layers in zip(found.shards, first, strict=True):
        other_bytes.append(max(0, shard - sum(costs[at : at + layers])))
        at += layers
    return balanced_layers(costs, other_bytes, room)


def balanced_layers(costs: Sequence[int], other_bytes: Sequence[int], room: Sequence[float]) -> tuple[int, ...]:
    """Return the number of layers on each device that leaves the fullest device least full, at least one each. `costs`:
    bytes of each layer; `other_bytes`: bytes on each device that belong to no layer; `room`: bytes of each device."""
    room = [max(1, have) for have in room]
    low, high = 0.0, max((each + sum(costs) + 1) / have for each, have in zip(other_bytes, room, strict=True))
    best = _fill(costs, other_bytes, room, high)
    assert best, "there is a layer for each device, and any device filled so far has room for all"
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = _fill(costs, other_bytes, room, middle)
        if found:
            best, high = found, middle
        else:
            low = middle
    return best


def _fill(costs: Sequence[int], other_bytes: Sequence[int], room: Sequence[float], share: float) -> tuple[int, ...]:
    """Return the layers by device if none is fuller than `share` of its bytes; empty if that is impossible."""
    counts, at = [], 0
    for place, (taken, have) in enumerate(zip(other_bytes, room, strict=True)):
        left = len(room) - place - 1
        count, used = 0, taken
        while at + count < len(costs) - left and used + costs[at + count] <= share * have:
            used += costs[at + count]
            count += 1
        if not count:
            return ()
        counts.append(count)
        at += count
    return tuple(counts) if at == len(costs) else ()


def fits(choice: Choice, shards: Sequence[int], room: Mapping[DeviceId, int]) -> bool:
    """Return whether shards of these sizes could ever be placed; `room` includes the bounds of gpu-split."""
    if choice.place:
        return all(size <= room.get(device, 0) for size, device in zip(shards, choice.place, strict=True))
    sizes = sorted(shards, reverse=True)
    have = sorted((room.get(device, 0) for device in choice.devices), reverse=True)
    return len(have) >= len(sizes) and all(size <= most for size, most in zip(sizes, have, strict=False))


def assigned(choice: Choice, shards: Sequence[int], room: Mapping[DeviceId, int]) -> tuple[DeviceId, ...]:
    """Return the device of each shard: the fixed one, else the largest shard on the device with most memory."""
    if choice.place:
        return choice.place
    by_room = sorted(choice.devices, key=lambda device: (-room.get(device, 0), device))
    by_size = sorted(range(len(shards)), key=lambda shard: -shards[shard])
    placed = dict(zip(by_size, by_room, strict=False))
    return tuple(placed[shard] for shard in range(len(shards)))


def grantable(choice: Choice, found: MemoryEstimate, room: Mapping[DeviceId, int]) -> int:
    """Return the steps of the range of the KV cache for which devices with so much `room` have memory."""
    places = assigned(choice, found.shards, room)
    sizes = zip(places, found.shards, found.kv_step, strict=False)  # without a range there is no step
    steps = ((room.get(device, 0) - shard) // step for device, shard, step in sizes if step)
    return max(0, min((found.kv_steps, *steps)))


def least_shards(found: MemoryEstimate) -> tuple[int, ...]:
    """Return the least that each shard takes: its weights."""
    return found.weights if any(found.weights) else found.shards


def allowed_devices(preset: Preset, readings: Sequence[Reading]) -> frozenset[DeviceId]:
    """Return the devices of the key `device`; without it all accelerators, or main memory if there are none.

    Raises LoadFailed if a device does not exist, or if the key mixes main memory and accelerators.
    """
    accelerators = [reading for reading in readings if reading.id.index >= 0]
    if not preset.device:
        chosen = {reading.id for reading in accelerators}
        return frozenset(chosen or {reading.id for reading in readings if reading.id.index == HOST})
    by_name = _by_name(readings)
    missing = [name for name in preset.device if name not in by_name]
    if missing:
        known = ", ".join(sorted(by_name))
        raise LoadFailed(f"{preset.id}: there is no device {', '.join(missing)} here, only {known}; change `device`")
    devices = frozenset(by_name[name] for name in preset.device)
    if len({device.index == HOST for device in devices}) > 1:
        raise LoadFailed(f"{preset.id}: `device` mixes cpu and accelerators; name one kind")
    return devices


def unused_settings(
    preset: Preset, facts: Checkpoint, readings: Sequence[Reading], devices: Collection[DeviceId]
) -> Iterator[str]:
    """Yield a warning for each key that has no effect, or another one, for this model on these `devices`."""
    if preset.caps_ctx and 0 < facts.max_positions < preset.ctx_size:
        yield f"ctx-size is {facts.max_positions}, the model's maximum, and not {preset.ctx_size}"
    yield from unused_placement(preset, readings, devices)


def unused_placement(preset: Preset, readings: Sequence[Reading], devices: Collection[DeviceId]) -> Iterator[str]:
    """Yield a warning for each key of placement that has no effect, or another one, on these `devices`."""
    by_name = _by_name(readings)
    known = ", ".join(sorted(str(reading.id) for reading in readings))
    on_host = all(device.index == HOST for device in devices)
    for name in preset.required_memory:
        if name and name not in by_name:
            yield f"required-memory names {name}, and there is no such device here, only {known}"
        elif name and by_name[name].index != HOST and by_name[name] not in devices:
            yield f"required-memory names {name}, which the key `device` excludes"
    if on_host:
        if preset.expects_accelerator and not preset.device:
            yield "device = cuda, and there is no accelerator here, so the CPU computes"
        keys = {
            "gpu-split": bool(preset.gpu_split),
            f"split-mode = {preset.split_mode}": preset.split_mode != "auto",
            f"n-gpu-layers = {preset.gpu_layers}": preset.gpu_layers < ALL_LAYERS,
        }
        yield from (f"{key} has no effect on the CPU" for key, is_set in keys.items() if is_set)
    elif len(preset.gpu_split) > max(1, len(devices)):
        yield f"gpu-split has {len(preset.gpu_split)} values, and there are {len(devices)} accelerators"


def device_order(preset: Preset, readings: Sequence[Reading], devices: frozenset[DeviceId]) -> list[DeviceId]:
    """Return the order in which lists of the preset (gpu-split, tensor-split) count the devices: that of the key
    `device`, else that of the driver."""
    if not preset.device:
        return sorted(devices)
    by_name = _by_name(readings)
    return list(dict.fromkeys(by_name[name] for name in preset.device if name in by_name))


def _by_name(readings: Sequence[Reading]) -> dict[str, DeviceId]:
    """Return the devices by their names (`cuda:0`, `cpu`) and by the identifiers of the driver."""
    by_name = {str(reading.id): reading.id for reading in readings}
    return by_name | {reading.uuid: reading.id for reading in readings if reading.uuid}


def capacities(
    readings: Sequence[Reading], margin: Callable[[DeviceId], int], limit: Callable[[DeviceId], int | None]
) -> dict[DeviceId, int]:
    """Return the bytes that all workers together can ever have on each device."""
    return {device.id: device.capacity for device in Ledger(margin=margin, limit=limit).observe(readings, ())}


def first_fitting(
    choices: Iterable[Choice],
    estimate_of: Callable[[Choice], MemoryEstimate],
    bounds: Mapping[DeviceId, int],
    *,
    can_wait: Callable[[MemoryEstimate], bool],
) -> tuple[Choice, MemoryEstimate]:
    """Return the first choice whose estimate fits within `bounds`, else the last one.

    `can_wait`: an exact estimate replaces this one before it decides anything. A choice whose weights fit is then taken
    although the estimate does not fit. Otherwise a static bound that is too high would spread a model over more devices
    than it needs.
    """
    for choice in choices:
        found = estimate_of(choice)
        if fits(choice, found.shards, bounds):
            break
        if can_wait(found) and fits(choice, least_shards(found), bounds):
            break
    return choice, found  # `choices` yields at least one or raises


def best_estimate(
    choice: Choice,
    facts: Checkpoint,
    preset: Preset,
    readings: Sequence[Reading],
    records: learned.LearnedEstimates,
    *,
    forked: bool,
    threads: int,
    or_executed: bool = False,
    learns: bool = True,
) -> MemoryEstimate:
    """Return the estimate of the preset itself, else the exact one from before, else the static one, and the last two
    with what was learned.

    `forked`: the worker is forked, not executed. With `or_executed`, records of executed workers do for a forked one:
    they are higher. `threads`: torch threads of the worker. Without `learns`, learned figures are not used. Raises
    EstimateError.
    """
    overhead = records.overhead(device_type(choice, readings), forked=forked)
    static = static_estimate(choice, facts, preset, threads=threads, forked=forked, overhead=overhead)
    if static.source == "preset":  # the figure of the preset holds for every way to start
        return static
    for way in (True, False) if forked and or_executed else (forked,):
        key = record_key(choice, facts, preset, readings, forked=way)
        exact, known = records.exact(key), records.learned(key) if learns else None
        found = refreshed(exact, static) if exact is not None and len(exact.shards) == choice.shards else static
        if known is not None and len(known.beside) == choice.shards:
            return learned.with_learned(found, known)
        if found is not static:
            return found
    return static


def record_key(choice: Choice, facts: Checkpoint, preset: Preset, readings: Sequence[Reading], *, forked: bool) -> str:
    """Return the key under which estimates and load times of a worker are kept."""
    return learned.key(facts, preset, _device_kinds(choice, readings), forked=forked)


def device_type(choice: Choice, readings: Sequence[Reading]) -> str:
    """Return the driver's name for the type of device, or `cpu`. Of several devices the first one decides."""
    first = min(choice.devices)
    if first.index == HOST:
        return "cpu"
    return next((reading.name for reading in readings if reading.id == first), "")


def _device_kinds(choice: Choice, readings: Sequence[Reading]) -> list[str]:
    """Return the type of device by shard, with the number of its layers or of the ranks: an estimate holds for no other
    split."""
    name = device_type(choice, readings)
    if choice.ranks > 1:
        return [f"{name}, of {choice.ranks} ranks"] * choice.shards
    return [f"{name}, {count} layers" for count in choice.layers] or [name]

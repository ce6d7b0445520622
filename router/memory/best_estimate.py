"""The best estimate that is available at once for a preset on this machine, and the devices that it holds for.

Live decisions (router.fleet.load_cost) and the command `router estimate` share these functions. Both therefore place a
model on the same devices and show the same figure. They differ in one rule only: a live worker may wait for an exact
estimate, which `first_fitting` gets as an argument.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from router.config.presets import Preset
from router.errors import LoadFailed
from router.memory import estimate as estimates
from router.memory import learned, sharding
from router.memory.checkpoint_facts import Checkpoint
from router.memory.estimate import Estimate
from router.memory.process import UNKNOWN
from router.memory.sharding import Choice
from router.planner.ledger import HOST, DeviceId, Ledger, Reading


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
    estimate_of: Callable[[Choice], Estimate],
    bounds: Mapping[DeviceId, int],
    *,
    can_wait: Callable[[Estimate], bool],
) -> tuple[Choice, Estimate]:
    """Return the first choice whose estimate fits within `bounds`, else the last one.

    `can_wait`: an exact estimate replaces this one before it decides anything. A choice whose weights fit is then taken
    although the estimate does not fit. Otherwise a static bound that is too high would spread a model over more devices
    than it needs.
    """
    for choice in choices:
        found = estimate_of(choice)
        if sharding.fits(choice, found.shards, bounds):
            break
        if can_wait(found) and sharding.fits(choice, sharding.floor(found), bounds):
            break
    return choice, found  # `choices` yields at least one or raises


def best_estimate(
    choice: Choice,
    facts: Checkpoint,
    preset: Preset,
    readings: Sequence[Reading],
    records: learned.LearnedEstimates | None,
    *,
    forked: bool,
    threads: int,
    or_executed: bool = False,
) -> Estimate:
    """Return the estimate of the preset itself, else a learned, else an exact one from before, else the static one.

    `forked`: the worker is forked, not executed. With `or_executed`, records of executed workers do for a forked one:
    they are higher. `threads`: torch threads of the worker. Raises EstimateError.
    """
    overhead = records.overhead(device_type(choice, readings), forked=forked) if records is not None else UNKNOWN
    static = sharding.cost(
        choice, facts, preset, on_host=choice.on_host, threads=threads, forked=forked, overhead=overhead
    )
    if static.source == "preset" or records is None:  # the figure of the preset holds for every way to start
        return static
    for way in (True, False) if forked and or_executed else (forked,):
        key = record_key(choice, facts, preset, readings, forked=way)
        for known in (records.learned(key), records.exact(key)):
            if known is not None and len(known.shards) == choice.shards:
                return estimates.refreshed(known, static)
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


__all__ = [
    "allowed_devices", "best_estimate", "capacities", "device_order", "device_type", "first_fitting", "record_key",
]  # fmt: skip

"""The memory in use on each device.

    reserved   the estimate while STARTING; the worker's own measurement once READY; kept until STOPPED
    foreign    driver - measured memory of our READY workers, read only while the device is quiet (none of our workers
               is STARTING or leaving there); in between, the last quiet value stands
    used       max(driver, foreign + reserved)

The driver's figure includes foreign memory, but not the growth of our workers that is still to come. Reservations
include that growth, but no foreign memory. Foreign memory therefore has a row of its own: without it, two parallel
loads beside a foreign process would over-commit the device.

A limit (`--device-limit`) is a budget for our own memory, in addition to the physical rule: the reservations of our
workers, and the memory that they share (`Reading.shared`). Foreign memory does not count against it.

Shared memory is that of the fork server. It is in the driver's figure, so the physical rule counts it as foreign. It is
taken from the budget once, before any worker, and workers are charged what they hold besides. A share in each worker's
reservation would have to change with every worker that starts or exits, also for those that are placed already. PURE.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HOST = -1  # index of a node's main memory
WORKER_SLOTS = -2  # index of a node's count of workers (--models-max); its unit is one worker, not a byte
LOCAL = "local"  # the only node of a router on one machine


class DeviceId(NamedTuple):
    """One device of one machine; index >= 0 is an accelerator."""

    node: str
    index: int  # type: ignore[assignment]  # shadows tuple.index, which is not used

    def __str__(self) -> str:
        name = {HOST: "cpu", WORKER_SLOTS: "slots"}.get(self.index, f"cuda:{self.index}")
        return name if self.node == LOCAL else f"{self.node}/{name}"


MAIN_MEMORY = DeviceId(LOCAL, HOST)  # of this machine
Bytes = Mapping[DeviceId, int]


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A size that depends on the device: a share of its memory."""

    share: float

    def __str__(self) -> str:
        return f"{100 * self.share:g}%"


@dataclass(frozen=True, slots=True)
class Reading:
    """The driver's figures for one device, in bytes. `used` includes foreign memory."""

    id: DeviceId
    total: int
    used: int
    name: str = ""  # the driver's name of the device, for display
    uuid: str = ""  # the identifier that a worker gets to select the device; empty for main memory
    # Main memory, for an accelerator that has none of its own; total and used are then those of main memory.
    pool: DeviceId | None = None
    shared: int = 0  # the part of `used` that our workers share; it stays when they exit
    others: int = 0  # reservations of other routers that no driver shows yet; `used` includes them


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One row of the ledger, in bytes (in workers for WORKER_SLOTS)."""

    id: DeviceId
    total: int
    # The driver's figure, foreign memory included. For WORKER_SLOTS: our workers.
    used: int
    foreign: int  # the part of `used` that is not ours
    margin: int = 0  # bytes that are kept free
    # Budget for all our memory here, margin included; None: the device's own size is the only limit.
    limit: int | None = None
    shared: int = 0  # memory that all our workers share, which is part of the budget
    # The device whose memory this one uses, if it has none of its own. All reservations here are charged there.
    pool: DeviceId | None = None

    @property
    def capacity(self) -> int:
        """The most that our workers together can ever have here: foreign memory may be freed, the margin may not."""
        size = self.total if self.limit is None else min(self.total, self.limit)
        return max(0, size - self.margin - self.shared)


# The sort key of residents, the first to be evicted first: busy, required, priority, last use (of a busy one: end of
# its minimum residency), and the cost of loading it again in seconds x bytes.
EvictionKey = tuple[bool, bool, int, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A worker from STARTING until STOPPED, or sleeping weights. Times are in seconds of one monotonic clock."""

    id: int
    model: str
    # By device, HOST and WORKER_SLOTS shares included: the claim it was started with, or its measurement since READY.
    reserved: Bytes
    # The memory that it reports; a device without a report counts with its reservation.
    measured: Bytes = field(default_factory=dict)
    # End of its last lease, or the time at which it became ready. The least recently used is evicted first.
    last_used: float = 0.0
    busy: bool = False  # it has a lease, or a request waits for its load
    # It takes no new leases. Its memory counts until it is STOPPED and no longer in the list of residents.
    leaving: bool = False
    # The time at which it began to leave. Memory that is freed first goes to the first in the queue.
    leaving_since: float = 0.0
    pinned: bool = False
    priority: int = 0
    best_effort: bool = False
    starting: bool = False
    exclusive: bool = False  # its engine measures the device while it starts, so no other load may run there
    # The end of its minimum residency. Ignored while STARTING, because the residency begins when it is ready.
    residency_ends: float = 0.0
    expires: float | None = None  # the time at which it is evicted if it is still idle (time to live); None: never
    # Idle grace: seconds for which it is kept for its next request while it is idle inside its minimum residency.
    # None: derived from the load time of the demand, and zero where that is less than `request_interval`.
    idle_grace: float | None = None
    # The usual seconds between two requests, where they are few; None: not known.
    request_interval: float | None = None
    load_seconds: float = 0.0  # seconds that it takes to load it again
    # By device, the bytes that its exit frees of the driver's figure and of the reservations.
    holds: tuple[tuple[DeviceId, int, int], ...] = field(init=False, repr=False, compare=False)
    eviction_key: EvictionKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute `holds` and `eviction_key` once: every plan reads them for every resident."""
        reserved, measured = self.reserved, self.measured
        holds = [(id, measured.get(id, size), size) for id, size in reserved.items()]
        if not measured.keys() <= reserved.keys():
            holds += [(id, size, 0) for id, size in measured.items() if id not in reserved]
        object.__setattr__(self, "holds", tuple(holds))
        # All busy ones are in use now, so the end of the last lease does not order them, and it would change with
        # each request that ends without a new plan. The end of the minimum residency is stable.
        since = self.residency_ends if self.busy else self.last_used
        cost = self.load_seconds * sum([size for id, size in reserved.items() if id.index != WORKER_SLOTS])
        object.__setattr__(self, "eviction_key", (self.busy, not self.best_effort, self.priority, since, cost))

    @property
    def shard_devices(self) -> tuple[DeviceId, ...]:
        """The devices of the shards: accelerators, or main memory if it uses none."""
        found = tuple(id for id in self.reserved if id.index >= 0)
        return found or tuple(id for id in self.reserved if id.index == HOST)


def in_use(device: Device, residents: Iterable[Resident]) -> int:
    """Return max(driver, foreign + reserved) of a device, in bytes."""
    return max(device.used, device.foreign + sum([resident.reserved.get(device.id, 0) for resident in residents]))


def is_on(resident: Resident, devices: Collection[DeviceId]) -> bool:
    """Return whether any of its memory is on one of the devices."""
    return any(id in resident.reserved or id in resident.measured for id in devices)


def pooled(sizes: Bytes, pools: Mapping[DeviceId, DeviceId]) -> dict[DeviceId, int]:
    """Return `sizes` by the device that has the memory; `pools` maps devices that have none of their own."""
    found: dict[DeviceId, int] = {}
    for id, size in sizes.items():
        pool = pools.get(id, id)
        found[pool] = found.get(pool, 0) + size
    return found


class Ledger:
    """Turns readings and residents into devices; remembers the last quiet value of each device's foreign memory."""

    def __init__(
        self,
        *,
        margin: Callable[[DeviceId], int] = lambda _: 0,
        limit: Callable[[DeviceId], int | None] = lambda _: None,
        models_max: int = 0,
    ):
        """`margin` and `limit` return bytes for a device; `models_max` is the number of workers at once on each node,
        0: unlimited."""
        self._margin = margin
        self._limit = limit
        self._models_max = models_max
        self._foreign: dict[DeviceId, int] = {}

    def observe(self, readings: Sequence[Reading], residents: Sequence[Resident]) -> list[Device]:
        """Return the devices, in order of their ids. Devices that share one memory all get the largest of their margins
        and the smallest of their limits.

        The readings must be at least as new as the residents' states. Otherwise the memory of a worker that the driver
        does not show yet would be subtracted from the foreign memory.
        """
        members: dict[DeviceId, list[DeviceId]] = {}
        for reading in readings:
            members.setdefault(reading.pool or reading.id, []).append(reading.id)
        own = {reading.id: reading for reading in readings if reading.pool is None}
        ready = dict.fromkeys(own, 0)
        unsettled: set[DeviceId] = set()
        for resident in residents:
            if resident.starting or resident.leaving:
                unsettled.update([id for id, _, _ in resident.holds])
                continue
            for id, occupied, _ in resident.holds:
                if id in ready:
                    ready[id] += occupied
        foreign = {
            id: self._observe_foreign(id, max(0, reading.used - ready[id]), is_settled=id not in unsettled)
            for id, reading in own.items()
        }
        devices = []
        for reading in readings:
            pool = reading.pool or reading.id
            limits = [limit for id in members[pool] if (limit := self._limit(id)) is not None]
            device = Device(
                id=reading.id,
                total=own[pool].total,
                used=max(own[pool].used, reading.used),  # more: an accelerator that cannot be read, shown as full
                foreign=foreign[pool],
                margin=max(self._margin(id) for id in members[pool]),
                limit=min(limits, default=None),
                shared=own[pool].shared,
                pool=reading.pool,
            )
            devices.append(device)
        if self._models_max:
            nodes = {reading.id.node for reading in readings}
            devices.extend(self._slots(DeviceId(node, WORKER_SLOTS), residents) for node in nodes)
        return sorted(devices, key=lambda device: device.id)

    def _observe_foreign(self, id: DeviceId, seen: int, *, is_settled: bool) -> int:
        """Return the foreign bytes. `seen`: the driver's figure less our ready workers; `is_settled`: none of our
        workers is starting or leaving there."""
        if not is_settled:
            # A part of `seen` is memory of workers that start or leave, so an older value is better. Without any,
            # `seen` is too large, which is safe.
            return self._foreign.get(id, seen)
        self._foreign[id] = seen
        return seen

    def _slots(self, id: DeviceId, residents: Sequence[Resident]) -> Device:
        return Device(
            id=id, total=self._models_max, used=sum(resident.reserved.get(id, 0) for resident in residents), foreign=0
        )

"""What is used on each device.

    reserved   the estimate while STARTING; what the worker measures once READY; kept until STOPPED
    foreign    driver - measured of our READY workers, read only while the device is quiet (none of ours STARTING or
               leaving); in between the last quiet value stands
    used       max(driver, foreign + reserved)

The driver sees foreign memory, but not what our workers may still grow into; reservations say that, but nothing
foreign. So foreign memory gets a row of its own: without it, two parallel loads beside a foreign process over-commit.

A limit (`--device-limit`) is something else: a budget for the reservations of our own workers, in addition to the
physical rule. Foreign memory does not count against it. Law: PURE.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HOST = -1
"""Index of a node's main memory."""
SLOTS = -2
"""Index of a node's count of workers (--models-max); its unit is one worker, not a byte."""
LOCAL = "local"
"""The only node of a router on one machine."""


class DeviceId(NamedTuple):
    """One device of one machine; index >= 0 is an accelerator."""

    node: str
    index: int  # type: ignore[assignment]  # a device is never searched like a tuple

    def __str__(self) -> str:
        name = {HOST: "cpu", SLOTS: "slots"}.get(self.index, f"cuda:{self.index}")
        return name if self.node == LOCAL else f"{self.node}/{name}"


Bytes = Mapping[DeviceId, int]


@dataclass(frozen=True, slots=True)
class Reading:
    """The driver's word on one device, in bytes. `used` counts everybody's memory."""

    id: DeviceId
    total: int
    used: int
    name: str = ""
    """As the driver calls it, for people."""
    uuid: str = ""
    """How a worker is told to use it; empty for main memory."""
    pool: DeviceId | None = None
    """Main memory, for an accelerator that has none of its own; total and used are then those of main memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One row of the ledger, in bytes (in workers for SLOTS)."""

    id: DeviceId
    total: int
    used: int
    """The driver's word: everybody's memory. For SLOTS: our workers."""
    foreign: int
    """Of that, what is not ours."""
    margin: int = 0
    """Never given out."""
    limit: int | None = None
    """Budget for all our reservations here, margin included; None: the device's own size is the only limit."""
    pool: DeviceId | None = None
    """The device whose memory this one uses, if it has none of its own: all that is here is charged there."""

    @property
    def capacity(self) -> int:
        """What could ever be had here by our workers together: foreign memory may go away, the margin may not."""
        size = self.total if self.limit is None else min(self.total, self.limit)
        return max(0, size - self.margin)


Worth = tuple[bool, bool, int, float, float]
"""By it residents are ranked, the first to leave first: whether it is busy, whether it is a need, priority, last use or
(busy) the end of its turn, cost of bringing it back: seconds x bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A worker that occupies memory, from STARTING until STOPPED. Times are in seconds of one monotonic clock."""

    id: int
    model: str
    reserved: Bytes
    """By device, HOST and SLOTS shares included: the claim it was started with, or what it measures since READY."""
    measured: Bytes = field(default_factory=dict)
    """What it occupies by its own word; a device that it does not speak of counts with its reservation."""
    last_used: float = 0.0
    """End of its last lease, or when it became ready; the smaller, the sooner it is evicted."""
    busy: bool = False
    """Somebody leases it, or waits for its load."""
    leaving: bool = False
    """Retired: takes no new leases; its memory counts until it is STOPPED and no longer given here."""
    retired_at: float = 0.0
    """Since when it is leaving: what goes first is promised to the first in line."""
    pinned: bool = False
    priority: int = 0
    luxury: bool = False
    starting: bool = False
    quiet: bool = False
    """It measures the device at its start: shares it with no other load."""
    turn_ends: float = 0.0
    """Until then it keeps its place while it is in use. Not looked at while STARTING: its turn is still to come."""
    expires: float | None = None
    """When an idle one leaves by its time to live; None: never."""
    linger: float | None = None
    """Seconds an idle one inside its turn is kept for its next request; None: by the load of who waits, and not at all
    where that is less than `comes_back`."""
    comes_back: float | None = None
    """Seconds after which it is asked for again, if it is soon; None: not known."""
    load_seconds: float = 0.0
    """What bringing it back takes."""
    holds: tuple[tuple[DeviceId, int, int], ...] = field(init=False, repr=False, compare=False)
    """What it gives back when it leaves, by device: bytes of the driver's figure, and of what is reserved."""
    worth: Worth = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Both are asked for in every plan while it is here."""
        reserved, measured = self.reserved, self.measured
        holds = [(id, measured.get(id, size), size) for id, size in reserved.items()]
        if not measured.keys() <= reserved.keys():
            holds += [(id, size, 0) for id, size in measured.items() if id not in reserved]
        object.__setattr__(self, "holds", tuple(holds))
        # Those in use are all used now: of them, who has had its turn longest. When a request ended last would say
        # less, and change with each that ends, while nobody plans anew.
        since = self.turn_ends if self.busy else self.last_used
        cost = self.load_seconds * sum([size for id, size in reserved.items() if id.index != SLOTS])
        object.__setattr__(self, "worth", (self.busy, not self.luxury, self.priority, since, cost))

    def occupied(self, device: DeviceId) -> int:
        """Bytes of the driver's figure that are this worker's."""
        return self.measured.get(device, self.reserved.get(device, 0))


def pooled(sizes: Bytes, pools: Mapping[DeviceId, DeviceId]) -> dict[DeviceId, int]:
    """`sizes` by the memory that each device uses; `pools` names those that have none of their own."""
    found: dict[DeviceId, int] = {}
    for id, size in sizes.items():
        pool = pools.get(id, id)
        found[pool] = found.get(pool, 0) + size
    return found


class Ledger:
    """Readings and residents to devices; remembers the last quiet value of each device's foreign memory."""

    def __init__(
        self,
        *,
        margin: Callable[[DeviceId], int] = lambda _: 0,
        limit: Callable[[DeviceId], int | None] = lambda _: None,
        models_max: int = 0,
    ):
        """`margin` and `limit` give bytes for any device that readings name (a mapping's `get` will do for the
        latter); `models_max` is the number of workers at once on each node, 0: unlimited."""
        self._margin = margin
        self._limit = limit
        self._models_max = models_max
        self._foreign: dict[DeviceId, int] = {}

    def observe(self, readings: Sequence[Reading], residents: Sequence[Resident]) -> list[Device]:
        """The devices as they stand, in order of their ids. Of several with one memory the largest margin and the
        smallest limit hold for all.

        The readings must be at least as new as the residents' states: a worker's memory that the driver does not
        show yet would be taken off the foreign row.
        """
        members: dict[DeviceId, list[DeviceId]] = {}
        for reading in readings:
            members.setdefault(reading.pool or reading.id, []).append(reading.id)
        own = {reading.id: reading for reading in readings if reading.pool is None}
        ready = dict.fromkeys(own, 0)
        restless: set[DeviceId] = set()
        for one in residents:
            if one.starting or one.leaving:
                restless.update([id for id, _, _ in one.holds])
                continue
            for id, occupied, _ in one.holds:
                if id in ready:
                    ready[id] += occupied
        foreign = {
            id: self._observe_foreign(id, max(0, reading.used - ready[id]), quiet=id not in restless)
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
                pool=reading.pool,
            )
            devices.append(device)
        if self._models_max:
            nodes = {reading.id.node for reading in readings}
            devices.extend(self._slots(DeviceId(node, SLOTS), residents) for node in nodes)
        return sorted(devices, key=lambda device: device.id)

    def _observe_foreign(self, id: DeviceId, seen: int, *, quiet: bool) -> int:
        """`seen`: bytes beside what those of ours occupy that are ready; `quiet`: none of ours comes or goes there."""
        if not quiet:
            # Some of `seen` belongs to those who come or go; without any quiet value it errs on the safe side.
            return self._foreign.get(id, seen)
        self._foreign[id] = seen
        return seen

    def _slots(self, id: DeviceId, residents: Sequence[Resident]) -> Device:
        return Device(id=id, total=self._models_max, used=sum(one.reserved.get(id, 0) for one in residents), foreign=0)

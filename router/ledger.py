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

    @property
    def capacity(self) -> int:
        """What could ever be had here by our workers together: foreign memory may go away, the margin may not."""
        size = self.total if self.limit is None else min(self.total, self.limit)
        return max(0, size - self.margin)


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
    """Seconds an idle one inside its turn is kept for its next request; None: by the load of who waits."""
    load_seconds: float = 0.0
    """What bringing it back takes."""

    def occupied(self, device: DeviceId) -> int:
        """Bytes of the driver's figure that are this worker's."""
        return self.measured.get(device, self.reserved.get(device, 0))


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
        """The devices as they stand, in order of their ids.

        The readings must be at least as new as the residents' states: a worker's memory that the driver does not
        show yet would be taken off the foreign row.
        """
        devices = [
            Device(
                id=reading.id,
                total=reading.total,
                used=reading.used,
                foreign=self._observe_foreign(reading, residents),
                margin=self._margin(reading.id),
                limit=self._limit(reading.id),
            )
            for reading in readings
        ]
        if self._models_max:
            nodes = {reading.id.node for reading in readings}
            devices.extend(self._slots(DeviceId(node, SLOTS), residents) for node in nodes)
        return sorted(devices, key=lambda device: device.id)

    def _observe_foreign(self, reading: Reading, residents: Sequence[Resident]) -> int:
        here = [one for one in residents if reading.id in one.reserved or reading.id in one.measured]
        ready = sum(one.occupied(reading.id) for one in here if not (one.starting or one.leaving))
        foreign = max(0, reading.used - ready)
        if any(one.starting or one.leaving for one in here):
            # Some of `foreign` belongs to those who come or go; without any quiet value it errs on the safe side.
            return self._foreign.get(reading.id, foreign)
        self._foreign[reading.id] = foreign
        return foreign

    def _slots(self, id: DeviceId, residents: Sequence[Resident]) -> Device:
        return Device(id=id, total=self._models_max, used=sum(one.reserved.get(id, 0) for one in residents), foreign=0)

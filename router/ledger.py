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
    """Seconds an idle one inside its turn is kept for its next request; None: by the load of who waits."""
    load_seconds: float = 0.0
    """What bringing it back takes."""

    def occupied(self, device: DeviceId) -> int:
        """Bytes of the driver's figure that are this worker's."""
        return self.measured.get(device, self.reserved.get(device, 0))


class _Row:
    """One device with some of our workers on it and something promised to others."""

    __slots__ = ("binds", "budget", "driver", "foreign", "ours", "promised", "top")

    def __init__(self, *, top: int, budget: int | None, driver: int, foreign: int, binds: bool):
        self.top = top
        self.budget = budget
        self.driver = driver
        self.foreign = foreign
        self.binds = binds
        self.ours = 0
        self.promised = 0

    def copy(self) -> "_Row":
        row = _Row(top=self.top, budget=self.budget, driver=self.driver, foreign=self.foreign, binds=self.binds)
        row.ours, row.promised = self.ours, self.promised
        return row

    def free(self) -> int:
        room = self.top - max(self.driver, self.foreign + self.ours) - self.promised
        return room if self.budget is None else min(room, self.budget - self.ours - self.promised)


class View:
    """What would be free if some of our workers had left and others had come.

        free = total - margin - max(driver - those who left, foreign + reserved of those who stay) - promised

    and within the limit likewise, less what is foreign. A device that is not known is not looked at.
    """

    def __init__(self, devices: Sequence[Device], residents: Sequence[Resident], *, memory: bool = True):
        """`residents`: everybody whose memory is in the devices' figures. Without `memory` only SLOTS can be short."""
        self._rows = {
            device.id: _Row(
                top=device.total - device.margin,
                budget=None if device.limit is None else device.limit - device.margin,
                driver=device.used,
                foreign=device.foreign,
                binds=memory or device.id.index == SLOTS,
            )
            for device in devices
        }
        for resident in residents:
            for id, reserved in resident.reserved.items():
                if id in self._rows:
                    self._rows[id].ours += reserved

    def copy(self) -> "View":
        """A view of its own that begins as this one stands."""
        view = View((), ())
        view._rows = {id: row.copy() for id, row in self._rows.items()}
        return view

    def leave(self, resident: Resident) -> None:
        """As if it were gone."""
        self._move(resident, -1)

    def stay(self, resident: Resident) -> None:
        """Takes `leave` back."""
        self._move(resident, +1)

    def promise(self, claim: Bytes) -> None:
        """Give room away that neither driver nor reservations show yet."""
        for id, needed in claim.items():
            if id in self._rows:
                self._rows[id].promised += needed

    def free(self, id: DeviceId) -> int:
        """Bytes for whoever comes next; negative where too much is in use already."""
        return self._rows[id].free()

    def used(self, id: DeviceId) -> int:
        """Bytes that driver or ledger count, whichever is more; without what was promised."""
        row = self._rows[id]
        return max(row.driver, row.foreign + row.ours)

    def short(self, claim: Bytes) -> list[DeviceId]:
        """The devices on which `claim` does not fit."""
        rows = self._rows
        return [id for id, needed in claim.items() if id in rows and rows[id].binds and rows[id].free() < needed]

    def keeps_its_promises(self) -> bool:
        """Whether there is room for all that was promised."""
        return all(row.free() >= 0 for row in self._rows.values() if row.promised and row.binds)

    def _move(self, resident: Resident, sign: int) -> None:
        for id in resident.reserved.keys() | resident.measured.keys():
            if row := self._rows.get(id):
                row.ours += sign * resident.reserved.get(id, 0)
                row.driver += sign * resident.occupied(id)


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

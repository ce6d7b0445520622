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

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


NO_LIMIT = 1 << 62
"""More bytes than any device has: what a budget leaves where there is none, and a view with nothing to compare."""


class _Row:
    """What is free on one device: by the driver, by the ledger, and within the limit. The least of them counts.

    They are kept apart since whoever leaves gives back what it occupies by the driver's figure, and what it has
    reserved by the others. All three move alike in every view, so that the least of several views is one view more.
    """

    __slots__ = ("binds", "by_driver", "by_ledger", "by_limit", "free", "promised")

    def __init__(self, by_driver: int, by_ledger: int, by_limit: int, *, binds: bool, promised: bool = False):
        self.by_driver = by_driver
        self.by_ledger = by_ledger
        self.by_limit = by_limit
        self.binds = binds
        self.promised = promised
        self.free = min(by_driver, by_ledger, by_limit)

    def copy(self) -> "_Row":
        return _Row(self.by_driver, self.by_ledger, self.by_limit, binds=self.binds, promised=self.promised)

    @property
    def figures(self) -> tuple[int, int, int]:
        return self.by_driver, self.by_ledger, self.by_limit

    def move(self, occupied: int, reserved: int) -> None:
        self.by_driver += occupied
        self.by_ledger += reserved
        self.by_limit += reserved
        self.free = min(self.by_driver, self.by_ledger, self.by_limit)

    def lower(self, other: "_Row") -> None:
        """To the other's figures, wherever they are less."""
        self.by_driver = min(self.by_driver, other.by_driver)
        self.by_ledger = min(self.by_ledger, other.by_ledger)
        self.by_limit = min(self.by_limit, other.by_limit)
        self.free = min(self.by_driver, self.by_ledger, self.by_limit)


class View:
    """What would be free if some of our workers had left and others had come.

        free = total - margin - max(driver - those who left, foreign + reserved of those who stay) - promised

    and within the limit likewise, less what is foreign. A device that is not known is not looked at, nor is one that
    has no memory of its own: what is there is charged to its pool.
    """

    def __init__(self, devices: Sequence[Device], residents: Sequence[Resident], *, memory: bool = True):
        """`residents`: everybody whose memory is in the devices' figures. Without `memory` only SLOTS can be short."""
        ours: dict[DeviceId, int] = {}
        for resident in residents:
            for id, reserved in resident.reserved.items():
                ours[id] = ours.get(id, 0) + reserved
        self._used = {d.id: max(d.used, d.foreign + ours.get(d.id, 0)) for d in devices}
        self._rows = {
            device.id: _Row(
                device.total - device.margin - device.used,
                device.total - device.margin - device.foreign - ours.get(device.id, 0),
                NO_LIMIT if device.limit is None else device.limit - device.margin - ours.get(device.id, 0),
                binds=memory or device.id.index == SLOTS,
            )
            for device in devices
            if device.pool is None
        }

    def copy(self) -> "View":
        """A view of its own that begins as this one stands."""
        view = View.__new__(View)
        view._used = self._used
        view._rows = {id: row.copy() for id, row in self._rows.items()}
        return view

    def leave(self, resident: Resident) -> None:
        """As if it were gone."""
        self._move(resident, +1)

    def stay(self, resident: Resident) -> None:
        """Takes `leave` back."""
        self._move(resident, -1)

    def promise(self, claim: Bytes) -> None:
        """Give room away that neither driver nor reservations show yet."""
        for id, needed in claim.items():
            if id in self._rows:
                self._rows[id].move(-needed, -needed)
                self._rows[id].promised |= needed > 0

    def lower(self, other: "View") -> None:
        """From now on say what is free in both, as long as whoever leaves, leaves both."""
        for id, row in self._rows.items():
            row.lower(other._rows[id])

    def free(self, id: DeviceId) -> int:
        """Bytes for whoever comes next; negative where too much is in use already."""
        return self._rows[id].free

    def used(self, id: DeviceId) -> int:
        """Bytes that driver or ledger counted at first, whichever is more."""
        return self._used[id]

    def short(self, claim: Bytes) -> list[DeviceId]:
        """The devices on which `claim` does not fit."""
        rows = self._rows
        return [id for id, needed in claim.items() if id in rows and rows[id].free < needed and rows[id].binds]

    def enough(self, claim: Bytes, order: Sequence[Resident]) -> tuple[Resident, ...] | None:
        """Who has to leave so that `claim` fits: taken in `order`, skipping who is not in the way, until it does; less
        whoever is not needed after all, beginning with the last. None if they would not do together."""
        lacking = {id: self._rows[id].copy() for id in self.short(claim)}
        for id, row in lacking.items():
            row.move(-claim[id], -claim[id])
        taken: list[Resident] = []
        short = list(lacking)
        for one in order:
            if not short:
                break
            if is_on(one, short):
                taken.append(one)
                _shift(lacking, one, +1)
                short = [id for id in short if lacking[id].free < 0]
        if short:
            return None
        if len(taken) == 1:
            return (taken[0],)
        needed: list[Resident] = []
        for one in reversed(taken):
            _shift(lacking, one, -1)
            if any(row.free < 0 for row in lacking.values()):
                _shift(lacking, one, +1)
                needed.append(one)
        return tuple(reversed(needed))

    def is_like(self, other: "View", devices: Iterable[DeviceId]) -> bool:
        """Whether both say the same of these devices, whoever leaves."""
        rows, others = self._rows, other._rows
        return all(rows[id].figures == others[id].figures for id in devices if id in rows)

    def _move(self, resident: Resident, sign: int) -> None:
        for id, reserved in resident.reserved.items():
            if row := self._rows.get(id):
                row.move(sign * resident.measured.get(id, reserved), sign * reserved)
        for id, measured in resident.measured.items():
            if id not in resident.reserved and (row := self._rows.get(id)):
                row.move(sign * measured, 0)


def _shift(rows: Mapping[DeviceId, _Row], resident: Resident, sign: int) -> None:
    """Like `View._move`, of a few rows only."""
    for id, row in rows.items():
        reserved = resident.reserved.get(id, 0)
        row.move(sign * resident.measured.get(id, reserved), sign * reserved)


def is_on(one: Resident, devices: Collection[DeviceId]) -> bool:
    """Whether any of its memory is on one of the devices."""
    return any(id in one.reserved or id in one.measured for id in devices)


class Stages:
    """Views of one moment after another, the last with everything that is to come. Whoever leaves, leaves all.

    Kept as three views only, however many there are (see `View.lower`): the last, the least of all, and the least of
    those rows in which something is promised.
    """

    def __init__(self, first: View):
        self.last = first
        self.least = first.copy()
        self.many = False
        """Whether there is more than one."""
        self._promises = first.copy()
        for row in self._promises._rows.values():
            row.move(NO_LIMIT, NO_LIMIT)

    def leave(self, resident: Resident) -> None:
        for view in (self.last, self.least, self._promises):
            view.leave(resident)

    def stay(self, resident: Resident) -> None:
        for view in (self.last, self.least, self._promises):
            view.stay(resident)

    def promise(self, claim: Bytes) -> None:
        """On each of them."""
        self.last.promise(claim)
        self.least.promise(claim)
        for id, needed in claim.items():
            if needed and id in self._promises._rows:
                self._promises._rows[id] = self.least._rows[id].copy()

    def book(self, claim: Bytes, victims: Sequence[Resident]) -> None:
        """From the last one on: if there are victims that leave later, that is one more."""
        if victims:
            self.last = self.last.copy()
            self.many = True
        for one in victims:
            self.last.leave(one)
        self.last.promise(claim)
        self.least.lower(self.last)
        for id, row in self.last._rows.items():
            if row.promised:
                self._promises._rows[id].lower(row)

    def keep_their_promises(self) -> bool:
        """Whether there is room, on each of them, for all that was promised there."""
        return all(row.free >= 0 for row in self._promises._rows.values() if row.binds)


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
        foreign = {id: self._observe_foreign(reading, residents) for id, reading in own.items()}
        devices = []
        for reading in readings:
            pool = reading.pool or reading.id
            limits = [limit for id in members[pool] if (limit := self._limit(id)) is not None]
            device = Device(
                id=reading.id,
                total=own[pool].total,
                used=own[pool].used,
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

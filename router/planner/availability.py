"""Availability: the places that a demand could take, and the free memory there as residents leave and start. PURE.

A place is a tuple of devices of one node, one for each shard. `Places` does not know the residents: the caller passes
the free memory as a function or a mapping. `Occupants` knows which models are on a device, and which loads run there.
`FreeMemory` is one moment, `FreeMemoryTimeline` several moments of one plan.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from router.planner.ledger import HOST, SLOTS, Bytes, Device, DeviceId, Resident
from router.planner.types import Demand

# On more devices only aligned runs are tried: 8 devices have at most 70 sets of one size, 16 have 12,870.
MANY_DEVICES = 8
Place = tuple[DeviceId, ...]
NO_LIMIT = 1 << 62  # more bytes than any device has; the budget of a device without a limit

# The free bytes of one device: by the driver, by the ledger, and within the limit. The least of them counts.
# One figure would not do: a resident that leaves frees its measured bytes in the first and its reserved bytes in the
# other two. All three move alike at every moment, so the minimum of several moments can be kept as one more.
Figures = tuple[int, int, int]


class FreeMemory:
    """The free memory of each device if some residents had left and others had started.

        used = max(driver - measured of those that left, foreign + reserved of those that stay)
        free = total - margin - used - promised

    The same holds within the limit, without foreign memory. Unknown devices are ignored, and so are devices without
    memory of their own, because their claims are charged to their pool.
    """

    __slots__ = ("_binds", "_figures", "promised", "room")

    def __init__(self, devices: Sequence[Device], residents: Sequence[Resident], *, memory: bool = True):
        """`residents`: all whose memory is in the devices' figures. Without `memory`, only SLOTS can be short."""
        ours: dict[DeviceId, int] = {}
        for resident in residents:
            for id, reserved in resident.reserved.items():
                ours[id] = ours.get(id, 0) + reserved
        self._binds = frozenset(d.id for d in devices if memory or d.id.index == SLOTS)
        self._figures = {
            device.id: (
                device.total - device.margin - device.used,
                device.total - device.margin - device.foreign - ours.get(device.id, 0),
                NO_LIMIT
                if device.limit is None
                else device.limit - device.margin - device.shared - ours.get(device.id, 0),
            )
            for device in devices
            if device.pool is None
        }
        # Free bytes by device; negative where too much is in use already. Callers only read it.
        self.room = {id: min(figures) for id, figures in self._figures.items()}
        self.promised: set[DeviceId] = set()  # devices on which something is promised

    def copy(self) -> "FreeMemory":
        """Return an independent copy."""
        view = FreeMemory.__new__(FreeMemory)
        view._binds = self._binds
        view._figures, view.room, view.promised = self._figures.copy(), self.room.copy(), self.promised.copy()
        return view

    def leave(self, resident: Resident) -> None:
        """Count a resident as gone."""
        figures = self._figures
        for id, occupied, reserved in resident.holds:
            if id in figures:
                driver, ledger, limit = figures[id]
                figures[id] = moved = driver + occupied, ledger + reserved, limit + reserved
                self.room[id] = min(moved)

    def leave_all(self, residents: Iterable[Resident]) -> None:
        """Count residents as gone. The sums per device make this faster than one `leave` for each."""
        gone: dict[DeviceId, list[int]] = {id: [0, 0] for id in self._figures}
        for resident in residents:
            for id, occupied, reserved in resident.holds:
                if (sums := gone.get(id)) is not None:
                    sums[0] += occupied
                    sums[1] += reserved
        for id, (occupied, reserved) in gone.items():
            if occupied or reserved:
                self._move(id, occupied, reserved)

    def stay(self, resident: Resident) -> None:
        """Undo `leave`."""
        for id, occupied, reserved in resident.holds:
            self._move(id, -occupied, -reserved)

    def promise(self, claim: Bytes) -> None:
        """Give memory away that neither driver nor reservations show yet."""
        figures = self._figures
        for id, needed in claim.items():
            if needed and id in figures:
                # The limit counts reservations, so a promise lowers all three figures.
                driver, ledger, limit = figures[id]
                figures[id] = moved = driver - needed, ledger - needed, limit - needed
                self.room[id] = min(moved)
                self.promised.add(id)

    def lower(self, other: "FreeMemory", devices: Iterable[DeviceId]) -> None:
        """Take the minimum with another view on these devices. It stays valid while both get the same changes."""
        for id in devices:
            if (here := self._figures.get(id)) is not None:
                there = other._figures[id]
                both = min(here[0], there[0]), min(here[1], there[1]), min(here[2], there[2])
                self._figures[id] = both
                self.room[id] = min(both)

    def free(self, id: DeviceId) -> int:
        """Return the free bytes of a device; negative where too much is in use already."""
        return self.room[id]

    def short(self, claim: Bytes) -> list[DeviceId]:
        """Return the devices on which `claim` does not fit."""
        room = self.room
        return [id for id, needed in claim.items() if id in room and room[id] < needed and id in self._binds]

    def short_without(self, claim: Bytes, gone: Sequence[Resident]) -> list[DeviceId]:
        """Return the devices on which `claim` does not fit if the residents in `gone` had left as well."""
        short = self.short(claim)
        if not short or not gone:
            return short
        return [id for id in short if min(_without(self._figures[id], id, gone)) < claim[id]]

    def is_overdrawn(self) -> bool:
        """Return whether more is given away on any device than there is."""
        return any(free < 0 for id, free in self.room.items() if id in self._binds)

    def enough(self, claim: Bytes, order: Sequence[Resident], short: list[DeviceId]) -> tuple[Resident, ...] | None:
        """Return the residents that have to leave so that `claim` fits, which does not fit on the devices in `short`.

        They are taken in `order`, skipping those that are not in the way, until it fits. Then those that are not needed
        are kept, the last first. None if all together are not enough.
        """
        # All devices are looked at together. One device after the other would evict two workers where a third one that
        # is on both devices is enough.
        if len(short) == 1:
            return self._enough_on(short[0], claim[short[0]], order)
        lacking = {id: self._figures[id] for id in short}
        taken: list[Resident] = []
        for resident in order:
            if not short:
                break
            if is_on(resident, short):
                taken.append(resident)
                lacking = {id: _without(figures, id, (resident,)) for id, figures in lacking.items()}
                short = [id for id in short if min(lacking[id]) < claim[id]]
        if short:
            return None
        needed: list[Resident] = []
        for resident in reversed(taken):
            less = {id: _with(figures, id, resident) for id, figures in lacking.items()}
            if any(min(figures) < claim[id] for id, figures in less.items()):
                needed.append(resident)
            else:
                lacking = less
        return tuple(reversed(needed))

    def _enough_on(self, id: DeviceId, size: int, order: Sequence[Resident]) -> tuple[Resident, ...] | None:
        """The same where only one device is short. This is nearly always the case, and this way is much faster."""
        driver, ledger, limit = (figure - size for figure in self._figures[id])
        taken: list[tuple[Resident, int, int]] = []
        for resident in order:
            reserved = resident.reserved.get(id, 0)
            occupied = resident.measured.get(id, reserved)
            if reserved or occupied:
                taken.append((resident, occupied, reserved))
                driver, ledger, limit = driver + occupied, ledger + reserved, limit + reserved
                if driver >= 0 and ledger >= 0 and limit >= 0:
                    break
        else:
            return None
        needed: list[Resident] = []
        for resident, occupied, reserved in reversed(taken):
            if driver >= occupied and ledger >= reserved and limit >= reserved:
                driver, ledger, limit = driver - occupied, ledger - reserved, limit - reserved
            else:
                needed.append(resident)
        needed.reverse()
        return tuple(needed)

    def is_like(self, other: "FreeMemory", devices: Iterable[DeviceId]) -> bool:
        """Return whether both views agree on these devices, and will after the same changes."""
        ours, theirs = self._figures, other._figures
        return all(ours[id] == theirs[id] for id in devices if id in ours)

    def _move(self, id: DeviceId, occupied: int, reserved: int) -> None:
        if (figures := self._figures.get(id)) is not None:
            self._figures[id] = moved = figures[0] + occupied, figures[1] + reserved, figures[2] + reserved
            self.room[id] = min(moved)


def _without(figures: Figures, id: DeviceId, gone: Iterable[Resident]) -> Figures:
    driver, ledger, limit = figures
    for resident in gone:
        reserved = resident.reserved.get(id, 0)
        driver, ledger, limit = driver + resident.measured.get(id, reserved), ledger + reserved, limit + reserved
    return driver, ledger, limit


def _with(figures: Figures, id: DeviceId, resident: Resident) -> Figures:
    reserved = resident.reserved.get(id, 0)
    return figures[0] - resident.measured.get(id, reserved), figures[1] - reserved, figures[2] - reserved


def is_on(resident: Resident, devices: Collection[DeviceId]) -> bool:
    """Return whether any of its memory is on one of the devices."""
    return any(id in resident.reserved or id in resident.measured for id in devices)


class FreeMemoryTimeline:
    """The views of successive moments; the last one contains all that is still to happen. `leave` applies to all.

    Only three views are kept, however many moments there are (see `FreeMemory.lower`): the last, the minimum of all,
    and the minimum of those rows in which something is promised. A list of views would make each check as slow as the
    queue is long. While there is only one moment, it is both the last and the minimum.
    """

    def __init__(self, first: FreeMemory):
        self.last = first
        self.least = first
        self.many = False  # there is more than one moment
        # Rows of devices with a promise only: memory that is overdrawn already breaks no promise.
        self._promises = first.copy()
        self._promises._figures, self._promises.room = {}, {}

    def leave(self, resident: Resident) -> None:
        self.last.leave(resident)
        if self.many:
            self.least.leave(resident)
        self._promises.leave(resident)

    def stay(self, resident: Resident) -> None:
        self.last.stay(resident)
        if self.many:
            self.least.stay(resident)
        self._promises.stay(resident)

    def promise(self, claim: Bytes) -> None:
        """Promise a claim at every moment."""
        self.last.promise(claim)
        if self.many:
            self.least.promise(claim)
        for id, needed in claim.items():
            if needed and id in self.least.room:
                self._promises._figures[id] = self.least._figures[id]
                self._promises.room[id] = self.least.room[id]

    def book(self, claim: Bytes, victims: Sequence[Resident]) -> None:
        """Promise a claim from the last moment on. Victims that leave later begin a new moment."""
        if victims and not self.many:
            self.many, self.least = True, self.last.copy()
        for resident in victims:
            self.last.leave(resident)
        self.last.promise(claim)
        if self.many:
            self.least.lower(self.last, claim)  # elsewhere the new last one has no less than the one before
        for id in self.last.promised.intersection(claim):
            if id not in self._promises.room:
                self._promises._figures[id], self._promises.room[id] = self.last._figures[id], self.last.room[id]
        self._promises.lower(self.last, claim)

    def need(self, resident: Resident) -> bool:
        """Return whether a promise on the devices of a leaving resident would be broken if it stayed."""
        view = self._promises
        on = resident.reserved.keys() | resident.measured.keys()
        return any(id in view.room and min(_with(view._figures[id], id, resident)) < 0 for id in on & view._binds)

    def keep_their_promises(self) -> bool:
        """Return whether there is room at every moment for all that is promised then."""
        return not self._promises.is_overdrawn()


class Places:
    """All places on the given devices."""

    __slots__ = ("_commons", "_groups", "_memory", "devices", "pools")

    def __init__(self, devices: Sequence[Device], *, memory: bool = True):
        """Without `memory`, only SLOTS can be short."""
        self.devices = {device.id: device for device in sorted(devices, key=lambda device: device.id)}
        # By device, the device whose memory it uses.
        self.pools = {id: device.pool or id for id, device in self.devices.items()}
        nodes = {id.node for id in self.devices}
        self._commons = {node: (DeviceId(node, HOST), DeviceId(node, SLOTS)) for node in nodes}
        self._groups: dict[frozenset[DeviceId], list[list[DeviceId]]] = {}
        self._memory = memory

    def groups(self, able: frozenset[DeviceId]) -> list[list[DeviceId]]:
        """Return those of the `able` devices that exist, by node."""
        found = self._groups.get(able)
        if found is None:
            groups: dict[str, list[DeviceId]] = {}
            for id in self.devices:
                if id in able:
                    groups.setdefault(id.node, []).append(id)
            found = self._groups[able] = list(groups.values())
        return found

    def with_room(
        self, demand: Demand, groups: Iterable[Sequence[DeviceId]], *rooms: Mapping[DeviceId, int]
    ) -> list[Sequence[DeviceId]]:
        """Return the devices that have room for the smallest shard in each of the views."""
        if not self._memory:
            return list(groups)
        pools, least = self.pools, min(demand.shards)
        for room in rooms:
            groups = [[id for id in group if room[pools[id]] >= least] for group in groups]
        return list(groups)

    def of(
        self,
        demand: Demand,
        groups: Iterable[Sequence[DeviceId]],
        room: Callable[[DeviceId], int],
        with_room: Iterable[Sequence[DeviceId]] | None = None,
    ) -> Iterator[Place]:
        """Yield the fixed place of `demand`, or one place for each set of devices; only places on `roomy` devices."""
        count = len(demand.shards)
        for group, among in zip(groups, groups if with_room is None else with_room, strict=True):
            if demand.place:
                if set(demand.place) <= set(among):
                    yield demand.place
                continue
            if count == 1:
                for id in among:
                    yield (id,)
                continue
            runs = (group[first : first + count] for first in range(0, len(group) - count + 1, count))
            for devices in combinations(among, count) if len(group) <= MANY_DEVICES else runs:
                if among is group or set(devices) <= set(among):
                    yield _assign(demand.shards, devices, room)

    def share(self, demand: Demand, place: Place) -> dict[DeviceId, int]:
        """Return the bytes that it reserves there. A shard is charged to the device that has the memory."""
        pools = self.pools
        if len(place) == 1:
            claim = {pools[place[0]]: demand.shards[0]}
        else:
            claim = {}
            for id, shard in zip(place, demand.shards, strict=True):
                claim[pools[id]] = claim.get(pools[id], 0) + shard
        host, slots = self._commons[place[0].node]
        if demand.host:
            # Without a reading of main memory the two share one memory, and the accelerator has the only row.
            home = host if host in self.devices else place[0]
            claim[home] = claim.get(home, 0) + demand.host
        claim[slots] = 1
        return claim

    def growth(self, demand: Demand, place: Place) -> dict[DeviceId, int]:
        """Return the bytes of one step of its range there, by the device that has the memory."""
        growth: dict[DeviceId, int] = {}
        for id, size in zip(place, demand.growth, strict=True):
            if size:
                pool = self.pools[id]
                growth[pool] = growth.get(pool, 0) + size
        return growth

    def charged(self, place: Place) -> set[DeviceId]:
        """Return the devices whose memory it takes."""
        return {self.pools[id] for id in place}

    def capacity(self, id: DeviceId) -> int:
        """Return the bytes that our workers together can ever have there."""
        return self.devices[self.pools[id]].capacity

    def could_hold(self, demand: Demand, groups: Sequence[Sequence[DeviceId]]) -> bool:
        """Return whether it would fit on an empty machine."""
        for place in self.of(demand, groups, self.capacity):
            claim = self.share(demand, place)
            if all(self.capacity(id) >= needed for id, needed in claim.items() if self.binds(id)):
                return True
        return False

    def binds(self, id: DeviceId) -> bool:
        """Return whether this device can be short."""
        return id in self.devices and (self._memory or id.index == SLOTS)

    def nearest(self, demand: Demand, groups: Sequence[Sequence[DeviceId]], room: Callable[[DeviceId], int]) -> Bytes:
        """Return the claim at the place where least is missing; empty if no node has enough devices."""
        # One shard misses least on the roomiest device of each node, so the other places need not be tried.
        if len(demand.shards) == 1:
            groups = [[max(group, key=room)] for group in groups]
        claims = [self.share(demand, place) for place in self.of(demand, groups, room)]
        return min(claims, key=lambda claim: sum(self._missing(claim, room).values()), default={})

    def _missing(self, claim: Bytes, room: Callable[[DeviceId], int]) -> Bytes:
        return {id: needed - room(id) for id, needed in claim.items() if self.binds(id) and room(id) < needed}


class Occupants:
    """The replicas on each device, and the loads that run there. Planned ones are included."""

    __slots__ = ("_loading", "_models", "_places", "_replica_devices", "_residents", "measured", "starting")

    def __init__(self, residents: Iterable[Resident], staying: Iterable[Resident], places: Places):
        """`staying`: those of the `residents` that take requests."""
        self._places = places
        self._residents = tuple(staying)
        self._models = {resident.model for resident in self._residents}
        self._replica_devices: dict[str, list[DeviceId]] = {}  # of all replicas of a model, computed on demand
        self.starting = [resident for resident in residents if resident.starting]
        self._loading = {id for resident in self.starting for id in resident.shard_devices}
        # The devices whose memory an engine measures while it loads.
        self.measured = {id for resident in self.starting if resident.exclusive for id in resident.shard_devices}

    def replicas(self, model: str, place: Place) -> int:
        """Return the number of replicas of a model on the devices of a place."""
        devices = self._devices_of(model)
        return sum(map(devices.count, self._places.charged(place))) if devices else 0

    def must_load_alone(self, demand: Demand, place: Place) -> bool:
        """Return whether the demand may not load there now: its own engine, or that of another load there, measures the
        device."""
        # Such an engine would take the memory of another load for its own.
        others = self._loading if demand.exclusive else self.measured
        return bool(others) and not others.isdisjoint(self._places.charged(place))

    def add(self, demand: Demand, place: Place) -> None:
        """Count the demand as loading at a place."""
        devices = self._places.charged(place)
        self._devices_of(demand.model).extend(devices)
        self._loading |= devices
        if demand.exclusive:
            self.measured |= devices

    def _devices_of(self, model: str) -> list[DeviceId]:
        devices = self._replica_devices.get(model)
        if devices is None:
            # Most demands are for models without a worker, and then the residents need not be searched.
            among = self._residents if model in self._models else ()
            here = [resident for resident in among if resident.model == model]
            devices = self._replica_devices[model] = [id for resident in here for id in resident.shard_devices]
        return devices


def _assign(shards: tuple[int, ...], devices: Sequence[DeviceId], room: Callable[[DeviceId], int]) -> Place:
    """Return a device for each shard: in the given order if they fit so, else the largest shard on the roomiest device.

    If any assignment fits, the second one does. The first is preferred because ranks then keep the order of devices.
    """
    if all(room(id) >= shard for id, shard in zip(devices, shards, strict=True)):
        return tuple(devices)
    by_size = sorted(range(len(shards)), key=lambda shard: -shards[shard])
    by_room = sorted(devices, key=lambda id: -room(id))
    placed = dict(zip(by_size, by_room, strict=True))
    return tuple(placed[shard] for shard in range(len(shards)))

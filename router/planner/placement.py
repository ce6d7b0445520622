"""Placement: the places that a demand could take. PURE.

A place is a tuple of devices of one node, one for each shard. `Places` has no residents: the caller passes
the free memory as a function or a mapping. `Occupants` has the residents and models on each device, and the loads
that run there.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from router.planner.ledger import HOST, WORKER_SLOTS, Bytes, Device, DeviceId, Resident
from router.planner.types import Demand

# On more devices only aligned runs are tried: 8 devices have at most 70 sets of one size, 16 have 12,870.
MANY_DEVICES = 8
Place = tuple[DeviceId, ...]


class Places:
    """All places on the given devices."""

    __slots__ = ("_commons", "_groups", "_memory", "binds", "devices", "pools")

    def __init__(self, devices: Sequence[Device], *, memory: bool = True):
        """Without `memory`, only WORKER_SLOTS can be short."""
        self.devices = {device.id: device for device in sorted(devices, key=lambda device: device.id)}
        # By device, the device whose memory it uses.
        self.pools = {id: device.pool or id for id, device in self.devices.items()}
        nodes = {id.node for id in self.devices}
        self._commons = {node: (DeviceId(node, HOST), DeviceId(node, WORKER_SLOTS)) for node in nodes}
        self._groups: dict[frozenset[DeviceId], list[list[DeviceId]]] = {}
        self._memory = memory
        self.binds = {id for id in self.devices if memory or id.index == WORKER_SLOTS}  # the devices that can be short

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

    def candidates(
        self,
        demand: Demand,
        groups: Iterable[Sequence[DeviceId]],
        room: Callable[[DeviceId], int],
        with_room: Iterable[Sequence[DeviceId]] | None = None,
    ) -> Iterator[Place]:
        """Yield the fixed place of `demand`, or one place for each set of devices. `with_room`: the devices of each
        group that a place may use; None: all."""
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

    def claim(self, demand: Demand, place: Place) -> dict[DeviceId, int]:
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
        for place in self.candidates(demand, groups, self.capacity):
            claim = self.claim(demand, place)
            if all(self.capacity(id) >= needed for id, needed in claim.items() if id in self.binds):
                return True
        return False

    def nearest(self, demand: Demand, groups: Sequence[Sequence[DeviceId]], room: Callable[[DeviceId], int]) -> Bytes:
        """Return the claim at the place where least is missing; empty if no node has enough devices."""
        # One shard misses least on the roomiest device of each node, so the other places need not be tried.
        if len(demand.shards) == 1:
            groups = [[max(group, key=room)] for group in groups]
        claims = [self.claim(demand, place) for place in self.candidates(demand, groups, room)]
        return min(claims, key=lambda claim: sum(self._missing(claim, room).values()), default={})

    def _missing(self, claim: Bytes, room: Callable[[DeviceId], int]) -> Bytes:
        return {id: needed - room(id) for id, needed in claim.items() if id in self.binds and room(id) < needed}


class Occupants:
    """The replicas on each device, and the loads that run there. Planned ones are included."""

    __slots__ = (
        "_by_device",
        "_loading",
        "_models",
        "_places",
        "_replica_devices",
        "_residents",
        "_staying",
        "measured",
        "starting",
    )

    def __init__(self, residents: Collection[Resident], staying: Iterable[Resident], places: Places):
        """`staying`: those of the `residents` that take requests."""
        self._places = places
        self._residents = residents
        self._staying = tuple(staying)
        self._models = {resident.model for resident in self._staying}
        self._by_device: dict[DeviceId, list[Resident]] = {}  # all residents, computed on demand
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

    def residents_on(self, devices: Collection[DeviceId], among: Mapping[int, Resident]) -> list[Resident]:
        """Return the residents `among` those given that have memory on one of the devices."""
        if not (among and devices):
            return []
        if not self._by_device:
            for resident in self._residents:
                for id, _, _ in resident.holds:
                    self._by_device.setdefault(id, []).append(resident)
        here = [resident for id in devices for resident in self._by_device.get(id, ()) if resident.id in among]
        return list({resident.id: resident for resident in here}.values())

    def _devices_of(self, model: str) -> list[DeviceId]:
        devices = self._replica_devices.get(model)
        if devices is None:
            # Most demands are for models without a worker, and then the residents need not be searched.
            among = self._staying if model in self._models else ()
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

"""The places that a demand could take, and the memory it would take there. PURE.

A place is a tuple of devices of one node, one for each shard. This module does not know the residents: the caller
passes the free memory as a function or a mapping.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from router.planner.ledger import HOST, SLOTS, Bytes, Device, DeviceId
from router.planner.types import Demand

# On more devices only aligned runs are tried: 8 devices have at most 70 sets of one size, 16 have 12,870.
MANY_DEVICES = 8
Place = tuple[DeviceId, ...]


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

"""Small fleets as values, and an independent calculation of what a plan takes."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from router.planner.ledger import HOST, LOCAL, WORKER_SLOTS, Bytes, Device, DeviceId, Resident
from router.planner.planner import plan
from router.planner.types import Demand, Plan, Policy

CPU = DeviceId(LOCAL, HOST)
COUNT = DeviceId(LOCAL, WORKER_SLOTS)
GPU = [DeviceId(LOCAL, index) for index in range(16)]
NOW = 1000.0
PATIENCE = 10.0


def resident(id: int, on: Bytes, **facts: Any) -> Resident:
    """A ready, idle worker past its minimum residency. It measures what it reserved; last used at `NOW - 100 + id`."""
    facts = {"model": f"m{id}", "last_used": NOW - 100 + id, "measured": {} if facts.get("starting") else on, **facts}
    return Resident(id=id, reserved={**on, COUNT: 1}, **facts)


def occupied(resident: Resident, id: DeviceId) -> int:
    """The share of a resident in the driver's figure; its reservation if it has not measured."""
    return resident.measured.get(id, resident.reserved.get(id, 0))


def demand(id: int, *shards: int, on: Collection[DeviceId] = (GPU[0],), **facts: Any) -> Demand:
    """A worker queued for room just now, by an exact estimate."""
    facts = {"model": f"m{id}", "since": NOW, **facts}
    return Demand(id=id, shards=shards, devices=frozenset(on), **facts)


def machine(
    residents: Sequence[Resident],
    totals: Bytes,
    *,
    foreign: Mapping[DeviceId, int] | None = None,
    margin: int = 0,
    limit: Mapping[DeviceId, int] | None = None,
    shared: Mapping[DeviceId, int] | None = None,
) -> list[Device]:
    """Devices whose driver sees what is foreign and what the residents occupy."""
    foreign = foreign or {}
    return [
        Device(
            id=id,
            total=total,
            used=foreign.get(id, 0) + sum(occupied(resident, id) for resident in residents),
            foreign=foreign.get(id, 0),
            margin=0 if id == COUNT else margin,
            limit=(limit or {}).get(id),
            shared=(shared or {}).get(id, 0),
        )
        for id, total in totals.items()
    ]


def decide(
    waiting: Sequence[Demand], residents: Sequence[Resident], totals: Bytes, *, now: float = NOW, **facts: Any
) -> Plan:
    """Return the plan of a machine with these residents; `facts` are those of `machine`."""
    return plan(waiting, residents, machine(residents, totals, **facts), now, Policy(patience=PATIENCE))


def claim_of(
    demand: Demand, place: Sequence[DeviceId], devices: Sequence[Device], steps: int = 0
) -> dict[DeviceId, int]:
    """Return the bytes that `demand` takes at `place` with so many steps of its range, calculated independently."""
    claim = {DeviceId(place[0].node, WORKER_SLOTS): 1}
    pools = {device.id: device.pool for device in devices}
    for id, shard, step in zip(place, demand.shards, demand.growth or [0] * len(place), strict=True):
        pool = pools.get(id) or id
        claim[pool] = claim.get(pool, 0) + shard + steps * step
    if demand.host:
        main = DeviceId(place[0].node, HOST)
        home = main if main in pools else place[0]
        claim[home] = claim.get(home, 0) + demand.host
    return claim


def overcommitted(
    devices: Sequence[Device], residents: Sequence[Resident], gone: Sequence[Resident], claims: Sequence[Bytes]
) -> list[DeviceId]:
    """The devices on which `claims` exceed the margin, by driver or by ledger, once `gone` have stopped."""
    left_ids = {resident.id for resident in gone}
    result = []
    for device in devices:
        taken = sum(claim.get(device.id, 0) for claim in claims)
        reserved = sum(resident.reserved.get(device.id, 0) for resident in residents if resident.id not in left_ids)
        driver = device.used - sum(occupied(resident, device.id) for resident in gone)
        top = device.total - device.margin
        by_limit = device.limit is not None and reserved + taken > device.limit - device.margin - device.shared
        if taken and (driver + taken > top or device.foreign + reserved + taken > top or by_limit):
            result.append(device.id)
    return result

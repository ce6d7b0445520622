"""Who gets its process before it gets its room: a newcomer prepares itself while its victims drain and die.

A standby has everything but weights and device. What it holds of main memory is charged to it like any other memory,
and taken off what its worker still waits for: together they never count for more, nor for less, than the worker alone.
It is a favour to the first in line, done only with memory that nobody ahead of it lacks, and taken back as soon as
somebody does. Law: PURE.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from router.planner.availability import FreeMemory
from router.planner.ledger import HOST, Device, DeviceId, Resident
from router.planner.types import Demand, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A demand in the queue, as far as standing by goes."""

    demand: Demand
    """As it was planned: less what its standby holds."""
    runtime: int = 0
    """Bytes of main memory that its process holds before any weights; 0: it is not to be prepared."""
    stands_by: bool = False
    """It has a standby that may be taken back."""


@dataclass(frozen=True, slots=True)
class Decision:
    """By demand."""

    begin: Mapping[int, int] = field(default_factory=dict)
    """These prepare themselves now, and are charged so many bytes of main memory."""
    end: frozenset[int] = frozenset()
    """The standbys of these must go."""


def less(demand: Demand, held: int) -> Demand:
    """What a demand still needs whose standby holds so many bytes of main memory."""
    if not held:
        return demand
    if demand.host:
        return replace(demand, host=max(0, demand.host - held))
    return replace(demand, shards=tuple(max(0, shard - held) for shard in demand.shards))


def cautious(devices: Iterable[Device], unseen: int) -> list[Device]:
    """The devices as if none of the `unseen` bytes, of main memory, were in the driver's figure yet."""
    if not unseen:
        return list(devices)
    return [replace(each, used=each.used + unseen) if each.id.index == HOST else each for each in devices]


def decide(
    plan: Plan, candidates: Sequence[Candidate], residents: Sequence[Resident], devices: Sequence[Device]
) -> Decision:
    """What to do after a plan for these demands, residents and devices."""
    if not any(each.stands_by or _may_begin(plan, each) for each in candidates):
        return Decision()
    free = _free(plan, residents, devices)
    hosts = {each.pool or each.id for each in devices if each.id.index == HOST}
    begin: dict[int, int] = {}
    end: set[int] = set()
    is_scarce = False
    for candidate in sorted(candidates, key=lambda each: place_in_line(each.demand)):
        demand = candidate.demand
        wait = plan.waits.get(demand.id)
        if wait is None:
            continue
        if candidate.stands_by:
            if is_scarce:
                end.add(demand.id)
        elif _may_begin(plan, candidate) and not is_scarce and candidate.runtime <= free:
            begin[demand.id] = candidate.runtime
        is_scarce = is_scarce or not hosts.isdisjoint(wait.shortage)
        free -= max(begin.get(demand.id, 0), _on_host(demand, hosts))
    return Decision(begin, frozenset(end))


def _may_begin(plan: Plan, candidate: Candidate) -> bool:
    """Whether it is to be prepared, if there is room: it waits for memory of those who leave."""
    wait = plan.waits.get(candidate.demand.id)
    return candidate.runtime > 0 and wait is not None and wait.cause == "stopping"


def readable(sizes: Sequence[tuple[Hashable, int]], devices: Sequence[Device], reading: int = 0) -> list[Hashable]:
    """Whose files of so many bytes may be read ahead, in this order, where `reading` bytes are being read already: what
    is read must fit into memory that the driver calls free, since for more the kernel would drop pages of others."""
    hosts = [each for each in devices if each.id.index == HOST]
    free = min((each.total - each.margin - each.used for each in hosts), default=0) - reading
    chosen = []
    for name, size in sizes:
        if 0 < size <= free:
            chosen.append(name)
            free -= size
    return chosen


def spare(plan: Plan, waiting: Sequence[Demand], residents: Sequence[Resident], devices: Sequence[Device]) -> int:
    """Bytes of main memory that are left for what is merely nice: after this plan nobody has them, nobody who waits is
    going to take them, and nobody who waits lacks any."""
    hosts = {each.pool or each.id for each in devices if each.id.index == HOST}
    if any(not hosts.isdisjoint(wait.shortage) for wait in plan.waits.values()):
        return 0
    return _free(plan, residents, devices) - sum(_on_host(each, hosts) for each in waiting if each.id in plan.waits)


def _free(plan: Plan, residents: Sequence[Resident], devices: Sequence[Device]) -> int:
    """Bytes of main memory that nobody has, nor is given by this plan."""
    view = FreeMemory(devices, residents)
    for start in plan.start.values():
        view.promise(start.claim)
    return min((view.free(each.pool or each.id) for each in devices if each.id.index == HOST), default=0)


def _on_host(demand: Demand, hosts: Collection[DeviceId]) -> int:
    """Bytes of main memory that it is going to take."""
    if demand.devices <= set(hosts):
        return sum(demand.shards)
    return demand.host


def place_in_line(demand: Demand) -> tuple[bool, int, float, int]:
    """By it those who wait are sorted, as the planner meets them."""
    return demand.best_effort, -demand.priority, demand.since, demand.id


__all__ = ["Candidate", "Decision", "cautious", "decide", "less", "place_in_line", "readable", "spare"]

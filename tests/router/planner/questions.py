"""One question to the planner, and independent checks of its answer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from router.planner.ledger import WORKER_SLOTS, Bytes, Device, DeviceId, Resident
from router.planner.planner import plan
from router.planner.types import Demand, Plan, Policy
from tests.router.planner.fleets import NOW, PATIENCE, claim_of, overcommitted


@dataclass(frozen=True)
class Fleet:
    """One question to the planner."""

    waiting: list[Demand]
    residents: list[Resident]
    devices: list[Device]
    now: float = NOW
    patience: float = PATIENCE
    memory: bool = True

    def ask(self) -> Plan:
        policy = Policy(patience=self.patience, memory=self.memory)
        return plan(self.waiting, self.residents, self.devices, self.now, policy)

    @property
    def queue(self) -> list[Demand]:
        """The demands in the order in which the planner serves them."""
        return sorted(self.waiting, key=lambda demand: (demand.best_effort, -demand.priority, demand.since, demand.id))

    def claims(self, plan: Plan, among: Sequence[Demand], *, granted: bool = True) -> dict[int, Bytes]:
        """Return the bytes that demands which start or keep a place will take there, with or without granted steps."""
        places = {id: wait.place for id, wait in plan.waits.items() if wait.place}
        places |= {id: start.place for id, start in plan.start.items()}
        steps = {id: start.steps for id, start in plan.start.items() if granted}
        found = [demand for demand in among if demand.id in places]
        return {
            demand.id: claim_of(demand, places[demand.id], self.devices, steps.get(demand.id, 0)) for demand in found
        }

    def stages(
        self, plan: Plan, among: Sequence[Demand], *, granted: bool = True
    ) -> Iterator[tuple[set[int], list[Bytes]]]:
        """The residents that have gone and the claims: first as the plan says now, then after each waiting demand in
        turn has got its place."""
        claims = self.claims(plan, among, granted=granted)
        for_demands = {demand.id for demand in among} | {None}
        gone = {resident.id for resident in self.residents if resident.leaving}
        gone |= {id for id, eviction in plan.evict.items() if eviction.for_demand in for_demands}
        later = [demand.id for demand in among if demand.id in claims and is_pending(plan, demand.id)]
        taken = [claims[id] for id in claims if id not in later]
        yield set(gone), list(taken)
        for id in later:
            gone |= set(plan.waits[id].victims)
            taken.append(claims[id])
            yield set(gone), list(taken)

    def overcommitted_devices(self, gone: set[int], claims: Sequence[Bytes]) -> list[DeviceId]:
        devices = [device for device in self.devices if self.memory or device.id.index == WORKER_SLOTS]
        return overcommitted(
            devices, self.residents, [resident for resident in self.residents if resident.id in gone], claims
        )

    def leaving(self, plan: Plan) -> list[Resident]:
        """The residents that leave by this plan or an earlier one."""
        return [resident for resident in self.residents if resident.leaving or resident.id in plan.evict]


def is_pending(plan: Plan, id: int) -> bool:
    """True if the demand has a place, but waits until its victims, or those of a demand before it, may leave."""
    wait = plan.waits.get(id)
    return wait is not None and (
        wait.cause not in ("stopping", "exclusive") or not set(wait.victims) <= set(plan.evict)
    )


# Violations of a plan


def starts_too_much(fleet: Fleet, plan: Plan) -> list[DeviceId]:
    """Devices on which the demands that start exceed the margin, by driver or by ledger."""
    return fleet.overcommitted_devices(set(), [start.claim for start in plan.start.values()])


def overtaken(fleet: Fleet, plan: Plan) -> list[DeviceId]:
    """Devices on which, as each waiting demand gets its place in the order of the queue, there is no room for all
    claims."""
    return [id for gone, taken in fleet.stages(plan, fleet.queue) for id in fleet.overcommitted_devices(gone, taken)]


def superfluous(fleet: Fleet, plan: Plan) -> list[int]:
    """Victims that need not be evicted: the demand they make room for, and all demands ahead of it, would start as soon
    without that. No victim is evicted for more than the least of a range.
    """
    queue = fleet.queue
    found = []
    for id, eviction in plan.evict.items():
        if eviction.reason == "evicted":
            ahead = queue[: 1 + [demand.id for demand in queue].index(eviction.for_demand or 0)]
            if not any(
                fleet.overcommitted_devices(gone - {id}, taken)
                for gone, taken in fleet.stages(plan, ahead, granted=False)
            ):
                found.append(id)
    return found

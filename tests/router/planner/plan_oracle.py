"""A brute-force planner for small fleets, written from the documented rules and not from the planner's code.

It keeps each moment of the plan as a set of workers that are gone and a list of claims. It tries every place and every
set of victims, and compares them by one written-out key.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import inf

from router.planner.ledger import HOST, WORKER_SLOTS, Bytes, Device, DeviceId, Resident
from router.planner.types import Demand
from tests.router.planner.fleets import occupied
from tests.router.planner.questions import Fleet

Place = tuple[DeviceId, ...]


@dataclass
class Moment:
    """The residents that have left by then, and the claims of demands."""

    gone: set[int]
    claims: list[Bytes] = field(default_factory=list)


@dataclass
class Expected:
    """The answer that the rules give; demands and residents by id."""

    start: dict[int, Place] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)  # granted to each demand that starts
    # The place and the victims of each demand that waits; both are empty if it has no place.
    wait: dict[int, tuple[Place, tuple[int, ...]]] = field(default_factory=dict)
    until: dict[int, float | None] = field(default_factory=dict)
    evict: dict[int, int | None] = field(default_factory=dict)  # the demand that each resident makes room for
    refine: set[int] = field(default_factory=set)
    refuse: set[int] = field(default_factory=set)
    drop: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Offer:
    place: Place
    claim: Bytes
    victims: tuple[Resident, ...] = ()


class Oracle:
    """One plan. `steps` and `stages` are those of `Moments`: a demand that starts fits in all of them."""

    def __init__(self, fleet: Fleet):
        self.fleet = fleet
        self.now = fleet.now
        self.devices = {device.id: device for device in fleet.devices}
        residents = sorted(fleet.residents, key=lambda resident: resident.id)
        self.residents = {resident.id: resident for resident in residents}
        self.memory_of = {
            id: [
                (resident.id, occupied(resident, id), resident.reserved.get(id, 0))
                for resident in residents
                if is_on(resident, id)
            ]
            for id in self.devices
        }
        self.present = [resident for resident in residents if not resident.leaving]
        self.staying = {resident.id: resident for resident in self.present}
        self.exiting = sorted(
            (resident for resident in residents if resident.leaving),
            key=lambda resident: (resident.leaving_since, resident.id),
        )
        self.claimed: dict[int, float] = {}
        self.loads = [(set(shard_devices(resident)), resident.exclusive) for resident in residents if resident.starting]
        self.replicas = [(resident.model, list(shard_devices(resident))) for resident in self.present]
        gone = {resident.id for resident in residents if resident.leaving}
        self.steps = [Moment(set())]
        self.stages = [Moment(set(gone))]
        self.emptied = Moment(gone | {resident.id for resident in self.present if not resident.pinned})
        self.answer = Expected()

    def decide(self) -> Expected:
        for resident in self.present:
            if resident.expires is not None and resident.expires <= self.now and not (resident.busy or resident.pinned):
                self.evict(resident, None)
                self.exiting.append(resident)
        for demand in self.fleet.queue:
            self.decide_for(demand)
        self.keep_unneeded()
        for demand in self.fleet.queue:
            if demand.id in self.answer.start:
                self.grant(demand, self.answer.start[demand.id])
        return self.answer

    # Memory

    def free(self, id: DeviceId, moment: Moment) -> int:
        """Bytes of a device that are free then: the least by the driver, by the ledger and within the limit."""
        device = self.devices[id]
        occupied_bytes = reserved = 0
        for resident, share, size in self.memory_of[id]:
            if resident in moment.gone:
                occupied_bytes += share
            else:
                reserved += size
        committed = sum([claim.get(id, 0) for claim in moment.claims])
        top = device.total - device.margin
        sizes = [top - device.used + occupied_bytes, top - device.foreign - reserved]
        if device.limit is not None:
            sizes.append(device.limit - device.margin - reserved)
        return min(sizes) - committed

    def binds(self, id: DeviceId) -> bool:
        return id in self.devices and (self.fleet.memory or id.index == WORKER_SLOTS)

    def short(self, claim: Bytes, moments: Iterable[Moment], gone: Iterable[int] = ()) -> set[DeviceId]:
        """The devices on which `claim` does not fit at one of the moments, if the residents `gone` had left as well."""
        found = set()
        for moment in moments:
            later = Moment(moment.gone | set(gone), moment.claims)
            found |= {id for id, size in claim.items() if self.binds(id) and self.free(id, later) < size}
        return found

    def pool(self, id: DeviceId) -> DeviceId:
        return self.devices[id].pool or id

    def free_now(self, id: DeviceId) -> int:
        """Bytes that are free and not claimed by a demand ahead."""
        return min(self.free(self.pool(id), moment) for moment in [*self.steps, *self.stages])

    def capacity(self, id: DeviceId) -> int:
        device: Device = self.devices[self.pool(id)]
        size = device.total if device.limit is None else min(device.total, device.limit)
        return max(0, size - device.margin)

    # Places

    def places(self, demand: Demand, room: Callable[[DeviceId], int]) -> Iterator[Place]:
        """Each set of devices of one node. Shards are assigned in order. If one does not fit, the largest shard is
        assigned to the device with most free memory, and so on."""
        candidates = sorted(demand.devices & self.devices.keys())
        if demand.place:
            if set(demand.place) <= set(candidates):
                yield demand.place
            return
        for chosen in combinations(candidates, len(demand.shards)):
            if len({id.node for id in chosen}) > 1:
                continue
            if all(room(id) >= size for id, size in zip(chosen, demand.shards, strict=True)):
                yield chosen
                continue
            by_size = sorted(range(len(chosen)), key=lambda shard: demand.shards[shard], reverse=True)
            by_room = sorted(chosen, key=room, reverse=True)
            yield tuple(by_room[by_size.index(shard)] for shard in range(len(chosen)))

    def claim(self, demand: Demand, place: Place) -> dict[DeviceId, int]:
        """The bytes that it takes at that place, by the device that has the memory."""
        node = place[0].node
        claim = {DeviceId(node, WORKER_SLOTS): 1}
        parts = [(self.pool(id), size) for id, size in zip(place, demand.shards, strict=True)]
        if demand.host:
            host = DeviceId(node, HOST)
            parts.append((host if host in self.devices else place[0], demand.host))
        for id, size in parts:
            claim[id] = claim.get(id, 0) + size
        return claim

    def preference(self, demand: Demand, place: Place) -> tuple[bool, int, int, Place]:
        """A quiet device first, then the fewest replicas, then the most room, then the first place."""
        pools = {self.pool(id) for id in place}
        replicas = sum(homes.count(id) for model, homes in self.replicas if model == demand.model for id in pools)
        return self.must_load_alone(demand, place), replicas, -min(self.free_now(id) for id in place), place

    def must_load_alone(self, demand: Demand, place: Place) -> bool:
        pools = {self.pool(id) for id in place}
        return any(pools & on and (exclusive or demand.exclusive) for on, exclusive in self.loads)

    # Decisions

    def decide_for(self, demand: Demand) -> None:
        starts = []
        for place in self.places(demand, self.free_now):
            claim = self.claim(demand, place)
            if not self.short(claim, [*self.steps, *self.stages]) and not self.must_load_alone(demand, place):
                starts.append(Offer(place, claim))
        if starts:
            self.start(demand, min(starts, key=lambda offer: self.preference(demand, offer.place)))
            return
        offers = list(self.offers(demand))
        if offers:
            self.claim_place(demand, min(offers, key=lambda offer: self.disturbance(demand, offer)))
        elif not any(
            self.fits_on_empty_devices(self.claim(demand, place)) for place in self.places(demand, self.capacity)
        ):
            if demand.best_effort:
                self.answer.drop.add(demand.id)
            elif demand.is_exact:
                self.answer.refuse.add(demand.id)
            else:
                self.answer.refine.add(demand.id)
                self.wait(demand, None, None)
        elif demand.best_effort:
            self.answer.drop.add(demand.id)
        else:
            self.wait(demand, None, None)

    def fits_on_empty_devices(self, claim: Bytes) -> bool:
        return all(self.capacity(id) >= size for id, size in claim.items() if self.binds(id))

    def start(self, demand: Demand, offer: Offer) -> None:
        self.answer.start[demand.id] = offer.place
        for moment in [*self.steps, *self.stages, self.emptied]:
            moment.claims.append(offer.claim)
        self.count_as_loading(demand, offer)

    def grant(self, demand: Demand, place: Place) -> None:
        """The most steps that fit at every step and stage as they are now, with all claims and no eviction."""
        moments = [*self.steps, *self.stages]
        for steps in range(demand.steps, -1, -1):
            claim: dict[DeviceId, int] = {}
            is_allowed = True
            for id, shard, step in zip(place, demand.shards, demand.growth or (0,) * len(place), strict=True):
                if steps and step:
                    claim[self.pool(id)] = claim.get(self.pool(id), 0) + steps * step
                    is_allowed &= shard + steps * step <= demand.shard_limits.get(id, inf)
            if is_allowed and not self.short(claim, moments):
                break
        self.answer.steps[demand.id] = steps
        for moment in moments:
            moment.claims.append(claim)

    def count_as_loading(self, demand: Demand, offer: Offer) -> None:
        """Count the demand as a load and a replica at its place, for the demands behind."""
        pools = {self.pool(id) for id in offer.place}
        self.loads.append((pools, demand.exclusive))
        self.replicas.append((demand.model, sorted(pools)))

    def offers(self, demand: Demand) -> Iterator[Offer]:
        """The best set of victims at each place: once all residents that demands ahead claim have left, and at every
        stage."""
        for place in self.places(demand, lambda id: self.free(self.pool(id), self.emptied)):
            claim = self.claim(demand, place)
            for moments in self.stages[-1:], self.stages:
                victims = self.best_set(demand, claim, moments)
                if victims is not None:
                    yield Offer(place, claim, victims)

    def best_set(self, demand: Demand, claim: Bytes, moments: Sequence[Moment]) -> tuple[Resident, ...] | None:
        """The sets are counted in binary, with the last to leave as the highest digit: the first that is enough leaves
        out the last resident, then the next to last, and so on. So no member is superfluous."""
        candidates = sorted(
            self.candidates(demand, claim), key=lambda resident: (self.bound(resident, demand), eviction_key(resident))
        )
        for number in range(1 << len(candidates)):
            chosen = tuple(resident for digit, resident in enumerate(candidates) if number >> digit & 1)
            if not self.short(claim, moments, [resident.id for resident in chosen]):
                return chosen
        return None

    def candidates(self, demand: Demand, claim: Bytes) -> list[Resident]:
        """Residents with memory on the devices of `claim` that could be evicted for it, now or later."""
        there = [
            resident
            for resident in self.staying.values()
            if claim.keys() & (resident.reserved.keys() | resident.measured.keys())
        ]
        candidates = [resident for resident in there if not resident.pinned]
        if demand.best_effort:
            candidates = [
                resident
                for resident in candidates
                if resident.best_effort and not resident.busy and resident.last_used < demand.since
            ]
        return candidates

    def bound(self, resident: Resident, demand: Demand) -> float:
        """The moment at which it may leave for the demand at the latest; -inf: now."""
        patient_until = demand.since + self.fleet.patience
        if resident.busy:
            latest = inf if resident.starting else max(resident.residency_ends, patient_until)
            return latest if latest > self.now else -inf
        if not resident.starting and resident.residency_ends <= self.now:
            return -inf
        idle_grace = min(2.0, max(0.2, demand.load_seconds / 2))
        if resident.request_interval is not None and resident.request_interval > idle_grace:
            idle_grace = 0.0
        if resident.idle_grace is not None:
            idle_grace = resident.idle_grace
        if resident.last_used + idle_grace <= self.now:
            return -inf
        return inf if resident.starting else max(resident.residency_ends, patient_until)

    def bound_of(self, demand: Demand, offer: Offer) -> float:
        """The time at which the place is free at the latest: its own victims may leave, and so may residents that are
        claimed by demands ahead on devices where it needs their memory."""
        bounds = [self.bound(resident, demand) for resident in offer.victims]
        missing = self.short(offer.claim, self.stages, [resident.id for resident in offer.victims])
        if missing:
            bounds += [self.now, *self.claimed_bounds(missing)]
        return max(bounds, default=-inf)

    def claimed_bounds(self, devices: Iterable[DeviceId]) -> list[float]:
        """The bounds of residents that demands ahead claim on these devices."""
        return [bound for id, bound in self.claimed.items() for on in devices if is_on(self.residents[id], on)]

    def disturbance(self, demand: Demand, offer: Offer) -> tuple[object, ...]:
        """Soonest, then fewest busy, then no required one, lowest priority, fewest required, least recently used,
        cheapest to load again; then the preferred place."""
        keys = [eviction_key(resident) for resident in offer.victims]
        return (
            self.bound_of(demand, offer),
            sum(busy for busy, _, _, _, _ in keys),
            any(required for _, required, _, _, _ in keys),
            max((priority for _, _, priority, _, _ in keys), default=-inf),
            sum(required for _, required, _, _, _ in keys),
            max((since for _, _, _, since, _ in keys), default=-inf),
            sum(cost for _, _, _, _, cost in keys),
            *self.preference(demand, offer.place),
        )

    def claim_place(self, demand: Demand, offer: Offer) -> None:
        """Evict, if all victims may leave now and nothing else is missing; else claim the place, or drop it."""
        later_bounds = [bound for resident in offer.victims if (bound := self.bound(resident, demand)) > -inf]
        missing = self.short(offer.claim, self.stages, [resident.id for resident in offer.victims])
        lacking = self.short(offer.claim, [*self.stages, *self.steps], [])
        must_refine = bool(offer.victims) and not demand.is_exact and any(id.index != WORKER_SLOTS for id in lacking)
        evicts_now = not (later_bounds or missing or must_refine or self.disturbs_a_measurement(offer))
        if must_refine:
            self.answer.refine.add(demand.id)
        elif demand.best_effort and not evicts_now:
            self.answer.drop.add(demand.id)
            return
        until = max([*later_bounds, *self.claimed_bounds(missing)], default=-inf)
        ids = {resident.id for resident in offer.victims}
        if evicts_now:
            for resident in offer.victims:
                self.evict(resident, demand.id)
            for moment in self.stages:
                moment.claims.append(offer.claim)
            self.add_step(offer)
        else:
            self.claimed |= {resident.id: self.bound(resident, demand) for resident in offer.victims}
            if ids:
                self.stages.append(Moment(self.stages[-1].gone | ids, list(self.stages[-1].claims)))
            self.stages[-1].claims.append(offer.claim)
            for id in ids:
                del self.staying[id]
        self.emptied.claims.append(offer.claim)
        self.count_as_loading(demand, offer)
        self.wait(demand, offer, until)

    def disturbs_a_measurement(self, offer: Offer) -> bool:
        """Memory would change on a device that a load measures which is not among the victims."""
        touched = {self.pool(id) for id in offer.place} | {
            id for resident in offer.victims for id in shard_devices(resident)
        }
        own = {id for resident in offer.victims if resident.starting for id in shard_devices(resident)}
        return bool(offer.victims) and any((on - own) & touched for on, exclusive in self.loads if exclusive)

    def add_step(self, offer: Offer) -> None:
        """Commit memory of leaving residents to the claim, of as few as it needs, the first to leave first."""
        last = self.steps[-1]
        later = Moment(last.gone | {resident.id for resident in offer.victims}, list(last.claims))
        for number in range(1 << len(self.exiting)):
            chosen = [resident for digit, resident in enumerate(self.exiting) if number >> digit & 1]
            if not self.short(offer.claim, [later], [resident.id for resident in chosen]):
                break
        else:
            raise AssertionError("it fits once all of them have left")
        later.gone |= {resident.id for resident in chosen}
        later.claims.append(offer.claim)
        self.steps.append(later)
        self.exiting = [resident for resident in self.exiting if resident not in chosen]

    def evict(self, resident: Resident, for_demand: int | None) -> None:
        self.answer.evict[resident.id] = for_demand
        del self.staying[resident.id]
        for moment in self.stages:
            moment.gone.add(resident.id)

    def wait(self, demand: Demand, offer: Offer | None, until: float | None) -> None:
        victims = tuple(sorted(resident.id for resident in offer.victims)) if offer else ()
        self.answer.wait[demand.id] = (offer.place if offer else ()), victims
        self.answer.until[demand.id] = until if until is not None and self.now < until < inf else None

    def keep_unneeded(self) -> None:
        """Victims that are not needed because of other victims stay, the most valuable first, if none is busy."""
        evicted = [self.residents[id] for id, for_demand in self.answer.evict.items() if for_demand is not None]
        if any(resident.busy for resident in evicted):
            return
        for resident in sorted(evicted, key=eviction_key, reverse=True):
            for moment in self.stages:
                moment.gone.remove(resident.id)
            if all(not self.is_overcommitted(moment) for moment in self.stages):
                del self.answer.evict[resident.id]
            else:
                for moment in self.stages:
                    moment.gone.add(resident.id)
        kept = {resident.id for resident in evicted} - self.answer.evict.keys()
        for id, (place, victims) in self.answer.wait.items():
            self.answer.wait[id] = place, tuple(victim for victim in victims if victim not in kept)

    def is_overcommitted(self, moment: Moment) -> bool:
        claimed = {id for claim in moment.claims for id, size in claim.items() if size}
        return any(self.binds(id) and self.free(id, moment) < 0 for id in claimed)


def eviction_key(resident: Resident) -> tuple[bool, bool, int, float, float]:
    """Idle before busy, best-effort before required, lower priority, least recently used (of busy ones: whose minimum
    residency ended first), cheaper to load again."""
    size = sum(size for id, size in resident.reserved.items() if id.index != WORKER_SLOTS)
    since = resident.residency_ends if resident.busy else resident.last_used
    return resident.busy, not resident.best_effort, resident.priority, since, resident.load_seconds * size


def shard_devices(resident: Resident) -> list[DeviceId]:
    """The accelerators that it uses; main memory if it uses none."""
    accelerators = [id for id in resident.reserved if id.index >= 0]
    return accelerators or [id for id in resident.reserved if id.index == HOST]


def is_on(resident: Resident, device: DeviceId) -> bool:
    return device in resident.reserved or device in resident.measured


def expected(fleet: Fleet) -> Expected:
    return Oracle(fleet).decide()

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
    """The workers that are gone by then, and what was given to others."""

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
    """One plan. `steps` and `stages` are as in the planner's documentation: who starts fits in all of them."""

    def __init__(self, fleet: Fleet):
        self.fleet = fleet
        self.now = fleet.now
        self.devices = {device.id: device for device in fleet.devices}
        residents = sorted(fleet.residents, key=lambda one: one.id)
        self.residents = {one.id: one for one in residents}
        self.held = {
            id: [(one.id, occupied(one, id), one.reserved.get(id, 0)) for one in residents if is_on(one, id)]
            for id in self.devices
        }
        self.present = [one for one in residents if not one.leaving]
        self.staying = {one.id: one for one in self.present}
        self.exiting = sorted((one for one in residents if one.leaving), key=lambda one: (one.leaving_since, one.id))
        self.claimed: dict[int, float] = {}
        self.loads = [(set(spots(one)), one.exclusive) for one in residents if one.starting]
        self.copies = [(one.model, list(spots(one))) for one in self.present]
        gone = {one.id for one in residents if one.leaving}
        self.steps = [Moment(set())]
        self.stages = [Moment(set(gone))]
        self.bare = Moment(gone | {one.id for one in self.present if not one.pinned})
        self.answer = Expected()

    def decide(self) -> Expected:
        for one in self.present:
            if one.expires is not None and one.expires <= self.now and not (one.busy or one.pinned):
                self.evict(one, None)
                self.exiting.append(one)
        for demand in self.fleet.line:
            self.decide_for(demand)
        self.keep_unneeded()
        for demand in self.fleet.line:
            if demand.id in self.answer.start:
                self.grant(demand, self.answer.start[demand.id])
        return self.answer

    # Memory

    def free(self, id: DeviceId, moment: Moment) -> int:
        """Bytes of a device that are free then: the least by the driver, by the ledger and within the limit."""
        device = self.devices[id]
        back = reserved = 0
        for one, share, size in self.held[id]:
            if one in moment.gone:
                back += share
            else:
                reserved += size
        given = sum([claim.get(id, 0) for claim in moment.claims])
        top = device.total - device.margin
        sizes = [top - device.used + back, top - device.foreign - reserved]
        if device.limit is not None:
            sizes.append(device.limit - device.margin - reserved)
        return min(sizes) - given

    def binds(self, id: DeviceId) -> bool:
        return id in self.devices and (self.fleet.memory or id.index == WORKER_SLOTS)

    def short(self, claim: Bytes, moments: Iterable[Moment], gone: Iterable[int] = ()) -> set[DeviceId]:
        """The devices on which `claim` does not fit at one of the moments, if those had left as well."""
        found = set()
        for moment in moments:
            then = Moment(moment.gone | set(gone), moment.claims)
            found |= {id for id, size in claim.items() if self.binds(id) and self.free(id, then) < size}
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
        """Each set of devices of one node. Its shards go there as they come; if one does not fit so, the largest goes
        to the device with most room, and so on."""
        able = sorted(demand.devices & self.devices.keys())
        if demand.place:
            if set(demand.place) <= set(able):
                yield demand.place
            return
        for chosen in combinations(able, len(demand.shards)):
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

    def appeal(self, demand: Demand, place: Place) -> tuple[bool, int, int, Place]:
        """A quiet device first, then the fewest replicas, then the most room, then the first place."""
        pools = {self.pool(id) for id in place}
        replicas = sum(homes.count(id) for model, homes in self.copies if model == demand.model for id in pools)
        return self.is_noisy(demand, place), replicas, -min(self.free_now(id) for id in place), place

    def is_noisy(self, demand: Demand, place: Place) -> bool:
        pools = {self.pool(id) for id in place}
        return any(pools & on and (exclusive or demand.exclusive) for on, exclusive in self.loads)

    # The story

    def decide_for(self, demand: Demand) -> None:
        starts = []
        for place in self.places(demand, self.free_now):
            claim = self.claim(demand, place)
            if not self.short(claim, [*self.steps, *self.stages]) and not self.is_noisy(demand, place):
                starts.append(Offer(place, claim))
        if starts:
            self.start(demand, min(starts, key=lambda offer: self.appeal(demand, offer.place)))
            return
        offers = list(self.offers(demand))
        if offers:
            self.take(demand, min(offers, key=lambda offer: self.disturbance(demand, offer)))
        elif not any(self.fits_empty(self.claim(demand, place)) for place in self.places(demand, self.capacity)):
            if demand.best_effort:
                self.answer.drop.add(demand.id)
            elif demand.is_exact:
                self.answer.refuse.add(demand.id)
            else:
                self.answer.refine.add(demand.id)
                self.stay(demand, None, None)
        elif demand.best_effort:
            self.answer.drop.add(demand.id)
        else:
            self.stay(demand, None, None)

    def fits_empty(self, claim: Bytes) -> bool:
        return all(self.capacity(id) >= size for id, size in claim.items() if self.binds(id))

    def start(self, demand: Demand, offer: Offer) -> None:
        self.answer.start[demand.id] = offer.place
        for moment in [*self.steps, *self.stages, self.bare]:
            moment.claims.append(offer.claim)
        self.settle(demand, offer)

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

    def settle(self, demand: Demand, offer: Offer) -> None:
        """Those behind see it there."""
        pools = {self.pool(id) for id in offer.place}
        self.loads.append((pools, demand.exclusive))
        self.copies.append((demand.model, sorted(pools)))

    def offers(self, demand: Demand) -> Iterator[Offer]:
        """The best set of victims at each place: once all that were claimed ahead have left, and at every stage."""
        for place in self.places(demand, lambda id: self.free(self.pool(id), self.bare)):
            claim = self.claim(demand, place)
            for moments in self.stages[-1:], self.stages:
                victims = self.best_set(demand, claim, moments)
                if victims is not None:
                    yield Offer(place, claim, victims)

    def best_set(self, demand: Demand, claim: Bytes, moments: Sequence[Moment]) -> tuple[Resident, ...] | None:
        """The sets are counted in binary, with the last to leave as the highest digit: the first that is enough leaves
        out the last, then the next to last, and so on. So no member is superfluous."""
        able = sorted(self.able(demand, claim), key=lambda one: (self.bound(one, demand), worth(one)))
        for number in range(1 << len(able)):
            chosen = tuple(one for digit, one in enumerate(able) if number >> digit & 1)
            if not self.short(claim, moments, [one.id for one in chosen]):
                return chosen
        return None

    def able(self, demand: Demand, claim: Bytes) -> list[Resident]:
        """Residents with memory on the devices of `claim` that could be evicted for it, now or later."""
        there = [one for one in self.staying.values() if claim.keys() & (one.reserved.keys() | one.measured.keys())]
        able = [one for one in there if not one.pinned]
        if demand.best_effort:
            able = [one for one in able if one.best_effort and not one.busy and one.last_used < demand.since]
        return able

    def bound(self, one: Resident, demand: Demand) -> float:
        """The moment at which it may leave for the demand at the latest; -inf: now."""
        patient = demand.since + self.fleet.patience
        if one.busy:
            latest = inf if one.starting else max(one.residency_ends, patient)
            return latest if latest > self.now else -inf
        if not one.starting and one.residency_ends <= self.now:
            return -inf
        idle_grace = min(2.0, max(0.2, demand.load_seconds / 2))
        if one.request_interval is not None and one.request_interval > idle_grace:
            idle_grace = 0.0
        if one.idle_grace is not None:
            idle_grace = one.idle_grace
        if one.last_used + idle_grace <= self.now:
            return -inf
        return inf if one.starting else max(one.residency_ends, patient)

    def bound_of(self, demand: Demand, offer: Offer) -> float:
        """The moment at which it has its place at the latest: its own victims may leave, and those claimed ahead on
        devices where it counts on them."""
        bounds = [self.bound(one, demand) for one in offer.victims]
        missing = self.short(offer.claim, self.stages, [one.id for one in offer.victims])
        if missing:
            bounds += [self.now, *self.ahead(missing)]
        return max(bounds, default=-inf)

    def ahead(self, devices: Iterable[DeviceId]) -> list[float]:
        """The bounds of those that are claimed on these devices."""
        return [bound for id, bound in self.claimed.items() for on in devices if is_on(self.residents[id], on)]

    def disturbance(self, demand: Demand, offer: Offer) -> tuple[object, ...]:
        """Soonest, then fewest busy, then no required one, lowest priority, fewest required, least recently used,
        cheapest to bring back; then the place that is most appealing."""
        worths = [worth(one) for one in offer.victims]
        return (
            self.bound_of(demand, offer),
            sum(busy for busy, _, _, _, _ in worths),
            any(required for _, required, _, _, _ in worths),
            max((priority for _, _, priority, _, _ in worths), default=-inf),
            sum(required for _, required, _, _, _ in worths),
            max((since for _, _, _, since, _ in worths), default=-inf),
            sum(cost for _, _, _, _, cost in worths),
            *self.appeal(demand, offer.place),
        )

    def take(self, demand: Demand, offer: Offer) -> None:
        """Evict, if all victims may leave now and nothing else is missing; else claim the place, or drop it."""
        late = [bound for one in offer.victims if (bound := self.bound(one, demand)) > -inf]
        missing = self.short(offer.claim, self.stages, [one.id for one in offer.victims])
        lacking = self.short(offer.claim, [*self.stages, *self.steps], [])
        unsure = bool(offer.victims) and not demand.is_exact and any(id.index != WORKER_SLOTS for id in lacking)
        goes = not (late or missing or unsure or self.disturbs(offer))
        if unsure:
            self.answer.refine.add(demand.id)
        elif demand.best_effort and not goes:
            self.answer.drop.add(demand.id)
            return
        until = max([*late, *self.ahead(missing)], default=-inf)
        ids = {one.id for one in offer.victims}
        if goes:
            for one in offer.victims:
                self.evict(one, demand.id)
            for moment in self.stages:
                moment.claims.append(offer.claim)
            self.step(offer)
        else:
            self.claimed |= {one.id: self.bound(one, demand) for one in offer.victims}
            if ids:
                self.stages.append(Moment(self.stages[-1].gone | ids, list(self.stages[-1].claims)))
            self.stages[-1].claims.append(offer.claim)
            for id in ids:
                del self.staying[id]
        self.bare.claims.append(offer.claim)
        self.settle(demand, offer)
        self.stay(demand, offer, until)

    def disturbs(self, offer: Offer) -> bool:
        """Its victims must not leave, nor it come, where a load other than theirs measures the device."""
        touched = {self.pool(id) for id in offer.place} | {id for one in offer.victims for id in spots(one)}
        own = {id for one in offer.victims if one.starting for id in spots(one)}
        return bool(offer.victims) and any((on - own) & touched for on, exclusive in self.loads if exclusive)

    def step(self, offer: Offer) -> None:
        """Promise it of those that leave as many as it takes, the first to go first."""
        last = self.steps[-1]
        then = Moment(last.gone | {one.id for one in offer.victims}, list(last.claims))
        for number in range(1 << len(self.exiting)):
            chosen = [one for digit, one in enumerate(self.exiting) if number >> digit & 1]
            if not self.short(offer.claim, [then], [one.id for one in chosen]):
                break
        else:
            raise AssertionError("it was to fit once all have left")
        then.gone |= {one.id for one in chosen}
        then.claims.append(offer.claim)
        self.steps.append(then)
        self.exiting = [one for one in self.exiting if one not in chosen]

    def evict(self, one: Resident, asker: int | None) -> None:
        self.answer.evict[one.id] = asker
        del self.staying[one.id]
        for moment in self.stages:
            moment.gone.add(one.id)

    def stay(self, demand: Demand, offer: Offer | None, until: float | None) -> None:
        victims = tuple(sorted(one.id for one in offer.victims)) if offer else ()
        self.answer.wait[demand.id] = (offer.place if offer else ()), victims
        self.answer.until[demand.id] = until if until is not None and self.now < until < inf else None

    def keep_unneeded(self) -> None:
        """Victims that are not needed because of other victims stay, the most valuable first, if none is busy."""
        evicted = [self.residents[id] for id, asker in self.answer.evict.items() if asker is not None]
        if any(one.busy for one in evicted):
            return
        for one in sorted(evicted, key=worth, reverse=True):
            for moment in self.stages:
                moment.gone.remove(one.id)
            if all(not self.is_overdrawn(moment) for moment in self.stages):
                del self.answer.evict[one.id]
            else:
                for moment in self.stages:
                    moment.gone.add(one.id)
        kept = {one.id for one in evicted} - self.answer.evict.keys()
        for id, (place, victims) in self.answer.wait.items():
            self.answer.wait[id] = place, tuple(victim for victim in victims if victim not in kept)

    def is_overdrawn(self, moment: Moment) -> bool:
        claimed = {id for claim in moment.claims for id, size in claim.items() if size}
        return any(self.binds(id) and self.free(id, moment) < 0 for id in claimed)


def worth(one: Resident) -> tuple[bool, bool, int, float, float]:
    """Idle before busy, best-effort before required, lower priority, least recently used (of busy ones: whose minimum
    residency ended first), cheaper to bring back."""
    size = sum(size for id, size in one.reserved.items() if id.index != WORKER_SLOTS)
    since = one.residency_ends if one.busy else one.last_used
    return one.busy, not one.best_effort, one.priority, since, one.load_seconds * size


def spots(one: Resident) -> list[DeviceId]:
    """The accelerators that it uses; main memory if it uses none."""
    accelerators = [id for id in one.reserved if id.index >= 0]
    return accelerators or [id for id in one.reserved if id.index == HOST]


def is_on(one: Resident, device: DeviceId) -> bool:
    return device in one.reserved or device in one.measured


def expected(fleet: Fleet) -> Expected:
    return Oracle(fleet).decide()

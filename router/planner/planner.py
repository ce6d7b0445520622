"""The planner: decides for the whole queue which demands start, where, and which residents are evicted. PURE.

The queue is walked once: required before best-effort demands, then by priority, then by arrival. For each demand:

1. It starts if it fits beside all residents and all claims ahead of it.
2. Else, if it fits without some residents, it claims the place that it disturbs least. The claim keeps the place from
   demands behind it. Its victims leave together, as soon as all of them may.
3. Else it waits without a claim. If it could not fit on an empty machine, it is refused and nothing is evicted.

A demand with a range of KV cache is placed by the least of it, and evicts for the least only. After the whole queue is
placed, the demands that start are granted what is left of the range, in the order of the queue (see `_Walk.grant`).

`router.planner.eviction` defines which residents may leave, when and in which order. The order of places is: victims
that may all leave first; fewest busy victims; the least valuable worst victim; fewest required victims; least recently
used.

The first in the queue always gets its place. A worker may leave, used or not, once its minimum residency and the
demand's swap patience are over. That time never moves away: a claim is only replaced by one whose victims leave now, or
no later, and no other model starts at a claimed place. Memory that is freed goes to claims in the order of the queue: a
demand behind never starts in memory that was freed for a demand ahead.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from router.planner.availability import Moments
from router.planner.eviction import EVICTION_ORDER, NO_VICTIMS, EvictionCandidates, VictimOrder, disturbance_by
from router.planner.ledger import WORKER_SLOTS, Bytes, Device, DeviceId, Resident, is_on
from router.planner.placement import Occupants, Place, Places
from router.planner.types import Demand, Eviction, Plan, Policy, Refusal, Shortage, Start, Wait, WaitCause

# A lower bound of the key of an offer: the first elements of such a key (see `_Walk._least_disturbing`).
Floor = tuple[Any, ...]


def plan(
    waiting: Sequence[Demand], residents: Sequence[Resident], devices: Sequence[Device], now: float, policy: Policy
) -> Plan:
    """Decide for all demands at once. The order inside the arguments does not matter."""
    # Without demands, the answer is cheap: this is the common case while the fleet only serves.
    idle = {
        resident.id: resident.expires
        for resident in residents
        if resident.expires is not None and _may_expire(resident)
    }
    expired = {id for id, expires in idle.items() if expires <= now}
    look_again = min([expires for expires in idle.values() if expires > now], default=None)
    if not waiting:
        evict = {id: Eviction(reason="idle", for_demand=None, idle=True) for id in sorted(expired)}
        return Plan(
            start={}, evict=evict, refine=frozenset(), refuse={}, drop=frozenset(), waits={}, look_again=look_again
        )
    walk = _Walk(residents, devices, now, policy)
    walk.expire(expired, look_again)
    for demand in sorted(waiting, key=queue_order):
        walk.decide(demand)
    walk.keep_unneeded()
    walk.grant()
    return walk.result()


def queue_order(demand: Demand) -> tuple[bool, int, float, int]:
    """The sort key of waiting demands, in the order in which they are considered."""
    return demand.best_effort, -demand.priority, demand.since, demand.id


class _Offer(NamedTuple):
    """A place that a demand could claim, and the residents that would have to leave for it."""

    place: Place
    claim: Bytes
    victims: tuple[Resident, ...] = ()
    free_by: float = -inf  # the time at which the place is free at the latest; -inf: now
    ahead: Sequence[DeviceId] = ()  # the devices on which it waits for residents that are claimed by demands ahead


NO_OFFER = _Offer((), {})  # of a demand that waits without a claim


class _Walk:
    """One walk along the queue, with the decisions so far and the free memory that follows from them."""

    def __init__(self, residents: Sequence[Resident], devices: Sequence[Device], now: float, policy: Policy):
        self.places = Places(devices, memory=policy.memory)
        self.pools = self.places.pools
        self.now = now
        self.policy = policy
        residents = sorted(residents, key=attrgetter("id"))
        self.staying = {resident.id: resident for resident in residents if not resident.leaving}
        self.leaving = {resident.id: resident for resident in residents if resident.leaving}
        self.claimed: dict[int, Resident] = {}
        self.free_by: dict[DeviceId, float] = {}  # by device, the time at which all claimed residents there may leave
        # Claims and evictions take residents out of `staying`; the candidates of each device follow.
        self.victims = EvictionCandidates(self.staying, now, policy.patience)

        self.moments = Moments(devices, residents, self.victims.evictable, memory=policy.memory)
        self.stages = self.moments.stages
        self.emptied = self.moments.emptied
        self.occupants = Occupants(residents, self.staying.values(), self.places)

        self.start: dict[int, Start] = {}
        self.starting: list[tuple[Demand, Place]] = []  # those of `start` with a range, in the order of the queue
        self.evict: dict[int, Eviction] = {}
        self.refine: set[int] = set()
        self.refuse: dict[int, Refusal] = {}
        self.drop: set[int] = set()
        self.waits: dict[int, Wait] = {}
        self.changes: list[float] = []  # the times at which time alone changes the answer

    # Steps of the walk, in order

    def expire(self, expired: Collection[int], next_one: float | None) -> None:
        """Evict residents that have been idle past their time to live."""
        for resident in [resident for resident in self.staying.values() if resident.id in expired]:
            self._evict(resident, Eviction(reason="idle", for_demand=None, idle=True))
            self.moments.expire(resident)
        if next_one is not None:
            self.changes.append(next_one)

    def decide(self, demand: Demand) -> None:
        """Decide for the next demand of the queue."""
        groups = self.places.groups(demand.devices)
        if offer := self._free_place(demand, groups):
            self._start_at(demand, offer)
        elif offer := self._least_disturbing(demand, groups, order := VictimOrder(self.victims, demand)):
            self._claim(demand, offer, order)
        elif not self.places.could_hold(demand, groups):
            self._refuse(demand, groups)
        elif demand.best_effort:
            self.drop.add(demand.id)
        else:
            self._wait_unclaimed(demand, groups)

    def keep_unneeded(self) -> None:
        """Keep victims that are no longer needed because of other victims of this plan, the most valuable first.

        Only if all victims are idle: no demand should wait for a busy worker so that an idle one may stay.
        """
        evicted = [self.leaving[id] for id, eviction in self.evict.items() if eviction.reason == "evicted"]
        if any(resident.busy for resident in evicted):
            return
        # The most valuable first: of two victims of which one is enough, the one that is used least leaves.
        kept_ids = set()
        for resident in sorted(evicted, key=EVICTION_ORDER, reverse=True):
            if self.stages.needs_exit_of(resident):
                continue
            self.stages.restore(resident)
            if self.stages.is_overcommitted():
                self.stages.remove(resident)
            else:
                del self.evict[resident.id], self.leaving[resident.id]
                kept_ids.add(resident.id)
        if kept_ids:
            leaving = self.leaving.values()
            self.waits = {id: _without_kept(wait, kept_ids, leaving) for id, wait in self.waits.items()}

    def grant(self) -> None:
        """Grant each demand that starts as many steps of its range as are free, in the order of the queue.

        This comes after all decisions, so that no grant causes an eviction or takes memory of a claim: the free
        memory is that of every step and stage, with the victims that are kept after all. One demand gets all that is
        free: a share for each would waste memory, because a ready worker does not grow.
        """
        for demand, place in self.starting:
            growth = self.places.growth(demand, place)
            steps = demand.steps
            if self.policy.memory:
                for id, size in growth.items():
                    steps = min(steps, max(0, self._free(id)) // size)
            for id, shard, size in zip(place, demand.shards, demand.growth, strict=True):
                if size and id in demand.shard_limits:
                    steps = min(steps, max(0, demand.shard_limits[id] - shard) // size)
            if not steps:
                continue
            granted = {id: steps * size for id, size in growth.items()}
            claim = self.start[demand.id].claim
            claim = {id: size + granted.get(id, 0) for id, size in claim.items()}
            self.start[demand.id] = Start(place=place, claim=claim, steps=steps)
            self.moments.start(granted)

    def result(self) -> Plan:
        return Plan(
            start=self.start,
            evict=self.evict,
            refine=frozenset(self.refine),
            refuse=self.refuse,
            drop=frozenset(self.drop),
            waits=self.waits,
            look_again=min(self.changes, default=None),
        )

    # Free memory

    def _free_if_emptied(self, id: DeviceId) -> int:
        return self.emptied.free[self.pools[id]]

    def _free(self, id: DeviceId) -> int:
        return self.moments.free(self.pools[id])

    # 1. Start

    def _free_place(self, demand: Demand, groups: Sequence[Sequence[DeviceId]]) -> _Offer | None:
        """Return the place where it fits at every moment: the one with fewest replicas, then with most free memory."""
        # Devices without room for the smallest shard are left out first: with eight devices there are 70 sets of four.
        here, coming, places = self.moments.now, self.stages.least, self.places
        with_room = places.with_room(demand, groups, here.free, coming.free)
        if not any(with_room):
            return None
        fitting = [
            _Offer(place, claim)
            for place in places.candidates(demand, groups, self._free, with_room)
            if not (
                here.short(claim := places.claim(demand, place))
                or coming.short(claim)
                or self.occupants.must_load_alone(demand, place)
            )
        ]
        return min(fitting, key=lambda offer: self._preference(demand, offer.place), default=None)

    def _preference(self, demand: Demand, place: Place) -> tuple[int, int, Place]:
        # Replicas of a model are spread over the devices, and the rest of the fleet too. The last element is the place
        # itself, so that the same question always gets the same answer.
        return self.occupants.replicas(demand.model, place), -min(map(self._free, place)), place

    def _start_at(self, demand: Demand, offer: _Offer) -> None:
        self.start[demand.id] = Start(place=offer.place, claim=offer.claim)
        if demand.steps:
            self.starting.append((demand, offer.place))
        self.moments.start(offer.claim)
        self.occupants.add(demand, offer.place)

    # 2. Claim

    def _least_disturbing(
        self, demand: Demand, groups: Sequence[Sequence[DeviceId]], order: VictimOrder
    ) -> _Offer | None:
        """Return the least disturbing offer; None if it fits nowhere, whatever leaves.

        Computing the victims of every place was too slow for large fleets. So places are taken in the order of a lower
        bound of their disturbance (branch and bound), until no other place can be better than the best one.
        """
        best: _Offer | None = None
        best_key: tuple[Any, ...] = ()
        places = self._floors(demand, groups, order)
        heapify(places)  # one of the first is the best, nearly always
        while places:
            floor, place = heappop(places)
            # All others have a higher bound, and none of them can be better than its bound.
            if best is not None and floor > best_key:
                break
            # A device that another load measures comes after one where the load could begin at once.
            tail = self.occupants.must_load_alone(demand, place), self._preference(demand, place)
            if best is not None and floor == best_key[:2] and tail > best_key[2:]:
                continue  # its victims disturb no less, and the rest of its key is larger
            claim = self.places.claim(demand, place)
            if self.emptied.short(claim):
                continue
            for victims in self._victims(claim, order):
                offer = self._offer(place, claim, victims, order)
                if best is not None and offer.free_by > best_key[0]:
                    continue
                disturbance = disturbance_by([resident.eviction_key for resident in victims])
                key = offer.free_by, disturbance, *tail
                if best is None or key < best_key:
                    best, best_key = offer, key
        return best

    def _floors(
        self, demand: Demand, groups: Sequence[Sequence[DeviceId]], order: VictimOrder
    ) -> list[tuple[Floor, Place]]:
        """Return the places that have room if all that can leave had left, each with a lower bound of its key: the
        victims there leave no sooner and disturb no less."""
        pools, victims, memory, free_by = self.pools, self.victims, self.policy.memory, self.free_by
        by_device = victims.by_device
        least, last = self.stages.least.free, self.stages.last.free
        now, patient_until = self.now, order.patient_until

        def floor_on(id: DeviceId, size: int) -> Floor:
            """The lower bound of one device; empty if no resident has to leave it."""
            pool = pools[id]
            if not memory or least[pool] >= size:
                return ()
            # The last stage decides: residents that are claimed by a demand ahead are gone there already.
            missing = size - last[pool]
            floor = (by_device.get(pool) or victims.on_device(pool)).floor(missing)
            if floor[0] > -inf:  # busy victims; they leave after their minimum residency and the swap patience
                latest = max(floor[0], patient_until)
                floor = (latest if latest > now else -inf), floor[1]
            if missing <= 0:  # it can also wait for victims of a demand ahead, and needs none of its own
                # Without this, a place whose own residents stay long would be skipped although it is free soon.
                return min(floor, (max(now, free_by[pool]), ()))
            return floor

        def floor_if_free(place: Place) -> Floor:
            # No victims, so the whole key is known. It is no start because a load there measures the device.
            return -inf, NO_VICTIMS, self.occupants.must_load_alone(demand, place), self._preference(demand, place)

        with_room, shards = self.places.with_room(demand, groups, self.emptied.free), demand.shards
        if len(shards) == 1 and not demand.place:
            return [(floor_on(id, shards[0]) or floor_if_free((id,)), (id,)) for group in with_room for id in group]
        return [
            (max(map(floor_on, place, shards)) or floor_if_free(place), place)
            for place in self.places.candidates(demand, groups, self._free_if_emptied, with_room)
        ]

    def _victims(self, claim: Bytes, order: VictimOrder) -> Iterator[tuple[Resident, ...]]:
        """Yield the sets of victims for a place: one that is enough once the claimed residents have left, and one that
        is enough at once.

        Neither is always better: to wait for residents that are claimed ahead disturbs fewer others, but takes longer.
        """
        last, least = self.stages.last, self.stages.least
        views = (last,) if not self.stages.has_later_moments or last.is_like(least, claim) else (last, least)
        for view in views:
            short = view.short(claim)
            victims = view.victims_for(claim, order.on_devices(short), short) if short else ()
            if victims is not None:
                yield victims

    def _offer(self, place: Place, claim: Bytes, victims: tuple[Resident, ...], order: VictimOrder) -> _Offer:
        """Return the offer with the devices on which it waits for demands ahead, and the time until then."""
        free_by = order.leaves_by(victims[-1]) if victims else -inf  # they are in this order, so no other leaves later
        # A device has less memory at an earlier stage only if claimed residents leave it, so it has such a time.
        ahead = self.stages.least.short_without(claim, victims) if self.stages.has_later_moments else ()
        if ahead:
            free_by = max(free_by, self.now, *(self.free_by[id] for id in ahead))
        return _Offer(place, claim, victims, free_by, ahead)

    def _claim(self, demand: Demand, offer: _Offer, order: VictimOrder) -> None:
        """Keep the place for the demand. Evict the victims if all of them may leave and nothing else is missing.

        All or none: half an eviction costs a model and does not help the demand.
        """
        shortage = self._shortage(offer.claim, self._free)
        is_measured = bool(offer.victims and self.occupants.measured) and self._disturbs_a_measurement(offer)
        # A static bound may be several times too high. Nothing is evicted on it: the exact estimate comes first. Where
        # only the number of workers is short, memory is enough even by that bound.
        must_refine = bool(offer.victims) and not demand.is_exact and any(id.index != WORKER_SLOTS for id in shortage)
        evicts_now = offer.free_by == -inf and not (is_measured or must_refine)
        if must_refine:
            self.refine.add(demand.id)
        elif demand.best_effort and not evicts_now:
            # A claim of a best-effort demand would keep memory from required ones.
            self.drop.add(demand.id)
            return

        ahead = self.occupants.residents_on(offer.ahead, self.claimed)
        if evicts_now:
            for resident in offer.victims:
                self._evict(resident, Eviction(reason="evicted", for_demand=demand.id, idle=not resident.busy))
            self.moments.evict(offer.claim, offer.victims)
        else:
            # The claim holds although its victims stay for now. Without it, small demands behind would take each byte
            # that becomes free, and a large model would never start.
            self._look_again_at(order.next_moment())
            self._claim_later(offer, order)
        self.occupants.add(demand, offer.place)

        # The cause is the one that lasts longest: victims that may not leave yet (inside the minimum residency, or
        # before the end of swap patience), then a missing estimate, then demands ahead, then a measurement, then exits
        # that are under way.
        cause: WaitCause
        on: Iterable[Resident]
        if not_yet := [resident for resident in offer.victims if order.leaves_by(resident) > -inf]:
            in_residency = any(resident.starting or resident.residency_ends > self.now for resident in not_yet)
            cause, on = "residency" if in_residency else "busy", not_yet
        elif must_refine:
            cause, on = _scarcity(shortage), offer.victims
        elif offer.ahead:
            cause, on = _scarcity(shortage), ahead
        elif is_measured or not shortage:
            disturbed, loads = self._disturbed(offer), self.occupants.starting
            cause, on = "exclusive", [load for load in loads if not disturbed.isdisjoint(load.shard_devices)]
        else:
            cause, on = "stopping", self.occupants.residents_on(shortage, self.leaving)
        self._wait(demand, cause, on, shortage, offer)

    def _disturbed(self, offer: _Offer) -> set[DeviceId]:
        """Return the devices on which memory changes: the place, and the devices of the victims."""
        return {
            *self.places.charged(offer.place),
            *(id for resident in offer.victims for id in resident.shard_devices),
        }

    def _disturbs_a_measurement(self, offer: _Offer) -> bool:
        """Return whether memory would change on a device that a load measures, unless that load is a victim itself."""
        measured = self.occupants.measured.difference(
            id for resident in offer.victims if resident.starting for id in resident.shard_devices
        )
        return not self._disturbed(offer).isdisjoint(measured)

    def _evict(self, resident: Resident, eviction: Eviction) -> None:
        self.evict[resident.id] = eviction
        self.leaving[resident.id] = self.staying.pop(resident.id)
        self.victims.remove(resident)

    def _look_again_at(self, moment: float) -> None:
        if moment < inf:
            self.changes.append(moment)

    def _claim_later(self, offer: _Offer, order: VictimOrder) -> None:
        """Record a claim whose victims leave later: demands behind may neither evict them nor use their memory."""
        # They are no candidates any more. Otherwise a demand behind could claim them too, and both would wait for the
        # same memory.
        self.moments.claim_later(offer.claim, offer.victims)
        for resident in offer.victims:
            leaves_by = order.leaves_by(resident)
            self.claimed[resident.id] = self.staying.pop(resident.id)
            self.victims.remove(resident)
            for id, _, _ in resident.holds:
                self.free_by[id] = max(self.free_by.get(id, -inf), leaves_by)

    # 3. Refuse, or wait without a claim

    def _refuse(self, demand: Demand, groups: Sequence[Sequence[DeviceId]]) -> None:
        """Refuse a demand that does not fit on an empty machine; refine a static estimate first."""
        capacity = self.places.capacity
        # The refusal reports the place that comes closest, so that the message names the smallest lack.
        shortage = self._shortage(self.places.nearest(demand, groups, capacity), capacity)
        if demand.best_effort:
            self.drop.add(demand.id)
        elif demand.is_exact:
            offered = max(map(len, groups), default=0)
            self.refuse[demand.id] = Refusal(devices=shortage, needs=len(demand.shards), offered=offered)
        else:
            self.refine.add(demand.id)
            self._wait(demand, _scarcity(shortage), (), shortage)

    def _wait_unclaimed(self, demand: Demand, groups: Sequence[Sequence[DeviceId]]) -> None:
        """Let the demand wait without a claim: it does not fit even if all candidates had left.

        A claim would block other demands for memory that is pinned or foreign, possibly for ever.
        """
        claim = self.places.nearest(demand, groups, self._free_if_emptied)
        missing = self.emptied.short(claim)
        shortage = self._shortage({id: claim[id] for id in missing}, self._free)
        on = self.occupants.residents_on(missing, self.staying) + self.occupants.residents_on(missing, self.claimed)
        self._wait(demand, _scarcity(shortage), on, shortage)

    # Reasons

    def _shortage(self, claim: Bytes, room: Callable[[DeviceId], int]) -> Mapping[DeviceId, Shortage]:
        """Return the devices on which `claim` does not fit into `room`."""
        binds = self.places.binds
        return {
            id: Shortage(needed, max(0, free))
            for id, needed in claim.items()
            if id in binds and (free := room(id)) < needed
        }

    def _wait(
        self,
        demand: Demand,
        cause: WaitCause,
        on: Iterable[Resident],
        shortage: Mapping[DeviceId, Shortage],
        offer: _Offer = NO_OFFER,
    ) -> None:
        self.waits[demand.id] = Wait(
            cause=cause,
            on=tuple(sorted([resident.id for resident in on])),
            shortage=shortage,
            place=offer.place,
            victims=tuple(sorted([resident.id for resident in offer.victims])),
            until=offer.free_by if self.now < offer.free_by < inf else None,
        )


def _may_expire(resident: Resident) -> bool:
    return not (resident.busy or resident.pinned or resident.leaving)


def _scarcity(shortage: Collection[DeviceId]) -> WaitCause:
    """Return the cause of a wait for more than there is."""
    return "slots" if shortage and all(id.index == WORKER_SLOTS for id in shortage) else "memory"


def _without_kept(wait: Wait, kept_ids: set[int], leaving: Iterable[Resident]) -> Wait:
    """Return the wait after residents that it named as victims are kept."""
    if kept_ids.isdisjoint(wait.on):
        return wait
    return replace(
        wait,
        on=tuple(sorted(resident.id for resident in leaving if is_on(resident, wait.shortage))),
        victims=tuple(id for id in wait.victims if id not in kept_ids),
    )

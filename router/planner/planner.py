"""The planner: decides for the whole queue which demands start, where, and which residents are evicted. PURE.

The queue is walked once: required before best-effort demands, then by priority, then by arrival. For each demand:

1. It starts if it fits beside all residents and all promises.
2. Else, if it fits without some residents, it claims the place that it disturbs least. The claim keeps the place from
   demands behind it. Its victims leave together, as soon as all of them may.
3. Else it waits without a claim. If it could not fit on an empty machine, it is refused and nothing is evicted.

`router.planner.eviction` defines which residents may leave, when and in which order. The order of places is: victims that may
all leave first; fewest busy victims; the least valuable worst victim; fewest required victims; least recently used.

The first in the queue always gets its place. A worker may leave, used or not, once its minimum residency and the
demand's swap patience are over. A claim is only replaced by one whose victims may all leave now, or not later, and a
claimed place takes no newcomers, so that time never moves away. Memory that is freed is promised in the order of the
queue: a demand behind never starts in memory that was freed for a demand ahead.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from router.planner.availability import Stages, View
from router.planner.eviction import NOBODY, WORTH, Line, Victims, disturbance_by
from router.planner.ledger import HOST, SLOTS, Bytes, Device, DeviceId, Resident
from router.planner.placement import Place, Places
from router.planner.types import Cause, Demand, Eviction, Keep, Plan, Policy, Refusal, Shortage, Start, Wait

Floor = tuple[Any, ...]
"""A lower bound of the key of an offer: the first elements of a key (see `_Walk._least_disturbing`)."""


def plan(
    waiting: Sequence[Demand], residents: Sequence[Resident], devices: Sequence[Device], now: float, policy: Policy
) -> Plan:
    """Decide for all demands at once. The order inside the arguments does not matter."""
    # Without demands, the answer is cheap: this is the common case while the fleet only serves.
    idle = {one.id: one.expires for one in residents if one.expires is not None and _may_expire(one)}
    expired = {id for id, expires in idle.items() if expires <= now}
    look_again = min([expires for expires in idle.values() if expires > now], default=None)
    if not waiting:
        evict = {id: Eviction(reason="idle", for_demand=None, idle=True) for id in sorted(expired)}
        return Plan(
            start={}, evict=evict, refine=frozenset(), refuse={}, drop=frozenset(), waits={}, look_again=look_again
        )
    walk = _Walk(residents, devices, now, policy)
    walk.expire(expired, look_again)
    for demand in sorted(waiting, key=lambda demand: (demand.luxury, -demand.priority, demand.since, demand.id)):
        walk.meet(demand)
    walk.spare()
    return walk.answer()


class _Offer(NamedTuple):
    """A place that a demand could claim, and the residents that would have to leave for it."""

    place: Place
    claim: Bytes
    victims: tuple[Resident, ...] = ()


class _Walk:
    """One walk along the queue, with the decisions so far and the free memory at each moment that follows from them.

    step      at first all residents, with what was granted. Each claim that only waits for leaving residents adds a
              step: without as many of them as it needs, the first to leave first, and with the claim
    now_free  the minimum of all steps
    stages    at first without all leaving residents, with all such claims. Each claim that waits until its victims may
              leave adds a stage: without these victims, and with the claim
    bare      without all that could be evicted, with all claims

    A demand starts if it fits at every step and on every stage. It evicts if it fits on every stage without its
    victims. Otherwise a demand ahead would have to wait for it. One view of the last moment alone would not do: memory
    can be free now and at the end, and be promised in between.
    """

    def __init__(self, residents: Sequence[Resident], devices: Sequence[Device], now: float, policy: Policy):
        self.places = Places(devices, memory=policy.memory)
        self.pools = self.places.pools
        self.now = now
        self.policy = policy
        residents = sorted(residents, key=attrgetter("id"))
        self.staying = {one.id: one for one in residents if not one.leaving}
        self.leaving = {one.id: one for one in residents if one.leaving}
        self.unpromised = sorted(self.leaving.values(), key=lambda one: (one.retired_at, one.id))
        self.claimed: dict[int, Resident] = {}
        self.bounds: dict[DeviceId, float] = {}  # by device, when the claimed residents may leave at the latest
        self.keep: dict[int, Keep] = {id: "pinned" if one.pinned else "elsewhere" for id, one in self.staying.items()}
        self.at: dict[DeviceId, list[Resident]] = {}
        for one in residents:
            for id, _, _ in one.holds:
                if id in self.at:
                    self.at[id].append(one)
                else:
                    self.at[id] = [one]
        self.victims = Victims(self.staying, now, policy.patience)

        self.step = View(devices, residents, memory=policy.memory)
        self.now_free = self.step.copy()
        soon = self.step.copy()
        for one in self.leaving.values():
            soon.leave(one)
        self.stages = Stages(soon)
        self.bare = soon.copy()
        self.bare.leave_all(self.victims.able)
        self.copies = tuple(self.staying.values())
        self.models = {one.model for one in self.copies}
        self.homes: dict[str, list[DeviceId]] = {}
        self.starting = [one for one in residents if one.starting]
        self.loading = {id for one in self.starting for id in _spots(one)}
        self.hushed = {id for one in self.starting if one.quiet for id in _spots(one)}

        self.start: dict[int, Start] = {}
        self.evict: dict[int, Eviction] = {}
        self.refine: set[int] = set()
        self.refuse: dict[int, Refusal] = {}
        self.drop: set[int] = set()
        self.waits: dict[int, Wait] = {}
        self.moments: list[float] = []

    # Steps of the walk, in order

    def expire(self, expired: Collection[int], next_one: float | None) -> None:
        """Evict residents that have been idle past their time to live."""
        for one in [one for one in self.staying.values() if one.id in expired]:
            self._send_away(one, Eviction(reason="idle", for_demand=None, idle=True))
            self.unpromised.append(one)
        if next_one is not None:
            self.moments.append(next_one)

    def meet(self, demand: Demand) -> None:
        """Decide for the next demand of the queue."""
        groups = self.places.groups(demand.devices)
        if offer := self._room(demand, groups):
            self._grant(demand, offer)
        elif offer := self._least_disturbing(demand, groups, line := Line(self.victims, demand)):
            self._claim(demand, offer, line)
        elif not self.places.could_hold(demand, groups):
            self._decline(demand, groups)
        elif demand.luxury:
            self.drop.add(demand.id)
        else:
            self._hold(demand, groups)

    def spare(self) -> None:
        """Keep victims that are no longer needed because of other victims of this plan, the most valuable first.

        Only if all victims are idle: no demand should wait for a busy worker so that an idle one may stay.
        """
        evicted = [self.leaving[id] for id, eviction in self.evict.items() if eviction.reason == "evicted"]
        if any(one.busy for one in evicted):
            return
        spared = set()
        for one in sorted(evicted, key=WORTH, reverse=True):
            if self.stages.need(one):
                continue
            self.stages.stay(one)
            if self.stages.keep_their_promises():
                del self.evict[one.id], self.leaving[one.id]
                spared.add(one.id)
            else:
                self.stages.leave(one)
        if spared:
            self.waits = {id: self._let_off(spared, wait) for id, wait in self.waits.items()}

    def answer(self) -> Plan:
        return Plan(
            start=self.start,
            evict=self.evict,
            refine=frozenset(self.refine),
            refuse=self.refuse,
            drop=frozenset(self.drop),
            waits=self.waits,
            look_again=min(self.moments, default=None),
        )

    # Free memory, replicas and loads

    def _bare(self, id: DeviceId) -> int:
        return self.bare.room[self.pools[id]]

    def _free(self, id: DeviceId) -> int:
        id = self.pools[id]
        return min(self.now_free.room[id], self.stages.least.room[id])

    def _copies(self, model: str, place: Place) -> int:
        homes = self._homes(model)
        return sum(map(homes.count, self.places.charged(place))) if homes else 0

    def _homes(self, model: str) -> list[DeviceId]:
        """Return the devices of all replicas of a model, planned ones included."""
        if model not in self.homes:
            here = [one for one in self.copies if one.model == model] if model in self.models else []
            self.homes[model] = [id for one in here for id in _spots(one)]
        return self.homes[model]

    def _is_noisy(self, demand: Demand, place: Place) -> bool:
        """Return whether it may not load there now: one of the loads there, or its own, measures the device."""
        noisy = self.loading if demand.quiet else self.hushed
        return bool(noisy) and not noisy.isdisjoint(self.places.charged(place))

    def _occupy(self, demand: Demand, place: Place) -> None:
        pools = self.places.charged(place)
        self._homes(demand.model).extend(pools)
        self.loading |= pools
        if demand.quiet:
            self.hushed |= pools

    # 1. Start

    def _room(self, demand: Demand, groups: Sequence[Sequence[DeviceId]]) -> _Offer | None:
        """Return the place where it fits at every moment, preferably with few replicas, then with much free memory."""
        # Devices without room for the smallest shard are left out first: with eight devices there are 70 sets of four.
        here, coming, places = self.now_free, self.stages.least, self.places
        roomy = places.roomy(demand, groups, here.room, coming.room)
        if not any(roomy):
            return None
        fitting = [
            _Offer(place, claim)
            for place in places.of(demand, groups, self._free, roomy)
            if not (
                here.short(claim := places.share(demand, place)) or coming.short(claim) or self._is_noisy(demand, place)
            )
        ]
        return min(fitting, key=lambda offer: self._appeal(demand, offer.place), default=None)

    def _appeal(self, demand: Demand, place: Place) -> tuple[int, int, Place]:
        return self._copies(demand.model, place), -min(map(self._free, place)), place

    def _grant(self, demand: Demand, offer: _Offer) -> None:
        self.start[demand.id] = Start(place=offer.place, claim=offer.claim)
        self.now_free.promise(offer.claim)
        self.step.promise(offer.claim)
        self.stages.promise(offer.claim)
        self.bare.promise(offer.claim)
        self._occupy(demand, offer.place)

    # 2. Claim

    def _least_disturbing(self, demand: Demand, groups: Sequence[Sequence[DeviceId]], line: Line) -> _Offer | None:
        """Return the least disturbing offer; None if it fits nowhere, whatever leaves.

        Computing the victims of every place was too slow for large fleets. So places are taken in the order of a lower
        bound of their disturbance (branch and bound), until no other place can be better than the best one.
        """
        best: _Offer | None = None
        best_key: tuple[Any, ...] = ()
        places = self._floors(demand, groups, line)
        heapify(places)  # one of the first is the best, nearly always
        while places:
            floor, place = heappop(places)
            if best is not None and floor > best_key:
                break
            tail = self._is_noisy(demand, place), self._appeal(demand, place)
            if best is not None and floor == best_key[:2] and tail > best_key[2:]:
                continue  # its victims disturb no less, and the rest of its key is larger
            claim = self.places.share(demand, place)
            for victims in () if self.bare.short(claim) else self._victims(claim, line):
                offer = _Offer(place, claim, victims)
                bound = self._bound_of(offer, line)
                if best is not None and bound > best_key[0]:
                    continue
                disturbance = disturbance_by([one.worth for one in victims])
                key = bound, disturbance, *tail
                if best is None or key < best_key:
                    best, best_key = offer, key
        return best

    def _floors(self, demand: Demand, groups: Sequence[Sequence[DeviceId]], line: Line) -> list[tuple[Floor, Place]]:
        """Return the places that have room if all that can leave had left, each with a lower bound of its key: the
        victims there leave no sooner and disturb no less."""
        pools, victims, memory, bounds = self.pools, self.victims, self.policy.memory, self.bounds
        crowds = victims.crowds
        least, last = self.stages.least.room, self.stages.last.room
        now, patient_until = self.now, line.patient_until

        def on(id: DeviceId, size: int) -> Floor:
            """The lower bound of one device; empty if no resident has to leave it."""
            pool = pools[id]
            if not memory or least[pool] >= size:
                return ()
            # The last stage decides: residents that are claimed by a demand ahead are gone there already.
            missing = size - last[pool]
            crowd = crowds.get(pool) or victims.crowd(pool)
            floor = crowd.floor(max(1, missing))
            turn = floor[0]
            if turn > -inf:
                latest = max(turn, patient_until)
                floor = (latest if latest > now else -inf), floor[1]
            if missing <= 0:  # it can also wait for victims of a demand ahead, and needs none of its own
                return min(floor, (max(now, bounds.get(pool, -inf)), ()))
            return floor

        def free(place: Place) -> Floor:
            return -inf, NOBODY, self._is_noisy(demand, place), self._appeal(demand, place)

        roomy, shards = self.places.roomy(demand, groups, self.bare.room), demand.shards
        if len(shards) == 1 and not demand.place:
            return [(on(id, shards[0]) or free((id,)), (id,)) for group in roomy for id in group]
        return [
            (max(map(on, place, shards)) or free(place), place)
            for place in self.places.of(demand, groups, self._bare, roomy)
        ]

    def _victims(self, claim: Bytes, line: Line) -> Iterator[tuple[Resident, ...]]:
        """Yield the sets of victims for a place: one that is enough once the claimed residents have left, and one that
        is enough at once.

        Neither is always better: to wait for residents that are claimed ahead disturbs fewer others, but takes longer.
        """
        last, least = self.stages.last, self.stages.least
        views = (last,) if not self.stages.many or last.is_like(least, claim) else (last, least)
        for view in views:
            short = view.short(claim)
            victims = view.enough(claim, line.on(short), short) if short else ()
            if victims is not None:
                yield victims

    def _bound_of(self, offer: _Offer, line: Line) -> float:
        """Return the time at which its place is free at the latest: its own victims may leave, and also those claimed
        ahead if it needs their memory."""
        bound = max([line.bound(one) for one in offer.victims], default=-inf)
        if self.claimed and (short := self._short_without(offer)):
            bound = max(bound, self.now, *(self.bounds.get(id, -inf) for id in short))
        return bound

    def _short_without(self, offer: _Offer) -> list[DeviceId]:
        """Return the devices on which it does not fit on some stage, although its own victims had left."""
        if not self.stages.many:
            return []  # they were chosen so
        return self.stages.least.short_without(offer.claim, offer.victims)

    def _claim(self, demand: Demand, offer: _Offer, line: Line) -> None:
        """Keep the place for it. Evict the victims if all of them may leave and nothing else is missing.

        All or none: half an eviction costs a model and does not help the demand.
        """
        late = [one for one in offer.victims if line.bound(one) > -inf]
        missing = self._short_without(offer)
        ahead = self._all_on(missing, self.claimed)
        is_hushed = bool(offer.victims and self.hushed) and self._disturbs_a_measurement(offer)
        must_refine = bool(offer.victims) and not demand.sure
        goes = not (late or missing or is_hushed or must_refine)
        if must_refine:
            self.refine.add(demand.id)
        elif demand.luxury and not goes:
            self.drop.add(demand.id)
            return

        shortage = self._shortage(offer.claim, self._free)
        until = max([*map(line.bound, late), *(self.bounds.get(id, -inf) for id in missing)], default=-inf)
        if goes:
            for one in offer.victims:
                self._send_away(one, Eviction(reason="evicted", for_demand=demand.id, idle=not one.busy))
            self.stages.promise(offer.claim)
            self._step(offer)
        else:
            # The claim holds although its victims stay for now. Without it, small demands behind would take each byte
            # that becomes free, and a large model would never start.
            self._look_at(line.next_moment())
            self._book(offer, line)
        self.bare.promise(offer.claim)
        self._occupy(demand, offer.place)

        # The cause is the one that lasts longest: victims that may not leave yet, then a missing estimate, then demands
        # ahead, then a measurement, then exits that are under way.
        cause: Cause
        on: Iterable[Resident]
        if late:
            cause = "turn" if any(one.starting or one.turn_ends > self.now for one in late) else "busy"
            on = late
        elif must_refine:
            cause, on = _scarce(shortage), offer.victims
        elif missing:
            cause, on = _scarce(shortage), ahead
        elif is_hushed or not shortage:
            disturbed = self._disturbed(offer)
            cause, on = "quiet", [one for one in self.starting if not disturbed.isdisjoint(_spots(one))]
        else:
            cause, on = "stopping", self._all_on(shortage, self.leaving)
        self.waits[demand.id] = self._wait(cause, on, shortage, offer, until)

    def _disturbed(self, offer: _Offer) -> set[DeviceId]:
        """Return the devices on which memory changes: its place, and those of its victims."""
        return {*self.places.charged(offer.place), *(id for one in offer.victims for id in _spots(one))}

    def _disturbs_a_measurement(self, offer: _Offer) -> bool:
        """Return whether memory would change on a device that a load measures, other than a load of its victims."""
        measured = self.hushed.difference(id for one in offer.victims if one.starting for id in _spots(one))
        return not self._disturbed(offer).isdisjoint(measured)

    def _send_away(self, one: Resident, eviction: Eviction) -> None:
        self.evict[one.id] = eviction
        self.leaving[one.id] = self.staying.pop(one.id)
        del self.keep[one.id]
        self.victims.lose(one)
        self.stages.leave(one)

    def _look_at(self, moment: float) -> None:
        if moment < inf:
            self.moments.append(moment)

    def _step(self, offer: _Offer) -> None:
        """Promise it the memory of leaving residents: the first to leave go to the first in the queue.

        Without this order, a demand behind could start in memory that is free by now, and the one ahead would wait for
        a worker that takes longer to exit.
        """
        step = self.step
        for one in offer.victims:
            step.leave(one)
        promised = step.enough(offer.claim, self.unpromised, step.short(offer.claim))
        assert promised is not None, "it fits on the first stage, where all of them are gone"
        for one in promised:
            step.leave(one)
            self.unpromised.remove(one)
        step.promise(offer.claim)
        self.now_free.lower(step, offer.claim)  # elsewhere this step has no less than the one before

    def _book(self, offer: _Offer, line: Line) -> None:
        """Record a claim whose victims leave later: demands behind may neither evict them nor use their memory."""
        self.stages.book(offer.claim, offer.victims)
        for one in offer.victims:
            bound = line.bound(one)
            self.claimed[one.id] = self.staying.pop(one.id)
            del self.keep[one.id]
            self.victims.lose(one)
            for id, _, _ in one.holds:
                self.bounds[id] = max(self.bounds.get(id, -inf), bound)

    # 3. Refuse, or wait without a claim

    def _decline(self, demand: Demand, groups: Sequence[Sequence[DeviceId]]) -> None:
        """Refuse a demand that does not fit on an empty machine; refine a static estimate first."""
        capacity = self.places.capacity
        devices = self._shortage(self.places.nearest(demand, groups, capacity), capacity)
        if demand.luxury:
            self.drop.add(demand.id)
        elif demand.sure:
            offered = max(map(len, groups), default=0)
            self.refuse[demand.id] = Refusal(devices=devices, needs=len(demand.shards), offered=offered)
        else:
            self.refine.add(demand.id)
            self.waits[demand.id] = self._wait(_scarce(devices), (), devices)

    def _hold(self, demand: Demand, groups: Sequence[Sequence[DeviceId]]) -> None:
        """Let it wait without a claim: it does not fit even if all that can leave had left.

        A claim would block other demands for memory that is pinned or foreign, possibly for ever.
        """
        claim = self.places.nearest(demand, groups, self._bare)
        missing = self.bare.short(claim)
        shortage = self._shortage({id: claim[id] for id in missing}, self._free)
        on = self._all_on(missing, self.staying) + self._all_on(missing, self.claimed)
        self.waits[demand.id] = self._wait(_scarce(shortage), on, shortage)

    def _shortage(self, claim: Bytes, room: Callable[[DeviceId], int]) -> Mapping[DeviceId, Shortage]:
        return {
            id: self._arithmetic(id, needed, free)
            for id, needed in claim.items()
            if self.places.binds(id) and (free := room(id)) < needed
        }

    def _arithmetic(self, id: DeviceId, required: int, available: int) -> Shortage:
        device = self.places.devices[id]
        return Shortage(
            required=required,
            available=max(0, available),
            margin=device.margin,
            used=self.step.used(id),
            foreign=device.foreign,
            total=device.total,
            limit=device.limit,
        )

    def _wait(
        self,
        cause: Cause,
        on: Iterable[Resident],
        shortage: Mapping[DeviceId, Shortage],
        offer: _Offer | None = None,
        until: float = inf,
    ) -> Wait:
        return Wait(
            cause=cause,
            on=tuple(sorted([one.id for one in on])),
            shortage=shortage,
            place=offer.place if offer else (),
            victims=tuple(sorted([one.id for one in offer.victims])) if offer else (),
            keep=self._kept(shortage),
            until=until if self.now < until < inf else None,
        )

    def _kept(self, shortage: Collection[DeviceId]) -> Mapping[int, Keep]:
        keep = self.keep.copy()
        for one in self._all_on(shortage, self.staying):
            if not one.pinned:
                keep[one.id] = self._why_kept(one)
        return keep

    def _all_on(self, devices: Iterable[DeviceId], among: Mapping[int, Resident]) -> list[Resident]:
        """Return the residents `among` those given that have memory on one of the devices."""
        found = {one.id: one for id in devices for one in self.at.get(id, ()) if one.id in among} if among else {}
        return list(found.values())

    def _let_off(self, spared: set[int], wait: Wait) -> Wait:
        if spared.isdisjoint(wait.on):
            return wait
        return replace(
            wait,
            on=tuple(sorted(one.id for one in self._all_on(wait.shortage, self.leaving))),
            victims=tuple(id for id in wait.victims if id not in spared),
            keep={**wait.keep, **{id: "unneeded" for id in wait.on if id in spared}},
        )

    def _why_kept(self, one: Resident) -> Keep:
        if one.busy and one.starting:
            return "starting"
        if one.busy:
            return "turn" if one.turn_ends > self.now else "busy"
        return "unneeded"


def _may_expire(one: Resident) -> bool:
    return not (one.busy or one.pinned or one.leaving)


def _spots(one: Resident) -> Place:
    """Return the devices of its shards: accelerators, or main memory if it uses none."""
    return tuple(id for id in one.reserved if id.index >= 0) or tuple(id for id in one.reserved if id.index == HOST)


def _scarce(shortage: Collection[DeviceId]) -> Cause:
    return "slots" if shortage and all(id.index == SLOTS for id in shortage) else "memory"

"""Eviction: the residents that may be evicted for a demand, when, and in which order. PURE.

* An idle resident may leave at once; inside its minimum residency, after the idle grace.
* A busy one may leave past its minimum residency, once the demand has waited for the swap patience.
* One that is STARTING while a request waits for it may not leave yet. A pinned one never leaves.
* For a best-effort demand only idle best-effort residents may leave.

The order is one sort key: first those that may leave now, then the others by the time at which they may; then idle
before busy, best-effort before required, lower priority, least recently used, cheaper to load again. At one place
victims are taken in that order, skipping those that are not in the way, until the claim fits on every device. Then
those that are not needed are let off, the last first (`router.planner.availability`). So of equals the least recently used leave, and
none is superfluous.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from operator import attrgetter

from router.planner.ledger import DeviceId, Resident, Worth
from router.planner.types import Demand

LINGER_SECONDS = (0.2, 2.0)
"""The least and the most idle grace, where the preset does not set it. No grace is given to a worker whose clients come
back later than that. The figures are guesses."""

WORTH = attrgetter("worth")


class Crowd:
    """The residents of one device that could be evicted, and a lower bound of the disturbance of any set of them.

    The bound lets the planner skip places without computing their victims.
    """

    __slots__ = ("_alike", "_floors", "_most", "ranked")

    def __init__(self, id: DeviceId, ranked: Sequence[Resident]):
        self.ranked = ranked
        """In order of their worth, idle ones first."""
        sizes = sorted([max(one.reserved.get(id, 0), one.measured.get(id, 0)) for one in ranked], reverse=True)
        self._most = list(accumulate(sizes))
        self._floors: dict[int, tuple[float, tuple[float, ...]]] = {}
        self._alike: bool | None = None

    def floor(self, size: int) -> tuple[float, tuple[float, ...]]:
        """Return the lower bound for any victims that free `size` bytes here: the soonest time at which the minimum
        residencies of the busy ones among them are over (-inf if all can be idle), and the least disturbance, or the
        first elements of it (see `disturbance_by`)."""
        # Even the largest residents have to be so many to free that much. Sizes are then ignored: the bound depends on
        # the number alone, so it can be kept for the next demand.
        count = 1 + bisect_left(self._most, size)
        floor = self._floors.get(count)
        if floor is None:
            floor = self._floors[count] = self._floor([one.worth for one in self.ranked[:count]])
        return floor

    def _floor(self, first: Sequence[Worth]) -> tuple[float, tuple[float, ...]]:
        busy = sum([worth[0] for worth in first])
        turn = self._turn(busy) if busy else -inf
        if len(first) < 2:
            return turn, disturbance_by(first)
        if not self._are_alike():
            return turn, (busy,)  # in this order, the first few need not be the least recently used ones
        _, need, priority, _, _ = first[0]
        return turn, (busy, need, priority, need * len(first), max([since for _, _, _, since, _ in first]))

    def _are_alike(self) -> bool:
        """Return whether all are equally required and have one priority."""
        if self._alike is None:
            self._alike = len({one.worth[1:3] for one in self.ranked}) == 1
        return self._alike

    def _turn(self, busy: int) -> float:
        """Return the soonest time at which the minimum residencies of so many busy ones are over."""
        turns = sorted([one.turn_ends for one in self.ranked if one.busy and not one.starting])
        return turns[busy - 1] if busy <= len(turns) else inf


class Victims:
    """The residents that stay and are not pinned. Evictions and claims make them fewer."""

    __slots__ = ("_ranked", "_staying", "able", "crowds", "lingering", "now", "patience", "turns")

    def __init__(self, staying: Mapping[int, Resident], now: float, patience: float):
        """`staying`: the residents that stay, by id. The caller removes residents from it and calls `lose` for each."""
        self._staying = staying
        self.now = now
        self.patience = patience
        self.able = [one for one in staying.values() if not one.pinned]
        """All that could be evicted when the plan began."""
        self.turns = sorted([one.turn_ends for one in self.able if one.busy and not one.starting])
        self.lingering = [
            one for one in self.able if not one.busy and (one.starting or one.turn_ends > now) and _may_linger(one, now)
        ]
        self.crowds: dict[DeviceId, Crowd] = {}
        """By device, computed on demand: most demands look at few devices."""
        self._ranked: dict[DeviceId, list[Resident]] | None = None

    def crowd(self, id: DeviceId) -> Crowd:
        """Return the residents that could leave this device."""
        crowd = self.crowds.get(id)
        if crowd is None:
            staying = self._staying
            ranked = self._by_worth().get(id, ())
            crowd = self.crowds[id] = Crowd(id, [one for one in ranked if one.id in staying])
        return crowd

    def lose(self, one: Resident) -> None:
        """Forget the crowds of a resident that stays no longer."""
        for id, _, _ in one.holds:
            self.crowds.pop(id, None)

    def _by_worth(self) -> Mapping[DeviceId, list[Resident]]:
        """Return by device the residents that could leave when this was first called, in order of their worth."""
        if self._ranked is None:
            ranked = self._ranked = {}
            for one in sorted([one for one in self._staying.values() if not one.pinned], key=WORTH):
                for id, _, _ in one.holds:
                    if id in ranked:
                        ranked[id].append(one)
                    else:
                        ranked[id] = [one]
        return self._ranked


class Line:
    """The possible victims of one demand, the first to be evicted first."""

    __slots__ = ("_bounds", "demand", "patient_until", "victims")

    def __init__(self, victims: Victims, demand: Demand):
        self.victims = victims
        self.demand = demand
        self.patient_until = demand.since + victims.patience
        self._bounds: dict[int, float] = {}

    def on(self, devices: Sequence[DeviceId]) -> list[Resident]:
        """Return those with memory on one of these devices, in order."""
        victims = self.victims
        if len(devices) == 1:
            able: Sequence[Resident] = victims.crowd(devices[0]).ranked
        else:
            found = {one.id: one for id in devices for one in victims.crowd(id).ranked}
            able = sorted(found.values(), key=WORTH)
        if self.demand.luxury:
            # Only those that were idle before the demand arrived: two best-effort demands must not evict each other in
            # turn for ever.
            able = [one for one in able if one.luxury and not one.busy and one.last_used < self.demand.since]
        # The sort is stable, so residents that may leave at the same time stay in order of their worth.
        return sorted(able, key=self.bound) if len(able) > 1 else list(able)

    def bound(self, one: Resident) -> float:
        """Return the time at which it may leave at the latest; -inf: now."""
        now = self.victims.now
        if not (one.busy or one.starting or one.turn_ends > now):
            return -inf
        bound = self._bounds.get(one.id)
        if bound is None:
            bound = self._bounds[one.id] = self._latest(one) if self._may_leave_at(one) > now else -inf
        return bound

    def next_moment(self) -> float:
        """Return the next time at which more of them may leave without any event; inf: never."""
        now, turns = self.victims.now, self.victims.turns
        moment = inf
        if self.patient_until > now:
            moment = max(turns[0], self.patient_until) if turns else inf
        elif (first := bisect_right(turns, now)) < len(turns):
            moment = turns[first]
        for one in self.victims.lingering:
            if now < (over := self._may_leave_at(one)) < moment:
                moment = over
        return moment

    def _may_leave_at(self, one: Resident) -> float:
        """Return the time from which it may leave for this demand, if its use does not change before."""
        if one.busy:
            return self._latest(one)
        over = one.last_used + _linger(one, self.demand)
        return over if one.starting else min(over, one.turn_ends)

    def _latest(self, one: Resident) -> float:
        """Return the time from which it may leave, whether it is in use or not."""
        return inf if one.starting else max(one.turn_ends, self.patient_until)


NOBODY = (0, 0, -inf, 0, -inf, 0)
"""The disturbance of a place without victims."""


def disturbance_by(victims: Sequence[Worth]) -> tuple[float, ...]:
    """Return the sort key of a set of victims: fewest busy, then the least valuable worst victim, then fewest required,
    then the least recently used, then the cheapest to load again."""
    # The number of victims is not in the key. Two idle, old residents disturb less than one that was just used.
    if not victims:
        return NOBODY
    if len(victims) == 1:
        busy, need, priority, last_used, cost = victims[0]
        return busy, need, priority, need, last_used, cost
    busy_, need_, priority_, last_used_, cost_ = zip(*victims, strict=True)
    return sum(busy_), max(need_), max(priority_), sum(need_), max(last_used_), sum(cost_)


def _may_linger(one: Resident, now: float) -> bool:
    """Return whether an idle one is inside its idle grace for some demand."""
    return (one.starting or one.turn_ends > now) and one.last_used + (one.linger or LINGER_SECONDS[1]) > now


def _linger(one: Resident, demand: Demand) -> float:
    if one.linger is not None:
        return one.linger
    least, most = LINGER_SECONDS
    seconds = min(most, max(least, demand.load_seconds / 2))
    return seconds if one.comes_back is None or one.comes_back <= seconds else 0.0

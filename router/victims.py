"""Who may leave for a demand, when, and in which order.

When: idle, at once; inside its turn after the linger. Busy: past its turn, when the demand has waited for the policy's
patience. STARTING and awaited: not yet. Pinned: never. For a luxury: idle luxuries alone.

The order is one sort key: who may leave now before who may not yet (of these, whose turn and patience end first), idle
before busy, luxuries before needs, lower priority, least recently used, cheaper to bring back. On one place they are
taken in that order, skipping who is not in the way, until the claim fits on every device; then whoever is not needed
after all is let off, beginning with the last (`router.views`). So of equals the least recently used leave, and none of
them in vain. Law: PURE.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from operator import attrgetter

from router.ledger import DeviceId, Resident, Worth
from router.plans import Demand

LINGER_SECONDS = (0.2, 2.0)
"""Least and most that an idle worker inside its turn is kept, unless its preset says how long or its clients come back
later."""

WORTH = attrgetter("worth")


class Crowd:
    """Who stays in the memory of one device and is not pinned; and the least that any victims among them disturb."""

    __slots__ = ("_alike", "_floors", "_most", "ranked")

    def __init__(self, id: DeviceId, ranked: Sequence[Resident]):
        self.ranked = ranked
        """By worth, the idle first."""
        sizes = sorted([max(one.reserved.get(id, 0), one.measured.get(id, 0)) for one in ranked], reverse=True)
        self._most = list(accumulate(sizes))
        self._floors: dict[int, tuple[float, tuple[float, ...]]] = {}
        self._alike: bool | None = None

    def floor(self, size: int) -> tuple[float, tuple[float, ...]]:
        """Of all victims that give back so many bytes here: the soonest end of the last turn of the busy ones, if
        there must be busy ones, and the least disturbance, or the beginning of it (see `disturbance_by`)."""
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
            return turn, (busy,)  # the first are not those that were used least recently
        _, need, priority, _, _ = first[0]
        return turn, (busy, need, priority, need * len(first), max([since for _, _, _, since, _ in first]))

    def _are_alike(self) -> bool:
        """Whether they differ neither in need nor in priority."""
        if self._alike is None:
            self._alike = len({one.worth[1:3] for one in self.ranked}) == 1
        return self._alike

    def _turn(self, busy: int) -> float:
        """When at the soonest the turns of so many that are in use have ended."""
        turns = sorted([one.turn_ends for one in self.ranked if one.busy and not one.starting])
        return turns[busy - 1] if busy <= len(turns) else inf


class Victims:
    """All who stay and are not pinned: as others are sent away or claimed, they become fewer."""

    __slots__ = ("_ranked", "_staying", "able", "crowds", "lingering", "now", "patience", "turns")

    def __init__(self, staying: Mapping[int, Resident], now: float, patience: float):
        """`staying`: who stays at each moment, by id; whoever is taken out of it is to be told of with `lose`."""
        self._staying = staying
        self.now = now
        self.patience = patience
        self.able = [one for one in staying.values() if not one.pinned]
        """Those of the beginning."""
        self.turns = sorted([one.turn_ends for one in self.able if one.busy and not one.starting])
        self.lingering = [
            one for one in self.able if not one.busy and (one.starting or one.turn_ends > now) and _may_linger(one, now)
        ]
        self.crowds: dict[DeviceId, Crowd] = {}
        """Those that somebody has asked for, by device."""
        self._ranked: dict[DeviceId, list[Resident]] | None = None

    def crowd(self, id: DeviceId) -> Crowd:
        """Who could leave this device."""
        crowd = self.crowds.get(id)
        if crowd is None:
            staying = self._staying
            ranked = self._by_worth().get(id, ())
            crowd = self.crowds[id] = Crowd(id, [one for one in ranked if one.id in staying])
        return crowd

    def lose(self, one: Resident) -> None:
        """It stays no longer."""
        for id, _, _ in one.holds:
            self.crowds.pop(id, None)

    def _by_worth(self) -> Mapping[DeviceId, list[Resident]]:
        """By device all who could leave it when somebody first had to, by their worth."""
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
    """Who could be the victim of one demand: the first to go first."""

    __slots__ = ("_bounds", "demand", "patient_until", "victims")

    def __init__(self, victims: Victims, demand: Demand):
        self.victims = victims
        self.demand = demand
        self.patient_until = demand.since + victims.patience
        self._bounds: dict[int, float] = {}

    def on(self, devices: Sequence[DeviceId]) -> list[Resident]:
        """Those with memory on one of these devices."""
        victims = self.victims
        if len(devices) == 1:
            able: Sequence[Resident] = victims.crowd(devices[0]).ranked
        else:
            found = {one.id: one for id in devices for one in victims.crowd(id).ranked}
            able = sorted(found.values(), key=WORTH)
        if self.demand.luxury:
            able = [one for one in able if one.luxury and not one.busy and one.last_used < self.demand.since]
        return sorted(able, key=self.bound) if len(able) > 1 else list(able)

    def bound(self, one: Resident) -> float:
        """When at the latest it may leave; -inf: at once."""
        now = self.victims.now
        if not (one.busy or one.starting or one.turn_ends > now):
            return -inf
        bound = self._bounds.get(one.id)
        if bound is None:
            bound = self._bounds[one.id] = self._latest(one) if self._may_leave_at(one) > now else -inf
        return bound

    def next_moment(self) -> float:
        """Not before, time alone lets any more of them leave."""
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
        """The moment from which it may leave for this demand, if nobody begins or ends to use it."""
        if one.busy:
            return self._latest(one)
        if not one.starting and one.turn_ends <= self.victims.now:
            return -inf
        over = one.last_used + _linger(one, self.demand)
        return over if one.starting else min(over, one.turn_ends)

    def _latest(self, one: Resident) -> float:
        """The moment from which it may leave whether it is used or not."""
        return inf if one.starting else max(one.turn_ends, self.patient_until)


NOBODY = (0, 0, -inf, 0, -inf, 0)
"""What is disturbed where nobody has to leave."""


def disturbance_by(victims: Sequence[Worth]) -> tuple[float, ...]:
    """Fewest busy, then the lowest worth, then the fewest needs, then the oldest."""
    if not victims:
        return NOBODY
    if len(victims) == 1:
        busy, need, priority, last_used, cost = victims[0]
        return busy, need, priority, need, last_used, cost
    busy_, need_, priority_, last_used_, cost_ = zip(*victims, strict=True)
    return sum(busy_), max(need_), max(priority_), sum(need_), max(last_used_), sum(cost_)


def _may_linger(one: Resident, now: float) -> bool:
    """Whether for some demand it is kept for its next request: idle, and inside its turn or not yet ready."""
    return (one.starting or one.turn_ends > now) and one.last_used + (one.linger or LINGER_SECONDS[1]) > now


def _linger(one: Resident, demand: Demand) -> float:
    if one.linger is not None:
        return one.linger
    least, most = LINGER_SECONDS
    seconds = min(most, max(least, demand.load_seconds / 2))
    return seconds if one.comes_back is None or one.comes_back <= seconds else 0.0

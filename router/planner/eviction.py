"""Eviction: the residents that may be evicted for a demand, when, and in which order. PURE.

* An idle resident may leave at once; inside its minimum residency, after the idle grace.
* A busy one may leave past its minimum residency, once the demand has waited for the swap patience.
* One that is STARTING while a request waits for it may not leave yet. A pinned one never leaves.
* For a best-effort demand only idle best-effort residents may leave.

The order is one sort key: first those that may leave now, then the others by the time at which they may; then idle
before busy, best-effort before required, lower priority, least recently used, cheaper to load again. At one place
victims are taken in that order, skipping those that are not in the way, until the claim fits on every device. Then
those that are not needed are kept, the last first (`FreeMemory.victims_for`). So of equals the least recently used
leave, and none is superfluous.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf
from operator import attrgetter

from router.planner.ledger import DeviceId, EvictionKey, Resident, is_on
from router.planner.types import Demand, KeepReason, Plan, Wait

# The least and the most idle grace, where the preset does not set it. A worker whose clients come back later than that
# gets none. Both figures are guesses: longer than the pause of an agent between two requests, shorter than a load.
IDLE_GRACE_SECONDS = (0.2, 2.0)

EVICTION_ORDER = attrgetter("eviction_key")


class DeviceCandidates:
    """The residents of one device that could be evicted, and a lower bound of the disturbance of any set of them.

    The bound lets the planner skip places without computing their victims.
    """

    __slots__ = ("_floors", "_idle", "_is_uniform", "_largest_sums", "ranked")

    def __init__(self, id: DeviceId, ranked: Sequence[Resident]):
        self.ranked = ranked  # in eviction order, idle ones first
        sizes = sorted(
            [max(resident.reserved.get(id, 0), resident.measured.get(id, 0)) for resident in ranked], reverse=True
        )
        self._largest_sums = list(accumulate(sizes))
        self._floors: dict[int, tuple[float, tuple[float, ...]]] = {}
        self._idle = sum([not resident.busy for resident in ranked])
        # All are equally required and have one priority.
        self._is_uniform = len({resident.eviction_key[1:3] for resident in ranked}) < 2

    def floor(self, size: int) -> tuple[float, tuple[float, ...]]:
        """Return the lower bound for any victims that free `size` bytes here: the soonest time at which the minimum
        residencies of the busy ones among them are over (-inf if all can be idle), and the least disturbance, or the
        first elements of it (see `disturbance_by`)."""
        # Even the largest residents have to be so many to free that much. Sizes are then ignored: the bound depends on
        # the number alone, so it can be kept for the next demand.
        count = 1 + bisect_left(self._largest_sums, size)
        floor = self._floors.get(count)
        if floor is None:
            floor = self._floors[count] = self._floor(count)
        return floor

    def _floor(self, count: int) -> tuple[float, tuple[float, ...]]:
        first = [resident.eviction_key for resident in self.ranked[:count]]
        busy = max(0, len(first) - self._idle)
        residencies_end = self._residencies_end(busy) if busy else -inf
        if len(first) < 2:
            return residencies_end, disturbance_by(first)
        if not self._is_uniform:
            # Candidates are sorted by priority before the last use. So of mixed ones, the first few need not be the
            # least recently used, and the maximum below would be no lower bound.
            return residencies_end, (busy,)
        _, need, priority, _, _ = first[0]
        return residencies_end, (busy, need, priority, need * len(first), max([since for _, _, _, since, _ in first]))

    def _residencies_end(self, busy: int) -> float:
        """Return the soonest time at which the minimum residencies of so many busy ones are over."""
        busy_residency_ends = sorted(
            [resident.residency_ends for resident in self.ranked if resident.busy and not resident.starting]
        )
        return busy_residency_ends[busy - 1] if busy <= len(busy_residency_ends) else inf


class EvictionCandidates:
    """The residents that stay and are not pinned. Evictions and claims make them fewer."""

    __slots__ = (
        "_ranked",
        "_staying",
        "busy_residency_ends",
        "by_device",
        "evictable",
        "idle_in_residency",
        "now",
        "patience",
    )

    def __init__(self, staying: Mapping[int, Resident], now: float, patience: float):
        """`staying`: the residents that stay, by id. For each that the caller takes out of it, it calls `remove`."""
        self._staying = staying
        self.now = now
        self.patience = patience
        # All that could be evicted when the plan began.
        self.evictable = [resident for resident in staying.values() if not resident.pinned]
        self.busy_residency_ends = sorted(
            [resident.residency_ends for resident in self.evictable if resident.busy and not resident.starting]
        )
        # Idle ones inside their minimum residency: the end of the idle grace changes the answer without an event.
        self.idle_in_residency = [
            resident
            for resident in self.evictable
            if not resident.busy and (resident.starting or resident.residency_ends > now)
        ]
        self.by_device: dict[DeviceId, DeviceCandidates] = {}  # computed on demand: most demands look at few devices
        self._ranked: dict[DeviceId, list[Resident]] | None = None

    def on_device(self, id: DeviceId) -> DeviceCandidates:
        """Return the residents that could leave this device."""
        on_device = self.by_device.get(id)
        if on_device is None:
            staying = self._staying
            ranked = self._in_eviction_order().get(id, ())
            on_device = self.by_device[id] = DeviceCandidates(
                id, [resident for resident in ranked if resident.id in staying]
            )
        return on_device

    def remove(self, resident: Resident) -> None:
        """Forget the candidates of the devices of a resident that stays no longer."""
        for id, _, _ in resident.holds:
            self.by_device.pop(id, None)

    def _in_eviction_order(self) -> Mapping[DeviceId, list[Resident]]:
        """Return by device the residents that could leave when this was first called, in eviction order."""
        if self._ranked is None:
            ranked = self._ranked = {}
            for resident in sorted(
                [resident for resident in self._staying.values() if not resident.pinned], key=EVICTION_ORDER
            ):
                for id, _, _ in resident.holds:
                    if id in ranked:
                        ranked[id].append(resident)
                    else:
                        ranked[id] = [resident]
        return self._ranked


class VictimOrder:
    """The possible victims of one demand, the first to be evicted first."""

    __slots__ = ("_leaves_by", "demand", "patient_until", "victims")

    def __init__(self, victims: EvictionCandidates, demand: Demand):
        self.victims = victims
        self.demand = demand
        self.patient_until = demand.since + victims.patience
        self._leaves_by: dict[int, float] = {}

    def on_devices(self, devices: Sequence[DeviceId]) -> list[Resident]:
        """Return those with memory on one of these devices, in order."""
        victims = self.victims
        if len(devices) == 1:
            evictable: Sequence[Resident] = victims.on_device(devices[0]).ranked
        else:
            found = {resident.id: resident for id in devices for resident in victims.on_device(id).ranked}
            evictable = sorted(found.values(), key=EVICTION_ORDER)
        if self.demand.best_effort:
            # Only those that were idle before the demand arrived: two best-effort demands must not evict each other in
            # turn for ever.
            evictable = [
                resident
                for resident in evictable
                if resident.best_effort and not resident.busy and resident.last_used < self.demand.since
            ]
        # The sort is stable, so residents that may leave at the same time stay in eviction order.
        return sorted(evictable, key=self.leaves_by)

    def leaves_by(self, resident: Resident) -> float:
        """Return the time at which it may leave at the latest; -inf: now."""
        now = self.victims.now
        if not (resident.busy or resident.starting or resident.residency_ends > now):
            return -inf
        leaves_by = self._leaves_by.get(resident.id)
        if leaves_by is None:
            leaves_by = self._latest(resident) if self._may_leave_at(resident) > now else -inf
            self._leaves_by[resident.id] = leaves_by
        return leaves_by

    def next_moment(self) -> float:
        """Return the next time at which more of them may leave without any event; inf: never."""
        now, busy_residency_ends = self.victims.now, self.victims.busy_residency_ends
        moment = inf
        if self.patient_until > now:
            moment = max(busy_residency_ends[0], self.patient_until) if busy_residency_ends else inf
        elif (first := bisect_right(busy_residency_ends, now)) < len(busy_residency_ends):
            moment = busy_residency_ends[first]
        for resident in self.victims.idle_in_residency:
            if now < (leaves_at := self._may_leave_at(resident)) < moment:
                moment = leaves_at
        return moment

    def _may_leave_at(self, resident: Resident) -> float:
        """Return the time from which it may leave for this demand, if its use does not change before."""
        if resident.busy:
            return self._latest(resident)
        # An idle one keeps its place for a moment: a client that sends request after request would otherwise lose its
        # model between two of them.
        idle_until = resident.last_used + _idle_grace_for(resident, self.demand)
        return idle_until if resident.starting else min(idle_until, resident.residency_ends)

    def _latest(self, resident: Resident) -> float:
        """Return the time from which it may leave, whether it is in use or not."""
        return inf if resident.starting else max(resident.residency_ends, self.patient_until)


# The disturbance of a place without victims. It is below that of any victim, whose priority may be negative.
NO_VICTIMS = (0, 0, -inf, 0, 0, 0)


def disturbance_by(victims: Sequence[EvictionKey]) -> tuple[float, ...]:
    """Return the sort key of a set of victims: fewest busy, then the least valuable worst victim, then fewest required,
    then the least recently used, then the cheapest to load again."""
    # The number of victims is not in the key. Two idle, old residents disturb less than one that was just used.
    if not victims:
        return NO_VICTIMS
    if len(victims) == 1:
        busy, need, priority, last_used, cost = victims[0]
        return busy, need, priority, need, last_used, cost
    busy_, need_, priority_, last_used_, cost_ = zip(*victims, strict=True)
    return sum(busy_), max(need_), max(priority_), sum(need_), max(last_used_), sum(cost_)


def _idle_grace_for(resident: Resident, demand: Demand) -> float:
    if resident.idle_grace is not None:
        return resident.idle_grace
    least, most = IDLE_GRACE_SECONDS
    seconds = min(most, max(least, demand.load_seconds / 2))
    return seconds if resident.request_interval is None or resident.request_interval <= seconds else 0.0


def keep_reasons(wait: Wait, plan: Plan, residents: Iterable[Resident], now: float) -> Mapping[int, KeepReason]:
    """Return the reason for which each resident that `plan` keeps does not leave for a demand that waits.

    For explanations only: it changes no decision.
    """
    victims = {id for other in plan.waits.values() for id in other.victims}
    return {
        resident.id: _keep_reason(resident, wait, now)
        for resident in residents
        if not (resident.leaving or resident.id in plan.evict or resident.id in victims)
    }


def _keep_reason(resident: Resident, wait: Wait, now: float) -> KeepReason:
    if resident.pinned:
        return "pinned"
    if not is_on(resident, wait.shortage):
        return "elsewhere"
    if not resident.busy:
        return "unneeded"
    if resident.starting:
        return "starting"
    return "residency" if resident.residency_ends > now else "busy"

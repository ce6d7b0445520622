"""Availability: the free memory of each device as residents leave and demands start. PURE.

`FreeMemory` is one moment, `FreeMemoryTimeline` a row of moments, `Moments` all that one plan has to look at.
"""

from collections.abc import Iterable, Sequence

from router.planner.ledger import WORKER_SLOTS, Bytes, Device, DeviceId, Resident, is_on

NO_LIMIT = 1 << 62  # more bytes than any device has; the budget of a device without a limit

# The free bytes of one device: by the driver, by the ledger, and within the limit. The least of them counts.
# One figure would not do: a resident that leaves frees its measured bytes in the first and its reserved bytes in the
# other two. All three move alike at every moment, so the minimum of several moments can be kept as one more.
Figures = tuple[int, int, int]


class FreeMemory:
    """The free memory of each device if some residents had left and others had started.

        used = max(driver - measured of those that left, foreign + reserved of those that stay)
        free = total - margin - used - committed

    The same holds within the limit, without foreign memory. Unknown devices are ignored, and so are devices without
    memory of their own, because their claims are charged to their pool.
    """

    __slots__ = ("_binds", "_figures", "committed", "free")

    def __init__(self, devices: Sequence[Device], residents: Sequence[Resident], *, memory: bool = True):
        """`residents`: all whose memory is in the devices' figures. Without `memory`, only worker slots can lack."""
        ours: dict[DeviceId, int] = {}
        for resident in residents:
            for id, reserved in resident.reserved.items():
                ours[id] = ours.get(id, 0) + reserved
        self._binds = frozenset(d.id for d in devices if memory or d.id.index == WORKER_SLOTS)
        self._figures = {
            device.id: (
                device.total - device.margin - device.used,
                device.total - device.margin - device.foreign - ours.get(device.id, 0),
                NO_LIMIT
                if device.limit is None
                else device.limit - device.margin - device.shared - ours.get(device.id, 0),
            )
            for device in devices
            if device.pool is None
        }
        # Free bytes by device; negative where too much is in use already. Callers only read it.
        self.free = {id: min(figures) for id, figures in self._figures.items()}
        self.committed: set[DeviceId] = set()  # devices of claims that were committed here

    def copy(self) -> "FreeMemory":
        """Return an independent copy."""
        view = FreeMemory.__new__(FreeMemory)
        view._binds = self._binds
        view._figures, view.free, view.committed = self._figures.copy(), self.free.copy(), self.committed.copy()
        return view

    def remove(self, resident: Resident) -> None:
        """Count a resident as gone."""
        for id, occupied, reserved in resident.holds:
            self._move(id, occupied, reserved)

    def restore(self, resident: Resident) -> None:
        """Undo `remove`."""
        for id, occupied, reserved in resident.holds:
            self._move(id, -occupied, -reserved)

    def commit(self, claim: Bytes) -> None:
        """Subtract memory of a claim that neither the driver nor reservations show yet."""
        for id, needed in claim.items():
            if needed and id in self._figures:
                self._move(id, -needed, -needed)  # the limit counts reservations, so a claim lowers all three figures
                self.committed.add(id)

    def take_minimum(self, other: "FreeMemory", devices: Iterable[DeviceId]) -> None:
        """Take the minimum with another view on these devices. It stays valid while both get the same changes."""
        for id in devices:
            if (here := self._figures.get(id)) is not None:
                there = other._figures[id]
                both = min(here[0], there[0]), min(here[1], there[1]), min(here[2], there[2])
                self._figures[id] = both
                self.free[id] = min(both)

    def short(self, claim: Bytes) -> list[DeviceId]:
        """Return the devices on which `claim` does not fit."""
        free = self.free
        return [id for id, needed in claim.items() if id in free and free[id] < needed and id in self._binds]

    def short_without(self, claim: Bytes, gone: Sequence[Resident]) -> list[DeviceId]:
        """Return the devices on which `claim` does not fit if the residents in `gone` had left as well."""
        short = self.short(claim)
        if not short or not gone:
            return short
        return [id for id in short if min(_without(self._figures[id], id, gone)) < claim[id]]

    def is_overcommitted(self) -> bool:
        """Return whether claims exceed the free memory of any device."""
        return any(free < 0 for id, free in self.free.items() if id in self._binds)

    def victims_for(
        self, claim: Bytes, order: Sequence[Resident], short: list[DeviceId]
    ) -> tuple[Resident, ...] | None:
        """Return the residents that have to leave so that `claim` fits, which does not fit on the devices in `short`.

        They are taken in `order`, skipping those that are not in the way, until it fits. Then those that are not needed
        are kept, the last first. None if all together are not enough.
        """
        # All devices are looked at together. One device after the other would evict two workers where a third one that
        # is on both devices is enough.
        lacking = {id: self._figures[id] for id in short}
        chosen: list[Resident] = []
        for resident in order:
            if not short:
                break
            if is_on(resident, short):
                chosen.append(resident)
                lacking = {id: _without(figures, id, (resident,)) for id, figures in lacking.items()}
                short = [id for id in short if min(lacking[id]) < claim[id]]
        if short:
            return None
        needed: list[Resident] = []
        for resident in reversed(chosen):
            less = {id: _with(figures, id, resident) for id, figures in lacking.items()}
            if any(min(figures) < claim[id] for id, figures in less.items()):
                needed.append(resident)
            else:
                lacking = less
        return tuple(reversed(needed))

    def is_like(self, other: "FreeMemory", devices: Iterable[DeviceId]) -> bool:
        """Return whether both views agree on these devices, and will after the same changes."""
        ours, theirs = self._figures, other._figures
        return all(ours[id] == theirs[id] for id in devices if id in ours)

    def _move(self, id: DeviceId, occupied: int, reserved: int) -> None:
        if (figures := self._figures.get(id)) is not None:
            self._figures[id] = moved = figures[0] + occupied, figures[1] + reserved, figures[2] + reserved
            self.free[id] = min(moved)


def _without(figures: Figures, id: DeviceId, gone: Iterable[Resident]) -> Figures:
    driver, ledger, limit = figures
    for resident in gone:
        reserved = resident.reserved.get(id, 0)
        driver, ledger, limit = driver + resident.measured.get(id, reserved), ledger + reserved, limit + reserved
    return driver, ledger, limit


def _with(figures: Figures, id: DeviceId, resident: Resident) -> Figures:
    reserved = resident.reserved.get(id, 0)
    return figures[0] - resident.measured.get(id, reserved), figures[1] - reserved, figures[2] - reserved


class FreeMemoryTimeline:
    """The views of successive moments; the last one contains all that is still to happen. `remove` applies to all.

    Only three views are kept, however many moments there are (see `FreeMemory.take_minimum`): the last, the minimum of
    all, and the minimum of those devices on which a claim is committed. A list of views would make each check as slow
    as the queue is long. While there is only one moment, it is both the last and the minimum.
    """

    def __init__(self, first: FreeMemory):
        self.last = first
        self.least = first
        self.has_later_moments = False  # victims leave after the first moment
        # Devices with claims only: one that was overcommitted before this plan is no reason to evict a resident.
        self._committed = first.copy()
        self._committed._figures, self._committed.free = {}, {}

    def remove(self, resident: Resident) -> None:
        self.last.remove(resident)
        if self.has_later_moments:
            self.least.remove(resident)
        self._committed.remove(resident)

    def restore(self, resident: Resident) -> None:
        self.last.restore(resident)
        if self.has_later_moments:
            self.least.restore(resident)
        self._committed.restore(resident)

    def commit(self, claim: Bytes) -> None:
        """Subtract a claim at every moment."""
        self.last.commit(claim)
        if self.has_later_moments:
            self.least.commit(claim)
        for id, needed in claim.items():
            if needed and id in self.least.free:
                self._committed._figures[id] = self.least._figures[id]
                self._committed.free[id] = self.least.free[id]

    def commit_later(self, claim: Bytes, victims: Sequence[Resident]) -> None:
        """Subtract a claim from the last moment on. Victims that leave later begin a new moment."""
        if victims and not self.has_later_moments:
            self.has_later_moments, self.least = True, self.last.copy()
        for resident in victims:
            self.last.remove(resident)
        self.last.commit(claim)
        if self.has_later_moments:
            self.least.take_minimum(self.last, claim)  # elsewhere the new last one has no less than the one before
        for id in self.last.committed.intersection(claim):
            if id not in self._committed.free:
                self._committed._figures[id], self._committed.free[id] = self.last._figures[id], self.last.free[id]
        self._committed.take_minimum(self.last, claim)

    def needs_exit_of(self, resident: Resident) -> bool:
        """Return whether a claim on the devices of a leaving resident would lack memory if it stayed."""
        view = self._committed
        on = resident.reserved.keys() | resident.measured.keys()
        return any(id in view.free and min(_with(view._figures[id], id, resident)) < 0 for id in on & view._binds)

    def is_overcommitted(self) -> bool:
        """Return whether claims exceed the free memory at any moment."""
        return self._committed.is_overcommitted()


class Moments:
    """The free memory at each moment that follows from the decisions of one plan.

    step      at first all residents, with what was granted. Each claim that only waits for leaving residents adds a
              step: without as many of them as it needs, the first to leave first, and with the claim
    now       the minimum of all steps
    stages    at first without all leaving residents, with all such claims. Each claim that waits until its victims may
              leave adds a stage: without these victims, and with the claim
    emptied   without all that could be evicted, with all claims

    A demand starts if it fits at every step and on every stage. It evicts if it fits on every stage without its
    victims. Otherwise a demand ahead would have to wait for it. One view of the last moment alone would not do: memory
    can be free now and at the end, and be committed in between.
    """

    def __init__(
        self, devices: Sequence[Device], residents: Sequence[Resident], evictable: Iterable[Resident], *, memory: bool
    ):
        leaving = [resident for resident in residents if resident.leaving]
        # Claims get memory of leaving residents in the order in which these began to leave: what is free first goes to
        # the first in the queue.
        self._uncommitted = sorted(leaving, key=lambda resident: (resident.leaving_since, resident.id))
        self._step = FreeMemory(devices, residents, memory=memory)
        self.now = self._step.copy()
        after_exits = self._step.copy()
        for resident in leaving:
            after_exits.remove(resident)
        self.stages = FreeMemoryTimeline(after_exits)
        self.emptied = after_exits.copy()
        for resident in evictable:
            self.emptied.remove(resident)

    def free(self, id: DeviceId) -> int:
        """Return the bytes that are free at every moment."""
        return min(self.now.free[id], self.stages.least.free[id])

    def start(self, claim: Bytes) -> None:
        """Give memory to a demand that starts."""
        self.now.commit(claim)
        self._step.commit(claim)
        self.stages.commit(claim)
        self.emptied.commit(claim)

    def expire(self, resident: Resident) -> None:
        """Count a resident as leaving from now on, for no demand."""
        self.stages.remove(resident)
        self._uncommitted.append(resident)

    def evict(self, claim: Bytes, victims: Sequence[Resident]) -> None:
        """Commit memory of victims, which leave from now on, and of residents that leave already, to a claim.

        The first to leave go to the first in the queue. Without this order, a demand behind could start in memory that
        is free by now, and the one ahead would wait for a worker that takes longer to exit.
        """
        step = self._step
        for resident in victims:
            self.stages.remove(resident)
            step.remove(resident)
        if short := step.short(claim):
            leaving = step.victims_for(claim, self._uncommitted, short)
            assert leaving is not None, "it fits on the first stage, where all of them are gone"
            # The rest of the leaving residents stays available for demands behind.
            for resident in leaving:
                step.remove(resident)
                self._uncommitted.remove(resident)
        step.commit(claim)
        self.now.take_minimum(step, claim)  # elsewhere this step has no less than the one before
        self.stages.commit(claim)
        self.emptied.commit(claim)

    def claim_later(self, claim: Bytes, victims: Sequence[Resident]) -> None:
        """Commit memory of victims that leave later to a claim."""
        self.stages.commit_later(claim, victims)
        self.emptied.commit(claim)

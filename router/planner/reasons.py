"""Reasons: the causes and the arithmetic that a plan reports for demands that wait or are refused. PURE.

They change no decision. A plan without such demands does not compute them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from router.planner.availability import Place, Places
from router.planner.ledger import SLOTS, Bytes, DeviceId, Resident
from router.planner.types import KeepReason, Shortage, Wait, WaitCause


class Reasons:
    """The reasons of one plan."""

    def __init__(self, places: Places, residents: Sequence[Resident], now: float):
        self._places = places
        self._now = now
        self._used: dict[DeviceId, int] = {}  # by device, before any change
        self._at: dict[DeviceId, list[Resident]] = {}
        for resident in residents:
            for id, _, _ in resident.holds:
                if id in self._at:  # faster than setdefault, which makes a list each time
                    self._at[id].append(resident)
                else:
                    self._at[id] = [resident]

    def shortage(self, claim: Bytes, room: Callable[[DeviceId], int]) -> Mapping[DeviceId, Shortage]:
        """Return the arithmetic of the devices on which `claim` does not fit into `room`."""
        return {
            id: self._arithmetic(id, needed, free)
            for id, needed in claim.items()
            if self._places.binds(id) and (free := room(id)) < needed
        }

    def _arithmetic(self, id: DeviceId, required: int, available: int) -> Shortage:
        device = self._places.devices[id]
        used = self._used.get(id)
        if used is None:
            ours = sum([resident.reserved.get(id, 0) for resident in self._at.get(id, ())])
            used = self._used[id] = max(device.used, device.foreign + ours)
        return Shortage(
            required=required,
            available=max(0, available),
            margin=device.margin,
            used=used,
            foreign=device.foreign,
            total=device.total,
            limit=device.limit,
            shared=device.shared,
        )

    def residents_on(self, devices: Iterable[DeviceId], among: Mapping[int, Resident]) -> list[Resident]:
        """Return the residents `among` those given that have memory on one of the devices."""
        if not among:
            return []
        found = {resident.id: resident for id in devices for resident in self._at.get(id, ()) if resident.id in among}
        return list(found.values())

    def wait(
        self,
        cause: WaitCause,
        on: Iterable[Resident],
        shortage: Mapping[DeviceId, Shortage],
        keep: Mapping[int, KeepReason],
        *,
        place: Place = (),
        victims: Iterable[Resident] = (),
        until: float = inf,
    ) -> Wait:
        """Return the wait of a demand. `keep`: the reasons of the residents that stay."""
        return Wait(
            cause=cause,
            on=tuple(sorted([resident.id for resident in on])),
            shortage=shortage,
            place=place,
            victims=tuple(sorted([resident.id for resident in victims])),
            keep=keep,
            until=until if self._now < until < inf else None,
        )

    def keep(
        self, shortage: Collection[DeviceId], staying: Mapping[int, Resident], elsewhere: Mapping[int, KeepReason]
    ) -> Mapping[int, KeepReason]:
        """Return the reasons for which the residents in `staying` stay. `elsewhere`: those on other devices."""
        reasons = dict(elsewhere)
        for resident in self.residents_on(shortage, staying):
            if not resident.pinned:
                reasons[resident.id] = self._keep_reason(resident)
        return reasons

    def _keep_reason(self, resident: Resident) -> KeepReason:
        if resident.busy and resident.starting:
            return "starting"
        if resident.busy:
            return "residency" if resident.residency_ends > self._now else "busy"
        return "unneeded"

    def without_kept(self, kept_ids: set[int], wait: Wait, leaving: Mapping[int, Resident]) -> Wait:
        """Return the wait after residents that it named as victims are kept."""
        if kept_ids.isdisjoint(wait.on):
            return wait
        return replace(
            wait,
            on=tuple(sorted(resident.id for resident in self.residents_on(wait.shortage, leaving))),
            victims=tuple(id for id in wait.victims if id not in kept_ids),
            keep={**wait.keep, **{id: "unneeded" for id in wait.on if id in kept_ids}},
        )


def scarcity(shortage: Collection[DeviceId]) -> WaitCause:
    """Return the cause of a wait for more than there is."""
    return "slots" if shortage and all(id.index == SLOTS for id in shortage) else "memory"

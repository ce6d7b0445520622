"""Reasons: the causes that a plan reports for waits, and the facts that are only computed to be shown. PURE.

They change no decision.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from router.planner.ledger import WORKER_SLOTS, DeviceId, Resident, is_on
from router.planner.types import KeepReason, Plan, Wait, WaitCause


def scarcity(shortage: Collection[DeviceId]) -> WaitCause:
    """Return the cause of a wait for more than there is."""
    return "slots" if shortage and all(id.index == WORKER_SLOTS for id in shortage) else "memory"


def without_kept(wait: Wait, kept_ids: set[int], leaving: Iterable[Resident]) -> Wait:
    """Return the wait after residents that it named as victims are kept."""
    if kept_ids.isdisjoint(wait.on):
        return wait
    return replace(
        wait,
        on=tuple(sorted(resident.id for resident in leaving if is_on(resident, wait.shortage))),
        victims=tuple(id for id in wait.victims if id not in kept_ids),
    )


def keep_reasons(wait: Wait, plan: Plan, residents: Iterable[Resident], now: float) -> Mapping[int, KeepReason]:
    """Return the reason for which each resident that `plan` keeps does not leave for a demand that waits."""
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

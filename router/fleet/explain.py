"""Plans in words and numbers, for people: why somebody waits, leaves or is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from router.errors import ApiError, DoesNotFit
from router.fleet.early_start import place_in_line
from router.fleet.worker import Worker
from router.planner.ledger import HOST, SLOTS, Device, DeviceId
from router.planner.types import Demand, Eviction, Plan, Refusal, Shortage, Wait

MIB = 1 << 20


def numbers(worker: Worker, devices: Sequence[Device]) -> dict[str, Any]:
    """What was needed and what was free, by device, in bytes."""
    if worker.costs is None:
        return {}
    rows = {
        str(device.id): {
            "total": device.total,
            "used": device.used,
            "foreign": device.foreign,
            "margin": device.margin,
            "limit": device.limit,
        }
        for device in devices
        if device.id in worker.devices or device.id.index in (HOST, SLOTS)
    }
    estimate = worker.costs.estimate
    note = {"note": estimate.note} if estimate.note else {}
    return {"needs": list(estimate.shards), "source": estimate.source, **note, "devices": rows}


def evicted(worker: Worker, eviction: Eviction, asker: Worker | None, wait: Wait | None, now: float) -> dict[str, Any]:
    """Why one leaves, for whom and what for; `wait` is that of the asker. Seconds, and bytes by device."""
    return {
        "reason": eviction.reason,
        "short_of": [str(id) for id in wait.shortage] if wait is not None else [],
        "for": asker.preset.id if asker else "",
        "resident_seconds": None if worker.ready_at is None else round(now - worker.ready_at, 1),
        "idle_seconds": 0.0 if worker.leases else round(now - worker.last_used, 1),
        "frees": {str(id): size for id, size in worker.reserved.items() if id.index != SLOTS},
    }


def refused(error: ApiError) -> dict[str, Any]:
    """That nothing would be tried, and why."""
    return {"decision": "refuse", "reason": error.reason, "message": error.message, "retry_after": error.retry_after}


def preview(
    demand: Demand, line: Sequence[Demand], found: Plan, names: Mapping[int, str], numbers: dict[str, Any]
) -> dict[str, Any]:
    """What a plan says of one demand among all in the `line`; `names` are models by worker."""
    evict = [
        {"model": names.get(id, ""), "reason": eviction.reason, "idle": eviction.idle}
        for id, eviction in found.evict.items()
        if eviction.for_demand == demand.id
    ]
    if demand.id in found.start:
        start = found.start[demand.id]
        claim = {str(device): size for device, size in start.claim.items()}
        return {"decision": "start", "place": [str(device) for device in start.place], "claim": claim, **numbers}
    if demand.id in found.refuse:
        refusal = found.refuse[demand.id]
        return {"decision": "refuse", "shortage": shortages(refusal.devices), **numbers}
    wait = found.waits.get(demand.id)
    if wait is None:
        return {"decision": "drop", **numbers}
    before = [each for each in line if place_in_line(each) < place_in_line(demand)]
    return {
        "decision": "evict" if evict else "wait",
        "cause": wait.cause,
        "ahead": [each.model for each in sorted(before, key=place_in_line) if each.id in found.waits],
        "evict": evict,
        "waits_for": [names.get(id, "") for id in wait.on],
        "later": [names.get(id, "") for id in wait.victims],
        "keep": {names.get(id, ""): why for id, why in wait.keep.items()},
        "shortage": shortages(wait.shortage),
        "refine": demand.id in found.refine,
        **numbers,
    }


def shortages(devices: Mapping[DeviceId, Shortage]) -> dict[str, Any]:
    return {
        str(id): {"required": short.required, "available": short.available, "margin": short.margin, "used": short.used}
        for id, short in devices.items()
    }


def does_not_fit(worker: Worker, refusal: Refusal) -> DoesNotFit:
    """507 with the arithmetic, in MiB by device."""
    devices = {
        str(id): {
            "required_mib": -(-short.required // MIB),
            "available_mib": short.available // MIB,
            "margin_mib": short.margin // MIB,
        }
        for id, short in refusal.devices.items()
        if id.index != SLOTS
    }
    parts = (
        ", ".join(
            f"{row['required_mib']} MiB on {name} where {row['available_mib']} MiB can be had"
            f" (margin {row['margin_mib']} MiB)"
            for name, row in devices.items()
        )
        or f"{refusal.needs} devices where there are {refusal.offered}"
    )
    spread = f", split over {refusal.needs} devices" if refusal.needs > 1 else ""
    name = worker.preset.id
    lower = worker.costs.estimate.lowered_by if worker.costs is not None else "ctx-size or parallel"
    return DoesNotFit(
        f"{name} does not fit even alone{spread}: it needs {parts}; lower {lower}, or the margin",
        extra={"devices": devices},
    )


__all__ = ["does_not_fit", "numbers", "preview", "refused", "shortages"]

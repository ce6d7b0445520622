"""Explanations: the facts of plans, evictions and refusals, for events and for `GET /router/plan`."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.errors import ApiError, DoesNotFit
from router.events import EventLog
from router.fleet.load_cost import remedies_for
from router.fleet.worker import Worker
from router.memory.remedies import Remedies
from router.planner.eviction import keep_reasons
from router.planner.ledger import WORKER_SLOTS, Device, DeviceId, Resident, in_use
from router.planner.planner import queue_order
from router.planner.types import Demand, Eviction, Plan, Refusal, Shortage, Wait
from worker.protocol.memory import MIB

# Seconds between two events of the same model and reason, so that a burst of refusals does not fill the event log.
REJECTION_PAUSE = 1.0


@dataclass(slots=True)
class _Unreported:
    """The rejections of a kind since its last event."""

    count: int
    error: ApiError
    numbers: dict[str, Any]


class RejectionLog:
    """Appends `refused` events: the first request of a kind at once, further ones once a second with their count."""

    def __init__(self, events: EventLog, loop: asyncio.AbstractEventLoop):
        self._events, self._loop = events, loop
        # By model and reason: the kinds with an event less than a pause ago.
        self._pauses: dict[tuple[str, str], _Unreported | None] = {}

    def append(self, model: str, error: ApiError, **numbers: Any) -> None:
        """Record that one request for `model` got `error`. `numbers`: the values that were compared."""
        kind = model, error.reason
        if kind not in self._pauses:
            self._append_event(kind, _Unreported(1, error, numbers))
            return
        before = self._pauses[kind]
        self._pauses[kind] = _Unreported(before.count + 1 if before else 1, error, numbers)

    def _append_event(self, kind: tuple[str, str], unreported: _Unreported) -> None:
        self._pauses[kind] = None
        self._loop.call_later(REJECTION_PAUSE, self._end_pause, kind)
        model, reason = kind
        self._events.append(
            "refused",
            model,
            reason=reason,
            message=unreported.error.message,
            retry_after=unreported.error.retry_after,
            count=unreported.count,
            **unreported.numbers,
        )

    def _end_pause(self, kind: tuple[str, str]) -> None:
        unreported = self._pauses.pop(kind)
        if unreported is not None:
            self._append_event(kind, unreported)


def evicted(
    worker: Worker, eviction: Eviction, for_worker: Worker | None, wait: Wait | None, now: float
) -> dict[str, Any]:
    """Return the facts of an eviction. `wait` is that of the worker for which memory is freed."""
    return {
        "reason": eviction.reason,
        "short_of": [str(id) for id in wait.shortage] if wait is not None else [],
        "for": for_worker.preset.id if for_worker else "",
        "resident_seconds": None if worker.ready_at is None else round(now - worker.ready_at, 1),
        "idle_seconds": 0.0 if worker.leases else round(now - worker.usage.last_used, 1),
        "frees": {str(id): size for id, size in worker.reserved.items() if id.index != WORKER_SLOTS},
    }


def refused(error: ApiError) -> dict[str, Any]:
    """Return the preview of a request that is refused at once."""
    return {"decision": "refuse", "reason": error.reason, "message": error.message, "retry_after": error.retry_after}


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The values that a plan was made from."""

    waiting: Sequence[Demand]
    residents: Sequence[Resident]
    devices: Sequence[Device]
    now: float


def preview(
    demand: Demand, inputs: PlanInputs, found: Plan, names: Mapping[int, str], numbers: dict[str, Any]
) -> dict[str, Any]:
    """Return the part of a plan that concerns one demand. `names`: models by resident or worker id."""
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
        return {"decision": "refuse", "shortage": shortages(refusal.devices, inputs), **numbers}
    wait = found.waits.get(demand.id)
    if wait is None:
        return {"decision": "drop", **numbers}
    before = [other for other in inputs.waiting if queue_order(other) < queue_order(demand)]
    return {
        "decision": "evict" if evict else "wait",
        "cause": wait.cause,
        "ahead": [other.model for other in sorted(before, key=queue_order) if other.id in found.waits],
        "evict": evict,
        "waits_for": [names.get(id, "") for id in wait.on],
        "victims": [names.get(id, "") for id in wait.victims],
        "keep": {names.get(id, ""): why for id, why in keep_reasons(wait, found, inputs.residents, inputs.now).items()},
        "shortage": shortages(wait.shortage, inputs),
        "refine": demand.id in found.refine,
        **numbers,
    }


def shortages(short: Mapping[DeviceId, Shortage], inputs: PlanInputs) -> dict[str, Any]:
    """Return the arithmetic of the devices with too little memory."""
    rows = {device.id: device for device in inputs.devices}
    return {
        str(id): {
            "required": required,
            "available": available,
            "margin": rows[id].margin,
            "used": in_use(rows[id], inputs.residents),
        }
        for id, (required, available) in short.items()
    }


def does_not_fit(
    worker: Worker, refusal: Refusal, inputs: PlanInputs, capacities: Mapping[DeviceId, int]
) -> DoesNotFit:
    """Return the 507 error with the needed and available MiB by device, and the keys with which it would fit.

    `capacities`: the bytes that could ever be free on each device.
    """
    rows = {device.id: device for device in inputs.devices}
    missing = [(short, rows[id]) for id, short in refusal.devices.items()]
    devices = {
        str(row.id): {
            "required_mib": -(-short.required // MIB),
            "available_mib": short.available // MIB,
            "margin_mib": row.margin // MIB,
            **({"shared_mib": -(-row.shared // MIB)} if row.shared else {}),
        }
        for short, row in missing
        if row.id.index != WORKER_SLOTS
    }
    limits = {
        str(row.id): f", --device-limit {row.limit // MIB} MiB"
        for _, row in missing
        if row.limit is not None and row.limit < row.total
    }
    parts = (
        ", ".join(
            f"{row['required_mib']} MiB on {name} where {row['available_mib']} MiB are available"
            f" (margin {row['margin_mib']} MiB"
            + limits.get(name, "")
            + (f", fork server {row['shared_mib']} MiB)" if "shared_mib" in row else ")")
            for name, row in devices.items()
        )
        or f"{refusal.needs} devices where there are {refusal.offered}"
    )
    spread = f", split over {refusal.needs} devices" if refusal.needs > 1 else ""
    name, bound = worker.preset.id, worker.costs.bound if worker.costs is not None else ""
    ways_out = [str(_remedies(worker, capacities))]
    if missing and all(short.required <= short.available + row.margin for short, row in missing):
        ways_out.append("lower the margin")
    if missing and all(
        row.limit is not None and short.required <= short.available + row.total - row.limit for short, row in missing
    ):
        ways_out.append("raise --device-limit")
    way_out = ", or ".join(filter(None, ways_out)) or "use a device with more memory, or a smaller model"
    return DoesNotFit(
        f"{name} does not fit on empty devices{spread}: it needs at least {parts}{bound}; {way_out}",
        extra={"devices": devices},
    )


def _remedies(worker: Worker, capacities: Mapping[DeviceId, int]) -> Remedies | str:
    if worker.costs is None:
        return ""
    if worker.costs.estimate.source == "preset":
        return "lower required-memory"
    return remedies_for(worker, worker.costs, capacities)

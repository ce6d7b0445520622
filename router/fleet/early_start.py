"""Early start: spawn a worker's process while evicted workers are still draining; load weights once memory is free.

A process that started early has no weights and no device. Its main memory is reserved like any other and is subtracted
from its worker's demand, so that both together never count for more than the worker alone. An early start is
best-effort: it takes only memory that no demand ahead of it lacks, and ends as soon as one does.

`decide` is a pure function. `EarlyStart` is the part of a worker's state that records its result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING

from router.launch.interface import EarlyProcess
from router.launch.process import tasks_of
from router.planner.availability import FreeMemory
from router.planner.ledger import HOST, MAIN_MEMORY, Device, DeviceId, Resident
from router.planner.planner import queue_order
from router.planner.types import Demand, Plan

if TYPE_CHECKING:  # it imports this module
    from router.fleet.worker import Worker


class Phase(IntEnum):
    """The phases of an early start, forwards only. Phases may be skipped."""

    NONE = 0
    RESERVED = 1  # the fleet has reserved its memory; the process may be spawned
    PREPARED = 2  # the process has done what needs neither weights nor a device; its measured memory is reserved
    TAKEN = 3  # the worker has its place: the process is the worker's, and its memory part of the worker's
    ENDING = 4  # it must exit; its memory stays reserved until it has
    ENDED = 5  # nothing is left of it, and the worker starts no other early


class EarlyStart:
    """The early start of one worker. There is at most one in a worker's lifecycle."""

    def __init__(self) -> None:
        self.phase = Phase.NONE
        self.reserved = 0  # bytes of main memory that are reserved for the process, beside what the worker reserves
        self.is_measured = False  # `reserved` is what the prepared process measured, not an estimate
        self.process: EarlyProcess | None = None
        self._spawned = asyncio.Event()
        self._phase_changed = asyncio.Event()

    @property
    def is_charged(self) -> bool:
        """The reserved memory counts towards the worker's demand."""
        return self.reserved > 0 and self.phase < Phase.ENDING

    def reserve(self, size: int) -> None:
        self.reserved = size
        self.advance(Phase.RESERVED)

    def prepared(self, measured: int) -> None:
        self.reserved, self.is_measured = measured, True
        self.advance(Phase.PREPARED)

    def spawned(self, process: EarlyProcess) -> None:
        self.process = process
        self._spawned.set()

    def advance(self, phase: Phase) -> None:
        """Enter `phase`. A phase that is reached already stays."""
        if phase > self.phase:
            self.phase = phase
            changed, self._phase_changed = self._phase_changed, asyncio.Event()
            changed.set()

    async def reached(self, phase: Phase) -> None:
        """Wait until `phase` or a later one is entered."""
        while self.phase < phase:
            await self._phase_changed.wait()

    async def taken_process(self) -> EarlyProcess | None:
        """Wait for the process of a worker that has its place; None if there is none."""
        if self.phase is not Phase.TAKEN:
            return None
        async with tasks_of(self._spawned.wait(), self.reached(Phase.ENDED)) as either:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return self.process if self.phase < Phase.ENDED else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A queued demand, with the facts that decide about its early start."""

    demand: Demand  # as planned: less the memory of its early start
    runtime: int = 0  # bytes of main memory of its process before weights; 0: no early start
    started_early: bool = False  # it has an early start that may be ended


@dataclass(frozen=True, slots=True)
class Decision:
    """Early starts to begin, with the bytes of main memory to reserve, and early starts to end. By demand."""

    begin: Mapping[int, int] = field(default_factory=dict)
    end: frozenset[int] = frozenset()


def subtract_early_start(demand: Demand, reserved: int) -> Demand:
    """Return the demand less the main memory that is reserved for its early start."""
    if not reserved:
        return demand
    if demand.host:
        return replace(demand, host=max(0, demand.host - reserved))
    limits = {id: max(0, size - reserved) for id, size in demand.shard_limits.items()}
    return replace(demand, shards=tuple(max(0, shard - reserved) for shard in demand.shards), shard_limits=limits)


def add_unallocated(devices: Iterable[Device], size: int) -> list[Device]:
    """Return the devices with `size` more bytes of main memory in use.

    A process that is still preparing allocates its reservation step by step. The driver's reading may lack all of it.
    """
    if not size:
        return list(devices)
    return [replace(device, used=device.used + size) if device.id.index == HOST else device for device in devices]


def decide(
    plan: Plan, candidates: Sequence[Candidate], residents: Sequence[Resident], devices: Sequence[Device]
) -> Decision:
    """Return the early starts to begin and to end after `plan`."""
    if not any(candidate.started_early or _may_begin(plan, candidate) for candidate in candidates):
        return Decision()
    free = _free(plan, residents, devices)
    hosts = {device.pool or device.id for device in devices if device.id.index == HOST}
    begin: dict[int, int] = {}
    end: set[int] = set()
    is_scarce = False
    # In queue order: once a demand lacks main memory, no early start behind it begins or stays. The demand itself may
    # have one, because its process holds a part of what the demand needs anyway.
    for candidate in sorted(candidates, key=lambda candidate: queue_order(candidate.demand)):
        demand = candidate.demand
        wait = plan.waits.get(demand.id)
        if wait is None:
            continue
        if candidate.started_early:
            if is_scarce:
                end.add(demand.id)
        elif _may_begin(plan, candidate) and not is_scarce and candidate.runtime <= free:
            begin[demand.id] = candidate.runtime
        is_scarce = is_scarce or not hosts.isdisjoint(wait.shortage)
        free -= max(begin.get(demand.id, 0), _on_host(demand, hosts))
    return Decision(begin, frozenset(end))


def _may_begin(plan: Plan, candidate: Candidate) -> bool:
    """The demand waits only for workers that are stopping, so its place is certain."""
    wait = plan.waits.get(candidate.demand.id)
    return candidate.runtime > 0 and wait is not None and wait.cause == "stopping"


def spare_memory(
    plan: Plan, waiting: Sequence[Demand], residents: Sequence[Resident], devices: Sequence[Device]
) -> int:
    """Return the bytes of main memory that are free for best-effort use after `plan`.

    0 while any demand lacks main memory. Memory that waiting demands will take is not free.
    """
    hosts = {device.pool or device.id for device in devices if device.id.index == HOST}
    if any(not hosts.isdisjoint(wait.shortage) for wait in plan.waits.values()):
        return 0
    return _free(plan, residents, devices) - sum(
        _on_host(demand, hosts) for demand in waiting if demand.id in plan.waits
    )


def _free(plan: Plan, residents: Sequence[Resident], devices: Sequence[Device]) -> int:
    """Return the bytes of main memory that no resident holds and this plan gives to none."""
    view = FreeMemory(devices, residents)
    for start in plan.start.values():
        view.commit(start.claim)
    return min((view.free[device.pool or device.id] for device in devices if device.id.index == HOST), default=0)


def _on_host(demand: Demand, hosts: Collection[DeviceId]) -> int:
    """Return the bytes of main memory that the demand will take."""
    if demand.devices <= set(hosts):
        return sum(demand.shards)
    return demand.host


def take_place(worker: Worker) -> None:
    """Add the memory of an early start to the worker's reservation, which the fleet has just made.

    The claim of the place lacks that memory, because it was subtracted from the demand. A process that must exit is not
    taken over, and its memory stays reserved beside the worker's until it has exited.
    """
    early = worker.early
    if early.reserved:
        worker.reserved[MAIN_MEMORY] = worker.reserved.get(MAIN_MEMORY, 0) + early.reserved
        if early.is_charged:
            early.reserved = 0
            early.advance(Phase.TAKEN)

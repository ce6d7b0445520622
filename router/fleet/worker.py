"""One worker: the record of one process serving one model, from its creation to its end. It performs no actions.

    DOWNLOADING > QUEUED > STARTING > READY > STOPPING > STOPPED

States may be skipped and are never entered twice. A model that is loaded again gets a new worker.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from router.config.presets import Preset
from router.errors import ApiError, LoadFailed
from router.events import EventLog
from router.fleet.early_start import Candidate, EarlyStart, Phase, less
from router.fleet.load_stages import Stages
from router.fleet.sleeping_weights import SleepRequest
from router.launch.interface import WorkerLost, WorkerProcess
from router.memory import estimate as estimates
from router.memory import sharding
from router.memory.checkpoint_facts import Checkpoint
from router.memory.estimate import Estimate
from router.planner.ledger import HOST, LOCAL, SLOTS, Bytes, DeviceId, Resident, pooled
from router.planner.types import Demand, Start
from worker.protocol.argv import ENGINES, AdapterSource
from worker.protocol.events import Progress, Pulse


class State(IntEnum):
    """The states of a worker. A later state is greater."""

    DOWNLOADING = 0
    QUEUED = 1
    STARTING = 2
    READY = 3
    STOPPING = 4
    STOPPED = 5

    @property
    def holds_memory(self) -> bool:
        """A worker in this state has a reservation on its place. A queued worker may hold an early start's memory."""
        return State.STARTING <= self <= State.STOPPING


def advance(current: State, to: State) -> State:
    """Return `to`. Raises ValueError if it does not come after `current`."""
    if to <= current:
        raise ValueError(f"a worker cannot go back from {current.name} to {to.name}")
    return to


class HeldLease(Protocol):
    """A lease, as its worker uses it."""

    def abort(self, error: ApiError) -> None:
        """End the request with `error`. The lease is returned soon after."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The predicted cost of a load."""

    estimate: Estimate
    is_exact: bool  # a plan may evict or refuse because of this estimate
    key: str  # of the learned estimates
    load_seconds: float
    forked: bool = False  # they hold for a forked worker only


class Worker:
    """One worker as fleet and planner see it. Times are seconds of the fleet's clock."""

    def __init__(
        self, id: int, preset: Preset, state: State, now: float, *, attempt: int = 0, best_effort: bool = False
    ):
        # Identity
        self.id = id
        self.preset = preset
        self.siblings: list[Worker] = []  # all running workers of the model, this one included; kept by the fleet
        self.attempt = (
            attempt  # earlier workers in a row that failed before ready in a way that a retry may cure: 0 or 1
        )
        self.best_effort = best_effort
        self.is_excess = False  # a replica beyond the minimum of `replicas`: it stops when idle
        self.prefetched = False  # started because another model lists this one under `prefetch`
        self.fetch_only = False  # ends after the download unless a request has leased it

        # Lifecycle
        self.state = state
        self.since = now  # when it entered its state; decides the place in the queue while QUEUED
        self.born = now
        self.wanted_since = now  # of a best-effort replica: it evicts no best-effort resident used after this
        self.task: asyncio.Task[None] | None = None
        self.reason = ""  # why it was retired or ended
        self.made_room_for = ""
        self.retired = asyncio.Event()  # takes no new leases
        self.leaving_since = 0.0
        self.deadline: float | None = None  # when running requests are aborted after retirement; None: never
        self.ready_at: float | None = None
        self.ended = asyncio.Event()  # the process is gone, stopping or unreachable: it answers no further request
        self.stopped = asyncio.Event()
        self.lost: WorkerLost | None = None
        self.refused: LoadFailed | None = None  # the error of a load that could not be attempted

        # Files and cost
        self.snapshot = ""
        self.file_sizes: Mapping[str, int] | None = None  # bytes of its weight files by path, once looked up
        self.facts: Checkpoint | None = None
        self.costs: Costs | None = None
        self.refine = asyncio.Event()  # the planner wants the exact estimate

        # Place and reservation
        self.devices: frozenset[DeviceId] = frozenset()  # devices that the preset allows
        self.choice = sharding.Choice()  # the placement over them
        self.pools: dict[DeviceId, DeviceId] = {}  # for devices with unified memory: the device whose memory they use
        self.place: tuple[DeviceId, ...] = ()
        self.reserved: dict[DeviceId, int] = {}
        self.early = EarlyStart()

        # Queue
        self.room: asyncio.Future[Start] = _future()
        self.considered = asyncio.Event()  # the planner has decided on an estimate that it may refuse on
        self.waits_for = ""  # the cause of the wait, in the planner's terms
        self.waits_until: float | None = None  # latest time at which its victims may leave; None: now, or unknown
        self.waits_for_slot = False  # its last wait was for the worker count, not for memory
        self.ahead = 0
        self.prefetch = asyncio.Event()  # its files are to be read into the page cache while it waits

        # Process
        self.process: WorkerProcess | None = None
        self.ready: asyncio.Future[WorkerProcess] = _future()
        self.pulse: Pulse | None = None
        self.told: tuple[tuple[AdapterSource, ...], str] = (), ""  # adapters and default adapter of the process
        self.telling = asyncio.Lock()

        # Requests
        self.leases: set[HeldLease] = set()
        self.leases_changed = asyncio.Event()
        self.last_used = now
        self.residency_ends = now
        self.keep_alive: float | None = None  # idle seconds set by its latest request; below 0: forever; None: preset
        self.answered = False  # it has completed an answer

        # Progress and statistics
        self.progress: Progress | None = None
        self.progress_at = -1.0  # time of the last progress event
        self.stages = Stages()
        self.load_seconds = 0.0
        self.first_token = 0.0  # seconds from the first request's arrival to its first token; 0.0: none yet
        self.has_peaked = False  # its largest step was measured and learned
        self._resident: tuple[tuple[object, ...], Resident] | None = None  # cached, with the values it was made from

    def __str__(self) -> str:
        return f"{self.preset.id}#{self.id}"

    @property
    def open(self) -> bool:
        """The worker may take new leases."""
        return self.state <= State.READY and not self.retired.is_set()

    @property
    def beside(self) -> bool:
        """Another worker of the model is open, so the end of this one is not the end of the model."""
        return any(other is not self and other.open for other in self.siblings)

    @property
    def holds_memory(self) -> bool:
        """The worker is a resident: it has a place, or an early start while it is queued."""
        return self.state.holds_memory or (self.state is State.QUEUED and self.early.held > 0)

    @property
    def measured(self) -> Bytes:
        return self.process.measured if self.process is not None else {}

    @property
    def occupied(self) -> Bytes:
        """Measured bytes by the device whose memory they are in."""
        return pooled(self.measured, self.pools) if self.pools else self.measured

    @property
    def counted(self) -> Bytes:
        """The part of the measured bytes that drivers report as used.

        Pages of mapped files are not part of it: the kernel can reclaim them. If they were subtracted from the driver's
        figure, memory of other programs would look free.
        """
        occupied, host = self.occupied, DeviceId(LOCAL, HOST)
        latest = self.pulse or (self.process.ready if self.process is not None else None)
        if latest is None or not latest.mapped or host not in occupied:
            return occupied
        return {**occupied, host: max(0, occupied[host] - latest.mapped)}

    @property
    def on_host(self) -> bool:
        return all(device.index == HOST for device in self.devices)

    def demand(self) -> Demand:
        """Return the planner's view of a queued worker with known costs, less the memory of its early start."""
        assert self.costs is not None
        estimate = self.costs.estimate
        demand = Demand(
            id=self.id,
            model=self.preset.id,
            shards=estimate.shards,
            host=0 if self.on_host else estimate.host,
            since=self.wanted_since if self.best_effort else self.since,
            priority=self.preset.priority,
            best_effort=self.best_effort,
            is_exact=self.costs.is_exact,
            exclusive=ENGINES[self.preset.engine].exclusive,
            devices=self.choice.devices,
            place=self.choice.place,
            load_seconds=self.costs.load_seconds,
        )
        return less(demand, self.early.held) if self.early.is_charged else demand

    def candidate(self, demand: Demand) -> Candidate:
        """Return the facts for the early-start decision of a queued worker with known costs and this demand."""
        assert self.costs is not None
        assert self.facts is not None
        traits = ENGINES[self.preset.engine]
        # Tensor-parallel followers get their options when they are spawned, so such a worker cannot start early.
        may_start = self.choice.ranks == 1 and self.early.phase is Phase.NONE
        may_start = may_start and not (self.best_effort or traits.exclusive)
        runtime = 0
        if may_start:
            costs = self.costs
            runtime = estimates.prepared_bytes(self.facts, costs.estimate, on_host=self.on_host, forked=costs.forked)
        return Candidate(demand=demand, runtime=runtime, started_early=self.early.is_charged)

    def resident(self, request_interval: float | None = None) -> Resident:
        """Return the planner's view of a worker that holds memory.

        `comes_back`: seconds until the model is expected to be requested again. The result is cached, because plans are
        made much more often than the values change.
        """
        if self.state is State.QUEUED:
            return self._early_resident()
        made_from = (
            self.preset, self.state, self.retired.is_set(), bool(self.leases), self.last_used, self.residency_ends,
            self.leaving_since, self.keep_alive, self.best_effort, self.is_excess,
            self.load_seconds, self.process, self.pulse,
            self.reserved.copy(), {**self.measured}, request_interval,  # copies: both mappings change in place
        )  # fmt: skip
        if self._resident is None or self._resident[0] != made_from:
            self._resident = made_from, self._make_resident(request_interval)
        return self._resident[1]

    def _early_resident(self) -> Resident:
        """The early start of a queued worker. Pinned, because `early_start.decide` ends it, not an eviction."""
        host, process = DeviceId(LOCAL, HOST), self.early.process
        return Resident(
            id=self.id,
            model=self.preset.id,
            reserved={host: self.early.held},
            measured=process.measured if process is not None and self.early.is_measured else {},
            starting=not self.early.is_measured,
            leaving=not self.early.is_charged,
            leaving_since=self.since,
            pinned=True,
        )

    def _make_resident(self, request_interval: float | None) -> Resident:
        ttl = self.time_to_live
        if self.is_excess:
            ttl = min(ttl, self.preset.replica_idle) if ttl >= 0 else self.preset.replica_idle
        return Resident(
            id=self.id,
            model=self.preset.id,
            reserved=self.reserved.copy(),
            measured={**self.counted},
            last_used=self.last_used,
            busy=bool(self.leases),
            leaving=self.retired.is_set() or self.state is State.STOPPING,
            leaving_since=self.leaving_since or self.since,
            pinned=self.preset.pin and not self.best_effort,
            priority=self.preset.priority,
            best_effort=self.best_effort,
            starting=self.state is State.STARTING,
            exclusive=ENGINES[self.preset.engine].exclusive,
            residency_ends=self.residency_ends,
            expires=self.last_used + ttl if ttl >= 0 and self.state is State.READY else None,
            idle_grace=self.preset.idle_grace if self.preset.idle_grace >= 0 else None,
            request_interval=request_interval,
            load_seconds=self.load_seconds,
        )

    @property
    def time_to_live(self) -> float:
        """Seconds that the worker may idle before it exits; below 0: forever."""
        ttl = self.preset.ttl if self.keep_alive is None else self.keep_alive
        return self.preset.sleep_idle if self.falls_asleep else ttl

    @property
    def falls_asleep(self) -> bool:
        """The worker exits after `sleep-idle-seconds`, and its weights may stay in main memory."""
        ttl = self.preset.ttl if self.keep_alive is None else self.keep_alive
        return self.preset.sleep_idle >= 0 and (ttl < 0 or self.preset.sleep_idle < ttl)

    def sleep_request(self, files: Mapping[str, int]) -> SleepRequest | None:
        """Return the weights to keep in main memory after this worker's end.

        None unless the worker was evicted, or exited after `sleep-idle-seconds`.
        """
        if self.ready_at is None or self.best_effort or self.lost is not None or not files:
            return None
        if self.reason != "evicted" and not (self.reason == "idle" and self.falls_asleep):
            return None
        expires = self.last_used + self.preset.ttl if self.preset.ttl >= 0 else None
        return SleepRequest(files=tuple(files), size=sum(files.values()), last_used=self.last_used, expires=expires)

    def cut(self, error: ApiError) -> None:
        """Abort all requests that hold this worker."""
        for lease in tuple(self.leases):
            lease.abort(error)


def _future() -> "asyncio.Future[Any]":
    """Return a future whose exception may stay unread."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def append_state(worker: Worker, events: EventLog, *, was: State | None, **facts: Any) -> None:
    """Append one `state` event with the facts of this transition."""
    data: dict[str, Any] = {"worker": worker.id, "state": worker.state.name.lower()}
    if was is not None:
        data["was"] = was.name.lower()
    if worker.state is State.STARTING:
        data["reserved"] = {str(id): size for id, size in worker.reserved.items() if id.index != SLOTS}
    elif worker.state is State.READY and worker.process is not None and was is not None:
        data["load_seconds"] = round(worker.load_seconds, 3)
        data["stages"] = {stage: round(seconds, 3) for stage, seconds in worker.stages.seconds.items()}
        data["measured"] = _by_name(worker.measured)
        data["estimated"] = {str(id): size for id, size in estimated(worker).items()}
        data["pid"] = worker.process.pid
        data["spent"] = {stage: round(seconds, 4) for stage, seconds in worker.process.ready.seconds.items()}
        data["processor_seconds"] = round(worker.process.ready.processor, 4)
    elif worker.state >= State.STOPPING:
        data["reason"] = worker.reason
        if worker.state is State.STOPPED and worker.process is not None:
            data["settle_seconds"] = round(worker.process.settle_seconds, 3)
        if worker.made_room_for:
            data["for"] = worker.made_room_for
        if worker.lost is not None:
            data["error"] = worker.lost.message
            if worker.lost.exit is not None:
                data["exit_code"] = worker.lost.exit
    if worker.beside:
        data["beside"] = True
    events.append("state", worker.preset.id, **data, **facts)


def figures(worker: Worker) -> dict[str, Any]:
    """Return the state and memory of a worker as JSON values."""
    return {
        "model": worker.preset.id,
        "state": worker.state.name.lower(),
        "pid": worker.process.pid if worker.process is not None else None,
        "leases": len(worker.leases),
        "reserved": _by_name(worker.reserved),
        "measured": _by_name(worker.measured),
        "retired": worker.retired.is_set(),
    }


def estimated(worker: Worker) -> dict[DeviceId, int]:
    """Return the estimated bytes by device of the worker's place."""
    if worker.costs is None:
        return {}
    found = dict(zip(worker.place, worker.costs.estimate.shards, strict=False))
    host = DeviceId(worker.place[0].node, HOST) if worker.place else None
    if host is not None and host not in found and worker.costs.estimate.host:
        found[host] = worker.costs.estimate.host
    return found


def _by_name(sizes: Bytes) -> dict[str, int]:
    return {str(device): size for device, size in sizes.items()}


__all__ = ["Costs", "HeldLease", "State", "Worker", "advance", "append_state", "estimated", "figures"]

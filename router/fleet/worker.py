"""One worker: the record of one process serving one model, from its creation to its end. It performs no actions.

    DOWNLOADING > QUEUED > STARTING > READY > STOPPING > STOPPED

States may be skipped and are never entered twice. A model that is loaded again gets a new worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import TYPE_CHECKING, Any

from router.config.presets import Preset
from router.errors import ApiError
from router.events import EventLog
from router.fleet.early_start import EarlyStart
from router.fleet.sleeping_weights import SleepRequest
from router.launch.interface import WorkerLost, WorkerProcess
from router.memory.checkpoint_facts import Checkpoint, rows, serves_embeddings
from router.memory.estimate import MemoryEstimate
from router.memory.sharding import Choice
from router.planner.ledger import HOST, MAIN_MEMORY, WORKER_SLOTS, Bytes, DeviceId, Resident, pooled
from router.planner.types import Start
from worker.protocol.argv import AdapterSource
from worker.protocol.events import MemoryNeed, Progress, Pulse, Ready

if TYPE_CHECKING:  # both import this module
    from router.fleet.admission import Lease
    from router.fleet.model import Model

# Main memory beyond its usual use, and the seconds for which a worker may keep it before it is replaced. Guesses: more
# than malloc keeps for the next requests, and less than a small model.
EXCESS_BYTES = 256 << 20
EXCESS_PATIENCE = 60.0


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


@dataclass(frozen=True, slots=True)
class Costs:
    """The predicted cost of a load."""

    estimate: MemoryEstimate
    choice: Choice  # the placement that the estimate holds for
    is_exact: bool  # a plan may evict or refuse because of this estimate
    key: str  # of the learned estimates
    load_seconds: float
    forked: bool = False  # they hold for a forked worker only
    # Bytes that the preset allows at most on a device; empty: no limit of its own.
    device_limits: Mapping[DeviceId, int] = field(default_factory=dict)
    no_exact: str = ""  # the reason why the exact estimate could not be made; empty if it was not tried

    @property
    def bound(self) -> str:
        """The part of a refusal that gives the reason why it is based on an upper bound; empty if it is not."""
        return f" (an upper bound; no exact estimate: {self.no_exact})" if self.no_exact else ""


@dataclass(slots=True, kw_only=True)
class QueuePosition:
    """The wait of a worker for memory: the requests of the planner, and its last decision."""

    granted: asyncio.Future[Start]  # the place that the fleet has reserved
    considered: asyncio.Event = field(default_factory=asyncio.Event)  # a plan was made on a reliable estimate
    refine: asyncio.Event = field(default_factory=asyncio.Event)  # the planner needs the exact estimate
    prefetch: asyncio.Event = field(default_factory=asyncio.Event)  # read its files into the page cache meanwhile
    waits_for: str = ""  # the cause of the wait, in the planner's terms, or "estimate": the exact one is being made
    waits_for_slot: bool = False  # its last wait was for the worker count, not for memory
    waits_until: float | None = None  # latest time at which its victims may leave; None: now, or unknown
    ahead: int = 0  # the number of workers before it
    reported: str = ""  # the cause in its last `plan` event
    # The highest priority of the workers that were evicted for it. With a lower one of its own it would stand behind
    # their models, which take the freed memory back at once.
    victims_priority: int | None = None

    def inherit(self, priority: int) -> None:
        """Note that a worker of this priority was evicted for it."""
        self.victims_priority = self.raised(priority)

    def raised(self, priority: int) -> int:
        """Return `priority`, or that of its victims if it is higher."""
        return priority if self.victims_priority is None else max(priority, self.victims_priority)


@dataclass(slots=True)
class Usage:
    """The use of a worker by requests. Times are seconds of the fleet's clock."""

    last_used: float  # end of its last lease, or the time at which it became ready
    residency_ends: float
    keep_alive: float | None = None  # idle seconds set by its latest request; below 0: forever; None: preset
    has_answered: bool = False  # it has completed an answer
    first_token: float = 0.0  # seconds from the first request's arrival to its first token; 0.0: none yet


@dataclass(slots=True)
class SentAdapters:
    """The adapters and the default adapter that the process was started with or has received since."""

    sent: tuple[tuple[AdapterSource, ...], str] | None = ((), "")  # None: their files may have changed since
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while they are being sent


PROGRESS_INTERVAL = 0.1  # seconds between two `progress` events of one load
# The unit of progress by stage. Other stages have no countable steps.
STAGE_UNITS = {"download": "bytes", "weights": "bytes", "warmup": "tokens"}
# Share of the whole load at begin and end of each stage. A guess: weights take nearly all time.
STAGE_RANGES = {"start": (0.0, 0.0), "weights": (0.0, 0.9), "warmup": (0.9, 1.0)}


def load_share(stage: str, share: float) -> float:
    """Return the share of the whole load, 0 to 1, at `share` of `stage`. A download is counted on its own."""
    begin, end = STAGE_RANGES.get(stage, (0.0, 1.0))
    return begin + (end - begin) * share


class LoadProgress:
    """The stages of one load in order: download, convert, wait, start, weights, warmup. Times are arguments."""

    def __init__(self) -> None:
        self.latest: Progress | None = None  # the last report of the process in this state
        self._shown_at = -inf  # time of the last report for which an event was made
        self._stage = ""
        self._since = 0.0
        self._ended: list[tuple[str, float, float]] = []  # ended stages with begin and end
        self._done = self._total = 0
        # Time and steps of the first report in this stage. The rate excludes steps that were done before.
        self._first: tuple[float, int] | None = None
        self._rate = 0.0

    def begin(self, stage: str, now: float) -> None:
        """End the current stage and begin `stage`. Without effect if it is the current one."""
        if stage == self._stage:
            return
        self.end(now)
        self._stage, self._since = stage, now
        self._done = self._total = 0
        self._first, self._rate = None, 0.0

    def update(self, stage: str, done: int, total: int, now: float) -> None:
        """Record `done` of `total` steps (0: unknown) of `stage`, and begin it if it is not the current one."""
        self.begin(stage, now)
        self._done, self._total = done, total
        at, before = self._first = self._first or (now, done)
        if now > at:
            self._rate = max(0.0, (done - before) / (now - at))

    def report(self, event: Progress, now: float) -> bool:
        """Record a report of the process. Return whether it is worth an event: for a new stage, for the end of a stage,
        or PROGRESS_INTERVAL after the last event."""
        before, self.latest = self.latest, event
        self.update(event.stage, event.done, event.total, now)
        is_same = before is not None and before.stage == event.stage
        is_end = before is not None and before.done < event.done == event.total
        if is_same and not is_end and now - self._shown_at < PROGRESS_INTERVAL:
            return False
        self._shown_at = now
        return True

    def end(self, now: float) -> None:
        """End the current stage."""
        if self._stage:
            self._ended.append((self._stage, self._since, now))
        self._stage = ""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each ended stage, in order."""
        return self.between(-inf, inf)

    def between(self, since: float, until: float) -> dict[str, float]:
        """Return the seconds of each ended stage within a time range."""
        found: dict[str, float] = {}
        for stage, began, ended in self._ended:
            if (seconds := min(ended, until) - max(began, since)) >= 0:
                found[stage] = found.get(stage, 0.0) + seconds
        return found

    @property
    def share(self) -> float:
        """Progress of the current stage, 0 to 1; 0 while its total is unknown."""
        return min(1.0, self._done / self._total) if self._total else 0.0

    @property
    def left(self) -> float | None:
        """Remaining seconds of the current stage at its rate so far; None if unknown."""
        return (self._total - self._done) / self._rate if self._rate and self._total else None

    def as_dict(self) -> dict[str, Any]:
        """Return the current stage as JSON values: `rate` in units per second, `eta` in seconds; None if unknown."""
        return {
            "stage": self._stage,
            "done": self._done,
            "total": self._total,
            "unit": STAGE_UNITS.get(self._stage),
            "rate": round(self._rate, 1) if self._rate else None,
            "eta": round(self.left, 1) if self.left is not None else None,
        }


@dataclass(slots=True)
class Retirement:
    """The drain of a worker that takes no new leases. Times are seconds of the fleet's clock."""

    began: asyncio.Event = field(default_factory=asyncio.Event)
    since: float = 0.0
    deadline: float | None = None  # when running requests are aborted; None: never
    made_room_for: str = ""  # the model that gets its memory; empty: it is not evicted


@dataclass(slots=True)
class HostUse:
    """The main memory of a ready worker beside its usual use: what was reserved when it became ready."""

    usual: int = 0  # bytes; 0: the worker is not ready
    excess_since: float | None = None

    def is_excessive(self, resident: int, now: float) -> bool:
        """Record `resident` bytes. True if they were EXCESS_BYTES above the usual ones for EXCESS_PATIENCE seconds.

        What a worker needs was reserved when it became ready. What large requests take beyond that is given back after
        them.
        """
        if not self.usual or resident <= self.usual + EXCESS_BYTES:
            self.excess_since = None
            return False
        self.excess_since = now if self.excess_since is None else self.excess_since
        return now - self.excess_since >= EXCESS_PATIENCE


class Worker:
    """One worker as fleet and planner see it. Times are seconds of the fleet's clock."""

    def __init__(self, id: int, model: Model, state: State, now: float, *, best_effort: bool = False):
        # Identity
        self.id = id
        self.model = model
        self.preset: Preset = model.preset  # stays when the model gets settings that need another load
        self.attempt = model.failed_attempts  # at its creation
        self.best_effort = best_effort
        self.is_excess = False  # a replica beyond the minimum of `replicas`: it stops when idle
        self.prefetched = False  # started because another model lists this one under `prefetch`
        self.fetch_only = False  # ends after the download unless a request has leased it

        # Lifecycle
        self.state = state
        self.since = now  # when it entered its state; decides the place in the queue while QUEUED
        self.wanted_since = now  # of a best-effort replica: it evicts no best-effort resident used after this
        self.task: asyncio.Task[None] | None = None
        self.reason = ""  # why it was retired or ended
        self.retirement = Retirement()
        self.ready: asyncio.Future[WorkerProcess] = _future()
        self.ready_at: float | None = None
        self.ended = asyncio.Event()  # the process is gone, stopping or unreachable: it answers no further request
        self.stopped = asyncio.Event()
        self.lost: WorkerLost | None = None
        self.refused: ApiError | None = None  # the error of a load that could not be attempted

        # Files and cost
        self.snapshot = ""
        self.file_sizes: Mapping[str, int] | None = None  # bytes of its weight files by path, once looked up
        self.facts: Checkpoint | None = None
        self.costs: Costs | None = None

        # Place and reservation
        self.devices: frozenset[DeviceId] = frozenset()  # devices that the preset allows
        self.pools: dict[DeviceId, DeviceId] = {}  # for devices with unified memory: the device whose memory they use
        self.place: tuple[DeviceId, ...] = ()
        self.reserved: dict[DeviceId, int] = {}
        # The estimate that its grant was made from, if the KV cache had a range. `costs` has the granted one since.
        self.kv_range: MemoryEstimate | None = None
        self.kv_steps = 0  # granted steps of that range
        self.host_use = HostUse()
        self.early = EarlyStart()

        # Wait, process and requests
        self.queue = QueuePosition(granted=_future())
        self.load = LoadProgress()
        self.load_seconds = 0.0
        self.process: WorkerProcess | None = None
        self.pulse: Pulse | None = None
        self.need: MemoryNeed | None = None  # announced since its last pulse
        # Bytes of main memory that it announces before it uses them, and that its reservation lacks until then.
        self.headroom = 0
        self.adapters = SentAdapters()
        self.leases: set[Lease] = set()
        self.leases_changed = asyncio.Event()
        self.usage = Usage(last_used=now, residency_ends=now)
        self.resident: tuple[tuple[object, ...], Resident] | None = None  # cached, with the values it was made from

    def __str__(self) -> str:
        return f"{self.preset.id}#{self.id}"

    @property
    def retired(self) -> bool:
        """The worker takes no new leases."""
        return self.retirement.began.is_set()

    @property
    def open(self) -> bool:
        """The worker may take new leases."""
        return self.state <= State.READY and not self.retired

    @property
    def has_open_sibling(self) -> bool:
        """Another worker of the model is open, so the end of this one is not the end of the model."""
        return any(other is not self and other.open for other in self.model.workers)

    @property
    def holds_memory(self) -> bool:
        """The worker is a resident: it has a place, or an early start while it is queued."""
        return self.state.holds_memory or (self.state is State.QUEUED and self.early.reserved > 0)

    @property
    def measured(self) -> Bytes:
        return self.process.measured if self.process is not None else {}

    @property
    def occupied(self) -> Bytes:
        """Measured bytes by the device whose memory they are in."""
        return pooled(self.measured, self.pools) if self.pools else self.measured

    @property
    def driver_visible(self) -> Bytes:
        """The part of the measured bytes that drivers report as used.

        Pages of mapped files are not part of it: the kernel can reclaim them. If they were subtracted from the driver's
        figure, memory of other programs would look free.
        """
        occupied, latest = self.occupied, self.latest_report
        if latest is None or not latest.mapped or MAIN_MEMORY not in occupied:
            return occupied
        return {**occupied, MAIN_MEMORY: max(0, occupied[MAIN_MEMORY] - latest.mapped)}

    @property
    def rows(self) -> int:
        """The most sequences in one step. An embedder reports tokens instead, so for it this is `contexts`."""
        if self.facts is None:
            return self.preset.contexts
        stated = rows(self.facts, self.preset)
        if self.pulse is None or serves_embeddings(self.facts, self.preset):
            return stated
        return self.pulse.parallel or stated

    @property
    def latest_report(self) -> Pulse | Ready | None:
        """The newest event of its process with its memory."""
        return self.pulse or (self.process.ready if self.process is not None else None)

    @property
    def expected_growth(self) -> int:
        """Bytes of main memory that it may still allocate, as it last reported."""
        latest = self.need or self.latest_report
        return latest.later if latest is not None else 0

    @property
    def unannounced(self) -> int:
        """Bytes of main memory that it may need besides, and announces before it allocates them."""
        latest = self.need or self.latest_report
        return latest.unannounced if latest is not None else 0

    @property
    def on_host(self) -> bool:
        return all(device.index == HOST for device in self.devices)

    @property
    def time_to_live(self) -> float:
        """Seconds that the worker may idle before it exits; below 0: forever."""
        return self.preset.sleep_idle if self.falls_asleep else self._ttl

    @property
    def falls_asleep(self) -> bool:
        """The worker exits after `sleep-idle-seconds`, and its weights may stay in main memory."""
        return self.preset.sleep_idle >= 0 and (self._ttl < 0 or self.preset.sleep_idle < self._ttl)

    @property
    def _ttl(self) -> float:
        return self.preset.ttl if self.usage.keep_alive is None else self.usage.keep_alive

    def sleep_request(self, files: Mapping[str, int]) -> SleepRequest | None:
        """Return the weights to keep in main memory after this worker's end.

        None unless the worker was evicted, or exited after `sleep-idle-seconds`.
        """
        if self.ready_at is None or self.best_effort or self.lost is not None or not files:
            return None
        if self.reason != "evicted" and not (self.reason == "idle" and self.falls_asleep):
            return None
        expires = self.usage.last_used + self.preset.ttl if self.preset.ttl >= 0 else None
        return SleepRequest(
            files=tuple(files), size=sum(files.values()), last_used=self.usage.last_used, expires=expires
        )

    def abort_leases(self, error: ApiError) -> None:
        """Abort all requests that hold this worker."""
        for lease in tuple(self.leases):
            lease.abort(error)


def _future() -> asyncio.Future[Any]:
    """Return a future whose exception may stay unread."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def enter(worker: Worker, state: State, events: EventLog, now: float) -> None:
    """Enter a state and append its event. A state that is reached already stays: states only go forwards."""
    if state > worker.state:
        was, worker.state, worker.since = worker.state, state, now
        append_state(worker, events, was=was)


def append_state(worker: Worker, events: EventLog, *, was: State | None, **facts: Any) -> None:
    """Append one `state` event with the facts of this transition."""
    data: dict[str, Any] = {"worker": worker.id, "state": worker.state.name.lower()}
    if was is not None:
        data["was"] = was.name.lower()
    if worker.state is State.STARTING:
        data["reserved"] = {str(id): size for id, size in worker.reserved.items() if id.index != WORKER_SLOTS}
        if worker.costs is not None and worker.costs.estimate.kv_tokens:
            data["kv_tokens"] = worker.costs.estimate.kv_tokens
    elif worker.state is State.READY and worker.process is not None and was is not None:
        data["load_seconds"] = round(worker.load_seconds, 3)
        data["stages"] = {stage: round(seconds, 3) for stage, seconds in worker.load.seconds.items()}
        data["measured"] = _by_name(worker.measured)
        data["estimated"] = {str(id): size for id, size in estimated(worker).items()}
        data["pid"] = worker.process.pid
        data["spent"] = {stage: round(seconds, 4) for stage, seconds in worker.process.ready.seconds.items()}
        data["processor_seconds"] = round(worker.process.ready.processor, 4)
    elif worker.state >= State.STOPPING:
        data["reason"] = worker.reason
        if worker.state is State.STOPPED and worker.process is not None:
            data["settle_seconds"] = round(worker.process.settle_seconds, 3)
        if worker.retirement.made_room_for:
            data["for"] = worker.retirement.made_room_for
        if worker.lost is not None:
            data["error"] = worker.lost.message
            if worker.lost.exit is not None:
                data["exit_code"] = worker.lost.exit
    if worker.has_open_sibling:
        data["extra_worker"] = True
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
        "expected_growth": worker.expected_growth,
        "headroom": worker.headroom,
        "retired": worker.retired,
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


def kv_cache(worker: Worker, granted: int | None = None) -> dict[str, Any]:
    """Return the KV cache of a worker as JSON values: the least, the granted one (None before a grant) and the most, in
    tokens, and in bytes over all shards. Empty if its tokens are not known.

    `granted`: the steps of a grant that a preview expects; None: those of the worker.
    """
    found = worker.kv_range or (worker.costs.estimate if worker.costs is not None else None)
    if found is None or not found.kv_tokens:
        return {}

    def cache(steps: int) -> dict[str, int]:
        fixed = found.granted(steps)
        return {"tokens": fixed.kv_tokens, "bytes": sum(fixed.context)}

    if granted is None and worker.state >= State.STARTING:
        granted = worker.kv_steps
    return {
        "least": cache(0),
        "granted": cache(granted) if granted is not None else None,
        "most": cache(found.kv_steps),
    }


def _by_name(sizes: Bytes) -> dict[str, int]:
    return {str(device): size for device, size in sizes.items()}

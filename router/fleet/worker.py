"""One life of one worker process: what is known of it, and how fleet and planner see it. It does nothing."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from router.config.presets import Preset
from router.errors import ApiError, LoadFailed
from router.events import EventLog
from router.fleet.early_start import Candidate, less
from router.fleet.load_stages import Stages
from router.fleet.sleeping_weights import Wish
from router.fleet.state import State
from router.launch.interface import Standby, WorkerLost, WorkerProcess
from router.memory import estimate as estimates
from router.memory import sharding
from router.memory.checkpoint_facts import Checkpoint
from router.memory.estimate import Estimate
from router.planner.ledger import HOST, LOCAL, SLOTS, Bytes, DeviceId, Resident, pooled
from router.planner.types import Demand, Start
from worker.protocol.argv import ENGINES, AdapterSource
from worker.protocol.events import Progress, Pulse


class Held(Protocol):
    """A lease, as the worker that it holds sees it."""

    def abort(self, error: ApiError) -> None:
        """End the request with `error`; its lease comes back soon."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a load will cost: bytes by shard, and whether a plan may evict or refuse on that word."""

    estimate: Estimate
    is_exact: bool
    key: str
    load_seconds: float
    forked: bool = False
    """They hold for a worker that is forked from a nursery, and for no other."""


class Standing:
    """What a life knows of its standby: a process that prepares itself while the life still waits for room."""

    def __init__(self) -> None:
        self.held = 0
        """Bytes of main memory that it is charged with; 0: there is none, or none any more."""
        self.wanted = asyncio.Event()
        """The fleet has reserved what it holds: it may begin. There is one in a life at most."""
        self.dismissed = asyncio.Event()
        """It must go, or is no longer needed."""
        self.process: Standby | None = None
        self.born = asyncio.Event()
        self.is_prepared = False
        self.is_taken = False
        """There is room: it is the worker now, and what it holds is part of what that has reserved."""
        self.over = asyncio.Event()
        """There will be none any more, and nothing is left of one that was."""

    @property
    def is_charged(self) -> bool:
        """Whether what it holds counts for what its worker is going to need."""
        return self.held > 0 and not self.dismissed.is_set()


class Worker:
    """One life of one worker process, as fleet and planner see it. Times are seconds of the fleet's clock."""

    def __init__(
        self, id: int, preset: Preset, state: State, now: float, *, attempt: int = 0, best_effort: bool = False
    ):
        self.id = id
        self.preset = preset
        self.state = state
        self.attempt = attempt
        """How many lives of this model just before this one ended before they were ready, by what one more may cure:
        they ran out of memory, or somebody killed them."""
        self.best_effort = best_effort
        """A copy: nobody's need as long as another worker of its model is."""
        self.fetches = False
        """It is only to bring the files: nobody has to wait for it, and it ends with the download unless somebody
        does."""
        self.wished = now
        """Since when there has been a wish for it, if it is a copy: luxuries that were used since then stay."""
        self.surplus = False
        """A copy beyond the least number of `replicas`: it ends when it idles."""
        self.since = now
        """When it entered its state; the place in the queue while QUEUED."""
        self.born = now
        self.snapshot = ""
        self.sizes: Mapping[str, int] | None = None
        """Bytes of the files of its weights, by path, once somebody has looked."""
        self.facts: Checkpoint | None = None
        self.costs: Costs | None = None
        self.devices: frozenset[DeviceId] = frozenset()
        """Those that its preset lets it take."""
        self.choice = sharding.Choice()
        """How it is to lie on them."""
        self.pools: dict[DeviceId, DeviceId] = {}
        """Of devices without memory of their own: whose they use."""
        self.place: tuple[DeviceId, ...] = ()
        self.reserved: dict[DeviceId, int] = {}
        self.standing = Standing()
        self.reads = asyncio.Event()
        """Its files are to be read ahead while it waits."""
        self.is_prefetch = False
        """It was begun because another model was asked for that its users ask for together with this one."""
        self.process: WorkerProcess | None = None
        self.told: tuple[tuple[AdapterSource, ...], str] = (), ""
        """The adapters, and the default one, that its process knows of."""
        self.telling = asyncio.Lock()
        self.pulse: Pulse | None = None
        self.progress: Progress | None = None
        """Of its download, or its load."""
        self.progress_told = -1.0
        self.stages = Stages()
        self.waits_for = ""
        """Why it is still QUEUED, in a word of the planner."""
        self.waits_until: float | None = None
        """When at the latest those in its way may leave; None: they do already, or nobody can say."""
        self.waits_for_slot = False
        """What it waited for last was not memory: there were as many workers as may be."""
        self.ahead = 0
        self.family: list[Worker] = []
        """All workers of its model that are not stopped, itself among them; kept by the fleet."""
        self.leases: set[Held] = set()
        self.last_used = now
        self.residency_ends = now
        self.keep_alive: float | None = None
        """Seconds that it may idle, as its latest request wants it; below 0: for ever; None: as its preset says."""
        self.reason = ""
        """Why it was retired or ended."""
        self.made_room_for = ""
        self.deadline: float | None = None
        """When running requests are cut, once retired; None: never."""
        self.leaving_since = 0.0
        self.ready_at: float | None = None
        """When it became ready, if it ever did."""
        self.answered = False
        """It has completed an answer."""
        self.lost: WorkerLost | None = None
        self.refused: LoadFailed | None = None
        """Why it could not even be tried."""
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[WorkerProcess] = loop.create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.room: asyncio.Future[Start] = loop.create_future()
        self.room.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.refine = asyncio.Event()
        self.retired = asyncio.Event()
        self.stirred = asyncio.Event()
        self.ended = asyncio.Event()
        """The process is known to be gone, or going, or out of reach: no further request can be answered by it."""
        self.stopped = asyncio.Event()
        self.considered = asyncio.Event()
        """The planner has answered on a figure that it may refuse on."""
        self.task: asyncio.Task[None] | None = None
        self.load_seconds = 0.0
        self.first_token = 0.0
        """Seconds from the arrival of its first request to its first token; 0.0: there was none yet."""
        self.has_peaked = False
        """Its largest step lies behind it, and was learned from."""
        self._resident: tuple[tuple[object, ...], Resident] | None = None
        """As the planner has seen it last, and what that was made of."""

    def __str__(self) -> str:
        return f"{self.preset.id}#{self.id}"

    @property
    def open(self) -> bool:
        """May take new leases."""
        return self.state <= State.READY and not self.retired.is_set()

    @property
    def beside(self) -> bool:
        """Another worker of the model is open: what becomes of this one is not what becomes of the model."""
        return any(other is not self and other.open for other in self.family)

    @property
    def measured(self) -> Bytes:
        return self.process.measured if self.process is not None else {}

    @property
    def occupied(self) -> Bytes:
        """What it measures, by the memory that its devices use."""
        return pooled(self.measured, self.pools) if self.pools else self.measured

    @property
    def counted(self) -> Bytes:
        """Of that, what drivers count as used. Pages of files that it has mapped are none of it: the kernel would give
        them to anybody, and whoever took them off its figure would take memory of others for free."""
        occupied, host = self.occupied, DeviceId(LOCAL, HOST)
        said = self.pulse or (self.process.ready if self.process is not None else None)
        if said is None or not said.mapped or host not in occupied:
            return occupied
        return {**occupied, host: max(0, occupied[host] - said.mapped)}

    @property
    def on_host(self) -> bool:
        return all(device.index == HOST for device in self.devices)

    def demand(self) -> Demand:
        """This worker as the planner sees it while QUEUED with its costs known, less what its standby holds."""
        assert self.costs is not None
        estimate = self.costs.estimate
        on_host = self.on_host
        demand = Demand(
            id=self.id,
            model=self.preset.id,
            shards=estimate.shards,
            host=0 if on_host else estimate.host,
            since=self.wished if self.best_effort else self.since,
            priority=self.preset.priority,
            best_effort=self.best_effort,
            is_exact=self.costs.is_exact,
            exclusive=ENGINES[self.preset.engine].exclusive,
            devices=self.choice.devices,
            place=self.choice.place,
            load_seconds=self.costs.load_seconds,
        )
        return less(demand, self.standing.held) if self.standing.is_charged else demand

    def candidate(self, demand: Demand) -> Candidate:
        """This worker as far as standing by goes, while QUEUED with its costs known; `demand` is its own."""
        assert self.costs is not None
        assert self.facts is not None
        traits = ENGINES[self.preset.engine]
        may = self.choice.ranks == 1  # followers are told what to load before they begin
        may = may and not (
            self.best_effort or traits.exclusive or self.standing.wanted.is_set() or self.standing.over.is_set()
        )
        runtime = 0
        if may:
            costs = self.costs
            runtime = estimates.prepared_bytes(self.facts, costs.estimate, on_host=self.on_host, forked=costs.forked)
        return Candidate(demand=demand, runtime=runtime, stands_by=self.standing.is_charged)

    def standby(self) -> Resident:
        """Its standby as the planner sees it: nobody's victim, as it goes by a law of its own (router/fleet/early_start.py)."""
        host = DeviceId(LOCAL, HOST)
        process = self.standing.process
        return Resident(
            id=self.id,
            model=self.preset.id,
            reserved={host: self.standing.held},
            measured=process.measured if process is not None and self.standing.is_prepared else {},
            starting=not self.standing.is_prepared,
            leaving=not self.standing.is_charged,
            leaving_since=self.since,
            pinned=True,
        )

    def resident(self, request_interval: float | None = None) -> Resident:
        """This worker as the planner sees it while it holds memory; its model is asked for again in `comes_back`
        seconds. The same as before while all is the same that it is made of: looks are many, changes few."""
        made_of = (
            self.preset, self.state, self.retired.is_set(), bool(self.leases), self.last_used, self.residency_ends,
            self.leaving_since, self.keep_alive, self.best_effort, self.surplus, self.load_seconds, self.process, self.pulse,
            self.reserved.copy(), {**self.measured}, request_interval,  # they change in place
        )  # fmt: skip
        if self._resident is None or self._resident[0] != made_of:
            self._resident = made_of, self._made(request_interval)
        return self._resident[1]

    def _made(self, request_interval: float | None) -> Resident:
        busy = bool(self.leases)
        ttl = self.time_to_live
        if self.surplus:
            ttl = min(ttl, self.preset.replica_idle) if ttl >= 0 else self.preset.replica_idle
        return Resident(
            id=self.id,
            model=self.preset.id,
            reserved=self.reserved.copy(),
            measured={**self.counted},
            last_used=self.last_used,
            busy=busy,
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
        """Seconds that it may idle, whatever then becomes of its weights; below 0: for ever."""
        ttl = self.preset.ttl if self.keep_alive is None else self.keep_alive
        return self.preset.sleep_idle if self.falls_asleep else ttl

    @property
    def falls_asleep(self) -> bool:
        """Whether, when it has idled for long, its weights stay in main memory if they may."""
        ttl = self.preset.ttl if self.keep_alive is None else self.keep_alive
        return self.preset.sleep_idle >= 0 and (ttl < 0 or self.preset.sleep_idle < ttl)

    def wish(self, files: Mapping[str, int]) -> Wish | None:
        """What is worth holding of it now that it has left, if anything is: it made room, or had idled for long."""
        if self.ready_at is None or self.best_effort or self.lost is not None or not files:
            return None
        if self.reason != "evicted" and not (self.reason == "idle" and self.falls_asleep):
            return None
        expires = self.last_used + self.preset.ttl if self.preset.ttl >= 0 else None
        return Wish(files=tuple(files), size=sum(files.values()), last_used=self.last_used, expires=expires)

    def cut(self, error: ApiError) -> None:
        """End every request that holds this worker."""
        for lease in tuple(self.leases):
            lease.abort(error)


def tell(worker: Worker, events: EventLog, *, was: State | None, **facts: Any) -> None:
    """One `state` event with what people want to know of this transition."""
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
    """What it is doing and holds, for people and programs."""
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
    """Estimated bytes by device of the place taken."""
    if worker.costs is None:
        return {}
    found = dict(zip(worker.place, worker.costs.estimate.shards, strict=False))
    host = DeviceId(worker.place[0].node, HOST) if worker.place else None
    if host is not None and host not in found and worker.costs.estimate.host:
        found[host] = worker.costs.estimate.host
    return found


def _by_name(sizes: Bytes) -> dict[str, int]:
    return {str(device): size for device, size in sizes.items()}


__all__ = ["Costs", "Held", "Standing", "Worker", "estimated", "figures", "tell"]

"""A worker's life: one coroutine; it acts on what the fleet has recorded.

    download, if files are missing > estimate > wait for room > serve > ready, until lost or retired > drain > stop

Law: a life goes forwards only and ends once, with its outcome given to everybody who waits for it. Whatever can fail
without a device comes before anybody is evicted.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from router import calibration, split
from router import estimate as estimates
from router.backoff import Failure
from router.calibration import Calibration
from router.errors import ApiError, Draining, Internal, LoadBackoff, LoadFailed, Stalled, WorkerCrashed
from router.estimate import Checkpoint, Estimate
from router.events import EventLog
from router.holding import Wish
from router.launchers import Launcher, Listen, NotForked, NotHeld, Program, Standby, WorkerLost, WorkerProcess
from router.ledger import HOST, LOCAL, SLOTS, Bytes, DeviceId, Reading, Resident, pooled
from router.lifecycle import State, advance
from router.planner import Demand, Start
from router.presets import Preset
from router.stages import Stages
from router.standby import Candidate, less
from worker import contract

log = logging.getLogger("router.life")

PROGRESS_INTERVAL = 0.1
"""Seconds between two events about the progress of one load."""
FETCHED = "downloaded"
"""Why a life ended that was only to bring the files."""
CUT_GRACE = 1.0
"""Seconds that requests get to read what has arrived, or to write their error frames, before connections close."""


class Again(Exception):
    """Told to those who wait: this life is over, but another one may be tried at once."""


class Held(Protocol):
    """A lease, as the worker that it holds sees it."""

    def abort(self, error: ApiError) -> None:
        """End the request with `error`; its lease comes back soon."""


class Files(Protocol):
    """Snapshots on disk."""

    def find(self, preset: Preset) -> str | None:
        """Folder of the preset's complete snapshot, if there is one; looks at a few names only."""

    def fetched(self, preset: Preset, snapshot: str) -> None:
        """A download of `preset` has ended in `snapshot`."""

    def loads_from(self, preset: Preset, snapshot: str) -> str:
        """Folder that a worker of the preset's snapshot loads: another one if that was converted."""

    def forsake(self, snapshot: str) -> bool:
        """What was to be loaded could not be: whether it was a converted snapshot, which is not used again."""

    def sweep(self) -> None:
        """Delete what was made of snapshots that are no longer there. Blocks on the disk."""

    @property
    def converted(self) -> Mapping[str, int]:
        """Bytes of disk of what was made of snapshots, by their folders; looks at nothing."""

    async def read(self, snapshot: str, preset: Preset) -> Checkpoint:
        """The facts in it, as `preset` changes them. Raises UnknownCheckpoint."""

    def weights(self, snapshot: str) -> Mapping[str, int]:
        """Bytes of each of its weight files, by path; looks at a few names only."""

    def look(self, preset: Preset) -> object:
        """What is on disk of it: equal as long as nothing there has changed; looks at a few names only."""

    def download(self, preset: Preset) -> contract.Download:
        """How to fetch it. Raises ApiError if it cannot be fetched."""

    def adapters(self, preset: Preset) -> list[contract.AdapterSource]:
        """Those of `preset`, with the folders of such as are on the hub, if they are here; looks at few names only."""

    def missing_adapters(self, preset: Preset) -> list[contract.Download]:
        """How to fetch those that are not here, and can be fetched."""


class World(Protocol):
    """What a life needs of its fleet."""

    launcher: Launcher
    calibration: Calibration
    events: EventLog
    files: Files

    def now(self) -> float: ...

    def changed(self) -> None:
        """Something that a plan depends on is different now."""

    def over(self, worker: "Worker") -> Failure | None:
        """This life has ended; called before anybody hears of it. What keeps its model from being tried again."""

    def capacities(self) -> Mapping[DeviceId, int]:
        """Bytes that could ever be had on each device."""

    def hopeless(self, worker: "Worker") -> bool:
        """Whether not even an empty machine has room for the weights alone."""

    def turn(self, preset: Preset) -> float:
        """Seconds that a fresh worker of `preset` keeps its place while it is in use."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a load will cost: bytes by shard, and whether a plan may evict or refuse on that word."""

    estimate: Estimate
    sure: bool
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

    def __init__(self, id: int, preset: Preset, state: State, now: float, *, attempt: int = 0, luxury: bool = False):
        self.id = id
        self.preset = preset
        self.state = state
        self.attempt = attempt
        """How many lives of this model just before this one ended before they were ready, by what one more may cure:
        they ran out of memory, or somebody killed them."""
        self.luxury = luxury
        """A copy: nobody's need as long as another worker of its model is."""
        self.fetches = False
        """It is only to bring the files: nobody has to wait for it, and it ends with the download unless somebody
        does."""
        self.surplus = False
        """A copy beyond the least number of `replicas`: it ends when it idles."""
        self.since = now
        """When it entered its state; the place in the queue while QUEUED."""
        self.born = now
        self.snapshot = ""
        self.facts: Checkpoint | None = None
        self.costs: Costs | None = None
        self.devices: frozenset[DeviceId] = frozenset()
        """Those that its preset lets it take."""
        self.choice = split.Choice()
        """How it is to lie on them."""
        self.pools: dict[DeviceId, DeviceId] = {}
        """Of devices without memory of their own: whose they use."""
        self.place: tuple[DeviceId, ...] = ()
        self.reserved: dict[DeviceId, int] = {}
        self.standing = Standing()
        self.reads = asyncio.Event()
        """Its files are to be read ahead while it waits."""
        self.companion = False
        """It was begun because another model was asked for that its users ask for together with this one."""
        self.process: WorkerProcess | None = None
        self.told: tuple[tuple[contract.AdapterSource, ...], str] = (), ""
        """The adapters, and the default one, that its process knows of."""
        self.telling = asyncio.Lock()
        self.pulse: contract.Pulse | None = None
        self.progress: contract.Progress | None = None
        """Of its download, or its load."""
        self.progress_told = -1.0
        self.stages = Stages()
        self.waits_for = ""
        """Why it is still QUEUED, in a word of the planner."""
        self.waits_for_slot = False
        """What it waited for last was not memory: there were as many workers as may be."""
        self.ahead = 0
        self.family: list[Worker] = []
        """All workers of its model that are not stopped, itself among them; kept by the fleet."""
        self.leases: set[Held] = set()
        self.last_used = now
        self.turn_ends = now
        self.keep_alive: float | None = None
        """Seconds that it may idle, as its latest request wants it; below 0: for ever; None: as its preset says."""
        self.reason = ""
        """Why it was retired or ended."""
        self.made_room_for = ""
        self.deadline: float | None = None
        """When running requests are cut, once retired; None: never."""
        self.retired_at = 0.0
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
        """The process is known to be gone, or going: no answer can come from it any more."""
        self.stopped = asyncio.Event()
        self.considered = asyncio.Event()
        """The planner has answered on a figure that it may refuse on."""
        self.task: asyncio.Task[None] | None = None
        self.load_seconds = 0.0
        self.first_token = 0.0
        """Seconds from the arrival of its first request to its first token; 0.0: there was none yet."""
        self.longest_prompt = 0

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
        return pooled(self.measured, self.pools)

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
            since=self.since,
            priority=self.preset.priority,
            luxury=self.luxury,
            sure=self.costs.sure,
            quiet=contract.ENGINES[self.preset.engine].quiet,
            devices=self.choice.devices,
            place=self.choice.place,
            load_seconds=self.costs.load_seconds,
        )
        return less(demand, self.standing.held) if self.standing.is_charged else demand

    def candidate(self) -> Candidate:
        """This worker as far as standing by goes, while QUEUED with its costs known."""
        assert self.costs is not None
        assert self.facts is not None
        traits = contract.ENGINES[self.preset.engine]
        may = not (self.luxury or traits.quiet or self.standing.wanted.is_set() or self.standing.over.is_set())
        runtime = 0
        if may:
            costs = self.costs
            runtime = estimates.prepared_bytes(self.facts, costs.estimate, on_host=self.on_host, forked=costs.forked)
        return Candidate(demand=self.demand(), runtime=runtime, stands_by=self.standing.is_charged)

    def standby(self) -> Resident:
        """Its standby as the planner sees it: nobody's victim, as it goes by a law of its own (router/standby.py)."""
        host = DeviceId(LOCAL, HOST)
        process = self.standing.process
        return Resident(
            id=self.id,
            model=self.preset.id,
            reserved={host: self.standing.held},
            measured=process.measured if process is not None and self.standing.is_prepared else {},
            starting=not self.standing.is_prepared,
            leaving=not self.standing.is_charged,
            retired_at=self.since,
            pinned=True,
        )

    def resident(self) -> Resident:
        """This worker as the planner sees it while it holds memory."""
        busy = bool(self.leases)
        ttl = self.time_to_live
        if self.surplus:
            ttl = min(ttl, self.preset.replica_idle) if ttl >= 0 else self.preset.replica_idle
        return Resident(
            id=self.id,
            model=self.preset.id,
            reserved=self.reserved,
            measured=self.occupied,
            last_used=self.last_used,
            busy=busy,
            leaving=self.retired.is_set() or self.state is State.STOPPING,
            retired_at=self.retired_at or self.since,
            pinned=self.preset.pin and not self.luxury,
            priority=self.preset.priority,
            luxury=self.luxury,
            starting=self.state is State.STARTING,
            quiet=contract.ENGINES[self.preset.engine].quiet,
            turn_ends=self.turn_ends,
            expires=self.last_used + ttl if ttl >= 0 and self.state is State.READY else None,
            linger=self.preset.linger if self.preset.linger >= 0 else None,
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
        if self.ready_at is None or self.luxury or self.lost is not None or not files:
            return None
        if self.reason != "evicted" and not (self.reason == "idle" and self.falls_asleep):
            return None
        expires = self.last_used + self.preset.ttl if self.preset.ttl >= 0 else None
        return Wish(files=tuple(files), size=sum(files.values()), last_used=self.last_used, expires=expires)

    def cut(self, error: ApiError) -> None:
        """End every request that holds this worker."""
        for lease in tuple(self.leases):
            lease.abort(error)


async def live(worker: Worker, world: World) -> None:
    """Live one life, to its end. Cancelling it is how a worker that is not ready yet is retired."""
    error: ApiError | Again | None = None
    try:
        await _live(worker, world)
    except asyncio.CancelledError:
        pass  # retired: `end` says why
    except WorkerLost as lost:
        if _is_conversions_fault(worker, world, lost):
            worker.reason, error = "abandoned", Again()
        else:
            worker.lost, worker.reason = lost, lost.cause
            error = _after_loss(worker, world, lost)
    except NotForked as refused:
        log.warning("%s: %s; what it takes when it is executed is reserved anew", worker, refused)
        worker.reason = "abandoned"
        error = Again()
    except estimates.EstimateError as unknown:
        worker.reason = "load_failed"
        worker.lost = WorkerLost(unknown.message, cause="load_failed", exit=contract.Exit.UNUSABLE)
        error = LoadFailed(f"{worker.preset.id} cannot be loaded: {unknown.message}")
    except ApiError as refused:
        worker.reason = worker.reason or refused.reason
        worker.refused = refused if isinstance(refused, LoadFailed) else None
        error = refused
    except Exception as bug:
        log.exception("%s: the router failed in this worker's life", worker)
        worker.reason = "crashed"
        worker.lost = WorkerLost(f"internal error: {type(bug).__name__}", cause="crashed")
        error = Internal(f"{worker.preset.id}: the router failed while it ran this model; see its log")
    end(worker, world, error)


def end(worker: Worker, world: World, error: "ApiError | Again | None") -> None:
    """The end of a life: recorded first, then told to everybody who waits. None: it was retired."""
    _enter(worker, world, State.STOPPED)
    worker.ended.set()
    worker.reserved = {}
    failure = world.over(worker)
    if isinstance(error, LoadBackoff) and failure is not None:
        error = _dated(error, failure, world.now())
    if not worker.ready.done():
        worker.ready.set_exception(error or _to_waiters(worker))
    worker.considered.set()
    worker.stopped.set()
    world.changed()


def _dated(error: LoadBackoff, failure: Failure, now: float) -> ApiError:
    """`error` with the time of the next trial; if there will be none, it is another error."""
    if failure.final:
        return LoadFailed(error.message)
    return LoadBackoff(error.message, retry_after=failure.until - now)


def _to_waiters(worker: Worker) -> "ApiError | Again":
    """What those hear who waited for a worker that was retired before it was ready."""
    if worker.reason == "config_changed":
        return Again()  # by its new settings
    return Draining(f"{worker.preset.id} was unloaded while it was loading; ask again", retry_after=1)


async def _live(worker: Worker, world: World) -> None:
    preset, program = worker.preset, program_of(worker.preset, str(worker))
    if worker.state is State.DOWNLOADING:
        command = world.files.download(preset)
        worker.stages.begin("download", world.now())
        worker.snapshot = await world.launcher.download(program, command, _listener(worker, world))
        world.files.fetched(preset, worker.snapshot)
        if worker.fetches and not worker.leases:
            worker.reason = FETCHED
            return
    else:
        worker.snapshot = world.files.find(preset) or ""
    worker.snapshot = world.files.loads_from(preset, worker.snapshot)
    await _fetch_adapters(worker, world, program)
    await weigh(worker, world)
    await _trace_unknown(worker, world, program)
    assert worker.costs is not None
    program = replace(program, must_fork=worker.costs.forked)
    if worker.state is State.DOWNLOADING:
        worker.progress = None
        _enter(worker, world, State.QUEUED)
    _tell_estimate(worker, world)
    world.changed()
    worker.stages.begin("wait", world.now())
    listener = _listener(worker, world)
    async with _standing_by(worker, world, program, listener):
        async with _reading_ahead(worker, world):
            start = await _room(worker, world, program)
        worker.place = start.place
        began = world.now()
        worker.stages.begin("start", began)
        async with _running(worker, world, program, listener) as process:
            await _serve(worker, world, process, began)


async def _fetch_adapters(worker: Worker, world: World, program: Program) -> None:
    """Have the adapters that are on the hub here; without one of them the model is served all the same."""
    for command in world.files.missing_adapters(worker.preset):
        try:
            await world.launcher.download(program, command, _listener(worker, world))
        except WorkerLost as lost:
            log.warning("%s: adapter %s cannot be fetched: %s", worker, command.repo, lost.message)


def take(worker: Worker) -> None:
    """The fleet has given the worker its room: what its standby holds is part of that, or still beside it."""
    standing, host = worker.standing, DeviceId(LOCAL, HOST)
    if standing.held:
        worker.reserved[host] = worker.reserved.get(host, 0) + standing.held
        if standing.is_charged:
            standing.held, standing.is_taken = 0, True


@contextlib.asynccontextmanager
async def _reading_ahead(worker: Worker, world: World) -> AsyncIterator[None]:
    """The block in which a life waits for room: what its worker will read is read ahead, if the fleet says so."""

    async def read() -> None:
        await worker.reads.wait()
        began = world.now()
        try:
            size = await world.launcher.read_ahead(tuple(world.files.weights(worker.snapshot)))
        except NotHeld as failed:
            log.warning("%s: its files are not read ahead: %s", worker, failed)
            return
        seconds = round(world.now() - began, 3)
        world.events.append("read_ahead", worker.preset.id, worker=worker.id, bytes=size, seconds=seconds)

    task = asyncio.ensure_future(read())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def _standing_by(worker: Worker, world: World, program: Program, listener: Listen) -> AsyncIterator[None]:
    """The block in which a life may have a standby; whatever ends it, nothing is left of one."""
    task = asyncio.ensure_future(_stand_by(worker, world, program, listener))
    try:
        yield
    finally:
        worker.standing.dismissed.set()
        world.changed()
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):  # retired already: nothing more than that can be wanted
                await asyncio.wait({task})
        task.result()


async def _stand_by(worker: Worker, world: World, program: Program, listener: Listen) -> None:
    """Once the fleet has reserved what it takes, have a process that prepares itself, until it is dismissed.

    One that is lost before there is room takes nobody's place and has cost nothing: the life goes on without, unless
    another one would be lost in the same way.
    """
    standing = worker.standing
    try:
        if not await _first(standing.wanted, standing.dismissed):
            return
        command = replace(options(worker, contract.Serve, listen="unix:"), **_serve_fields(worker, world))
        async with world.launcher.prepare(program, command, listener) as standing.process:
            standing.born.set()
            await _until_dismissed(worker, world, standing.process)
    except WorkerLost as lost:
        if worker.room.done():
            return  # whoever told it to go hears that
        if lost.final:
            worker.room.set_exception(lost)
        else:
            log.warning(
                "%s: preparing ahead of its turn failed (%s); it loads when there is room", worker, lost.message
            )
    except NotForked:
        pass  # it hears so again when there is room, and what an executed one takes is reserved
    finally:
        standing.dismissed.set()
        held, standing.held = standing.held, 0
        _give_back(worker, held)
        standing.over.set()
        world.changed()


async def _first(event: asyncio.Event, other: asyncio.Event) -> bool:
    """Returns once one of two events has happened: whether `other` has not."""
    tasks = {asyncio.ensure_future(each.wait()) for each in (event, other)}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return not other.is_set()


async def _until_dismissed(worker: Worker, world: World, process: Standby) -> None:
    """Returns once the standby must go, or its worker is over. Raises WorkerLost while there is no room yet."""
    standing = worker.standing
    dismissed = asyncio.ensure_future(standing.dismissed.wait())
    prepared = asyncio.ensure_future(process.prepared())
    lost = asyncio.ensure_future(process.lost())
    try:
        await asyncio.wait({dismissed, prepared}, return_when=asyncio.FIRST_COMPLETED)
        if prepared.done() and not dismissed.done():
            prepared.result()
            await world.launcher.refresh()  # what it measures is in the readings from now on
            _settle_standby(worker, process)
            world.changed()
        await asyncio.wait({dismissed, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not dismissed.done() and not worker.room.done():
            raise lost.result()
        await asyncio.wait({dismissed})
    finally:
        for task in (dismissed, prepared, lost):
            task.cancel()
        await asyncio.gather(dismissed, prepared, lost, return_exceptions=True)


def _settle_standby(worker: Worker, process: Standby) -> None:
    """It is charged with what it measures, from now on; one that took more than it was given must go."""
    standing = worker.standing
    if worker.room.done() or not standing.is_charged:
        return
    measured = process.measured.get(DeviceId(LOCAL, HOST), 0)
    if not 0 < measured <= standing.held:
        log.warning("%s: prepared, it holds %d MiB, more than it was given", worker, measured >> 20)
        standing.dismissed.set()
        return
    worker.reserved[DeviceId(LOCAL, HOST)] = standing.held = measured
    standing.is_prepared = True


def _give_back(worker: Worker, held: int) -> None:
    """Nothing is left of a standby that was charged with so many bytes; what its worker itself takes stays reserved."""
    host = DeviceId(LOCAL, HOST)
    if held and host in worker.reserved and worker.state < State.STOPPING:
        worker.reserved[host] -= held
        if not worker.reserved[host]:
            del worker.reserved[host]


@contextlib.asynccontextmanager
async def _running(worker: Worker, world: World, program: Program, listener: Listen) -> AsyncIterator[WorkerProcess]:
    """The worker's process, ready, on its place: its standby, if it has one, else a new one."""
    command = replace(
        options(worker, contract.Serve, listen="unix:"), **_serve_fields(worker, world)
    )  # the launcher fills in devices, socket and leash
    standing = worker.standing
    if standing.is_taken and await _first(standing.born, standing.over) and standing.process is not None:
        yield await standing.process.go(command, place_bytes(worker))
        return
    standing.dismissed.set()
    await standing.over.wait()
    async with world.launcher.serve(program, command, place_bytes(worker), listener) as process:
        yield process


async def _serve(worker: Worker, world: World, process: WorkerProcess, began: float) -> None:
    """The worker is ready; returns once it is retired and drained. Raises WorkerLost."""
    worker.process = process
    worker.load_seconds = world.now() - began
    worker.stages.end(world.now())
    await world.launcher.refresh()  # readings must be as new as what READY subtracts from them
    assert worker.costs is not None
    if process.forked != worker.costs.forked:  # what it measures holds for the way in which it was really born
        worker.costs = replace(worker.costs, key=_key(worker, world, forked=process.forked), forked=process.forked)
    _settle_reservation(worker)
    world.calibration.record_load(worker.costs.key, worker.load_seconds)
    _learn_from_load(worker, world)
    worker.last_used = worker.ready_at = world.now()
    worker.turn_ends = worker.last_used + world.turn(worker.preset)
    _enter(worker, world, State.READY)
    worker.ready.set_result(process)
    world.changed()
    try:
        await _until_over(worker, world, process)
    finally:
        _enter(worker, world, State.STOPPING)
        worker.ended.set()
        _settle_reservation(worker)
        _learn(worker, world)
        world.changed()
        if worker.lost is not None:
            await _requests_end(worker)


async def _room(worker: Worker, world: World, program: Program) -> Start:
    """Returns once the fleet has reserved a place; works out the exact costs when the planner asks for them."""
    while not worker.room.done():
        await _until_room(worker, worker.refine.wait())
        if not worker.room.done():
            await _until_room(worker, _refine(worker, world, program))
            worker.refine.clear()
            world.changed()
    return worker.room.result()


async def _until_room(worker: Worker, work: Coroutine[Any, Any, object]) -> None:
    """Returns once `work` is done, or there is room: then it has been cancelled, and is over. Raises what it raises."""
    task = asyncio.ensure_future(work)
    either: set[asyncio.Future[Any]] = {worker.room, task}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def _refine(worker: Worker, world: World, program: Program) -> None:
    """Replace an estimate by the exact one; if that cannot be had, stand by the one there is."""
    assert worker.costs is not None
    try:
        exact = await world.launcher.estimate(program, options(worker, contract.Estimate))
    except WorkerLost as lost:
        if lost.final:
            raise
        log.warning("%s: no exact estimate (%s); %s", worker, lost.message, _what_stands(worker.costs.estimate))
        worker.costs = replace(worker.costs, sure=True)
        _estimate(worker, world, stands=True)
        return
    _keep_exact(worker, world, worker.costs, exact)
    _tell_estimate(worker, world)


def _keep_exact(worker: Worker, world: World, costs: Costs, exact: contract.Estimated) -> None:
    """The exact figure stands from now on; if it says that one device more is needed, a first figure for that."""
    estimate = estimates.exact(exact, worker.preset, forked=costs.forked, layers=worker.choice.layers)
    world.calibration.store_exact(costs.key, estimate)
    worker.costs = replace(costs, estimate=estimate, sure=True)
    if not split.fits(worker.choice, estimate.shards, _bounds(worker, world)):
        _estimate(worker, world)


async def _trace_unknown(worker: Worker, world: World, program: Program) -> None:
    """Where nothing but the weights is known, or a first figure is beyond what the preset allows of single devices, ask
    for the exact figure before anybody plans with a guess."""
    while (costs := worker.costs) is not None and not costs.sure and _is_a_guess(worker, world, costs.estimate):
        worker.costs = None
        try:
            exact = await world.launcher.estimate(program, options(worker, contract.Estimate))
        except WorkerLost as lost:
            if lost.final:
                raise
            log.warning("%s: no exact estimate (%s); %s", worker, lost.message, _what_stands(costs.estimate))
            _estimate(worker, world, stands=True)
            return
        _keep_exact(worker, world, costs, exact)


def _is_a_guess(worker: Worker, world: World, estimate: Estimate) -> bool:
    if estimate.source == "weights":
        return True
    is_bound = bool(worker.preset.gpu_split) and not worker.on_host
    return is_bound and not split.fits(worker.choice, estimate.shards, _bounds(worker, world))


def _bounds(worker: Worker, world: World) -> dict[DeviceId, int]:
    """What it may have of each device that it may use."""
    order = in_order(worker.preset, world.launcher.readings(), worker.devices)
    return split.bounded(worker.preset, order, world.capacities())


async def _until_over(worker: Worker, world: World, process: WorkerProcess) -> None:
    """Returns once the worker is retired and drained; raises WorkerLost as soon as it is lost."""
    lost = asyncio.ensure_future(process.lost())
    over = asyncio.ensure_future(_retired_and_drained(worker, world))
    try:
        await asyncio.wait({lost, over}, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            if worker.reason == "shutdown":
                return  # in a hurry everybody is killed
            worker.lost = lost.result()
            worker.reason = worker.lost.cause
            raise worker.lost
        over.result()
    finally:
        for task in (lost, over):
            task.cancel()


async def _retired_and_drained(worker: Worker, world: World) -> None:
    await worker.retired.wait()
    while worker.leases:
        worker.stirred.clear()
        left = None if worker.deadline is None else worker.deadline - world.now()
        if left is not None and left <= 0:
            worker.cut(Draining(f"{worker.preset.id} is being unloaded; the answer was cut", retry_after=1))
            await _leases_back(worker)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await worker.stirred.wait()


async def _requests_end(worker: Worker) -> None:
    """Returns once the requests of a lost worker have read what it still sent and are over; bounded.

    Only then may its connections be closed: one that is closed by ourselves looks to its reader like silence.
    """
    await _leases_back(worker)
    worker.cut(lost_error(worker))
    await _leases_back(worker)


async def _leases_back(worker: Worker) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CUT_GRACE):
            while worker.leases:
                worker.stirred.clear()
                await worker.stirred.wait()


def _is_conversions_fault(worker: Worker, world: World, lost: WorkerLost) -> bool:
    """Whether a worker could not use a converted snapshot: its model is loaded at once from the files as they came."""
    if worker.ready_at is not None or not (lost.final or lost.exit == contract.Exit.DAMAGED):
        return False
    if not world.files.forsake(worker.snapshot):
        return False
    log.warning("%s: its converted snapshot cannot be used (%s); it is loaded as it came", worker, lost.message)
    return True


def _after_loss(worker: Worker, world: World, lost: WorkerLost) -> ApiError | Again:
    """What those hear who still wait for a worker that never became ready."""
    name = worker.preset.id
    if lost.memory and worker.costs is not None:
        raised = world.calibration.raise_(worker.costs.key, worker.costs.estimate, lost.memory)
        when = "while loading" if worker.ready_at is None else "in service"
        log.warning("%s ran out of %s memory %s; its estimate is raised", worker, lost.memory, when)
        if worker.attempt == 0:
            return Again()
        needs = sum(raised.shards)
        return LoadBackoff(
            f"{name} ran out of {lost.memory} memory while loading, twice; it is now expected to need "
            f"{needs / 2**20:.0f} MiB. Lower ctx-size or parallel, or free memory: {lost.message}",
            retry_after=1,
        )
    if lost.final:
        return LoadFailed(f"{name} cannot be loaded: {lost.message}")
    if lost.from_outside and worker.attempt == 0 and worker.ready_at is None:
        log.warning("%s: %s; those who wait for it get another one", worker, lost.message)
        return Again()
    return LoadBackoff(f"{name} failed to load: {lost.message}", retry_after=1)


def lost_error(worker: Worker) -> ApiError:
    """What a request hears whose worker was lost under it."""
    lost, name = worker.lost, worker.preset.id
    if lost is None:
        return WorkerCrashed(f"{name}: the connection to its worker broke; ask again")
    if lost.cause == "stalled":
        return Stalled(f"{name} stopped making progress and was ended: {lost.message}")
    return WorkerCrashed(f"{name}: its worker ended in mid-answer: {lost.message}; ask again")


def _enter(worker: Worker, world: World, state: State, **facts: Any) -> None:
    """Record a transition; a state already reached stands."""
    if state <= worker.state:
        return
    was, worker.state = worker.state, advance(worker.state, state)
    worker.since = world.now()
    tell(worker, world.events, was=was, **facts)


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
        data["estimated"] = {str(id): size for id, size in _estimated(worker).items()}
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


def _listener(worker: Worker, world: World) -> Listen:
    """Keeps what a worker's events say where fleet and faces look for it."""

    def listen(event: contract.Event) -> None:
        if type(event) is contract.Request:
            _hear_request(worker, world, event)
            return
        match event:
            case contract.Progress() if (
                worker.state is not State.QUEUED
            ):  # it waits for room, whatever its standby does
                worker.stages.hear(event.stage, event.done, event.total, world.now())
                if _is_news(worker, event, world.now()):
                    told = {**worker.stages.told(), **({"beside": True} if worker.beside else {})}
                    if event.files:
                        told["files"] = event.files
                    world.events.append("progress", worker.preset.id, worker=worker.id, **told)
                worker.progress = event
            case contract.Pulse():
                worker.pulse = event
                if worker.state is State.READY:
                    _settle_reservation(worker)

    return listen


def _hear_request(worker: Worker, world: World, event: contract.Request) -> None:
    worker.answered = worker.answered or event.outcome == "ok"
    worker.first_token = worker.first_token or event.ttft
    worker.longest_prompt = max(worker.longest_prompt, event.prompt_tokens)
    if event.keep_alive != worker.keep_alive:
        worker.keep_alive = event.keep_alive
        world.changed()
    world.events.mention(
        "request",
        worker.preset.id,
        worker=worker.id,
        id=event.id,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        completion_tokens=event.completion_tokens,
        outcome=event.outcome,
        ttft=event.ttft,
        token_seconds=event.token_seconds,
    )


def _is_news(worker: Worker, event: contract.Progress, now: float) -> bool:
    """Whether progress is worth an event: a new stage, a stage's end, or a while after the last one."""
    before = worker.progress
    if before is not None and before.stage == event.stage:
        ends = before.done < event.done == event.total
        if not ends and now - worker.progress_told < PROGRESS_INTERVAL:
            return False
    worker.progress_told = now
    return True


async def weigh(worker: Worker, world: World) -> None:
    """Fill in facts, devices and costs of a worker whose snapshot is here. Raises EstimateError, LoadFailed."""
    worker.facts = await world.files.read(worker.snapshot, worker.preset)
    _choose_devices(worker, world.launcher.readings())
    _estimate(worker, world)


def _choose_devices(worker: Worker, readings: Sequence[Reading]) -> None:
    worker.pools = {reading.id: reading.pool for reading in readings if reading.pool is not None}
    worker.devices = devices_of(worker.preset, readings)


def devices_of(preset: Preset, readings: Sequence[Reading]) -> frozenset[DeviceId]:
    """The devices that this model may take: those it names, else all accelerators, else main memory.

    Raises LoadFailed for one that is not here.
    """
    accelerators = [reading for reading in readings if reading.id.index >= 0]
    if not preset.device:
        chosen = {reading.id for reading in accelerators}
        return frozenset(chosen or {reading.id for reading in readings if reading.id.index == HOST})
    by_name = {str(reading.id): reading.id for reading in readings}
    by_name |= {reading.uuid: reading.id for reading in accelerators if reading.uuid}
    missing = [name for name in preset.device if name not in by_name]
    if missing:
        known = ", ".join(sorted(by_name))
        raise LoadFailed(f"{preset.id}: there is no device {', '.join(missing)} here, only {known}; change `device`")
    devices = frozenset(by_name[name] for name in preset.device)
    if len({device.index == HOST for device in devices}) > 1:
        raise LoadFailed(f"{preset.id}: `device` mixes cpu and accelerators; name one kind")
    return devices


def _estimate(worker: Worker, world: World, *, stands: bool = False) -> None:
    """On how few devices it fits, and the best figure for that which can be had at once: the preset's word, learned,
    exact from before, or static. `stands`: there will be no better one.

    Where it is not sure that it does not fit, the figure for more devices has to wait for an exact one. Raises
    EstimateError.
    """
    preset, facts = worker.preset, worker.facts
    assert facts is not None
    order = in_order(preset, world.launcher.readings(), worker.devices)
    room = world.capacities()
    bounds = split.bounded(preset, order, room)
    for choice in split.choices(facts, preset, worker.devices, order, room):
        worker.choice = choice
        worker.costs = costs = _cost(worker, world, stands=stands)
        could = split.fits(choice, split.floor(costs.estimate), bounds)
        if split.fits(choice, costs.estimate.shards, bounds) or (could and not costs.sure):
            break
    assert worker.costs is not None
    if preset.gpu_split and not worker.on_host:
        _hold_to(bounds, worker, worker.costs)
    if not worker.costs.sure and world.hopeless(worker):
        worker.costs = replace(worker.costs, sure=True)


def _hold_to(bounds: Mapping[DeviceId, int], worker: Worker, costs: Costs) -> None:
    """What the preset allows of single devices binds, though there be room. Raises LoadFailed for what needs more."""
    choice, shards = worker.choice, costs.estimate.shards
    if split.fits(choice, shards, bounds):
        if not choice.layers:
            worker.choice = replace(choice, devices=frozenset(id for id in choice.devices if bounds[id] >= shards[0]))
    elif costs.sure or not split.fits(choice, split.floor(costs.estimate), bounds):
        most = ", ".join(f"{size >> 20} MiB of {device}" for device, size in bounds.items())
        needs = " + ".join(f"{size >> 20} MiB" for size in shards)
        raise LoadFailed(
            f"{worker.preset.id}: it needs {needs}, and gpu-split and the devices' sizes let it have {most};"
            " raise gpu-split or lower ctx-size"
        )


def _cost(worker: Worker, world: World, *, stands: bool) -> Costs:
    """What the chosen way to place it costs."""
    preset, facts, on_host = worker.preset, worker.facts, worker.on_host
    assert facts is not None
    forked = world.launcher.forks(program_of(preset, str(worker)))
    key = _key(worker, world, forked=forked)
    seconds = world.calibration.load_seconds(key) or 0.0
    static = estimates.estimate(
        facts,
        preset,
        layers=worker.choice.layers,
        on_host=on_host,
        threads=threads(preset, on_host=on_host),
        forked=forked,
    )
    if static.source == "preset":  # holds for whatever is started
        return Costs(static, True, key, seconds)
    known = world.calibration.learned(key) or world.calibration.exact(key)
    if known is not None and len(known.shards) == worker.choice.shards:
        return Costs(replace(known, layers=worker.choice.layers), True, key, seconds, forked)
    return Costs(static, stands or static.sure, key, seconds, forked)


def in_order(preset: Preset, readings: Sequence[Reading], devices: frozenset[DeviceId]) -> list[DeviceId]:
    """The devices as its preset's lists count them: as `device` names them, else as the driver does."""
    if not preset.device:
        return sorted(devices)
    by_name = {str(reading.id): reading.id for reading in readings}
    by_name |= {reading.uuid: reading.id for reading in readings if reading.uuid}
    return list(dict.fromkeys(by_name[name] for name in preset.device if name in by_name))


def _key(worker: Worker, world: World, *, forked: bool) -> str:
    """Of what is learned about this worker, were it forked or executed."""
    assert worker.facts is not None
    on_host = all(device.index == HOST for device in worker.devices)
    names = {reading.id: reading.name for reading in world.launcher.readings()}
    kinds = ["cpu"] if on_host else kinds_of(worker.choice, names)
    return calibration.key(worker.facts, worker.preset, kinds, forked=forked)


def kinds_of(choice: split.Choice, names: Mapping[DeviceId, str]) -> list[str]:
    """What kinds of accelerator a figure for such a placement holds for, and how many layers each has."""
    name = names.get(min(choice.devices), "")
    return [f"{name}, {count} layers" for count in choice.layers] or [name]


def program_of(preset: Preset, worker: str) -> Program:
    """How a process of `worker` is run."""
    return Program(
        model=preset.id,
        worker=worker,
        python=preset.python,
        env=preset.env,
        forks=contract.ENGINES[preset.engine].forks,
        start_timeout=preset.start_timeout,
        stop_timeout=preset.stop_timeout,
        stall_timeout=preset.stall_timeout,
    )


def _what_stands(estimate: Estimate) -> str:
    return f"what stands is {estimate.note}" if estimate.note else f"the {estimate.source} one stands"


def _tell_estimate(worker: Worker, world: World) -> None:
    assert worker.costs is not None
    found = worker.costs.estimate
    world.events.append(
        "estimate",
        worker.preset.id,
        worker=worker.id,
        source=found.source,
        weights=list(found.weights),
        context=list(found.context),
        compute=list(found.compute),
        runtime=list(found.runtime),
        host=found.host,
        note=found.note,
    )


def _settle_reservation(worker: Worker) -> None:
    """Once ready, a worker is charged its estimate, or what it measures and may yet take of main memory, whichever is
    more: its pools are allocated, but what a longer prompt computes may still come."""
    later = _later(worker)
    for device, size in worker.occupied.items():
        size += later if device.index == HOST else 0
        worker.reserved[device] = max(worker.reserved.get(device, 0), size)


def _learn_from_load(worker: Worker, world: World) -> None:
    """Replace a static estimate for next time: weights and pools are in what a ready worker measures, so that only
    what its largest step computes is still to come."""
    costs = worker.costs
    if costs is None or costs.estimate.source not in ("static", "weights"):
        return
    at_ready, host = _peaks(worker)
    if all(at_ready):
        shards = [size + step for size, step in zip(at_ready, costs.estimate.compute, strict=True)]
        world.calibration.record(costs.key, costs.estimate, shards, host)


def _learn(worker: Worker, world: World) -> None:
    """Keep what a worker has measured, if that says more than its estimate did.

    A worker that has seen no prompt of a whole prefill chunk has not been at its peak: of such a one only a figure
    above the estimate is worth keeping.
    """
    costs = worker.costs
    if costs is None or costs.estimate.source == "preset" or not worker.place:
        return
    shards, host = _peaks(worker)
    seen_whole = worker.longest_prompt >= worker.preset.chunk
    if all(shards) and (seen_whole or any(a > b for a, b in zip(shards, costs.estimate.shards, strict=False))):
        world.calibration.record(costs.key, costs.estimate, shards, host)


def _later(worker: Worker) -> int:
    """Bytes of main memory that it does not take yet, and may at any time."""
    if worker.pulse is not None:
        return worker.pulse.later
    return worker.process.ready.later if worker.process is not None else 0


def _peaks(worker: Worker) -> tuple[tuple[int, ...], int]:
    """Peak bytes by shard (0: not measured), and of main memory beside them, with what it may yet take of that."""
    assert worker.costs is not None
    main, later = DeviceId(worker.place[0].node, HOST), _later(worker)
    shards = tuple(worker.measured.get(device, 0) for device in worker.place)
    if main in worker.place:  # it is the only shard
        return tuple(size and size + later for size in shards), 0
    beside = worker.costs.estimate.host
    measured = worker.measured.get(main, 0)
    return shards, measured + later if beside and measured else beside


def _estimated(worker: Worker) -> dict[DeviceId, int]:
    """Estimated bytes by device of the place taken."""
    if worker.costs is None:
        return {}
    found = dict(zip(worker.place, worker.costs.estimate.shards, strict=False))
    host = DeviceId(worker.place[0].node, HOST) if worker.place else None
    if host is not None and host not in found and worker.costs.estimate.host:
        found[host] = worker.costs.estimate.host
    return found


estimated = _estimated


def place_bytes(worker: Worker) -> dict[DeviceId, int]:
    """What a worker that starts may take, in the order of shards, main memory last, for the launcher."""
    return _estimated(worker)


def _by_name(sizes: Bytes) -> dict[str, int]:
    return {str(device): size for device, size in sizes.items()}


def threads(preset: Preset, *, on_host: bool) -> int:
    """torch threads of the preset's worker; half the cores on main memory, so that two workers do not fight."""
    return preset.threads or (max(1, (os.cpu_count() or 2) // 2) if on_host else 1)


def options(worker: Worker, kind: Any, **fields: Any) -> Any:
    """A command of `kind` (contract.Estimate or contract.Serve) with the model's options."""
    assert worker.facts is not None
    on_host = all(device.index == HOST for device in worker.devices)
    return model_options(
        kind,
        worker.preset,
        worker.facts,
        worker.snapshot,
        on_host=on_host,
        layers=worker.choice.layers,
        **fields,
    )


def model_options(
    kind: Any,
    preset: Preset,
    facts: Checkpoint,
    snapshot: str,
    *,
    on_host: bool,
    layers: tuple[int, ...] = (),
    **fields: Any,
) -> Any:
    """A command of `kind` for a model that nobody runs yet; `layers`: of each device, if there are several."""
    return kind(
        snapshot=snapshot,
        tokenizer=preset.tokenizer,
        task=preset.task,
        devices=("cpu",) if on_host else tuple(f"cuda:{shard}" for shard in range(len(layers) or 1)),
        layers=tuple(map(str, layers)),
        dtype=preset.dtype,
        quantization=preset.quantization,
        load_format=preset.load_format,
        trust_remote_code=preset.trust_remote_code,
        config_override=preset.config_override,
        attention=preset.attention,
        enforce_eager=preset.enforce_eager,
        ctx_size=estimates.effective_ctx(facts, preset),
        parallel=preset.parallel,
        kv_tokens=preset.kv_tokens,
        prefill_chunk=preset.chunk,
        limit_images=preset.limit_images,
        max_loras=preset.adapter_slots,
        max_lora_rank=preset.max_lora_rank,
        threads=threads(preset, on_host=on_host),
        **fields,
    )


def _serve_fields(worker: Worker, world: World) -> dict[str, Any]:
    preset = worker.preset
    if preset.adapter_slots and not worker.standing.is_taken:  # a standby was told before
        worker.told = preset.adapters, preset.default_lora
    return {
        "name": preset.id,
        **(_place_fields(worker) if worker.place else {}),
        "prefix_caching": preset.prefix_caching,
        "adapters": contract.encode_adapters(world.files.adapters(preset)) if preset.adapter_slots else "",
        "default_adapter": preset.default_lora if preset.adapter_slots else "",
        "max_cpu_loras": preset.max_cpu_loras,
        "max_input_tokens": preset.max_input_tokens,
        "n_predict": preset.n_predict,
        "queue_size": preset.queue_size,
        "max_logprobs": preset.max_logprobs,
        "seed": preset.seed,
        "sampling": json.dumps(dict(preset.sampling)) if preset.sampling else "",
        "pooling": preset.pooling,
        "embd_normalize": preset.embd_normalize,
        "chat_template": preset.chat_template,
        "chat_template_kwargs": preset.chat_template_kwargs,
        "strict_fields": preset.strict_fields,
    }


def _place_fields(worker: Worker) -> dict[str, Any]:
    """What is known once there is room."""
    names = ["cpu"] if worker.place[0].index == HOST else [f"cuda:{shard}" for shard in range(len(worker.place))]
    shares = _estimated(worker)
    reserved = {name: shares[device] for name, device in zip(names, worker.place, strict=True)}
    return {"devices": tuple(names), "reserved": json.dumps(reserved)}


__all__ = ["FETCHED", "Again", "Costs", "Files", "Worker", "World", "live", "lost_error", "take", "weigh"]

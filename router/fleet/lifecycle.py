"""A worker's life: one coroutine; it acts on what the fleet has recorded.

    download, if files are missing > estimate > wait for room > serve > ready, until lost or retired > drain > stop

Law: a life goes forwards only and ends once, with its outcome given to everybody who waits for it. Whatever can fail
without a device comes before anybody is evicted.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

from router.errors import ApiError, Draining, Internal, LoadBackoff, LoadFailed, Stalled, WorkerCrashed
from router.fleet.backoff import Failure
from router.fleet.interfaces import World
from router.fleet.load_cost import key_of, refine, tell_estimate, trace_unknown, weigh
from router.fleet.measurements import learn, learn_at_peak, settle_reservation
from router.fleet.state import State, advance
from router.fleet.worker import Worker, tell
from router.fleet.worker_argv import options, place_bytes, program_of, serve_fields
from router.launch.interface import Listen, NotForked, NotHeld, Program, Standby, WorkerLost, WorkerProcess
from router.memory.checkpoint_facts import EstimateError
from router.planner.ledger import HOST, LOCAL, DeviceId
from router.planner.types import Start
from worker.protocol.argv import Serve
from worker.protocol.events import Event, Progress, Pulse, Request
from worker.protocol.exits import Exit

log = logging.getLogger("router.fleet.lifecycle")

PROGRESS_INTERVAL = 0.1
"""Seconds between two events about the progress of one load."""
FETCHED = "downloaded"
"""Why a life ended that was only to bring the files."""
CUT_GRACE = 1.0
"""Seconds that requests get to read what has arrived, or to write their error frames, before connections close."""


class Again(Exception):
    """Told to those who wait: this life is over, but another one may be tried at once."""


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
    except EstimateError as unknown:
        if _forsakes(worker, world, unknown.message):
            worker.reason = "abandoned"
            return end(worker, world, Again())
        worker.reason = "load_failed"
        worker.lost = WorkerLost(unknown.message, cause="load_failed", exit=Exit.UNUSABLE)
        error = LoadFailed.of(worker.preset.id, unknown.message)
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
    await trace_unknown(worker, world, program)
    assert worker.costs is not None
    program = replace(program, must_fork=worker.costs.forked)
    if worker.state is State.DOWNLOADING:
        worker.progress = None
        _enter(worker, world, State.QUEUED)
    tell_estimate(worker, world)
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
        command = replace(options(worker, Serve, listen="unix:"), **serve_fields(worker, world))
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
        options(worker, Serve, listen="unix:"), **serve_fields(worker, world)
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
        worker.costs = replace(worker.costs, key=key_of(worker, world, forked=process.forked), forked=process.forked)
    settle_reservation(worker)
    world.calibration.record_load(worker.costs.key, worker.load_seconds)
    learn(worker, world)
    worker.last_used = worker.ready_at = world.now()
    worker.residency_ends = worker.last_used + world.min_residency(worker.preset)
    _enter(worker, world, State.READY)
    worker.ready.set_result(process)
    world.changed()
    try:
        await _until_over(worker, world, process)
    finally:
        _enter(worker, world, State.STOPPING)
        worker.ended.set()
        settle_reservation(worker)
        learn(worker, world)
        world.changed()
        if worker.lost is not None:
            await _requests_end(worker)


async def _room(worker: Worker, world: World, program: Program) -> Start:
    """Returns once the fleet has reserved a place; works out the exact costs when the planner asks for them."""
    while not worker.room.done():
        await _until_room(worker, worker.refine.wait())
        if not worker.room.done():
            await _until_room(worker, refine(worker, world, program))
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


async def _until_over(worker: Worker, world: World, process: WorkerProcess) -> None:
    """Returns once the worker is retired and drained; raises WorkerLost as soon as it is lost."""
    lost = asyncio.ensure_future(process.lost())
    over = asyncio.ensure_future(_retired_and_drained(worker, world))
    unreachable = asyncio.ensure_future(process.unreachable())
    try:
        await asyncio.wait({lost, over, unreachable}, return_when=asyncio.FIRST_COMPLETED)
        if not (lost.done() or over.done()):
            world.replace(worker)
            await asyncio.wait({lost, over}, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            if worker.reason == "shutdown":
                return  # in a hurry everybody is killed
            worker.lost = lost.result()
            worker.reason = worker.lost.cause
            raise worker.lost
        over.result()
    finally:
        for task in (lost, over, unreachable):
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
    if worker.ready_at is not None or not (lost.final or lost.exit == Exit.DAMAGED):
        return False
    return _forsakes(worker, world, lost.message)


def _forsakes(worker: Worker, world: World, why: str) -> bool:
    """Whether what could not be used is a converted snapshot: it is not used again."""
    if not world.files.give_up_converted(worker.snapshot):
        return False
    log.warning("%s: its converted snapshot cannot be used (%s); it is loaded as it came", worker, why)
    return True


def _after_loss(worker: Worker, world: World, lost: WorkerLost) -> ApiError | Again:
    """What those hear who still wait for a worker that never became ready."""
    name = worker.preset.id
    if lost.memory and worker.costs is not None:
        raised = world.calibration.record_out_of_memory(worker.costs.key, worker.costs.estimate, lost.memory)
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
        return LoadFailed.of(name, lost.message)
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


def _listener(worker: Worker, world: World) -> Listen:
    """Keeps what a worker's events say where fleet and faces look for it."""

    def listen(event: Event) -> None:
        if type(event) is Request:
            _hear_request(worker, world, event)
            return
        match event:
            case Progress() if worker.state is not State.QUEUED:  # it waits for room, whatever its standby does
                worker.stages.hear(event.stage, event.done, event.total, world.now())
                if _is_news(worker, event, world.now()):
                    told = {**worker.stages.told(), **({"beside": True} if worker.beside else {})}
                    if event.files:
                        told["files"] = event.files
                    world.events.append("progress", worker.preset.id, worker=worker.id, **told)
                worker.progress = event
            case Pulse():
                worker.pulse = event
                if worker.state is State.READY:
                    settle_reservation(worker)
                    learn_at_peak(worker, world)

    return listen


def _hear_request(worker: Worker, world: World, event: Request) -> None:
    worker.answered = worker.answered or event.outcome == "ok"
    worker.first_token = worker.first_token or event.ttft
    if event.keep_alive is not None and event.keep_alive != worker.keep_alive:
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


def _is_news(worker: Worker, event: Progress, now: float) -> bool:
    """Whether progress is worth an event: a new stage, a stage's end, or a while after the last one."""
    before = worker.progress
    if before is not None and before.stage == event.stage:
        ends = before.done < event.done == event.total
        if not ends and now - worker.progress_told < PROGRESS_INTERVAL:
            return False
    worker.progress_told = now
    return True


__all__ = ["FETCHED", "Again", "end", "live", "lost_error", "take"]

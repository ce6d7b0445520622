"""The worker lifecycle: one coroutine per worker, which carries out what the fleet has recorded.

    download and convert, if files are missing > estimate > wait for memory > start > ready, until lost or retired
    > drain > stop

A lifecycle ends once, and its outcome is the result of all leases that wait for it. Steps that can fail without a
device come before any eviction.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

from router.errors import ApiError, Draining, Internal, LoadBackoff, LoadFailed, Stalled, WorkerCrashed
from router.fleet.early_start import Phase
from router.fleet.failures import Failure
from router.fleet.interfaces import World
from router.fleet.load_cost import append_estimate, key_of, refine, trace_unknown, weigh
from router.fleet.measurements import learn, learn_at_peak, settle_reservation
from router.fleet.worker import State, Worker, advance, append_state
from router.fleet.worker_argv import options, place_bytes, program_of, serve_fields
from router.launch.interface import EarlyProcess, Listen, NotForked, NotLocked, Program, WorkerLost, WorkerProcess
from router.memory.checkpoint_facts import EstimateError
from router.planner.ledger import HOST, LOCAL, DeviceId
from router.planner.types import Start
from worker.protocol.argv import Serve
from worker.protocol.events import Event, Exit, Progress, Pulse, RequestEnded

log = logging.getLogger("router.fleet.lifecycle")

PROGRESS_INTERVAL = 0.1
"""Seconds between two `progress` events of one load."""
FETCHED = "downloaded"
"""The `reason` of a worker that was started only to download files."""
CUT_GRACE = 1.0
"""Seconds for requests to forward the last bytes or write an error frame before connections close. A guess."""


class NextWorker(Exception):
    """This worker has ended, and its leases move to the model's next worker."""


async def run(worker: Worker, world: World) -> None:
    """Run one worker to its end. A worker that is not ready yet is retired by cancelling this."""
    error: ApiError | NextWorker | None = None
    try:
        await _run(worker, world)
    except asyncio.CancelledError:
        pass  # retired; `end` makes the error of its leases
    except WorkerLost as lost:
        if _converted_copy_failed(worker, world, lost):
            worker.reason, error = "abandoned", NextWorker()
        else:
            worker.lost, worker.reason = lost, lost.cause
            error = _error_after_loss(worker, world, lost)
    except NotForked as refused:
        log.warning("%s: %s; it is started again with the reservation of an executed worker", worker, refused)
        worker.reason = "abandoned"
        error = NextWorker()
    except EstimateError as unknown:
        if _discard_converted(worker, world, unknown.message):
            worker.reason = "abandoned"
            return end(worker, world, NextWorker())
        worker.reason = "load_failed"
        worker.lost = WorkerLost(unknown.message, cause="load_failed", exit=Exit.UNUSABLE)
        error = LoadFailed.of(worker.preset.id, unknown.message)
    except ApiError as refused:
        worker.reason = worker.reason or refused.reason
        worker.refused = refused if isinstance(refused, LoadFailed) else None
        error = refused
    except Exception as bug:
        log.exception("%s: internal error in its lifecycle", worker)
        worker.reason = "crashed"
        worker.lost = WorkerLost(f"internal error: {type(bug).__name__}", cause="crashed")
        error = Internal(f"{worker.preset.id}: internal error of the router; see its log")
    end(worker, world, error)


def end(worker: Worker, world: World, error: "ApiError | NextWorker | None") -> None:
    """Record the end of a worker, then give its leases the outcome. `error` is None for a retired worker."""
    _enter(worker, world, State.STOPPED)
    worker.ended.set()
    worker.reserved = {}
    failure = world.over(worker)
    if isinstance(error, LoadBackoff) and failure is not None:
        error = _with_retry_time(error, failure, world.now())
    if not worker.ready.done():
        worker.ready.set_exception(error or _error_of_retirement(worker))
    worker.considered.set()
    worker.stopped.set()
    world.changed()


def _with_retry_time(error: LoadBackoff, failure: Failure, now: float) -> ApiError:
    """Return `error` with the time of the next attempt; a LoadFailed if there is none."""
    if failure.final:
        return LoadFailed(error.message)
    return LoadBackoff(error.message, retry_after=failure.until - now)


def _error_of_retirement(worker: Worker) -> "ApiError | NextWorker":
    """Return the error of leases that wait for a worker which was retired before it was ready."""
    if worker.reason == "config_changed":
        return NextWorker()  # a worker with the new settings
    return Draining(f"{worker.preset.id} was unloaded while it was loading; try again", retry_after=1)


async def _run(worker: Worker, world: World) -> None:
    preset, program = worker.preset, program_of(worker.preset, str(worker))
    if worker.state is State.DOWNLOADING:
        command = world.files.download(preset)
        worker.stages.begin("download", world.now())
        worker.snapshot = await world.launcher.download(program, command, _listener(worker, world))
        world.files.fetched(preset, worker.snapshot)
        await _convert(worker, world, program)
        if worker.fetch_only and not worker.leases:
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
    append_estimate(worker, world)
    world.changed()
    worker.stages.begin("wait", world.now())
    listener = _listener(worker, world)
    async with _starting_early(worker, world, program, listener):
        async with _prefetching(worker, world):
            start = await _room(worker, world, program)
        worker.place = start.place
        began = world.now()
        worker.stages.begin("start", began)
        async with _running(worker, world, program, listener) as process:
            await _serve(worker, world, process, began)


async def _convert(worker: Worker, world: World, program: Program) -> None:
    """Convert a downloaded snapshot if its loads would otherwise convert it each time. Append a `converted` event.

    A failed conversion does not fail the load: the snapshot is loaded as it is.
    """
    command = await world.files.conversion(worker.preset, worker.snapshot)
    if command is None:
        return
    began = world.now()
    worker.stages.begin("convert", began)
    facts: dict[str, Any] = {}
    try:
        converted = await world.launcher.convert(program, command, _listener(worker, world))
        facts = {"outcome": "done", "bytes": converted.weights, "tokenizer": converted.tokenizer}
    except WorkerLost as lost:
        if lost.final:  # the same files would fail again
            world.files.give_up_converted(command.target)
        outcome = "disk_full" if lost.exit == Exit.DISK_FULL else "failed"
        facts = {"outcome": outcome, "error": lost.message, "exit_code": lost.exit}
    seconds = round(world.now() - began, 3)
    world.events.append("converted", worker.preset.id, worker=worker.id, seconds=seconds, **facts)


async def _fetch_adapters(worker: Worker, world: World, program: Program) -> None:
    """Download adapters that are missing. A model is served without an adapter that cannot be downloaded."""
    for command in world.files.missing_adapters(worker.preset):
        try:
            await world.launcher.download(program, command, _listener(worker, world))
        except WorkerLost as lost:
            log.warning("%s: adapter %s cannot be downloaded: %s", worker, command.repo, lost.message)


@contextlib.asynccontextmanager
async def _prefetching(worker: Worker, world: World) -> AsyncIterator[None]:
    """Read the worker's files into the page cache during the block, once the fleet sets `worker.prefetch`."""

    async def prefetch() -> None:
        await worker.prefetch.wait()
        began = world.now()
        try:
            size = await world.launcher.read_ahead(tuple(world.files.weights(worker.snapshot)))
        except NotLocked as failed:
            log.warning("%s: prefetch of its files failed: %s", worker, failed)
            return
        seconds = round(world.now() - began, 3)
        world.events.append("read_ahead", worker.preset.id, worker=worker.id, bytes=size, seconds=seconds)

    task = asyncio.ensure_future(prefetch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def take_place(worker: Worker) -> None:
    """Add the memory of an early start to the worker's reservation, which the fleet has just made.

    The claim of the place lacks that memory, because it was subtracted from the demand. A process that must exit is not
    taken over, and its memory stays reserved beside the worker's until it has exited.
    """
    early, host = worker.early, DeviceId(LOCAL, HOST)
    if early.held:
        worker.reserved[host] = worker.reserved.get(host, 0) + early.held
        if early.is_charged:
            early.held = 0
            early.advance(Phase.TAKEN)


@contextlib.asynccontextmanager
async def _starting_early(worker: Worker, world: World, program: Program, listener: Listen) -> AsyncIterator[None]:
    """Allow an early start during the block. On exit, wait until its process is reaped."""
    task = asyncio.ensure_future(_start_early(worker, world, program, listener))
    try:
        yield
    finally:
        worker.early.advance(Phase.ENDING)
        world.changed()
        while not task.done():
            # The worker is ending already, so a further cancellation asks for nothing new.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        task.result()


async def _start_early(worker: Worker, world: World, program: Program, listener: Listen) -> None:
    """Spawn the worker's process once the fleet has reserved its memory; keep it until the phase is ENDING.

    A process that is lost before the worker has its place does not end the worker, unless the error is final.
    """
    early = worker.early
    try:
        await early.reached(Phase.RESERVED)
        if early.phase >= Phase.ENDING:
            return
        command = replace(options(worker, Serve, listen="unix:"), **serve_fields(worker, world))
        async with world.launcher.prepare(program, command, listener) as process:
            early.spawned(process)
            await _until_ending(worker, world, process)
    except WorkerLost as lost:
        if worker.room.done():
            return  # `go` raises it, too
        if lost.final:
            worker.room.set_exception(lost)
        else:
            log.warning("%s: its early start failed (%s); it starts when its memory is free", worker, lost.message)
    except NotForked:
        pass  # raised again at the normal start, which then reserves the memory of an executed worker
    finally:
        early.advance(Phase.ENDING)
        held, early.held = early.held, 0
        _release_early_memory(worker, held)
        early.advance(Phase.ENDED)
        world.changed()


async def _until_ending(worker: Worker, world: World, process: EarlyProcess) -> None:
    """Return once the phase is ENDING. Raises WorkerLost if the process is lost before the worker has its place."""
    early = worker.early
    ending = asyncio.ensure_future(early.reached(Phase.ENDING))
    prepared = asyncio.ensure_future(process.prepared())
    lost = asyncio.ensure_future(process.lost())
    try:
        await asyncio.wait({ending, prepared}, return_when=asyncio.FIRST_COMPLETED)
        if prepared.done() and not ending.done():
            prepared.result()
            await world.launcher.refresh()  # the driver's reading must contain what is counted as measured from here on
            _reserve_measured(worker, process)
            world.changed()
        await asyncio.wait({ending, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done() and not worker.room.done():
            raise lost.result()
        await asyncio.wait({ending})
    finally:
        for task in (ending, prepared, lost):
            task.cancel()
        await asyncio.gather(ending, prepared, lost, return_exceptions=True)


def _reserve_measured(worker: Worker, process: EarlyProcess) -> None:
    """Lower the reservation of a prepared process to its measured memory; end it if it measures more."""
    early = worker.early
    if worker.room.done() or not early.is_charged:
        return
    host = DeviceId(LOCAL, HOST)
    measured = process.measured.get(host, 0)
    if not 0 < measured <= early.held:
        log.warning(
            "%s: its early start is ended: it measures %d MiB, %d MiB are reserved",
            worker, measured >> 20, early.held >> 20,
        )  # fmt: skip
        early.advance(Phase.ENDING)
        return
    worker.reserved[host] = measured
    early.prepared(measured)


def _release_early_memory(worker: Worker, held: int) -> None:
    """Take the `held` bytes of an ended early start off the worker's reservation."""
    host = DeviceId(LOCAL, HOST)
    if held and host in worker.reserved and worker.state < State.STOPPING:
        worker.reserved[host] -= held
        if not worker.reserved[host]:
            del worker.reserved[host]


@contextlib.asynccontextmanager
async def _running(worker: Worker, world: World, program: Program, listener: Listen) -> AsyncIterator[WorkerProcess]:
    """Yield the worker's ready process: the one that started early if there is one, else a new one."""
    # The launcher fills in devices, socket and leash.
    command = replace(options(worker, Serve, listen="unix:"), **serve_fields(worker, world))
    process = await worker.early.taken_process()
    if process is not None:
        yield await process.go(command, place_bytes(worker))
        return
    worker.early.advance(Phase.ENDING)
    await worker.early.reached(Phase.ENDED)  # two processes of one worker never run at once
    async with world.launcher.serve(program, command, place_bytes(worker), listener) as worker_process:
        yield worker_process


async def _serve(worker: Worker, world: World, process: WorkerProcess, began: float) -> None:
    """Enter READY; return once the worker is retired and drained. Raises WorkerLost."""
    worker.process = process
    worker.load_seconds = world.now() - began
    worker.stages.end(world.now())
    await world.launcher.refresh()  # readings must be as new as what READY subtracts from them
    assert worker.costs is not None
    if process.forked != worker.costs.forked:  # learned estimates are kept apart for forked and executed workers
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
    """Wait until the fleet has reserved a place. Make the exact estimate when the planner wants it."""
    while not worker.room.done():
        await _until_room(worker, worker.refine.wait())
        if not worker.room.done():
            await _until_room(worker, refine(worker, world, program))
            worker.refine.clear()
            world.changed()
    return worker.room.result()


async def _until_room(worker: Worker, work: Coroutine[Any, Any, object]) -> None:
    """Run `work`; cancel it when the place is reserved. Raises its exceptions."""
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
    """Wait until the worker is retired and drained. Raises WorkerLost as soon as its process is lost."""
    lost = asyncio.ensure_future(process.lost())
    over = asyncio.ensure_future(_drain(worker, world))
    unreachable = asyncio.ensure_future(process.unreachable())
    try:
        await asyncio.wait({lost, over, unreachable}, return_when=asyncio.FIRST_COMPLETED)
        if not (lost.done() or over.done()):
            world.replace(worker)
            await asyncio.wait({lost, over}, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            if worker.reason == "shutdown":
                return  # a second signal kills all workers
            worker.lost = lost.result()
            worker.reason = worker.lost.cause
            raise worker.lost
        over.result()
    finally:
        for task in (lost, over, unreachable):
            task.cancel()


async def _drain(worker: Worker, world: World) -> None:
    await worker.retired.wait()
    while worker.leases:
        worker.leases_changed.clear()
        left = None if worker.deadline is None else worker.deadline - world.now()
        if left is not None and left <= 0:
            worker.cut(Draining(f"{worker.preset.id} is being unloaded; the answer was cut", retry_after=1))
            await _leases_back(worker)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await worker.leases_changed.wait()


async def _requests_end(worker: Worker) -> None:
    """Wait, for a bounded time, until the requests of a lost worker have read its last bytes and ended.

    Connections are closed only then: a reader cannot tell a connection that we closed from a silent worker.
    """
    await _leases_back(worker)
    worker.cut(lost_error(worker))
    await _leases_back(worker)


async def _leases_back(worker: Worker) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CUT_GRACE):
            while worker.leases:
                worker.leases_changed.clear()
                await worker.leases_changed.wait()


def _converted_copy_failed(worker: Worker, world: World, lost: WorkerLost) -> bool:
    """The worker could not load a converted snapshot. Discard it, so that the next worker loads the original."""
    if worker.ready_at is not None or not (lost.final or lost.exit == Exit.DAMAGED):
        return False
    return _discard_converted(worker, world, lost.message)


def _discard_converted(worker: Worker, world: World, why: str) -> bool:
    """Stop using the worker's snapshot if it is a converted one; return whether it is."""
    if not world.files.give_up_converted(worker.snapshot):
        return False
    log.warning("%s: its converted snapshot cannot be used (%s); the original is loaded", worker, why)
    return True


def _error_after_loss(worker: Worker, world: World, lost: WorkerLost) -> ApiError | NextWorker:
    """Return the error of leases that wait for a lost worker."""
    name = worker.preset.id
    if lost.memory and worker.costs is not None:
        raised = world.calibration.record_out_of_memory(worker.costs.key, worker.costs.estimate, lost.memory)
        when = "while loading" if worker.ready_at is None else "in service"
        log.warning("%s ran out of %s memory %s; its estimate is raised", worker, lost.memory, when)
        if worker.attempt == 0:
            return NextWorker()
        needs = sum(raised.shards)
        return LoadBackoff(
            f"{name} ran out of {lost.memory} memory while loading, twice; it is now expected to need "
            f"{needs / 2**20:.0f} MiB. Lower ctx-size or parallel, or free memory: {lost.message}",
            retry_after=1,
        )
    if lost.final:
        return LoadFailed.of(name, lost.message)
    if lost.from_outside and worker.attempt == 0 and worker.ready_at is None:
        log.warning("%s: %s; its requests wait for another worker", worker, lost.message)
        return NextWorker()
    return LoadBackoff(f"{name} failed to load: {lost.message}", retry_after=1)


def lost_error(worker: Worker) -> ApiError:
    """Return the error of a request whose worker was lost while it ran."""
    lost, name = worker.lost, worker.preset.id
    if lost is None:
        return WorkerCrashed(f"{name}: the connection to its worker broke; try again")
    if lost.cause == "stalled":
        return Stalled(f"{name} stopped making progress and was killed: {lost.message}")
    return WorkerCrashed(f"{name}: its worker exited during the response: {lost.message}; try again")


def _enter(worker: Worker, world: World, state: State, **facts: Any) -> None:
    """Record a transition. A state that is reached already stays."""
    if state <= worker.state:
        return
    was, worker.state = worker.state, advance(worker.state, state)
    worker.since = world.now()
    append_state(worker, world.events, was=was, **facts)


def _listener(worker: Worker, world: World) -> Listen:
    """Return a listener that records the events of a worker's process."""

    def listen(event: Event) -> None:
        if type(event) is RequestEnded:
            _request_ended(worker, world, event)
            return
        match event:
            case Progress() if (
                worker.state is not State.QUEUED
            ):  # progress of an early start is not shown: the worker still waits
                worker.stages.update(event.stage, event.done, event.total, world.now())
                if _is_worth_an_event(worker, event, world.now()):
                    data = {**worker.stages.as_dict(), **({"beside": True} if worker.beside else {})}
                    if event.files:
                        data["files"] = event.files
                    world.events.append("progress", worker.preset.id, worker=worker.id, **data)
                worker.progress = event
            case Pulse():
                worker.pulse = event
                if worker.state is State.READY:
                    settle_reservation(worker)
                    learn_at_peak(worker, world)

    return listen


def _request_ended(worker: Worker, world: World, event: RequestEnded) -> None:
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


def _is_worth_an_event(worker: Worker, event: Progress, now: float) -> bool:
    """Decide on an event: for a new stage, the end of a stage, or PROGRESS_INTERVAL after the last event."""
    before = worker.progress
    if before is not None and before.stage == event.stage:
        ends = before.done < event.done == event.total
        if not ends and now - worker.progress_at < PROGRESS_INTERVAL:
            return False
    worker.progress_at = now
    return True


__all__ = ["FETCHED", "NextWorker", "end", "lost_error", "run", "take_place"]

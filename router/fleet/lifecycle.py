"""The worker lifecycle: one coroutine per worker, which carries out what the fleet has recorded.

    download and convert, if files are missing > estimate > wait for memory > start > ready, until lost or retired
    > drain > stop

A lifecycle ends once, and its outcome is the result of all leases that wait for it. Steps that can fail without a
device come before any eviction.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from router.errors import ApiError, DoesNotFit, Draining, Internal, LoadBackoff, LoadFailed
from router.fleet.early_start import Phase
from router.fleet.failures import NextWorker, error_after_loss, error_of_retirement, lost_error, with_retry_time
from router.fleet.load_cost import (
    append_estimate,
    estimate_costs,
    learn,
    record_load,
    refine,
    settle_reservation,
    trace_unknown,
)
from router.fleet.worker import State, Worker, enter, estimated
from router.fleet.worker_argv import options, program_of, serve_fields
from router.launch.interface import EarlyProcess, Listen, NotLocked, NotStarted, Program, WorkerLost, WorkerProcess
from router.launch.process import tasks_of
from router.memory.checkpoint_facts import EstimateError
from router.planner.ledger import MAIN_MEMORY
from router.planner.types import Start
from worker.protocol.argv import Serve
from worker.protocol.events import Event, Exit, MemoryNeed, Progress, Pulse, RequestEnded

if TYPE_CHECKING:  # it imports this module
    from router.fleet.fleet import Fleet

log = logging.getLogger("router.fleet.lifecycle")

FETCHED = "downloaded"  # the `reason` of a worker that was started only to download files
CUT_GRACE = 1.0  # seconds for requests to forward the last bytes or write an error before connections close; a guess


async def run(worker: Worker, fleet: Fleet) -> None:
    """Run one worker to its end. A worker that is not ready yet is retired by cancelling this."""
    error: ApiError | NextWorker | None = None
    try:
        await _run(worker, fleet)
    except asyncio.CancelledError:
        pass  # retired; `end` makes the error of its leases
    except WorkerLost as lost:
        if _converted_copy_failed(worker, fleet, lost):
            worker.reason, error = "abandoned", NextWorker()
        else:
            worker.lost, worker.reason = lost, lost.cause
            error = error_after_loss(worker, fleet, lost)
    except NotStarted as refused:
        log.warning("%s: %s; it is planned again", worker, refused)
        worker.reason = "abandoned"
        error = NextWorker()
    except EstimateError as unknown:
        if _discard_converted(worker, fleet, unknown.message):
            worker.reason = "abandoned"
            return end(worker, fleet, NextWorker())
        worker.reason = "load_failed"
        worker.lost = WorkerLost(unknown.message, cause="load_failed", exit=Exit.UNUSABLE)
        error = LoadFailed.of(worker.preset.id, unknown.message)
    except ApiError as refused:
        worker.reason = worker.reason or refused.reason
        # The planner's refusal is that of a place; a refusal before the first plan is a fault of the preset.
        is_of_place = worker.queue.granted.done()
        if isinstance(refused, LoadFailed) or (isinstance(refused, DoesNotFit) and not is_of_place):
            worker.refused = refused
        error = refused
    except Exception as bug:
        log.exception("%s: internal error in its lifecycle", worker)
        worker.reason = "crashed"
        worker.lost = WorkerLost(f"internal error: {type(bug).__name__}", cause="crashed")
        error = Internal(f"{worker.preset.id}: internal error of the router; see its log")
    end(worker, fleet, error)


def end(worker: Worker, fleet: Fleet, error: ApiError | NextWorker | None) -> None:
    """Record the end of a worker, then give its leases the outcome. `error` is None for a retired worker."""
    enter(worker, State.STOPPED, fleet.events, fleet.now())
    worker.ended.set()
    worker.reserved = {}
    failure = fleet.record_end(worker)
    if isinstance(error, LoadBackoff) and failure is not None:
        error = with_retry_time(error, failure, fleet.now())
    if not worker.ready.done():
        worker.ready.set_exception(error or error_of_retirement(worker))
    worker.queue.considered.set()
    worker.stopped.set()
    fleet.scheduler.plan_soon()


async def _run(worker: Worker, fleet: Fleet) -> None:
    preset, program = worker.preset, program_of(worker.preset, str(worker))
    if worker.state is State.DOWNLOADING:
        worker.snapshot = fleet.usable_snapshot(worker.model) or ""
        if not worker.snapshot:
            command = fleet.files.download(preset)
            worker.load.begin("download", fleet.now())
            worker.snapshot = await fleet.launcher.download(program, command, _listener(worker, fleet))
            fleet.files.fetched(preset, worker.snapshot)
        await _convert(worker, fleet, program)
        if worker.fetch_only and not worker.leases:
            worker.reason = FETCHED
            return
    else:
        worker.snapshot = fleet.files.find(preset) or ""
    worker.snapshot = fleet.files.loads_from(preset, worker.snapshot)
    await _fetch_adapters(worker, fleet, program)
    draft = fleet.files.missing_draft(preset)
    if draft is not None:  # unlike an adapter, it is part of the estimate: without it the load fails
        await fleet.launcher.download(program, draft, _listener(worker, fleet))
    # A worker that starts before would be executed: it would take some hundred MiB more, and keep a smaller KV cache.
    await fleet.launcher.will_fork(program)
    await estimate_costs(worker, fleet)
    await trace_unknown(worker, fleet, program)
    assert worker.costs is not None
    program = replace(program, must_fork=worker.costs.forked)
    if worker.state is State.DOWNLOADING:
        worker.load.latest = None
        enter(worker, State.QUEUED, fleet.events, fleet.now())
    append_estimate(worker, fleet)
    fleet.scheduler.plan_soon()
    worker.load.begin("wait", fleet.now())
    listener = _listener(worker, fleet)
    async with _starting_early(worker, fleet, program, listener):
        async with _prefetching(worker, fleet):
            start = await _wait_for_place(worker, fleet, program)
        worker.place = start.place
        began = fleet.now()
        worker.load.begin("start", began)
        async with _running(worker, fleet, program, listener) as process:
            await _serve(worker, fleet, process, began)


async def _convert(worker: Worker, fleet: Fleet, program: Program) -> None:
    """Convert a downloaded snapshot if its loads would otherwise convert it each time. Append a `converted` event.

    A failed conversion does not fail the load: the snapshot is loaded as it is. Pickled weights cannot be, so their
    conversion raises WorkerLost.
    """
    command = await fleet.files.conversion(worker.preset, worker.snapshot)
    if command is None:
        return
    began = fleet.now()
    worker.load.begin("convert", began)
    lost = None
    try:
        converted = await fleet.launcher.convert(program, command, _listener(worker, fleet))
        facts = {"outcome": "done", "bytes": converted.weights}
    except WorkerLost as error:
        lost = error
        outcome = "disk_full" if lost.exit == Exit.DISK_FULL else "failed"
        facts = {"outcome": outcome, "error": lost.message, "exit_code": lost.exit}
    seconds = round(fleet.now() - began, 3)
    fleet.events.append("converted", worker.preset.id, worker=worker.id, seconds=seconds, **facts)
    if lost is not None and fleet.files.must_convert(worker.preset, worker.snapshot):
        raise lost
    if lost is not None and lost.final:  # the same files would fail again
        fleet.files.give_up_converted(command.target)


async def _fetch_adapters(worker: Worker, fleet: Fleet, program: Program) -> None:
    """Download adapters that are missing. A model is served without an adapter that cannot be downloaded."""
    for command in fleet.files.missing_adapters(worker.preset):
        try:
            await fleet.launcher.download(program, command, _listener(worker, fleet))
        except WorkerLost as lost:
            log.warning("%s: adapter %s cannot be downloaded: %s", worker, command.repo, lost.message)


@contextlib.asynccontextmanager
async def _prefetching(worker: Worker, fleet: Fleet) -> AsyncIterator[None]:
    """Read the worker's files into the page cache during the block, once the fleet sets `worker.queue.prefetch`."""

    async def prefetch() -> None:
        await worker.queue.prefetch.wait()
        began = fleet.now()
        try:
            size = await fleet.launcher.prefetch(tuple(fleet.files.weights(worker.snapshot)))
        except NotLocked as failed:
            log.warning("%s: prefetch of its files failed: %s", worker, failed)
            return
        seconds = round(fleet.now() - began, 3)
        fleet.events.append("prefetch", worker.preset.id, worker=worker.id, bytes=size, seconds=seconds)

    async with tasks_of(prefetch()):
        yield


@contextlib.asynccontextmanager
async def _starting_early(worker: Worker, fleet: Fleet, program: Program, listener: Listen) -> AsyncIterator[None]:
    """Allow an early start during the block. On exit, wait until its process is reaped."""
    task = asyncio.ensure_future(_start_early(worker, fleet, program, listener))
    try:
        yield
    finally:
        worker.early.advance(Phase.ENDING)
        fleet.scheduler.plan_soon()
        while not task.done():
            # The worker is ending already, so a further cancellation asks for nothing new.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        task.result()


async def _start_early(worker: Worker, fleet: Fleet, program: Program, listener: Listen) -> None:
    """Spawn the worker's process once the fleet has reserved its memory; keep it until the phase is ENDING.

    A process that is lost before the worker has its place does not end the worker, unless the error is final.
    """
    early = worker.early
    try:
        await early.reached(Phase.RESERVED)
        if early.phase >= Phase.ENDING:
            return
        command = replace(options(worker, Serve, listen="unix:"), **serve_fields(worker, fleet))
        async with fleet.launcher.prepare(program, command, listener) as process:
            early.spawned(process)
            await _until_ending(worker, fleet, process)
    except WorkerLost as lost:
        if worker.queue.granted.done():
            return  # `load` raises it, too
        if lost.final:
            worker.queue.granted.set_exception(lost)
        else:
            log.warning("%s: its early start failed (%s); it starts when its memory is free", worker, lost.message)
    except NotStarted:
        pass  # raised again at the normal start, which then reserves the memory of an executed worker
    finally:
        early.advance(Phase.ENDING)
        reserved, early.reserved = early.reserved, 0
        _release_early_memory(worker, reserved)
        early.advance(Phase.ENDED)
        fleet.scheduler.plan_soon()


async def _until_ending(worker: Worker, fleet: Fleet, process: EarlyProcess) -> None:
    """Return once the phase is ENDING. Raises WorkerLost if the process is lost before the worker has its place."""
    early = worker.early
    async with tasks_of(early.reached(Phase.ENDING), process.prepared(), process.lost()) as (ending, prepared, lost):
        await asyncio.wait({ending, prepared}, return_when=asyncio.FIRST_COMPLETED)
        if prepared.done() and not ending.done():
            prepared.result()
            await fleet.launcher.refresh()  # the driver's reading must contain what is counted as measured from here on
            _reserve_measured(worker, process)
            fleet.scheduler.plan_soon()
        await asyncio.wait({ending, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done() and not worker.queue.granted.done():
            raise lost.result()
        await asyncio.wait({ending})


def _reserve_measured(worker: Worker, process: EarlyProcess) -> None:
    """Lower the reservation of a prepared process to its measured memory; end it if it measures more."""
    early = worker.early
    if worker.queue.granted.done() or not early.is_charged:
        return
    measured = process.measured.get(MAIN_MEMORY, 0)
    if not 0 < measured <= early.reserved:
        log.warning(
            "%s: its early start is ended: it measures %d MiB, %d MiB are reserved",
            worker, measured >> 20, early.reserved >> 20,
        )  # fmt: skip
        early.advance(Phase.ENDING)
        return
    worker.reserved[MAIN_MEMORY] = measured
    early.prepared(measured)


def _release_early_memory(worker: Worker, reserved: int) -> None:
    """Take the `reserved` bytes of an ended early start off the worker's reservation."""
    if reserved and MAIN_MEMORY in worker.reserved and worker.state < State.STOPPING:
        worker.reserved[MAIN_MEMORY] -= reserved
        if not worker.reserved[MAIN_MEMORY]:
            del worker.reserved[MAIN_MEMORY]


@contextlib.asynccontextmanager
async def _running(worker: Worker, fleet: Fleet, program: Program, listener: Listen) -> AsyncIterator[WorkerProcess]:
    """Yield the worker's ready process: the one that started early if there is one, else a new one."""
    # The launcher fills in devices, socket and supervision.
    command = replace(options(worker, Serve, listen="unix:"), **serve_fields(worker, fleet))
    process = await worker.early.taken_process()
    if process is not None:
        yield await process.load(command, estimated(worker))
        return
    worker.early.advance(Phase.ENDING)
    await worker.early.reached(Phase.ENDED)  # two processes of one worker never run at once
    async with fleet.launcher.serve(program, command, estimated(worker), listener) as worker_process:
        yield worker_process


async def _serve(worker: Worker, fleet: Fleet, process: WorkerProcess, began: float) -> None:
    """Enter READY; return once the worker is retired and drained. Raises WorkerLost."""
    worker.process = process
    worker.load_seconds = fleet.now() - began
    worker.load.end(fleet.now())
    await fleet.launcher.refresh()  # readings must be as new as what READY subtracts from them
    record_load(worker, fleet)
    worker.usage.last_used = worker.ready_at = fleet.now()
    worker.usage.residency_ends = worker.ready_at + _min_residency(worker, fleet)
    enter(worker, State.READY, fleet.events, fleet.now())
    worker.ready.set_result(process)
    fleet.scheduler.plan_soon()
    try:
        await _until_drained_or_lost(worker, fleet, process)
    finally:
        enter(worker, State.STOPPING, fleet.events, fleet.now())
        worker.ended.set()
        settle_reservation(worker)
        learn(worker, fleet)
        fleet.scheduler.plan_soon()
        if worker.lost is not None:
            await _wait_for_requests_to_end(worker)


def _min_residency(worker: Worker, fleet: Fleet) -> float:
    """Return the seconds for which the worker keeps its place while it is in use."""
    seconds = worker.preset.min_residency
    return seconds if seconds >= 0 else min(10.0, fleet.settings.swap_patience)


async def _wait_for_place(worker: Worker, fleet: Fleet, program: Program) -> Start:
    """Wait until the fleet has reserved a place. Make the exact estimate when the planner asks for it."""
    while not worker.queue.granted.done():
        await _until_granted(worker, worker.queue.refine.wait())
        if not worker.queue.granted.done():
            await _until_granted(worker, refine(worker, fleet, program))
            worker.queue.refine.clear()
            fleet.scheduler.plan_soon()
    try:
        return worker.queue.granted.result()
    except DoesNotFit:
        # Before the fork server has done its imports, the estimate is that of an executed worker, which takes some
        # hundred MiB more. The refusal would be final for the client and wrong a few seconds later.
        assert worker.costs is not None
        may_need_less = not worker.costs.forked and worker.costs.estimate.source != "preset"
        if not (may_need_less and await fleet.launcher.will_fork(program)):
            raise
    raise NotStarted("an executed worker never fits, and a forked one needs less memory")


async def _until_granted(worker: Worker, work: Coroutine[Any, Any, object]) -> None:
    """Run `work`; cancel it when the place is reserved. Raises its exceptions."""
    async with tasks_of(work) as (task,):
        await asyncio.wait({worker.queue.granted, task}, return_when=asyncio.FIRST_COMPLETED)
    if not task.cancelled():
        task.result()


async def _until_drained_or_lost(worker: Worker, fleet: Fleet, process: WorkerProcess) -> None:
    """Wait until the worker is retired and drained. Raises WorkerLost as soon as its process is lost."""
    async with tasks_of(process.lost(), _drain(worker, fleet), process.unreachable()) as (lost, drained, unreachable):
        await asyncio.wait({lost, drained, unreachable}, return_when=asyncio.FIRST_COMPLETED)
        if not (lost.done() or drained.done()):
            fleet.replace(worker)
            await asyncio.wait({lost, drained}, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            if worker.reason == "shutdown":
                return  # a second signal kills all workers
            worker.lost = lost.result()
            worker.reason = worker.lost.cause
            raise worker.lost
        drained.result()


async def _drain(worker: Worker, fleet: Fleet) -> None:
    await worker.retirement.began.wait()
    while worker.leases:
        worker.leases_changed.clear()
        left = None if worker.retirement.deadline is None else worker.retirement.deadline - fleet.now()
        if left is not None and left <= 0:
            stops = worker.reason == "shutdown"
            cause = "the router is shutting down" if stops else f"{worker.preset.id} is being unloaded"
            worker.abort_leases(Draining(f"{cause}; the answer was cut", retry_after=5 if stops else 1))
            await _wait_for_leases(worker)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await worker.leases_changed.wait()


async def _wait_for_requests_to_end(worker: Worker) -> None:
    """Wait, for a bounded time, until the requests of a lost worker have read its last bytes and ended.

    Connections are closed only then: to a reader, a connection that we closed looks like a silent worker.
    """
    await _wait_for_leases(worker)
    worker.abort_leases(lost_error(worker))
    await _wait_for_leases(worker)


async def _wait_for_leases(worker: Worker) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CUT_GRACE):
            while worker.leases:
                worker.leases_changed.clear()
                await worker.leases_changed.wait()


def _converted_copy_failed(worker: Worker, fleet: Fleet, lost: WorkerLost) -> bool:
    """The worker could not load a converted snapshot. Discard it, so that the next worker loads the original."""
    if worker.ready_at is not None or not (lost.final or lost.exit == Exit.DAMAGED):
        return False
    return _discard_converted(worker, fleet, lost.message)


def _discard_converted(worker: Worker, fleet: Fleet, why: str) -> bool:
    """Stop using the worker's snapshot if it is a converted one; return whether it is."""
    if not fleet.files.give_up_converted(worker.snapshot):
        return False
    log.warning("%s: its converted snapshot cannot be used (%s); the original is loaded", worker, why)
    return True


def _listener(worker: Worker, fleet: Fleet) -> Listen:
    """Return a listener that records the events of a worker's process."""

    def listen(event: Event) -> None:
        if type(event) is RequestEnded:
            _request_ended(worker, fleet, event)
            return
        match event:
            case Progress() if (
                worker.state is not State.QUEUED
            ):  # an early start reports too, but the worker still waits
                if worker.load.report(event, fleet.now()):
                    data = {**worker.load.as_dict(), **({"extra_worker": True} if worker.has_open_sibling else {})}
                    if event.files:
                        data["files"] = event.files
                    fleet.events.append("progress", worker.preset.id, worker=worker.id, **data)
            case MemoryNeed():
                worker.need = event
                if worker.state is State.READY:
                    _settle(worker, fleet)
            case Pulse():
                worker.pulse, worker.need = event, None
                if worker.state is State.READY:
                    _settle(worker, fleet)
                    if worker.host_use.is_excessive(event.resident, fleet.now()) and not worker.leases:
                        fleet.replace_oversized(worker)

    return listen


def _settle(worker: Worker, fleet: Fleet) -> None:
    """Apply a report of memory to the reservation. Plan again if memory became free, since no reading may show that.

    Plan again if the headroom changed, too. Workers share the largest one, which may be another worker's now. Then a
    waiting demand may need further victims.
    """
    before, headroom = worker.reserved.get(MAIN_MEMORY, 0) + worker.headroom, worker.headroom
    settle_reservation(worker)
    if worker.headroom != headroom or worker.reserved.get(MAIN_MEMORY, 0) + worker.headroom < before:
        fleet.scheduler.plan_soon()


def _request_ended(worker: Worker, fleet: Fleet, event: RequestEnded) -> None:
    usage = worker.usage
    usage.has_answered = usage.has_answered or event.outcome == "ok"
    usage.first_token = usage.first_token or event.ttft
    if event.keep_alive is not None and event.keep_alive != usage.keep_alive:
        usage.keep_alive = event.keep_alive
        fleet.scheduler.plan_soon()
    fleet.events.notify(
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
        prefill_seconds=event.prefill_seconds,
        decode_seconds=event.decode_seconds,
    )

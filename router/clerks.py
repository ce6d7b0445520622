"""Clerks: worker processes with a model's tokenizer and without the model.

A model that may not be loaded is counted for all the same: requests that need its tokenizer and nothing else get a
lease on its clerk, which is begun when the first one comes and ends when none has come for a while. A clerk takes
nobody's place: it has no device, its memory is charged while it starts and is part of every reading from then on, and
as soon as somebody waits for main memory those that idle end. Law: as the fleet's, no method awaits between reading a
state and writing what follows from it.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from router import backoff
from router.backoff import Crashes, Failure
from router.commands import model_options, program_of, serve_fields
from router.errors import (
    ApiError,
    Draining,
    Internal,
    LoadBackoff,
    LoadFailed,
    ModelNotLoaded,
    QueueFull,
    QueueTimeout,
)
from router.estimate import TOKENIZER_BYTES, picture_bytes
from router.events import Event
from router.facts import EstimateError
from router.fleet import Fleet
from router.launchers import Program, WorkerLost, WorkerProcess
from router.lease import Lease
from router.ledger import HOST, LOCAL, DeviceId
from router.life import Again
from router.lifecycle import State, advance
from router.model import Model
from router.overhead import RUNTIME_FORKED, RUNTIME_HOST
from router.presets import Preset
from router.worker import Worker
from worker.protocol import events
from worker.protocol.argv import Serve
from worker.protocol.events import Pulse, Request

log = logging.getLogger("router.clerks")

MOST = 4
"""Clerks at once; one more takes the place of the one that has idled for longest."""
IDLE = 60.0
"""Seconds without a request after which one ends."""
LAST_ANSWERS = 2.0
"""Seconds for which one that is lost or must end is kept for those who still read its answers."""
RUNTIME = 112 << 20
"""Bytes of one without torch, beside its tokenizers: 81 MiB before it served (transformers 5.23, Python 3.11, Linux),
and room for what serving adds."""
TOKENIZERS = 2
"""In one clerk: a second one where special tokens are to be read as text."""


class Clerks:
    """Those of one router. It leases workers as the fleet does, and is the lessor (`router.lease`) of its own."""

    def __init__(self, fleet: Fleet, *, most: int = MOST, idle: float = IDLE):
        self.events = fleet.events
        self.limits = fleet.limits
        self._fleet = fleet
        self._most, self._idle = most, idle
        self._ids = 0
        self._open: dict[str, Worker] = {}
        """Those that take leases, by model."""
        self._alive: dict[Worker, asyncio.Task[None]] = {}
        """All that are not stopped, the one begun first at the beginning."""
        self._stirred = asyncio.Event()
        """One has fallen idle, or is over."""
        self._looks: dict[int, object] = {}
        """What the files of each looked like when it began, by its number."""
        self._failures: dict[str, tuple[Failure, Preset]] = {}
        """Why the last one of a model ended in error, and the preset that it went by."""
        self._crashes: dict[str, Crashes] = {}
        self._cut_short: set[str] = set()
        """Models whose last clerk somebody killed before it was ready."""
        self.events.fold(self._hear, mentions=False)

    # Leases

    def now(self) -> float:
        return self._fleet.now()

    def lease(self, id: str, *, autoload: bool | None) -> Lease:
        """The fleet's lease on a worker of model `id`; where it may not load one, a lease on its clerk.

        Raises what `Fleet.lease` raises; ModelNotLoaded only for a model whose files are not here.
        """
        try:
            return self._fleet.lease(id, autoload=autoload)
        except ModelNotLoaded:
            model = self._fleet.model(id)
        clerk = self._current(model) or self._begin(model)
        if model.preset.max_concurrent and len(clerk.leases) >= model.preset.max_concurrent:
            raise QueueFull(f"{id} already has {len(clerk.leases)} requests at once (max-concurrent)", retry_after=1)
        if clerk.state < State.READY:
            self._admit(model, clerk)
        lease = Lease(self, model, clerk, self.now())
        clerk.leases.add(lease)
        return lease

    def give_back(self, lease: Lease) -> None:
        clerk = lease.worker
        clerk.leases.discard(lease)
        clerk.last_used = self.now()
        clerk.stirred.set()
        self._stirred.set()

    def move(self, lease: Lease) -> None:
        """Carry a lease over to the model's next clerk. Raises ApiError if there will be none."""
        model = self._fleet.model(lease.model.preset.id)
        lease.worker.leases.discard(lease)
        lease.worker = clerk = self._current(model) or self._begin(model)
        clerk.leases.add(lease)

    def queue_timeout(self, worker: Worker) -> QueueTimeout:
        return QueueTimeout(
            f"{worker.preset.id} is not loaded, and all {self._most} processes that count for such models were in use"
            f" for {self.limits.queue_timeout:.0f} s; try again later",
            retry_after=1,
        )

    def _admit(self, model: Model, clerk: Worker) -> None:
        """Raises QueueFull if one more may not wait."""
        if len(clerk.leases) >= model.preset.queue_size:
            raise QueueFull(
                f"{len(clerk.leases)} requests already wait for {model.preset.id} (queue-size)", retry_after=1
            )
        everybody = sum(len(each.leases) for each in self._alive if each.state < State.READY)
        if everybody >= self.limits.queue_size:
            raise QueueFull(f"{everybody} requests already wait (--queue-size)", retry_after=1)

    def _current(self, model: Model) -> Worker | None:
        """The clerk that goes by the model's preset as it is now, if there is one."""
        clerk = self._open.get(model.preset.id)
        if clerk is not None and clerk.preset is not model.preset and clerk.preset != model.preset:
            self._retire(clerk, "config_changed")
            return None
        return clerk

    # Lives

    def _begin(self, model: Model) -> Worker:
        """Raises ModelNotLoaded, LoadFailed, LoadBackoff, Draining."""
        preset, now = model.preset, self.now()
        if self._fleet.closing:
            raise Draining("the router is shutting down", retry_after=5)
        files = self._fleet.files
        snapshot = files.find(preset)
        if snapshot is None:
            files.download(preset)  # which says so if it cannot be fetched
            raise ModelNotLoaded(
                f"model '{preset.id}' is not loaded, and its files are not here, so that its tokens cannot be counted;"
                " fetch and load it with POST /models/load, or turn autoload on"
            )
        look = files.look(preset)
        self._refuse_failed(preset, look)
        self._ids += 1
        clerk = Worker(self._ids, preset, State.QUEUED, now)
        clerk.snapshot = files.loads_from(preset, snapshot)
        self._open[preset.id], self._looks[clerk.id] = clerk, look
        task = asyncio.get_running_loop().create_task(self._live(clerk), name=_name(clerk))
        self._alive[clerk] = task
        task.add_done_callback(lambda _: self._over(clerk, Again()))  # if it was cancelled before its first step
        return clerk

    def _refuse_failed(self, preset: Preset, look: object) -> None:
        """Raises LoadFailed, LoadBackoff for a model whose last clerk could not begin."""
        failure, told = self._failures.get(preset.id, (None, None))
        now = self.now()
        if failure is None or now >= failure.until or told != preset or (failure.final and failure.files != look):
            return
        if failure.final:
            raise LoadFailed(f"{failure.message} (it is not tried again before the preset or its files change)")
        raise LoadBackoff(
            f"{failure.message}; next attempt in {failure.until - now:.0f} s", retry_after=failure.until - now
        )

    async def _live(self, clerk: Worker) -> None:
        """One clerk, to its end."""
        error: ApiError | Again = Again()
        try:
            clerk.stages.begin("wait", self.now())
            await self._room()
            clerk.state, clerk.since = advance(clerk.state, State.STARTING), self.now()
            clerk.stages.begin("start", clerk.since)
            await self._serve(clerk)
        except asyncio.CancelledError:
            error = Draining("the router is shutting down", retry_after=5)
        except WorkerLost as lost:
            clerk.lost, error = lost, self._after_loss(clerk, lost)
        except EstimateError as unknown:
            if not self._fleet.files.forsake(clerk.snapshot):  # else it counts by the files as they came
                error = LoadFailed(f"{clerk.preset.id} cannot be counted for: {unknown.message}")
        except ApiError as refused:
            error = refused
        except Exception:
            log.exception("%s: the router failed in this clerk's life", _name(clerk))
            error = Internal(f"{clerk.preset.id}: the router failed while it counted for this model; see its log")
        self._over(clerk, error)

    def _over(self, clerk: Worker, error: ApiError | Again) -> None:
        """The end of a life, told to everybody who waits."""
        if clerk not in self._alive:
            return
        del self._alive[clerk], self._looks[clerk.id]
        self._close_door(clerk)
        was, clerk.state = clerk.state, State.STOPPED
        if was >= State.STARTING:
            told = {} if clerk.lost is None else {"error": clerk.lost.message}
            told |= {"was": was.name.lower(), "reason": clerk.reason}
            self.events.append("clerk", clerk.preset.id, clerk=clerk.id, state="stopped", **told)
        if not clerk.ready.done():
            clerk.ready.set_exception(error)
        clerk.ended.set()
        clerk.stopped.set()
        self._stirred.set()

    def _close_door(self, clerk: Worker) -> None:
        """It takes no more leases."""
        if self._open.get(clerk.preset.id) is clerk:
            del self._open[clerk.preset.id]

    def _retire(self, clerk: Worker, reason: str) -> None:
        """It takes no more leases, and ends with the last one."""
        self._close_door(clerk)
        clerk.reason = clerk.reason or reason
        clerk.retired.set()
        clerk.stirred.set()

    async def _replace(self, clerk: Worker, process: WorkerProcess) -> None:
        """Once it lives and nobody reaches it."""
        await process.unreachable()
        self._retire(clerk, "unreachable")
        clerk.ended.set()

    async def _room(self) -> None:
        """Returns once it is one of those that may be."""
        while sum(each.state >= State.STARTING for each in self._alive) >= self._most:
            idle = [each for each in self._alive if each.state is State.READY and not each.leases]
            if idle and not any(each.retired.is_set() for each in idle):
                self._retire(min(idle, key=lambda each: each.last_used), "room")
            self._stirred.clear()
            await self._stirred.wait()

    async def _serve(self, clerk: Worker) -> None:
        """From the start of its process to its end. Raises WorkerLost, EstimateError."""
        fleet, preset = self._fleet, clerk.preset
        program = program_of(preset, _name(clerk))
        clerk.facts = await fleet.files.read(clerk.snapshot, preset)
        options = model_options(Serve, preset, clerk.facts, clerk.snapshot, on_host=True, listen="unix:")
        command = replace(options, **serve_fields(clerk, fleet), clerk=True)
        needs = self._needs(clerk, program)
        clerk.reserved = {DeviceId(LOCAL, HOST): needs}
        async with AsyncExitStack() as running:
            with fleet.errand(preset, needs) as errand:
                process = await running.enter_async_context(
                    fleet.launcher.serve(program, command, clerk.reserved, self._listener(clerk))
                )
                await fleet.launcher.refresh()  # what it takes is in the readings from now on, and charged no longer
            clerk.reserved = {}
            self._begin_service(clerk, process)
            if errand.released.is_set():  # somebody needs the room
                self._retire(clerk, "evicted")
            await self._until_over(clerk, process)

    def _needs(self, clerk: Worker, program: Program) -> int:
        """Bytes of main memory that it takes at most."""
        assert clerk.facts is not None
        has_torch = clerk.preset.trust_remote_code or clerk.facts.picture_tokens > 0
        executed = RUNTIME_HOST if has_torch else RUNTIME
        runtime = RUNTIME_FORKED if self._fleet.launcher.forks(program) else executed
        tokenizers = TOKENIZERS * clerk.facts.vocab_size * TOKENIZER_BYTES
        return runtime + tokenizers + picture_bytes(clerk.facts, clerk.preset)

    def _begin_service(self, clerk: Worker, process: WorkerProcess) -> None:
        now = self.now()
        clerk.stages.end(now)
        clerk.state = advance(clerk.state, State.READY)
        clerk.process = process
        clerk.load_seconds = now - clerk.since
        clerk.since = clerk.last_used = clerk.ready_at = now
        self._cut_short.discard(clerk.preset.id)
        clerk.ready.set_result(process)
        seconds = round(clerk.load_seconds, 3)
        self.events.append(
            "clerk", clerk.preset.id, clerk=clerk.id, state="ready", pid=process.pid, load_seconds=seconds
        )

    async def _until_over(self, clerk: Worker, process: WorkerProcess) -> None:
        """Returns once it is retired, or has idled for long, and nobody holds it. Raises WorkerLost."""
        lost = asyncio.ensure_future(process.lost())
        unreachable = asyncio.ensure_future(self._replace(clerk, process))
        try:
            while not lost.done():
                if not clerk.leases and (clerk.retired.is_set() or clerk.last_used + self._idle <= self.now()):
                    self._retire(clerk, "idle")
                    return
                clerk.stirred.clear()
                left = None if clerk.leases else clerk.last_used + self._idle - self.now()
                stirred = asyncio.ensure_future(clerk.stirred.wait())
                try:
                    await asyncio.wait({lost, stirred}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stirred.cancel()
            clerk.lost = lost.result()
            clerk.reason = clerk.lost.cause
            raise clerk.lost
        finally:
            lost.cancel()
            unreachable.cancel()
            self._close_door(clerk)
            clerk.state = State.STOPPING
            clerk.ended.set()
            await _read_out(clerk)

    def _after_loss(self, clerk: Worker, lost: WorkerLost) -> ApiError | Again:
        """What those hear who still wait for it; those who come hear the same for a while."""
        id, served, now = clerk.preset.id, clerk.ready_at is not None, self.now()
        clerk.reason = clerk.reason or lost.cause
        if not served and self._fleet.files.forsake(clerk.snapshot):
            return Again()  # from the files as they came
        if lost.from_outside and (served or id not in self._cut_short):
            self._cut_short |= set() if served else {id}
            return Again()
        pause = backoff.FINAL_PAUSE
        if not lost.final:
            crashes, spread = self._crashes.setdefault(id, Crashes()), random.uniform(*backoff.SPREAD)
            pause = crashes.pause(now, allowed=clerk.preset.max_restarts, served=served, spread=spread)
        message = f"{id} cannot be counted for: {lost.message}"
        failure = Failure(lost.cause, message, lost.exit, lost.final, now, now + pause, self._looks[clerk.id])
        self._failures[id] = failure, clerk.preset
        return LoadFailed(message) if lost.final else LoadBackoff(message, retry_after=pause)

    def _listener(self, clerk: Worker) -> Any:
        def listen(event: events.Event) -> None:
            if isinstance(event, Pulse):
                clerk.pulse = event
            elif isinstance(event, Request):
                self.events.mention(
                    "request",
                    clerk.preset.id,
                    worker=None,
                    id=event.id,
                    prompt_tokens=event.prompt_tokens,
                    cached_tokens=0,
                    completion_tokens=0,
                    outcome=event.outcome,
                    ttft=0.0,
                    token_seconds=0.0,
                )

        return listen

    # What happens around them

    def _hear(self, event: Event) -> None:
        match event.kind:
            case "config" | "removed" | "listed":
                self._renew()
            case "state" if event.data["state"] == "ready" and (clerk := self._open.get(event.model)) is not None:
                self._retire(clerk, "loaded")
            case "plan" if event.data["decision"] in ("wait", "evict") and self._main_memory_is_short():
                for clerk in [each for each in self._open.values() if each.state is State.READY]:
                    self._retire(clerk, "evicted")

    def _renew(self) -> None:
        """Presets were read again: those end whose preset or files are no longer what they were."""
        models, files = self._fleet.models, self._fleet.files
        for id, clerk in list(self._open.items()):
            model = models.get(id)
            if model is None or model.preset != clerk.preset or files.look(clerk.preset) != self._looks[clerk.id]:
                self._retire(clerk, "config_changed")

    def _main_memory_is_short(self) -> bool:
        """Whether somebody waits for it."""
        plan = self._fleet.last_plan
        return plan is not None and any(id.index == HOST for wait in plan.waits.values() for id in wait.shortage)

    async def close(self) -> None:
        """End them all; returns once their processes are reaped."""
        for clerk, task in list(self._alive.items()):
            clerk.reason = clerk.reason or "shutdown"
            task.cancel()
        while self._alive:
            await asyncio.wait(set(self._alive.values()))

    def of(self, id: str) -> Worker | None:
        """The newest that counts for model `id`, whether or not it still takes requests."""
        return next((clerk for clerk in reversed(self._alive) if clerk.preset.id == id), None)

    @property
    def alive(self) -> Sequence[Worker]:
        """All that are not stopped, the oldest first."""
        return tuple(self._alive)


async def _read_out(clerk: Worker) -> None:
    """Returns once those who hold it have read what it still sent and are over; bounded."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_ANSWERS):
            while clerk.leases:
                clerk.stirred.clear()
                await clerk.stirred.wait()


def _name(clerk: Worker) -> str:
    return f"{clerk.preset.id}#clerk{clerk.id}"


__all__ = ["Clerks"]

"""What can be done once for a model is done once, while nobody wants anything: its snapshot is converted, and its exact
footprint worked out.

A model's turn comes when it was fetched, and when it was loaded for the first time. Law: nobody waits for a
preparation, and none begins while anybody waits for anything: who comes before it is there is served as if there were
none, and who needs the memory that a conversion takes ends it. What fails is told, costs what it cost before, and is
tried again after a pause, unless it would fail the same way again.
"""

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from router.config.presets import Preset
from router.errors import RouterError
from router.events import Event
from router.fleet.fleet import Fleet
from router.fleet.lifecycle import FETCHED
from router.fleet.load_cost import weigh
from router.fleet.state import State
from router.fleet.worker import Worker
from router.fleet.worker_argv import program_of, question
from router.launch.interface import WorkerLost
from router.memory import estimate as estimates
from router.memory.checkpoint_facts import DTYPE_BYTES, Checkpoint
from router.memory.process import RUNTIME_HOST
from router.planner.ledger import HOST
from router.store.converted import can_be_converted
from worker.protocol import events
from worker.protocol.argv import Convert
from worker.protocol.events import Converted
from worker.protocol.exits import Exit

QUIET = 3.0
"""Seconds without a request or a load before one begins."""
PAUSE, LONGEST_PAUSE = 60.0, 3600.0
"""Seconds until what has failed is tried again: doubled with each further failure of the model, up to the longest."""
LOOK_INTERVAL = 30.0
"""Seconds until it is looked again whether somebody is served, or memory is free, where no event says so."""
STACKED_AT_ONCE = 3
"""Times a layer's experts that are in memory while it is converted: two halves, both together, and what becomes of
them."""


class Conversions(Protocol):
    """Where converted snapshots are, as `router.store.converted` has it."""

    def target(self, snapshot: str) -> Path | None: ...

    def is_settled(self, snapshot: str, facts: Checkpoint) -> bool: ...

    def give_up(self, target: Path) -> None: ...

    async def swept(self) -> None:
        """Returns once those are deleted that are of no use any more."""


class Postponed(Exception):
    """Somebody needs the memory that a conversion takes."""


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one preparation."""

    outcome: str
    """done, nothing (there was nothing to do), no_room (of disk), failed, postponed (somebody needed its memory)."""
    weights: int = 0
    """Bytes written."""
    tokenizer: bool = False
    estimated: bool = False
    why: str = ""
    is_final: bool = True
    """There is nothing to gain from another try."""


class Preparation:
    """Of all models of one fleet, one after the other. `run` is its life; `hear` must be told of every event."""

    def __init__(self, fleet: Fleet, conversions: Conversions, *, quiet: float = QUIET):
        self._fleet = fleet
        self._conversions = conversions
        self._quiet = quiet
        self._wanted: dict[str, float] = {}
        """Models whose turn will come, by id, in this order; not before this time of the fleet's clock."""
        self._failures: Counter[str] = Counter()
        """How often they have failed, one time behind another."""
        self._stirred = asyncio.Event()
        self._busy_at = self._fleet.now()
        """When somebody was last seen to want something."""

    def hear(self, event: Event) -> None:
        """Take note of models that were fetched or loaded, and of whoever wants anything."""
        if event.kind not in ("state", "request", "progress", "plan"):
            return
        self._busy_at = self._fleet.now()  # that nothing can begin sooner wakes nobody
        if event.kind == "state" and event.model in self._fleet.models:
            has_come = event.data["state"] == "queued" and event.data.get("was") == "downloading"
            if has_come or event.data.get("reason") == FETCHED:
                self._failures.pop(event.model, None)
                self._wanted[event.model] = 0.0
                self._stirred.set()
            elif event.data["state"] == "ready":
                self._wanted.setdefault(event.model, 0.0)
                self._stirred.set()

    async def run(self) -> None:
        """Never returns; cancelling it ends the preparation that runs, of which nothing is left."""
        await self._conversions.swept()
        while True:
            id = await self._until_quiet()
            model = self._fleet.models.get(id)
            if model is None:
                continue
            began = time.monotonic()
            done = await self._prepare(model.preset)
            took = time.monotonic() - began
            if done.weights or done.tokenizer:  # listed before it is told of
                await self._conversions.swept()
            pause = self._pause(id, done)
            if pause is not None:
                self._wanted[id] = self._fleet.now() + pause
            if done.outcome not in ("nothing", "postponed"):
                self._tell(id, done, took, pause)

    def _pause(self, id: str, done: Done) -> float | None:
        """Seconds until it is tried again; None: it is not."""
        if done.is_final:
            self._failures.pop(id, None)
            return None
        if done.outcome == "postponed":
            return 0.0
        self._failures[id] += 1
        return min(LONGEST_PAUSE, PAUSE * 2.0 ** (self._failures[id] - 1))

    def _tell(self, id: str, done: Done, seconds: float, pause: float | None) -> None:
        self._fleet.events.append(
            "prepared",
            id,
            outcome=done.outcome,
            bytes=done.weights,
            tokenizer=done.tokenizer,
            estimated=done.estimated,
            seconds=round(seconds, 3),
            why=done.why,
            again=pause,
        )

    async def _until_quiet(self) -> str:
        """The model whose turn it is, taken from those that wait, once nobody has wanted anything for a while."""
        while True:
            self._stirred.clear()
            left: float | None = None
            if self._wanted:
                id, due = min(self._wanted.items(), key=lambda each: each[1])
                due = max(due, self._busy_at + self._quiet)
                left = LOOK_INTERVAL if self._is_busy() else due - self._fleet.now()
                if left <= 0:
                    del self._wanted[id]
                    return id
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._stirred.wait()

    def _is_busy(self) -> bool:
        workers = self._fleet.workers()
        return any(worker.state is not State.READY or worker.leases for worker in workers)

    async def _prepare(self, preset: Preset) -> Done:
        snapshot = self._fleet.files.find(preset)
        if snapshot is None or not can_be_converted(preset):
            return Done("nothing")
        converted: Converted | None = None
        try:
            facts = await self._fleet.files.read(snapshot, preset)
            if not self._conversions.is_settled(snapshot, facts):
                needs = _memory_of(facts)
                if why := self._too_little_memory(needs):
                    return Done("failed", why=why, is_final=False)
                converted = await self._convert(preset, snapshot, needs)
            estimated = await self._estimate(preset, snapshot)
        except Postponed:
            return Done("postponed", is_final=False)
        except WorkerLost as lost:
            outcome = "no_room" if lost.exit == Exit.DISK_FULL else "failed"
            return Done(outcome, why=lost.message, is_final=lost.final)
        except RouterError as refused:  # an estimate that cannot be made, a device that is not here
            return Done("failed", why=str(refused))
        weights, tokenizer = (converted.weights, converted.tokenizer) if converted is not None else (0, False)
        return Done("done" if weights or tokenizer or estimated else "nothing", weights, tokenizer, estimated)

    async def _convert(self, preset: Preset, snapshot: str, needs: int) -> Converted | None:
        """Returns once it is converted, which takes `needs` bytes of main memory. Raises Postponed, and WorkerLost;
        what would fail the same way again is not tried again."""
        target = self._conversions.target(snapshot)
        if target is None:
            return None
        await self._conversions.swept()  # whoever makes it leaves alone what lies there, torn by somebody or not
        command = Convert(snapshot=snapshot, target=str(target))
        with self._fleet.errand(preset, needs) as errand:
            work = self._fleet.launcher.convert(program_of(preset, f"{preset.id}#0"), command, _ignore)
            converting, released = asyncio.ensure_future(work), asyncio.ensure_future(errand.released.wait())
            try:
                await asyncio.wait({converting, released}, return_when=asyncio.FIRST_COMPLETED)
                if not converting.done():
                    raise Postponed
                return converting.result()
            except WorkerLost as lost:
                if lost.final:
                    self._conversions.give_up(target)
                raise
            finally:
                converting.cancel()
                released.cancel()
                await asyncio.wait({converting, released})  # its memory is charged until its process is gone

    async def _estimate(self, preset: Preset, snapshot: str) -> bool:
        """Have the exact footprint, unless what is known of it is as good; whether it was worked out now."""
        fleet = self._fleet
        worker = Worker(0, preset, State.QUEUED, fleet.now())
        worker.snapshot = fleet.files.loads_from(preset, snapshot)
        await weigh(worker, fleet)
        costs = worker.costs
        if costs is None or costs.estimate.source not in ("static", "weights"):
            return False
        said = await fleet.launcher.estimate(program_of(preset, str(worker)), question(worker))
        exact = estimates.from_trace(said, preset, forked=costs.forked, first=costs.estimate)
        fleet.calibration.store_exact(costs.key, exact)
        return True

    def _too_little_memory(self, needs: int) -> str:
        """Why a conversion that takes `needs` bytes would have others short of main memory; "" if it would not."""
        devices = [each for each in self._fleet.devices if each.id.index == HOST]
        free = min((each.total - each.used - each.margin for each in devices), default=needs)
        if needs <= free:
            return ""
        return f"converting takes {needs >> 20} MiB of main memory, {max(free, 0) >> 20} are free above the margin"


def _memory_of(facts: Checkpoint) -> int:
    """Bytes of main memory that a conversion takes."""
    itemsize = max((DTYPE_BYTES.get(dtype, 1) for dtype in facts.tensors), default=1)
    return RUNTIME_HOST + STACKED_AT_ONCE * facts.stacked * itemsize // max(facts.layers, 1)


def _ignore(event: events.Event) -> None:
    pass


__all__ = ["Preparation"]

"""What can be done once for a model is done once, while nobody wants anything: its snapshot is converted, and its exact
footprint worked out.

A model's turn comes when it was fetched, and when it was loaded for the first time. Law: nobody waits for a
preparation, and none begins while anybody waits for anything: who comes before it is there is served as if there were
none. What fails is told, and costs what it cost before.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from router import estimate as estimates
from router.commands import options, program_of
from router.conversions import can_be_converted
from router.costs import weigh
from router.errors import RouterError
from router.estimate import Checkpoint
from router.events import Event
from router.fleet import Fleet
from router.launchers import WorkerLost
from router.ledger import HOST
from router.life import FETCHED
from router.lifecycle import State
from router.presets import Preset
from router.worker import Worker
from worker import contract

log = logging.getLogger("router.preparation")

QUIET = 3.0
"""Seconds without a request or a load before one begins."""
LOOK_INTERVAL = 30.0
"""Seconds until it is looked again whether somebody is served, or memory is free, where no event says so."""
STACKED_AT_ONCE = 3
"""Times a layer's experts that are in memory while it is converted: two halves, both together, and what becomes of
them."""


class Conversions(Protocol):
    """Where converted snapshots are, as `router.conversions` has it."""

    def target(self, snapshot: str) -> Path | None: ...

    def is_settled(self, snapshot: str, facts: Checkpoint) -> bool: ...

    def give_up(self, target: Path) -> None: ...

    async def swept(self) -> None:
        """Returns once those are deleted that are of no use any more."""


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one preparation."""

    outcome: str
    """done, nothing (there was nothing to do), no_room (of disk), failed."""
    weights: int = 0
    """Bytes written."""
    tokenizer: bool = False
    estimated: bool = False
    why: str = ""


class Preparation:
    """Of all models of one fleet, one after the other. `run` is its life; `hear` must be told of every event."""

    def __init__(self, fleet: Fleet, conversions: Conversions, *, quiet: float = QUIET):
        self._fleet = fleet
        self._conversions = conversions
        self._quiet = quiet
        self._wanted: dict[str, None] = {}
        """Models whose turn will come, by id, in this order."""
        self._stirred = asyncio.Event()
        self._busy_at = self._fleet.now()
        """When somebody was last seen to want something."""

    def hear(self, event: Event) -> None:
        """Take note of models that were fetched or loaded, and of whoever wants anything."""
        if event.kind not in ("state", "request", "progress", "plan"):
            return
        self._busy_at = self._fleet.now()
        if event.kind == "state" and event.model in self._fleet.models:
            has_come = event.data["state"] == "queued" and event.data.get("was") == "downloading"
            if has_come or event.data["state"] == "ready" or event.data.get("reason") == FETCHED:
                self._wanted.setdefault(event.model)
        self._stirred.set()

    async def run(self) -> None:
        """Never returns; cancelling it ends the preparation that runs, of which nothing is left."""
        await self._conversions.swept()
        while True:
            await self._until_quiet()
            id = next(iter(self._wanted))
            del self._wanted[id]
            model = self._fleet.models.get(id)
            if model is None:
                continue
            began = time.monotonic()
            done = await self._prepare(model.preset)
            if done.outcome != "nothing":
                self._tell(id, done, time.monotonic() - began)
            if done.weights or done.tokenizer:
                await self._conversions.swept()

    def _tell(self, id: str, done: Done, seconds: float) -> None:
        self._fleet.events.append(
            "prepared",
            id,
            outcome=done.outcome,
            bytes=done.weights,
            tokenizer=done.tokenizer,
            estimated=done.estimated,
            seconds=round(seconds, 3),
            why=done.why,
        )

    async def _until_quiet(self) -> None:
        """Returns once there is something to prepare, and nobody has wanted anything for a while."""
        while True:
            self._stirred.clear()
            left: float | None = None
            if self._wanted:
                left = LOOK_INTERVAL if self._is_busy() else self._busy_at + self._quiet - self._fleet.now()
                if left <= 0:
                    return
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
        converted: contract.Converted | None = None
        try:
            facts = await self._fleet.files.read(snapshot, preset)
            if not self._conversions.is_settled(snapshot, facts):
                if why := self._too_little_memory(facts):
                    return Done("failed", why=why)
                converted = await self._convert(preset, snapshot)
            estimated = await self._estimate(preset, snapshot)
        except WorkerLost as lost:
            outcome = "no_room" if lost.exit == contract.Exit.DISK_FULL else "failed"
            return Done(outcome, why=lost.message)
        except RouterError as refused:  # an estimate that cannot be made, a device that is not here
            return Done("failed", why=str(refused))
        weights, tokenizer = (converted.weights, converted.tokenizer) if converted is not None else (0, False)
        return Done("done" if weights or tokenizer or estimated else "nothing", weights, tokenizer, estimated)

    async def _convert(self, preset: Preset, snapshot: str) -> contract.Converted | None:
        """Returns once it is converted. Raises WorkerLost; what would fail the same way again is not tried again."""
        target = self._conversions.target(snapshot)
        if target is None:
            return None
        command = contract.Convert(snapshot=snapshot, target=str(target))
        try:
            return await self._fleet.launcher.convert(program_of(preset, f"{preset.id}#0"), command, _ignore)
        except WorkerLost:
            self._conversions.give_up(target)
            raise

    async def _estimate(self, preset: Preset, snapshot: str) -> bool:
        """Have the exact footprint, unless what is known of it is as good; whether it was worked out now."""
        fleet = self._fleet
        worker = Worker(0, preset, State.QUEUED, fleet.now())
        worker.snapshot = fleet.files.loads_from(preset, snapshot)
        await weigh(worker, fleet)
        costs = worker.costs
        if costs is None or costs.estimate.source not in ("static", "weights"):
            return False
        said = await fleet.launcher.estimate(program_of(preset, str(worker)), options(worker, contract.Estimate))
        fleet.calibration.store_exact(costs.key, estimates.exact(said, preset, forked=costs.forked))
        return True

    def _too_little_memory(self, facts: Checkpoint) -> str:
        """Why a conversion would have others short of main memory; "" if it would not."""
        itemsize = max((estimates.DTYPE_BYTES.get(dtype, 1) for dtype in facts.tensors), default=1)
        needs = estimates.RUNTIME_HOST + STACKED_AT_ONCE * facts.stacked * itemsize // max(facts.layers, 1)
        devices = [each for each in self._fleet.devices if each.id.index == HOST]
        free = min((each.total - each.used - each.margin for each in devices), default=needs)
        if needs <= free:
            return ""
        return f"converting takes {needs >> 20} MiB of main memory, {max(free, 0) >> 20} are free above the margin"


def _ignore(event: contract.Event) -> None:
    pass


__all__ = ["Preparation"]

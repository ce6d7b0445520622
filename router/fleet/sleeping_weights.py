"""Sleeping weights: weights of models whose workers have exited, locked in main memory within a budget.

They are best-effort residents of main memory: reserved like a worker, started only in memory that no demand needs, and
released before any worker is evicted. A model that wakes is loaded like any other, and its files are in the page cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.config.presets import Preset
from router.launch.interface import NotLocked
from router.launch.process import tasks_of
from router.planner.ledger import MAIN_MEMORY, Resident

if TYPE_CHECKING:  # both import this module
    from router.fleet.fleet import Fleet
    from router.fleet.model import Model

log = logging.getLogger("router.fleet.sleeping_weights")

# Seconds by which sleeping weights count as longer unused than they are, so that they are evicted before any worker.
ASLEEP = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepRequest:
    """The weights of a worker that has exited and may sleep. Times are seconds of the fleet's clock."""

    files: tuple[str, ...]
    size: int  # bytes of the files
    last_used: float
    expires: float | None  # by the model's `ttl`; None: never


class SleepingWeights:
    """The weights of one model in main memory, from their reservation to their release."""

    def __init__(self, id: int, preset: Preset, request: SleepRequest):
        self.id = id
        self.preset = preset
        self.request = request
        self.is_locked = False  # all files are read and locked
        self.reason = ""  # of the release
        self.released = asyncio.Event()
        self.stopped = asyncio.Event()

    def __str__(self) -> str:
        return f"{self.preset.id}#{self.id}"

    def resident(self) -> Resident:
        """Return the planner's view."""
        return Resident(
            id=self.id,
            model=self.preset.id,
            reserved={MAIN_MEMORY: self.request.size},
            measured={MAIN_MEMORY: self.request.size if self.is_locked else 0},
            last_used=self.request.last_used - ASLEEP,
            leaving=self.released.is_set(),
            pinned=self.preset.pin,
            priority=self.preset.priority,
            best_effort=True,
            expires=self.request.expires,
        )

    def release(self, reason: str) -> None:
        """Release the memory. The first reason stays."""
        self.reason = self.reason or reason
        self.released.set()


class AllSleepingWeights:
    """All sleeping weights of one fleet. No method awaits."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
        self.all: dict[int, SleepingWeights] = {}  # all that are not stopped, by id

    def put_to_sleep(self, models: Iterable[Model], spare: int) -> None:
        """Hold the weights of models whose worker has just exited, within `spare` bytes of free main memory.

        Release the weights of models that are ready again.
        """
        for model in models:
            if model.sleeping is None and model.sleep_request is None:
                continue
            if model.sleeping is not None and model.is_ready:
                self.release_model(model, "awake")
            request, model.sleep_request = model.sleep_request, None
            if request is None or model.workers or model.sleeping is not None or request.size > spare:
                continue
            victims = make_room(self.all.values(), request.size, self._fleet.settings.sleep_memory)
            if victims is None:
                continue
            for weights in victims:
                self.release(weights, "evicted")
            spare -= request.size
            self._begin(model, request)

    def release_model(self, model: Model, reason: str) -> None:
        """Release the model's sleeping weights, if any, and drop its request to sleep."""
        model.sleep_request = None
        if model.sleeping is not None:
            self.release(model.sleeping, reason)

    def release(self, weights: SleepingWeights, reason: str) -> None:
        if not weights.released.is_set():
            weights.release(reason)
            self._fleet.scheduler.plan_soon()  # it counts as leaving from now on

    def _begin(self, model: Model, request: SleepRequest) -> None:
        weights = SleepingWeights(next(self._fleet.ids), model.preset, request)
        model.sleeping = self.all[weights.id] = weights
        task = asyncio.get_running_loop().create_task(hold(weights, self._fleet), name=str(weights))
        self._fleet.tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, model, weights))
        self._fleet.scheduler.plan_soon()  # its memory is reserved from now on, and its `ttl` may end soon

    def _ended(self, task: asyncio.Task[None], model: Model, weights: SleepingWeights) -> None:
        self._fleet.tasks.discard(task)
        del self.all[weights.id]
        weights.stopped.set()
        if model.sleeping is weights:
            model.sleeping = None
            model.since = self._fleet.now()
        self._fleet.scheduler.plan_soon()


async def hold(weights: SleepingWeights, fleet: Fleet) -> None:
    """Lock the weights in main memory until they are released or lost."""
    _append_event(weights, fleet, "locking")
    try:
        async with fleet.launcher.lock_files(weights.request.files) as locked:
            await fleet.launcher.refresh()  # the driver's reading must contain what `is_locked` counts as measured
            weights.is_locked = True
            _append_event(weights, fleet, "locked")
            fleet.scheduler.plan_soon()
            async with tasks_of(locked.lost(), weights.released.wait()) as (lost, released):
                await asyncio.wait({lost, released}, return_when=asyncio.FIRST_COMPLETED)
                if not released.done():
                    raise lost.result()
    except NotLocked as failed:
        log.warning("%s: its weights cannot stay in main memory: %s", weights, failed)
        weights.release("failed")
    finally:
        weights.release("shutdown")
        with contextlib.suppress(asyncio.CancelledError):
            await fleet.launcher.refresh()
        weights.stopped.set()
        _append_event(weights, fleet, "released")


def _append_event(weights: SleepingWeights, fleet: Fleet, state: str) -> None:
    data = {"reason": weights.reason} if weights.reason else {}
    fleet.events.append(
        "sleeping_weights", weights.preset.id, id=weights.id, state=state, bytes=weights.request.size, **data
    )


def make_room(present: Iterable[SleepingWeights], size: int, budget: int) -> Sequence[SleepingWeights] | None:
    """Return the weights to release so that `size` more bytes stay within the budget; None if that is impossible.

    Lower priority goes first, then the least recently used. Pinned models stay.
    """
    kept = [weights for weights in present if not weights.released.is_set()]
    excess = sum(weights.request.size for weights in kept) + size - budget
    victims = []
    for weights in sorted(kept, key=lambda weights: (weights.preset.priority, weights.request.last_used)):
        if excess <= 0:
            break
        if not weights.preset.pin:
            victims.append(weights)
            excess -= weights.request.size
    return victims if excess <= 0 else None

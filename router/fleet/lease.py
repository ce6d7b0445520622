"""A request's hold on a worker, from its arrival to its last byte."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, Self

from router.errors import ApiError
from router.events import EventLog
from router.fleet.lifecycle import Again
from router.fleet.limits import Limits
from router.fleet.model import Model
from router.fleet.state import State
from router.fleet.worker import Worker
from router.launch.interface import WorkerProcess

WAITS = {"download": "download", "wait": "memory"}
"""What requests wait for during the stages of a load; all others are its start."""


class Lessor(Protocol):
    """The fleet, as its leases see it."""

    events: EventLog
    limits: Limits

    def now(self) -> float: ...

    def give_back(self, lease: "Lease") -> None:
        """It is over."""

    def move(self, lease: "Lease") -> None:
        """Carry it over to the model's next life. Raises ApiError if there will be none."""

    def queue_timeout(self, worker: Worker) -> ApiError:
        """What those hear whose time in the queue is up."""


class Lease:
    """A request's hold on a worker, from its arrival to its last byte. Made by `Fleet.lease`."""

    def __init__(self, fleet: Lessor, model: Model, worker: Worker, arrived: float):
        self.model = model
        self.worker = worker
        self.arrived = arrived
        self.on_abort: Callable[[], object] | None = None
        """Called once when this request must end before its time; set by whoever streams its answer."""
        self.aborted: ApiError | None = None
        self._fleet = fleet
        self._failed: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._told = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._fleet.give_back(self)

    def abort(self, error: ApiError) -> None:
        if self.aborted is not None:
            return
        self.aborted = error
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(None)
        if self.on_abort is not None:
            self.on_abort()

    async def ready(self) -> WorkerProcess:
        """Returns once the worker can answer; raises ApiError if it never will, or not in time.

        Cancelling gives nothing back: the lease ends with its block.
        """
        while True:
            if self.aborted is not None:
                raise self.aborted
            if self.worker.ready.done():
                try:
                    process = self.worker.ready.result()
                    self._tell_waits()
                    return process
                except Again:
                    self._fleet.move(self)
                    continue
            loop = asyncio.get_running_loop()
            self._failed = loop.create_future()
            self._arm()
            either: set[asyncio.Future[Any]] = {self.worker.ready, self._failed}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._failed = None
                if self._timer is not None:
                    self._timer.cancel()

    def _tell_waits(self) -> None:
        """Say once how long it waited for what; who waited for nothing says nothing."""
        worker, now = self.worker, self._fleet.now()
        if self._told or (worker.ready_at is not None and worker.ready_at <= self.arrived):
            return
        self._told = True
        waits: dict[str, float] = {}
        for stage, seconds in worker.stages.between(self.arrived, now).items():
            cause = WAITS.get(stage, "start")
            if cause == "memory" and worker.waits_for_slot:
                cause = "slot"
            waits[cause] = waits.get(cause, 0.0) + seconds
        self._fleet.events.mention("waited", self.model.preset.id, seconds=waits)

    def _arm(self) -> None:
        """Wake when the time in the queue is up; time in downloads and in the own load does not count."""
        limit = self._fleet.limits.queue_timeout
        if limit <= 0:
            return
        left = limit
        if self.worker.state is State.QUEUED:
            left = max(self.arrived, self.worker.since) + limit - self._fleet.now()
            if left <= 0:
                self.abort(self._fleet.queue_timeout(self.worker))
                return
        self._timer = asyncio.get_running_loop().call_later(left, self._arm)


__all__ = ["Lease"]

"""Admission: leases on workers, and the queue as requests meet it.

`AdmissionQueue` decides which requests may run or wait, and predicts waiting times. It changes no state of the fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from router.errors import ApiError, QueueFull, QueueTimeout
from router.fleet.failures import NextWorker
from router.fleet.worker import State, Worker
from router.launch.interface import WorkerProcess
from worker.protocol.memory import MIB

if TYPE_CHECKING:  # both import this module
    from router.fleet.fleet import Fleet
    from router.fleet.model import Model

# The causes in `waited` events, by stage of a load. The cause of all other stages is "start".
CAUSE_BY_STAGE = {"download": "download", "convert": "download", "wait": "memory"}


class Lease:
    """A request's hold on a worker, from its arrival to its last byte. Made by `Fleet.lease`."""

    def __init__(self, fleet: Fleet, worker: Worker, arrived: float):
        self.model = worker.model
        self.worker = worker
        self.arrived = arrived
        self.on_abort: Callable[[], object] | None = None  # called once by `abort`; set while a response is streamed
        self.aborted: ApiError | None = None
        self._fleet = fleet
        self._abort_signal: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_reported_wait = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._fleet.give_back(self)

    def abort(self, error: ApiError) -> None:
        """End the request with `error`. Further calls have no effect."""
        if self.aborted is not None:
            return
        self.aborted = error
        if self._abort_signal is not None and not self._abort_signal.done():
            self._abort_signal.set_result(None)
        if self.on_abort is not None:
            self.on_abort()

    async def ready(self) -> WorkerProcess:
        """Wait until the worker is ready. Raises ApiError if it fails or the time in the queue is up.

        Cancelling this does not end the lease; leaving its `with` block does.
        """
        while True:
            if self.aborted is not None:
                raise self.aborted
            if self.worker.ready.done():
                try:
                    process = self.worker.ready.result()
                    self._report_wait()
                    return process
                except NextWorker:
                    self._fleet.move(self)
                    continue
            self._abort_signal = asyncio.get_running_loop().create_future()
            self._start_timer()
            either: set[asyncio.Future[Any]] = {self.worker.ready, self._abort_signal}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._abort_signal = None
                if self._timer is not None:
                    self._timer.cancel()

    def _report_wait(self) -> None:
        """Emit one `waited` event with the seconds per cause. Skip it if the worker was ready at the arrival."""
        worker, now = self.worker, self._fleet.now()
        if self._has_reported_wait or (worker.ready_at is not None and worker.ready_at <= self.arrived):
            return
        self._has_reported_wait = True
        waits: dict[str, float] = {}
        for stage, seconds in worker.load.between(self.arrived, now).items():
            cause = CAUSE_BY_STAGE.get(stage, "start")
            if cause == "memory" and worker.queue.waits_for_slot:
                cause = "slot"
            waits[cause] = waits.get(cause, 0.0) + seconds
        self._fleet.events.notify("waited", self.model.preset.id, seconds=waits)

    def _start_timer(self) -> None:
        """Abort the lease when its time in the queue is up. Downloads and the load itself do not count."""
        limit = self._fleet.settings.queue_timeout
        if limit <= 0:
            return
        left = limit
        if self.worker.state is State.QUEUED:
            left = max(self.arrived, self.worker.since) + limit - self._fleet.now()
            if left <= 0:
                self.abort(self._fleet.queue.timeout(self.worker))
                return
        self._timer = asyncio.get_running_loop().call_later(left, self._start_timer)


class AdmissionQueue:
    """Requests that wait for workers, and the limits on them. No method awaits."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet

    # Limits

    def admit(self, model: Model, worker: Worker | None) -> None:
        """Raises QueueFull if one more request, for `worker`, may not run beside the others of its model, or may not
        wait."""
        if (error := self._over_max_concurrent(model)) is not None:
            running, limit = self._requests(model), model.preset.max_concurrent
            self._fleet.rejections.append(model.preset.id, error, running=running, limit=limit)
            raise error
        if must_wait(worker):
            self.admit_to_wait(model)

    def admit_to_wait(self, model: Model) -> None:
        """Raises QueueFull if one more request may not wait."""
        if (error := self._queue_full(model)) is not None:
            waiting, waiting_in_all = self._waiting(model)
            limits = {"limit": model.preset.queue_size, "limit_of_all": self._fleet.settings.queue_size}
            self._fleet.rejections.append(
                model.preset.id, error, waiting=waiting, waiting_of_all=waiting_in_all, **limits
            )
            raise error

    def refusal(self, model: Model) -> QueueFull | None:
        """Return the error that `admit` would raise, without an event."""
        return self._over_max_concurrent(model) or (self._queue_full(model) if must_wait(model.open) else None)

    def _requests(self, model: Model) -> int:
        return model.leases - sum(lease.model is model for lease in self._fleet.loads.values())

    def _over_max_concurrent(self, model: Model) -> QueueFull | None:
        limit = model.preset.max_concurrent
        if not limit or (running := self._requests(model)) < limit:
            return None
        message = f"{model.preset.id} already has {running} requests at once (max-concurrent)"
        return QueueFull(message, retry_after=self.turnover(model))

    def _waiting(self, model: Model) -> tuple[int, int]:
        """Return the number of requests that wait for `model`, and for all models."""
        of_model = sum(len(worker.leases) for worker in model.workers if worker.state < State.READY)
        in_all = sum(len(worker.leases) for worker in self._fleet.workers() if worker.state < State.READY)
        loads = [lease for lease in self._fleet.loads.values() if lease.worker.state < State.READY]
        return of_model - sum(lease.model is model for lease in loads), in_all - len(loads)

    def _queue_full(self, model: Model) -> QueueFull | None:
        of_model, in_all = self._waiting(model)
        if of_model >= model.preset.queue_size:
            message = f"{of_model} requests already wait for {model.preset.id} (queue-size)"
        elif in_all >= self._fleet.settings.queue_size:
            message = f"{in_all} requests already wait (--queue-size)"
        else:
            return None
        return QueueFull(message, retry_after=self.eta(model))

    def timeout(self, worker: Worker) -> QueueTimeout:
        """Return the error of a request that has waited for --queue-timeout, and record it."""
        fleet, waits_for, name = self._fleet, worker.queue.waits_for, worker.preset.id
        limit = fleet.settings.queue_timeout
        waited = "its exact memory estimate" if waits_for == "estimate" else "memory"
        waits = f" ({waits_for})" if waits_for not in ("", "estimate") else ""
        error = QueueTimeout(
            f"{name} waited {limit:g} s for {waited}{waits}{self._holders(worker)}; try again later",
            retry_after=self.eta(worker.model),
        )
        fleet.rejections.append(name, error, cause=waits_for, position=worker.queue.ahead + 1, limit_seconds=limit)
        return error

    def _holders(self, worker: Worker) -> str:
        """Return the part of a message that names what eviction cannot free: pinned models and foreign memory."""
        by_slots = worker.queue.waits_for == "slots"
        if not by_slots and worker.queue.waits_for != "memory":
            return ""
        pinned = [
            other.preset.id
            for other in self._fleet.workers()
            if other.preset.pin and not other.best_effort and other.reserved  # not one that waits as well
            and (by_slots or other.reserved.keys() & worker.devices)
        ]  # fmt: skip
        # Below a --device-limit, other programs only count if they leave less than the limit.
        others = [
            f"{device.foreign >> 20} MiB of {device.id}"
            for device in self._fleet.scheduler.devices
            if device.id in worker.devices and device.foreign >= MIB
            and (device.limit is None or device.total - device.foreign < device.limit)
        ]  # fmt: skip
        held = f"; pinned models are not evicted ({', '.join(pinned)}): unpin or unload one" if pinned else ""
        return f"{held}; other programs or routers hold {', '.join(others)}" if others and not by_slots else held

    # Predictions

    def eta(self, model: Model) -> float:
        """Return the seconds until a request for `model` is expected to run.

        The prediction adds the expected loads of the workers ahead in the queue, less what has passed of them, and the
        time until their victims may leave. For a download it uses the rate so far.
        """
        worker, now = model.open, self._fleet.now()
        if worker is not None and worker.state >= State.STARTING:
            rest = model.expected_load() - (now - worker.since)
            return rest if rest > 1.0 else max(1.0, worker.load.left or 0.0)  # slower than before: use its own rate
        if worker is not None and worker.state is State.DOWNLOADING:
            return max(1.0, (worker.load.left or 0.0) + model.expected_load())
        ahead = [
            other
            for other in self._fleet.workers()
            if other.state is State.QUEUED and not other.best_effort and other is not worker
            and (worker is None or other.queue.ahead < worker.queue.ahead)
        ]  # fmt: skip
        waiting = ahead if worker is None else [*ahead, worker]
        begins = max((other.queue.waits_until for other in waiting if other.queue.waits_until is not None), default=now)
        loads = sum(other.model.expected_load() for other in ahead)
        return max(1.0, max(0.0, begins - now) + model.expected_load() + loads)

    def turnover(self, model: Model) -> float:
        """Return the seconds until a request of `model` is expected to end, by their mean duration."""
        if must_wait(model.open):
            return self.eta(model)
        return max(1.0, (model.request_seconds or 1.0) / max(1, model.leases))


def must_wait(worker: Worker | None) -> bool:
    """True if a request for `worker`, the open one of its model, must wait."""
    return worker is None or worker.state is not State.READY

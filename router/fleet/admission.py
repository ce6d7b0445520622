"""The queue as requests meet it: who may join it or run beside others, and how long each can expect to wait.

It looks at what the fleet keeps and changes nothing of it.
"""

from collections.abc import Callable, Collection, Mapping

from router.errors import QueueFull
from router.fleet.lease import Lease
from router.fleet.limits import Limits
from router.fleet.model import Model
from router.fleet.rejection_log import Refusals
from router.fleet.state import State
from router.fleet.worker import Worker


class Queue:
    """Law: nothing in it awaits."""

    def __init__(
        self,
        *,
        alive: Mapping[int, Worker],
        homes: Mapping[int, Model],
        loads: Collection[Lease],
        limits: Limits,
        refusals: Refusals,
        now: Callable[[], float],
    ):
        """`alive` and `homes` by worker, and `loads`, leases that are no requests: all as they are at any time."""
        self._alive, self._homes, self._loads = alive, homes, loads
        self._limits, self._refusals, self._now = limits, refusals, now

    # Who may

    def admit(self, model: Model) -> None:
        """Raises QueueFull if one more request may not run beside the others of its model, or has to wait and may
        not."""
        if (error := self._too_many(model)) is not None:
            running, limit = self._requests(model), model.preset.max_concurrent
            self._refusals.tell(model.preset.id, error, running=running, limit=limit)
            raise error
        if must_wait(model):
            self.admit_to_wait(model)

    def admit_to_wait(self, model: Model) -> None:
        """Raises QueueFull if one more may not wait."""
        if (error := self._full(model)) is not None:
            mine, all_ = self._waiting(model)
            limits = {"limit": model.preset.queue_size, "limit_of_all": self._limits.queue_size}
            self._refusals.tell(model.preset.id, error, waiting=mine, waiting_of_all=all_, **limits)
            raise error

    def refusal(self, model: Model) -> QueueFull | None:
        """What `admit` would raise; nobody is told of it."""
        return self._too_many(model) or (self._full(model) if must_wait(model) else None)

    def _requests(self, model: Model) -> int:
        """Those that hold any of its workers."""
        return model.leases - sum(lease.model is model for lease in self._loads)

    def _too_many(self, model: Model) -> QueueFull | None:
        limit = model.preset.max_concurrent
        if not limit or (running := self._requests(model)) < limit:
            return None
        message = f"{model.preset.id} already has {running} requests at once (max-concurrent)"
        return QueueFull(message, retry_after=self.turnover(model))

    def _waiting(self, model: Model) -> tuple[int, int]:
        """Requests that wait for a model, and for any."""
        mine = sum(len(worker.leases) for worker in model.workers if worker.state < State.READY)
        all_ = sum(len(worker.leases) for worker in self._alive.values() if worker.state < State.READY)
        loads = [lease for lease in self._loads if lease.worker.state < State.READY]
        return mine - sum(lease.model is model for lease in loads), all_ - len(loads)

    def _full(self, model: Model) -> QueueFull | None:
        mine, all_ = self._waiting(model)
        if mine >= model.preset.queue_size:
            message = f"{mine} requests already wait for {model.preset.id} (queue-size)"
        elif all_ >= self._limits.queue_size:
            message = f"{all_} requests already wait (--queue-size)"
        else:
            return None
        return QueueFull(message, retry_after=self.eta(model))

    # How long

    def eta(self, model: Model) -> float:
        """Seconds until a request for `model` can expect its turn: its own load and those ahead of it, by what loads
        took so far, less what is over of them, once those in the way may leave; before that, the rest of its download,
        by the rate so far."""
        worker, now = model.open, self._now()
        if worker is not None and worker.state >= State.STARTING:
            rest = model.expected_load() - (now - worker.since)
            return rest if rest > 1.0 else max(1.0, worker.stages.left or 0.0)  # slower than ever: by its rate so far
        if worker is not None and worker.state is State.DOWNLOADING:
            return max(1.0, (worker.stages.left or 0.0) + model.expected_load())
        queued = [w for w in self._alive.values() if w.state is State.QUEUED and not w.best_effort and w is not worker]
        ahead = [w for w in queued if worker is None or w.ahead < worker.ahead]
        loads = (self._homes[w.id].expected_load() for w in ahead)
        line = ahead if worker is None else [*ahead, worker]
        begins = max((w.waits_until for w in line if w.waits_until is not None), default=now)
        return max(1.0, max(0.0, begins - now) + model.expected_load() + sum(loads))

    def turnover(self, model: Model) -> float:
        """Seconds until one of the requests of a model can be expected to end, by how long they took so far."""
        if must_wait(model):
            return self.eta(model)
        return max(1.0, (model.request_seconds or 1.0) / max(1, model.leases))


def must_wait(model: Model) -> bool:
    """Whether no worker of it is ready for one more request."""
    worker = model.open
    return worker is None or worker.state is not State.READY


__all__ = ["Queue", "must_wait"]

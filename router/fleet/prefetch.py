"""Prefetch: read weight files into the page cache ahead of their load, within free main memory.

Two kinds of files are read: those of queued workers, by their lifecycles, and those of models under `prefetch`, here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from router.config.presets import Preset
from router.fleet.worker import State, Worker
from router.launch.interface import NotLocked
from router.planner.ledger import HOST, Device

if TYPE_CHECKING:  # it imports this module
    from router.fleet.fleet import Fleet

log = logging.getLogger("router.fleet.prefetch")
T = TypeVar("T")


class Prefetcher:
    """The prefetches of one fleet. No public method awaits."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
        self.tasks: dict[asyncio.Task[None], int] = {}  # reads for models under `prefetch`, with their bytes

    def begin(self, waiting: Iterable[Worker], devices: Sequence[Device]) -> None:
        """Let workers that wait for a place read their files meanwhile. `waiting`: in the order of the queue."""
        sizes = [
            (worker, self._bytes_to_read(worker))
            for worker in waiting
            if not (worker.best_effort or worker.queue.prefetch.is_set())
        ]
        if sizes:
            for worker in readable(sizes, devices, self._bytes_in_flight()):
                worker.queue.prefetch.set()

    def read_files(self, presets: Iterable[Preset], devices: Sequence[Device]) -> None:
        """Read the files of models that are expected to be requested soon."""
        sizes = []
        for preset in presets:
            snapshot = self._fleet.files.find(preset) or ""
            files = self._fleet.files.weights(self._fleet.files.loads_from(preset, snapshot))
            sizes.append((tuple(files), sum(files.values())))
        for chosen in readable(sizes, devices, self._bytes_in_flight()):
            task = asyncio.get_running_loop().create_task(self._read(chosen), name="prefetch")
            self.tasks[task] = dict(sizes)[chosen]
            task.add_done_callback(self.tasks.pop)

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def _read(self, files: tuple[str, ...]) -> None:
        try:
            await self._fleet.launcher.prefetch(files)
        except NotLocked as failed:
            log.warning("prefetch of files failed: %s", failed)

    def _bytes_in_flight(self) -> int:
        queued = [worker for worker in self._fleet.workers() if worker.state is State.QUEUED]
        for_workers = sum([self._bytes_to_read(worker) for worker in queued if worker.queue.prefetch.is_set()])
        return for_workers + sum(self.tasks.values())

    def _bytes_to_read(self, worker: Worker) -> int:
        """Return the size of the worker's files. It is cached, because a queued worker is planned many times."""
        if worker.file_sizes is None:
            worker.file_sizes = self._fleet.files.weights(worker.snapshot)
        return sum(worker.file_sizes.values())


def readable(sizes: Sequence[tuple[T, int]], devices: Sequence[Device], reading: int = 0) -> list[T]:
    """Return the names of the files that may be prefetched, in order. `reading`: bytes that are being prefetched.

    The files must fit into memory that the driver reports as free: for more, the kernel drops other cached pages.
    """
    hosts = [device for device in devices if device.id.index == HOST]
    free = min((host.total - host.margin - host.used for host in hosts), default=0) - reading
    chosen = []
    for name, size in sizes:
        if 0 < size <= free:
            chosen.append(name)
            free -= size
    return chosen

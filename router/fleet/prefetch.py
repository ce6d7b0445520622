"""Prefetch: read weight files into the page cache ahead of their load, within free main memory.

Two kinds of files are read: those of queued workers, by their lifecycles, and those of models under `prefetch`, here.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from router.config.presets import Preset
from router.fleet import early_start
from router.fleet.interfaces import Files
from router.fleet.worker import Worker
from router.launch.interface import Launcher, NotLocked
from router.planner.ledger import Device
from router.planner.types import Plan

log = logging.getLogger("router.fleet.fleet")


class Prefetcher:
    """The prefetches of one fleet. No public method awaits."""

    def __init__(self, launcher: Launcher, files: Files, queued: Callable[[], Iterable[Worker]]):
        """`queued` returns all queued workers."""
        self._launcher = launcher
        self._files = files
        self._queued = queued
        self.tasks: set[asyncio.Task[None]] = set()  # reads for models under `prefetch`

    def begin(self, plan: Plan, queued: Iterable[Worker], devices: Sequence[Device]) -> None:
        """Let workers that wait by this plan read their files meanwhile, in the order of the queue."""
        in_order = sorted(queued, key=lambda worker: (-worker.preset.priority, worker.since))
        sizes = [
            (worker.id, self._bytes_to_read(worker))
            for worker in in_order if worker.id in plan.waits and not (worker.best_effort or worker.prefetch.is_set())
        ]  # fmt: skip
        if sizes:
            chosen = set(early_start.readable(sizes, devices, self._bytes_in_flight()))
            for worker in (worker for worker in in_order if worker.id in chosen):
                worker.prefetch.set()

    def read_files(self, presets: Iterable[Preset], devices: Sequence[Device]) -> None:
        """Read the files of models that are expected to be requested soon."""
        sizes = []
        for preset in presets:
            snapshot = self._files.find(preset) or ""
            files = self._files.weights(self._files.loads_from(preset, snapshot))
            sizes.append((tuple(files), sum(files.values())))
        for chosen in early_start.readable(sizes, devices, self._bytes_in_flight()):
            assert isinstance(chosen, tuple)
            task = asyncio.get_running_loop().create_task(self._read(chosen), name="prefetch")
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def _read(self, files: tuple[str, ...]) -> None:
        try:
            await self._launcher.read_ahead(files)
        except NotLocked as failed:
            log.warning("prefetch of files failed: %s", failed)

    def _bytes_in_flight(self) -> int:
        return sum([self._bytes_to_read(worker) for worker in self._queued() if worker.prefetch.is_set()])

    def _bytes_to_read(self, worker: Worker) -> int:
        """Return the size of the worker's files. It is cached, because a queued worker is planned many times."""
        if worker.file_sizes is None:
            worker.file_sizes = self._files.weights(worker.snapshot)
        return sum(worker.file_sizes.values())


__all__ = ["Prefetcher"]

"""Files that are brought into the page cache ahead of their load, as far as memory is free.

Two kinds: of those who have to wait for room, whose lives read them themselves once they are told, and of companions,
which nobody may ever ask for.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from router.config.presets import Preset
from router.fleet import early_start
from router.fleet.interfaces import Files
from router.fleet.worker import Worker
from router.launch.interface import Launcher, NotHeld
from router.planner.ledger import Device
from router.planner.types import Plan

log = logging.getLogger("router.fleet.fleet")


class ReadingAhead:
    """All of one fleet. Law: like the fleet's, no method awaits."""

    def __init__(self, launcher: Launcher, files: Files, queued: Callable[[], Iterable[Worker]]):
        """`queued` gives all who wait for room, who may be reading."""
        self._launcher = launcher
        self._files = files
        self._queued = queued
        self.tasks: set[asyncio.Task[None]] = set()
        """Those that read for companions."""

    def begin(self, plan: Plan, line: Iterable[Worker], devices: Sequence[Device]) -> None:
        """Have those of the `line` who wait by this plan read their files meanwhile, the first in line first."""
        line = sorted(line, key=lambda worker: (-worker.preset.priority, worker.since))
        sizes = [
            (worker.id, self._to_read(worker))
            for worker in line if worker.id in plan.waits and not (worker.best_effort or worker.reads.is_set())
        ]  # fmt: skip
        if sizes:
            chosen = set(early_start.readable(sizes, devices, self._reading()))
            for worker in (worker for worker in line if worker.id in chosen):
                worker.reads.set()

    def call(self, prefetch: Iterable[Preset], devices: Sequence[Device]) -> None:
        """Read the files of models that will be asked for together with one that loads."""
        sizes = []
        for preset in prefetch:
            snapshot = self._files.find(preset) or ""
            files = self._files.weights(self._files.loads_from(preset, snapshot))
            sizes.append((tuple(files), sum(files.values())))
        for chosen in early_start.readable(sizes, devices, self._reading()):
            assert isinstance(chosen, tuple)
            task = asyncio.get_running_loop().create_task(self._read(chosen), name="read ahead")
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def _read(self, files: tuple[str, ...]) -> None:
        try:
            await self._launcher.read_ahead(files)
        except NotHeld as failed:
            log.warning("files of a companion are not read ahead: %s", failed)

    def _reading(self) -> int:
        """Bytes that are being read ahead for those who wait."""
        return sum([self._to_read(worker) for worker in self._queued() if worker.reads.is_set()])

    def _to_read(self, worker: Worker) -> int:
        """Bytes of its files, which are looked up once: it may wait for long, and plans are many."""
        if worker.sizes is None:
            worker.sizes = self._files.weights(worker.snapshot)
        return sum(worker.sizes.values())

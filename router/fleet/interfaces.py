"""What the life of a worker needs of those around it: its fleet, and the snapshots on disk."""

from collections.abc import Mapping
from typing import Protocol

from router.config.presets import Preset
from router.events import EventLog
from router.fleet.backoff import Failure
from router.fleet.worker import Worker
from router.launch.interface import Launcher
from router.memory.checkpoint_facts import Checkpoint
from router.memory.learned import LearnedEstimates
from router.planner.ledger import DeviceId
from worker.protocol.argv import AdapterSource, Download


class Files(Protocol):
    """Snapshots on disk."""

    def find(self, preset: Preset) -> str | None:
        """Folder of the preset's complete snapshot, if there is one; looks at a few names only."""

    def fetched(self, preset: Preset, snapshot: str) -> None:
        """A download of `preset` has ended in `snapshot`."""

    def loads_from(self, preset: Preset, snapshot: str) -> str:
        """Folder that a worker of the preset's snapshot loads: another one if that was converted."""

    def give_up_converted(self, snapshot: str) -> bool:
        """What was to be loaded could not be: whether it was a converted snapshot, which is not used again."""

    def sweep(self) -> None:
        """Delete what was made of snapshots that are no longer there. Blocks on the disk."""

    @property
    def converted(self) -> Mapping[str, int]:
        """Bytes of disk of what was made of snapshots, by their folders; looks at nothing."""

    async def read(self, snapshot: str, preset: Preset) -> Checkpoint:
        """The facts in it, as `preset` changes them. Raises UnknownCheckpoint."""

    def weights(self, snapshot: str) -> Mapping[str, int]:
        """Bytes of each of its weight files, by path; looks at a few names only."""

    def look(self, preset: Preset) -> object:
        """What is on disk of it: equal as long as nothing there has changed; looks at a few names only."""

    def can_download_again(self, preset: Preset) -> bool:
        """Whether a download would find what is damaged of it, and bring it anew."""

    def download(self, preset: Preset) -> Download:
        """How to fetch it. Raises ApiError if it cannot be fetched."""

    def adapters(self, preset: Preset) -> list[AdapterSource]:
        """Those of `preset`, with the folders of such as are on the hub, if they are here; looks at few names only."""

    def missing_adapters(self, preset: Preset) -> list[Download]:
        """How to fetch those that are not here, and can be fetched."""


class World(Protocol):
    """What a life needs of its fleet."""

    launcher: Launcher
    calibration: LearnedEstimates
    events: EventLog
    files: Files

    def now(self) -> float: ...

    def changed(self) -> None:
        """Something that a plan depends on is different now."""

    def over(self, worker: "Worker") -> Failure | None:
        """This life has ended; called before anybody hears of it. What keeps its model from being tried again."""

    def capacities(self) -> Mapping[DeviceId, int]:
        """Bytes that could ever be had on each device."""

    def hopeless(self, worker: "Worker") -> bool:
        """Whether not even an empty machine has room for the weights alone."""

    def replace(self, worker: "Worker") -> None:
        """It is ready, and nobody reaches it: it takes no new leases, and ends with those that it has."""

    def min_residency(self, preset: Preset) -> float:
        """Seconds that a fresh worker of `preset` keeps its place while it is in use."""


__all__ = ["Files", "World"]

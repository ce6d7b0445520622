"""The interface of snapshots on disk, as the fleet uses it."""

from collections.abc import Mapping
from typing import Protocol

from router.config.presets import Preset
from router.memory.checkpoint_facts import Checkpoint
from worker.protocol.argv import AdapterSource, Convert, Download


class Files(Protocol):
    """Snapshots on disk."""

    def find(self, preset: Preset) -> str | None:
        """Return the folder of the preset's complete snapshot, if any. Reads a few directory entries only."""

    def fetched(self, preset: Preset, snapshot: str) -> None:
        """Record that a download of `preset` has made `snapshot`."""

    async def conversion(self, preset: Preset, snapshot: str) -> Convert | None:
        """Return the command that converts a downloaded snapshot.

        None for a local folder without pickled weights, for a snapshot that needs no conversion, and for one that is
        converted already or cannot be converted. Deletes incomplete targets first.
        """

    def must_convert(self, preset: Preset, snapshot: str) -> bool:
        """Return whether the snapshot cannot be loaded as it is and is not converted yet. Reads a few entries only."""

    def loads_from(self, preset: Preset, snapshot: str) -> str:
        """Return the folder that a worker loads: the converted copy of `snapshot` if there is one, else `snapshot`."""

    def give_up_converted(self, snapshot: str) -> bool:
        """Stop using `snapshot` if it is a converted copy or the target of one. Return whether it is."""

    def sweep(self) -> None:
        """Delete converted copies of snapshots that are gone or changed. Blocks on the disk."""

    @property
    def converted(self) -> Mapping[str, int]:
        """Bytes of converted copies by the folder of the original. Does not read the disk."""

    async def read(self, snapshot: str, preset: Preset) -> Checkpoint:
        """Read a snapshot's facts, with the overrides of `preset`. Raises UnknownCheckpoint."""

    def weights(self, snapshot: str) -> Mapping[str, int]:
        """Return the bytes of each weight file by path. Reads a few directory entries only."""

    def fingerprint(self, preset: Preset) -> object:
        """Return a value that changes with the model's files; None without files. Reads a few entries only."""

    def can_download_again(self, preset: Preset) -> bool:
        """A download would verify the files and replace damaged ones."""

    def download(self, preset: Preset) -> Download:
        """Return the download command. Raises ApiError if the model cannot be downloaded."""

    def adapters(self, preset: Preset) -> list[AdapterSource]:
        """Return the adapters of `preset`, with their folders for adapters from the hub that are here."""

    def missing_adapters(self, preset: Preset) -> list[Download]:
        """Return the download commands of missing adapters."""

    def missing_draft(self, preset: Preset) -> Download | None:
        """Return the download command of the draft model, if it is missing. Raises LoadFailed."""

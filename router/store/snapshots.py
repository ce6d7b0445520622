"""Snapshots: the folders with files of models, on disk or in the hub cache, and the commands that download them."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from router import DISTRIBUTION
from router.config.presets import HUB, Preset
from router.errors import LoadFailed
from router.memory import checkpoint
from router.memory.checkpoint import has_only_pickles
from router.memory.checkpoint_facts import Checkpoint, EstimateError, UnknownCheckpoint
from router.memory.estimate import version
from router.store.catalogue import find_snapshot
from router.store.converted import ConvertedSnapshots, can_be_converted
from worker.protocol.argv import AdapterSource, Convert, Download


class Snapshots:
    """Finds and reads snapshots, and builds the commands that download them."""

    def __init__(self, *, cache: str, state: Path, offline: bool, prepare: bool = True):
        """`prepare`: models are loaded from converted snapshots if there are any."""
        self._cache = cache
        self._demo = state / "demo"
        self._offline = offline
        self._prepare = prepare
        versions = [version(name) for name in ("transformers", "tokenizers", DISTRIBUTION)]
        self.conversions = ConvertedSnapshots(state / "converted", versions=versions)
        # Folders of demo models, by name; only `worker download` defines where they are made.
        self._demo_folders: dict[str, str] = {}

    def find(self, preset: Preset) -> str | None:
        """Return the folder of the preset's complete snapshot, if any. Reads a few directory entries only."""
        if preset.path:
            return preset.path
        if preset.demo:
            folder = self._demo_folders.get(preset.demo)
            return folder if folder is not None and os.path.isdir(folder) else None
        return find_snapshot(preset.repo, preset.revision, self._cache)

    def fetched(self, preset: Preset, snapshot: str) -> None:
        """Record that a download of `preset` has made `snapshot`."""
        if preset.demo:
            self._demo_folders[preset.demo] = snapshot

    def fingerprint(self, preset: Preset) -> object:
        """Return a value that changes with the model's files; None without files. Reads a few entries only."""
        folder = self.find(preset)
        if folder is None:
            return None
        try:
            with os.scandir(folder) as entries:
                return folder, sorted((entry.name, *_outside(entry)) for entry in entries)
        except OSError as error:
            return folder, error.errno

    async def read(self, snapshot: str, preset: Preset) -> Checkpoint:
        """Read a snapshot's facts, with the overrides of `preset`. Raises UnknownCheckpoint."""
        return await asyncio.to_thread(self.facts, Path(snapshot), preset)

    def facts(self, snapshot: Path, preset: Preset) -> Checkpoint:
        """As `read`, but blocks on the disk."""
        needs_weights = preset.load_format != "dummy"
        found = checkpoint.read(
            snapshot,
            override=preset.config_override,
            rope=preset.rope,
            needs_weights=needs_weights,
            task=preset.task,
        )
        if not preset.drafts_by_model:
            return found
        folder = self._folder(preset.model_draft)
        if folder is None:
            repo = preset.model_draft.removeprefix(HUB)
            raise UnknownCheckpoint(
                f"{preset.id}: the draft model {repo} is not in the cache; run router download {preset.id}"
            )
        draft = checkpoint.read(Path(folder), needs_weights=needs_weights)
        identity = f"{found.identity} {draft.identity}"
        return replace(found, draft=draft, draft_snapshot=folder, identity=identity)

    def _folder(self, path: str, *, adapter: bool = False) -> str | None:
        """Return the folder of a draft model or of an adapter in a preset; None if it is only on the hub."""
        return find_snapshot(*_hub_name(path), self._cache, adapter=adapter) if path.startswith(HUB) else path

    def missing_draft(self, preset: Preset) -> Download | None:
        """Return the download command of the draft model, if it is missing. Raises LoadFailed."""
        if not preset.drafts_by_model or self._folder(preset.model_draft) is not None:
            return None
        repo, revision = _hub_name(preset.model_draft)
        if self._offline:
            raise LoadFailed(
                f"{preset.id}: the draft model {repo} is not in the cache, and --offline forbids fetching it; start"
                " once without --offline, or point model-draft at a folder"
            )
        return Download(repo=repo, revision=revision, cache=self._cache)

    def weights(self, snapshot: str) -> dict[str, int]:
        """Return the bytes of each weight file by path. Reads a few directory entries only."""
        try:
            with os.scandir(snapshot) as entries:
                return {entry.path: entry.stat().st_size for entry in entries if entry.name.endswith(".safetensors")}
        except OSError:
            return {}

    async def conversion(self, preset: Preset, snapshot: str) -> Convert | None:
        """Return the command that converts a downloaded snapshot.

        None for a local folder without pickled weights, for a snapshot that needs no conversion, and for one that is
        converted already or cannot be converted. Deletes incomplete targets first.
        """
        is_local = preset.path and not has_only_pickles(snapshot)
        if not self._prepare or is_local or not can_be_converted(preset):
            return None
        try:
            facts = await self.read(snapshot, preset)
        except EstimateError:
            return None  # its load fails with this message
        return await asyncio.to_thread(self.conversions.command, snapshot, facts)

    def must_convert(self, preset: Preset, snapshot: str) -> bool:
        """Return whether the snapshot cannot be loaded as it is and is not converted yet. Reads a few entries only."""
        if not self._prepare or not can_be_converted(preset) or not has_only_pickles(snapshot):
            return False
        return self.conversions.find(snapshot) is None

    def loads_from(self, preset: Preset, snapshot: str) -> str:
        """Return the folder that a worker loads: the converted copy of `snapshot` if there is one, else `snapshot`."""
        # A preset with its own interpreter may have other libraries and gets the original.
        if not self._prepare or not can_be_converted(preset):
            return snapshot
        return self.conversions.find(snapshot) or snapshot

    def give_up_converted(self, snapshot: str) -> bool:
        """Stop using `snapshot` if it is a converted copy or the target of one. Return whether it is."""
        if not self.conversions.is_one(snapshot):
            return False
        self.conversions.give_up(Path(snapshot))
        return True

    def adapters(self, preset: Preset) -> list[AdapterSource]:
        """Return the adapters of `preset`, with their folders for adapters from the hub that are here."""
        return [
            replace(source, path=self._folder(source.path, adapter=True) or source.path) for source in preset.adapters
        ]

    def missing_adapters(self, preset: Preset) -> list[Download]:
        """Return the download commands of missing adapters."""
        if self._offline or not preset.adapter_slots:
            return []
        missing = [source.path for source in preset.adapters if not self._folder(source.path, adapter=True)]
        names = map(_hub_name, missing)
        return [Download(repo=repo, revision=revision, cache=self._cache, adapter=True) for repo, revision in names]

    def can_download_again(self, preset: Preset) -> bool:
        """Return whether a download would verify the files and replace damaged ones."""
        return not (preset.path or preset.demo or self._offline)

    def download(self, preset: Preset) -> Download:
        """Return the download command. Raises LoadFailed if the model cannot be downloaded."""
        if preset.demo:
            return Download(demo=preset.demo, target=str(self._demo))
        if self._offline:
            raise LoadFailed(
                f"{preset.id}: {preset.repo} at {preset.revision} is not in the cache, and --offline forbids fetching"
                " it; start once without --offline, or point `model` at a folder"
            )
        return Download(repo=preset.repo, revision=preset.revision, cache=self._cache)


def _hub_name(path: str) -> tuple[str, str]:
    """Return repository and revision of `hub:org/name:revision`."""
    repo, _, revision = path.removeprefix(HUB).partition(":")
    return repo, revision


def _outside(entry: os.DirEntry[str]) -> tuple[int, int]:
    """Return size and time of a file, or of the target of a link, as in the hub cache."""
    try:
        facts = entry.stat()
    except OSError:
        return -1, -1
    return facts.st_size, facts.st_mtime_ns

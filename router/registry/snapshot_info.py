"""Facts, metadata and texts from the files of models, for API responses."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.config.presets import Preset
from router.memory.checkpoint import json_object, meta
from router.memory.checkpoint_facts import Checkpoint, EstimateError, effective_ctx
from router.registry.shared_workers import SharedWorkers
from router.store.snapshots import Snapshots

READ_TIMEOUT = 5.0  # seconds that a response waits for the disk; a guess
UNREADABLE_PAUSE = 60.0  # seconds until unreadable files are read again although they have not changed; a guess


@dataclass(frozen=True, slots=True)
class SnapshotTexts:
    """The chat template, special tokens and generation defaults of a snapshot."""

    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    generation: Mapping[str, Any] = field(default_factory=dict)  # the content of generation_config.json


class SnapshotInfo:
    """Cached reader of the models' files. A slow disk delays a response by READ_TIMEOUT at most."""

    def __init__(self, files: Snapshots, shared_workers: SharedWorkers):
        self._files = files
        self._shared_workers = shared_workers
        self._facts: dict[str, tuple[str, Checkpoint]] = {}  # by model id: snapshot folder and its facts
        # By model id: the state of files that could not be read, and the time of it. A damaged pickle can take seconds.
        self._unreadable: dict[str, tuple[object, float]] = {}
        self._readings: dict[str, tuple[asyncio.Task[Checkpoint | None], float]] = {}  # running ones, with their start

    def forget(self, id: str) -> None:
        """Drop the facts of one model."""
        self._facts.pop(id, None)
        self._unreadable.pop(id, None)

    def clear(self) -> None:
        """Drop all facts, because files may have changed."""
        self._facts, self._unreadable = {}, {}  # new mappings: a running read adds its old facts to the old ones

    async def facts(self, preset: Preset) -> Checkpoint | None:
        """The facts of the preset's checkpoint.

        None if its files are missing, cannot be read, or reading takes longer than READ_TIMEOUT. Concurrent calls for
        one model share a reading and its deadline.
        """
        now = asyncio.get_running_loop().time()
        if preset.id not in self._readings:
            reading = asyncio.create_task(self._read(preset))
            reading.add_done_callback(lambda _: self._readings.pop(preset.id))
            self._readings[preset.id] = reading, now
        reading, began = self._readings[preset.id]
        # `wait` does not cancel the task at the timeout, so a slow reading still fills the cache for later calls.
        await asyncio.wait({reading}, timeout=max(0.0, began + READ_TIMEOUT - now))
        return reading.result() if reading.done() else None

    async def describe(self, preset: Preset) -> tuple[Checkpoint | None, dict[str, Any]]:
        """Facts and `meta` of a model, as lists of models contain them."""
        facts = await self.facts(preset)
        if facts is None:
            return None, {}
        try:
            n_ctx = effective_ctx(facts, preset)
        except EstimateError:
            n_ctx = 0
        return facts, meta(facts, n_ctx)

    async def texts(self, preset: Preset) -> SnapshotTexts:
        """The texts of a model whose facts are known; empty ones for another model."""
        known = self._facts.get(preset.id)
        return await asyncio.to_thread(_read_texts, Path(known[0])) if known is not None else SnapshotTexts()

    async def _read(self, preset: Preset) -> Checkpoint | None:
        facts_by_id, unreadable = self._facts, self._unreadable
        listed = self._shared_workers.listed.get(preset.id)
        worker = next(iter(listed.model.workers), None) if listed is not None else None
        snapshot = (worker.snapshot if worker is not None else "") or await asyncio.to_thread(self._find, preset)
        known = facts_by_id.get(preset.id)
        # Without a snapshot (deleted, or its folder is not mounted) the last known facts still describe the model.
        if known is not None and (not snapshot or known[0] == snapshot):
            return known[1]
        if not snapshot:
            return None
        now = asyncio.get_running_loop().time()
        state = snapshot, await asyncio.to_thread(self._files.fingerprint, preset)  # before the files are read
        before, failed = unreadable.get(preset.id, (None, 0.0))
        if before == state and now < failed + UNREADABLE_PAUSE:
            return None
        try:
            facts = await self._files.read(snapshot, preset)
        except EstimateError:
            if not preset.drafts_by_model:  # a missing draft model appears in another folder
                unreadable[preset.id] = state, now
            return None
        facts_by_id[preset.id] = (snapshot, facts)
        return facts

    def _find(self, preset: Preset) -> str:
        return self._files.find(preset) or ""


def _read_texts(folder: Path) -> SnapshotTexts:
    tokenizer = json_object(folder / "tokenizer_config.json")
    template = tokenizer.get("chat_template")
    if isinstance(template, list):  # several templates, by name
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), "")
    if not template:  # older checkpoints of vision models have it in a file of its own
        template = json_object(folder / "chat_template.json").get("chat_template", "")
    with contextlib.suppress(OSError, UnicodeDecodeError):
        template = (folder / "chat_template.jinja").read_text("utf-8")
    tokens = [tokenizer.get(name) for name in ("bos_token", "eos_token")]
    bos, eos = (str(token.get("content", "")) if isinstance(token, dict) else str(token or "") for token in tokens)
    generation = json_object(folder / "generation_config.json")
    return SnapshotTexts(template if isinstance(template, str) else "", bos, eos, generation)

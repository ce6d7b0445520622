"""`router download` and `router prepare`: the stages before a model's first load, with no server running.

`download` (or `router ... --download-only`) fetches the files of each model and its adapters, and converts them as the
router does after a download. Container builds use it. `prepare` only converts: also local folders, and snapshots that
were in the hub cache before.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from router.cli.worker_program import run_worker
from router.config.presets import Preset
from router.config.settings import Settings
from router.errors import RouterError
from router.fleet import worker_argv
from router.memory import checkpoint
from router.store.converted import can_be_converted
from router.store.snapshots import Snapshots
from worker.protocol.argv import Convert, Download
from worker.protocol.events import Converted, Downloaded
from worker.protocol.memory import MIB


def download(preset: Preset, settings: Settings, environ: Mapping[str, str], *, state: Path) -> str:
    """Download and convert what `preset` lacks; progress goes to stderr. Return the folder that it is loaded from.

    Blocks until the worker program has exited. Raises RouterErrors.
    """
    files = Snapshots(cache=settings.hub_cache, state=state, offline=settings.offline, prepare=settings.prepare)

    def fetch(command: Download) -> str:
        report = progress(f"{preset.id}: downloading {command.repo or command.demo}")
        return run_worker(
            preset, command, Downloaded, environ, report=report, offline=settings.offline, hf_token=settings.hf_token
        ).snapshot

    snapshot = files.find(preset) or fetch(files.download(preset))
    for adapter in files.missing_adapters(preset):
        fetch(adapter)
    draft = files.missing_draft(preset)
    if draft is not None:
        fetch(draft)
    command = asyncio.run(files.conversion(preset, snapshot))
    if command is not None:
        _convert(preset, command, environ)
    return files.loads_from(preset, snapshot)


class PrepareError(RouterError):
    """The snapshot cannot be converted."""


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """The result of `router prepare` for one snapshot."""

    snapshot: str
    target: str  # "" if there was nothing to do
    weights: int = 0  # bytes written

    @property
    def is_converted(self) -> bool:
        return self.weights > 0

    def __str__(self) -> str:
        """The result for a terminal."""
        if self.is_converted:
            return f"{self.snapshot}: converted weights ({self.weights / MIB:.1f} MiB) to {self.target}"
        if self.target and Path(self.target).is_dir():
            return f"{self.snapshot}: is already converted, in {self.target}"
        return f"{self.snapshot}: needs no conversion"


def prepare(preset: Preset, settings: Settings, environ: Mapping[str, str], *, state: Path) -> ConversionResult:
    """Convert the snapshot of `preset`; progress goes to stderr.

    Blocks until the worker program has exited. Raises PrepareError, and other RouterErrors for a snapshot that cannot
    be read or converted.
    """
    if not can_be_converted(preset):
        raise PrepareError(
            f"{preset.id}: models with `python`, `trust-remote-code` or `load-format = dummy` and built-in models are"
            " not converted"
        )
    files = Snapshots(cache=settings.hub_cache, state=state, offline=True)
    snapshot = files.find(preset)
    if snapshot is None:
        raise PrepareError(
            f"{preset.id}: {preset.repo} at {preset.revision} is not in the hub cache; `router download`"
            " downloads and converts it"
        )
    facts = checkpoint.read(Path(snapshot), override=preset.config_override, rope=preset.rope)
    command = files.conversions.command(snapshot, facts)
    if command is None:
        return ConversionResult(snapshot, files.conversions.find(snapshot) or "")
    done = _convert(preset, command, environ)
    return ConversionResult(snapshot, command.target, done.weights)


def _convert(preset: Preset, command: Convert, environ: Mapping[str, str]) -> Converted:
    command = replace(command, threads=worker_argv.threads(preset, on_host=True))
    return run_worker(preset, command, Converted, environ, report=progress(f"{preset.id}: converting"))


def progress(what: str) -> Callable[[int, int], None]:
    """A function that writes progress in bytes to stderr: each tenth as a line, or each step in place on a terminal."""
    shown = -1

    def report(done: int, total: int) -> None:
        nonlocal shown
        tenth, in_place = 10 * done // total if total else 0, sys.stderr.isatty()
        if not total or (tenth == shown and not in_place):
            return
        shown = tenth
        end = "\n" if not in_place or done >= total else ""
        line = f"{what}: {done / MIB:.1f} of {total / MIB:.1f} MiB"
        print(f"\r{line}" if in_place else line, end=end, file=sys.stderr, flush=True)

    return report

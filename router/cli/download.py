"""`router download`, and `router ... --download-only`: the stages before a model's first load, with no server running.

The files of each model and its adapters are downloaded, and converted as the router does after a download. Container
builds use it. `router prepare` is the second stage alone, and converts local folders, too.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from router.cli.worker_program import run_worker
from router.config.presets import Preset
from router.config.settings import Settings
from router.fleet import worker_argv
from router.store.snapshots import Snapshots
from worker.protocol.argv import Download
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
        command = replace(command, threads=worker_argv.threads(preset, on_host=True))
        run_worker(preset, command, Converted, environ, report=progress(f"{preset.id}: converting"))
    return files.loads_from(preset, snapshot)


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

"""`router prepare MODEL`: convert a model's snapshot once, so that its loads need not, with no server running.

The router itself converts a snapshot only after it has downloaded it. This command is for local folders and for
snapshots that were in the hub cache before.
"""

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
from worker.protocol.events import Converted


class PrepareError(RouterError):
    """The snapshot cannot be converted."""


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """The result of one conversion."""

    snapshot: str
    target: str  # "" if there was nothing to do
    weights: int = 0  # bytes written
    tokenizer: bool = False

    @property
    def is_converted(self) -> bool:
        return self.weights > 0 or self.tokenizer


def prepare(
    preset: Preset,
    settings: Settings,
    environ: Mapping[str, str],
    *,
    state: Path,
    report: Callable[[int, int], object],
) -> ConversionResult:
    """Convert the snapshot of a preset. Blocks until the worker program has exited.

    `report` is called with the steps done and their total. Raises PrepareError and other RouterErrors for a snapshot
    that is missing, cannot be read or cannot be converted.
    """
    if not can_be_converted(preset):
        raise PrepareError(
            f"{preset.id}: models with `python`, `trust-remote-code` or `load-format = dummy` and built-in models are"
            " not converted"
        )
    snapshots = Snapshots(cache=settings.hub_cache, state=state, offline=True)
    snapshot = snapshots.find(preset)
    if snapshot is None:
        raise PrepareError(
            f"{preset.id}: {preset.repo} at {preset.revision} is not in the hub cache; `router download`"
            " downloads and converts it"
        )
    facts = checkpoint.read(Path(snapshot), override=preset.config_override, rope=preset.rope)
    command = snapshots.conversions.command(snapshot, facts)
    if command is None:
        return ConversionResult(snapshot, snapshots.conversions.find(snapshot) or "")
    command = replace(command, threads=worker_argv.threads(preset, on_host=True))
    done = run_worker(preset, command, Converted, environ, report=report)
    return ConversionResult(snapshot, command.target, done.weights, done.tokenizer)


def text(prepared: ConversionResult) -> str:
    """Return the result for a terminal."""
    if prepared.is_converted:
        parts = [f"weights ({prepared.weights / 2**20:.1f} MiB)"] if prepared.weights else []
        parts += ["tokenizer"] * prepared.tokenizer
        return f"{prepared.snapshot}: converted {' and '.join(parts)} to {prepared.target}"
    if prepared.target and Path(prepared.target).is_dir():
        return f"{prepared.snapshot}: is already converted, in {prepared.target}"
    return f"{prepared.snapshot}: needs no conversion"

"""`router estimate`: the memory of a model on this machine, without a server.

No weights are loaded, and of a repository that is not in the cache only headers are fetched. The exact estimate comes
from the worker program.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from router.cli import hub_headers
from router.cli.worker_program import run_worker
from router.config.presets import Preset
from router.config.resolve import LoadedPresets
from router.config.settings import Settings
from router.errors import RouterError
from router.fleet import worker_argv
from router.launch.devices import Devices
from router.launch.spawn import may_fork
from router.memory import estimate as estimates
from router.memory import sharding
from router.memory.checkpoint_facts import DTYPE_BYTES, Checkpoint, compute_dtype, effective_ctx, serves_embeddings
from router.memory.estimate import RUNTIME_FORKED, RUNTIME_HOST, UNKNOWN, Estimate
from router.memory.learned import LearnedEstimates
from router.memory.remedies import Remedies, remedies
from router.memory.segments import bits_on_load, head_bytes, quantized_and_kept, weight_bytes
from router.memory.sharding import allowed_devices, best_estimate, capacities, device_order, first_fitting
from router.planner.ledger import HOST, LOCAL, DeviceId, Reading
from router.store.catalogue import find_snapshot
from router.store.snapshots import Snapshots
from worker.protocol.argv import Estimate as EstimateCommand
from worker.protocol.events import Downloaded, Estimated
from worker.protocol.memory import FORK_SERVER_BYTES, LIBRARY_CODE_BYTES

_SEGMENTS = ("weights", "context", "compute", "runtime")
_SOURCES = {
    "static": "static; not learned yet",
    "weights": "a guess from the weights alone",
    "exact": "exact: the worker's own trace",
    "learned": "learned: measured when it ran",
    "preset": "the preset's own figure",
}


class EstimateFailed(RouterError):
    """No estimate can be made."""


@dataclass(frozen=True)
class DeviceReport:
    """One device, in bytes."""

    device: str
    name: str
    needs: int  # of the model on this device
    total: int
    margin: int
    usable_when_empty: int  # for all workers together: the size or the limit of the device, less the margin
    usable_now: int  # the part of it that is free

    @property
    def fits(self) -> bool:
        return self.needs <= self.usable_when_empty

    @property
    def fits_now(self) -> bool:
        return self.needs <= self.usable_now


@dataclass(frozen=True)
class Report:
    """The estimate of a model and its fit on the devices of this machine."""

    preset: Preset
    facts: Checkpoint
    files: str  # the folder of the snapshot, or its address on the hub
    is_downloaded: bool
    estimate: Estimate  # with the least KV cache
    remedies: Remedies  # empty if it fits
    steps: int  # of the range of the KV cache that the devices would grant if they were empty
    is_forked: bool  # of a worker that is forked from the fork server, not executed
    on_host: bool  # the model runs on main memory
    ranks: int  # of tensor parallelism
    devices: tuple[DeviceReport, ...]
    beside: tuple[str, ...]  # ids of other presets, each of which would fit on an empty device beside this model
    warnings: tuple[str, ...]  # keys of placement that have no effect, or another one than the preset asks for

    @property
    def main_devices(self) -> list[DeviceReport]:
        """The devices of the model, without the main memory that it needs beside accelerators."""
        return [device for device in self.devices if self.on_host or device.device != "cpu"]

    @property
    def fits(self) -> bool:
        """True if one allowed device has enough memory (or all devices of a split), and main memory beside them."""
        enough = all if len(self.estimate.shards) > 1 else any
        beside = (device for device in self.devices if device not in self.main_devices)
        return enough(device.fits for device in self.main_devices) and all(device.fits for device in beside)

    @property
    def tokens(self) -> int:
        """Tokens of the longest request; 0 for a model without a KV cache."""
        return 0 if serves_embeddings(self.facts, self.preset) else effective_ctx(self.facts, self.preset)

    @property
    def dtype(self) -> str:
        return compute_dtype(self.facts, self.preset, on_host=self.on_host)

    @property
    def quantized_on_load(self) -> bool:
        return bool(bits_on_load(self.facts, self.preset))

    @property
    def quantization(self) -> str:
        """The method of the checkpoint, or of the load; empty if the weights are not quantized."""
        return self.facts.quantization or (self.preset.quantization if self.quantized_on_load else "")

    @property
    def unquantized(self) -> int:
        """Bytes of the floating-point weights."""
        return quantized_and_kept(self.facts, self.preset, on_host=self.on_host)[1]

    @property
    def quantized(self) -> int:
        """Bytes of the quantized weights with their scales."""
        return max(0, weight_bytes(self.facts, self.preset, on_host=self.on_host) - self.unquantized)

    @property
    def runtime_is_measured(self) -> bool:
        """True if the overhead of a process was measured on this type of device, whatever model the process had."""
        source, overhead = self.estimate.source, self.estimate.overhead
        if source in ("learned", "preset"):
            return True
        # An exact estimate runs on main memory and measures its own process.
        return bool(overhead.host) or source == "exact" if self.on_host else bool(overhead.device)


class Machine:
    """The settings, the devices and the recorded estimates of this machine. Blocks on the driver."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], state: Path):
        self.settings, self.environ, self.state = settings, environ, state
        with contextlib.closing(Devices(environ)) as devices:
            self.readings = devices.read()
            self._margins = devices.by_device(settings.models_memory_margin, "--models-memory-margin")
            limits = devices.by_device(settings.device_limit, "--device-limit")
        if settings.fork_server:
            held = FORK_SERVER_BYTES + LIBRARY_CODE_BYTES
            self.readings = [replace(each, shared=held) if each.id.index == HOST else each for each in self.readings]
        self.capacities = capacities(self.readings, self._margin, limits.get)
        records = state / "estimates.json"
        self._records = LearnedEstimates(records, driver=devices.driver) if records.is_file() else None

    def _margin(self, device: DeviceId) -> int:
        return self._margins.get(device, self.settings.models_memory_margin.get("", 0))

    def forks(self, preset: Preset) -> bool:
        return self.settings.fork_server and may_fork(worker_argv.program_of(preset, preset.id), "serve")

    def estimate(self, preset: Preset, facts: Checkpoint, choice: sharding.Choice, *, learns: bool = True) -> Estimate:
        """The best estimate without a run of the worker program. Without `learns`, learned figures are left out. Raises
        EstimateError."""
        threads = worker_argv.threads(preset, on_host=choice.on_host, ranks=choice.ranks)
        return best_estimate(
            choice,
            facts,
            preset,
            self.readings,
            self._records,
            forked=self.forks(preset),
            threads=threads,
            or_executed=True,
            learns=learns,
        )

    def static(self, preset: Preset, facts: Checkpoint, choice: sharding.Choice) -> Estimate:
        """The static estimate, with the process overhead that was measured on this machine. Raises EstimateError."""
        forked, overhead = self.forks(preset), UNKNOWN
        if self._records is not None:
            overhead = self._records.overhead(sharding.device_type(choice, self.readings), forked=forked)
        threads = worker_argv.threads(preset, on_host=choice.on_host, ranks=choice.ranks)
        return sharding.static_estimate(choice, facts, preset, threads=threads, forked=forked, overhead=overhead)

    def exact(self, preset: Preset, facts: Checkpoint, choice: sharding.Choice, folder: Path) -> Estimate:
        """The estimate of the worker program; that of the preset if it has its own. Raises RouterError."""
        first, forked = self.static(preset, facts, choice), self.forks(preset)
        if first.source == "preset":
            return first
        command = worker_argv.model_options(
            EstimateCommand,
            preset,
            facts,
            str(folder),
            on_host=choice.on_host,
            layers=choice.layers,
            ranks=choice.ranks,
            overhead=first.overhead.device,
            host_overhead=0 if choice.on_host else first.overhead.beside_device(forked=forked),
        )
        traced = run_worker(preset, command, Estimated, self.environ)
        if forked:
            # The traced process was executed, so it could not measure what a forked worker shares with the fork server.
            shared = RUNTIME_HOST - RUNTIME_FORKED
            traced = replace(traced, inherited=int(shared / estimates.INHERITED_SHARE))
        return estimates.from_trace(traced, preset, forked=forked, first=first)

    def forget(self, facts: Checkpoint) -> None:
        """Drop the learned figures of a model, for all settings."""
        if self._records is not None:
            self._records.forget(facts)

    def remedies(
        self,
        preset: Preset,
        facts: Checkpoint,
        choice: sharding.Choice,
        estimate: Estimate,
        bounds: Mapping[DeviceId, int],
    ) -> Remedies:
        """The keys with which a model would fit that does not."""
        threads = worker_argv.threads(preset, on_host=choice.on_host, ranks=choice.ranks)
        room = {**self.capacities, **bounds}
        return remedies(facts, preset, choice, estimate, room, threads=threads, forked=self.forks(preset))

    @property
    def host_capacity(self) -> int:
        return self.capacities[DeviceId(LOCAL, HOST)]

    def capacity(self, device: DeviceId, bounds: Mapping[DeviceId, int]) -> int:
        """Bytes of a device for all workers together, and at most the bound of the preset."""
        capacity = self.capacities[device]
        return min(capacity, bounds.get(device, capacity))

    def report(self, reading: Reading, needs: int, bounds: Mapping[DeviceId, int]) -> DeviceReport:
        margin, usable = self._margin(reading.id), self.capacity(reading.id, bounds)
        free = max(0, min(usable, reading.total - margin - reading.used))
        return DeviceReport(str(reading.id), reading.name, needs, reading.total, margin, usable, free)


def report(
    preset: Preset, loaded: LoadedPresets, machine: Machine, *, exact: bool = False, forget: bool = False
) -> Report:
    """Estimate the memory of a preset. Blocks on the disk, the hub and the worker program. Raises RouterError.

    `forget`: first drop what was learned of its files.
    """
    settings = machine.settings
    allowed = allowed_devices(preset, machine.readings)
    on_host = all(device.index == HOST for device in allowed)
    with tempfile.TemporaryDirectory(prefix="router-estimate-") as temporary:
        snapshots = Snapshots(cache=settings.hub_cache, state=machine.state, offline=True, prepare=settings.prepare)
        folder, files = _files(preset, machine, snapshots, Path(temporary))
        is_downloaded = files == str(folder)
        if is_downloaded:
            folder = Path(snapshots.loads_from(preset, files))  # a conversion may take another size
        elif exact:
            raise EstimateFailed(f"{preset.id}: --exact wants the files here; `router` fetches them on first use")
        facts = snapshots.facts(folder, preset)
        if forget:
            machine.forget(facts)
        order = device_order(preset, machine.readings, allowed)
        room = sharding.limited(preset, machine.readings, machine.capacities)
        bounds = sharding.bounded(preset, order, room)

        def choose(*, learns: bool) -> tuple[sharding.Choice, Estimate, bool]:
            def estimate_of(choice: sharding.Choice) -> Estimate:
                if exact:
                    return machine.exact(preset, facts, choice, folder)
                return machine.estimate(preset, facts, choice, learns=learns)

            choices = sharding.choices(facts, preset, allowed, order, room)
            choice, found = first_fitting(choices, estimate_of, bounds, can_wait=lambda _: False)
            fits = sharding.fits(choice, found.shards, bounds) and (on_host or found.host <= machine.host_capacity)
            return choice, found, fits

        choice, estimate, fit = choose(learns=True)
        if estimate.source == "learned" and not fit:
            choice, estimate, fit = choose(learns=False)  # as at a load: a learned figure refuses no model
    needs = dict.fromkeys(choice.devices, estimate.shards[0])
    if choice.shards > 1:
        needs = dict(zip(sharding.assigned(choice, estimate.shards, bounds), estimate.shards, strict=True))
    left = max(machine.capacity(device, bounds) - size for device, size in needs.items())
    if not on_host:
        needs[DeviceId(LOCAL, HOST)] = estimate.host
    readings = [reading for reading in machine.readings if reading.id in needs]
    return Report(
        preset=preset,
        facts=facts,
        files=files,
        is_downloaded=is_downloaded,
        estimate=estimate,
        remedies=Remedies() if fit else machine.remedies(preset, facts, choice, estimate, bounds),
        steps=sharding.grantable(choice, estimate, bounds),
        is_forked=machine.forks(preset),
        on_host=on_host,
        ranks=choice.ranks,
        devices=tuple(machine.report(reading, needs[reading.id], bounds) for reading in readings),
        beside=tuple(_beside(preset, loaded, machine, allowed, left)),
        warnings=(*sharding.unused(preset, facts, machine.readings, allowed), *filter(None, [choice.note])),
    )


def check(loaded: LoadedPresets, machine: Machine) -> tuple[dict[str, str], list[str]]:
    """Return a message for each model with files on this machine that no empty device holds, and the warnings of all
    models.

    A preset that changes config.json is estimated by the worker program, which knows the classes of configurations, and
    its errors are messages, too. Other models without an estimate are left out.
    """
    found: dict[str, str] = {}
    warnings: list[str] = []
    alone = replace(loaded, presets={})  # without the models that would fit beside it
    for preset in loaded.presets.values():
        if not preset.path and not (
            preset.repo and find_snapshot(preset.repo, preset.revision, machine.settings.hub_cache)
        ):
            continue
        changes_config = bool(preset.config_override or preset.rope)
        try:
            answer = report(preset, alone, machine, exact=changes_config)
        except RouterError as error:
            if changes_config:
                found[preset.id] = str(error)
            continue  # its first load and `router estimate` tell why
        warnings += (f"{preset.id}: {warning}" for warning in answer.warnings)
        if not answer.fits:
            lines = [_device_line(device, answer.estimate) for device in answer.devices if not device.fits]
            lines += [str(answer.remedies)] * bool(answer.remedies.settings)
            found[preset.id] = f"{preset.id}: {'; '.join(' '.join(line.split()) for line in lines)}"
    return found, warnings


def _files(preset: Preset, machine: Machine, snapshots: Snapshots, temporary: Path) -> tuple[Path, str]:
    """The folder of the model's files, and their address. Files that are only on the hub have a skeleton in
    `temporary`. A built-in model is made where its first load would make it."""
    settings, environ = machine.settings, machine.environ
    if preset.demo:
        made = run_worker(preset, snapshots.download(preset), Downloaded, environ).snapshot
        return Path(made), made
    folder = preset.path or find_snapshot(preset.repo, preset.revision, settings.hub_cache)
    if folder is not None:
        return Path(folder), folder
    if settings.offline:
        raise EstimateFailed(
            f"{preset.id}: the files of {preset.repo} at {preset.revision} are not here, and --offline forbids asking"
            " the hub; leave it out, or name a folder"
        )
    hub_headers.skeleton(preset.repo, preset.revision, temporary, environ=environ, token=settings.hf_token)
    return temporary, f"{preset.repo} at {preset.revision}, headers from the hub"


def _beside(
    preset: Preset, loaded: LoadedPresets, machine: Machine, allowed: frozenset[DeviceId], left: int
) -> Iterator[str]:
    """The ids of other presets with files on this machine that need at most `left` bytes on an allowed device."""
    cache = machine.settings.hub_cache
    snapshots = Snapshots(cache=cache, state=machine.state, offline=True)
    for other in loaded.presets.values():
        folder = other.path or (find_snapshot(other.repo, other.revision, cache) if other.repo else None)
        if other.id == preset.id or folder is None:
            continue
        try:
            devices = allowed_devices(other, machine.readings)
            estimate = machine.estimate(other, snapshots.facts(Path(folder), other), sharding.Choice(devices=devices))
        except RouterError:
            continue  # a report of that model contains the error
        if devices & allowed and max(estimate.shards) <= left:
            yield other.id


def document(report: Report) -> dict[str, Any]:
    """The report as a JSON document. Sizes are in bytes."""
    estimate = report.estimate
    return {
        "model": report.preset.id,
        "files": report.files,
        "downloaded": report.is_downloaded,
        "source": estimate.source,
        "note": estimate.note,
        "warnings": list(report.warnings),
        "dtype": report.dtype,
        "kv_cache_dtype": report.preset.kv_cache_dtype,
        "quantization": report.quantization,
        "quantized": report.quantized,
        "unquantized": report.unquantized,
        "ctx_size": report.tokens,
        "parallel": report.preset.parallel,
        "forked": report.is_forked,
        **{segment: sum(getattr(estimate, segment)) for segment in _SEGMENTS},
        "runtime_source": "measured" if report.runtime_is_measured else "assumed",
        "host": estimate.host,
        "total": estimate.total,
        "kv_cache": _kv_cache(report),
        "fits": report.fits,
        "would_fit": {"settings": list(report.remedies.settings), "together": report.remedies.are_joint},
        "layers": list(estimate.layers),
        "ranks": report.ranks,
        "devices": [{**asdict(device), "fits": device.fits, "fits_now": device.fits_now} for device in report.devices],
        "beside": list(report.beside),
    }


def _kv_cache(report: Report) -> dict[str, dict[str, int]]:
    """The least and the most KV cache, and what the devices of the model would grant if they were empty."""
    estimate = report.estimate
    sizes = {"least": 0, "granted": report.steps, "most": estimate.kv_steps}
    caches = {name: estimate.granted(steps) for name, steps in sizes.items()}
    return {name: {"tokens": cache.kv_tokens, "bytes": sum(cache.context)} for name, cache in caches.items()}


def text(report: Report) -> str:
    """The report for a terminal."""
    preset, estimate, method = report.preset, report.estimate, report.quantization
    dtype = f"{method}, {report.dtype}" if method else report.dtype
    task = f"context {report.tokens} x {preset.parallel} sequences" if report.tokens else "embeds or scores texts"
    lines = [f"{preset.id}   {dtype}, {task}", f"files     {report.files}"]
    if estimate.source == "preset":
        lines.append(_line("required", sum(estimate.shards), "required-memory of the preset"))
    else:
        lines.append(_line("weights", sum(estimate.weights), "from checkpoint headers"))
        if method:
            quantized = f"quantised tensors with their scales take {_size(report.quantized)}"
            parts = ": embeddings, head, norms, routers and experts" if report.quantized_on_load else ""
            lines.append(_line("", None, f"{quantized}; {_size(report.unquantized)} stay in {report.dtype}{parts}"))
        lines.append(_line("context", sum(estimate.context), _context_formula(report)))
        lines.append(_line("compute", sum(estimate.compute), _compute_bound(report)))
        lines.append(_line("runtime", sum(estimate.runtime), _runtime_parts(report)))
    if estimate.host:
        lines.append(_line("host", estimate.host, "main memory beside the device"))
    lines.append(_line("total", estimate.total, _SOURCES[estimate.source]))
    lines += _range_lines(report)
    if estimate.note:
        lines.append(f"{'note':9} {estimate.note}")
    lines += [f"{'warning':9} {warning}" for warning in report.warnings]
    lines += _shard_lines(report)
    lines += [_device_line(device, estimate) for device in report.devices]
    if report.remedies.settings:
        lines.append(f"{'to fit':9} {report.remedies}")
    if report.beside:
        lines.append(f"{'beside':9} fits, one of: {', '.join(report.beside)}")
    return "\n".join(lines)


def _device_line(device: DeviceReport, estimate: Estimate) -> str:
    usable = _size(device.usable_when_empty)
    if device.fits:
        now = "and now" if device.fits_now else f"not now: {_size(device.usable_now)} are free"
        return f"{device.device:9} fits when empty: {usable} usable; {now}"
    fits_without_margin = device.needs <= min(device.total, device.usable_when_empty + device.margin)
    lower = ["required-memory"] if estimate.source == "preset" else []
    if fits_without_margin:
        lower.insert(0, f"--models-memory-margin ({_size(device.margin)})")
    needs = f"{_size(device.needs)} needed at least, {usable} usable when empty"
    return f"{device.device:9} does not fit: {needs}" + (f"; lower {' or '.join(lower)}" if lower else "")


def _shard_lines(report: Report) -> Iterator[str]:
    """The bytes of each shard of a model that is split over several devices."""
    estimate = report.estimate
    shards = zip(*(getattr(estimate, segment) for segment in _SEGMENTS), strict=True)
    sums = [" + ".join(map(_size, shard)) for shard in shards]
    if report.ranks > 1:
        if len(sums) > 1:
            yield _line("each of", estimate.shards[0], f"{len(sums)} devices: {sums[0]}")
        limits = "no CUDA graphs, no reordered weights"
        yield _line("ranks", None, f"each matrix divided among {report.ranks} processes; {limits}")
        return
    first = 0
    for shard, count in enumerate(estimate.layers):
        layers = f"layers {first} to {first + count - 1}"
        yield _line(f"part {shard}", estimate.shards[shard], f"{layers}: {sums[shard]}")
        first += count
    if estimate.layers:
        yield _line("split", None, f"over {len(report.main_devices)} devices; no CUDA graphs")


def _range_lines(report: Report) -> Iterator[str]:
    """The KV cache above the least, if its size is not fixed."""
    if not report.estimate.kv_steps:
        return
    cache = _kv_cache(report)
    if report.fits:
        words = f"KV cache of {cache['granted']['tokens']} tokens, if nothing else is loaded"
        yield _line("granted", cache["granted"]["bytes"], words)
    words = f"KV cache of {cache['most']['tokens']} tokens, the full context of {report.preset.parallel} sequences"
    yield _line("most", cache["most"]["bytes"], words)


def _context_formula(report: Report) -> str:
    facts, preset = report.facts, report.preset
    if not report.tokens:
        return "no cache"
    if report.estimate.source == "weights":
        return "not known"
    parts = []
    if facts.attending:
        element = DTYPE_BYTES.get(report.dtype, 4)
        dims = facts.head_dim, facts.value_dim or facts.head_dim
        head = sum(head_bytes(preset.kv_cache_dtype, dim, element) for dim in dims)
        dtype = report.dtype if preset.kv_cache_dtype == "auto" else preset.kv_cache_dtype
        heads = f"{_count(facts.attending, 'layer')} x {_count(facts.kv_heads, 'KV head')}"
        least = ", for one request" if report.estimate.kv_steps else ""
        parts.append(f"{heads} x {head} B of {dtype} x {report.estimate.kv_tokens} tokens{least}")
    if facts.cross_attention:
        parts.append("as much for what the encoder read")
    if facts.state_layers:
        sequences = report.estimate.kv_tokens // report.tokens if facts.aligned else preset.parallel
        parts.append(f"{_count(facts.state_layers, 'layer')} with states of {_count(sequences, 'sequence')}")
    return ", and ".join(parts)


def _compute_bound(report: Report) -> str:
    if report.estimate.source == "weights":
        return "not known, taken as a multiple of the weights"
    return "largest prefill chunk or decode step, logits included" if report.tokens else "largest batch of texts"


def _runtime_parts(report: Report) -> str:
    device = report.main_devices[0].name or "such a device"
    source = f"measured on {device}" if report.runtime_is_measured else f"assumed until a worker has run on {device}"
    reserved = f"; reserved-memory, {_size(report.estimate.reserved)}" if report.estimate.reserved else ""
    if not report.on_host:
        return f"device context and libraries, {source}{reserved}"
    # Nearly all memory of a forked process is shared, and the rest does not depend on the machine.
    process = "forked, without what it shares" if report.is_forked else f"libraries ({source})"
    grammars = ", and tables for grammars" if report.tokens else ""
    return f"the process: {process}, its tokenizer{grammars}{reserved}"


def _line(label: str, size: int | None, words: str) -> str:
    return f"{label:9} {'' if size is None else _size(size):>11}   {words}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _size(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 10 << 30 else f"{size / (1 << 20):.1f} MiB"

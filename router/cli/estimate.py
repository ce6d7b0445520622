"""What a model would take, asked of no server: its files here or on the hub, this machine's devices, what was learned.

Nothing is loaded and nothing is fetched but headers. The exact figure comes from the worker's own program.
"""

import difflib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from router.cli import hub_headers
from router.config import kv_types, resolve
from router.config.presets import Preset
from router.config.resolve import LoadedPresets
from router.config.settings import Settings
from router.errors import ConfigError, RouterError
from router.fleet import worker_argv
from router.launch import environment
from router.launch.devices import Devices
from router.memory import checkpoint, sharding
from router.memory import estimate as estimates
from router.memory.checkpoint_facts import DTYPE_BYTES, Checkpoint, compute_dtype, effective_ctx, serves_embeddings
from router.memory.estimate import RUNTIME_FORKED, RUNTIME_HOST, Estimate
from router.memory.learned import LearnedEstimates
from router.memory.segments import bits_on_load, packing, weight_bytes
from router.memory.sharding import allowed_devices, best_estimate, capacities, device_order, first_fitting
from router.planner.ledger import HOST, DeviceId, Reading
from router.store.catalogue import LocalDisk, find_snapshot
from router.store.snapshots import Snapshots
from worker.protocol.argv import Download, to_argv
from worker.protocol.argv import Estimate as EstimateCommand
from worker.protocol.events import Downloaded, Estimated, Failed, decode

EXACT_TIMEOUT = 120.0
"""Seconds that `worker estimate` may take."""


SPARED = RUNTIME_HOST - RUNTIME_FORKED
"""Bytes of main memory that a worker does without if it is forked."""


class ForecastError(RouterError):
    """No forecast can be made; the message is for a person."""


@dataclass(frozen=True)
class Room:
    """One device, as this model would find it. Bytes."""

    id: str
    name: str
    needs: int
    total: int
    capacity: int
    """What our workers could ever have of it together: its size or limit, less the margin."""
    free: int
    """Of that, what nobody uses right now."""
    margin: int
    is_main: bool
    """The model's own device, rather than main memory beside it."""

    @property
    def fits(self) -> bool:
        return self.needs <= self.capacity

    def remedy(self, estimate: Estimate) -> str:
        """What lets the model of this estimate fit, if it does not."""
        without_margin = min(self.total, self.capacity + self.margin)
        margin = f"--models-memory-margin ({_size(self.margin)}), " if self.needs <= without_margin else ""
        return f"lower {margin}{estimate.lowered_by}"


@dataclass(frozen=True)
class Forecast:
    preset: Preset
    facts: Checkpoint
    files: str
    """Where they were read: a folder, or the hub's address of the repository."""
    is_here: bool
    estimate: Estimate
    forked: bool
    """Of a worker that is forked from the router's nursery; False: of one that is executed."""
    tokens: int
    """Of one request; 0 for a model that has no cache of them."""
    dtype: str
    rooms: tuple[Room, ...]
    packed: int
    """Bytes of the weights that are quantised, scales included."""
    unpacked: int
    """Bytes of the weights that are plain floating point: all, or what stays in high precision."""
    ranks: int
    """Among how many processes its matrices are divided; 1: they are not."""
    beside: tuple[str, ...]
    """Other models of the presets, files here, that fit beside it on an empty device, each alone."""

    @property
    def fits(self) -> bool:
        """On some device that it may take, or on all that it is split over, with main memory for what stands beside."""
        mains = [room for room in self.rooms if room.is_main]
        is_held = all if len(self.estimate.shards) > 1 else any
        return is_held(room.fits for room in mains) and all(room.fits for room in self.rooms if not room.is_main)


def forecast(
    name: str,
    settings: Settings,
    loaded: LoadedPresets,
    model_flags: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    state: Path,
    exact: bool = False,
) -> Forecast:
    """Of a model of the presets, a folder or a repository. Blocks on disk, hub and, if `exact`, the worker's program.

    `state`: the folder that learned figures lie in. Raises ConfigError for a name that is none of the three, and
    RouterError with a message for whatever else stands in the way.
    """
    preset = find(name, loaded, model_flags, environ)
    devices = Devices(environ)
    try:
        readings = devices.read()
        margins = devices.by_device(settings.models_memory_margin, "--models-memory-margin")
        limits = devices.by_device(settings.device_limit, "--device-limit")
    finally:
        devices.close()
    margin = settings.models_memory_margin.get("", 0)
    places = allowed_devices(preset, readings)
    on_host = all(place.index == HOST for place in places)
    forked = settings.fork_server and worker_argv.program_of(preset, preset.id).may_fork
    records = state / "estimates.json"
    known = LearnedEstimates(records, driver=devices.driver) if records.is_file() else None
    with tempfile.TemporaryDirectory(prefix="router-estimate-") as spare:
        snapshots = Snapshots(cache=settings.hub_cache, state=state, offline=True, prepare=settings.prepare)
        folder, files = _files(preset, settings, snapshots, environ, Path(spare))
        is_here = files == str(folder)
        if is_here:  # what a load takes, which may have been converted
            folder = Path(snapshots.loads_from(preset, files))
        facts = _facts(preset, folder)
        if exact and not is_here:
            raise ForecastError(f"{preset.id}: --exact wants the files here; `router` fetches them on first use")
        room = capacities(readings, lambda id: margins.get(id, margin), limits.get)
        order = device_order(preset, readings, places)
        bounds = sharding.bounded(preset, order, room)

        def estimate_of(choice: sharding.Choice) -> Estimate:
            first = cost(preset, facts, choice, readings, known, fork_server=settings.fork_server)
            if not exact or first.source == "preset":
                return first
            return _exactly(preset, facts, str(folder), environ, choice=choice, forked=forked, first=first)

        choice, found = first_fitting(
            sharding.choices(facts, preset, places, order, room), estimate_of, bounds, can_wait=lambda _: False
        )
    needs = dict.fromkeys(choice.devices, found.shards[0])
    if choice.shards > 1:
        needs = dict(zip(sharding.assigned(choice, found.shards, bounds), found.shards, strict=True))
    rooms = tuple(
        _room(
            reading,
            needs.get(reading.id, found.host),
            min(room[reading.id], bounds.get(reading.id, room[reading.id])),
            margins.get(reading.id, margin),
            is_main=reading.id in needs,
        )
        for reading in readings
        if reading.id in needs or (reading.id.index == HOST and not on_host)
    )
    _, plain = packing(facts, preset, on_host=on_host)
    left = max((room.capacity - room.needs for room in rooms if room.is_main), default=0)
    return Forecast(
        preset=preset,
        facts=facts,
        files=files,
        is_here=is_here,
        estimate=found,
        forked=forked,
        tokens=0 if serves_embeddings(facts, preset) else effective_ctx(facts, preset),
        dtype=compute_dtype(facts, preset, on_host=on_host),
        rooms=rooms,
        packed=max(0, weight_bytes(facts, preset, on_host=on_host) - plain),
        unpacked=plain,
        ranks=choice.ranks,
        beside=tuple(_beside(preset, loaded, settings, readings, places, known, left)),
    )


def find(name: str, loaded: LoadedPresets, model_flags: Mapping[str, str], environ: Mapping[str, str]) -> Preset:
    """The preset that `name` means: one of `loaded` by its id or another name, else what `model =` could mean: a
    folder, `demo:NAME` or `org/name`.

    Raises ConfigError if it is none of them.
    """
    for preset in loaded.presets.values():
        if name == preset.id or name in preset.aliases:
            return preset
    if "/" not in name and not name.startswith("demo:") and not (name and Path(name).exists()):
        names = sorted({each for preset in loaded.presets.values() for each in (preset.id, *preset.aliases)})
        near = next(iter(difflib.get_close_matches(name, names, n=1)), "")
        hint = f"did you mean {near}?" if near else f"models are: {', '.join(loaded.presets) or 'none'}"
        raise ConfigError([f"{name!r} is no model, no folder and no repository (org/name); {hint}"])
    if any(word in name for word in "\n\r") or name != name.strip():
        raise ConfigError([f"{name!r} is no folder and no repository"])
    alone = resolve.load(
        f"[model]\nmodel = {name}\n",
        file="",
        folder=str(Path.cwd()),
        disk=LocalDisk(),
        flags=model_flags,
        environ=environ,
        working=str(Path.cwd()),
    )
    if alone.problems:
        raise ConfigError([problem.message for problem in alone.problems])
    return replace(alone.presets["model"], id=name)


def cost(
    preset: Preset,
    facts: Checkpoint,
    choice: sharding.Choice,
    readings: Sequence[Reading],
    known: LearnedEstimates | None,
    *,
    fork_server: bool,
) -> Estimate:
    """The best figure that can be had without asking anybody: the preset's word, learned, exact from before, static.

    With a `nursery` that of a worker that is forked, if it may be; what is known of one that was executed is more, and
    does for it, too.
    """
    forked = fork_server and worker_argv.program_of(preset, preset.id).may_fork
    threads = worker_argv.threads(preset, on_host=choice.on_host, ranks=choice.ranks)
    return best_estimate(choice, facts, preset, readings, known, forked=forked, threads=threads, or_executed=True)


def _files(
    preset: Preset, settings: Settings, snapshots: Snapshots, environ: Mapping[str, str], spare: Path
) -> tuple[Path, str]:
    """The folder of the model's files, and where they are for a person; their skeleton in `spare` if they are not
    here. A built-in model is made where its first load would make it."""
    if preset.demo:
        made = _ask(preset, Downloaded, snapshots.download(preset), environ, threads=1).snapshot
        return Path(made), made
    if preset.path:
        return Path(preset.path), preset.path
    here = find_snapshot(preset.repo, preset.revision, settings.hub_cache)
    if here is not None:
        return Path(here), here
    if settings.offline:
        raise ForecastError(
            f"{preset.id}: the files of {preset.repo} at {preset.revision} are not here, and --offline forbids asking"
            " the hub; leave it out, or name a folder"
        )
    hub_headers.skeleton(preset.repo, preset.revision, spare, environ=environ, token=settings.hf_token)
    return spare, f"{preset.repo} at {preset.revision}, headers from the hub"


def _facts(preset: Preset, folder: Path) -> Checkpoint:
    needs_weights = preset.load_format != "dummy"
    return checkpoint.read(folder, override=preset.config_override, needs_weights=needs_weights)


def _exactly(
    preset: Preset,
    facts: Checkpoint,
    folder: str,
    environ: Mapping[str, str],
    *,
    choice: sharding.Choice,
    forked: bool,
    first: Estimate,
) -> Estimate:
    """What `worker estimate` says, in a process with the environment that a worker gets; of a worker that is `forked`
    without what it will share with its nursery. `first`: the figure that can be had without asking."""
    on_host = all(place.index == HOST for place in choice.devices)
    command = worker_argv.model_options(
        EstimateCommand,
        preset,
        facts,
        folder,
        on_host=on_host,
        layers=choice.layers,
        ranks=choice.ranks,
        overhead=first.overhead.device,
        host_overhead=0 if on_host else first.overhead.beside_device(forked=forked),
    )
    threads = worker_argv.threads(preset, on_host=on_host, ranks=choice.ranks)
    said = _ask(preset, Estimated, command, environ, threads=threads)
    if forked:  # the process that says so was not
        said = replace(said, inherited=int(SPARED / estimates.INHERITED_SHARE))
    return estimates.from_trace(said, preset, forked=forked, first=first)


Said = TypeVar("Said", Downloaded, Estimated)


def _ask(
    preset: Preset,
    kind: type[Said],
    command: Download | EstimateCommand,
    environ: Mapping[str, str],
    *,
    threads: int,
) -> Said:
    """What the worker's program answers to `command`, in a process with the environment that a worker gets."""
    name: Literal["download", "estimate"] = "download" if isinstance(command, Download) else "estimate"
    argv = [preset.python or sys.executable, "-P", "-m", "worker", *to_argv(command)]
    env = environment.environment(
        environ, name, tag=name, visible="", threads=threads, extra=preset.env, offline=True, hf_token=""
    )
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=EXACT_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise ForecastError(f"{preset.id}: `worker {name}` took over {EXACT_TIMEOUT:.0f} s and was ended") from None
    except OSError as error:
        raise ForecastError(f"{preset.id}: {argv[0]} cannot be started: {error.strerror or error}") from None
    events = [decode(line) for line in done.stdout.splitlines()]
    said = next((event for event in events if isinstance(event, kind)), None)
    if said is not None:
        return said
    failed = next((event.message for event in events if isinstance(event, Failed)), "")
    last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    raise ForecastError(f"{preset.id}: `worker {name}` failed (exit {done.returncode}): {failed or last}")


def _room(reading: Reading, needs: int, capacity: int, margin: int, *, is_main: bool) -> Room:
    free = max(0, min(capacity, reading.total - margin - reading.used))
    return Room(str(reading.id), reading.name, needs, reading.total, capacity, free, margin, is_main)


def _beside(
    preset: Preset,
    loaded: LoadedPresets,
    settings: Settings,
    readings: Sequence[Reading],
    places: frozenset[DeviceId],
    known: LearnedEstimates | None,
    left: int,
) -> list[str]:
    """Who of the other models needs no more than `left` bytes; those whose files are not here are not asked about."""
    found = []
    for other in loaded.presets.values():
        folder = other.path or (find_snapshot(other.repo, other.revision, settings.hub_cache) if other.repo else None)
        if other.id == preset.id or folder is None:
            continue
        try:
            its = allowed_devices(other, readings)
            whole = sharding.Choice(devices=its)
            cheapest = cost(
                other, _facts(other, Path(folder)), whole, readings, known, fork_server=settings.fork_server
            )
            needs = max(cheapest.shards)
        except RouterError:
            continue  # it says so when it is asked for itself
        if its & places and needs <= left:
            found.append(other.id)
    return found


def document(found: Forecast) -> dict[str, Any]:
    """As JSON: integer bytes."""
    estimate = found.estimate
    return {
        "model": found.preset.id,
        "files": found.files,
        "downloaded": found.is_here,
        "source": estimate.source,
        "note": estimate.note,
        "dtype": found.dtype,
        "kv_cache_dtype": found.preset.kv_cache_dtype,
        "quantization": found.facts.quantization or _on_load(found),
        "packed": found.packed,
        "unpacked": found.unpacked,
        "ctx_size": found.tokens,
        "parallel": found.preset.parallel,
        "forked": found.forked,
        "weights": sum(estimate.weights),
        "context": sum(estimate.context),
        "compute": sum(estimate.compute),
        "runtime": sum(estimate.runtime),
        "runtime_source": "measured" if _is_measured(found) else "assumed",
        "host": estimate.host,
        "total": estimate.total,
        "fits": found.fits,
        "layers": list(estimate.layers),
        "ranks": found.ranks,
        "devices": [
            {
                "device": room.id,
                "name": room.name,
                "needs": room.needs,
                "total": room.total,
                "usable_when_empty": room.capacity,
                "usable_now": room.free,
                "fits": room.fits,
                "fits_now": room.needs <= room.free,
            }
            for room in found.rooms
        ],
        "beside": list(found.beside),
    }


def text(found: Forecast) -> str:
    """The same for a terminal."""
    facts, estimate, parallel = found.facts, found.estimate, found.preset.parallel
    method = facts.quantization or _on_load(found)
    kind = f"{method}, {found.dtype}" if method else found.dtype
    served = f"context {found.tokens} x {parallel} sequences" if found.tokens else "embeds or scores texts"
    lines = [f"{found.preset.id}   {kind}, {served}", f"files     {found.files}"]
    rows = [
        ("weights", estimate.weights, "from checkpoint headers"),
        ("context", estimate.context, _context_words(found)),
        ("compute", estimate.compute, _compute_words(found)),
        ("runtime", estimate.runtime, _runtime_words(found)),
    ]
    if estimate.source == "preset":
        rows = [("required", estimate.shards, "required-memory of the preset")]
    lines += [f"{label:9} {_size(sum(sizes)):>11}   {words}" for label, sizes, words in rows]
    if method and estimate.source != "preset":
        packed = f"quantised tensors with their scales take {_size(found.packed)}"
        if _on_load(found):
            count, one = facts.linears.count, facts.linears.count == 1
            scales = "its scales takes" if one else "their scales take"
            packed = f"{_count(count, 'linear layer')} with {scales} {_size(found.packed)}"
        lines.insert(3, f"{'':9} {'':>11}   {packed}; {_size(found.unpacked)} stay in {found.dtype}{_who_stays(found)}")
    if estimate.host:
        lines.append(f"{'host':9} {_size(estimate.host):>11}   main memory beside the device")
    sources = {
        "static": "static; not learned yet",
        "weights": "a guess from the weights alone",
        "exact": "exact: the worker's own trace",
        "learned": "learned: measured when it ran",
        "preset": "the preset's own figure",
    }
    lines.append(f"{'total':9} {_size(estimate.total):>11}   {sources[estimate.source]}")
    if estimate.note:
        lines.append(f"{'note':9} {estimate.note}")
    lines += _shard_lines(found)
    for room in found.rooms:
        if room.fits:
            now = "and now" if room.needs <= room.free else f"not now: {_size(room.free)} are free"
            lines.append(f"{room.id:9} fits when empty: {_size(room.capacity)} usable; {now}")
        else:
            lines.append(
                f"{room.id:9} does not fit: {_size(room.needs)} needed, {_size(room.capacity)} usable when empty;"
                f" {room.remedy(estimate)}"
            )
    if found.beside:
        lines.append(f"{'beside':9} fits, one of: {', '.join(found.beside)}")
    return "\n".join(lines)


def _shard_lines(found: Forecast) -> list[str]:
    """What lies on each of several devices."""
    estimate, lines = found.estimate, []
    names = [room.id for room in found.rooms if room.is_main]
    if found.ranks > 1:
        return _rank_lines(found)
    if not estimate.layers:
        return []
    first = 0
    for shard, count in enumerate(estimate.layers):
        parts = (estimate.weights, estimate.context, estimate.compute, estimate.runtime)
        sizes = " + ".join(_size(part[shard]) for part in parts)
        lines.append(
            f"{f'part {shard}':9} {_size(estimate.shards[shard]):>11}   layers {first} to {first + count - 1}: {sizes}"
        )
        first += count
    lines.append(f"{'split':9} {'':>11}   over {len(names)} devices; no CUDA graphs")
    return lines


def _rank_lines(found: Forecast) -> list[str]:
    """What each rank takes; on main memory they lie side by side."""
    estimate, shards = found.estimate, len(found.estimate.shards)
    what = f"{'':9} {'':>11}   each matrix divided among {found.ranks} processes; no CUDA graphs, no reordered weights"
    if shards == 1:
        return [f"{'ranks':9}{what[9:]}"]
    parts = (estimate.weights, estimate.context, estimate.compute, estimate.runtime)
    sizes = " + ".join(_size(part[0]) for part in parts)
    return [f"{'each of':9} {_size(estimate.shards[0]):>11}   {shards} devices: {sizes}", f"{'ranks':9}{what[9:]}"]


def _on_load(found: Forecast) -> str:
    """The method by which weights are quantised while they are loaded; empty: they are not."""
    return found.preset.quantization if bits_on_load(found.facts, found.preset) else ""


def _who_stays(found: Forecast) -> str:
    return ": embeddings, head, norms, routers and experts" if _on_load(found) else ""


def _context_words(found: Forecast) -> str:
    facts, tokens = found.facts, found.preset.kv_tokens or found.tokens * found.preset.parallel
    if not found.tokens:
        return "no cache"
    if found.estimate.source == "weights":
        return "not known"
    size, kept_as = DTYPE_BYTES.get(found.dtype, 4), found.preset.kv_cache_dtype
    sides = facts.head_dim, facts.value_dim or facts.head_dim
    head = f"{sum(sides)} elements x {size} B"
    if kv_types.is_compact(kept_as, found.dtype):
        head = f"{sum(kv_types.head_bytes(kept_as, elements, size) for elements in sides)} B of {kept_as}"
    words = []
    if attending := facts.attending:
        words.append(f"{_count(attending, 'layer')} x {_count(facts.kv_heads, 'KV head')} x {head} x {tokens} tokens")
    if facts.cross_attention:
        words.append("as much for what the encoder read")
    if facts.state_layers:
        words.append(f"{_count(facts.state_layers, 'layer')} with states of {found.preset.parallel} sequences")
    return ", and ".join(words)


def _compute_words(found: Forecast) -> str:
    if found.estimate.source == "weights":
        return "not known, taken as a multiple of the weights"
    return "largest prefill chunk or decode step, logits included" if found.tokens else "largest batch of texts"


def _is_measured(found: Forecast) -> bool:
    """Whether what a process takes whatever its model was measured, on this type of device, by this worker or another
    one; a trace for main memory measures itself."""
    known = found.estimate.overhead
    if found.estimate.source in ("learned", "preset"):
        return True
    return bool(known.host) or found.estimate.source == "exact" if _is_on_host(found) else bool(known.device)


def _is_on_host(found: Forecast) -> bool:
    return any(room.is_main and room.id == "cpu" for room in found.rooms)


def _runtime_words(found: Forecast) -> str:
    """What the process itself takes where it runs."""
    type = next((room.name for room in found.rooms if room.is_main), "") or "such a device"
    source = f"measured on {type}" if _is_measured(found) else f"assumed until a worker has run on {type}"
    extra = found.estimate.reserved
    reserved = f"; reserved-memory, {_size(extra)}" if extra else ""
    if not _is_on_host(found):
        return f"device context and libraries, {source}{reserved}"
    grammars = ", and tables for grammars" if found.tokens else ""
    # of a forked one nearly all is shared, and the rest is no matter of the machine
    kind = "forked, without what it shares" if found.forked else f"libraries ({source})"
    return f"the process: {kind}, its tokenizer{grammars}{reserved}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _size(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 10 << 30 else f"{size / (1 << 20):.1f} MiB"


__all__ = ["Forecast", "ForecastError", "Room", "document", "forecast", "text"]

"""The report of `router estimate`: the figures of a model on the devices of this machine, for a terminal or as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from router.config.presets import Preset
from router.memory.checkpoint_facts import (
    DTYPE_BYTES,
    Checkpoint,
    compute_dtype,
    effective_ctx,
    rows,
    serves_embeddings,
)
from router.memory.estimate import MemoryEstimate
from router.memory.remedies import Remedies
from router.memory.segments import bits_on_load, head_bytes, quantized_and_kept, weight_bytes

_SEGMENTS = ("weights", "context", "compute", "runtime")
_SOURCES = {
    "static": "static; not learned yet",
    "weights": "a guess from the weights alone",
    "exact": "exact: the worker's own trace",
    "learned": "learned: measured when it ran",
    "preset": "the preset's own figure",
}


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
    limit: int | None = None  # --device-limit
    limited_by: str = ""  # the keys of the preset that allow the model less than that of all workers

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
    estimate: MemoryEstimate  # with the least KV cache
    remedies: Remedies  # empty if it fits
    steps: int  # of the range of the KV cache that the devices would grant if they were empty
    is_forked: bool  # of a worker that is forked from the fork server, not executed
    on_host: bool  # the model runs on main memory
    ranks: int  # of tensor parallelism
    devices: tuple[DeviceReport, ...]
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
    def doubt(self) -> str:
        """The reason why a model that does not fit may be loaded all the same; empty if there is none."""
        if self.fits or self.estimate.source != "static":
            return ""
        return "a static estimate, an upper bound: the exact one (router estimate --exact) decides, as at a load"

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
        return quantized_and_kept(self.facts, self.preset, self.facts, on_host=self.on_host)[1]

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
        "parallel": rows(report.facts, report.preset),
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
    task = "embeds or scores texts"
    if report.tokens:
        task = f"context {report.tokens}, {count_of(rows(report.facts, preset), 'sequence')} at once"
    lines = [f"{preset.id}   {dtype}, {task}", f"files     {report.files}"]
    if estimate.source == "preset":
        lines.append(_line("required", sum(estimate.shards), "required-memory of the preset"))
    else:
        lines.append(_line("weights", sum(estimate.weights), "from checkpoint headers"))
        if method:
            quantized = f"quantized tensors with their scales take {_size(report.quantized)}"
            parts = ": embeddings, head, norms, routers and experts" if report.quantized_on_load else ""
            lines.append(_line("", None, f"{quantized}; {_size(report.unquantized)} stay in {report.dtype}{parts}"))
        lines.append(_line("context", sum(estimate.context), _context_formula(report)))
        lines.append(_line("compute", sum(estimate.compute), _compute_bound(report)))
        lines.append(_line("runtime", sum(estimate.runtime), _runtime_parts(report)))
    if estimate.host:
        lines.append(_line("host", estimate.host, "main memory beside the device"))
    lines.append(_line("total", estimate.total, report.doubt or _SOURCES[estimate.source]))
    lines += _range_lines(report)
    if estimate.note:
        lines.append(f"{'note':9} {estimate.note}")
    lines += [f"{'warning':9} {warning}" for warning in report.warnings]
    lines += _shard_lines(report)
    lines += [device_line(device, estimate) for device in report.devices]
    if report.remedies.settings:
        lines.append(f"{'to fit':9} {report.remedies}")
    return "\n".join(lines)


def device_line(device: DeviceReport, estimate: MemoryEstimate) -> str:
    usable = _size(device.usable_when_empty)
    if device.fits:
        now = "and now" if device.fits_now else f"not now: {_size(device.usable_now)} are free"
        return f"{device.device:9} fits when empty: {usable} usable; {now}"
    ways = []
    if device.limited_by:
        ways.append(f"raise {device.limited_by.replace(' and ', ' or ')}")
    else:
        if device.needs <= min(device.total, device.usable_when_empty + device.margin):
            ways.append(f"lower --models-memory-margin ({_size(device.margin)})")
        if device.limit is not None and device.needs <= device.usable_when_empty + device.total - device.limit:
            ways.append(f"raise --device-limit ({_size(device.limit)})")
    if estimate.source == "preset":
        ways.append("lower required-memory")
    needs = f"{_size(device.needs)} needed at least, {usable} usable when empty"
    return f"{device.device:9} does not fit: {needs}" + (f"; {' or '.join(ways)}" if ways else "")


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
    words = f"KV cache of {cache['most']['tokens']} tokens, the full context of {report.preset.contexts} sequences"
    yield _line("most", cache["most"]["bytes"], words)


def _context_formula(report: Report) -> str:
    facts, preset = report.facts, report.preset
    if not report.tokens:
        return "no cache"
    if report.estimate.source == "weights":
        return "not known"
    parts = []
    if facts.attention_layers:
        element = DTYPE_BYTES.get(report.dtype, 4)
        dims = facts.head_dim, facts.value_dim or facts.head_dim
        head = sum(head_bytes(preset.kv_cache_dtype, dim, element) for dim in dims)
        dtype = report.dtype if preset.kv_cache_dtype == "auto" else preset.kv_cache_dtype
        heads = f"{count_of(facts.attention_layers, 'layer')} x {count_of(facts.kv_heads, 'KV head')}"
        least = ", for one request" if report.estimate.kv_steps else ""
        parts.append(f"{heads} x {head} B of {dtype} x {report.estimate.kv_tokens} tokens{least}")
    if facts.cross_attention:
        parts.append("as much for what the encoder read")
    if facts.state_layers:
        sequences = report.estimate.kv_tokens // report.tokens if facts.aligned else rows(facts, preset)
        parts.append(f"{count_of(facts.state_layers, 'layer')} with states of {count_of(sequences, 'sequence')}")
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


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _size(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 10 << 30 else f"{size / (1 << 20):.1f} MiB"

"""Learned figures: measurements of real loads, kept on disk and shared by all routers of a state folder.

A learned figure contains what a worker takes beside its weights and its KV cache, which are known exactly. On
accelerators the engine's allocator reports it. On main memory it is what the worker took until it was ready: after that
a process also holds memory that requests did not free, even requests that never reached the engine. A figure counts
only up to a bound above the estimate that was made without it (`with_learned`), and falls with lower measurements.

They are in one JSON file, which is replaced as a whole under a lock. A reader never sees half of it, and a writer never
undoes another. A record counts at once; the file follows. Damage and a full disk are warnings: the loss of a record
costs an estimate, not a model.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from router import DISTRIBUTION
from router.config.presets import Preset
from router.memory.checkpoint_facts import Checkpoint, effective_ctx
from router.memory.estimate import UNKNOWN, MemoryEstimate, Overhead, beside_steps, version

DECAY = 0.25  # part of the difference by which a learned figure falls with a lower measurement; it rises at once
RAISE = 1.15  # factor for a figure whose worker ran out of memory
MOST_RECORDS = 1000  # of each kind; the one written longest ago is dropped
MOST_SECONDS = 5  # load times kept of one model
MAX_FILE_BYTES = 16 << 20  # a larger file is invalid; MOST_RECORDS of each kind take about 1 MiB
MOST_BYTES = 1 << 60  # a larger figure is invalid
# A learned figure counts up to this factor of the estimate without it, and this many bytes more. Both are guesses.
MAX_FACTOR, MAX_EXTRA_BYTES = 1.5, 256 << 20
AGREE_BYTES = 64 << 20  # largest difference between two loads that agree on the overhead of a process

# Libraries that compute quantized weights beside torch and transformers, by method.
_LIBRARIES = {
    "awq": ("gptqmodel",), "bnb-4bit": ("bitsandbytes",), "bnb-8bit": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",), "gptq": ("gptqmodel", "optimum"),
}  # fmt: skip

_VERSION = 2  # 1: figures with weights and KV cache, of all that a process held
_Kind = Literal["learned", "exact", "seconds", "overhead"]
_Records = dict[str, dict[str, Any]]
# Kind and key of a record, and a function from its value before (None: no record) to its value after. It is applied
# again when the file has changed.
_Change = tuple[_Kind, str, Callable[[Any], Any]]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)]
_Shards = Annotated[tuple[_Bytes, ...], msgspec.Meta(min_length=1)]
T = TypeVar("T")
_log = logging.getLogger(__name__)


def key(
    checkpoint: Checkpoint,
    preset: Preset,
    devices: Sequence[str],
    *,
    forked: bool = False,
    installed: Callable[[str], str] | None = None,
) -> str:
    """Return the key of a measurement: snapshot, load settings, types of device by shard, library versions, and whether
    the worker is forked.

    A forked worker does not count memory that it shares with its fork server, so its figures do not hold for an
    executed one. `installed`: function from distribution to version, for tests.
    """
    quantized = checkpoint.quantization or preset.quantization
    libraries = ("torch", "transformers", DISTRIBUTION, *_LIBRARIES.get(quantized, ()))
    settings = (
        effective_ctx(checkpoint, preset), preset.parallel, preset.kv_tokens, preset.kv_cache_dtype, preset.chunk,
        preset.dtype,
        preset.quantization, preset.attention, preset.enforce_eager, preset.threads, preset.load_format, preset.task,
        preset.engine, preset.python, preset.reserved_memory, preset.limit_images,
        preset.adapter_slots, preset.max_lora_rank, preset.draft_max if preset.speculates else 0,
        sorted(preset.env.items()), [(installed or version)(name) for name in libraries],
    )  # fmt: skip
    words = json.dumps([settings, list(devices), "fork" if forked else "exec"])
    return _prefix(checkpoint) + hashlib.sha256(words.encode()).hexdigest()[:32]


def _prefix(checkpoint: Checkpoint) -> str:
    """Return the first part of all keys of a snapshot."""
    return hashlib.sha256(checkpoint.identity.encode()).hexdigest()[:16] + "-"


@dataclass(frozen=True, slots=True)
class Learned:
    """The learned figure of one key, without `reserved-memory`."""

    beside: _Shards  # bytes by shard beside weights and KV cache
    host: _Bytes = 0  # bytes of main memory beside the shards; 0: the shard is main memory
    steps: bool = False  # `beside` includes the largest steps of the engine


class _Exact(msgspec.Struct):
    """An exact estimate in the file."""

    weights: _Shards
    context: _Shards
    compute: _Shards
    runtime: _Shards
    host: _Bytes
    reserved: _Bytes
    process: _Bytes

    def __post_init__(self) -> None:
        if not len(self.weights) == len(self.context) == len(self.compute) == len(self.runtime):
            raise ValueError("the segments have different numbers of shards")

    @property
    def estimate(self) -> MemoryEstimate:
        segments = self.weights, self.context, self.compute, self.runtime
        return MemoryEstimate(*segments, self.host, "exact", self.reserved, process=self.process)


# The entries of each kind.
_ENTRY_TYPES: Mapping[_Kind, Any] = {
    "learned": Learned, "exact": _Exact, "seconds": list[Annotated[float, msgspec.Meta(ge=0, le=MOST_BYTES)]],
    "overhead": dict[str, _Bytes],
}  # fmt: skip


def with_learned(base: MemoryEstimate, learned: Learned) -> MemoryEstimate:
    """Return `base`, the estimate without `learned`, with what was learned in place of compute, runtime and host.

    No shard and no host figure is larger than MAX_FACTOR x that of `base` + MAX_EXTRA_BYTES.
    """
    compute, runtime = [], []
    parts = zip(base.shards, base.weights, base.context, base.compute, learned.beside, strict=True)
    for shard, weights, context, step, beside in parts:
        beside = min(beside + (0 if learned.steps else step), _bound(shard) - weights - context)
        compute.append(min(step, beside))
        runtime.append(beside - compute[-1] + base.reserved)
    host = min(learned.host, _bound(base.host)) if learned.host else base.host
    return replace(
        base, compute=tuple(compute), runtime=tuple(runtime), host=host, source="learned", note="", process=0
    )


def _bound(size: int) -> int:
    return int(MAX_FACTOR * size) + MAX_EXTRA_BYTES


class LearnedEstimates:
    """The records of one file. All methods may be called from any thread."""

    def __init__(
        self,
        path: Path,
        *,
        driver: str = "",
        submit: Callable[[Callable[[], None]], object] = lambda save: save(),
    ):
        """`path`: the file; it and its folder are made with the first record. `driver`: version of the driver.

        `submit` receives the function that writes the file. It may run it elsewhere, in the same order, so that a slow
        disk does not block the caller.
        """
        self._path = path
        self._driver = driver
        self._submit = submit
        self._stamp: tuple[int, int] | None = None  # of the file as it was last read or written
        self._unsaved: list[_Change] = []
        self._records = _empty()  # those of the file, with all unsaved changes
        self._cannot_save = False  # the last attempt to write the file failed
        self._warned: tuple[int, int] | None = None  # stamp of the file of the last warning about its content
        self._mutex = threading.RLock()  # held for the four above, never while the file is written
        self._refresh()

    def learned(self, key: str) -> Learned | None:
        """Return the learned figure of `key`; None if there is none yet."""
        return _converted(self._get("learned", key), Learned)

    def record(
        self, key: str, base: MemoryEstimate, shards: Sequence[int], host: int = 0, *, steps: bool = False
    ) -> Learned:
        """Record a measurement of a worker of `key` that was started on `base`, whose KV cache is the granted one.

        `shards`: measured bytes by shard, `reserved-memory` and memory that is allocated later included. `host`: bytes
        of main memory beside them. `steps`: the worker has computed its largest steps. A figure rises at once, and
        falls by a part of the difference. A measurement without steps lowers one with steps only as far as the
        estimated steps allow.
        """
        beside = tuple(
            max(0, size - weights - context)
            for size, weights, context in zip(shards, base.weights, base.context, strict=True)
        )

        def merge(before: Learned | None) -> Learned:
            if before is None or len(before.beside) != len(beside) or (steps and not before.steps):
                return Learned(beside, host, steps)
            least = beside
            if before.steps and not steps:
                # It is not known if the steps of this worker would have taken as much as those before.
                most = (
                    now + compute + beside_steps(compute) for now, compute in zip(beside, base.compute, strict=True)
                )
                least = tuple(
                    max(now, min(old, size)) for now, old, size in zip(beside, before.beside, most, strict=True)
                )
            return Learned(tuple(map(_decayed, before.beside, least)), _decayed(before.host, host), before.steps)

        return self._learn(key, merge)

    def record_out_of_memory(self, key: str, base: MemoryEstimate, memory: Literal["device", "host"]) -> MemoryEstimate:
        """Raise the estimate of `key` by 15 %: its worker, which was started on `base`, ran out of memory of the
        device or the host. Returns the raised estimate."""
        is_beside = memory == "host" and base.host > 0
        by_shard, by_host = (1.0, RAISE) if is_beside else (RAISE, 1.0)

        def merge(before: Learned | None) -> Learned:
            known = base
            if before is not None and len(before.beside) == len(base.shards):
                known = with_learned(base, before)
            steps = known is not base and before is not None and before.steps
            beside = []
            for shard, old, weights, context, step in zip(
                known.shards, base.shards, base.weights, base.context, known.compute, strict=True
            ):
                raised = round(by_shard * (max(shard, old) - base.reserved))
                beside.append(max(0, raised - weights - context - (0 if steps else step)))
            return Learned(tuple(beside), round(by_host * max(known.host, base.host)), steps)

        return with_learned(base, self._learn(key, merge))

    def forget(self, checkpoint: Checkpoint) -> int:
        """Drop the learned figures of a snapshot, for all settings; return their number."""
        with self._mutex:
            self._refresh()
            keys = [key for key in self._records["learned"] if key.startswith(_prefix(checkpoint))]
        for key in keys:
            self._change("learned", key, lambda before: None)
        return len(keys)

    def exact(self, key: str) -> MemoryEstimate | None:
        """Return the exact estimate of `key` from before; None if there is none."""
        found = _converted(self._get("exact", key), _Exact)
        return found.estimate if found is not None else None

    def store_exact(self, key: str, estimate: MemoryEstimate) -> None:
        """Keep the result of `worker estimate` for `key`, with the largest KV cache of its range."""
        largest = estimate.granted(estimate.kv_steps)
        self._change("exact", key, lambda before: asdict(largest))

    def overhead(self, device: str, *, forked: bool) -> Overhead:
        """Return the measured memory of processes on this type of device (driver name, or `cpu`), for any model, under
        the current driver and library versions."""
        return _to_overhead(self._get("overhead", self._process(device, forked)))

    def record_overhead(self, device: str, measured: Overhead, *, forked: bool, is_own: bool = True) -> None:
        """Record a measured process on this type of device. Without `is_own`, the figure is the growth of memory in use
        on the device, which others change too; then two loads have to agree on it."""

        def change(before: Any) -> Any:
            known, record = _to_overhead(before), dict(before or {})
            if measured.host:
                record["host"] = _decayed(known.host or measured.host, measured.host)
            if measured.device:
                last = record.get("last")
                agrees = last is not None and abs(last - measured.device) <= AGREE_BYTES
                if is_own or agrees:
                    record["device"] = _decayed(known.device or measured.device, measured.device)
                record["last"] = measured.device
            return record

        self._change("overhead", self._process(device, forked), change)

    def _process(self, device: str, forked: bool) -> str:
        """Return the key of an overhead record. It is readable text, for a person who opens the file."""
        driver = [f"driver {self._driver}"] if device != "cpu" and self._driver else []
        libraries = [f"{name} {version(name)}" for name in ("torch", "transformers", DISTRIBUTION)]
        return ", ".join([device, *driver, *libraries, "forked" if forked else "executed"])

    def load_seconds(self, key: str) -> float | None:
        """Return the median of the last loads of `key` from spawn to ready; None if there was none yet."""
        seconds = self._get("seconds", key)
        return statistics.median(seconds) if seconds else None

    def record_load(self, key: str, seconds: float) -> None:
        """Record the seconds of one load of `key` from spawn to ready."""
        self._change("seconds", key, lambda before: [*(before or ()), seconds][-MOST_SECONDS:])

    def _learn(self, key: str, merge: Callable[[Learned | None], Learned]) -> Learned:
        after: list[Learned] = []

        def change(before: Any) -> Any:
            after.append(merge(_converted(before, Learned)))
            return asdict(after[-1])

        self._change("learned", key, change)
        return after[-1]

    def _get(self, kind: _Kind, key: str) -> Any:
        self._refresh()
        return self._records[kind].get(key)

    def _change(self, kind: _Kind, key: str, change: Callable[[Any], Any]) -> None:
        self._refresh()
        with self._mutex:
            self._unsaved.append((kind, key, change))
            self._records = _changed(self._records, self._unsaved[-1:])
        self._submit(self._save)

    def _refresh(self) -> None:
        """Read the file if another router has changed it."""
        with self._mutex:
            stamp = _stamp(self._path)
            if stamp is not None and stamp != self._stamp:
                self._records = _changed(self._read(), self._unsaved)
                self._stamp = stamp

    def _read(self) -> _Records:
        """Read the file. What is damaged is ignored, with one warning for each content of the file."""
        stamp = _stamp(self._path)
        try:
            records, ignored = _parse(_content(self._path))
        except FileNotFoundError:
            return _empty()
        except (OSError, ValueError, RecursionError) as error:
            records, ignored = _empty(), f"it cannot be read ({error}); learning begins anew"
        if ignored and stamp != self._warned:
            self._warned = stamp
            _log.warning("estimates in %s: %s", self._path, ignored)
        return records

    def _save(self) -> None:
        """Apply the unsaved changes to the file under the lock of all routers. If that fails, they stay in memory and
        are part of the next attempt."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.with_suffix(".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                changes = self._unsaved.copy()
                if changes:
                    self._replace(_changed(self._read(), changes), len(changes))
        except OSError as error:
            if not self._cannot_save:  # one warning until a write succeeds again
                _log.warning(
                    "estimates cannot be kept in %s (%s); they last until this router ends: make room there, or give"
                    " another --state-dir",
                    self._path,
                    error.strerror or error,
                )
            self._cannot_save = True

    def _replace(self, records: _Records, saved: int) -> None:
        """Replace the file by `records`, which contain the first `saved` changes. Only the owner of the lock writes the
        draft; a draft of a killed router is overwritten."""
        draft = f"{self._path}.draft"
        try:
            with open(draft, "w", opener=partial(os.open, mode=0o600)) as file:
                json.dump({"version": _VERSION, **records}, file)
                file.flush()
                os.fsync(file.fileno())
            # Together, or a reader would see the new file and apply the saved changes to it once more.
            with self._mutex:
                os.replace(draft, self._path)
                self._stamp = _stamp(self._path)
                del self._unsaved[:saved]
                self._records = _changed(records, self._unsaved)
                self._cannot_save = False
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise


def _changed(records: _Records, changes: Sequence[_Change]) -> _Records:
    """Return `records` with all `changes` applied in order."""
    for kind, key, change in changes:
        kept = dict(records[kind])
        record = change(kept.pop(key, None))
        if record is not None:
            kept[key] = record  # at the end: the newest
        records = {**records, kind: dict(list(kept.items())[-MOST_RECORDS:])}
    return records


def _empty() -> _Records:
    return {"learned": {}, "exact": {}, "seconds": {}, "overhead": {}}


def _parse(text: bytes) -> tuple[_Records, str]:
    """Parse the file; also return which entries are ignored because they are invalid, for a message.

    Raises ValueError if it is not of this format.
    """
    body = json.loads(text)
    if not isinstance(body, dict):
        raise ValueError("not a JSON object")
    if body.get("version") != _VERSION:
        raise ValueError(f"its version is {body.get('version')!r}, this router writes {_VERSION}")
    records, invalid = _empty(), 0
    for kind, entry_type in _ENTRY_TYPES.items():
        entries = body.get(kind)
        if not isinstance(entries, dict):
            raise ValueError(f"{kind} is missing")
        records[kind] = {key: entry for key, entry in entries.items() if _converted(entry, entry_type) is not None}
        invalid += len(entries) - len(records[kind])
    return records, f"{invalid} invalid entries are ignored" if invalid else ""


def _converted(record: Any, kind: type[T]) -> T | None:
    """Return a record of the file; None if it is invalid, as in a file that was edited by hand."""
    try:
        return msgspec.convert(record, kind)
    except msgspec.ValidationError:
        return None


def _to_overhead(record: Any) -> Overhead:
    return Overhead(record.get("device", 0), record.get("host", 0)) if record else UNKNOWN


def _decayed(before: int, measured: int) -> int:
    return max(measured, round(before + (measured - before) * DECAY))


def _content(path: Path) -> bytes:
    """Return the bytes of a regular file. Opening a named pipe, or reading a device, might never end.

    Raises OSError, ValueError.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_FILE_BYTES:
            raise ValueError(f"it is no regular file of at most {MAX_FILE_BYTES >> 20} MiB")
        return file.read(MAX_FILE_BYTES)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return the inode and time of the file, which change when it is replaced; None without a file."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns

"""Learned estimates: measurements of real loads, kept on disk and shared by all routers of a state folder.

They are in one JSON file, which is replaced as a whole under a lock. A reader never sees half of it, and a writer never
undoes another. A record counts at once; the file follows. Damage and a full disk are warnings: the loss of a record
costs an estimate, not a model.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from router.config.presets import Preset
from router.memory.checkpoint_facts import Checkpoint, effective_ctx
from router.memory.estimate import UNKNOWN, Estimate, Overhead, from_measurement

DECAY = 0.25  # part of the difference by which a learned figure falls with a lower measurement; it rises at once
RAISE = 1.15  # factor for a figure whose worker ran out of memory
MOST_RECORDS = 1000  # of each kind; the one written longest ago is dropped
MOST_SECONDS = 5  # load times kept of one model
MOST_BYTES = 1 << 60  # a larger figure is invalid
AGREE_BYTES = 64 << 20  # largest difference between two loads that agree on the overhead of a process

# Libraries that compute quantized weights beside torch and transformers, by method.
_LIBRARIES = {
    "awq": ("gptqmodel",), "bnb-4bit": ("bitsandbytes",), "bnb-8bit": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",), "gptq": ("gptqmodel", "optimum"),
}  # fmt: skip

_VERSION = 1
_Kind = Literal["learned", "exact", "seconds", "overhead"]
_Records = dict[str, dict[str, Any]]
# Kind and key of a record, and a function from its value before (None: no record) to its value after. It is applied
# again when the file has changed.
_Change = tuple[_Kind, str, Callable[[Any], Any]]
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
    packed = checkpoint.quantization or preset.quantization
    libraries = ("torch", "transformers", "fleet-router", *_LIBRARIES.get(packed, ()))
    settings = (
        effective_ctx(checkpoint, preset), preset.parallel, preset.kv_tokens, preset.kv_cache_dtype, preset.chunk,
        preset.dtype,
        preset.quantization, preset.attention, preset.enforce_eager, preset.threads, preset.load_format, preset.task,
        preset.engine, preset.python, preset.reserved_memory, preset.limit_images,
        preset.adapter_slots, preset.max_lora_rank,
        sorted(preset.env.items()), [(installed or version)(name) for name in libraries],
    )  # fmt: skip
    words = json.dumps([checkpoint.identity, settings, list(devices), "fork" if forked else "exec"])
    return hashlib.sha256(words.encode()).hexdigest()[:32]


@functools.cache
def version(distribution: str) -> str:
    """Return the version of an installed distribution without importing it; "" if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class _Lesson:
    """The learned record of one key."""

    estimate: Estimate
    measured: tuple[int, ...]  # bytes by shard, without `reserved-memory` and steps that have not occurred yet
    share: float = 0.0  # part of the largest step that has not occurred yet


class LearnedEstimates:
    """The records of one file. All methods may be called from any thread."""

    def __init__(
        self,
        path: Path,
        *,
        driver: str = "",
        later: Callable[[Callable[[], None]], object] = lambda save: save(),
    ):
        """`path`: the file; it and its folder are made with the first record. `driver`: version of the driver.

        `later` receives the function that writes the file. It may run it elsewhere, in the same order, so that a slow
        disk does not block the caller.
        """
        self._path = path
        self._driver = driver
        self._later = later
        self._stamp: tuple[int, int] | None = None  # of the file as it was last read or written
        self._unsaved: list[_Change] = []
        self._records = _empty()  # those of the file, with all unsaved changes
        self._cannot_save = False  # the last attempt to write the file failed
        self._mutex = threading.RLock()  # held for the four above, never while the file is written
        self._refresh()

    def learned(self, key: str) -> Estimate | None:
        """Return the learned estimate of `key`; None if there is none yet."""
        return _to_estimate(self._get("learned", key), "learned")

    def record(
        self, key: str, estimate: Estimate, shards: Sequence[int], host: int = 0, *, share_to_come: float = 0.0
    ) -> Estimate:
        """Record the peak of a worker of `key` that was started on `estimate`: bytes by shard, and on main memory
        beside.

        `share_to_come`: the part of its largest step that has not occurred yet; that part of the compute segment is
        added. A measurement with a larger part to come than an earlier one can only raise the record. Returns the
        learned estimate: at least the measurement, plus what is left of higher ones.
        """
        to_come = tuple(round(share_to_come * size) for size in estimate.compute)

        def merge(before: _Lesson | None) -> _Lesson:
            measured, share, add, beside = tuple(shards), share_to_come, to_come, host
            if before is not None and len(before.measured) == len(measured):
                beside = _decayed(before.estimate.host, host)
                if share <= before.share:
                    measured = tuple(map(_decayed, before.measured, measured))
                else:
                    was = tuple(each - before.estimate.reserved for each in before.estimate.shards)
                    measured, share = tuple(map(max, before.measured, measured)), before.share
                    add = tuple(max(0, old - new) for old, new in zip(was, measured, strict=True))
            total = tuple(map(sum, zip(measured, add, strict=True)))
            return _Lesson(from_measurement(estimate, total, beside), measured, share)

        return self._learn(key, merge)

    def record_out_of_memory(self, key: str, estimate: Estimate, memory: Literal["device", "host"]) -> Estimate:
        """Raise the estimate of `key` by 15 %: its worker ran out of memory of the device or the host. Returns it."""

        def merge(before: _Lesson | None) -> _Lesson:
            known = before.estimate if before is not None else estimate
            least = known if len(known.shards) == len(estimate.shards) else estimate
            is_beside = memory == "host" and estimate.host > 0
            growth = (1.0, RAISE) if is_beside else (RAISE, 1.0)
            both = zip(least.shards, estimate.shards, strict=True)
            shards = tuple(round(max(each) * growth[0]) - estimate.reserved for each in both)
            return _Lesson(
                from_measurement(estimate, shards, round(max(least.host, estimate.host) * growth[1])), shards
            )

        return self._learn(key, merge)

    def exact(self, key: str) -> Estimate | None:
        """Return the exact estimate of `key` from before; None if there is none."""
        return _to_estimate(self._get("exact", key), "exact")

    def store_exact(self, key: str, estimate: Estimate) -> None:
        """Keep the result of `worker estimate` for `key`."""
        self._change("exact", key, lambda before: asdict(estimate))

    def overhead(self, device: str, *, forked: bool) -> Overhead:
        """Return the measured memory of processes on this type of device (driver name, or `cpu`), for any model, under
        the current driver and library versions."""
        return _to_overhead(self._get("overhead", self._process(device, forked)))

    def record_overhead(self, device: str, measured: Overhead, *, forked: bool, is_own: bool = True) -> None:
        """Record a measured process on this type of device. Without `is_own`, the figure is the growth of memory in use
        on the device, which others change too; then two loads have to agree on it."""

        def change(before: Any) -> Any:
            known, record = _to_overhead(before), dict(before) if isinstance(before, Mapping) else {}
            if measured.host:
                record["host"] = _decayed(known.host or measured.host, measured.host)
            if measured.device:
                last = record.get("last")
                agrees = isinstance(last, int) and abs(last - measured.device) <= AGREE_BYTES
                if is_own or agrees:
                    record["device"] = _decayed(known.device or measured.device, measured.device)
                record["last"] = measured.device
            return record

        self._change("overhead", self._process(device, forked), change)

    def _process(self, device: str, forked: bool) -> str:
        """Return the key of an overhead record. It is readable text, for a person who opens the file."""
        driver = [f"driver {self._driver}"] if device != "cpu" and self._driver else []
        libraries = [f"{name} {version(name)}" for name in ("torch", "transformers", "fleet-router")]
        return ", ".join([device, *driver, *libraries, "forked" if forked else "executed"])

    def load_seconds(self, key: str) -> float | None:
        """Return the median of the last loads of `key` from spawn to ready; None if there was none yet."""
        seconds = _to_seconds(self._get("seconds", key))
        return statistics.median(seconds) if seconds else None

    def record_load(self, key: str, seconds: float) -> None:
        """Record the seconds of one load of `key` from spawn to ready."""
        self._change("seconds", key, lambda before: [*_to_seconds(before), seconds][-MOST_SECONDS:])

    def _learn(self, key: str, merge: Callable[["_Lesson | None"], "_Lesson"]) -> Estimate:
        after: list[Estimate] = []

        def change(before: Any) -> Any:
            lesson = merge(_to_lesson(before))
            after.append(lesson.estimate)
            return {**asdict(lesson.estimate), "measured": lesson.measured, "share": lesson.share}

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
        self._later(self._save)

    def _refresh(self) -> None:
        """Read the file if another router has changed it."""
        with self._mutex:
            stamp = _stamp(self._path)
            if stamp is not None and stamp != self._stamp:
                self._records = _changed(self._read(), self._unsaved)
                self._stamp = stamp

    def _read(self) -> _Records:
        try:
            return _parse(self._path.read_bytes())
        except FileNotFoundError:
            return _empty()
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("estimates in %s cannot be read (%s); learning begins anew", self._path, error)
            return _empty()

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
            with open(draft, "w", opener=_private) as file:
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
        kept[key] = change(kept.pop(key, None))  # popped, so that it moves to the end: the newest
        records = {**records, kind: dict(list(kept.items())[-MOST_RECORDS:])}
    return records


def _empty() -> _Records:
    return {"learned": {}, "exact": {}, "seconds": {}, "overhead": {}}


def _parse(text: bytes) -> _Records:
    """Parse the file. Raises ValueError if it is not of this format."""
    body = json.loads(text)
    if not isinstance(body, dict) or body.pop("version", None) != _VERSION:
        raise ValueError("not a file of this version")
    for kind in _empty():
        if not isinstance(body.get(kind), dict):
            raise ValueError(f"{kind} is missing")
    return body


def _to_estimate(record: Any, source: Literal["learned", "exact"]) -> Estimate | None:
    """Return the estimate in a record; None if it is invalid, as in a file that was edited by hand."""
    if not isinstance(record, Mapping):
        return None
    segments: list[Any] = [record.get(name) for name in ("weights", "context", "compute", "runtime")]
    sizes: list[Any] = [record.get(name) for name in ("host", "reserved", "process")]
    if not all(map(_is_sizes, (sizes, *segments))) or len({len(segment or ()) for segment in segments}) > 1:
        return None
    weights, context, compute, runtime = (tuple(segment or ()) for segment in segments)
    host, reserved, process = sizes
    return Estimate(weights, context, compute, runtime, host, source, reserved, process=process) if weights else None


def _to_lesson(record: Any) -> _Lesson | None:
    estimate = _to_estimate(record, "learned")
    if estimate is None:
        return None
    measured, share = record.get("measured"), record.get("share")
    if not (_is_sizes(measured) and len(measured) == len(estimate.shards) and isinstance(share, (int, float))):
        return None
    return _Lesson(estimate, tuple(measured), share)


def _is_sizes(sizes: Any) -> bool:
    return isinstance(sizes, (list, tuple)) and all(isinstance(size, int) and 0 <= size <= MOST_BYTES for size in sizes)


def _to_overhead(record: Any) -> Overhead:
    """Return the measurement in a record; unknown if it is invalid."""
    if not isinstance(record, Mapping):
        return UNKNOWN
    device, host = record.get("device", 0), record.get("host", 0)
    return Overhead(device, host) if _is_sizes([device, host]) else UNKNOWN


def _to_seconds(record: Any) -> list[float]:
    return [float(each) for each in record if isinstance(each, (int, float))] if isinstance(record, list) else []


def _decayed(before: int, measured: int) -> int:
    return max(measured, round(before + (measured - before) * DECAY))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return the inode and time of the file, which change when it is replaced; None without a file."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns

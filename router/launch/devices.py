"""Readings of this machine's devices from NVML, /proc and the control groups. The only module that imports pynvml.

It never creates a context on a device. It never reports free memory that it has not read: an accelerator whose
driver fails keeps its last reading and is named in `problems`, and no worker is started there.
"""

import contextlib
import functools
import math
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]

from router.errors import ConfigError
from router.planner.ledger import LOCAL, MAIN_MEMORY, DeviceId, DeviceShare, Reading

# A cgroup limit above this means no limit (version 1 writes the largest multiple of a page below 2**63).
_UNLIMITED = 1 << 60


@dataclass(slots=True)
class _Accelerator:
    """One device that CUDA_VISIBLE_DEVICES leaves visible; `handle` is NVML's; None: not found yet, or lost."""

    id: DeviceId
    uuid: str
    name: str
    handle: Any
    last: Reading | None = None


class Devices:
    """This machine's devices, as far as the router's own environment lets it use them.

    `env` is the router's environment: CUDA_VISIBLE_DEVICES there limits and orders the accelerators as it does for
    any CUDA program, so that `cuda:0` is the first visible one. `proc` and `cgroup` are the roots of the kernel's
    file systems, `dev` that of device files. The constructor queries NVML; without a driver there are no accelerators,
    and `notes` has the reason and the kinds that are not supported.
    All methods that read may block for as long as the driver does: call them in a thread, one at a time.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        proc: Path = Path("/proc"),
        cgroup: Path = Path("/sys/fs/cgroup"),
        dev: Path = Path("/dev"),
    ):
        self._proc = proc
        self._cgroup = cgroup
        self._accelerators: list[_Accelerator] = []
        self._suspect = False
        self.notes: list[str] = []  # remarks for people about the devices that were found, one line each
        self.problems: dict[DeviceId, str] = {}  # for each device that the last `read` could not use, the reason
        self.driver = ""  # version of the accelerators' driver; empty: there is none
        found: list[Found] = []
        try:
            pynvml.nvmlInit()
            with contextlib.suppress(pynvml.NVMLError):
                self.driver = str(pynvml.nvmlSystemGetDriverVersion())
            found, self.notes = _enumerate()
        except pynvml.NVMLError as error:
            self.notes.append(f"no accelerator: {_explain(error)}")
        if (dev / "kfd").exists():  # AMD's compute driver; its display driver alone is no accelerator
            self.notes.append("the AMD accelerator (/dev/kfd) is not supported by this version: it is not used")
        if not found:
            return
        chosen, note = visible(found, env.get("CUDA_VISIBLE_DEVICES"))
        if note:
            self.notes.append(note)
        for index, device in enumerate(chosen):
            self._accelerators.append(_Accelerator(DeviceId(LOCAL, index), device.uuid, device.name, device.handle))

    def read(self) -> list[Reading]:
        """Every device that has ever been read, the accelerators first and in their order. May block.

        Used bytes are those of all processes. A device that fails now has its last reading and an entry in `problems`.
        """
        host = self.host()
        if self._suspect:
            self._reopen()
        readings = [reading for accelerator in self._accelerators if (reading := self._read(accelerator, host))]
        return [*readings, host]

    def device_id(self, name: str) -> DeviceId:
        """The device of a name as `option_types.device_name` returns it; of a UUID the beginning suffices.

        Raises ValueError with a message for people if there is no such device, or more than one.
        """
        if name == str(MAIN_MEMORY):
            return MAIN_MEMORY
        matches = [each for each in self._accelerators if name == str(each.id) or _names(name, each.uuid)]
        if len(matches) == 1:
            return matches[0].id
        have = ", ".join(f"{accelerator.id} ({accelerator.uuid})" for accelerator in self._accelerators)
        here = f"{have} and cpu" if have else "only cpu"
        problem = "names more than one device" if matches else "is no device of this machine"
        raise ValueError(f"{name!r} {problem}; it has {here}")

    def by_device(self, sizes: Mapping[str, int | DeviceShare], option: str) -> dict[DeviceId, int]:
        """The sizes of `option` by device, without the one for all devices (``""``). Shares are of the total memory.

        Raises ConfigError. May block if there is a share.
        """
        found: dict[DeviceId, int] = {}
        for name, size in sizes.items():
            if name:
                try:
                    device = self.device_id(name)
                    found[device] = int(size.share * self._total(device)) if isinstance(size, DeviceShare) else size
                except ValueError as unknown:
                    raise ConfigError(f"{option}: {unknown}") from None
        return found

    def _total(self, device: DeviceId) -> int:
        """The memory of a device. Raises ValueError if the driver does not report it."""
        for reading in self.read():
            if reading.id == device:
                return reading.total
        raise ValueError(f"the driver does not report the memory of {device}; write the limit in MiB")

    def host(self) -> Reading:
        """The reading of main memory, or of the cgroup's share if that is less.

        Page cache that the kernel can reclaim counts as available, even if a process has it mapped.
        """
        fields = dict(line.split(":", 1) for line in (self._proc / "meminfo").read_text().splitlines())
        # Available as the kernel estimates it, which is more than what is free.
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        for group, root, files in _memory_groups(self._proc, self._cgroup):
            for parent in (group, *group.parents):
                limit = _number(parent / files.limit)
                if limit is not None and limit < _UNLIMITED:
                    cached = sum(_statistic(parent / "memory.stat", name) or 0 for name in files.cached)
                    used = max(0, (_number(parent / files.used) or 0) - cached)
                    total = min(total, limit)
                    available = min(available, max(0, limit - used))
                if parent == root:
                    break
        return Reading(MAIN_MEMORY, total, max(0, total - available), name="main memory")

    def close(self) -> None:
        """Shut NVML down."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _read(self, device: _Accelerator, host: Reading) -> Reading | None:
        try:
            if device.handle is None:
                device.handle = _find(device.uuid)
            total, used = _memory(device.handle)
            pool = None
        except pynvml.NVMLError as error:
            had_memory = device.last is not None and device.last.pool is None
            if had_memory or not isinstance(error, pynvml.NVMLError_NotSupported):
                self._suspect = True
                device.handle = None
                self.problems[device.id] = f"{device.id} ({device.name}) cannot be read: {_explain(error)}"
                return device.last
            total, used, pool = host.total, host.used, MAIN_MEMORY  # unified memory: it has none of its own
        self.problems.pop(device.id, None)
        device.last = Reading(device.id, total, used, device.name, device.uuid, pool)
        return device.last

    def _reopen(self) -> None:
        """Restart NVML, which it may need after an error (driver reloaded, device reset).

        Handles do not survive that.
        """
        self.close()
        for accelerator in self._accelerators:
            accelerator.handle = None
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._suspect = False


@dataclass(frozen=True, slots=True)
class Found:
    """One device as NVML lists it: a card, or one MIG instance of a card."""

    index: int  # that of the card, in PCI bus order
    uuid: str
    card: str  # UUID of the card; equals `uuid` unless the card is in MIG mode
    name: str
    handle: Any = None


def visible(found: Sequence[Found], setting: str | None) -> tuple[list[Found], str]:
    """The devices that a CUDA program sees with CUDA_VISIBLE_DEVICES = `setting`, in their order, and a note for people
    if that may be unexpected.

    Rules (CUDA C++ Programming Guide, "CUDA Environment Variables"): unset shows all; entries are indices or UUIDs,
    of which an unambiguous beginning suffices; the first invalid entry hides itself and all after it; a device that
    is named twice hides all. Two differences, as this router runs many programs: an index counts in PCI bus order,
    and a card in MIG mode stands for all of its instances, where one CUDA program would see the first.
    """
    if setting is None:
        return list(found), ""
    chosen: list[Found] = []
    for entry in (part.strip() for part in setting.split(",")):
        matches = _matches(found, entry)
        if not matches:
            meant = entry in ("", "-1") or entry.lower() in ("none", "nodevfiles")
            return chosen, "" if meant else f"CUDA_VISIBLE_DEVICES={setting}: {entry!r} and what follows is no device"
        if any(match in chosen for match in matches):
            return [], f"CUDA_VISIBLE_DEVICES={setting} names {entry!r} twice: no accelerator is visible"
        chosen += matches
    return chosen, ""


def _matches(found: Sequence[Found], entry: str) -> list[Found]:
    """The devices that one entry of CUDA_VISIBLE_DEVICES selects; empty if it is invalid or ambiguous."""
    if entry.isascii() and entry.isdigit():
        return [device for device in found if device.index == int(entry)]
    instances = [device for device in found if _names(entry, device.uuid)]
    cards = [device for device in found if _names(entry, device.card)]
    if len(instances) == 1:
        return instances
    return cards if len({device.card for device in cards}) == 1 else []


def _names(word: str, uuid: str) -> bool:
    """True if `word` is `uuid` or its beginning, with at least one character beyond the kind."""
    kind, _, rest = word.partition("-")
    return kind in ("GPU", "MIG") and bool(rest) and uuid.startswith(word)


def _enumerate() -> tuple[list[Found], list[str]]:
    """All cards in PCI bus order, those in MIG mode replaced by their instances, and a note for each that fails."""
    found: list[Found] = []
    notes: list[str] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            card = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(pynvml.nvmlDeviceGetUUID(card))
            for handle in _instances(card) if _is_in_mig_mode(card) else [card]:
                name = str(pynvml.nvmlDeviceGetName(handle))
                found.append(Found(index, str(pynvml.nvmlDeviceGetUUID(handle)), uuid, name, handle))
        except pynvml.NVMLError as error:
            notes.append(f"card {index} is left out: {_explain(error)}")
    return found, notes


def _instances(card: Any) -> Iterator[Any]:
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        with contextlib.suppress(pynvml.NVMLError_NotFound):
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number)


def _is_in_mig_mode(card: Any) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(card)[0])
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return False


def _find(uuid: str) -> Any:
    """The handle of a device that had `uuid` before; raises NVMLError if it is gone."""
    for found in _enumerate()[0]:
        if found.uuid == uuid:
            return found.handle
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)


def _memory(handle: Any) -> tuple[int, int]:
    """Bytes of a device: those that programs can have, and those that they do have.

    The driver's own share, which version 2 of the call separates, is in neither; older drivers count it as used.
    """
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return int(memory.total) - int(memory.reserved), int(memory.used)
    except (
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_ArgumentVersionMismatch,
        pynvml.NVMLError_NotSupported,
    ):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.used)


def _explain(error: Exception) -> str:
    """The text of an NVML error."""
    return str(error) or type(error).__name__


# Control groups of the kernel


@dataclass(frozen=True, slots=True)
class _MemoryFiles:
    """Names of the files of a memory controller, and in its statistics."""

    limit: str
    used: str
    events: str  # with the number of OOM kills
    cached: tuple[str, str]  # reclaimable page cache


_VERSION_1 = _MemoryFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", ("total_active_file", "total_inactive_file")
)
_VERSION_2 = _MemoryFiles("memory.max", "memory.current", "memory.events", ("active_file", "inactive_file"))


def _memory_groups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, Path, _MemoryFiles]]:
    """The group of this process in each hierarchy with a memory controller, and that hierarchy's root.

    A container that sees only its own group has it at the root.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (cgroup / "memory", _VERSION_1) if controllers else (cgroup, _VERSION_2)
        group = root / path.strip("/")
        yield group if group.is_dir() and ".." not in group.parts else root, root, files


@functools.cache
def usable_cores(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPU cores that this process may use at once, by its affinity and the quota of its control group (version 2).

    Under a quota of two cores, one thread for each of 64 cores would be stopped for most of each period.
    """
    cores = len(os.sched_getaffinity(0))
    for group, root, files in _memory_groups(proc, cgroup):
        for parent in (group, *group.parents) if files is _VERSION_2 else ():
            with contextlib.suppress(OSError, ValueError):
                quota, period = (parent / "cpu.max").read_text().split()
                cores = min(cores, math.ceil(int(quota) / int(period)))  # ValueError without a quota: "max"
            if parent == root:
                break
    return max(cores, 1)


def _number(file: Path) -> int | None:
    """The number in a file of the kernel; None for `max`, a missing file, or no number."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _statistic(file: Path, key: str) -> int | None:
    """The number after `key` in a file with one statistic per line; None if it has none."""
    try:
        fields = dict(line.split(" ", 1) for line in file.read_text().splitlines() if " " in line)
        return int(fields[key])
    except (OSError, KeyError, ValueError):
        return None


RECENT = 5.0  # seconds for which an OOM kill explains a SIGKILL; a guess


class OomKills:
    """Samples of the kernel's counter of OOM kills. Times are seconds of a monotonic clock.

    A process that the OOM killer ends cannot report it, and SIGKILL may also come from a person. A recent rise of the
    counter distinguishes the two.
    """

    def __init__(self, count: Callable[[], int]):
        """`count`: returns the counter, like `count_oom_kills`."""
        self._count = count
        self._samples: deque[tuple[float, int]] = deque()

    def sample(self, now: float) -> None:
        """Remember the counter. Call it about once a second."""
        self._samples.append((now, self._count()))
        while len(self._samples) > 1 and self._samples[1][0] <= now - RECENT:
            self._samples.popleft()

    def explains(self, exit_code: int, now: float) -> bool:
        """True if a process with this exit code was killed by SIGKILL, and the counter rose within RECENT seconds."""
        if exit_code != -signal.SIGKILL:
            return False
        self.sample(now)
        return self._samples[-1][1] > self._samples[0][1]


def count_oom_kills(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """OOM kills in our control group, or if it has no counter, in the whole machine; 0 if there is no counter."""
    for file in (*(group / files.events for group, _, files in _memory_groups(proc, cgroup)), proc / "vmstat"):
        if (count := _statistic(file, "oom_kill")) is not None:
            return count
    return 0

"""What this process occupies, and how its allocators are told to keep to it."""

import ctypes
import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from worker.contract import Exit
from worker.errors import StartError

CUDA_CONTEXT_BYTES = 512 << 20
"""A guess (published figures: 100 to 600 MiB by card and driver); a process cannot see its own context's size."""
_LOOK_INTERVAL = 10.0
"""Seconds between two looks at what is shared with a nursery."""
_M_ARENA_MAX = -8
"""malloc.h. A second arena for each thread keeps freed memory that no other thread can use."""


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A one-dimensional tensor on `device`; the host does not wait for what the device is doing."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def measured(devices: Sequence[str]) -> dict[str, int]:
    """Peak bytes by device name. `cpu`: resident bytes of this process, mapped files included; without what a forked
    one shares with its nursery, which nobody gets back when it ends."""
    peaks = {"cpu": max(0, _peak_resident() - _inherited.bytes())} if "cpu" in devices else {}
    for name in devices:
        if name != "cpu":
            peaks[name] = torch.cuda.max_memory_reserved(torch.device(name)) + CUDA_CONTEXT_BYTES
    return peaks


def _peak_resident() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


class _Inherited:
    """Pages of a forked process that it has not written to, and so still has in common with its nursery."""

    def __init__(self) -> None:
        self.is_forked = False
        self._bytes = 0
        self._looked_at = -math.inf

    def bytes(self) -> int:
        """Not older than some seconds: to count them, the kernel walks all pages (4 ms for 300 MB, measured)."""
        if self.is_forked and time.monotonic() - self._looked_at > _LOOK_INTERVAL:
            self._bytes = _shared_dirty()
            self._looked_at = time.monotonic()  # last: until then the other threads look for themselves
        return self._bytes


_inherited = _Inherited()


def forked() -> None:
    """This process was forked from one that had its imports done."""
    _inherited.is_forked = True


def _shared_dirty() -> int:
    """Bytes that are no clean part of a file and that another process maps, too (proc_pid_smaps_rollup(5))."""
    with suppress(OSError), open("/proc/self/smaps_rollup", encoding="ascii", errors="replace") as sums:
        for line in sums:
            if line.startswith("Shared_Dirty:"):
                return int(line.split()[1]) * 1024
    return 0


def keep_small() -> None:
    """Let all threads share malloc's arenas: what one frees another uses. Only glibc has this; elsewhere nothing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def cap(devices: Sequence[str], reserved: str) -> None:
    """Hold the CUDA allocator to what the router reserved, so that a wrong estimate hurts only this worker.

    `reserved`: JSON object, bytes by device name; empty: no cap. Raises StartError if it is no such object.
    """
    if not reserved:
        return
    try:
        bytes_by_device = {str(name): int(size) for name, size in json.loads(reserved).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise StartError(f"--reserved wants a JSON object of bytes by device, not {reserved!r}") from error
    for name in devices:
        if name != "cpu" and name in bytes_by_device:
            device = torch.device(name)
            total = torch.cuda.get_device_properties(device).total_memory
            share = max(bytes_by_device[name] - CUDA_CONTEXT_BYTES, 0) / total
            torch.cuda.set_per_process_memory_fraction(min(max(share, 0.01), 1.0), device)


def is_exhausted(error: BaseException) -> bool:
    """Whether `error` says that memory, of the device or of the host, could not be had."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def start_error(what: str, device: torch.device, error: BaseException) -> StartError:
    """What to end with if there was no room for `what`."""
    exit = Exit.HOST_MEMORY if device.type == "cpu" else Exit.DEVICE_MEMORY
    return StartError(
        f"no memory for {what} on {device}: {one_line(error)}; lower ctx-size, parallel or kv-tokens, or free memory",
        exit,
    )


def one_line(error: BaseException, most: int = 240) -> str:
    """What `error` says, for a message of one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def is_sticky(error: BaseException) -> bool:
    """Whether `error` leaves the CUDA context unusable for the rest of this process."""
    if is_exhausted(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))

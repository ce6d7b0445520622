"""Process overhead: memory that a worker needs independent of its model, by CUDA context and libraries.

If NVML lists this process, the overhead is its usage minus torch's allocator. Otherwise, as in most containers, it is
the increase of the device's total usage since before this process used it. Other processes may start or stop meanwhile,
so the router accepts such a figure only when two loads agree.

The driver is read through NVML, which needs no CUDA context. Device names are those of this process: `cuda:0` is the
first device in CUDA_VISIBLE_DEVICES.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from worker.protocol.memory import DEVICE_PROCESS_BYTES

LEAST_BYTES, MOST_BYTES = 16 << 20, 4 << 30  # values outside are caused by other processes; both are guesses


class NvmlMemory:
    """Bytes in use on a device by NVML, which is open from the first query until the process exits. None if unknown.

    A fork server never queries it: an open device does not survive a fork.
    """

    def __init__(self) -> None:
        self._is_open = False

    def used(self, device: str) -> int | None:
        """Bytes used by all processes."""
        found: int | None = self._query(device, lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        return found

    def own(self, device: str) -> int | None:
        """Bytes used by this process."""
        listed = self._query(device, lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return next((process.usedGpuMemory for process in listed or () if process.pid == os.getpid()), None)

    def _query(self, device: str, question: Callable[[Any, Any], Any]) -> Any:
        try:
            import pynvml  # type: ignore[import-untyped]  # late: only on accelerators; another interpreter may lack it
        except ImportError:
            return None
        try:
            if not self._is_open:
                pynvml.nvmlInit()
                self._is_open = True
            return question(pynvml, self._handle(pynvml, int(device.partition(":")[2] or 0)))
        except pynvml.NVMLError:
            return None

    def _handle(self, nvml: Any, index: int) -> Any:
        """Handle of a device by its number in CUDA_VISIBLE_DEVICES, which lists UUIDs, or indices in PCI bus order
        (CUDA_DEVICE_ORDER is set for every worker)."""
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = list(map(str, range(index + 1))) if shown is None else [name.strip() for name in shown.split(",")]
        if index >= len(names):
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)
        name = names[index]
        return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)


class ProcessOverhead:
    """Overhead of one process on its devices."""

    def __init__(self, driver: NvmlMemory, allocated: Callable[[str], int]):
        """`allocated`: returns the bytes of a device in torch's allocator."""
        self._driver, self._allocated = driver, allocated
        self._expected = 0
        self._used_before: dict[str, int | None] = {}
        self._measured: dict[str, int] = {}
        self.reported: dict[str, int] = {}  # by device name, as in `Ready`: the first measurement
        self.is_own = True  # as in `Ready`: all figures come from NVML's list of processes

    def begin(self, devices: Sequence[str], expected: int) -> None:
        """Call before this process uses any of `devices`. `expected`: the router's figure (`ModelOptions`)."""
        self._expected = expected
        self._used_before = {name: self._driver.used(name) for name in devices if name != "cpu"}

    def measure(self) -> None:
        """Update the figures. Call after kernels and libraries have been used."""
        for name, before in self._used_before.items():
            own, used, allocated = self._driver.own(name), self._driver.used(name), self._allocated(name)
            found = None
            if own is not None:
                found = own - allocated
            elif used is not None and before is not None:
                found = used - before - allocated
            if found is not None and LEAST_BYTES <= found <= MOST_BYTES:
                self._measured[name] = found
                if name not in self.reported:
                    self.reported[name] = found
                    self.is_own = self.is_own and own is not None

    def bytes(self, device: str) -> int:
        """Overhead on an accelerator: measured, else the router's figure, else a constant."""
        return self._measured.get(device) or self._expected or DEVICE_PROCESS_BYTES


overhead = ProcessOverhead(NvmlMemory(), lambda name: torch.cuda.memory_reserved(torch.device(name)))  # of this process

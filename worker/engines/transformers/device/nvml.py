"""What the driver of accelerators says of this process, by NVML: no context is taken for the question.

Named are the devices as this process has them, `cuda:0` being the first that CUDA_VISIBLE_DEVICES shows.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Driver(Protocol):
    """Bytes in use on a device, by the name that this process has for it; None: nobody says."""

    def used(self, device: str) -> int | None:
        """By everybody."""

    def own(self, device: str) -> int | None:
        """By this process."""


class Nvml:
    """The driver's own library. It takes no context, and is asked at the start of a load only."""

    def __init__(self, environ: Mapping[str, str] = os.environ):
        self._environ = environ

    def used(self, device: str) -> int | None:
        found: int | None = self._asked(device, lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        return found

    def own(self, device: str) -> int | None:
        listed = self._asked(device, lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return next((each.usedGpuMemory for each in listed or () if each.pid == os.getpid()), None)

    def _asked(self, device: str, question: Callable[[Any, Any], Any]) -> Any:
        try:
            import pynvml  # type: ignore[import-untyped]  # late: only on accelerators; another interpreter may lack it
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            try:
                return question(pynvml, self._handle(pynvml, int(device.partition(":")[2] or 0)))
            finally:
                pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return None

    def _handle(self, nvml: Any, index: int) -> Any:
        """Of the device with that number among those that this process is shown: by UUID, or by index in PCI bus order,
        as `CUDA_DEVICE_ORDER` is set for every worker."""
        shown = self._environ.get("CUDA_VISIBLE_DEVICES")
        names = list(map(str, range(index + 1))) if shown is None else [each.strip() for each in shown.split(",")]
        if index >= len(names):
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)
        name = names[index]
        return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)

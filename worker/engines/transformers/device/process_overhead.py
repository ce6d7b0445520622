"""What this process takes whatever its model: main memory by its imports, an accelerator by context and libraries.

The driver has no word for the latter. Where NVML lists this process, it is what is said there, less what torch's
allocator holds. Elsewhere, as in most containers, it is by how much more of the device is in use than before this
process came there; others come and go meanwhile, so that the router believes such a figure once two loads agree.
"""

from collections.abc import Callable, Sequence

import torch

from worker.engines.transformers.device.nvml import Driver, Nvml
from worker.protocol.memory import DEVICE_PROCESS_BYTES

LEAST_BYTES, MOST_BYTES = 16 << 20, 4 << 30
"""What is less or more is not this process's overhead, but somebody else's coming or going."""


class Overhead:
    """Of one process."""

    def __init__(self, driver: Driver, held: Callable[[str], int]):
        """`held`: bytes of a device that torch's allocator has."""
        self._driver, self._held = driver, held
        self._told = 0
        self._before: dict[str, int | None] = {}
        self._found: dict[str, int] = {}
        self.said: dict[str, int] = {}
        """By device name, as in `Ready`; what was found at the first look."""
        self.is_own = True
        """As in `Ready`."""

    def begin(self, devices: Sequence[str], told: int) -> None:
        """Before this process has touched any of `devices`. `told`: as in `ModelOptions`."""
        self._told = told
        self._before = {name: self._driver.used(name) for name in devices if name != "cpu"}

    def look(self) -> None:
        """Measure, once kernels and libraries have been used."""
        for name, before in self._before.items():
            own, used, held = self._driver.own(name), self._driver.used(name), self._held(name)
            found = None
            if own is not None:
                found = own - held
            elif used is not None and before is not None:
                found = used - before - held
            if found is not None and LEAST_BYTES <= found <= MOST_BYTES:
                self._found[name] = found
                if name not in self.said:
                    self.said[name] = found
                    self.is_own = self.is_own and own is not None

    def bytes(self, device: str) -> int:
        """Of an accelerator: as measured, else as it was told, else assumed."""
        return self._found.get(device) or self._told or DEVICE_PROCESS_BYTES


overhead = Overhead(Nvml(), lambda name: torch.cuda.memory_reserved(torch.device(name)))
"""Of this process."""

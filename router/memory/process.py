"""What a process takes whatever its model, by the type of its device: measured there once, and remembered. Law: PURE.

The first worker on a device of a type measures it as it loads (worker/engines/transformers/device/process_overhead.py); from then on every estimate
for that type, driver and these versions counts with that. Until then constants stand for it.
"""

from dataclasses import dataclass

from worker.protocol.memory import DEVICE_PROCESS_BYTES, DEVICE_PROCESS_HOST_BYTES, MIB

RUNTIME_HOST = 420 * MIB
"""Resident bytes of a worker process on main memory beside its model: 395 MiB are imports (torch 2.13 for the CPU,
transformers 5.23, Python 3.11; a third of it mapped libraries), and 15 come until it is ready. With its tokenizer and
what kernels take, which are counted apart, one with a model of 1.8 MiB was seen at 410 MiB once ready and at 433 in
service, where 484 were expected."""

RUNTIME_FORKED = 96 * MIB
"""Of one that was forked, without what it shares with its nursery: 67 MiB once ready and 72 in service with a model of
half a MiB, and a tenth of the 250 MiB that it shares at first, for pages that are written to as time goes by."""

SERVING_HOST = 64 * MIB
"""What is not there yet when a process has its imports: 15 MiB come until it is ready with a small model (395 MiB were
imports, by its own word), 10 to 45 with service."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes; 0: nobody has measured that yet."""

    device: int = 0
    """Of each accelerator, beyond what torch's allocator holds: context and libraries."""
    host: int = 0
    """Of main memory, once a process has its imports and its way to its device; of one that was forked only the
    latter, as it shares the imports with its nursery."""

    @property
    def on_device(self) -> int:
        """What to count with on each accelerator."""
        return self.device or DEVICE_PROCESS_BYTES

    def on_host(self, *, forked: bool) -> int:
        """What to count with for a worker on main memory, its tokenizer left out."""
        if forked:
            return RUNTIME_FORKED
        return self.host + SERVING_HOST if self.host else RUNTIME_HOST

    def beside_device(self, *, forked: bool) -> int:
        """What to count with on main memory for a worker on accelerators, likewise."""
        if not self.host:
            return DEVICE_PROCESS_HOST_BYTES
        return self.host + (RUNTIME_FORKED if forked else SERVING_HOST)


UNKNOWN = Overhead()

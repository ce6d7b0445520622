"""The memory of a process without a model, by type of device. PURE.

The first worker on a type of device measures it while it loads (see worker/engines/transformers/device/).
Later estimates for that type, driver and library versions use the measurement. Until then constants stand in for it.
"""

from dataclasses import dataclass

from worker.protocol.memory import DEVICE_PROCESS_BYTES, DEVICE_PROCESS_HOST_BYTES, MIB

# Resident bytes of a worker process on main memory beside its model: 395 MiB are imports (torch 2.13 for the CPU,
# transformers 5.23, Python 3.11; a third of it mapped libraries), and 15 come until it is ready. With its tokenizer
# and what kernels take, which are counted apart, one with a model of 1.8 MiB was seen at 410 MiB once ready and at
# 433 in service, where 484 were expected.
RUNTIME_HOST = 420 * MIB

# Of one that was forked, without what it shares with its nursery: 67 MiB once ready and 72 in service with a model of
# half a MiB, and a tenth of the 250 MiB that it shares at first, for pages that are written to as time goes by.
RUNTIME_FORKED = 96 * MIB

# What is not there yet when a process has its imports: 15 MiB come until it is ready with a small model (395 MiB were
# imports, by its own word), 10 to 45 with service.
SERVING_HOST = 64 * MIB


@dataclass(frozen=True, slots=True)
class Overhead:
    """Measured bytes of a process without a model; 0: not measured yet."""

    device: int = 0  # of each accelerator, beyond what torch's allocator holds: context and libraries
    # Of main memory, once a process has its imports and its way to its device; of one that was forked only the
    # latter, as it shares the imports with its nursery.
    host: int = 0

    @property
    def on_device(self) -> int:
        """Bytes to count on each accelerator."""
        return self.device or DEVICE_PROCESS_BYTES

    def on_host(self, *, forked: bool) -> int:
        """Return the bytes to count for a worker on main memory, without its tokenizer."""
        if forked:
            return RUNTIME_FORKED
        return self.host + SERVING_HOST if self.host else RUNTIME_HOST

    def beside_device(self, *, forked: bool) -> int:
        """Return the bytes of main memory to count for a worker on accelerators, without its tokenizer."""
        if not self.host:
            return DEVICE_PROCESS_HOST_BYTES
        return self.host + (RUNTIME_FORKED if forked else SERVING_HOST)


UNKNOWN = Overhead()

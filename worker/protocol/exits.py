"""Exit codes of a worker."""

from enum import IntEnum


class Exit(IntEnum):
    """The cause of a worker's exit. Any other code, or a signal, is a crash."""

    OK = 0
    USAGE = 2
    UNUSABLE = 3
    """Config, files, architecture, untrusted code, 401/403/404 of a hub: it would fail the same way again."""
    DEVICE_MEMORY = 4
    POISONED = 5
    """A sticky device error: this process can no longer use the device."""
    HOST_MEMORY = 6
    ORPHANED = 7
    NETWORK = 8
    DISK_FULL = 9
    DAMAGED = 10
    """Downloaded content failed its check; fetching it once more may help."""


FINAL_EXITS = frozenset({Exit.USAGE, Exit.UNUSABLE})
"""No retry until the preset or the snapshot changes, an explicit load, or ten minutes later."""

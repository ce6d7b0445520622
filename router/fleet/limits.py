"""The fleet's own settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds and counts."""

    autoload: bool = True
    queue_size: int = 4000
    queue_timeout: float = 300.0
    patience: float = 10.0
    drain_timeout: float = 30.0
    evict_timeout: float = -1.0
    models_max: int = 0
    sleep_memory: int = 0
    """Bytes of main memory for holdings."""
    memory: bool = True
    """False with a margin of 0: then only the count decides."""


__all__ = ["Limits"]

"""An errand: work that takes main memory for a while, and that nobody waits for, such as a conversion.

A luxury on main memory, as a holding is: charged while it runs, and it ends as soon as somebody has need of the room.
"""

import asyncio
from math import inf

from router.config.presets import Preset
from router.planner.ledger import HOST, LOCAL, DeviceId, Resident


class Errand:
    """One, from the moment on that it is charged."""

    def __init__(self, id: int, preset: Preset, size: int, now: float):
        """`size`: bytes that it takes at most."""
        self.id = id
        self.preset = preset
        self.released = asyncio.Event()
        """Set by the fleet: it must end."""
        self._size = size
        self._since = now

    def resident(self) -> Resident:
        """As the planner sees it: it grows up to its size, as who starts does, never lingers, and goes first."""
        return Resident(
            id=self.id,
            model=self.preset.id,
            reserved={DeviceId(LOCAL, HOST): self._size},
            last_used=-inf,
            idle_grace=0.0,
            starting=True,
            leaving=self.released.is_set(),
            leaving_since=self._since,
            best_effort=True,
        )


__all__ = ["Errand"]

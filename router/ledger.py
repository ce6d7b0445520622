"""What is used on each device.

The driver sees foreign memory, but not what our workers may still grow into; reservations say that, but nothing
foreign. So foreign memory gets a row of its own. Law: PURE.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

HOST = -1
"""Index of a node's main memory."""
SLOTS = -2
"""Index of a node's count of workers (--models-max); its unit is one worker, not a byte."""
LOCAL = "local"
"""The only node of a router on one machine."""


class DeviceId(NamedTuple):
    """One device of one machine; index >= 0 is an accelerator."""

    node: str
    index: int  # type: ignore[assignment]  # a device is never searched like a tuple

    def __str__(self) -> str:
        name = {HOST: "cpu", SLOTS: "slots"}.get(self.index, f"cuda:{self.index}")
        return name if self.node == LOCAL else f"{self.node}/{name}"


Bytes = Mapping[DeviceId, int]


@dataclass(frozen=True, slots=True)
class Reading:
    """The driver's word on one device, in bytes. `used` counts everybody's memory."""

    id: DeviceId
    total: int
    used: int
    name: str = ""
    """As the driver calls it, for people."""
    uuid: str = ""
    """How a worker is told to use it; empty for main memory."""

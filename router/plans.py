"""What the planner is asked, and what it answers: a vocabulary for those who ask, carry out and explain, too.

Law: PURE.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from router.ledger import Bytes, DeviceId

Keep = Literal["pinned", "busy", "starting", "turn", "elsewhere", "unneeded"]
"""Why a resident stays: never a victim; in use; its load is awaited; inside its turn; not on those devices; enough
without it."""
Cause = Literal["memory", "turn", "busy", "quiet", "stopping", "slots"]
"""Why a demand waits.

`turn`, `busy`: for victims inside their turn, or in use while patience is not over. `quiet`: for another load on the
device. `stopping`: for memory of those who leave. `memory`, `slots`: there is too little, and nobody who could leave
would change that, or those who will, leave for somebody ahead first, or the estimate is to be refined before.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A worker queued for room. Times are in seconds of one monotonic clock."""

    id: int
    model: str
    shards: tuple[int, ...]
    """Bytes by shard; each takes a device of its own, all on one node."""
    host: int = 0
    """Bytes of main memory beside the shards; 0 if the shard itself is on the host."""
    since: float
    """When it joined the queue."""
    devices: frozenset[DeviceId]
    """Those its shards may take: accelerators, or main memory."""
    place: tuple[DeviceId, ...] = ()
    """The device of each shard, where that is not to be chosen; empty: any of `devices`."""
    priority: int = 0
    luxury: bool = False
    """Merely nice: starts at once, displaces idle luxuries, or is dropped."""
    sure: bool = True
    """False for a static estimate: it may start, but is refined before it evicts or is refused."""
    quiet: bool = False
    """It measures the device at its start: shares it with no other load, from its claim on."""
    load_seconds: float = 0.0
    """Expected length of its load."""

    def __post_init__(self) -> None:
        if not self.shards:
            raise ValueError(f"a demand has at least one shard: {self.model}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the operator decides."""

    patience: float
    """Seconds a demand waits before busy workers past their turn are retired for it."""
    memory: bool = True
    """False: nobody waits, leaves or is refused for memory (--device-limit included); only SLOTS count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The arithmetic of one device, in bytes (in workers for SLOTS)."""

    required: int
    available: int
    """In a Wait: what is free now and promised to nobody ahead. In a Refusal: what could ever be had."""
    margin: int
    used: int
    """max(driver, foreign + reserved)."""
    foreign: int
    total: int
    limit: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Room for a demand, from now on."""

    place: tuple[DeviceId, ...]
    """The device of each shard, in the order of shards."""
    claim: Bytes
    """What to reserve: shards, and the HOST and SLOTS shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """A resident that is to leave."""

    reason: Literal["evicted", "idle"]
    """To make room; or its time to live is over."""
    for_demand: int | None
    idle: bool
    """Nobody leases it: it can stop at once. Otherwise it drains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Even an empty machine could not hold it."""

    devices: Mapping[DeviceId, Shortage]
    """Of the place that comes nearest; empty if there is no place with enough devices."""
    needs: int
    """How many devices it takes on one node."""
    offered: int
    """How many of those it may take exist on one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Why a demand stays in line."""

    cause: Cause
    on: tuple[int, ...] = ()
    """Residents in the way, by id."""
    shortage: Mapping[DeviceId, Shortage] = field(default_factory=dict)
    """Of devices on which there is too little, at `place` if there is one, else where least is missing."""
    place: tuple[DeviceId, ...] = ()
    """The device claimed for each shard; empty if there is nothing to claim."""
    victims: tuple[int, ...] = ()
    """Who leaves for it now or, together, later; by id."""
    keep: Mapping[int, Keep] = field(default_factory=dict)
    """Why the others stay."""
    until: float | None = None
    """When at the latest those in the way may leave; None: they do already, or nobody can say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer. Each demand is in exactly one of `start`, `refuse`, `drop` and `waits`, by its id."""

    start: Mapping[int, Start]
    evict: Mapping[int, Eviction]
    """By resident."""
    refine: frozenset[int]
    """Demands among `waits` of which an exact estimate is wanted."""
    refuse: Mapping[int, Refusal]
    drop: frozenset[int]
    """Luxuries for which there is no room."""
    waits: Mapping[int, Wait]
    look_again: float | None
    """The next moment at which time alone changes the answer."""

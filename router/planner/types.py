"""The types of the planner's question and answer. The fleet and the explanations use them, too. PURE."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from router.planner.ledger import Bytes, DeviceId

# The reason for which a resident is kept: never a victim; in use; a request waits for its load; inside its minimum
# residency; not on those devices; the memory is enough without it.
KeepReason = Literal["pinned", "busy", "starting", "residency", "elsewhere", "unneeded"]

# The reason for which a demand waits:
#     residency      its victims are inside their minimum residency, or still starting
#     busy           its victims are in use, and the swap patience is not over
#     exclusive      another load runs on the device, and one of the two measures it
#     stopping       evicted workers have not exited yet
#     memory, slots  there is too little, and no eviction would change that; or a demand ahead claims it; or the
#                    estimate has to be refined first
WaitCause = Literal["memory", "residency", "busy", "exclusive", "stopping", "slots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A worker queued for room. Times are in seconds of one monotonic clock."""

    id: int
    model: str
    # Bytes by shard, at least one. Each shard takes another device; all devices are on one node.
    shards: tuple[int, ...]
    host: int = 0  # bytes of main memory beside the shards; 0 if the shard itself is on the host
    # The KV cache as a range: `shards` contain the least of it, and it may grow by up to `steps` equal steps.
    growth: tuple[int, ...] = ()  # bytes of one step, by shard; empty without a range
    steps: int = 0
    # Bytes that a shard may take at most on a device; no entry: no limit.
    shard_limits: Bytes = field(default_factory=dict)
    since: float  # the time at which it joined the queue
    devices: frozenset[DeviceId]  # the devices that its shards may use: accelerators, or main memory
    place: tuple[DeviceId, ...] = ()  # the device of each shard, if it is fixed; empty: any of `devices`
    priority: int = 0
    best_effort: bool = False  # it starts at once, evicts idle best-effort residents, or is dropped
    # False for a static estimate: the demand may start, but is refined before it evicts or is refused.
    is_exact: bool = True
    # Its engine measures the device while it starts, so no other load may run there from its claim on.
    exclusive: bool = False
    load_seconds: float = 0.0  # expected length of its load


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings of the operator."""

    # Swap patience: seconds that a demand waits before busy workers past their minimum residency are drained.
    patience: float
    # False: only WORKER_SLOTS count; no demand waits, evicts or is refused for memory or a --device-limit.
    memory: bool = True


class Shortage(NamedTuple):
    """One device with too little memory, in bytes (in workers for WORKER_SLOTS)."""

    required: int
    # In a Wait: bytes that are free now and not claimed by a demand ahead. In a Refusal: the capacity of the device.
    available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Memory for a demand, from now on."""

    place: tuple[DeviceId, ...]  # the device of each shard, in the order of shards
    claim: Bytes  # bytes to reserve: the shards with their granted steps, and the HOST and WORKER_SLOTS shares
    steps: int = 0  # granted steps of the range


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """A resident that has to leave."""

    reason: Literal["evicted", "idle"]  # `evicted`: to make room; `idle`: its time to live is over
    for_demand: int | None
    # It has no lease and can stop at once. Otherwise it drains.
    idle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The demand does not even fit on an empty machine."""

    # The devices of the place where least is missing; empty if no node has enough devices.
    devices: Mapping[DeviceId, Shortage]
    needs: int  # the number of devices that it needs on one node
    offered: int  # the largest number of its devices that exist on one node


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The reason for which a demand stays in the queue."""

    cause: WaitCause
    on: tuple[int, ...] = ()  # residents in the way, by id
    # The devices with too little memory, at `place` if there is one, else at the place where least is missing.
    shortage: Mapping[DeviceId, Shortage] = field(default_factory=dict)
    place: tuple[DeviceId, ...] = ()  # the device claimed for each shard; empty if there is nothing to claim
    victims: tuple[int, ...] = ()  # residents, by id, that leave for it now or, together, later
    # The time at which the residents in the way may leave at the latest; None: they leave already, or not known.
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer. Each demand is in exactly one of `start`, `refuse`, `drop` and `waits`, by its id."""

    start: Mapping[int, Start]
    evict: Mapping[int, Eviction]  # by resident
    refine: frozenset[int]  # demands among `waits` that need an exact estimate
    refuse: Mapping[int, Refusal]
    drop: frozenset[int]  # best-effort demands for which there is no room
    waits: Mapping[int, Wait]
    look_again: float | None  # the next moment at which time alone changes the answer

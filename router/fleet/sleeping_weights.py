"""A holding: weights of a model that sleeps, in main memory without a worker; and its life, one coroutine.

It is a luxury on main memory: charged like anything else, begun only where nobody else has need of the room, and an
idle resident that leaves as soon as somebody has. Whoever wakes the model loads it as any other, from files that need
not be read again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from router.config.presets import Preset
from router.events import EventLog
from router.launch.interface import Launcher, NotHeld
from router.planner.ledger import HOST, LOCAL, DeviceId, Resident

log = logging.getLogger("router.fleet.fleet")

ASLEEP = 1e9
"""Seconds that weights that sleep are older than they are: they make way before any worker, copies included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be held. Times are seconds of the fleet's clock."""

    files: tuple[str, ...]
    size: int
    """Their bytes."""
    last_used: float
    expires: float | None
    """When it is over by the model's `ttl`; None: never."""


class Holding:
    """The weights of one model in main memory, from the moment on that they are charged."""

    def __init__(self, id: int, preset: Preset, wish: Wish):
        self.id = id
        self.preset = preset
        self.wish = wish
        self.is_held = False
        """All of it is there."""
        self.reason = ""
        """Why it ends."""
        self.released = asyncio.Event()
        self.stopped = asyncio.Event()

    def __str__(self) -> str:
        return f"{self.preset.id}#{self.id}"

    def resident(self) -> Resident:
        """As the planner sees it."""
        host = DeviceId(LOCAL, HOST)
        return Resident(
            id=self.id,
            model=self.preset.id,
            reserved={host: self.wish.size},
            measured={host: self.wish.size if self.is_held else 0},
            last_used=self.wish.last_used - ASLEEP,
            leaving=self.released.is_set(),
            pinned=self.preset.pin,
            priority=self.preset.priority,
            best_effort=True,
            expires=self.wish.expires,
        )

    def release(self, reason: str) -> None:
        """Let it go; why stands."""
        self.reason = self.reason or reason
        self.released.set()


async def hold(holding: Holding, launcher: Launcher, events: EventLog, changed: Callable[[], None]) -> None:
    """Live one holding, until it is released or lost; `changed` is called once it is held."""
    tell(holding, events, "holding")
    try:
        async with launcher.keep(holding.wish.files) as held:
            await launcher.refresh()  # from here on it is in the driver's figure
            holding.is_held = True
            tell(holding, events, "held")
            changed()
            lost = asyncio.ensure_future(held.lost())
            released = asyncio.ensure_future(holding.released.wait())
            try:
                await asyncio.wait({lost, released}, return_when=asyncio.FIRST_COMPLETED)
                if not released.done():
                    raise lost.result()
            finally:
                for task in (lost, released):
                    task.cancel()
    except NotHeld as failed:
        log.warning("%s: its weights are not held in main memory: %s", holding, failed)
        holding.release("failed")
    finally:
        holding.release("shutdown")
        with contextlib.suppress(asyncio.CancelledError):
            await launcher.refresh()
        holding.stopped.set()
        tell(holding, events, "released")


def tell(holding: Holding, events: EventLog, state: str) -> None:
    data = {"reason": holding.reason} if holding.reason else {}
    events.append("holding", holding.preset.id, id=holding.id, state=state, bytes=holding.wish.size, **data)


def make_room(holdings: Iterable[Holding], size: int, budget: int) -> Sequence[Holding] | None:
    """Who is to go so that `size` more bytes stay within the budget: the least recently used first, pinned stay.

    None if that would not do.
    """
    present = [each for each in holdings if not each.released.is_set()]
    over = sum(each.wish.size for each in present) + size - budget
    gone = []
    for each in sorted(present, key=lambda each: (each.preset.priority, each.wish.last_used)):
        if over <= 0:
            break
        if not each.preset.pin:
            gone.append(each)
            over -= each.wish.size
    return gone if over <= 0 else None


__all__ = ["Holding", "Wish", "hold", "make_room", "tell"]

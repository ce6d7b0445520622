"""LoRA slots: device memory for adapters, and the adapter in each slot.

`max-loras` slots are allocated at load. A running sequence holds the slot of its adapter. An unused adapter keeps its
slot until another one needs it; the least recently used goes first, a pinned one never.

The tensors of the slots are in `load.lora`; this module handles numbers only.
"""

from collections.abc import Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoraAdapter:
    """One registration of an adapter: the files behind its name when a request named it. An update makes a new one."""

    number: int  # unique to this registration
    name: str
    folder: str
    scale: float = 1.0  # from the preset, multiplied with the adapter's own scale
    pinned: bool = False  # never evicted from its slot until it is unregistered


@dataclass(frozen=True, slots=True)
class AppliedAdapter:
    """An adapter with the scale that one sequence applies."""

    adapter: LoraAdapter
    scale: float = 1.0  # 1.0: as trained

    @property
    def salt(self) -> bytes:
        """Prefix-cache salt: different wherever equal tokens get different keys and values."""
        return f"{self.adapter.number} {self.scale!r}".encode()


class LoraSlots:
    """Assignment of adapters to slots."""

    def __init__(self, count: int):
        """`count`: at least 1."""
        self.count = count
        self._free = list(range(count))
        # adapter number -> slot and adapter, least recently used first (dicts keep insertion order)
        self._slots: dict[int, tuple[int, LoraAdapter]] = {}
        self._users: dict[int, int] = {}  # adapter number -> running sequences
        self._registered: Set[int] | None = None  # adapter numbers; None: all

    def can_acquire(self, adapter: LoraAdapter) -> bool:
        """True if the adapter is in a slot, or a slot is free or held by an unused, unpinned adapter."""
        return adapter.number in self._slots or bool(self._free) or self._victim() is not None

    def acquire(self, adapter: LoraAdapter) -> int:
        """Return the adapter's slot and count one more user. Call `can_acquire` first."""
        number = adapter.number
        if number not in self._slots:
            if not self._free:
                victim = self._victim()
                assert victim is not None, "can_acquire was not called first"
                self._free_slot(victim)
            self._slots[number] = self._free.pop(), adapter
        # Reinsert at the end: the most recently used one.
        self._slots[number] = self._slots.pop(number)
        self._users[number] = self._users.get(number, 0) + 1
        return self._slots[number][0]

    def assign(self, slot: int, adapter: LoraAdapter) -> None:
        """Put an adapter into a slot that another rank has chosen, in place of the one there."""
        self._slots = {number: held for number, held in self._slots.items() if held[0] != slot}
        self._slots[adapter.number] = slot, adapter

    def release(self, adapter: LoraAdapter) -> None:
        """Count one user less. The adapter keeps its slot until another one needs it."""
        self._users[adapter.number] -= 1
        if not self._users[adapter.number]:
            del self._users[adapter.number]
            self._free_if_gone(adapter.number)

    def keep_only(self, registered: Set[int]) -> None:
        """Free the slots of adapters with other numbers: now, or as soon as the last user has ended."""
        self._registered = registered
        for number in list(self._slots):
            self._free_if_gone(number)

    def slot(self, adapter: LoraAdapter) -> int:
        """Slot of an adapter in use."""
        return self._slots[adapter.number][0]

    def _victim(self) -> int | None:
        idle = (
            number for number, (_, adapter) in self._slots.items() if number not in self._users and not adapter.pinned
        )
        return next(idle, None)

    def _free_if_gone(self, number: int) -> None:
        # A sequence that waited while its adapter was unregistered acquires a slot afterwards.
        if self._registered is not None and number not in self._registered and number not in self._users:
            self._free_slot(number)

    def _free_slot(self, number: int) -> None:
        self._free.append(self._slots.pop(number)[0])

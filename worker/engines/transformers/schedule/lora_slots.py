"""Which adapter lies in which slot of the device's memory, and who is using it.

There are as many slots as `max-loras`, allocated at load. A running sequence pins the slot of its adapter; an adapter
that nobody uses keeps its slot until somebody else needs it, the least recently used first, a pinned one never.

Law: PURE; who holds the tensors asks here for numbers only.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One registration: what a name stood for when a request named it. An update makes another one."""

    number: int
    """Of this registration and of no other."""
    name: str
    folder: str
    scale: float = 1.0
    """As its preset has it, on top of the adapter's own."""
    pinned: bool = False
    """Once in a slot it stays there until it is unregistered."""


@dataclass(frozen=True, slots=True)
class Use:
    """An adapter as one sequence has it."""

    adapter: Adapter
    scale: float = 1.0
    """1.0: as it was trained."""

    @property
    def salt(self) -> bytes:
        """Differs wherever the same tokens have other keys and values."""
        return f"{self.adapter.number} {self.scale!r}".encode()


class Slots:
    """Slots lent to adapters."""

    def __init__(self, count: int):
        """`count`: at least 1."""
        self.count = count
        self._free = list(range(count))
        self._lent: dict[int, tuple[int, Adapter]] = {}
        """Slot and adapter by the adapter's number, the least recently used first."""
        self._users: dict[int, int] = {}
        self._gone: set[int] = set()

    def can_lend(self, adapter: Adapter) -> bool:
        """Whether it is in a slot, or one is free or held by an adapter that nobody uses."""
        return adapter.number in self._lent or bool(self._free) or self._victim() is not None

    def lend(self, adapter: Adapter) -> int:
        """Its slot, for one more user; ask `can_lend` first."""
        number = adapter.number
        if number not in self._lent:
            if not self._free:
                victim = self._victim()
                assert victim is not None, "it was asked before"
                self._take(victim)
            self._lent[number] = self._free.pop(), adapter
        self._lent[number] = self._lent.pop(number)
        self._users[number] = self._users.get(number, 0) + 1
        return self._lent[number][0]

    def give_back(self, adapter: Adapter) -> None:
        """One user less; the adapter stays where it is until its slot is needed."""
        self._users[adapter.number] -= 1
        if not self._users[adapter.number]:
            del self._users[adapter.number]
            if adapter.number in self._gone:
                self._take(adapter.number)

    def forget(self, adapter: Adapter) -> None:
        """It is registered no longer: its slot is free as soon as nobody uses it."""
        if adapter.number not in self._lent:
            return
        self._gone.add(adapter.number)
        if adapter.number not in self._users:
            self._take(adapter.number)

    def slot(self, adapter: Adapter) -> int:
        """Where an adapter that has a user lies."""
        return self._lent[adapter.number][0]

    def _victim(self) -> int | None:
        idle = (number for number, (_, each) in self._lent.items() if number not in self._users and not each.pinned)
        return next(idle, None)

    def _take(self, number: int) -> None:
        self._free.append(self._lent.pop(number)[0])
        self._gone.discard(number)

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot was lost or lent twice. For tests, and when idle."""
        lent = [slot for slot, _ in self._lent.values()]
        assert sorted([*self._free, *lent]) == list(range(self.count)), "a slot was lost or lent twice"
        assert self._users.keys() <= self._lent.keys(), "somebody uses an adapter that is nowhere"

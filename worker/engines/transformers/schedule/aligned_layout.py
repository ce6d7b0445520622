"""Where the rows of the aligned cache lie: in which slot, and at which column each begins.

The cache has one slot for each row, `width` columns long. Rows that decode together must end at one column, the common
time, and lie in neighbouring slots, so that views of the buffers are all that a step needs; where a row begins, its
mask says. A prompt is computed in a slot of its own, far from those that decode, and joins them once it is complete:
then its keys and values move to where they end at the common time. If it is longer than that time, the others move.

Law: PURE. What has to move is a list of moves; who holds the tensors carries them out, one after another.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """`length` columns of slot `source` from `begin` on go to slot `target` from `to` on."""

    source: int
    begin: int
    target: int
    to: int
    length: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Two slots change places, with all that belongs to them; nothing changes its column."""

    one: int
    other: int


@dataclass(slots=True)
class _Place:
    slot: int
    begin: int
    """Column of the row's first token."""


@dataclass(frozen=True, slots=True)
class Together:
    """Rows that decode in one forward: those of `slots`, whose past ends in front of column `time`."""

    rows: tuple[int, ...]
    """In the order of their slots."""
    slots: slice
    low: int
    """The first column that any of them uses."""
    time: int
    moves: tuple[Move | Swap, ...]
    """To be carried out first."""


class Alignment:
    """Slots and columns by row."""

    def __init__(self, slots: int, width: int):
        self._places: dict[int, _Place] = {}
        self._slots = slots
        self._width = width

    def has(self, row: int) -> bool:
        return row in self._places

    def slot(self, row: int) -> int:
        return self._places[row].slot

    def begin(self, row: int) -> int:
        return self._places[row].begin

    def forget(self, row: int) -> None:
        """Its slot is free. Unknown rows are ignored."""
        self._places.pop(row, None)

    def fork(self, source: int, target: int, length: int) -> Move:
        """Row `target` is to hold the `length` columns of row `source`; what it held before is void."""
        self.forget(target)
        origin = self._places[source]
        copy = self._places[target] = _Place(self._free()[0], origin.begin)
        return Move(origin.slot, origin.begin, copy.slot, copy.begin, length)

    def alone(self, row: int, start: int, length: int) -> tuple[Move, ...]:
        """Room for `length` columns behind the `start` first ones of `row`, which is given a slot if it has none."""
        place = self._places.get(row)
        if place is None:
            self._places[row] = _Place(self._free()[-1], 0)
            return ()
        if start == 0:
            place.begin = 0
            return ()
        if place.begin + start + length <= self._width:
            return ()
        move = Move(place.slot, place.begin, place.slot, 0, start)
        place.begin = 0
        return (move,)

    def together(self, starts: Sequence[tuple[int, int]]) -> Together:
        """Bring rows (each with its number of columns so far) to one time and side by side, moving as few as may be."""
        time = self._time(starts)
        moves = self._gather(starts, time)
        for row, start in starts:
            place = self._places[row]
            if place.begin != time - start:
                moves.append(Move(place.slot, place.begin, place.slot, time - start, start))
                place.begin = time - start
        order = sorted((self._places[row].slot, row) for row, _ in starts)
        return Together(
            rows=tuple(row for _, row in order),
            slots=slice(order[0][0], order[-1][0] + 1),
            low=min(time - start for _, start in starts),
            time=time,
            moves=tuple(moves),
        )

    def _time(self, starts: Sequence[tuple[int, int]]) -> int:
        """The time that most columns already end at, if all rows fit in front of it and a column behind it."""
        longest = max(start for _, start in starts)
        ends: Counter[int] = Counter()
        for row, start in starts:
            end = self._places[row].begin + start
            if longest <= end < self._width:
                ends[end] += start
        return max(ends, key=lambda end: (ends[end], -end)) if ends else longest

    def _gather(self, starts: Sequence[tuple[int, int]], time: int) -> list[Move | Swap]:
        """Fill the gaps between the slots of these rows, from slot 0 on."""
        held = {self._places[row].slot: row for row, _ in starts}
        if max(held) - min(held) + 1 == len(held):
            return []
        length = dict(starts)
        owners = {place.slot: row for row, place in self._places.items()}
        gaps = sorted((slot for slot in range(len(held)) if slot not in held), key=lambda slot: slot in owners)
        outside = sorted(slot for slot in held if slot >= len(held))
        moves: list[Move | Swap] = []
        for slot, gap in zip(outside, gaps, strict=True):
            row = held[slot]
            place = self._places[row]
            if gap in owners:
                moves.append(Swap(slot, gap))
                self._places[owners[gap]].slot = slot
            else:
                moves.append(Move(slot, place.begin, gap, time - length[row], length[row]))
                place.begin = time - length[row]
            place.slot = gap
        return moves

    def _free(self) -> list[int]:
        taken = {place.slot for place in self._places.values()}
        return [slot for slot in range(self._slots) if slot not in taken]

    def check_integrity(self) -> None:
        """No two rows share a slot. For tests, and when idle."""
        slots = [place.slot for place in self._places.values()]
        assert len(set(slots)) == len(slots), "a slot is held twice"
        assert all(0 <= slot < self._slots for slot in slots), "a row lies outside"
        assert all(0 <= place.begin <= self._width for place in self._places.values()), "a row begins outside"

"""Layout of the aligned cache: the buffer row of each sequence and the column where it begins.

The cache is one buffer `[rows, columns]` per layer, `width` columns long, with one buffer row for each running
sequence. Sequences that decode together must end at one column (`time`) and lie in neighbouring buffer rows, so
that a step needs plain views of the buffers. The attention mask hides the columns before a sequence's first token (left
padding).

A prompt is computed in a buffer row far from the decoding ones. It joins them when it is complete: its keys and values
then move so that they end at the common column. If it is longer than that column, the others move instead.

This module returns the copies to make as a list. The cache (run/aligned_cache) carries them out in order.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ColumnMove:
    """Copy `length` columns of buffer row `source`, from `begin` on, to buffer row `target`, from `to` on."""

    source: int
    begin: int
    target: int
    to: int
    length: int


@dataclass(frozen=True, slots=True)
class RowSwap:
    """Exchange two buffer rows with everything in them. Columns stay the same."""

    one: int
    other: int


@dataclass(slots=True)
class _RowPlacement:
    buffer_row: int
    begin: int  # column of the first token


@dataclass(frozen=True, slots=True)
class AlignedDecodes:
    """Sequences that decode in one forward pass, in neighbouring buffer rows. Their cached tokens end before column
    `time`."""

    rows: tuple[int, ...]  # sorted by buffer row
    buffer_rows: slice
    low: int  # first column that any of them uses
    time: int
    moves: tuple[ColumnMove | RowSwap, ...]  # to be carried out first


class AlignedLayout:
    """Buffer row and first column by row of the scheduler."""

    def __init__(self, buffer_rows: int, width: int):
        self._placements: dict[int, _RowPlacement] = {}
        self._buffer_rows = buffer_rows
        self._width = width

    def has(self, row: int) -> bool:
        return row in self._placements

    def buffer_row(self, row: int) -> int:
        return self._placements[row].buffer_row

    def begin(self, row: int) -> int:
        return self._placements[row].begin

    def forget(self, row: int) -> None:
        """Free the buffer row. Unknown rows are ignored."""
        self._placements.pop(row, None)

    def fork(self, source: int, target: int, length: int) -> ColumnMove:
        """Copy the `length` columns of row `source` to row `target`, whose former content is dropped."""
        self.forget(target)
        origin = self._placements[source]
        copy = self._placements[target] = _RowPlacement(self._free()[0], origin.begin)
        return ColumnMove(origin.buffer_row, origin.begin, copy.buffer_row, copy.begin, length)

    def reserve(self, row: int, start: int, length: int) -> tuple[ColumnMove, ...]:
        """Make room for `length` columns behind the `start` first ones of `row`. A new row gets a buffer row.

        New prompts take the highest free buffer row, away from the decoding ones, which gather from 0 on.
        """
        placement = self._placements.get(row)
        if placement is None:
            self._placements[row] = _RowPlacement(self._free()[-1], 0)
            return ()
        if start == 0:
            placement.begin = 0
            return ()
        # Left padding that decodes caused is given up when the prompt would not fit otherwise.
        if placement.begin + start + length <= self._width:
            return ()
        move = ColumnMove(placement.buffer_row, placement.begin, placement.buffer_row, 0, start)
        placement.begin = 0
        return (move,)

    def align(self, starts: Sequence[tuple[int, int]], new: int = 1) -> AlignedDecodes:
        """Align rows, given with their numbers of columns, at one end column in neighbouring buffer rows. `new` columns
        are to be written behind it."""
        time = self._end_column(starts, new)
        moves = self._gather(starts, time)
        for row, start in starts:
            placement = self._placements[row]
            if placement.begin != time - start:
                moves.append(
                    ColumnMove(placement.buffer_row, placement.begin, placement.buffer_row, time - start, start)
                )
                placement.begin = time - start
        order = sorted((self._placements[row].buffer_row, row) for row, _ in starts)
        return AlignedDecodes(
            rows=tuple(row for _, row in order),
            buffer_rows=slice(order[0][0], order[-1][0] + 1),
            low=min(time - start for _, start in starts),
            time=time,
            moves=tuple(moves),
        )

    def _end_column(self, starts: Sequence[tuple[int, int]], new: int) -> int:
        """The end column that needs the fewest copied columns.

        That is the one where most columns already end, of those that leave room for the longest row before it and for
        `new` columns behind it.
        """
        longest = max(start for _, start in starts)
        ends: Counter[int] = Counter()
        for row, start in starts:
            end = self._placements[row].begin + start
            if longest <= end <= self._width - new:
                ends[end] += start
        return max(ends, key=lambda end: (ends[end], -end)) if ends else longest

    def _gather(self, starts: Sequence[tuple[int, int]], time: int) -> list[ColumnMove | RowSwap]:
        """Close the gaps between the buffer rows of these sequences, towards buffer row 0."""
        members = {self._placements[row].buffer_row: row for row, _ in starts}
        if max(members) - min(members) + 1 == len(members):
            return []
        length = dict(starts)
        # Free buffer rows are used before occupied ones: a move copies one row, a swap two.
        owners = {placement.buffer_row: row for row, placement in self._placements.items()}
        gaps = sorted(
            (buffer_row for buffer_row in range(len(members)) if buffer_row not in members),
            key=lambda buffer_row: buffer_row in owners,
        )
        outside = sorted(buffer_row for buffer_row in members if buffer_row >= len(members))
        moves: list[ColumnMove | RowSwap] = []
        for buffer_row, gap in zip(outside, gaps, strict=True):
            row = members[buffer_row]
            placement = self._placements[row]
            if gap in owners:
                # The occupant is a prompt that is still being computed. It takes the vacated buffer row.
                moves.append(RowSwap(buffer_row, gap))
                self._placements[owners[gap]].buffer_row = buffer_row
            else:
                # Moving to another buffer row aligns the end column in the same copy.
                moves.append(ColumnMove(buffer_row, placement.begin, gap, time - length[row], length[row]))
                placement.begin = time - length[row]
            placement.buffer_row = gap
        return moves

    def _free(self) -> list[int]:
        taken = {placement.buffer_row for placement in self._placements.values()}
        return [buffer_row for buffer_row in range(self._buffer_rows) if buffer_row not in taken]

"""Runs of free blocks, and the choice of the block at which a sequence begins a new run."""

from collections.abc import Callable

# A sequence accepts free runs of this many blocks rather than evict cached content for a longer one. A guess: reading
# one run more costs an attention call in each layer, about 15 microseconds on a CPU.
SHORT_RUN = 8


class FreeRuns:
    """Blocks that hold nothing: neither tokens of a running sequence nor cached ones. Neighbours form maximal runs.

    Adding a block, and taking the first block of a run, cost O(1). The choice of a place scans all runs, which happens
    once for each run of a sequence.
    """

    def __init__(self, count: int):
        self._ends = {0: count}  # end by start, for each run
        self._starts = {count: 0}

    def __contains__(self, block: int) -> bool:
        """True if a run begins at `block`."""
        return block in self._ends

    def add(self, block: int) -> int:
        """Add a block. Return the length of the run that it is part of now."""
        start = self._starts.pop(block, block)
        end = self._ends.pop(block + 1, block + 1)
        self._ends[start], self._starts[end] = end, start
        return end - start

    def take(self, block: int) -> None:
        """Remove a block that is free."""
        if block in self._ends:
            start = block
        else:
            start = next(start for start, end in self._ends.items() if start < block < end)
        end = self._ends.pop(start)
        del self._starts[end]
        for first, behind in ((start, block), (block + 1, end)):
            if first < behind:
                self._ends[first], self._starts[behind] = behind, first

    def longest(self) -> int:
        """Length of the longest run."""
        return max((end - start for start, end in self._ends.items()), default=0)

    def place(self, wanted: int, region: int, least: int, is_held: Callable[[int], bool]) -> int | None:
        """First block for a run that may grow to `wanted` blocks. None if no block is free.

        The preferred place is a free region of the pool (`region` blocks from a multiple of `region` on): sequences
        that begin at equal distances attend in one call. Otherwise the longest run is chosen, and the room that is not
        wanted is split between the new run and the sequence in front of it, which may still grow. If its part would be
        less than `least` blocks and it has ended (its last block is not held), the new run gets all: no other sequence
        accepts so few blocks, and with a gap behind each short prompt half of the pool would stay empty.
        """
        regions = ((-(-start // region) * region, end) for start, end in self._ends.items())
        first = min((first for first, end in regions if first + max(wanted, region) <= end), default=None)
        if first is not None or not self._ends:
            return first
        start, end = max(self._ends.items(), key=lambda run: (run[1] - run[0], -run[0]))
        gap = max(end - start - wanted, 0) // 2 if start else 0
        return start + gap if gap >= least or (gap and is_held(start - 1)) else start

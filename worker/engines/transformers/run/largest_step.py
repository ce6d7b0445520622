"""The largest steps so far: those that are larger announce main memory before they take it."""

from collections.abc import Iterable, Set

from worker.engines.transformers.attention.cpu_linear import row_chunks
from worker.protocol.memory import KERNEL_CODES

# After this number of shapes, all kernels that attention needs are compiled, or their cache is full. A guess.
_MOST_SHAPES = 16 * KERNEL_CODES


class LargestSizes:
    """The largest sizes that the steps had so far, and the numbers of rows for which kernels are compiled."""

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()
        # Numbers of rows that were multiplied at once, if the weights are plain, and if they are reordered.
        self._rows: tuple[set[int], set[int]] = (set(), set())
        self._shapes: set[tuple[int, int]] = set()

    def are_exceeded(self, *sizes: int, rows: Iterable[int] = (), shapes: Set[tuple[int, int]] = frozenset()) -> bool:
        """Record a step. True if one of its sizes is larger than in all steps before, or if the CPU kernels may need
        code for another one of its numbers of `rows`, or of its `shapes` of attention: queries or rows, and context."""
        before, self._sizes = self._sizes, tuple(map(max, self._sizes or sizes, sizes))
        needs_code = len(self._shapes) < _MOST_SHAPES and not shapes <= self._shapes
        if needs_code:
            self._shapes |= shapes
        for is_reordered, known in enumerate(self._rows):
            if len(known) < KERNEL_CODES:  # else the cache of kernels is full: a new one replaces another
                some = {size for count in rows for size in row_chunks(count, bool(is_reordered))}
                needs_code |= not some <= known
                known |= some
        return needs_code or self._sizes != before

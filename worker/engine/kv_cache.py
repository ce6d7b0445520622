"""Which rows of the key-value pool belong to whom.

The pool has one row for each sequence that may run at once, as long as the context: a sequence that got a row can go
on to its end and is never preempted for want of cache. Token `p` of the sequence in row `r` lives in slot
`r * ctx_size + p`, the same in every layer.
Law: PURE; who holds the tensors asks here for numbers only.
"""

import heapq


def pool_bytes(layers: int, kv_heads: int, head_dim: int, rows: int, ctx_size: int, dtype_bytes: int) -> int:
    """Bytes of the whole pool: keys and values of `rows` sequences of `ctx_size` tokens each, in every layer.

    A layer with a sliding window holds its full length, too.
    """
    return 2 * layers * kv_heads * head_dim * rows * ctx_size * dtype_bytes


class Rows:
    """Rows of the pool and their owners. The lowest free row is given first, so that few rows run close together."""

    def __init__(self, count: int):
        self._free = list(range(count))
        self._owners: dict[int, int] = {}
        self.count = count

    @property
    def can_take(self) -> bool:
        return bool(self._free)

    @property
    def owners(self) -> dict[int, int]:
        """Owner by row; a copy."""
        return dict(self._owners)

    def take(self, owner: int) -> int:
        """The lowest free row, now `owner`'s; ask `can_take` first."""
        row = heapq.heappop(self._free)
        self._owners[row] = owner
        return row

    def give_back(self, row: int) -> None:
        """Its owner is done with it; what it holds is void."""
        del self._owners[row]
        heapq.heappush(self._free, row)

    def check_integrity(self) -> None:
        """Every row is either free or owned, by one owner each. For tests, and when idle."""
        assert sorted([*self._free, *self._owners]) == list(range(self.count)), "a row was lost or given twice"
        assert len(set(self._owners.values())) == len(self._owners), "an owner holds two rows"

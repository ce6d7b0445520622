"""Allocation of the KV cache: rows, blocks and shared prefixes.

The cache has one *row* for each sequence that may run at once. A row has either room for a whole context
(`RowAllocator`) or a table of blocks (`BlockAllocator`). A block holds BLOCK_TOKENS tokens. Sequences that begin with
the same tokens share blocks (prefix caching), and a block keeps its content after its last sequence has ended until the
room is needed. The least recently used block of the whole pool is evicted first. Of the blocks of one sequence the last
one is evicted first, because a block is found only behind all blocks before it.

The location of blocks matters, because blocks that are neighbours in the pool (a run) are read as a view, without a
copy. A sequence therefore grows into the block behind its last one, if that holds nothing. Eviction never chooses
blocks by location, and location never chooses what is evicted: a sequence that begins a run evicts in order of last use
until a run of empty blocks is long enough (`_begin_run`), and then chooses a place in it. The pool is divided into as
many equal *regions* as there are rows. As long as a region is empty, a new sequence begins there. Without cached
content, in a pool with room for the full context of every row, each sequence is therefore one run.

This module handles numbers only; the tensors belong to `attention.kv_pool`.
"""

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from worker.engines.transformers.schedule.free_runs import SHORT_RUN, FreeRuns
from worker.engines.transformers.schedule.sequence import Sequence
from worker.protocol.memory import BLOCK_TOKENS


def pool_blocks(rows: int, ctx_size: int, kv_tokens: int = 0) -> int:
    """Blocks of a pool for `kv_tokens` tokens. With 0 the pool has room for the full context of every row, so that no
    sequence is ever preempted."""
    return blocks_for(kv_tokens) if kv_tokens else rows * blocks_for(ctx_size)


def region_blocks(rows: int, blocks: int) -> int:
    """Blocks of one region."""
    return max(blocks // rows, 1)


def blocks_for(tokens: int) -> int:
    """Number of blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(slots=True)
class BlockRun:
    """`count` neighbouring blocks of the pool, from `block` on. They are entries `first` to `first + count` of a
    table."""

    first: int
    block: int
    count: int


@dataclass(slots=True, eq=False)
class BlockTable:
    """Block table of one running sequence, in the order of its tokens."""

    blocks: list[int] = field(default_factory=list)
    runs: list[BlockRun] = field(default_factory=list)  # the same blocks, grouped by neighbourhood in the pool
    # Prefix-cache keys of the leading blocks that are full and computed.
    keys: list[bytes] = field(default_factory=list)
    max_blocks: int = 0  # blocks that the sequence holds at its longest
    # The last block is shared and its owner may still append to it, so copy before writing.
    shares_last_block: bool = False
    # Source and target block of a copy to make before the next forward pass. The runner sets it to None afterwards.
    copy: tuple[int, int] | None = None

    def append(self, block: int) -> None:
        if self.runs and self.runs[-1].block + self.runs[-1].count == block:
            self.runs[-1].count += 1
        else:
            self.runs.append(BlockRun(len(self.blocks), block, 1))
        self.blocks.append(block)

    def drop_last(self) -> int:
        self.runs[-1].count -= 1
        if not self.runs[-1].count:
            self.runs.pop()
        return self.blocks.pop()

    def spans(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Positions in the pool of tokens `start` to `end`: first position and length of each run, in order."""
        for run in self.runs:
            first = run.first * BLOCK_TOKENS
            low, high = max(start, first), min(end, first + run.count * BLOCK_TOKENS)
            if low < high:
                yield run.block * BLOCK_TOKENS + low - first, high - low


class RowAllocator:
    """Rows for running sequences, and room for their tokens: the interface between the scheduler and a cache.

    Here each row has room for a full context, so an admitted sequence never runs out of room. `BlockAllocator` gives
    rows room block by block. The lowest free row is used first, so that running rows stay close together.
    """

    def __init__(self, count: int, ctx_size: int = 0):
        self._free_rows = list(range(count))
        self._owners: dict[int, int] = {}
        self.rows = count  # maximum of running sequences
        self.tokens = count * ctx_size  # that the whole cache has room for

    @property
    def owners(self) -> dict[int, int]:
        """Sequence id by row; a copy."""
        return dict(self._owners)

    @property
    def shared(self) -> int:
        """Tokens counted more than once when the lengths of all rows are added."""
        return 0

    @property
    def reusable(self) -> int:
        """Cached tokens that no row holds."""
        return 0

    @property
    def has_row(self) -> bool:
        """True if a row is free."""
        return bool(self._free_rows)

    def can_admit(self, sequence: Sequence) -> bool:
        """True if a row is free and there is room for all tokens of the sequence and some more."""
        return self.has_row

    def admit(self, sequence: Sequence) -> tuple[int, int]:
        """Return a row and the number of cached tokens in it, never all of them. Call `can_admit` first."""
        return self.attach(sequence), 0

    def attach(self, sequence: Sequence) -> int:
        """Return a row without room, for a further choice of a prompt that is being computed. Call `has_row` first."""
        row = heapq.heappop(self._free_rows)
        self._owners[row] = sequence.id
        return row

    def fork(self, source: int, target: int, tokens: int) -> None:
        """Share the first `tokens` of row `source` with the attached row `target`. Here the runner copies the row."""

    def grow(self, row: int, start: int, end: int) -> bool:
        """Reserve exclusive room for tokens `start` to `end` of the row. Return False if there is not enough."""
        return True

    def cache_blocks(self, row: int, sequence: Sequence) -> None:
        """Register the blocks of the row that are now full and computed in the prefix cache. Here there are none."""

    def reuse(self, row: int, sequence: Sequence) -> int:
        """Take the next tokens of an incomplete prompt from the prefix cache. Return their number. Here it is 0."""
        return 0

    def release(self, row: int, *, is_corrupt: bool = False, is_checked: bool = True) -> None:
        """Free the row. `is_corrupt`: its content is invalid and must not be reused. `is_checked`: logits behind
        all of its content were finite."""
        del self._owners[row]
        heapq.heappush(self._free_rows, row)

    def table(self, row: int) -> BlockTable | None:
        """Block table of the row, or None for a cache without blocks."""
        return None

    def contiguous_table(self, row: int, tokens: int) -> BlockTable | None:
        """Like `table`, for a row with `tokens` tokens in one run. For measurements before any sequence runs."""
        return None


class BlockAllocator(RowAllocator):
    """Reference-counted blocks with a prefix cache.

    A block without references is free but keeps its content and key until it is reused. A new sequence that begins with
    the same tokens takes it from the prefix cache instead of computing it again.
    """

    def __init__(self, rows: int, count: int, *, caches: bool = True):
        """`count`: at least the blocks of the longest sequence, so that one sequence can always continue."""
        super().__init__(rows)
        self.count, self.tokens = count, count * BLOCK_TOKENS
        self._caches = caches
        self._references = [0] * count
        # Blocks without references, with or without cached content. Counted along, because `grow` reads it for every
        # sequence in every step.
        self.free = count
        self._key_of: list[bytes | None] = [None] * count
        self._block_of: dict[bytes, int] = {}
        self._tables: dict[int, BlockTable] = {}
        # Cached blocks without references, the least recently used one first; and blocks that hold nothing.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._empty = FreeRuns(count)
        self._region_size = region_blocks(rows, count)
        # In a small pool, SHORT_RUN is a whole region: what a cached prompt leaves of one would always be too short.
        self._short_run = max(1, min(SHORT_RUN, self._region_size // 4))
        self._suspect: set[int] = set()  # blocks that may contain NaN
        self._corrupt: list[int] = []  # those of them that became empty and must be overwritten
        # Id and length of the last sequence looked up, with its block keys: a waiting one is looked up in every step.
        self._last_lookup: tuple[int, int, list[bytes]] = (-1, 0, [])

    @property
    def shared(self) -> int:
        return sum(references - 1 for references in self._references if references > 1) * BLOCK_TOKENS

    @property
    def reusable(self) -> int:
        return len(self._cached) * BLOCK_TOKENS

    def can_admit(self, sequence: Sequence) -> bool:
        """See `RowAllocator`. One block is left for each running sequence, so that admission causes no preemption."""
        if not self.has_row:
            return False
        # Cached blocks that no sequence holds count as free blocks and as blocks needed, so they cancel out.
        shared = sum(self._references[block] > 0 for block in self._find_prefix(sequence))
        return blocks_for(len(sequence.tokens)) - shared + len(self._tables) <= self.free

    def admit(self, sequence: Sequence) -> tuple[int, int]:
        """See `RowAllocator`. Allocates all blocks for the sequence's tokens at once."""
        found = self._find_prefix(sequence)
        row = self.attach(sequence)
        table = self._tables[row]
        for block in found:
            self._add_reference(block)
            table.append(block)
            key = self._key_of[block]
            assert key is not None
            table.keys.append(key)
        # The prefix is referenced first, so that `grow` cannot evict it.
        has_room = self.grow(row, len(found) * BLOCK_TOKENS, len(sequence.tokens))
        assert has_room, "can_admit was not called first"
        return row, len(found) * BLOCK_TOKENS

    def attach(self, sequence: Sequence) -> int:
        row = super().attach(sequence)
        self._tables[row] = BlockTable(max_blocks=blocks_for(sequence.prompt_tokens + max(sequence.limit, 0)))
        return row

    def fork(self, source: int, target: int, tokens: int) -> None:
        """See `RowAllocator`. A partly filled last block is shared, too, until the target writes to it (copy on write).

        The source appends in place. That is safe because the other sequences read only the common tokens of the block.
        """
        source_table, target_table = self._tables[source], self._tables[target]
        for block in source_table.blocks[: blocks_for(tokens)]:
            self._add_reference(block)
            target_table.append(block)
        target_table.shares_last_block = tokens % BLOCK_TOKENS > 0
        target_table.keys = source_table.keys[: tokens // BLOCK_TOKENS]

    def grow(self, row: int, start: int, end: int) -> bool:
        table = self._tables[row]
        # If the other holders of a shared last block have ended, it is exclusive by now and needs no copy.
        copies = table.shares_last_block and self._references[table.blocks[-1]] > 1
        if copies + max(0, blocks_for(end) - len(table.blocks)) > self.free:
            return False
        # Checked before any change: a failed call leaves the table as it was.
        table.shares_last_block = False
        if copies:
            assert start // BLOCK_TOKENS == len(table.blocks) - 1, "only the last block is not full"
            block = table.drop_last()
            self._references[block] -= 1
            self._append(table, blocks_for(end))
            table.copy = block, table.blocks[-1]
        while len(table.blocks) < blocks_for(end):
            self._append(table, blocks_for(end))
        return True

    def cache_blocks(self, row: int, sequence: Sequence) -> None:
        table = self._tables[row]
        if not self._caches:
            return
        # A key may be present already: two sequences computed equal blocks side by side. The first one stays.
        for index in range(len(table.keys), sequence.computed // BLOCK_TOKENS):
            key = next_key(table.keys, sequence)
            table.keys.append(key)
            block = table.blocks[index]
            if key not in self._block_of:
                self._block_of[key] = block
                self._key_of[block] = key

    def reuse(self, row: int, sequence: Sequence) -> int:
        """See `RowAllocator`. Prompts with a common beginning that arrive together are all admitted before it is
        computed. The first one computes it, and the others take its blocks here in place of empty ones of their own.
        """
        table = self._tables[row]
        held = len(table.keys)
        if sequence.computed != held * BLOCK_TOKENS or not self._may_reuse(sequence):
            return 0
        found, keys = [], list(table.keys)
        for _ in range(held, (len(sequence.tokens) - 1) // BLOCK_TOKENS):
            key = next_key(keys, sequence)
            if key not in self._block_of:
                break
            keys.append(key)
            found.append(self._block_of[key])
        if not found:
            return 0
        for block in found:
            self._add_reference(block)
        for block in table.blocks[held : held + len(found)]:
            self._references[block] -= 1
            self.free += 1
            self._empty.add(block)
        # A new table object: the draft model compares tables to detect that blocks were replaced.
        self._tables[row] = changed = BlockTable(keys=keys, max_blocks=table.max_blocks)
        for block in (*table.blocks[:held], *found, *table.blocks[held + len(found) :]):
            changed.append(block)
        return len(found) * BLOCK_TOKENS

    def release(self, row: int, *, is_corrupt: bool = False, is_checked: bool = True) -> None:
        super().release(row)
        table = self._tables.pop(row)
        # From the last block to the first, so that a block is evicted before the blocks before it.
        for index in reversed(range(len(table.blocks))):
            block = table.blocks[index]
            self._references[block] -= 1
            if is_corrupt:
                self._drop_key(block)
            elif index < len(table.keys):
                self._touch(block, table.keys[index])
            if is_corrupt or not is_checked:
                self._suspect.add(block)
            if not self._references[block]:
                self.free += 1
                # Cached blocks keep their content; that is the prefix cache. Unchecked ones, too: if they contain NaN,
                # the tokens that find them would give NaN again.
                if self._key_of[block] is None:
                    self._add_empty(block)
                else:
                    self._cached[block] = None

    def _add_empty(self, block: int) -> int:
        """Count a block as empty. Return the length of its run of empty blocks."""
        if block in self._suspect:
            self._suspect.remove(block)
            self._corrupt.append(block)
        return self._empty.add(block)

    def _touch(self, block: int, key: bytes) -> None:
        """Count the end of a sequence as a use of the block that is cached as `key`, which may be another one with
        equal content. If that has been evicted meanwhile, `block` takes its place."""
        cached = self._block_of.setdefault(key, block)
        if cached == block:
            self._key_of[block] = key
        elif cached in self._cached:
            self._cached.move_to_end(cached)

    def table(self, row: int) -> BlockTable:
        return self._tables[row]

    def contiguous_table(self, row: int, tokens: int) -> BlockTable:
        table, count = BlockTable(), blocks_for(tokens)
        # As in normal traffic, the row begins at its own region, unless the pool ends before.
        first = max(0, min(row * self._region_size, self.count - count))
        for block in range(first, first + count):
            table.append(block)
        return table

    def take_corrupt(self) -> list[int]:
        """Blocks emptied since the last call that may be corrupt. The caller must overwrite them with zeros.

        They may contain NaN or infinity. An attention mask does not hide those, because 0 * NaN is NaN.
        """
        corrupt, self._corrupt = self._corrupt, []
        return corrupt

    # Prefixes

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the longest known prefix, but never of the whole sequence: its last token must be computed
        for its logits. Empty if logits are needed at every prompt position.
        """
        if not self._may_reuse(sequence):
            return []
        found = []
        for key in self._keys(sequence):
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def _may_reuse(self, sequence: Sequence) -> bool:
        return self._caches and not sequence.prompt_logprobs

    def _keys(self, sequence: Sequence) -> list[bytes]:
        # Hashing a long prompt takes milliseconds, and a waiting sequence is looked up before every step.
        id, length, keys = self._last_lookup
        if (id, length) != (sequence.id, len(sequence.tokens)):
            keys = []
            while len(keys) < (len(sequence.tokens) - 1) // BLOCK_TOKENS:
                keys.append(next_key(keys, sequence))
            self._last_lookup = sequence.id, len(sequence.tokens), keys
        return keys

    def _drop_key(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None

    # Location of new blocks

    def _append(self, table: BlockTable, target: int) -> None:
        """Append one block of those up to `target`: the one after the last block if that is empty. The caller has
        checked that a block is free."""
        block = table.blocks[-1] + 1 if table.blocks else self.count
        if block not in self._empty:
            # A cached block here is not overwritten: it may be the beginning of a later prompt. Or another sequence
            # holds the block.
            block = self._begin_run(len(table.blocks), target, table.max_blocks)
        self._empty.take(block)
        self._add_reference(block)
        table.append(block)

    def _begin_run(self, held: int, target: int, most: int) -> int:
        """First block of a new run for a sequence that holds `held` blocks, needs `target` now, and `most` at last.

        Blocks are evicted only if all empty runs are short. Then more than one block is evicted, so that a sequence
        that grows token by token does not get a run for each block. A sequence of n blocks gets O(log n) runs, and it
        evicts at most twice as much as the longest run that it could fill.
        """
        needed = max(target - held, 1)
        wanted = max(needed, min(most - held, max(self._short_run, held // 2)))
        longest = self._empty.longest()
        if longest < min(wanted, max(self._short_run, needed // 4)):
            for _ in range(min(2 * wanted, len(self._cached))):
                if longest >= wanted:
                    break
                longest = max(longest, self._evict())
        block = self._empty.place(wanted, self._region_size, self._short_run, lambda block: self._references[block] > 0)
        assert block is not None, "no block is free"
        return block

    def _evict(self) -> int:
        """Evict the least recently used block. Return the length of its run of empty blocks."""
        block, _ = self._cached.popitem(last=False)
        self._drop_key(block)
        return self._add_empty(block)

    def _add_reference(self, block: int) -> None:
        if not self._references[block]:
            self.free -= 1
            self._cached.pop(block, None)
        self._references[block] += 1


def block_key(before: bytes, tokens: Tokens[int]) -> bytes:
    """Prefix-cache key of a full block: a hash of its tokens and of `before`, the key of the block before it.

    The chain of keys covers all tokens up to the end of the block. A collision would let a request read the context of
    another one, so the hash must be cryptographic: 128 bits of BLAKE2b (RFC 7693).
    """
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


def next_key(keys: Tokens[bytes], sequence: Sequence) -> bytes:
    """Prefix-cache key of the block behind the leading blocks of `sequence`, whose keys are `keys`."""
    begin = len(keys) * BLOCK_TOKENS
    return block_key(keys[-1] if keys else _root(sequence), sequence.tokens[begin : begin + BLOCK_TOKENS])


def _root(sequence: Sequence) -> bytes:
    """Start of the key chain: the adapter, under which equal tokens have other keys and values, and the request's own
    salt, which separates clients."""
    adapter = sequence.adapter.salt if sequence.adapter is not None else b""
    return adapter + b"\0" + sequence.salt if sequence.salt else adapter

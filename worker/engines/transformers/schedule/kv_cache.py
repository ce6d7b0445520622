"""Which part of the key-value cache belongs to whom.

A backend's cache has a *row* for each sequence that may run at once; `Capacity` lends them. Behind a row lies either
room for a whole context (`Rows`), or a table of blocks (`Blocks`): BLOCK_TOKENS tokens each, lent one by one, shared by
all who begin with the same tokens, and remembered when their sequence has ended until somebody needs the room.

Where blocks lie matters, because what lies in one run is read without a copy. So a sequence grows into the block
behind its last one, and begins at one of as many *homes* as there are rows, which divide the pool: the one that was
least recently used. With room for every row's whole context no sequence is ever in another's way; with less, runs
break where they meet, and what can take place nowhere waits.

Law: PURE; who holds the tensors asks here for numbers only.
"""

import hashlib
import heapq
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Protocol

from worker.engines.transformers.schedule.sequence import Sequence
from worker.protocol.memory import BLOCK_TOKENS


def pool_blocks(rows: int, ctx_size: int, kv_tokens: int = 0) -> int:
    """Blocks of a pool for `kv_tokens` tokens; 0: for the whole context in each of `rows` rows, so that nobody is ever
    put back for want of room."""
    return blocks_for(kv_tokens) if kv_tokens else rows * blocks_for(ctx_size)


def home_stride(rows: int, blocks: int) -> int:
    """Blocks from one home to the next."""
    return max(blocks // rows, 1)


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(slots=True)
class Run:
    """`count` blocks of a table, from its `first` on, that lie one behind another in the pool, from `block` on."""

    first: int
    block: int
    count: int


@dataclass(slots=True, eq=False)
class Table:
    """The blocks of one running sequence, in the order of its tokens."""

    blocks: list[int] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    """The same blocks, by where they lie."""
    keys: list[bytes] = field(default_factory=list)
    """Of the first blocks, those that are full and computed."""
    place: int | None = None
    """The block where it would like to go on; None: it has not begun anywhere yet."""
    borrows: bool = False
    """Its last block is another's, who may write in there behind what both have in common."""
    copy: tuple[int, int] | None = None
    """The first of these blocks is to be copied into the second, before anything is computed. Who has done it, once,
    sets this to None."""

    def append(self, block: int) -> None:
        if self.runs and self.runs[-1].block + self.runs[-1].count == block:
            self.runs[-1].count += 1
        else:
            self.runs.append(Run(len(self.blocks), block, 1))
        self.blocks.append(block)

    def drop_last(self) -> int:
        self.runs[-1].count -= 1
        if not self.runs[-1].count:
            self.runs.pop()
        return self.blocks.pop()

    def slots(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Where tokens `start` to `end` lie: first slot and length of each run, in order."""
        for run in self.runs:
            first = run.first * BLOCK_TOKENS
            low, high = max(start, first), min(end, first + run.count * BLOCK_TOKENS)
            if low < high:
                yield run.block * BLOCK_TOKENS + low - first, high - low


class Capacity(Protocol):
    """What a cache has room for: the scheduler asks, and the sequences that run hold rows of it."""

    @property
    def rows(self) -> int:
        """Sequences that may run at once."""

    @property
    def owners(self) -> dict[int, int]:
        """Id of the sequence by row; a copy."""

    @property
    def tokens(self) -> int:
        """Tokens that all of it has room for."""

    @property
    def shared(self) -> int:
        """Tokens that would be counted too often if those of all rows were added."""

    @property
    def reusable(self) -> int:
        """Tokens that no row holds, kept for whoever begins with them."""

    @property
    def has_row(self) -> bool:
        """Whether a row is free."""

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether there is a row, and room for all that the sequence has to compute and a little of what follows."""

    def admit(self, sequence: Sequence) -> tuple[int, int]:
        """A row for it, and how many of its tokens are in there already, never all; ask `can_admit` first."""

    def attach(self, sequence: Sequence) -> int:
        """A row for another choice of a prompt that is being computed, and no room yet; ask `has_row` first."""

    def fork(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` of row `source` are those of row `target`, which was attached, as well."""

    def grow(self, row: int, start: int, end: int) -> bool:
        """Make room for its tokens `start` to `end`, where nobody else reads; whether there was enough."""

    def note(self, row: int, sequence: Sequence) -> None:
        """The row's sequence got on: what is computed of it may serve others who begin alike."""

    def give_back(self, row: int, *, is_spoiled: bool = False) -> None:
        """Its owner is done with it. `is_spoiled`: what it holds must not serve anybody."""

    def table(self, row: int) -> Table | None:
        """The blocks behind the row, if there are such."""

    def trial(self, row: int, tokens: int) -> Table | None:
        """As `table`, as if the row held so many tokens in one run. Nobody's: for trials before anybody runs."""

    def check_integrity(self) -> None:
        """Raises AssertionError if something is lost or lent twice. For tests, and when idle."""


class Rows:
    """Rows that each have room for the whole context: whoever got one can go on to its end.

    The lowest free row is given first, so that few rows run close together.
    """

    def __init__(self, count: int, ctx_size: int = 0):
        self._free = list(range(count))
        self._owners: dict[int, int] = {}
        self.rows, self.tokens = count, count * ctx_size
        self.shared = self.reusable = 0

    @property
    def owners(self) -> dict[int, int]:
        return dict(self._owners)

    @property
    def has_row(self) -> bool:
        return bool(self._free)

    def can_admit(self, sequence: Sequence) -> bool:
        return self.has_row

    def admit(self, sequence: Sequence) -> tuple[int, int]:
        return self.attach(sequence), 0

    def attach(self, sequence: Sequence) -> int:
        row = heapq.heappop(self._free)
        self._owners[row] = sequence.id
        return row

    def fork(self, source: int, target: int, tokens: int) -> None:
        """Nothing to do: the backend copies the row."""

    def grow(self, row: int, start: int, end: int) -> bool:
        return True

    def note(self, row: int, sequence: Sequence) -> None:
        """Nothing to do: nobody else reads this row."""

    def give_back(self, row: int, *, is_spoiled: bool = False) -> None:
        del self._owners[row]
        heapq.heappush(self._free, row)

    def table(self, row: int) -> Table | None:
        return None

    def trial(self, row: int, tokens: int) -> Table | None:
        return None

    def check_integrity(self) -> None:
        assert sorted([*self._free, *self._owners]) == list(range(self.rows)), "a row was lost or given twice"
        assert len(set(self._owners.values())) == len(self._owners), "an owner holds two rows"


class Blocks:
    """Blocks behind rows: counted, shared, remembered.

    A block is referred to by the tables that hold it. One that none holds is free, and keeps its content (and its key)
    until it is given away: whoever begins with the same tokens finds it and need not compute them again.
    """

    def __init__(self, rows: int, count: int, *, caches: bool = True):
        """`count` blocks; at least as many as the longest sequence takes, so that one can always go on."""
        self._lent = Rows(rows)
        self.count = count
        self._caches = caches
        self._references = [0] * count
        self._free = count
        self._key_of: list[bytes | None] = [None] * count
        self._block_of: dict[bytes, int] = {}
        self._tables: dict[int, Table] = {}
        self._stride = home_stride(rows, count)
        self._used = [0] * len(range(0, count, self._stride))
        """By home: when one of its blocks was last held, in ticks."""
        self._tick = 0
        self._spoiled: list[int] = []
        self._asked: tuple[int, int, list[bytes]] = (-1, 0, [])
        """Id and length of the sequence that was last looked up, and the keys of its blocks."""

    # What Capacity promises

    @property
    def rows(self) -> int:
        return self._lent.rows

    @property
    def owners(self) -> dict[int, int]:
        return self._lent.owners

    @property
    def tokens(self) -> int:
        return self.count * BLOCK_TOKENS

    @property
    def shared(self) -> int:
        return sum(references - 1 for references in self._references if references > 1) * BLOCK_TOKENS

    @property
    def reusable(self) -> int:
        return sum(not self._references[block] for block in self._block_of.values()) * BLOCK_TOKENS

    @property
    def has_row(self) -> bool:
        return self._lent.has_row

    def can_admit(self, sequence: Sequence) -> bool:
        """Beside its own blocks, one is left for each who runs: nobody is admitted only to be put back again."""
        if not self.has_row:
            return False
        shared = sum(self._references[block] > 0 for block in self._find(sequence))
        return blocks_for(len(sequence.tokens)) - shared + len(self._tables) <= self._free

    def admit(self, sequence: Sequence) -> tuple[int, int]:
        """All blocks that its tokens need are its own at once."""
        found = self._find(sequence)
        row = self._lent.attach(sequence)
        table = self._tables[row] = Table()
        table.place = self._beyond(found)
        for block in found:
            self._refer(block)
            table.append(block)
            key = self._key_of[block]
            assert key is not None
            table.keys.append(key)
        self._touch(found)
        has_room = self.grow(row, len(found) * BLOCK_TOKENS, len(sequence.tokens))
        assert has_room, "it was asked before"
        return row, len(found) * BLOCK_TOKENS

    def attach(self, sequence: Sequence) -> int:
        row = self._lent.attach(sequence)
        self._tables[row] = Table()
        return row

    def fork(self, source: int, target: int, tokens: int) -> None:
        """The last block, if it is not full, is shared as well, until the target writes there: then it gets a copy.

        The source goes on in place, which nobody sees: who shares the block reads no further than both agree.
        """
        given, taken = self._tables[source], self._tables[target]
        for block in given.blocks[: blocks_for(tokens)]:
            self._refer(block)
            taken.append(block)
        taken.borrows = tokens % BLOCK_TOKENS > 0
        taken.keys = given.keys[: tokens // BLOCK_TOKENS]

    def grow(self, row: int, start: int, end: int) -> bool:
        table = self._tables[row]
        copies = table.borrows and self._references[table.blocks[-1]] > 1
        if copies + max(0, blocks_for(end) - len(table.blocks)) > self._free:
            return False
        table.borrows = False
        if copies:
            assert start // BLOCK_TOKENS == len(table.blocks) - 1, "only the last block is not full"
            block = table.drop_last()
            self._references[block] -= 1
            self._append(table)
            table.copy = block, table.blocks[-1]
        while len(table.blocks) < blocks_for(end):
            self._append(table)
        return True

    def note(self, row: int, sequence: Sequence) -> None:
        table = self._tables[row]
        if not self._caches:
            return
        for index in range(len(table.keys), sequence.computed // BLOCK_TOKENS):
            key = block_key(table.keys[-1] if index else _root(sequence), _part(sequence.tokens, index))
            table.keys.append(key)
            block = table.blocks[index]
            if key not in self._block_of:
                self._block_of[key] = block
                self._key_of[block] = key

    def give_back(self, row: int, *, is_spoiled: bool = False) -> None:
        self._lent.give_back(row)
        table = self._tables.pop(row)
        self._touch(table.blocks)
        for block in table.blocks:
            self._references[block] -= 1
            if is_spoiled:
                self._forget_key(block)
            if not self._references[block]:
                self._free += 1
                if is_spoiled:
                    self._spoiled.append(block)

    def table(self, row: int) -> Table:
        return self._tables[row]

    def trial(self, row: int, tokens: int) -> Table:
        table, count = Table(), blocks_for(tokens)
        first = max(0, min(row * self._stride, self.count - count))
        for block in range(first, first + count):
            table.append(block)
        return table

    def take_spoiled(self) -> list[int]:
        """Blocks that were given back spoiled, each told once: numbers in there may not be finite, and a mask hides
        only those that are, so they are to be overwritten."""
        spoiled, self._spoiled = self._spoiled, []
        return spoiled

    @property
    def free(self) -> int:
        """Blocks that nobody holds, with or without content."""
        return self._free

    # Prefixes

    def _find(self, sequence: Sequence) -> list[int]:
        """Blocks with its first tokens; never with all of them, because the last one's logits are wanted.

        None if logits are wanted at every position of the prompt.
        """
        if not self._caches or sequence.prompt_logprobs:
            return []
        found = []
        for key in self._keys(sequence):
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def _keys(self, sequence: Sequence) -> list[bytes]:
        id, length, keys = self._asked
        if (id, length) != (sequence.id, len(sequence.tokens)):
            keys, key = [], _root(sequence)
            for index in range((len(sequence.tokens) - 1) // BLOCK_TOKENS):
                key = block_key(key, _part(sequence.tokens, index))
                keys.append(key)
            self._asked = sequence.id, len(sequence.tokens), keys
        return keys

    def _forget_key(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None

    # Places

    def _beyond(self, found: list[int]) -> int | None:
        """Where to go on behind `found`: right there, unless that would overwrite what was used more recently than
        all that lies at the best home."""
        if not found or found[-1] + 1 >= self.count or self._references[found[-1] + 1]:
            return None
        place, home = found[-1] + 1, self._home()
        if self._key_of[place] is None or home is None:
            return place
        return place if self._used[self._home_of(place)] <= self._used[self._home_of(home)] else None

    def _home(self) -> int | None:
        """The first block of the home that was used least recently, the lowest of several; None: all are held."""
        homes = (each for each in range(len(self._used)) if not self._references[each * self._stride])
        best = min(homes, key=lambda each: (self._used[each], each), default=None)
        return None if best is None else best * self._stride

    def _home_of(self, block: int) -> int:
        return block // self._stride

    def _longest(self) -> int:
        """The first block of the longest run that nobody holds."""
        best, most, length = 0, 0, 0
        for block, references in enumerate(self._references):
            length = 0 if references else length + 1
            if length > most:
                best, most = block - length + 1, length
        return best

    def _append(self, table: Table) -> None:
        """One more block, where the table would like to have it if that is free; ask for room first."""
        block = self._home() if table.place is None else table.place
        if block is None or block >= self.count or self._references[block]:
            block = self._longest()
        self._forget_key(block)
        self._refer(block)
        table.append(block)
        table.place = block + 1
        self._touch((block,))

    def _refer(self, block: int) -> None:
        self._free -= not self._references[block]
        self._references[block] += 1

    def _touch(self, blocks: Iterable[int]) -> None:
        if self._caches:
            self._tick += 1
            for home in {self._home_of(block) for block in blocks}:
                self._used[home] = self._tick

    def check_integrity(self) -> None:
        self._lent.check_integrity()
        assert set(self._tables) == set(self.owners), "a table without a row, or a row without a table"
        references = [0] * self.count
        for table in self._tables.values():
            assert len(set(table.blocks)) == len(table.blocks), "a block is twice in a table"
            lying = [block for run in table.runs for block in range(run.block, run.block + run.count)]
            assert lying == table.blocks, "runs are not the blocks"
            for block in table.blocks:
                references[block] += 1
        assert references == self._references, "a block was lost or is held without a table"
        assert references.count(0) == self._free, "free blocks were miscounted"
        keyed = {key: block for block, key in enumerate(self._key_of) if key is not None}
        assert keyed == self._block_of, "a key without its block"
        for index, (block, tables) in self._shared():
            assert all(table.blocks[index] == block for table in tables), "a block is shared at different places"
            assert len({tuple(table.keys[:index]) for table in tables}) == 1, "shared behind different tokens"

    def _shared(self) -> Iterator[tuple[int, tuple[int, list[Table]]]]:
        """Blocks that several tables hold, with their index in the first of these."""
        for block, references in enumerate(self._references):
            if references > 1:
                tables = [table for table in self._tables.values() if block in table.blocks]
                yield tables[0].blocks.index(block), (block, tables)


def block_key(before: bytes, tokens: Tokens[int]) -> bytes:
    """Names the content of a block: its tokens, and with `before`, the key of the block before, all that precede them.

    128 bits of BLAKE2 (RFC 7693), because one who finds a collision would read another's context.
    """
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


def _root(sequence: Sequence) -> bytes:
    """What stands before the first block: under another adapter the same tokens have other keys and values, and a
    request's own salt says who may share them."""
    adapter = sequence.adapter.salt if sequence.adapter is not None else b""
    return adapter + b"\0" + sequence.salt if sequence.salt else adapter


def _part(tokens: list[int], index: int) -> list[int]:
    return tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]

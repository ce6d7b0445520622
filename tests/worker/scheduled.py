"""Sequences for tests of the scheduler, steps recorded as the generation loop records them, and checks of what the
scheduler and its allocators count: nothing is lost, and nothing is used twice."""

import math
from collections import Counter
from collections.abc import Sequence as Tokens
from typing import Any

from worker.engines.transformers.schedule.kv_cache import BlockAllocator, RowAllocator
from worker.engines.transformers.schedule.lora_slots import LoraSlots
from worker.engines.transformers.schedule.scheduler import Batch, Scheduler
from worker.engines.transformers.schedule.sequence import Sequence
from worker.engines.transformers.schedule.speculation import DraftLength


class FixedLength(DraftLength):
    """Drafts of one length in each step, whatever they cost."""

    def __init__(self, length: int):
        super().__init__((0, length))
        self._length = length

    def choose(self, rows: int) -> int:
        return self._length

    def in_use(self, rows: int) -> int:
        return self._length

    def saving(self, rows: int, has_prompts: bool) -> float:
        return math.inf

    def learn(self, rows: int, length: int, tokens: int, seconds: float, catch_up: float = 0.0) -> None: ...

    def charge(self, rows: int, catch_up: float) -> None: ...


def sequence(id: int, prompt: int | Tokens[int] = 1, limit: int = 3, **fields: Any) -> Sequence:
    """A sequence without stop tokens. `prompt`: its tokens, or their number."""
    tokens = [5] * prompt if isinstance(prompt, int) else list(prompt)
    return Sequence(id=id, prompt_tokens=len(tokens), tokens=tokens, limit=limit, ends=frozenset(), **fields)


def sequences(scheduler: Scheduler) -> list[Sequence]:
    """All sequences, running before waiting, in order of arrival within each."""
    return [*(running for running, _ in scheduler._running.values()), *scheduler._waiting]


def advance(scheduler: Scheduler, batch: Batch) -> list[int]:
    """Record a step. Return the ids of the sequences that ended."""
    ended: list[int] = []
    for segment in batch:
        segment.sequence.computed = segment.end
        if not segment.completes:
            continue
        forked = scheduler.followers(segment.sequence) if not segment.sequence.output_tokens else []
        for follower in forked:
            scheduler.fork(follower)
        for each in (segment.sequence, *forked):
            if each.append(7):
                scheduler.remove(each)
                ended.append(each.id)
    return ended


def check_scheduler(scheduler: Scheduler) -> None:
    """Rows and slots are those of the running sequences, and each follower has a running leader."""
    check_rows(scheduler._capacity)
    if scheduler._slots is not None:
        check_slots(scheduler._slots)
    running, leaders = scheduler._running, set(scheduler._leaders.values())
    assert scheduler._capacity.owners == {row: id for id, (_, row) in running.items()}
    assert set(scheduler._following) | leaders <= set(running)
    assert set(scheduler._following.values()) <= leaders


def check_rows(rows: RowAllocator) -> None:
    assert sorted([*rows._free_rows, *rows.owners]) == list(range(rows.rows))
    assert len(set(rows.owners.values())) == len(rows.owners), "a sequence holds two rows"
    if isinstance(rows, BlockAllocator):
        _check_blocks(rows)


def _check_blocks(blocks: BlockAllocator) -> None:
    tables = blocks._tables
    assert tables.keys() == blocks.owners.keys()
    places: dict[int, set[tuple[int, tuple[bytes, ...]]]] = {}  # of each block in the tables, with the keys before it
    for table in tables.values():
        assert len(set(table.blocks)) == len(table.blocks), "a block is twice in a table"
        assert [block for run in table.runs for block in range(run.block, run.block + run.count)] == table.blocks
        for place, block in enumerate(table.blocks):
            places.setdefault(block, set()).add((place, tuple(table.keys[:place])))
    assert all(len(found) == 1 for found in places.values()), "a block is shared behind different tokens"
    references = Counter(block for table in tables.values() for block in table.blocks)
    assert [references[block] for block in range(blocks.count)] == blocks._references
    assert blocks.free == blocks.count - len(references)
    keyed = {key: block for block, key in enumerate(blocks._key_of) if key is not None}
    assert keyed == blocks._block_of
    unused = set(range(blocks.count)) - references.keys()
    assert set(blocks._cached) == unused & set(keyed.values()), "a cached block is not in the order of eviction"
    runs = blocks._empty._ends
    assert {end: start for start, end in runs.items()} == blocks._empty._starts
    assert runs.keys().isdisjoint(runs.values()), "neighbouring runs were not joined"
    empty = {block for start, end in runs.items() for block in range(start, end)}
    assert empty == unused - set(keyed.values()), "an empty block was lost"


def check_slots(slots: LoraSlots) -> None:
    lent = [slot for slot, _ in slots._slots.values()]
    assert sorted([*slots._free, *lent]) == list(range(slots.count))
    assert slots._users.keys() <= slots._slots.keys(), "an adapter in use has no slot"

"""Checks of what the scheduler and its allocators count: nothing is lost, and nothing is used twice."""

from collections import Counter

from worker.engines.transformers.schedule.kv_cache import BlockAllocator, RowAllocator
from worker.engines.transformers.schedule.lora_slots import LoraSlots
from worker.engines.transformers.schedule.scheduler import Scheduler


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

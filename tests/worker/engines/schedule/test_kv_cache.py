"""Promises of `worker.engines.transformers.schedule.kv_cache`: rows are lent, never lost, never lent twice; bytes as
said."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.scheduled import sequence
from worker.engines.transformers.schedule.kv_cache import RowAllocator, pool_blocks
from worker.protocol.memory import BLOCK_TOKENS


@settings(max_examples=200)
@given(st.integers(1, 6), st.lists(st.integers(0, 9), max_size=60))
def test_no_row_is_lost_or_lent_twice(count: int, moves: list[int]) -> None:
    rows, owner = RowAllocator(count), 0
    held: list[int] = []
    for move in moves:
        if move < 6 and rows.has_row:
            owner += 1
            taken = rows.attach(sequence(owner))
            assert taken == min(set(range(count)) - set(held)), "the lowest free row is given"
            held.append(taken)
        elif held:
            rows.release(held.pop(move % len(held)))
        assert sorted(rows.owners) == sorted(held)
        assert rows.has_row == (len(held) < count)


def test_a_pool_has_room_for_all_rows_or_for_as_many_tokens_as_are_asked_for() -> None:
    assert pool_blocks(4, 8192) == 4 * 8192 // BLOCK_TOKENS
    assert pool_blocks(3, 40) == 3 * 3, "40 tokens take three blocks"
    assert pool_blocks(4, 8192, kv_tokens=8192) == 8192 // BLOCK_TOKENS
    assert pool_blocks(4, 8192, kv_tokens=8193) == 8192 // BLOCK_TOKENS + 1

"""Promises of `worker.engines.transformers.schedule.scheduler`: budget kept, no starvation, first come first served,
nothing leaks."""

from tests.worker.scheduled import advance, sequence
from worker.engines.transformers.schedule.kv_cache import RowAllocator
from worker.engines.transformers.schedule.scheduler import Batch, Scheduler
from worker.interface import PromptImage, PromptImages
from worker.protocol.memory import PROMPT_LOGITS


def parts(batch: Batch) -> list[tuple[int, int, int]]:
    return [(segment.sequence.id, segment.start, segment.length) for segment in batch]


def test_an_image_that_must_be_whole_is_never_cut() -> None:
    for first in range(1, 14):
        scheduler = Scheduler(RowAllocator(2), chunk=99)
        seeing = sequence(1, prompt=20)
        seeing.prompt_images = PromptImages(tuple(PromptImage(((begin, 5),), {}, is_whole=True) for begin in (3, 9)))
        scheduler.add(seeing)
        ends = set()
        budgets = iter((first, 1, 4, 7, 2, 3, 5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1))
        while not seeing.output_tokens:
            batch = scheduler.next(next(budgets))
            ends.add(batch[0].end)
            advance(scheduler, batch)
        assert not ends & {4, 5, 6, 7, 10, 11, 12, 13}, "a step ends within an image"
        assert 20 in ends


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    scheduler = Scheduler(RowAllocator(2), chunk=4)
    scheduler.add(sequence(1, prompt=2, limit=9))
    advance(scheduler, scheduler.next(99))
    scheduler.add(sequence(2, prompt=10))
    seen, computed = [], []
    for _ in range(4):
        computed.append(scheduler.prefill_context)
        batch = scheduler.next(99)
        seen.append(parts(batch))
        advance(scheduler, batch)
    assert seen == [[(1, 2, 1), (2, 0, 4)], [(1, 3, 1), (2, 4, 4)], [(1, 4, 1), (2, 8, 2)], [(1, 5, 1), (2, 10, 1)]]
    assert computed == [0, 4, 8, 0]


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    scheduler = Scheduler(RowAllocator(2), chunk=8)
    scheduler.add(sequence(1, prompt=100))
    scheduler.add(sequence(2, prompt=3))
    assert parts(scheduler.next(99)) == [(1, 0, 5), (2, 0, 3)]


def test_a_long_prompt_is_not_stuck_behind_a_stream_of_short_ones() -> None:
    scheduler = Scheduler(RowAllocator(4), chunk=8)
    long = sequence(0, prompt=40, limit=1)
    scheduler.add(long)
    for id in range(1, 60):
        scheduler.add(sequence(id, prompt=8, limit=1))
    for _ in range(10):
        advance(scheduler, scheduler.next(99))
    assert long.output_tokens, "it gets half of every step at least"


def test_a_place_is_taken_in_the_very_next_step_after_it_is_free() -> None:
    scheduler = Scheduler(RowAllocator(1), chunk=8)
    first, second = sequence(1, prompt=2), sequence(2, prompt=2)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.next(99)
    scheduler.remove(first)
    assert parts(scheduler.next(99)) == [(2, 0, 2)]


def test_logits_of_all_prompt_positions_come_a_few_at_a_time() -> None:
    scheduler = Scheduler(RowAllocator(2), chunk=64)
    scheduler.add(sequence(1, prompt=40, prompt_logprobs=True))
    scheduler.add(sequence(2, prompt=40, prompt_logprobs=True))
    batch = scheduler.next(99)
    assert sum(segment.logits for segment in batch) == PROMPT_LOGITS
    advance(scheduler, batch)
    for _ in range(9):
        batch = scheduler.next(99)
        assert sum(segment.logits for segment in batch) <= PROMPT_LOGITS + 2
        advance(scheduler, batch)
    assert not scheduler.has_work


def test_preempted_sequences_restart_first_after_one_has_ended() -> None:
    scheduler = Scheduler(RowAllocator(2), chunk=8)
    old, young, late = sequence(1, prompt=2, limit=9), sequence(2, prompt=2), sequence(3, prompt=2)
    for each in (old, young, late):
        scheduler.add(each)
    advance(scheduler, scheduler.next(99))
    scheduler.preempt(young)
    assert parts(scheduler.next(99)) == [(1, 2, 1)], "as many as before would run out of memory again"
    scheduler.remove(old)
    assert parts(scheduler.next(99))[0] == (2, 0, 3), "its answer so far is computed again with its prompt"


def test_sequences_that_are_held_take_no_part_in_a_step_and_do_not_count_for_drafts() -> None:
    scheduler = Scheduler(RowAllocator(2), chunk=4)
    one, other = sequence(1, limit=9), sequence(2, limit=9)
    for each in (one, other):
        scheduler.add(each)
    advance(scheduler, scheduler.next(99))
    rows: list[int] = []

    def draft_length(count: int, has_prompts: bool) -> int:
        rows.append(count)
        return 0

    assert len(scheduler.next(99, draft_length)) == 2
    one.is_held = True
    assert parts(scheduler.next(99, draft_length)) == [(2, 1, 1)]
    other.is_held = True
    assert not scheduler.next(99, draft_length)
    assert rows == [2, 1]


def test_removing_an_unknown_sequence_changes_nothing() -> None:
    scheduler = Scheduler(RowAllocator(1), chunk=8)
    scheduler.remove(sequence(1, prompt=2))
    assert not scheduler.has_work

"""Several choices of one prompt: the prompt is computed once, and each choice is the same as alone."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.loaded import collect_choices, complete_one, generation
from tests.worker.scheduled import advance, check_scheduler, sequence, sequences
from tests.worker.stepped import JournalRunner, journaled
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.schedule.kv_cache import RowAllocator
from worker.engines.transformers.schedule.scheduler import Scheduler
from worker.engines.transformers.schedule.sequence import Sequence
from worker.interface import SamplingParams

PROMPT = tuple(range(20, 57))
WARM = SamplingParams(temperature=1.3, seed=11)


def choices(count: int, *, first: int = 0, prompt: int = 6) -> list[Sequence]:
    return [sequence(first + each, prompt, group=first) for each in range(count)]


def computed(scheduler: Scheduler) -> dict[int, int]:
    """Run until no sequence is left. Return the number of tokens computed for each."""
    spent: dict[int, int] = {}
    for _ in range(1000):
        if not scheduler.has_work:
            return spent
        batch = scheduler.next(99)
        for segment in batch:
            spent[segment.sequence.id] = spent.get(segment.sequence.id, 0) + segment.length
        advance(scheduler, batch)
        check_scheduler(scheduler)
    raise AssertionError("a sequence never ends")


def test_the_prompt_is_computed_for_the_first_choice_and_for_no_other() -> None:
    scheduler = Scheduler(RowAllocator(4), chunk=4)
    for each in choices(3):
        scheduler.add(each)
    assert computed(scheduler) == {0: 6 + 2, 1: 2, 2: 2}


def test_choices_without_a_row_run_later_and_lead_the_rest() -> None:
    scheduler = Scheduler(RowAllocator(2), chunk=4)
    for each in (*choices(4), *choices(1, first=9, prompt=2)):
        scheduler.add(each)
    assert computed(scheduler) == {0: 6 + 2, 1: 2, 2: 6 + 2, 3: 2, 9: 2 + 2}


def test_a_follower_of_a_preempted_sequence_waits_behind_it() -> None:
    scheduler = Scheduler(RowAllocator(4), chunk=4)
    first, *rest = choices(3)
    other = choices(1, first=9)[0]
    for each in (first, *rest, other):
        scheduler.add(each)
    scheduler.next(99)
    scheduler.preempt(first)
    check_scheduler(scheduler)
    assert [each.id for each in sequences(scheduler)] == [9, 0, 1, 2]
    assert sorted(scheduler.take_freed_rows()) == [0, 1, 2]
    assert computed(scheduler) == {9: 6 + 2, 0: 6 + 2, 1: 2, 2: 6 + 2}, "only two run at once from now on"


@pytest.fixture(scope="module")
def counted(llama: Path) -> Iterator[tuple[TransformersEngine, JournalRunner]]:
    engine, journal = journaled(llama, ctx_size=128, parallel=4, prefill_chunk=16)
    yield engine, journal
    asyncio.run(engine.close())


async def test_each_choice_answers_as_it_would_alone(counted: tuple[TransformersEngine, JournalRunner]) -> None:
    engine, journal = counted
    before, calls = journal.prompt_tokens, len(journal.calls)
    collected = await collect_choices(
        engine, generation(PROMPT, n=3, sampling=WARM, max_tokens=12, prompt_logprobs=True)
    )
    assert journal.prompt_tokens - before == len(PROMPT), "the prompt is computed once"
    assert sum(call.startswith("fork") for call in journal.calls[calls:]) == 2
    alone = [
        await complete_one(engine, PROMPT, sampling=SamplingParams(temperature=1.3, seed=11 + index), max_tokens=12)
        for index in range(3)
    ]
    assert [each.tokens for each in collected] == [each.tokens for each in alone]
    assert len({tuple(each.tokens) for each in collected}) == 3, "seeds differ, and so do answers"
    assert all(len(each.prompt_logprobs) == len(PROMPT) for each in collected)
    assert collected[0].prompt_logprobs == collected[2].prompt_logprobs


async def test_one_token_of_each_choice_ends_them_all_in_the_step_of_the_prompt(
    counted: tuple[TransformersEngine, JournalRunner],
) -> None:
    engine, _ = counted
    collected = await collect_choices(engine, generation(PROMPT[:5], n=4, sampling=WARM, max_tokens=1))
    assert [each.finish for each in collected] == ["length"] * 4
    collected = await collect_choices(engine, generation(PROMPT[:5], n=2, max_tokens=0))
    assert [(each.tokens, each.finish) for each in collected] == [([], "length")] * 2

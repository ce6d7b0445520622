"""Several choices of one prompt: they share its blocks, and each choice is the same as alone."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.integrity import check_scheduler
from tests.worker.loaded import collect_choices, complete_one, generation
from tests.worker.scheduled import advance, sequence, sequences
from tests.worker.stepped import JournalRunner, journaled
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.schedule.kv_cache import BlockAllocator, RowAllocator
from worker.engines.transformers.schedule.lora_slots import AppliedAdapter, LoraAdapter, LoraSlots
from worker.engines.transformers.schedule.scheduler import Scheduler
from worker.engines.transformers.schedule.sequence import Sequence
from worker.interface import SamplingParams
from worker.protocol.memory import BLOCK_TOKENS as B

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


def test_choices_wait_for_the_first_one_and_take_the_blocks_of_its_prompt() -> None:
    scheduler = Scheduler(BlockAllocator(4, 16), chunk=16)
    for each in choices(3, prompt=2 * B + 3):
        scheduler.add(each)
    assert computed(scheduler) == {0: 2 * B + 3 + 2, 1: 3 + 2, 2: 3 + 2}


def test_all_choices_that_waited_begin_in_the_same_step() -> None:
    scheduler = Scheduler(BlockAllocator(8, 64), chunk=99)
    for each in choices(8, prompt=2 * B + 3):
        scheduler.add(each)
    advance(scheduler, scheduler.next(99))
    assert len(scheduler.next(99)) == 8


def test_later_requests_pass_choices_that_wait() -> None:
    scheduler = Scheduler(BlockAllocator(2, 16), chunk=16)
    for each in (*choices(3, prompt=2 * B + 3), sequence(9, 4)):
        scheduler.add(each)
    scheduler.next(99)
    assert [each.id for each in sequences(scheduler)] == [0, 9, 1, 2]
    assert computed(scheduler) == {0: 2 * B + 3 + 2, 9: 4 + 2, 1: 3 + 2, 2: 3 + 2}


def test_requests_with_adapters_pass_choices_that_wait_for_their_prompt() -> None:
    scheduler = Scheduler(BlockAllocator(4, 16), 16, LoraSlots(1))
    adapters = [AppliedAdapter(LoraAdapter(number, str(number), "")) for number in range(2)]
    waits, adapted = (sequence(id, 4, adapter=adapter) for id, adapter in zip((3, 4), adapters, strict=True))
    for each in (*choices(3, prompt=2 * B + 3), waits, adapted):
        scheduler.add(each)
    scheduler.next(99)
    assert [each.id for each in sequences(scheduler)] == [0, 3, 1, 2, 4]
    assert computed(scheduler) == {0: 2 * B + 3 + 2, 3: 4 + 2, 1: 3 + 2, 2: 3 + 2, 4: 4 + 2}


@pytest.mark.parametrize(
    ("capacity", "prompt"),
    [
        pytest.param(RowAllocator(4), 2 * B + 3, id="without blocks"),
        pytest.param(BlockAllocator(4, 16, caches=False), 2 * B + 3, id="without prefix caching"),
        pytest.param(BlockAllocator(4, 16), B, id="prompt of one block"),
    ],
)
def test_choices_that_can_share_no_blocks_compute_the_prompt_each_without_waiting(
    capacity: RowAllocator, prompt: int
) -> None:
    scheduler = Scheduler(capacity, chunk=16)
    for each in choices(3, prompt=prompt):
        scheduler.add(each)
    scheduler.next(99)
    assert scheduler.running == 3
    scheduler.preempt(sequences(scheduler)[0])
    assert computed(scheduler)[2] == prompt + 2


def test_if_the_first_choice_is_preempted_the_next_one_computes_the_prompt() -> None:
    scheduler = Scheduler(BlockAllocator(4, 16), chunk=16)
    first, *rest = choices(3, prompt=2 * B + 3)
    for each in (first, *rest):
        scheduler.add(each)
    scheduler.next(99)
    scheduler.preempt(first)
    check_scheduler(scheduler)
    assert [each.id for each in sequences(scheduler)] == [0, 1, 2]
    assert computed(scheduler) == {0: 2 * B + 3 + 2, 1: 3 + 2, 2: 3 + 2}


@pytest.fixture(scope="module")
def counted(llama: Path) -> Iterator[tuple[TransformersEngine, JournalRunner]]:
    engine, journal = journaled(llama, ctx_size=128, parallel=4, prefill_chunk=16)
    yield engine, journal
    asyncio.run(engine.close())


async def test_each_choice_answers_as_it_would_alone(counted: tuple[TransformersEngine, JournalRunner]) -> None:
    engine, journal = counted
    before = journal.prompt_tokens
    collected = await collect_choices(engine, generation(PROMPT, n=3, sampling=WARM, max_tokens=12))
    assert journal.prompt_tokens - before == 3 * len(PROMPT) - 2 * 2 * B, "two blocks of the prompt are computed once"
    alone = [
        await complete_one(engine, PROMPT, sampling=SamplingParams(temperature=1.3, seed=11 + index), max_tokens=12)
        for index in range(3)
    ]
    assert [each.tokens for each in collected] == [each.tokens for each in alone]
    assert len({tuple(each.tokens) for each in collected}) == 3, "seeds differ, and so do answers"


async def test_each_choice_has_the_logprobs_of_the_prompt(counted: tuple[TransformersEngine, JournalRunner]) -> None:
    engine, _ = counted
    collected = await collect_choices(
        engine, generation(PROMPT, n=3, sampling=WARM, max_tokens=2, prompt_logprobs=True)
    )
    assert all(len(each.prompt_logprobs) == len(PROMPT) for each in collected)
    first, *rest = ([each.logprob for each in choice.prompt_logprobs] for choice in collected)
    assert all(each == pytest.approx(first, abs=1e-4) for each in rest)


async def test_choices_of_one_token_and_of_none_end(counted: tuple[TransformersEngine, JournalRunner]) -> None:
    engine, _ = counted
    collected = await collect_choices(engine, generation(PROMPT[:5], n=4, sampling=WARM, max_tokens=1))
    assert [each.finish for each in collected] == ["length"] * 4
    collected = await collect_choices(engine, generation(PROMPT[:5], n=2, max_tokens=0))
    assert [(each.tokens, each.finish) for each in collected] == [([], "length")] * 2

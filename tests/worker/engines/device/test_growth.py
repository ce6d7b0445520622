"""Main memory of grammars and of steps is announced before it is taken."""

from dataclasses import replace

import pytest
import torch

from worker.engines.transformers.attention.cpu_linear import CpuLinears, is_supported
from worker.engines.transformers.device.growth import Growth
from worker.engines.transformers.loop.generation_loop import LargestStep
from worker.engines.transformers.run.largest_step import LargestSizes
from worker.engines.transformers.schedule.kv_cache import BlockTable
from worker.engines.transformers.schedule.lora_slots import AppliedAdapter, LoraAdapter
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.engines.transformers.schedule.sequence import Sequence
from worker.interface import SamplingParams
from worker.protocol.memory import KERNEL_CODES


def test_steps_are_announced_once_until_a_pulse_has_what_they_took() -> None:
    announced: list[int] = []
    growth = Growth(lambda: announced.append(growth.bytes))
    growth.announce_steps(12)
    growth.announce_steps(12)
    with growth.announced(5):
        assert growth.bytes == 17
    growth.settle()
    growth.announce_steps(0)
    growth.announce_steps(4)
    assert announced == [12, 17, 4]


def test_one_announcement_serves_the_requests_until_a_pulse() -> None:
    announced: list[int] = []
    growth = Growth(lambda: announced.append(growth.bytes))
    growth.running_bytes = 30
    growth.settle()
    assert growth.bytes == 0, "requests of a worker that announces none"
    growth.announce_requests(30 + 7)
    growth.running_bytes = 60
    growth.announce_requests(60 + 7)
    assert announced == [74]
    growth.settle()
    assert growth.bytes == 60, "running requests may not have taken theirs yet"
    growth.running_bytes = 20
    growth.announce_requests(20 + 7)
    growth.announce_requests(70)
    growth.running_bytes = 0
    growth.settle()
    assert (announced, growth.bytes) == ([74, 140], 0)


def batch(*parts: tuple[int, int]) -> Batch:
    """Segments by (start, length)."""
    return tuple(
        Segment(
            Sequence(id=row, prompt_tokens=1, tokens=[0] * (start + length), limit=start + length, ends=frozenset()),
            row,
            start,
            length,
            None,
        )
        for row, (start, length) in enumerate(parts)
    )


@pytest.mark.parametrize(
    ("step", "is_larger"),
    [
        (batch((0, 13)), True),
        (batch((3, 1), (3, 1), (3, 1)), True),
        (batch((0, 4), (0, 4)), False),
        (batch((14, 1)), False),
        (batch((15, 1)), True),
    ],
)
def test_a_step_is_larger_by_tokens_rows_or_twice_the_context(step: Batch, is_larger: bool) -> None:
    largest = LargestStep()
    assert largest.is_exceeded(batch((0, 8), (0, 4)))
    assert not largest.is_exceeded(batch((0, 8), (0, 4)))
    assert largest.is_exceeded(step) is is_larger


def drawn(*samplings: SamplingParams) -> bool:
    """Return whether a step with these draws is larger than one with a plain draw."""
    largest = LargestStep()
    assert largest.is_exceeded(batch((8, 1)), [SamplingParams()])
    return largest.is_exceeded(batch((8, 1)), samplings)


def test_a_step_is_larger_by_draws_that_sort_the_scores_or_by_logprobs() -> None:
    assert not drawn(SamplingParams())
    assert not drawn(SamplingParams(temperature=0.0, top_p=0.5)), "greedy"
    assert drawn(SamplingParams(top_p=0.5))
    assert drawn(SamplingParams(logprobs=2))
    assert drawn(SamplingParams(), SamplingParams()), "of another choice of the same prompt"


def test_a_step_is_larger_by_keys_in_several_runs_of_blocks() -> None:
    whole, broken, largest = BlockTable(), BlockTable(), LargestStep()
    for place in range(2):
        whole.append(place)
        broken.append(2 * place)
    [segment] = batch((20, 1))
    assert [largest.is_exceeded((replace(segment, table=table),)) for table in (whole, whole, broken, broken)] == [
        True, False, True, False,
    ]  # fmt: skip


def test_a_step_is_larger_by_a_number_of_rows_without_kernels() -> None:
    sizes = LargestSizes()
    steps = [(300, {300}), (20, {20}), (20, {20}), (18, {18}), (5, {5}), (5, {6})]
    found = [sizes.are_exceeded(size, rows=rows) for size, rows in steps]
    assert found == [True, True, False, False, True, False], "18 rows are padded to 20, and 5 to 6"
    for count in range(301, 301 + KERNEL_CODES):
        sizes.are_exceeded(20, rows={count})
    assert not sizes.are_exceeded(20, rows={1000}), "the cache of kernels is full"


@pytest.mark.skipif(not is_supported(torch.bfloat16), reason="this processor has no kernels for bfloat16")
def test_a_step_in_bfloat16_is_larger_by_a_shape_of_attention_without_kernels() -> None:
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        linears = CpuLinears(torch.nn.ModuleList([torch.nn.Linear(64, 64, dtype=dtype)]), least_bytes=0)
        while not linears.are_settled:
            linears.reorder(0.0)
        largest = LargestStep(linears)
        steps = batch((0, 16), (0, 16)), batch((8, 1), (8, 1)), batch((8, 1), (8, 1)), batch((9, 1), (8, 1))
        found[dtype] = [largest.is_exceeded(step) for step in steps]
    assert found == {torch.bfloat16: [True, True, False, True], torch.float32: [True, True, False, False]}


def test_each_step_is_larger_until_all_weights_are_reordered_and_kernels_are_measured() -> None:
    layer = torch.nn.Linear(64, 64)
    linears = CpuLinears(torch.nn.ModuleList([layer]), least_bytes=0)
    largest = LargestStep(linears)
    found = [largest.is_exceeded(batch((8, 1))) for _ in range(2)]
    while not linears.are_settled:
        linears.reorder(0.0)
    assert [*found, *(largest.is_exceeded(batch((8, 1))) for _ in range(2))] == [True, True, True, False]


def test_a_step_is_larger_by_logits_of_a_prompt() -> None:
    largest, tokens = LargestStep(), [0] * 8
    plain, scored = (
        Sequence(id=0, prompt_tokens=8, tokens=tokens, limit=9, ends=frozenset(), prompt_logprobs=scores)
        for scores in (False, True)
    )
    assert largest.is_exceeded((Segment(plain, 0, 0, 8),))
    assert not largest.is_exceeded((Segment(plain, 0, 0, 8),))
    assert largest.is_exceeded((Segment(scored, 0, 0, 8),))


def test_a_step_is_larger_by_its_adapters_and_their_tokens() -> None:
    largest, (first, second) = LargestStep(), batch((8, 1), (8, 1))
    one, other = (AppliedAdapter(LoraAdapter(number, "", "")) for number in range(2))

    def step(*adapters: AppliedAdapter | None) -> Batch:
        pairs = zip((first, second), adapters, strict=True)
        return tuple(replace(part, sequence=replace(part.sequence, adapter=adapter)) for part, adapter in pairs)

    steps = [step(None, None), step(one, None), step(None, other), step(one, one), step(one, other)]
    assert [largest.is_exceeded(each) for each in steps] == [True, True, False, True, False]

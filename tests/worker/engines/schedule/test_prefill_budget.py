"""Promises of `worker.engines.transformers.schedule.prefill_budget`: prompts are quick without streams, and no
stream stutters for them."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.scheduled import sequence
from worker.engines.transformers.schedule.kv_cache import RowAllocator
from worker.engines.transformers.schedule.prefill_budget import PrefillBudget, StepCost, context_reads
from worker.engines.transformers.schedule.scheduler import Batch, Scheduler, Segment


def steps(prompt_tokens: int, *, decodes: int = 0, start: int = 0) -> Batch:
    batch = []
    if prompt_tokens:
        batch.append(Segment(sequence(1, start + prompt_tokens), 0, start, prompt_tokens))
    for row in range(decodes):
        each = sequence(2 + row, 1)
        each.append(7)
        each.computed = 1
        batch.append(Segment(each, 1 + row, 1, 1))
    return tuple(batch)


class Burst:
    """So many requests at once on a machine whose steps take what `seconds` says of their decodes and prompt tokens.

    Prompts are of 16 to 80 tokens, answers of 32 to 64.
    """

    def __init__(
        self,
        prefill_budget: PrefillBudget,
        count: int,
        fixed: float,
        decode: float,
        token: float,
        unsteady: float = 0.0,
    ):
        source, scheduler = random.Random(count), Scheduler(RowAllocator(count), 512)
        for number in range(count):
            scheduler.add(sequence(number, source.randint(16, 80), source.randint(32, 64)))
        now = 0.0
        reported: dict[int, list[float]] = {number: [] for number in range(count)}
        self.prompt_tokens: list[int] = []
        while scheduler.has_work:
            decoding = scheduler.decoding
            batch = scheduler.next(prefill_budget.budget(decoding, 512, scheduler.running - decoding))
            decodes = sum(each.is_decode for each in batch)
            prompt_tokens = sum(each.length for each in batch) - decodes
            took = fixed + decode * decodes + token * prompt_tokens
            took *= 1.0 + unsteady * source.random()
            now += took
            prefill_budget.learn(batch, took)
            self.prompt_tokens += [prompt_tokens] if prompt_tokens else []
            for each in batch:
                each.sequence.computed = each.end
                if each.completes:
                    reported[each.sequence.id].append(now)
                    if each.sequence.append(7):
                        scheduler.remove(each.sequence)
        self.first = max(each[0] for each in reported.values())
        self.gap = max(after - before for each in reported.values() for before, after in pairwise(each))


def test_sizes_that_no_longer_occur_do_not_decide_the_cost_of_those_that_do() -> None:
    cost = StepCost()
    for decodes in (1, 2, 4, 8, 16):
        cost.learn(decodes, 0, 0.02)
    for _ in range(60):
        cost.learn(4, 0, 0.01)
    assert cost.seconds_for(4, 0) == pytest.approx(0.01, rel=0.05)


def test_a_burst_gets_its_first_tokens_soon_after_any_history() -> None:
    """All prompts alone would take 3.0 s; 64 decodes take 0.15 s a step."""
    for before in (0, 1, 16):
        prefill_budget = PrefillBudget()
        if before:
            Burst(prefill_budget, before, fixed=0.03, decode=0.0018, token=0.00095)
        burst = Burst(prefill_budget, 64, fixed=0.03, decode=0.0018, token=0.00095, unsteady=0.3)
        assert burst.first < 5.3, f"behind {before} at once"
        assert burst.gap < 1.2
        assert min(burst.prompt_tokens[:-1]) >= 64, "prompts do not trickle"


def prefill(
    prefill_budget: PrefillBudget,
    tokens: int,
    alone: float,
    token: float,
    read: float,
    pair: float,
    unsteady: float = 0.0,
) -> tuple[list[float], list[int]]:
    """Seconds and prompt tokens of each step while a prompt comes in beside four streams, whose steps take `alone`; by
    seconds of a token of it, of one that is read back, and of each pair of both."""
    source = random.Random(tokens)
    for decodes in (1, 4) * 20:
        prefill_budget.learn(steps(0, decodes=decodes), alone * (0.88 + 0.03 * decodes))
    start, gaps, parts = 0, [], []
    while start < tokens:
        part = min(prefill_budget.budget(4, 512, 1, start), tokens - start)
        seconds = alone + part * token + start * read + part * start * pair
        seconds *= 1.0 + unsteady * source.random()
        prefill_budget.learn(steps(part, decodes=4, start=start), seconds)
        gaps.append(seconds)
        parts.append(part)
        start += part
    return gaps, parts


MEASURED = {"alone": 0.0267, "token": 0.00117, "read": 5.7e-6, "pair": 0.5e-6}
"""The bench's model of 110 M parameters on two cores."""


def test_a_long_prompt_makes_no_stream_stutter_though_its_tokens_get_dearer() -> None:
    """Three times the gap of before is what streams may see; machines are unsteady."""
    gaps, parts = prefill(PrefillBudget(), 4096, **MEASURED)
    assert max(gaps[5:]) < 2.75 * MEASURED["alone"]
    assert len(parts) < 520, "nor does the prompt trickle"
    gaps, parts = prefill(PrefillBudget(), 4096, **MEASURED, unsteady=0.1)
    assert sorted(gaps)[int(0.99 * len(gaps))] < 3.0 * MEASURED["alone"]
    assert len(parts) < 520


def test_a_prompt_with_a_very_long_context_keeps_a_third_of_its_speed() -> None:
    """Reading 20,000 tokens back takes 0.11 s, for however few tokens: as long as ten themselves."""
    _, parts = prefill(PrefillBudget(), 20_000, **MEASURED)
    read = MEASURED["read"] * 20_000
    assert parts[-2] * (MEASURED["token"] + MEASURED["pair"] * 20_000) == pytest.approx(read / 2, rel=0.25)


def test_costs_are_learned_from_steps_that_mix_prompts_and_decodes() -> None:
    cost = StepCost()
    for decodes, tokens in ((1, 0), (17, 390), (28, 200), (40, 500), (49, 16), (60, 100)):
        cost.learn(decodes, tokens, 0.03 + 0.002 * decodes + 0.001 * tokens)
    assert cost.parts == pytest.approx((0.03, 0.002, 0.001, 0.0), rel=0.05)


def test_context_reads_and_prompt_tokens_have_separate_costs() -> None:
    cost = StepCost()
    for decodes, tokens, start in ((1, 0, 0), (4, 0, 0), (4, 64, 0), (4, 32, 1000), (4, 16, 3000), (4, 8, 6000)):
        looked = context_reads(start, tokens)
        cost.learn(decodes, tokens, 0.03 + 0.002 * decodes + 0.001 * tokens + 6e-6 * looked, looked)
    assert cost.parts == pytest.approx((0.03, 0.002, 0.001, 6e-6), rel=0.1)


@settings(max_examples=25)
@given(
    st.floats(0.001, 1.0), st.floats(1e-6, 0.1), st.floats(1e-6, 0.01),
    st.lists(
        st.tuples(st.integers(0, 64), st.integers(0, 512), st.integers(0, 1 << 20)).filter(lambda each: any(each[:2])),
        min_size=1, max_size=20,
    ),
)  # fmt: skip
def test_no_part_of_a_step_ever_costs_less_than_nothing(
    fixed: float, decode: float, token: float, kinds: list[tuple[int, int, int]]
) -> None:
    cost = StepCost()
    for decodes, tokens, start in kinds:
        looked = context_reads(start, tokens) if tokens else 0.0
        cost.learn(decodes, tokens, fixed + decode * decodes + token * (tokens + looked / 64), looked)
        assert min(cost.parts) >= 0.0
        assert sum(cost.parts) > 0.0


def test_knowledge_of_prompts_outlasts_hundreds_of_decode_steps() -> None:
    prefill_budget = PrefillBudget()
    Burst(prefill_budget, 16, fixed=0.03, decode=0.0018, token=0.001)
    before = prefill_budget.budget(4, 512)
    for _ in range(300):
        prefill_budget.learn(steps(0, decodes=4), 0.037)
    assert prefill_budget.budget(4, 512) == pytest.approx(before, rel=0.3)


def test_a_machine_that_has_become_slower_is_believed_within_some_steps() -> None:
    prefill_budget = PrefillBudget()
    for slower in (1.0, 3.0):
        for _ in range(12):
            prefill_budget.learn(steps(0, decodes=8), 0.05 * slower)
            prefill_budget.learn(steps(48, decodes=8), 0.05 * slower + 0.048)
    assert prefill_budget.budget(8, 512) == pytest.approx(150 * PrefillBudget.MAX_LENGTHENING, rel=0.1)


def test_a_step_that_stumbled_over_a_few_tokens_does_not_make_prompts_trickle() -> None:
    prefill_budget = PrefillBudget()
    for _ in range(4):
        prefill_budget.learn(steps(0, decodes=8), 0.05)
        prefill_budget.learn(steps(400, decodes=8), 0.45)
    before = prefill_budget.budget(8, 512)
    prefill_budget.learn(steps(1, decodes=8), 1.0)
    assert prefill_budget.budget(8, 512) > before / 4


def test_one_stream_is_not_kept_waiting_as_long_as_many_at_once_would_be() -> None:
    prefill_budget = PrefillBudget()
    prefill_budget.learn(steps(64), 0.064)
    prefill_budget.learn(steps(0, decodes=1), 0.01)
    prefill_budget.learn(steps(0, decodes=33), 0.33)
    budgets = [prefill_budget.budget(decoding, 512) for decoding in (1, 5, 17, 33, 60)]
    alone = (10, 50, 170, 330, 600)
    assert budgets == [pytest.approx(min(PrefillBudget.MAX_LENGTHENING * each, 512), rel=0.05) for each in alone]


def test_many_waiting_prompts_outweigh_few_streams() -> None:
    prefill_budget = PrefillBudget()
    prefill_budget.learn(steps(64), 0.064)
    prefill_budget.learn(steps(256), 0.256)
    prefill_budget.learn(steps(0, decodes=4), 0.02)
    budgets = [prefill_budget.budget(4, 512, prompts) for prompts in (1, 2, 3, 5, 9, 1000)]
    alone = (20, 20, 20, 80, 320, 512)
    assert budgets == [pytest.approx(min(PrefillBudget.MAX_LENGTHENING * each, 512), rel=0.06) for each in alone]


def test_a_prompt_that_is_computed_apart_goes_on_in_parts_worth_a_pass() -> None:
    for prefill_budget, fewest in (
        (PrefillBudget(), PrefillBudget.MIN_TOKENS),
        (PrefillBudget(separate=True), PrefillBudget.MIN_SEPARATE_TOKENS),
    ):
        prefill_budget.learn(steps(64), 6.4)
        prefill_budget.learn(steps(0, decodes=4), 0.02)
        assert prefill_budget.budget(4, 512) == fewest


def test_a_step_of_a_slow_model_stays_short_enough_for_cancellation() -> None:
    prefill_budget = PrefillBudget()
    for _ in range(20):
        prefill_budget.learn(steps(64), 64 * 0.02)
    assert 40 <= prefill_budget.budget(0, 512) <= 60


def test_a_very_slow_model_gets_no_tiny_prompt_chunks() -> None:
    """A step reads 140 GB in five seconds: then it may as well compute as many tokens as take so long."""
    prefill_budget = PrefillBudget()
    for tokens in (8, 64):
        prefill_budget.learn(steps(tokens), 5.0 + 0.1 * tokens)
    assert prefill_budget.budget(0, 512) == pytest.approx(50 * PrefillBudget.MAX_LENGTHENING, rel=0.1)


def test_before_anything_is_known_the_first_steps_are_small() -> None:
    assert PrefillBudget().budget(0, 512) == 64
    assert PrefillBudget().budget(0, 8) == 8

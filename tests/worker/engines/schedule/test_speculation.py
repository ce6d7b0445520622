"""Drafts by prompt lookup, and the choice of a draft length."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines.transformers.schedule.sequence import PenaltyCounts, Sequence
from worker.engines.transformers.schedule.speculation import DraftLength, PromptLookup, accepted


@pytest.mark.parametrize(
    ("drafted", "chosen", "count"),
    [([], [5], 0), ([5], [5, 6], 1), ([5, 7], [5, 6, 8], 1), ([4, 5], [5, 5, 5], 0), ([5, 6], [5, None, 7], 1)],
)
def test_a_draft_is_accepted_up_to_the_first_difference(drafted: list[int], chosen: list[int], count: int) -> None:
    assert accepted(drafted, chosen) == count


@settings(max_examples=200)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60), size=st.integers(1, 4), count=st.integers(1, 8),
    begin=st.integers(1, 60),
)  # fmt: skip
def test_lookup_drafts_what_followed_the_last_occurrence(text: list[int], size: int, count: int, begin: int) -> None:
    tokens = text[: min(begin, len(text))]
    lookup = PromptLookup(tokens, size)
    for token in [*text[len(tokens) :], None]:
        found = lookup.draft(count)
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]]
        if not ends or len(tokens) < size:
            assert found == []
        else:
            extended = list(tokens)
            for place in range(count):
                extended.append(extended[ends[-1] + place])
            assert found == extended[len(tokens) :]
        if token is not None:
            tokens.append(token)


def run(
    length: DraftLength,
    steps: int,
    seconds: dict[int, float],
    tokens: dict[int, float],
    rows: int = 4,
    catch_up: float = 0.0,
) -> list[int]:
    """The lengths chosen in `steps` steps of a device and a text with these averages per step and row.

    catch_up: seconds that the draft model takes for a prompt, each 20 steps.
    """
    source, chosen = random.Random(2), []
    for step in range(steps):
        choice = length.choose(rows)
        chosen.append(choice)
        taken = seconds[choice] * source.uniform(0.95, 1.1)
        length.learn(rows, choice, round(rows * tokens[choice]), taken, catch_up if choice and step % 20 == 0 else 0.0)
    return chosen


COSTS = {0: 1.0, 1: 1.1, 2: 1.2, 4: 1.5, 8: 2.0}


def test_the_length_with_the_most_tokens_per_second_is_used() -> None:
    chosen = run(DraftLength.up_to(8), 400, COSTS, GOOD)
    assert chosen[100:].count(4) > 0.85 * 300


# A draft model that is as slow as its target: trials of long drafts cost many times a step.
SLOW = {0: 1.0, 1: 2.1, 2: 3.2, 4: 5.5, 8: 10.0}
WORTHLESS = dict.fromkeys(COSTS, 1.0)
GOOD = {0: 1.0, 1: 1.75, 2: 2.5, 4: 3.5, 8: 4.0}


@pytest.mark.parametrize("costs", [COSTS, SLOW], ids=["fast", "slow"])
def test_trials_lose_less_than_two_percent_where_no_length_pays(costs: dict[int, float]) -> None:
    chosen = run(DraftLength.up_to(8), 1000, costs, WORTHLESS)
    assert sum(costs[choice] for choice in chosen) < 1.02 * len(chosen)
    # The search at the beginning takes the time of a few tokens.
    assert sum(costs[choice] for choice in chosen[:50]) < 50 + 5


def test_drafts_end_soon_when_they_do_not_pay_any_more() -> None:
    length = DraftLength.up_to(8)
    assert run(length, 100, COSTS, GOOD)[-1] == 4
    chosen = run(length, 400, COSTS, WORTHLESS)
    assert sum(COSTS[choice] for choice in chosen) < 1.08 * len(chosen)


def test_prompts_that_the_draft_model_reads_count_against_drafts() -> None:
    # Drafts make steps 1.37 times as fast, and with each prompt lose as much as they gain in 20 of them.
    assert run(DraftLength.up_to(8), 1500, COSTS, GOOD, catch_up=0.0)[500:].count(0) < 50
    assert run(DraftLength.up_to(8), 1500, COSTS, GOOD, catch_up=60.0)[500:].count(0) > 900


@pytest.mark.parametrize("seed", range(8))
def test_delays_by_other_processes_do_not_change_the_choice(seed: int) -> None:
    source, spent = random.Random(seed), 0.0
    length = DraftLength.up_to(16)
    for _ in range(1000):
        choice = length.choose(4)
        spent += 1.0 + 0.4 * choice
        length.learn(4, choice, 4, (1.0 + 0.4 * choice) * source.choice((1.0, 1.0, 1.1, 3.0)))
    assert spent < 1.05 * 1000


def test_drafts_return_when_the_text_changes() -> None:
    length = DraftLength.up_to(8)
    run(length, 300, COSTS, dict.fromkeys(COSTS, 1.0))
    chosen = run(length, 2500, COSTS, {0: 1.0, 1: 2.0, 2: 3.0, 4: 5.0, 8: 9.0})
    assert chosen[-200:].count(8) > 120


def test_lengths_that_would_be_dropped_as_too_short_are_not_compared() -> None:
    assert DraftLength.up_to(16, 5).lengths == (0, 8, 16)
    assert DraftLength.up_to(16, 99).lengths == (0, 16)


def test_lengths_that_a_step_has_no_room_for_are_not_tried() -> None:
    assert set(run(DraftLength.up_to(16), 200, COSTS, GOOD, rows=16)) == {0, 1, 2, 4}
    assert set(run(DraftLength.up_to(16), 50, COSTS, GOOD, rows=65)) == {0}


def test_a_step_with_prompts_is_no_part_of_a_trial() -> None:
    length = DraftLength.up_to(8)
    in_use = []
    for _ in range(400):
        in_use.append(length.in_use(4))
        run(length, 1, COSTS, GOOD)
    assert set(in_use[:5]) == {0}
    assert in_use[100:].count(4) > 0.9 * 300


# Seconds of a step by its drafted tokens, where one without drafts takes one: of a draft model of a tenth, one as slow
# as its target, one whose calls are expensive, and prompt lookup where more tokens cost more.
STEP_SECONDS: dict[str, Callable[[int], float]] = {
    "tenth": lambda length: 1.0 + 0.12 * length,
    "slow": lambda length: 1.0 + 1.1 * length,
    "expensive-call": lambda length: 1.0 + (0.5 + 0.05 * length) * (length > 0),
    "lookup": lambda length: 1.0 + 0.3 * length,
}
# The probability that a drafted token is accepted, by the step and by whether it is part of a trial.
ACCEPTANCE: dict[str, Callable[[int, bool], float]] = {
    "nothing": lambda step, trial: 0.0,
    "few": lambda step, trial: 0.06,
    "some": lambda step, trial: 0.3,
    "half": lambda step, trial: 0.5,
    "most": lambda step, trial: 0.9,
    "in-trials": lambda step, trial: 0.5 * trial,
    "all-in-trials": lambda step, trial: 1.0 * trial,
    "in-turns-of-24": lambda step, trial: 0.9 * (step // 24 % 2),
    "in-turns-of-100": lambda step, trial: 0.9 * (step // 100 % 2),
    "rarely": lambda step, trial: 0.9 * (step % 160 < 16),
}


@pytest.mark.parametrize("unread", [0.0, 0.02], ids=["", "unread"])
@pytest.mark.parametrize("acceptance", ACCEPTANCE)
@pytest.mark.parametrize("costs", STEP_SECONDS)
def test_drafts_cost_less_than_five_percent_at_every_moment_after_the_first_search(
    costs: str, acceptance: str, unread: float
) -> None:
    """`unread`: seconds in which the draft model reads a token that was generated without it."""
    source, rows, length = random.Random(3), 4, DraftLength.up_to(8)
    seconds = tokens = missed = 0.0
    drafted = []
    for step in range(1000):
        choice = length.choose(rows)
        likely = ACCEPTANCE[acceptance](step, choice != length.in_use(rows))
        accepted = sum(next((n for n in range(choice) if source.random() >= likely), choice) for _ in range(rows))
        taken, caught_up = STEP_SECONDS[costs](choice), unread * missed if choice else 0.0
        missed = 0 if choice else min(missed + 1, 512)  # the most that it reads in a step
        length.learn(rows, choice, rows + accepted, taken, caught_up)
        seconds += taken + caught_up
        tokens += 1 + accepted / rows
        drafted.append(choice > 0)
        # Without drafts, these tokens would have taken as many seconds.
        assert seconds <= (1.05 * tokens if step >= 500 else tokens + 25), step
    if acceptance in ("nothing", "few"):
        # Each trial is charged for a tenth of its time at least, and may lose a hundredth of all time.
        assert sum(drafted[500:]) < 0.1 * len(drafted[500:])


@pytest.mark.parametrize("spread", [0.3, 0.6])
def test_drafts_of_which_nothing_is_accepted_are_only_tried_however_steps_are_delayed(spread: float) -> None:
    for seed in range(20):
        source, length = random.Random(seed), DraftLength.up_to(8)
        for _ in range(500):
            choice = length.choose(1)
            length.learn(1, choice, 1, STEP_SECONDS["tenth"](choice) * source.lognormvariate(0.0, spread))
            assert not length.in_use(1)


def test_each_size_of_batch_has_a_choice_of_its_own() -> None:
    length = DraftLength.up_to(8)
    for _ in range(10):
        run(length, 40, COSTS, GOOD, rows=1)
        run(length, 40, {0: 1.0, 1: 2.0, 2: 3.0, 4: 5.0, 8: 9.0}, GOOD, rows=16)
    assert run(length, 20, COSTS, GOOD, rows=1).count(4) > 10
    assert run(length, 20, COSTS, GOOD, rows=16).count(0) > 10


@given(
    tokens=st.lists(st.integers(0, 4), min_size=2, max_size=12), drafted=st.lists(st.integers(0, 4), max_size=5),
    window=st.sampled_from([-1, 0, 1, 3, 7]), prompt=st.integers(1, 3),
)  # fmt: skip
def test_penalties_behind_a_draft_are_those_of_the_text_with_it(
    tokens: list[int], drafted: list[int], window: int, prompt: int
) -> None:
    def counts(text: list[int]) -> PenaltyCounts:
        found = PenaltyCounts(Sequence(id=1, prompt_tokens=prompt, tokens=text, limit=99, ends=frozenset()), window)
        found.update()
        return found

    before = counts(list(tokens))
    for count, later in enumerate(before.after_each(drafted)):
        expected = counts([*tokens, *drafted[:count]])
        assert (later.seen, later.output) == (expected.seen, expected.output)
    unchanged = counts(list(tokens))
    assert (before.seen, before.output) == (unchanged.seen, unchanged.output)

"""The sampler against straightforward formulas in float64."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines.transformers.sample import sampler
from worker.engines.transformers.sample.sampler import RowSampling, has_penalties, sample, uniform
from worker.engines.transformers.schedule.sequence import PenaltyCounts
from worker.engines.transformers.schedule.sequence import Sequence as TokenSequence
from worker.interface import SamplingParams

VOCAB = 24
LOGITS = [round(3.0 * math.sin(1.7 * token) - 0.05 * token, 3) for token in range(VOCAB)]


def penalty_counts(prompt: Sequence[int], answer: Sequence[int], window: int = -1) -> PenaltyCounts:
    tokens = [*prompt, *answer]
    found = PenaltyCounts(
        TokenSequence(id=1, prompt_tokens=len(prompt), tokens=tokens, limit=99, ends=frozenset()), window
    )
    found.update()
    return found


def reference(
    logits: Sequence[float], sampling: SamplingParams, prompt: Sequence[int] = (), answer: Sequence[int] = ()
) -> Any:
    """Probabilities in float64, each rule written as its definition."""
    scores = np.array(logits, dtype=np.float64)
    window = [*prompt, *answer]
    first = max(0, len(window) - sampling.repeat_last_n) if sampling.repeat_last_n >= 0 else 0
    for token in set(window[first:]):
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    answers = window[max(first, len(prompt)) :]
    for token in set(answers):
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * answers.count(token)
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    if sampling.temperature == 0.0:
        return (scores == scores.max()).astype(float)
    late = sampling.temperature if sampling.temperature_last else 1.0
    scores = scores / (sampling.temperature / late)
    order = np.argsort(-scores, kind="stable")
    kept = list(order[: sampling.top_k or len(order)])
    weights = np.exp(scores[kept] - scores.max())
    share = np.cumsum(weights) / weights.sum()
    if sampling.top_p < 1.0:
        kept = kept[: int(np.searchsorted(share, sampling.top_p - 1e-12) + 1)]
    least = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    kept = [token for token in kept if scores[token] - scores.max() >= least]
    probabilities = np.zeros(len(scores))
    probabilities[kept] = np.exp((scores[kept] - scores.max()) / late)
    return probabilities / probabilities.sum()


def test_odds_are_those_of_the_draw_and_logprobs_those_of_the_model() -> None:
    samplings = [
        SamplingParams(temperature=0.0, logprobs=3, post_sampling_logprobs=True),
        SamplingParams(logprobs=3),
        SamplingParams(
            temperature=1.5, top_k=9, top_p=0.8, logit_bias={2: 4.0}, logprobs=VOCAB, post_sampling_logprobs=True
        ),
        SamplingParams(
            temperature=1.5, top_k=9, top_p=0.8, temperature_last=True, logprobs=VOCAB, post_sampling_logprobs=True
        ),
        SamplingParams(),
    ]
    collected = sample(torch.tensor([LOGITS] * len(samplings)), [RowSampling(each, 0.4) for each in samplings])
    for sampling, found in zip(samplings, collected, strict=True):
        assert found is not None
        if sampling.logprobs is None:
            assert found.likelihood is None
            continue
        assert found.likelihood is not None
        odds = reference(LOGITS, sampling if sampling.post_sampling_logprobs else SamplingParams())
        assert math.exp(found.likelihood.logprob) == pytest.approx(odds[found.token], abs=1e-5)
        for token, logprob in found.likelihood.top:
            assert math.exp(logprob) == pytest.approx(odds[token], abs=1e-5)


@settings(max_examples=150)
@given(
    st.lists(st.integers(-8000, 8000).map(lambda n: n / 1000), min_size=VOCAB, max_size=VOCAB, unique=True),
    st.sampled_from([0.0, 0.5, 1.0, 1.8]),
    st.integers(0, VOCAB + 3),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 0.6]),
    st.booleans(),
    st.floats(0, 0.999),
)
def test_one_draw_is_the_inverse_of_the_cumulative_distribution(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, is_last: bool, at: float
) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, temperature_last=is_last)
    (found,) = sample(torch.tensor([logits]), [RowSampling(sampling, at)])
    probabilities = reference(logits, sampling)
    assert found is not None
    after = probabilities[: found.token + 1].sum()
    if temperature == 0.0:
        assert probabilities[found.token] == 1.0
    else:
        assert after - probabilities[found.token] - 1e-4 <= at <= after + 1e-4


def test_the_numbers_of_one_sequence_are_spread_evenly_and_follow_no_pattern() -> None:
    values = np.array([uniform(7, position) for position in range(4000)])
    for numbers in (values, np.array([uniform(seed, 5) for seed in range(4000)])):
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 19 + 4 * math.sqrt(2 * 19), "chi-square, four standard deviations"
    pairs = np.histogram2d(values[:-1], values[1:], bins=5, range=[[0, 1], [0, 1]])[0].ravel()
    expected = len(values[1:]) / 25
    assert ((pairs - expected) ** 2 / expected).sum() < 24 + 4 * math.sqrt(2 * 24), "successive numbers are independent"


TOKENS = st.integers(0, VOCAB - 1)
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 10]),
    top_p=st.sampled_from([1.0, 1.0, 0.4, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.15]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.4]),
    presence_penalty=st.sampled_from([0.0, -1.1, 0.8]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 0.5]),
    repeat_last_n=st.sampled_from([-1, 0, 2, 7]),
    logit_bias=st.dictionaries(TOKENS, st.floats(-6, 6, width=16), max_size=3),
    logprobs=st.sampled_from([None, 0, 3]),
)
ROWS = st.tuples(
    st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB),
    SAMPLINGS,
    st.lists(TOKENS, max_size=8),
    st.lists(TOKENS, max_size=8),
    st.floats(0, 0.999),
)
Row = tuple[list[float], SamplingParams, list[int], list[int], float]


def pick_of(row: Row) -> RowSampling:
    _, sampling, prompt, answer, at = row
    return RowSampling(
        sampling, at, penalty_counts(prompt, answer, sampling.repeat_last_n) if has_penalties(sampling) else None
    )


@settings(max_examples=200)
@given(ROWS.filter(lambda row: has_penalties(row[1]) or row[1].logit_bias))
def test_penalties_and_biases_are_those_of_the_formulas_for_any_history(row: Row) -> None:
    logits, sampling, prompt, answer, at = row
    logits = [logit / 6 for logit in logits]  # so that no token has a negligible probability
    open_ended = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)  # so that rounding moves no token in or out
    (found,) = sample(torch.tensor([logits]), [pick_of((logits, open_ended, prompt, answer, at))])
    assert found is not None
    if open_ended.temperature == 0.0:
        warm = reference(logits, replace(open_ended, temperature=1.0), prompt, answer)
        assert warm[found.token] >= warm.max() * (1 - 1e-5)
        return
    probabilities = reference(logits, open_ended, prompt, answer)
    after = probabilities[: found.token + 1].sum()
    assert after - probabilities[found.token] - 1e-5 <= at <= after + 1e-5


@settings(max_examples=60)
@given(st.lists(ROWS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_no_row_depends_on_other_rows(rows: list[Row], chance: Any) -> None:
    alone = [sample(torch.tensor([row[0]]), [pick_of(row)])[0] for row in rows]
    order = chance.sample(range(len(rows)), chance.randint(1, len(rows)))
    together = sample(torch.tensor([rows[at][0] for at in order]), [pick_of(rows[at]) for at in order])
    for at, found in zip(order, together, strict=True):
        expected = alone[at]
        assert found is not None
        assert expected is not None
        assert found.token == expected.token
        assert (found.likelihood is None) == (expected.likelihood is None)
        if found.likelihood is not None and expected.likelihood is not None:
            assert found.likelihood.logprob == pytest.approx(expected.likelihood.logprob, abs=1e-6)
            assert [token for token, _ in found.likelihood.top] == [token for token, _ in expected.likelihood.top]


@settings(max_examples=100)
@given(
    st.lists(st.one_of(st.floats(-60, 60, width=32), st.just(-math.inf)), min_size=VOCAB, max_size=VOCAB),
    SAMPLINGS,
    st.integers(0, VOCAB),
    st.floats(0, 0.999),
)
def test_logprobs_of_any_logits_are_the_raw_log_softmax_in_float64(
    logits: list[float], sampling: SamplingParams, top: int, at: float
) -> None:
    logits[3] = 0.0  # at least one token is possible
    (found,) = sample(torch.tensor([logits]), [pick_of((logits, replace(sampling, logprobs=top), [1, 3], [3], at))])
    assert found is not None
    assert found.likelihood is not None
    scores = np.array(logits)
    exact = scores - scores.max() - math.log(np.exp(scores - scores.max()).sum())
    assert found.likelihood.logprob == pytest.approx(exact[found.token], abs=1e-4)
    assert len(found.likelihood.top) == top
    for (token, value), best in zip(found.likelihood.top, sorted(exact, reverse=True), strict=False):
        assert value == pytest.approx(best, abs=1e-4)
        assert value == pytest.approx(exact[token], abs=1e-4)
    assert len({token for token, _ in found.likelihood.top}) == top


def support(probabilities: Sequence[float], sampling: SamplingParams, **further: Any) -> set[int]:
    """All tokens that can be drawn. The logits are the logarithms of `probabilities` plus 3."""
    logits = [math.log(each) + 3.0 for each in probabilities]
    draws = [RowSampling(sampling, float(at), **further) for at in np.linspace(0, 0.9999, 200)]
    return {found.token for found in sample(torch.tensor([logits] * len(draws)), draws) if found is not None}


FOUR = (0.4, 0.3, 0.2, 0.1)


@pytest.mark.parametrize(
    ("sampling", "further", "tokens"),
    [
        # penalties, biases and forbidden tokens come before every cut
        (SamplingParams(top_k=1), {}, {0}),
        (SamplingParams(top_k=1, presence_penalty=2.0), {"penalty_counts": penalty_counts([], [0])}, {1}),
        (SamplingParams(top_k=1, repetition_penalty=2.0), {"penalty_counts": penalty_counts([0, 1], [])}, {2}),
        (SamplingParams(top_k=1, logit_bias={3: 5.0}), {}, {3}),
        (SamplingParams(top_p=0.3, logit_bias={3: 5.0}), {}, {3}),
        (SamplingParams(top_k=2), {"forbidden": [0, 4]}, {1, 2}),  # 4 is beyond the vocabulary
        (SamplingParams(temperature=0.0), {"forbidden": [0]}, {1}),
        (SamplingParams(), {"forced": 3}, {3}),
        (SamplingParams(temperature=1e-9, top_p=0.1, min_p=0.9, top_k=1), {"forced": 3}, {3}),
        (SamplingParams(temperature=0.0), {"forced": 3}, {3}),
        (SamplingParams(min_p=0.6), {"forbidden": [0]}, {1, 2}),  # of the likeliest token that is allowed
        # temperature comes before the cuts by probability
        (SamplingParams(top_p=0.65), {}, {0, 1}),
        (SamplingParams(top_p=0.65, temperature=10.0), {}, {0, 1, 2}),
        (SamplingParams(min_p=0.4), {}, {0, 1, 2}),
        (SamplingParams(min_p=0.4, temperature=2.0), {}, {0, 1, 2, 3}),
        # top_p counts the probability of tokens left by top_k
        (SamplingParams(top_p=0.5), {}, {0, 1}),
        (SamplingParams(top_p=0.5, top_k=2), {}, {0}),  # 0.4 of 0.7 reach one half
        # the likeliest token always remains
        (SamplingParams(temperature=0.0, top_k=3, top_p=0.1, min_p=0.9, logit_bias={3: 5.0}), {}, {3}),
        (SamplingParams(temperature=1e-46, logit_bias={3: 5.0}), {}, {3}),  # less than float32 can represent
        (SamplingParams(top_p=0.0, logit_bias={3: 5.0}), {}, {3}),
    ],
)
def test_rules_apply_in_their_order(sampling: SamplingParams, further: dict[str, Any], tokens: set[int]) -> None:
    assert support(FOUR, sampling, **further) == tokens


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 6.0, 40.0])
@pytest.mark.parametrize("share", [0.1, 0.9, 0.999, 0.9999999])
def test_a_nucleus_is_the_one_that_sorting_the_whole_vocabulary_finds(spread: float, share: float) -> None:
    logits = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(1)) * spread
    logits -= logits.amax(-1, keepdim=True)
    logits[0, 7:900] = -math.inf
    falling = logits.double().sort(dim=-1, descending=True).values
    weights = falling.exp()
    sums = (weights.cumsum(-1) - weights) / weights.sum(-1, keepdim=True)
    found = sampler._nucleus(logits, [20_000] * 3, [share] * 3)
    for row in range(3):
        place = int((falling[row] >= found[row]).sum()) - 1
        # The last token of the nucleus is needed for the share, the first one outside is not, within float32's sums.
        first_equal = int((falling[row] > found[row]).sum())
        assert sums[row, first_equal] < share + 2e-5
        assert place == 19_999 or sums[row, place + 1] >= share - 2e-5


def test_the_number_that_decides_depends_on_seed_and_position_alone() -> None:
    assert uniform(1, 0) == uniform(1, 0) == uniform(1 + 2**64, 0)
    values = {uniform(seed, position) for seed in (0, 1, -1, 2**63) for position in range(50)}
    assert len(values) == 200
    assert all(0.0 <= value < 1.0 for value in values)


def test_a_row_without_finite_logits_fails_alone() -> None:
    logits = torch.tensor([LOGITS] * 5)
    logits[1, 3], logits[2, :], logits[3, 0] = math.nan, -math.inf, math.inf
    found = sample(
        logits, [RowSampling(SamplingParams(temperature=0.0)), *[RowSampling(SamplingParams(top_p=0.5), 0.5)] * 4]
    )
    assert [each is None for each in found] == [False, True, True, True, False]

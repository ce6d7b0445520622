"""Promises of `worker.engines.transformers.schedule.sequence`: limits, ends, and what penalties look back at."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines.transformers.schedule.sequence import (
    PenaltyCounts,
    RepeatedNgrams,
    Sequence,
    TokenRules,
)
from worker.engines.transformers.schedule.speculation import DraftLimits
from worker.interface import GenerationRequest, SamplingParams


def sequence(prompt: int = 3, *, limit: int = 4, **sampling: object) -> Sequence:
    request = GenerationRequest(id="r", prompt=tuple(range(10, 10 + prompt)), sampling=SamplingParams(**sampling))  # type: ignore[arg-type]
    return Sequence.of(request, id=1, limit=limit, ends={99}, seed=0)


def test_an_answer_ends_with_an_end_token_or_at_its_limit() -> None:
    assert sequence(limit=1).append(99) == "stop", "also as the last one"
    long = sequence(limit=2)
    assert (long.append(1), long.append(2)) == (None, "length")


def test_a_checkpoint_forbids_tokens_at_the_beginning_or_everywhere() -> None:
    rules = TokenRules(never=frozenset({1}), never_first=frozenset({2}))
    assert [rules.forbidden(place) for place in (0, 1, 2)] == [{1, 2}, {1}, {1}]
    forced = TokenRules(never=frozenset({1}), never_first=frozenset({2}), first=5)
    assert [forced.forbidden(place) for place in (0, 1, 2)] == [{1}, {1, 2}, {1}], "the first token is forced"


def test_a_sequence_without_repeated_ngrams_drafts_nothing() -> None:
    for size, room in ((0, 3), (2, 0)):
        drafting = sequence(limit=9, no_repeat_ngram_size=size)
        drafting.draft_limits = DraftLimits(most=3, least=0)
        assert drafting.draft_room(8) == room


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(0, 3), max_size=30), st.data())
def test_a_token_that_would_repeat_an_ngram_is_forbidden(
    size: int, first: int, tokens: list[int], data: st.DataObject
) -> None:
    grown = sequence(first, limit=99)
    ngrams = RepeatedNgrams(grown, size, first)
    for token in tokens:
        if data.draw(st.booleans()):
            ngrams.forbidden()  # at any place, since several tokens may come at once
        grown.append(token)
    places = range(len(tokens) - size + 1)
    before = {tuple(tokens[at : at + size]) for at in places}
    expected = {token for token in range(4) if (*tokens[len(tokens) - size + 1 :], token)[-size:] in before}
    assert set(ngrams.forbidden()) == expected
    assert len(ngrams.forbidden()) == len(expected), "each once, as a long text may repeat one often"


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=6),
    st.integers(-1, 6),
)
def test_repeats_counts_the_window_however_often_it_is_updated(
    prompt: list[int], steps: list[list[int]], window: int
) -> None:
    text = Sequence(id=1, prompt_tokens=len(prompt), tokens=list(prompt), limit=99, ends=frozenset())
    penalty_counts = PenaltyCounts(text, window)
    for tokens in steps:
        for token in tokens:
            text.append(token)
        penalty_counts.update()
        first = 0 if window < 0 else max(0, len(text.tokens) - window)
        assert penalty_counts.seen == Counter(text.tokens[first:])
        assert penalty_counts.output == Counter(text.tokens[max(first, len(prompt)) :])

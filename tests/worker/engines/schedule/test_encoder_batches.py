"""Which texts are computed together: little padding, and each text is computed in its turn."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines.transformers.schedule.encoder_batches import MAX_PADDING, EncoderQueue

REQUESTS = st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=30), min_size=1, max_size=8)


def queue(requests: list[list[int]]) -> EncoderQueue[int]:
    made: EncoderQueue[int] = EncoderQueue()
    for job, lengths in enumerate(requests):
        made.add(job, lengths)
    return made


@settings(max_examples=200)
@given(REQUESTS, st.integers(1, 600))
def test_every_text_is_computed_once_in_batches_within_budget_and_waste(requests: list[list[int]], budget: int) -> None:
    waiting, done = queue(requests), []
    while waiting:
        before, turn = len(waiting), waiting.jobs[0]
        batch = waiting.take(budget)
        assert batch[0][0] == turn
        assert len(waiting) == before - len(batch)
        lengths = [requests[job][index] for job, index in batch]
        padded = len(batch) * max(lengths)
        assert padded <= budget or len(batch) == 1
        assert sum(lengths) >= (1 - MAX_PADDING) * padded - 1e-9
        done += batch
    assert sorted(done) == [(job, index) for job, lengths in enumerate(requests) for index in range(len(lengths))]


@settings(max_examples=100)
@given(REQUESTS, st.integers(1, 600))
def test_requests_take_turns(requests: list[list[int]], budget: int) -> None:
    """A request of k texts among j requests is done after k x j batches."""
    waiting, left = queue(requests), Counter(dict(enumerate(map(len, requests))))
    steps = 0
    while waiting:
        steps += 1
        for job, _ in waiting.take(budget):
            left[job] -= 1
            assert left[job] or steps <= len(requests[job]) * len(requests)


@settings(max_examples=100)
@given(st.lists(st.integers(50, 54), min_size=16, max_size=40))
def test_texts_of_like_length_fill_the_budget(lengths: list[int]) -> None:
    waiting = queue([[length] for length in lengths])
    assert len(waiting.take(8 * 54)) == 8


def test_lengths_too_far_apart_are_not_mixed() -> None:
    waiting = queue([[10, 10], [100, 10], [100]])
    assert waiting.take(1000) == [(0, 1), (0, 0), (1, 1)]
    assert waiting.take(1000) == [(1, 0), (2, 0)]
    assert not waiting


def test_a_cancelled_request_leaves_with_all_its_texts() -> None:
    waiting = queue([[1, 2], [3], [4, 5]])
    waiting.drop(0)
    waiting.drop(7)
    assert (waiting.jobs, len(waiting)) == ([1, 2], 3)
    assert {job for job, _ in waiting.take(100) + waiting.take(100)} == {1, 2}

"""Main memory of grammars and of steps is announced before it is taken."""

import pytest

from worker.engines.transformers.device.growth import Growth
from worker.engines.transformers.loop.generation_loop import LargestStep
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.engines.transformers.schedule.sequence import Sequence


def test_steps_are_announced_once_until_a_pulse_has_what_they_took() -> None:
    announced: list[int] = []
    growth = Growth(lambda: announced.append(growth.bytes))
    growth.announce_steps(12)
    growth.announce_steps(12)
    with growth.announced(5):
        assert growth.bytes == 17
    growth.step_bytes = 0  # the pulse
    growth.announce_steps(0)
    growth.announce_steps(4)
    assert announced == [12, 17, 4]


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


def test_a_step_is_larger_by_logits_of_a_prompt() -> None:
    largest, tokens = LargestStep(), [0] * 8
    plain, scored = (
        Sequence(id=0, prompt_tokens=8, tokens=tokens, limit=9, ends=frozenset(), prompt_logprobs=scores)
        for scores in (False, True)
    )
    assert largest.is_exceeded((Segment(plain, 0, 0, 8),))
    assert not largest.is_exceeded((Segment(plain, 0, 0, 8),))
    assert largest.is_exceeded((Segment(scored, 0, 0, 8),))

"""Sequences for tests of the scheduler, and steps recorded as the generation loop records them."""

import math
from collections.abc import Sequence as Tokens
from typing import Any

from worker.engines.transformers.schedule.scheduler import Batch, Scheduler
from worker.engines.transformers.schedule.sequence import Sequence
from worker.engines.transformers.schedule.speculation import DraftLength


class FixedLength(DraftLength):
    """Drafts of one length in each step, whatever they cost."""

    def __init__(self, length: int):
        super().__init__((0, length))
        self._length = length

    def choose(self, rows: int) -> int:
        return self._length

    def in_use(self, rows: int) -> int:
        return self._length

    def saving(self, rows: int, has_prompts: bool) -> float:
        return math.inf

    def learn(self, rows: int, length: int, tokens: int, seconds: float, catch_up: float = 0.0) -> None: ...

    def charge(self, rows: int, catch_up: float) -> None: ...


def sequence(id: int, prompt: int | Tokens[int] = 1, limit: int = 3, **fields: Any) -> Sequence:
    """A sequence without stop tokens. `prompt`: its tokens, or their number."""
    tokens = [5] * prompt if isinstance(prompt, int) else list(prompt)
    return Sequence(id=id, prompt_tokens=len(tokens), tokens=tokens, limit=limit, ends=frozenset(), **fields)


def sequences(scheduler: Scheduler) -> list[Sequence]:
    """All sequences, running before waiting, in order of arrival within each."""
    return [*(running for running, _ in scheduler._running.values()), *scheduler._waiting]


def advance(scheduler: Scheduler, batch: Batch) -> list[int]:
    """Record a step. Return the ids of the sequences that ended."""
    ended: list[int] = []
    for segment in batch:
        segment.sequence.computed = segment.end
        if not segment.completes:
            continue
        forked = scheduler.followers(segment.sequence) if not segment.sequence.output_tokens else []
        for follower in forked:
            scheduler.fork(follower)
        for each in (segment.sequence, *forked):
            if each.append(7):
                scheduler.remove(each)
                ended.append(each.id)
    return ended

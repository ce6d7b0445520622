"""Sequences for tests of the scheduler, and steps recorded as the generation loop records them."""

from collections.abc import Sequence as Tokens
from typing import Any

from worker.engines.transformers.schedule.scheduler import Batch, Scheduler
from worker.engines.transformers.schedule.sequence import Sequence


def sequence(id: int, prompt: int | Tokens[int] = 1, limit: int = 3, **fields: Any) -> Sequence:
    """A sequence without stop tokens. `prompt`: its tokens, or their number."""
    tokens = [5] * prompt if isinstance(prompt, int) else list(prompt)
    return Sequence(id=id, prompt_tokens=len(tokens), tokens=tokens, limit=limit, ends=frozenset(), **fields)


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

"""Drafts of any quality for engines that draft."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.worker.loaded import work_of
from tests.worker.scheduled import FixedLength
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.loop.drafting import Drafter
from worker.engines.transformers.run.draft_model import DraftModel
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.engines.transformers.schedule.speculation import DraftLength

ALWAYS = FixedLength(4)


class Oracle(DraftModel):
    """Drafts whose tokens are those of known texts with a probability of `quality`, and random otherwise."""

    def __init__(self, quality: float, texts: Sequence[Sequence[int]] = ()):
        self.quality, self.texts = quality, [list(text) for text in texts]
        self._random = random.Random(1)

    def draft(self, batch: Batch, segments: Sequence[Segment], saving: float) -> list[list[int]]:
        return [self._one(segment) for segment in segments]

    catch_up, is_settled = 0.0, True
    on_larger_step: Callable[[], None] | None = None

    def reorder(self, seconds: float) -> None: ...

    def _one(self, segment: Segment) -> list[int]:
        tokens = segment.sequence.tokens
        known: list[int] = next((text[len(tokens) :] for text in self.texts if text[: len(tokens)] == tokens), [])
        return [
            known[place]
            if place < len(known) and self._random.random() < self.quality
            else self._random.randrange(2, 500)
            for place in range(segment.draft_room)
        ]


def drafting(engine: TransformersEngine, model: Any = None, length: DraftLength = ALWAYS) -> Drafter:
    """Make the engine draft with `model`, always of one length."""
    work, drafter = work_of(engine), Drafter(length, model)
    work._backend = replace(work._backend, drafter=drafter)
    return drafter

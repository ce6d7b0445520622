"""Drafts for the decoding sequences of a step, and what is learned from their acceptance."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from worker.engines.transformers.device import cuda_errors
from worker.engines.transformers.loop.requests import RequestChoice
from worker.engines.transformers.run.draft_model import DraftModel
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.engines.transformers.schedule.sequence import Sequence as TokenSequence
from worker.engines.transformers.schedule.speculation import DraftLength

log = logging.getLogger(__name__)

# Entries of the penalty counts after all tokens of one draft. The counts are copied for each token, and the sampler
# handles entry by entry: about a millisecond for so many. A guess.
_PENALTIES = 4096


class Drafter:
    """Speculative decoding of one model: puts drafts into batches, and learns which length pays."""

    def __init__(self, length: DraftLength, model: DraftModel | None = None):
        """`model` drafts for sequences in whose text nothing was found."""
        self.length, self._model = length, model
        self._catch_up = 0.0  # seconds that the draft model took for more than the newest tokens in the last step
        self._rows, self._saving = 0, 0.0  # of the next step: running sequences, and as in `DraftModel.draft`
        self.drafted = self.accepted = 0  # tokens since the start
        self.drafts = 0  # since the start
        self.accepted_at: list[int] = []  # accepted tokens by position in their draft

    def announce_to(self, on_larger_step: Callable[[], None]) -> None:
        """Call `on_larger_step` before a step of the draft model that is larger than all before."""
        if self._model is not None:
            self._model.on_larger_step = on_larger_step

    @property
    def is_settled(self) -> bool:
        """True if `reorder` has nothing left to do."""
        return self._model is None or self._model.is_settled

    def drafts_next(self, batch: Batch) -> bool:
        """True if the step after `batch` needs the tokens of `batch` on the host: it will have drafts, or the number
        of accepted tokens decides where it begins."""
        if any(segment.drafted for segment in batch):
            return True
        return any(segment.sequence.draft_limits for segment in batch) and self.length.choose(len(batch)) > 0

    def next_length(self, rows: int, has_prompts: bool) -> int:
        """Tokens to draft for each decoding sequence in the next step, of `rows` running sequences."""
        length = self.length.in_use(rows) if has_prompts else self.length.choose(rows)
        self._rows, self._saving = rows, self.length.saving(rows, has_prompts) if length else 0.0
        return length

    def draft(self, batch: Batch, choice_of: Callable[[TokenSequence], RequestChoice]) -> Batch:
        """`batch` with a draft in each segment that has room and for which one was found.

        Segments with one token come first: they attend together.
        """
        if not any(segment.draft_room for segment in batch) and not self._reads(batch):
            return batch
        found: dict[int, Sequence[int]] = {}  # by sequence id
        for segment in batch:
            lookup = choice_of(segment.sequence).lookup
            if segment.draft_room and lookup is not None:
                found[segment.sequence.id] = lookup.draft(segment.draft_room)
        if self._model is not None:
            rest = [segment for segment in batch if segment.draft_room and not found.get(segment.sequence.id)]
            found |= self._from_model(self._model, batch, rest)
        drafted = [
            _with_draft(segment, choice_of(segment.sequence), found.get(segment.sequence.id, ())) for segment in batch
        ]
        return tuple(sorted(drafted, key=lambda segment: (not segment.is_decode, len(segment.drafted) > 0)))

    def _reads(self, batch: Batch) -> bool:
        """True if the draft model reads the prompts of `batch`, because they will be drafted for. In a trial it reads
        them when it drafts, where the time is charged to the trial."""
        return self._model is not None and self._saving > 0.0 and not all(segment.is_decode for segment in batch)

    def _from_model(self, model: DraftModel, batch: Batch, segments: Sequence[Segment]) -> dict[int, Sequence[int]]:
        """The drafts of `model` by sequence id. Empty if it fails: an answer does not need its drafts."""
        try:
            found = model.draft(batch, segments, self._saving)
        except Exception as error:
            if cuda_errors.is_sticky(error):
                raise
            if cuda_errors.is_exhausted(error):
                log.warning("out of memory in a step of the draft model; the step has no drafts")
            else:
                log.exception("the draft model failed; nothing is drafted with it any more")
                self._model = None
            return {}
        self._catch_up = model.catch_up
        return {segment.sequence.id: tokens for segment, tokens in zip(segments, found, strict=True)}

    def reorder(self, seconds: float) -> None:
        """Spend up to `seconds` on weight layouts that make later steps faster."""
        if self._model is not None:
            self._model.reorder(seconds)

    def learn(self, batch: Batch, tokens: int, seconds: float) -> None:
        """Record that `batch`, which took `seconds`, gave `tokens`."""
        # Of this step only: a step launched ahead has no drafts.
        catch_up, self._catch_up = self._catch_up, 0.0
        limits = [segment.sequence.draft_limits for segment in batch if segment.sequence.draft_limits is not None]
        if not limits or not all(segment.is_decode for segment in batch):
            # The time of the target's prompts does not depend on drafts.
            self.length.charge(self._rows, catch_up)
            return
        chosen = self.length.choose(len(batch))
        # A step without any draft, though some were wanted, is a plain one. The requests' own limits count: they make
        # the length worth less for these requests, and a trial that is never measured would never end.
        is_wanted = any(min(chosen, limit.most) >= max(limit.least, 1) for limit in limits)
        length = 0 if is_wanted and not any(segment.drafted for segment in batch) else chosen
        self.length.learn(len(batch), length, tokens, seconds - catch_up, catch_up)

    def count(self, sequence: TokenSequence, drafted: int, accepted: int) -> None:
        """Count the tokens drafted for a sequence in a step, and those of them that became output."""
        sequence.drafted += drafted
        sequence.accepted += accepted
        self.drafted += drafted
        self.accepted += accepted
        self.drafts += 1
        self.accepted_at += [0] * (accepted - len(self.accepted_at))
        for position in range(accepted):
            self.accepted_at[position] += 1


def _with_draft(segment: Segment, choice: RequestChoice, tokens: Sequence[int]) -> Segment:
    if tokens and choice.penalty_counts is not None:
        tokens = tokens[: _PENALTIES // max(len(choice.penalty_counts.seen), 1)]
    if tokens and choice.matcher is not None:
        # A token that the grammar forbids would be rejected anyway, with those after it.
        tokens = tokens[: choice.matcher.allowed(tokens)]
    limits = segment.sequence.draft_limits
    if not tokens or (limits is not None and len(tokens) < limits.least):
        return replace(segment, draft_room=0) if segment.draft_room else segment
    return replace(segment, length=1 + len(tokens), drafted=tuple(tokens))

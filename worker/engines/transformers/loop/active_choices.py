"""The choices that wait or run, by sequence id, with the scheduler and the cache rows that they occupy.

Used on the step loop's thread only.
"""

from collections.abc import Callable, Collection, Iterator

from worker.engines.transformers.loop.requests import RequestChoice, RequestStream
from worker.engines.transformers.run.in_flight_step import InFlightStep, SegmentChoosers
from worker.engines.transformers.run.runner import Runner
from worker.engines.transformers.schedule.prefill_budget import PrefillBudget
from worker.engines.transformers.schedule.scheduler import Batch, Scheduler, Segment
from worker.engines.transformers.schedule.sequence import Sequence


class ActiveChoices:
    """Adds and removes choices, and makes the batches of steps.

    A step that was launched ahead still reads and writes the rows of its sequences. A sequence that ends meanwhile
    keeps its row until that step has finished: a freed row could be given to another sequence and then overwritten.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner):
        self.scheduler = scheduler
        self._runner = runner
        self._choices: dict[int, RequestChoice] = {}
        self.in_flight: InFlightStep | None = None  # the step that was launched ahead
        # Sequences that have ended but are in that step, each with a flag for a spoiled cache.
        self._leaving: list[tuple[Sequence, bool]] = []

    def __iter__(self) -> Iterator[RequestChoice]:
        return iter(list(self._choices.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._choices

    def of(self, sequence: Sequence) -> RequestChoice:
        return self._choices[sequence.id]

    def add(self, stream: RequestStream) -> None:
        for choice in stream.choices:
            self._choices[choice.sequence.id] = choice
            self.scheduler.add(choice.sequence)

    def remove(self, choice: RequestChoice, *, is_corrupt: bool = False) -> None:
        """Free the choice's row: now or, if the step in flight contains it, when that step has finished.

        `is_corrupt`: the cache of the sequence may be wrong, so no other request may reuse it.
        """
        sequence = choice.sequence
        if self.in_flight is not None and self.in_flight.has(sequence):
            self._leaving.append((sequence, is_corrupt))
        else:
            self.scheduler.remove(sequence, is_corrupt=is_corrupt)
            self._forget_rows()
        choice.stream.choices.remove(choice)
        self._choices.pop(sequence.id, None)

    def step_finished(self, spoiled: Collection[int]) -> None:
        """Free the rows of ended sequences that are not in the step in flight.

        `spoiled`: ids of the sequences for which the finished step gave no finite logits.
        """
        leaving, self._leaving = self._leaving, []
        for sequence, is_corrupt in leaving:
            if self.in_flight is not None and self.in_flight.has(sequence):
                self._leaving.append((sequence, is_corrupt))
            else:
                self.scheduler.remove(sequence, is_corrupt=is_corrupt or sequence.id in spoiled)
        if leaving:
            self._forget_rows()

    def preempt(self, sequence: Sequence) -> None:
        """Return a running sequence to the queue and free its row."""
        self.scheduler.preempt(sequence)
        self._forget_rows()

    def restart(self, sequence: Sequence) -> None:
        """As `preempt`, because the cache of the sequence may be wrong."""
        self.scheduler.restart(sequence)
        self._forget_rows()

    def fork(self, follower: Sequence) -> RequestChoice:
        """Give `follower` the cache of the prompt that its leader has computed."""
        self._runner.fork(*self.scheduler.fork(follower))
        return self._choices[follower.id]

    # Batches

    def next(
        self, prefill_budget: PrefillBudget, chunk: int, draft_length: Callable[[int, bool], int] | None = None
    ) -> Batch:
        """The batch of the next step. `chunk`: the most prompt tokens of a step; `draft_length` as in `Scheduler`."""
        # The budget depends on the running sequences, so the scheduler calls this after it has admitted waiting ones.
        batch = self.scheduler.next(lambda: self._prefill_budget(prefill_budget, chunk), draft_length)
        self._forget_rows()
        return batch

    def ahead(self, step: InFlightStep) -> Batch:
        """The batch of the step after `step`, while that one runs. Empty if it is not known yet."""
        return self.scheduler.ahead(step.batch, self._continuing(step))

    def parts(self, batch: Batch) -> list[SegmentChoosers]:
        """The segments of `batch`, each with the choices that sample from its last logits."""
        return [SegmentChoosers(segment, self._choosers(segment)) for segment in batch]

    def _prefill_budget(self, prefill_budget: PrefillBudget, chunk: int) -> int:
        decoding = self.scheduler.decoding
        return prefill_budget.budget(decoding, chunk, self.scheduler.running - decoding, self.scheduler.prefill_context)

    def _choosers(self, segment: Segment) -> list[RequestChoice]:
        """The segment's own choice, then the choices that wait for the same prompt."""
        sequence = segment.sequence
        if not (segment.completes and sequence.limit > 0):
            return []
        followers = self.scheduler.followers(sequence) if not sequence.output_tokens else []
        return [self._choices[chooser.id] for chooser in (sequence, *followers)]

    def _continuing(self, step: InFlightStep) -> set[int]:
        """Ids of the sequences that continue after `step` unless it ends them.

        Empty if other choices begin after one of them: these need rows, which only `next` gives.
        """
        going: set[int] = set()
        if len(step.forwards) != 1:  # the step failed in part: its tokens are not in one tensor on the device
            return going
        for segment in step.batch:
            sequence = segment.sequence
            if sequence not in self or sequence.output_tokens + 1 >= sequence.limit or sequence.id in step.late:
                continue
            if self.scheduler.followers(sequence):
                return set()
            going.add(sequence.id)
        return going

    def _forget_rows(self) -> None:
        for row in self.scheduler.take_freed_rows():
            self._runner.forget(row)

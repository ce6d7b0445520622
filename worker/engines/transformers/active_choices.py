"""The choices that wait or run: by sequence id, with the scheduler and the cache rows that they occupy.

Law: called on the step loop's thread only.
"""

from collections.abc import Collection, Iterable, Iterator

from worker.engines.transformers.run.in_flight_step import Flight, Part
from worker.engines.transformers.run.runner import Runner
from worker.engines.transformers.schedule.prefill_budget import Pace
from worker.engines.transformers.schedule.scheduler import Batch, Scheduler, Segment
from worker.engines.transformers.schedule.sequence import Sequence
from worker.engines.transformers.stream import Choice, Stream


class ActiveChoices:
    """Adds and removes choices, and makes the batches of steps.

    A step that was launched ahead may still read and write the rows of its sequences. So a sequence that ends meanwhile
    keeps its row until that step has landed.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner):
        self.scheduler = scheduler
        self._runner = runner
        self._choices: dict[int, Choice] = {}
        self.in_flight: Flight | None = None
        """The step that was launched ahead."""
        self._leaving: list[tuple[Sequence, bool]] = []
        """Sequences that have ended but are in that step, each with whether its cache is spoiled."""

    def __iter__(self) -> Iterator[Choice]:
        return iter(list(self._choices.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._choices

    def of(self, sequence: Sequence) -> Choice:
        return self._choices[sequence.id]

    def add(self, stream: Stream) -> None:
        for choice in stream.choices:
            self._choices[choice.sequence.id] = choice
            self.scheduler.add(choice.sequence)

    def remove(self, choice: Choice, *, is_spoiled: bool = False) -> None:
        """Free the choice's row: at once or, if the step in flight has it, when that step has landed.

        `is_spoiled`: the cache of the sequence may be wrong, so no other request may reuse it.
        """
        sequence = choice.sequence
        if self.in_flight is not None and self.in_flight.has(sequence):
            self._leaving.append((sequence, is_spoiled))
        else:
            self.scheduler.remove(sequence, is_spoiled=is_spoiled)
            self._forget_rows()
        choice.stream.choices.remove(choice)
        self._choices.pop(sequence.id, None)

    def landed(self, spoiled: Collection[int]) -> None:
        """A step has landed: free the rows of ended sequences that are not in the next step.

        `spoiled`: ids of the sequences for which the step found no numbers.
        """
        leaving, self._leaving = self._leaving, []
        for sequence, is_spoiled in leaving:
            if self.in_flight is not None and self.in_flight.has(sequence):
                self._leaving.append((sequence, is_spoiled))
            else:
                self.scheduler.remove(sequence, is_spoiled=is_spoiled or sequence.id in spoiled)
        if leaving:
            self._forget_rows()

    def preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back and free its row."""
        self.scheduler.preempt(sequence)
        self._forget_rows()

    def fork(self, follower: Sequence) -> Choice:
        """Give `follower` the cache of its leader's prompt."""
        self._runner.fork(*self.scheduler.fork(follower))
        return self._choices[follower.id]

    # Batches

    def next(self, pace: Pace, chunk: int) -> Batch:
        """The parts of the next step. `chunk`: prompt tokens of a step at most."""
        # The budget depends on who runs, so the scheduler asks for it once it has admitted the waiting sequences.
        batch = self.scheduler.next(lambda: self._prefill_budget(pace, chunk))
        self._forget_rows()
        return batch

    def ahead(self, flight: Flight) -> Batch:
        """The parts of the step behind `flight`, while that one still runs; empty if it cannot be known yet."""
        return self.scheduler.ahead(flight.batch, self._going(flight))

    def present(self, segments: Iterable[Segment]) -> Batch:
        """The segments whose sequences have not ended meanwhile."""
        return tuple(segment for segment in segments if segment.sequence in self)

    def parts(self, batch: Batch) -> list[Part]:
        """The segments of `batch`, each with the choices that take a token by its last logits."""
        return [Part(segment, self._choosers(segment)) for segment in batch]

    def _prefill_budget(self, pace: Pace, chunk: int) -> int:
        decoding = self.scheduler.decoding
        return pace.budget(decoding, chunk, self.scheduler.running - decoding, self.scheduler.looks_back)

    def _choosers(self, segment: Segment) -> list[Choice]:
        """The segment's own choice, then those for which it completes the prompt as well."""
        sequence = segment.sequence
        if not (segment.completes and sequence.limit > 0):
            return []
        followers = self.scheduler.followers(sequence) if not sequence.answered else []
        return [self._choices[each.id] for each in (sequence, *followers)]

    def _going(self, flight: Flight) -> set[int]:
        """Ids of the sequences that go on behind `flight` unless it ends them. Empty if other choices begin behind one
        of them: these need rows, which only `next` gives."""
        going: set[int] = set()
        if len(flight.attempts) != 1:
            return going
        for segment in flight.batch:
            sequence = segment.sequence
            if sequence not in self or sequence.answered + 1 >= sequence.limit:
                continue
            if self.scheduler.followers(sequence):
                return set()
            going.add(sequence.id)
        return going

    def _forget_rows(self) -> None:
        for row in self.scheduler.take_void():
            self._runner.forget(row)

"""Launches steps, and finds out which sequence is at fault when one fails.

All keys and values are written at fixed places, so a step can be computed again without the sequence that failed.
"""

import logging
import time
from collections.abc import Callable

import torch

from worker.engines.transformers.active_choices import ActiveChoices
from worker.engines.transformers.device import memory
from worker.engines.transformers.run.in_flight_step import Attempt, Flight, Masking, compute, launch
from worker.engines.transformers.run.runner import Runner
from worker.engines.transformers.sample.grammar import Grammars
from worker.engines.transformers.schedule.scheduler import Batch
from worker.engines.transformers.schedule.sequence import Sequence
from worker.errors import RequestError, SequenceFailed

log = logging.getLogger(__name__)


class Launcher:
    """Hands steps to the runner. A sticky device error is raised; any other failure ends one sequence."""

    def __init__(
        self,
        runner: Runner,
        grammars: Grammars | None,
        active: ActiveChoices,
        fail: Callable[[Sequence, RequestError], None],
    ):
        """`fail` ends the request of a sequence with an error."""
        self._runner, self._grammars = runner, grammars
        self._active, self._fail = active, fail
        self.steps_ahead = 0
        """The number of steps that were launched before the step in front of them had landed."""

    def launch(self, batch: Batch, now: float) -> Flight:
        return Flight(batch, self._compute(batch), now)

    def launch_ahead(self, flight: Flight) -> Flight | None:
        """Launch the step behind `flight`, if its batch is known already."""
        batch = self._active.ahead(flight)
        if not batch:
            return None
        begin = time.monotonic()
        parts = self._active.parts(batch)
        # Grammars and penalties depend on the newest token. The host does not have it yet, so only the forward is
        # launched; `choose` follows once the step in front has landed.
        waits = any(each.matcher is not None or each.repeats is not None for part in parts for each in part.choosers)
        try:
            fed = flight.fed(batch)
            attempt = compute(self._runner, parts, fed) if waits else launch(self._runner, self._grammars, parts, fed)
        except Exception as error:
            if memory.is_sticky(error):
                raise
            # Computed in its turn, the step gets the usual treatment of failures, which needs the newest tokens.
            log.warning("a step could not be run ahead, and is computed in its turn: %s", memory.one_line(error))
            return None
        self.steps_ahead += 1
        return Flight(batch, (attempt,), begin)

    def choose(self, flight: Flight) -> bool:
        """Choose the tokens of `flight`, whose step in front has landed. False: that failed; compute it again."""
        here = [self._active.of(each.sequence) for each in flight.batch if each.sequence in self._active]
        try:
            flight.choose(Masking(self._grammars, here))
        except Exception as error:
            if memory.is_sticky(error):
                raise
            log.warning("a step that ran ahead is computed again: %s", memory.one_line(error))
            return False
        return True

    def _compute(self, batch: Batch) -> list[Attempt]:
        """The segments that could be computed; the sequences of the others have ended or wait again."""
        try:
            return [self._attempt(batch)] if batch else []
        except Exception as error:
            if memory.is_sticky(error):
                raise
            if memory.is_exhausted(error):
                return self._with_fewer(batch, error)
            return self._one_by_one(batch)

    def _with_fewer(self, batch: Batch, error: Exception) -> list[Attempt]:
        """Memory ran out: compute once more without the youngest sequence, which waits until another has ended."""
        log.warning("out of memory in a step of %d sequences: %s", len(batch), error)
        youngest = max(batch, key=lambda segment: segment.sequence.id).sequence
        alone = len(batch) == 1
        if youngest.spared or alone:
            # It was put back before, or nothing else uses memory: waiting longer would not help.
            self._fail(youngest, SequenceFailed("the device has no memory for this request's step; shorten it"))
        else:
            self._active.preempt(youngest)
        rest = self._active.present(segment for segment in batch if segment.sequence is not youngest)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            return [self._attempt(rest)] if rest else []
        except Exception as again:
            if not memory.is_exhausted(again):
                raise
            for segment in rest:
                if segment.sequence in self._active:
                    self._fail(segment.sequence, SequenceFailed("the device has no memory for a step of this request"))
            return []

    def _one_by_one(self, batch: Batch) -> list[Attempt]:
        """Another failure: compute each sequence alone, to find the one that causes it."""
        attempts: list[Attempt] = []
        for segment in batch:
            if segment.sequence not in self._active:
                continue
            try:
                attempts.append(self._attempt((segment,)))
                attempts[-1].wait()
            except Exception as error:
                if memory.is_sticky(error):
                    raise
                log.exception("a sequence failed in its step")
                told = SequenceFailed(f"the model failed on this request: {type(error).__name__}")
                self._fail(segment.sequence, error if isinstance(error, RequestError) else told)
        return attempts

    def _attempt(self, batch: Batch) -> Attempt:
        """Compute and choose. Changes no sequence, so it may be repeated with fewer."""
        return launch(self._runner, self._grammars, self._active.parts(batch))

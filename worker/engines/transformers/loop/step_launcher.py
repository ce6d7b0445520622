"""Launching of steps, and the search for the sequence that makes one fail.

Keys and values are written at fixed positions, so a step can be computed again without the sequence that failed.
"""

import logging
import time
from collections.abc import Callable

import torch

from worker.engines.transformers.device import cuda_errors
from worker.engines.transformers.loop.active_choices import ActiveChoices
from worker.engines.transformers.run.in_flight_step import InFlightStep, LaunchedForward, PendingMasks, launch
from worker.engines.transformers.run.runner import Runner
from worker.engines.transformers.sample.grammar import Grammars
from worker.engines.transformers.schedule.scheduler import Batch
from worker.engines.transformers.schedule.sequence import Sequence
from worker.errors import RequestError, SequenceFailed

log = logging.getLogger(__name__)


class StepLauncher:
    """Passes batches to the runner. Raises sticky device errors; any other failure ends one sequence."""

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
        self.steps_ahead = 0  # steps that were launched before the step in front of them had finished

    def launch(self, batch: Batch, now: float) -> InFlightStep:
        return InFlightStep(batch, self._compute(batch), now)

    def launch_ahead(self, step: InFlightStep) -> InFlightStep | None:
        """Launch the step after `step`. None if its batch is not known yet, or if that failed."""
        batch = self._active.ahead(step)
        if not batch:
            return None
        begin = time.monotonic()
        parts = self._active.parts(batch)
        # Grammars, penalties and n-grams depend on the newest token, which the host does not have yet. So only the
        # forward is launched; `sample` follows when the step in front has finished.
        waits = any(
            chooser.matcher is not None or chooser.penalty_counts is not None or chooser.ngrams is not None
            for part in parts
            for chooser in part.choosers
        )
        try:
            (in_front,) = step.forwards
            device_tokens = in_front.device_tokens(batch)
            forward = launch(self._runner, self._grammars, parts, device_tokens, samples=not waits)
        except Exception as error:
            if cuda_errors.is_sticky(error):
                raise
            # The next call schedules the same tokens again, and `launch` finds the sequence that fails. This cannot
            # happen here: the search needs the newest tokens on the host.
            log.warning("launching a step ahead failed; it is computed in turn: %s", cuda_errors.one_line(error))
            return None
        self.steps_ahead += 1
        return InFlightStep(batch, (forward,), begin)

    def sample(self, step: InFlightStep) -> bool:
        """Choose the tokens of `step`, after the step in front has finished. False if it must be computed again."""
        here = [self._active.of(segment.sequence) for segment in step.batch if segment.sequence in self._active]
        try:
            (forward,) = step.forwards
            forward.sample(PendingMasks(self._grammars, ((choice, ()) for choice in here)))
        except Exception as error:
            if cuda_errors.is_sticky(error):
                raise
            log.warning(
                "sampling of a step launched ahead failed; it is computed again: %s", cuda_errors.one_line(error)
            )
            return False
        return True

    def _compute(self, batch: Batch) -> list[LaunchedForward]:
        """Launch the batch. On a failure, return the forwards that succeeded; other sequences end or wait again."""
        while batch:
            try:
                return [self._launch_batch(batch)]
            except Exception as error:
                if cuda_errors.is_sticky(error):
                    raise
                is_exhausted, why = cuda_errors.is_exhausted(error), cuda_errors.one_line(error)
            # Outside of the handler: until its end the error refers to the frames of the failed forward, and they to
            # its tensors, which the next attempt could not use the memory of.
            if not is_exhausted:
                return self._one_by_one(batch)
            batch = self._with_fewer(batch, why)
        return []

    def _with_fewer(self, batch: Batch, why: str) -> Batch:
        """After out of memory: preempt the youngest sequence, and return the rest of the batch.

        The youngest has the least to lose, and first come stays first served.
        """
        log.warning("out of memory in a step of %d sequences: %s", len(batch), why)
        youngest = max(batch, key=lambda segment: segment.sequence.id).sequence
        if youngest.preempted_for_memory or len(batch) == 1:
            # It was preempted for this before, or nothing else uses memory: waiting longer would not help.
            self._fail(youngest, SequenceFailed("device out of memory in this request's step; send a shorter prompt"))
        else:
            self._active.preempt(youngest)
        if torch.cuda.is_available():
            # Blocks cached for the larger step are too small or fragmented for the smaller one.
            torch.cuda.empty_cache()
        others = (segment for segment in batch if segment.sequence is not youngest)
        return tuple(segment for segment in others if segment.sequence in self._active)  # a failure may end several

    def _one_by_one(self, batch: Batch) -> list[LaunchedForward]:
        """After any other failure: compute each sequence alone, to find the one that causes it."""
        forwards: list[LaunchedForward] = []
        for segment in batch:
            if segment.sequence not in self._active:
                continue
            try:
                forwards.append(self._launch_batch((segment,)))
                forwards[-1].wait()  # errors of a device arrive late: attribute them to this sequence
            except Exception as error:
                if cuda_errors.is_sticky(error):
                    raise
                log.exception("a sequence failed in its step")
                failure = SequenceFailed(f"the model failed on this request: {type(error).__name__}")
                self._fail(segment.sequence, error if isinstance(error, RequestError) else failure)
        return forwards

    def _launch_batch(self, batch: Batch) -> LaunchedForward:
        """Launch forward and sampling. Changes no sequence, so it can be repeated with a smaller batch."""
        return launch(self._runner, self._grammars, self._active.parts(batch))

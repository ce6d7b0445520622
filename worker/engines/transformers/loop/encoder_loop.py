"""Step work of an encoder: texts to vectors and pairs to scores, for many requests at once."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from worker.engines.transformers.device import cuda_errors
from worker.engines.transformers.loop.requests import AdmissionLimit
from worker.engines.transformers.loop.step_loop import Outbox
from worker.engines.transformers.run.largest_step import LargestSizes
from worker.engines.transformers.run.pooling import Encoder, normalized
from worker.engines.transformers.schedule.encoder_batches import EncoderQueue
from worker.errors import RequestError, SequenceFailed
from worker.interface import EncoderInput
from worker.protocol.events import Pulse

log = logging.getLogger(__name__)


@dataclass(eq=False)
class EncoderJob:
    """The texts of one request, their results so far, and the future for all of them."""

    texts: Sequence[EncoderInput]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[list[Any]]  # for each text its numbers: a list, or a list of lists without pooling
    normalize: int = -1  # as llama-server's --embd-normalize; -1: unchanged
    results: dict[int, Any] = field(default_factory=dict)


class EncoderLoop:
    """`StepWork` for encoders. Methods run on the step loop's thread unless their docstring names another."""

    def __init__(
        self,
        encoder: Encoder,
        outbox: Outbox,
        *,
        budget: int,
        compiles_attention: bool = False,
        on_larger_step: Callable[[], None] | None = None,
    ):
        """One step takes at most `budget` tokens, padding included, or one text. `compiles_attention`: as
        `CpuLinears.compiles_attention`. `on_larger_step`: called before a step that is larger than all before."""
        self._encoder, self._outbox, self._budget = encoder, outbox, budget
        self._largest, self._on_larger_step = LargestSizes(), on_larger_step
        self._compiles_attention = compiles_attention
        self._queue: EncoderQueue[EncoderJob] = EncoderQueue()
        self._batch: list[tuple[EncoderJob, int]] = []
        self.prefill_tokens = self.decode_tokens = 0
        self.limit = AdmissionLimit()

    def add(self, job: EncoderJob) -> None:
        """Queue the texts of `job`, of which there is at least one."""
        self._queue.add(job, [len(text.tokens) for text in job.texts])

    def cancel(self, job: EncoderJob) -> None:
        """Remove the texts of `job` from the queue."""
        self._queue.drop(job)

    def abandon(self, error: RequestError) -> None:
        for job in {*self._queue.jobs, *(job for job, _ in self._batch)}:
            self._fail(job, error)

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    @property
    def load(self) -> tuple[int, int]:
        return len(self._batch), len(self._queue)

    def report(self, pulse: Pulse) -> Pulse:
        return replace(pulse, parallel=self._budget)  # a batch has at most as many texts as tokens

    def step(self) -> None:
        self._batch = self._queue.take(self._budget)
        if self._on_larger_step is not None and self._is_larger(self._batch):
            self._on_larger_step()
        for job, index, result in self._compute(self._batch):
            job.results[index] = result
            self.prefill_tokens += len(job.texts[index].tokens)
            if len(job.results) == len(job.texts):
                results = [job.results[place] for place in range(len(job.texts))]
                self._outbox.put(job.loop, partial(_settle, job.answer, results))
        self._batch = []

    def _is_larger(self, batch: list[tuple[EncoderJob, int]]) -> bool:
        """Record a step. True if it is larger than all before: by its tokens with padding, its texts, or the pairs of
        tokens, of which attention may have a mask."""
        lengths = {len(job.texts[index].tokens) for job, index in batch}
        texts, longest = len(batch), max(lengths)
        padded = texts * longest
        # Texts are computed one by one if their batch fails, or if the model cannot pad them.
        shapes = {(texts, longest), *((1, length) for length in lengths)} if self._compiles_attention else frozenset()
        return self._largest.are_exceeded(
            padded, texts, padded * longest, rows={padded, texts, *lengths}, shapes=shapes
        )

    def _compute(self, batch: list[tuple[EncoderJob, int]]) -> list[tuple[EncoderJob, int, Any]]:
        """Run a batch. If it fails, run each text alone; a text that fails then ends its request."""
        try:
            results = self._encoder.run([job.texts[index] for job, index in batch])
        except Exception as error:
            if cuda_errors.is_sticky(error):
                raise
            if len(batch) > 1:
                return [found for text in batch for found in self._compute([text])]
            log.exception("a text failed in its step")
            self._fail(batch[0][0], SequenceFailed(f"the model failed on this text: {type(error).__name__}"))
            return []
        found = []
        for (job, index), result in zip(batch, results, strict=True):
            if result.isfinite().all():
                found.append((job, index, normalized(result, job.normalize).tolist()))
            else:
                self._fail(job, SequenceFailed("the model gives no finite numbers for this text; set another dtype"))
        return found

    def _fail(self, job: EncoderJob, error: RequestError) -> None:
        self._queue.drop(job)
        self._outbox.put(job.loop, partial(_settle, job.answer, error))


def _settle(answer: asyncio.Future[list[Any]], outcome: list[Any] | RequestError) -> None:
    if answer.done():
        return  # the client has disconnected, or another text of the request has failed
    if isinstance(outcome, RequestError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)

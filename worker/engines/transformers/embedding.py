"""Texts to vectors and pairs to scores, for many requests at once: the engine's work when it does not generate."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from worker.engines.transformers.device import memory
from worker.engines.transformers.run.pooling import Encoder, normalized
from worker.engines.transformers.schedule.encoder_batches import Queue
from worker.engines.transformers.step_loop import Outbox, Report
from worker.errors import RequestError, SequenceFailed
from worker.interface import EncoderInput

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """One request's texts, and where what was computed of them goes."""

    texts: Sequence[EncoderInput]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[list[Any]]
    """For each text its numbers: a list, or a list of lists."""
    normalize: int = -1
    """As llama-server's --embd-normalize; -1: as the model gives it."""
    results: dict[int, Any] = field(default_factory=dict)


class Embedding:
    """The engine's `Work` for encoders. Methods run on the step loop's thread unless they say otherwise."""

    def __init__(self, encoder: Encoder, outbox: Outbox, *, budget: int):
        """One step takes at most `budget` tokens, padding included, or one text."""
        self._encoder, self._outbox, self._budget = encoder, outbox, budget
        self._queue: Queue[Job] = Queue()
        self._batch: list[tuple[Job, int]] = []
        self._tokens = 0
        self._largest = 0, 0, 0
        """As in `Pulse`."""
        self._live = 0
        self._lock = threading.Lock()

    def admit(self, most: int) -> bool:
        """Count one more request in, unless `most` are here already. From any thread."""
        with self._lock:
            if self._live >= most:
                return False
            self._live += 1
            return True

    def release(self) -> None:
        """One request less counts. From any thread."""
        with self._lock:
            self._live -= 1

    def add(self, job: Job) -> None:
        """Its texts wait from now on; there is at least one."""
        self._queue.add(job, [len(text.tokens) for text in job.texts])

    def cancel(self, job: Job) -> None:
        """Its texts are out of the next step."""
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

    def report(self) -> Report:
        # a batch could be of texts of one token
        return Report(parallel=self._budget, prefill_tokens=self._tokens, largest=self._largest)

    def step(self) -> None:
        self._batch = self._queue.take(self._budget)
        for job, index, result in self._compute(self._batch):
            job.results[index] = result
            self._tokens += len(job.texts[index].tokens)
            longest, texts, _ = self._largest
            longest = max(longest, len(job.texts[index].tokens))
            self._largest = longest, max(texts, len(self._batch)), longest
            if len(job.results) == len(job.texts):
                results = [job.results[place] for place in range(len(job.texts))]
                self._outbox.put(job.loop, partial(_settle, job.answer, results))
        self._batch = []

    def _compute(self, batch: list[tuple[Job, int]]) -> list[tuple[Job, int, Any]]:
        """If a batch fails, each text alone: whoever fails then, ends its request."""
        try:
            results = self._encoder.run([job.texts[index] for job, index in batch])
        except Exception as error:
            if memory.is_sticky(error):
                raise
            if len(batch) > 1:
                return [found for each in batch for found in self._compute([each])]
            log.exception("a text failed in its step")
            self._fail(batch[0][0], SequenceFailed(f"the model failed on this text: {type(error).__name__}"))
            return []
        found = []
        for (job, index), result in zip(batch, results, strict=True):
            if result.isfinite().all():
                found.append((job, index, normalized(result, job.normalize).tolist()))
            else:
                self._fail(job, SequenceFailed("the model gives no finite numbers for this text; try another dtype"))
        return found

    def _fail(self, job: Job, error: RequestError) -> None:
        self._queue.drop(job)
        self._outbox.put(job.loop, partial(_settle, job.answer, error))


def _settle(answer: asyncio.Future[list[Any]], outcome: list[Any] | RequestError) -> None:
    if answer.done():
        return  # its reader is gone, or another of its texts has failed
    if isinstance(outcome, RequestError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)

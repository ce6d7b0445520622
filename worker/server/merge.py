"""The deltas of all generations of one request, merged in the order of their arrival."""

import asyncio
import contextlib
from collections.abc import Sequence

from worker.errors import RequestError
from worker.interface import Delta, Engine, GenerationRequest

MAX_CONCURRENT = 64  # choices of one request in the engine: a long list of prompts must not fill its queue alone

ArrivedDeltas = list[tuple[int, Delta]]  # deltas in order of arrival, each with the number of its generation


class MergedDeltas:
    """The merged output of several generations, for one reader: `async with MergedDeltas(...) as deltas`. Leaving the
    block cancels unfinished generations."""

    def __init__(self, engine: Engine, generations: Sequence[GenerationRequest], *, room: int = MAX_CONCURRENT):
        """`room`: choices that the engine admits. More at once would be rejected, and again whenever they are sent."""
        self._engine = engine
        self._generations = generations
        # Unbounded: a slow client must not block the engine. The context length bounds the output.
        self._arrived: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue()
        choices = max((generation.n for generation in generations), default=1)
        self._places = asyncio.Semaphore(max(1, min(room, MAX_CONCURRENT) // choices))
        self._tasks: list[asyncio.Task[None]] = []
        self._open = len(generations)
        self._error: BaseException | None = None

    async def __aenter__(self) -> "MergedDeltas":
        for number, generation in enumerate(self._generations):
            task = asyncio.create_task(self._read(number, generation), name=generation.id)
            task.add_done_callback(self._end)
            self._tasks.append(task)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel all generations and wait until the engine has released them. If this wait is cancelled, the release
        continues in the background."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def next_deltas(self) -> ArrivedDeltas:
        """Return everything that has arrived, at least one delta; an empty list at the end. Cancelling loses nothing.

        Raises the error of a generation, after the deltas that arrived before it.
        """
        batch: ArrivedDeltas = []
        while self._open and self._error is None and not (batch and self._arrived.empty()):
            arrived = await self._arrived.get()  # suspends only while the batch is empty
            if arrived is None:
                self._open -= 1
            elif isinstance(arrived, BaseException):
                self._error = arrived
            else:
                batch.append(arrived)
        if not batch and self._error is not None:
            raise self._error
        return batch

    def fail(self, error: RequestError) -> None:
        """End with `error`, after the deltas that have arrived."""
        self._arrived.put_nowait(error)

    async def _read(self, number: int, generation: GenerationRequest) -> None:
        async with self._places, contextlib.aclosing(self._engine.generate(generation)) as deltas:
            async for delta in deltas:
                self._arrived.put_nowait((number, delta))

    def _end(self, task: asyncio.Task[None]) -> None:
        self._arrived.put_nowait(None if task.cancelled() else task.exception())

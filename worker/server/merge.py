"""The deltas of several generations of one request, merged as they arise. Leaving the block cancels the rest."""

import asyncio
import contextlib
from collections.abc import Sequence

from worker.errors import RequestError
from worker.interface import Delta, Engine, GenerationRequest

AT_ONCE = 64
"""Generations of one request in the engine at a time: a long list of prompts must not fill its queue by itself."""

Batch = list[tuple[int, Delta]]
"""Deltas in the order they arose, each with the number of its generation."""


class Deltas:
    """What the engine says, read by one task: `async with Deltas(...) as deltas: await deltas.some()`."""

    def __init__(self, engine: Engine, generations: Sequence[GenerationRequest]):
        self._engine = engine
        self._generations = generations
        # unbounded: a slow client must hold nobody up, and an answer is bounded by the context
        self._arrived: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue()
        self._places = asyncio.Semaphore(AT_ONCE)
        self._pumps: list[asyncio.Task[None]] = []
        self._open = len(generations)
        self._error: BaseException | None = None

    async def __aenter__(self) -> "Deltas":
        for number, generation in enumerate(self._generations):
            pump = asyncio.create_task(self._pump(number, generation), name=generation.id)
            pump.add_done_callback(self._ended)
            self._pumps.append(pump)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Returns once the engine has taken back every place; cancelling this wait leaves that to happen by itself."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.wait(self._pumps)

    async def some(self) -> Batch:
        """All that has arrived; waits for at least one, and is empty at the
        end. Cancelling it loses nothing.

        Raises what a generation raised, after all that came before it.
        """
        batch: Batch = []
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
        """End with `error`, after what has arrived."""
        self._arrived.put_nowait(error)

    async def _pump(self, number: int, generation: GenerationRequest) -> None:
        async with self._places, contextlib.aclosing(self._engine.generate(generation)) as deltas:
            async for delta in deltas:
                self._arrived.put_nowait((number, delta))

    def _ended(self, pump: asyncio.Task[None]) -> None:
        self._arrived.put_nowait(None if pump.cancelled() else pump.exception())

"""The merged deltas of several generations: complete, with errors in their order, and cancelled together."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from tests.worker import serving
from tests.worker.fake_engine import FakeEngine
from worker.errors import Draining, SequenceFailed
from worker.interface import Delta, GenerationRequest
from worker.server.merge import MAX_CONCURRENT, MergedDeltas


class Hasty(FakeEngine):
    """Yields two deltas and fails, without a suspension in between."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        yield Delta(text="a")
        yield Delta(text="b")
        raise SequenceFailed("no more")


class Counting(FakeEngine):
    """Counts the generations that run at once."""

    running = most = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async for delta in super().generate(request):
                yield delta
        finally:
            self.running -= 1


def generations(count: int, text: str = "hi") -> list[GenerationRequest]:
    prompt = tuple(serving.tokenizer().encode(text))
    return [GenerationRequest(id=str(number), prompt=prompt, max_tokens=3) for number in range(count)]


async def test_deltas_that_arrived_before_an_error_come_before_it() -> None:
    async with MergedDeltas(Hasty(serving.tokenizer()), generations(1)) as deltas:
        await asyncio.wait([task for task in asyncio.all_tasks() if task.get_name() == "0"])  # all three are waiting
        assert [delta.text for _, delta in await deltas.next_deltas()] == ["a", "b"]
        for _ in range(2):
            with pytest.raises(SequenceFailed):
                await deltas.next_deltas()


async def test_all_generations_end_with_an_empty_batch() -> None:
    async with MergedDeltas(FakeEngine(serving.tokenizer()), generations(3)) as deltas:
        texts = ["", "", ""]
        while batch := await deltas.next_deltas():
            for number, delta in batch:
                texts[number] += delta.text
        assert texts == ["0 Gr\ufffd"] * 3
        assert await deltas.next_deltas() == []


async def test_a_cancelled_wait_loses_nothing() -> None:
    engine = FakeEngine(serving.tokenizer())
    async with MergedDeltas(engine, generations(1, "hold")) as deltas:
        waiting = asyncio.create_task(deltas.next_deltas())
        await engine.until("begin")
        waiting.cancel()
        await asyncio.wait([waiting])
        engine.gate.set()
        text = ""
        while batch := await deltas.next_deltas():
            text += "".join(delta.text for _, delta in batch)
        assert text == "0 Gr\ufffd"


async def test_leaving_the_block_waits_until_the_engine_has_released_all() -> None:
    engine = Counting(serving.tokenizer())
    async with MergedDeltas(engine, generations(5, "hold")):
        await engine.until("begin")
    assert engine.running == 0
    assert engine.journal.count("cancelled") == engine.journal.count("begin")


async def test_a_long_list_of_prompts_enters_the_engine_in_parts() -> None:
    engine = Counting(serving.tokenizer())
    async with MergedDeltas(engine, generations(MAX_CONCURRENT * 2)) as deltas:
        ended = 0
        while batch := await deltas.next_deltas():
            ended += sum(delta.finish is not None for _, delta in batch)
    assert (ended, engine.most) == (MAX_CONCURRENT * 2, MAX_CONCURRENT)


@pytest.mark.parametrize(("n", "room", "most"), [(1, 5, 5), (2, 1000, 32), (24, 1000, 2), (128, 1000, 1), (128, 5, 1)])
async def test_a_list_of_prompts_enters_the_engine_in_parts_that_its_queue_admits(n: int, room: int, most: int) -> None:
    engine = Counting(serving.tokenizer())
    several = [replace(generation, n=n) for generation in generations(40)]
    async with MergedDeltas(engine, several, room=room) as deltas:
        while await deltas.next_deltas():
            pass
    assert engine.most == most


async def test_a_failure_from_outside_ends_the_wait() -> None:
    engine = FakeEngine(serving.tokenizer())
    async with MergedDeltas(engine, generations(1, "hold")) as deltas:
        await engine.until("begin")
        deltas.fail(Draining("stop"))
        with pytest.raises(Draining):
            await deltas.next_deltas()
    assert engine.journal == ["begin", "cancelled"]

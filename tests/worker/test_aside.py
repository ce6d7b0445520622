"""What is computed a few layers at a time beside the steps: the same text for all, and nobody waits for it."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.worker.families import FAMILIES
from tests.worker.loaded import (
    DEADLINE,
    generated,
    generation,
    load,
    load_with,
    options,
    put_back_the_youngest,
    reference,
    say,
    serving,
    tell,
)
from tests.worker.stepped import Drive
from worker.engine import attention, loader
from worker.engine.architectures import PAGED
from worker.engine.aside import Aside
from worker.engine.backends import make_pool
from worker.engine.engine import TransformersEngine
from worker.engine.kv_cache import BLOCK_TOKENS, Blocks
from worker.engine.pace import Pace
from worker.engine.runner import PackedRunner
from worker.engine.scheduler import Batch, Segment
from worker.engine.sequence import Sequence
from worker.errors import Draining
from worker.generation import Sampling

torch.set_num_threads(1)
CTX, NEW = 128, 24
PACKED = [name for name, (family, _) in FAMILIES.items() if family in PAGED]


class Pressing(Pace):
    """Whatever is left of a prompt is put aside while somebody streams, and goes on by one layer a step."""

    def __init__(self, tokens: int = 7, *, mixed: int = 16) -> None:
        super().__init__()
        self._tokens, self._mixed = tokens, mixed
        self.count = 0
        self.presses = threading.Event()
        self.disturbed: list[int] = []
        """By slice: how many decoded."""

    def budget(self, decoding: int, chunk: int, prompts: int = 1, start: int = 0, *, beside: bool = False) -> int:
        return min(chunk, self._mixed)

    def aside(self, decoding: int, prompts: int, start: int, pending: int, layers: int, mixed: int) -> int:
        length = min(self._tokens, pending) if decoding else 0
        if length:
            self.count += 1
            self.presses.set()
        return length

    def slice(self, decoding: int, took: float) -> float:
        self.disturbed.append(decoding)
        return 0.0


def words(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(3 + (seed * 131 + index * 37) % 480 for index in range(count))


# A forward of nobody's


def segment() -> Segment:
    return Segment(Sequence(id=1, prompt_tokens=3, tokens=[5, 6, 7], limit=3, ends=frozenset()), 0, 0, 3)


def computing(said: list[str], layers: int = 3) -> Callable[[Callable[[], None]], torch.Tensor]:
    @torch.inference_mode()
    def compute(pause: Callable[[], None]) -> torch.Tensor:
        try:
            for layer in range(layers):
                pause()
                assert torch.is_inference_mode_enabled()
                said.append(f"layer {layer}")
            return torch.ones(1)
        finally:
            said.append("over")

    return compute


def test_without_time_it_goes_on_from_one_pause_to_the_next() -> None:
    said: list[str] = []
    aside = Aside(segment(), computing(said))
    for layer in range(3):
        assert not aside.go_on(0.0)
        assert said == [f"layer {each}" for each in range(layer)]
        assert not torch.is_inference_mode_enabled(), "the steps in between have their own mode"
    assert aside.go_on(0.0)
    assert said[-1] == "over"
    assert aside.logits.tolist() == [1.0]
    assert aside.seconds > 0.0


def test_with_time_it_ends_at_once() -> None:
    said: list[str] = []
    assert Aside(segment(), computing(said)).go_on(60.0)
    assert len(said) == 4


def test_who_gives_it_up_unwinds_it_wherever_it_is() -> None:
    for steps in range(4):
        said: list[str] = []
        aside = Aside(segment(), computing(said))
        for _ in range(steps):
            aside.go_on(0.0)
        aside.give_up()
        assert said[-1:] == (["over"] if steps else [])
        assert "layer 2" not in said
        assert not torch.is_inference_mode_enabled()
        aside.give_up()


def test_what_computing_raises_is_raised_where_it_was_gone_on_with() -> None:
    def compute(pause: Callable[[], None]) -> torch.Tensor:
        pause()
        raise ValueError("no such layer")

    aside = Aside(segment(), compute)
    assert not aside.go_on(0.0)
    with pytest.raises(ValueError, match="no such layer"):
        aside.go_on(0.0)
    aside.give_up()


# Of models


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("llama"))


def pressed(folder: Path, pace: Pace, **changes: Any) -> TransformersEngine:
    return load_with(folder, lambda runner: runner, pace=pace, ctx_size=CTX, **changes)


def scheduler_of(engine: TransformersEngine) -> Any:
    assert engine._generating is not None
    return engine._generating._scheduler


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
async def test_prompts_beside_streams_say_what_they_say_alone_and_so_do_those(tmp_path: Path, name: str) -> None:
    """Joining, leaving, put back now and then, beginning alike: whoever comes is put aside while somebody streams."""
    family, overrides = FAMILIES[name]
    folder = tiny.make(family, tmp_path, **overrides)
    model, pace = reference(folder), Pressing()
    shared = words(2 * BLOCK_TOKENS + 3, seed=8)
    prompts = [words(3), words(90, seed=1), (*shared, *words(30, seed=2)), (*shared, *words(9, seed=3)), words(60, 4)]
    expected = [generated(model, prompt, NEW) for prompt in prompts]
    async with serving(pressed(folder, pace, parallel=3, prefill_chunk=24)) as engine:
        for _ in range(2):
            tasks = [asyncio.create_task(say(engine, prompt, max_tokens=NEW)) for prompt in prompts]
            for _ in range(6):
                await asyncio.sleep(0)
                put_back_the_youngest(engine)
            assert [each.tokens for each in await asyncio.gather(*tasks)] == expected
        scheduler_of(engine).check_integrity()
    assert pace.count > 10


async def test_choices_of_a_prompt_that_is_aside_begin_together(llama: Path) -> None:
    warm, pace = Sampling(temperature=1.1, seed=4), Pressing()
    async with serving(pressed(llama, Pressing(), parallel=4)) as engine:
        alone = await tell(engine, generation(words(50), n=3, sampling=warm, max_tokens=NEW))
    async with serving(pressed(llama, pace, parallel=4)) as engine:
        stream = engine.generate(generation(words(5, seed=3), max_tokens=100))
        await anext(stream)
        told = await tell(engine, generation(words(50), n=3, sampling=warm, max_tokens=NEW))
        await stream.aclose()
    assert [each.tokens for each in told] == [each.tokens for each in alone]
    assert pace.count >= 5


async def test_an_engine_that_closes_meanwhile_tells_all(llama: Path) -> None:
    pace = Pressing(1)
    engine = pressed(llama, pace, parallel=2)
    stream = engine.generate(generation(words(5), max_tokens=100))
    await anext(stream)
    late = asyncio.create_task(say(engine, words(100, seed=1), max_tokens=NEW))
    async with asyncio.timeout(DEADLINE):
        await asyncio.to_thread(pace.presses.wait)
        await engine.close()
    with pytest.raises(Draining):
        await late
    with pytest.raises(Draining):
        [_ async for _ in stream]


async def test_tokens_of_a_step_are_told_before_what_is_beside_it_goes_on(llama: Path) -> None:
    goes_on, held = threading.Event(), threading.Event()

    class Held(PackedRunner):
        """Computes nothing beside a step until it may."""

        def run(
            self, batch: Batch, fed: torch.Tensor | None = None, pause: Callable[[], None] | None = None
        ) -> torch.Tensor:
            if pause is not None:
                held.set()
                assert goes_on.wait(DEADLINE)
            return super().run(batch, fed, pause)

    def holding(runner: PackedRunner) -> PackedRunner:
        return Held(runner._model, runner.pool, runner._blocks, runner.device)

    async with serving(load_with(llama, holding, pace=Pressing(), ctx_size=CTX, parallel=2)) as engine:
        try:
            stream = engine.generate(generation(words(5), max_tokens=100))
            told = [await anext(stream)]
            late = asyncio.create_task(say(engine, words(60, seed=1), max_tokens=NEW))
            async with asyncio.timeout(DEADLINE):
                await asyncio.to_thread(held.wait)
                assert engine._generating is not None
                while sum(len(each.tokens) for each in told) < engine._generating.report().decode_tokens:
                    told.append(await anext(stream))
        finally:
            goes_on.set()
        await late
        await stream.aclose()


@pytest.mark.parametrize("changes", [{"kv_cache_dtype": "int8"}, {"attention": "eager"}])
async def test_whatever_the_cache_is_kept_in_the_text_is_the_same(llama: Path, changes: dict[str, Any]) -> None:
    prompt, pace = words(70, seed=2), Pressing()
    async with serving(load(llama, ctx_size=CTX, parallel=2, **changes)) as engine:
        expected = (await say(engine, prompt, max_tokens=NEW)).tokens
    async with serving(pressed(llama, pace, parallel=2, **changes)) as engine:
        stream = engine.generate(generation(words(5), max_tokens=100))
        await anext(stream)
        assert (await say(engine, prompt, max_tokens=NEW)).tokens == expected
        await stream.aclose()
    assert pace.count > 5


@pytest.mark.parametrize(("family", "count"), [("llama", 2), ("mistral", 2), ("gemma3_text", 1)])
def test_beside_layers_with_a_window_those_that_look_back_on_all_take_the_time(
    tmp_path: Path, family: str, count: int
) -> None:
    """One of six, and it would be as long as six shares, if each layer were thought to take one."""
    model, blocks, device = attended(tiny.make(family, tmp_path)), Blocks(1, 4), torch.device("cpu")
    pool = make_pool(model.config, blocks, torch.float32, device)
    assert PackedRunner(model, pool, blocks, device).layers == count


# One step at a time, on the test's own thread


class Told(PackedRunner):
    """Notes whom it computes, and fails for what is put aside if it is told to."""

    said: list[str]
    fails = False
    lacks_memory = False
    """For steps, while something is beside them."""
    beside = 0

    def run(
        self, batch: Batch, fed: torch.Tensor | None = None, pause: Callable[[], None] | None = None
    ) -> torch.Tensor:
        ids = ",".join(str(each.sequence.id) for each in batch)
        self.said.append(f"aside {ids}" if pause is not None else ids)
        if pause is not None and self.fails:
            pause()
            raise RuntimeError("a layer has failed")
        if pause is None and self.lacks_memory and self.beside:
            raise torch.OutOfMemoryError("no more of it")
        self.beside += pause is not None
        try:
            return super().run(batch, fed, pause)
        finally:
            self.beside -= pause is not None


Runners = Callable[[int], tuple[Told, Blocks]]


@pytest.fixture
def runners(llama: Path) -> Iterator[Runners]:
    """A runner with so many blocks."""
    model = attended(llama)
    made: list[Blocks] = []

    def make(count: int) -> tuple[Told, Blocks]:
        blocks = Blocks(4, count, caches=False)
        made.append(blocks)
        device = torch.device("cpu")
        told = Told(model, make_pool(model.config, blocks, torch.float32, device), blocks, device)
        told.said = []
        return told, blocks

    yield make
    for blocks in made:
        blocks.check_integrity()
        assert not blocks.owners


def attended(folder: Path) -> Any:
    """The model with our attention."""
    asked = options(folder)
    attention.register()
    return loader.load_model(asked, loader.load_config(asked), attention.SDPA, lambda progress: None).model


async def test_whoever_is_put_back_while_it_is_aside_is_computed_again(runners: Runners) -> None:
    """Four blocks: the first, at its 33rd token, wants the third of them, and the other has two."""
    told, blocks = runners(4)
    drive = Drive(told, blocks, ahead=False, pace=Pressing(1, mixed=1))
    drive.ask(1, words(4), most=40)
    drive.ask(2, words(20, seed=1))
    drive.work.step()
    last = None
    while drive.work._scheduler.running == 2:
        last = drive.work._aside
        drive.work.step()
    assert last is not None
    assert drive.work._aside is None
    drive.to_the_end()
    assert len(await drive.told(1)) == 41
    said, alone = await drive.told(2), Drive(told, blocks, ahead=False)
    alone.ask(2, words(20, seed=1))
    alone.to_the_end()
    assert said == await alone.told(2)


async def test_others_go_on_and_come_in_between_two_layers(runners: Runners) -> None:
    told, blocks = runners(16)
    drive = Drive(told, blocks, ahead=False, pace=Pressing(20))
    drive.ask(1, words(4), most=30)
    drive.work.step()
    drive.ask(2, words(50, seed=1))
    drive.work.step()  # it is let in, and its first tokens are in the step
    del told.said[:]
    drive.work.step()
    drive.ask(3, words(6, seed=2))
    drive.work.step()
    drive.work.step()
    assert told.said[:3] == ["1", "aside 2", "1,3"]
    drive.to_the_end()
    answers = [await drive.told(id) for id in (1, 2, 3)]
    alone = Drive(told, blocks, ahead=False)
    for id, prompt, most in ((1, words(4), 30), (2, words(50, seed=1), 8), (3, words(6, seed=2), 8)):
        alone.ask(id, prompt, most=most)
        alone.to_the_end()
        assert await alone.told(id) == answers[id - 1]


async def test_a_cancel_of_what_is_aside_takes_effect_at_once(runners: Runners) -> None:
    told, blocks = runners(16)
    drive = Drive(told, blocks, ahead=False, pace=Pressing(20))
    drive.ask(1, words(4), most=30)
    drive.work.step()
    drive.ask(2, words(50, seed=1))
    for _ in range(2):
        drive.work.step()
    assert drive.work._aside is not None
    drive.work.cancel(drive.streams[2])
    assert drive.work._aside is None
    assert list(blocks.owners.values()) == [1]
    drive.ask(3, words(40, seed=2))
    drive.to_the_end()
    assert [len(await drive.told(id)) for id in (1, 3)] == [31, 9]


async def test_what_fails_beside_the_steps_is_computed_in_them(
    runners: Runners, caplog: pytest.LogCaptureFixture
) -> None:
    told, blocks = runners(16)
    alone = Drive(told, blocks, ahead=False)
    alone.ask(2, words(50, seed=1))
    alone.to_the_end()
    expected = await alone.told(2)
    told.fails = True
    drive = Drive(told, blocks, ahead=False, pace=Pressing(20))
    drive.ask(1, words(4), most=30)
    drive.work.step()
    drive.ask(2, words(50, seed=1))
    with caplog.at_level(logging.WARNING):
        drive.to_the_end()
    assert await drive.told(2) == expected
    assert "a layer has failed" in caplog.text
    assert sum(each.startswith("aside") for each in told.said) == 1


async def test_a_step_without_memory_has_what_is_beside_it_given_up_before_anybody_suffers(runners: Runners) -> None:
    told, blocks = runners(16)
    drive = Drive(told, blocks, ahead=False, pace=Pressing(20))
    drive.ask(1, words(4), most=30)
    drive.work.step()
    drive.ask(2, words(50, seed=1))
    told.lacks_memory = True
    drive.to_the_end()
    answers = [await drive.told(id) for id in (1, 2)]
    assert [len(each) for each in answers] == [31, 9]
    assert sum(each.startswith("aside") for each in told.said) == 1
    alone = Drive(told, blocks, ahead=False)
    alone.ask(2, words(50, seed=1))
    alone.to_the_end()
    assert await alone.told(2) == answers[1]


async def test_who_begins_to_stream_is_not_kept_waiting_for_its_second_token(runners: Runners) -> None:
    """Of the step with its prompt nobody else is a part: what is beside it would have all the time."""
    told, blocks = runners(16)
    pace = Pressing(30)
    drive = Drive(told, blocks, ahead=False, pace=pace)
    drive.ask(1, words(4), most=3)
    drive.work.step()
    drive.ask(2, words(60, seed=1))
    while drive.work._scheduler.decoding:
        drive.work.step()
    assert drive.work._aside is not None
    assert pace.disturbed[-1] == 0
    drive.ask(3, words(6, seed=2))
    drive.work.step()
    assert told.said[-1] == "3"
    assert pace.disturbed[-1] == 1
    drive.to_the_end()

"""Running ahead: a step is launched before the one in front of it has landed, and nobody can tell by the text.

On an accelerator the host would wait otherwise. Here launching computes at once; what is tested is the order of things,
the values, and that the host asks for numbers once a step.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from tests import tiny
from tests.worker.loaded import (
    DEADLINE,
    GREEDY,
    Told,
    generated,
    generation,
    load,
    load_with,
    options,
    reference,
    say,
    serving,
    tell,
)
from tests.worker.stepped import PROMPT, Drive
from worker.engines.transformers.attention import paged
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.generation_loop import Generating
from worker.engines.transformers.load import loader
from worker.engines.transformers.run.backends import implementation, make_pool, make_runner
from worker.engines.transformers.run.cuda_graphs import FixedRunner
from worker.engines.transformers.run.in_flight_step import Part, launch
from worker.engines.transformers.run.runner import PackedRunner, Runner
from worker.engines.transformers.sample import topk
from worker.engines.transformers.sample.device_to_host import Readout
from worker.engines.transformers.sample.sampler import Masks, Pick, draw, uniform
from worker.engines.transformers.schedule.kv_cache import Blocks, Capacity, Rows
from worker.engines.transformers.schedule.prefill_budget import Pace
from worker.engines.transformers.schedule.scheduler import Batch, Scheduler, Segment
from worker.engines.transformers.schedule.sequence import Repeats
from worker.engines.transformers.schedule.sequence import Sequence as TokenSequence
from worker.engines.transformers.stream import Choice
from worker.errors import SequenceFailed
from worker.interface import GenerationRequest, Grammar, SamplingParams
from worker.protocol.memory import BLOCK_TOKENS

torch.set_num_threads(1)
CTX, NEW = 128, 30
FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt_oss", "mamba", "t5")
"""One for each backend and kind of cache: paged, with norms of its own, with windows; aligned with windows, with
states, behind an encoder."""
WARM = SamplingParams(temperature=1.0, seed=11)


@pytest.fixture(scope="module", params=FAMILIES)
def snapshot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"seed": 2} if request.param == "t5" else {}
    return tiny.make(request.param, tmp_path_factory.mktemp("snapshot"), **changes)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("llama"))


def work_of(engine: TransformersEngine) -> Generating:
    assert engine._generating is not None
    return engine._generating


def prompts(longest: int = 60) -> list[tuple[int, ...]]:
    source = random.Random(3)
    return [tuple(source.randrange(2, 500) for _ in range(length)) for length in (1, 7, 17, longest)]


def requests(longest: int, *, may_tell_prompts: bool) -> list[GenerationRequest]:
    """Every kind of request that a step may have to wait for, and many that it need not."""
    first, second, third, fourth = prompts(longest)
    held = Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}, "maxItems": 4}', "response_format")
    told = replace(GREEDY, logprobs=3)
    penalised = replace(WARM, repetition_penalty=1.3, presence_penalty=0.5, repeat_last_n=8)
    return [
        *(generation(each, max_tokens=NEW) for each in (first, second, third, fourth)),
        generation(second, max_tokens=9, sampling=replace(WARM, temperature=1.5)),
        generation(third, max_tokens=NEW, sampling=replace(WARM, seed=5, top_p=0.9, top_k=40, min_tokens=12)),
        generation(fourth, max_tokens=NEW, sampling=replace(WARM, seed=6), stop=("e", "t")),
        generation(third, max_tokens=1),
        generation(second, max_tokens=0),
        generation(third, max_tokens=NEW, sampling=penalised),
        generation(third, n=3, max_tokens=11, sampling=WARM),
        generation(fourth, max_tokens=NEW, sampling=told, prompt_logprobs=may_tell_prompts),
        generation(first, max_tokens=40, sampling=replace(WARM, seed=8), grammar=held),
        generation(first, max_tokens=NEW, sampling=replace(GREEDY, ignore_eos=True), timings=True),
    ]


def told_of(answers: list[list[Told]]) -> list[Any]:
    """What two engines must agree on; logprobs to five digits, as sums have another order in another company."""
    return [
        [
            (
                each.text,
                each.tokens,
                each.finish,
                each.stop,
                [(one.token, round(one.logprob or 0.0, 3)) for one in (*each.logprobs, *each.prompt_logprobs)],
            )
            for each in told
        ]
        for told in answers
    ]


async def all_told(engine: TransformersEngine, wanted: list[GenerationRequest]) -> list[list[Told]]:
    """Everybody, joining one after another, with some who leave beside them."""

    async def leave(prompt: tuple[int, ...], after: int) -> None:
        stream, count = engine.generate(generation(prompt, max_tokens=NEW)), 0
        async for delta in stream:
            count += len(delta.tokens)
            if count >= after:
                break
        await stream.aclose()

    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        asked = []
        for place, each in enumerate(wanted):
            asked.append(tasks.create_task(tell(engine, each)))
            if place % 3 == 0:
                tasks.create_task(leave(each.prompt, 2 + place))
            for _ in range(place % 4 * 10):
                await asyncio.sleep(0)  # passes of this loop, so that some join while others are under way
    return [each.result() for each in asked]


@pytest.mark.slow
async def test_ahead_or_not_everybody_is_told_the_same(snapshot: Path) -> None:
    model = reference(snapshot)
    wanted = requests(60, may_tell_prompts=True)
    if model.config.model_type != "llama":  # the others for what their caches are, and that costs less
        wanted = requests(20, may_tell_prompts=model.config.model_type != "t5")[::2]
    found = []
    for ahead in (False, True):
        engine = load(snapshot, ahead=ahead, ctx_size=CTX, parallel=5, prefill_chunk=16)
        async with serving(engine):
            found.append(told_of(await all_told(engine, wanted)))
            await say(engine, PROMPT, max_tokens=9, sampling=replace(GREEDY, ignore_eos=True))
            assert (work_of(engine).steps_ahead >= 8) == ahead
            work_of(engine)._scheduler.check_integrity()
    assert found[0] == found[1]
    expected = [generated(model, each.prompt, NEW) for each in wanted[:2]]
    assert [told[0][1] for told in found[1][:2]] == expected


@pytest.mark.slow
async def test_ahead_in_a_cache_too_small_for_all_everybody_is_told_the_same(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are put back again and again, for want of room and on demand, with a step ahead of them in the air."""
    # all come in before the first have ended, however busy the machine is
    monkeypatch.setattr(Pace, "budget", lambda self, decoding, chunk, *waiting: chunk)
    model = reference(llama)
    asked = [*prompts(), *((each * 3)[:50] for each in prompts())]
    engine = load(llama, ahead=True, ctx_size=CTX, parallel=6, prefill_chunk=16, kv_tokens=CTX, prefix_caching=False)
    async with serving(engine):
        told = await asyncio.gather(*(say(engine, each, max_tokens=NEW) for each in asked))
        work = work_of(engine)
        assert work.report().prefill_tokens > sum(map(len, asked)), "somebody was computed again"
        work._scheduler.check_integrity()
    assert [each.tokens for each in told] == [generated(model, each, NEW) for each in asked]


@pytest.mark.slow
async def test_ahead_prefixes_are_found_and_right(llama: Path) -> None:
    """A step that is thrown away writes into nobody's block that another one may read."""
    model = reference(llama)
    stem = tuple(5 + at * 7 % 400 for at in range(40))
    async with serving(load(llama, ahead=True, ctx_size=CTX, parallel=3, prefill_chunk=16)) as engine:
        first = await say(engine, stem, max_tokens=22)
        again = await say(engine, (*stem, *first.tokens[:20]), max_tokens=8)
        assert again.timings is not None
        assert again.timings.cached_tokens == 3 * BLOCK_TOKENS
        assert again.tokens == generated(model, (*stem, *first.tokens[:20]), 8)
        for _ in range(2):
            asked = [(*stem, *range(20, 20 + more)) for more in (0, 1, 5, 8, 20)]
            told = await asyncio.gather(*(say(engine, each, max_tokens=NEW - len(each) % 5) for each in asked))
            for prompt, each in zip(asked, told, strict=True):
                assert each.tokens == generated(model, prompt, NEW - len(prompt) % 5)


@pytest.mark.slow
async def test_ahead_steps_of_fixed_shape_say_what_generate_says(llama: Path) -> None:
    made: list[FixedRunner] = []

    def wrap(runner: Runner) -> Runner:
        assert isinstance(runner, PackedRunner)
        made.append(FixedRunner(runner, rows=5, ctx_size=CTX))
        return made[0]

    model = reference(llama)
    asked = [*prompts(), PROMPT]
    async with serving(load_with(llama, wrap, ahead=True, ctx_size=CTX, parallel=5, prefill_chunk=16)) as engine:
        told = await asyncio.gather(*(say(engine, each, max_tokens=NEW - len(each) % 7) for each in asked))
        assert work_of(engine).steps_ahead > 15
    assert [each.tokens for each in told] == [generated(model, each, NEW - len(each) % 7) for each in asked]
    assert made[0].fixed_steps > 20


# One step at a time, on the test's own thread


class Journal:
    """A runner that notes what is asked of it, and fails as told."""

    def __init__(self, runner: Runner, fault: Callable[[Batch, bool], Any] = lambda batch, ahead: None):
        self.runner, self.fault = runner, fault
        self.said: list[str] = []
        self.batches: list[Batch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def forget(self, row: int) -> None:
        self.said.append(f"forget {row}")
        self.runner.forget(row)

    def run(self, batch: Batch, fed: torch.Tensor | None = None) -> torch.Tensor:
        ids = ",".join(str(each.sequence.id) for each in sorted(batch, key=lambda each: each.sequence.id))
        self.said.append(f"{'ahead' if fed is not None else 'run'} {ids}")
        self.batches.append(batch)
        broken: Sequence[Segment] = self.fault(batch, fed is not None) or ()
        logits = self.runner.run(batch, fed)
        with torch.inference_mode():
            for place, segment in enumerate(batch):
                if segment in broken:
                    logits[place] = float("nan")
        return logits


@pytest.fixture(scope="module")
def loaded(llama: Path) -> tuple[Any, Any, torch.device, torch.dtype]:
    asked = options(llama)
    paged.register()
    config = loader.load_config(asked)
    made = loader.load_model(asked, config, paged.SDPA, lambda _: None)
    return made.model, config, made.device, made.dtype


@pytest.fixture
def runner(loaded: Any) -> Iterator[tuple[PackedRunner, Blocks]]:
    model, config, device, dtype = loaded
    blocks = Blocks(4, 4 * 4)
    yield PackedRunner(model, make_pool(config, blocks, dtype, device), blocks, device), blocks
    blocks.check_integrity()
    assert not blocks.owners


async def test_a_step_is_launched_before_the_one_in_front_has_told_its_tokens(
    runner: tuple[PackedRunner, Blocks],
) -> None:
    journal = Journal(runner[0])
    drive = Drive(journal, runner[1])
    drive.ask(0, most=4)
    drive.work.step()
    assert journal.said == ["run 0", "ahead 0"]
    assert len(await drive.told(0)) == 1
    drive.work.step()
    assert journal.said == ["run 0", "ahead 0", "ahead 0"]
    drive.to_the_end()
    assert journal.said == ["run 0", "ahead 0", "ahead 0", "ahead 0", "forget 0"], "nothing runs ahead of a known end"


async def test_prompts_are_let_in_one_step_later_at_most(runner: tuple[PackedRunner, Blocks]) -> None:
    journal = Journal(runner[0])
    drive = Drive(journal, runner[1])
    drive.ask(0, most=9)
    drive.work.step()
    drive.ask(1, most=9)
    drive.work.step()
    drive.work.step()
    assert journal.said == ["run 0", "ahead 0", "run 0,1", "ahead 0,1"]
    drive.to_the_end()


async def test_a_cancel_takes_effect_within_two_steps_and_gives_its_place_back(
    runner: tuple[PackedRunner, Blocks],
) -> None:
    journal = Journal(runner[0])
    drive = Drive(journal, runner[1])
    stream = drive.ask(0, most=20)
    drive.ask(1, most=20)
    drive.work.step()
    drive.work.cancel(stream)
    assert runner[1].owners.keys() == {0, 1}, "a step that is under way still writes there"
    del journal.said[:]
    drive.work.step()
    assert journal.said == ["ahead 1", "forget 0"]
    assert set(runner[1].owners.values()) == {1}
    drive.to_the_end()
    assert len(await drive.told(0)) == 1, "nothing after the cancel"


async def test_an_end_nobody_foresaw_is_the_end_and_its_company_goes_on(runner: tuple[PackedRunner, Blocks]) -> None:
    journal = Journal(runner[0])
    drive = Drive(journal, runner[1])
    drive.ask(0, most=20, stop=("xxx",))
    drive.ask(1, most=20)
    drive.to_the_end()
    alone = Drive(runner[0], runner[1], ahead=False)
    alone.ask(0, most=20, stop=("xxx",))
    alone.ask(1, most=20)
    alone.to_the_end()
    assert await drive.told(0) == (said := await alone.told(0))
    assert said[-1] == "stop"
    assert await drive.told(1) == await alone.told(1)
    assert journal.said.count("ahead 0,1") == 3, "the last of these was in vain for one of them"
    assert journal.said.index("forget 0") < len(journal.said) - 1


async def test_a_step_that_cannot_be_launched_ahead_is_computed_in_its_turn(
    runner: tuple[PackedRunner, Blocks],
) -> None:
    def fault(batch: Batch, ahead: bool) -> None:
        if ahead and batch[0].sequence.answered == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        if ahead and batch[0].sequence.answered == 4:
            raise ValueError("a model's own code")

    journal, plain = Journal(runner[0], fault), Drive(runner[0], runner[1], ahead=False)
    drive = Drive(journal, runner[1])
    for each in (drive, plain):
        each.ask(0, most=9)
        each.ask(1, PROMPT[1:], most=9)
        each.to_the_end()
    assert await drive.told(0) == await plain.told(0)
    assert await drive.told(1) == await plain.told(1)
    assert journal.said.count("run 0,1") == 1 + 2, "the prompts, and after each fault"


async def test_whoever_fails_in_every_step_ends_alone(runner: tuple[PackedRunner, Blocks]) -> None:
    def fault(batch: Batch, ahead: bool) -> None:
        if any(each.sequence.id == 1 and each.start >= 8 for each in batch):
            raise ValueError("a model's own code")

    drive, plain = Drive(Journal(runner[0], fault), runner[1]), Drive(runner[0], runner[1], ahead=False)
    for each in (drive, plain):
        each.ask(0, most=12)
        each.ask(1, most=12)
        each.to_the_end()
    assert (await drive.told(1))[-1] is SequenceFailed
    assert await drive.told(0) == await plain.told(0)


async def test_no_numbers_in_a_step_ahead_end_their_request_and_stay_nowhere(
    runner: tuple[PackedRunner, Blocks],
) -> None:
    """What the poisoned sequence wrote is erased, also by the step that was in the air when that was found."""
    pool = runner[0].pool

    def fault(batch: Batch, ahead: bool) -> list[Segment]:
        poisoned = [each for each in batch if each.sequence.id == 1 and each.start >= 8]
        for segment in poisoned:
            assert segment.table is not None
            for slot, count in segment.table.slots(0, segment.end):
                for store in pool.values:
                    store[slot : slot + count] = float("nan")
        return []

    journal = Journal(runner[0], fault)
    drive, plain = Drive(journal, runner[1]), Drive(runner[0], runner[1], ahead=False)
    for each in (plain, drive):
        each.ask(0, most=24)
        each.ask(1, most=24)
        each.to_the_end()
    assert (await drive.told(1))[-1] is SequenceFailed
    assert await drive.told(0) == await plain.told(0)
    assert all(bool(store.isfinite().all()) for store in (*pool.keys, *pool.values))


async def test_no_numbers_found_in_vain_stay_nowhere_either(runner: tuple[PackedRunner, Blocks]) -> None:
    """The sequence ends with a stop string while the step that loses its numbers is in the air."""
    pool = runner[0].pool

    def fault(batch: Batch, ahead: bool) -> list[Segment]:
        lost = [each for each in batch if ahead and each.sequence.id == 1 and each.sequence.answered == 2]
        for segment in lost:
            assert segment.table is not None
            ((slot, _),) = segment.table.slots(segment.start, segment.end)
            pool.values[0][slot + 1] = float("nan")  # of the same block: what lies at the slot itself is written yet
        return lost

    drive = Drive(Journal(runner[0], fault), runner[1])
    drive.ask(0, most=24)
    drive.ask(1, most=24, stop=("xxx",))
    drive.to_the_end()
    assert (await drive.told(1))[-1] == "stop"
    assert all(bool(store.isfinite().all()) for store in (*pool.keys, *pool.values))


async def test_for_whom_the_host_has_to_look_first_it_has_when_it_chooses_and_nobody_waits(
    runner: tuple[PackedRunner, Blocks],
) -> None:
    told = []
    for ahead, penalty in ((True, -50.0), (False, -50.0), (False, 0.0)):
        journal = Journal(runner[0])
        drive = Drive(journal, runner[1], ahead=ahead)
        stream = drive.ask(0, most=20, sampling=replace(GREEDY, presence_penalty=penalty))
        (choice,) = stream.choices
        choice.repeats = Repeats(choice.sequence, -1)
        drive.ask(1, most=12)
        drive.work.step()
        assert journal.said == ["run 0,1", "ahead 0,1"][: 1 + ahead]
        drive.to_the_end()
        told.append([await drive.told(0), await drive.told(1)])
    assert told[0] == told[1]
    assert len(set(told[1][0][:-1])) == 1 < len(set(told[2][0][:-1])), "what was said last is said again"


class Masking:
    """Grammars that allow everything, and can be made to fail."""

    def __init__(self, failing: int):
        self.asked = 0
        self._failing = failing

    def masks(self, matchers: Sequence[Any]) -> "Future[Any]":
        self.asked += 1
        found: Future[Any] = Future()
        if self.asked == self._failing:
            found.set_exception(RuntimeError("no masks this time"))
        else:
            found.set_result(np.full((len(matchers), 4096), 255, np.uint8))
        return found


class Anything:
    """Where a sequence stands in such a grammar."""

    is_over = False

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, token: int) -> None:
        self.taken.append(token)


async def test_a_step_ahead_whose_tokens_cannot_be_chosen_is_computed_in_its_turn(
    runner: tuple[PackedRunner, Blocks],
) -> None:
    told = []
    for failing in (0, 3):
        journal, grammars = Journal(runner[0]), Masking(failing)
        drive = Drive(journal, runner[1], grammars=grammars)
        stream = drive.ask(0, most=6)
        matcher: Any = Anything()
        stream.choices[0].matcher = matcher
        drive.ask(1, most=6)
        drive.to_the_end()
        told.append([await drive.told(0), await drive.told(1)])
        assert matcher.taken == told[-1][0][:-1], "each token once"
        assert journal.said.count("run 0,1") == (2 if failing else 1)
    assert told[0] == told[1]


# Waiting for a device


class Asking(TorchFunctionMode):
    """Counts what would make the host wait for a device: every way to get a number out of a tensor."""

    _NAMES = frozenset(
        {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "nonzero",
         "masked_select", "equal", "allclose", "unique", "__iter__", "__contains__"}
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self._NAMES:
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in main memory is searched there, which no device would be."""
    monkeypatch.setattr(topk, "_is_here", lambda scores: False)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.usefixtures("as_on_a_device")
async def test_a_step_asks_the_device_once(runner: tuple[PackedRunner, Blocks], ahead: bool) -> None:
    """Prompts in parts, logprobs of prompts and of answers, sampling of every kind, ends: once a step at most."""
    drive = Drive(runner[0], runner[1], ahead=ahead)
    drive.ask(0, most=12, sampling=replace(GREEDY, logprobs=2))
    drive.ask(1, most=9, sampling=replace(WARM, top_p=0.9, top_k=20))
    for step in range(40):
        if step == 4:
            drive.ask(2, tuple(range(5, 45)), most=8, sampling=replace(WARM, logprobs=1), prompt_logprobs=True)
            drive.ask(3, most=8, sampling=replace(WARM, logit_bias={7: 3.0}, min_p=0.05, min_tokens=4))
        if not drive.work.has_work:
            break
        with Asking() as mode:
            drive.work.step()
        assert len(mode.asked) <= 1, mode.asked
    assert not drive.work.has_work
    assert (drive.work.steps_ahead > 5) == ahead


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_device")
async def test_a_step_of_an_aligned_cache_asks_the_device_once(tmp_path: Path) -> None:
    """Where transformers' code does not: with torch's attention it looks itself whether a mask hides anything."""
    asked = options(tiny.make("gpt_oss", tmp_path), parallel=2)
    config = loader.load_config(asked)
    made = loader.load_model(asked, config, implementation("auto", config), lambda _: None)
    drive = Drive(*make_runner(made.model, config, asked, 64, made.device, caches=False))
    drive.ask(0, most=9)
    drive.ask(1, PROMPT[2:], most=7)
    while drive.work.has_work:
        with Asking() as mode:
            drive.work.step()
        assert len(mode.asked) <= 1, mode.asked
    assert drive.work.steps_ahead > 5


@pytest.mark.slow
def test_a_launch_waits_for_no_device_at_all(tmp_path: Path) -> None:
    """On torch's device without contents, where every look at a number is an error."""
    device = torch.device("meta")
    asked = options(tiny.make("llama", tmp_path), parallel=4)
    paged.register()
    config = loader.load_config(asked)
    model: Any = loader.load_model(asked, config, implementation("auto", config), lambda _: None).model.to(device)
    made, capacity = make_runner(model, config, asked, 64, device, caches=False)
    parts = []
    for id in range(3):
        sampling = (GREEDY, replace(WARM, top_p=0.9, logprobs=2), replace(WARM, min_p=0.1, logit_bias={5: 1.0}))[id]
        sequence = TokenSequence.of(generation(PROMPT, sampling=sampling), id=id, limit=9, ends={1}, seed=id)
        row, _ = capacity.admit(sequence)
        choice = Choice(0, sequence, None, None)  # type: ignore[arg-type]  # nobody reads
        parts.append(Part(Segment(sequence, row, 0, len(PROMPT), capacity.table(row)), [choice]))
    for fixed in (None, FixedRunner(made, rows=4, ctx_size=64) if isinstance(made, PackedRunner) else None):
        flown = launch(made, None, parts)
        after = []
        for part in parts:
            segment = part.segment
            assert capacity.grow(segment.row, segment.end, segment.end + 1)
            table = capacity.table(segment.row)
            after.append(Segment(segment.sequence, segment.row, segment.end, 1, table, ahead=True))
        fed = flown.fed((after[2], after[0]))
        assert (fed.shape, fed.device, fed.dtype) == ((2,), device, torch.int64)
        chosen = [Part(after[2], parts[2].choosers), Part(after[0], parts[0].choosers)]
        launch(fixed or made, None, chosen, fed)
    masks = Masks([0, 2], torch.zeros(2, 64, dtype=torch.uint8).numpy())
    draw(torch.zeros(3, 500, device=device), [Pick(WARM, uniform=0.5)] * 3, masks, Readout())


# What is pure


def test_a_token_is_drawn_with_the_number_of_its_place_however_early(loaded: Any) -> None:
    sequence = TokenSequence.of(generation(PROMPT, sampling=WARM), id=0, limit=9, ends={1}, seed=4)
    choice = Choice(0, sequence, None, None)  # type: ignore[arg-type]  # nobody reads
    sequence.append(50)

    class Even:
        vocab_size, bytes = 1000, 0

        def run(self, batch: Batch, fed: torch.Tensor | None = None) -> torch.Tensor:
            return torch.zeros(1, 1000)

        def fork(self, source: int, target: int) -> None: ...

        def forget(self, row: int) -> None: ...

    for ahead in (False, True):
        segment = Segment(sequence, 0, len(sequence.tokens) - 1 + ahead, 1, ahead=ahead)
        (found,) = launch(Even(), None, [Part(segment, [choice])], torch.tensor([7]) if ahead else None).land()
        assert found.sampled is not None
        assert found.sampled.token == int(uniform(4, 1 + ahead) * 1000)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 4),
    blocks=st.integers(0, 12),
    chunk=st.integers(1, 40),
    script=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(1, 30), st.integers(0, 6), st.booleans()),
        min_size=1,
        max_size=9,
    ),
)
def test_what_is_computed_ahead_is_what_would_be_computed_in_its_turn(
    rows: int, blocks: int, chunk: int, script: list[tuple[int, int, int, int, bool]]
) -> None:
    """Sequences come, end unforeseen, are cancelled; a step ahead writes into places of its own sequences only, and of
    each sequence every token is computed behind all tokens before it."""
    capacity: Capacity = Blocks(rows, max(blocks, 4)) if blocks else Rows(rows, 64)
    scheduler = Scheduler(capacity, chunk)
    work = Pretending(scheduler, capacity)
    pending = list(enumerate(script))
    for _ in range(3000):
        if pending and not pending[0][1][3]:
            id, (prompt, limit, end, _, is_cancelled) = pending.pop(0)
            work.add(id, prompt, limit, end, is_cancelled=is_cancelled)
        elif pending:
            id, (prompt, limit, end, wait, is_cancelled) = pending[0]
            pending[0] = id, (prompt, limit, end, wait - 1, is_cancelled)
        if not scheduler.has_work and not pending:
            break
        work.step()
        scheduler.check_integrity()
    assert not scheduler.has_work
    assert work.ended == {id: min(limit, end) for id, (_, limit, end, _, gone) in enumerate(script) if not gone}


class Pretending:
    """What `Generating` does with a scheduler, on a cache that holds the position of each token, and on no model."""

    def __init__(self, scheduler: Scheduler, capacity: Capacity):
        self.scheduler, self.capacity = scheduler, capacity
        self.flight: Batch = ()
        self.leaving: list[TokenSequence] = []
        self.held: dict[int, tuple[int, int]] = {}
        """By slot: of which sequence, and at which position, or of which row where there are no blocks."""
        self.ends: dict[int, tuple[int, bool]] = {}
        self.ended: dict[int, int] = {}
        self.alive: dict[int, TokenSequence] = {}

    def add(self, id: int, prompt: int, limit: int, end: int, *, is_cancelled: bool) -> None:
        prompt, limit = min(prompt, 40), min(limit, 24)  # all of it fits into the smallest pool
        sequence = TokenSequence(
            id=id, prompt_tokens=prompt, tokens=[1000 * (id + 1)] * prompt, limit=limit, ends=frozenset()
        )
        self.ends[id] = end, is_cancelled
        self.alive[id] = sequence
        self.scheduler.add(sequence)

    def step(self) -> None:
        flight = self.flight or self.launch(self.scheduler.next(99))
        going = {
            each.sequence.id
            for each in flight
            if each.sequence.id in self.alive and each.sequence.answered + 1 < each.sequence.limit
        }
        self.flight = self.launch(self.scheduler.ahead(flight, going))
        for segment in flight:
            self.land(segment)
        flown = {each.sequence.id for each in self.flight}
        for sequence in [each for each in self.leaving if each.id not in flown]:
            self.leaving.remove(sequence)
            self.scheduler.remove(sequence)
        self.scheduler.take_void()

    def launch(self, batch: Batch) -> Batch:
        for segment in batch:
            sequence = segment.sequence
            if segment.table is None:
                continue
            for position in range(segment.end):
                ((slot, _),) = segment.table.slots(position, position + 1)
                if position >= segment.start:
                    self.held[slot] = sequence.id, position
                else:
                    id, at = self.held[slot]
                    assert at == position, "another token lies there"
                    assert id == sequence.id or position < sequence.cached, "somebody else's token"
            assert segment.ahead == (segment.start == len(sequence.tokens))
        return batch

    def land(self, segment: Segment) -> None:
        sequence = segment.sequence
        if sequence.id not in self.alive:
            return
        end, is_cancelled = self.ends[sequence.id]
        sequence.computed = segment.end
        if segment.completes:
            is_over = sequence.append(1000 * (sequence.id + 1) + sequence.answered) is not None
            if is_over or sequence.answered >= end:
                if not is_cancelled:
                    self.ended[sequence.id] = sequence.answered
                self.leave(sequence)
        elif is_cancelled and sequence.computed > end:
            self.leave(sequence)

    def leave(self, sequence: TokenSequence) -> None:
        del self.alive[sequence.id]
        if any(each.sequence is sequence for each in self.flight):
            self.leaving.append(sequence)
        else:
            self.scheduler.remove(sequence)

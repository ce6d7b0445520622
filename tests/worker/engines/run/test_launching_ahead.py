"""Launching ahead: a step is launched before the one in front has finished, without any effect on the text.

On the CPU a launch computes at once. These tests check the order of operations, the values, and that the host reads
from the device once a step.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import tiny
from tests.worker.every_kind import NEW, WARM, comparable, requests
from tests.worker.loaded import (
    DEADLINE,
    GREEDY,
    CollectedChoice,
    collect_choices,
    complete_one,
    complete_until,
    generated,
    generation,
    load,
    options,
    reference,
    serving,
    work_of,
)
from tests.worker.scheduled import check_rows, check_scheduler
from tests.worker.stepped import PROMPT, Drive, JournalRunner
from worker.engines.transformers.attention import paged
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.load import loader
from worker.engines.transformers.load.snapshot import load_config
from worker.engines.transformers.loop.requests import RequestChoice
from worker.engines.transformers.run.backends import implementation, make_pool, make_runner
from worker.engines.transformers.run.cuda_graphs import GraphRunner
from worker.engines.transformers.run.in_flight_step import PendingMasks, SegmentChoosers, launch
from worker.engines.transformers.run.runner import PagedRunner
from worker.engines.transformers.sample.device_to_host import DeviceToHost
from worker.engines.transformers.sample.sampler import RowSampling, TokenMasks, draw
from worker.engines.transformers.sample.work_thread import Job
from worker.engines.transformers.schedule.kv_cache import BlockAllocator, RowAllocator
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.engines.transformers.schedule.sequence import PenaltyCounts, RepeatedNgrams
from worker.engines.transformers.schedule.sequence import Sequence as TokenSequence
from worker.errors import SequenceFailed
from worker.interface import GenerationRequest

CTX = 128
# One for each runner and kind of cache: paged, with windows; aligned with windows, with states, with an encoder.
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "mamba", "t5")


@pytest.fixture(scope="module", params=FAMILIES)
def snapshot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"seed": 2} if request.param == "t5" else {}
    return tiny.make(request.param, tmp_path_factory.mktemp("snapshot"), **changes)


async def answer_all(engine: TransformersEngine, wanted: list[GenerationRequest]) -> list[list[CollectedChoice]]:
    """All requests, joining one after another, while others are cancelled."""
    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        asked = []
        for place, each in enumerate(wanted):
            asked.append(tasks.create_task(collect_choices(engine, each)))
            if place % 3 == 0:
                tasks.create_task(complete_until(engine, generation(each.prompt, max_tokens=NEW), 2 + place))
            for _ in range(place % 4 * 10):
                await asyncio.sleep(0)  # some requests join while others are running
    return [each.result() for each in asked]


@pytest.mark.slow
async def test_answers_are_the_same_with_and_without_launching_ahead(snapshot: Path) -> None:
    model = reference(snapshot)
    wanted = requests()
    if model.config.model_type != "llama":  # the others matter for their caches only, which costs less
        wanted = requests(20, prompt_logprobs=model.config.model_type != "t5")[::2]
    found = []
    for ahead in (False, True):
        engine = load(snapshot, ahead=ahead, ctx_size=CTX, parallel=5, prefill_chunk=16)
        async with serving(engine):
            found.append(comparable(await answer_all(engine, wanted)))
            await complete_one(engine, PROMPT, max_tokens=9, sampling=replace(GREEDY, ignore_eos=True))
            assert (work_of(engine).steps_ahead >= 8) == ahead
            check_scheduler(work_of(engine)._scheduler)
    assert found[0] == found[1]
    expected = [generated(model, each.prompt, NEW) for each in wanted[:2]]
    assert [collected[0][1] for collected in found[1][:2]] == expected


# One step at a time, on the test's thread

Paged = tuple[PagedRunner, BlockAllocator]


@pytest.fixture(scope="module")
def loaded(llama: Path) -> tuple[Any, Any, torch.device, torch.dtype]:
    asked = options(llama)
    paged.register()
    config = load_config(asked)
    made = loader.load_model(asked, config, paged.SDPA, lambda _: None)
    return made.model, config, made.device, made.dtype


@pytest.fixture
def runner(loaded: Any) -> Iterator[Paged]:
    model, config, device, dtype = loaded
    blocks = BlockAllocator(4, 4 * 4)
    yield PagedRunner(model, make_pool(config, blocks, dtype, device), blocks, device), blocks
    check_rows(blocks)
    assert not blocks.owners


async def test_a_step_is_launched_before_the_results_of_the_last_one_are_read(runner: Paged) -> None:
    journal = JournalRunner(runner[0])
    drive = Drive(journal, runner[1])
    drive.ask(0, most=4)
    drive.work.step()
    assert journal.calls == ["run 0", "ahead 0"]
    assert len(await drive.collected(0)) == 1
    drive.work.step()
    assert journal.calls == ["run 0", "ahead 0", "ahead 0"]
    drive.to_the_end()
    assert journal.calls == ["run 0", "ahead 0", "ahead 0", "ahead 0", "forget 0"], "nothing runs ahead of a known end"


async def test_prompts_are_let_in_one_step_later_at_most(runner: Paged) -> None:
    journal = JournalRunner(runner[0])
    drive = Drive(journal, runner[1])
    drive.ask(0, most=9)
    drive.work.step()
    drive.ask(1, most=9)
    drive.work.step()
    drive.work.step()
    assert journal.calls == ["run 0", "ahead 0", "run 0,1", "ahead 0,1"]
    drive.to_the_end()


async def test_a_cancel_takes_effect_within_two_steps_and_gives_its_place_back(runner: Paged) -> None:
    journal = JournalRunner(runner[0])
    drive = Drive(journal, runner[1])
    stream = drive.ask(0, most=20)
    drive.ask(1, most=20)
    drive.work.step()
    drive.work.cancel(stream)
    assert runner[1].owners.keys() == {0, 1}, "a step that is under way still writes there"
    del journal.calls[:]
    drive.work.step()
    assert journal.calls == ["ahead 1", "forget 0"]
    assert set(runner[1].owners.values()) == {1}
    drive.to_the_end()
    assert len(await drive.collected(0)) == 1, "nothing after the cancel"


async def test_an_unforeseen_end_is_the_end_and_other_sequences_go_on(runner: Paged) -> None:
    journal = JournalRunner(runner[0])
    drive = Drive(journal, runner[1])
    drive.ask(0, most=20, stop=("xxx",))
    drive.ask(1, most=20)
    drive.to_the_end()
    alone = Drive(runner[0], runner[1], ahead=False)
    alone.ask(0, most=20, stop=("xxx",))
    alone.ask(1, most=20)
    alone.to_the_end()
    assert await drive.collected(0) == (said := await alone.collected(0))
    assert said[-1] == "stop"
    assert await drive.collected(1) == await alone.collected(1)
    assert journal.calls.count("ahead 0,1") == 3, "the result of the last of these is dropped for one sequence"
    assert journal.calls.index("forget 0") < len(journal.calls) - 1


async def test_a_step_that_cannot_be_launched_ahead_is_computed_in_its_turn(runner: Paged) -> None:
    def fault(batch: Batch, ahead: bool) -> None:
        if ahead and batch[0].sequence.output_tokens == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        if ahead and batch[0].sequence.output_tokens == 4:
            raise ValueError("a model's own code")

    journal, plain = JournalRunner(runner[0], fault), Drive(runner[0], runner[1], ahead=False)
    drive = Drive(journal, runner[1])
    for each in (drive, plain):
        each.ask(0, most=9)
        each.ask(1, PROMPT[1:], most=9)
        each.to_the_end()
    assert await drive.collected(0) == await plain.collected(0)
    assert await drive.collected(1) == await plain.collected(1)
    assert journal.calls.count("run 0,1") == 1 + 2, "the prompts, and after each fault"


async def test_a_sequence_that_its_step_had_no_memory_for_is_not_launched_ahead(runner: Paged) -> None:
    def fault(batch: Batch, ahead: bool) -> None:
        if len(batch) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    journal, plain = JournalRunner(runner[0], fault), Drive(runner[0], runner[1], ahead=False)
    drive = Drive(journal, runner[1])
    for each in (drive, plain):
        each.ask(0, most=4)
        each.ask(1, PROMPT[1:], most=4)
        each.to_the_end()
    assert journal.calls[:4] == ["run 0,1", "forget 1", "run 0", "ahead 0"]
    for id in (0, 1):
        assert await drive.collected(id) == await plain.collected(id)


@pytest.mark.parametrize("ahead", [True, False])
async def test_nan_in_the_cache_ends_its_request_and_is_erased(runner: Paged, ahead: bool) -> None:
    """Later readers would get NaN through any mask. A step in flight may write more when the first is found."""
    pool = runner[0].pool

    def fault(batch: Batch, ahead: bool) -> list[Segment]:
        poisoned = [each for each in batch if each.sequence.id == 1 and each.start >= 8]
        for segment in poisoned:
            assert segment.table is not None
            for position, count in segment.table.spans(0, segment.end):
                for store in pool.values:
                    store[position : position + count] = float("nan")
        return []

    drive = Drive(JournalRunner(runner[0], fault), runner[1], ahead=ahead)
    plain = Drive(runner[0], runner[1], ahead=False)
    for each in (plain, drive):
        each.ask(0, most=24)
        each.ask(1, most=24)
        each.to_the_end()
    assert (await drive.collected(1))[-1] is SequenceFailed
    assert await drive.collected(0) == await plain.collected(0)
    assert all(bool(store.isfinite().all()) for store in (*pool.keys, *pool.values))


async def test_nan_of_a_dropped_result_is_erased_too(runner: Paged) -> None:
    """The sequence ends with a stop string while the step that loses its logits is in flight."""
    pool = runner[0].pool

    def fault(batch: Batch, ahead: bool) -> list[Segment]:
        lost = [each for each in batch if ahead and each.sequence.id == 1 and each.sequence.output_tokens == 2]
        for segment in lost:
            assert segment.table is not None
            ((position, _),) = segment.table.spans(segment.start, segment.end)
            pool.values[0][position + 1] = float("nan")  # in the same block, at a position that is not written yet
        return lost

    drive = Drive(JournalRunner(runner[0], fault), runner[1])
    drive.ask(0, most=24)
    drive.ask(1, most=24, stop=("xxx",))
    drive.to_the_end()
    assert (await drive.collected(1))[-1] == "stop"
    assert all(bool(store.isfinite().all()) for store in (*pool.keys, *pool.values))


async def test_tokens_that_need_the_host_are_chosen_after_it_has_them_without_a_wait(runner: Paged) -> None:
    collected = []
    for ahead, penalty in ((True, -50.0), (False, -50.0), (False, 0.0)):
        journal = JournalRunner(runner[0])
        drive = Drive(journal, runner[1], ahead=ahead)
        stream = drive.ask(0, most=20, sampling=replace(GREEDY, presence_penalty=penalty))
        (choice,) = stream.choices
        choice.penalty_counts = PenaltyCounts(choice.sequence, -1)
        drive.ask(1, most=12)
        drive.work.step()
        assert journal.calls == ["run 0,1", "ahead 0,1"][: 1 + ahead]
        drive.to_the_end()
        collected.append([await drive.collected(0), await drive.collected(1)])
    assert collected[0] == collected[1]
    assert len(set(collected[1][0][:-1])) == 1 < len(set(collected[2][0][:-1])), "what was said last is said again"


async def test_the_newest_token_counts_for_ngrams_in_a_step_launched_ahead(runner: Paged) -> None:
    collected = []
    for ahead in (True, False):
        drive = Drive(JournalRunner(runner[0]), runner[1], ahead=ahead)
        # biased, so that a token would be said again at once
        how = replace(GREEDY, no_repeat_ngram_size=1, logit_bias={7: 100.0, 8: 90.0})
        stream = drive.ask(0, most=20, sampling=how)
        (choice,) = stream.choices
        choice.ngrams = RepeatedNgrams(choice.sequence, 1)
        drive.to_the_end()
        collected.append(await drive.collected(0))
    assert collected[0] == collected[1]
    said = collected[0][:-1]
    assert said[:2] == [7, 8]
    assert len(set(said)) == len(said)


class FakeGrammars:
    """Grammars that allow everything, and fail on request."""

    def __init__(self, failing: int):
        self.asked = 0
        self._failing = failing

    def mask(self, matcher: Any) -> Job[Any]:
        self.asked += 1
        if self.asked == self._failing:
            raise RuntimeError("no mask this time")
        job = Job(lambda: np.full(4096, 255, np.uint8))
        job.run()
        return job

    def is_late(self, matcher: Any) -> bool:
        return False


class FakeMatcher:
    """The matcher of such a grammar."""

    is_over = has_slow_grammar = False

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, token: int) -> bool:
        self.taken.append(token)
        return True

    def after_each(self, tokens: Sequence[int]) -> Sequence[Any]:
        return ()


async def test_a_step_ahead_is_computed_again_if_its_tokens_cannot_be_chosen(runner: Paged) -> None:
    collected = []
    for failing in (0, 3):
        journal, grammars = JournalRunner(runner[0]), FakeGrammars(failing)
        drive = Drive(journal, runner[1], grammars=grammars)
        stream = drive.ask(0, most=6)
        matcher: Any = FakeMatcher()
        stream.choices[0].matcher = matcher
        drive.ask(1, most=6)
        drive.to_the_end()
        collected.append([await drive.collected(0), await drive.collected(1)])
        assert matcher.taken == collected[-1][0][:-1], "each token once"
        assert journal.calls.count("run 0,1") == (2 if failing else 1)
    assert collected[0] == collected[1]


class HeldGrammars(FakeGrammars):
    """Grammars of one request whose next mask is late from `hold` to `release`."""

    def __init__(self) -> None:
        super().__init__(0)
        self.holds, self.late = False, list[Job[Any]]()

    def mask(self, matcher: Any) -> Job[Any]:
        if not self.holds:
            return super().mask(matcher)
        if not self.late:
            self.late.append(Job(lambda: np.full(4096, 255, np.uint8)))
        return self.late[0]

    def is_late(self, matcher: Any) -> bool:
        return bool(self.late) and not self.late[0].future.done()

    def release(self) -> None:
        self.late[0].run()
        self.holds = False


@pytest.mark.parametrize(
    ("ahead", "before", "meanwhile", "after"),
    [
        (False, ["run 0,1", "run 0,1"], ["run 1", "run 1"], ["run 0,1"]),
        # The first of two calls after the release finishes the step that was launched before.
        (True, ["run 0,1", "ahead 0,1", "ahead 0,1"], ["ahead 1", "ahead 1"], ["run 0,1", "ahead 0,1"]),
    ],
)
async def test_a_sequence_sits_out_while_its_mask_is_late(
    runner: Paged, ahead: bool, before: list[str], meanwhile: list[str], after: list[str]
) -> None:
    plain = Drive(runner[0], runner[1], ahead=False)
    journal, grammars = JournalRunner(runner[0]), HeldGrammars()
    drive = Drive(journal, runner[1], ahead=ahead, grammars=grammars)
    for each in (plain, drive):
        stream = each.ask(0, most=9)
        each.ask(1, most=12)
        if each is plain:
            plain.to_the_end()
    stream.choices[0].matcher = FakeMatcher()  # type: ignore[assignment]
    drive.work.step()
    grammars.holds = True
    drive.work.step()
    assert journal.calls == before
    drive.work.step()
    drive.work.step()
    assert journal.calls[len(before) :] == meanwhile
    grammars.release()
    for _ in range(1 + ahead):
        drive.work.step()
    assert journal.calls[len(before) + len(meanwhile) :] == after
    drive.to_the_end()
    for id in (0, 1):
        assert await drive.collected(id) == await plain.collected(id)


@pytest.mark.parametrize("ahead", [True, False])
async def test_nan_of_a_sequence_that_ends_while_its_mask_is_late_is_erased(runner: Paged, ahead: bool) -> None:
    pool, grammars = runner[0].pool, HeldGrammars()

    def fault(batch: Batch, ahead: bool) -> None:
        for segment in batch:
            if segment.sequence.id == 0 and grammars.holds:
                assert segment.table is not None
                ((position, _),) = segment.table.spans(segment.start, segment.end)
                pool.values[0][position + 1] = float("nan")  # in the same block, at a position that is not written yet

    drive = Drive(JournalRunner(runner[0], fault), runner[1], ahead=ahead, grammars=grammars)
    stream = drive.ask(0, most=24)
    drive.ask(1, most=24)
    stream.choices[0].matcher = FakeMatcher()  # type: ignore[assignment]
    drive.work.step()
    grammars.holds = True
    for _ in range(1 + ahead):
        drive.work.step()
    assert grammars.late
    drive.work.cancel(stream)
    drive.to_the_end()
    assert all(bool(store.isfinite().all()) for store in (*pool.keys, *pool.values))


# Waiting for a device


@pytest.mark.slow
def test_a_launch_waits_for_no_device_at_all(tmp_path: Path) -> None:
    """On torch's meta device, where reading a value is an error."""
    device = torch.device("meta")
    asked = options(tiny.make("llama", tmp_path), parallel=4)
    paged.register()
    config = load_config(asked)
    model: Any = loader.load_model(asked, config, implementation(asked, config), lambda _: None).model.to(device)
    made, capacity = make_runner(model, config, asked, 64, device, caches=False)
    parts = []
    for id in range(3):
        sampling = (GREEDY, replace(WARM, top_p=0.9, logprobs=2), replace(WARM, min_p=0.1, logit_bias={5: 1.0}))[id]
        sequence = TokenSequence.of(generation(PROMPT, sampling=sampling), id=id, limit=9, ends={1}, seed=id)
        row, _ = capacity.admit(sequence)
        choice = RequestChoice(0, sequence, None, None)  # type: ignore[arg-type]  # not read here
        parts.append(SegmentChoosers(Segment(sequence, row, 0, len(PROMPT), capacity.table(row)), [choice]))
    for fixed in (None, GraphRunner(made, rows=4, ctx_size=64) if isinstance(made, PagedRunner) else None):
        flown = launch(made, None, parts)
        after = []
        for part in parts:
            segment = part.segment
            assert capacity.grow(segment.row, segment.end, segment.end + 1)
            table = capacity.table(segment.row)
            after.append(Segment(segment.sequence, segment.row, segment.end, 1, table, ahead=True))
        device_tokens = flown.device_tokens((after[2], after[0]))
        assert (device_tokens.shape, device_tokens.device, device_tokens.dtype) == ((2,), device, torch.int64)
        chosen = [SegmentChoosers(after[2], parts[2].choosers), SegmentChoosers(after[0], parts[0].choosers)]
        launch(fixed or made, None, chosen, device_tokens)
    masks = TokenMasks([0, 2], torch.zeros(2, 64, dtype=torch.uint8).numpy())
    draw(torch.zeros(3, 500, device=device), [RowSampling(WARM, uniform=0.5)] * 3, masks, DeviceToHost())


# Pure parts


class PositionRunner:
    """A runner without a model. Its cache stores which token of which sequence lies at each place. `faults` lists the
    segments that read another one: the loop would catch an exception. Output token number `end` of a sequence is the
    stop token, all others are 7."""

    vocab_size = 10

    def __init__(self, ends: dict[int, int]):
        self.ends = ends  # by sequence id
        self.faults: list[tuple[Segment, int]] = []
        self._written: dict[object, tuple[TokenSequence | None, int]] = {}  # by place in the cache

    def run(self, batch: Batch, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        logits = torch.zeros(sum(segment.logits for segment in batch), self.vocab_size)
        rows = iter(logits)
        for segment in batch:
            sequence = segment.sequence
            if segment.ahead != (segment.start == len(sequence.tokens)):
                self.faults.append((segment, -1))
            for position in range(segment.end):
                place = self._place(segment, position)
                if position >= segment.start:
                    self._written[place] = sequence, position
                else:
                    owner, at = self._written.get(place, (None, -1))
                    if at != position or not (owner is sequence or _may_share(sequence, owner, position)):
                        self.faults.append((segment, position))
            if segment.logits:
                number = segment.end - sequence.prompt_tokens + 1
                next(rows)[1 if number == self.ends[sequence.id] else 7] = 1.0
        return logits

    def _place(self, segment: Segment, position: int) -> object:
        if segment.table is None:
            return segment.row, position
        ((place, _),) = segment.table.spans(position, position + 1)
        return place

    def fork(self, source: int, target: int) -> None: ...

    def forget(self, row: int) -> None: ...


def _may_share(sequence: TokenSequence, owner: TokenSequence | None, position: int) -> bool:
    """True for a cached prefix. After a preemption it may be longer than `cached`: another sequence may have computed
    the same tokens, output included."""
    same = owner is not None and owner.tokens[: position + 1] == sequence.tokens[: position + 1]
    return same and (sequence.preempted or position < sequence.cached)


@pytest.mark.slow
@example(rows=2, blocks=5, script=[*[(1, 1, 1, 0, None)] * 6, (9, 1, 1, 0, None), *[(40, 10, 10, 0, None)] * 2])
@settings(max_examples=100)
@given(
    rows=st.integers(1, 4),
    blocks=st.integers(0, 12),
    script=st.lists(
        st.tuples(
            st.integers(1, 40), st.integers(1, 24), st.integers(1, 30), st.integers(0, 6), st.none() | st.integers(0, 9)
        ),
        min_size=1,
        max_size=9,
    ),
)
async def test_steps_ahead_read_and_write_only_the_places_of_their_sequences(
    rows: int, blocks: int, script: list[tuple[int, int, int, int, int | None]]
) -> None:
    """Sequences (prompt, limit, end) arrive after some steps, and some are cancelled a few steps later."""
    capacity: RowAllocator = BlockAllocator(rows, max(blocks, 4)) if blocks else RowAllocator(rows, 64)
    runner = PositionRunner({id: end for id, (_, _, end, _, _) in enumerate(script)})
    drive = Drive(runner, capacity)
    cancels: dict[int, list[int]] = {}  # by step
    now = 0
    for id, (prompt, limit, _, wait, cancelled_after) in enumerate(script):
        for _ in range(wait):
            drive.step(cancels.pop(now, ()))
            now += 1
        drive.ask(id, [5] * prompt, most=limit)
        if cancelled_after is not None:
            cancels.setdefault(now + cancelled_after, []).append(id)
    while drive.work.has_work or cancels:
        drive.step(cancels.pop(now, ()))
        now += 1
    check_scheduler(drive.work._scheduler)
    assert not capacity.owners
    assert not runner.faults
    for id, (_, limit, end, _, cancelled_after) in enumerate(script):
        found = await drive.collected(id)
        if cancelled_after is None:
            assert found == [*[7] * (end - 1), "stop"] if end <= limit else found == [*[7] * limit, "length"]


@pytest.mark.parametrize("arrives", [2, 100])
def test_a_step_waits_for_a_late_mask_while_the_device_computes(arrives: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mask: Job[Any] = Job(lambda: np.zeros(4, np.uint8))
    looks: list[int] = []

    class Event:
        """Work that ends before the fifth look at it."""

        def record(self, stream: object) -> None:
            looks.clear()

        def query(self) -> bool:
            looks.append(len(looks))
            if len(looks) == arrives:
                mask.run()
            return len(looks) == 5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    matcher = SimpleNamespace(after_each=lambda drafted: ())
    chooser: Any = SimpleNamespace(sequence=SimpleNamespace(id=7), matcher=matcher)
    grammars: Any = SimpleNamespace(mask=lambda matcher: mask)
    pending = PendingMasks(grammars, [(chooser, ())])
    pending.wait(torch.device("cuda", 0), [chooser], is_alone=False)
    assert len(looks) == min(arrives, 5)
    assert pending.is_late(chooser) is (arrives > 5)

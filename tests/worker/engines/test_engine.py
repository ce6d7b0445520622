"""The engine on a tiny Llama: results of single requests, and their independence of other requests.

Known faults of transformers' continuous batching are among the cases.
"""

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import tiny
from tests.worker.loaded import (
    DEADLINE,
    GREEDY,
    CollectedChoice,
    collect_choices,
    complete_one,
    generated,
    generation,
    load,
    options,
    reference,
    serving,
)
from tests.worker.stepped import journaled
from worker.engines.transformers.device.cores import StepThreads
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.errors import (
    ContextExceeded,
    Draining,
    InvalidValue,
    QueueFull,
    RequestError,
    SequenceFailed,
    UnsupportedByModel,
)
from worker.interface import Delta, EncoderInput, Grammar, PrefillProgress, SamplingParams
from worker.protocol.events import Exit, Progress, Pulse

CTX, EOS = 128, 1
PROMPT = (9, 41, 70, 77, 80)
WARM = SamplingParams(temperature=1.3, seed=11)


@pytest.fixture(scope="module")
def model(llama: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(llama)


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[TransformersEngine]:
    engine = load(llama, ctx_size=CTX, parallel=4, prefill_chunk=16)
    yield engine
    asyncio.run(engine.close())


async def first(stream: Any) -> Delta:
    """The next delta with a token."""
    async with asyncio.timeout(DEADLINE):
        while True:
            delta: Delta = await anext(stream)
            if delta.tokens:
                return delta


async def rest(stream: Any, collected: CollectedChoice) -> CollectedChoice:
    async with asyncio.timeout(DEADLINE):
        async for delta in stream:
            collected.add(delta)
    return collected


# Rejected requests do not affect others


@pytest.mark.parametrize(
    ("prompt", "changes", "error"),
    [
        ((5, 512), {}, InvalidValue),
        ((5, -1), {}, InvalidValue),
        ((5,) * CTX, {}, ContextExceeded),
        ((5,) * 4 * CTX, {}, ContextExceeded),
        (PROMPT, {"sampling": SamplingParams(logit_bias={512: 1.0})}, InvalidValue),
    ],
)
async def test_an_invalid_request_is_rejected_and_no_other_ends(
    engine: TransformersEngine, model: Any, prompt: Sequence[int], changes: dict[str, Any], error: type[RequestError]
) -> None:
    stream = engine.generate(generation(PROMPT, max_tokens=12))
    collected = CollectedChoice()
    collected.add(await first(stream))
    with pytest.raises(error) as rejected:
        await collect_choices(engine, generation(prompt, **changes))
    if error is ContextExceeded:
        assert rejected.value.extra == {"n_prompt_tokens": len(prompt), "n_ctx": CTX}
    assert (await rest(stream, collected)).tokens == generated(model, PROMPT, 12)


async def test_max_tokens_beyond_the_context_ends_with_length_at_its_last_token(engine: TransformersEngine) -> None:
    never_end = replace(GREEDY, ignore_eos=True)
    collected = await complete_one(engine, PROMPT, max_tokens=10_000, sampling=never_end)
    assert (collected.finish, len(collected.tokens)) == ("length", CTX - len(PROMPT))
    longest = await complete_one(engine, (5,) * (CTX - 1), max_tokens=10_000, sampling=never_end)
    assert (longest.finish, len(longest.tokens)) == ("length", 1)


async def test_a_request_without_a_maximum_or_a_seed_gets_none_from_the_preset(llama: Path) -> None:
    """A client turns both off with -1. Defaults of the preset are filled in where the body is parsed."""
    free = SamplingParams(temperature=2.0, ignore_eos=True)
    async with serving(load(llama, ctx_size=40, n_predict=7, seed=11)) as engine:
        answers = [(await complete_one(engine, PROMPT, sampling=free)).tokens for _ in range(2)]
    assert [len(answer) for answer in answers] == [40 - len(PROMPT)] * 2
    assert answers[0] != answers[1]


async def test_no_tokens_at_all_may_be_asked_for(engine: TransformersEngine) -> None:
    collected = await complete_one(engine, PROMPT, max_tokens=0, prompt_logprobs=True)
    assert (collected.tokens, collected.finish, len(collected.prompt_logprobs)) == ([], "length", len(PROMPT))


# Sampling


async def test_an_answer_does_not_depend_on_the_rest_of_the_batch(engine: TransformersEngine) -> None:
    """The same seed gives the same text, beside other temperatures, filters and lengths, and every time."""
    others = [replace(WARM, seed=seed, temperature=0.1 * seed, top_k=seed) for seed in range(6)]
    requests = [
        generation(PROMPT, max_tokens=24, sampling=WARM),
        generation(PROMPT, max_tokens=24),
        generation(PROMPT, max_tokens=24, sampling=replace(WARM, temperature=2.5, seed=12)),
        generation(PROMPT, max_tokens=10_000, sampling=replace(WARM, temperature=0.3, ignore_eos=True)),
        *(generation((7, *range(2, 12 + index)), max_tokens=24, sampling=how) for index, how in enumerate(others)),
        generation(PROMPT, max_tokens=24, sampling=WARM),
    ]
    alone = [(await collect_choices(engine, request))[0] for request in requests]
    together = [answer for (answer,) in await asyncio.gather(*(collect_choices(engine, each) for each in requests))]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert [answer.finish for answer in together] == [answer.finish for answer in alone]
    assert alone[0].tokens == alone[-1].tokens
    assert (together[3].finish, len(together[3].tokens)) == ("length", CTX - len(PROMPT))
    assert len({tuple(answer.tokens) for answer in alone}) > 6, "the settings make a difference"


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_no_ngram_is_repeated_as_in_generate(engine: TransformersEngine, model: Any, size: int) -> None:
    once = generated(model, PROMPT, 40)
    assert len(set(once)) < len(once), "without the limit, tokens are repeated"
    expected = generated(model, PROMPT, 40, no_repeat_ngram_size=size)
    asked, free = await asyncio.gather(
        complete_one(engine, PROMPT, max_tokens=40, sampling=replace(GREEDY, no_repeat_ngram_size=size)),
        complete_one(engine, PROMPT, max_tokens=40),
    )
    assert (asked.tokens, free.tokens) == (expected, once)


async def test_a_repetition_penalty_equals_that_of_generate(engine: TransformersEngine, model: Any) -> None:
    tokens = torch.tensor([PROMPT])
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False, repetition_penalty=1.8,
        pad_token_id=0,
    )  # fmt: skip
    collected = await complete_one(engine, PROMPT, max_tokens=20, sampling=replace(GREEDY, repetition_penalty=1.8))
    assert collected.tokens == out[0, len(PROMPT) :].tolist()


async def test_penalties_look_at_no_prompt_that_an_encoder_reads(tmp_path: Path) -> None:
    folder = tiny.make("t5", tmp_path, seed=2)
    prompt = tuple(range(300, 505))
    expected = generated(reference(folder), prompt, 20, repetition_penalty=3.0)
    assert set(prompt) & set(expected), "or it would make no difference"
    async with serving(load(folder, ctx_size=256, parallel=1)) as engine:
        collected = await complete_one(engine, prompt, max_tokens=20, sampling=replace(GREEDY, repetition_penalty=3.0))
        assert collected.tokens == expected
        expected = generated(reference(folder), prompt, 20, no_repeat_ngram_size=1)
        assert set(prompt) & set(expected), "or it would make no difference"
        how = replace(GREEDY, no_repeat_ngram_size=1)
        assert (await complete_one(engine, prompt, max_tokens=20, sampling=how)).tokens == expected


async def test_an_end_of_sequence_ends_the_answer_and_is_no_part_of_it(engine: TransformersEngine) -> None:
    ends = replace(GREEDY, logit_bias={EOS: 1000.0})
    collected = await complete_one(engine, PROMPT, max_tokens=9, sampling=ends)
    assert (collected.tokens, collected.text, collected.finish, collected.stop) == ([], "", "stop", None)
    assert collected.timings is not None
    assert collected.timings.completion_tokens == 1
    patient = await complete_one(engine, PROMPT, max_tokens=9, sampling=replace(ends, min_tokens=5))
    assert (len(patient.tokens), patient.finish) == (5, "stop")
    endless = await complete_one(engine, PROMPT, max_tokens=9, sampling=replace(ends, ignore_eos=True))
    assert (len(endless.tokens), endless.finish) == (9, "length")


async def test_logprobs_are_those_of_a_plain_forward(engine: TransformersEngine, model: Any) -> None:
    how = replace(WARM, logprobs=3, top_k=4, repetition_penalty=1.3)
    collected = await complete_one(engine, PROMPT, max_tokens=12, sampling=how, prompt_logprobs=True)
    with torch.inference_mode():
        exact = model(torch.tensor([[*PROMPT, *collected.tokens]])).logits[0].log_softmax(-1)
    answers = [*collected.prompt_logprobs, *collected.logprobs]
    assert [each.token for each in answers] == [*PROMPT, *collected.tokens]
    assert answers[0].logprob is None
    for position, each in enumerate(answers[1:]):
        assert each.logprob == pytest.approx(exact[position, each.token].item(), abs=1e-4)
        best = exact[position].topk(3)
        assert [top.token for top in each.top] == best.indices.tolist()
        assert [top.logprob for top in each.top] == pytest.approx(best.values.tolist(), abs=1e-4)


async def test_logprobs_of_a_prompt_longer_than_a_chunk_are_complete(engine: TransformersEngine, model: Any) -> None:
    prompt = tuple(range(20, 90))
    collected = await asyncio.gather(
        *(complete_one(engine, prompt, max_tokens=2, prompt_logprobs=True) for _ in range(3))
    )
    with torch.inference_mode():
        exact = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [exact[position, token].item() for position, token in enumerate(prompt[1:])]
    for each in collected:
        assert [one.logprob for one in each.prompt_logprobs[1:]] == pytest.approx(expected, abs=1e-4)
        assert each.deltas[0].prompt_logprobs, "they come with the first delta"


# Text


async def test_deltas_add_up_to_the_text_of_the_tokens(engine: TransformersEngine) -> None:
    tokenizer: Any = engine.tokenizer
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in ("The quick", "Die Katze schläft", "素早い 🦊")]
    collected = await asyncio.gather(
        *(complete_one(engine, each, max_tokens=40, sampling=replace(WARM, seed=1)) for each in prompts)
    )
    for prompt, each in zip(prompts, collected, strict=True):
        whole = tokenizer.decode([*prompt, *each.tokens], skip_special_tokens=True)
        assert tokenizer.decode(list(prompt), skip_special_tokens=True) + each.text == whole
        assert "".join(delta.text for delta in each.deltas) == each.text


async def test_each_token_is_sent_once_and_soon(engine: TransformersEngine) -> None:
    collected = await complete_one(engine, PROMPT, max_tokens=80, sampling=replace(GREEDY, ignore_eos=True))
    assert sum(len(delta.tokens) for delta in collected.deltas) == 80
    assert max(len(delta.tokens) for delta in collected.deltas) < 40, "held back for a character at most"
    assert sum(len(delta.text) for delta in collected.deltas) == len(collected.text)


async def test_times_and_counts_come_with_the_last_delta_or_with_every_one_on_request(
    engine: TransformersEngine,
) -> None:
    collected = await complete_one(engine, PROMPT, max_tokens=9)
    assert all(delta.timings is None for delta in collected.deltas[:-1])
    last = collected.timings
    assert last is not None
    assert (last.prompt_tokens, last.completion_tokens, last.cached_tokens) == (5, 9, 0)
    assert min(last.prefill_seconds, last.decode_seconds) >= 0.0
    answers = await complete_one(engine, PROMPT, max_tokens=9, timings=True)
    counts = [each.timings.completion_tokens for each in answers.deltas if each.timings is not None]
    assert len(counts) == len(answers.deltas)
    assert (counts, counts[-1]) == (sorted(counts), 9)
    assert len({each.timings and each.timings.prefill_seconds for each in answers.deltas}) == 1, "the prompt is over"


# Batching


async def test_a_long_prompt_does_not_stall_a_stream(llama: Path) -> None:
    async with serving(load(llama, ctx_size=256, parallel=2, prefill_chunk=8)) as engine:
        stream = engine.generate(generation(PROMPT, sampling=replace(GREEDY, ignore_eos=True), max_tokens=200))
        await first(stream)
        received = 0

        async def listen() -> None:
            nonlocal received
            async for delta in stream:
                received += len(delta.tokens)

        listener = asyncio.create_task(listen())
        await complete_one(engine, (6,) * 200, max_tokens=1)
        assert received >= 20, "a prompt of 25 chunks leaves the stream a token with each"
        listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listener
        await stream.aclose()


async def nothing_runs(engine: TransformersEngine) -> None:
    """Wait until the engine is idle: a request behind the cancel has been answered."""
    await complete_one(engine, PROMPT, max_tokens=1)
    async with asyncio.timeout(DEADLINE):
        while engine.occupancy.running or engine.occupancy.waiting:
            await complete_one(engine, PROMPT, max_tokens=1)


async def test_a_slow_reader_delays_no_request_and_misses_nothing(engine: TransformersEngine, model: Any) -> None:
    slow = engine.generate(generation(PROMPT, max_tokens=30))
    collected = CollectedChoice()
    collected.add(await first(slow))
    for _ in range(4):
        assert len((await complete_one(engine, (7, 8, 9), max_tokens=20)).tokens) == 20
    assert (await rest(slow, collected)).tokens == generated(model, PROMPT, 30)


async def test_the_queue_is_bounded(llama: Path) -> None:
    async with serving(load(llama, ctx_size=CTX, parallel=1, queue_size=2)) as engine:
        streams = [engine.generate(generation(PROMPT)) for _ in range(3)]
        readers = [asyncio.create_task(first(stream)) for stream in streams]
        await asyncio.wait(readers[:1])
        with pytest.raises(QueueFull):
            await complete_one(engine, PROMPT)
        assert engine.occupancy.running == 1
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        assert (await complete_one(engine, PROMPT, max_tokens=2)).finish == "length", "there is room again"


async def test_closing_ends_running_requests_and_rejects_new_ones(llama: Path) -> None:
    engine = load(llama, ctx_size=CTX, parallel=1)
    running, waiting = (engine.generate(generation(PROMPT, max_tokens=None)) for _ in range(2))
    await first(running)
    waiter = asyncio.create_task(first(waiting))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(Draining):
        await rest(running, CollectedChoice())
    with pytest.raises(Draining):
        await waiter
    for grammar in (None, Grammar("regex", "a", "regex")):
        with pytest.raises(Draining):
            await complete_one(engine, PROMPT, grammar=grammar)
    assert not engine.fatal.done()


# Failures of one request, and of the engine


def is_marked(segment: Segment) -> bool:
    return segment.sequence.tokens[0] == 13


MARKED = (13, 5, 6)


async def in_one_batch(asked: threading.Event, *answers: Coroutine[Any, Any, CollectedChoice]) -> list[Any]:
    """Answers, or errors, of requests whose first step begins when `asked` is set, however slow the machine is."""
    tasks = [asyncio.create_task(each) for each in answers]
    await asyncio.sleep(0)
    asked.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_steps_run_on_one_thread_with_helpers_up_to_the_presets_number(llama: Path) -> None:
    seen: set[tuple[str, int]] = set()

    def fault(batch: Batch, ahead: bool) -> None:
        seen.add((threading.current_thread().name, torch.get_num_threads()))

    engine, _ = journaled(llama, fault, ctx_size=CTX, threads=3)
    async with serving(engine):
        await asyncio.gather(*(complete_one(engine, PROMPT, max_tokens=3) for _ in range(2)))
    assert {name for name, _ in seen} == {"step-loop"}
    assert all(1 <= count <= 3 for _, count in seen)
    assert isinstance(engine._loop._threads, StepThreads)
    assert engine._loop._threads.most == 3
    assert torch.get_num_threads() == 1, "other threads are unchanged"


async def test_the_threads_that_a_load_computed_with_are_gone_when_it_is_done(llama: Path) -> None:
    helpers: set[int] = set()

    def progress(_: Progress) -> None:
        torch.ones(1 << 18).add_(1)  # uses two threads, as a conversion of weights does
        helpers.update(unnamed_threads() - before)

    before = unnamed_threads()
    asked = options(llama, ctx_size=CTX, threads=2)
    try:
        engine = await asyncio.to_thread(
            TransformersEngine.load, asked, progress=progress, pulse=lambda _: None, ahead=False
        )
    finally:
        torch.set_num_threads(1)
    async with serving(engine):
        assert helpers
        deadline = time.monotonic() + DEADLINE
        while unnamed_threads() & helpers:
            assert time.monotonic() < deadline, "they would slow each product of a step down"
            await asyncio.sleep(0.001)


def unnamed_threads() -> set[int]:
    """Ids of this process's threads that Python did not start."""
    return set(map(int, os.listdir("/proc/self/task"))) - {each.native_id or 0 for each in threading.enumerate()}


async def test_a_cancel_takes_effect_within_one_step(llama: Path) -> None:
    computing, go_on = threading.Event(), threading.Event()

    def fault(batch: Batch, ahead: bool) -> None:
        if batch[0].sequence.output_tokens == 3 and not computing.is_set():
            computing.set()
            assert go_on.wait(DEADLINE)

    engine, runner = journaled(llama, fault, ctx_size=CTX, parallel=1)
    async with serving(engine):
        stream = engine.generate(generation(PROMPT))
        await first(stream)
        assert await asyncio.to_thread(computing.wait, DEADLINE)
        await stream.aclose()
        go_on.set()
        assert (await complete_one(engine, MARKED, max_tokens=3)).finish == "length", "its place is free"
        cancelled = [batch for batch in runner.batches if not is_marked(batch[0])]
        assert len(cancelled) == 4, "the prompt, two tokens, and the step under way when the cancel came"
        await nothing_runs(engine)


async def test_the_runner_forgets_every_freed_row(llama: Path) -> None:
    asked, computing, go_on = threading.Event(), threading.Event(), threading.Event()
    full: list[Batch] = []

    def fault(batch: Batch, ahead: bool) -> None:
        assert asked.wait(DEADLINE), "the three are in one batch however slow the machine is"
        if not full and len(batch) == 3 and max(each.sequence.output_tokens for each in batch) >= 2:
            full.append(batch)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        if is_marked(batch[0]) and batch[0].sequence.output_tokens == 3 and not computing.is_set():
            computing.set()
            assert go_on.wait(DEADLINE)

    engine, runner = journaled(llama, fault, ctx_size=CTX, parallel=3)
    async with serving(engine):
        prompts = [(20 + index, 5, 6) for index in range(3)]
        answers = await in_one_batch(asked, *(complete_one(engine, prompt, max_tokens=5) for prompt in prompts))
        assert all(isinstance(each, CollectedChoice) for each in answers)
        assert len(full) == 1
        freed = sorted(call for call in runner.calls if call.startswith("forget"))
        assert set(freed) == {"forget 0", "forget 1", "forget 2"}
        assert len(freed) == 4, "three ends and a preemption"
        del runner.calls[:]
        stream = engine.generate(generation(MARKED))
        await first(stream)
        assert await asyncio.to_thread(computing.wait, DEADLINE)
        await stream.aclose()
        go_on.set()
        await complete_one(engine, PROMPT, max_tokens=1)
        freed = [call for call in runner.calls if call.startswith("forget")]
        assert freed == ["forget 0"] * 2, "a cancelled sequence, too, before another one gets the row"


async def test_prompt_logprobs_are_complete_after_a_preemption(llama: Path) -> None:
    """The second prompt shares a step with the end of the first, is preempted and begins again alone."""
    asked, seen = threading.Event(), set[tuple[int, int]]()

    def fault(batch: Batch, ahead: bool) -> None:
        assert asked.wait(DEADLINE)
        second = next((each for each in batch if is_marked(each)), None)
        if second is not None and (seen or second.start):
            seen.add((second.start, second.length))
        if second is not None and second.start and len(seen) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    prompts = [tuple(range(20, 60)), (13, *range(20, 59))]
    engine, _ = journaled(llama, fault, ctx_size=CTX, parallel=2, prefill_chunk=16)
    async with serving(engine):
        first, second = await in_one_batch(
            asked, *(complete_one(engine, each, max_tokens=4, prompt_logprobs=True) for each in prompts)
        )
        alone = await complete_one(engine, prompts[1], max_tokens=4, prompt_logprobs=True)
    assert {start % 16 for start, _ in seen} >= {0, 8}, "cut in two ways"
    assert [each.token for each in first.prompt_logprobs] == list(prompts[0])
    assert [each.token for each in second.prompt_logprobs] == list(prompts[1])
    collected = [each.logprob for each in second.prompt_logprobs[1:]]
    assert collected == pytest.approx([each.logprob for each in alone.prompt_logprobs[1:]], abs=1e-4)


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("breaks", [False, True], ids=["NaN logits", "an error of the model"])
async def test_a_failing_sequence_ends_its_request_and_no_other(
    llama: Path, model: Any, *, breaks: bool, choices: int
) -> None:
    def fault(batch: Batch, ahead: bool) -> list[Segment]:
        failing = [segment for segment in batch if is_marked(segment) and segment.sequence.output_tokens == 3]
        failing = [segment for segment in failing if choices == 1 or segment.sequence.seed == 12]
        if breaks and failing:
            raise IndexError("index out of range in self")
        return failing

    engine, _ = journaled(llama, fault, ctx_size=CTX)
    async with serving(engine):
        failed, *others = await asyncio.gather(
            collect_choices(engine, generation(MARKED, n=choices, sampling=WARM)),
            complete_one(engine, PROMPT, max_tokens=20),
            complete_one(engine, (7, 8), max_tokens=20),
            return_exceptions=True,
        )
        assert isinstance(failed, SequenceFailed)
        expected = [generated(model, prompt, 20) for prompt in (PROMPT, (7, 8))]
        assert [answer.tokens for answer in others if isinstance(answer, CollectedChoice)] == expected
        await nothing_runs(engine)


async def test_a_request_whose_steps_run_out_of_memory_twice_fails_and_no_other(llama: Path, model: Any) -> None:
    asked = threading.Event()

    def fault(batch: Batch, ahead: bool) -> None:
        assert asked.wait(DEADLINE)
        if len(batch) > 1 and any(map(is_marked, batch)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    engine, _ = journaled(llama, fault, ctx_size=CTX, parallel=3)
    async with serving(engine):
        lengths = {PROMPT: 3, (7, 8): 40, MARKED: 9}
        wanted = (complete_one(engine, each, max_tokens=most) for each, most in lengths.items())
        *others, failed = await in_one_batch(asked, *wanted)
        assert isinstance(failed, SequenceFailed)
        expected = [generated(model, prompt, lengths[prompt]) for prompt in (PROMPT, (7, 8))]
        assert [answer.tokens for answer in others if isinstance(answer, CollectedChoice)] == expected


async def test_an_error_of_the_second_try_ends_its_request_and_no_other(llama: Path, model: Any) -> None:
    asked, full = threading.Event(), list[Batch]()

    def fault(batch: Batch, ahead: bool) -> None:
        assert asked.wait(DEADLINE)
        if len(batch) == 3 and not full:
            full.append(batch)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        if full and any(map(is_marked, batch)):
            raise IndexError("index out of range in self")

    engine, _ = journaled(llama, fault, ctx_size=CTX, parallel=3)
    async with serving(engine):
        prompts = [MARKED, PROMPT, (7, 8)]
        wanted = (complete_one(engine, prompt, max_tokens=9) for prompt in prompts)
        failed, *others = await in_one_batch(asked, *wanted)
        assert isinstance(failed, SequenceFailed)
        expected = [generated(model, prompt, 9) for prompt in prompts[1:]]
        assert [answer.tokens for answer in others if isinstance(answer, CollectedChoice)] == expected
        assert not engine.fatal.done()


async def test_the_tensors_of_a_step_without_memory_are_free_before_it_is_tried_again(llama: Path) -> None:
    asked = threading.Event()
    failed: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def fault(batch: Batch, ahead: bool) -> None:
        assert asked.wait(DEADLINE)
        alive.extend(each() is not None for each in failed)
        if len(batch) > 1 and not failed:
            activations = torch.ones(1)
            failed.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    engine, _ = journaled(llama, fault, ctx_size=CTX, parallel=2)
    async with serving(engine):
        prompts = [(20 + index, 5, 6) for index in range(2)]
        answers = await in_one_batch(asked, *(complete_one(engine, prompt, max_tokens=5) for prompt in prompts))
        assert all(isinstance(each, CollectedChoice) for each in answers)
    assert alive
    assert not any(alive)


async def test_without_any_memory_requests_end_and_the_worker_lives_on(llama: Path, model: Any) -> None:
    full = threading.Event()
    full.set()

    def fault(batch: Batch, ahead: bool) -> None:
        if full.is_set():
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    engine, _ = journaled(llama, fault, ctx_size=CTX)
    async with serving(engine):
        collected = await asyncio.gather(
            *(complete_one(engine, PROMPT, max_tokens=9) for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(each, SequenceFailed) for each in collected)
        full.clear()
        assert (await complete_one(engine, PROMPT, max_tokens=9)).tokens == generated(model, PROMPT, 9)
        assert not engine.fatal.done()


async def test_a_sticky_device_error_ends_all_requests_and_the_process(llama: Path) -> None:
    raised: list[Batch] = []

    def fault(batch: Batch, ahead: bool) -> None:
        if raised or batch[0].sequence.output_tokens == 2:
            raised.append(batch)
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    engine, _ = journaled(llama, fault, ctx_size=CTX)
    collected = await asyncio.gather(*(complete_one(engine, PROMPT) for _ in range(2)), return_exceptions=True)
    assert all(isinstance(each, Draining) for each in collected)
    assert len(raised) == 1, "the device is not touched again"
    async with asyncio.timeout(DEADLINE):
        error = await asyncio.wrap_future(engine.fatal)
    assert error.exit is Exit.POISONED
    with pytest.raises(Draining):
        await complete_one(engine, PROMPT)
    await engine.close()


# Pulses


async def test_pulses_come_from_the_step_loop_with_what_is_measured(llama: Path) -> None:
    received: list[tuple[str, Pulse]] = []
    came = threading.Event()

    def pulse(event: Pulse) -> None:
        received.append((threading.current_thread().name, event))
        came.set()

    stages: list[Progress] = []
    asked = options(llama, ctx_size=64)
    stage_done: list[str] = []
    engine = TransformersEngine.load(asked, progress=stages.append, pulse=pulse, stage_done=stage_done.append)
    async with serving(engine):
        assert list(dict.fromkeys(stage_done)) == ["config", "tokenizer", "read", "build", "warmup"]
        assert await asyncio.to_thread(came.wait, DEADLINE)
        thread, event = received[0]
        assert thread == "step-loop"
        assert event.measured["cpu"] > 100 << 20
        assert list(dict.fromkeys(stage.stage for stage in stages)) == ["start", "weights", "warmup"]
        last = [stage for stage in stages if stage.stage == "weights"][-1]
        assert last.done == last.total >= (llama / "model.safetensors").stat().st_size
        assert engine.measured["cpu"] >= event.measured["cpu"]
        steps = engine.occupancy.steps
        await complete_one(engine, PROMPT, max_tokens=5)
        assert engine.occupancy.steps >= steps + 5


async def test_a_long_prompt_reports_progress_on_request(engine: TransformersEngine) -> None:
    prompt = [301 + index for index in range(40)]  # no other test of this engine begins so
    answers = await complete_one(engine, prompt, max_tokens=2, progress=True)
    known = [each.progress for each in answers.deltas]
    assert known[:4] == [PrefillProgress(done=done, total=40, cached=0) for done in (0, 16, 32, 40)]
    assert known[4:] == [None] * len(known[4:]), "then the answer begins"
    again = await complete_one(engine, prompt, max_tokens=2, progress=True)
    first, *_, last = [each.progress for each in again.deltas if each.progress]
    assert first.done == first.cached == last.cached > 0, "what was found of it comes first"
    assert last.done == 40
    assert not any(each.progress for each in (await complete_one(engine, prompt, max_tokens=2)).deltas)


async def test_an_engine_for_text_gives_no_vectors(engine: TransformersEngine) -> None:
    assert engine.capabilities == {"completion"}
    with pytest.raises(UnsupportedByModel):
        await engine.embed([EncoderInput(PROMPT)])


@pytest.mark.parametrize("is_steady", [True, False])
async def test_each_step_is_announced_if_steps_of_one_size_take_different_memory(
    engine: TransformersEngine, is_steady: bool
) -> None:
    work = engine._generation
    assert work is not None
    announced: list[bool] = []
    work._has_steady_steps, work._on_larger_step = is_steady, lambda: announced.append(True)
    try:
        await complete_one(engine, PROMPT, max_tokens=5)
        announced.clear()
        await complete_one(engine, PROMPT, max_tokens=5)
    finally:
        work._has_steady_steps, work._on_larger_step = True, None
    assert len(announced) == (0 if is_steady else 5)

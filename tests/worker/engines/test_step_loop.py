"""The step loop, and the reports of `GenerationLoop` to it: pulses are complete and correct."""

import asyncio
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from router.launch.process import decode_event
from worker.detokenizer import AnswerText
from worker.engines.transformers.device import memory
from worker.engines.transformers.device.growth import Growth
from worker.engines.transformers.loop.generation_loop import Backend, GenerationLoop
from worker.engines.transformers.loop.requests import RequestChoice, RequestStream
from worker.engines.transformers.loop.step_loop import CounterRate, Outbox, StepLoop
from worker.engines.transformers.schedule.kv_cache import RowAllocator
from worker.engines.transformers.schedule.prefill_budget import PrefillBudget
from worker.engines.transformers.schedule.scheduler import Batch
from worker.engines.transformers.schedule.sequence import Sequence
from worker.errors import Draining, RequestError
from worker.interface import GenerationRequest, SamplingParams
from worker.protocol.events import Pulse, encode

DEADLINE = 60.0
VOCAB = 16
NO_FIGURES = Pulse(steps=0, running=0, waiting=0, measured={})


class Flat:
    """A runner whose next token is always 5."""

    vocab_size = VOCAB

    def run(self, batch: Batch, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        logits = torch.zeros(sum(segment.logits for segment in batch), VOCAB)
        logits[:, 5] = 1.0
        return logits

    def fork(self, source: int, target: int) -> None:
        raise AssertionError("no request has a second choice")

    def forget(self, row: int) -> None:
        pass


class Unhurried(PrefillBudget):
    """A budget of the whole chunk, always."""

    def budget(self, decoding: int, chunk: int, prompts: int = 1, start: int = 0) -> int:
        return chunk


def generating() -> GenerationLoop:
    backend = Backend(runner=Flat(), capacity=RowAllocator(2, 50), prefill_budget=Unhurried())
    return GenerationLoop(backend, Outbox(), lambda token: b"x", chunk=8)


def ask(work: GenerationLoop, number: int, prompt: int, limit: int) -> RequestStream:
    """A request of `prompt` tokens and up to `limit` new ones."""
    stream = RequestStream(asyncio.get_running_loop())
    request = GenerationRequest(id="", prompt=(3,) * prompt, sampling=SamplingParams(temperature=0.0))
    sequence = Sequence.of(request, id=number, limit=limit, ends=(), seed=0)
    stream.choices.append(RequestChoice(0, sequence, stream, AnswerText(lambda tokens: "x" * len(tokens))))
    assert work.limit.admit(stream, 1, 10)
    work.add(stream)
    return stream


async def test_a_report_contains_running_sequences_and_the_cache() -> None:
    work = generating()
    ask(work, 7, prompt=4, limit=5)
    work.step()
    work.step()
    ask(work, 8, prompt=12, limit=3)
    third = ask(work, 9, prompt=2, limit=3)
    work.step()
    report = work.report(NO_FIGURES)
    assert report.slots == [[0, 7, 0, 3, 2, 0, 0], [1, 8, 4, 0, 3, 0, 0]]
    assert (work.load, report.parallel) == ((2, 1), 2)
    assert (report.cache_used, report.cache_total) == (4 + 2 + 8, 100)
    assert (work.prefill_tokens, work.decode_tokens) == (4 + 8, 3)
    assert (report.batched, report.longest) == (1 + 1 + 2, 8)
    work.cancel(third)
    while work.has_work:
        work.step()
    report = work.report(NO_FIGURES)
    assert (report.slots, report.cache_used) == ([], 0)
    assert (work.prefill_tokens, work.decode_tokens) == (4 + 12, 5 + 3), "counters only rise"
    assert (report.batched, report.longest) == (5 + 4, 12 + 2), "the last token of a text is not computed"


def test_a_rate_is_the_increase_since_the_last_reading() -> None:
    rate = CounterRate()
    assert rate.since(1000, 5.0) == 0.0, "nothing is known of the time before"
    assert rate.since(1100, 7.0) == 50.0
    assert rate.since(1100, 8.0) == 0.0
    assert rate.since(1101, 8.0) == 0.0, "no time, no rate"
    assert rate.since(1102, 11.0) == 0.3


class Counting:
    """Work that computes 100 prompt tokens and 10 answer tokens in each step."""

    has_work, load = True, (2, 1)

    prefill_tokens = decode_tokens = 0

    def report(self, pulse: Pulse) -> Pulse:
        return replace(
            pulse, parallel=4, cache_used=70, cache_reusable=20, cache_total=400, drafted=12, accepted=5, drafts=4,
            accepted_at=[4, 1], batched=30, longest=50, slots=[[0, 4, 0, 9, 1, 6, 2], [1, 5, 30, 0, 8, 0, 0]],
        )  # fmt: skip

    def step(self) -> None:
        self.prefill_tokens += 100
        self.decode_tokens += 10

    def abandon(self, error: RequestError) -> None:
        pass


def make_loop(work: Any, **changes: Any) -> StepLoop:
    """Start a step loop. It reads the threads and the memory of this process only where a test says so."""
    readings: dict[str, Any] = {"pulse": lambda _: None, "measured": dict, "later": lambda: 0, "threads": lambda: 1}
    return StepLoop(work, Outbox(), **readings | changes)


async def test_a_pulse_carries_the_whole_report_and_rates_in_proportion() -> None:
    received: list[Pulse] = []
    enough = threading.Event()

    def receive(pulse: Pulse) -> None:
        received.append(pulse)
        if len(received) == 3:
            enough.set()

    measured = partial(memory.measured, ())
    loop = make_loop(Counting(), pulse=receive, measured=measured, later=lambda: 7, interval=0.02)
    try:
        assert await asyncio.to_thread(enough.wait, DEADLINE)
    finally:
        await asyncio.to_thread(loop.close)
    assert (received[0].prefill_rate, received[0].decode_rate) == (0.0, 0.0)
    later = received[2]
    assert later.decode_rate > 0
    assert abs(later.prefill_rate - 10 * later.decode_rate) <= 0.6, "both of the same steps and time, to a tenth"
    assert (later.running, later.waiting, later.parallel, later.later) == (2, 1, 4, 7)
    assert (later.cache_used, later.cache_reusable, later.cache_total) == (70, 20, 400)
    assert decode_event(encode(later)) == later
    assert later.slots == [[0, 4, 0, 9, 1, 6, 2], [1, 5, 30, 0, 8, 0, 0]]
    assert (later.drafted, later.accepted, later.drafts, later.accepted_at) == (12, 5, 4, [4, 1])
    assert (later.batched, later.longest) == (30, 50)


def test_a_pulse_revokes_no_announcement_that_is_made_while_it_is_composed() -> None:
    growth, done = Growth(), threading.Event()
    is_locked: list[bool] = []

    def receive(pulse: Pulse) -> None:
        is_locked.append(growth.lock.locked())
        done.set()

    def later() -> int:
        is_locked.append(growth.lock.locked())
        return growth.bytes

    start = partial(make_loop, Idle(), pulse=receive, later=later, growth=growth, interval=0.0)
    loop = start()
    assert done.wait(DEADLINE)
    loop.close()
    assert set(is_locked) == {True}
    done.clear()
    with growth.lock:  # as while an announcement waits for the router
        loop = start()
        assert loop.call(lambda: 7) == 7
        assert not done.is_set()
    loop.close()


def test_steps_get_another_number_of_threads_at_a_pulse() -> None:
    counts = iter((4, 2, 3, 1))  # the first is for steps before the first pulse
    received: list[int] = []
    done = threading.Event()

    def receive(_: Pulse) -> None:
        received.append(torch.get_num_threads())
        if len(received) == 3:
            done.set()

    before = torch.get_num_threads()
    loop = make_loop(Counting(), pulse=receive, threads=lambda: next(counts, 1), interval=0.0)
    assert done.wait(DEADLINE)
    loop.close()
    assert received[:3] == [2, 3, 1]
    assert torch.get_num_threads() == before, "other threads are unchanged"


def test_what_announced_steps_took_is_reported_soon_after_they_have_ended() -> None:
    growth, reported = Growth(), threading.Event()
    announced: list[int] = []

    class OneStep(Idle):
        has_work = True

        def step(self) -> None:
            growth.announce_steps(7)
            announced.append(growth.bytes)
            self.has_work = False

    def receive(_: Pulse) -> None:
        announced.append(growth.bytes)
        reported.set()

    loop = make_loop(OneStep(), pulse=receive, growth=growth, interval=2 * DEADLINE)
    assert reported.wait(DEADLINE)
    loop.close()
    assert announced == [7, 0]


class Idle:
    """Work that never has anything to do."""

    has_work, load = False, (0, 0)
    prefill_tokens = decode_tokens = 0

    def report(self, pulse: Pulse) -> Pulse:
        return pulse

    def step(self) -> None:
        raise AssertionError("there is none")

    def abandon(self, error: RequestError) -> None:
        pass


def test_a_call_on_the_thread_has_ended_when_it_returns() -> None:
    """Start the thread-local state of libraries before it is counted."""
    loop = make_loop(Idle())

    def fail() -> None:
        raise torch.OutOfMemoryError("no room for a handle")

    assert loop.call(lambda: threading.current_thread().name) == "step-loop"
    with pytest.raises(torch.OutOfMemoryError, match="handle"):
        loop.call(fail)
    loop.call(partial(memory.take_handles, [torch.device("cpu")]))
    loop.close()
    with pytest.raises(Draining):
        loop.call(lambda: None)

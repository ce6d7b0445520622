"""A generation loop without its thread, where the test calls each step itself, and a runner that keeps a journal."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.worker.loaded import generation, load_with
from tests.worker.scheduled import check_scheduler
from worker.detokenizer import AnswerText
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.loop.generation_loop import Backend, GenerationLoop
from worker.engines.transformers.loop.requests import RequestChoice, RequestStream
from worker.engines.transformers.loop.step_loop import Outbox
from worker.engines.transformers.run.runner import Runner
from worker.engines.transformers.schedule.kv_cache import RowAllocator
from worker.engines.transformers.schedule.prefill_budget import PrefillBudget
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.engines.transformers.schedule.sequence import Sequence as TokenSequence
from worker.interface import Delta

PROMPT = (9, 41, 70, 77, 80)


class Steady(PrefillBudget):
    """Sixteen prompt tokens in each step, independent of the machine's speed."""

    def budget(self, decoding: int, chunk: int, prompts: int = 1, start: int = 0) -> int:
        return min(chunk, 16)


Fault = Callable[[Batch, bool], Sequence[Segment] | None]


class JournalRunner:
    """A runner that records its calls, and fails on request.

    `fault` gets each batch, and whether it is launched ahead. It raises, or returns segments whose logits become NaN.
    """

    def __init__(self, runner: Runner, fault: Fault = lambda batch, ahead: None):
        self.runner, self.fault = runner, fault
        self.calls: list[str] = []
        self.batches: list[Batch] = []
        self.prompt_tokens = 0  # computed so far

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def fork(self, source: int, target: int) -> None:
        self.calls.append(f"fork {source} {target}")
        self.runner.fork(source, target)

    def forget(self, row: int) -> None:
        self.calls.append(f"forget {row}")
        self.runner.forget(row)

    def run(self, batch: Batch, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        ids = ",".join(map(str, sorted(segment.sequence.id for segment in batch)))
        self.calls.append(f"{'ahead' if device_tokens is not None else 'run'} {ids}")
        self.batches.append(batch)
        self.prompt_tokens += sum(segment.length for segment in batch if not segment.is_decode)
        broken = self.fault(batch, device_tokens is not None) or ()
        logits = self.runner.run(batch, device_tokens)
        first = 0
        with torch.inference_mode():
            for segment in batch:
                if segment in broken:
                    logits[first : first + segment.logits] = float("nan")
                first += segment.logits
        return logits


def journaled(
    folder: Path, fault: Fault = lambda batch, ahead: None, **changes: Any
) -> tuple[TransformersEngine, JournalRunner]:
    """An engine, and the journal of its runner."""
    made: list[JournalRunner] = []

    def wrap(runner: Runner) -> Any:
        made.append(JournalRunner(runner, fault))
        return made[0]

    return load_with(folder, wrap, **changes), made[0]


class Drive:
    """A generation loop that the test steps."""

    def __init__(self, runner: Any, capacity: RowAllocator, *, ahead: bool = True, grammars: Any = None):
        backend = Backend(runner=runner, capacity=capacity, prefill_budget=Steady(), ahead=ahead)
        self._outbox = Outbox()
        self.work = GenerationLoop(backend, self._outbox, lambda token: b"x", chunk=64, grammars=grammars)
        self.streams: dict[int, RequestStream] = {}

    def ask(self, id: int, prompt: Sequence[int] = PROMPT, *, most: int = 8, **changes: Any) -> RequestStream:
        stream = RequestStream(asyncio.get_running_loop())
        request = generation(prompt, **changes)
        sequence = TokenSequence.of(request, id=id, limit=most, ends={1}, seed=request.sampling.seed or 0)
        answer = AnswerText(lambda tokens: "x" * len(tokens), request.stop)
        stream.choices.append(RequestChoice(0, sequence, stream, answer))
        self.streams[id] = stream
        assert self.work.limit.admit(stream, 1, 99)
        self.work.add(stream)
        return stream

    def step(self, cancelled: Sequence[int] = ()) -> None:
        """Cancel these requests, then do one step if there is work."""
        for id in cancelled:
            self.work.cancel(self.streams[id])
        if self.work.has_work:
            self.work.step()

    def to_the_end(self) -> None:
        while self.work.has_work:
            self.work.step()
        check_scheduler(self.work._scheduler)

    async def collected(self, id: int) -> list[Any]:
        """All items sent to the stream of `id`: tokens, then the finish reason or the class of the error."""
        self._outbox.flush()
        await asyncio.sleep(0)
        answers: list[Any] = []
        queue = self.streams[id].items
        while not queue.empty():
            item = queue.get_nowait()
            if isinstance(item, Delta):
                answers.extend(item.tokens)
                if item.finish is not None:
                    answers.append(item.finish)
            elif item is not None:
                answers.append(type(item))
        return answers

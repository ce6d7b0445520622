"""A generation loop without its thread: the test calls each step itself."""

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.worker.loaded import generation
from worker.detokenizer import AnswerText
from worker.engines.transformers.loop.generation_loop import Backend, GenerationLoop
from worker.engines.transformers.loop.requests import RequestChoice, RequestStream
from worker.engines.transformers.loop.step_loop import Outbox
from worker.engines.transformers.schedule.kv_cache import RowAllocator
from worker.engines.transformers.schedule.prefill_budget import PrefillBudget
from worker.engines.transformers.schedule.sequence import Sequence as TokenSequence
from worker.interface import Delta

PROMPT = (9, 41, 70, 77, 80)


class Steady(PrefillBudget):
    """Sixteen prompt tokens in each step, independent of the machine's speed."""

    def budget(self, decoding: int, chunk: int, prompts: int = 1, start: int = 0) -> int:
        return min(chunk, 16)


class Drive:
    """A generation loop that the test steps."""

    def __init__(self, runner: Any, capacity: RowAllocator, *, ahead: bool = True, grammars: Any = None):
        backend = Backend(runner=runner, capacity=capacity, pace=Steady(), ahead=ahead)
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

    def to_the_end(self) -> None:
        while self.work.has_work:
            self.work.step()
        self.work._scheduler.check_integrity()

    async def collected(self, id: int) -> list[Any]:
        """All items sent to the stream of `id`: tokens, then the finish reason or the class of the error."""
        self._outbox.flush()
        await asyncio.sleep(0)
        said: list[Any] = []
        queue = self.streams[id].items
        while not queue.empty():
            item = queue.get_nowait()
            if isinstance(item, Delta):
                said.extend(item.tokens)
                if item.finish is not None:
                    said.append(item.finish)
            elif item is not None:
                said.append(type(item))
        return said

"""Faults of other batching engines that this one must not have: growing work for a token, and huge masks."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import tiny
from tests.worker.loaded import complete_one, load_with, serving
from tests.worker.stepped import JournalRunner
from worker.detokenizer import AnswerText
from worker.engines.transformers.run.runner import Runner
from worker.engines.transformers.schedule.scheduler import Batch


def test_the_work_for_a_token_is_the_same_however_long_the_answer_is() -> None:
    tokenizer = tiny.make_tokenizer("llama").backend_tokenizer
    tokens = tokenizer.encode("The quick brown fox, größer als 世界! 🦊 ", add_special_tokens=False).ids * 160
    read = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal read
        read += len(ids)
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    costs = []
    answer, text = AnswerText(decode, ("END", "an end that never comes")), ""
    for begin in range(0, len(tokens), 1000):
        before = read
        for token in tokens[begin : begin + 1000]:
            text += answer.push(token).text
        costs.append((read - before) / len(tokens[begin : begin + 1000]))
    assert len(tokens) > 4000
    assert text + answer.finish().text == decode(tokens)
    assert max(costs) < 12, "token ids decoded per token"
    assert max(costs) - min(costs) < 1.0


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """The largest single tensor allocated while the mode is active. Views count nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        held = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in held:
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return result


class StepSizes(JournalRunner):
    """A runner that records the largest tensor of each step."""

    def __init__(self, runner: Runner):
        super().__init__(runner)
        self.largest: list[int] = []

    def run(self, batch: Batch, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        with LargestTensor() as mode:
            logits = super().run(batch, device_tokens)
        self.largest.append(mode.bytes)
        return logits


async def test_no_mask_is_as_large_as_the_prompt_squared_nor_as_all_rows_together(llama: Path) -> None:
    """512 tokens in 8 rows: a mask over all rows would take 64 MiB, one for a prompt alone 1 MiB."""
    watched: list[StepSizes] = []

    def watch(runner: Runner) -> Any:
        watched.append(StepSizes(runner))
        return watched[0]

    ctx, rows, chunk = 512, 8, 32
    async with serving(load_with(llama, watch, ctx_size=ctx, parallel=rows, prefill_chunk=chunk)) as engine:
        prompts = [tuple(20 + (7 * at + row) % 400 for at in range(ctx - 8)) for row in range(rows)]
        await asyncio.gather(*(complete_one(engine, prompt, max_tokens=4) for prompt in prompts))
    (runner,) = watched
    heads = 4
    assert max(runner.largest) <= 4 * chunk * ctx * heads, "a chunk against its own context"
    assert len(runner.largest) > rows * ctx // chunk // 2

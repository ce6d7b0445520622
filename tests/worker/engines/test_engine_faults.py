"""Faults of other batching engines that this one must not have: one bad request, growing work, huge masks.

Other test modules cover the rest of these faults.
"""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import tiny
from tests.worker.loaded import DEADLINE, collect_choices, complete_one, generation, load, load_with, serving
from worker.detokenizer import AnswerText
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.run.runner import Runner
from worker.engines.transformers.schedule.scheduler import Batch
from worker.errors import ContextExceeded, RequestError
from worker.interface import SamplingParams

CTX = 96
PROMPT = (9, 41, 70, 77, 80)
SEEDED = SamplingParams(temperature=1.0, seed=11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TransformersEngine]:
    engine = load(folder, ctx_size=CTX, parallel=4, prefill_chunk=16)
    yield engine
    asyncio.run(engine.close())


async def test_every_request_of_a_batch_keeps_its_own_temperature_and_its_own_end(engine: TransformersEngine) -> None:
    """Temperature 0 and other temperatures, and max_tokens beyond the positions, in one batch."""
    wanted = [
        generation(PROMPT, max_tokens=20),
        generation(PROMPT, max_tokens=20, sampling=SEEDED),
        generation(PROMPT, max_tokens=20, sampling=SamplingParams(temperature=2.5, seed=12)),
        generation(PROMPT, max_tokens=10_000, sampling=SamplingParams(temperature=0.3, seed=13, ignore_eos=True)),
    ]
    alone = [(await collect_choices(engine, each))[0] for each in wanted]
    together = [collected for (collected,) in await asyncio.gather(*(collect_choices(engine, each) for each in wanted))]
    assert [collected.tokens for collected in together] == [collected.tokens for collected in alone]
    assert [collected.finish for collected in together] == [collected.finish for collected in alone]
    assert (together[3].finish, len(together[3].tokens)) == ("length", CTX - len(PROMPT))
    assert len({tuple(collected.tokens) for collected in alone[:3]}) == 3, "the temperatures did make a difference"


async def test_a_prompt_and_a_seed_give_one_text_however_often_and_beside_whomever(engine: TransformersEngine) -> None:
    said = [await complete_one(engine, PROMPT, max_tokens=24, sampling=SEEDED) for _ in range(2)]
    said += await asyncio.gather(*(complete_one(engine, PROMPT, max_tokens=24, sampling=SEEDED) for _ in range(4)))
    assert len({collected.text for collected in said}) == 1


@pytest.mark.parametrize("prompt", [(5, 9999), (5,) * CTX, (5,) * (4 * CTX)], ids=["unknown token", "full", "larger"])
async def test_a_rejected_request_ends_no_other_and_the_engine_goes_on(
    engine: TransformersEngine, prompt: Sequence[int]
) -> None:
    expected = (await complete_one(engine, PROMPT, max_tokens=30)).tokens
    running = [asyncio.create_task(complete_one(engine, PROMPT, max_tokens=30)) for _ in range(2)]
    refused = await asyncio.gather(*(complete_one(engine, prompt) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(each, RequestError) for each in refused)
    if len(prompt) >= CTX:
        assert all(isinstance(each, ContextExceeded) for each in refused), "refused, not cut short"
    assert [collected.tokens for collected in await asyncio.gather(*running)] == [expected] * 2
    assert (await complete_one(engine, PROMPT, max_tokens=30)).tokens == expected


async def test_a_request_that_is_cancelled_hears_its_end_and_leaves_nothing(engine: TransformersEngine) -> None:
    asked = asyncio.create_task(
        complete_one(engine, PROMPT, max_tokens=CTX, sampling=SamplingParams(temperature=0.0, ignore_eos=True))
    )
    async with asyncio.timeout(DEADLINE):
        while not engine.occupancy.running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        while engine.occupancy.running or engine.occupancy.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)


# Work and memory


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


async def test_each_delta_holds_what_is_new_and_nothing_else(engine: TransformersEngine) -> None:
    collected = await complete_one(
        engine, PROMPT, max_tokens=80, sampling=SamplingParams(temperature=0.0, ignore_eos=True)
    )
    assert sum(len(delta.tokens) for delta in collected.deltas) == 80
    assert max(len(delta.tokens) for delta in collected.deltas) < 40, "held back for a character at most"
    assert sum(len(delta.text) for delta in collected.deltas) == len(collected.text)


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


class StepSizes:
    """A runner that records the sizes of its steps."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self.largest: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, batch: Batch, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        with LargestTensor() as mode:
            logits = self._runner.run(batch, device_tokens)
        self.largest.append(mode.bytes)
        return logits


async def test_no_mask_is_as_large_as_the_prompt_squared_nor_as_all_rows_together(folder: Path) -> None:
    """512 tokens in 8 rows: a mask over all rows would take 64 MiB, one for a prompt alone 1 MiB."""
    watched: list[StepSizes] = []

    def watch(runner: Runner) -> Any:
        watched.append(StepSizes(runner))
        return watched[0]

    ctx, rows, chunk = 512, 8, 32
    async with serving(load_with(folder, watch, ctx_size=ctx, parallel=rows, prefill_chunk=chunk)) as engine:
        prompts = [tuple(20 + (7 * at + row) % 400 for at in range(ctx - 8)) for row in range(rows)]
        await asyncio.gather(*(complete_one(engine, prompt, max_tokens=4) for prompt in prompts))
    (runner,) = watched
    heads = 4
    assert max(runner.largest) <= 4 * chunk * ctx * heads, "a chunk against its own context"
    assert len(runner.largest) > rows * ctx // chunk // 2

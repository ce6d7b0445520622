"""On an accelerator: equality with `generate` there, graphs that say what kernels one by one say, memory that stays.

`scripts/gpu_check` runs these, beside what only whole processes can show.
"""

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import tiny
from tests.worker.loaded import complete_one, generated, load, options, serving
from tests.worker.stepped import Drive
from worker.engines.transformers.attention import paged
from worker.engines.transformers.device import memory
from worker.engines.transformers.load import loader
from worker.engines.transformers.load.snapshot import load_config
from worker.engines.transformers.run import backends
from worker.engines.transformers.run.runner import PagedRunner
from worker.engines.transformers.run.warmup import record
from worker.engines.transformers.schedule.prefill_budget import PrefillBudget
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.engines.transformers.schedule.sequence import Sequence as TokenSequence
from worker.interface import SamplingParams

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda:0")  # scripts/gpu_check --device cpu runs some of them there
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cpu" and not torch.cuda.is_available(), reason="torch sees no accelerator here"),
    # torch says this at the first call of set_sync_debug_mode.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]
NEW = 32
FAMILIES = ("llama", "mistral", "gpt2", "qwen3", "qwen3_moe", "gemma3_text", "phi3")


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_text_equals_generate_on_the_device(family: str, enforce_eager: bool, tmp_path: Path) -> None:
    folder = tiny.make(family, tmp_path)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
    source = random.Random(3)
    prompts = [tuple(source.randrange(2, 500) for _ in range(length)) for length in (1, 7, 23, 60, 100)]
    engine = load(
        folder, devices=(DEVICE,), dtype="float32", ctx_size=160, parallel=3, prefill_chunk=16,
        enforce_eager=enforce_eager,
    )  # fmt: skip
    async with serving(engine):
        told = await asyncio.gather(*(complete_one(engine, prompt, max_tokens=NEW) for prompt in prompts))
    assert [each.tokens for each in told] == [generated(model, prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mamba"])
async def test_text_is_the_same_on_several_devices(family: str, tmp_path: Path) -> None:
    """With one accelerator both parts are on it. Only two show that every tensor that must move is moved."""
    folder = tiny.make(family, tmp_path)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
    prompts = [tuple(3 + (seed * 131 + index * 37) % 480 for index in range(60)) for seed in range(3)]
    devices = (DEVICE, "cuda:1" if torch.cuda.device_count() > 1 else DEVICE)
    layers = ("1", str(model.config.num_hidden_layers - 1))
    engine = load(folder, devices=devices, layers=layers, dtype="float32", ctx_size=160, parallel=3, prefill_chunk=16)
    async with serving(engine):
        told = await asyncio.gather(*(complete_one(engine, prompt, max_tokens=NEW) for prompt in prompts))
    assert [each.tokens for each in told] == [generated(model, prompt, NEW) for prompt in prompts]
    assert set(devices) <= engine.measured.keys()


def test_a_recorded_step_says_what_the_dynamic_one_says_at_every_rung(tmp_path: Path) -> None:
    asked = options(tiny.make("llama", tmp_path), devices=(DEVICE,), dtype="float32", parallel=5)
    memory.keep_small()  # as in a worker: without cuDNN's attention
    paged.register()
    config = load_config(asked)
    loaded = loader.load_model(asked, config, backends.implementation(asked, config), lambda _: None)
    runner, capacity = backends.make_runner(loaded.model, config, asked, 200, loaded.device, caches=False)
    assert isinstance(runner, PagedRunner)
    fixed = record(runner, capacity, PrefillBudget(), ctx_size=200, progress=lambda _: None)
    assert fixed.recorded == len(fixed.shapes) > 0
    source = random.Random(1)
    rows: list[tuple[TokenSequence, int]] = []
    for id, length in enumerate((3, 40, 17, 90, 64)):
        tokens = [source.randrange(2, 500) for _ in range(length + 1)]
        sequence = TokenSequence(id=id, prompt_tokens=length, tokens=tokens, limit=200, ends=frozenset())
        row, _ = capacity.admit(sequence)
        runner.run((Segment(sequence, row, 0, length, capacity.table(row)),))
        sequence.computed = length
        rows.append((sequence, row))

    def batch(count: int) -> Batch:
        made = []
        for sequence, row in rows[:count]:
            assert capacity.grow(row, sequence.computed, sequence.computed + 1)
            made.append(Segment(sequence, row, sequence.computed, 1, capacity.table(row)))
        return tuple(made)

    for step in range(12):
        for count in range(1, 6):
            replayed = fixed.run(batch(count)).clone()
            torch.testing.assert_close(replayed, runner.run(batch(count)), atol=1e-3, rtol=1e-3)
        for sequence, _ in rows:
            sequence.tokens.append(5 + step)
            sequence.computed += 1


async def test_nothing_grows_while_an_engine_serves(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path)
    engine = load(folder, devices=(DEVICE,), ctx_size=200, parallel=4, prefill_chunk=64)
    async with serving(engine):
        ready = memory.measured((DEVICE,))[DEVICE]
        prompts = [tuple(range(5, 5 + length)) for length in (150, 3, 90, 160, 40, 120)]
        for _ in range(3):
            await asyncio.gather(*(complete_one(engine, prompt, max_tokens=NEW) for prompt in prompts))
        # torch's allocator may take a further segment of 2 MiB for steps of another composition (seen on an H200).
        assert memory.measured((DEVICE,))[DEVICE] <= ready + (2 << 20)


def test_weights_arrive_on_the_device_as_they_lie(tmp_path: Path) -> None:
    asked = options(tiny.make("gemma3_text", tmp_path / "model", dtype="bfloat16"), devices=("cuda:0",))
    config = load_config(asked)
    usual = loader.load_model(options(tmp_path / "model"), config, None, lambda event: None).model.state_dict()
    before = torch.cuda.memory_allocated()  # what libraries keep for other tests' threads is part of it
    loaded = loader.load_model(asked, config, None, lambda event: None)
    found = loaded.model.state_dict()
    assert {tensor.device.type for tensor in found.values()} == {"cuda"}
    assert found.keys() == usual.keys()
    assert all(torch.equal(tensor.cpu(), usual[name]) for name, tensor in found.items())
    taken = torch.cuda.memory_allocated() - before
    assert taken < 2 * sum(tensor.nbytes for tensor in usual.values()) + (1 << 20)


async def test_a_step_waits_for_the_device_where_its_numbers_come_back_and_nowhere_else(tmp_path: Path) -> None:
    """Torch raises at every other wait; an event's, of which there is one for each step, it lets pass."""
    asked = options(tiny.make("llama", tmp_path), devices=(DEVICE,), dtype="float32", parallel=4)
    memory.keep_small()  # as in a worker: without cuDNN's attention
    paged.register()
    config = load_config(asked)
    loaded = loader.load_model(asked, config, backends.implementation(asked, config), lambda _: None)
    runner, capacity = backends.make_runner(loaded.model, config, asked, 200, loaded.device, caches=True)
    assert isinstance(runner, PagedRunner)
    fixed = record(runner, capacity, PrefillBudget(), ctx_size=200, progress=lambda _: None)
    for each in (runner, fixed):
        drive = Drive(each, capacity)
        drive.ask(0, most=30, sampling=SamplingParams(temperature=0.0, logprobs=2))
        drive.ask(1, most=24, sampling=SamplingParams(temperature=1.0, top_p=0.9, top_k=40, min_p=0.01))
        drive.ask(
            2, tuple(range(5, 80)), most=9, sampling=SamplingParams(temperature=0.7, logit_bias={7: 2.0}, min_tokens=3)
        )
        drive.work.step()  # libraries may wait when they are first called
        try:
            torch.cuda.set_sync_debug_mode("error")
            drive.to_the_end()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert drive.work.steps_ahead > 20


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
async def test_ahead_or_not_a_seed_gives_one_text(family: str, tmp_path: Path) -> None:
    folder, told = tiny.make(family, tmp_path), []
    for ahead in (False, True):
        engine = load(folder, ahead=ahead, devices=(DEVICE,), dtype="float32", ctx_size=160, parallel=4)
        async with serving(engine):
            asked = (
                complete_one(
                    engine,
                    tuple(range(5, 8 + 20 * each)),
                    max_tokens=NEW,
                    sampling=SamplingParams(temperature=1.0, seed=each),
                )
                for each in range(6)
            )
            told.append([each.tokens for each in await asyncio.gather(*asked)])
            assert engine._generation is not None
            assert (engine._generation.steps_ahead > 0) == ahead
    assert told[0] == told[1]

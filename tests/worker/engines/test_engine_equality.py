"""Greedy text equals transformers' own `generate`, token for token, for every supported architecture.

Alone, and in a changing batch: requests of many lengths join, end and are cancelled at any step.
"""

import asyncio
import random
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests import tiny
from tests.worker import loaded
from tests.worker.families import FAMILIES
from tests.worker.scheduled import check_scheduler
from worker.engines.transformers.load.architectures import backend
from worker.protocol.architectures import VERIFIED

NEW = 17  # each answer crosses a border of KV blocks, which have 16 tokens
LENGTHS = (1, 7, 23, 60)


# One architecture for each kind of cache. The others are in the slow tier.
FAST = ("llama", "mistral", "qwen3", "gpt2", "falcon", "mamba", "t5")


@pytest.fixture(
    scope="module", params=[name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def snapshot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = FAMILIES[request.param]
    return tiny.make(family, tmp_path_factory.mktemp("snapshot"), **overrides)


@pytest.fixture(scope="module")
def expected(snapshot: Path) -> dict[tuple[int, ...], list[int]]:
    """Results of `generate` for each prompt."""
    model = loaded.reference(snapshot)
    source = random.Random(3)
    prompts = [tuple(source.randrange(2, 500) for _ in range(length)) for length in LENGTHS]
    return {prompt: loaded.generated(model, prompt, NEW) for prompt in prompts}


async def test_greedy_text_equals_generate_alone_and_while_others_join_end_and_are_cancelled(
    snapshot: Path, expected: dict[tuple[int, ...], list[int]]
) -> None:
    source = random.Random(5)
    prompts = list(expected)
    engine = loaded.load(snapshot, ctx_size=128, parallel=3, prefill_chunk=16)

    async def talk(prompt: tuple[int, ...], count: int, leave_after: int | None) -> None:
        tokens = await loaded.complete_until(engine, loaded.generation(prompt, max_tokens=count), leave_after)
        assert tokens == expected[prompt][: len(tokens)]
        assert leave_after is not None or tokens == expected[prompt][:count]

    async with loaded.serving(engine), asyncio.timeout(loaded.DEADLINE):
        await talk(prompts[-1], NEW, None)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(10):
                count = source.choice((3, 9, NEW))
                leave = source.choice((None, None, source.randrange(1, count + 1)))
                tasks.create_task(talk(source.choice(prompts), count, leave))
                for _ in range(source.randrange(40)):
                    await asyncio.sleep(0)  # some requests join while others are running


async def test_greedy_text_equals_generate_after_preemptions(
    snapshot: Path, expected: dict[tuple[int, ...], list[int]]
) -> None:
    """Four requests in blocks for one, where there are blocks. The youngest is preempted at every ninth forward."""
    kind = transformers.AutoConfig.from_pretrained(snapshot)
    room = 128 if backend(kind) == "paged" else 0
    options: dict[str, Any] = {"ctx_size": 128, "parallel": 4, "prefill_chunk": 16, "kv_tokens": room}
    async with loaded.serving(loaded.load(snapshot, prefix_caching=False, **options)) as engine:
        work = loaded.work_of(engine)
        runner: Any = work._backend.runner
        forwards, are_queued = count(), threading.Event()

        def before_forward(*_: object) -> None:
            are_queued.wait(loaded.DEADLINE)
            if next(forwards) % 9 == 7:
                loaded.put_back_the_youngest(engine)

        runner._model.register_forward_pre_hook(before_forward)
        async with asyncio.timeout(loaded.DEADLINE):
            answers = asyncio.gather(
                *(loaded.complete_until(engine, loaded.generation(prompt, max_tokens=NEW)) for prompt in expected)
            )
            await asyncio.sleep(0)  # each request is queued now
            are_queued.set()
            collected = await answers
        assert collected == list(expected.values())
        assert work.prefill_tokens > sum(map(len, expected)), "some tokens were computed again"
        check_scheduler(work._scheduler)


def test_all_verified_families_are_tested_here() -> None:
    assert set(FAST) <= FAMILIES.keys()
    assert {family for family, _ in FAMILIES.values()} >= VERIFIED
    assert {"llama", "mistral", "qwen2", "qwen3", "gpt2"} <= VERIFIED

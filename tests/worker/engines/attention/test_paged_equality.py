"""Text from the cache in blocks equals transformers' own: with found prefixes, tiny pools, shared prompts, cancels."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests import tiny
from tests.worker import loaded
from tests.worker.scheduled import check_scheduler
from worker.engines.transformers.run.backends import make_blocks
from worker.errors import StartError
from worker.protocol.argv import Serve
from worker.protocol.memory import BLOCK_TOKENS

B = BLOCK_TOKENS
CTX, NEW = 128, 32
FAMILIES = ("llama", "mistral", "gpt2")
"""Grouped heads; a window that is narrower than the prompts; a head of its own for each query."""


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: tiny.make(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def models(snapshots: dict[str, Path]) -> dict[str, Any]:
    return {family: transformers.AutoModelForCausalLM.from_pretrained(folder) for family, folder in snapshots.items()}


SYSTEM = loaded.words(2 * B + 3)
PROMPTS = (
    *((*SYSTEM, *loaded.words(tail, seed=tail)) for tail in (1, 5, 14, 40)),  # alike, then each its own way
    SYSTEM,
    SYSTEM[: B + 2],
    loaded.words(3, seed=9),
    (*SYSTEM[: B + 5], *loaded.words(20, seed=4)),  # another way inside a block
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "attention_name"), [*((family, "sdpa") for family in FAMILIES), ("mistral", "eager")]
)
async def test_prompts_with_a_common_prefix_answer_as_alone(
    snapshots: dict[str, Path], models: dict[str, Any], family: str, attention_name: str
) -> None:
    expected = [loaded.generated(models[family], prompt, NEW) for prompt in PROMPTS]
    changes: dict[str, Any] = {"ctx_size": CTX, "parallel": 4, "prefill_chunk": 24, "attention": attention_name}
    async with loaded.serving(loaded.load(snapshots[family], **changes)) as engine:
        first = await loaded.complete_one(engine, PROMPTS[0], max_tokens=NEW)
        assert (first.tokens, first.cached_tokens) == (expected[0], 0)
        for _ in range(2):  # with the beginning of one; then with everything of all
            logsums = await asyncio.gather(*(loaded.complete_one(engine, prompt, max_tokens=NEW) for prompt in PROMPTS))
            assert [each.tokens for each in logsums] == expected
        counts = [each.cached_tokens for each in logsums]
    assert counts[4:] == [2 * B, B, 0, 2 * B], "whole blocks, never the last token; none of three tokens"
    assert all(count >= 2 * B for count in counts[:4])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "caches"), [*((family, True) for family in FAMILIES), ("llama", False)])
async def test_text_is_the_same_when_the_cache_is_too_small_for_all(
    snapshots: dict[str, Path], models: dict[str, Any], family: str, caches: bool
) -> None:
    """Eight sequences of up to five blocks, in a pool of eight: most are put back, some of them twice.

    tests/worker/engines/test_engine_equality.py has all families without prefix caching.
    """
    expected = [loaded.generated(models[family], prompt, NEW) for prompt in PROMPTS]
    changes: dict[str, Any] = {"ctx_size": CTX, "parallel": 8, "prefill_chunk": 24, "kv_tokens": CTX}
    async with loaded.serving(loaded.load(snapshots[family], **changes, prefix_caching=caches)) as engine:
        logsums = await asyncio.gather(*(loaded.complete_one(engine, prompt, max_tokens=NEW) for prompt in PROMPTS))
        assert [each.tokens for each in logsums] == expected
        choices = await loaded.collect_choices(engine, loaded.generation(PROMPTS[3], n=6, max_tokens=NEW))
        assert [each.tokens for each in choices] == [expected[3]] * 6
        check_scheduler(loaded.work_of(engine)._scheduler)


async def test_a_cancel_frees_blocks_that_others_share_for_them_alone(
    snapshots: dict[str, Path], models: dict[str, Any]
) -> None:
    async with loaded.serving(loaded.load(snapshots["llama"], ctx_size=CTX, parallel=4, kv_tokens=2 * CTX)) as engine:
        expected = [loaded.generated(models["llama"], prompt, NEW) for prompt in PROMPTS[:4]]
        for _ in range(3):
            streams = [engine.generate(loaded.generation(SYSTEM, max_tokens=60, n=2)) for _ in range(2)]
            tasks = [asyncio.create_task(loaded.complete_one(engine, prompt, max_tokens=NEW)) for prompt in PROMPTS[:4]]
            async with asyncio.timeout(loaded.DEADLINE):
                for stream in streams:
                    for _ in range(3):
                        await anext(stream)
                    await stream.aclose()
                logsums = await asyncio.gather(*tasks)
            assert [each.tokens for each in logsums] == expected
        check_scheduler(loaded.work_of(engine)._scheduler)


def test_a_cache_that_cannot_hold_one_request_is_refused_with_the_way_out() -> None:
    with pytest.raises(StartError, match=r"kv-tokens 100 is less than the 128 tokens .* raise kv-tokens"):
        make_blocks(Serve(snapshot="x", listen="", kv_tokens=100), CTX, caches=True)

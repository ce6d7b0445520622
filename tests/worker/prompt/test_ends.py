"""End of an answer (stop strings, stop tokens, visibility of the end) and cache salts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.loaded import complete_one, load
from worker.engines.transformers.engine import TransformersEngine
from worker.errors import InvalidValue
from worker.interface import SamplingParams

PROMPT = (9, 41, 70, 77, 80)
LONG = tuple(range(5, 45))


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "ahead"])
def engine(llama: Path, request: Any) -> Iterator[TransformersEngine]:
    engine = load(llama, ctx_size=128, parallel=4, ahead=request.param)
    yield engine
    asyncio.run(engine.close())


async def test_a_stop_token_of_the_request_ends_its_answer(engine: TransformersEngine) -> None:
    free = await complete_one(engine, PROMPT, max_tokens=12)
    end = free.tokens[5]
    at = free.tokens.index(end)
    held = await complete_one(engine, PROMPT, max_tokens=12, ends=frozenset({end}))
    assert (held.tokens, held.finish, held.stop) == (free.tokens[:at], "stop", None)
    assert held.deltas[-1].hidden_tokens == (end,)
    shown = await complete_one(engine, PROMPT, max_tokens=12, ends=frozenset({end}), include_stop=True)
    assert (shown.tokens, shown.finish, shown.deltas[-1].hidden_tokens) == (free.tokens[: at + 1], "stop", ())


async def test_ignore_eos_ignores_only_the_models_end_tokens_and_min_tokens_all(llama: Path) -> None:
    engine = load(llama, ctx_size=128, parallel=1)
    free = await complete_one(engine, PROMPT, max_tokens=12, sampling=SamplingParams(temperature=0.0, ignore_eos=True))
    end = free.tokens[3]
    at = free.tokens.index(end)
    stated = frozenset({end})
    ignoring = SamplingParams(temperature=0.0, ignore_eos=True)
    assert (await complete_one(engine, PROMPT, max_tokens=12, sampling=ignoring, ends=stated)).tokens == free.tokens[
        :at
    ]
    patient = SamplingParams(temperature=0.0, ignore_eos=True, min_tokens=at + 2)
    received = await complete_one(engine, PROMPT, max_tokens=12, sampling=patient, ends=stated)
    assert len(received.tokens) >= at + 2
    assert end not in received.tokens[: at + 2]
    await engine.close()


async def test_a_stop_string_is_shown_on_request_and_its_tokens_are_always_reported(engine: TransformersEngine) -> None:
    free = await complete_one(engine, PROMPT, max_tokens=12)
    stop = "".join(delta.text for delta in free.deltas[3:6])
    hidden = await complete_one(engine, PROMPT, max_tokens=12, stop=(stop,))
    shown = await complete_one(engine, PROMPT, max_tokens=12, stop=(stop,), include_stop=True)
    at = free.text.index(stop)
    assert (hidden.finish, hidden.stop) == ("stop", stop)
    assert (hidden.text, shown.text) == (free.text[:at], free.text[: at + len(stop)])
    every = [[*received.tokens, *received.deltas[-1].hidden_tokens] for received in (hidden, shown)]
    assert every[0] == every[1] == free.tokens[: len(every[0])]
    assert hidden.timings is not None
    assert hidden.timings.completion_tokens == len(every[0]) > len(hidden.tokens), "all that was computed is counted"


async def test_a_stop_token_outside_the_vocabulary_is_rejected(engine: TransformersEngine) -> None:
    with pytest.raises(InvalidValue, match="stop_token_ids"):
        await complete_one(engine, PROMPT, ends=frozenset({10**6}))


async def test_cached_prompts_are_shared_only_with_the_same_salt(llama: Path) -> None:
    engine = load(llama, ctx_size=128, parallel=2)

    async def cached(salt: str) -> int:
        return (await complete_one(engine, LONG, max_tokens=1, salt=salt)).cached_tokens

    assert await cached("mine") == 0
    assert await cached("mine") > 0
    assert await cached("yours") == 0
    assert await cached("") == 0
    await engine.close()

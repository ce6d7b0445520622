"""Promises of the engine to those who want vectors: right pooling, no influence of company, clear limits."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny
from tests.worker.loaded import load, say, serving
from worker.engine.embedding import WASTE, choose, normalized, pool, resolve_pooling
from worker.engine.engine import TransformersEngine
from worker.errors import ContextExceeded, Draining, InvalidValue, QueueFull, StartError, UnsupportedByModel

torch.set_num_threads(1)
PROMPTS = [tuple(range(3, 3 + length)) for length in (4, 31, 1, 9, 60, 5, 12)]


@pytest.fixture(scope="module", params=["bert-embed", "llama-embed"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(request.param, tmp_path_factory.mktemp("embed"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TransformersEngine]:
    engine = load(folder, parallel=3, prefill_chunk=64)
    yield engine
    asyncio.run(engine.close())


def hidden(folder: Path, prompt: Sequence[int]) -> torch.Tensor:
    """Last hidden states `[tokens, width]` of a plain forward."""
    model: Any = transformers.AutoModel.from_pretrained(folder)
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([prompt])).last_hidden_state[0]
    return states


def unit(vector: torch.Tensor) -> list[float]:
    numbers: list[float] = (vector / vector.norm()).tolist()
    return numbers


async def test_vectors_are_the_mean_of_a_plain_forward_whatever_else_is_in_the_batch(
    engine: TransformersEngine, folder: Path
) -> None:
    assert engine.capabilities == {"embedding"}
    together = await engine.embed(PROMPTS)
    split = await asyncio.gather(*(engine.embed([prompt]) for prompt in PROMPTS))
    for prompt, vector, (alone,) in zip(PROMPTS, together, split, strict=True):
        exact = unit(hidden(folder, prompt).mean(0))
        assert vector == pytest.approx(exact, abs=1e-5)
        assert alone == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize(("pooling", "position"), [("cls", 0), ("last", -1)])
async def test_pooling_is_as_asked(pooling: str, position: int, tmp_path: Path) -> None:
    folder = tiny.make("llama-embed", tmp_path)
    async with serving(load(folder, pooling=pooling, embd_normalize=-1)) as engine:
        vectors = await engine.embed(PROMPTS)
    for prompt, vector in zip(PROMPTS, vectors, strict=True):
        assert vector == pytest.approx(hidden(folder, prompt)[position].tolist(), abs=1e-4)


async def test_a_text_model_embeds_when_told_to(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path)
    async with serving(load(folder, task="embed")) as engine:
        (vector,) = await engine.embed(PROMPTS[:1])
    assert vector == pytest.approx(unit(hidden(folder, PROMPTS[0]).mean(0)), abs=1e-5)


async def test_a_causal_layout_of_sentence_transformers_is_an_embedder_without_being_told(tmp_path: Path) -> None:
    folder = tiny.make("qwen3", tmp_path)
    (folder / "1_Pooling").mkdir()
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    async with serving(load(folder)) as engine:
        assert engine.capabilities == {"embedding"}
        (vector,) = await engine.embed(PROMPTS[1:2])
    assert vector == pytest.approx(unit(hidden(folder, PROMPTS[1])[-1]), abs=1e-5)


async def test_what_cannot_be_embedded_is_refused(engine: TransformersEngine) -> None:
    with pytest.raises(ContextExceeded):
        await engine.embed([PROMPTS[0], (5,) * 257])
    with pytest.raises(InvalidValue, match="vocabulary"):
        await engine.embed([(5, 9999)])
    with pytest.raises(InvalidValue, match="empty"):
        await engine.embed([()])
    with pytest.raises(UnsupportedByModel):
        await say(engine, PROMPTS[0])
    assert await engine.embed([]) == []
    assert len((await engine.embed([(5,) * 256]))[0]) == 64, "the longest input fits"


async def test_an_embedding_that_is_cancelled_leaves_the_queue(engine: TransformersEngine) -> None:
    many = asyncio.create_task(engine.embed([PROMPTS[4]] * 400))
    await asyncio.sleep(0)
    many.cancel()
    with pytest.raises(asyncio.CancelledError):
        await many
    assert len(await engine.embed(PROMPTS[:1])) == 1
    assert engine.occupancy.waiting == 0


async def test_the_queue_of_embeddings_is_bounded_and_ends_with_the_engine(folder: Path) -> None:
    engine = load(folder, parallel=1, queue_size=1, prefill_chunk=8)
    running = [asyncio.create_task(engine.embed([PROMPTS[4]] * 500)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await engine.embed(PROMPTS[:1])
    await engine.close()
    for each in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(each, Draining)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 600), st.integers(1, 8))
def test_a_batch_takes_the_oldest_and_keeps_budget_rows_and_waste(lengths: list[int], budget: int, rows: int) -> None:
    chosen = choose(lengths, budget, rows)
    padded = len(chosen) * max(lengths[index] for index in chosen)
    assert chosen[0] == 0
    assert len(set(chosen)) == len(chosen) <= rows
    assert padded <= max(budget, lengths[0])
    assert sum(lengths[index] for index in chosen) >= (1 - WASTE) * padded - 1e-9


def test_equal_lengths_fill_a_batch() -> None:
    assert choose([9, 9, 50, 9, 9], budget=100, rows=3) == [0, 1, 3]


def test_pooling_looks_at_tokens_only() -> None:
    states = torch.arange(24, dtype=torch.float32).view(2, 4, 3)
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    assert pool(states, mask, "mean")[0].tolist() == [1.5, 2.5, 3.5]
    assert pool(states, mask, "last").tolist() == [[3.0, 4.0, 5.0], [21.0, 22.0, 23.0]]
    assert pool(states, mask, "cls")[1].tolist() == [12.0, 13.0, 14.0]


@pytest.mark.parametrize(
    ("norm", "expected"), [(-1, [3.0, -4.0]), (0, [24570.0, -32760.0]), (1, [3 / 7, -4 / 7]), (2, [0.6, -0.8])]
)
def test_vectors_are_normalised_as_asked(norm: int, expected: list[float]) -> None:
    assert normalized(torch.tensor([[3.0, -4.0]]), norm)[0].tolist() == pytest.approx(expected)
    assert not normalized(torch.zeros(1, 2), norm).isnan().any()


def test_a_pooling_that_we_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="none"):
        resolve_pooling("none", tmp_path)
    with pytest.raises(StartError, match="rank"):
        resolve_pooling("rank", tmp_path)
    (tmp_path / "modules.json").write_text('[{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]')
    with pytest.raises(StartError, match="Dense"):
        resolve_pooling("", tmp_path)
    assert resolve_pooling("cls", tmp_path) == "cls"
    (tmp_path / "modules.json").write_text('[{"path": "p", "type": "sentence_transformers.models.Pooling"}]')
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(StartError, match="max"):
        resolve_pooling("", tmp_path)
    (tmp_path / "p" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    assert resolve_pooling("", tmp_path) == "last"

"""Keys and values that are kept in another type: the formula, and text that is transformers' own over such a cache."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from router.memory.segments import head_bytes
from tests import tiny
from tests.worker import kept, loaded
from tests.worker.integrity import check_scheduler
from worker.engines.transformers.attention.quantized_kv_types import KvStorageType
from worker.errors import StartError
from worker.protocol.memory import kv_group_size

CTX, NEW = 128, 24
QUANTIZED = ("int8", "int4")


# The formula


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["f32", "f16", "bf16", *QUANTIZED])
def test_unquantized_numbers_follow_the_documented_formula(name: str, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(0)
    for heads, dim in ((2, 64), (1, 80), (3, 16), (1, 8)):
        given = torch.randn(5, heads, dim, generator=source).to(dtype) * 3
        given[1, 0], given[2, 0], given[3] = 0.0, -7.0, given[3] * 1e-6
        kind = KvStorageType.of(name, heads, dim, dtype)
        if kind is None:
            assert str(dtype).endswith({"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[name])
            continue
        records = kind.pack(given)
        assert records.shape == (5, kind.width)
        assert torch.equal(kind.unpack(records), kept.kept(given, name))


def test_bytes_of_a_record() -> None:
    def width(name: str, heads: int, dim: int) -> int:
        kind = KvStorageType.of(name, heads, dim, torch.float32)
        assert kind is not None
        return kind.width

    assert width("int8", 8, 128) == 8 * (128 + 4 * 2)
    assert width("int4", 8, 128) == 8 * (64 + 4 * 4)
    assert width("bf16", 8, 128) == 8 * 256
    for name in ("f32", "f16", "bf16", *QUANTIZED):
        for dim in (8, 16, 37 if name == "int8" else 40, 64, 72, 80, 96, 128, 192, 512):
            kind = KvStorageType.of(name, 2, dim, torch.float64)
            assert kind is not None
            assert kind.width == 2 * head_bytes(name, dim, 8), "as the router reckons"
    assert [kv_group_size(dim) for dim in (128, 80, 96, 72, 8, 37, 4)] == [32, 20, 32, 24, 8, 37, 4]
    with pytest.raises(StartError, match=r"int4 .* heads have 37; set kv-cache-dtype to int8"):
        KvStorageType.of("int4", 1, 37, torch.float32)


@pytest.mark.parametrize("name", [*QUANTIZED, "f16"])
def test_tensors_that_are_not_contiguous_are_stored_alike(name: str) -> None:
    """Keys of families with partial rotary positions arrive as transposed views."""
    given = torch.randn(2, 3, 5, 32, generator=torch.Generator().manual_seed(0)).transpose(1, 2)  # [2, 5, 3, 32]
    storage = KvStorageType.of(name, 3, 32, torch.float32)
    assert storage is not None
    assert not given.is_contiguous()
    assert torch.equal(storage.pack(given), storage.pack(given.contiguous()))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_nan_stays_nan(name: str, wrong: float) -> None:
    kind = KvStorageType.of(name, 2, 32, torch.float32)
    assert kind is not None
    given = torch.randn(3, 2, 32)
    given[1, 0, 5] = wrong
    found = kind.unpack(kind.pack(given))
    assert not bool(found[1, 0].isfinite().any())
    assert bool(found[[0, 2]].isfinite().all())
    assert bool(found[1, 1].isfinite().all())


# Text

SYSTEM = loaded.words(35)
PROMPTS = (
    *((*SYSTEM, *loaded.words(tail, seed=tail)) for tail in (1, 14, 40)),
    SYSTEM,
    SYSTEM[:18],
    loaded.words(3, seed=9),
)


def expected(model: Any, name: str) -> list[list[int]]:
    texts = [loaded.generated(model, prompt, NEW, past_key_values=kept.cache(model, name)) for prompt in PROMPTS]
    if name in QUANTIZED:
        exact = (loaded.generated(model, prompt, NEW) for prompt in PROMPTS)  # computed up to the first that differs
        assert any(text != other for text, other in zip(texts, exact, strict=True)), "the text shows the cache's type"
    return texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "kv_tokens"),
    [
        ("llama", "int4", CTX),
        ("mistral", "int8", CTX),
        ("qwen3", "bf16", CTX),
        ("gemma2", "int8", 0),  # windows
        ("deepseek_v3", "int4", 0),  # compressed rows
        ("falcon_h1", "int4", 0),  # states and keys in one layer
        ("t5", "int4", 0),  # keys of what an encoder read
    ],
)
async def test_text_is_that_of_generate_over_such_a_cache(
    family: str, name: str, kv_tokens: int, tmp_path: Path
) -> None:
    """In blocks: with cached prefixes and a pool too small for all, so that some are preempted. Without blocks: by the
    model's own forward."""
    folder = tiny.make(family, tmp_path, seed=2 if family == "t5" else 0)
    texts = expected(loaded.reference(folder), name)
    changes: dict[str, Any] = {"ctx_size": CTX, "parallel": 4, "prefill_chunk": 24, "kv_cache_dtype": name}
    async with loaded.serving(loaded.load(folder, **changes, kv_tokens=kv_tokens)) as engine:
        assert (await loaded.complete_one(engine, PROMPTS[0], max_tokens=NEW)).tokens == texts[0]
        logsums = await asyncio.gather(*(loaded.complete_one(engine, prompt, max_tokens=NEW) for prompt in PROMPTS))
        assert [each.tokens for each in logsums] == texts
        assert any(each.cached_tokens for each in logsums) == bool(kv_tokens)
        choices = await loaded.collect_choices(engine, loaded.generation(PROMPTS[2], n=3, max_tokens=NEW))
        assert [each.tokens for each in choices] == [texts[2]] * 3
        check_scheduler(loaded.work_of(engine)._scheduler)
    assert len({token for text in texts for token in text}) > 10, "the text is varied enough for the comparison"

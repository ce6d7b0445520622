"""A pool of records: whatever is read, gathered, copied or erased is what was kept, and attention is over that. Text
over a quantized cache."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from router.memory.segments import head_bytes
from tests import tiny
from tests.worker import kept, loaded
from tests.worker.loaded import options, paged_runner, reference
from tests.worker.paged_reference import formula, positions, table
from tests.worker.scheduled import check_scheduler, sequence
from worker.engines.transformers.attention import dense, kv_pool, paged
from worker.engines.transformers.attention.kv_pool import QuantizedKvPool
from worker.engines.transformers.attention.quantized_kv_types import KvStorageType
from worker.engines.transformers.load.snapshot import load_config
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.backends import make_blocks, make_pool
from worker.engines.transformers.schedule.scheduler import Segment
from worker.errors import StartError
from worker.estimate.memory_tracer import live_bytes
from worker.fetch import demo
from worker.protocol.argv import Serve
from worker.protocol.memory import BLOCK_TOKENS, DEQUANTIZED_KV_BYTES, kv_group_size

B, CPU = BLOCK_TOKENS, torch.device("cpu")
KINDS = ("bf16", "int8", "int4")


def filled(name: str, *, heads: int, dim: int, rows: int, blocks: int) -> tuple[QuantizedKvPool, torch.Tensor]:
    """A pool, and what was written of keys and values in its layer 1, `[2, slots, heads, dim]`, as it is kept."""
    kind = KvStorageType.of(name, heads, dim, torch.float32)
    assert kind is not None
    pool = QuantizedKvPool(kind, layers=2, rows=rows, blocks=blocks, device=CPU)
    given = torch.randn(2, pool.positions, heads, dim, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(pool.positions, generator=torch.Generator().manual_seed(1))
    pool.write(1, order, *given[:, order])
    return pool, kept.kept(given, name)


@pytest.mark.parametrize("name", KINDS)
def test_reads_return_the_stored_tokens(name: str) -> None:
    pool, both = filled(name, heads=2, dim=32, rows=3, blocks=9)
    for spans in (((5, 40),), ((64, 30), (3, 1), (16, 8))):
        slots = [place for first, count in spans for place in range(first, first + count)]
        for found, whole in zip(pool.read(1, spans), both, strict=True):
            assert torch.equal(found, whole[slots].transpose(0, 1)[None])
    for found, whole in zip(pool.read_rows(1, 7, 48, 2, 20), both, strict=True):
        assert torch.equal(found, torch.stack([whole[7:27], whole[55:75]]).transpose(1, 2))
    for found, whole in zip(pool.gather(1, torch.tensor([4, 0, 8, 8]), 2), both, strict=True):
        by_block = whole.view(9, B, 2, 32)[[4, 0, 8, 8]].view(2, 2 * B, 2, 32)
        assert torch.equal(found, by_block.transpose(1, 2))


@pytest.mark.parametrize("name", KINDS)
def test_blocks_are_copied_with_all_that_belongs_to_them_and_erased_to_zeros(name: str) -> None:
    pool, both = filled(name, heads=2, dim=32, rows=2, blocks=4)
    pool.copy([(1, 2), (0, 1)])
    for found, whole in zip(pool.read(1, ((B, 2 * B),)), both, strict=True):
        assert torch.equal(found[0].transpose(0, 1), torch.cat([whole[:B], whole[B : 2 * B]]))
    pool.erase([1])
    assert not any(bool(each.any()) for each in pool.read(1, ((B, B),)))
    assert all(bool(each.any()) for each in pool.read(1, ((2 * B, B),)))


@pytest.mark.parametrize("name", KINDS)
def test_attention_over_quantized_tokens_follows_the_formula(name: str) -> None:
    """Rows enough for several pieces; one begins in blocks that another has, so that answers are merged."""
    pool, both = filled(name, heads=2, dim=64, rows=14, blocks=14 * 32)
    tables = [table(*range(32 * row, 32 * row + 31)) for row in range(13)]
    tables.append(table(*range(4), *range(13 * 32, 13 * 32 + 27)))
    decodes = tuple((each, 490 - 3 * row) for row, each in enumerate(tables))
    assert pool.rows_at_once(14, 490) < 13
    assert pool.rows_at_once(14, 490) * 490 * pool.token_bytes <= DEQUANTIZED_KV_BYTES["cpu"]
    packed = paged.PackedBatch(pool, torch.zeros(14, dtype=torch.int64), decodes, {})
    query = torch.randn(14, 4, 64, generator=torch.Generator().manual_seed(2))
    for kernel in (dense.sdpa, dense.eager):
        answers = packed.decode(paged.LayerAttention(kernel, 1, 0), query)
        for each, (blocks, end) in enumerate(decodes):
            answer, _ = formula(query[each], *(whole[positions(blocks, end)] for whole in both))
            torch.testing.assert_close(answers[each].double(), answer, atol=1e-5, rtol=1e-4)


def logits(folder: Path, name: str, tokens: list[int]) -> torch.Tensor:
    """Of every token, computed in chunks."""
    runner, blocks = paged_runner(options(folder, ctx_size=len(tokens), parallel=1, kv_cache_dtype=name))
    asker = sequence(0, tokens, prompt_logprobs=True)
    row, _ = blocks.admit(asker)
    parts = [(start, min(48, len(tokens) - start)) for start in range(0, len(tokens), 48)]
    return torch.cat([runner.run((Segment(asker, row, *part, blocks.table(row)),)) for part in parts])


def test_int8_changes_logits_by_hundredths_of_their_spread_and_int4_by_tenths() -> None:
    """Of the trained demo model; random weights of four families differ by as much (measured: 0.011 and 0.15)."""
    folder = Path(demo.__file__).parent / "chat"
    tokens = transformers.AutoTokenizer.from_pretrained(folder)("Who are you? I am a model, and the sky is blue. " * 6)
    plain, *others = (logits(folder, name, tokens["input_ids"]) for name in ("auto", "bf16", "int8", "int4"))
    spread = (plain - plain.mean(-1, keepdim=True)).norm(dim=-1)
    errors = [float(((each - plain).norm(dim=-1) / spread).mean()) for each in others]
    assert errors[0] < 0.01
    assert errors[1] < 0.02
    assert 0.05 < errors[2] < 0.25
    same = [float((each.argmax(-1) == plain.argmax(-1)).float().mean()) for each in others]
    assert same[1] > 0.97
    assert same[2] > 0.8


def test_nothing_that_was_dequantized_outlives_its_step(tmp_path: Path) -> None:
    """Not in the layers of transformers' cache either, which like to keep what they gave."""
    model = reference(tiny.make("gemma2", tmp_path)).eval()
    runner = AlignedRunner(model, rows=1, ctx_size=128, chunk=100, device=CPU, kv_dtype="int8")
    logits: list[torch.Tensor] = []
    live = live_bytes(lambda: logits.append(runner.run((Segment(sequence(0, 100), 0, 0, 100),))))
    dequantized = 100 * 2 * 2 * 16 * 4  # tokens, keys and values, heads, elements, bytes: of one layer
    assert live.peak > dequantized
    assert live.now - logits[0].nbytes < dequantized


def test_the_model_s_own_type_is_the_plain_pool(tmp_path: Path) -> None:
    asked = Serve(snapshot=str(tiny.make("llama", tmp_path)), listen="", ctx_size=32, parallel=1)
    config = load_config(asked)
    blocks = make_blocks(asked, 32, caches=True)
    for dtype, name in ((torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "auto")):
        assert type(make_pool(config, blocks, dtype, CPU, kv_dtype=name)) is kv_pool.KvPool
    assert type(make_pool(config, blocks, torch.float32, CPU, kv_dtype="f16")) is QuantizedKvPool


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

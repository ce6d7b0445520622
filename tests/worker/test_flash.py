"""FlashAttention over the pool: that it is called as its documentation says, and used only where it is right.

There is none without an accelerator; in its place stands the formula, behind the documented signature.
"""

import asyncio
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.worker.loaded import generated, load, load_with, reference, say, serving
from worker.engine import flash
from worker.engine.attention import Pool
from worker.engine.flash import Flash
from worker.engine.graphs import FixedRunner
from worker.engine.kv_cache import BLOCK_TOKENS
from worker.engine.runner import PackedRunner, Runner
from worker.errors import StartError

torch.set_num_threads(1)
CTX = 128
CPU = torch.device("cpu")


class Plain:
    """What version 3's `flash_attn_with_kvcache` computes, by its docstring, one sequence after another; it insists on
    the types and shapes that the real one checks."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, int]] = []
        """Of each: whether sequences had several tokens, and how many sequences there were."""

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: None = None,
        v: None = None,
        *,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        count = len(cache_seqlens)
        assert causal
        assert q.is_contiguous()
        assert page_table.is_contiguous()
        assert {each.dtype for each in (cache_seqlens, page_table)} == {torch.int32}
        assert k_cache.shape[1] == v_cache.shape[1] == BLOCK_TOKENS
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert int(page_table.max()) < len(k_cache)
        assert page_table.shape[0] == count
        assert page_table.shape[1] * BLOCK_TOKENS >= int(cache_seqlens.max())
        begins = list(range(count + 1))
        if cu_seqlens_q is None:
            assert (q.dim(), len(q), q.shape[1], max_seqlen_q) == (4, count, 1, None)
        else:
            assert cu_seqlens_q.dtype == torch.int32
            begins = cu_seqlens_q.tolist()
            assert max_seqlen_q == max(after - before for before, after in pairwise(begins))
            assert (q.dim(), len(q), len(begins)) == (3, begins[-1], count + 1)
        self.calls.append((cu_seqlens_q is not None, count))
        flat, answers = q.reshape(-1, *q.shape[-2:]), []
        for which in range(count):
            length, first, end = int(cache_seqlens[which]), begins[which], begins[which + 1]
            pages = page_table[which].long()
            keys, values = (self.lay_out(cache, pages)[:length] for cache in (k_cache, v_cache))
            answers.append(self.attend(flat[first:end], keys, values, softmax_scale, window_size))
        return torch.cat(answers).view_as(q)

    def lay_out(self, cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        return cache[pages].flatten(0, 1)

    def hidden(self, query: torch.Tensor, key: torch.Tensor, left: int) -> torch.Tensor:
        return (key > query) | (key < query - left if left >= 0 else key < 0)

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None, window: tuple[int, int]
    ) -> torch.Tensor:
        group = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
        last = torch.arange(len(keys) - len(q), len(keys))[:, None]  # the last query sees the last key
        scores = scores.masked_fill(self.hidden(last, torch.arange(len(keys)), window[0]), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


@pytest.mark.slow
@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral"])
async def test_text_equals_generate_whoever_shares_joins_or_begins_elsewhere(
    family: str, is_fixed: bool, tmp_path: Path
) -> None:
    """Grouped heads, and a window in each layer; prefixes that lie in another sequence's blocks, prompts in parts."""
    folder, kernels = tiny.make(family, tmp_path), Plain()

    def wrap(runner: Runner) -> Runner:
        assert isinstance(runner, PackedRunner)
        runner.flash = Flash(kernels, runner.pool)
        return FixedRunner(runner, rows=3, ctx_size=CTX) if is_fixed else runner

    model, source = reference(folder), random.Random(4)
    stem = tuple(source.randrange(2, 500) for _ in range(40))
    prompts = [stem, (*stem, 7, 8), (*stem[:20], 9), stem[:5], (5,)]
    engine = load_with(folder, wrap, ahead=True, ctx_size=CTX, parallel=3, prefill_chunk=24)
    async with serving(engine):
        first = await say(engine, stem, max_tokens=18)
        told = await asyncio.gather(*(say(engine, each, max_tokens=12 + len(each) % 5) for each in prompts))
    assert first.tokens == generated(model, stem, 18)
    assert [each.tokens for each in told] == [generated(model, each, 12 + len(each) % 5) for each in prompts]
    assert {several for several, _ in kernels.calls} == {False, True}
    assert max(count for _, count in kernels.calls) == 3


@pytest.fixture
def pool() -> Pool:
    return Pool(layers=1, kv_heads=2, head_dim=16, rows=2, blocks=4, dtype=torch.bfloat16, device=CPU)


def test_kernels_that_say_what_the_formula_says_are_taken(pool: Pool) -> None:
    for asked in ("auto", "flash"):
        kernels = Plain()
        assert flash.choose(asked, pool, 4, CPU, kernels) is not None
        assert kernels.calls == [(True, 2), (True, 2), (False, 2), (False, 2)], "a prompt and a step of decoding, each"
    assert flash.choose("sdpa", pool, 4, CPU, Plain()) is None


class Unpaged(Plain):
    """Reads pages one behind another, whatever the table says."""

    def lay_out(self, cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        return super().lay_out(cache, torch.arange(len(pages)))


class Wide(Plain):
    """Takes a window for one token more than it is."""

    def hidden(self, query: torch.Tensor, key: torch.Tensor, left: int) -> torch.Tensor:
        return super().hidden(query, key, left + 1 if left >= 0 else left)


class Elsewhere(Plain):
    """Aligns the first query with the first key."""

    def hidden(self, query: torch.Tensor, key: torch.Tensor, left: int) -> torch.Tensor:
        return super().hidden(query - query[0], key, left)


class Unable(Plain):
    """Was not built for this card."""

    def lay_out(self, cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("This flash attention build does not support headdim 16")


@pytest.mark.parametrize(
    ("kernels", "why"),
    [(Unpaged(), "off by"), (Wide(), "off by"), (Elsewhere(), "off by"), (Unable(), "does not support headdim 16")],
)
def test_kernels_that_fail_or_say_something_else_are_not_used(pool: Pool, kernels: Plain, why: str) -> None:
    assert flash.choose("auto", pool, 4, CPU, kernels) is None
    with pytest.raises(StartError, match=why):
        flash.choose("flash", pool, 4, CPU, kernels)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("llama", {}, "runs on CUDA devices"),
        ("llama", {"kv_cache_dtype": "int4"}, "kv-cache-dtype = int4 keeps another"),
        ("llama", {"kv_cache_dtype": "bf16"}, "kv-cache-dtype = bf16 keeps another"),
        ("llama", {"devices": ("cpu", "cpu"), "layers": ("1", "1")}, "split over devices"),
        pytest.param("mamba", {}, "keep no blocks", marks=pytest.mark.slow),
        ("bert-embed", {}, "keeps no blocks"),
    ],
)
def test_asked_for_where_it_cannot_be_had_it_is_refused_with_the_way_out(
    family: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    snapshot = tiny.make(family, tmp_path)
    for weights in snapshot.glob("*.safetensors"):
        weights.write_bytes(b"nobody reads this")
    with pytest.raises(StartError, match=why) as caught:
        load(snapshot, attention="flash", ctx_size=64, **changes)
    assert "leave attention at auto" in str(caught.value)


@pytest.mark.parametrize(
    ("device", "dtype", "why"),
    [
        ("cpu", torch.bfloat16, "CUDA"),
        ("cuda:0", torch.float32, "float32"),
        ("cuda:0", torch.bfloat16, "not installed"),
    ],
)
def test_it_is_not_even_tried_where_it_cannot_be(device: str, dtype: torch.dtype, why: str) -> None:
    small = Pool(layers=1, kv_heads=2, head_dim=16, rows=2, blocks=4, dtype=dtype, device=CPU)
    assert flash.choose("auto", small, 4, torch.device(device)) is None
    with pytest.raises(StartError, match=why):
        flash.choose("flash", small, 4, torch.device(device))


@pytest.mark.parametrize(("card", "is_suited"), [((8, 0), True), ((9, 0), True), ((7, 5), False), ((12, 0), False)])
def test_it_is_not_even_tried_on_cards_that_it_is_not_for(
    card: tuple[int, int], is_suited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it ends the process."""
    (tmp_path / f"{flash.MODULE}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    why = flash.unsuited(torch.bfloat16, torch.device("cuda:0"))
    assert (not why) == is_suited
    assert is_suited or f"{card[0]}.{card[1]}" in why

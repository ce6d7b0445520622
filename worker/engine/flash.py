"""FlashAttention over the pool, where version 3 is installed: one kernel for prompts and for those who decode.

Its `flash_attn_with_kvcache` reads keys and values through a table of pages of any size, so the pool suits it as it
lies: nothing is gathered, padded, masked or computed one sequence after another. (Version 2 asks for pages of at least
256 tokens, by its own docstring, and is left alone: small blocks are what lets requests share what they begin with.)

Whether it works on this card, with these heads and this type, no list says: it is tried at load on a few tokens, and
compared with the plain formula.
"""

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from worker.engine.attention import Pool
from worker.engine.kv_cache import BLOCK_TOKENS
from worker.engine.memory import is_exhausted, is_sticky, one_line, upload
from worker.engine.scheduler import Batch
from worker.errors import StartError

MODULE = "flash_attn_interface"
_TOLERANCE = 0.05
"""Of averages of numbers of about 1, in types of 16 bits; a token too few or too many makes ten times as much."""
_GENERATIONS = (8, 9)
"""Of cards that version 3 is written for: Ampere and Ada, and Hopper. On others it does not fail, it ends the process
(its launch.h: CHECK_CUDA), so that it must not even be tried."""

log = logging.getLogger(__name__)


class Kernels(Protocol):
    """What of FlashAttention 3 is called here."""

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        """`q` `[sequences, queries, heads, head_dim]`, or `[tokens, heads, head_dim]` with `cu_seqlens_q`; the answer
        is of the same shape. Caches `[pages, page tokens, kv_heads, head_dim]`; the last query sees the last key."""


@dataclass(frozen=True, slots=True)
class Paged:
    """The layout of one step (`attention.Layout`): where its tokens go, and which blocks each sequence has."""

    kernels: Kernels
    pool: Pool
    slots: torch.Tensor
    """`[tokens]`."""
    table: torch.Tensor
    """`[sequences, blocks]`, int32: padded with blocks that nobody looks at."""
    lengths: torch.Tensor
    """`[sequences]`, int32: tokens of each, those of this step included."""
    begins: torch.Tensor | None = None
    """`[sequences + 1]`, int32: where the tokens of each begin and end; None: there is one of each."""
    longest: int = 1
    """Tokens of one sequence in this step."""

    def attend(
        self,
        kernel: Any,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int,
        scaling: float | None,
    ) -> torch.Tensor:
        """See `Layout`; `kernel` is what would compute it without FlashAttention."""
        pool = self.pool
        pool.write(layer, self.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        keys, values = (
            store.view(pool.blocks, BLOCK_TOKENS, *store.shape[1:]) for store in (pool.keys[layer], pool.values[layer])
        )
        tokens = query[0].transpose(0, 1).contiguous()  # [tokens, heads, head_dim]
        answer = self.kernels.flash_attn_with_kvcache(
            tokens if self.begins is not None else tokens[:, None],
            keys,
            values,
            cache_seqlens=self.lengths,
            page_table=self.table,
            cu_seqlens_q=self.begins,
            max_seqlen_q=self.longest if self.begins is not None else None,
            softmax_scale=scaling,
            causal=True,
            window_size=(window - 1, 0) if window else (-1, -1),
        )
        return answer.reshape(1, *tokens.shape)


class Flash:
    """FlashAttention for one pool."""

    def __init__(self, kernels: Kernels, pool: Pool):
        self._kernels, self._pool = kernels, pool

    def packed(self, batch: Batch, device: torch.device) -> Paged:
        """The layout of a step whose sequences have any number of tokens."""
        slots: list[int] = []
        tables: list[Sequence[int]] = []
        begins = [0]
        for segment in batch:
            assert segment.table is not None, "this cache has blocks"
            for slot, tokens in segment.table.slots(segment.start, segment.end):
                slots.extend(range(slot, slot + tokens))
            tables.append(segment.table.blocks)
            begins.append(len(slots))
        width = max(map(len, tables))
        table = [block for blocks in tables for block in (*blocks, *[0] * (width - len(blocks)))]
        longest = max(segment.length for segment in batch)
        return Paged(
            self._kernels,
            self._pool,
            slots=upload(slots, torch.int64, device),
            table=upload(table, torch.int32, device).view(len(batch), width),
            lengths=upload([segment.end for segment in batch], torch.int32, device),
            begins=upload(begins, torch.int32, device) if longest > 1 else None,
            longest=longest,
        )

    def fixed(self, slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> Paged:
        """The layout of a step that decodes, from buffers on the device: `[rows]`, `[rows]`, `[rows, blocks]`."""
        return Paged(self._kernels, self._pool, slots.contiguous(), table.int().contiguous(), lengths.int())


def choose(asked: str, pool: Pool, heads: int, device: torch.device, kernels: Kernels | None = None) -> Flash | None:
    """FlashAttention if it works here, and `asked` (auto, flash, or another one) does not exclude it.

    `heads`: of queries. `kernels`: in place of the installed ones. Raises StartError if it was asked for in so many
    words and does not work.
    """
    if asked not in ("auto", "flash"):
        return None
    why = unsuited(pool.keys[0].dtype, device) if kernels is None else ""
    if pool.kept_as:
        why = keeps_another(pool.kept_as)
    if not why:
        kernels = kernels or cast("Kernels", importlib.import_module(MODULE))
        why = _tried(kernels, pool, heads, device)
    if not why:
        assert kernels is not None
        return Flash(kernels, pool)
    if asked == "flash":
        raise refused(why)
    if device.type == "cuda":
        log.info("FlashAttention is not used: %s", why)
    return None


def refused(why: str) -> StartError:
    """It was asked for, and cannot be had."""
    return StartError(
        f"attention = flash cannot be had: {why}; leave attention at auto, which takes the fastest there is"
    )


def keeps_another(kept_as: str) -> str:
    """Why it cannot be had beside a cache in another type than the model's."""
    return f"it reads keys and values in the model's own type, and kv-cache-dtype = {kept_as} keeps another"


def demand(device: torch.device) -> None:
    """Raises StartError if it cannot be had on `device`, whatever the model: known before any weight is read."""
    if why := _absent(device):
        raise refused(why)


def unsuited(dtype: torch.dtype, device: torch.device) -> str:
    """Why it need not be tried with a model of this type; empty if it has to be."""
    if device.type == "cuda" and dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, and this model in {str(dtype).removeprefix('torch.')}"
    if why := _absent(device):
        return why
    generation, minor = torch.cuda.get_device_capability(device)
    if generation not in _GENERATIONS:
        return f"it is for cards of compute capability 8 and 9, and {device} has {generation}.{minor}"
    return ""


def _absent(device: torch.device) -> str:
    """Why there is none for `device`; empty if there is."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, and this model is on {device}"
    if importlib.util.find_spec(MODULE) is None:
        return f"FlashAttention 3 (the module {MODULE}) is not installed; version 2 cannot read blocks as small as ours"
    return ""


@torch.inference_mode()
def _tried(kernels: Kernels, pool: Pool, heads: int, device: torch.device) -> str:
    """Why it does not work, by a step of a prompt and of one that decodes; empty if it does."""
    _, kv_heads, head_dim = pool.keys[0].shape
    store = pool.keys[0]
    small = Pool(layers=1, kv_heads=kv_heads, head_dim=head_dim, rows=2, blocks=6, dtype=store.dtype, device=device)
    source = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source).to(device, store.dtype)

    for each in (*small.keys, *small.values):
        each.copy_(drawn(*each.shape))
    tables = ((4, 1, 2), (5, 0))
    steps = (((36, 1), (5, 20)), ((36, 1), (24, 1)))  # where each begins, and how many tokens it has
    worst = 0.0
    try:
        for parts in steps:
            for window in (0, 7):
                layout = _layout(Flash(kernels, small), tables, parts, device)
                tokens = sum(count for _, count in parts)
                query, key, value = (
                    drawn(1, heads, tokens, head_dim),
                    *(drawn(1, kv_heads, tokens, head_dim) for _ in "kv"),
                )
                found = layout.attend(None, 0, query, key, value, window, None)
                expected = _plainly(small, tables, parts, query, window)
                worst = max(worst, float((found.float() - expected).abs().max()))
    except Exception as error:
        if is_sticky(error) or is_exhausted(error):
            raise
        return f"a trial failed ({type(error).__name__}: {one_line(error)})"
    return "" if worst <= _TOLERANCE else f"a trial of it was off by {worst:.2f}"


def _layout(
    flash: Flash, tables: Sequence[Sequence[int]], parts: Sequence[tuple[int, int]], device: torch.device
) -> Paged:
    """Of a trial's step."""
    slots = [
        blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
        for blocks, (start, count) in zip(tables, parts, strict=True)
        for at in range(start, start + count)
    ]
    width = max(map(len, tables))
    table = torch.tensor([[*blocks, *[0] * (width - len(blocks))] for blocks in tables], device=device)
    lengths = torch.tensor([start + count for start, count in parts], device=device)
    fixed = flash.fixed(torch.tensor(slots, device=device), lengths, table)
    if all(count == 1 for _, count in parts):
        return fixed
    begins = [0]
    for _, count in parts:
        begins.append(begins[-1] + count)
    longest = max(count for _, count in parts)
    return Paged(
        fixed.kernels, fixed.pool, fixed.slots, fixed.table, fixed.lengths,
        torch.tensor(begins, dtype=torch.int32, device=device), longest,
    )  # fmt: skip


def _plainly(
    pool: Pool,
    tables: Sequence[Sequence[int]],
    parts: Sequence[tuple[int, int]],
    query: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """The answers `[1, tokens, heads, head_dim]` by the formula, in float32, token by token."""
    _, heads, _, head_dim = query.shape
    group = heads // pool.keys[0].shape[1]
    answers, place = [], 0
    for blocks, (start, count) in zip(tables, parts, strict=True):
        slots = [block * BLOCK_TOKENS + at for block in blocks for at in range(BLOCK_TOKENS)]
        keys, values = (store[0][slots].float().repeat_interleave(group, 1) for store in (pool.keys, pool.values))
        for position in range(start, start + count):
            first = max(0, position + 1 - window) if window else 0
            mine = query[0, :, place].float()  # [heads, head_dim]
            scores = torch.einsum("hd,thd->ht", mine, keys[first : position + 1]) * head_dim**-0.5
            answers.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values[first : position + 1]))
            place += 1
    return torch.stack(answers)[None]

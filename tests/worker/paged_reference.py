"""Attention over a cache in blocks, by its formula."""

from collections.abc import Sequence

import torch

from worker.engines.transformers.attention import kv_pool
from worker.engines.transformers.schedule.kv_cache import BlockTable

CPU = torch.device("cpu")


def random_pool(
    *, rows: int, blocks: int, dtype: torch.dtype = torch.float32, kv_heads: int = 2, head_dim: int = 8
) -> kv_pool.KvPool:
    """A pool of one layer with random keys and values."""
    torch.manual_seed(0)
    pool = kv_pool.KvPool(
        layers=1, kv_heads=kv_heads, head_dim=head_dim, rows=rows, blocks=blocks, dtype=dtype, device=CPU
    )
    pool.keys[0].normal_()
    pool.values[0].normal_()
    return pool


def table(*blocks: int) -> BlockTable:
    made = BlockTable()
    for block in blocks:
        made.append(block)
    return made


def positions(table: BlockTable, end: int, window: int = 0) -> list[int]:
    """The positions in the pool of the tokens that a row attends to."""
    found = [place for first, count in table.spans(0, end) for place in range(first, first + count)]
    return found[-window:] if window else found


def formula(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Answer and logarithm of the sum, in float64, of one row: `query` `[heads, head_dim]`, keys and values
    `[tokens, kv_heads, head_dim]`."""
    group = query.shape[0] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("hd,phd->hp", query.double(), keys) / query.shape[-1] ** 0.5
    return torch.einsum("hp,phd->hd", scores.softmax(-1), values), scores.logsumexp(-1)


def assert_formula(
    answers: torch.Tensor,
    query: torch.Tensor,
    pool: kv_pool.KvPool,
    decodes: Sequence[tuple[BlockTable, int]],
    window: int = 0,
    *,
    atol: float = 1e-5,
    rtol: float = 1e-4,
) -> None:
    """Compare the answer of each row with the formula."""
    for place, (table, end) in enumerate(decodes):
        slots = positions(table, end, window)
        exact, _ = formula(query[place], pool.keys[0][slots], pool.values[0][slots])
        torch.testing.assert_close(answers[place].double(), exact, atol=atol, rtol=rtol)

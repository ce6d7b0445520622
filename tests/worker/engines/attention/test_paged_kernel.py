"""The decode kernel against plain attention. It runs where Triton is installed: on an accelerator, or on the CPU with
Triton's interpreter, which is selected with TRITON_INTERPRET=1 before the start."""

import os

import pytest
import torch

from worker.engines.transformers.attention import paged_kernel
from worker.protocol.memory import BLOCK_TOKENS

pytest.importorskip("triton", reason="torch for the CPU has no Triton; tests/gpu run this on an accelerator")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="neither an accelerator nor TRITON_INTERPRET=1"
)
DEVICE = "cpu" if INTERPRETED else "cuda:0"
DTYPES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
BLOCKS = 20


def plain(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor,
    window: int, scaling: float,
) -> torch.Tensor:  # fmt: skip
    """In float64, row by row."""
    found = []
    for row, length in enumerate(lengths.tolist()):
        places = [BLOCK_TOKENS * block + offset for block in tables[row].tolist() for offset in range(BLOCK_TOKENS)]
        places = places[max(0, length - window) if window else 0 : length]
        group = query.shape[1] // keys.shape[1]
        key, value = (each[places].double().repeat_interleave(group, 1) for each in (keys, values))
        scores = torch.einsum("hd,nhd->hn", query[row].double(), key) * scaling
        found.append(torch.einsum("hn,nhd->hd", scores.softmax(1), value))
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if not (INTERPRETED and name == "bfloat16")])  # not there
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "window"),
    [(1, 4, 2, 16, 0), (3, 4, 4, 80, 0), (5, 8, 1, 64, 7), (2, 4, 2, 128, 40), (70, 8, 8, 32, 0), (2, 20, 1, 256, 0)],
)
def test_it_equals_plain_attention_wherever_the_blocks_are(
    rows: int, heads: int, kv_heads: int, head_dim: int, window: int, dtype: str
) -> None:
    torch.manual_seed(rows)
    pool = rows * BLOCKS + 3
    kind = getattr(torch, dtype)
    keys, values = (torch.randn(pool * BLOCK_TOKENS, kv_heads, head_dim).to(DEVICE, kind) for _ in range(2))
    query = torch.randn(rows, heads, head_dim).to(DEVICE, kind)
    # As in the buffer of a graph: tables and lengths are columns.
    numbers = torch.zeros(rows, 4 + BLOCKS, dtype=torch.int64)
    numbers[:, 4:] = torch.stack([torch.randperm(pool)[:BLOCKS] for _ in range(rows)])
    numbers[:, 3] = torch.randint(1, BLOCKS * BLOCK_TOKENS + 1, (rows,))
    numbers[0, 3] = 1 if rows > 1 else BLOCKS * BLOCK_TOKENS
    numbers = numbers.to(DEVICE)
    found = paged_kernel.attend(query, keys, values, numbers[:, 4:], numbers[:, 3], window=window, scaling=0.3)
    expected = plain(query, keys, values, numbers[:, 4:], numbers[:, 3], window, 0.3)
    assert (found.double() - expected).norm() <= DTYPES[dtype] * expected.norm()


@pytest.mark.parametrize(("rows", "kv_heads", "parts"), [(1, 8, 32), (16, 8, 4), (64, 8, 1), (3, 1, 32), (600, 1, 1)])
def test_few_rows_are_divided_into_more_parts(rows: int, kv_heads: int, parts: int) -> None:
    assert paged_kernel.parts_for(rows, kv_heads) == parts

"""The decode kernel against plain attention. It runs where Triton is installed: on an accelerator, or on the CPU with
Triton's interpreter, which is selected with TRITON_INTERPRET=1 before the start."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.engines.transformers.attention import paged_kernel
from worker.engines.transformers.attention.kv_pool import KvPool
from worker.protocol.memory import BLOCK_TOKENS

triton: Any = pytest.importorskip("triton", reason="torch for the CPU has no Triton; gpu_check runs this on a GPU")
pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
computes = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="neither an accelerator nor TRITON_INTERPRET=1"
)
DEVICE = "cpu" if INTERPRETED else "cuda:0"
DTYPES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
BLOCKS = 20
# KiB of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide).
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


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


@computes
@pytest.mark.parametrize("dtype", [name for name in DTYPES if not (INTERPRETED and name == "bfloat16")])  # not there
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "window"),
    [
        (1, 4, 2, 16, 0),
        (3, 4, 4, 80, 0),
        (5, 8, 1, 64, 7),
        (2, 4, 2, 128, 40),
        (70, 8, 8, 32, 0),
        (2, 20, 1, 256, 0),
        (2, 7, 1, 8, 0),
    ],
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


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("group", "head_dim", "dtype", "is_whole"),
    [(4, 128, "bf16", False), (7, 64, "fp16", True), (1, 256, "fp32", False), (5, 8, "fp16", False)],
)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_it_can_be_compiled_for_each_kind_of_card_and_fits_its_shared_memory(
    capability: int, group: int, head_dim: int, dtype: str, is_whole: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """No card is needed to compile it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    decode, _ = paged_kernel._kernels()
    constants: dict[str, int] = paged_kernel.constants_for(group, head_dim, 4 if dtype == "fp32" else 2)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    constants["is_whole"] = is_whole
    types = dict.fromkeys(("query", "keys", "values"), f"*{dtype}") | {"blocks": "*i64", "lengths": "*i64"}
    types |= {"partial": f"*{dtype}" if is_whole else "*fp32", "sums": "*fp32", "scaling": "fp32"}
    types |= dict.fromkeys(
        ("blocks_stride", "lengths_stride", "keys_stride", "values_stride", "parts", "window"), "i32"
    )
    names: list[str] = decode.arg_names
    aligned = ("query", "keys", "values", "partial", "sums", "keys_stride", "values_stride")
    source = triton.compiler.ASTSource(
        decode,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    assert compiled.metadata.shared <= SHARED_KIB[capability] << 10


@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="there is no accelerator to compile it for")
def test_no_step_compiles_it_after_the_trial_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KvPool(
        layers=1, kv_heads=8, head_dim=32, rows=70, blocks=70 * BLOCKS, dtype=torch.float16, device=torch.device(DEVICE)
    )
    paged_kernel.try_out(pool, 24)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for rows, width, window in ((1, 1, 0), (1, 16, 0), (3, 5, 7), (70, 16, 0), (70, 19, 64)):
        query = torch.zeros(rows, 24, 32, dtype=torch.float16, device=DEVICE)
        graph = torch.ones(rows, 5 + width, dtype=torch.int64, device=DEVICE)
        other = torch.ones(rows * width + rows, dtype=torch.int64, device=DEVICE)
        for blocks, lengths in ((graph[:, 5:], graph[:, 3]), (other[:-rows].view(rows, width), other[-rows:])):
            paged_kernel.attend(query, pool.keys[0], pool.values[0], blocks, lengths, window=window, scaling=None)
    assert list(tmp_path.iterdir()) == []

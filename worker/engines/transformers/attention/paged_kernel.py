"""Decode attention on an accelerator: one Triton kernel that reads keys and values through block tables.

Each program computes the query heads of one key-value head of one sequence, over a part of its tokens (flash decoding:
Dao et al. 2023; online softmax: Milakov and Gimelshein 2018). A second kernel adds up the parts. Lengths and block
tables are read on the device, so one recorded CUDA graph serves all lengths, nothing is gathered or padded, and a
sequence may lie anywhere in the pool.

Only builds of torch for an accelerator bring Triton along, and it needs a C compiler. Without them attention gathers
keys and values.
"""

import functools
import importlib.util
import logging
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from worker.engines.transformers.attention.kv_pool import KvPool
from worker.engines.transformers.device.cuda_errors import one_line
from worker.protocol.memory import BLOCK_TOKENS

# Programs that keep all multiprocessors of a large card busy. A few rows are split into as many parts.
_PROGRAMS = 512
_MOST_PARTS = 32
_LEAST_SIZE = 16  # of each side of Triton's matrix products
_TILE_BYTES = 16 << 10  # keys of one step of the loop
_failures: list[str] = []  # errors of failed attempts in this process

log = logging.getLogger(__name__)


def is_available() -> bool:
    """True if nothing is missing on this machine to compile the kernel, and no attempt (`try_out`) has failed."""
    return not _failures and not missing()


@functools.cache
def missing() -> str:
    """Return the reason why Triton cannot compile the kernel on this machine, with the remedy; empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler; install gcc"
    # Debian's default scheme names another folder; Triton corrects it in the same way.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    if not Path(sysconfig.get_path("include", scheme), "Python.h").exists():
        return "Triton needs Python's header files; install python3-dev"
    return ""


def try_out(pool: KvPool, heads: int) -> None:
    """Compile the variants of the kernel that a model with `heads` query heads needs, and run each once.

    If that fails, a warning gives the reason, and attention in this process gathers keys and values from now on.
    """
    if not _is_plain_on_accelerator(pool):
        return
    why = missing()
    if not why:
        try:
            for rows in sorted({1, pool.rows}):  # the most parts and the fewest
                query = torch.zeros(rows, heads, pool.head_dim, dtype=pool.dtype, device=pool.device)
                numbers = torch.zeros(rows, 2, dtype=torch.int64, device=pool.device)
                blocks, lengths = numbers[:, :1], numbers[:, 1] + 1
                attend(query, pool.keys[0], pool.values[0], blocks, lengths, window=0, scaling=None)
            torch.cuda.synchronize(pool.device)
        except Exception as error:  # noqa: BLE001 - a compiler, a cache folder or a driver that does not suit Triton
            why = one_line(error)
            _failures.append(why)
    if why:
        log.warning("decode steps copy keys and values, which is slower: %s", why)


def supports(pool: KvPool) -> bool:
    """True if the kernel can read `pool`: on an accelerator, in the model's own type."""
    return _is_plain_on_accelerator(pool) and is_available()


def _is_plain_on_accelerator(pool: KvPool) -> bool:
    device = pool.device
    on_accelerator = device.type == "cuda" or (device.type == "cpu" and bool(device.index))  # a fake one of an estimate
    return on_accelerator and type(pool) is KvPool


def parts_for(rows: int, kv_heads: int) -> int:
    """Return the number of parts into which the tokens of each sequence are divided: a power of two."""
    parts = 1
    while parts < _MOST_PARTS and 2 * parts * rows * kv_heads <= _PROGRAMS:
        parts *= 2
    return parts


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    lengths: torch.Tensor,
    *,
    window: int,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of the newest token of each sequence: `query` `[rows, heads, head_dim]`, result alike.

    keys, values: `[positions, kv_heads, head_dim]` of one layer.
    blocks: `[rows, any]`, int64: block table of each row. Entries behind its length are not read.
    lengths: `[rows]`, int64: tokens of each row, at least 1.
    window: a row sees so many of its last tokens; 0: all.
    """
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    parts = parts_for(rows, kv_heads)
    query = query.contiguous()
    out = torch.empty_like(query)
    sums = query.new_empty(0, dtype=torch.float32)
    partial = out
    if parts > 1:
        partial = query.new_empty(rows, heads, parts, head_dim, dtype=torch.float32)
        sums = query.new_empty(rows, heads, parts, dtype=torch.float32)
    if isinstance(query, FakeTensor):  # in an estimate
        return out
    constants = constants_for(heads // kv_heads, head_dim, keys.element_size())
    decode, add_up = _kernels()
    # Triton launches on the current device, which is another one in a split model.
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        decode[(rows, kv_heads, parts)](
            query, keys, values, blocks, lengths, partial, sums,
            blocks.stride(0), lengths.stride(0), keys.stride(0), values.stride(0), scaling or head_dim**-0.5,
            parts, window, is_whole=parts == 1, **constants,
        )  # fmt: skip
        if parts > 1:
            add_up[(rows * heads,)](
                partial, sums, out, parts, most=_MOST_PARTS, head_dim=head_dim, width=constants["width"], num_warps=4
            )
    return out


def constants_for(group: int, head_dim: int, itemsize: int) -> dict[str, int]:
    """Return the constants with which `decode` is compiled. `group`: query heads of one key-value head; `itemsize`:
    bytes of an element of keys and values."""
    width = max(_LEAST_SIZE, _power_of_two(head_dim))
    tile = max(_LEAST_SIZE, min(128, _TILE_BYTES // (width * itemsize)))  # tokens of one step of the loop
    return {
        "group": group,
        "head_dim": head_dim,
        "block_tokens": BLOCK_TOKENS,
        "queries": max(_LEAST_SIZE, _power_of_two(group)),
        "width": width,
        "tile": tile,
        "num_warps": 4,
        "num_stages": 3 if tile * width * itemsize <= _TILE_BYTES else 2,
    }


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """The two kernels. Triton compiles them for each shape at the first call, and keeps them in its cache folder."""
    from worker.engines.transformers.attention import triton_decode

    return triton_decode.decode, triton_decode.add_up

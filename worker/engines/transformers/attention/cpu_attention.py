"""CPU attention for decodes: one query against many keys, where torch's kernel is slow.

Torch's kernel handles each head of each row separately, as a vector-matrix product. It reads keys and values at a third
of the memory bandwidth, and in bfloat16, where a single query does not use the CPU's bfloat16 instructions, at a
twentieth. `decode_attention` handles all rows and heads in a few calls: scores by a sampled matrix product (only the
entries that are needed), outputs as weighted sums of table rows, as for embeddings. Both read only visible tokens, in
place. Milliseconds for one layer with 12 heads of 64 and 16 rows of 40 to 140 tokens, read from memory (Zen 4, two
threads):

| | torch | two heads at once (`pair_heads`) | `decode_attention` |
|---|---|---|---|
| float32 | 1.06 | | 0.70 |
| bfloat16 | 3.6 | 1.15 | 0.50 |
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import embedding_bag

from worker.protocol.memory import SPREAD_SCORES, WIDENED_BYTES

# Minimum of rows by type. With fewer rows, and for other types, torch's kernel is as fast (measured as above).
_LEAST_ROWS = {torch.float32: 12, torch.bfloat16: 4}

with warnings.catch_warnings():  # torch warns about the first sparse CSR tensor of a process
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0], [], [], size=(0, 0), check_invariants=False)


def _products(
    rows: torch.Tensor, table: torch.Tensor, begins: torch.Tensor, places: torch.Tensor, scale: float
) -> torch.Tensor:
    """Products of row `r` of `rows` `[rows, dim]` with the rows `places[begins[r]:begins[r + 1]]` of `table`
    `[any, dim]`, times `scale`, as one vector `[places]`. All in float32."""
    found = rows.new_zeros(len(places))
    chosen = torch.sparse_csr_tensor(begins, places, found, size=(len(rows), len(table)), check_invariants=False)
    torch.sparse.sampled_addmm(chosen, rows, table.t(), beta=0.0, alpha=scale, out=chosen)
    return found


def _meta_products(
    rows: torch.Tensor, table: torch.Tensor, begins: torch.Tensor, places: torch.Tensor, scale: float
) -> torch.Tensor:
    return rows.new_empty(len(places))


# A registered operator, so that it also works on meta tensors (the memory estimate).
_library: Any = torch.library.Library("fleet_router", "DEF")  # type: ignore[no-untyped-call]  # torch
_library.define("products(Tensor rows, Tensor table, Tensor begins, Tensor places, float scale) -> Tensor")
_library.impl("products", _products, "CPU")
_library.impl("products", _meta_products, "Meta")
products: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
products = torch.ops.fleet_router.products.default


@dataclass(frozen=True, slots=True)
class RowPositions:
    """Positions of the keys and values of some rows: those of row `r` begin at position `low + r * stride`.

    With stride 0, `tokens` are positions themselves, and rows may be anywhere. bfloat16 keys need a stride.
    """

    low: int
    stride: int
    # [rows, tokens], int32: offsets of the visible tokens. Hidden entries repeat the offset of a visible token.
    tokens: torch.Tensor
    _cache: dict[tuple[int, int, bool], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def of(self, kv_heads: int, queries: int, *, is_dense: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of single heads' vectors, `[rows * kv_heads * queries * tokens]`, and where those of each query begin
        and end, `[rows * kv_heads * queries + 1]`. Computed by the first layer, shared by the others.

        `is_dense`: of a dense copy, in which the tokens of each row follow those of the row before.
        """
        key = kv_heads, queries, is_dense
        if key not in self._cache:
            rows, tokens = self.tokens.shape
            low, stride = (0, tokens) if is_dense else (self.low, self.stride)
            positions = self.tokens + (low + stride * torch.arange(rows, dtype=torch.int32))[:, None]
            indices = positions[:, None, None] * kv_heads + torch.arange(kv_heads, dtype=torch.int32)[:, None, None]
            indices = indices.expand(rows, kv_heads, queries, tokens).reshape(-1)
            self._cache[key] = indices, torch.arange(0, len(indices) + 1, tokens, dtype=torch.int32)
        return self._cache[key]


def max_tokens(rows: int, heads: int, keys: torch.Tensor) -> int:
    """Maximum of tokens per row for which `decode_attention` is available and faster; 0 if it never is. `keys`
    `[positions, kv_heads, head_dim]`."""
    positions, kv_heads, head_dim = keys.shape
    # sparse CSR indices are int32 here, and a widened copy and the scores are bounded in bytes
    if keys.device.type != "cpu" or rows < _LEAST_ROWS.get(keys.dtype, rows + 1) or positions * kv_heads >= 1 << 31:
        return 0
    widened = WIDENED_BYTES // (4 * kv_heads * head_dim) if keys.dtype == torch.bfloat16 else SPREAD_SCORES
    return min(widened, SPREAD_SCORES // (rows * heads))


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: RowPositions,
    mask: torch.Tensor | None,
    *,
    scaling: float | None,
    logsums: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention of `query` `[rows, kv_heads, queries, head_dim]` to `keys` `[positions, kv_heads, head_dim]`.

    `mask` `[rows, 1, 1, tokens]` is added to the scores. If `logsums` is given, it receives their log-sum-exp
    `[rows, kv_heads, queries]`.
    """
    _, kv_heads, queries, head_dim = query.shape
    # [rows, kv_heads, queries, tokens]
    scores = _scores(query, keys, places, head_dim**-0.5 if scaling is None else scaling)
    if mask is not None:
        scores += mask
    if logsums is not None:
        logsums.append(torch.logsumexp(scores, dim=-1))
    weights = torch.softmax(scores, dim=-1)
    del scores
    indices, begins = places.of(kv_heads, queries)
    weights = weights.to(values.dtype).view(-1)
    # embedding_bag is a weighted sum of table rows: here the values of one head, weighted by the softmax.
    table = values.view(-1, head_dim)
    return embedding_bag(indices, table, begins[:-1], mode="sum", per_sample_weights=weights).view(query.shape)


def _scores(query: torch.Tensor, keys: torch.Tensor, places: RowPositions, scaling: float) -> torch.Tensor:
    """`[rows, kv_heads, queries, tokens]`, in float32."""
    _, kv_heads, queries, head_dim = query.shape
    tokens = places.tokens.shape[1]
    if keys.dtype == torch.float32:
        indices, begins = places.of(kv_heads, queries)
        table = keys.view(-1, head_dim)
        scores = products(query.reshape(-1, head_dim), table, begins, indices, scaling)
        return scores.view(*query.shape[:3], tokens)
    # sampled_addmm has no bfloat16: convert the keys, some rows at a time so that the copy stays in the cache.
    most = WIDENED_BYTES // (4 * tokens * kv_heads * head_dim)
    firsts = range(0, len(query), most)
    parts = [_widened_scores(query[first : first + most], keys, places, first, scaling) for first in firsts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _widened_scores(
    query: torch.Tensor, keys: torch.Tensor, places: RowPositions, first: int, scaling: float
) -> torch.Tensor:
    """As `_scores`, for the rows of `query`, which begin at row `first`, with a float32 copy of their keys."""
    rows, kv_heads, queries, head_dim = query.shape
    tokens, wide = places.tokens.shape[1], kv_heads * head_dim
    begin = keys.storage_offset() + (places.low + first * places.stride) * wide
    table = keys.as_strided((rows, tokens, wide), (places.stride * wide, wide, 1), begin)
    widened = table.to(torch.float32, memory_format=torch.contiguous_format).view(-1, head_dim)
    indices, begins = places.of(kv_heads, queries, is_dense=True)
    count = rows * kv_heads * queries
    scores = products(
        query.float().reshape(-1, head_dim), widened, begins[: count + 1], indices[: count * tokens], scaling
    )
    return scores.view(*query.shape[:3], tokens)


def pair_heads(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Combine two heads of one query each into one head of two queries with zeros for the other head's elements.

    Two queries are enough for torch's bfloat16 kernel to use matrix instructions; the zeros change no sum. Returns
    query, keys and values for the kernel, whose output goes through `unpair_heads`. None unless it is bfloat16 on the
    CPU and the keys and values `[rows, kv_heads, tokens, head_dim]` of two heads are adjacent in memory.
    """
    rows, heads, queries, dim = query.shape
    suits = query.dtype == torch.bfloat16 and query.device.type == "cpu" and queries == 1 and heads % 2 == 0
    if not suits or any(tensor.stride(1) != dim or tensor.stride(3) != 1 for tensor in (keys, values)):
        return None
    wide = query.new_zeros(rows, heads // 2, 2, 2, dim)
    wide.diagonal(dim1=2, dim2=3).copy_(query.view(rows, heads // 2, 2, dim).transpose(2, 3))
    keys, values = (
        tensor.as_strided(
            (rows, heads // 2, tensor.shape[2], 2 * dim), (tensor.stride(0), 2 * dim, tensor.stride(2), 1)
        )
        for tensor in (keys, values)
    )
    return wide.view(rows, heads // 2, 2, 2 * dim), keys, values


def unpair_heads(answer: torch.Tensor) -> torch.Tensor:
    """`[rows, pairs, 2, 2 * head_dim]` to `[rows, heads, 1, head_dim]`: each query keeps its own head's half."""
    rows, pairs, _, wide = answer.shape
    own = answer.reshape(rows, pairs, 2, 2, wide // 2).diagonal(dim1=2, dim2=3).transpose(2, 3)
    return own.reshape(rows, 2 * pairs, 1, wide // 2)

"""Attention on the CPU where torch's kernel is slow: one query against many keys, as in steps of decoding.

Torch's kernel takes each head of each row by itself, and multiplies a vector with a matrix: it reads keys and values
at a third of the memory's speed, and in bfloat16, where a single query goes past the processor's instructions for it,
at a twentieth. `spread` takes all rows and heads in a few calls: scores by the product of two matrices at chosen places
only, answers as the weighted sums of rows of a table, as embeddings are. Both read just what is seen, where it lies.
Milliseconds of one layer of 12 heads of 64, of 16 rows with 40 to 140 tokens each, that come from memory (Zen 4, two
threads):

| | torch | two heads at once (`paired`) | `spread` |
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

_LEAST_ROWS = {torch.float32: 12, torch.bfloat16: 4}
"""Fewer are left to torch's kernel, which is no slower then. Types that are not here are, too."""

with warnings.catch_warnings():  # what torch says of the first such tensor of a process
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0], [], [], size=(0, 0), check_invariants=False)


def _products(
    rows: torch.Tensor, table: torch.Tensor, begins: torch.Tensor, places: torch.Tensor, scale: float
) -> torch.Tensor:
    """Of row `r` of `rows` `[rows, dim]` with each of those of `table` `[any, dim]` that `places` names from
    `begins[r]` to `begins[r + 1]`, times `scale`: as many as `places`. All in float32."""
    found = rows.new_zeros(len(places))
    chosen = torch.sparse_csr_tensor(begins, places, found, size=(len(rows), len(table)), check_invariants=False)
    torch.sparse.sampled_addmm(chosen, rows, table.t(), beta=0.0, alpha=scale, out=chosen)
    return found


def _like_places(
    rows: torch.Tensor, table: torch.Tensor, begins: torch.Tensor, places: torch.Tensor, scale: float
) -> torch.Tensor:
    return rows.new_empty(len(places))


# an operator, so that it has a result for tensors without content, too
_library: Any = torch.library.Library("fleet_router", "DEF")  # type: ignore[no-untyped-call]  # torch
_library.define("products(Tensor rows, Tensor table, Tensor begins, Tensor places, float scale) -> Tensor")
_library.impl("products", _products, "CPU")
_library.impl("products", _like_places, "Meta")
products: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
products = torch.ops.fleet_router.products.default


@dataclass(frozen=True, slots=True)
class Places:
    """Where the keys and values of some rows lie: those of row `r` from slot `low + r * stride` on."""

    low: int
    stride: int
    tokens: torch.Tensor
    """`[rows, tokens]`, int32: from there on, those that the row sees, and one that it sees in place of each other."""
    _made: dict[tuple[int, int, int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def of(self, kv_heads: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of single heads' vectors `[rows * kv_heads * queries * tokens]`, and where each query's begin among
        them, and end, `[rows * kv_heads * queries + 1]`. Made for the first layer that asks."""
        return self._at(kv_heads, queries, self.low, self.stride)

    def close_by(self, kv_heads: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same where the tokens of each row lie behind those of the one before, with nothing between."""
        return self._at(kv_heads, queries, 0, self.tokens.shape[1])

    def _at(self, kv_heads: int, queries: int, low: int, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = kv_heads, queries, low, stride
        if key not in self._made:
            rows, tokens = self.tokens.shape
            slots = self.tokens + torch.arange(low, low + rows * stride, stride, dtype=torch.int32)[:, None]
            each = slots[:, None, None] * kv_heads + torch.arange(kv_heads, dtype=torch.int32)[:, None, None]
            each = each.expand(rows, kv_heads, queries, tokens).reshape(-1)
            self._made[key] = each, torch.arange(0, len(each) + 1, tokens, dtype=torch.int32)
        return self._made[key]


def longest(rows: int, heads: int, keys: torch.Tensor) -> int:
    """Tokens that the longest of `rows` may have for `spread` to compute them, and faster; 0: it never does. `keys`
    `[slots, kv_heads, head_dim]`."""
    slots, kv_heads, head_dim = keys.shape
    if keys.device.type != "cpu" or rows < _LEAST_ROWS.get(keys.dtype, rows + 1) or slots * kv_heads >= 1 << 31:
        return 0
    widened = WIDENED_BYTES // (4 * kv_heads * head_dim) if keys.dtype == torch.bfloat16 else SPREAD_SCORES
    return min(widened, SPREAD_SCORES // (rows * heads))


def spread(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: Places,
    mask: torch.Tensor | None,
    *,
    scaling: float | None,
    told: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """`query` `[rows, kv_heads, queries, head_dim]` against `keys` `[slots, kv_heads, head_dim]`; `mask`
    `[rows, 1, 1, tokens]` is added to the scores.

    The logarithms of the sums of their exponentials, `[rows, kv_heads, queries]`, go to `told` if that is wanted.
    """
    _, kv_heads, queries, head_dim = query.shape
    scores = _scores(query, keys, places, head_dim**-0.5 if scaling is None else scaling)
    if mask is not None:
        scores += mask
    if told is not None:
        told.append(torch.logsumexp(scores, dim=-1))
    weights = torch.softmax(scores, dim=-1)
    del scores
    where, begins = places.of(kv_heads, queries)
    weights = weights.to(values.dtype).view(-1)
    lying = values.view(-1, head_dim)
    return embedding_bag(where, lying, begins[:-1], mode="sum", per_sample_weights=weights).view(query.shape)


def _scores(query: torch.Tensor, keys: torch.Tensor, places: Places, scaling: float) -> torch.Tensor:
    """`[rows, kv_heads, queries, tokens]`, in float32."""
    _, kv_heads, queries, head_dim = query.shape
    tokens = places.tokens.shape[1]
    if keys.dtype == torch.float32:
        where, begins = places.of(kv_heads, queries)
        lying = keys.view(-1, head_dim)
        scores = products(query.reshape(-1, head_dim), lying, begins, where, scaling)
        return scores.view(*query.shape[:3], tokens)
    most = WIDENED_BYTES // (4 * tokens * kv_heads * head_dim)
    firsts = range(0, len(query), most)
    parts = [_widened_scores(query[first : first + most], keys, places, first, scaling) for first in firsts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _widened_scores(
    query: torch.Tensor, keys: torch.Tensor, places: Places, first: int, scaling: float
) -> torch.Tensor:
    """As `_scores`, of the rows from `first` on that `query` has, by a copy of their keys in float32."""
    rows, kv_heads, queries, head_dim = query.shape
    tokens, wide = places.tokens.shape[1], kv_heads * head_dim
    begin = keys.storage_offset() + (places.low + first * places.stride) * wide
    lying = keys.as_strided((rows, tokens, wide), (places.stride * wide, wide, 1), begin)
    widened = lying.to(torch.float32, memory_format=torch.contiguous_format).view(-1, head_dim)
    where, begins = places.close_by(kv_heads, queries)
    count = rows * kv_heads * queries
    scores = products(
        query.float().reshape(-1, head_dim), widened, begins[: count + 1], where[: count * tokens], scaling
    )
    return scores.view(*query.shape[:3], tokens)


def paired(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Two heads of one query each as one head of two queries, each of which has zeros where the other's keys are.

    In bfloat16 on the CPU, where keys and values `[rows, kv_heads, tokens, head_dim]` of two heads lie side by side;
    else None. What a kernel answers is for `unpaired`. The zeros change no sum.
    """
    rows, heads, queries, dim = query.shape
    suits = query.dtype == torch.bfloat16 and query.device.type == "cpu" and queries == 1 and heads % 2 == 0
    if not suits or any(each.stride(1) != dim or each.stride(3) != 1 for each in (keys, values)):
        return None
    wide = query.new_zeros(rows, heads // 2, 2, 2, dim)
    wide.diagonal(dim1=2, dim2=3).copy_(query.view(rows, heads // 2, 2, dim).transpose(2, 3))
    keys, values = (
        each.as_strided((rows, heads // 2, each.shape[2], 2 * dim), (each.stride(0), 2 * dim, each.stride(2), 1))
        for each in (keys, values)
    )
    return wide.view(rows, heads // 2, 2, 2 * dim), keys, values


def unpaired(answer: torch.Tensor) -> torch.Tensor:
    """`[rows, pairs, 2, 2 * head_dim]` to `[rows, heads, 1, head_dim]`: of each query its own head's part."""
    rows, pairs, _, wide = answer.shape
    own = answer.reshape(rows, pairs, 2, 2, wide // 2).diagonal(dim1=2, dim2=3).transpose(2, 3)
    return own.reshape(rows, 2 * pairs, 1, wide // 2)

"""Attention on the CPU where torch's kernel is slow: one query against many keys, as in steps of decoding.

Torch's kernel takes each head of each row by itself, and multiplies a vector with a matrix: in float32 it reads keys
and values at a quarter of the memory's speed, and in bfloat16, where a single query goes past the processor's
instructions for it, at a twentieth. Milliseconds of one layer of 12 heads of 64, of rows with 56 to 112 tokens each,
one call behind another (Zen 4, two threads):

| rows | torch | `spread` | | bfloat16: torch | `paired` |
|---|---|---|---|---|---|
| 4 | 0.20 | 0.14 | | | |
| 16 | 0.74 | 0.35 | | 2.5 | 0.8 |
| 32 | 1.53 | 0.95 | | | |
| 64 | 3.06 | 2.43 | | 10.2 | 3.2 |
"""

from dataclasses import dataclass, field

import torch
from torch.nn.functional import embedding_bag

MOST_SCORES = 1 << 18
"""That `spread` computes at once, of all rows and heads. More, and they are no small part of a step's memory."""
SCORES_ALIVE = 4
"""Tensors of that size, of 4 bytes each: indices, scores, products on their way to these, weights."""
_LEAST_ROWS = 32
"""For fewer its calls take longer than torch's one, within steps: between the model's other work they are a good deal
slower than one behind another (110 M Llama, gaps of 46 ms in place of 35 with 4 rows, of 61 and 54 with 16)."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the values lie that each row sees: `slots` `[rows, tokens]`. Where a row sees nothing, one that it sees."""

    slots: torch.Tensor
    _bags: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def bags(self, kv_heads: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of single heads' values `[rows * kv_heads * queries * tokens]`, and where each query's begin among
        them. Built for the first layer that asks."""
        if (kv_heads, queries) not in self._bags:
            rows, tokens = self.slots.shape
            heads = torch.arange(kv_heads, dtype=self.slots.dtype)
            each = self.slots[:, None, None] * kv_heads + heads[:, None, None]
            each = each.expand(rows, kv_heads, queries, tokens).reshape(-1)
            self._bags[kv_heads, queries] = each, torch.arange(0, len(each), tokens, dtype=each.dtype)
        return self._bags[kv_heads, queries]


def can_spread(rows: int, heads: int, tokens: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `spread` does it, and does it faster."""
    fits = rows * heads * tokens <= MOST_SCORES
    return device.type == "cpu" and dtype == torch.float32 and rows >= _LEAST_ROWS and fits


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
    """`query` `[rows, kv_heads, queries, head_dim]` against `keys` `[rows, kv_heads, tokens, head_dim]`, all rows of a
    head in one call; `mask` `[rows, 1, 1, tokens]` is added to the scores.

    The logarithms of the sums of their exponentials, `[rows, kv_heads, queries]`, go to `told` if that is wanted.

    `values` `[places, head_dim]` are summed up by their weights from where they lie, as embeddings are: only those that
    are seen are read.
    """
    rows, kv_heads, queries, head_dim = query.shape
    query = query * (head_dim**-0.5 if scaling is None else scaling)
    scores = query.new_empty(rows, kv_heads, queries, keys.shape[2])
    for head in range(kv_heads):
        scores[:, head] = torch.bmm(query[:, head], keys[:, head].transpose(1, 2))
    if mask is not None:
        scores += mask
    weights = torch.softmax(scores, dim=-1)
    where, begins = places.bags(kv_heads, queries)
    answer = embedding_bag(where, values, begins, mode="sum", per_sample_weights=weights.view(-1))
    if told is not None:
        told.append(torch.logsumexp(scores, dim=-1))
    return answer.view(query.shape)


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

"""The key-value pool, and attention over it for sequences packed one behind another.

A step's tokens, of all its sequences, go through the model as one row `[1, tokens]`: linear layers, norms and position
embeddings do not care where one sequence ends. Attention does, so transformers calls ours (through its attention
interface) with the step's layout in the keyword `packed`. It writes the new keys and values into the pool and lets
each token see its own sequence only: the tokens up to itself, within the layer's window if it has one.

A model whose attention needs more than that (soft-capping, sinks, position biases, masks of its own) is refused here
with an error, never computed without it.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker.engine.memory import upload
from worker.engine.scheduler import Batch

SDPA, EAGER = "packed_sdpa", "packed_eager"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "cache")
_PADDING = 2.0
"""Sequences that decode are computed together, padded to the longest, while that costs at most so many times the work
of each alone. Measured on 2 cores: a call for each costs about as much as one padded call without waste."""


class Pool:
    """Keys and values of every layer, allocated and touched at once: nothing of it grows later.

    `keys[layer]` and `values[layer]` are `[rows * ctx_size, kv_heads, head_dim]`; slots as in `kv_cache`.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        ctx_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.rows, self.ctx_size = rows, ctx_size
        # empty, then zeroed: zeros() alone leaves the pages to be claimed by the first write
        self._store = torch.empty(layers, 2, rows * ctx_size, kv_heads, head_dim, dtype=dtype, device=device).zero_()
        self.keys = [layer[0] for layer in self._store]
        self.values = [layer[1] for layer in self._store]

    @property
    def bytes(self) -> int:
        return self._store.nbytes

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`keys`, `values` `[tokens, kv_heads, head_dim]` into `slots` `[tokens]`."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def copy_row(self, source: int, target: int) -> None:
        """All that row `source` holds into row `target`, in every layer."""
        rows = self._store.view(*self._store.shape[:2], self.rows, self.ctx_size, *self._store.shape[3:])
        rows[:, :, target] = rows[:, :, source]

    def read(self, layer: int, rows: slice, span: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Views `[rows, kv_heads, span, head_dim]`; nothing is copied."""
        shape = (self.rows, self.ctx_size, *self.keys[layer].shape[1:])
        keys = self.keys[layer].view(shape)[rows, span]
        values = self.values[layer].view(shape)[rows, span]
        return keys.transpose(1, 2), values.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of packed tokens that attends in one call: some of one row, or one of each row in a range."""

    first: int
    count: int
    row: int
    start: int


@dataclass(slots=True)
class Packed:
    """The layout of one step: which packed tokens belong together, and where the pool keeps them."""

    pool: Pool
    batch: Batch
    slots: torch.Tensor
    """`[tokens]`: where each token's keys and values go."""
    decodes: int
    """The first so many tokens are the newest of as many sequences, computed together, padded."""
    index: torch.Tensor | None
    """`[decodes]`: their rows, counted from the lowest; None if they are all rows of `rows` in order."""
    rows: slice
    longest: int
    parts: tuple[_Part, ...]
    """All other tokens, computed one sequence after another."""
    masks: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    """By (part, window): built for the first layer that needs it, shared by the others."""

    @classmethod
    def of(cls, batch: Batch, pool: Pool, device: torch.device) -> "Packed":
        """Layout of `batch`, whose segments of one token should come first."""
        slots: list[int] = []
        for segment in batch:
            base = segment.row * pool.ctx_size
            slots.extend(range(base + segment.start, base + segment.end))
        decodes = _together(batch)
        rows = [segment.row for segment in batch[:decodes]]
        low, high = (min(rows), max(rows) + 1) if rows else (0, 0)
        in_order = rows == list(range(low, high))
        parts, first = [], decodes
        for segment in batch[decodes:]:
            parts.append(_Part(first, segment.length, segment.row, segment.start))
            first += segment.length
        return cls(
            pool=pool,
            batch=batch,
            slots=upload(slots, torch.int64, device),
            decodes=decodes,
            index=None if in_order else upload([row - low for row in rows], torch.int64, device),
            rows=slice(low, high),
            longest=max((segment.end for segment in batch[:decodes]), default=0),
            parts=tuple(parts),
        )

    def decode_mask(self, window: int, dtype: torch.dtype) -> torch.Tensor | None:
        """`[rows, 1, 1, longest]`, added to the scores: who may look where; None if everybody may everywhere."""
        if (-1, window) not in self.masks:
            self.masks[-1, window] = self._decode_mask(window, dtype)
        return self.masks[-1, window]

    def _decode_mask(self, window: int, dtype: torch.dtype) -> torch.Tensor | None:
        segments = self.batch[: self.decodes]
        if all(segment.end == self.longest for segment in segments) and not 0 < window < self.longest:
            return None
        ends = [0] * (self.rows.stop - self.rows.start)
        for segment in segments:
            ends[segment.row - self.rows.start] = segment.end
        end = upload(ends, torch.int64, self.slots.device)[:, None]
        position = torch.arange(self.longest, device=self.slots.device)
        hidden = position >= end
        if window:
            hidden |= position < end - window
        return _additive(hidden, dtype)[:, None, None]

    def part_mask(self, part: _Part, window: int, dtype: torch.dtype) -> tuple[int, torch.Tensor | None]:
        """First position that any token of `part` sees, and `[1, 1, tokens, positions]` from there on, added to the
        scores; None: plain causal from position 0, or a single token that sees all from the first position on."""
        first = max(0, part.start + 1 - window) if window else 0
        end = part.start + part.count
        if part.count == 1 or (part.start == 0 and not 0 < window < end):
            return first, None
        key = (part.first, window)
        if key not in self.masks:
            query = torch.arange(part.start, end, device=self.slots.device)[:, None]
            position = torch.arange(first, end, device=self.slots.device)
            hidden = position > query
            if window:
                hidden |= position <= query - window
            self.masks[key] = _additive(hidden, dtype)[None, None]
        return first, self.masks[key]


def _together(batch: Batch) -> int:
    """How many of the first segments are computed together: all that decode, unless padding would cost too much."""
    count = 0
    while count < len(batch) and batch[count].length == 1:
        count += 1
    if count < 2:
        return 0
    rows = [segment.row for segment in batch[:count]]
    ends = [segment.end for segment in batch[:count]]
    padded = (max(rows) - min(rows) + 1) * max(ends)
    return count if padded <= _PADDING * sum(ends) else 0


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def register() -> None:
    """Make both functions known to transformers; again is harmless."""
    ALL_ATTENTION_FUNCTIONS.register(SDPA, _attend_sdpa)
    ALL_ATTENTION_FUNCTIONS.register(EAGER, _attend_eager)


def _attend_sdpa(module: Any, query: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
    return _attend(_sdpa, module, query, *args, **options), None


def _attend_eager(module: Any, query: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
    return _attend(_eager, module, query, *args, **options), None


def _attend(
    kernel: Any,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: Packed,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """One layer's attention: `query` `[1, heads, tokens, head_dim]` to `[1, tokens, heads, head_dim]`."""
    needs = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if needs or attention_mask is not None:
        raise NotImplementedError(f"attention with {', '.join(needs) or 'a mask of its own'} is not supported")
    pool, layer, window = packed.pool, module.layer_idx, sliding_window or 0
    pool.write(layer, packed.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    tokens = query[0].transpose(0, 1)  # [tokens, heads, head_dim]
    out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    if packed.decodes:
        out[: packed.decodes] = _decode(kernel, packed, layer, tokens[: packed.decodes], window, scaling)
    for part in packed.parts:
        first, mask = packed.part_mask(part, window, query.dtype)
        end = part.start + part.count
        keys, values = pool.read(layer, slice(part.row, part.row + 1), slice(first, end))
        mine = query[:, :, part.first : part.first + part.count]
        answer = kernel(mine, keys, values, mask, causal=mask is None and part.count > 1, scaling=scaling)
        out[part.first : part.first + part.count] = answer[0].transpose(0, 1)
    return out[None]


def _decode(
    kernel: Any, packed: Packed, layer: int, tokens: torch.Tensor, window: int, scaling: float | None
) -> torch.Tensor:
    """`tokens` `[decodes, heads, head_dim]`, the newest of as many rows, against all of their rows in one call."""
    keys, values = packed.pool.read(layer, packed.rows, slice(0, packed.longest))
    rows, kv_heads = keys.shape[:2]
    heads, head_dim = tokens.shape[1:]
    if packed.index is None:
        query = tokens
    else:
        query = tokens.new_zeros(rows, heads, head_dim)
        query[packed.index] = tokens
    # heads that share keys become queries of one head: no repetition of keys  # [rows, kv_heads, group, head_dim]
    query = query.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    mask = packed.decode_mask(window, tokens.dtype)
    answer: torch.Tensor = kernel(query, keys, values, mask, causal=False, scaling=scaling)
    answer = answer.reshape(rows, heads, head_dim)
    return answer if packed.index is None else answer[packed.index]


def _sdpa(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    """Torch's kernels. `[rows, heads, queries, head_dim]` against `[rows, kv_heads, positions, head_dim]`."""
    grouped = query.shape[1] != keys.shape[1]
    if grouped and mask is not None and query.is_cuda:
        # with a mask, CUDA's fast kernels want one key head for each head
        group = query.shape[1] // keys.shape[1]
        keys, values, grouped = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), False
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
    )


def _eager(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    """The formula, step by step, softmax in float32."""
    if query.shape[1] != keys.shape[1]:
        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ values

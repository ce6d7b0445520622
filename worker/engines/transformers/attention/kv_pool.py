"""The memory of the paged KV cache: keys and values of all blocks, in every layer. `kv_cache` gives the blocks out."""

from collections.abc import Sequence

import torch

from worker.engines.transformers.device.lazy_pages import claim
from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.schedule.kv_cache import home_stride
from worker.protocol.memory import BLOCK_TOKENS

Span = tuple[int, int]
"""First slot, and how many: tokens that lie one behind another."""


class Pool:
    """Keys and values of every layer, allocated at once: nothing of it grows later.

    `keys[layer]` and `values[layer]` are `[slots, kv_heads, head_dim]`; block `b` is the slots from
    `b * BLOCK_TOKENS` on.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """`rows`: sequences that may run at once; their homes divide the pool (`kv_cache.Blocks`)."""
        self.rows, self.blocks = rows, blocks
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, dtype
        """Of what is read."""
        self.kept_as = ""
        """The type that it is kept in, if that is another (`compact`)."""
        self.slots = blocks * BLOCK_TOKENS
        self.stride = home_stride(rows, blocks) * BLOCK_TOKENS
        """Slots from one home to the next."""
        self._store = claim(layers, 2, self.slots, kv_heads, head_dim, dtype=dtype, device=device)
        self.keys = [layer[0] for layer in self._store]
        self.values = [layer[1] for layer in self._store]

    @property
    def device(self) -> torch.device:
        return self._store.device

    @property
    def bytes(self) -> int:
        return self._store.nbytes

    def bytes_on(self, device: torch.device) -> int:
        return self._store.nbytes if self._store.device == device else 0

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in one layer, as they are read."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`keys`, `values` `[tokens, kv_heads, head_dim]` into `slots` `[tokens]`."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def read(self, layer: int, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """`[1, kv_heads, tokens, head_dim]`: a view of one span, a copy of several."""
        keys, values = self.keys[layer], self.values[layer]
        if len(spans) == 1:
            ((slot, tokens),) = spans
            keys, values = keys[slot : slot + tokens], values[slot : slot + tokens]
        else:
            keys = torch.cat([keys[slot : slot + tokens] for slot, tokens in spans])
            values = torch.cat([values[slot : slot + tokens] for slot, tokens in spans])
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def read_rows(self, layer: int, slot: int, stride: int, rows: int, tokens: int) -> list[torch.Tensor]:
        """Keys and values, views `[rows, kv_heads, tokens, head_dim]`: row `r` begins at slot `slot + r * stride`."""
        _, heads, dim = self.keys[layer].shape
        wide = heads * dim
        shape, strides = (rows, heads, tokens, dim), (stride * wide, dim, wide, 1)
        both = (self.keys[layer], self.values[layer])
        return [each.as_strided(shape, strides, each.storage_offset() + slot * wide) for each in both]

    def rows_at_once(self, rows: int, tokens: int) -> int:
        """Of so many `rows` of `tokens` each, how many should be read in one go."""
        return rows

    def gather(self, layer: int, blocks: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies `[rows, kv_heads, tokens, head_dim]`: the `blocks` of every row, one behind another."""
        keys, values = (self._gather(store[layer], blocks, rows) for store in (self.keys, self.values))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _gather(self, store: torch.Tensor, blocks: torch.Tensor, rows: int) -> torch.Tensor:
        """`[rows, tokens, kv_heads, head_dim]`."""
        _, kv_heads, head_dim = store.shape
        found = store.view(self.blocks, BLOCK_TOKENS * kv_heads * head_dim).index_select(0, blocks)
        return found.view(rows, -1, kv_heads, head_dim)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The first block of each pair into the second, in every layer; all are read before any is written."""
        blocks = self._by_block()
        source, target = (upload([pair[side] for pair in pairs], torch.int64, self._store.device) for side in (0, 1))
        blocks.index_copy_(2, target, blocks.index_select(2, source))

    def erase(self, blocks: Sequence[int]) -> None:
        """Zeros in every layer."""
        self._by_block().index_fill_(2, upload(blocks, torch.int64, self._store.device), 0.0)

    def _by_block(self) -> torch.Tensor:
        """`[layers, 2, blocks, BLOCK_TOKENS, kv_heads, head_dim]`."""
        layers, _, _, heads, dim = self._store.shape
        return self._store.view(layers, 2, self.blocks, BLOCK_TOKENS, heads, dim)

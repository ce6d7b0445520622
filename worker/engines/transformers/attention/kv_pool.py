"""Memory of the paged KV cache: keys and values of all blocks, in every layer. `schedule.kv_cache` allocates blocks."""

from collections.abc import Sequence

import torch

from worker.engines.transformers.attention.quantized_kv_types import KvStorageType
from worker.engines.transformers.device.lazy_pages import claim
from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.schedule.kv_cache import region_blocks
from worker.protocol.memory import BLOCK_TOKENS, DEQUANTIZED_KV_BYTES

KvSpan = tuple[int, int]  # first position in the pool and number of tokens that lie next to each other


class KvPool:
    """Keys and values of every layer, allocated once.

    `keys[layer]` and `values[layer]` are `[positions, kv_heads, head_dim]`. Block `b` begins at position
    `b * BLOCK_TOKENS`.
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
        """`rows`: sequences that may run at once; that many regions divide the pool (`kv_cache.BlockAllocator`)."""
        self.rows, self.blocks = rows, blocks
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, dtype  # as read, after dequantization
        self.positions = blocks * BLOCK_TOKENS
        self.stride = region_blocks(rows, blocks) * BLOCK_TOKENS  # positions from one region start to the next
        # One allocation with the layer first: [layers, keys and values, positions, kv_heads, head_dim]. Blocks are then
        # copied and erased in all layers with one operation.
        self._store = claim(layers, 2, self.positions, kv_heads, head_dim, dtype=dtype, device=device)
        self.keys = [layer[0] for layer in self._store]
        self.values = [layer[1] for layer in self._store]

    @property
    def device(self) -> torch.device:
        return self._store.device

    def bytes_on(self, device: torch.device) -> int:
        return self._store.nbytes if self._store.device == device else 0

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in one layer, as they are read."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `keys` and `values` `[tokens, kv_heads, head_dim]` at `positions` `[tokens]`."""
        self.keys[layer].index_copy_(0, positions, keys)
        self.values[layer].index_copy_(0, positions, values)

    def read(self, layer: int, spans: Sequence[KvSpan]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[1, kv_heads, tokens, head_dim]`: a view for one span, a copy for several."""
        keys, values = self.keys[layer], self.values[layer]
        if len(spans) == 1:
            ((first, tokens),) = spans
            keys, values = keys[first : first + tokens], values[first : first + tokens]
        else:
            keys = torch.cat([keys[first : first + tokens] for first, tokens in spans])
            values = torch.cat([values[first : first + tokens] for first, tokens in spans])
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def read_rows(self, layer: int, begin: int, stride: int, rows: int, tokens: int) -> list[torch.Tensor]:
        """Views `[rows, kv_heads, tokens, head_dim]` of keys and values. Row `r` begins at position `begin + r *
        stride`."""
        _, heads, dim = self.keys[layer].shape
        wide = heads * dim
        # Overlapping rows are allowed in a view that is only read: the last tokens of a row may be another row's first.
        shape, strides = (rows, heads, tokens, dim), (stride * wide, dim, wide, 1)
        both = (self.keys[layer], self.values[layer])
        return [store.as_strided(shape, strides, store.storage_offset() + begin * wide) for store in both]

    def rows_at_once(self, rows: int, tokens: int) -> int:
        """Number of rows of `tokens` tokens to read at once, at most `rows`."""
        return rows

    def gather(self, layer: int, blocks: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies `[rows, kv_heads, tokens, head_dim]` of the `blocks` of every row. Shapes do not depend on the
        content, so the operation can be captured in a CUDA graph."""
        keys, values = (self._gather(store[layer], blocks, rows) for store in (self.keys, self.values))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _gather(self, store: torch.Tensor, blocks: torch.Tensor, rows: int) -> torch.Tensor:
        """`[rows, tokens, kv_heads, head_dim]`."""
        _, kv_heads, head_dim = store.shape
        found = store.view(self.blocks, BLOCK_TOKENS * kv_heads * head_dim).index_select(0, blocks)
        return found.view(rows, -1, kv_heads, head_dim)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the first block of each pair to the second, in every layer. All are read before any is written."""
        blocks = self._by_block()
        source, target = (upload([pair[side] for pair in pairs], self._store.device) for side in (0, 1))
        blocks.index_copy_(2, target, blocks.index_select(2, source))

    def erase(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros in every layer."""
        self._by_block().index_fill_(2, upload(blocks, self._store.device), 0.0)

    def _by_block(self) -> torch.Tensor:
        """View `[layers, 2, blocks, BLOCK_TOKENS, kv_heads, head_dim]`."""
        layers, _, _, heads, dim = self._store.shape
        return self._store.view(layers, 2, self.blocks, BLOCK_TOKENS, heads, dim)


class QuantizedKvPool(KvPool):
    """A pool in another storage type than the model's: `keys[layer]` and `values[layer]` are records
    `[positions, 1, bytes]`.

    A record contains everything needed to read it, so blocks are moved, shared and erased as in a plain pool. Attention
    reads dequantized copies: the tokens of one sequence, or as many rows of a decode call as a byte limit allows.
    """

    def __init__(self, kind: KvStorageType, *, layers: int, rows: int, blocks: int, device: torch.device):
        # To the base class a record is one head of `width` bytes.
        super().__init__(
            layers=layers, kv_heads=1, head_dim=kind.width, rows=rows, blocks=blocks, dtype=torch.uint8, device=device
        )
        self.kv_heads, self.head_dim, self.dtype = kind.heads, kind.head_dim, kind.dtype
        self._kind = kind

    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        pack = self._kind.pack
        super().write(layer, positions, pack(keys)[:, None], pack(values)[:, None])

    def read(self, layer: int, spans: Sequence[KvSpan]) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (self._read(store[layer], spans) for store in (self.keys, self.values))
        return keys, values

    def _read(self, store: torch.Tensor, spans: Sequence[KvSpan]) -> torch.Tensor:
        total = sum(tokens for _, tokens in spans)
        out = torch.empty(total, self.kv_heads, self.head_dim, dtype=self.dtype, device=store.device)
        done = 0
        for first, tokens in spans:
            self._kind.unpack_to(out[done : done + tokens], store[first : first + tokens, 0])
            done += tokens
        return out.transpose(0, 1)[None]

    def read_rows(self, layer: int, begin: int, stride: int, rows: int, tokens: int) -> list[torch.Tensor]:
        records = super().read_rows(layer, begin, stride, rows, tokens)  # [rows, 1, tokens, bytes]
        return [self._kind.unpack(record[:, 0]).transpose(1, 2) for record in records]

    def rows_at_once(self, rows: int, tokens: int) -> int:
        most = DEQUANTIZED_KV_BYTES.get(self._store.device.type, DEQUANTIZED_KV_BYTES["cuda"])
        # At least one row, even if a long context exceeds the limit.
        return max(1, min(rows, most // (tokens * self.token_bytes)))

    def _gather(self, store: torch.Tensor, blocks: torch.Tensor, rows: int) -> torch.Tensor:
        return self._kind.unpack(super()._gather(store, blocks, rows)[:, :, 0])

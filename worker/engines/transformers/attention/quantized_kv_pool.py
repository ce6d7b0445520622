"""KV pool in a storage type other than the model's: each token is a record of bytes (`quantized_kv_types`).

A record contains everything needed to read it, so blocks are moved, shared and erased as in a plain pool. Attention
reads dequantized copies: the tokens of one sequence, or as many rows of a decode call as a byte limit allows.
"""

from collections.abc import Sequence

import torch

from worker.engines.transformers.attention.kv_pool import KvPool, KvSpan
from worker.engines.transformers.attention.quantized_kv_types import KvStorageType
from worker.protocol.memory import UNPACKED_BYTES


class QuantizedKvPool(KvPool):
    """See `KvPool`. `keys[layer]` and `values[layer]` are records `[positions, 1, bytes]`."""

    def __init__(self, kind: KvStorageType, *, layers: int, rows: int, blocks: int, device: torch.device):
        # To the base class a record is one head of `width` bytes.
        super().__init__(
            layers=layers, kv_heads=1, head_dim=kind.width, rows=rows, blocks=blocks, dtype=torch.uint8, device=device
        )
        self.kv_heads, self.head_dim, self.dtype = kind.heads, kind.head_dim, kind.dtype
        self.kv_dtype = kind.name
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
        width = self._kind.width
        shape, strides = (rows, tokens, width), (stride * width, width, 1)
        both = (self.keys[layer], self.values[layer])
        records = [store.as_strided(shape, strides, store.storage_offset() + begin * width) for store in both]
        return [self._kind.unpack(record).transpose(1, 2) for record in records]

    def rows_at_once(self, rows: int, tokens: int) -> int:
        most = UNPACKED_BYTES.get(self._store.device.type, UNPACKED_BYTES["cuda"])
        # At least one row, even if a long context exceeds the limit.
        return max(1, min(rows, most // (tokens * self.token_bytes)))

    def _gather(self, store: torch.Tensor, blocks: torch.Tensor, rows: int) -> torch.Tensor:
        return self._kind.unpack(super()._gather(store, blocks, rows)[:, :, 0])

"""Storage types of the KV cache other than the model's own type.

The keys (or values) of one head and token are divided into groups of up to 32 elements. A group `x` is stored as

    int8    scale = max |x| / 127                               codes round(x / scale), a byte each
    int4    minimum = min x, scale = (max x - minimum) / 15     codes round((x - minimum) / scale), two in a byte
    f32, f16, bf16                                              x cast to that type, without groups

and read as `codes * scale` or `codes * scale + minimum`, computed in the model's type. Scales and minima are rounded to
bfloat16 before use, which has float32's range. The error is at most half a scale, plus the rounding of scale and
minimum. int8 is llama.cpp's q8_0 except for the scale's type. int4 spends bytes on a minimum because some key channels
have a large offset (Liu et al. 2024, KIVI, section 3), and a symmetric range would leave half of the codes unused.
KIVI's own scheme for keys, quantization by channel over many tokens, does not fit blocks that are shared token by
token.

Every token reads the stored values, including a token of the same step. Output therefore depends on prompt chunking,
cached prefixes and batch composition only through the order of summation. That may round a code differently: of 40
sampled texts of 60 tokens, with prompts cut in two ways, one differed with int4 and none with int8.
"""

from dataclasses import dataclass

import torch

from worker.errors import StartError
from worker.protocol.memory import kv_group_size

_CASTS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_SCALE = torch.bfloat16
_TINY = 1e-37  # divisor for a group of zeros, whose scale is 0


@dataclass(frozen=True, slots=True)
class KvStorageType:
    """Conversion of one token's `heads` heads of `head_dim` elements to a record of bytes, and back."""

    name: str
    heads: int
    head_dim: int
    dtype: torch.dtype  # type that `unpack` returns

    @classmethod
    def of(cls, name: str, heads: int, head_dim: int, dtype: torch.dtype) -> "KvStorageType | None":
        """The type for `name`, or None if tensors are stored as they are. Raises StartError for unsupported heads."""
        if name == "auto" or _CASTS.get(name) == dtype:
            return None
        if name == "int4" and heads * head_dim % 2:
            raise StartError(
                f"int4 stores two elements in a byte, and this model's heads have {head_dim};"
                " set kv-cache-dtype to int8 or auto"
            )
        return cls(name, heads, head_dim, dtype)

    @property
    def width(self) -> int:
        """Bytes of a record. Even, so that its parts can be viewed as 16-bit numbers."""
        if self.name in _CASTS:
            return self._elements * _CASTS[self.name].itemsize
        width = self._header_bytes + self._elements // (1 if self.name == "int8" else 2)
        return width + width % 2

    @property
    def _elements(self) -> int:
        return self.heads * self.head_dim

    @property
    def _grouped(self) -> tuple[int, int]:
        """Number of groups of a record, and elements of each."""
        size = kv_group_size(self.head_dim)
        return self._elements // size, size

    @property
    def _header_bytes(self) -> int:
        """Bytes of scales and minima, at the start of a record."""
        return self._grouped[0] * _SCALE.itemsize * (2 if self.name == "int4" else 1)

    def pack(self, given: torch.Tensor) -> torch.Tensor:
        """Quantize `[..., heads, head_dim]` to records `[..., width]`, uint8."""
        shape = given.shape[:-2]
        if self.name in _CASTS:
            return given.to(_CASTS[self.name]).reshape(*shape, self._elements).view(torch.uint8)
        records = torch.zeros(*shape, self.width, dtype=torch.uint8, device=given.device)
        x = given.to(torch.float32).reshape(*shape, *self._grouped)  # [..., groups, elements]
        if self.name == "int8":
            # Round the scale before dividing by it: codes must match the scale that is stored.
            scales = (x.abs().amax(-1, keepdim=True) / 127).to(_SCALE)
            codes = (x / scales.float().clamp_min(_TINY)).round_().clamp_(-127, 127).to(torch.int8)
            self._codes(records).copy_(codes.reshape(*shape, self._elements).view(torch.uint8))
        else:
            minima = x.amin(-1, keepdim=True).to(_SCALE)
            x = x - minima.float()
            scales = (x.amax(-1, keepdim=True) / 15).to(_SCALE)
            codes = (x / scales.float().clamp_min(_TINY)).round_().clamp_(0, 15).to(torch.uint8)
            # First half of the elements in the low four bits, second half in the high ones.
            low, high = codes.reshape(*shape, self._elements).chunk(2, -1)
            self._codes(records).copy_(low | high << 4)
            self._numbers(records, 1).copy_(minima[..., 0])
        self._numbers(records, 0).copy_(scales[..., 0])
        return records

    def unpack(self, records: torch.Tensor) -> torch.Tensor:
        """Dequantize records `[..., width]` to `[..., heads, head_dim]`."""
        out = torch.empty(*records.shape[:-1], self.heads, self.head_dim, dtype=self.dtype, device=records.device)
        self.unpack_to(out, records)
        return out

    def unpack_to(self, out: torch.Tensor, records: torch.Tensor) -> None:
        """As `unpack`, into `out`. Works in place, so that little memory beside `out` is needed."""
        shape = records.shape[:-1]
        flat = out.view(*shape, self._elements)
        if self.name in _CASTS:
            flat.copy_(records.view(_CASTS[self.name]))
            return
        codes, grouped = self._codes(records), out.view(*shape, *self._grouped)
        if self.name == "int8":
            flat.copy_(codes.view(torch.int8))
        else:
            low, high = flat.chunk(2, -1)
            low.copy_(codes & 15)
            high.copy_(codes >> 4)
        grouped.mul_(self._numbers(records, 0).to(self.dtype)[..., None])
        if self.name == "int4":
            grouped.add_(self._numbers(records, 1).to(self.dtype)[..., None])

    def _codes(self, records: torch.Tensor) -> torch.Tensor:
        """View of the codes, `[..., bytes]`."""
        count = self._elements // (1 if self.name == "int8" else 2)
        return records[..., self._header_bytes : self._header_bytes + count]

    def _numbers(self, records: torch.Tensor, which: int) -> torch.Tensor:
        """View of the scales (0) or the minima (1), `[..., groups]`."""
        size = self._grouped[0] * _SCALE.itemsize
        return records[..., which * size : (which + 1) * size].view(_SCALE)

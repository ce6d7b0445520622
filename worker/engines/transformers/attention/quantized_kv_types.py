"""In which numbers keys and values are kept, where that is not the model's own type.

A head's keys (or values) of one token are cut into groups of up to 32 elements. Each group `x` is kept as

    int8    scale = max |x| / 127                               codes round(x / scale), a byte each
    int4    least = min x, scale = (max x - least) / 15         codes round((x - least) / scale), two in a byte
    f32, f16, bf16                                              x in that type; one group is like the other

and read as `codes * scale` or `codes * scale + least`, computed in the model's type. Scales and minima are rounded to
bfloat16 first, which has float32's range, so what is kept is never further from `x` than half a scale, but for that
rounding. int8 is what llama.cpp calls q8_0 but for the scale's type. For int4 the minimum is worth its room: keys have
channels that stand out to one side (Liu et al. 2024, KIVI, section 3), and a range that must be symmetric spends half
its codes on the other. KIVI's keys, quantised channel by channel over many tokens, would not go into blocks that are
shared token by token.

What has been kept is read by everybody alike, the token's own step included: so a text depends on how its prompt was
cut, what was found of it, or who is computed beside it by the order of sums only. That may round a code the other way:
of 40 sampled texts of 60 tokens, prompts cut in two ways, one differed with int4 and none with int8.
"""

from dataclasses import dataclass

import torch

from worker.errors import StartError
from worker.protocol.memory import LEAST_GROUPED, MOST_GROUPED

NAMES = ("auto", "f32", "f16", "bf16", "int8", "int4")
"""What a preset may ask for; auto: the model's own type."""
_CASTS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_SCALE = torch.bfloat16
_TINY = 1e-37
"""A group of zeros has no scale, and is divided by this."""


def group_size(head_dim: int) -> int:
    """Elements of a group: as many up to 32 as divide a head, else the whole head."""
    sizes = range(min(MOST_GROUPED, head_dim), LEAST_GROUPED - 1, -1)
    return next((size for size in sizes if head_dim % size == 0), head_dim)


@dataclass(frozen=True, slots=True)
class CacheType:
    """How `heads` heads of `head_dim` elements, of one token, become a record of bytes, and are read again."""

    name: str
    heads: int
    head_dim: int
    dtype: torch.dtype
    """What is read."""

    @classmethod
    def of(cls, name: str, heads: int, head_dim: int, dtype: torch.dtype) -> "CacheType | None":
        """None: such tensors are kept as they are. Raises StartError for heads that cannot be kept so."""
        if name == "auto" or _CASTS.get(name) == dtype:
            return None
        if name == "int4" and heads * head_dim % 2:
            raise StartError(
                f"kv-cache-dtype = int4 puts two elements in a byte, and this model's heads have {head_dim};"
                " choose int8 or auto"
            )
        return cls(name, heads, head_dim, dtype)

    @property
    def width(self) -> int:
        """Bytes of a record; even, so that whatever lies in it can be looked at as what it is."""
        if self.name in _CASTS:
            return self._elements * _CASTS[self.name].itemsize
        width = self._beside + self._elements // (1 if self.name == "int8" else 2)
        return width + width % 2

    @property
    def _elements(self) -> int:
        return self.heads * self.head_dim

    @property
    def _grouped(self) -> tuple[int, int]:
        """Groups of a record, and elements of each."""
        size = group_size(self.head_dim)
        return self._elements // size, size

    @property
    def _beside(self) -> int:
        """Bytes of scales and minima, which come first in a record."""
        return self._grouped[0] * _SCALE.itemsize * (2 if self.name == "int4" else 1)

    def pack(self, given: torch.Tensor) -> torch.Tensor:
        """`[..., heads, head_dim]` to records `[..., width]`, uint8."""
        shape = given.shape[:-2]
        if self.name in _CASTS:
            return given.to(_CASTS[self.name]).reshape(*shape, self._elements).view(torch.uint8)
        records = torch.zeros(*shape, self.width, dtype=torch.uint8, device=given.device)
        x = given.to(torch.float32).reshape(*shape, *self._grouped)
        if self.name == "int8":
            scales = (x.abs().amax(-1, keepdim=True) / 127).to(_SCALE)
            codes = (x / scales.float().clamp_min(_TINY)).round_().clamp_(-127, 127).to(torch.int8)
            self._codes(records).copy_(codes.view(*shape, self._elements).view(torch.uint8))
        else:
            minima = x.amin(-1, keepdim=True).to(_SCALE)
            x = x - minima.float()
            scales = (x.amax(-1, keepdim=True) / 15).to(_SCALE)
            codes = (x / scales.float().clamp_min(_TINY)).round_().clamp_(0, 15).to(torch.uint8)
            low, high = codes.view(*shape, self._elements).chunk(2, -1)
            self._codes(records).copy_(low | high << 4)
            self._numbers(records, 1).copy_(minima[..., 0])
        self._numbers(records, 0).copy_(scales[..., 0])
        return records

    def unpack(self, records: torch.Tensor) -> torch.Tensor:
        """Records `[..., width]` to `[..., heads, head_dim]`."""
        out = torch.empty(*records.shape[:-1], self.heads, self.head_dim, dtype=self.dtype, device=records.device)
        self.unpack_to(out, records)
        return out

    def unpack_to(self, out: torch.Tensor, records: torch.Tensor) -> None:
        """As `unpack`, to where that is wanted; in place, so that little more than `out` is alive."""
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
        """Views of the codes, `[..., bytes]`."""
        count = self._elements // (1 if self.name == "int8" else 2)
        return records[..., self._beside : self._beside + count]

    def _numbers(self, records: torch.Tensor, which: int) -> torch.Tensor:
        """Views of the scales (0) or the minima (1), `[..., groups]`."""
        size = self._grouped[0] * _SCALE.itemsize
        return records[..., which * size : (which + 1) * size].view(_SCALE)

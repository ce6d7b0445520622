"""Linear layers on the CPU, computed by oneDNN with their weights as it likes them.

A step of decoding multiplies a few rows with every matrix of the model. Torch's own way for float32 is made for many
rows, and in bfloat16 it has oneDNN reorder the weights in each call. Microseconds of a multiplication with weights, 768
x 2048, that come from memory (Zen 4, 2 threads; scripts/bench_engine shows what comes of it):

| rows | float32 | oneDNN, as they lie | reordered | bfloat16 | reordered |
|---|---|---|---|---|---|
| 1 | 432 | 176 | 194 | 212 | 101 |
| 4 | 591 | 313 | 147 | 234 | 94 |
| 16 | 760 | 483 | 283 | 317 | 164 |
| 64 | 1775 | 1180 | 947 | 658 | 494 |

Which size is the quickest for one row or two differs between processors (Zen 3, 550 MB of weights: one row 34 ms,
padded to four 42), so that it is measured, once all weights are reordered.

Weights are reordered while sequences decode, some between one step and the next: loading copies nothing. A reordered
matrix takes the place of the mapped one, whose pages are let go; other weights are freed.

oneDNN makes code for each number of rows it meets, in half a millisecond, and keeps half a MiB of it, for as many as it
is told to (worker/program/main.py): so it meets those in _SIZES only. Any other number is padded, or computed in several.
"""

import inspect
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import linear, pad
from transformers.pytorch_utils import Conv1D

from worker.protocol.memory import KERNEL_CODE_BYTES, KERNEL_CODES, REORDERED_FROM_BYTES, SLICE_BYTES

_SIZES = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 192, 256)
REORDERED = {size: max(147.0, 80.0 + 13.6 * size) for size in _SIZES if size >= 4}
"""Rows that are computed at once, and the microseconds that it takes where the weights come from memory: fitted to
float32, 768 x 2048, 2 threads; only ratios matter. Fewer than 4 are measured (`Few`)."""
PLAIN = {size: 176.0 if size == 1 else 260.0 + 14.0 * size for size in _SIZES}
"""The same of weights as they lie."""
_ROWS_TO_EXPECT = 16
_FEW = 4
"""So many rows, and less, take about as long: what counts is how fast the weights are read."""
_NARROW = 16
"""Fewer rows are padded by so little that it may stay behind what came of them."""
_ALIGNMENT = 64
"""Rows of a slice: a multiple of every width of oneDNN's blocks."""


@lru_cache(maxsize=4096)
def pieces(rows: int, is_reordered: bool) -> tuple[int, ...]:
    """The cheapest way to compute `rows`: sizes whose sum is at least that, only the last of them padded.

    More than the largest size are computed as they are: beside that, oneDNN's making of code is short."""
    costs = REORDERED if is_reordered else PLAIN
    if rows in costs or rows > max(costs):
        return (rows,)
    padded = min(size for size in costs if size >= rows)
    ways = [(padded,), *((size, *pieces(rows - size, is_reordered)) for size in costs if size < rows)]
    return min(ways, key=lambda way: sum(costs[size] for size in way))


def quickest(seconds: Mapping[int, float]) -> dict[int, int]:
    """For each number of rows below _FEW the size that takes it in the shortest time; `seconds` by size, with that of
    _FEW among them."""
    return {
        rows: min((size for size in seconds if size >= rows), key=lambda size: (seconds[size], size))
        for rows in range(1, _FEW)
    }


class Few:
    """How few rows are computed with weights that are reordered: padded to _FEW until it is known better.

    It is measured on matrices that are more together than the processor's cache holds, a size at a time, so that no
    step waits for long.
    """

    TURNS = 3
    """The shortest of them counts: others may have had the processor."""
    BYTES = 96 << 20

    def __init__(self) -> None:
        self.sizes = dict.fromkeys(range(1, _FEW), _FEW)
        self._turns = [size for _ in range(self.TURNS) for size in _SIZES if size <= _FEW]
        self._seconds: dict[int, float] = {}

    def measure(self, layers: Iterable["_Linear"]) -> bool:
        """Have one size take its turn with some of `layers`; false once none is left to do so."""
        if not self._turns:
            return False
        size, taken = self._turns.pop(), 0
        begun = time.perf_counter()
        for layer in layers:
            if taken < self.BYTES and layer.is_whole:
                taken += layer.compute(size)
        if not taken:
            self._turns.clear()
            return False
        seconds = time.perf_counter() - begun
        self._seconds[size] = min(seconds, self._seconds.get(size, seconds))
        if not self._turns:
            self.sizes = quickest(self._seconds)
        return True


def is_supported(dtype: torch.dtype) -> bool:
    """Whether oneDNN has fast kernels for weights of this type on this processor."""
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available() or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


@dataclass(eq=False)
class _Linear:
    """The forward of one module: `[.., inputs]` to `[.., outputs]`."""

    module: nn.Module
    weight: torch.Tensor
    """`[outputs, inputs]`, as it lies."""
    bias: torch.Tensor | None
    few: Few
    """Shared by all layers of a model."""
    slices: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """First output and weights of each part that is reordered; what is behind the last of them is not."""
    begin: int = 0
    """The first output that is not reordered."""

    @property
    def is_whole(self) -> bool:
        """Reordered, in one piece."""
        return len(self.slices) == 1 and self.begin == len(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:
            return linear(x, self.weight, self.bias)  # says what is wrong
        shape = (*x.shape[:-1], len(self.weight))
        rows = x.reshape(-1, x.shape[-1])
        if not self.slices:
            return self._apply(rows, self.weight, self.bias, is_reordered=False).view(shape)
        if self.is_whole:
            return self._apply(rows, self.slices[0][1], self.bias, is_reordered=True).view(shape)
        parts = [
            self._apply(rows, weight, self._bias(first, first + len(weight)), is_reordered=True)
            for first, weight in self.slices
        ]
        if self.begin < len(self.weight):
            rest = self._bias(self.begin, len(self.weight))
            parts.append(self._apply(rows, self.weight[self.begin :], rest, is_reordered=False))
        return torch.cat(parts, dim=-1).view(shape)

    def _bias(self, begin: int, end: int) -> torch.Tensor | None:
        return None if self.bias is None else self.bias[begin:end]

    def _apply(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, is_reordered: bool
    ) -> torch.Tensor:
        """`[rows, outputs of the weight]`."""
        count = len(rows)
        way = self._pieces(count, is_reordered) if count else ()
        if len(way) == 1 and way[0] == count:
            return _multiply(rows, weight, bias)
        if len(way) == 1 and count < _NARROW:
            return _multiply(pad(rows, (0, 0, 0, way[0] - count)), weight, bias)[:count]
        out = rows.new_empty(count, len(weight))
        first = 0
        for size in way:
            some = rows[first : first + size]
            if len(some) < size:
                some = torch.cat((some, some.new_zeros(size - len(some), some.shape[-1])))
            out[first : first + size] = _multiply(some, weight, bias)[: count - first]
            first += size
        return out

    def _pieces(self, rows: int, is_reordered: bool) -> tuple[int, ...]:
        return (self.few.sizes[rows],) if is_reordered and rows < _FEW else pieces(rows, is_reordered)

    def compute(self, size: int) -> int:
        """Take so many rows, for the time that it takes; the bytes of the weights, which are reordered."""
        _multiply(torch.ones(size, self.weight.shape[1], dtype=self.weight.dtype), self.slices[0][1], self.bias)
        return self.weight.nbytes

    def beside(self, rows: int) -> int:
        """Elements that are alive at once beside `rows` and what becomes of them: rows that are padded, and what comes
        of some at a time, until it stands with the rest."""
        outputs, inputs = self.weight.shape
        way = self._pieces(rows, bool(self.slices))
        if way == (rows,):
            return 0
        if len(way) == 1 and rows < _NARROW:
            return way[0] * inputs + (way[0] - rows) * outputs
        padded = way[-1] * inputs if sum(way) > rows else 0
        return max(max(way) * outputs, way[-1] * outputs + padded)

    def pretend(self, slice_bytes: int) -> None:
        """Compute as if all were reordered, with weights as they lie."""
        while self.begin < len(self.weight):
            end = self._end(slice_bytes)
            self.slices.append((self.begin, self.weight[self.begin : end]))
            self.begin = end

    def _end(self, slice_bytes: int) -> int:
        """Of the slice that is the next to be reordered."""
        outputs, inputs = self.weight.shape
        if not self.weight.is_contiguous():
            return outputs
        fits = slice_bytes // (inputs * self.weight.itemsize)
        return min(self.begin + max(fits // _ALIGNMENT * _ALIGNMENT, _ALIGNMENT), outputs)

    def reorder_some(self, slice_bytes: int, let_go: Callable[[torch.Tensor], bool]) -> bool:
        """Reorder the next slice; the weights it was made of are needed no more. False if nothing is left to do: all
        is reordered, or a slice alone frees nothing, as the weights lie in no file."""
        outputs = len(self.weight)
        end = self._end(slice_bytes)
        some = self.weight[self.begin : end]
        self.slices.append((self.begin, torch.ops.mkldnn._reorder_linear_weight(some, _ROWS_TO_EXPECT)))
        self.begin = end
        if let_go(some):
            return end < outputs
        if end < outputs:
            self.slices.clear()
            self.begin = 0
        else:
            # whoever reads them all the same is told so, in place of reading what is not there
            self.weight = self.weight.to("meta")
            self.module.weight = nn.Parameter(self.weight, requires_grad=False)
        return False


def _multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return out


class Linears:
    """The linear layers of a model on the CPU, and which of them are reordered yet."""

    def __init__(
        self,
        model: nn.Module,
        *,
        let_go: Callable[[torch.Tensor], bool] = lambda weights: False,
        least_bytes: int = REORDERED_FROM_BYTES,
        slice_bytes: int = SLICE_BYTES,
    ):
        """Takes over the modules' forward; nothing else of them is changed yet.

        `let_go` frees the memory of weights that lie in a mapped file, and says whether they do.
        """
        self._let_go, self._slice_bytes = let_go, slice_bytes
        self._all: list[_Linear] = []
        self._left: list[_Linear] = []
        self._few = Few()
        users = Counter(_addresses(model))
        for module, weight in _candidates(model, least_bytes):
            lies_across = type(module) is Conv1D  # [inputs, outputs]
            bias = cast(torch.Tensor | None, module.bias)
            mine = _Linear(module, weight.t() if lies_across else weight, bias, self._few)
            module.forward = mine
            self._all.append(mine)
            if users[_address(weight)] == 1 and not (lies_across and weight.nbytes > slice_bytes):
                self._left.append(mine)
        self._left.reverse()

    @property
    def are_done(self) -> bool:
        """All that can be is reordered."""
        return not self._left

    def reorder(self, seconds: float) -> None:
        """Reorder slices for about so long; at least one, if any is left. Then find out how few rows are computed."""
        deadline = time.monotonic() + seconds
        while self._left:
            if not self._left[-1].reorder_some(self._slice_bytes, self._let_go):
                self._left.pop()
            if time.monotonic() >= deadline:
                return
        while self._few.measure(self._all) and time.monotonic() < deadline:
            pass

    def pretend(self) -> None:
        """Compute as if all that will be reordered were so, by weights as they lie: for tensors without content, of
        which only the sizes matter."""
        while self._left:
            self._left.pop().pretend(self._slice_bytes)

    def costliest(self, most: int) -> dict[int, int]:
        """Of numbers of rows up to `most` those that may take the most memory at once: that one, and some that are not
        much fewer and have to be padded or computed in parts; with the bytes at most that this takes."""
        found = {most: 0}
        for layer in {(each.weight.shape, bool(each.slices)): each for each in self._all}.values():
            width, highest = sum(layer.weight.shape), 0
            for rows in range(most, 0, -1):
                beside = layer.beside(rows)
                if rows * width + beside > highest:
                    highest = rows * width + beside
                    found[rows] = max(found.get(rows, 0), beside * layer.weight.itemsize)
        return found


def look_at(model: nn.Module) -> None:
    """Have the code of `model` read, so that `Linears` need not, here or in a process that is forked from this one."""
    for _ in _candidates(model, 0):
        pass


def extra_bytes(model: nn.Module) -> tuple[int, int]:
    """What oneDNN's code for the model's shapes will take, and what reordering takes meanwhile: both in bytes."""
    taken = list(_candidates(model, REORDERED_FROM_BYTES))
    kinds = {(weight.shape, weight.dtype) for _, weight in taken}
    users = Counter(id(own) for module in model.modules() for own in module.parameters(recurse=False))
    most = max((weight.nbytes for module, weight in taken if users[id(module.weight)] == 1), default=0)
    codes = min(len(kinds) * (len(REORDERED) + len(PLAIN)), KERNEL_CODES)
    return codes * KERNEL_CODE_BYTES, min(most, SLICE_BYTES)


def _candidates(model: nn.Module, least_bytes: int) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Linear layers that are computed here, with their weights: only those that nobody reads but the layer itself."""
    for parent in model.modules():
        for name, module in parent.named_children():
            if type(module) not in (nn.Linear, Conv1D) or is_read(type(parent).__module__, name):
                continue
            weight = cast(torch.Tensor, module.weight)
            least = 0 if weight.dtype == torch.bfloat16 else least_bytes
            if weight.nbytes >= least and is_supported(weight.dtype) and weight.device.type == "cpu":
                yield module, weight.detach()


@lru_cache(maxsize=1024)
def is_read(module: str, name: str) -> bool:
    """Whether the code of `module`, around a layer called `name`, uses its weights itself, as Mamba does, and must not
    find them gone; code that cannot be seen may. Neither asking for their type nor drawing them at random counts."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return True
    return bool(re.search(rf"(?<!\bmodule)\.{name}\.weight\b(?!\.dtype|\.device|, torch\.Tensor)", source))


def _addresses(model: nn.Module) -> Iterable[tuple[int, int]]:
    """Where each parameter of each module lies: those that several share more than once."""
    return (_address(own) for module in model.modules() for own in module.parameters(recurse=False))


def _address(tensor: torch.Tensor) -> tuple[int, int]:
    """Of tensors without content, too."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())

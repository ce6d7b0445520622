"""Linear layers on the CPU, computed by oneDNN with weights in oneDNN's own layout.

A decode step multiplies a few rows with every matrix of the model. Torch's float32 kernel is made for many rows, and in
bfloat16 torch has oneDNN reorder the weights in each call. Microseconds of a multiplication with weights of 768 x 2048
read from memory (Zen 4, 2 threads; scripts/bench_engine measures the effect):

| rows | float32 | oneDNN, plain | oneDNN, reordered | bfloat16 | oneDNN, reordered |
|---|---|---|---|---|---|
| 1 | 432 | 176 | 194 | 212 | 101 |
| 4 | 591 | 313 | 147 | 234 | 94 |
| 16 | 760 | 483 | 283 | 317 | 164 |
| 64 | 1775 | 1180 | 947 | 658 | 494 |

The fastest number of rows to pad one or two rows to differs between processors (Zen 3, 550 MB of weights: one row takes
34 ms, padded to four 42). It is therefore measured once all weights are reordered.

Weights are reordered between decode steps, a slice at a time, so loading copies nothing. A reordered matrix replaces
the mapped one, whose pages are released.

oneDNN compiles a kernel for each number of rows, which takes half a millisecond and half a MiB. Its cache is limited
(worker/program/main.py). Rows are therefore padded or divided into chunks, so that only the numbers in _SIZES occur.
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
# Microseconds per chunk size with reordered weights read from memory, fitted to float32, 768 x 2048, 2 threads. Only
# the ratios matter. Sizes below 4 are measured at run time (`SmallBatchSizes`).
REORDERED = {size: max(147.0, 80.0 + 13.6 * size) for size in _SIZES if size >= 4}
# The same with plain weights.
PLAIN = {size: 176.0 if size == 1 else 260.0 + 14.0 * size for size in _SIZES}
_ROWS_TO_EXPECT = 16  # hint for oneDNN's choice of a layout; typical batch size of decodes
_FEW = 4  # up to this many rows take about the same time, which is that of reading the weights
_NARROW = 16  # below this many rows, padded output is returned as a view; a copy would cost more than the padding
_ALIGNMENT = 64  # output rows of a slice are a multiple of every block width of oneDNN's layouts


@lru_cache(maxsize=4096)
def row_chunks(rows: int, is_reordered: bool) -> tuple[int, ...]:
    """Cheapest division of `rows` into chunk sizes. Only the last chunk may be padded.

    More rows than the largest size are one chunk: compiling a kernel is fast compared to that.
    """
    costs = REORDERED if is_reordered else PLAIN
    if rows in costs or rows > max(costs):
        return (rows,)
    padded = min(size for size in costs if size >= rows)
    divisions = [(padded,), *((size, *row_chunks(rows - size, is_reordered)) for size in costs if size < rows)]
    return min(divisions, key=lambda chunks: sum(costs[size] for size in chunks))


def fastest_sizes(seconds: Mapping[int, float]) -> dict[int, int]:
    """Fastest chunk size for each number of rows below _FEW. `seconds` by size, including that of _FEW."""
    return {
        rows: min((size for size in seconds if size >= rows), key=lambda size: (seconds[size], size))
        for rows in range(1, _FEW)
    }


class SmallBatchSizes:
    """Chunk sizes for fewer than _FEW rows with reordered weights: _FEW until measured, then the fastest.

    Measured on matrices that together exceed the CPU cache, one size at a time, so that no step is delayed for long.
    """

    TURNS = 3  # the fastest turn counts; other processes may have slowed down the rest
    BYTES = 96 << 20  # weights per turn; more than the last-level cache of most processors (a guess)

    def __init__(self) -> None:
        self.sizes = dict.fromkeys(range(1, _FEW), _FEW)
        self._turns = [size for _ in range(self.TURNS) for size in _SIZES if size <= _FEW]
        self._seconds: dict[int, float] = {}

    @property
    def has_turns(self) -> bool:
        return bool(self._turns)

    def measure(self, layers: Iterable["_Linear"]) -> bool:
        """Time the next size on some of `layers`. False if nothing is left to measure."""
        if not self._turns:
            return False
        size, computed = self._turns.pop(), 0
        started = time.perf_counter()
        for layer in layers:
            if computed < self.BYTES and layer.is_whole:
                computed += layer.compute(size)
        if not computed:
            self._turns.clear()
            return False
        seconds = time.perf_counter() - started
        self._seconds[size] = min(seconds, self._seconds.get(size, seconds))
        if not self._turns:
            self.sizes = fastest_sizes(self._seconds)
        return True


def is_supported(dtype: torch.dtype) -> bool:
    """True if oneDNN has fast kernels for weights of this type on this processor."""
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available() or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


@dataclass(eq=False)
class _Linear:
    """Forward function of one module: `[.., inputs]` to `[.., outputs]`."""

    module: nn.Module
    weight: torch.Tensor  # [outputs, inputs], in its original layout
    bias: torch.Tensor | None
    small_batches: SmallBatchSizes  # shared by all layers of a model
    # First output and weights of each reordered slice. The outputs behind the last slice use the original weights.
    slices: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    begin: int = 0  # first output that is not reordered

    @property
    def is_whole(self) -> bool:
        """True if all of it is reordered, in one slice."""
        return len(self.slices) == 1 and self.begin == len(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:
            return linear(x, self.weight, self.bias)  # raises torch's own message
        shape = (*x.shape[:-1], len(self.weight))
        rows = x.reshape(-1, x.shape[-1])
        if not self.slices:
            return self._apply(rows, self.weight, self.bias, is_reordered=False).view(shape)
        if self.is_whole:
            return self._apply(rows, self.slices[0][1], self.bias, is_reordered=True).view(shape)
        # During reordering: slices by the fast kernel, the rest by the plain one.
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
        """Rows times one slice: `[rows, outputs of the slice]`."""
        count = len(rows)
        chunks = self._chunks(count, is_reordered) if count else ()
        if len(chunks) == 1 and chunks[0] == count:
            return _multiply(rows, weight, bias)
        if len(chunks) == 1 and count < _NARROW:
            return _multiply(pad(rows, (0, 0, 0, chunks[0] - count)), weight, bias)[:count]
        out = rows.new_empty(count, len(weight))
        first = 0
        for size in chunks:
            some = rows[first : first + size]
            if len(some) < size:
                some = torch.cat((some, some.new_zeros(size - len(some), some.shape[-1])))
            out[first : first + size] = _multiply(some, weight, bias)[: count - first]
            first += size
        return out

    def _chunks(self, rows: int, is_reordered: bool) -> tuple[int, ...]:
        return (self.small_batches.sizes[rows],) if is_reordered and rows < _FEW else row_chunks(rows, is_reordered)

    def compute(self, size: int) -> int:
        """Multiply `size` rows for timing. Return the bytes of weights read."""
        _multiply(torch.ones(size, self.weight.shape[1], dtype=self.weight.dtype), self.slices[0][1], self.bias)
        return self.weight.nbytes

    def scratch(self, rows: int) -> int:
        """Scratch elements besides input and output of `rows` rows: padding, and chunk outputs before concatenation."""
        outputs, inputs = self.weight.shape
        chunks = self._chunks(rows, bool(self.slices))
        if chunks == (rows,):
            return 0
        if len(chunks) == 1 and rows < _NARROW:
            return chunks[0] * inputs + (chunks[0] - rows) * outputs
        padded = chunks[-1] * inputs if sum(chunks) > rows else 0
        return max(max(chunks) * outputs, chunks[-1] * outputs + padded)

    def pretend(self, slice_bytes: int) -> None:
        """Mark everything as reordered without doing it (for memory estimates on meta tensors)."""
        while self.begin < len(self.weight):
            end = self._end(slice_bytes)
            self.slices.append((self.begin, self.weight[self.begin : end]))
            self.begin = end

    def _end(self, slice_bytes: int) -> int:
        """End of the next slice to reorder."""
        outputs, inputs = self.weight.shape
        if not self.weight.is_contiguous():
            return outputs  # a transposed view (Conv1D): slices of it would not be whole pages of the file
        fits = slice_bytes // (inputs * self.weight.itemsize)
        return min(self.begin + max(fits // _ALIGNMENT * _ALIGNMENT, _ALIGNMENT), outputs)

    def reorder_some(self, slice_bytes: int, release_pages: Callable[[torch.Tensor], bool]) -> bool:
        """Reorder the next slice and release its original weights. False if nothing is left to do: all is reordered, or
        the weights are not part of a file, so that a single slice frees nothing."""
        outputs = len(self.weight)
        end = self._end(slice_bytes)
        some = self.weight[self.begin : end]
        self.slices.append((self.begin, torch.ops.mkldnn._reorder_linear_weight(some, _ROWS_TO_EXPECT)))
        self.begin = end
        if release_pages(some):
            return end < outputs
        # Not in a file: only the whole matrix can be freed. Undo a partial slice; such layers stay plain.
        if end < outputs:
            self.slices.clear()
            self.begin = 0
        else:
            # Other code that reads the weights fails with torch's error for meta tensors instead of reading freed
            # pages.
            self.weight = self.weight.to("meta")
            self.module.weight = nn.Parameter(self.weight, requires_grad=False)
        return False


def _multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return out


class CpuLinears:
    """The linear layers of a model on the CPU and the progress of their reordering."""

    def __init__(
        self,
        model: nn.Module,
        *,
        release_pages: Callable[[torch.Tensor], bool] = lambda weights: False,
        least_bytes: int = REORDERED_FROM_BYTES,
        slice_bytes: int = SLICE_BYTES,
    ):
        """Replace the modules' forward functions. Weights are unchanged until `reorder`.

        `release_pages` releases the pages of weights in a mapped file, and returns False for other weights.
        """
        self._release_pages, self._slice_bytes = release_pages, slice_bytes
        self._all: list[_Linear] = []
        self._pending: list[_Linear] = []
        self._small_batches = SmallBatchSizes()
        # Shared parameters occur more than once.
        users = Counter(_address(own) for module in model.modules() for own in module.parameters(recurse=False))
        for module, weight in _candidates(model, least_bytes):
            is_transposed = type(module) is Conv1D  # [inputs, outputs]
            bias = cast(torch.Tensor | None, module.bias)
            replacement = _Linear(module, weight.t() if is_transposed else weight, bias, self._small_batches)
            module.forward = replacement
            self._all.append(replacement)
            # Shared weights (tied embeddings) are read elsewhere and must stay in their layout.
            if users[_address(weight)] == 1 and not (is_transposed and weight.nbytes > slice_bytes):
                self._pending.append(replacement)
        self._pending.reverse()
        # In bfloat16, attention needs a kernel for each shape, too.
        self.compiles_attention = any(layer.weight.dtype == torch.bfloat16 for layer in self._all)

    @property
    def are_done(self) -> bool:
        """True if every layer that can be reordered is."""
        return not self._pending

    @property
    def are_settled(self) -> bool:
        """True if nothing is left to reorder or to measure, both of which compile kernels."""
        return not (self._pending or self._small_batches.has_turns)

    @property
    def has_layers(self) -> bool:
        return bool(self._all)

    def reorder(self, seconds: float) -> None:
        """Reorder slices for about `seconds`, at least one if any is left. Then measure small batches
        (`SmallBatchSizes`)."""
        deadline = time.monotonic() + seconds
        while self._pending:
            if not self._pending[-1].reorder_some(self._slice_bytes, self._release_pages):
                self._pending.pop()
            if time.monotonic() >= deadline:
                return
        while self._small_batches.measure(self._all) and time.monotonic() < deadline:
            pass

    def pretend(self) -> None:
        """Mark all layers as reordered without doing it, for memory estimates with meta tensors."""
        while self._pending:
            self._pending.pop().pretend(self._slice_bytes)

    def peak_row_counts(self, most: int) -> dict[int, int]:
        """Numbers of rows up to `most` that may need the most memory, with an upper bound of their scratch bytes.

        The candidates are `most` itself and smaller numbers that must be padded or divided into chunks.
        """
        found = {most: 0}
        for layer in {(candidate.weight.shape, bool(candidate.slices)): candidate for candidate in self._all}.values():
            width, highest = sum(layer.weight.shape), 0
            for rows in range(most, 0, -1):
                scratch = layer.scratch(rows)
                if rows * width + scratch > highest:
                    highest = rows * width + scratch
                    found[rows] = max(found.get(rows, 0), scratch * layer.weight.itemsize)
        return found


def read_sources(model: nn.Module) -> None:
    """Read the source code that `CpuLinears` needs, so that forked processes find it cached
    (`uses_weight_directly`)."""
    for _ in _candidates(model, 0):
        pass


def onednn_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of oneDNN's kernels for the model's shapes, and bytes needed temporarily by reordering."""
    weights = list(_candidates(model, REORDERED_FROM_BYTES))
    kinds = {(weight.shape, weight.dtype) for _, weight in weights}
    users = Counter(id(own) for module in model.modules() for own in module.parameters(recurse=False))
    most = max((weight.nbytes for module, weight in weights if users[id(module.weight)] == 1), default=0)
    codes = min(len(kinds) * (len(REORDERED) + len(PLAIN)), KERNEL_CODES)
    return codes * KERNEL_CODE_BYTES, min(most, SLICE_BYTES)


def _candidates(model: nn.Module, least_bytes: int) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Linear layers to compute here, with their weights: those whose weights only the layer itself reads."""
    for parent in model.modules():
        for name, module in parent.named_children():
            if type(module) not in (nn.Linear, Conv1D) or uses_weight_directly(type(parent).__module__, name):
                continue
            weight = cast(torch.Tensor, module.weight)
            least = 0 if weight.dtype == torch.bfloat16 else least_bytes
            if weight.nbytes >= least and is_supported(weight.dtype) and weight.device.type == "cpu":
                yield module, weight.detach()


@lru_cache(maxsize=1024)
def uses_weight_directly(module: str, name: str) -> bool:
    """True if the code of `module` uses the weights of a layer called `name` directly, as Mamba does.

    Such weights must not be reordered. Unavailable source code counts as using them. Reading their dtype or device, and
    initialising them, does not count.
    """
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return True
    return bool(re.search(rf"(?<!\bmodule)\.{name}\.weight\b(?!\.dtype|\.device|, torch\.Tensor)", source))


def _address(tensor: torch.Tensor) -> tuple[int, int]:
    """Identity of the storage plus offset; works for meta tensors, too."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())

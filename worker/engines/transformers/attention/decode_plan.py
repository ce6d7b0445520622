"""Grouping of a step's decodes into attention calls. Made once and shared by layers of the same kind.

One call for each sequence costs more than its arithmetic. One call for all sequences reads unneeded keys and values
where lengths differ. Sequences whose runs begin at region starts become rows of one strided view of the pool, padded to
the longest. In float32 on the CPU, many sequences attend in one call wherever they begin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.engines.transformers.attention import cpu_attention
from worker.engines.transformers.attention.kv_pool import KvPool, KvSpan
from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.schedule.kv_cache import BlockTable
from worker.protocol.memory import BLOCK_TOKENS

# Decodes share a padded call as long as the extra keys and values take no longer to read than the calls saved: bytes
# read during the overhead of a call. Measured on 2 cores with head sizes 64 and 128 and contexts of 70 to 500 tokens:
# 15 microseconds at 12 GB/s. The value for CUDA is a guess.
_CALL_BYTES = {"cpu": 180 << 10, "cuda": 32 << 20}
# Elements. CUDA kernels need aligned mask rows; torch makes a padded copy of other masks, in every layer.
_MASK_ALIGNMENT = 16
# As _CALL_BYTES for cpu_attention.decode_attention, which reads few unneeded keys. A guess.
_DECODE_ATTENTION_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PaddedCall:
    """Decodes that attend in one call as rows of a strided view. The view may include rows of no decode."""

    indices: torch.Tensor | None  # [decodes of the call]: their indices in the batch; None: all, in order
    row: torch.Tensor | None  # [decodes of the call]: their rows in the view; None: all rows, in order
    begin: int  # position of the first row in the pool
    stride: int
    rows: int
    tokens: int
    mask: torch.Tensor | None  # [rows, 1, 1, tokens], added to the scores; None if every row sees all tokens
    places: cpu_attention.RowPositions | None  # set if cpu_attention.decode_attention is faster than torch's kernel


@dataclass(frozen=True, slots=True)
class SharedCall:
    """Decodes that all see the same tokens, and all of them."""

    indices: torch.Tensor | None
    spans: tuple[KvSpan, ...]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Attention calls for the decodes of a step, for layers with one window and number of heads."""

    calls: tuple[PaddedCall | SharedCall, ...]
    merges: bool  # some decode is in several calls, whose outputs are merged


@dataclass(frozen=True, slots=True)
class _DecodeView:
    """Part of the newest run that one decode sees: positions `begin + hidden` to `begin + tokens` of the pool."""

    index: int  # of the decode
    begin: int
    hidden: int
    tokens: int


class DecodePlanner:
    """Builds the plans for the decodes of one step."""

    def __init__(self, pool: KvPool, decodes: Sequence[tuple[BlockTable, int]], device: torch.device):
        """`decodes`: block table and length of each sequence."""
        self._pool, self._decodes, self._device = pool, decodes, device

    def plan(self, window: int, heads: int, dtype: torch.dtype, *, can_merge: bool) -> DecodePlan:
        """Plan the calls for a layer with this window (0: none) and number of query heads.

        `dtype`: of masks. `can_merge`: the kernel returns the log-sum-exp needed to merge outputs of several runs.
        """
        views: list[_DecodeView] = []
        shared_runs: dict[KvSpan, list[int]] = {}
        gathered: list[tuple[int, tuple[KvSpan, ...]]] = []
        for index, (table, end) in enumerate(self._decodes):
            low = max(0, end - window) if window else 0  # first token seen
            run = next(run for run in reversed(table.runs) if run.first * BLOCK_TOKENS < end)
            first = run.first * BLOCK_TOKENS
            if low >= first:
                # All visible tokens lie in the newest run: a view, nothing is copied.
                views.append(_DecodeView(index, run.block * BLOCK_TOKENS, low - first, end - first))
            elif can_merge and not low:
                # Earlier runs are prefixes that other sequences may share. Grouped by run, each is read once for all
                # of them. Gathering per sequence would read a shared prefix once for each sequence.
                for span in table.spans(0, first):
                    shared_runs.setdefault(span, []).append(index)
                views.append(_DecodeView(index, run.block * BLOCK_TOKENS, 0, end - first))
            else:
                # The kernel cannot merge, or a window begins inside an earlier run: gather this sequence's keys.
                gathered.append((index, tuple(table.spans(low, end))))
        padded, single = self._partition(views, heads)
        calls: list[PaddedCall | SharedCall] = [self._padded(padded, heads, dtype)] if padded else []
        if can_merge and self._can_scatter(single, heads):
            calls.append(self._scattered(single, dtype))
            single = []
        calls += [
            SharedCall(self._index_tensor([view.index]), ((view.begin + view.hidden, view.tokens - view.hidden),))
            for view in single
        ]
        calls += [SharedCall(self._index_tensor(indices), (span,)) for span, indices in shared_runs.items()]
        calls += [SharedCall(self._index_tensor([index]), spans) for index, spans in gathered]
        return DecodePlan(tuple(calls), merges=bool(shared_runs))

    def _partition(self, views: list[_DecodeView], heads: int) -> tuple[list[_DecodeView], list[_DecodeView]]:
        """Split views into those for one padded call, and the rest, which attend one by one.

        The first list has all views at region starts, unless padding would cost more than the calls it saves.
        """
        at_region_start = [view for view in views if view.begin % self._pool.stride == 0]
        # Two sequences with one start share a run (a prefix) and cannot both be a row of the view.
        if len(at_region_start) < 2 or len({view.begin for view in at_region_start}) < len(at_region_start):
            return [], views
        low, stride, rows, tokens = _rows(at_region_start)
        # The last row may extend beyond the pool if it is padded to the longest.
        fits = low + (rows - 1) * stride + tokens <= self._pool.positions
        # Padding reads unneeded keys and values, which costs bandwidth; one call for each row costs call overhead.
        wasted = rows * tokens - sum(view.tokens - view.hidden for view in at_region_start)
        call = _CALL_BYTES.get(self._device.type, 0)
        if self._can_use_decode_attention(rows, heads, tokens):
            call = _DECODE_ATTENTION_BYTES
        is_cheap = wasted * self._pool.token_bytes <= len(at_region_start) * call
        if not fits or not is_cheap:
            return [], views
        return at_region_start, [view for view in views if view.begin % self._pool.stride]

    def _can_scatter(self, views: list[_DecodeView], heads: int) -> bool:
        """True if `views`, which begin anywhere, may attend in one call of cpu_attention.decode_attention."""
        # bfloat16 keys are widened through a strided view.
        if self._pool.dtype != torch.float32 or not views:
            return False
        longest = max(view.tokens - view.hidden for view in views)
        wasted = len(views) * longest - sum(view.tokens - view.hidden for view in views)
        is_cheap = wasted * self._pool.token_bytes <= len(views) * _DECODE_ATTENTION_BYTES
        return is_cheap and self._can_use_decode_attention(len(views), heads, longest)

    def _scattered(self, views: list[_DecodeView], dtype: torch.dtype) -> PaddedCall:
        begins, lengths = [0] * len(views), [view.tokens - view.hidden for view in views]
        longest = max(lengths)
        offsets = self._visible(begins, lengths, longest)
        first = upload([view.begin + view.hidden for view in views], self._device)[:, None]
        return PaddedCall(
            indices=self._index_tensor([view.index for view in views]),
            row=None,
            begin=0,
            stride=0,
            rows=len(views),
            tokens=longest,
            mask=self._padded_mask(begins, lengths, longest, dtype),
            places=cpu_attention.RowPositions(0, 0, (first + offsets).int()),
        )

    def _can_use_decode_attention(self, rows: int, heads: int, tokens: int) -> bool:
        return tokens <= cpu_attention.max_tokens(rows, heads, self._pool.keys[0])  # 0 for uint8, so never if quantized

    def _padded(self, views: list[_DecodeView], heads: int, dtype: torch.dtype) -> PaddedCall:
        low, stride, rows, tokens = _rows(views)
        row = [(view.begin - low) // stride for view in views]
        begins, ends = [0] * rows, [0] * rows
        for view, place in zip(views, row, strict=True):
            begins[place], ends[place] = view.hidden, view.tokens
        return PaddedCall(
            indices=self._index_tensor([view.index for view in views]),
            row=None if row == list(range(rows)) else upload(row, self._device),
            begin=low,
            stride=stride,
            rows=rows,
            tokens=tokens,
            mask=self._padded_mask(begins, ends, tokens, dtype),
            places=cpu_attention.RowPositions(low, stride, self._visible(begins, ends, tokens).int())
            if self._can_use_decode_attention(rows, heads, tokens)
            else None,
        )

    def _visible(self, begins: list[int], ends: list[int], tokens: int) -> torch.Tensor:
        """Offsets `[rows, tokens]`. Those outside of a row's range repeat its nearest visible one, so that
        `decode_attention` reads nothing in vain."""
        low, high = upload(begins, self._device)[:, None], upload(ends, self._device)[:, None] - 1
        return torch.arange(tokens).clamp(low, high).clamp_(min=0)

    def _padded_mask(self, begins: list[int], ends: list[int], tokens: int, dtype: torch.dtype) -> torch.Tensor | None:
        if not any(begins) and min(ends) == tokens:
            return None
        position = torch.arange(tokens, device=self._device)
        hidden = position >= upload(ends, self._device)[:, None]
        if any(begins):
            hidden |= position < upload(begins, self._device)[:, None]
        return additive(hidden[:, None, None], dtype)

    def _index_tensor(self, indices: list[int]) -> torch.Tensor | None:
        return None if indices == list(range(len(self._decodes))) else upload(indices, self._device)


def _rows(views: list[_DecodeView]) -> tuple[int, int, int, int]:
    """First position, stride (the largest that meets all runs), number of rows, and tokens of the longest row."""
    low, high = min(view.begin for view in views), max(view.begin for view in views)
    stride = math.gcd(*(view.begin - low for view in views))
    return low, stride, (high - low) // stride + 1, max(view.tokens for view in views)


def additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask: minus infinity where `hidden` `[rows, 1 or heads, queries, positions]` is true, else 0."""
    *outer, positions = hidden.shape
    width = -(-positions // _MASK_ALIGNMENT) * _MASK_ALIGNMENT if hidden.is_cuda else positions
    mask = torch.zeros(*outer, width, dtype=dtype, device=hidden.device)[..., :positions]
    return mask.masked_fill_(hidden, float("-inf"))

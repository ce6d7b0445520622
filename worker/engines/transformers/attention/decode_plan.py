"""Which decodes of a step attend in one call: decisions about views of the pool, made once for layers that are alike.

A call for each sequence would cost more than its arithmetic, and one call for all reads keys and values in vain where
lengths differ. Sequences whose runs begin at homes are rows of one strided view of the pool, padded to the longest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.engines.transformers.attention import cpu_attention
from worker.engines.transformers.attention.kv_pool import Pool, Span
from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.schedule.kv_cache import Table
from worker.protocol.memory import BLOCK_TOKENS

_CALL_BYTES = {"cpu": 180 << 10, "cuda": 32 << 20}
"""Sequences that decode are computed together, padded to the longest, while the keys and values read in vain take no
longer than a call for each would: bytes that are read while a call begins. Measured on 2 cores, with head sizes of 64
and 128 and contexts of 70 to 500 tokens: 15 microseconds at 12 GB/s; of CUDA a guess."""
_MASK_ALIGNMENT = 16
"""Elements: of masks whose rows begin elsewhere CUDA's kernels have a padded copy made, in every layer."""
_SPREAD_BYTES = 1 << 20
"""The same where `kernels.spread` computes them, which hardly reads in vain."""


@dataclass(frozen=True, slots=True)
class Padded:
    """Decodes that attend in one call, as rows of a view; some rows may be nobody's."""

    who: torch.Tensor | None
    """`[decodes of the call]`; None: all, in order."""
    row: torch.Tensor | None
    """`[decodes of the call]`: the row of each; None: all rows, in order."""
    slot: int
    stride: int
    rows: int
    tokens: int
    mask: torch.Tensor | None
    """`[rows, 1, 1, tokens]`, added to the scores: who may look where; None if everybody may everywhere."""
    places: cpu_attention.Places | None
    """Where the values lie; None where torch's kernel is as fast."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Decodes that all see the same tokens, and all of them."""

    who: torch.Tensor | None
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How the decodes of a step attend in a layer."""

    calls: tuple[Padded | Shared, ...]
    merges: bool
    """Some decode is in several calls, whose answers are parts of its own."""


@dataclass(frozen=True, slots=True)
class _View:
    """What one decode sees of the run that its newest token lies in: slots from `slot + hidden` to `slot + tokens`."""

    who: int
    slot: int
    hidden: int
    tokens: int


class DecodePlanner:
    """Plans for the decodes of one step."""

    def __init__(self, pool: Pool, decodes: Sequence[tuple[Table, int]], device: torch.device):
        """`decodes`: of each its blocks and its length."""
        self._pool, self._decodes, self._device = pool, decodes, device

    def plan(self, window: int, heads: int, dtype: torch.dtype, *, can_merge: bool) -> Plan:
        """The calls by which the decodes attend in a layer with this window (0: none) and so many heads.

        `dtype`: of masks. `can_merge`: the kernel returns the sums by which answers to several runs are merged.
        """
        views: list[_View] = []
        before: dict[Span, list[int]] = {}
        gathered: list[tuple[int, tuple[Span, ...]]] = []
        for who, (table, end) in enumerate(self._decodes):
            low = max(0, end - window) if window else 0
            run = next(run for run in reversed(table.runs) if run.first * BLOCK_TOKENS < end)
            first = run.first * BLOCK_TOKENS
            if low >= first:
                # All that it sees lies in its newest run: a view, nothing is copied.
                views.append(_View(who, run.block * BLOCK_TOKENS, low - first, end - first))
            elif can_merge and not low:
                # Earlier runs are prefixes that other sequences may share. Grouped by run, each is read once for all
                # of them; gathering them per sequence would read a shared prefix as often as it is shared.
                for span in table.slots(0, first):
                    before.setdefault(span, []).append(who)
                views.append(_View(who, run.block * BLOCK_TOKENS, 0, end - first))
            else:
                # The kernel returns no sums, or a window begins inside a shared run: copy what this one sees.
                gathered.append((who, tuple(table.slots(low, end))))
        together, alone = self._together(views, heads)
        calls: list[Padded | Shared] = [self._padded(together, heads, dtype)] if together else []
        calls += [
            Shared(self._who([view.who]), ((view.slot + view.hidden, view.tokens - view.hidden),)) for view in alone
        ]
        calls += [Shared(self._who(who), (span,)) for span, who in before.items()]
        calls += [Shared(self._who([who]), spans) for who, spans in gathered]
        return Plan(tuple(calls), merges=bool(before))

    def _together(self, views: list[_View], heads: int) -> tuple[list[_View], list[_View]]:
        """Those that are computed as rows of one view, and the rest: all whose runs begin at homes, unless padding
        costs too much."""
        at_home = [view for view in views if view.slot % self._pool.stride == 0]
        if len(at_home) < 2 or len({view.slot for view in at_home}) < len(at_home):
            return [], views
        low, stride, rows, tokens = _rows(at_home)
        fits = low + (rows - 1) * stride + tokens <= self._pool.slots
        # Padding reads keys and values that no row sees. That costs bandwidth; a call for each row costs its overhead.
        vain = rows * tokens - sum(view.tokens - view.hidden for view in at_home)
        call = _CALL_BYTES.get(self._device.type, 0)
        if self._can_spread(rows, heads, tokens):
            call = _SPREAD_BYTES
        is_cheap = vain * self._pool.token_bytes <= len(at_home) * call
        if not fits or not is_cheap:
            return [], views
        return at_home, [view for view in views if view.slot % self._pool.stride]

    def _can_spread(self, rows: int, heads: int, tokens: int) -> bool:
        return tokens <= cpu_attention.longest(rows, heads, self._pool.keys[0])  # of bytes: none

    def _padded(self, views: list[_View], heads: int, dtype: torch.dtype) -> Padded:
        low, stride, rows, tokens = _rows(views)
        row = [(view.slot - low) // stride for view in views]
        begins, ends = [0] * rows, [0] * rows
        for view, place in zip(views, row, strict=True):
            begins[place], ends[place] = view.hidden, view.tokens
        return Padded(
            who=self._who([view.who for view in views]),
            row=None if row == list(range(rows)) else self._upload(row),
            slot=low,
            stride=stride,
            rows=rows,
            tokens=tokens,
            mask=self._padded_mask(begins, ends, tokens, dtype),
            places=self._places(low, stride, begins, ends, tokens) if self._can_spread(rows, heads, tokens) else None,
        )

    def _places(self, low: int, stride: int, begins: list[int], ends: list[int], tokens: int) -> cpu_attention.Places:
        position = torch.arange(tokens).clamp(self._upload(begins)[:, None], self._upload(ends)[:, None] - 1)
        return cpu_attention.Places(low, stride, position.clamp_(min=0).int())

    def _padded_mask(self, begins: list[int], ends: list[int], tokens: int, dtype: torch.dtype) -> torch.Tensor | None:
        if not any(begins) and min(ends) == tokens:
            return None
        position = torch.arange(tokens, device=self._device)
        hidden = position >= self._upload(ends)[:, None]
        if any(begins):
            hidden |= position < self._upload(begins)[:, None]
        return additive(hidden[:, None, None], dtype)

    def _who(self, who: list[int]) -> torch.Tensor | None:
        return None if who == list(range(len(self._decodes))) else self._upload(who)

    def _upload(self, values: list[int]) -> torch.Tensor:
        return upload(values, torch.int64, self._device)


def _rows(views: list[_View]) -> tuple[int, int, int, int]:
    """The lowest slot, the widest stride that meets all runs, and how many rows of how many tokens those are."""
    low, high = min(view.slot for view in views), max(view.slot for view in views)
    stride = math.gcd(*(view.slot - low for view in views))
    return low, stride, (high - low) // stride + 1, max(view.tokens for view in views)


def additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Minus infinity where `hidden` `[rows, 1 or heads, queries, positions]` is set, else 0."""
    *outer, positions = hidden.shape
    width = -(-positions // _MASK_ALIGNMENT) * _MASK_ALIGNMENT if hidden.is_cuda else positions
    mask = torch.zeros(*outer, width, dtype=dtype, device=hidden.device)[..., :positions]
    return mask.masked_fill_(hidden, float("-inf"))

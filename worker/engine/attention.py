"""The key-value pool, and attention over it for sequences packed one behind another.

A step's tokens, of all its sequences, go through the model as one row `[1, tokens]`: linear layers, norms and position
embeddings do not care where one sequence ends. Attention does, so transformers calls ours (through its attention
interface) with the step's layout in the keyword `packed`. It writes the new keys and values into the pool and lets
each token see its own sequence only: the tokens up to itself, within the layer's window if it has one.

The pool is made of blocks (`kv_cache`). What lies in one run is read as a view: copying the keys and values of every
sequence in every step would cost more than a small model on a CPU. Sequences that decode are computed together, as
rows of one strided view, where their runs begin at homes. What lies in several runs (a prefix that others share, then
its own) is attended run by run and merged by the sums of the softmax's exponentials (Milakov and Gimelshein 2018), so
that a prefix which many share is read once for all of them; where a kernel does not tell these sums, and for prompts,
runs are gathered first.

A model whose attention needs more than that (soft-capping, sinks, position biases, masks of its own) is refused here
with an error, never computed without it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker.engine import kernels
from worker.engine.claims import claim
from worker.engine.kv_cache import BLOCK_TOKENS, Table, home_stride
from worker.engine.memory import upload

SDPA, EAGER = "packed_sdpa", "packed_eager"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "cache")
_CALL_BYTES = {"cpu": 180 << 10, "cuda": 32 << 20}
"""Sequences that decode are computed together, padded to the longest, while the keys and values read in vain take no
longer than a call for each would: bytes that are read while a call begins. Measured on 2 cores, with head sizes of 64
and 128 and contexts of 70 to 500 tokens: 15 microseconds at 12 GB/s; of CUDA a guess."""
_MASK_ALIGNMENT = 16
"""Elements: of masks whose rows begin elsewhere CUDA's kernels have a padded copy made, in every layer."""
_SPREAD_BYTES = 1 << 20
"""The same where `kernels.spread` computes them, which hardly reads in vain."""

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

    def lay_out(self, batch: Sequence["Piece"]) -> "Packed":
        """The layout of a step."""
        return Packed.of(batch, self, self._store.device)

    def erase(self, blocks: Sequence[int]) -> None:
        """Zeros in every layer."""
        self._by_block().index_fill_(2, upload(blocks, torch.int64, self._store.device), 0.0)

    def _by_block(self) -> torch.Tensor:
        """`[layers, 2, blocks, BLOCK_TOKENS, kv_heads, head_dim]`."""
        layers, _, _, heads, dim = self._store.shape
        return self._store.view(layers, 2, self.blocks, BLOCK_TOKENS, heads, dim)


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of packed tokens of one sequence, which attend in one call."""

    first: int
    count: int
    start: int
    table: Table


@dataclass(frozen=True, slots=True)
class _Padded:
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
    places: kernels.Places | None
    """Where the values lie; None where torch's kernel is as fast."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """Decodes that all see the same tokens, and all of them."""

    who: torch.Tensor | None
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the decodes of a step attend in a layer."""

    calls: tuple[_Padded | _Shared, ...]
    merges: bool
    """Some decode is in several calls, whose answers are parts of its own."""


@dataclass(frozen=True, slots=True)
class _View:
    """What one decode sees of the run that its newest token lies in: slots from `slot + hidden` to `slot + tokens`."""

    who: int
    slot: int
    hidden: int
    tokens: int


class Piece(Protocol):
    """A run of a sequence's tokens, as far as attention needs to know of it: a segment of a step."""

    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def table(self) -> Table | None: ...


class Layout(Protocol):
    """Where the tokens of a step lie: what transformers hands through to our attention."""

    def attend(
        self,
        kernel: Any,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int,
        scaling: float | None,
    ) -> torch.Tensor:
        """One layer's attention: `query` `[1, heads, tokens, head_dim]` to `[1, tokens, heads, head_dim]`.

        `key` and `value` `[1, kv_heads, tokens, head_dim]` go into the pool; `window` tokens are seen, 0: all.
        """


@dataclass(slots=True)
class Packed:
    """The layout of one step: which packed tokens belong together, and where the pool keeps them."""

    pool: Pool
    slots: torch.Tensor
    """`[tokens]`: where each token's keys and values go."""
    decodes: tuple[tuple[Table, int], ...]
    """Of the first so many tokens, each the newest of its sequence: its blocks and its length."""
    parts: tuple[_Part, ...]
    """All other tokens, computed one sequence after another."""
    masks: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    """Of parts, by (part, window): built for the first layer that needs it, shared by the others."""
    plans: dict[tuple[int, int, bool], _Plan] = field(default_factory=dict)
    """Of decodes, by window, query heads and whether the kernel can merge; likewise."""
    pause: Callable[[], None] | None = None
    """Called before each layer's attention: other steps may be computed meanwhile."""

    @classmethod
    def of(cls, batch: Sequence["Piece"], pool: Pool, device: torch.device) -> "Packed":
        """Layout of `batch`, whose segments have tables; those of one token should come first."""
        slots: list[int] = []
        for segment in batch:
            for slot, tokens in _table(segment).slots(segment.start, segment.end):
                slots.extend(range(slot, slot + tokens))
        count = 0
        while count < len(batch) and batch[count].length == 1:
            count += 1
        parts, first = [], count
        for segment in batch[count:]:
            parts.append(_Part(first, segment.length, segment.start, _table(segment)))
            first += segment.length
        return cls(
            pool=pool,
            slots=upload(slots, torch.int64, device),
            decodes=tuple((_table(segment), segment.end) for segment in batch[:count]),
            parts=tuple(parts),
        )

    def attend(
        self,
        kernel: Any,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int,
        scaling: float | None,
    ) -> torch.Tensor:
        """See `Layout`."""
        if self.pause is not None:
            self.pause()
        pool = self.pool
        pool.write(layer, self.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        tokens = query[0].transpose(0, 1)  # [tokens, heads, head_dim]
        decodes = len(self.decodes)
        if not self.parts:
            return _decode(kernel, self, layer, tokens, window, scaling)[None]
        out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        if decodes:
            out[:decodes] = _decode(kernel, self, layer, tokens[:decodes], window, scaling)
        for part in self.parts:
            mine = query[:, :, part.first : part.first + part.count]
            answer = self._attend_part(kernel, layer, part, mine, window, scaling)
            out[part.first : part.first + part.count] = answer[0].transpose(0, 1)
        return out[None]

    def _attend_part(
        self, kernel: Any, layer: int, part: _Part, query: torch.Tensor, window: int, scaling: float | None
    ) -> torch.Tensor:
        """By itself, so that what it gathered is gone before the next one's is."""
        first, mask = self.part_mask(part, window, query.dtype)
        spans = tuple(part.table.slots(first, part.start + part.count))
        keys, values = self.pool.read(layer, spans)
        answer: torch.Tensor = kernel(query, keys, values, mask, causal=mask is None, scaling=scaling)
        return answer

    def plan(self, window: int, heads: int, dtype: torch.dtype, *, can_merge: bool) -> _Plan:
        """How the decodes attend in a layer with this window (0: none) and so many heads; `dtype` of masks."""
        key = window, heads, can_merge
        if key not in self.plans:
            self.plans[key] = self._plan(window, heads, dtype, can_merge=can_merge)
        return self.plans[key]

    def _plan(self, window: int, heads: int, dtype: torch.dtype, *, can_merge: bool) -> _Plan:
        views: list[_View] = []
        before: dict[Span, list[int]] = {}
        gathered: list[tuple[int, tuple[Span, ...]]] = []
        for who, (table, end) in enumerate(self.decodes):
            low = max(0, end - window) if window else 0
            run = next(run for run in reversed(table.runs) if run.first * BLOCK_TOKENS < end)
            first = run.first * BLOCK_TOKENS
            if low >= first:
                views.append(_View(who, run.block * BLOCK_TOKENS, low - first, end - first))
            elif can_merge and not low:
                for span in table.slots(0, first):
                    before.setdefault(span, []).append(who)
                views.append(_View(who, run.block * BLOCK_TOKENS, 0, end - first))
            else:
                gathered.append((who, tuple(table.slots(low, end))))
        together, alone = self._together(views, heads)
        calls: list[_Padded | _Shared] = [self._padded(together, heads, dtype)] if together else []
        calls += [
            _Shared(self._who([view.who]), ((view.slot + view.hidden, view.tokens - view.hidden),)) for view in alone
        ]
        calls += [_Shared(self._who(who), (span,)) for span, who in before.items()]
        calls += [_Shared(self._who([who]), spans) for who, spans in gathered]
        return _Plan(tuple(calls), merges=bool(before))

    def _together(self, views: list[_View], heads: int) -> tuple[list[_View], list[_View]]:
        """Those that are computed as rows of one view, and the rest: all whose runs begin at homes, unless padding
        costs too much."""
        at_home = [view for view in views if view.slot % self.pool.stride == 0]
        if len(at_home) < 2 or len({view.slot for view in at_home}) < len(at_home):
            return [], views
        low, stride, rows, tokens = _rows(at_home)
        fits = low + (rows - 1) * stride + tokens <= self.pool.slots
        vain = rows * tokens - sum(view.tokens - view.hidden for view in at_home)
        call = _CALL_BYTES.get(self.slots.device.type, 0)
        if self._can_spread(rows, heads, tokens):
            call = _SPREAD_BYTES
        is_cheap = vain * self.pool.token_bytes <= len(at_home) * call
        if not fits or not is_cheap:
            return [], views
        return at_home, [view for view in views if view.slot % self.pool.stride]

    def _can_spread(self, rows: int, heads: int, tokens: int) -> bool:
        return tokens <= kernels.longest(rows, heads, self.pool.keys[0])  # of bytes: none

    def _padded(self, views: list[_View], heads: int, dtype: torch.dtype) -> _Padded:
        low, stride, rows, tokens = _rows(views)
        row = [(view.slot - low) // stride for view in views]
        begins, ends = [0] * rows, [0] * rows
        for view, place in zip(views, row, strict=True):
            begins[place], ends[place] = view.hidden, view.tokens
        return _Padded(
            who=self._who([view.who for view in views]),
            row=None if row == list(range(rows)) else self._upload(row),
            slot=low,
            stride=stride,
            rows=rows,
            tokens=tokens,
            mask=self._padded_mask(begins, ends, tokens, dtype),
            places=self._places(low, stride, begins, ends, tokens) if self._can_spread(rows, heads, tokens) else None,
        )

    def _places(self, low: int, stride: int, begins: list[int], ends: list[int], tokens: int) -> kernels.Places:
        position = torch.arange(tokens).clamp(self._upload(begins)[:, None], self._upload(ends)[:, None] - 1)
        return kernels.Places(low, stride, position.clamp_(min=0).int())

    def _padded_mask(self, begins: list[int], ends: list[int], tokens: int, dtype: torch.dtype) -> torch.Tensor | None:
        if not any(begins) and min(ends) == tokens:
            return None
        position = torch.arange(tokens, device=self.slots.device)
        hidden = position >= self._upload(ends)[:, None]
        if any(begins):
            hidden |= position < self._upload(begins)[:, None]
        return _additive(hidden[:, None, None], dtype)

    def _who(self, who: list[int]) -> torch.Tensor | None:
        return None if who == list(range(len(self.decodes))) else self._upload(who)

    def _upload(self, values: list[int]) -> torch.Tensor:
        return upload(values, torch.int64, self.slots.device)

    def part_mask(self, part: _Part, window: int, dtype: torch.dtype) -> tuple[int, torch.Tensor | None]:
        """First position that any token of `part` sees, and `[1, 1, tokens, positions]` from there on, added to the
        scores; None: plain causal from position 0."""
        first = max(0, part.start + 1 - window) if window else 0
        end = part.start + part.count
        if part.start == 0 and not 0 < window < end:
            return first, None
        key = (part.first, window)
        if key not in self.masks:
            query = torch.arange(part.start, end, device=self.slots.device)[:, None]
            position = torch.arange(first, end, device=self.slots.device)
            hidden = position > query
            if window:
                hidden |= position <= query - window
            self.masks[key] = _additive(hidden[None, None], dtype)
        return first, self.masks[key]


def _table(segment: Piece) -> Table:
    assert segment.table is not None, "this cache has blocks"
    return segment.table


def _rows(views: list[_View]) -> tuple[int, int, int, int]:
    """The lowest slot, the widest stride that meets all runs, and how many rows of how many tokens those are."""
    low, high = min(view.slot for view in views), max(view.slot for view in views)
    stride = math.gcd(*(view.slot - low for view in views))
    return low, stride, (high - low) // stride + 1, max(view.tokens for view in views)


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Minus infinity where `hidden` `[rows, 1 or heads, queries, positions]` is set, else 0."""
    *outer, positions = hidden.shape
    width = -(-positions // _MASK_ALIGNMENT) * _MASK_ALIGNMENT if hidden.is_cuda else positions
    mask = torch.zeros(*outer, width, dtype=dtype, device=hidden.device)[..., :positions]
    return mask.masked_fill_(hidden, float("-inf"))


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
    packed: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """One layer's attention: `query` `[1, heads, tokens, head_dim]` to `[1, tokens, heads, head_dim]`."""
    needs = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if needs or attention_mask is not None:
        raise NotImplementedError(f"attention with {', '.join(needs) or 'a mask of its own'} is not supported")
    layer, window = module.layer_idx, sliding_window or 0
    return packed.attend(kernel, layer, query, key, value, window, scaling)


def _decode(
    kernel: Any, packed: Packed, layer: int, tokens: torch.Tensor, window: int, scaling: float | None
) -> torch.Tensor:
    """`tokens` `[decodes, heads, head_dim]`, each the newest of its sequence, against all that it sees."""
    can_merge = kernel is _sdpa and tokens.device.type == "cpu"
    plan = packed.plan(window, tokens.shape[1], tokens.dtype, can_merge=can_merge)
    if plan.merges:
        return _merged(packed, plan, layer, tokens, scaling)
    if len(plan.calls) == 1 and plan.calls[0].who is None:
        return _call(kernel, packed.pool, layer, tokens, plan.calls[0], scaling)
    out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    for call in plan.calls:
        out[call.who] = _call(kernel, packed.pool, layer, tokens[call.who], call, scaling)
    return out


def _merged(packed: Packed, plan: _Plan, layer: int, tokens: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """As `_decode`, where some decode sees several runs: its answers to them, weighted by what each run's scores sum
    up to."""
    count, heads, _ = tokens.shape
    answers, sums = [], []
    highest = tokens.new_full((count, heads), float("-inf"), dtype=torch.float32)
    for call in plan.calls:
        who = slice(None) if call.who is None else call.who
        told: list[torch.Tensor] = []
        answers.append(_call(partial(_flash, told), packed.pool, layer, tokens[who], call, scaling, told))
        sums.append(_unfolded(told[0][..., None], call, heads)[..., 0])
        highest[who] = torch.maximum(highest[who], sums[-1])
    total = torch.zeros_like(highest)
    out = torch.zeros_like(tokens, dtype=torch.float32)
    for call, answer, logsum in zip(plan.calls, answers, sums, strict=True):
        who = slice(None) if call.who is None else call.who
        weight = torch.exp(logsum - highest[who])  # [decodes of the call, heads]
        total[who] += weight
        out[who] += answer.float() * weight[..., None]
    return (out / total[..., None]).to(tokens.dtype)


def _call(
    kernel: Any,
    pool: Pool,
    layer: int,
    tokens: torch.Tensor,
    call: _Padded | _Shared,
    scaling: float | None,
    told: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Answers to `tokens` `[decodes of the call, heads, head_dim]`; `told` is where `kernel` says its sums, if it does.

    Heads that share keys become queries of one head, so no key is repeated.
    """
    _, heads, head_dim = tokens.shape
    kv_heads = pool.kv_heads
    if isinstance(call, _Shared):
        keys, values = pool.read(layer, call.spans)
        # [1, kv_heads, decodes * group, head_dim]
        query = tokens.reshape(-1, kv_heads, heads // kv_heads, head_dim).transpose(0, 1)
        query = query.reshape(1, kv_heads, -1, head_dim)
        return _unfolded(kernel(query, keys, values, None, causal=False, scaling=scaling), call, heads)
    query = tokens
    if call.row is not None:
        query = tokens.new_zeros(call.rows, heads, head_dim)
        query[call.row] = tokens
    query = query.reshape(call.rows, kv_heads, heads // kv_heads, head_dim)
    if call.places is not None and kernel is not _eager:
        lying = pool.keys[layer], pool.values[layer]
        answer = kernels.spread(query, *lying, call.places, call.mask, scaling=scaling, told=told)
        return _unfolded(answer, call, heads)
    most = pool.rows_at_once(call.rows, call.tokens)
    if most >= call.rows:
        return _unfolded(_attend_rows(kernel, pool, layer, query, call, 0, call.mask, scaling), call, heads)
    answers = []
    for first in range(0, call.rows, most):
        mask = call.mask[first : first + most] if call.mask is not None else None
        some = query[first : first + most]
        answers.append(_attend_rows(kernel, pool, layer, some, call, first, mask, scaling))
    if told is not None:
        told[:] = [torch.cat(told)]
    return _unfolded(torch.cat(answers), call, heads)


def _attend_rows(
    kernel: Any,
    pool: Pool,
    layer: int,
    query: torch.Tensor,
    call: _Padded,
    first: int,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Answers to `query`, that of rows of `call` from the `first` on. By itself, so that what was read for them is gone
    before the next are."""
    keys, values = pool.read_rows(layer, call.slot + first * call.stride, call.stride, len(query), call.tokens)
    answer: torch.Tensor = kernel(query, keys, values, mask, causal=False, scaling=scaling)
    return answer


def _unfolded(answer: torch.Tensor, call: _Padded | _Shared, heads: int) -> torch.Tensor:
    """`[rows, kv_heads, queries, any]` as a kernel gave it, to `[decodes of the call, heads, any]`."""
    kv_heads, _, last = answer.shape[1:]
    if isinstance(call, _Shared):
        return answer.reshape(kv_heads, -1, heads // kv_heads, last).transpose(0, 1).reshape(-1, heads, last)
    answer = answer.reshape(call.rows, heads, last)
    return answer if call.row is None else answer[call.row]


def _flash(
    told: list[torch.Tensor],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    """Torch's kernel for the CPU, as `_sdpa`; the logarithms of its sums `[rows, heads, queries]` go to `told`."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    shape, pairs = query.shape[:3], kernels.paired(query, keys, values)
    answer, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(pairs or (query, keys, values)), 0.0, causal, attn_mask=mask, scale=scaling
    )
    told.append(sums.reshape(shape))
    out: torch.Tensor = kernels.unpaired(answer) if pairs else answer
    return out


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
    if grouped and query.is_cuda and not _may_share(query, keys, values, mask, causal=causal):
        group = query.shape[1] // keys.shape[1]
        keys, values, grouped = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), False
    pairs = None if causal or grouped else kernels.paired(query, keys, values)
    if pairs is not None:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return kernels.unpaired(F.scaled_dot_product_attention(*pairs, attn_mask=mask, scale=scaling))
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
    )


def _may_share(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
) -> bool:
    """Whether a fast kernel of CUDA's takes keys that heads share: FlashAttention alone does, without a mask, in types
    of 16 bits and on cards that it knows. Where it cannot, torch would compute all scores at once."""
    asked = torch.backends.cuda.SDPAParams(query, keys, values, mask, 0.0, causal, True)
    return mask is None and torch.backends.cuda.can_use_flash_attention(asked)


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

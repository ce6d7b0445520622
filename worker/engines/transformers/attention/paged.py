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

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker.engines.transformers.attention import cpu_attention
from worker.engines.transformers.attention.decode_plan import DecodePlanner, Padded, Plan, Shared, additive
from worker.engines.transformers.attention.dense import eager, flash, sdpa
from worker.engines.transformers.attention.kv_pool import Pool
from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.schedule.kv_cache import Table

SDPA, EAGER = "packed_sdpa", "packed_eager"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "cache")


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of packed tokens of one sequence, which attend in one call."""

    first: int
    count: int
    start: int
    table: Table


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
    plans: dict[tuple[int, int, bool], Plan] = field(default_factory=dict)
    """Of decodes, by window, query heads and whether the kernel can merge; likewise."""

    @classmethod
    def of(cls, batch: Sequence["Piece"], pool: Pool) -> "Packed":
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
            slots=upload(slots, torch.int64, pool.device),
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

    def plan(self, window: int, heads: int, dtype: torch.dtype, *, can_merge: bool) -> Plan:
        """How the decodes attend in a layer with this window (0: none) and so many heads; `dtype` of masks."""
        key = window, heads, can_merge
        if key not in self.plans:
            planner = DecodePlanner(self.pool, self.decodes, self.slots.device)
            self.plans[key] = planner.plan(window, heads, dtype, can_merge=can_merge)
        return self.plans[key]

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
            self.masks[key] = additive(hidden[None, None], dtype)
        return first, self.masks[key]


def _table(segment: Piece) -> Table:
    assert segment.table is not None, "this cache has blocks"
    return segment.table


def register() -> None:
    """Make both functions known to transformers; again is harmless."""
    ALL_ATTENTION_FUNCTIONS.register(SDPA, _attend_sdpa)
    ALL_ATTENTION_FUNCTIONS.register(EAGER, _attend_eager)


def _attend_sdpa(module: Any, query: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
    return _attend(sdpa, module, query, *args, **options), None


def _attend_eager(module: Any, query: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
    return _attend(eager, module, query, *args, **options), None


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
    # Computed without what a model needs, its text would be plausible and wrong: refuse instead of ignoring options.
    needs = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if needs or attention_mask is not None:
        raise NotImplementedError(f"attention with {', '.join(needs) or 'a mask of its own'} is not supported")
    layer, window = module.layer_idx, sliding_window or 0
    return packed.attend(kernel, layer, query, key, value, window, scaling)


def _decode(
    kernel: Any, packed: Packed, layer: int, tokens: torch.Tensor, window: int, scaling: float | None
) -> torch.Tensor:
    """`tokens` `[decodes, heads, head_dim]`, each the newest of its sequence, against all that it sees."""
    can_merge = kernel is sdpa and tokens.device.type == "cpu"
    plan = packed.plan(window, tokens.shape[1], tokens.dtype, can_merge=can_merge)
    if plan.merges:
        return _merged(packed, plan, layer, tokens, scaling)
    if len(plan.calls) == 1 and plan.calls[0].who is None:
        return _call(kernel, packed.pool, layer, tokens, plan.calls[0], scaling)
    out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    for call in plan.calls:
        out[call.who] = _call(kernel, packed.pool, layer, tokens[call.who], call, scaling)
    return out


def _merged(packed: Packed, plan: Plan, layer: int, tokens: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """As `_decode`, where some decode sees several runs: its answers to them, weighted by what each run's scores sum
    up to."""
    count, heads, _ = tokens.shape
    answers, sums = [], []
    # Weights are exponentials of sums: without the highest subtracted they would overflow.
    highest = tokens.new_full((count, heads), float("-inf"), dtype=torch.float32)
    for call in plan.calls:
        who = slice(None) if call.who is None else call.who
        told: list[torch.Tensor] = []
        answers.append(_call(partial(flash, told), packed.pool, layer, tokens[who], call, scaling, told))
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
    call: Padded | Shared,
    scaling: float | None,
    told: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Answers to `tokens` `[decodes of the call, heads, head_dim]`; `told` is where `kernel` says its sums, if it does.

    Heads that share keys become queries of one head, so no key is repeated.
    """
    _, heads, head_dim = tokens.shape
    kv_heads = pool.kv_heads
    if isinstance(call, Shared):
        keys, values = pool.read(layer, call.spans)
        # [1, kv_heads, decodes * group, head_dim]
        query = tokens.reshape(-1, kv_heads, heads // kv_heads, head_dim).transpose(0, 1)
        query = query.reshape(1, kv_heads, -1, head_dim)
        return _unfolded(kernel(query, keys, values, None, causal=False, scaling=scaling), call, heads)
    query = tokens
    # Rows of the view that belong to no decode of this call get zeros as query; their answers are dropped.
    if call.row is not None:
        query = tokens.new_zeros(call.rows, heads, head_dim)
        query[call.row] = tokens
    query = query.reshape(call.rows, kv_heads, heads // kv_heads, head_dim)
    if call.places is not None and kernel is not eager:
        lying = pool.keys[layer], pool.values[layer]
        answer = cpu_attention.spread(query, *lying, call.places, call.mask, scaling=scaling, told=told)
        return _unfolded(answer, call, heads)
    # A quantized pool unpacks what it reads. It limits the rows of a call, so that little is unpacked at a time.
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
    call: Padded,
    first: int,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Answers to `query`, that of rows of `call` from the `first` on. By itself, so that what was read for them is gone
    before the next are."""
    keys, values = pool.read_rows(layer, call.slot + first * call.stride, call.stride, len(query), call.tokens)
    answer: torch.Tensor = kernel(query, keys, values, mask, causal=False, scaling=scaling)
    return answer


def _unfolded(answer: torch.Tensor, call: Padded | Shared, heads: int) -> torch.Tensor:
    """`[rows, kv_heads, queries, any]` as a kernel gave it, to `[decodes of the call, heads, any]`."""
    kv_heads, _, last = answer.shape[1:]
    if isinstance(call, Shared):
        return answer.reshape(kv_heads, -1, heads // kv_heads, last).transpose(0, 1).reshape(-1, heads, last)
    answer = answer.reshape(call.rows, heads, last)
    return answer if call.row is None else answer[call.row]

"""Attention over the paged KV cache for a packed batch.

The tokens of all sequences of a step go through the model as one packed row `[1, tokens]`, without padding. Linear
layers, norms and position embeddings do not depend on sequence boundaries; attention does. transformers therefore calls
the functions registered here (its attention interface), with the batch in the keyword argument `packed`. They write the
new keys and values into the pool, and each token attends to its own sequence up to itself, within the layer's sliding
window if there is one.

The pool consists of blocks (`schedule.kv_cache`). A run of neighbouring blocks is read as a view: copying the keys and
values of every sequence in every step would cost more than a small model itself on a CPU. Decodes whose runs begin at
region starts are rows of one strided view and attend in one call. A sequence in several runs (a shared prefix, then its
own) attends run by run, and the results are merged with the log-sum-exp of each run's scores (online softmax, Milakov
and Gimelshein 2018), so a shared prefix is read once for all sequences that share it. Kernels that do not return the
log-sum-exp, and prompts, read a gathered copy instead.

Attention options that are not implemented (soft-capping, sinks, position biases, custom masks) raise an error. They are
never ignored, because the text would be plausible and wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker.engines.transformers.attention import cpu_attention
from worker.engines.transformers.attention.decode_plan import (
    DecodePlan,
    DecodePlanner,
    PaddedCall,
    SharedCall,
    additive,
)
from worker.engines.transformers.attention.dense import cpu_flash_attention, eager, sdpa
from worker.engines.transformers.attention.kv_pool import KvPool
from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.schedule.kv_cache import BlockTable

SDPA, EAGER = "packed_sdpa", "packed_eager"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "cache")


@dataclass(frozen=True, slots=True)
class _PrefillPart:
    """Prompt tokens of one sequence in the packed batch; they attend in one call."""

    first: int  # index in the packed batch
    count: int
    start: int  # position in the sequence
    table: BlockTable


class PackedSegment(Protocol):
    """The part of a scheduler segment that attention needs."""

    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def table(self) -> BlockTable | None: ...


class AttentionLayout(Protocol):
    """Location of a step's keys and values. transformers passes it through to the registered functions."""

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

        `key` and `value` `[1, kv_heads, tokens, head_dim]` are written to the cache. A token sees the last `window`
        tokens, or all with 0.
        """


@dataclass(slots=True)
class PackedBatch:
    """A packed batch: the tokens of one step, their sequences, and the positions of their keys and values in the
    pool."""

    pool: KvPool
    slots: torch.Tensor  # [tokens], int64: position in the pool of each token's keys and values
    # The leading tokens of the batch, each the newest of its sequence: block table and length of the sequence.
    decodes: tuple[tuple[BlockTable, int], ...]
    parts: tuple[_PrefillPart, ...]  # all other tokens, one part for each sequence
    # Masks of parts by (first token, window). Built by the first layer that needs one, shared by the others.
    masks: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    # Plans of the decodes by (window, query heads, kernel can merge); shared by the layers likewise.
    plans: dict[tuple[int, int, bool], DecodePlan] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Sequence["PackedSegment"], pool: KvPool) -> "PackedBatch":
        """Pack `batch`. Segments of one token that come first are decodes."""
        slots: list[int] = []
        for segment in batch:
            for slot, tokens in _table(segment).slots(segment.start, segment.end):
                slots.extend(range(slot, slot + tokens))
        count = 0
        # A one-token segment after a longer one is correct, too, but attends in a call of its own.
        while count < len(batch) and batch[count].length == 1:
            count += 1
        parts, first = [], count
        for segment in batch[count:]:
            parts.append(_PrefillPart(first, segment.length, segment.start, _table(segment)))
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
        """See `AttentionLayout`."""
        pool = self.pool
        # Write before reading: tokens of this step attend to each other through the pool.
        pool.write(layer, self.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))  # [tokens, kv_heads, head_dim]
        tokens = query[0].transpose(0, 1)  # [tokens, heads, head_dim]
        decodes = len(self.decodes)
        if not self.parts:
            return _decode(kernel, self, layer, tokens, window, scaling)[None]
        # One call per prompt: a common call would pad all of them to the longest.
        out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        if decodes:
            out[:decodes] = _decode(kernel, self, layer, tokens[:decodes], window, scaling)
        for part in self.parts:
            part_query = query[:, :, part.first : part.first + part.count]  # [1, heads, tokens of the part, head_dim]
            answer = self._attend_part(kernel, layer, part, part_query, window, scaling)
            out[part.first : part.first + part.count] = answer[0].transpose(0, 1)
        return out[None]

    def _attend_part(
        self, kernel: Any, layer: int, part: _PrefillPart, query: torch.Tensor, window: int, scaling: float | None
    ) -> torch.Tensor:
        """Attention of one part. In its own function, so that gathered keys are freed before the next part's are
        read."""
        first, mask = self.part_mask(part, window, query.dtype)
        # The part sees all earlier tokens of its sequence, which earlier steps (or other sequences) computed.
        spans = tuple(part.table.slots(first, part.start + part.count))
        keys, values = self.pool.read(layer, spans)
        answer: torch.Tensor = kernel(query, keys, values, mask, causal=mask is None, scaling=scaling)
        return answer

    def plan(self, window: int, heads: int, dtype: torch.dtype, *, can_merge: bool) -> DecodePlan:
        """Plan of the decodes for a layer with this window (0: none) and number of query heads; `dtype` of masks."""
        key = window, heads, can_merge
        if key not in self.plans:
            planner = DecodePlanner(self.pool, self.decodes, self.slots.device)
            self.plans[key] = planner.plan(window, heads, dtype, can_merge=can_merge)
        return self.plans[key]

    def part_mask(self, part: _PrefillPart, window: int, dtype: torch.dtype) -> tuple[int, torch.Tensor | None]:
        """First position that any token of `part` sees, and the additive mask `[1, 1, tokens, positions]` from there
        on.

        None instead of a mask means plain causal attention from position 0, for which kernels need no mask.
        """
        first = max(0, part.start + 1 - window) if window else 0
        end = part.start + part.count
        if part.start == 0 and not 0 < window < end:
            return first, None
        key = (part.first, window)
        if key not in self.masks:
            query = torch.arange(part.start, end, device=self.slots.device)[:, None]
            position = torch.arange(first, end, device=self.slots.device)
            hidden = position > query  # [tokens, positions]
            if window:
                hidden |= position <= query - window
            self.masks[key] = additive(hidden[None, None], dtype)
        return first, self.masks[key]


def _table(segment: PackedSegment) -> BlockTable:
    assert segment.table is not None, "the packed batch needs a cache with blocks"
    return segment.table


def register() -> None:
    """Register both attention functions with transformers. May be called repeatedly."""
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
    packed: AttentionLayout,
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
    kernel: Any, packed: PackedBatch, layer: int, tokens: torch.Tensor, window: int, scaling: float | None
) -> torch.Tensor:
    """Attention of decodes: `tokens` `[decodes, heads, head_dim]`, each the newest of its sequence."""
    # Only torch's CPU kernel returns the log-sum-exp. (Its CUDA kernels do, too, but not through a stable
    # operator.)
    can_merge = kernel is sdpa and tokens.device.type == "cpu"
    plan = packed.plan(window, tokens.shape[1], tokens.dtype, can_merge=can_merge)
    if plan.merges:
        return _merged(packed, plan, layer, tokens, scaling)
        # The usual case: all decodes are rows of one view, in order, so nothing is indexed or copied.
    if len(plan.calls) == 1 and plan.calls[0].indices is None:
        return _call(kernel, packed.pool, layer, tokens, plan.calls[0], scaling)
    out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    for call in plan.calls:
        out[call.indices] = _call(kernel, packed.pool, layer, tokens[call.indices], call, scaling)
    return out


def _merged(
    packed: PackedBatch, plan: DecodePlan, layer: int, tokens: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """As `_decode`, where some sequences lie in several runs.

    The softmax over all runs is the average of the softmax over each run, weighted by the sum of that run's
    exponentials (online softmax, Milakov and Gimelshein 2018).
    """
    count, heads, _ = tokens.shape
    answers, sums = [], []
    # Maximum per decode, subtracted before exponentiation; the weights would overflow otherwise.
    highest = tokens.new_full((count, heads), float("-inf"), dtype=torch.float32)
    for call in plan.calls:
        indices = slice(None) if call.indices is None else call.indices
        logsums: list[torch.Tensor] = []
        answers.append(
            _call(partial(cpu_flash_attention, logsums), packed.pool, layer, tokens[indices], call, scaling, logsums)
        )
        sums.append(_ungroup(logsums[0][..., None], call, heads)[..., 0])
        highest[indices] = torch.maximum(highest[indices], sums[-1])
    total = torch.zeros_like(highest)
    out = torch.zeros_like(tokens, dtype=torch.float32)
    for call, answer, logsum in zip(plan.calls, answers, sums, strict=True):
        indices = slice(None) if call.indices is None else call.indices
        # [decodes of the call, heads]
        weight = torch.exp(logsum - highest[indices])
        total[indices] += weight
        out[indices] += answer.float() * weight[..., None]
    return (out / total[..., None]).to(tokens.dtype)


def _call(
    kernel: Any,
    pool: KvPool,
    layer: int,
    tokens: torch.Tensor,
    call: PaddedCall | SharedCall,
    scaling: float | None,
    logsums: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Outputs for `tokens` `[decodes of the call, heads, head_dim]`. `logsums` receives the kernel's log-sum-exp.

    Query heads that share a key head (grouped-query attention) become queries of that head, so no key is repeated.
    """
    _, heads, head_dim = tokens.shape
    kv_heads = pool.kv_heads
    if isinstance(call, SharedCall):
        keys, values = pool.read(layer, call.spans)
        # All decodes see the same keys without a mask, so they are queries of one "row":
        # [1, kv_heads, decodes * group, head_dim]
        query = tokens.reshape(-1, kv_heads, heads // kv_heads, head_dim).transpose(0, 1)
        query = query.reshape(1, kv_heads, -1, head_dim)
        return _ungroup(kernel(query, keys, values, None, causal=False, scaling=scaling), call, heads)
    query = tokens
    # Rows of the view between those of this call get zero queries. Their output is dropped.
    if call.row is not None:
        query = tokens.new_zeros(call.rows, heads, head_dim)
        query[call.row] = tokens
    query = query.reshape(call.rows, kv_heads, heads // kv_heads, head_dim)  # [rows, kv_heads, group, head_dim]
    if call.places is not None and kernel is not eager:
        stored = pool.keys[layer], pool.values[layer]
        answer = cpu_attention.decode_attention(
            query, *stored, call.places, call.mask, scaling=scaling, logsums=logsums
        )
        return _ungroup(answer, call, heads)
    # A quantized pool dequantizes what it reads. It limits the rows of a call to bound that memory.
    at_once = pool.rows_at_once(call.rows, call.tokens)
    if at_once >= call.rows:
        return _ungroup(_attend_rows(kernel, pool, layer, query, call, 0, call.mask, scaling), call, heads)
    answers = []
    for first in range(0, call.rows, at_once):
        mask = call.mask[first : first + at_once] if call.mask is not None else None
        row_queries = query[first : first + at_once]
        answers.append(_attend_rows(kernel, pool, layer, row_queries, call, first, mask, scaling))
    if logsums is not None:
        logsums[:] = [torch.cat(logsums)]
    return _ungroup(torch.cat(answers), call, heads)


def _attend_rows(
    kernel: Any,
    pool: KvPool,
    layer: int,
    query: torch.Tensor,
    call: PaddedCall,
    first: int,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Outputs for `query`, the rows of `call` from `first` on. In its own function, so that dequantized keys and values
    are freed before the next rows are read."""
    keys, values = pool.read_rows(layer, call.slot + first * call.stride, call.stride, len(query), call.tokens)
    answer: torch.Tensor = kernel(query, keys, values, mask, causal=False, scaling=scaling)
    return answer


def _ungroup(answer: torch.Tensor, call: PaddedCall | SharedCall, heads: int) -> torch.Tensor:
    """Undo the grouping: a kernel's `[rows, kv_heads, queries, any]` to `[decodes of the call, heads, any]`."""
    kv_heads, _, last = answer.shape[1:]
    if isinstance(call, SharedCall):
        return answer.reshape(kv_heads, -1, heads // kv_heads, last).transpose(0, 1).reshape(-1, heads, last)
    answer = answer.reshape(call.rows, heads, last)
    return answer if call.row is None else answer[call.row]

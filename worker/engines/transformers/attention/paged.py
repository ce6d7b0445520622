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
from typing import Any, NamedTuple, Protocol

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker.engines.transformers.attention import cpu_attention, paged_kernel
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
from worker.engines.transformers.schedule.kv_cache import BlockTable, blocks_for
from worker.engines.transformers.schedule.scheduler import ForwardPart, Segment

SDPA, EAGER = "packed_sdpa", "packed_eager"
# Calls of a step that is not a recorded graph, above which one launch of the Triton kernel takes less time: each call
# launches about six kernels, and Triton's launch takes as long as 30 of them (H100, 0.5 ms).
_MOST_CALLS = 4
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "cache")


class LayerAttention(NamedTuple):
    """How one layer of the model attends."""

    kernel: Any  # one of `dense`
    layer: int
    window: int = 0  # a token sees so many tokens up to itself; 0: all
    scaling: float | None = None  # of the scores; None: 1 / sqrt(head_dim)


class AttentionLayout(Protocol):
    """Location of a step's keys and values. transformers passes it through to the registered functions."""

    def attend(self, at: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """One layer's attention: `query` `[1, heads, tokens, head_dim]` to `[1, tokens, heads, head_dim]`.

        `key` and `value` `[1, kv_heads, tokens, head_dim]` are written to the cache.
        """


@dataclass(slots=True)
class PackedBatch:
    """A packed batch: the tokens of one step, their sequences, and the positions of their keys and values in the
    pool."""

    pool: KvPool
    positions: torch.Tensor  # [tokens], int64: position in the pool of each token's keys and values
    # The leading tokens of the batch, each the newest of its sequence: block table and length of the sequence.
    decodes: tuple[tuple[BlockTable, int], ...]
    # All other tokens by the index of the first one: one part for each sequence, whose tokens attend in one call.
    parts: dict[int, Segment | ForwardPart]
    # Masks of parts by (first token, window). Built by the first layer that needs one, shared by the others.
    masks: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    # Plans of the decodes by (window, query heads, kernel can merge); shared by the layers likewise.
    plans: dict[tuple[int, int, bool], DecodePlan] = field(default_factory=dict)
    # Block tables `[decodes, blocks]` and lengths `[decodes]` of the decodes, for `paged_kernel`.
    tables: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, batch: Sequence[Segment | ForwardPart], pool: KvPool) -> "PackedBatch":
        """Pack `batch`. Segments of one token that come first are decodes."""
        positions: list[int] = []
        for segment in batch:
            for first, tokens in _table(segment).spans(segment.start, segment.end):
                positions.extend(range(first, first + tokens))
        count = 0
        # A one-token segment after a longer one is correct, too, but attends in a call of its own.
        while count < len(batch) and batch[count].length == 1:
            count += 1
        parts, first = dict[int, Segment | ForwardPart](), count
        for segment in batch[count:]:
            parts[first] = segment
            first += segment.length
        return cls(
            pool=pool,
            positions=upload(positions, pool.device),
            decodes=tuple((_table(segment), segment.end) for segment in batch[:count]),
            parts=parts,
        )

    def attend(self, at: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `AttentionLayout`."""
        # Write before reading: tokens of this step attend to each other through the pool.
        # [1, kv_heads, tokens, head_dim] to [tokens, kv_heads, head_dim]
        self.pool.write(at.layer, self.positions, key[0].transpose(0, 1), value[0].transpose(0, 1))
        tokens = query[0].transpose(0, 1)  # [tokens, heads, head_dim]
        decodes = len(self.decodes)
        if not self.parts:
            return self.decode(at, tokens)[None]
        # One call per prompt: a common call would pad all of them to the longest.
        out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        if decodes:
            out[:decodes] = self.decode(at, tokens[:decodes])
        for index, part in self.parts.items():
            part_query = query[:, :, index : index + part.length]  # [1, heads, tokens of the part, head_dim]
            out[index : index + part.length] = self._attend_part(at, index, part_query)[0].transpose(0, 1)
        return out[None]

    def _attend_part(self, at: LayerAttention, index: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of one part. In its own function, so that gathered keys are freed before the next part's are
        read."""
        part = self.parts[index]
        first, mask = self.part_mask(index, at.window, query.dtype)
        # The part sees all earlier tokens of its sequence, which earlier steps (or other sequences) computed.
        keys, values = self.pool.read(at.layer, tuple(_table(part).spans(first, part.end)))
        answer: torch.Tensor = at.kernel(query, keys, values, mask, causal=mask is None, scaling=at.scaling)
        return answer

    def decode(self, at: LayerAttention, tokens: torch.Tensor) -> torch.Tensor:
        """Attention of the decodes: `tokens` `[decodes, heads, head_dim]`, each the newest of its sequence."""
        # Only torch's CPU kernel returns the log-sum-exp. (Its CUDA kernels do, too, but not through a stable
        # operator.)
        can_merge = at.kernel is sdpa and tokens.device.type == "cpu"
        plan = self.plan(at.window, tokens.shape[1], tokens.dtype, can_merge=can_merge)
        if plan.merges:
            return self._merged(at, plan, tokens)
        if len(plan.calls) > _MOST_CALLS and at.kernel is sdpa and paged_kernel.supports(self.pool):
            keys, values = self.pool.keys[at.layer], self.pool.values[at.layer]
            blocks, lengths = self._decode_tables()
            return paged_kernel.attend(tokens, keys, values, blocks, lengths, window=at.window, scaling=at.scaling)
        # The usual case: all decodes are rows of one view, in order, so nothing is indexed or copied.
        if len(plan.calls) == 1 and plan.calls[0].indices is None:
            return self._call(at, plan.calls[0], tokens)
        out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        for call in plan.calls:
            out[call.indices] = self._call(at, call, tokens[call.indices])
        return out

    def _decode_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`tables`, made by the first layer."""
        if self.tables is None:
            counts = [blocks_for(length) for _, length in self.decodes]
            width, numbers = max(counts), list[int]()
            for (table, _), count in zip(self.decodes, counts, strict=True):
                numbers += table.blocks[:count]
                numbers += [0] * (width - count)
            numbers += [length for _, length in self.decodes]
            together = upload(numbers, self.positions.device)
            rows = len(counts)
            self.tables = together[:-rows].view(rows, width), together[-rows:]
        return self.tables

    def _merged(self, at: LayerAttention, plan: DecodePlan, tokens: torch.Tensor) -> torch.Tensor:
        """As `decode`, where some sequences lie in several runs.

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
            merging = at._replace(kernel=partial(cpu_flash_attention, logsums))
            answers.append(self._call(merging, call, tokens[indices], logsums))
            sums.append(_ungroup(logsums[0][..., None], call, heads)[..., 0])
            highest[indices] = torch.maximum(highest[indices], sums[-1])
        total = torch.zeros_like(highest)
        out = torch.zeros_like(tokens, dtype=torch.float32)
        for call, answer, logsum in zip(plan.calls, answers, sums, strict=True):
            indices = slice(None) if call.indices is None else call.indices
            weight = torch.exp(logsum - highest[indices])  # [decodes of the call, heads]
            total[indices] += weight
            out[indices] += answer.float() * weight[..., None]
        return (out / total[..., None]).to(tokens.dtype)

    def _call(
        self,
        at: LayerAttention,
        call: PaddedCall | SharedCall,
        tokens: torch.Tensor,
        logsums: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Outputs for `tokens` `[decodes of the call, heads, head_dim]`. `logsums` receives the kernel's log-sum-exp.

        Query heads that share a key head (grouped-query attention) become queries of that head, so no key is repeated.
        """
        _, heads, head_dim = tokens.shape
        kv_heads = self.pool.kv_heads
        if isinstance(call, SharedCall):
            keys, values = self.pool.read(at.layer, call.spans)
            # All decodes see the same keys without a mask, so they are queries of one "row":
            # [1, kv_heads, decodes * group, head_dim]
            query = tokens.reshape(-1, kv_heads, heads // kv_heads, head_dim).transpose(0, 1)
            query = query.reshape(1, kv_heads, -1, head_dim)
            return _ungroup(at.kernel(query, keys, values, None, causal=False, scaling=at.scaling), call, heads)
        query = tokens
        # Rows of the view between those of this call get zero queries. Their output is dropped.
        if call.row is not None:
            query = tokens.new_zeros(call.rows, heads, head_dim)
            query[call.row] = tokens
        query = query.reshape(call.rows, kv_heads, heads // kv_heads, head_dim)  # [rows, kv_heads, group, head_dim]
        if call.places is not None and at.kernel is not eager:
            keys, values = self.pool.keys[at.layer], self.pool.values[at.layer]
            answer = cpu_attention.decode_attention(
                query, keys, values, call.places, call.mask, scaling=at.scaling, logsums=logsums
            )
            return _ungroup(answer, call, heads)
        # A quantized pool dequantizes what it reads. It limits the rows of a call to bound that memory.
        at_once = self.pool.rows_at_once(call.rows, call.tokens)
        if at_once >= call.rows:
            return _ungroup(self._attend_rows(at, call, 0, query, call.mask), call, heads)
        answers = []
        for first in range(0, call.rows, at_once):
            mask = call.mask[first : first + at_once] if call.mask is not None else None
            answers.append(self._attend_rows(at, call, first, query[first : first + at_once], mask))
        if logsums is not None:
            logsums[:] = [torch.cat(logsums)]
        return _ungroup(torch.cat(answers), call, heads)

    def _attend_rows(
        self, at: LayerAttention, call: PaddedCall, first: int, query: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Outputs for `query`, the rows of `call` from `first` on. In its own function, so that dequantized keys and
        values are freed before the next rows are read."""
        begin = call.begin + first * call.stride
        keys, values = self.pool.read_rows(at.layer, begin, call.stride, len(query), call.tokens)
        answer: torch.Tensor = at.kernel(query, keys, values, mask, causal=False, scaling=at.scaling)
        return answer

    def plan(self, window: int, heads: int, dtype: torch.dtype, *, can_merge: bool) -> DecodePlan:
        """Plan of the decodes for a layer with this window (0: none) and number of query heads; `dtype` of masks."""
        key = window, heads, can_merge
        if key not in self.plans:
            planner = DecodePlanner(self.pool, self.decodes, self.positions.device)
            self.plans[key] = planner.plan(window, heads, dtype, can_merge=can_merge)
        return self.plans[key]

    def part_mask(self, index: int, window: int, dtype: torch.dtype) -> tuple[int, torch.Tensor | None]:
        """First position that any token of a part sees, and the additive mask `[1, 1, tokens, positions]` from there
        on.

        None instead of a mask means plain causal attention from position 0, for which kernels need no mask.
        """
        part = self.parts[index]
        first, end = max(0, part.start + 1 - window) if window else 0, part.end
        if part.start == 0 and not 0 < window < end:
            return first, None
        key = (index, window)
        if key not in self.masks:
            query = torch.arange(part.start, end, device=self.positions.device)[:, None]
            position = torch.arange(first, end, device=self.positions.device)
            hidden = position > query  # [tokens, positions]
            if window:
                hidden |= position <= query - window
            self.masks[key] = additive(hidden[None, None], dtype)
        return first, self.masks[key]


def _table(segment: Segment | ForwardPart) -> BlockTable:
    assert segment.table is not None, "the packed batch needs a cache with blocks"
    return segment.table


def register() -> None:
    """Register both attention functions with transformers. May be called repeatedly."""
    ALL_ATTENTION_FUNCTIONS.register(SDPA, partial(_attend, sdpa))
    ALL_ATTENTION_FUNCTIONS.register(EAGER, partial(_attend, eager))


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
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers. It returns the outputs, and no weights."""
    needs = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if needs or attention_mask is not None:
        raise NotImplementedError(f"attention with {', '.join(needs) or 'a mask of its own'} is not supported")
    at = LayerAttention(kernel, module.layer_idx, sliding_window or 0, scaling)
    return packed.attend(at, query, key, value), None


def _ungroup(answer: torch.Tensor, call: PaddedCall | SharedCall, heads: int) -> torch.Tensor:
    """Undo the grouping: a kernel's `[rows, kv_heads, queries, any]` to `[decodes of the call, heads, any]`."""
    kv_heads, _, last = answer.shape[1:]
    if isinstance(call, SharedCall):
        return answer.reshape(kv_heads, -1, heads // kv_heads, last).transpose(0, 1).reshape(-1, heads, last)
    answer = answer.reshape(call.rows, heads, last)
    return answer if call.row is None else answer[call.row]

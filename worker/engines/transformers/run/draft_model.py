"""The draft model of speculative decoding: a small model of the same vocabulary that guesses the next tokens, greedily.

Its keys and values are in a pool of its own. If the target has paged attention, they are at the positions of the
target's block tables, so blocks are allocated, shared and freed for both pools at once (`TargetTables`). If the target
has an aligned cache, each row has blocks of its own (`RowTables`). The draft model reads the tokens that it has not
computed yet when a draft is asked for, usually the last one or two. A sequence with more of them is read only if its
drafts are expected to save more time than that takes. A cached prefix is read only where it has not been: the
prefix-cache keys state what a block contains. A mistake in this costs accepted tokens and never changes a text.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from worker.engines.transformers.attention.cpu_linear import CpuLinears
from worker.engines.transformers.attention.kv_pool import KvPool
from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.load.lora import LoraStep
from worker.engines.transformers.run.largest_step import LargestSizes
from worker.engines.transformers.run.runner import PagedRunner
from worker.engines.transformers.schedule.kv_cache import BlockTable, blocks_for, next_key
from worker.engines.transformers.schedule.scheduler import Batch, ForwardPart, Segment
from worker.engines.transformers.schedule.speculation import NEWEST, TIMES, accepted, is_worth_reading, undelayed
from worker.protocol.memory import BLOCK_TOKENS, DRAFT_LOGITS

# The time for a token is measured in steps that read so many or more. A guess.
_MANY = 64


@dataclass(slots=True)
class _DraftState:
    """The tokens of one sequence that the draft model has computed."""

    table: BlockTable
    tokens: int = 0  # leading tokens in its pool
    drafted: list[int] = field(default_factory=list)  # its own tokens after them, which may have been rejected


class TargetTables:
    """The block tables of a target with paged attention."""

    def __init__(self, target: PagedRunner, pool: KvPool):
        """`pool`: of the draft model, with the blocks of the target's. Its blocks are erased and copied along."""
        self._target = target
        target.mirrors.append(pool)

    def prepare(self, batch: Batch) -> None:
        """Copy shared blocks before anything is written after their tokens."""
        self._target.prepare_blocks(batch)

    def table(self, segment: Segment) -> BlockTable:
        """The blocks of the segment's sequence. A new object if a block was replaced."""
        assert segment.table is not None, "the target's cache has blocks"
        return segment.table


class RowTables:
    """Block tables for a target whose cache has rows: each row has blocks for a whole context.

    No blocks are shared. With `n` > 1 the draft model reads the prompt once for each choice.
    """

    def __init__(self, ctx_size: int):
        self._blocks = blocks_for(ctx_size)
        self._tables: dict[int, tuple[int, BlockTable]] = {}  # by row: the id of its sequence, and the blocks

    def prepare(self, batch: Batch) -> None:
        """Do nothing: no block is shared."""

    def table(self, segment: Segment) -> BlockTable:
        id, table = self._tables.get(segment.row, (None, None))
        if table is None or id != segment.sequence.id:
            table = BlockTable()
            for block in range(segment.row * self._blocks, (segment.row + 1) * self._blocks):
                table.append(block)
            self._tables[segment.row] = segment.sequence.id, table
        # With keys, a sequence reuses the common beginning of the sequence that had this row before.
        while len(table.keys) < len(segment.sequence.tokens) // BLOCK_TOKENS:
            table.keys.append(next_key(table.keys, segment.sequence))
        return table


class DraftModel:
    """Drafts for the sequences of a target on the same device."""

    def __init__(
        self,
        runner: PagedRunner,
        tables: TargetTables | RowTables,
        *,
        vocab_size: int,
        positions: int,
        chunk: int,
        linears: CpuLinears | None = None,
    ):
        """`runner`: of the draft model, with a pool that has the blocks of `tables`.

        vocab_size: tokens that both models have. positions: longest text of the draft model, 0 for no limit. chunk: the
        most tokens that it reads in one step beside the newest ones.
        """
        self._runner, self._tables = runner, tables
        self._vocab_size, self._positions, self._chunk = vocab_size, positions, chunk
        self._linears = linears
        # Seconds that the last call of `draft` took for more than the newest tokens, as those of prompts.
        self.catch_up = 0.0
        self.on_larger_step: Callable[[], None] | None = None  # called before a step that is larger than all before
        self._largest = LargestSizes()
        self._token_seconds: deque[float] = deque(maxlen=TIMES)  # for each token, in steps that read many
        self._states: dict[int, _DraftState] = {}  # by sequence id
        # The prefix-cache key of each block whose tokens the draft model has computed.
        self._keys: dict[int, bytes] = {}

    @property
    def pool(self) -> KvPool:
        return self._runner.pool

    @property
    def is_settled(self) -> bool:
        """True if `reorder` has nothing left to do."""
        return self._linears is None or self._linears.are_settled

    def reorder(self, seconds: float) -> None:
        """Spend up to `seconds` on weight layouts that make later steps faster."""
        if self._linears is not None:
            self._linears.reorder(seconds)

    @torch.inference_mode()
    def draft(self, batch: Batch, segments: Sequence[Segment], saving: float) -> Sequence[Sequence[int]]:
        """The drafts of decoding segments of `batch`, of up to `draft_room` tokens each. Also reads the prompts in it.

        saving: seconds that drafts save for each token of a sequence. Where reading what was generated without the
        draft model would take longer than drafts save, there is no draft.
        """
        try:
            return self._draft(batch, segments, saving)
        except Exception:
            # Keys and values of the failed step may be missing in the pool.
            self._states.clear()
            self._keys.clear()
            raise

    def _draft(self, batch: Batch, segments: Sequence[Segment], saving: float) -> Sequence[Sequence[int]]:
        self._tables.prepare(batch)
        states = {segment.sequence.id: self._state(segment) for segment in batch}
        self._states = states
        prompts = [segment for segment in batch if not segment.is_decode and segment.sequence.draft_limits is not None]
        wanted = {
            segment.sequence.id
            for segment in (*prompts, *filter(self._reaches, segments))
            if self._pays(segment, saving)
        }
        parts, ready = self._unread(batch, wanted)
        found: dict[int, list[int]] = {}
        self.catch_up = 0.0
        if parts:
            if self.on_larger_step is not None and self._is_larger(parts, len(ready)):
                self.on_larger_step()
            begin = time.monotonic()
            newest = self._next_tokens(parts)
            tokens = sum(part.length for part in parts)
            each = (time.monotonic() - begin) / tokens  # on an accelerator, this is the time of the launch only
            if tokens >= _MANY:
                self._token_seconds.append(each)
            self.catch_up = each * sum(
                part.length for place, part in enumerate(parts) if place not in ready or part.length > NEWEST
            )
            if ready:
                found = self._continue(list(ready.values()), newest)
        return [found.get(segment.sequence.id, []) for segment in segments]

    def _is_larger(self, parts: Sequence[ForwardPart], drafting: int) -> bool:
        """Record the steps of a draft for `drafting` sequences. True if one may take more main memory than all before;
        sizes as in `LargestStep`."""
        tokens, context = sum(part.length for part in parts), sum(part.end for part in parts)
        runs = sum(part.end for part in parts if len(part.table.runs) > 1)
        sizes = tokens, len(parts), drafting, context.bit_length(), runs.bit_length()
        if self._linears is None or not self._linears.has_layers:
            return self._largest.are_exceeded(*sizes)
        shapes = set()
        if self._linears.compiles_attention:
            room = DRAFT_LOGITS // max(drafting, 1)  # all drafts of a step together have so many tokens
            shapes = {(part.length, part.end) for part in parts}
            shapes |= {(drafting, part.end + place) for part in parts for place in range(1, room + 1)}
        return self._largest.are_exceeded(*sizes, rows={tokens, *range(1, drafting + 1)}, shapes=shapes)

    def _reaches(self, segment: Segment) -> bool:
        """True if the draft model has positions for the draft of `segment`."""
        return not self._positions or segment.end + segment.draft_room <= self._positions

    def _pays(self, segment: Segment, saving: float) -> bool:
        """True if drafts are expected to save more time than reading the unread tokens of `segment` takes."""
        sequence = segment.sequence
        unread, left = len(sequence.tokens) - self._states[sequence.id].tokens, sequence.limit - sequence.output_tokens
        return is_worth_reading(unread, left, undelayed(self._token_seconds), saving)

    def _state(self, segment: Segment) -> _DraftState:
        """The draft state of the segment's sequence, after its newest tokens."""
        sequence, table = segment.sequence, self._tables.table(segment)
        state = self._states.get(sequence.id)
        if state is None or state.table is not table or state.tokens > len(sequence.tokens):
            state = _DraftState(table, self._cached(table))  # it begins, or begins again
        kept = accepted(state.drafted, sequence.tokens[state.tokens :])
        # At least one token is read, for the logits after it.
        state.tokens = min(state.tokens + kept, len(sequence.tokens) - 1)
        state.drafted = []
        for index in range(min(state.tokens // BLOCK_TOKENS, len(table.keys))):
            self._keys[table.blocks[index]] = table.keys[index]
        return state

    def _cached(self, table: BlockTable) -> int:
        """Leading tokens in blocks whose content the draft model has computed."""
        for index, key in enumerate(table.keys):
            if self._keys.get(table.blocks[index]) != key:
                return index * BLOCK_TOKENS
        return len(table.keys) * BLOCK_TOKENS

    def _unread(self, batch: Batch, wanted: set[int]) -> tuple[list[ForwardPart], dict[int, Segment]]:
        """Parts of the sequences in `wanted` to read, and by part the segments to draft for after them.

        Sequences that decode come first. A prompt is read along with the target, up to the tokens of this step. There
        are no drafts before all are read: a trial would measure the drafts of some sequences only.
        """
        read: list[tuple[ForwardPart, Segment]] = []
        left, is_behind = self._chunk, False
        for segment in batch:
            sequence = segment.sequence
            state = self._states[sequence.id]
            if sequence.id not in wanted:
                continue
            end = min(len(sequence.tokens), segment.end)
            if self._positions:
                end = min(end, self._positions)
            count = min(end - state.tokens, max(left, 2 if segment.is_decode else 0))
            if count <= 0:
                continue
            left -= count
            until = state.tokens + count
            is_behind = is_behind or (segment.is_decode and until < len(sequence.tokens))
            tokens = [min(token, self._vocab_size - 1) for token in sequence.tokens[state.tokens : until]]
            read.append((ForwardPart(tokens, state.tokens, int(segment.is_decode), state.table), segment))
            self._forget_keys(state, until)
            state.tokens = until
        read.sort(key=lambda each: each[0].length > 1)  # single tokens attend together if they come first
        if is_behind:
            return [part._replace(logits=0) for part, _ in read], {}
        ready = {place: segment for place, (_, segment) in enumerate(read) if segment.is_decode}
        return [part for part, _ in read], ready

    def _forget_keys(self, state: _DraftState, end: int) -> None:
        """Forget what the blocks contain that are written from the state's end to `end`."""
        for block in state.table.blocks[state.tokens // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)]:
            self._keys.pop(block, None)

    def _next_tokens(self, parts: Sequence[ForwardPart], device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """The likeliest next tokens after the parts with logits. `device_tokens`: in place of the parts' own."""
        logits = self._runner.compute(parts, LoraStep(), device_tokens)
        return logits[:, : self._vocab_size].argmax(-1)

    def _continue(self, drafting: list[Segment], newest: torch.Tensor) -> dict[int, list[int]]:
        """Drafts by sequence id. `newest` `[drafting]`: the first token of each."""
        steps = [newest]
        longest = max(segment.draft_room for segment in drafting)
        rows = list(range(len(drafting)))
        for place in range(1, longest):
            left = [row for row in rows if drafting[row].draft_room > place]
            if len(left) < len(rows):
                kept = [rows.index(row) for row in left]
                newest = newest[upload(kept, newest.device)]
                rows = left
            parts = []
            for row in rows:
                state = self._states[drafting[row].sequence.id]
                at = state.tokens + place - 1
                parts.append(ForwardPart((0,), at, 1, state.table))  # its token is on the device only
            newest = self._next_tokens(parts, newest)
            steps.append(newest)
        values = iter(torch.cat(steps).tolist())  # the one wait for the device
        found: dict[int, list[int]] = {segment.sequence.id: [] for segment in drafting}
        for place in range(longest):
            for segment in drafting:
                if segment.draft_room > place:
                    found[segment.sequence.id].append(next(values))
        for segment in drafting:
            state = self._states[segment.sequence.id]
            state.drafted = found[segment.sequence.id][:-1]  # the last one was not read
            self._forget_keys(state, state.tokens + len(state.drafted))
        return found

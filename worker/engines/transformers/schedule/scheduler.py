"""Continuous batching: admission of waiting sequences and selection of the tokens of the next step.

Every step computes some tokens of some running sequences. A sequence whose prompt is complete adds its newest token
(decode); a sequence whose prompt is incomplete adds a chunk of it (chunked prefill). Decodes come first and are never
delayed. Prompts share a token budget, so a long prompt does not stall streams that already run.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from worker.engines.transformers.schedule.kv_cache import BlockTable, RowAllocator
from worker.engines.transformers.schedule.lora_slots import LoraSlots
from worker.engines.transformers.schedule.sequence import Sequence
from worker.protocol.memory import DRAFT_LOGITS, PROMPT_LOGITS


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens `start` to `start + length` of one sequence, as its part of a step. The last ones may be drafted."""

    sequence: Sequence
    row: int
    start: int
    length: int
    # The row's blocks, covering the tokens up to `end`. None for a cache without blocks.
    table: BlockTable | None = None
    ahead: bool = False  # scheduled before the previous step finished: its one token is not in `sequence.tokens` yet
    draft_room: int = 0  # tokens that may be drafted after the newest one: the table covers them
    drafted: tuple[int, ...] = ()  # the segment's last tokens, which are not in `sequence.tokens`
    # True if this segment leaves nothing to compute, so its last logits choose the next token. Not a property: the
    # sequence grows while the segment is still in use.
    completes: bool = field(init=False)
    is_decode: bool = field(init=False)

    def __post_init__(self) -> None:
        sequence, end = self.sequence, self.end - len(self.drafted)
        completes = self.ahead or end == len(sequence.tokens)
        object.__setattr__(self, "completes", completes)
        is_decode = self.ahead or (completes and end - self.start == 1 and sequence.output_tokens > 0)
        object.__setattr__(self, "is_decode", is_decode)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def tokens(self) -> list[int]:
        tokens = self.sequence.tokens[self.start : self.end]
        return [*tokens, *self.drafted] if self.drafted else tokens

    @property
    def logits(self) -> int:
        """Number of trailing positions whose logits are needed."""
        if self.sequence.prompt_logprobs and self.start < self.sequence.prompt_tokens:
            return self.length
        return 1 + len(self.drafted) if self.completes else 0

    @property
    def has_image_tokens(self) -> bool:
        """True if some of its tokens stand for an image."""
        prompt_images = self.sequence.prompt_images
        return prompt_images is not None and any(
            image.begin < self.end and self.start < image.end for image in prompt_images.images
        )


class ForwardPart(NamedTuple):
    """Tokens of one sequence, as a forward needs them. A segment has the same and more."""

    tokens: Tokens[int]
    start: int
    logits: int  # number of last positions whose logits are needed
    table: BlockTable

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + self.length


Batch = tuple[Segment, ...]


class Scheduler:
    """Sequences from arrival to end, first come, first served. A running sequence holds one row of the cache.

    The choices of one request (`n` > 1) start together. The first one, the leader, computes the prompt. The others, the
    followers, hold a row and are forked from the leader when the prompt is complete. A choice that gets no row by then
    computes the prompt itself.

    If the cache cannot hold the full context of every row, the youngest sequence is preempted when blocks run out. The
    oldest is never preempted, so there is always progress. Preempted sequences are admitted before new ones.
    """

    def __init__(self, capacity: RowAllocator, chunk: int, slots: LoraSlots | None = None):
        """`capacity` limits the running sequences, `chunk` the prompt tokens of one step. `slots` holds the LoRA
        adapters of sequences that use one."""
        self._chunk = chunk
        self._slots = slots
        self._capacity = capacity
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, tuple[Sequence, int]] = {}
        self._leaders: dict[int, int] = {}  # group -> id of the sequence that computes its prompt
        self._following: dict[int, int] = {}  # id of a follower -> id of its leader
        self._freed_rows: list[int] = []
        # Lowered below `capacity.rows` after a step ran out of device memory; grows by one with every sequence that
        # ends.
        self._max_running = capacity.rows

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def places(self) -> list[tuple[int, Sequence]]:
        """Running sequences with their rows, sorted by row."""
        return sorted(((row, sequence) for sequence, row in self._running.values()), key=lambda place: place[0])

    @property
    def decoding(self) -> int:
        """Number of running sequences whose prompt is complete."""
        return sum(sequence.is_decoding for sequence, _ in self._running.values())

    @property
    def prefill_context(self) -> int:
        """Largest context length of a prompt in the next step: its computed tokens."""
        prompts = (sequence for sequence, _ in self._running.values() if not sequence.is_decoding)
        return max((prompt.computed for prompt in prompts if prompt.id not in self._following), default=0)

    @property
    def _unheld(self) -> list[tuple[Sequence, int]]:
        """Running sequences that may take part in the next step, with their rows."""
        return [(sequence, row) for sequence, row in self._running.values() if not sequence.is_held]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        """Append to the waiting queue."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence, *, is_corrupt: bool = False) -> None:
        """Drop a sequence that ended or was cancelled, and free its row at once. Unknown sequences are ignored.

        `is_corrupt`: its keys and values may be wrong, so its blocks must not enter the prefix cache.
        """
        if sequence.id in self._running:
            self._release(sequence, is_corrupt=is_corrupt)
            self._max_running = min(self._max_running + 1, self._capacity.rows)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Preempt a running sequence because a step ran out of device memory, and run fewer until one has ended."""
        sequence.preempted_for_memory = True
        self._requeue(sequence)
        self._max_running = max(1, len(self._running))

    def restart(self, sequence: Sequence) -> None:
        """Compute a running sequence again, because its cache may be wrong."""
        self._requeue(sequence, is_corrupt=True)

    def followers(self, leader: Sequence) -> list[Sequence]:
        """Followers of `leader` in order of arrival."""
        return [self._running[id][0] for id, leader_id in self._following.items() if leader_id == leader.id]

    def fork(self, follower: Sequence) -> tuple[int, int]:
        """Fork `follower` from its leader, which has just completed the prompt. Return the leader's and its own row."""
        leader, source = self._running[self._following.pop(follower.id)]
        _, target = self._running[follower.id]
        # The leader's complete blocks get their keys first: the fork copies the keys with the block numbers.
        self._capacity.cache_blocks(source, leader)
        self._capacity.fork(source, target, leader.computed)
        follower.computed, follower.cached = leader.computed, leader.cached
        return source, target

    def take_freed_rows(self) -> list[int]:
        """Rows freed since the last call, by sequences that ended or were preempted."""
        freed, self._freed_rows = self._freed_rows, []
        return freed

    def _release(self, sequence: Sequence, *, is_corrupt: bool = False) -> None:
        """Free the row and the LoRA slot of a running sequence. Followers of it wait again."""
        if not is_corrupt:
            # Register the computed blocks before they are released: a preempted sequence finds them when it restarts.
            self._capacity.cache_blocks(self._running[sequence.id][1], sequence)
        _, row = self._running.pop(sequence.id)
        if sequence.adapter is not None and self._slots is not None:
            self._slots.release(sequence.adapter.adapter)
        is_checked = sequence.output_tokens > 0 and not sequence.is_unchecked
        self._capacity.release(row, is_corrupt=is_corrupt, is_checked=is_checked)
        self._freed_rows.append(row)
        self._following.pop(sequence.id, None)
        if sequence.group is not None and self._leaders.get(sequence.group) == sequence.id:
            # Followers have no keys of their own. Requeued in reverse, so the oldest is first and may lead next.
            del self._leaders[sequence.group]
            for follower in reversed(self.followers(sequence)):
                self._requeue(follower)

    def _requeue(self, sequence: Sequence, *, is_corrupt: bool = False) -> None:
        """Preempt: release the row and insert among the waiting ones, preempted before new, then by arrival."""
        has_run = sequence.id not in self._following  # a follower has computed nothing that could be lost
        self._release(sequence, is_corrupt=is_corrupt)
        if has_run:
            sequence.restart()
        key = (not sequence.preempted, sequence.id)
        before = sum((not waiting.preempted, waiting.id) < key for waiting in self._waiting)
        self._waiting.insert(before, sequence)

    def next(
        self, prompt_budget: int | Callable[[], int], draft_length: Callable[[int, bool], int] | None = None
    ) -> Batch:
        """Admit waiting sequences, then select the next step: decodes sorted by position in the cache, then prompts.

        prompt_budget: the most prompt tokens of this step, capped to the chunk size. At least one prompt token is
            computed if a prompt is waiting. A callable is called only if there are prompts, and after admission, since
            the budget depends on the running sequences.
        draft_length: the number of tokens to draft for each decoding sequence, of n running ones, in a step with or
            without prompts. A draft gets blocks only where some are free (`Segment.draft_room`).
        """
        # Blocks that are complete by now enter the prefix cache first, so that requests admitted below find them.
        for sequence, row in self._running.values():
            self._capacity.cache_blocks(row, sequence)
        self._reuse_blocks()
        # Prompts that are admitted here begin in this very step, and the budget depends on their number.
        self._admit_all()
        # Decodes that are neighbours in the cache become rows of one strided view (attention/decode_plan).
        decodes = list(self._decodes())
        prompts = self._prefill(prompt_budget)
        rows = len(self._unheld)
        length = draft_length(rows, bool(prompts)) if rows and draft_length is not None else 0
        if length and decodes:
            decodes = self._with_draft_room(decodes, length)
        return (*sorted(decodes, key=_cache_location), *prompts)

    def ahead(self, batch: Batch, continuing: Collection[int]) -> Batch:
        """Select the step after `batch` while `batch` is still running: one more token of each continuing sequence.

        The token to compute is known on the device only. `continuing`: ids of the sequences that continue unless that
        token ends them. The call reserves cache blocks and changes nothing else.

        Return an empty batch if `next` would do anything else: compute a prompt, admit a sequence or preempt one.
        """
        # A sequence that is not in the batch (nor held), or whose prompt is not complete, has a prompt to compute. Its
        # part depends on the budget, which is learned when the step in front lands.
        begun = {segment.sequence.id for segment in batch}
        has_others = any(sequence.id not in begun for sequence, _ in self._unheld)
        if has_others or not all(segment.completes for segment in batch):
            return ()
        if self._could_admit():
            return ()
        segments = []
        # Blocks go to the oldest sequence first, as in `_decodes`.
        for segment in sorted(batch, key=lambda part: part.sequence.id):
            sequence, row, start = segment.sequence, segment.row, segment.end
            # One that the batch was launched without, for lack of device memory, waits again.
            if sequence.id in continuing and sequence.id in self._running:
                # Room is only taken here, never made: to preempt a sequence of the step in flight would free blocks
                # that the device still writes.
                if not self._capacity.grow(row, start, start + 1):
                    return ()
                segments.append(Segment(sequence, row, start, 1, self._capacity.table(row), ahead=True))
        return tuple(sorted(segments, key=_cache_location))

    def _reuse_blocks(self) -> None:
        """Take what other prompts have computed meanwhile, for prompts that begin with the same tokens."""
        for sequence, row in self._running.values():
            if not sequence.is_decoding and sequence.id not in self._following:
                found = self._capacity.reuse(row, sequence)
                sequence.computed += found
                if not sequence.preempted:
                    sequence.cached += found

    def _admit_all(self) -> None:
        """Admit in order of arrival. Sequences without an adapter may pass one that waits for its adapter's slot."""
        passed = 0
        while passed < len(self._waiting) and len(self._running) < self._max_running:
            first = self._waiting[passed]
            if first.adapter is not None and (passed or not self._has_slot(first)):
                # With an adapter, a later request may not pass an earlier one: it would take the slot that the earlier
                # one waits for, again and again.
                passed += 1
            elif self._admit(first):
                del self._waiting[passed]
            else:
                break  # no room: smaller requests after it may not pass, or it would wait for ever

    def _could_admit(self) -> bool:
        """True if `next` would admit a sequence now. Mirrors `_admit_all` without side effects."""
        if len(self._running) < self._max_running:
            # Only the first candidate counts: if it does not fit, `_admit_all` stops there, too.
            for passed, sequence in enumerate(self._waiting):
                if sequence.adapter is None or (not passed and self._has_slot(sequence)):
                    return self._capacity.can_admit(sequence)
        return False

    def _has_slot(self, sequence: Sequence) -> bool:
        return sequence.adapter is None or self._slots is None or self._slots.can_acquire(sequence.adapter.adapter)

    def _start(self, sequence: Sequence, row: int) -> None:
        self._running[sequence.id] = sequence, row
        if sequence.adapter is not None and self._slots is not None:
            self._slots.acquire(sequence.adapter.adapter)

    def _admit(self, sequence: Sequence) -> bool:
        """Give the sequence a row if there is room."""
        # A preempted choice that already has output differs from its group and computes everything itself.
        group = sequence.group if not sequence.output_tokens else None
        leader = self._leaders.get(group) if group is not None else None
        # A leader with output is ahead of the prompt: a fork from it would copy keys and values of its output.
        if leader is not None and not self._running[leader][0].output_tokens:
            if not self._capacity.has_row:
                return False
            self._start(sequence, self._capacity.attach(sequence))
            self._following[sequence.id] = leader
            return True
        if not self._capacity.can_admit(sequence):
            return False
        # The row starts with the cached prefix; `computed` counts the tokens that need no prefill.
        row, sequence.computed = self._capacity.admit(sequence)
        self._start(sequence, row)
        # A restart finds its own blocks again. Only the first admission determines the reported cached tokens.
        if not sequence.preempted:
            sequence.cached = sequence.computed
        if group is not None:
            self._leaders[group] = sequence.id
        return True

    def _decodes(self) -> Iterator[Segment]:
        """Decodes in order of arrival. Where a block is missing, the youngest sequence is preempted.

        Preemption recomputes instead of swapping to main memory: the prefix cache still has most of it, where it is on,
        and swapping would need a second pool. The oldest is never preempted, so some sequence always ends.
        """
        decoding = [(sequence, row) for sequence, row in self._unheld if sequence.is_decoding]
        for sequence, row in sorted(decoding, key=_age):
            end = len(sequence.tokens)
            while sequence.id in self._running and not self._capacity.grow(row, sequence.computed, end):
                # Blocks are given in order of age, so the youngest has no part in this step yet.
                youngest, _ = max(self._running.values(), key=_age)
                self._requeue(youngest)
            if sequence.id in self._running:
                yield self._segment(sequence, row, 1)

    def _with_draft_room(self, decodes: list[Segment], length: int) -> list[Segment]:
        """`decodes`, with room for drafts of `length`. Called when all of them have room for their tokens: no sequence
        is preempted for a draft."""
        length = min(length, DRAFT_LOGITS // len(decodes))
        rooms = [segment.sequence.draft_room(length) for segment in decodes]
        return [
            replace(segment, draft_room=room)
            if room and self._capacity.grow(segment.row, segment.start, segment.end + room)
            else segment
            for segment, room in zip(decodes, rooms, strict=True)
        ]

    def _segment(self, sequence: Sequence, row: int, length: int) -> Segment:
        return Segment(sequence, row, sequence.computed, length, self._capacity.table(row))

    def _prefill(self, prompt_budget: int | Callable[[], int]) -> list[Segment]:
        prompts = [
            (prompt, row) for prompt, row in self._unheld if not prompt.is_decoding and prompt.id not in self._following
        ]
        if not prompts:
            return []
        budget = prompt_budget if isinstance(prompt_budget, int) else prompt_budget()
        budget = max(1, min(budget, self._chunk))
        # Half of the budget for the oldest, the rest for the shortest. All of it for the oldest would block short
        # questions behind a long document; all of it for the shortest would starve the document.
        wanted = _unbudgeted_tokens([prompt for prompt, _ in prompts])
        # The dict keeps order of admission, so the first prompt is the oldest.
        oldest = prompts[0][0].id
        shares = {prompt.id: 0 for prompt, _ in prompts} | {oldest: min(wanted[oldest], (budget + 1) // 2)}
        left = budget - shares[oldest]
        for prompt, _ in sorted(prompts, key=lambda pair: pair[0].pending):
            more = min(wanted[prompt.id] - shares[prompt.id], left)
            shares[prompt.id] += more
            left -= more
        return [
            self._segment(prompt, row, _whole_images(prompt, shares[prompt.id]))
            for prompt, row in prompts
            if shares[prompt.id]
        ]


def _whole_images(sequence: Sequence, share: int) -> int:
    """`share` prompt tokens, rounded so that no image is cut whose tokens must be computed in one step."""
    if sequence.prompt_images is None:
        return share
    return sequence.prompt_images.cut(sequence.computed, sequence.computed + share) - sequence.computed


def _age(running: tuple[Sequence, int]) -> int:
    return running[0].id


def _cache_location(segment: Segment) -> int:
    """Sort key of the cache location of a segment's newest tokens: the last run's first block, or the row."""
    return segment.table.runs[-1].block if segment.table is not None else segment.row


def _unbudgeted_tokens(prompts: list[Sequence]) -> dict[int, int]:
    """Tokens that each prompt would compute in one step without a budget, by sequence id.

    Logits at every position cost vocabulary x 4 bytes a token, so prompts with logprobs share PROMPT_LOGITS positions.
    """
    wanted, logits = {}, PROMPT_LOGITS
    for prompt in prompts:
        if prompt.prompt_logprobs and prompt.computed < prompt.prompt_tokens:
            wanted[prompt.id] = min(logits, prompt.prompt_tokens - prompt.computed)
            logits -= wanted[prompt.id]
        else:
            wanted[prompt.id] = prompt.pending
    return wanted

"""Continuous batching: who waits, who runs, and which tokens go into the next step.

Every step computes some tokens of some running sequences, packed one behind another. A sequence whose answer goes on
adds its newest token (decode); one whose prompt is not computed yet adds a chunk of it (prefill). Decoding comes
first and is never held up; prompts share a budget of tokens, so a long one cannot stall streams that run already.

Law: PURE. Decisions are functions of what is here; time is an argument.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from worker.engines.transformers.schedule.kv_cache import Capacity, Table
from worker.engines.transformers.schedule.lora_slots import Slots
from worker.engines.transformers.schedule.sequence import Sequence
from worker.protocol.memory import PROMPT_LOGITS


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens `start` to `start + length` of one sequence, as its part of a step."""

    sequence: Sequence
    row: int
    start: int
    length: int
    table: Table | None = None
    """The blocks of the row, where the cache has such; they cover the tokens up to `end`."""
    ahead: bool = False
    """Its one token is what the step in front of this one chooses: the sequence does not have it yet."""

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def completes(self) -> bool:
        """Nothing of the sequence is left to compute after this: its next token can be chosen."""
        return self.ahead or self.end == len(self.sequence.tokens)

    @property
    def logits(self) -> int:
        """At how many of its last positions logits are wanted."""
        if self.sequence.prompt_logprobs and self.start < self.sequence.prompt_tokens:
            return self.length
        return 1 if self.completes else 0

    @property
    def sees(self) -> bool:
        """Whether some of its tokens stand for images."""
        prompt_images = self.sequence.prompt_images
        return prompt_images is not None and any(
            each.begin < self.end and self.start < each.end for each in prompt_images.each
        )

    @property
    def is_decode(self) -> bool:
        return self.ahead or (self.sequence.answered > 0 and self.length == 1 and self.completes)


Batch = tuple[Segment, ...]


class Scheduler:
    """Sequences from arrival to end. First come, first served; each holds one row of the cache while it runs.

    The choices of one request start together: the first computes the prompt (it leads), the others hold a row, follow,
    and are forked from it when it is done. Those who find no row by then run like anybody else.
    Where the cache has less room than all rows could need, the youngest is put back when it is full: the oldest never,
    so somebody always gets on. Who was put back comes before all who never ran.
    """

    def __init__(self, capacity: Capacity, chunk: int, slots: Slots | None = None):
        """As many run at once as `capacity` has room for; one step computes at most `chunk` prompt tokens. `slots`: for
        the adapters of sequences that have one."""
        self._chunk = chunk
        self._slots = slots
        self._capacity = capacity
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, tuple[Sequence, int]] = {}
        self._leaders: dict[int, int] = {}
        """Who computes the prompt of a group now."""
        self._following: dict[int, int] = {}
        """By follower: who leads it."""
        self._void: list[int] = []
        self._allowed = capacity.rows

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def places(self) -> list[tuple[int, Sequence]]:
        """Who runs in which row, by row."""
        return sorted(((row, each) for each, row in self._running.values()), key=lambda place: place[0])

    @property
    def decoding(self) -> int:
        """Running sequences whose prompt is computed."""
        return sum(sequence.is_decoding for sequence, _ in self._running.values())

    @property
    def looks_back(self) -> int:
        """Tokens that the prompts of the next step have behind them already: the most that any of them has."""
        prompts = (each for each, _ in self._running.values() if not each.is_decoding)
        return max((each.computed for each in prompts if each.id not in self._following), default=0)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences, running before waiting, in order of arrival within each."""
        yield from (sequence for sequence, _ in self._running.values())
        yield from self._waiting

    def add(self, sequence: Sequence) -> None:
        """Queue behind all that wait."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence, *, is_spoiled: bool = False) -> None:
        """It has ended, or nobody wants it any more; its row, if it had one, is free at once.

        `is_spoiled`: what was computed for it may be wrong and must serve nobody else. Unknown sequences are ignored.
        """
        if sequence.id in self._running:
            self._take_back(sequence, is_spoiled=is_spoiled)
            self._allowed = min(self._allowed + 1, self._capacity.rows)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """A step had no memory: put a running sequence back, and run fewer until one has ended."""
        sequence.spared = True
        self._put_back(sequence)
        self._allowed = max(1, len(self._running))

    def followers(self, leader: Sequence) -> list[Sequence]:
        """Those who wait for `leader` to compute their prompt, in order of arrival."""
        return [self._running[id][0] for id, leads in self._following.items() if leads == leader.id]

    def fork(self, follower: Sequence) -> tuple[int, int]:
        """Its leader has computed their prompt, and no more: so has the follower. The rows of both, leader's first."""
        leader, source = self._running[self._following.pop(follower.id)]
        _, target = self._running[follower.id]
        self._capacity.note(source, leader)
        self._capacity.fork(source, target, leader.computed)
        follower.computed, follower.cached = leader.computed, leader.cached
        return source, target

    def take_void(self) -> list[int]:
        """Rows whose sequences have ended or were put back since this was last asked."""
        void, self._void = self._void, []
        return void

    def _take_back(self, sequence: Sequence, *, is_spoiled: bool = False) -> None:
        """Its row and its part in a group; whoever it leads waits again."""
        if not is_spoiled:
            self._capacity.note(self._running[sequence.id][1], sequence)
        _, row = self._running.pop(sequence.id)
        if sequence.adapter is not None and self._slots is not None:
            self._slots.give_back(sequence.adapter.adapter)
        self._capacity.give_back(row, is_spoiled=is_spoiled)
        self._void.append(row)
        self._following.pop(sequence.id, None)
        if sequence.group is not None and self._leaders.get(sequence.group) == sequence.id:
            del self._leaders[sequence.group]
            for follower in reversed(self.followers(sequence)):
                self._put_back(follower)

    def _put_back(self, sequence: Sequence) -> None:
        """Among those who wait: who has run before who has not, then in order of arrival."""
        has_run = sequence.id not in self._following  # a follower has computed nothing that could be lost
        self._take_back(sequence)
        if has_run:
            sequence.restart()
        key = (not sequence.preempted, sequence.id)
        before = sum((not each.preempted, each.id) < key for each in self._waiting)
        self._waiting.insert(before, sequence)

    def next(self, prompt_budget: int | Callable[[], int]) -> Batch:
        """Admit whoever has room, then the parts of the next step: all who decode, by place in the cache, then prompts.

        `prompt_budget` caps the prompt tokens of this step below the chunk (at least one is given if a prompt waits);
        one that depends on who runs is asked for once they are admitted.
        Half of them go to the oldest prompt; the rest to the prompts with the least left, so that a short question
        is not stuck behind a long document, nor the document behind a stream of questions.
        """
        # Blocks that are complete by now enter the prefix cache first, so that requests admitted below find them.
        for sequence, row in self._running.values():
            self._capacity.note(row, sequence)
        # Prompts that are admitted here begin in this very step, and the budget depends on their number.
        self._admit_all()
        decodes = sorted(self._decodes(), key=_place)
        wanted = prompt_budget if isinstance(prompt_budget, int) else prompt_budget()
        budget = max(1, min(wanted, self._chunk))
        return (*decodes, *self._prefill(budget))

    def ahead(self, batch: Batch, going: Collection[int]) -> Batch:
        """The step behind `batch`, while that one still runs: the next token of those sequences, by id, that go `going`
        on if it does not end them. Nothing changes but that they have room for it.

        Empty if `next` would do something else: if it has a prompt to compute or somebody to let in, or if room would
        have to be made.
        """
        # A sequence that is not in the batch, or whose prompt is not complete, has a prompt to compute: its part
        # depends on the budget, which is learned when the step in front lands.
        if len(batch) != len(self._running) or not all(segment.completes for segment in batch):
            return ()
        if self._could_admit():
            return ()
        found = []
        for segment in sorted(batch, key=lambda each: each.sequence.id):  # the oldest is asked first
            sequence, row, start = segment.sequence, segment.row, segment.end
            if sequence.id in going:
                # Room is only taken here, never made: to preempt a sequence of the step in flight would free blocks
                # that the device still writes.
                if not self._capacity.grow(row, start, start + 1):
                    return ()
                found.append(Segment(sequence, row, start, 1, self._capacity.table(row), ahead=True))
        return tuple(sorted(found, key=_place))

    def _admit_all(self) -> None:
        """First come, first served; but who waits for its adapter's slot lets those pass who need none, as they may
        run meanwhile. Nobody else with an adapter passes: slots would never fall idle."""
        passed = 0
        while passed < len(self._waiting) and len(self._running) < self._allowed:
            first = self._waiting[passed]
            if first.adapter is not None and (passed or not self._has_slot(first)):
                # With an adapter, a later request may not pass an earlier one: it would take the slot that the earlier
                # one waits for, again and again.
                passed += 1
            elif self._admit(first):
                del self._waiting[passed]
            else:
                break  # no room: smaller requests behind it may not pass, or it would wait for ever

    def _could_admit(self) -> bool:
        """Whether `next` would let somebody in now."""
        if len(self._running) < self._allowed:
            for passed, each in enumerate(self._waiting):
                if each.adapter is None or (not passed and self._has_slot(each)):
                    return self._capacity.can_admit(each)
        return False

    def _has_slot(self, sequence: Sequence) -> bool:
        return sequence.adapter is None or self._slots is None or self._slots.can_lend(sequence.adapter.adapter)

    def _run(self, sequence: Sequence, row: int) -> None:
        self._running[sequence.id] = sequence, row
        if sequence.adapter is not None and self._slots is not None:
            self._slots.lend(sequence.adapter.adapter)

    def _admit(self, sequence: Sequence) -> bool:
        """Let it run, if there is room."""
        group = sequence.group if not sequence.answered else None
        leader = self._leaders.get(group) if group is not None else None
        # A leader that has answered is ahead of the prompt: to fork from it then would copy keys of its answer.
        if leader is not None and not self._running[leader][0].answered:
            if not self._capacity.has_row:
                return False
            self._run(sequence, self._capacity.attach(sequence))
            self._following[sequence.id] = leader
            return True
        if not self._capacity.can_admit(sequence):
            return False
        row, sequence.computed = self._capacity.admit(sequence)
        self._run(sequence, row)
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
        decoding = [(each, row) for each, row in self._running.values() if each.is_decoding]
        for sequence, row in sorted(decoding, key=_age):
            end = len(sequence.tokens)
            while sequence.id in self._running and not self._capacity.grow(row, sequence.computed, end):
                # Asked in order of age, a sequence that already has its part in this step is older than the youngest.
                youngest, _ = max(self._running.values(), key=_age)
                self._put_back(youngest)
            if sequence.id in self._running:
                yield self._segment(sequence, row, 1)

    def _segment(self, sequence: Sequence, row: int, length: int) -> Segment:
        return Segment(sequence, row, sequence.computed, length, self._capacity.table(row))

    def _prefill(self, budget: int) -> list[Segment]:
        prompts = [
            (each, row)
            for each, row in self._running.values()
            if not each.is_decoding and each.id not in self._following
        ]
        if not prompts:
            return []
        # Half of the budget for the oldest, the rest for the shortest. All of it for the oldest would block short
        # questions behind a long document; all of it for the shortest would starve the document.
        wanted = _wanted([each for each, _ in prompts])
        oldest = prompts[0][0].id
        shares = {each.id: 0 for each, _ in prompts} | {oldest: min(wanted[oldest], (budget + 1) // 2)}
        left = budget - shares[oldest]
        for each, _ in sorted(prompts, key=lambda pair: pair[0].pending):
            more = min(wanted[each.id] - shares[each.id], left)
            shares[each.id] += more
            left -= more
        return [self._segment(each, row, _uncut(each, shares[each.id])) for each, row in prompts if shares[each.id]]

    def check_integrity(self) -> None:
        """Rows belong to exactly those who run. For tests, and when idle."""
        self._capacity.check_integrity()
        if self._slots is not None:
            self._slots.check_integrity()
        assert self._capacity.owners == {row: id for id, (_, row) in self._running.items()}, (
            "a row outlived its sequence"
        )
        assert set(self._following) <= set(self._running), "a follower outlived its row"
        assert set(self._following.values()) <= set(self._leaders.values()), "somebody follows who is gone"
        assert set(self._leaders.values()) <= set(self._running), "a leader is gone"


def _uncut(sequence: Sequence, share: int) -> int:
    """`share` tokens of a prompt, or as many fewer or more as it takes not to cut an image that must be whole."""
    if sequence.prompt_images is None:
        return share
    return sequence.prompt_images.cut(sequence.computed, sequence.computed + share) - sequence.computed


def _age(running: tuple[Sequence, int]) -> int:
    return running[0].id


def _place(segment: Segment) -> int:
    """Where its newest tokens lie."""
    return segment.table.runs[-1].block if segment.table is not None else segment.row


def _wanted(prompts: list[Sequence]) -> dict[int, int]:
    """Tokens by id that each would compute in one step, if it had all of it; PROMPT_LOGITS are shared by all."""
    wanted, logits = {}, PROMPT_LOGITS
    for each in prompts:
        if each.prompt_logprobs and each.computed < each.prompt_tokens:
            wanted[each.id] = min(logits, each.prompt_tokens - each.computed)
            logits -= wanted[each.id]
        else:
            wanted[each.id] = each.pending
    return wanted

"""Continuous batching: who waits, who runs, and which tokens go into the next step.

Every step computes some tokens of some running sequences, packed one behind another. A sequence whose answer goes on
adds its newest token (decode); one whose prompt is not computed yet adds a chunk of it (prefill). Decoding comes
first and is never held up; prompts share a budget of tokens, so a long one cannot stall streams that run already.

Law: PURE. Decisions are functions of what is here; time is an argument.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from worker.engine.kv_cache import Rows
from worker.engine.sequence import Sequence

PROMPT_LOGITS = 16
"""Positions of prompts whose logits are computed in one step, where requests want them all: logits of a large
vocabulary are the largest tensor of a step, and this bounds it."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens `start` to `start + length` of one sequence, as its part of a step."""

    sequence: Sequence
    row: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def completes(self) -> bool:
        """Nothing of the sequence is left to compute after this: its next token can be chosen."""
        return self.end == len(self.sequence.tokens)

    @property
    def logits(self) -> int:
        """At how many of its last positions logits are wanted."""
        if self.sequence.prompt_logprobs and self.start < self.sequence.prompt_tokens:
            return self.length
        return 1 if self.completes else 0

    @property
    def is_decode(self) -> bool:
        return self.sequence.answered > 0 and self.length == 1 and self.completes


Batch = tuple[Segment, ...]


class Scheduler:
    """Sequences from arrival to end. First come, first served; each holds one row while it runs."""

    def __init__(self, rows: int, chunk: int):
        """`rows` sequences run at once; one step computes at most `chunk` prompt tokens."""
        self._chunk = chunk
        self._rows = Rows(rows)
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, tuple[Sequence, int]] = {}
        self._allowed = rows

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
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences, running before waiting, in order of arrival within each."""
        yield from (sequence for sequence, _ in self._running.values())
        yield from self._waiting

    def add(self, sequence: Sequence) -> None:
        """Queue behind all that wait."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> int | None:
        """It has ended, or nobody wants it any more; its row, if it had one, is free at once, and returned.

        Unknown sequences are ignored.
        """
        held = self._running.pop(sequence.id, None)
        if held is not None:
            self._rows.give_back(held[1])
            self._allowed = min(self._allowed + 1, self._rows.count)
            return held[1]
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        return None

    def preempt(self, sequence: Sequence) -> int:
        """Put a running sequence back before those who never ran, and run fewer until one has ended; the row it had."""
        _, row = self._running.pop(sequence.id)
        self._rows.give_back(row)
        sequence.restart()
        before = sum(each.preempted and each.id < sequence.id for each in self._waiting)
        self._waiting.insert(before, sequence)
        self._allowed = max(1, len(self._running))
        return row

    def next(self, prompt_budget: int) -> Batch:
        """Admit whoever has room, then the parts of the next step: all who decode, then prompts.

        `prompt_budget` caps the prompt tokens of this step below the chunk (at least one is given if a prompt waits).
        Half of them go to the oldest prompt; the rest to the prompts with the least left, so that a short question
        is not stuck behind a long document, nor the document behind a stream of questions.
        """
        while self._waiting and self._rows.can_take and len(self._running) < self._allowed:
            sequence = self._waiting.popleft()
            self._running[sequence.id] = (sequence, self._rows.take(sequence.id))
        decodes = [Segment(each, row, each.computed, 1) for each, row in self._running.values() if each.is_decoding]
        budget = max(1, min(prompt_budget, self._chunk))
        return (*decodes, *self._prefill(budget))

    def _prefill(self, budget: int) -> list[Segment]:
        prompts = [(each, row) for each, row in self._running.values() if not each.is_decoding]
        if not prompts:
            return []
        wanted = _wanted([each for each, _ in prompts])
        oldest = prompts[0][0].id
        shares = {each.id: 0 for each, _ in prompts} | {oldest: min(wanted[oldest], (budget + 1) // 2)}
        left = budget - shares[oldest]
        for each, _ in sorted(prompts, key=lambda pair: pair[0].pending):
            more = min(wanted[each.id] - shares[each.id], left)
            shares[each.id] += more
            left -= more
        return [Segment(each, row, each.computed, shares[each.id]) for each, row in prompts if shares[each.id]]

    def check_integrity(self) -> None:
        """Rows belong to exactly those who run. For tests, and when idle."""
        self._rows.check_integrity()
        assert self._rows.owners == {row: id for id, (_, row) in self._running.items()}, "a row outlived its sequence"


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


class Pace:
    """How many prompt tokens fit into a step without making streams stutter; learned from the steps so far.

    While nobody decodes a step may take PROMPT_SECONDS, so that a cancel is soon heard; while streams run prompts
    may lengthen a step by STRETCH times what it takes without them (engine.md section 6: the gap between tokens stays
    within three times its median).
    """

    PROMPT_SECONDS = 1.0
    STRETCH = 1.5
    FEWEST = 16
    """Below this a step's fixed cost outweighs what is saved."""
    _WEIGHT = 0.3
    """Of the newest step in the running means."""

    def __init__(self) -> None:
        self._decode_seconds: float | None = None
        self._token_seconds: float | None = None

    def budget(self, decoding: int, chunk: int) -> int:
        """Prompt tokens for the next step, in which `decoding` sequences decode."""
        if self._token_seconds is None:
            return min(chunk, self.FEWEST * 4)
        allowed = self.PROMPT_SECONDS
        if decoding and self._decode_seconds is not None:
            allowed = min(allowed, self.STRETCH * self._decode_seconds)
        return min(chunk, max(self.FEWEST, int(allowed / self._token_seconds)))

    def learn(self, batch: Batch, seconds: float) -> None:
        """A step with these parts took `seconds`."""
        prompt_tokens = sum(segment.length for segment in batch if not segment.is_decode)
        has_decodes = len(batch) > sum(not segment.is_decode for segment in batch)
        if not prompt_tokens:
            self._decode_seconds = self._mean(self._decode_seconds, seconds)
            return
        if has_decodes and self._decode_seconds is not None:
            seconds = max(seconds - self._decode_seconds, 0.0)
        self._token_seconds = max(self._mean(self._token_seconds, seconds / prompt_tokens), 1e-9)

    def _mean(self, old: float | None, new: float) -> float:
        return new if old is None else old + self._WEIGHT * (new - old)

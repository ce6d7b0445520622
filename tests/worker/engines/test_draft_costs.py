"""The time that a draft model costs in short runs: the real scheduler and drafter, with simulated seconds.

The seconds are those of the 35 M shape of `scripts/bench_engine --speculative` with one thread.
"""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from worker.engines.transformers.loop.drafting import Drafter
from worker.engines.transformers.run.draft_model import DraftModel
from worker.engines.transformers.schedule.kv_cache import RowAllocator
from worker.engines.transformers.schedule.prefill_budget import PrefillBudget
from worker.engines.transformers.schedule.scheduler import Batch, Scheduler, Segment
from worker.engines.transformers.schedule.sequence import Sequence as TokenSequence
from worker.engines.transformers.schedule.speculation import (
    NEWEST,
    DraftLength,
    DraftLimits,
    accepted,
    is_worth_reading,
)

STEP, DECODE, PROMPT = 0.014, 0.00075, 0.00055  # seconds: of a step, and of each token in it
DRAFT_STEP, DRAFT_TOKEN = 0.0028, 0.000085  # likewise, of the draft model
CHUNK = 256
GOOD = 1  # the token that the target chooses, always
NOTHING: Any = SimpleNamespace(lookup=None, penalty_counts=None, matcher=None)


class SimulatedModel(DraftModel):
    """A draft model that guesses right with probability `quality`, and reads as `DraftModel` does."""

    is_settled = True
    on_larger_step: Callable[[], None] | None = None

    def __init__(self, quality: float, seed: int):
        self.quality, self._source = quality, random.Random(seed)
        self.catch_up = self.seconds = self._per_token = 0.0
        self._read: dict[int, int] = {}  # tokens, by sequence id
        self._drafted: dict[int, list[int]] = {}

    def reorder(self, seconds: float) -> None: ...

    def draft(self, batch: Batch, segments: Sequence[Segment], saving: float) -> list[list[int]]:
        sequences = [segment.sequence for segment in batch]
        kept = {each.id: self._read.get(each.id, 0) for each in sequences}
        for each in sequences:
            kept[each.id] += accepted(self._drafted.get(each.id, []), each.tokens[kept[each.id] :])
        self._read = {each.id: min(kept[each.id], len(each.tokens) - 1) for each in sequences}
        self._drafted = {}
        wanted, left, tokens, unread, is_behind = [], CHUNK, 0, 0, False
        for segment in batch:
            each = segment.sequence
            behind = len(each.tokens) - self._read[each.id]
            if is_worth_reading(behind, each.limit - each.output_tokens, self._per_token, saving):
                end = min(len(each.tokens), segment.end)
                count = min(end - self._read[each.id], max(left, NEWEST * segment.is_decode))
                self._read[each.id] += count
                left, tokens = left - count, tokens + count
                is_behind |= segment.is_decode and self._read[each.id] < len(each.tokens)
                unread += count * (count > NEWEST or not segment.is_decode)
                wanted += [segment] * (segment.draft_room > 0)
        self.seconds = (DRAFT_STEP + DRAFT_TOKEN * tokens) * (tokens > 0)
        self._per_token = self.seconds / tokens if tokens > 64 else self._per_token
        self.catch_up = self.seconds * (tokens if is_behind else unread) / max(tokens, 1)
        drafted = [] if is_behind else [segment.sequence.id for segment in wanted]
        for place in range(1, max((segment.draft_room for segment in wanted if drafted), default=0)):
            self.seconds += DRAFT_STEP + DRAFT_TOKEN * sum(segment.draft_room > place for segment in wanted)
        found = [
            [int(self._source.random() < self.quality) for _ in range(segment.draft_room)]
            if segment.sequence.id in drafted
            else []
            for segment in segments
        ]
        # The last token of a draft is not read.
        self._drafted = {part.sequence.id: draft[:-1] for part, draft in zip(segments, found, strict=True)}
        return found


class SimulatedEngine:
    """Gives the seconds of a run of some requests, each of so many tokens of prompt and of answer."""

    def __init__(self, quality: float, seed: int):
        self._model, self._noise = SimulatedModel(quality, seed), random.Random(seed)
        self._drafter = Drafter(DraftLength.up_to(16), self._model)
        self._budget = PrefillBudget()
        self._requests = 0

    def run(self, requests: Sequence[tuple[int, int]], limits: DraftLimits | None) -> float:
        scheduler, seconds = Scheduler(RowAllocator(16), CHUNK), 0.0
        for prompt, answer in requests:
            self._requests += 1
            scheduler.add(
                TokenSequence(
                    self._requests, prompt, [GOOD] * prompt, limit=answer, ends=frozenset(), draft_limits=limits
                )
            )
        while scheduler.has_work:
            batch = scheduler.next(
                lambda: self._budget.budget(
                    scheduler.decoding, CHUNK, scheduler.running - scheduler.decoding, scheduler.prefill_context
                ),
                self._drafter.next_length,
            )
            self._model.seconds = 0.0
            batch = self._drafter.draft(batch, lambda sequence: NOTHING)
            each = (part.length * (DECODE if part.is_decode or part.drafted else PROMPT) for part in batch)
            taken = (STEP + sum(each) + self._model.seconds) * self._noise.uniform(0.97, 1.05)
            seconds += taken
            gained = {part: 1 + accepted(part.drafted, [GOOD] * len(part.drafted)) for part in batch if part.completes}
            self._budget.learn(batch, taken)
            self._drafter.learn(batch, sum(gained.values()), taken)
            for part in batch:
                part.sequence.computed = part.end - len(part.drafted) + max(gained.get(part, 0) - 1, 0)
                if any(part.sequence.append(GOOD) for _ in range(gained.get(part, 0))):
                    scheduler.remove(part.sequence)
        return seconds


Lengths = tuple[tuple[int, int], tuple[int, int]]  # shortest and longest prompt, and answer
SHORT: Lengths = ((16, 80), (64, 96))  # as in `scripts/bench_engine`
LONG: Lengths = ((400, 1200), (100, 200))
DRAFTS = DraftLimits(16)
RUNS = 4


def requests_of(count: int, seed: int, lengths: Lengths) -> list[tuple[int, int]]:
    source, (prompts, answers) = random.Random(seed), lengths
    return [(source.randint(*prompts), source.randint(*answers)) for _ in range(count)]


def seconds_of(
    quality: float, seed: int, first: Sequence[int], count: int, lengths: Lengths
) -> list[tuple[float, float]]:
    """Seconds of RUNS runs of `count` requests, without and with drafts, after and between runs of `first` requests."""
    engine, without, found = SimulatedEngine(quality, seed), SimulatedEngine(quality, seed), []
    for other in (*first, count) if first else ():
        engine.run(requests_of(other, 99, lengths), DRAFTS)
    for number in range(RUNS):
        requests = requests_of(count, number, lengths)
        found.append((without.run(requests, None), engine.run(requests, DRAFTS)))
        for other in first:
            engine.run(requests_of(other, number, lengths), DRAFTS)
    return found


# Drafts of any quality, of which those that hardly pay decide; long prompts, which take the most time to simulate, only
# with the worst, and with those near the border.
CASES: dict[str, tuple[tuple[int, ...], Lengths, float]] = {
    "short-0.3": ((), SHORT, 0.3), "short-0.6": ((), SHORT, 0.6), "short-0.92": ((), SHORT, 0.92),
    "short-0.0-after-others": ((1, 4), SHORT, 0.0), "short-0.6-after-others": ((1, 4), SHORT, 0.6),
    "short-0.7-after-others": ((1, 4), SHORT, 0.7),
    "long-0.0": ((), LONG, 0.0), "long-0.6": ((), LONG, 0.6), "long-0.7-after-others": ((1, 4), LONG, 0.7),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_drafts_lose_three_percent_of_four_runs_at_most_from_the_first_step_on(name: str) -> None:
    first, lengths, quality = CASES[name]
    runs = [seconds_of(quality, seed, first, 16, lengths) for seed in range(3)]
    plain = [sum(seconds[number][0] for seconds in runs) for number in range(RUNS)]
    drafting = [sum(seconds[number][1] for seconds in runs) for number in range(RUNS)]
    for end in range(1, RUNS + 1):
        assert sum(drafting[:end]) - sum(plain[:end]) <= 0.03 * sum(plain), end


@pytest.mark.parametrize(("count", "gain"), [(1, 1.7), (4, 1.3), (16, 1.05)])
def test_good_drafts_pay_in_short_runs(count: int, gain: float) -> None:
    plain, drafting = zip(*(run for seed in range(3) for run in seconds_of(0.92, seed, (), count, SHORT)), strict=True)
    assert sum(plain) > gain * sum(drafting)

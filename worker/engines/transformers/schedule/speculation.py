"""Speculative decoding: how many tokens to draft, and drafts by prompt lookup.

A draft is a guess of the tokens that follow a sequence. One step computes the logits after the sequence's newest token
and after each drafted one. At each of these positions the model's own sampler chooses a token, as it would without a
draft, given the tokens before. The drafted tokens that agree with the choices are accepted, up to the first difference,
and the choice there is the next token. So a step gives one token more than it accepts.

Every token is therefore chosen from the model's own distribution with its own random number, penalties and grammar. A
draft changes the speed of an answer and nothing else. Rejection sampling (Leviathan et al. 2023) accepts more tokens at
high temperatures, but it needs the draft's probabilities and gives other texts for the same seed.

PURE: numbers only.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from worker.protocol.memory import DRAFT_LOGITS

# Accepted tokens are averaged over about _MEMORY steps, the time for prompts over more: they are rare. Guesses.
_MEMORY, _CATCH_UP_MEMORY = 16, 128
# Steps whose seconds are kept for `undelayed`. A guess, checked with simulated delays in the tests.
TIMES = 9
# A trial of a draft length takes _TRIAL_STEPS steps with drafts. The first is not measured: the draft model may read
# the last part of what was generated without it. Trials may lose _TRIAL_SHARE of the time. Each is charged for
# _LEAST_CHARGE of its own time at least, so that trials that lose nothing do not follow one another. Guesses.
_TRIAL_STEPS, _TRIAL_SHARE, _LEAST_CHARGE = 4, 0.01, 0.1
# Longer drafts than one that gives less than this share of the best rate are not tried. A guess.
_HOPELESS = 0.92
# The least gain for which drafts begin, since measurements vary. A guess.
_LEAST_GAIN = 1.05
# In a trial, the share of the time that drafts are assumed to save. It bounds what the draft model reads for trials. A
# guess.
_TRIAL_SAVING = 1 / 8
# The most tokens that the draft model has not read of a sequence for which it drafted in the step before.
NEWEST = 2
# Further tokens that are expected of an answer, if its own limit is not nearer. A guess.
_EXPECTED = 128


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Tokens to draft for one sequence in a step: at most `most`; a draft of fewer than `least` is dropped."""

    most: int
    least: int = 0


def accepted(drafted: Sequence[int], chosen: Sequence[int | None]) -> int:
    """Number of leading tokens of `drafted` that equal the tokens `chosen` at their positions."""
    for count, (draft, choice) in enumerate(zip(drafted, chosen, strict=False)):
        if draft != choice:
            return count
    return min(len(drafted), len(chosen))


def undelayed(times: Collection[float]) -> float:
    """The first quartile: other processes delay steps, and never make them faster. 0 if there are none."""
    return sorted(times)[len(times) // 4] if times else 0.0


def is_worth_reading(unread: int, left: int, token_seconds: float, saving: float) -> bool:
    """True if the drafts for a sequence are expected to save more time than reading what they need takes.

    unread: its tokens that the draft model has not read, each in `token_seconds`. left: the most tokens that it may
    still get. saving: seconds that drafts save for each of them.
    """
    return unread <= NEWEST or unread * token_seconds <= min(left, _EXPECTED) * saving


class PromptLookup:
    """Drafts from the sequence's own text: the tokens that followed the last occurrence of its newest `size` tokens.

    As prompt lookup decoding (Saxena 2023) and llama.cpp's `ngram-simple`. Occurrences are indexed as the text grows,
    so a step costs the same however long the text is.
    """

    def __init__(self, tokens: Sequence[int], size: int):
        self._tokens, self._size = tokens, size
        self._indexed = 0  # n-grams that end before this position are indexed
        # Position after the last occurrence of each n-gram that is followed by a token.
        self._behind: dict[tuple[int, ...], int] = {}

    def draft(self, count: int) -> list[int]:
        """Up to `count` tokens; none if the newest n-gram has not occurred before."""
        tokens, size, end = self._tokens, self._size, len(self._tokens)
        for last in range(max(self._indexed, size - 1), end - 1):
            self._behind[tuple(tokens[last + 1 - size : last + 1])] = last + 1
        self._indexed = max(self._indexed, end - 1)
        place = self._behind.get(tuple(tokens[end - size :])) if end >= size else None
        if place is None:
            return []
        found = list(tokens[place : place + count])
        # Text that repeats itself without end: the copy continues with its own tokens.
        while len(found) < count:
            found.append(found[len(found) - (end - place)])
        return found


@dataclass(slots=True)
class _Measured:
    """The steps of one draft length and batch size."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=TIMES))  # seconds of the last steps
    steps: int = 0
    tokens: float = 0.0  # of a sequence in a step, moving average

    def learn(self, tokens: float, seconds: float) -> None:
        self.times.append(seconds)
        self.steps += 1
        self.tokens += max(1.0 / self.steps, 1.0 / _MEMORY) * (tokens - self.tokens)

    @property
    def seconds(self) -> float:
        """Of a step that no other process delayed. 0 without measurements."""
        return undelayed(self.times)


@dataclass(slots=True)
class _LengthChoice:
    """The choice among draft lengths for batches of one size."""

    measured: dict[int, _Measured]
    best: int = 0
    # Seconds in a step that the draft model spends on prompts and on what was generated without it, moving average.
    catch_up: float = 0.0
    trials: list[int] = field(default_factory=list)  # lengths to try one after the other. The first one is on trial
    steps_left: int = 0  # steps of the trial
    seconds: float = 0.0  # of the trial so far
    tokens: float = 0.0  # of a sequence in the trial so far
    credit: float = 0.0  # seconds that trials may lose; negative after a trial that has lost more
    rotation: int = 0

    def rate(self, length: int) -> float:
        """Tokens of a sequence per second. 0 without measurements."""
        measured = self.measured[length]
        if not measured.times:
            return 0.0
        # A draft makes no step shorter. Without this bound, a delay of the steps without drafts would make drafts of
        # which nothing is accepted seem to pay.
        seconds = max(measured.seconds, self.measured[0].seconds)
        return measured.tokens / (seconds + (self.catch_up if length else 0.0))

    @property
    def saving(self) -> float:
        """Seconds that drafts of the best length save for each token of a sequence, without the time for prompts."""
        plain, best = self.measured[0].seconds, self.measured[self.best]
        return plain - max(best.seconds, plain) / best.tokens if self.best else 0.0

    def begin(self, lengths: Sequence[int]) -> None:
        """Begin a trial of the first of `lengths`; none if there is none."""
        self.trials, self.steps_left, self.seconds, self.tokens = list(lengths), _TRIAL_STEPS, 0.0, 0.0
        for length in lengths[:1]:
            measured = self.measured[length]
            measured.times.clear()  # compared are times of now: all steps may have become slower
            # Acceptance measured long ago has about half of the weight.
            measured.steps = min(measured.steps, _TRIAL_STEPS)

    def end(self) -> None:
        """End the trial. Continue with the next length, unless longer ones cannot be faster."""
        length, *left = self.trials
        best, rate = self.rate(self.best), self.rate(length)
        if length != self.best and best > 0.0:
            self.credit -= max(self.seconds - self.tokens / best, _LEAST_CHARGE * self.seconds)
        # Only the two are compared: what was measured of others is old.
        if rate > best * (1.0 if self.best else _LEAST_GAIN):
            self.best, best = length, rate
        self.begin(left if rate >= _HOPELESS * best else ())


class DraftLength:
    """The draft length that gives the most tokens per second, by measurement, for each size of batch.

    The lengths compared are 0 (no speculation) and the powers of two up to the limit. A gain depends on the model, the
    device, the batch, the text and the draft model in ways that no formula covers, so steps of each length are timed.
    The best length is used. Others are tried from time to time, as often as their losses allow: what a trial has lost
    is known at its end, and the next one begins when _TRIAL_SHARE of the time since then is as much.
    """

    def __init__(self, lengths: Sequence[int]):
        """`lengths`: those to compare, rising from 0."""
        self.lengths = tuple(lengths)
        self._choices: dict[int, _LengthChoice] = {}

    @classmethod
    def up_to(cls, most: int, least: int = 0) -> "DraftLength":
        """Compare no drafts, and drafts of `least` to `most` tokens. Shorter ones would be dropped."""
        return cls((0, *(1 << power for power in range(most.bit_length()) if least <= 1 << power < most), most))

    def choose(self, rows: int) -> int:
        """Tokens to draft for each of `rows` sequences in the next step."""
        if rows > DRAFT_LOGITS:
            return 0  # a step has no room for a draft of each
        choice = self._choice_for(rows)
        return choice.trials[0] if choice.trials else choice.best

    def in_use(self, rows: int) -> int:
        """As `choose`, for a step that is not timed. It uses the best length: a trial counts only timed losses."""
        return self._choice_for(rows).best if rows <= DRAFT_LOGITS else 0

    def saving(self, rows: int, has_prompts: bool) -> float:
        """Seconds that drafts save for each token of one of `rows` sequences. At least the assumption in trials."""
        choice = self._choice_for(rows)
        assumed = _TRIAL_SAVING * choice.measured[0].seconds if choice.trials and not has_prompts else 0.0
        return max(choice.saving, assumed) / rows

    def learn(self, rows: int, length: int, tokens: int, seconds: float, catch_up: float = 0.0) -> None:
        """Record a step of `rows` decoding sequences, with drafts of up to `length` tokens, that gave `tokens`.

        catch_up: as in `charge`, in addition to `seconds`.
        """
        self.charge(rows, catch_up)
        if rows > DRAFT_LOGITS or length not in (0, self.choose(rows)):
            return  # a trial has begun or ended since the step's drafts were made
        choice = self._choice_for(rows)
        if choice.trials and length == choice.trials[0]:
            choice.steps_left -= 1
            choice.seconds += seconds
            choice.tokens += tokens / rows
            if choice.steps_left < _TRIAL_STEPS - 1:
                choice.measured[length].learn(tokens / rows, seconds)
            if not choice.steps_left:
                choice.end()
            return
        choice.measured[length].learn(tokens / rows, seconds)
        if length:
            choice.catch_up -= choice.catch_up / _CATCH_UP_MEMORY
        choice.credit += _TRIAL_SHARE * seconds
        if choice.trials:
            return  # a step of the trial in which nothing could be drafted
        if choice.credit >= 0.0:
            choice.begin(self._others(choice))
        elif choice.rate(length) < choice.rate(0):
            choice.begin((0,))

    def charge(self, rows: int, catch_up: float) -> None:
        """Record seconds that the draft model has spent on more than the newest tokens of `rows` sequences."""
        if not catch_up or rows > DRAFT_LOGITS:
            return
        choice = self._choice_for(rows)
        if choice.trials:
            choice.credit -= catch_up
        else:
            choice.catch_up += catch_up / _CATCH_UP_MEMORY

    def _choice_for(self, rows: int) -> _LengthChoice:
        """The choice for batches of about this size: sizes with the same number of binary digits share one."""
        choice = self._choices.get(rows.bit_length())
        if choice is None:
            # The scheduler makes longer drafts shorter, so they would be tried for nothing.
            fewest = 1 << rows.bit_length() - 1
            lengths = [length for length in self.lengths if length * fewest <= DRAFT_LOGITS]
            choice = _LengthChoice({length: _Measured() for length in lengths})
            # Where drafts have not paid for any other size, the first trial may wait as long as the next one there.
            if self._choices and not any(other.best for other in self._choices.values()):
                choice.credit = min(other.credit for other in self._choices.values())
            else:
                choice.begin(lengths)
            self._choices[rows.bit_length()] = choice
        return choice

    def _others(self, choice: _LengthChoice) -> Sequence[int]:
        """The lengths to try now: from short to long where nothing is drafted, or else none or a neighbour in turn."""
        lengths = tuple(choice.measured)
        place = lengths.index(choice.best)
        if not place:
            choice.catch_up *= 1.0 - _TRIAL_STEPS / _MEMORY  # measured long ago
            return lengths[1:]
        choice.rotation += 1
        others = (0, *lengths[max(place - 1, 1) : place], *lengths[place + 1 : place + 2])
        return others[choice.rotation % len(others) :][:1]

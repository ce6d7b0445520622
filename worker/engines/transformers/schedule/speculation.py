"""Speculative decoding: how many tokens to draft, and drafts by prompt lookup.

A draft is a guess of the tokens that follow a sequence. One step computes the logits behind the sequence's newest token
and behind each drafted one. At each of these positions the model's own sampler chooses a token, as it would without a
draft, given the tokens before. The drafted tokens that agree with the choices are accepted, up to the first difference,
and the choice there is the next token. So a step gives one token more than it accepts.

Every token is therefore chosen from the model's own distribution with its own random number, penalties and grammar. A
draft changes the speed of an answer and nothing else. Rejection sampling (Leviathan et al. 2023) accepts more tokens at
high temperatures, but it needs the draft's probabilities and gives other texts for the same seed.

PURE: numbers only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

# Accepted drafts and times are averaged over about this many steps: of the best length, and of one on trial, which has
# few steps and an old average. Guesses.
_MEMORY, _TRIAL_MEMORY = 32, 6
# A trial of a draft length other than the best one takes _TRIAL_STEPS steps. The first is not measured: a draft model
# may have to compute what was generated without it. Between two trials are _INTERVAL steps at least, and as many more
# as are needed for trials to lose at most _TRIAL_SHARE of the time. All are guesses.
_TRIAL_STEPS, _INTERVAL, _TRIAL_SHARE = 4, 32, 0.02
# At first, lengths are tried from short to long until one gives less than this share of the best. A guess.
_HOPELESS = 0.85
# Averages of times follow longer steps so many times more slowly than shorter ones: other processes delay steps, and
# never make them faster. A guess.
_DELAYED = 4
# The least gain for which tokens are drafted, since measurements vary. A guess.
_LEAST_GAIN = 1.05


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


class PromptLookup:
    """Drafts from the sequence's own text: the tokens that followed the last occurrence of its newest `size` tokens.

    As prompt lookup decoding (Saxena 2023) and llama.cpp's `ngram-simple`. Occurrences are indexed as the text grows,
    so a step costs the same however long the text is.
    """

    def __init__(self, tokens: Sequence[int], size: int):
        self._tokens, self._size = tokens, size
        self._indexed = 0  # n-grams that end before this position are indexed
        # Position behind the last occurrence of each n-gram, of those that have a token behind them.
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
    """Moving averages of the steps of one draft length and batch size."""

    seconds: float = 0.0
    tokens: float = 0.0
    steps: int = 0

    def learn(self, seconds: float, tokens: float, memory: int) -> None:
        self.steps += 1
        share = max(1.0 / self.steps, 1.0 / memory)
        is_delayed = self.steps > 1 and seconds > self.seconds
        self.seconds += share * (seconds - self.seconds) / (_DELAYED if is_delayed else 1)
        self.tokens += share * (tokens - self.tokens)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0


@dataclass(slots=True)
class _Choice:
    """The choice among draft lengths for batches of one size."""

    measured: dict[int, _Measured] = field(default_factory=dict)
    best: int = 0
    trial: int = 0  # the length on trial, while `trial_left` is positive
    trial_left: int = 0
    until_trial: int = 0  # steps
    credit: float = 0.0  # seconds that trials may lose
    turn: int = 0

    def loss(self, length: int) -> float:
        """Expected seconds that a trial of this length loses against the best one."""
        tried = self.measured[length]
        rate = self.measured[self.best].rate
        return max(0.0, _TRIAL_STEPS * (tried.seconds - tried.tokens / rate)) if rate > 0.0 else 0.0


class DraftLength:
    """The draft length that gives the most tokens per second, by measurement, for each size of batch.

    The lengths compared are 0 (no speculation) and the powers of two up to the limit. A gain depends on the model, the
    device, the batch, the text and the draft model in ways that no formula covers, so steps of each length are timed.
    The best length is used. Another one is tried from time to time, the less often the more its trial is expected to
    lose. Where no length pays, nothing is drafted outside of these trials.
    """

    def __init__(self, lengths: Sequence[int]):
        """`lengths`: those to compare, rising. A single one is used always."""
        self.lengths = tuple(lengths)
        self._choices: dict[int, _Choice] = {}

    @classmethod
    def up_to(cls, most: int, least: int = 0) -> "DraftLength":
        """Compare no drafts, and drafts of `least` to `most` tokens. Shorter ones would be dropped."""
        return cls((0, *(1 << power for power in range(most.bit_length()) if least <= 1 << power < most), most))

    def choose(self, rows: int) -> int:
        """Tokens to draft for each of `rows` sequences in the next step."""
        choice = self._of(rows)
        return choice.trial if choice.trial_left else choice.best

    def learn(self, rows: int, length: int, tokens: int, seconds: float) -> None:
        """Record a step of `rows` decoding sequences, with drafts of up to `length` tokens, that gave `tokens`."""
        choice = self._of(rows)
        if len(self.lengths) == 1 or length != self.choose(rows):
            return  # a trial has begun or ended since the step's drafts were made
        if not choice.trial_left:
            choice.measured[length].learn(seconds, tokens / rows, _MEMORY)
            choice.until_trial -= 1
            choice.credit += _TRIAL_SHARE * seconds
            if choice.until_trial <= 0:
                self._begin_trial(choice)
            return
        choice.trial_left -= 1
        if choice.trial_left < _TRIAL_STEPS - 1:
            choice.measured[length].learn(seconds, tokens / rows, _TRIAL_MEMORY)
        if not choice.trial_left:
            self._end_trial(choice)

    def _of(self, rows: int) -> _Choice:
        """The choice for batches of about this size: sizes with the same number of binary digits share one."""
        choice = self._choices.get(rows.bit_length())
        if choice is None:
            measured = {length: _Measured() for length in self.lengths}
            choice = self._choices[rows.bit_length()] = _Choice(measured, best=self.lengths[0])
            if len(self.lengths) > 1:
                self._begin_trial(choice)
        return choice

    def _begin_trial(self, choice: _Choice) -> None:
        unknown = [length for length in self.lengths if not choice.measured[length].steps]
        if unknown:
            # From short to long, no speculation first.
            choice.trial = unknown[0]
        else:
            others = [length for length in self.lengths if length != choice.best]
            choice.trial = others[choice.turn % len(others)]
            if choice.loss(choice.trial) > choice.credit:
                return  # asked again after the next step
            choice.credit -= choice.loss(choice.trial)
            choice.turn += 1
        choice.trial_left = _TRIAL_STEPS

    def _end_trial(self, choice: _Choice) -> None:
        known = [length for length in self.lengths if choice.measured[length].steps]
        best = max(known, key=lambda length: choice.measured[length].rate * (1.0 if length else _LEAST_GAIN))
        choice.best = best
        choice.until_trial = _INTERVAL
        left = self.lengths[len(known) :]
        last = choice.measured[known[-1]]
        if left and last.rate < _HOPELESS * choice.measured[best].rate:
            # Longer ones are assumed to be worse, until a trial of them can be afforded.
            for length in left:
                choice.measured[length] = _Measured(last.seconds * length / known[-1], last.tokens, 1)
        elif left:
            self._begin_trial(choice)

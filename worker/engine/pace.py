"""How many prompt tokens go into a step, so that streams do not stutter: learned from what the steps so far took.

A step's seconds are taken for a sum: a fixed part (all weights are read once), one for each sequence that decodes, one
for each token of a prompt. The three are fitted to steps of every kind, also to those that mix decodes with prompts:
when many requests come at once, there are no others. (Were a prompt's share what is left of a step once that of its
decodes is taken off, and the latter known of few sequences only, prompts would look dear, trickle in, and go on to
look dear.)

Law: PURE. Time is an argument.
"""

from dataclasses import dataclass

from worker.engine.scheduler import Batch

Three = tuple[float, float, float]


@dataclass(slots=True)
class _Kind:
    """Steps alike: running means of what was in them and of their seconds."""

    decodes: float
    tokens: float
    seconds: float
    count: int
    seen: int
    """When the newest of them was: steps of its sort, with or without prompts, before it."""


class StepCost:
    """Seconds of a step with so many decodes and prompt tokens: least squares over the kinds of steps that were timed.

    Kinds are told apart by the numbers of bits of both. Errors count as parts of the seconds measured. A kind that has
    not been seen for long weighs little, but never nothing: what no step has told since is kept. Steps without prompts
    and those with some grow old apart: while a long prompt comes in, all steps are of one kind, which says nothing of
    the parts of its sum, and its tokens get dearer; what was known of decodes before must stand.
    """

    _NEWEST = 0.3
    """Of the newest step in the means of its kind, at least."""
    _FADES, _LEAST = 0.9, 0.01
    """Weight of a kind: this to the power of the steps since it was seen, but not less than the other."""
    _PRIOR = 1e-4
    """Weight of what is believed of parts that nothing was measured of: that they are small, as by _PARTS."""
    _PARTS: Three = (1.0, 16.0, 32.0)
    """So many decodes, or tokens of prompts, are believed to take as long as the fixed part. Only until measured."""
    _STUMBLE = 4.0
    """A step of a known kind that takes so many times what was expected tells about the machine, not about itself."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._steps = [0, 0]
        """Without prompts, with some."""
        self._parts: Three | None = None

    @property
    def parts(self) -> Three:
        """Seconds of the fixed part, of a decode and of a token of a prompt; none below 0, all 0 if none is known."""
        if self._parts is None:
            self._parts = self._fit()
        return self._parts

    def of(self, decodes: int, tokens: int) -> float:
        """Seconds that a step with so many of either is expected to take."""
        fixed, decode, token = self.parts
        return fixed + decodes * decode + tokens * token

    def learn(self, decodes: int, tokens: int, seconds: float) -> None:
        """A step with so many of either took `seconds`."""
        self._steps[tokens > 0] += 1
        key = decodes.bit_length(), tokens.bit_length()
        if key in self._kinds:
            seconds = min(seconds, self._STUMBLE * self.of(decodes, tokens) or seconds)
        kind = self._kinds.setdefault(key, _Kind(decodes, tokens, seconds, 0, 0))
        kind.count += 1
        kind.seen = self._steps[tokens > 0]
        newest = max(1.0 / kind.count, self._NEWEST)
        kind.decodes += newest * (decodes - kind.decodes)
        kind.tokens += newest * (tokens - kind.tokens)
        kind.seconds += newest * (seconds - kind.seconds)
        self._parts = None

    def _fit(self) -> Three:
        """Solves the normal equations; the prior keeps them regular."""
        if not self._kinds:
            return 0.0, 0.0, 0.0
        mean = sum(kind.seconds for kind in self._kinds.values()) / len(self._kinds) + 1e-9
        rows = [[0.0] * 4 for _ in range(3)]
        for place, size in enumerate(self._PARTS):
            rows[place][place] = self._PRIOR * (size / mean) ** 2
        for kind in self._kinds.values():
            weight = max(self._FADES ** (self._steps[kind.tokens > 0] - kind.seen), self._LEAST)
            scale = 1.0 / max(kind.seconds, 1e-9)
            line = (scale, kind.decodes * scale, kind.tokens * scale, 1.0)
            for place in range(3):
                for column in range(4):
                    rows[place][column] += weight * line[place] * line[column]
        return _solve(rows)


def _solve(rows: list[list[float]]) -> Three:
    """Of three equations `[3][4]`, symmetric and positive. A part that would be negative is 0, and the others are what
    they are without it: cut off, it would be missing in what they have to sum up to."""
    left = [0, 1, 2]
    while left:
        found = _eliminate([[rows[place][column] for column in (*left, 3)] for place in left])
        if min(found) >= 0.0:
            parts = dict(zip(left, found, strict=True))
            return parts.get(0, 0.0), parts.get(1, 0.0), parts.get(2, 0.0)
        left.pop(found.index(min(found)))
    return 0.0, 0.0, 0.0


def _eliminate(rows: list[list[float]]) -> list[float]:
    """The solution of equations `[n][n + 1]`, by Gauss; they are positive, so that no order is better than theirs."""
    count = len(rows)
    for place in range(count):
        for other in range(count):
            if other != place:
                factor = rows[other][place] / rows[place][place]
                rows[other] = [mine - factor * its for mine, its in zip(rows[other], rows[place], strict=True)]
    return [row[count] / row[place] for place, row in enumerate(rows)]


class Pace:
    """How many prompt tokens fit into a step without making streams stutter; learned from the steps so far.

    While nobody decodes a step may take PROMPT_SECONDS, so that a cancel is soon heard; while streams run prompts
    may lengthen a step by STRETCH times what it takes without them. That makes a typical gap between tokens twice as
    long, and leaves the unsteadiness of real machines within three times (engine.md section 6: the 99th percentile
    while a long prompt comes in, over the median before).
    """

    PROMPT_SECONDS = 1.0
    STRETCH = 1.0
    FEWEST = 16
    """Below this a step's fixed cost outweighs what is saved."""
    FEWEST_APART = 64
    """The same where each part of a prompt is a pass of its own, and so reads all the weights once more."""
    _UNKNOWN = 64
    """Prompt tokens of a step before any was timed."""

    def __init__(self, *, apart: bool = False) -> None:
        """`apart`: the parts of prompts are not computed in one pass with those who decode."""
        self._fewest = self.FEWEST_APART if apart else self.FEWEST
        self._cost = StepCost()
        self._knows_prompts = False

    def budget(self, decoding: int, chunk: int, prompts: int = 1) -> int:
        """Prompt tokens for the next step, in which `decoding` sequences decode and `prompts` wait for a first token.

        After a burst of requests small steps would make everybody late: what those who wait lose by one more step grows
        with the square of their number, as each waits for all before it; what streams lose by a long one, with theirs.
        Where the former is more, prompts may lengthen a step by so much more.
        """
        if not self._knows_prompts:
            return min(chunk, self._UNKNOWN)
        fixed, _, token = self._cost.parts
        allowed = self.PROMPT_SECONDS - fixed
        if decoding:
            alone = self._cost.of(decoding, 0)
            allowed = min(self.PROMPT_SECONDS, self.STRETCH * alone * max(1.0, (prompts - 1) ** 2 / decoding))
        return min(chunk, max(self._fewest, int(allowed / max(token, 1e-9))))

    def learn(self, batch: Batch, seconds: float) -> None:
        """A step with these parts took `seconds`."""
        tokens = sum(segment.length for segment in batch if not segment.is_decode)
        self._knows_prompts = self._knows_prompts or tokens > 0
        self._cost.learn(sum(segment.is_decode for segment in batch), tokens, seconds)

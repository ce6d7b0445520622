"""How many prompt tokens go into a step, so that streams do not stutter: learned from what the steps so far took.

A step's seconds are taken for a sum: a fixed part (all weights are read once), one for each sequence that decodes, one
for each token of a prompt, one for what its tokens look back on. They are fitted to steps of every kind, also to those
that mix decodes with prompts: when many requests come at once, there are no others. (Were a prompt's share what is left
of a step once that of its decodes is taken off, and the latter known of few sequences only, prompts would look dear,
trickle in, and go on to look dear.)

Law: PURE. Time is an argument.
"""

from dataclasses import dataclass

from worker.engines.transformers.schedule.scheduler import Batch

Parts = tuple[float, float, float, float]

SCORES = 12
"""Tokens of a prompt that together take as long to look at what came before them as it takes to read that once, however
few they are: with 110 M parameters, 12 heads of 64, float32, 5.7 us for each token before them, and 0.5 us for each
pair (two cores, 840 steps with 0 to 4,096 tokens before them, least squares)."""


def reach(start: int, length: int) -> float:
    """What `length` tokens of a prompt look back on, `start` tokens, in tokens that are read back."""
    return start * (1.0 + length / SCORES)


@dataclass(slots=True)
class _Kind:
    """Steps alike: running means of what was in them and of their seconds."""

    decodes: float
    tokens: float
    reach: float
    seconds: float
    count: int
    seen: int
    """When the newest of them was: steps of its sort, with or without prompts, before it."""


class StepCost:
    """Seconds of a step with so many decodes and prompt tokens, and so much reach of these: least squares over the
    kinds of steps that were timed.

    Kinds are told apart by the numbers of bits of all three. Errors count as parts of the seconds measured. A kind that
    has not been seen for long weighs little, but never nothing: what no step has told since is kept. Steps without
    prompts and those with some grow old apart: while a long prompt comes in, all steps are of few kinds, which say
    little of the parts of their sums; what was known of decodes before must stand.
    """

    _NEWEST = 0.3
    """Of the newest step in the means of its kind, at least."""
    _FADES, _LEAST = 0.9, 0.01
    """Weight of a kind: this to the power of the steps since it was seen, but not less than the other."""
    _PRIOR = 1e-4
    """Weight of what is believed of parts that nothing was measured of: that they are small, as by _PARTS."""
    _PARTS: Parts = (1.0, 16.0, 32.0, 4096.0)
    """So many decodes, tokens of prompts, or tokens that are read back, are believed to take as long as the fixed part.
    Only until measured."""
    _NEAR = 512
    """What is read back less than that makes no kind of its own."""
    _MOST = 32
    """Kinds with prompts that are remembered, and as many without: each takes its time in every fit, and many old ones
    together would outweigh what is so now."""
    _STUMBLE = 4.0
    """A step of a known kind that takes so many times what was expected tells about the machine, not about itself."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int, int], _Kind] = {}
        self._steps = [0, 0]
        """Without prompts, with some."""
        self._parts: Parts | None = None

    @property
    def parts(self) -> Parts:
        """Seconds of the fixed part, of a decode, of a token of a prompt and of a token read back; none below 0, all 0
        if none is known."""
        if self._parts is None:
            self._parts = self._fit()
        return self._parts

    def of(self, decodes: int, tokens: int, reach: float = 0.0) -> float:
        """Seconds that a step with so many of each is expected to take."""
        fixed, decode, token, back = self.parts
        return fixed + decodes * decode + tokens * token + reach * back

    def learn(self, decodes: int, tokens: int, seconds: float, reach: float = 0.0) -> None:
        """A step with so many of each took `seconds`."""
        self._steps[tokens > 0] += 1
        key = decodes.bit_length(), tokens.bit_length(), (int(reach) // self._NEAR).bit_length()
        if key in self._kinds:
            seconds = min(seconds, self._STUMBLE * self.of(decodes, tokens, reach) or seconds)
        kind = self._kinds.setdefault(key, _Kind(decodes, tokens, reach, seconds, 0, 0))
        if not kind.count:
            self._forget(tokens > 0)
        kind.count += 1
        kind.seen = self._steps[tokens > 0]
        newest = max(1.0 / kind.count, self._NEWEST)
        kind.decodes += newest * (decodes - kind.decodes)
        kind.tokens += newest * (tokens - kind.tokens)
        kind.reach += newest * (reach - kind.reach)
        kind.seconds += newest * (seconds - kind.seconds)
        self._parts = None

    def _forget(self, has_prompts: bool) -> None:
        """Of too many kinds with prompts, or without, the one that was seen longest ago."""
        alike = [key for key, kind in self._kinds.items() if (kind.tokens > 0) == has_prompts and kind.count]
        if len(alike) >= self._MOST:
            del self._kinds[min(alike, key=lambda key: self._kinds[key].seen)]

    def _fit(self) -> Parts:
        """Solves the normal equations; the prior keeps them regular."""
        if not self._kinds:
            return 0.0, 0.0, 0.0, 0.0
        mean = sum(kind.seconds for kind in self._kinds.values()) / len(self._kinds) + 1e-9
        count = len(self._PARTS)
        rows = [[0.0] * (count + 1) for _ in range(count)]
        for place, size in enumerate(self._PARTS):
            rows[place][place] = self._PRIOR * (size / mean) ** 2
        for kind in self._kinds.values():
            weight = max(self._FADES ** (self._steps[kind.tokens > 0] - kind.seen), self._LEAST)
            scale = 1.0 / max(kind.seconds, 1e-9)
            line = (scale, kind.decodes * scale, kind.tokens * scale, kind.reach * scale, 1.0)
            for place in range(count):
                for column in range(count + 1):
                    rows[place][column] += weight * line[place] * line[column]
        fixed, decode, token, back = _solve(rows)
        return fixed, decode, token, back


def _solve(rows: list[list[float]]) -> list[float]:
    """Of equations `[n][n + 1]`, symmetric and positive. A part that would be negative is 0, and the others are what
    they are without it: cut off, it would be missing in what they have to sum up to."""
    left, last = list(range(len(rows))), len(rows)
    while left:
        found = _eliminate([[rows[place][column] for column in (*left, last)] for place in left])
        if min(found) >= 0.0:
            parts = dict(zip(left, found, strict=True))
            return [parts.get(place, 0.0) for place in range(last)]
        left.pop(found.index(min(found)))
    return [0.0] * last


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

    While nobody decodes a step may take PROMPT_SECONDS, so that a cancel is soon heard (more only of a model that is so
    large that few tokens take longer); while streams run prompts may lengthen a step by STRETCH times what it takes
    without them. Steps of 2.4 times the length leave a quarter for the unsteadiness of real machines until it is three
    times (engine.md section 6: the 99th percentile of the gaps while a long prompt comes in, over the median before).
    With 1.5 in place of 1.4 that percentile was 2.7 to 3.0 times the median; with 1.0 no less, as far back in a prompt
    it is the reading that takes long, and the prompt took half as long again.

    Behind a long context most of a step would go into reading it once more for a few tokens. So no fewer are taken than
    those that take half as long themselves: a prompt may lose two thirds of its speed to those who stream, but no more.
    (As many as take as long made steps of 3.3 times the length 4,000 tokens back, where reading these takes as long as
    all weights and four decodes: 12 heads of 64 in float32, two cores of Zen 5.)
    """

    PROMPT_SECONDS = 1.0
    STRETCH = 1.4
    LOOKING = 1.5
    """Of what it takes to read a context back, a prompt's share of a step at least."""
    FEWEST = 4
    """However dear they are."""
    FEWEST_APART = 64
    """The same where each part of a prompt is a pass of its own, and so reads all the weights once more."""
    _UNKNOWN = 64
    """Prompt tokens of a step before any was timed."""

    def __init__(self, *, apart: bool = False) -> None:
        """`apart`: the parts of prompts are not computed in one pass with those who decode."""
        self._fewest = self.FEWEST_APART if apart else self.FEWEST
        self._cost = StepCost()
        self._knows_prompts = False

    def budget(self, decoding: int, chunk: int, prompts: int = 1, start: int = 0) -> int:
        """Prompt tokens for the next step, in which `decoding` sequences decode and `prompts` wait for a first token;
        `start` tokens of the one whose turn it is are computed.

        After a burst of requests small steps would make everybody late: what those who wait lose by one more step grows
        with the square of their number, as each waits for all before it; what streams lose by a long one, with theirs.
        Where the former is more, prompts may lengthen a step by so much more.
        """
        if not self._knows_prompts:
            return min(chunk, self._UNKNOWN)
        fixed, _, token, back = self._cost.parts
        reading, each = start * back, max(token + start * back / SCORES, 1e-9)
        allowed = max(self.PROMPT_SECONDS - fixed, self.STRETCH * fixed)
        if decoding:
            alone = self._cost.of(decoding, 0)
            allowed = min(allowed, self.STRETCH * alone * max(1.0, (prompts - 1) ** 2 / decoding))
            allowed = max(allowed, self.LOOKING * reading)
        return min(chunk, max(self._fewest, int((allowed - reading) / each)))

    def learn(self, batch: Batch, seconds: float) -> None:
        """A step with these parts took `seconds`."""
        prompts = [segment for segment in batch if not segment.is_decode]
        tokens = sum(segment.length for segment in prompts)
        self._knows_prompts = self._knows_prompts or tokens > 0
        looked = sum(reach(segment.start, segment.length) for segment in prompts)
        self._cost.learn(len(batch) - len(prompts), tokens, seconds, looked)

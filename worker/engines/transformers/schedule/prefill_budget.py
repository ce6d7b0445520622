"""Prefill budget: the number of prompt tokens per step, learned from the duration of earlier steps.

The seconds of a step are modelled as a sum: a fixed part (all weights are read once), one part per decoding sequence,
one per prompt token, and one for the context that prompt tokens attend to. The parts are fitted to steps of every kind,
including steps that mix decodes with prompts, because in a burst of requests there are no other steps. The simpler
model, prompt time = step time - known decode time, was rejected: with decode time known for few sequences only, prompts
look expensive, get small budgets, and continue to look expensive.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.engines.transformers.schedule.scheduler import Batch

CostParts = tuple[float, float, float, float]

# Prompt tokens whose attention to a context takes as long as reading that context once. Measured with 110 M parameters,
# 12 heads of 64, float32: 5.7 us per context token, and 0.5 us per pair of context token and prompt token (two cores,
# 840 steps with 0 to 4,096 context tokens, least squares).
TOKENS_PER_CONTEXT_READ = 12


def context_reads(start: int, length: int) -> float:
    """Cost of attention of `length` prompt tokens to `start` context tokens, in context tokens read once."""
    return start * (1.0 + length / TOKENS_PER_CONTEXT_READ)


@dataclass(slots=True)
class _StepKind:
    """Running means of similar steps: their composition and their seconds."""

    decodes: float
    tokens: float
    context_reads: float
    seconds: float
    count: int
    seen: int  # step counter (with or without prompts) at the newest of them


class StepCost:
    """Model of the seconds of a step as a linear function of decodes, prompt tokens and context reads.

    It is a least-squares fit to the kinds of steps that were timed. A kind is the bit lengths of the three numbers.
    Errors are relative to the measured seconds. The weight of a kind decays while no step of it occurs, but not to
    zero, because it may be the only source for one of the parts. Steps with and without prompts age separately: while a
    long prompt is computed, all steps are of a few similar kinds, which must not displace the knowledge about decodes.
    """

    # All constants of this class are guesses, checked with simulated steps in tests/worker/engines/schedule.
    _NEWEST_WEIGHT = 0.3  # minimum weight of the newest step in the means of its kind
    # Weight of a kind: _DECAY to the power of the steps since the last one, at least _MIN_WEIGHT.
    _DECAY, _MIN_WEIGHT = 0.9, 0.01
    _PRIOR = 1e-4  # weight of the prior, which decides parts without measurements
    # The prior: numbers of steps, decodes, prompt tokens and context reads that take as long as the fixed part.
    _PRIOR_PARTS: CostParts = (1.0, 16.0, 32.0, 4096.0)
    _READ_GRANULARITY = 512  # granularity of context reads in the key of a kind
    # Maximum of kinds with prompts, and of kinds without. Every kind costs time in each fit, and many old ones together
    # would outweigh the present.
    _MAX_KINDS = 32
    _MAX_OUTLIER = 4.0  # a longer duration than so many expected ones is cut: the machine was busy with other work

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int, int], _StepKind] = {}
        self._steps = [0, 0]  # without prompts, with prompts
        self._parts: CostParts | None = None

    @property
    def parts(self) -> CostParts:
        """Seconds of the fixed part, a decode, a prompt token and a context read. Never negative; 0 before any step."""
        if self._parts is None:
            self._parts = self._fit()
        return self._parts

    def seconds_for(self, decodes: int, tokens: int, context_reads: float = 0.0) -> float:
        """Expected seconds of a step with these numbers."""
        fixed, decode, token, context_read = self.parts
        return fixed + decodes * decode + tokens * token + context_reads * context_read

    def learn(self, decodes: int, tokens: int, seconds: float, context_reads: float = 0.0) -> None:
        """Record the measured `seconds` of a step."""
        self._steps[tokens > 0] += 1
        key = decodes.bit_length(), tokens.bit_length(), (int(context_reads) // self._READ_GRANULARITY).bit_length()
        # The fit costs more than the rest, so it is used only for a duration that may be an outlier.
        if key in self._kinds and seconds > self._MAX_OUTLIER / 2 * self._kinds[key].seconds:
            seconds = min(seconds, self._MAX_OUTLIER * self.seconds_for(decodes, tokens, context_reads) or seconds)
        kind = self._kinds.setdefault(key, _StepKind(decodes, tokens, context_reads, seconds, 0, 0))
        if not kind.count:
            self._forget(tokens > 0)
        kind.count += 1
        kind.seen = self._steps[tokens > 0]
        # The mean of all steps at first, an exponential moving average later.
        newest = max(1.0 / kind.count, self._NEWEST_WEIGHT)
        kind.decodes += newest * (decodes - kind.decodes)
        kind.tokens += newest * (tokens - kind.tokens)
        kind.context_reads += newest * (context_reads - kind.context_reads)
        kind.seconds += newest * (seconds - kind.seconds)
        self._parts = None

    def _forget(self, has_prompts: bool) -> None:
        """If the kinds with (or without) prompts are too many, drop the one that occurred longest ago."""
        alike = [key for key, kind in self._kinds.items() if (kind.tokens > 0) == has_prompts and kind.count]
        if len(alike) >= self._MAX_KINDS:
            del self._kinds[min(alike, key=lambda key: self._kinds[key].seen)]

    def _fit(self) -> CostParts:
        """Solve the weighted normal equations. The prior keeps them regular."""
        kinds = tuple(self._kinds.values())
        if not kinds:
            return 0.0, 0.0, 0.0, 0.0
        seconds = np.array([max(kind.seconds, 1e-9) for kind in kinds])
        ages = np.array([self._steps[kind.tokens > 0] - kind.seen for kind in kinds])
        weights = np.maximum(self._DECAY**ages, self._MIN_WEIGHT)
        # Division by the measured seconds makes errors relative. The fit would else follow long steps only.
        rows = np.array([(1.0, kind.decodes, kind.tokens, kind.context_reads) for kind in kinds]) / seconds[:, None]
        prior = self._PRIOR * (np.array(self._PRIOR_PARTS) / seconds.mean()) ** 2
        weighted = rows.T * weights
        fixed, decode, token, context_read = _solve(weighted @ rows + np.diag(prior), weighted.sum(1)).tolist()
        return fixed, decode, token, context_read


def _solve(matrix: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative solution of the equations of a positive definite `matrix`.

    The most negative variable is fixed at 0 and the others are solved again. Clipping alone would leave the others with
    values whose sum no longer matches the measurements.
    """
    left, solution = list(range(len(right))), np.zeros(len(right))
    while left:
        found = np.linalg.solve(matrix[np.ix_(left, left)], right[left])
        if found.min() >= 0.0:
            solution[left] = found
            break
        left.pop(int(found.argmin()))
    return solution


class PrefillBudget:
    """Number of prompt tokens that fit into a step without stalling running streams.

    Without decoding sequences a step may take PROMPT_SECONDS, so that a cancellation takes effect soon (longer only if
    the model is so large that a few tokens take more). With decoding sequences, prompts may lengthen a step by
    MAX_LENGTHENING times its duration without them, so to 2.4 times. That leaves a quarter for jitter until three
    times, the target for the 99th percentile of inter-token latency during a long prefill relative to the median
    before. Measured: with 1.5 instead of 1.4 the percentile was 2.7 to 3.0 times the median. With 1.0 it was not lower,
    because late in a prompt the context reads dominate, and the prefill took half as long again.

    Behind a long context, a small budget would spend most of each step on reading that context again. Prompts therefore
    get at least CONTEXT_SHARE times the duration of that read. So a prefill loses at most two thirds of its speed to
    streams.
    """

    PROMPT_SECONDS = 1.0
    MAX_LENGTHENING = 1.4
    # Minimum share of a step for prompts, in durations of reading their context once: the read itself and half as long
    # for tokens. With twice the read, steps got 3.3 times as long 4,000 tokens into a prompt, where reading these takes
    # as long as all weights and four decodes (12 heads of 64 in float32, two cores of Zen 5).
    CONTEXT_SHARE = 1.5
    MIN_TOKENS = 4  # minimum budget; a guess
    # Minimum where each chunk of a prompt is a forward pass of its own and reads all weights. A guess.
    MIN_SEPARATE_TOKENS = 64
    _INITIAL_TOKENS = 64  # budget before any prompt was timed; a guess

    def __init__(self, *, separate: bool = False) -> None:
        """`separate`: prompts and decodes are computed in separate forward passes."""
        self._fewest = self.MIN_SEPARATE_TOKENS if separate else self.MIN_TOKENS
        self._cost = StepCost()
        self._has_prompt_timings = False

    def budget(self, decoding: int, chunk: int, prompts: int = 1, start: int = 0) -> int:
        """Prompt tokens for the next step.

        `decoding` sequences decode, `prompts` wait for a first token, and `start` tokens of the oldest one are
        computed.

        In a burst of requests small steps would delay all of them. The loss of the waiting prompts by one more step
        grows with the square of their number, since each waits for all before it. The loss of the streams by a longer
        step grows with theirs. Where the former is larger, prompts may lengthen a step by that ratio more.
        """
        if not self._has_prompt_timings:
            return min(chunk, self._INITIAL_TOKENS)
        fixed, _, token, context_read = self._cost.parts
        reading, per_token = start * context_read, max(token + start * context_read / TOKENS_PER_CONTEXT_READ, 1e-9)
        allowed = max(self.PROMPT_SECONDS - fixed, self.MAX_LENGTHENING * fixed)
        if decoding:
            alone = self._cost.seconds_for(decoding, 0)
            allowed = min(allowed, self.MAX_LENGTHENING * alone * max(1.0, (prompts - 1) ** 2 / decoding))
            allowed = max(allowed, self.CONTEXT_SHARE * reading)
        # Solved for the number of tokens: reading + tokens x each = allowed.
        return min(chunk, max(self._fewest, int((allowed - reading) / per_token)))

    def learn(self, batch: Batch, seconds: float) -> None:
        """Record that `batch` took `seconds`."""
        prompts = [segment for segment in batch if not segment.is_decode]
        self._has_prompt_timings = self._has_prompt_timings or bool(prompts)
        decodes = len(batch) - len(prompts)
        # A drafted token costs about as much as one of a prompt.
        tokens = sum(segment.length for segment in batch) - decodes
        reads = sum(context_reads(segment.start, segment.length) for segment in prompts)
        self._cost.learn(decodes, tokens, seconds, reads)

"""Steps between their launch and their results.

Launching passes all kernels of a step to the device, sampling and the copy to the host included, and waits for nothing.
Reading the results waits for the copy. In between, the next step can be launched: its input tokens stay on the device
(`InFlightStep.device_tokens`). If the host must know a token before it can choose the next one (grammar, penalties),
the next forward is launched anyway and its tokens are chosen later (`LaunchedForward.choose`).

Nothing here changes a sequence, so a launch can be repeated with a smaller batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.run.runner import Runner
from worker.engines.transformers.sample.device_to_host import DeviceToHost
from worker.engines.transformers.sample.grammar import Bits, GrammarMatcher, Grammars
from worker.engines.transformers.sample.sampler import (
    DrawnTokens,
    Likelihood,
    RowSampling,
    Sampled,
    TokenLikelihoods,
    TokenMasks,
    draw,
    gather_likelihoods,
    uniform,
)
from worker.engines.transformers.schedule import sequence as sequences
from worker.engines.transformers.schedule.scheduler import Batch, Segment


class Chooser(Protocol):
    """A consumer of logits: a sequence with its penalties and its grammar."""

    @property
    def sequence(self) -> sequences.Sequence: ...

    @property
    def repeats(self) -> sequences.PenaltyCounts | None: ...

    @property
    def matcher(self) -> GrammarMatcher | None: ...


@dataclass(frozen=True, slots=True)
class SegmentResult:
    """The result of a step for one segment."""

    segment: Segment
    chooses: bool  # the segment completes a sequence that may have a further token
    prompt: tuple[Likelihood, ...] = ()  # likelihoods of the prompt tokens that follow the segment's tokens
    sampled: Sampled | None = None  # None although `chooses`: no token could be chosen
    # Further choices whose prompt the segment completes, each with its first token.
    forks: tuple[tuple[sequences.Sequence, Sampled | None], ...] = ()


class SegmentChoosers(NamedTuple):
    """A segment and the choosers that sample from its last logits: its own sequence, then its followers."""

    segment: Segment
    choosers: Sequence[Chooser]


class PendingMasks:
    """Grammar masks of some choosers, computed on another thread while the model runs."""

    def __init__(self, grammars: Grammars | None, choosers: Iterable[Chooser]):
        constrained = [chooser for chooser in choosers if chooser.matcher is not None]
        self._ids = {chooser.sequence.id for chooser in constrained}
        matchers = [chooser.matcher for chooser in constrained if chooser.matcher is not None]
        self._masks = grammars.masks(matchers) if grammars and matchers else None

    def constrains(self, chooser: Chooser) -> bool:
        return chooser.sequence.id in self._ids

    def bits(self) -> Bits:
        """Masks of the constrained choosers, in their order. Waits for them."""
        assert self._masks is not None
        return self._masks.result()


class LaunchedForward:
    """One forward that was launched, and the tokens that are sampled from its `logits`."""

    def __init__(self, parts: Sequence[SegmentChoosers], logits: torch.Tensor):
        self._parts, self._to_host = parts, DeviceToHost()
        self._logits: torch.Tensor | None = logits
        self._prompts: list[TokenLikelihoods | None] = []
        self._drawn: DrawnTokens | None = None

    @property
    def is_chosen(self) -> bool:
        return self._logits is None

    def choose(self, masking: PendingMasks) -> None:
        """Launch sampling and the copy to the host. Sequences must have all tokens before the new ones by now."""
        logits = self._logits
        assert logits is not None, "choose was called twice"
        rows: list[int] = []
        picks: list[RowSampling] = []
        constrained: list[int] = []
        end = 0
        for part in self._parts:
            # Logits of all segments lie one after the other: [sum of segment.logits, vocab].
            end += part.segment.logits
            wants_prompt = part.segment.sequence.prompt_logprobs
            mine = logits[end - part.segment.logits : end] if wants_prompt else None
            self._prompts.append(_prompt_likelihoods(part.segment, mine, self._to_host) if mine is not None else None)
            for chooser in part.choosers:
                if masking.constrains(chooser):
                    constrained.append(len(rows))
                rows.append(end - 1)  # followers sample from the same logits as the leader
                picks.append(_row_sampling(chooser, part.segment))
        if rows:
            masks = TokenMasks(constrained, masking.bits()) if constrained else None
            # Plain decoding uses all rows in order: no copy of [rows, vocab] then.
            is_whole = rows == list(range(len(logits)))
            mine = logits if is_whole else logits[upload(rows, torch.int64, logits.device)]
            self._drawn = draw(mine, picks, masks, self._to_host)
        self._to_host.send()
        self._logits = None  # sampling overwrites them, and the device may reuse their memory

    def wait(self) -> None:
        """Wait until the device has finished this forward and its sampling."""
        self._to_host.wait()

    def results(self) -> list[SegmentResult]:
        """Wait for the device, and return the result of each segment."""
        self._to_host.wait()
        chosen: Iterator[Sampled | None] = iter(self._drawn.read() if self._drawn is not None else ())
        found = []
        for part, likelihoods in zip(self._parts, self._prompts, strict=True):
            sampled = next(chosen) if part.choosers else None
            forks = tuple((chooser.sequence, next(chosen)) for chooser in part.choosers[1:])
            prompt = tuple(likelihoods.read()) if likelihoods is not None else ()
            found.append(SegmentResult(part.segment, bool(part.choosers), prompt, sampled, forks))
        return found

    def device_tokens(self, batch: Batch) -> torch.Tensor:
        """The tokens that this forward samples for the sequences of `batch`, `[len(batch)]`, int64, on the device."""
        assert self._drawn is not None, "no sequence of this step samples a token"
        ids = [chooser.sequence.id for part in self._parts for chooser in part.choosers]
        tokens, wanted = self._drawn.tokens, [segment.sequence.id for segment in batch]
        if ids == wanted:
            return tokens
        row = {id: row for row, id in enumerate(ids)}
        return tokens[upload([row[id] for id in wanted], torch.int64, tokens.device)]


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step: one forward, or several if the batch had to be repeated in parts."""

    batch: Batch
    forwards: Sequence[LaunchedForward]
    begun: float  # monotonic seconds

    def has(self, sequence: sequences.Sequence) -> bool:
        """True if the device may still read and write the row of this sequence."""
        return any(segment.sequence is sequence for segment in self.batch)

    @property
    def is_chosen(self) -> bool:
        return all(forward.is_chosen for forward in self.forwards)

    def choose(self, masking: PendingMasks) -> None:
        """See `LaunchedForward.choose`. The step has one forward."""
        (forward,) = self.forwards
        forward.choose(masking)

    def device_tokens(self, batch: Batch) -> torch.Tensor:
        """See `LaunchedForward.device_tokens`. The step has one forward."""
        (forward,) = self.forwards
        return forward.device_tokens(batch)

    def results(self) -> list[SegmentResult]:
        """Wait for the device, and return the result of each segment that could be launched."""
        return [result for forward in self.forwards for result in forward.results()]


def launch(
    runner: Runner,
    grammars: Grammars | None,
    parts: Sequence[SegmentChoosers],
    device_tokens: torch.Tensor | None = None,
) -> LaunchedForward:
    """Launch forward and sampling of `parts`. `device_tokens`: the inputs of a step that is launched ahead."""
    # The masks are started before the forward: both are computed at the same time.
    masking = PendingMasks(grammars, (chooser for part in parts for chooser in part.choosers))
    forward = launch_forward(runner, parts, device_tokens)
    forward.choose(masking)
    return forward


def launch_forward(
    runner: Runner, parts: Sequence[SegmentChoosers], device_tokens: torch.Tensor | None = None
) -> LaunchedForward:
    """Launch the forward of `parts` without sampling."""
    batch = tuple(part.segment for part in parts)
    return LaunchedForward(parts, runner.run(batch) if device_tokens is None else runner.run(batch, device_tokens))


def _row_sampling(chooser: Chooser, segment: Segment) -> RowSampling:
    sequence = chooser.sequence
    if chooser.repeats is not None:
        chooser.repeats.update()
    # Of a sequence in a step that was launched ahead, this is one more than the host had counted at its launch.
    answered = segment.end - sequence.prompt_tokens
    return RowSampling(
        sequence.sampling,
        uniform=uniform(sequence.seed, answered) if sequence.sampling.temperature > 0.0 else 0.0,
        repeats=chooser.repeats,
        forbidden=tuple(sequence.forbidden_ends(answered)),
    )


def _prompt_likelihoods(segment: Segment, logits: torch.Tensor, to_host: DeviceToHost) -> TokenLikelihoods | None:
    """Likelihoods of the prompt tokens that follow those of `segment`, from the `logits` of the segment."""
    sequence = segment.sequence
    if segment.start >= sequence.prompt_tokens - 1:
        return None
    following = sequence.tokens[segment.start + 1 : min(segment.end + 1, sequence.prompt_tokens)]
    return gather_likelihoods(logits[: len(following)], following, sequence.sampling.logprobs or 0, to_host)

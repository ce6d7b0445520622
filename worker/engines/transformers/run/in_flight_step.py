"""A step between its launch and its landing: what is being computed, and what it will tell.

To launch is to hand a device all that a step takes, sampling and the way back included, without waiting for any of it;
to land is to wait until the host has the numbers. In between the step behind it may be launched as well: a token that
this one chooses goes into that one on the device, before the host has seen it (`Flight.fed`). Where the host has to
know it before the next one can be chosen (a grammar, penalties), that step is computed meanwhile all the same, and its
tokens are chosen once this one has landed (`Attempt.choose`).

Law: nothing here changes a sequence, so a launch may be repeated with fewer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.run.runner import Runner
from worker.engines.transformers.sample.device_to_host import Readout
from worker.engines.transformers.sample.grammar import Bits, Grammars, Matcher
from worker.engines.transformers.sample.sampler import (
    Drawn,
    Likelihood,
    Masks,
    Pick,
    Sampled,
    Told,
    draw,
    tell,
    uniform,
)
from worker.engines.transformers.schedule import sequence as sequences
from worker.engines.transformers.schedule.scheduler import Batch, Segment


class Chooser(Protocol):
    """Who takes a token: a sequence, with what its choice depends on beside the logits."""

    @property
    def sequence(self) -> sequences.Sequence: ...

    @property
    def repeats(self) -> sequences.Repeats | None: ...

    @property
    def matcher(self) -> Matcher | None: ...


@dataclass(frozen=True, slots=True)
class Result:
    """What a step found for one segment."""

    segment: Segment
    chooses: bool
    """It completes a sequence that may have a further token."""
    prompt: tuple[Likelihood, ...] = ()
    """How likely the tokens of the prompt behind those of the segment were."""
    sampled: Sampled | None = None
    """None although it `chooses`: there was no token to choose."""
    forks: tuple[tuple[sequences.Sequence, Sampled | None], ...] = ()
    """Further choices of the prompt that the segment completes, and the first token of each."""


class Part(NamedTuple):
    """A segment, and who takes a token by its last logits: its own sequence first, then those that follow it."""

    segment: Segment
    choosers: Sequence[Chooser]


class Masking:
    """What the grammars of some choosers allow next, computed beside the model."""

    def __init__(self, grammars: Grammars | None, choosers: Iterable[Chooser]):
        held = [each for each in choosers if each.matcher is not None]
        self._held = {each.sequence.id for each in held}
        matchers = [each.matcher for each in held if each.matcher is not None]
        self._future = grammars.masks(matchers) if grammars and matchers else None

    def holds(self, chooser: Chooser) -> bool:
        return chooser.sequence.id in self._held

    def bits(self) -> Bits:
        """Of those that it holds, in their order. Waits."""
        assert self._future is not None
        return self._future.result()


class Attempt:
    """One forward that was launched, and what is chosen by its `logits`."""

    def __init__(self, parts: Sequence[Part], logits: torch.Tensor):
        self._parts, self._readout = parts, Readout()
        self._logits: torch.Tensor | None = logits
        self._prompts: list[Told | None] = []
        self._drawn: Drawn | None = None

    @property
    def is_chosen(self) -> bool:
        return self._logits is None

    def choose(self, masking: Masking) -> None:
        """Launch the choice of all tokens, and the way back to the host. Sequences have all tokens before those now."""
        logits = self._logits
        assert logits is not None, "it is done once"
        rows: list[int] = []
        picks: list[Pick] = []
        held: list[int] = []
        end = 0
        for part in self._parts:
            end += part.segment.logits
            asked = part.segment.sequence.prompt_logprobs
            mine = logits[end - part.segment.logits : end] if asked else None
            self._prompts.append(_prompt_likelihoods(part.segment, mine, self._readout) if mine is not None else None)
            for chooser in part.choosers:
                if masking.holds(chooser):
                    held.append(len(rows))
                rows.append(end - 1)
                picks.append(_pick(chooser, part.segment))
        if rows:
            masks = Masks(held, masking.bits()) if held else None
            is_whole = rows == list(range(len(logits)))
            mine = logits if is_whole else logits[upload(rows, torch.int64, logits.device)]
            self._drawn = draw(mine, picks, masks, self._readout)
        self._readout.send()
        self._logits = None

    def wait(self) -> None:
        """Returns once the device has done all of it."""
        self._readout.wait()

    def land(self) -> list[Result]:
        """Waits for the device, if it has not done all of it."""
        self._readout.wait()
        chosen: Iterator[Sampled | None] = iter(self._drawn.read() if self._drawn is not None else ())
        found = []
        for part, told in zip(self._parts, self._prompts, strict=True):
            sampled = next(chosen) if part.choosers else None
            forks = tuple((each.sequence, next(chosen)) for each in part.choosers[1:])
            prompt = tuple(told.read()) if told is not None else ()
            found.append(Result(part.segment, bool(part.choosers), prompt, sampled, forks))
        return found

    def fed(self, batch: Batch) -> torch.Tensor:
        """`[len(batch)]`, int64, on the device: the token that this attempt chooses for each sequence of `batch`, all
        of which choose here."""
        assert self._drawn is not None, "nobody chooses"
        ids = [each.sequence.id for part in self._parts for each in part.choosers]
        tokens, wanted = self._drawn.tokens, [each.sequence.id for each in batch]
        if ids == wanted:
            return tokens
        row = {id: row for row, id in enumerate(ids)}
        return tokens[upload([row[id] for id in wanted], torch.int64, tokens.device)]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched: in one attempt, or in several if some of its sequences had to be found out."""

    batch: Batch
    attempts: Sequence[Attempt]
    begun: float
    """Monotonic seconds."""

    def has(self, sequence: sequences.Sequence) -> bool:
        """Whether the device may still be reading and writing this sequence's place."""
        return any(segment.sequence is sequence for segment in self.batch)

    @property
    def is_chosen(self) -> bool:
        return all(attempt.is_chosen for attempt in self.attempts)

    def choose(self, masking: Masking) -> None:
        """See `Attempt.choose`; there was one."""
        (attempt,) = self.attempts
        attempt.choose(masking)

    def fed(self, batch: Batch) -> torch.Tensor:
        """See `Attempt.fed`; there was one."""
        (attempt,) = self.attempts
        return attempt.fed(batch)

    def land(self) -> list[Result]:
        """Of those segments that could be launched. Waits for the device."""
        return [result for attempt in self.attempts for result in attempt.land()]


def launch(
    runner: Runner, grammars: Grammars | None, parts: Sequence[Part], fed: torch.Tensor | None = None
) -> Attempt:
    """Compute `parts` and choose; `fed`: the tokens of segments that run ahead, as all of them do then."""
    masking = Masking(grammars, (each for part in parts for each in part.choosers))
    attempt = compute(runner, parts, fed)
    attempt.choose(masking)
    return attempt


def compute(runner: Runner, parts: Sequence[Part], fed: torch.Tensor | None = None) -> Attempt:
    """As `launch`, but for the choice."""
    batch = tuple(part.segment for part in parts)
    return Attempt(parts, runner.run(batch) if fed is None else runner.run(batch, fed))


def _pick(chooser: Chooser, segment: Segment) -> Pick:
    sequence = chooser.sequence
    if chooser.repeats is not None:
        chooser.repeats.update()
    answered = segment.end - sequence.prompt_tokens  # of whom runs ahead one more than it has, or had at the launch
    return Pick(
        sequence.sampling,
        uniform=uniform(sequence.seed, answered) if sequence.sampling.temperature > 0.0 else 0.0,
        repeats=chooser.repeats,
        forbidden=tuple(sequence.barred(answered)),
    )


def _prompt_likelihoods(segment: Segment, logits: torch.Tensor, readout: Readout) -> Told | None:
    """How likely each token of the prompt was that follows one of `segment`'s; `logits` are those of the segment."""
    sequence = segment.sequence
    if segment.start >= sequence.prompt_tokens - 1:
        return None
    following = sequence.tokens[segment.start + 1 : min(segment.end + 1, sequence.prompt_tokens)]
    return tell(logits[: len(following)], following, sequence.sampling.logprobs or 0, readout)

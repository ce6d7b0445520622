"""Steps between their launch and their results.

Launching passes all kernels of a step to the device, sampling and the copy to the host included, and waits for nothing.
Reading the results waits for the device. In between, the next step can be launched: its input tokens stay on the device
(`LaunchedForward.device_tokens`). If the host must know a token before it can choose the next one (grammar, penalties),
the next forward is launched anyway and its tokens are chosen later (`LaunchedForward.sample`).

A sequence whose grammar mask is late gets no token, so that no other sequence waits for it. A later step computes its
newest token again: that is simpler than to keep its logits, and a row more makes a step hardly longer.

Nothing here changes a sequence, so a launch can be repeated with a smaller batch.
"""

from collections.abc import Iterable, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.run.runner import Runner
from worker.engines.transformers.sample.device_to_host import DeviceToHost
from worker.engines.transformers.sample.grammar import ALONE_SECONDS, Bits, GrammarMatcher, Grammars
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
from worker.engines.transformers.schedule.speculation import accepted

_POLL_INTERVAL = 0.0005  # seconds between looks at a device


class Chooser(Protocol):
    """A consumer of logits: a sequence with its penalties and its grammar."""

    @property
    def sequence(self) -> sequences.Sequence: ...

    @property
    def penalty_counts(self) -> sequences.PenaltyCounts | None: ...

    @property
    def ngrams(self) -> sequences.RepeatedNgrams | None: ...

    @property
    def matcher(self) -> GrammarMatcher | None: ...


@dataclass(frozen=True, slots=True)
class SegmentResult:
    """The result of a step for one segment."""

    segment: Segment
    chooses: bool  # the segment completes a sequence that may have a further token
    prompt: tuple[Likelihood, ...] = ()  # likelihoods of the prompt tokens that follow the segment's tokens
    # The next tokens, if `chooses`: one, and another after each accepted token of the draft. None: no token could be
    # chosen.
    sampled: tuple[Sampled | None, ...] = ()
    # Some logits after the draft are NaN, so the drafted tokens may have spoiled the cache. Tokens may be missing.
    is_spoiled: bool = False
    # Further choices whose prompt the segment completes, each with its first token.
    forks: tuple[tuple[sequences.Sequence, Sampled | None], ...] = ()


class SegmentChoosers(NamedTuple):
    """A segment and the choosers that sample from its last logits: its own sequence, then its followers."""

    segment: Segment
    choosers: Sequence[Chooser]


class PendingMasks:
    """Grammar masks of some choosers, computed on other threads while the model runs."""

    def __init__(self, grammars: Grammars | None, choosers: Iterable[tuple[Chooser, Sequence[int]]]):
        """`choosers`: with the tokens drafted for each, which its grammar allows. It gets one mask after each."""
        self._masks: dict[int, list[Future[Bits]]] = {}  # by sequence id
        if grammars is None:
            return
        # All copies are made before a job uses the lexer that they share. Masks of copies that could not be made are
        # never there.
        constrained = [
            (chooser.sequence.id, [matcher, *matcher.after_each(drafted)], 1 + len(drafted))
            for chooser, drafted in choosers
            if (matcher := chooser.matcher) is not None
        ]
        for id, matchers, count in constrained:
            masks = [grammars.mask(matcher).future for matcher in matchers]
            self._masks[id] = [*masks, *(Future() for _ in range(count - len(masks)))]

    def constrains(self, chooser: Chooser) -> bool:
        return chooser.sequence.id in self._masks

    def is_late(self, chooser: Chooser) -> bool:
        """True if the mask of the next token is not there yet."""
        return self.constrains(chooser) and not self._masks[chooser.sequence.id][0].done()

    def wait(self, device: torch.device, choosers: Sequence[Chooser], *, is_alone: bool) -> None:
        """Wait for late masks while `device` computes the logits. With `is_alone`, also until one of `choosers` can go
        on, for a short time."""
        late = {self._masks[chooser.sequence.id][0] for chooser in choosers if self.is_late(chooser)}
        if late and device.type == "cuda":
            computed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            computed.record(torch.cuda.current_stream(device))
            while late and not computed.query():
                late = wait(late, _POLL_INTERVAL).not_done
        if is_alone and late and len(late) == len(choosers):
            wait(late, ALONE_SECONDS, FIRST_COMPLETED)

    def bits(self, choosers: Iterable[Chooser]) -> Bits:
        """Masks of constrained choosers, in their order, uint8 `[masks, bytes]`. Late ones, of drafts, allow none."""
        masks = [mask for chooser in choosers for mask in self._masks[chooser.sequence.id]]
        bits = np.zeros((len(masks), len(masks[0].result())), np.uint8)
        for row, mask in zip(bits, masks, strict=True):
            if mask.done():
                row[:] = mask.result()
        return bits

    def drop_drafts(self) -> None:
        """Drop the masks of drafts that are not there yet. They would only delay those of answers."""
        for _, *drafted in self._masks.values():
            for mask in drafted:
                mask.cancel()


class LaunchedForward:
    """One forward that was launched, and the tokens that are sampled from its `logits`."""

    def __init__(self, parts: Sequence[SegmentChoosers], logits: torch.Tensor):
        self._parts, self._to_host = parts, DeviceToHost()
        self._logits: torch.Tensor | None = logits
        self._prompts: list[TokenLikelihoods | None] = []
        self._drawn: DrawnTokens | None = None
        self.late: set[int] = set()  # ids of sequences that get no token, because their grammar masks are late

    @property
    def is_sampled(self) -> bool:
        return self._logits is None

    def sample(self, pending_masks: PendingMasks) -> None:
        """Launch sampling and the copy to the host. Sequences must have all tokens before the new ones by now."""
        logits = self._logits
        assert logits is not None, "sample was called twice"
        choosers = [chooser for part in self._parts for chooser in part.choosers]
        pending_masks.wait(logits.device, choosers, is_alone=all(part.choosers for part in self._parts))
        parts, self._parts = self._parts, []
        rows: list[int] = []
        samplings: list[RowSampling] = []
        masked: list[int] = []
        constrained: list[Chooser] = []
        end = 0
        for part in parts:
            # Logits of all segments lie one after the other: [sum of segment.logits, vocab].
            end += part.segment.logits
            if any(map(pending_masks.is_late, part.choosers)):
                self.late |= {chooser.sequence.id for chooser in part.choosers}
                continue
            self._parts.append(part)
            wants_prompt = part.segment.sequence.prompt_logprobs
            prompt = logits[end - part.segment.logits : end] if wants_prompt else None
            self._prompts.append(
                _prompt_likelihoods(part.segment, prompt, self._to_host) if prompt is not None else None
            )
            for chooser in part.choosers:
                # After the newest token, then after each drafted one. Followers sample from the same logits as the
                # leader; nothing is drafted for these.
                own = _row_samplings(chooser, part.segment)
                if pending_masks.constrains(chooser):
                    masked.extend(range(len(rows), len(rows) + len(own)))
                    constrained.append(chooser)
                rows.extend(range(end - len(own), end))
                samplings += own
        if rows:
            masks = TokenMasks(masked, pending_masks.bits(constrained)) if constrained else None
            # Plain decoding uses all rows in order: no copy of [rows, vocab] then.
            is_whole = rows == list(range(len(logits)))
            used = logits if is_whole else logits[upload(rows, logits.device)]
            self._drawn = draw(used, samplings, masks, self._to_host)
        pending_masks.drop_drafts()
        self._to_host.send(logits.device)
        self._logits = None  # sampling overwrites them, and the device may reuse their memory

    def wait(self) -> None:
        """Wait until the device has finished this forward and its sampling."""
        self._to_host.wait()

    def results(self) -> list[SegmentResult]:
        """Wait for the device, and return the result of each segment that is not late."""
        self._to_host.wait()
        chosen = self._drawn.read() if self._drawn is not None else []
        found, row = [], 0
        for part, likelihoods in zip(self._parts, self._prompts, strict=True):
            drafted, first = part.segment.drafted, row
            row += len(part.choosers) + len(drafted)
            sampled, is_spoiled = tuple(chosen[first : first + 1 + len(drafted)]) if part.choosers else (), False
            if drafted and self._drawn is not None:
                is_spoiled = any(self._drawn.is_nan(place) for place in range(first, row))
                sampled = sampled[: 1 + accepted(drafted, [None if pick is None else pick.token for pick in sampled])]
                if sampled[-1] is None and (is_spoiled or len(sampled) > 1):
                    # A later step finds out why, as without a draft. Here a drafted token may have spoiled the logits
                    # before it, since a mask does not hide NaN, or a grammar had no time left for drafts.
                    sampled = sampled[:-1]
            forks = tuple(
                (chooser.sequence, chosen[first + number]) for number, chooser in enumerate(part.choosers[1:], 1)
            )
            prompt = tuple(likelihoods.read()) if likelihoods is not None else ()
            found.append(SegmentResult(part.segment, bool(part.choosers), prompt, sampled, is_spoiled, forks))
        return found

    def device_tokens(self, batch: Batch) -> torch.Tensor:
        """The tokens that this forward samples for the sequences of `batch`, `[len(batch)]`, int64, on the device."""
        assert self._drawn is not None, "no sequence of this step samples a token"
        ids = [chooser.sequence.id for part in self._parts for chooser in part.choosers]
        tokens, wanted = self._drawn.tokens, [segment.sequence.id for segment in batch]
        if ids == wanted:
            return tokens
        row = {id: row for row, id in enumerate(ids)}
        return tokens[upload([row[id] for id in wanted], tokens.device)]


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
    def late(self) -> set[int]:
        """Ids of the sequences that get no token, because their grammar masks are late."""
        return {id for forward in self.forwards for id in forward.late}

    @property
    def is_sampled(self) -> bool:
        return all(forward.is_sampled for forward in self.forwards)

    def results(self) -> list[SegmentResult]:
        """Wait for the device, and return the result of each segment that could be launched and is not late."""
        return [result for forward in self.forwards for result in forward.results()]


def launch(
    runner: Runner,
    grammars: Grammars | None,
    parts: Sequence[SegmentChoosers],
    device_tokens: torch.Tensor | None = None,
    *,
    samples: bool = True,
) -> LaunchedForward:
    """Launch the forward of `parts`, and with `samples` their sampling. `device_tokens`: the inputs of a step that is
    launched ahead."""
    # The masks are started before the forward: both are computed at the same time.
    choosers = ((chooser, part.segment.drafted) for part in parts for chooser in part.choosers)
    pending_masks = PendingMasks(grammars, choosers) if samples else None
    batch = tuple(part.segment for part in parts)
    logits = runner.run(batch) if device_tokens is None else runner.run(batch, device_tokens)
    forward = LaunchedForward(parts, logits)
    if pending_masks is not None:
        forward.sample(pending_masks)
    return forward


def _row_samplings(chooser: Chooser, segment: Segment) -> list[RowSampling]:
    """The settings for the next token, then for the token after each drafted one."""
    counts = chooser.penalty_counts
    if counts is not None:
        counts.update()
    # Of a sequence in a step that was launched ahead, this is one more than the host had counted at its launch.
    place = segment.end - len(segment.drafted) - chooser.sequence.prompt_tokens
    if not segment.drafted:
        repeated = chooser.ngrams.forbidden() if chooser.ngrams is not None else frozenset()
        return [_row_sampling(chooser.sequence, place, counts, repeated)]
    ahead = counts.after_each(segment.drafted) if counts is not None else repeat(None, 1 + len(segment.drafted))
    return [_row_sampling(chooser.sequence, place + more, counts) for more, counts in enumerate(ahead)]


def _row_sampling(
    sequence: sequences.Sequence,
    place: int,
    penalty_counts: sequences.PenaltyCounts | None,
    repeated: Set[int] = frozenset(),
) -> RowSampling:
    """The settings for output token number `place`. `repeated`: tokens that would repeat an n-gram."""
    return RowSampling(
        sequence.sampling,
        uniform=uniform(sequence.seed, place) if sequence.sampling.temperature > 0.0 else 0.0,
        penalty_counts=penalty_counts,
        forbidden=tuple(sequence.forbidden_ends(place) | sequence.rules.forbidden(place) | repeated),
        forced=sequence.rules.forced(place, sequence.limit),
    )


def _prompt_likelihoods(segment: Segment, logits: torch.Tensor, to_host: DeviceToHost) -> TokenLikelihoods | None:
    """Likelihoods of the prompt tokens that follow those of `segment`, from the `logits` of the segment."""
    sequence = segment.sequence
    if segment.start >= sequence.prompt_tokens - 1:
        return None
    following = sequence.tokens[segment.start + 1 : min(segment.end + 1, sequence.prompt_tokens)]
    return gather_likelihoods(logits[: len(following)], following, sequence.sampling.logprobs or 0, to_host)

"""The readers of running requests: the choices of a request, and the deltas that its reader gets.

Law: nothing here waits for a reader.
"""

import asyncio
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from worker.detokenizer import AnswerText, TextPiece
from worker.engines.transformers.sample.grammar import Matcher
from worker.engines.transformers.sample.sampler import Likelihood, Sampled
from worker.engines.transformers.schedule.sequence import Repeats, Sequence
from worker.engines.transformers.step_loop import Outbox
from worker.errors import RequestError
from worker.interface import ChoiceTimings, Delta, FinishReason, PrefillProgress, TokenLogprob


class Stream:
    """The queue that one request's reader reads: deltas, then None or an error. Unbounded, so that no step waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.items: asyncio.Queue[Delta | RequestError | None] = asyncio.Queue()
        self.choices: list[Choice] = []
        self.places = 0
        """The number of its sequences that `SequenceLimit` counts."""

    @property
    def has_ended(self) -> bool:
        return not self.choices


@dataclass(eq=False)
class Choice:
    """One sequence with its reader, its text and its times (monotonic seconds)."""

    index: int
    sequence: Sequence
    stream: Stream
    answer: AnswerText
    repeats: Repeats | None = None
    matcher: Matcher | None = None
    """The state of its grammar."""
    started: float = 0.0
    answered: float = 0.0
    unsaid: list[TokenLogprob | int] = field(default_factory=list)
    """Tokens whose text is held back; with their logprobs if asked for."""
    said: int = 0
    """The number of tokens that were sent to the reader."""
    prompt: list[TokenLogprob] = field(default_factory=list)
    """Logprobs of the prompt's tokens as far as they are known, the first one (which has none) included. Empty once
    they are sent, or if the request did not ask for them."""
    include_stop: bool = False
    """The token that ends the answer is part of it."""
    tells_progress: bool = False
    told: int = -1
    """Computed prompt tokens by the last progress delta; -1: none was sent."""
    wants_timings: bool = False
    """Every delta has timings."""

    def timings(self, now: float) -> ChoiceTimings:
        """Counts and times so far."""
        answered = self.answered or now
        return ChoiceTimings(
            prompt_tokens=self.sequence.prompt_tokens,
            cached_tokens=self.sequence.cached,
            completion_tokens=self.sequence.answered,
            prefill_seconds=answered - self.started,
            decode_seconds=now - answered,
        )


class SequenceLimit:
    """The number of sequences of unfinished requests. Called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def admit(self, stream: Stream, most: int) -> bool:
        """Count the choices of `stream`, unless `most` sequences are counted already."""
        with self._lock:
            if self._count >= most:
                return False
            stream.places = len(stream.choices)
            self._count += stream.places
            return True

    def release(self, stream: Stream, places: int) -> None:
        """Stop counting up to `places` of the choices of `stream`."""
        with self._lock:
            places = min(places, stream.places)
            stream.places -= places
            self._count -= places


class DeltaWriter:
    """Makes deltas of tokens and puts them into the outbox."""

    def __init__(self, outbox: Outbox, piece: Callable[[int], bytes]):
        """`piece`: the bytes of a token."""
        self._outbox, self._piece = outbox, piece

    def put(self, stream: Stream, item: Delta | RequestError | None) -> None:
        self._outbox.put(stream.loop, partial(stream.items.put_nowait, item))

    def progress(self, choice: Choice, now: float) -> None:
        """Send how much of the prompt is computed, beginning with the cached part. A preempted sequence computes its
        prompt again; it sends nothing until it is further than before."""
        done = min(choice.sequence.computed, choice.sequence.prompt_tokens)
        if not choice.tells_progress or done <= choice.told:
            return
        choice.told = done
        prefill = PrefillProgress(
            done=done,
            total=choice.sequence.prompt_tokens,
            cached=choice.sequence.cached,
            seconds=now - choice.started,
        )
        self.put(choice.stream, Delta(index=choice.index, progress=prefill))

    def token(self, choice: Choice, sampled: Sampled) -> TextPiece:
        """Add a token to the answer; returns the text that may be sent now."""
        likelihood = sampled.likelihood
        choice.unsaid.append(sampled.token if likelihood is None else self.logprob(likelihood))
        return choice.answer.push(sampled.token)

    def send(
        self, choice: Choice, piece: TextPiece, finish: FinishReason | None, timings: ChoiceTimings | None
    ) -> None:
        """Send `piece` with its tokens, and the prompt's logprobs if they were not sent yet."""
        said, choice.unsaid = choice.unsaid[: piece.tokens], choice.unsaid[piece.tokens :]
        choice.said += len(said)
        prompt, choice.prompt = tuple(choice.prompt), []
        sequence = choice.sequence
        delta = Delta(
            index=choice.index,
            text=piece.text,
            tokens=tuple(each.token if isinstance(each, TokenLogprob) else each for each in said),
            logprobs=tuple(each for each in said if isinstance(each, TokenLogprob)),
            finish=finish,
            stop=piece.stop,
            hidden_tokens=() if finish is None else tuple(sequence.tokens[sequence.prompt_tokens + choice.said :]),
            prompt_logprobs=prompt,
            timings=timings,
        )
        self.put(choice.stream, delta)

    def logprob(self, likelihood: Likelihood) -> TokenLogprob:
        return TokenLogprob(
            likelihood.token,
            self._piece(likelihood.token),
            _finite(likelihood.logprob),
            tuple(TokenLogprob(token, self._piece(token), _finite(value)) for token, value in likelihood.top),
        )


def _finite(logprob: float) -> float | None:
    """None in place of minus infinity, which JSON cannot express."""
    return logprob if math.isfinite(logprob) else None

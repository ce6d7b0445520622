"""Requests inside the engine: limits that they are checked against, their choices, and the deltas that they receive.

`StreamFactory` rejects a request before it costs anything, or turns it into a `RequestStream` with one `RequestChoice`
for each of the `n` choices. `DeltaWriter` sends tokens to the asyncio side. It never waits for a client.
"""

import asyncio
import logging
import math
import secrets
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from worker.detokenizer import AnswerText, TextPiece
from worker.engines.transformers.loop.step_loop import Outbox
from worker.engines.transformers.sample.grammar import GrammarMatcher
from worker.engines.transformers.sample.sampler import Likelihood, Sampled, has_penalties
from worker.engines.transformers.sample.vocabulary import Vocabulary
from worker.engines.transformers.schedule.lora_slots import AppliedAdapter
from worker.engines.transformers.schedule.sequence import PenaltyCounts, RepeatedNgrams
from worker.engines.transformers.schedule.sequence import Sequence as TokenSequence
from worker.engines.transformers.schedule.speculation import DraftLimits, PromptLookup
from worker.errors import ContextExceeded, InvalidValue, RequestError, StartError, UnsupportedByModel
from worker.interface import ChoiceTimings, Delta, FinishReason, GenerationRequest, PrefillProgress, TokenLogprob
from worker.protocol.argv import ModelOptions, Serve
from worker.protocol.memory import DRAFT_LOGITS

log = logging.getLogger(__name__)


def context_size(options: ModelOptions, positions: int) -> int:
    """Tokens that prompt and answer of one request may have: `ctx_size`, capped to the model's `positions`.

    `positions`: 0 if the model's configuration states no maximum. Raises StartError if neither limit is known.
    """
    if not positions and not options.ctx_size:
        raise StartError("this model states no maximum length; set ctx-size")
    if positions and options.ctx_size > positions:
        log.warning("ctx-size %d is beyond the model's %d positions; using %d", options.ctx_size, positions, positions)
    return min(filter(None, (options.ctx_size, positions)))


class RequestStream:
    """One request: its unfinished choices, and the queue from which the asyncio side reads its deltas.

    The queue ends with None or an error. It is unbounded, so that a slow client never delays a step; its length is
    bounded by the tokens that the request may generate.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.items: asyncio.Queue[Delta | RequestError | None] = asyncio.Queue()
        self.choices: list[RequestChoice] = []


@dataclass(eq=False)
class RequestChoice:
    """One choice of a request: its sequence, its text and its times (monotonic seconds)."""

    index: int
    sequence: TokenSequence
    stream: RequestStream
    answer: AnswerText
    penalty_counts: PenaltyCounts | None = None
    ngrams: RepeatedNgrams | None = None
    matcher: GrammarMatcher | None = None  # the state of its grammar
    last: Sampled | None = None  # its last token, while a slow grammar takes it
    lookup: PromptLookup | None = None  # drafts by prompt lookup
    started_at: float = 0.0
    first_token_at: float = 0.0
    # Tokens whose text is held back, as part of a character or of a possible stop string. TokenLogprob if the request
    # wants logprobs.
    unsent: list[TokenLogprob | int] = field(default_factory=list)
    sent: int = 0  # tokens that were sent
    # Logprobs of the prompt's tokens computed so far, beginning with the first one, which has none. Empty once they
    # are sent, or if the request does not ask for them.
    prompt: list[TokenLogprob] = field(default_factory=list)
    include_stop: bool = False  # the token that ends the answer is part of it
    wants_progress: bool = False
    progress_sent: int = -1  # computed prompt tokens in the last progress delta; -1: none was sent
    wants_timings: bool = False  # every delta has timings, not only the last one

    def timings(self, now: float) -> ChoiceTimings:
        """Counts and times so far."""
        first_token_at = self.first_token_at or now
        return ChoiceTimings(
            prompt_tokens=self.sequence.prompt_tokens,
            cached_tokens=self.sequence.cached,
            completion_tokens=self.sequence.output_tokens,
            drafted_tokens=self.sequence.drafted,
            accepted_tokens=self.sequence.accepted,
            prefill_seconds=first_token_at - self.started_at,
            decode_seconds=now - first_token_at,
        )


class StreamFactory:
    """Checks requests against the model's context, its vocabulary and its options, and makes their streams."""

    def __init__(self, options: Serve, vocabulary: Vocabulary, ctx_size: int, *, has_encoder: bool):
        """`has_encoder`: an encoder reads the prompt. So prompt tokens have no logits, and the answer does not continue
        the prompt's text."""
        self._options, self._vocabulary, self._ctx_size = options, vocabulary, ctx_size
        self._has_encoder = has_encoder
        self._ids = count()

    def check(self, request: GenerationRequest) -> None:
        """Raise ContextExceeded, InvalidValue or UnsupportedByModel. The API has checked all values that it reads from
        a body. Here are the limits that only the engine knows: those of the model's own vocabulary, which may be
        smaller than the tokenizer's, and of its cache."""
        if len(request.prompt) >= self._ctx_size:  # at least one token of the answer must fit as well
            raise ContextExceeded(len(request.prompt), self._ctx_size)
        if request.prompt_logprobs and self._has_encoder:
            raise UnsupportedByModel("prompt logprobs are not available: this model reads the prompt with an encoder")
        self.check_tokens(request.prompt, "prompt")
        self.check_tokens(request.sampling.logit_bias, "logit_bias")
        self.check_tokens(request.ends, "stop_token_ids")  # min_tokens masks them in the logits

    def check_tokens(self, tokens: Collection[int], param: str) -> None:
        """Raise InvalidValue for a token id outside the vocabulary. On an accelerator it would end the process."""
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocabulary.size):
            wrong = next(token for token in tokens if not 0 <= token < self._vocabulary.size)
            raise InvalidValue(
                f"{param}: token {wrong} is outside this model's vocabulary of {self._vocabulary.size} tokens",
                param=param,
            )

    def make(
        self,
        request: GenerationRequest,
        matcher: GrammarMatcher | None,
        adapter: AppliedAdapter | None,
    ) -> RequestStream:
        """The stream of `request`. Seeds are random if the request has none."""
        stream = RequestStream(asyncio.get_running_loop())
        room, seed = self._ctx_size - len(request.prompt), request.sampling.seed
        limits = self._draft_limits(request)
        for index in range(request.n):
            sequence = TokenSequence.of(
                request,
                id=next(self._ids),
                limit=room if request.max_tokens is None else min(request.max_tokens, room),
                ends=self._vocabulary.ends,
                seed=secrets.randbits(63) if seed is None else seed + index,
            )
            sequence.rules = self._vocabulary.rules
            sequence.adapter, sequence.draft_limits = adapter, limits
            if request.n > 1:  # the choices of one request share the computation of its prompt
                sequence.group = stream.choices[0].sequence.id if index else sequence.id
            stream.choices.append(self._choice(request, index, sequence, stream))
            stream.choices[-1].matcher = matcher and matcher.of_choice()
        return stream

    def _draft_limits(self, request: GenerationRequest) -> DraftLimits | None:
        """The preset's limits, which a request may lower. None without speculative decoding."""
        most = min(self._options.draft_max, self._options.draft_max if request.draft_max is None else request.draft_max)
        least = self._options.draft_min if request.draft_min is None else request.draft_min
        # As in llama-server, a minimum above the maximum is lowered to it.
        return DraftLimits(most, min(least, most, DRAFT_LOGITS)) if most > 0 and self._options.speculates else None

    def _choice(
        self, request: GenerationRequest, index: int, sequence: TokenSequence, stream: RequestStream
    ) -> RequestChoice:
        vocabulary, prompt = self._vocabulary, request.prompt
        decode = (
            partial(vocabulary.decode_with, request.visible_special_tokens)
            if request.visible_special_tokens
            else vocabulary.decode
        )
        context = () if self._has_encoder else prompt
        choice = RequestChoice(
            index,
            sequence,
            stream,
            AnswerText(decode, request.stop, context, shows_stop=request.include_stop),
            include_stop=request.include_stop,
            wants_progress=request.progress,
            wants_timings=request.timings,
        )
        # Penalties look at decoder tokens only: a prompt that an encoder reads is skipped, as in transformers.
        skipped = len(prompt) if self._has_encoder else 0
        if request.sampling.no_repeat_ngram_size:
            choice.ngrams = RepeatedNgrams(sequence, request.sampling.no_repeat_ngram_size, skipped)
        if has_penalties(request.sampling):
            choice.penalty_counts = PenaltyCounts(sequence, request.sampling.repeat_last_n, skipped)
        if sequence.draft_limits is not None and self._options.ngram_size:
            choice.lookup = PromptLookup(sequence.tokens, self._options.ngram_size)
        if request.prompt_logprobs:
            choice.prompt = [TokenLogprob(prompt[0], vocabulary.piece(prompt[0]), None)]
        return choice


class AdmissionLimit:
    """Count of the sequences (or of the encoder's requests) that are not finished. Called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._counts: dict[object, int] = {}  # by request

    def admit(self, request: object, number: int, most: int) -> bool:
        """Count `number` for a request, unless `most` are counted already."""
        with self._lock:
            # A request with several choices may exceed the limit: it would otherwise never fit into a small queue.
            if self._count >= most:
                return False
            self._counts[request] = number
            self._count += number
            return True

    def release(self, request: object, number: int) -> None:
        """Count up to `number` less for a request."""
        with self._lock:
            counted = self._counts.pop(request, 0)
            number = min(number, counted)
            self._count -= number
            if number < counted:
                self._counts[request] = counted - number


class DeltaWriter:
    """Turns tokens into deltas and puts them into the outbox."""

    def __init__(self, outbox: Outbox, piece: Callable[[int], bytes]):
        """`piece`: the bytes of a token."""
        self._outbox, self._piece = outbox, piece

    def put(self, stream: RequestStream, item: Delta | RequestError | None) -> None:
        self._outbox.put(stream.loop, partial(stream.items.put_nowait, item))

    def progress(self, choice: RequestChoice, now: float) -> None:
        """Send the number of prompt tokens computed so far, cached ones included.

        A preempted sequence computes its prompt again. It sends nothing until it is further than before, so that the
        number never falls.
        """
        done = min(choice.sequence.computed, choice.sequence.prompt_tokens)
        if not choice.wants_progress or done <= choice.progress_sent:
            return
        choice.progress_sent = done
        prefill = PrefillProgress(
            done=done,
            total=choice.sequence.prompt_tokens,
            cached=choice.sequence.cached,
            seconds=now - choice.started_at,
        )
        self.put(choice.stream, Delta(index=choice.index, progress=prefill))

    def token(self, choice: RequestChoice, sampled: Sampled) -> TextPiece:
        """Add a token to the answer. Return the text that may be sent now."""
        likelihood = sampled.likelihood
        choice.unsent.append(sampled.token if likelihood is None else self.logprob(likelihood))
        return choice.answer.push(sampled.token)

    def send(
        self, choice: RequestChoice, piece: TextPiece, finish: FinishReason | None, timings: ChoiceTimings | None
    ) -> None:
        """Send `piece` with its tokens, and the prompt's logprobs if they were not sent yet."""
        sent, choice.unsent = choice.unsent[: piece.tokens], choice.unsent[piece.tokens :]
        choice.sent += len(sent)
        prompt, choice.prompt = tuple(choice.prompt), []
        sequence = choice.sequence
        delta = Delta(
            index=choice.index,
            text=piece.text,
            tokens=tuple(entry.token if isinstance(entry, TokenLogprob) else entry for entry in sent),
            logprobs=tuple(entry for entry in sent if isinstance(entry, TokenLogprob)),
            finish=finish,
            stop=piece.stop,
            hidden_tokens=() if finish is None else tuple(sequence.tokens[sequence.prompt_tokens + choice.sent :]),
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

"""Requests for text as sequences of the generation loop."""

import asyncio
import secrets
from collections.abc import Sequence
from functools import partial
from itertools import count

from worker.detokenizer import AnswerText
from worker.engines.transformers.sample.grammar import Matcher
from worker.engines.transformers.sample.sampler import has_penalties
from worker.engines.transformers.sample.vocabulary import Vocabulary
from worker.engines.transformers.schedule.lora_slots import Use
from worker.engines.transformers.schedule.sequence import Repeats, answer_limit
from worker.engines.transformers.schedule.sequence import Sequence as TokenSequence
from worker.engines.transformers.stream import Choice, Stream
from worker.interface import GenerationRequest, TokenLogprob
from worker.protocol.argv import Serve


class RequestStreams:
    """Makes the stream of a request, with a sequence for each of its choices."""

    def __init__(self, options: Serve, vocabulary: Vocabulary, ctx_size: int, *, reads_first: bool):
        """`reads_first`: an encoder reads the prompt, so the answer does not continue the prompt's text."""
        self._options, self._vocabulary, self._ctx_size = options, vocabulary, ctx_size
        self._reads_first = reads_first
        self._ids = count()

    def make(
        self, request: GenerationRequest, prompt: Sequence[int], matcher: Matcher | None, adapter: Use | None
    ) -> Stream:
        """The stream of `request`. Its choices get random seeds if neither the request nor the preset has one."""
        stream = Stream(asyncio.get_running_loop())
        limit = answer_limit(len(prompt), request.max_tokens, self._options.n_predict, self._ctx_size)
        seed = request.sampling.seed
        if seed is None and self._options.seed >= 0:
            seed = self._options.seed
        for index in range(request.n):
            sequence = TokenSequence.of(
                request,
                id=next(self._ids),
                limit=limit,
                ends=self._vocabulary.ends,
                seed=secrets.randbits(63) if seed is None else seed + index,
                prompt=prompt,
                adapter=adapter,
            )
            if request.n > 1:  # the choices of one request share the computation of its prompt
                sequence.group = stream.choices[0].sequence.id if index else sequence.id
            stream.choices.append(self._choice(request, index, sequence, stream, prompt))
            stream.choices[-1].matcher = matcher and matcher.copy()
        return stream

    def _choice(
        self, request: GenerationRequest, index: int, sequence: TokenSequence, stream: Stream, prompt: Sequence[int]
    ) -> Choice:
        vocabulary = self._vocabulary
        decode = (
            partial(vocabulary.decode_with, request.visible_special_tokens)
            if request.visible_special_tokens
            else vocabulary.decode
        )
        context = () if self._reads_first else prompt
        choice = Choice(
            index,
            sequence,
            stream,
            AnswerText(decode, request.stop, context, shows_stop=request.include_stop),
            include_stop=request.include_stop,
            tells_progress=request.progress,
            wants_timings=request.timings,
        )
        if has_penalties(request.sampling):
            choice.repeats = Repeats(sequence, request.sampling.repeat_last_n, len(prompt) if self._reads_first else 0)
        if request.prompt_logprobs:
            choice.prompt = [TokenLogprob(prompt[0], vocabulary.piece(prompt[0]), None)]
        return choice

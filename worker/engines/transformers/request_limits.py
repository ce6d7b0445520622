"""The bounds of one model: what a request may ask of it, whoever has read its body."""

import logging
import math
from collections.abc import Sequence

from worker.engines.transformers.sample.vocabulary import Vocabulary
from worker.errors import ContextExceeded, InvalidValue, StartError, UnsupportedByModel
from worker.interface import GenerationRequest
from worker.protocol.argv import ModelOptions, Serve

log = logging.getLogger(__name__)


class Bounds:
    """By its options, its context and its tokens."""

    def __init__(self, options: Serve, vocabulary: Vocabulary, ctx_size: int, *, reads_first: bool):
        """`reads_first`: an encoder reads the prompt."""
        self._options = options
        self._vocabulary = vocabulary
        self._ctx_size = ctx_size
        self._reads_first = reads_first

    def check(self, request: GenerationRequest) -> tuple[int, ...]:
        """The prompt to compute. Raises ContextExceeded or InvalidValue for what no sequence could be made of."""
        prompt = request.prompt
        if not prompt:
            first = self._vocabulary.first
            if first is None:
                raise InvalidValue("the prompt is empty, and this model has no token to begin with", param="prompt")
            prompt = (first,)
        self.check_tokens(prompt)
        if len(prompt) >= self._ctx_size:
            raise ContextExceeded(len(prompt), self._ctx_size)
        if 0 < self._options.max_input_tokens < len(prompt):
            raise ContextExceeded(len(prompt), self._options.max_input_tokens)
        if request.n < 1:
            raise InvalidValue(f"n is {request.n}; it must be at least 1", param="n")
        if request.max_tokens is not None and request.max_tokens < 0:
            raise InvalidValue(f"max_tokens is {request.max_tokens}; it must not be negative", param="max_tokens")
        if not all(request.stop):
            raise InvalidValue("a stop string is empty", param="stop")
        if request.prompt_logprobs and self._reads_first:
            raise UnsupportedByModel("this model's encoder reads the prompt: there are no logprobs of it")
        if not all(0 <= token < self._vocabulary.size for token in request.ends):
            raise InvalidValue(
                f"stop_token_ids must be tokens of this model, from 0 to {self._vocabulary.size - 1}",
                param="stop_token_ids",
            )
        self._check_sampling(request)
        return prompt

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises InvalidValue for those that this model does not have."""
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocabulary.size):
            wrong = next(token for token in tokens if not 0 <= token < self._vocabulary.size)
            raise InvalidValue(
                f"token {wrong} is outside this model's vocabulary of {self._vocabulary.size} tokens", param="prompt"
            )

    def _check_sampling(self, request: GenerationRequest) -> None:
        sampling = request.sampling
        numbers = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": sum(sampling.logit_bias.values()),
        }
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise InvalidValue(f"{name} is {value}; it must be a finite number", param=name)
        if sampling.temperature < 0.0:
            raise InvalidValue(f"temperature is {sampling.temperature}; it must not be negative", param="temperature")
        if sampling.repetition_penalty <= 0.0:
            raise InvalidValue("repetition_penalty must be greater than 0", param="repetition_penalty")
        for token in sampling.logit_bias:
            if not 0 <= token < self._vocabulary.size:
                raise InvalidValue(
                    f"token {token} is outside this model's vocabulary of {self._vocabulary.size} tokens",
                    param="logit_bias",
                )
        most = min(self._options.max_logprobs, self._vocabulary.size)
        if sampling.logprobs is not None and not 0 <= sampling.logprobs <= most:
            raise InvalidValue(
                f"{sampling.logprobs} logprobs were asked for; this model gives 0 to {most}", param="logprobs"
            )


def context_size(options: ModelOptions, positions: int) -> int:
    """Tokens of one request: as asked, at most what the model has positions for (0: it does not say)."""
    if not positions and not options.ctx_size:
        raise StartError("this model states no maximum length; set ctx-size")
    if positions and options.ctx_size > positions:
        log.warning("ctx-size %d is beyond the model's %d positions; using %d", options.ctx_size, positions, positions)
    return min(filter(None, (options.ctx_size, positions)))

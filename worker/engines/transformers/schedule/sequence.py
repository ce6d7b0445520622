"""One sequence: a prompt, its answer so far, and its limits.

Law: PURE. A sequence counts tokens and knows when it is over; it does not know batches, tensors or text.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from worker.engines.transformers.schedule.lora_slots import Use
from worker.interface import FinishReason, GenerationRequest, PromptImages, SamplingParams


def answer_limit(prompt_tokens: int, asked: int | None, default: int, ctx_size: int) -> int:
    """New tokens that a request may get: what it asked for (or `default`; negative: all), capped to the room left."""
    room = ctx_size - prompt_tokens
    wanted = default if asked is None else asked
    return room if wanted < 0 else min(wanted, room)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request. `computed` tokens of `tokens` have their keys and values in the cache."""

    id: int
    """Rises with arrival."""
    prompt_tokens: int
    tokens: list[int]
    """The prompt, then the answer, with the end-of-sequence token that closed it, if one did."""
    limit: int
    """New tokens at most."""
    ends: frozenset[int]
    """Tokens that end the answer."""
    stated: frozenset[int] = frozenset()
    """Those of them that the request states itself."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    prompt_logprobs: bool = False
    """Logits are wanted at every position of the prompt, not only at its last."""
    prompt_images: PromptImages | None = None
    """The images that some tokens of its prompt stand for."""
    adapter: Use | None = None
    """None: the model as it is."""
    salt: bytes = b""
    """What is cached of its tokens serves only sequences with the same salt."""
    group: int | None = None
    """Those who share it are choices of one request, with the same prompt: one computes it for all."""
    computed: int = 0
    cached: int = 0
    """Tokens of the prompt that were in the cache when the sequence first ran."""
    preempted: bool = False
    """It has run, and was put back."""
    spared: bool = False
    """It was put back once already because a step had no memory."""

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        *,
        id: int,
        limit: int,
        ends: Iterable[int],
        seed: int,
        prompt: Tokens[int] = (),
        adapter: Use | None = None,
    ) -> "Sequence":
        """A fresh sequence for one choice of `request`; `prompt` where it differs from the request's own; `adapter`:
        the one that the request's choice stands for."""
        tokens = list(prompt or request.prompt)
        return cls(
            id=id,
            prompt_tokens=len(tokens),
            tokens=tokens,
            limit=limit,
            ends=frozenset(ends) | request.ends,
            stated=request.ends,
            sampling=request.sampling,
            seed=seed,
            prompt_logprobs=request.prompt_logprobs,
            prompt_images=request.prompt_images,
            adapter=adapter,
            salt=request.salt.encode(),
        )

    @property
    def answered(self) -> int:
        """New tokens so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to be computed; the last one's logits choose the next token."""
        return len(self.tokens) - self.computed

    @property
    def is_decoding(self) -> bool:
        """Exactly the newest token of an answer is left to compute."""
        return self.answered > 0 and self.pending == 1

    def barred(self, answered: int) -> frozenset[int]:
        """Those of `ends` that the token behind so many of the answer must not be."""
        if answered < self.sampling.min_tokens:
            return self.ends
        return self.ends - self.stated if self.sampling.ignore_eos else frozenset()

    def append(self, token: int) -> FinishReason | None:
        """Take the next token of the answer; says why the answer is over, if it is."""
        self.tokens.append(token)
        if token in self.ends:
            return "stop"
        return "length" if self.answered >= self.limit else None

    def restart(self) -> None:
        """Its part of the cache was taken away: everything so far is to be computed again."""
        self.computed = 0
        self.preempted = True


class Repeats:
    """The tokens that a sequence's penalties look back at, counted.

    Of the last `window` tokens (-1: of all) of prompt and answer together: `seen` are all, `answer` those that belong
    to the answer. Counting is incremental, so a step costs the same however long the text is.
    """

    def __init__(self, sequence: Sequence, window: int, first: int = 0):
        """`first`: the tokens before it are another text, which an encoder reads."""
        self._first = first
        self.seen: Counter[int] = Counter()
        self.answer: Counter[int] = Counter()
        self._sequence = sequence
        self._window = window
        self._begin = 0
        self._end = 0

    def update(self) -> None:
        """Catch up with the tokens that the sequence got since, and forget those that left the window."""
        tokens, prompt = self._sequence.tokens, self._sequence.prompt_tokens
        begin = self._first if self._window < 0 else max(self._first, len(tokens) - self._window)
        for position in range(max(self._end, begin), len(tokens)):
            self.seen[tokens[position]] += 1
            if position >= prompt:
                self.answer[tokens[position]] += 1
        for position in range(self._begin, min(begin, self._end)):
            _uncount(self.seen, tokens[position])
            if position >= prompt:
                _uncount(self.answer, tokens[position])
        self._begin, self._end = begin, len(tokens)


def _uncount(counter: Counter[int], token: int) -> None:
    counter[token] -= 1
    if not counter[token]:
        del counter[token]

"""One sequence: a prompt, its output so far, and its limits.

Token ids and numbers only: no batches, tensors or text.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from collections.abc import Sequence as Tokens
from copy import copy
from dataclasses import dataclass, field

from worker.engines.transformers.schedule.lora_slots import AppliedAdapter
from worker.engines.transformers.schedule.speculation import DraftLimits
from worker.interface import FinishReason, GenerationRequest, PromptImages, SamplingParams


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Tokens that a checkpoint forbids or forces, whatever the request."""

    never: frozenset[int] = frozenset()
    never_first: frozenset[int] = frozenset()  # forbidden as the first token that is not forced
    first: int | None = None  # the first token of the output; None: any
    last: int | None = None  # the token at the limit of the output; None: any

    def forbidden(self, position: int) -> frozenset[int]:
        """Tokens that must not be output token number `position`."""
        begin = 0 if self.first is None else 1
        return self.never | self.never_first if position == begin else self.never

    def forced(self, position: int, limit: int) -> int | None:
        """The only token allowed as output token number `position`, of at most `limit`. None: any."""
        if self.last is not None and position == limit - 1:
            return self.last
        return self.first if position == 0 else None


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request: its tokens, its limits and its progress."""

    id: int  # rises with arrival, so a smaller id means an older sequence
    prompt_tokens: int
    tokens: list[int]  # prompt, then output, including the end-of-sequence token
    limit: int  # maximum of output tokens
    ends: frozenset[int]  # stop tokens: they end the output
    requested_ends: frozenset[int] = frozenset()  # the subset of `ends` that the request itself lists
    rules: TokenRules = TokenRules()  # of the checkpoint
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    prompt_logprobs: bool = False  # logits are needed at every prompt position, not only at the last one
    prompt_images: PromptImages | None = None  # images behind placeholder tokens of the prompt
    adapter: AppliedAdapter | None = None  # None: the base model
    salt: bytes = b""  # cached blocks are shared only between sequences with equal salt
    group: int | None = None  # choices of one request have the same group and prompt; one of them computes it for all
    draft_limits: DraftLimits | None = None  # None: no speculative decoding
    drafted: int = 0  # tokens that were drafted for it so far
    accepted: int = 0  # of these, the tokens that became output
    computed: int = 0  # leading tokens whose keys and values are in the cache
    cached: int = 0  # prompt tokens found in the prefix cache at the first admission
    is_held: bool = False  # sits out of steps until its grammar mask is there
    is_unchecked: bool = False  # its newest token was computed, but its logits were not read: they may be NaN
    preempted: bool = False  # has run before and was preempted
    preempted_for_memory: bool = False  # was preempted once because a step ran out of device memory

    @classmethod
    def of(cls, request: GenerationRequest, *, id: int, limit: int, ends: Iterable[int], seed: int) -> "Sequence":
        """A new sequence for one choice of `request`."""
        tokens = list(request.prompt)
        return cls(
            id=id,
            prompt_tokens=len(tokens),
            tokens=tokens,
            limit=limit,
            ends=frozenset(ends) | request.ends,
            requested_ends=request.ends,
            sampling=request.sampling,
            seed=seed,
            prompt_logprobs=request.prompt_logprobs,
            prompt_images=request.prompt_images,
            salt=request.salt.encode(),
        )

    @property
    def output_tokens(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens without keys and values in the cache. The logits of the last one choose the next token."""
        return len(self.tokens) - self.computed

    def draft_room(self, most: int) -> int:
        """Tokens that are worth drafting now, up to `most`: a step gives one more, and its draft must not exceed the
        limit. 0 for a draft that would be dropped as too short."""
        if self.draft_limits is None or self.sampling.no_repeat_ngram_size:
            return 0  # `RepeatedNgrams` counts no drafted tokens
        room = min(most, self.draft_limits.most, self.limit - self.output_tokens - 1)
        return room if room >= max(self.draft_limits.least, 1) else 0

    @property
    def is_decoding(self) -> bool:
        """True if exactly the newest output token is left to compute."""
        return self.output_tokens > 0 and self.pending == 1

    def forbidden_ends(self, position: int) -> frozenset[int]:
        """Tokens of `ends` that must not be sampled as output token number `position`."""
        if position < self.sampling.min_tokens:
            return self.ends
        # ignore_eos disables the model's own end tokens; tokens that the request lists still end the output.
        return self.ends - self.requested_ends if self.sampling.ignore_eos else frozenset()

    def append(self, token: int) -> FinishReason | None:
        """Append the next output token. Return the finish reason if it ends the output."""
        self.tokens.append(token)
        is_cut = self.output_tokens >= self.limit
        # A forced last token is often one that ends the output, but the limit has ended it.
        if token in self.ends and not (is_cut and self.rules.last is not None):
            return "stop"
        return "length" if is_cut else None

    def restart(self) -> None:
        """Reset after preemption: all tokens so far are to be computed again, unless found in the prefix cache."""
        self.computed = 0
        self.preempted = True


class PenaltyCounts:
    """Counts of the tokens that repetition penalties consider.

    They cover the last `window` tokens (-1: all) of prompt and output together: `seen` counts all of them, `output`
    those of the output. Counting is incremental, so the cost of a step does not grow with the text.
    """

    def __init__(self, sequence: Sequence, window: int, first: int = 0):
        """`first`: start of the counted text. Tokens before it are an encoder's input."""
        self._first = first
        self.seen: Counter[int] = Counter()
        self.output: Counter[int] = Counter()
        self._sequence = sequence
        self._window = window
        self._begin = 0
        self._end = 0

    def update(self) -> None:
        """Add the tokens that are new since the last call, and remove those that left the window."""
        self._move(self._sequence.tokens, len(self._sequence.tokens))

    def _move(self, tokens: Tokens[int], end: int) -> None:
        """Count the window before `end`."""
        prompt = self._sequence.prompt_tokens
        begin = self._first if self._window < 0 else max(self._first, end - self._window)
        for position in range(max(self._end, begin), end):
            self.seen[tokens[position]] += 1
            if position >= prompt:
                self.output[tokens[position]] += 1
        for position in range(self._begin, min(begin, self._end)):
            _uncount(self.seen, tokens[position])
            if position >= prompt:
                _uncount(self.output, tokens[position])
        self._begin, self._end = begin, end

    def after_each(self, drafted: Tokens[int]) -> Iterator["PenaltyCounts"]:
        """The counts after none, one, ... and all tokens of `drafted`, as if they were output. Unchanged itself."""
        tokens, later = [*self._sequence.tokens, *drafted], self
        yield later
        for end in range(len(tokens) - len(drafted) + 1, len(tokens) + 1):
            later = copy(later)
            later.seen, later.output = Counter(later.seen), Counter(later.output)
            later._move(tokens, end)
            yield later


class RepeatedNgrams:
    """The tokens that would repeat an n-gram of `size` tokens. Each token is indexed once, so a step takes as long in a
    long text as in a short one."""

    def __init__(self, sequence: Sequence, size: int, first: int = 0):
        """`first`: start of the text that counts. Tokens before it are an encoder's input."""
        self._sequence = sequence
        self._size = size
        self._first = self._begin = first  # `_begin`: of the first occurrence that is not noted yet
        # The tokens that followed each run of `size - 1` tokens, by the hash of the run. Tuples of 63 tokens would take
        # six times the memory. In a text of 100,000 tokens, the odds of a collision are about one in a billion. Most
        # runs were followed by one token, which is stored without a set, because a set takes 216 bytes.
        self._following: dict[int, int | set[int]] = {}

    def forbidden(self) -> Set[int]:
        """The tokens that must not come next."""
        tokens, before = self._sequence.tokens, self._size - 1
        for begin in range(self._begin, len(tokens) - before):
            key, token = hash(tuple(tokens[begin : begin + before])), tokens[begin + before]
            known = self._following.setdefault(key, token)
            if isinstance(known, set):
                known.add(token)
            elif known != token:
                self._following[key] = {known, token}
        self._begin = max(self._begin, len(tokens) - before)
        if len(tokens) - self._first < before:
            return frozenset()
        found = self._following.get(hash(tuple(tokens[len(tokens) - before :])), set())
        return found if isinstance(found, set) else {found}


def _uncount(counter: Counter[int], token: int) -> None:
    counter[token] -= 1
    if not counter[token]:
        del counter[token]

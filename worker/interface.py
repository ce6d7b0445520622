"""Interface between the API modules and the engines: GenerationRequest, SamplingParams, Delta and the Engine protocol.

An API module turns the JSON of one dialect into GenerationRequests and turns Deltas back into JSON. An engine turns
GenerationRequests into Deltas and contains no dialect. This module holds values only: no torch and no I/O.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from worker.images import EncodedImage
from worker.protocol.argv import AdapterSource

FinishReason = Literal["stop", "length"]
GrammarKind = Literal["json_schema", "regex", "choice", "lark", "gbnf"]
# Whitespace that a grammar allows between JSON tokens. It is bounded because a model that loops would otherwise fill
# its context with blanks.
JSON_WHITESPACE = r"[ \t]|\r?\n[ \t]{0,32}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one sequence. Each default is neutral, so that the corresponding step does nothing."""

    temperature: float = 1.0  # 0.0 is greedy, whatever else is set
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of most likely tokens whose probabilities reach p (Holtzman et al. 2020)
    min_p: float = 0.0  # drop tokens less likely than min_p times the most likely one (Nguyen et al. 2024)
    repetition_penalty: float = 1.0  # divide positive and multiply negative logits of seen tokens (Keskar et al. 2019)
    presence_penalty: float = 0.0  # subtracted once from the logit of every generated token (OpenAI)
    frequency_penalty: float = 0.0  # subtracted once per occurrence among the generated tokens (OpenAI)
    # Number of last tokens that the three penalties look at; -1 is all, 0 is none. The prompt of an encoder-decoder
    # model is never included.
    repeat_last_n: int = -1
    # No sequence of this many tokens occurs twice in prompt and output, as in transformers; 0 is off.
    no_repeat_ngram_size: int = 0
    # Apply temperature after top_k, top_p and min_p, as llama.cpp does, instead of before them.
    temperature_last: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits, by token id
    # The same seed gives the same text, whatever else is in the batch. None draws a new seed for each request.
    seed: int | None = None
    min_tokens: int = 0  # suppress the end of sequence until this many tokens are generated
    ignore_eos: bool = False  # never sample the model's own end-of-sequence tokens
    # Number of alternatives to report beside each chosen token (0 is none); None reports no logprobs. Logprobs are
    # the log-softmax of the unmodified logits.
    logprobs: int | None = None
    post_sampling_logprobs: bool = False  # report logprobs of the distribution that the token was drawn from instead


@dataclass(frozen=True, slots=True)
class Grammar:
    """Formal language that the text of an answer must belong to."""

    kind: GrammarKind  # `choice`: JSON array of strings; `gbnf`: llama.cpp's notation; `lark`: llguidance's
    text: str
    field: str = field(default="grammar", compare=False)  # request field that an error names
    # rules in llguidance's Lark for text before the constrained part, such as reasoning; start rule `preamble`
    preamble: str = ""
    lenient: bool = False  # JSON schema only: ignore keywords that cannot be enforced instead of rejecting them


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """One image of a prompt, preprocessed for the model."""

    # positions of its placeholder tokens: (first position, length), from left to right
    runs: tuple[tuple[int, int], ...]
    inputs: Mapping[str, Any]  # inputs of the model's vision tower, by name
    is_whole: bool = False  # its tokens attend to each other and must be computed in one step

    @property
    def begin(self) -> int:
        return self.runs[0][0]

    @property
    def end(self) -> int:
        return self.runs[-1][0] + self.runs[-1][1]

    @property
    def tokens(self) -> int:
        return sum(length for _, length in self.runs)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PromptImages:
    """All images of a prompt, in prompt order."""

    images: tuple[PromptImage, ...]

    def cut(self, start: int, end: int) -> int:
        """Return the end of a step that starts at `start` and should end at `end`.

        An image with `is_whole` must not be cut: the step ends before it, or after it if the step starts at its
        beginning.
        """
        for picture in self.images:
            if picture.is_whole and picture.begin < end < picture.end:
                return picture.begin if start < picture.begin else picture.end
        return end


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """The LoRA adapter that a request selects."""

    name: str = ""  # empty, without a number: no adapter, even if there is a default one
    number: int | None = None  # index in the list of all adapters, as llama-server numbers them
    scale: float = 1.0  # 1.0: as trained; 0.0: no effect


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request: the token ids of a prompt and how to continue it."""

    id: str
    prompt: tuple[int, ...]
    prompt_images: PromptImages | None = None  # images that some of the prompt's tokens stand for
    adapter: AdapterChoice | None = None  # None selects the default adapter, if there is one
    # maximum number of new tokens; None: up to the end of the context. The engine caps it to the space left.
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()  # strings that end the answer and are not part of it
    ends: frozenset[int] = frozenset()  # tokens that end the answer, in addition to the model's own
    include_stop: bool = False  # keep the token or stop string that ended the answer as part of it
    n: int = 1  # number of choices; choice i of a seeded request uses seed + i
    sampling: SamplingParams = SamplingParams()
    # The answer must be a complete text of this language, unless something else ends it earlier. Completing the text
    # ends the answer.
    grammar: Grammar | None = None
    # special tokens whose text is part of the answer; the text of all others is dropped
    visible_special_tokens: frozenset[int] = frozenset()
    salt: str = ""  # cached prompt blocks are shared only between requests with the same salt
    prompt_logprobs: bool = False  # also report logprobs of the prompt's tokens; the first token has none
    timings: bool = False  # report timings on every delta instead of only on the last one of each choice
    progress: bool = False  # report `Delta.progress` after each prefill step
    # Limits of drafts, in place of the preset's: at most so many tokens (0: no speculative decoding; not more than the
    # preset allows), and the fewest that are worth a step.
    draft_max: int | None = None
    draft_min: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token. `piece` is the bytes of this token alone, which may be part of a character."""

    token: int
    piece: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New output of one choice. The concatenated `text` is the whole answer; a character is never split."""

    index: int = 0
    text: str = ""
    # Tokens of `text`. The token or the stop string that ended the answer is excluded: it is counted in
    # `ChoiceTimings.completion_tokens` but not shown.
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token in `tokens`, if requested
    finish: FinishReason | None = None  # set on the last delta of this choice
    stop: str | None = None  # the stop string that ended the answer
    # on the last delta: the tokens of a stop string, or the token that ended the answer
    hidden_tokens: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # on the first delta, if requested: one per prompt token
    # on the last delta of each choice; if requested, on every delta with text or tokens
    timings: "ChoiceTimings | None" = None
    # If requested. Such a delta comes before all others of its choice and has no other content.
    progress: "PrefillProgress | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """Prefill progress in tokens: `done` of `total`, of which `cached` came from the prefix cache."""

    done: int
    total: int
    cached: int
    seconds: float = field(default=0.0, compare=False)  # since the first step that contained a token of this prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceTimings:
    """Token counts and durations of one choice."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int  # all computed tokens, including those that are not shown
    prefill_seconds: float  # from the first step that contained a token of this prompt until its first output token
    decode_seconds: float
    drafted_tokens: int = 0  # by speculative decoding
    accepted_tokens: int = 0  # of these, the tokens that became output


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One input of an encoder: a text, or a pair of texts as the tokenizer joins them."""

    tokens: Sequence[int]
    kinds: Sequence[int] = ()  # token type ids (segment of each token), from the tokenizer; empty: all 0
    skipped: int = 0  # length of the leading instruction, which some models exclude from pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingConfig:
    """Input conventions and output shape of an embedding model."""

    dimensions: int  # components of a vector
    is_pooled: bool = True  # one vector per text; otherwise one per token
    prompts: Mapping[str, str] = field(default_factory=dict)  # instructions to prepend to a text, by name
    default_prompt: str = ""  # instruction text for requests that name none
    skips_prompt: bool = False  # pooling excludes the tokens of the instruction


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of an engine."""

    steps: int  # since the start
    running: int
    waiting: int


class ImageProcessor(Protocol):
    """Image preprocessing for one model."""

    @property
    def placeholder(self) -> str:
        """Text that stands for one image in a rendered prompt."""

    async def read(self, prompt: str, images: Sequence[EncodedImage]) -> tuple[list[int], PromptImages]:
        """Return the tokens of a prompt with one placeholder for each of `images`, and the preprocessed images.

        Images are decoded and preprocessed in a thread. Raise InvalidValue naming the image that cannot be used,
        UnsupportedField for more images than the model is served with, and QueueFull.
        """


class Engine(Protocol):
    """Computes tokens or vectors for one model."""

    @property
    def capabilities(self) -> frozenset[str]:
        """Subset of `completion`, `embedding`, `rerank` and `vision`. `ServedModel.capabilities` derives `chat` and
        `tools` from the chat template."""

    @property
    def vision(self) -> ImageProcessor | None:
        """Image preprocessor; None if the model takes no images."""

    @property
    def no_vision(self) -> str:
        """User-facing reason why the model takes no images; empty if it takes them."""

    @property
    def encoding(self) -> EncodingConfig | None:
        """Conventions of an embedding model; None for any other model."""

    @property
    def ctx_size(self) -> int:
        """Maximum number of tokens of prompt and answer together."""

    @property
    def occupancy(self) -> EngineLoad: ...

    @property
    def measured(self) -> dict[str, int]:
        """Peak bytes by device name (`cpu`: resident bytes of this process)."""

    def announced(self, size: int) -> AbstractContextManager[None]:
        """Announce that a request takes up to `size` bytes of main memory in the block, beside its steps."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield deltas of all choices in the order of their computation, until the `finish` of the last choice.

        Closing the generator cancels: the sequences leave the batch within one step. A slow consumer never blocks the
        step loop. Raise ContextExceeded, InvalidValue (a token id outside the vocabulary, a grammar that cannot be
        compiled) or QueueFull before the first delta, and SequenceFailed at any time.
        """

    async def check_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar. Raise InvalidValue or UnsupportedByModel as `generate` does."""

    async def embed(self, texts: Sequence[EncoderInput], *, normalize: int | None = None) -> list[list[float]]:
        """Return one vector per text, in order. `normalize` is the norm as in llama-server's --embd-normalize; None
        uses the model's configuration.

        Raise ContextExceeded, InvalidValue, QueueFull, UnsupportedByModel, or SequenceFailed if the model cannot
        compute one of them. Cancelling drops the work that is not computed yet.
        """

    async def embed_tokens(self, texts: Sequence[EncoderInput]) -> list[list[list[float]]]:
        """Return the hidden states, one vector per token, for models without pooling. Otherwise like `embed`."""

    async def score(self, pairs: Sequence[EncoderInput]) -> list[float]:
        """Return the relevance score of each pair, by a cross-encoder; higher is better. Otherwise like `embed`."""

    async def set_adapters(self, sources: Sequence[AdapterSource], default: str = "") -> Mapping[str, str]:
        """Replace the set of adapters that requests may name. Running requests keep the adapter that they started with.

        Return the errors of adapters that cannot be used, by name. Raise UnsupportedByModel if the model cannot use
        adapters.
        """

    async def close(self) -> None:
        """Stop the step loop. Running requests end with Draining."""

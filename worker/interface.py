"""What faces and engines share: Generation, Sampling, Delta, Engine.

A face turns JSON of one API into a `Generation` and `Delta`s back into JSON; an engine turns one into the other and
knows no API. Law: PURE, values only; no torch, no I/O.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from worker.images import Image
from worker.protocol.argv import AdapterSource

Finish = Literal["stop", "length"]
GrammarKind = Literal["json_schema", "regex", "choice", "lark", "gbnf"]
JSON_WHITESPACE = r"[ \t]|\r?\n[ \t]{0,32}"
"""The whitespace that a grammar allows between the parts of JSON. Bounded: a model that loops would otherwise fill its
context with blanks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one sequence picks its tokens. The defaults are neutral: each step of the pipeline does nothing."""

    temperature: float = 1.0
    """0.0: greedy, whatever else is set."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Keep the smallest likeliest set whose probabilities reach p (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p x the likeliest one (Nguyen et al. 2024)."""
    repetition_penalty: float = 1.0
    """Divide positive, multiply negative logits of tokens seen (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from every token of the answer so far (OpenAI)."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the answer so far (OpenAI)."""
    repeat_last_n: int = -1
    """Tokens that the three penalties look back at, but none of a prompt that an encoder reads; -1: all, 0: none."""
    tempers_last: bool = False
    """Temperature comes behind top_k, top_p and min_p, which look at what the model says, as in llama.cpp; else before
    them."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to logits by token id."""
    seed: int | None = None
    """The same seed gives the same text, whatever else is in the batch. None: another one each time."""
    min_tokens: int = 0
    """No end of sequence before so many new tokens."""
    ignore_eos: bool = False
    """The model's own ends never come."""
    logprobs: int | None = None
    """How many alternatives to report beside each chosen token (0: none); None: no logprobs at all. They are of the
    unmodified distribution: softmax of the raw logits."""
    tells_odds: bool = False
    """They are of the distribution that the token was drawn from, instead."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer may be: its text is one of a formal language."""

    kind: GrammarKind
    """`choice`: `text` is a JSON array of strings; `gbnf`: llama.cpp's notation; `lark`: llguidance's."""
    text: str
    field: str = field(default="grammar", compare=False)
    """The field of the request that states it: the one that an error names."""
    preamble: str = ""
    """Rules of llguidance's Lark for what may come before such a text, `preamble` among them: thoughts, say."""
    lenient: bool = False
    """Of a JSON schema: pass over keywords that no grammar of ours can enforce, instead of refusing them."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One image of a prompt, prepared as its model wants it."""

    runs: tuple[tuple[int, int], ...]
    """Which of the prompt's tokens stand for it: first position and number, from left to right."""
    inputs: Mapping[str, Any]
    """What the model's vision tower takes, by name."""
    is_whole: bool = False
    """Its tokens see each other: they are computed in one step."""

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
class Pictures:
    """All images of a prompt, in its order."""

    each: tuple[Picture, ...]

    def cut(self, start: int, end: int) -> int:
        """Where a step from `start` on ends that was to end at `end`: before a picture that must not be cut, or behind
        it if the step begins with it."""
        for picture in self.each:
            if picture.is_whole and picture.begin < end < picture.end:
                return picture.begin if start < picture.begin else picture.end
        return end


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """The adapter that a request names."""

    name: str = ""
    """Empty, with no number: the model as it is, even if there is a default adapter."""
    number: int | None = None
    """Its place in the list of all, as llama-server's clients say it."""
    scale: float = 1.0
    """1.0: as it was trained; 0.0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request: a prompt of token ids and how to go on from it."""

    id: str
    prompt: tuple[int, ...]
    pictures: Pictures | None = None
    """The images that some of the prompt's tokens stand for."""
    adapter: AdapterChoice | None = None
    """None: the default one, if there is any."""
    max_tokens: int | None = None
    """New tokens at most; None: to the end of the context. An engine caps it to the room left."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the answer beside the model's own."""
    shows_end: bool = False
    """What ended the answer, a token or a stop string, is part of it after all."""
    n: int = 1
    """Choices; choice i > 0 of a seeded request uses seed + i."""
    sampling: Sampling = Sampling()
    grammar: Grammar | None = None
    """The answer is a text of this language, whole unless something else ends it; its end ends the answer."""
    shown: frozenset[int] = frozenset()
    """Special tokens whose text is part of the answer's text; that of all others is left out."""
    salt: str = ""
    """What is cached of a prompt serves only requests with the same salt."""
    prompt_logprobs: bool = False
    """Report the logprobs of the prompt's own tokens as well (the first one has none)."""
    timings: bool = False
    """Report times and counts so far on every delta, not on the last of each choice only."""
    progress: bool = False
    """Tell how far the prompt is after each step that computes a part of it (`Delta.progress`)."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's probability. `piece` are its bytes alone, which may be part of a character."""

    token: int
    piece: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new on one choice. Concatenated `text` is the whole answer; characters are never cut."""

    index: int = 0
    text: str = ""
    tokens: tuple[int, ...] = ()
    """Those that the text so far is made of. A token that ended the answer is in none, nor are those of a stop
    string: they count (`Timings.completion_tokens`) but are not shown."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `tokens`, if asked for."""
    finish: Finish | None = None
    """Set on the last delta of this choice."""
    stop: str | None = None
    """The stop string that ended it."""
    unshown: tuple[int, ...] = ()
    """On the last delta: the tokens behind those that are shown, of a stop string or the one that ended the answer."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """On the first delta, if asked for: one for each prompt token."""
    timings: "Timings | None" = None
    """On the last delta of each choice; on every one that has text or tokens, if asked for."""
    progress: "Prefill | None" = None
    """Only if asked for; such a delta comes before all others of its choice and says nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """How far a prompt is, in tokens: `done` of `total`, of which `cached` were there already and cost nothing."""

    done: int
    total: int
    cached: int
    seconds: float = field(default=0.0, compare=False)
    """Since the first step that carried a token of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Counts of tokens and seconds of one choice."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    """All that were computed, also those that are not shown: they cost the same."""
    prefill_seconds: float
    """From the first step that carried a token of it to its first token."""
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class Text:
    """One input of an encoder: a text, or a pair of them as its tokenizer joins them."""

    tokens: Sequence[int]
    kinds: Sequence[int] = ()
    """Which text each token belongs to, as the tokenizer numbers them; empty: all 0."""
    skipped: int = 0
    """Tokens of the instruction at its beginning, which some models leave out of pooling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How a model that embeds wants its texts, and what it makes of them."""

    dimensions: int
    """Components of a vector."""
    is_pooled: bool = True
    """One vector for each text; else one for each token."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Instructions to put before a text, by name."""
    default_prompt: str = ""
    """The text of the one for requests that name none."""
    skips_prompt: bool = False
    """Pooling leaves the instruction's tokens out."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What an engine is doing; counters only rise."""

    steps: int
    running: int
    waiting: int


class Vision(Protocol):
    """How prompts with images are made for one model."""

    @property
    def placeholder(self) -> str:
        """What stands in a prompt's text for an image."""

    async def read(self, prompt: str, images: Sequence[Image]) -> tuple[list[int], Pictures]:
        """Tokens of a prompt with a placeholder for each of `images`, and what these are for the model.

        Images are opened and prepared in a thread. Raises InvalidValue naming the image that cannot be used,
        UnsupportedField for more of them than the model is served with, and QueueFull.
        """


class Engine(Protocol):
    """What computes tokens or vectors for one model."""

    @property
    def capabilities(self) -> frozenset[str]:
        """Of `completion`, `embedding` and `rerank`; `chat` is added where there is a chat template, `vision` where
        there is that and a `vision`."""

    @property
    def vision(self) -> Vision | None:
        """Of a model that takes images; None of any other."""

    @property
    def blind(self) -> str:
        """Why it takes none, for people; empty if it does."""

    @property
    def encoding(self) -> Encoding | None:
        """Of a model that embeds; None of any other."""

    @property
    def ctx_size(self) -> int:
        """Tokens that prompt and answer of one request may have together."""

    @property
    def occupancy(self) -> Occupancy: ...

    @property
    def measured(self) -> dict[str, int]:
        """Peak bytes by device name (`cpu`: resident bytes of this process)."""

    def generate(self, request: Generation) -> AsyncGenerator[Delta, None]:
        """Deltas of all choices, in the order they arise; ends after the last choice's `finish`.

        Closing the generator cancels: within one step the sequences are gone from the batch. A reader that is slow
        never holds up the step loop. Raises ContextExceeded, InvalidValue (a token id outside the vocabulary, a
        grammar that cannot be compiled), QueueFull before the first delta; SequenceFailed at any time.
        """

    async def embed(self, texts: Sequence[Text], *, normalize: int | None = None) -> list[list[float]]:
        """One vector for each text, in their order; its norm as llama-server's --embd-normalize, None: as configured.

        Raises ContextExceeded, InvalidValue, QueueFull, UnsupportedByModel; SequenceFailed if the model cannot compute
        one of them. Cancelling drops what is not computed yet.
        """

    async def embed_tokens(self, texts: Sequence[Text]) -> list[list[list[float]]]:
        """The model's own hidden states, a vector for each token; of models without pooling. Otherwise as `embed`."""

    async def score(self, pairs: Sequence[Text]) -> list[float]:
        """How well the two texts of each pair fit, by a cross-encoder; higher is better. Otherwise as `embed`."""

    async def adapt(self, sources: Sequence[AdapterSource], default: str = "") -> Mapping[str, str]:
        """From now on these adapters may be named and no others; what runs goes on as it began. Returns what is wrong
        with those that cannot be used, by name. Raises UnsupportedByModel where none can be."""

    async def close(self) -> None:
        """Stop the step loop; whatever runs ends with Draining."""

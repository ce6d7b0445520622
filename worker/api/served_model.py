"""The loaded model as API modules use it: engine, tokenizer, chat template and defaults."""

import asyncio
import copy
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from worker.detokenizer import TokenBytes
from worker.errors import InvalidValue, RequestError, StartError, UnsupportedByModel, UnsupportedField
from worker.interface import EncoderInput, Engine, PromptImages
from worker.prompt import chat_formats, sampling_options, tools
from worker.prompt.chat_template import ChatTemplate, Conversation
from worker.prompt.response_parser import AnswerParser, ParseOptions
from worker.prompt.text_limits import PIECE, TextBound, TextLimit, bound_of, groups, shorten
from worker.protocol.argv import ModelOptions, Profile, Serve
from worker.protocol.dialects.generation_fields import REASONING_BUDGETS
from worker.protocol.events import CAPABILITIES, Exit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Result = TypeVar("Result")
_log = logging.getLogger(__name__)
# Characters above which a text is tokenized in a thread, and tokens above which they are decoded in one. Below it,
# tokenizing takes at most about 10 ms of the event loop: a microsecond per byte is the slowest that was measured.
LONG_TEXT = 8 * 1024
# Characters and messages above which a chat is rendered in a thread. Rendering is faster than tokenizing.
LONG_CHAT, MANY_MESSAGES = 64 * 1024, 1024
# Texts that are tokenized or rendered in threads at once. It bounds their memory.
MAX_TOKENIZING = 2
MAX_REQUEST_TOKENS = 1 << 20  # tokens of all texts of one request, 40 MB of numbers
# Tokens that a call which only counts or lists them accepts. Clients use it to cut texts that are too long.
COUNTED_CONTEXTS, COUNTED_TOKENS = 2, 64 * 1024
# Characters of a chat beyond those that its tokens could have. Templates drop parts of chats, such as old reasoning.
CHAT_GRACE = 1 << 20


@dataclass(frozen=True, slots=True)
class VocabularyFacts:
    """Facts that take a pass over all tokens."""

    size: int
    fill_in_the_middle: chat_formats.FillInTheMiddle | None  # its prompt layout; None: not supported
    text_bound: TextBound


# By tokenizer. With 128,000 tokens the pass takes 0.15 s, so the fork server makes it for its workers.
_facts: WeakKeyDictionary[Any, VocabularyFacts] = WeakKeyDictionary()


def vocabulary_facts(tokenizer: "PreTrainedTokenizerBase") -> VocabularyFacts:
    """The facts of this tokenizer, from the first call with it."""
    if tokenizer not in _facts:
        vocabulary = tokenizer.get_vocab()
        layout = chat_formats.find_fill_in_the_middle(vocabulary)
        _facts[tokenizer] = VocabularyFacts(max(vocabulary.values()) + 1, layout, bound_of(tokenizer, vocabulary))
    return _facts[tokenizer]


class ServedModel:
    """The loaded model, its tokenizer and the settings of its preset, as API modules use them."""

    def __init__(self, engine: Engine, tokenizer: "PreTrainedTokenizerBase", options: Serve):
        """Raise StartError if the preset's sampling settings or chat template are invalid."""
        self.engine = engine
        self.tokenizer = tokenizer
        vocabulary = vocabulary_facts(tokenizer)
        self.vocab_size = vocabulary.size
        self.fill_in_the_middle = vocabulary.fill_in_the_middle
        self.text_bound = vocabulary.text_bound
        self._apply_options(options)
        # special tokens by their text; grammars refer to them by id
        self.special = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if _is_special(token)}
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.fingerprint = _fingerprint(options)
        self.token_bytes = TokenBytes.of(tokenizer)  # the bytes of a single token
        self._threads = ThreadPoolExecutor(MAX_TOKENIZING, "tokenizer")  # shared by all profiles
        # Copies of the tokenizer with other settings, by purpose. Shared by all profiles.
        self._copies: dict[str, PreTrainedTokenizerBase] = {}
        # warm-up: the first call changes the tokenizer's state, and later calls run in threads
        self._encode(["?"], add_special=True, parse_special=True)

    def _apply_options(self, options: Serve) -> None:
        """Apply the request-related settings of `options`."""
        self.options = options
        placeholder = self.engine.vision.placeholder if self.engine.vision is not None else ""
        self.template = ChatTemplate(
            self.tokenizer, text=options.chat_template, variables=options.chat_template_kwargs, placeholder=placeholder
        )
        checkpoint = _generation_config(Path(options.snapshot))
        self.defaults = sampling_options.defaults(options.sampling, checkpoint, vocab_size=self.vocab_size)
        # markup of reasoning and tool calls in answers; None: plain text only
        self.chat_format = chat_formats.find(self.template.source, _response_template(self.tokenizer))

    def with_profile(self, profile: Profile) -> "ServedModel":
        """Return the same model with the settings of `profile`. Raise StartError like the constructor."""
        other = copy.copy(self)
        other._apply_options(replace(self.options, **asdict(profile)))
        return other

    async def check_grammar(self) -> None:
        """Raise StartError for a grammar of the preset that cannot be compiled. Every request would fail. Warn of a
        limit of reasoning that has no effect."""
        if "completion" not in self.engine.capabilities:
            return
        grammars = [] if self.defaults.grammar is None else [self.defaults.grammar]
        if self.defaults.members.get(REASONING_BUDGETS[0], -1) != -1:
            opening = tools.opening_token(self.chat_format, self.special)
            if opening is None:
                _log.warning("reasoning-budget has no effect: no tokens of this model begin and end its reasoning")
            else:  # the first grammar takes a second, which the first request need not wait for
                grammars.append(tools.any_text(opening, is_open=True))
        try:
            for grammar in grammars:
                await self.engine.check_grammar(grammar)
        except RequestError as error:
            raise StartError(f"sampling: {error.message}", Exit.USAGE) from None

    @property
    def capabilities(self) -> list[str]:
        """Those of CAPABILITIES that the model has."""
        can = self.engine.capabilities
        chats = "completion" in can and self.template.exists
        has = {"chat": chats, "tools": chats and self.template.mentions("tools"), "vision": chats and "vision" in can}
        return [name for name in CAPABILITIES if has.get(name, name in can)]

    def require(self, capability: str) -> None:
        """Raise UnsupportedByModel, naming the calls that the model supports, unless it has `capability`."""
        if capability not in self.engine.capabilities:
            offered = {
                "completion": "POST /v1/chat/completions or /v1/completions",
                "embedding": "POST /v1/embeddings",
                "rerank": "POST /v1/rerank",
            }
            instead = " and ".join(path for name, path in offered.items() if name in self.engine.capabilities)
            abilities = {"completion": "generate text", "embedding": "compute embeddings", "rerank": "rerank documents"}
            raise UnsupportedByModel(
                f"this model does not {abilities[capability]}; use {instead or 'the tokenizer calls'}"
            )

    @property
    def max_prompt(self) -> int:
        """Maximum tokens of a prompt: one position is reserved for the answer."""
        return min(self.options.max_input_tokens or self.engine.ctx_size, self.engine.ctx_size - 1)

    @property
    def max_text(self) -> int:
        """Maximum tokens of an encoder's input, which needs no position for an answer."""
        return min(self.options.max_input_tokens or self.engine.ctx_size, self.engine.ctx_size)

    def text_limit(self, param: str, *, truncate: int | None = None) -> TextLimit:
        """The limit of an encoder's input in field `param`.

        `truncate`: the tokens of a longer text that are kept; None: it is rejected.
        """
        if truncate is not None:
            return TextLimit(min(truncate, self.max_text), param, keep="start")
        return TextLimit(
            self.max_text, param, setting="max-input-tokens" if self.max_text < self.engine.ctx_size else ""
        )

    def check_prompt(self, prompt: Sequence[int], *, param: str) -> None:
        """Raise ContextExceeded if the prompt leaves no room for an answer."""
        if len(prompt) > self.max_prompt:
            raise self.prompt_limit(param).error(len(prompt), is_exact=True)

    def prompt_limit(self, param: str) -> TextLimit:
        """The limit of a prompt in field `param`."""
        is_full = self.max_prompt == self.engine.ctx_size - 1
        if is_full:
            return TextLimit(self.max_prompt, param, shown=self.engine.ctx_size)
        return TextLimit(self.max_prompt, param, setting="max-input-tokens")

    def count_limit(self, param: str) -> TextLimit:
        """The limit of a text in field `param` that is only tokenized."""
        return TextLimit(max(COUNTED_CONTEXTS * self.engine.ctx_size, COUNTED_TOKENS), param)

    async def encode(
        self, texts: Sequence[str], limit: TextLimit, *, add_special: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """Return the token ids of each text. Long texts are tokenized in a thread so that the event loop is not
        blocked.

        A text that cannot have few enough tokens for `limit` is rejected before it is tokenized, or cut. A result may
        still have more tokens than that. Raise ContextExceeded, and InvalidValue for more than MAX_REQUEST_TOKENS
        tokens.

        `add_special`: add the tokens that the tokenizer puts around a text. `parse_special`: read `<s>` as the
        special token instead of as three characters.
        """
        if not texts:
            return []
        texts = [self.text_bound.fit(text, limit) for text in texts]
        is_quick = parse_special or "literal" in self._copies
        if is_quick and sum(map(len, texts)) <= LONG_TEXT:
            return self._encode(texts, add_special=add_special, parse_special=parse_special)

        def encode() -> list[list[int]]:
            rows: list[list[int]] = []
            total = 0
            for group in groups(shorten(text, limit, self._count) for text in texts):
                encoded = self._encode(group, add_special=add_special, parse_special=parse_special)
                total = self._add_tokens(total, encoded, limit)
                rows += encoded
            return rows

        return await self.in_thread(encode)

    async def in_thread(self, function: Callable[[], Result]) -> Result:
        """Run `function` in one of few threads. It goes on when its request is cancelled, and keeps its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _count(self, text: str) -> int:
        """The number of tokens of `text`, without special tokens around it."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return len(self._encode([text], add_special=False, parse_special=True)[0])
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)  # a third of the time of `encode`
        return len(encoding)

    def _add_tokens(self, total: int, rows: Sequence[Sequence[int]], limit: TextLimit) -> int:
        """Return `total` and the tokens of `rows`. Raise InvalidValue if that is too much for one request, and
        ContextExceeded if a single one of them is too long."""
        total += sum(map(len, rows))
        if total > max(MAX_REQUEST_TOKENS, COUNTED_CONTEXTS * self.engine.ctx_size):
            longest = max(map(len, rows))
            if longest > limit.tokens and not limit.keep:
                raise limit.error(longest)
            raise InvalidValue(
                f"{limit.param} has more than {MAX_REQUEST_TOKENS} tokens in all; send its texts in several requests",
                param=limit.param,
            )
        return total

    def encode_piece(self, text: str) -> list[int]:
        """Return the token ids of a short text, without special tokens around it."""
        return self._encode([text], add_special=False, parse_special=True)[0]

    async def encode_cut(self, texts: Sequence[str], limit: TextLimit) -> list[list[int]]:
        """Like `encode`, with each text truncated at its end to the tokens of `limit`, including special tokens."""
        if not texts:
            return []
        texts = [self.text_bound.fit(text, limit) for text in texts]

        def encode() -> list[list[int]]:
            shorter = (shorten(text, limit, self._count) for text in texts)
            return [list(ids) for group in groups(shorter) for ids in self._truncated(limit, group)["input_ids"]]

        return await self.in_thread(encode)

    async def first_tokens(self, texts: Sequence[str], count: int, param: str) -> list[str]:
        """Return the beginning of each text that its first `count` tokens stand for. Special tokens do not count.
        `param`: the field of the texts."""
        limit = TextLimit(count, param, keep="start")
        backend = getattr(self.tokenizer, "backend_tokenizer", None)

        def cut(text: str) -> str:
            text = shorten(self.text_bound.fit(text, limit), limit, self._count)
            if backend is None:
                ids = self._encode([text], add_special=False, parse_special=True)[0]
                return text if len(ids) <= count else self.decode(ids[:count])
            # The text itself and not its tokens decoded: these may be in lower case, or end within a character.
            ends = [end for _, end in backend.encode(text, add_special_tokens=False).offsets]
            return text if len(ends) <= count else text[: ends[count - 1]]

        return await self.in_thread(lambda: [cut(text) for text in texts])

    async def encode_pairs(self, first: str, seconds: Sequence[str], limit: TextLimit) -> list[EncoderInput]:
        """Join `first` with each of `seconds` as the tokenizer joins pairs. If `limit` allows a cut, remove tokens
        beyond it from the end of the longer text of a pair. Raise the errors of `encode`."""
        first = self.text_bound.fit(first, limit)
        seconds = [self.text_bound.fit(second, limit) for second in seconds]
        total = 0

        def encode(group: list[str]) -> list[EncoderInput]:
            nonlocal total
            pairs = ([first] * len(group), group)
            encoded: Any = self._truncated(limit, *pairs) if limit.keep else self.tokenizer(*pairs, verbose=False)
            total = self._add_tokens(total, encoded["input_ids"], limit)
            kinds = encoded.get("token_type_ids") or [()] * len(group)
            return [EncoderInput(ids, kind) for ids, kind in zip(encoded["input_ids"], kinds, strict=True)]

        if not limit.keep and len(first) * len(seconds) + sum(map(len, seconds)) <= LONG_TEXT:
            return encode(seconds)

        def encode_all() -> list[EncoderInput]:
            nonlocal first
            first = shorten(first, limit, self._count)
            shorter = (shorten(second, limit, self._count) for second in seconds)
            # The first text counts with each of the others, so groups of a constant number would not bound the memory.
            size = max(1, PIECE // (len(first) + 1))
            return [
                pair
                for group in groups(shorter)
                for begin in range(0, len(group), size)
                for pair in encode(group[begin : begin + size])
            ]

        return await self.in_thread(encode_all)

    async def encode_around(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[str | None], suffix: str, limit: TextLimit
    ) -> list[list[int]]:
        """Return each prompt with `suffix` in the model's fill-in-the-middle layout.

        `texts` are the prompts as strings, None for a prompt that was sent as token ids. Raise UnsupportedField if
        the model has no fill-in-the-middle tokens.
        """
        if self.fill_in_the_middle is None:
            raise UnsupportedField(
                "suffix is not supported: this model has no fill-in-the-middle tokens; leave it out", param="suffix"
            )
        [after] = await self.encode([suffix], replace(limit, param="suffix"), add_special=False)
        plain = iter(await self.encode([text for text in texts if text is not None], limit, add_special=False))
        before = [prompt if text is None else next(plain) for prompt, text in zip(prompts, texts, strict=True)]
        return [self.start + self.fill_in_the_middle.around(prefix, after) for prefix in before]

    @property
    def start(self) -> list[int]:
        """The token that the tokenizer puts at the beginning of every text, if it does."""
        begins = self._encode(["?"], add_special=True, parse_special=True)[0][:1]
        return begins if begins == [self.tokenizer.bos_token_id] else []

    def without_start(self, prompt: str) -> str:
        """Return a rendered `prompt` without a beginning of text that the tokenizer would add a second time."""
        return prompt.removeprefix(str(self.tokenizer.bos_token)) if self.start else prompt

    async def encode_pieces(
        self, pieces: Sequence[Any], limit: TextLimit, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of one text given as pieces: ids are kept, strings are tokenized.

        `add_special` applies to a string at the beginning only. Raise InvalidValue, and the errors of `encode`.
        """
        param = limit.param
        if not limit.keep and len(pieces) > limit.tokens:
            raise limit.error(len(pieces), is_exact=True)
        for piece in pieces:
            if not (isinstance(piece, str) or (type(piece) is int and 0 <= piece < self.vocab_size)):
                # LangChain's embeddings send token ids of OpenAI's tokenizer by default.
                raise InvalidValue(
                    f"{param} must hold token ids between 0 and {self.vocab_size - 1}, the vocabulary of this model; "
                    "send text instead of token ids of another model",
                    param=param,
                )
        begins = bool(pieces) and isinstance(pieces[0], str)
        first = [pieces[0]] if begins else []
        rest = [piece for piece in pieces[begins:] if isinstance(piece, str)]
        encoded = await self.encode(first, limit, add_special=add_special, parse_special=parse_special)
        encoded += await self.encode(rest, limit, add_special=False, parse_special=parse_special)
        texts = iter(encoded)
        return [id for piece in pieces for id in (next(texts) if isinstance(piece, str) else [piece])]

    def start_of_text(self, name: str) -> list[int]:
        """Return the tokens that stand for an empty text. Raise InvalidValue naming field `name` if the model has no
        such token."""
        if isinstance(self.tokenizer.bos_token_id, int):
            return [self.tokenizer.bos_token_id]
        raise InvalidValue(f"{name} must not be empty: this model has no beginning-of-text token", param=name)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, including special tokens, without cleaning up spaces."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    async def decode_all(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each of `rows`. Many tokens are decoded in a thread."""
        if sum(map(len, rows)) <= LONG_TEXT:
            return [self.decode(tokens) for tokens in rows]
        return await self.in_thread(lambda: [self.decode(tokens) for tokens in rows])

    async def read(self, conversation: Conversation, limit: TextLimit) -> tuple[str, list[int], PromptImages | None]:
        """Return the chat as one prompt: its text (without that of prior tokens), its tokens, and its images.

        Raise InvalidValue, the errors of `encode`, and those of `worker.interface.ImageProcessor.read`.
        """
        prompt = await self.render(conversation, limit)
        vision = self.engine.vision
        images = conversation.images if vision is not None else []  # of other models they were rejected
        if vision is None or not images:
            [tokens] = await self.encode([prompt], limit, add_special=False)
            return prompt, [*conversation.before, *tokens], None
        self.text_bound.fit(prompt, replace(limit, keep=""))
        return prompt, *await vision.read(prompt, images)

    async def render(self, conversation: Conversation, limit: TextLimit) -> str:
        """Render the chat with the template, as a whole or as the continuation of prior tokens. Long chats are rendered
        in a thread. Raise ContextExceeded for a chat that is too long to be rendered.
        """
        render = self.template.render_on if conversation.before else self.template.render

        def render_bounded() -> str:
            size = conversation.size
            if size > self.text_bound.most_bytes(limit.tokens) + CHAT_GRACE:
                raise limit.error(size // self.text_bound.bytes_per_token)
            return render(conversation)

        is_short = len(conversation.messages) <= MANY_MESSAGES and conversation.size <= LONG_CHAT
        return render_bounded() if is_short else await self.in_thread(render_bounded)

    def _encode(self, texts: Sequence[str], *, add_special: bool, parse_special: bool) -> list[list[int]]:
        # reading special tokens as text is tokenizer state, and other threads use the tokenizer
        tokenizer = self.tokenizer if parse_special else self._copy("literal")
        encoded = tokenizer(
            list(texts),
            add_special_tokens=add_special,
            return_attention_mask=False,
            return_token_type_ids=False,
            split_special_tokens=not parse_special,
            verbose=False,  # no warning about long texts: lengths are checked here
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _truncated(self, limit: TextLimit, *texts: list[str]) -> Any:
        """Tokenize texts, or pairs of texts, with truncation. Raise InvalidValue if `limit` has no room for a text."""
        least = self.tokenizer.num_special_tokens_to_add(pair=len(texts) > 1) + len(texts)
        if limit.tokens < least:
            raise InvalidValue(
                f"truncate_prompt_tokens must be at least {least} for this model", param="truncate_prompt_tokens"
            )
        # the maximum length is tokenizer state, too
        return self._copy("truncating")(*texts, truncation="longest_first", max_length=limit.tokens, verbose=False)

    def _copy(self, use: str) -> "PreTrainedTokenizerBase":
        """Return the copy of the tokenizer for one purpose."""
        if use not in self._copies:
            self._copies[use] = copy.deepcopy(self.tokenizer)
        return self._copies[use]


def _is_special(token: Any) -> bool:
    """Match llguidance (toktrie_hf_tokenizers 1.9): an added token spelled `<...>` is special to it, even if the
    tokenizer does not mark it as special (Qwen's `<tool_call>` and `<think>` are not marked)."""
    return bool(token.special) or (token.content.startswith("<") and token.content.endswith(">"))


def _response_template(tokenizer: "PreTrainedTokenizerBase") -> Any:
    """Return the tokenizer's response template, which describes how to parse answers; None if it has none or an invalid
    one."""
    given = getattr(tokenizer, "response_template", None)
    if given is None:
        return None
    called = [{"type": "function", "function": {"name": "?"}}]
    # imported late: few tokenizers have one
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        load_response_template(given)
        AnswerParser(ParseOptions(chat_format=chat_formats.find("", given), tools=called)).push("?")
    except Exception as error:  # noqa: BLE001 - the template comes from a model's file; the library raises various errors
        _log.warning("the tokenizer's response template cannot be used: %s", error)
        return None
    return given


def _generation_config(snapshot: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((snapshot / "generation_config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _fingerprint(options: Serve) -> str:
    """Return a digest that changes whenever the same seed may give a different text."""
    settings = {name: str(getattr(options, name)) for name in ModelOptions.__dataclass_fields__}
    digest = hashlib.blake2s(json.dumps(settings, sort_keys=True).encode(), digest_size=5).hexdigest()
    return f"b0-{digest}"  # llama-server's format, which its clients parse

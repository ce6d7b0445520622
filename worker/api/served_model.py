"""The loaded model as API modules use it: engine, tokenizer, chat template and defaults."""

import asyncio
import copy
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.detokenizer import TokenBytes
from worker.errors import ContextExceeded, InvalidValue, UnsupportedByModel, UnsupportedField
from worker.interface import EncoderInput, Engine, PromptImages
from worker.prompt import chat_formats, sampling_options
from worker.prompt.chat_template import ChatTemplate, Conversation
from worker.prompt.response_parser import AnswerParser, ParseOptions
from worker.protocol.argv import ModelOptions, Profile, Serve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
# Characters above which a text is tokenized in a thread. Below it, tokenizing takes about 10 ms of the event loop.
LONG_TEXT = 64 * 1024


class ServedModel:
    """The loaded model, its tokenizer and the settings of its preset, as API modules use them."""

    def __init__(self, engine: Engine, tokenizer: "PreTrainedTokenizerBase", options: Serve):
        """Raise StartError if the preset's sampling settings or chat template are invalid."""
        self.engine = engine
        self.tokenizer = tokenizer
        self._apply_options(options)
        # prompt layout for fill-in-the-middle; None: not supported
        self.fill_in_the_middle = chat_formats.find_fill_in_the_middle(tokenizer.get_vocab())
        # special tokens by their text; grammars refer to them by id
        self.special = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if _is_special(token)}
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.fingerprint = _fingerprint(options)
        self.token_bytes = _token_bytes(tokenizer)  # the bytes of a single token
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
        self.defaults = sampling_options.defaults(options.sampling, _generation_config(Path(options.snapshot)))
        # markup of reasoning and tool calls in answers; None: plain text only
        self.chat_format = chat_formats.find(self.template.source, _response_template(self.tokenizer))

    def under(self, profile: Profile) -> "ServedModel":
        """Return the same model with the settings of `profile`. Raise StartError like the constructor."""
        other = copy.copy(self)
        other._apply_options(replace(self.options, **asdict(profile)))
        return other

    @property
    def capabilities(self) -> list[str]:
        """Subset of chat, completion, tools, vision, embedding and rerank."""
        can = self.engine.capabilities
        chats = "completion" in can and self.template.exists
        has = {"chat": chats, "tools": chats and self.template.mentions("tools"), "vision": chats and "vision" in can}
        every = ("chat", "completion", "tools", "vision", "embedding", "rerank")
        return [name for name in every if has.get(name, name in can)]

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

    def check_prompt(self, prompt: Sequence[int], *, param: str) -> None:
        """Raise ContextExceeded if the prompt leaves no room for an answer."""
        if len(prompt) > self.max_prompt:
            is_full = self.max_prompt == self.engine.ctx_size - 1
            raise ContextExceeded(len(prompt), self.engine.ctx_size if is_full else self.max_prompt, param=param)

    async def encode(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """Return the token ids of each text. Long texts are tokenized in a thread so that the event loop is not
        blocked.

        `add_special`: add the tokens that the tokenizer puts around a text. `parse_special`: read `<s>` as the
        special token instead of as three characters.
        """
        if not texts:
            return []
        is_quick = parse_special or "literal" in self._copies
        if is_quick and sum(map(len, texts)) <= LONG_TEXT:
            return self._encode(texts, add_special=add_special, parse_special=parse_special)
        return await asyncio.to_thread(self._encode, texts, add_special=add_special, parse_special=parse_special)

    def encode_piece(self, text: str) -> list[int]:
        """Return the token ids of a short text, without special tokens around it."""
        return self._encode([text], add_special=False, parse_special=True)[0]

    async def encode_cut(self, texts: Sequence[str]) -> list[list[int]]:
        """Like `encode`, with each text truncated at its end to `max_text` tokens including special tokens."""
        if not texts:
            return []
        return await asyncio.to_thread(lambda: [list(ids) for ids in self._truncated(list(texts))["input_ids"]])

    async def encode_pairs(self, first: str, seconds: Sequence[str], *, truncate: bool = False) -> list[EncoderInput]:
        """Join `first` with each of `seconds` as the tokenizer joins pairs. `truncate`: remove tokens beyond `max_text`
        from the end of the longer text of a pair.
        """

        def encode() -> list[EncoderInput]:
            pairs = ([first] * len(seconds), list(seconds))
            encoded: Any = self._truncated(*pairs) if truncate else self.tokenizer(*pairs, verbose=False)
            kinds = encoded.get("token_type_ids") or [()] * len(seconds)
            return [EncoderInput(ids, kind) for ids, kind in zip(encoded["input_ids"], kinds, strict=True)]

        is_quick = not truncate and len(first) * len(seconds) + sum(map(len, seconds)) <= LONG_TEXT
        return encode() if is_quick else await asyncio.to_thread(encode)

    async def encode_around(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[str | None], suffix: str
    ) -> list[list[int]]:
        """Return each prompt with `suffix` in the model's fill-in-the-middle layout.

        `texts` are the prompts as strings, None for a prompt that was sent as token ids. Raise UnsupportedField if
        the model has no fill-in-the-middle tokens.
        """
        if self.fill_in_the_middle is None:
            raise UnsupportedField(
                "suffix is not supported: this model has no fill-in-the-middle tokens; leave it out", param="suffix"
            )
        [after] = await self.encode([suffix], add_special=False)
        plain = iter(await self.encode([text for text in texts if text is not None], add_special=False))
        before = [prompt if text is None else next(plain) for prompt, text in zip(prompts, texts, strict=True)]
        return [self.start + self.fill_in_the_middle.around(prefix, after) for prefix in before]

    @property
    def start(self) -> list[int]:
        """The token that the tokenizer puts at the beginning of every text, if it does."""
        begins = self._encode(["?"], add_special=True, parse_special=True)[0]
        return begins[:1] if begins[0] == self.tokenizer.bos_token_id else []

    async def encode_pieces(
        self, pieces: Sequence[Any], *, param: str, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of one text given as pieces: ids are kept, strings are tokenized.

        `add_special` applies to a string at the beginning only. Raise InvalidValue naming the field `param`.
        """
        for piece in pieces:
            if not (isinstance(piece, str) or (type(piece) is int and 0 <= piece < self.vocab_size)):
                raise InvalidValue(f"{param} must hold token ids between 0 and {self.vocab_size - 1}", param=param)
        begins = bool(pieces) and isinstance(pieces[0], str)
        first = [pieces[0]] if begins else []
        rest = [piece for piece in pieces[begins:] if isinstance(piece, str)]
        encoded = await self.encode(first, add_special=add_special, parse_special=parse_special)
        encoded += await self.encode(rest, add_special=False, parse_special=parse_special)
        texts = iter(encoded)
        return [id for piece in pieces for id in (next(texts) if isinstance(piece, str) else [piece])]

    def start_of_text(self, name: str) -> list[int]:
        """Return the tokens that stand for an empty text. Raise InvalidValue naming field `name` if the model has no
        such token.
        """
        if isinstance(self.tokenizer.bos_token_id, int):
            return [self.tokenizer.bos_token_id]
        raise InvalidValue(f"{name} must not be empty: this model has no beginning-of-text token", param=name)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, including special tokens, without cleaning up spaces."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    async def read(self, conversation: Conversation) -> tuple[str, list[int], PromptImages | None]:
        """Return the chat as one prompt: its text (without that of prior tokens), its tokens, and its images.

        Raise InvalidValue, and the errors of `worker.interface.ImageProcessor.read`.
        """
        prompt = await self.render(conversation)
        images = conversation.images
        if not images:
            [tokens] = await self.encode([prompt], add_special=False)
            return prompt, [*conversation.before, *tokens], None
        assert self.engine.vision is not None, "images were rejected earlier"
        return prompt, *await self.engine.vision.read(prompt, images)

    async def render(self, conversation: Conversation) -> str:
        """Render the chat with the template, as a whole or as the continuation of prior tokens. Long chats are rendered
        in a thread.
        """
        render = self.template.render_on if conversation.before else self.template.render
        if conversation.size <= LONG_TEXT:
            return render(conversation)
        return await asyncio.to_thread(render, conversation)

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

    def _truncated(self, *texts: list[str]) -> Any:
        """Tokenize with truncation. The maximum length is tokenizer state, too."""
        return self._copy("truncating")(*texts, truncation="longest_first", max_length=self.max_text, verbose=False)

    def _copy(self, use: str) -> "PreTrainedTokenizerBase":
        """Return the copy of the tokenizer for one purpose."""
        if use not in self._copies:
            self._copies[use] = copy.deepcopy(self.tokenizer)
        return self._copies[use]


def _is_special(token: Any) -> bool:
    """Match llguidance (toktrie_hf_tokenizers 1.9): an added token spelled `<...>` is special to it, even if the
    tokenizer does not mark it as special (Qwen's `<tool_call>` and `<think>` are not marked).
    """
    return bool(token.special) or (token.content.startswith("<") and token.content.endswith(">"))


def _token_bytes(tokenizer: "PreTrainedTokenizerBase") -> TokenBytes:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    added = {id: token.content for id, token in tokenizer.added_tokens_decoder.items()}
    spell: Any = tokenizer.convert_ids_to_tokens  # the type hint of the overload for a single id is missing
    return TokenBytes(decoder.__getstate__().decode() if decoder else "", spell, added)


def _response_template(tokenizer: "PreTrainedTokenizerBase") -> Any:
    """Return the tokenizer's response template, which describes how to parse answers; None if it has none or an invalid
    one.
    """
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

"""What every face is given, a Model, and what it makes of a request for tokens, a Call; one module per API."""

import asyncio
import copy
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from worker.detokenizer import TokenBytes
from worker.errors import ContextExceeded, InvalidValue, UnsupportedByModel, UnsupportedField
from worker.interface import Delta, Engine, Generation, Pictures, Text
from worker.prompt import chat_formats, fill_in_the_middle, sampling_options
from worker.prompt.body_reader import Fields, Json
from worker.prompt.chat_template import Conversation, Template
from worker.prompt.response_parser import Manner, Reading
from worker.protocol.argv import ModelOptions, Profile, Serve
from worker.protocol.dialects import Dialect
from worker.protocol.dialects.generation_fields import MAX_TEXTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
LONG_TEXT = 64 * 1024
"""Characters from which a text is tokenized in a thread: about 10 ms of the loop's time below that."""
DEFAULT_PING_INTERVAL = 15.0


class Model:
    """The loaded model as faces see it."""

    def __init__(self, engine: Engine, tokenizer: "PreTrainedTokenizerBase", options: Serve):
        """Raises StartError if the preset's sampling or chat template cannot be used."""
        self.engine = engine
        self.tokenizer = tokenizer
        self._answer_as(options)
        self.filling = fill_in_the_middle.find(tokenizer.get_vocab())
        """How a prompt with a suffix is laid out; None: this model fills in nothing."""
        self.special = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if _is_mark(token)}
        """Tokens by their text that no grammar writes letter by letter."""
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.fingerprint = _fingerprint(options)
        self.token_bytes = _token_bytes(tokenizer)
        """The bytes of one token alone."""
        self._copies: dict[str, PreTrainedTokenizerBase] = {}
        """Tokenizers in another state, by what they are for."""
        self._encode(["?"], add_special=True, parse_special=True)  # settles what a first call changes in the tokenizer

    def _answer_as(self, options: Serve) -> None:
        """Take over what `options` say of requests."""
        self.options = options
        placeholder = self.engine.vision.placeholder if self.engine.vision is not None else ""
        self.template = Template(
            self.tokenizer, text=options.chat_template, variables=options.chat_template_kwargs, placeholder=placeholder
        )
        self.defaults = sampling_options.defaults(options.sampling, _generation_config(Path(options.snapshot)))
        self.family = chat_formats.find(self.template.source, _response_template(self.tokenizer))
        """How its answers are to be read; None: as they stand."""

    def under(self, profile: Profile) -> "Model":
        """The same model, for requests under `profile`. Raises StartError like the model itself."""
        other = copy.copy(self)
        other._answer_as(replace(self.options, **asdict(profile)))
        return other

    @property
    def capabilities(self) -> list[str]:
        """Of chat, completion, tools, vision, embedding and rerank."""
        can = self.engine.capabilities
        chats = "completion" in can and self.template.exists
        has = {"chat": chats, "tools": chats and self.template.mentions("tools"), "vision": chats and "vision" in can}
        every = ("chat", "completion", "tools", "vision", "embedding", "rerank")
        return [name for name in every if has.get(name, name in can)]

    def require(self, capability: str) -> None:
        """Raise UnsupportedByModel, naming what the model can do instead, unless it has `capability`."""
        if capability not in self.engine.capabilities:
            offered = {
                "completion": "POST /v1/chat/completions or /v1/completions",
                "embedding": "POST /v1/embeddings",
                "rerank": "POST /v1/rerank",
            }
            instead = " and ".join(path for name, path in offered.items() if name in self.engine.capabilities)
            wanted = {"completion": "generate text", "embedding": "compute embeddings", "rerank": "rerank documents"}
            raise UnsupportedByModel(
                f"this model does not {wanted[capability]}; it answers {instead or 'tokenizer calls only'}"
            )

    @property
    def max_prompt(self) -> int:
        """Tokens; one place is left for the answer."""
        return min(self.options.max_input_tokens or self.engine.ctx_size, self.engine.ctx_size - 1)

    @property
    def max_text(self) -> int:
        """Tokens of one text of an encoder, which needs no place for an answer."""
        return min(self.options.max_input_tokens or self.engine.ctx_size, self.engine.ctx_size)

    def check_prompt(self, prompt: Sequence[int], *, param: str) -> None:
        """Raise ContextExceeded if the prompt leaves no room for an answer."""
        if len(prompt) > self.max_prompt:
            is_full = self.max_prompt == self.engine.ctx_size - 1
            raise ContextExceeded(len(prompt), self.engine.ctx_size if is_full else self.max_prompt, param=param)

    async def encode(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """Token ids of each text; long ones are made in a thread, so that the loop goes on.

        `add_special`: with the tokens that the tokenizer puts around a text; `parse_special`: `<s>` in a text is the
        token of that name, else just three characters.
        """
        if not texts:
            return []
        is_quick = parse_special or "literal" in self._copies
        if is_quick and sum(map(len, texts)) <= LONG_TEXT:
            return self._encode(texts, add_special=add_special, parse_special=parse_special)
        return await asyncio.to_thread(self._encode, texts, add_special=add_special, parse_special=parse_special)

    def encode_piece(self, text: str) -> list[int]:
        """Token ids of a few characters, with nothing around them."""
        return self._encode([text], add_special=False, parse_special=True)[0]

    async def encode_cut(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, each text cut at its end to `max_text` tokens, what the tokenizer puts around it included."""
        if not texts:
            return []
        return await asyncio.to_thread(lambda: [list(ids) for ids in self._cut(list(texts))["input_ids"]])

    async def encode_pairs(self, first: str, seconds: Sequence[str], *, cuts: bool = False) -> list[Text]:
        """One text with each of several, joined as the tokenizer joins pairs. `cuts`: tokens over `max_text` are taken
        from the longer of the two, from its end."""

        def encode() -> list[Text]:
            pairs = ([first] * len(seconds), list(seconds))
            encoded: Any = self._cut(*pairs) if cuts else self.tokenizer(*pairs, verbose=False)
            kinds = encoded.get("token_type_ids") or [()] * len(seconds)
            return [Text(ids, kind) for ids, kind in zip(encoded["input_ids"], kinds, strict=True)]

        is_quick = not cuts and len(first) * len(seconds) + sum(map(len, seconds)) <= LONG_TEXT
        return encode() if is_quick else await asyncio.to_thread(encode)

    async def encode_around(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[str | None], suffix: str
    ) -> list[list[int]]:
        """Each prompt, and the text that follows the gap behind it, as the model wants them to fill in the middle.

        `texts` are those of the prompts that are texts. Raises UnsupportedField for a model without tokens for that.
        """
        if self.filling is None:
            raise UnsupportedField(
                "suffix is not supported: this model has no tokens to fill in the middle; leave it out", param="suffix"
            )
        [after] = await self.encode([suffix], add_special=False)
        plain = iter(await self.encode([text for text in texts if text is not None], add_special=False))
        before = [prompt if text is None else next(plain) for prompt, text in zip(prompts, texts, strict=True)]
        return [self.start + self.filling.around(prefix, after) for prefix in before]

    @property
    def start(self) -> list[int]:
        """The token with which the tokenizer begins every text, if it does."""
        begins = self._encode(["?"], add_special=True, parse_special=True)[0]
        return begins[:1] if begins[0] == self.tokenizer.bos_token_id else []

    async def encode_pieces(
        self, pieces: Sequence[Any], *, param: str, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of one text that lies in pieces: ids as they are, strings as tokens. What the tokenizer puts around
        a text (`add_special`) it puts around a string that begins one. Raises InvalidValue naming the field `param`."""
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
        """What stands for an empty text in field `name`; raises InvalidValue if the model has nothing for that."""
        if isinstance(self.tokenizer.bos_token_id, int):
            return [self.tokenizer.bos_token_id]
        raise InvalidValue(f"{name} must not be empty: this model has no token that begins a text", param=name)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, special ones included, spaces as they are."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    async def read(self, conversation: Conversation) -> tuple[str, list[int], Pictures | None]:
        """The chat as one prompt: its text, without that of tokens before it, its tokens, and the images that some of
        those stand for.

        Raises InvalidValue, and what `worker.interface.Vision` says of images.
        """
        prompt = await self.render(conversation)
        images = conversation.images
        if not images:
            [tokens] = await self.encode([prompt], add_special=False)
            return prompt, [*conversation.before, *tokens], None
        assert self.engine.vision is not None, "images have been refused"
        return prompt, *await self.engine.vision.read(prompt, images)

    async def render(self, conversation: Conversation) -> str:
        """The chat as one prompt, or as what follows the tokens before it; a long one is made in a thread."""
        render = self.template.render_on if conversation.before else self.template.render
        if conversation.size <= LONG_TEXT:
            return render(conversation)
        return await asyncio.to_thread(render, conversation)

    def _encode(self, texts: Sequence[str], *, add_special: bool, parse_special: bool) -> list[list[int]]:
        tokenizer = self.tokenizer if parse_special else self._literal_tokenizer()
        encoded = tokenizer(
            list(texts),
            add_special_tokens=add_special,
            return_attention_mask=False,
            return_token_type_ids=False,
            split_special_tokens=not parse_special,
            verbose=False,  # no warning about long texts: we check lengths ourselves
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _literal_tokenizer(self) -> "PreTrainedTokenizerBase":
        """A copy that reads special tokens as text: the switch is a state of the tokenizer, which other threads use."""
        return self._copy("literal")

    def _cut(self, *texts: list[str]) -> Any:
        """With a copy for this alone: how long texts may be is a state of the tokenizer, too."""
        return self._copy("cutting")(*texts, truncation="longest_first", max_length=self.max_text, verbose=False)

    def _copy(self, use: str) -> "PreTrainedTokenizerBase":
        """One for all profiles."""
        if use not in self._copies:
            self._copies[use] = copy.deepcopy(self.tokenizer)
        return self._copies[use]


class Reply(Protocol):
    """How one dialect puts an answer. Deltas come with the number of their generation in the call."""

    def whole(self, deltas: Iterable[tuple[int, Delta]]) -> Any:
        """The body of an answer in one piece."""

    def frames(self, number: int, delta: Delta) -> bytes:
        """The whole frames that `delta` adds to a stream; perhaps none."""

    def closing(self) -> bytes:
        """The frames after the last delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request for tokens, understood."""

    generations: tuple[Generation, ...]
    reply: Reply
    stream: bool = False
    ping_interval: float | None = DEFAULT_PING_INTERVAL
    """Seconds of silence in a stream before a comment; None: never."""
    ignored: tuple[str, ...] = ()
    """Names of fields that made no difference."""
    keep_alive: float | None = None
    """As `Request` has it."""
    speaks: Dialect | None = None
    """In whose frames it streams, where those are not its path's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """An answer that needed no tokens generated: its body, what was ignored, and the tokens it read."""

    body: Any
    """JSON: an object, or where a dialect wants it an array."""
    ignored: tuple[str, ...] = ()
    prompt_tokens: int = 0
    keep_alive: float | None = None
    """As `Request` has it."""
    stream: bool = False
    """It is the one line of a stream, for a client that waits for one."""


async def read_texts(
    fields: Fields,
    name: str,
    model: Model,
    *,
    prefix: str = "",
    longest: int | None = None,
    add_special: bool = True,
) -> tuple[list[list[int]], list[str | None]]:
    """Token ids of each text in field `name`, and the texts, where they were texts.

    The field holds a text, or several; each is a string, token ids, pieces of both, one behind another, or an object
    that llama-server takes for one of these. `prefix` stands before each string, but not before token ids;
    `add_special`: with what the tokenizer puts around a text. Raises InvalidValue or UnsupportedField naming the field,
    and ContextExceeded for more than `longest` (None: the context) token ids.
    """
    value = fields.take(name)
    items = value if isinstance(value, list) and value and not any(map(_is_number, value)) else [value]
    if len(items) > MAX_TEXTS:
        raise InvalidValue(f"{name} must have at most {MAX_TEXTS} entries", param=name)
    items = [_without_media(item, name) if isinstance(item, dict) else item for item in items]
    for item in items:
        if not (isinstance(item, str) or (isinstance(item, list) and item)):
            raise InvalidValue(f"{name} must be a string, an array of strings, token ids or arrays of them", param=name)
        if isinstance(item, list) and len(item) > (longest or model.engine.ctx_size):  # before each is looked at
            raise ContextExceeded(len(item), model.engine.ctx_size, param=name)
    strings = [item for item in items if isinstance(item, str)]
    encoded = iter(
        await model.encode([prefix + text for text in strings] if prefix else strings, add_special=add_special)
    )
    prompts = [
        next(encoded) if isinstance(item, str) else await _ids(item, name, model, add_special=add_special)
        for item in items
    ]
    if not all(prompts):
        prompts = [prompt or model.start_of_text(name) for prompt in prompts]
    return prompts, [item if isinstance(item, str) else None for item in items]


def _without_media(item: Json, name: str) -> Any:
    """What an object holds that may have media beside it: `prompt_string`, or the text of `content`, which is one or
    has parts as of a message. Raises UnsupportedField for media."""
    text = item.get("prompt_string")
    content = item.get("content") if text is None else None
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if item.get("multimodal_data") or any(part.get("type") != "text" for part in parts):
        raise UnsupportedField(
            f"{name} may hold texts only; a model that takes images has them in messages of POST /v1/chat/completions",
            param=name,
        )
    texts = [text for part in parts if isinstance(text := part.get("text"), str)]
    if parts and len(texts) == len(content or ()):
        return "".join(texts)
    return content if isinstance(content, str) else text


async def _ids(pieces: list[Any], name: str, model: Model, *, add_special: bool) -> list[int]:
    if all(type(piece) is int and 0 <= piece < model.vocab_size for piece in pieces):
        return pieces
    return await model.encode_pieces(pieces, param=name, add_special=add_special)


def read_ping_interval(fields: Fields) -> float | None:
    """Seconds of `sse_ping_interval`; -1 is off."""
    interval = fields.number("sse_ping_interval")
    if interval is None:
        return DEFAULT_PING_INTERVAL
    if interval != -1 and interval < 0.01:
        raise InvalidValue("sse_ping_interval must be seconds above 0, or -1 for off", param="sse_ping_interval")
    return None if interval == -1 else interval


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_mark(token: Any) -> bool:
    """As llguidance tells it (toktrie_hf_tokenizers 1.9): an added token called `<...>` is no text to it, whether the
    tokenizer calls it special or not (Qwen's `<tool_call>` and `<think>` are not)."""
    return bool(token.special) or (token.content.startswith("<") and token.content.endswith(">"))


def _token_bytes(tokenizer: "PreTrainedTokenizerBase") -> TokenBytes:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    added = {id: token.content for id, token in tokenizer.added_tokens_decoder.items()}
    spell: Any = tokenizer.convert_ids_to_tokens  # of one id one token, which its types do not say
    return TokenBytes(decoder.__getstate__().decode() if decoder else "", spell, added)


def _response_template(tokenizer: "PreTrainedTokenizerBase") -> Any:
    """What the tokenizer says of how answers are to be read; None if it says nothing, or nothing that can be used."""
    stated = getattr(tokenizer, "response_template", None)
    if stated is None:
        return None
    called = [{"type": "function", "function": {"name": "?"}}]
    from transformers.utils.chat_parsing.response_templates import load_response_template  # late: for the few who do

    try:
        load_response_template(stated)
        Reading(Manner(family=chat_formats.find("", stated), tools=called)).push("?")
    except Exception as error:  # noqa: BLE001 - a file of the model's, and whatever a library makes of it
        _log.warning("the tokenizer's response template cannot be used: %s", error)
        return None
    return stated


def _generation_config(snapshot: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((snapshot / "generation_config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _fingerprint(options: Serve) -> str:
    """Changes whenever the same seed may give another text."""
    settings = {name: str(getattr(options, name)) for name in ModelOptions.__dataclass_fields__}
    digest = hashlib.blake2s(json.dumps(settings, sort_keys=True).encode(), digest_size=5).hexdigest()
    return f"b0-{digest}"  # llama-server's form, by which its clients know it

"""Output of every API module: GenerationCall or JsonAnswer, and readers of fields that several APIs share."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from worker.api.served_model import ServedModel
from worker.errors import ContextExceeded, InvalidValue, UnsupportedField
from worker.interface import Delta, GenerationRequest
from worker.prompt.body_reader import BodyFields, Json
from worker.prompt.text_limits import TextLimit
from worker.protocol.dialects import Dialect
from worker.protocol.dialects.generation_fields import MAX_TEXTS

DEFAULT_PING_INTERVAL = 15.0
MAX_CUT_IDS = 1 << 20  # maximum token ids of one text that is to be truncated


class ReplyWriter(Protocol):
    """Serializes deltas as answers of one dialect. Each delta comes with the index of its generation in the call."""

    def full_body(self, deltas: Iterable[tuple[int, Delta]]) -> Any:
        """Return the body of an answer that is not streamed."""

    def frames(self, number: int, delta: Delta) -> bytes:
        """Return the complete frames that `delta` adds to a stream, possibly none."""

    def closing_frames(self) -> bytes:
        """Return the frames after the last delta. None by default: the last delta's frames have the end."""
        return b""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """A parsed request for tokens."""

    generations: tuple[GenerationRequest, ...]
    reply: ReplyWriter
    stream: bool = False
    # seconds without data before a comment is sent in a stream; None: never
    ping_interval: float | None = DEFAULT_PING_INTERVAL
    ignored: tuple[str, ...] = ()  # names of request fields that have no effect
    keep_alive: float | None = None  # keep_alive in seconds, as in `Request`
    frame_dialect: Dialect | None = None  # dialect of the stream's frames, if it differs from that of the path


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonAnswer:
    """An answer that needs no generated tokens, such as embeddings or token counts."""

    body: Any  # JSON: an object, or an array where the dialect has one
    ignored: tuple[str, ...] = ()
    prompt_tokens: int = 0
    keep_alive: float | None = None  # keep_alive in seconds, as in `Request`
    stream: bool = False  # send the body as the only line of a stream, for a client that expects one


async def read_texts(
    fields: BodyFields,
    name: str,
    model: ServedModel,
    *,
    limit: TextLimit | None = None,
    prefix: str = "",
    add_special: bool = True,
) -> tuple[list[list[int]], list[str | None]]:
    """Return the token ids of each text in field `name`, and the texts themselves (None for token ids).

    The field holds one text or several. Each text is a string, token ids, a mixed list of strings and token ids, or
    an object that llama-server accepts. `prefix` is prepended to each string but not to token ids. `add_special`: add
    the tokens that the tokenizer puts around a text. `limit`: that of each text, by default that of a prompt. Raise
    InvalidValue or UnsupportedField naming the field, and ContextExceeded for texts or ids above the limit.
    """
    limit = limit or model.prompt_limit(name)
    value = fields.take(name)
    items = value if isinstance(value, list) and value and not any(map(_is_number, value)) else [value]
    if len(items) > MAX_TEXTS:
        raise InvalidValue(f"{name} must have at most {MAX_TEXTS} entries", param=name)
    items = [_without_media(item, name) if isinstance(item, dict) else item for item in items]
    for item in items:
        if not (isinstance(item, str) or (isinstance(item, list) and item)):
            raise InvalidValue(f"{name} must be a string, an array of strings, token ids or arrays of them", param=name)
        # checked before the ids themselves, to bound the work
        longest = MAX_CUT_IDS if limit.keep else model.engine.ctx_size
        if isinstance(item, list) and len(item) > longest:
            if limit.keep or len(item) <= limit.tokens:
                raise ContextExceeded(len(item), model.engine.ctx_size, param=name)
            raise limit.error(len(item), is_exact=True)
    check_texts(name, (piece for item in items if isinstance(item, list) for piece in item))
    strings = [item for item in items if isinstance(item, str)]
    encoded = iter(
        await model.encode([prefix + text for text in strings] if prefix else strings, limit, add_special=add_special)
    )
    prompts = [
        next(encoded) if isinstance(item, str) else await _ids(item, model, limit, add_special=add_special)
        for item in items
    ]
    if not all(prompts):
        prompts = [prompt or model.start_of_text(name) for prompt in prompts]
    return prompts, [item if isinstance(item, str) else None for item in items]


def check_texts(name: str, pieces: Iterable[Any]) -> None:
    """Raise InvalidValue if more than MAX_TEXTS of `pieces`, of token ids and texts in field `name`, are texts. Each of
    them is tokenized for itself, in 0.1 ms, however short it is."""
    if sum(type(piece) is str for piece in pieces) > MAX_TEXTS:
        raise InvalidValue(
            f"{name} must have at most {MAX_TEXTS} texts between token ids; join neighbouring texts", param=name
        )


def check_choices(prompts: int, n: int) -> None:
    """Raise InvalidValue if a request has more than MAX_TEXTS choices over all its prompts. Each choice takes memory
    from the beginning: 260,000 took 700 MiB."""
    if prompts * n > MAX_TEXTS:
        raise InvalidValue(
            f"{prompts} prompts with {n} choices each are more than {MAX_TEXTS} choices; send fewer prompts, or a lower"
            " n",
            param="prompt",
        )


def _without_media(item: Json, name: str) -> Any:
    """Return the text of an object that may also hold media: `prompt_string`, or `content` as a string or as text
    parts.

    Raise UnsupportedField for media.
    """
    text = item.get("prompt_string")
    content = item.get("content") if text is None else None
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if item.get("multimodal_data") or any(part.get("type") != "text" for part in parts):
        raise UnsupportedField(
            f"{name} must not hold media; send images to POST /v1/chat/completions",
            param=name,
        )
    texts = [text for part in parts if isinstance(text := part.get("text"), str)]
    if parts and len(texts) == len(content or ()):
        return "".join(texts)
    return content if isinstance(content, str) else text


async def _ids(pieces: list[Any], model: ServedModel, limit: TextLimit, *, add_special: bool) -> list[int]:
    if all(type(piece) is int and 0 <= piece < model.vocab_size for piece in pieces):
        return pieces
    return await model.encode_pieces(pieces, limit, add_special=add_special)


def read_ping_interval(fields: BodyFields) -> float | None:
    """Return `sse_ping_interval` in seconds; None for -1, which disables pings."""
    interval = fields.number("sse_ping_interval")
    if interval is None:
        return DEFAULT_PING_INTERVAL
    return None if interval == -1 else interval


def read_stream_flag(fields: BodyFields, name: str, *, stream: bool) -> bool:
    """Read a flag about chunks. It is reported as ignored if the answer is not streamed."""
    is_set = fields.flag(name) or False
    if is_set and not stream:
        fields.mark_unused(name)
    return is_set and stream


def switch_reasoning(fields: BodyFields, name: str, model: ServedModel, *, is_on: bool) -> Json:
    """Return the fields of a chat completion that turn reasoning on or off. Field `name` is reported as ignored if the
    model does otherwise and its template has no switch."""
    if model.template.thinking_switch:
        return {"chat_template_kwargs": {"enable_thinking": is_on}}
    if is_on != (model.chat_format is not None and model.chat_format.has_reasoning):
        fields.mark_unused(name)
    return {}


def data_frame(body: Json) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def event_frame(event: Json) -> bytes:
    """Return a server-sent event named by its type."""
    return f"event: {event['type']}\n".encode() + data_frame(event)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)

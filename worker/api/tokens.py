"""Tokenize and detokenize, for llama-server's and vLLM's clients at the same paths.

The request's fields distinguish the two; where they do not, one answer serves both.
"""

from collections.abc import Sequence
from typing import Any

from worker.api.call import JsonAnswer, check_texts
from worker.api.openai import chat_prompt_tokens
from worker.api.served_model import ServedModel
from worker.errors import InvalidValue
from worker.prompt.body_reader import BodyFields, Json, to_integer
from worker.protocol.dialects.llama_server import DETOKENIZE, TOKENIZE
from worker.protocol.dialects.vllm import TOKENIZE_CHAT, TOKENIZE_TEXT

_SOURCES = ("content", "prompt", "messages")


async def tokenize(body: Json, model: ServedModel) -> JsonAnswer:
    """Return the token ids of llama-server's `content`, of vLLM's `prompt`, or of the prompt for `messages`. Raise
    RequestError."""
    given = [name for name in _SOURCES if body.get(name) is not None]
    if len(given) > 1:
        raise InvalidValue(f"{' and '.join(given)} exclude each other; send one of them", param=given[1])
    if given == ["prompt"]:
        return await _of_prompt(body, model)
    return await (_of_chat(body, model) if given == ["messages"] else _of_content(body, model))


async def _of_content(body: Json, model: ServedModel) -> JsonAnswer:
    fields = BodyFields(body, TOKENIZE)
    fields.text("model")
    content = fields.take("content")
    if not isinstance(content, str | list):
        raise InvalidValue(
            "content must be a string, or an array of strings and token ids; vLLM's prompt or messages"
            " are accepted instead",
            param="content",
        )
    add_special = fields.flag("add_special") or False
    parse_special = fields.flag("parse_special")
    with_pieces = fields.flag("with_pieces") or False
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    pieces = content if isinstance(content, list) else [content]
    check_texts("content", pieces)
    tokens = await model.encode_pieces(
        pieces, model.count_limit("content"), add_special=add_special, parse_special=parse_special is not False
    )
    listed: list[Any] = tokens
    if with_pieces:  # 3 microseconds each
        listed = await model.in_thread(lambda: [{"id": token, "piece": _piece(model, token)} for token in tokens])
    return JsonAnswer(body={"tokens": listed}, ignored=ignored)


async def _of_prompt(body: Json, model: ServedModel) -> JsonAnswer:
    fields = BodyFields(body, TOKENIZE_TEXT)
    fields.text("model")
    prompt = fields.text("prompt") or ""
    add_special = fields.flag("add_special_tokens") is not False
    with_strings = fields.flag("return_token_strs") or False
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    [tokens] = await model.encode([prompt], model.count_limit("prompt"), add_special=add_special)
    return await _tokens_answer(tokens, model, ignored, with_strings=with_strings)


async def _of_chat(body: Json, model: ServedModel) -> JsonAnswer:
    fields = BodyFields(body, TOKENIZE_CHAT)
    add_special = fields.flag("add_special_tokens") or False
    with_strings = fields.flag("return_token_strs") or False
    chat = {name: value for name, value in body.items() if name not in fields.known}
    tokens, ignored = await chat_prompt_tokens(chat, model, add_special=add_special)
    return await _tokens_answer(tokens, model, ignored, with_strings=with_strings)


async def _tokens_answer(
    tokens: Sequence[int], model: ServedModel, ignored: tuple[str, ...], *, with_strings: bool
) -> JsonAnswer:
    """Return vLLM's answer. Texts beyond `max_model_len` are accepted, up to `ServedModel.count_limit`."""
    strings = None
    if with_strings:
        strings = await model.in_thread(lambda: model.tokenizer.convert_ids_to_tokens(list(tokens)))
    answer = {
        "count": len(tokens),
        "max_model_len": model.engine.ctx_size,
        "tokens": tokens,
        "token_strs": strings,
    }
    return JsonAnswer(body=answer, ignored=ignored)


async def detokenize(body: Json, model: ServedModel) -> JsonAnswer:
    """Return the text of `tokens`, including special tokens; vLLM's clients read it from `prompt`.
    Raise RequestError."""
    fields = BodyFields(body, DETOKENIZE)
    fields.text("model")
    listed = fields.sequence("tokens")
    if listed is None:
        raise InvalidValue("tokens must be an array of token ids", param="tokens")
    limit = model.count_limit("tokens")
    if len(listed) > limit.tokens:
        raise limit.error(len(listed), is_exact=True)
    tokens = [id for token in listed if (id := to_integer(token)) is not None and 0 <= id < model.vocab_size]
    if len(tokens) < len(listed):
        raise InvalidValue(f"tokens must be token ids between 0 and {model.vocab_size - 1}", param="tokens")
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    [text] = await model.decode_all([tokens])
    return JsonAnswer(body={"content": text, "prompt": text}, ignored=ignored)


def _piece(model: ServedModel, token: int) -> str | list[int]:
    """Return the token's text, or its bytes if they are not whole characters."""
    piece = model.token_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)

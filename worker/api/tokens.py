"""Texts and chats to tokens and back. llama-server's clients and vLLM's ask for it at the same paths: what they send
tells them apart, and where it does not, one answer is for both."""

from collections.abc import Sequence
from typing import Any

from worker.api.call import Model, Result
from worker.api.openai import prompt_of
from worker.errors import InvalidValue
from worker.prompt.body_reader import Fields, Json, to_integer
from worker.protocol.dialects.llama_server import DETOKENIZE, TOKENIZE
from worker.protocol.dialects.vllm import TOKENIZE_CHAT, TOKENIZE_TEXT

_SOURCES = ("content", "prompt", "messages")


async def tokenize(body: Json, model: Model) -> Result:
    """Token ids: of llama-server's `content`, of vLLM's `prompt`, or of the prompt that `messages` make. Raises
    RequestError."""
    stated = [name for name in _SOURCES if body.get(name) is not None]
    if len(stated) > 1:
        raise InvalidValue(f"{' and '.join(stated)} exclude each other; state one", param=stated[1])
    if stated == ["prompt"]:
        return await _of_prompt(body, model)
    return await (_of_chat(body, model) if stated == ["messages"] else _of_content(body, model))


async def _of_content(body: Json, model: Model) -> Result:
    fields = Fields(body, TOKENIZE)
    fields.text("model")
    content = fields.take("content")
    if not isinstance(content, str | list):
        raise InvalidValue(
            "content must be a string, or an array of strings and token ids; vLLM's prompt or messages may stand in its"
            " place",
            param="content",
        )
    add_special = fields.flag("add_special") or False
    parse_special = fields.flag("parse_special")
    with_pieces = fields.flag("with_pieces") or False
    ignored = fields.settle(strict=model.options.strict_fields)
    pieces = content if isinstance(content, list) else [content]
    tokens = await model.encode_pieces(
        pieces, param="content", add_special=add_special, parse_special=parse_special is not False
    )
    listed: list[Any] = [{"id": token, "piece": _piece(model, token)} for token in tokens] if with_pieces else tokens
    return Result(body={"tokens": listed}, ignored=ignored)


async def _of_prompt(body: Json, model: Model) -> Result:
    fields = Fields(body, TOKENIZE_TEXT)
    fields.text("model")
    prompt = fields.text("prompt") or ""
    add_special = fields.flag("add_special_tokens") is not False
    spells = fields.flag("return_token_strs") or False
    ignored = fields.settle(strict=model.options.strict_fields)
    [tokens] = await model.encode([prompt], add_special=add_special)
    return _counted(tokens, model, ignored, spells=spells)


async def _of_chat(body: Json, model: Model) -> Result:
    fields = Fields(body, TOKENIZE_CHAT)
    add_special = fields.flag("add_special_tokens") or False
    spells = fields.flag("return_token_strs") or False
    chat = {name: value for name, value in body.items() if name not in fields.known}
    tokens, ignored = await prompt_of(chat, model, add_special=add_special)
    return _counted(tokens, model, ignored, spells=spells)


def _counted(tokens: Sequence[int], model: Model, ignored: tuple[str, ...], *, spells: bool) -> Result:
    """vLLM's answer. Long texts are no fault here: `max_model_len` is what the model takes."""
    told = {
        "count": len(tokens),
        "max_model_len": model.engine.ctx_size,
        "tokens": tokens,
        "token_strs": model.tokenizer.convert_ids_to_tokens(list(tokens)) if spells else None,
    }
    return Result(body=told, ignored=ignored)


async def detokenize(body: Json, model: Model) -> Result:
    """The text of `tokens`, special ones included: vLLM's clients look for it in `prompt`. Raises RequestError."""
    fields = Fields(body, DETOKENIZE)
    fields.text("model")
    listed = fields.sequence("tokens")
    if listed is None:
        raise InvalidValue("tokens must be an array of token ids", param="tokens")
    tokens = [id for token in listed if (id := to_integer(token)) is not None and 0 <= id < model.vocab_size]
    if len(tokens) < len(listed):
        raise InvalidValue(f"tokens must be token ids between 0 and {model.vocab_size - 1}", param="tokens")
    ignored = fields.settle(strict=model.options.strict_fields)
    text = model.decode(tokens)
    return Result(body={"content": text, "prompt": text}, ignored=ignored)


def _piece(model: Model, token: int) -> str | list[int]:
    """The token's text; its bytes where they are no whole characters."""
    piece = model.token_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)

"""llama-server's service calls: texts to tokens and back, and a chat as the prompt that its template makes."""

from typing import Any

from worker import chat
from worker.errors import InvalidValue
from worker.faces import Model, Result
from worker.fields import Fields, Json, to_integer


async def tokenize(body: Json, model: Model) -> Result:
    """`content` as token ids, with their pieces if `with_pieces`; raises RequestError."""
    fields = Fields(body)
    fields.text("model")
    content = fields.text("content")
    if content is None:
        raise InvalidValue("content must be a string", param="content")
    add_special = fields.flag("add_special") or False
    parse_special = fields.flag("parse_special")
    with_pieces = fields.flag("with_pieces") or False
    ignored = fields.settle(strict=model.options.strict_fields)
    [tokens] = await model.encode([content], add_special=add_special, parse_special=parse_special is not False)
    listed: list[Any] = [{"id": token, "piece": _piece(model, token)} for token in tokens] if with_pieces else tokens
    return Result(body={"tokens": listed}, ignored=ignored)


async def detokenize(body: Json, model: Model) -> Result:
    """The text of `tokens`, special ones included; raises RequestError."""
    fields = Fields(body)
    fields.text("model")
    listed = fields.sequence("tokens")
    if listed is None:
        raise InvalidValue("tokens must be an array of token ids", param="tokens")
    tokens = [id for token in listed if (id := to_integer(token)) is not None and 0 <= id < model.vocab_size]
    if len(tokens) < len(listed):
        raise InvalidValue(f"tokens must be token ids between 0 and {model.vocab_size - 1}", param="tokens")
    ignored = fields.settle(strict=model.options.strict_fields)
    return Result(body={"content": model.decode(tokens)}, ignored=ignored)


async def apply_template(body: Json, model: Model) -> Result:
    """The prompt that a chat with this body would start from; raises RequestError."""
    fields = Fields(body)
    conversation = chat.read(fields, model.template)
    fields.skip(chat.FIELDS)
    ignored = fields.settle(strict=model.options.strict_fields)
    return Result(body={"prompt": await model.render(conversation)}, ignored=ignored)


def _piece(model: Model, token: int) -> str | list[int]:
    """The token's text; its bytes where they are no whole characters."""
    piece = model.token_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)

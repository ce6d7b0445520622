"""Embeddings in OpenAI's and llama-server's form, rerank and score."""

import asyncio
import base64
import struct
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from math import hypot
from operator import mul
from typing import Any

from worker.api.call import JsonAnswer, read_texts
from worker.api.served_model import ServedModel
from worker.errors import InvalidValue, UnsupportedByModel
from worker.interface import EncoderInput, EncodingConfig
from worker.prompt import chat_template as chats
from worker.prompt.body_reader import BodyFields, Json
from worker.protocol.dialects.generation_fields import MAX_TEXTS
from worker.protocol.dialects.llama_server import EMBEDDING, RERANK
from worker.protocol.dialects.openai import EMBEDDINGS
from worker.protocol.dialects.vllm import EMBED_CHAT, SCORE, SCORE_FIELDS


async def embeddings(body: Json, model: ServedModel) -> JsonAnswer:
    """Compute one vector per input (OpenAI). Raise RequestError. Cancelling drops the work.

    Fields beyond OpenAI's: `prompt_name` selects one of the model's instructions to prepend to each text; `truncate`
    truncates long texts instead of rejecting them; `messages` instead of `input` embeds a chat, as in vLLM.
    """
    model.require("embedding")
    is_chat = body.get("messages") is not None
    if is_chat and body.get("input") is not None:
        raise InvalidValue("input and messages exclude each other; send one of them", param="messages")
    fields = BodyFields(body, EMBED_CHAT if is_chat else EMBEDDINGS)
    name = fields.text("model") or model.options.name
    is_base64 = fields.choice("encoding_format") == "base64"
    dimensions = fields.integer("dimensions")
    texts = [await _read_chat(fields, model)] if is_chat else await _read_inputs(fields, ("input",), model)
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    vectors = await model.engine.embed(texts)
    if dimensions is not None:
        vectors = [shorten(vector, dimensions) for vector in vectors]
    data = [
        {"object": "embedding", "index": index, "embedding": to_base64(vector) if is_base64 else vector}
        for index, vector in enumerate(vectors)
    ]
    return _result({"object": "list", "data": data, "model": name}, texts, ignored)


async def native(body: Json, model: ServedModel) -> JsonAnswer:
    """Compute a list of vectors per input (llama-server): a single one, or without pooling one per token. Raise
    RequestError."""
    model.require("embedding")
    fields = BodyFields(body, EMBEDDING)
    fields.text("model")
    norm = fields.integer("embd_normalize")
    texts = await _read_inputs(fields, ("input", "content"), model)
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    if _encoding(model).is_pooled:
        found = [[vector] for vector in await model.engine.embed(texts, normalize=norm)]
    else:
        found = await model.engine.embed_tokens(texts)
    listed = [{"index": index, "embedding": vectors} for index, vectors in enumerate(found)]
    return JsonAnswer(body=listed, ignored=ignored, prompt_tokens=_count(texts))


async def rerank(body: Json, model: ServedModel) -> JsonAnswer:
    """Sort documents by relevance to a query: by a cross-encoder's score, otherwise by cosine similarity.

    Raise RequestError. Cancelling drops the work.
    """
    model.require("rerank")
    fields = BodyFields(body, RERANK)
    name = fields.text("model") or model.options.name
    query = fields.text("query")
    documents, is_bare = _read_documents(fields)
    field = "texts" if is_bare else "documents"
    most = fields.integer("top_n")
    returns_text = bool(fields.flag("return_documents")) | bool(fields.flag("return_text"))
    truncate, most_tokens = _read_truncate(fields, model), fields.integer("max_tokens_per_doc")
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    if not query:
        raise InvalidValue("query must be a non-empty string", param="query")
    read = await model.first_tokens(documents, most_tokens, field) if most_tokens else documents
    scores, texts = await _relevance([query], read, ("query", field), model, truncate=truncate)
    order = sorted(range(len(documents)), key=lambda index: (-scores[index], index))[:most]
    if is_bare:
        text = [{"text": document} if returns_text else {} for document in documents]
        bare = [{"index": index, "score": scores[index], **text[index]} for index in order]
        return JsonAnswer(body=bare, ignored=ignored, prompt_tokens=_count(texts))
    results: list[Json] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if returns_text:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    head = {"id": f"rerank-{uuid.uuid4().hex}", "model": name, "object": "list"}
    return _result({**head, "results": results}, texts, ignored)


async def score(body: Json, model: ServedModel) -> JsonAnswer:
    """Score pairs of texts, or one text with each of several (vLLM): by a cross-encoder, otherwise by cosine
    similarity.

    Raise RequestError. Cancelling drops the work.
    """
    model.require("rerank")
    fields = BodyFields(body, SCORE)
    name = fields.text("model") or model.options.name
    names, firsts, seconds = _read_pairs(fields)
    truncate = _read_truncate(fields, model)
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    scores, texts = await _relevance(firsts, seconds, names, model, truncate=truncate)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": name}
    return _result({**head, "data": data}, texts, ignored)


async def _relevance(
    firsts: Sequence[str], seconds: Sequence[str], names: tuple[str, str], model: ServedModel, *, truncate: int | None
) -> tuple[Sequence[float], list[EncoderInput]]:
    """Return the relevance of each of `seconds` to the one of `firsts`, or to that at the same place, and the inputs.

    `names`: the fields of both, for errors.
    """
    if model.engine.encoding is None:
        limit = model.text_limit(names[1], truncate=truncate)
        encode_group = partial(model.encode_pairs, limit=limit)
        others = [seconds] if len(firsts) == 1 else [[text] for text in seconds]
        groups = zip(firsts, others, strict=True)
        pairs = [pair for first, group in groups for pair in await encode_group(first, group)]
        return await model.engine.score(_checked(pairs, model, names[1])), pairs
    queries = await _encode(firsts, model, names[0], "query", truncate=truncate)
    texts = [*queries, *await _encode(seconds, model, names[1], "document", truncate=truncate)]
    vectors = await model.engine.embed(texts, normalize=2)
    lefts, rights = vectors[: len(queries)], vectors[len(queries) :]
    sides = zip(lefts if len(lefts) > 1 else cycle(lefts), rights, strict=False)
    # 2,048 texts take about 0.1 s, in which the event loop must not be blocked.
    return await asyncio.to_thread(lambda: [sum(map(mul, left, right)) for left, right in sides]), texts


def _read_pairs(fields: BodyFields) -> tuple[tuple[str, str], list[str], list[str]]:
    """Return the names of the two fields and the texts of both. The first field may have one text for all. Raise
    InvalidValue."""
    given = {name: texts for pair in SCORE_FIELDS for name in pair if (texts := _read_scored(fields, name))}
    names = next((pair for pair in SCORE_FIELDS if given.keys() == set(pair)), None)
    if names is None:
        pairs = ", or ".join(" and ".join(pair) for pair in SCORE_FIELDS)
        raise InvalidValue(f"send one pair: {pairs}", param=next(iter(given), "text_1"))
    firsts, seconds = (given[name] for name in names)
    if len(firsts) not in (1, len(seconds)):
        raise InvalidValue(
            f"{names[1]} must have as many texts as {names[0]} ({len(firsts)}), or {names[0]} a single one",
            param=names[1],
        )
    return names, firsts, seconds


def _read_scored(fields: BodyFields, name: str) -> list[str]:
    """Return the texts of a field; empty if it is absent."""
    value = fields.take(name)
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return []
    if (
        not isinstance(texts, list)
        or not 0 < len(texts) <= MAX_TEXTS
        or not all(isinstance(text, str) for text in texts)
    ):
        raise InvalidValue(f"{name} must be a string, or an array of 1 to {MAX_TEXTS} strings", param=name)
    return texts


async def _read_inputs(fields: BodyFields, names: tuple[str, ...], model: ServedModel) -> list[EncoderInput]:
    """Return the texts of the one field of `names` that is present, with the model's instruction before each. Token ids
    are unchanged.

    Raise InvalidValue or ContextExceeded naming the field.
    """
    encoding = _encoding(model)
    prompt, truncate = _read_prompt(fields, encoding), _read_truncate(fields, model)
    given = [name for name in names if fields.take(name) is not None]
    if len(given) > 1:
        raise InvalidValue(f"{' and '.join(given)} mean the same; send one of them", param=given[1])
    name = given[0] if given else names[0]
    limit = model.text_limit(name, truncate=truncate)
    rows, texts = await read_texts(fields, name, model, limit=limit, prefix=prompt)
    written = [text for text in texts if text is not None]
    if written:
        return await _prepare(rows, written, model, encoding, prompt, name, truncate=truncate)
    if fields.take("prompt_name") is not None:
        raise InvalidValue(
            "prompt_name needs texts; prepend the instruction to the token ids instead", param="prompt_name"
        )
    return _checked([EncoderInput(row[:truncate]) for row in rows], model, name)


async def _read_chat(fields: BodyFields, model: ServedModel) -> EncoderInput:
    """Return the tokens of a chat as the model's template renders it, by default without the beginning of an answer.
    Raise UnsupportedByModel, InvalidValue or ContextExceeded."""
    if not model.template.exists:
        raise UnsupportedByModel(
            "this model has no chat template; send input instead of messages, or set chat-template in its preset"
        )
    chat = chats.read(fields, model.template)
    if fields.flag("add_generation_prompt") is None:
        chat = replace(chat, add_generation_prompt=False)
    if chat.tools and not model.template.mentions("tools"):
        fields.mark_unused("tools")
    truncate = _read_truncate(fields, model)
    add_special = fields.flag("add_special_tokens") or False
    limit = model.text_limit("messages", truncate=truncate)
    [tokens] = await model.encode([await model.render(chat, limit)], limit, add_special=add_special)
    if not tokens:
        raise InvalidValue("this model's chat template renders the messages to an empty text", param="messages")
    return _checked([EncoderInput(tokens[:truncate])], model, "messages")[0]


async def _encode(
    texts: Sequence[str], model: ServedModel, name: str, prompt: str, *, truncate: int | None
) -> list[EncoderInput]:
    """Tokenize `texts` with the instruction named `prompt` before each. Raise ContextExceeded."""
    encoding = _encoding(model)
    instruction = encoding.prompts.get(prompt, "")
    rows = await model.encode([instruction + text for text in texts], model.text_limit(name, truncate=truncate))
    rows = [row or model.start_of_text(name) for row in rows]
    return await _prepare(rows, texts, model, encoding, instruction, name, truncate=truncate)


async def _prepare(
    rows: list[list[int]],
    texts: Sequence[str],
    model: ServedModel,
    encoding: EncodingConfig,
    prompt: str,
    name: str,
    *,
    truncate: int | None,
) -> list[EncoderInput]:
    """Truncate or reject long inputs and set the tokens that pooling skips. `rows`: the tokens of `texts` with `prompt`
    before each."""
    skipped = 0
    if prompt and encoding.skips_prompt:
        [alone] = await model.encode([prompt], model.text_limit("prompt_name"))
        skipped = len(alone) - (bool(alone) and alone[-1] in model.special_ids)
        if truncate is not None and truncate <= len(alone):  # pooling would have no token of the text
            raise InvalidValue(
                f"truncate_prompt_tokens must be above {len(alone)}, the tokens of the model's instruction",
                param="truncate_prompt_tokens",
            )
    if truncate is not None:
        cut = model.text_limit(name, truncate=truncate)
        long = [index for index, row in enumerate(rows) if len(row) > cut.tokens]
        shorter = await model.encode_cut([prompt + texts[index] for index in long], cut)
        for index, row in zip(long, shorter, strict=True):
            rows[index] = row
    return _checked([EncoderInput(row, skipped=skipped) for row in rows], model, name)


def _checked(texts: list[EncoderInput], model: ServedModel, name: str) -> list[EncoderInput]:
    """Raise ContextExceeded if an input is too long; otherwise return the inputs."""
    for text in texts:
        if len(text.tokens) > model.max_text:
            raise model.text_limit(name).error(len(text.tokens), is_exact=True)
    return texts


def _encoding(model: ServedModel) -> EncodingConfig:
    encoding = model.engine.encoding
    if encoding is None:
        raise UnsupportedByModel("this model does not compute embeddings")
    return encoding


def _read_prompt(fields: BodyFields, encoding: EncodingConfig) -> str:
    """Return the instruction named by `prompt_name`, otherwise the model's default."""
    name = fields.text("prompt_name")
    if name is None:
        return encoding.default_prompt
    if name not in encoding.prompts:
        known = ", ".join(sorted(encoding.prompts))
        raise InvalidValue(f"prompt_name must be one of this model's prompts: {known}", param="prompt_name")
    return encoding.prompts[name]


def _read_truncate(fields: BodyFields, model: ServedModel) -> int | None:
    """Return the tokens to which longer texts are truncated; None if they are rejected.

    The request has `truncate` (true, or END as in Cohere's API), or vLLM's truncate_prompt_tokens: -1 is all that fit.
    """
    fields.refuse("truncation_side", 'truncation_side must be "right": only the end of a text can be truncated')
    value, most = fields.take("truncate"), fields.integer("truncate_prompt_tokens")
    if value is None and most is not None:
        return model.max_text if most == -1 else min(most, model.max_text)
    if value is None or isinstance(value, bool):
        return model.max_text if value else None
    if isinstance(value, str) and value.upper() in ("NONE", "END"):
        return model.max_text if value.upper() == "END" else None
    raise InvalidValue(
        "truncate must be true or false, or NONE or END; only the end can be truncated", param="truncate"
    )


def _read_documents(fields: BodyFields) -> tuple[list[str], bool]:
    """Return the documents, and whether the field is `texts` (text-embeddings-inference) instead of `documents`.

    A document is a string or an object with a `text`. Raise InvalidValue.
    """
    listed, bare = fields.sequence("documents"), fields.sequence("texts")
    if bare is not None:
        if listed is not None:
            raise InvalidValue("documents and texts mean the same; send one of them", param="texts")
        if not bare or len(bare) > MAX_TEXTS or not all(isinstance(text, str) for text in bare):
            raise InvalidValue(f"texts must be an array of 1 to {MAX_TEXTS} strings", param="texts")
        return bare, True
    if not listed:
        raise InvalidValue("documents must be an array of at least one string or object with text", param="documents")
    if len(listed) > MAX_TEXTS:
        raise InvalidValue(f"documents must have at most {MAX_TEXTS} entries", param="documents")
    texts: list[Any] = [document.get("text") if isinstance(document, dict) else document for document in listed]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidValue("a document must be a string or an object with text", param=f"documents[{index}]")
    return texts, False


def _result(body: Json, texts: Sequence[EncoderInput], ignored: tuple[str, ...]) -> JsonAnswer:
    tokens = _count(texts)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JsonAnswer(body={**body, "usage": usage}, ignored=ignored, prompt_tokens=tokens)


def _count(texts: Sequence[EncoderInput]) -> int:
    return sum(len(text.tokens) for text in texts)


def shorten(vector: list[float], dimensions: int) -> list[float]:
    """Truncate the vector to `dimensions` components and normalize it (Matryoshka embeddings, Kusupati et al. 2022).
    Raise InvalidValue if it has fewer components."""
    if dimensions > len(vector):
        raise InvalidValue(
            f"dimensions must be at most {len(vector)}, the size of this model's vectors", param="dimensions"
        )
    kept = vector[:dimensions]
    length = hypot(*kept)
    return [value / length for value in kept] if length else kept


def to_base64(vector: list[float]) -> str:
    """Encode as little-endian float32, four bytes per component."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

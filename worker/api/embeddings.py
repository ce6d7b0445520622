"""Texts to vectors, in OpenAI's shape and in llama-server's, and texts by how well they fit others."""

import asyncio
import base64
import struct
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from math import hypot
from operator import mul
from typing import Any

from worker.api.call import Model, Result, read_texts
from worker.errors import ContextExceeded, InvalidValue, UnsupportedByModel
from worker.interface import Encoding, Text
from worker.prompt import chat_template as chats
from worker.prompt.body_reader import Fields, Json
from worker.protocol.dialects.generation_fields import MAX_TEXTS
from worker.protocol.dialects.openai import EMBEDDING, EMBEDDINGS, RERANK
from worker.protocol.dialects.vllm import EMBED_CHAT, SCORE, SCORED

QUICK = 1 << 18
"""Products of components that are summed on the loop's thread; about 10 ms."""
MOST_IDS = 1 << 20
"""Token ids of one text that are looked at to be cut."""


async def embeddings(body: Json, model: Model) -> Result:
    """OpenAI: one vector per input; raises RequestError. Cancelling drops the work.

    Beyond OpenAI's fields: `prompt_name`, one of the model's own instructions to put before each text; `truncate`, to
    cut what is too long instead of refusing it; as vLLM has it, `messages` in the place of `input`, the text of a chat.
    """
    model.require("embedding")
    is_chat = body.get("messages") is not None
    if is_chat and body.get("input") is not None:
        raise InvalidValue("input and messages exclude each other; state one", param="messages")
    fields = Fields(body, EMBED_CHAT if is_chat else EMBEDDINGS)
    name = fields.text("model") or model.options.name
    is_base64 = fields.choice("encoding_format") == "base64"
    dimensions = fields.integer("dimensions")
    texts = [await _read_chat(fields, model)] if is_chat else await _read_inputs(fields, ("input",), model)
    ignored = fields.settle(strict=model.options.strict_fields)
    vectors = await model.engine.embed(texts)
    if dimensions is not None:
        vectors = [shorten(vector, dimensions) for vector in vectors]
    data = [
        {"object": "embedding", "index": index, "embedding": to_base64(vector) if is_base64 else vector}
        for index, vector in enumerate(vectors)
    ]
    return _result({"object": "list", "data": data, "model": name}, texts, ignored)


async def native(body: Json, model: Model) -> Result:
    """llama-server: a list of vectors per input, one, or without pooling one for each token; raises RequestError."""
    model.require("embedding")
    fields = Fields(body, EMBEDDING)
    fields.text("model")
    norm = fields.integer("embd_normalize")
    texts = await _read_inputs(fields, ("input", "content"), model)
    ignored = fields.settle(strict=model.options.strict_fields)
    if _encoding(model).is_pooled:
        found = [[vector] for vector in await model.engine.embed(texts, normalize=norm)]
    else:
        found = await model.engine.embed_tokens(texts)
    listed = [{"index": index, "embedding": vectors} for index, vectors in enumerate(found)]
    return Result(body=listed, ignored=ignored, prompt_tokens=_count(texts))


async def rerank(body: Json, model: Model) -> Result:
    """Documents by how well they fit a query, the best first: by a cross-encoder's score, else by the cosine between
    vectors; raises RequestError. Cancelling drops the work."""
    model.require("rerank")
    fields = Fields(body, RERANK)
    name = fields.text("model") or model.options.name
    query = fields.text("query")
    documents, is_bare = _read_documents(fields)
    field = "texts" if is_bare else "documents"
    most = fields.integer("top_n")
    shows = bool(fields.flag("return_documents")) | bool(fields.flag("return_text"))
    fields.refuse("raw_scores", "raw_scores is not supported: leave it out for scores that can be compared")
    cuts = _read_truncate(fields)
    ignored = fields.settle(strict=model.options.strict_fields)
    if not query:
        raise InvalidValue("query must be a string that is not empty", param="query")
    if model.engine.encoding is None:
        texts = _checked(await model.encode_pairs(query, documents, cuts=cuts), model, field)
        scores = await model.engine.score(texts)
    else:
        asked = await _encode([query], model, "query", "query", cuts=cuts)
        given = await _encode(documents, model, field, "document", cuts=cuts)
        texts = [*asked, *given]
        vector, *others = await model.engine.embed(texts, normalize=2)
        scores = await _products(vector, others)
    order = sorted(range(len(documents)), key=lambda index: (-scores[index], index))[:most]
    if is_bare:
        text = [{"text": each} if shows else {} for each in documents]
        bare = [{"index": index, "score": scores[index], **text[index]} for index in order]
        return Result(body=bare, ignored=ignored, prompt_tokens=_count(texts))
    results: list[Json] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if shows:
        for each in results:
            each["document"] = {"text": documents[each["index"]]}
    return _result({"model": name, "object": "list", "results": results}, texts, ignored)


async def score(body: Json, model: Model) -> Result:
    """vLLM: how well texts fit each other, pair by pair, or one with each of several; by a cross-encoder's score, else
    by the cosine between vectors. Raises RequestError. Cancelling drops the work."""
    model.require("rerank")
    fields = Fields(body, SCORE)
    name = fields.text("model") or model.options.name
    names, firsts, seconds = _read_pairs(fields)
    fields.refuse("use_activation", "use_activation must be true: scores are those that can be compared")
    cuts = _read_truncate(fields)
    ignored = fields.settle(strict=model.options.strict_fields)
    if model.engine.encoding is None:
        others = [seconds] if len(firsts) == 1 else [[text] for text in seconds]
        groups = zip(firsts, others, strict=True)
        texts = [text for first, group in groups for text in await model.encode_pairs(first, group, cuts=cuts)]
        scores = await model.engine.score(_checked(texts, model, names[1]))
    else:
        asked = await _encode(firsts, model, names[0], "query", cuts=cuts)
        given = await _encode(seconds, model, names[1], "document", cuts=cuts)
        texts = [*asked, *given]
        vectors = await model.engine.embed(texts, normalize=2)
        lefts, rights = vectors[: len(asked)], vectors[len(asked) :]
        if len(lefts) == 1:
            scores = await _products(lefts[0], rights)
        else:
            scores = [sum(map(mul, left, right)) for left, right in zip(lefts, rights, strict=True)]
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": name}
    return _result({**head, "data": data}, texts, ignored)


def _read_pairs(fields: Fields) -> tuple[tuple[str, str], list[str], list[str]]:
    """The names of what is scored, and the texts of both, of which the first may be one for all. Raises
    InvalidValue."""
    stated = {name: texts for pair in SCORED for name in pair if (texts := _read_scored(fields, name))}
    names = next((pair for pair in SCORED if stated.keys() == set(pair)), None)
    if names is None:
        pairs = ", or ".join(" and ".join(pair) for pair in SCORED)
        raise InvalidValue(f"state one pair: {pairs}", param=next(iter(stated), "text_1"))
    firsts, seconds = (stated[name] for name in names)
    if len(firsts) not in (1, len(seconds)):
        raise InvalidValue(
            f"{names[1]} must be as many as {names[0]}, {len(firsts)}, or {names[0]} one for all", param=names[1]
        )
    return names, firsts, seconds


def _read_scored(fields: Fields, name: str) -> list[str]:
    """The texts of a field; none if it is not there."""
    value = fields.take(name)
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return []
    if (
        not isinstance(texts, list)
        or not 0 < len(texts) <= MAX_TEXTS
        or not all(isinstance(each, str) for each in texts)
    ):
        raise InvalidValue(f"{name} must be a string, or an array of 1 to {MAX_TEXTS} strings", param=name)
    return texts


async def _read_inputs(fields: Fields, names: tuple[str, ...], model: Model) -> list[Text]:
    """The texts of the first of the fields `names` that is there, with the model's instruction before each; token ids
    stay as they are. Raises InvalidValue or ContextExceeded naming the field."""
    encoding = _encoding(model)
    prompt, cuts = _read_prompt(fields, encoding), _read_truncate(fields)
    stated = [name for name in names if fields.take(name) is not None]
    if len(stated) > 1:
        raise InvalidValue(f"{' and '.join(stated)} mean the same; state one", param=stated[1])
    name = stated[0] if stated else names[0]
    rows, texts = await read_texts(fields, name, model, prefix=prompt, longest=MOST_IDS if cuts else None)
    written = [text for text in texts if text is not None]
    if written:
        return await _prepare(rows, written, model, encoding, prompt, name, cuts=cuts)
    if fields.take("prompt_name") is not None:
        raise InvalidValue("prompt_name goes before texts; with token ids put it there yourself", param="prompt_name")
    return _checked([Text(row[: model.max_text] if cuts else row) for row in rows], model, name)


async def _read_chat(fields: Fields, model: Model) -> Text:
    """The tokens of a chat as the model's template writes it, by itself without the beginning of an answer. Raises
    UnsupportedByModel, InvalidValue or ContextExceeded."""
    if not model.template.exists:
        raise UnsupportedByModel(
            "this model has no chat template; state input in the place of messages, or chat-template in its preset"
        )
    chat = chats.read(fields, model.template)
    if fields.flag("add_generation_prompt") is None:
        chat = replace(chat, add_generation_prompt=False)
    if chat.tools and not model.template.mentions("tools"):
        fields.mark_unused("tools")
    cuts = _read_truncate(fields)
    add_special = fields.flag("add_special_tokens") or False
    [tokens] = await model.encode([await model.render(chat)], add_special=add_special)
    if not tokens:
        raise InvalidValue("messages render to an empty text with this model's chat template", param="messages")
    return _checked([Text(tokens[: model.max_text] if cuts else tokens)], model, "messages")[0]


async def _encode(texts: Sequence[str], model: Model, name: str, prompt: str, *, cuts: bool) -> list[Text]:
    """`texts` with the instruction called `prompt` before each. Raises ContextExceeded."""
    encoding = _encoding(model)
    instruction = encoding.prompts.get(prompt, "")
    rows = await model.encode([instruction + text for text in texts])
    rows = [row or model.start_of_text(name) for row in rows]
    return await _prepare(rows, texts, model, encoding, instruction, name, cuts=cuts)


async def _prepare(
    rows: list[list[int]],
    texts: Sequence[str],
    model: Model,
    encoding: Encoding,
    prompt: str,
    name: str,
    *,
    cuts: bool,
) -> list[Text]:
    """`rows`: the tokens of `texts` with `prompt` before each; they are cut or refused if there are too many."""
    skipped = 0
    if prompt and encoding.skips_prompt:
        [alone] = await model.encode([prompt])
        skipped = len(alone) - (bool(alone) and alone[-1] in model.special_ids)
    if cuts:
        long = [index for index, row in enumerate(rows) if len(row) > model.max_text]
        shorter = await model.encode_cut([prompt + texts[index] for index in long])
        for index, row in zip(long, shorter, strict=True):
            rows[index] = row
    return _checked([Text(row, skipped=skipped) for row in rows], model, name)


def _checked(texts: list[Text], model: Model, name: str) -> list[Text]:
    """The same; raises ContextExceeded for one that is too long."""
    for text in texts:
        if len(text.tokens) > model.max_text:
            raise ContextExceeded(len(text.tokens), model.max_text, param=name)
    return texts


def _encoding(model: Model) -> Encoding:
    encoding = model.engine.encoding
    if encoding is None:
        raise UnsupportedByModel("this model does not compute embeddings")
    return encoding


def _read_prompt(fields: Fields, encoding: Encoding) -> str:
    """The instruction that `prompt_name` names, else the model's default."""
    name = fields.text("prompt_name")
    if name is None:
        return encoding.default_prompt
    if name not in encoding.prompts:
        known = ", ".join(sorted(encoding.prompts))
        raise InvalidValue(f"prompt_name must be one of this model's prompts: {known}", param="prompt_name")
    return encoding.prompts[name]


def _read_truncate(fields: Fields) -> bool:
    """Whether texts are cut at their end: true, END as Cohere has it, or vLLM's truncate_prompt_tokens of -1."""
    fields.refuse(
        "truncate_prompt_tokens", "truncate_prompt_tokens must be -1: what is too long can be cut to the context only"
    )
    fields.refuse("truncation_side", 'truncation_side must be "right": only the end of a text can be cut')
    value = fields.take("truncate")
    if value is None and fields.take("truncate_prompt_tokens") is not None:
        return True
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str) and value.upper() in ("NONE", "END"):
        return value.upper() == "END"
    raise InvalidValue("truncate must be true or false, or NONE or END; only the end can be cut", param="truncate")


def _read_documents(fields: Fields) -> tuple[list[str], bool]:
    """`documents`: strings, or objects with a `text`; or `texts`, as text-embeddings-inference has them, and whether
    they are called that. Raises InvalidValue."""
    listed, bare = fields.sequence("documents"), fields.sequence("texts")
    if bare is not None:
        if listed is not None:
            raise InvalidValue("documents and texts mean the same; state one", param="texts")
        if not bare or len(bare) > MAX_TEXTS or not all(isinstance(each, str) for each in bare):
            raise InvalidValue(f"texts must be an array of 1 to {MAX_TEXTS} strings", param="texts")
        return bare, True
    if not listed:
        raise InvalidValue("documents must be an array of at least one string or object with text", param="documents")
    if len(listed) > MAX_TEXTS:
        raise InvalidValue(f"documents must have at most {MAX_TEXTS} entries", param="documents")
    texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in listed]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidValue("a document must be a string or an object with text", param=f"documents[{index}]")
    return texts, False


async def _products(vector: Sequence[float], others: Sequence[Sequence[float]]) -> list[float]:
    """Of one vector with others, of equal length; many in a thread, so that the loop goes on."""

    def compute() -> list[float]:
        return [sum(map(mul, vector, other)) for other in others]

    return compute() if len(vector) * len(others) <= QUICK else await asyncio.to_thread(compute)


def _result(body: Json, texts: Sequence[Text], ignored: tuple[str, ...]) -> Result:
    tokens = _count(texts)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return Result(body={**body, "usage": usage}, ignored=ignored, prompt_tokens=tokens)


def _count(texts: Sequence[Text]) -> int:
    return sum(len(text.tokens) for text in texts)


def shorten(vector: list[float], dimensions: int) -> list[float]:
    """The first `dimensions` components, of length 1 again (Kusupati et al. 2022); raises InvalidValue if it has
    fewer."""
    if dimensions > len(vector):
        raise InvalidValue(
            f"dimensions must be at most {len(vector)}, the size of this model's vectors", param="dimensions"
        )
    kept = vector[:dimensions]
    length = hypot(*kept)
    return [value / length for value in kept] if length else kept


def to_base64(vector: list[float]) -> str:
    """Little-endian float32, four bytes a component."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

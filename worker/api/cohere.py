"""Cohere's vectors, as vLLM offers them to its clients."""

import uuid
from functools import partial
from typing import Any

from worker.api import embeddings
from worker.api.call import Model, Result
from worker.api.openai import in_their_words, renamed
from worker.errors import InvalidValue
from worker.prompt.body_reader import Fields, Json
from worker.protocol.dialects.cohere import EMBED

_MEANT = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}
"""The names that models give to instructions for what Cohere's clients call so."""


async def embed(body: Json, model: Model) -> Result:
    """Vectors of texts, by type; raises RequestError. Cancelling drops the work."""
    model.require("embedding")
    fields = Fields(body, EMBED)
    name = fields.text("model") or model.options.name
    texts, inputs = fields.sequence("texts"), fields.sequence("inputs")
    if (texts is None) == (inputs is None):
        raise InvalidValue("either texts or inputs must be an array of at least one", param="texts")
    if texts is not None and not all(isinstance(each, str) for each in texts):
        raise InvalidValue("texts must be an array of strings", param="texts")
    fields.refuse("images", "images is not supported; only texts are embedded")
    fields.refuse("max_tokens", "max_tokens is not supported; what is too long can be cut to the context only")
    kinds = _kinds(fields)
    asked = {
        "model": name,
        "input": inputs if texts is None else texts,
        "dimensions": fields.handed("output_dimension"),
        "truncate": fields.choice("truncate") != "NONE",
        "prompt_name": _instruction(fields, model),
    }
    ignored = fields.settle(strict=model.options.strict_fields)
    names = {"input": "inputs" if texts is None else "texts", "dimensions": "output_dimension"}
    with in_their_words(partial(renamed, names)):
        made = await embeddings.embeddings(asked, model)
    vectors = [each["embedding"] for each in made.body["data"]]
    told = {
        "id": f"embd-{uuid.uuid4().hex}",
        "embeddings": {kind: [_FORMS[kind](vector) for vector in vectors] for kind in kinds},
        "texts": texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": made.prompt_tokens}},
        "response_type": "embeddings_by_type",
    }
    return Result(body=told, ignored=ignored, prompt_tokens=made.prompt_tokens)


def _kinds(fields: Fields) -> list[str]:
    stated = fields.sequence("embedding_types") or ["float"]
    if not all(isinstance(each, str) and each in _FORMS for each in stated):
        raise InvalidValue(
            f"embedding_types must be an array of {', '.join(_FORMS)}; others need a calibration",
            param="embedding_types",
        )
    return list(dict.fromkeys(stated))


def _instruction(fields: Fields, model: Model) -> str | None:
    """The model's own instruction for what the texts are; reported as ignored where it has none for that."""
    stated = fields.text("input_type")
    prompts = model.engine.encoding.prompts if model.engine.encoding is not None else {}
    found = next((name for name in _MEANT.get(stated or "", (stated,)) if name in prompts), None)
    if stated is not None and found is None:
        fields.mark_unused("input_type")
    return found


def to_bits(vector: list[float]) -> list[int]:
    """A bit for each component, 1 where it is above 0, the first one the highest of its byte; raises InvalidValue for a
    number of components that fills no bytes."""
    if len(vector) % 8:
        raise InvalidValue(
            f"binary and ubinary need vectors of a multiple of 8 components, and these have {len(vector)}",
            param="embedding_types",
        )
    bits = "".join("1" if value > 0 else "0" for value in vector)
    return [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)]


_FORMS: dict[str, Any] = {
    "float": list,
    "base64": embeddings.to_base64,
    "binary": lambda vector: [byte - 128 for byte in to_bits(vector)],
    "ubinary": to_bits,
}

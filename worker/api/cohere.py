"""Cohere's embed call, in the form that vLLM offers."""

import uuid
from typing import Any

from worker.api import embeddings
from worker.api.call import JsonAnswer
from worker.api.openai import client_field_names
from worker.api.served_model import ServedModel
from worker.errors import InvalidValue
from worker.prompt.body_reader import BodyFields, Json
from worker.protocol.dialects.cohere import EMBED

# models' instruction names for Cohere's input types
_INSTRUCTION_NAMES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}


async def embed(body: Json, model: ServedModel) -> JsonAnswer:
    """Compute vectors of texts, by type. Raise RequestError. Cancelling drops the work."""
    model.require("embedding")
    fields = BodyFields(body, EMBED)
    name = fields.text("model") or model.options.name
    texts, inputs = fields.sequence("texts"), fields.sequence("inputs")
    if (texts is None) == (inputs is None):
        raise InvalidValue("either texts or inputs must be an array of at least one", param="texts")
    if texts is not None and not all(isinstance(text, str) for text in texts):
        raise InvalidValue("texts must be an array of strings", param="texts")
    fields.refuse("images", "images is not supported; send texts")
    most, truncates = fields.integer("max_tokens"), fields.choice("truncate") != "NONE"
    if most is not None and not truncates:
        raise InvalidValue("max_tokens truncates texts; leave it out, or truncate: NONE", param="max_tokens")
    kinds = _kinds(fields)
    openai_body = {
        "model": name,
        "input": inputs if texts is None else texts,
        "dimensions": fields.checked("output_dimension"),
        "truncate": truncates if most is None else None,
        "truncate_prompt_tokens": most,
        "prompt_name": _instruction(fields, model),
    }
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    names = {
        "input": "inputs" if texts is None else "texts",
        "dimensions": "output_dimension",
        "truncate_prompt_tokens": "max_tokens",
    }
    with client_field_names(names):
        embedded = await embeddings.embeddings(openai_body, model)
    vectors = [item["embedding"] for item in embedded.body["data"]]
    answer = {
        "id": f"embd-{uuid.uuid4().hex}",
        "embeddings": {kind: [_FORMS[kind](vector) for vector in vectors] for kind in kinds},
        "texts": texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": embedded.prompt_tokens}},
        "response_type": "embeddings_by_type",
    }
    return JsonAnswer(body=answer, ignored=ignored, prompt_tokens=embedded.prompt_tokens)


def _kinds(fields: BodyFields) -> list[str]:
    given = fields.sequence("embedding_types") or ["float"]
    if not all(isinstance(kind, str) and kind in _FORMS for kind in given):
        raise InvalidValue(
            f"embedding_types must be an array of {', '.join(_FORMS)}; other types need calibration",
            param="embedding_types",
        )
    return list(dict.fromkeys(given))


def _instruction(fields: BodyFields, model: ServedModel) -> str | None:
    """Return the name of the model's instruction for `input_type`, which is reported as ignored if there is none."""
    given = fields.text("input_type")
    prompts = model.engine.encoding.prompts if model.engine.encoding is not None else {}
    found = next((name for name in _INSTRUCTION_NAMES.get(given or "", (given,)) if name in prompts), None)
    if given is not None and found is None:
        fields.mark_unused("input_type")
    return found


def to_bits(vector: list[float]) -> list[int]:
    """Pack one bit per component, 1 for components above 0, most significant bit first.

    Raise InvalidValue if the number of components is not a multiple of 8.
    """
    if len(vector) % 8:
        raise InvalidValue(
            f"binary and ubinary need vectors of a multiple of 8 components; this model's vectors have {len(vector)}",
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

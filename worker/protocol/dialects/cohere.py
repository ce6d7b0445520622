"""Cohere's API: schemas of requests and responses."""

from worker.protocol.dialects.generation_fields import MAX_TEXTS
from worker.protocol.dialects.openai import BASE64, MODEL, TEXT_OBJECTS
from worker.protocol.schema import (
    COUNT,
    NUMBER,
    TEXT,
    WHOLE,
    Body,
    ResponseSchema,
    array,
    choice,
    const,
    enum,
    integer,
    one_of,
    or_null,
    several,
    shape,
    text,
)

EMBEDDING_TYPES = ("float", "base64", "binary", "ubinary")
EMBED: Body = {
    "model": MODEL,
    "texts": array(TEXT, least=1, most=MAX_TEXTS, about="Either these or `inputs`."),
    "inputs": array(TEXT_OBJECTS[1], least=1, most=MAX_TEXTS, about="Objects whose `content` has parts of type text."),
    "images": one_of([[]], "Not supported: only texts are embedded."),
    "input_type": text("Chooses among the model's own instructions, where it has one of this name or meaning."),
    "embedding_types": array(enum(*EMBEDDING_TYPES), about="float unless stated."),
    "output_dimension": integer(1),
    "truncate": choice(("NONE", "END"), "END unless stated; the start of a text is never cut."),
    "max_tokens": integer(1, None, "Tokens of each text that are kept. Not with truncate: NONE."),
}

_VECTORS = {"float": several(NUMBER), "base64": BASE64, "binary": several(WHOLE), "ubinary": several(COUNT)}
_BILLED = shape({"api_version": shape({"version": TEXT}), "billed_units": shape({"input_tokens": COUNT})})
EMBED_RESPONSE = ResponseSchema(
    body=shape(
        {
            "id": TEXT,
            "embeddings": shape({}, {type: several(vector) for type, vector in _VECTORS.items()}),
            "texts": or_null(several(TEXT)),
            "meta": _BILLED,
            "response_type": const("embeddings_by_type"),
        }
    )
)

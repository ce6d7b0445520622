"""Cohere's API: schemas of requests and responses."""

from worker.protocol import schema as s
from worker.protocol.dialects.generation_fields import MAX_TEXTS
from worker.protocol.dialects.openai import BASE64, MODEL, TEXT_OBJECTS
from worker.protocol.schema import Body, ResponseSchema

EMBEDDING_TYPES = ("float", "base64", "binary", "ubinary")
EMBED: Body = {
    "model": MODEL,
    "texts": s.array(s.TEXT, least=1, most=MAX_TEXTS, about="Either these or `inputs`."),
    "inputs": s.array(
        TEXT_OBJECTS[1], least=1, most=MAX_TEXTS, about="Objects whose `content` has parts of type text."
    ),
    "images": s.one_of([[]], "Not supported: only texts are embedded."),
    "input_type": s.text("Chooses among the model's own instructions, where it has one of this name or meaning."),
    "embedding_types": s.array(s.enum(*EMBEDDING_TYPES), about="float unless stated."),
    "output_dimension": s.integer(1),
    "truncate": s.choice(("NONE", "END"), "END unless stated; the start of a text is never cut."),
    "max_tokens": s.integer(1, None, "Tokens of each text that are kept. Not with truncate: NONE."),
}

_VECTORS = {"float": s.several(s.NUMBER), "base64": BASE64, "binary": s.several(s.WHOLE), "ubinary": s.several(s.COUNT)}
_BILLED = s.shape({"api_version": s.shape({"version": s.TEXT}), "billed_units": s.shape({"input_tokens": s.COUNT})})
EMBED_RESPONSE = ResponseSchema(
    body=s.shape(
        {
            "id": s.TEXT,
            "embeddings": s.shape({}, {type: s.several(vector) for type, vector in _VECTORS.items()}),
            "texts": s.or_null(s.several(s.TEXT)),
            "meta": _BILLED,
            "response_type": s.const("embeddings_by_type"),
        }
    )
)

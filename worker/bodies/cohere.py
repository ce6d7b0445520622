"""Bodies of Cohere's calls."""

from worker.bodies.common import MAX_TEXTS
from worker.bodies.openai import MODEL, OBJECTS
from worker.schemas import Body, array, choice, integer, one_of, text

EMBEDDING_TYPES = ("float", "base64", "binary", "ubinary")
EMBED: Body = {
    "model": MODEL,
    "texts": array({"type": "string"}, least=1, most=MAX_TEXTS, about="Either these or `inputs`."),
    "inputs": array(OBJECTS[1], least=1, most=MAX_TEXTS, about="Objects whose `content` has parts of type text."),
    "images": one_of([[]], "Not supported: only texts are embedded."),
    "input_type": text("Chooses among the model's own instructions, where it has one of this name or meaning."),
    "embedding_types": array({"enum": list(EMBEDDING_TYPES)}, about="float unless stated."),
    "output_dimension": integer(1),
    "truncate": choice(("NONE", "END"), "END unless stated; the start of a text is never cut."),
    "max_tokens": one_of([], "Not supported: what is too long can be cut to the context only."),
}

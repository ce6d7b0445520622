"""EricLLM's API: schemas of requests and responses."""

from worker.protocol import schema as s
from worker.protocol.dialects.generation_fields import TUNING
from worker.protocol.dialects.openai import COMMON
from worker.protocol.schema import Body, ResponseSchema

# Fields with the name and the meaning of a field of OpenAI's API.
SAME_AS_OPENAI = (
    "model", "max_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "n", "seed", "skip_special_tokens",
)  # fmt: skip
GENERATE: Body = {
    **{name: COMMON[name] for name in SAME_AS_OPENAI},
    "prompt": s.TEXT,
    "token_repetition_penalty": TUNING["repetition_penalty"],
    "top_a": s.number(0, 1e6, "No effect, as in EricLLM: it does not pass it to its sampler. 1.0 is its default."),
    "filters": s.one_of([[]]),
}

GENERATE_RESPONSE = ResponseSchema(body=s.shape({"text": s.any_of(s.TEXT, s.several(s.TEXT))}))

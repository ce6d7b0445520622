"""EricLLM's API: schemas of requests and responses."""

from worker.protocol.dialects.generation_fields import MAX_CHOICES, SAMPLING, STOP, TUNING, tuning
from worker.protocol.dialects.openai import COMMON, MAX_TOKENS, MODEL
from worker.protocol.schema import TEXT, Body, ResponseSchema, any_of, integer, number, one_of, several, shape

GENERATE: Body = {
    "model": MODEL,
    "prompt": TEXT,
    "max_tokens": MAX_TOKENS,
    **tuning("temperature", "top_k", "top_p", "min_p"),
    "stop": STOP,
    "n": integer(1, MAX_CHOICES),
    "seed": SAMPLING["seed"],
    "token_repetition_penalty": TUNING["repetition_penalty"],
    "top_a": number(0, 1e6, "No effect, as in EricLLM: it does not pass it to its sampler. 1.0 is its default."),
    "filters": one_of([[]]),
    "skip_special_tokens": COMMON["skip_special_tokens"],
}

GENERATE_RESPONSE = ResponseSchema(body=shape({"text": any_of(TEXT, several(TEXT))}))

"""EricLLM's API: schemas of requests and responses."""

from worker.protocol.dialects.generation_fields import MAX_CHOICES, SAMPLING, STOP, TUNING, tuning
from worker.protocol.dialects.openai import MAX_TOKENS, MODEL
from worker.protocol.schema import TEXT, Body, ResponseSchema, any_of, integer, one_of, several, shape

GENERATE: Body = {
    "model": MODEL,
    "prompt": TEXT,
    "max_tokens": MAX_TOKENS,
    **tuning("temperature", "top_k", "top_p", "min_p"),
    "stop": STOP,
    "n": integer(1, MAX_CHOICES),
    "seed": SAMPLING["seed"],
    "token_repetition_penalty": TUNING["repetition_penalty"],
    "top_a": one_of([0]),
    "filters": one_of([[]]),
    "skip_special_tokens": one_of([True]),
}

GENERATE_RESPONSE = ResponseSchema(body=shape({"text": any_of(TEXT, several(TEXT))}))

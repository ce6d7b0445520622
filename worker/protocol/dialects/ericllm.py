"""EricLLM's API: schemas of requests and responses."""

from worker.protocol.dialects.generation_fields import MAX_CHOICES, SAMPLING, STOP, TUNING
from worker.protocol.dialects.openai import MAX_TOKENS, MODEL
from worker.protocol.schema import TEXT, Body, ResponseSchema, integer, one_of, required, several, shape, text

GENERATE: Body = {
    "model": MODEL,
    "prompt": required(text()),
    "max_tokens": MAX_TOKENS,
    "temperature": TUNING["temperature"],
    "top_k": TUNING["top_k"],
    "top_p": TUNING["top_p"],
    "min_p": TUNING["min_p"],
    "stop": STOP,
    "n": integer(1, MAX_CHOICES),
    "seed": SAMPLING["seed"],
    "token_repetition_penalty": TUNING["repetition_penalty"],
    "top_a": one_of([0]),
    "filters": one_of([[]]),
    "skip_special_tokens": one_of([True]),
}

GENERATE_RESPONSE = ResponseSchema(body=shape({"text": {"anyOf": [TEXT, several(TEXT)]}}))

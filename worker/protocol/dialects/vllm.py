"""vLLM's own API: schemas of requests and responses."""

from worker.protocol.dialects.generation_fields import MAX_TEXTS
from worker.protocol.dialects.openai import CHAT_TOKENS, CONVERSATION, CUTS, EMBEDDINGS, MODEL
from worker.protocol.schema import (
    COUNT,
    NUMBER,
    TEXT,
    Body,
    ResponseSchema,
    Schema,
    array,
    const,
    flag,
    maybe,
    one_of,
    ref,
    required,
    several,
    shape,
    text,
)

_TELLING: Body = {"return_token_strs": flag("The tokens come as the tokenizer spells them, too.")}
TOKENIZE_TEXT: Body = {
    "model": MODEL,
    "prompt": required(text()),
    "add_special_tokens": flag("With what the tokenizer puts around texts; true unless stated."),
    **_TELLING,
}
TOKENIZE_CHAT: Body = {
    **CHAT_TOKENS,
    "add_special_tokens": flag("With what the tokenizer puts around texts, beside what the chat template writes."),
    **_TELLING,
}
EMBED_CHAT: Body = {
    **{name: schema for name, schema in EMBEDDINGS.items() if name not in ("input", "prompt_name")},
    **CONVERSATION,
    "add_generation_prompt": flag("false unless stated."),
    "add_special_tokens": flag("With what the tokenizer puts around texts, beside what the chat template writes."),
}
SCORED = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""What is scored, by the names that one request may have for it."""
_SCORED: Schema = {
    "anyOf": [{"type": ["string", "null"]}, array({"type": "string"}, least=1, most=MAX_TEXTS)],
    "description": "A text, or several: as many as of the other kind, or one for all of them.",
}
SCORE: Body = {
    "model": MODEL,
    **{name: _SCORED for pair in SCORED for name in pair},
    "use_activation": one_of([True], "Not supported: scores are those that can be compared."),
    **CUTS,
}

COUNTED = shape({"count": COUNT, "max_model_len": COUNT, "tokens": several(COUNT), "token_strs": maybe(several(TEXT))})
"""`/tokenize`, where it is asked as vLLM's clients do."""

SCORE_RESPONSE = ResponseSchema(
    body=shape(
        {
            "id": TEXT,
            "object": const("list"),
            "created": COUNT,
            "model": TEXT,
            "data": several(shape({"index": COUNT, "object": const("score"), "score": NUMBER})),
            "usage": ref("PromptUsage"),
        }
    )
)
VERSION_RESPONSE = ResponseSchema(body=shape({"version": TEXT}))

"""vLLM's own API: schemas of requests and responses."""

from worker.protocol.dialects.generation_fields import MAX_TEXTS
from worker.protocol.dialects.openai import CHAT_TOKENS, CONVERSATION, EMBEDDINGS, MODEL, TRUNCATION
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

_TELLING: Body = {"return_token_strs": flag("Also return the tokens as text, as in the vocabulary.")}
TOKENIZE_TEXT: Body = {
    "model": MODEL,
    "prompt": required(text()),
    "add_special_tokens": flag("Add the tokenizer's special tokens; true unless stated."),
    **_TELLING,
}
TOKENIZE_CHAT: Body = {
    **CHAT_TOKENS,
    "add_special_tokens": flag("Add the tokenizer's special tokens to those of the chat template."),
    **_TELLING,
}
EMBED_CHAT: Body = {
    **{name: schema for name, schema in EMBEDDINGS.items() if name not in ("input", "prompt_name")},
    **CONVERSATION,
    "add_generation_prompt": flag("false unless stated."),
    "add_special_tokens": flag("Add the tokenizer's special tokens to those of the chat template."),
}
# Names of the two sides of a comparison; a request uses one pair.
SCORE_FIELDS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
_SCORED: Schema = {
    "anyOf": [{"type": ["string", "null"]}, array({"type": "string"}, least=1, most=MAX_TEXTS)],
    "description": "A text or several: as many as on the other side, or one for all.",
}
SCORE: Body = {
    "model": MODEL,
    **{name: _SCORED for pair in SCORE_FIELDS for name in pair},
    "use_activation": one_of([True], "Not supported: scores are always activated."),
    **TRUNCATION,
}

# `/tokenize`, where it is asked as vLLM's clients do.
TOKEN_COUNT = shape(
    {"count": COUNT, "max_model_len": COUNT, "tokens": several(COUNT), "token_strs": maybe(several(TEXT))}
)

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

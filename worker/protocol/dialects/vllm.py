"""vLLM's own API: schemas of requests and responses."""

from worker.protocol.dialects.generation_fields import MAX_TEXTS
from worker.protocol.dialects.openai import CHAT_TOKENS, CONVERSATION, EMBEDDINGS, MODEL, TRUNCATION
from worker.protocol.schema import (
    COUNT,
    NUMBER,
    TEXT,
    Body,
    ResponseSchema,
    any_of,
    array,
    const,
    flag,
    members,
    or_null,
    ref,
    several,
    shape,
)

_TOKEN_TEXTS: Body = {"return_token_strs": flag("Also return the tokens as text, as in the vocabulary.")}
TOKENIZE_TEXT: Body = {
    "model": MODEL,
    "prompt": TEXT,
    "add_special_tokens": flag("Add the tokenizer's special tokens; true unless stated."),
    **_TOKEN_TEXTS,
}
_SPECIAL_TOKENS = flag("Add the tokenizer's special tokens to those of the chat template.")
TOKENIZE_CHAT: Body = {**CHAT_TOKENS, "add_special_tokens": _SPECIAL_TOKENS, **_TOKEN_TEXTS}
EMBED_CHAT: Body = {
    **{name: schema for name, schema in EMBEDDINGS.items() if name not in ("input", "prompt_name")},
    **CONVERSATION,
    "add_generation_prompt": flag("false unless stated."),
    "add_special_tokens": _SPECIAL_TOKENS,
}
# Names of the two sides of a comparison; a request uses one pair.
SCORE_FIELDS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
_SIDE = any_of(
    or_null(TEXT),
    array(TEXT, least=1, most=MAX_TEXTS),
    about="A text or several: as many as on the other side, or one for all.",
)
SCORE: Body = {
    "model": MODEL,
    **members(_SIDE, *(name for pair in SCORE_FIELDS for name in pair)),
    **TRUNCATION,
}

# The response of `/tokenize` to a request in vLLM's format.
TOKEN_COUNT = shape(
    {"count": COUNT, "max_model_len": COUNT, "tokens": several(COUNT), "token_strs": or_null(several(TEXT))}
)

SCORES = shape(
    {
        "id": TEXT,
        "object": const("list"),
        "created": COUNT,
        "model": TEXT,
        "data": several(shape({"index": COUNT, "object": const("score"), "score": NUMBER})),
        "usage": ref("PromptUsage"),
    }
)
SCORE_RESPONSE = ResponseSchema(body=SCORES)
VERSION_RESPONSE = ResponseSchema(body=shape({"version": TEXT}))

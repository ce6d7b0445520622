"""vLLM's own API: schemas of requests and responses."""

from worker.protocol import schema as s
from worker.protocol.dialects.generation_fields import MAX_TEXTS
from worker.protocol.dialects.openai import CHAT_TOKENS, CONVERSATION, EMBEDDINGS, MODEL, TRUNCATION
from worker.protocol.schema import Body, ResponseSchema

_TOKEN_TEXTS: Body = {"return_token_strs": s.flag("Also return the tokens as text, as in the vocabulary.")}
TOKENIZE_TEXT: Body = {
    "model": MODEL,
    "prompt": s.TEXT,
    "add_special_tokens": s.flag("Add the tokenizer's special tokens; true unless stated."),
    **_TOKEN_TEXTS,
}
_SPECIAL_TOKENS = s.flag("Add the tokenizer's special tokens to those of the chat template.")
TOKENIZE_CHAT: Body = {**CHAT_TOKENS, "add_special_tokens": _SPECIAL_TOKENS, **_TOKEN_TEXTS}
EMBED_CHAT: Body = {
    **{name: schema for name, schema in EMBEDDINGS.items() if name not in ("input", "prompt_name")},
    **CONVERSATION,
    "add_generation_prompt": s.flag("false unless stated."),
    "add_special_tokens": _SPECIAL_TOKENS,
}
# Names of the two sides of a comparison; a request uses one pair.
SCORE_FIELDS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
_SIDE = s.any_of(
    s.or_null(s.TEXT),
    s.array(s.TEXT, least=1, most=MAX_TEXTS),
    about="A text or several: as many as on the other side, or one for all.",
)
SCORE: Body = {
    "model": MODEL,
    **s.members(_SIDE, *(name for pair in SCORE_FIELDS for name in pair)),
    **TRUNCATION,
}

# The response of `/tokenize` to a request in vLLM's format.
TOKEN_COUNT = s.shape(
    {
        "count": s.COUNT,
        "max_model_len": s.COUNT,
        "tokens": s.several(s.COUNT),
        "token_strs": s.or_null(s.several(s.TEXT)),
    }
)

SCORES = s.shape(
    {
        "id": s.TEXT,
        "object": s.const("list"),
        "created": s.COUNT,
        "model": s.TEXT,
        "data": s.several(s.shape({"index": s.COUNT, "object": s.const("score"), "score": s.NUMBER})),
        "usage": s.ref("PromptUsage"),
    }
)
SCORE_RESPONSE = ResponseSchema(body=SCORES)
VERSION_RESPONSE = ResponseSchema(body=s.shape({"version": s.TEXT}))

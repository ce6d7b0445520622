"""The API of FastChat's workers: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol.dialects.generation_fields import MAX_INT32
from worker.protocol.dialects.openai import EMBEDDINGS, MODEL, TEXT_COMPLETION
from worker.protocol.schema import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    NULL,
    NUMBER,
    TEXT,
    Body,
    ResponseSchema,
    Schema,
    any_of,
    array,
    const,
    enum,
    flag,
    integer,
    members,
    one_of,
    or_null,
    record,
    ref,
    required,
    several,
    shape,
)

# Fields with the name and the meaning of a field of OpenAI's text completions.
SAME_AS_OPENAI = (
    "model", "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop",
    "stop_token_ids", "logprobs", "seed",
)  # fmt: skip
GENERATE: Body = {
    **{name: TEXT_COMPLETION[name] for name in SAME_AS_OPENAI},
    "prompt": TEXT,
    "max_new_tokens": integer(1, None, "256 unless stated."),
    "echo": flag("The text begins with the prompt; true unless stated."),
    "stream": flag("No effect: the path decides."),
    "images": one_of([[]]),
}
EMBED: Body = EMBEDDINGS
COUNT_TOKENS: Body = {"model": MODEL, "prompt": TEXT}
CONV_TEMPLATE: Body = {"model": MODEL}
TOKEN_CHECK: Body = {
    "prompts": required(array(record({**COUNT_TOKENS, "max_tokens": integer(0, MAX_INT32)}), most=256))
}

_CONVERSATION = {
    **shape({"name": TEXT, "roles": several(TEXT), "sep_style": COUNT}),
    "additionalProperties": True,
}
STREAM_RESPONSE = ResponseSchema(frame=ref("FastChatText"))
GENERATE_RESPONSE = ResponseSchema(body=ref("FastChatText"))
EMBED_RESPONSE = ResponseSchema(body=shape({"embedding": several(any_of(several(NUMBER), TEXT)), "token_num": COUNT}))
CONV_TEMPLATE_RESPONSE = ResponseSchema(body=shape({"conv": _CONVERSATION}))
COUNT_TOKENS_RESPONSE = ResponseSchema(body=shape({"count": COUNT, "error_code": const(0)}))
STATUS_RESPONSE = ResponseSchema(body=shape({"model_names": several(TEXT), "speed": COUNT, "queue_length": COUNT}))
MODELS_RESPONSE = ResponseSchema(body=shape({"models": several(TEXT)}))
ADDRESS_RESPONSE = ResponseSchema(body=shape({"address": TEXT}))
NULL_RESPONSE = ResponseSchema(body=NULL)
WORD_RESPONSE = ResponseSchema(body=const("success"))
DETAILS_RESPONSE = ResponseSchema(body=shape({"context_length": COUNT}))
TOKEN_CHECK_RESPONSE = ResponseSchema(
    body=shape({"prompts": several(shape({"fits": FLAG, "tokenCount": COUNT, "contextLength": COUNT}))})
)

COMPONENTS: Mapping[str, Schema] = {
    "FastChatText": shape(
        {
            "text": TEXT,
            "usage": or_null(shape(members(COUNT, "prompt_tokens", "completion_tokens", "total_tokens"))),
            "error_code": const(0),
            "finish_reason": or_null(enum("stop", "length")),
        },
        {"logprobs": or_null(ANY_OBJECT)},
    ),
}

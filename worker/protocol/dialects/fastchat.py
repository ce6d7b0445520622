"""The API of FastChat's workers: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol import schema as s
from worker.protocol.dialects.generation_fields import MAX_INT32
from worker.protocol.dialects.openai import MODEL, TEXT_COMPLETION
from worker.protocol.schema import Body, ResponseSchema, Schema

# Fields with the name and the meaning of a field of OpenAI's text completions.
SAME_AS_OPENAI = (
    "model", "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop",
    "stop_token_ids", "logprobs", "seed",
)  # fmt: skip
GENERATE: Body = {
    **{name: TEXT_COMPLETION[name] for name in SAME_AS_OPENAI},
    "prompt": s.TEXT,
    "max_new_tokens": s.integer(1, None, "256 unless stated."),
    "echo": s.flag("The text begins with the prompt; true unless stated."),
    "stream": s.flag("No effect: the path decides."),
    "images": s.one_of([[]]),
}
COUNT_TOKENS: Body = {"model": MODEL, "prompt": s.TEXT}
CONV_TEMPLATE: Body = {"model": MODEL}
TOKEN_CHECK: Body = {
    "prompts": s.required(s.array(s.record({**COUNT_TOKENS, "max_tokens": s.integer(0, MAX_INT32)}), most=256))
}

_CONVERSATION = {
    **s.shape({"name": s.TEXT, "roles": s.several(s.TEXT), "sep_style": s.COUNT}),
    "additionalProperties": True,
}
STREAM_RESPONSE = ResponseSchema(frame=s.ref("FastChatText"))
GENERATE_RESPONSE = ResponseSchema(body=s.ref("FastChatText"))
EMBED_RESPONSE = ResponseSchema(
    body=s.shape({"embedding": s.several(s.any_of(s.several(s.NUMBER), s.TEXT)), "token_num": s.COUNT})
)
CONV_TEMPLATE_RESPONSE = ResponseSchema(body=s.shape({"conv": _CONVERSATION}))
COUNT_TOKENS_RESPONSE = ResponseSchema(body=s.shape({"count": s.COUNT, "error_code": s.const(0)}))
STATUS_RESPONSE = ResponseSchema(
    body=s.shape({"model_names": s.several(s.TEXT), "speed": s.COUNT, "queue_length": s.COUNT})
)
MODELS_RESPONSE = ResponseSchema(body=s.shape({"models": s.several(s.TEXT)}))
ADDRESS_RESPONSE = ResponseSchema(body=s.shape({"address": s.TEXT}))
NULL_RESPONSE = ResponseSchema(body=s.NULL)
WORD_RESPONSE = ResponseSchema(body=s.const("success"))
DETAILS_RESPONSE = ResponseSchema(body=s.shape({"context_length": s.COUNT}))
TOKEN_CHECK_RESPONSE = ResponseSchema(
    body=s.shape({"prompts": s.several(s.shape({"fits": s.FLAG, "tokenCount": s.COUNT, "contextLength": s.COUNT}))})
)

COMPONENTS: Mapping[str, Schema] = {
    "FastChatText": s.shape(
        {
            "text": s.TEXT,
            "usage": s.or_null(s.shape(s.members(s.COUNT, "prompt_tokens", "completion_tokens", "total_tokens"))),
            "error_code": s.const(0),
            "finish_reason": s.or_null(s.enum("stop", "length")),
        },
        {"logprobs": s.or_null(s.ANY_OBJECT)},
    ),
}

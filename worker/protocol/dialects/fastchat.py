"""The API of FastChat's workers: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol.dialects.generation_fields import LARGEST, SAMPLING, STOP, TUNING
from worker.protocol.dialects.openai import COMMON, EMBEDDINGS, MODEL
from worker.protocol.schema import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    Body,
    ResponseSchema,
    Schema,
    array,
    const,
    enum,
    flag,
    integer,
    maybe,
    one_of,
    record,
    ref,
    required,
    several,
    shape,
    text,
)

FASTCHAT: Body = {
    "model": MODEL,
    "prompt": required(text()),
    "temperature": TUNING["temperature"],
    "top_k": TUNING["top_k"],
    "top_p": TUNING["top_p"],
    "repetition_penalty": TUNING["repetition_penalty"],
    "presence_penalty": TUNING["presence_penalty"],
    "frequency_penalty": TUNING["frequency_penalty"],
    "max_new_tokens": integer(1, None, "256 unless stated."),
    "echo": flag("Whether the text begins with the prompt; true unless stated."),
    "stop": STOP,
    "stop_token_ids": COMMON["stop_token_ids"],
    "logprobs": integer(0, None, "At most the model's max-logprobs."),
    "seed": SAMPLING["seed"],
    "stream": flag("Makes no difference: the path says it."),
    "best_of": one_of([1]),
    "use_beam_search": one_of([False]),
    "images": one_of([[]]),
}
FASTCHAT_EMBED: Body = EMBEDDINGS
FASTCHAT_COUNT: Body = {"model": MODEL, "prompt": required(text())}
FASTCHAT_CONV: Body = {"model": MODEL}
FASTCHAT_CHECK: Body = {
    "prompts": required(
        array(record({"model": MODEL, "prompt": required(text()), "max_tokens": integer(0, LARGEST)}), most=256)
    )
}

FASTCHAT_STREAM_RESPONSE = ResponseSchema(frame=ref("FastChatText"))
FASTCHAT_GENERATE_RESPONSE = ResponseSchema(body=ref("FastChatText"))
FASTCHAT_EMBEDDINGS_RESPONSE = ResponseSchema(
    body=shape({"embedding": several({"anyOf": [several(NUMBER), TEXT]}), "token_num": COUNT})
)
FASTCHAT_CONV_RESPONSE = ResponseSchema(
    body=shape(
        {
            "conv": {
                **shape({"name": TEXT, "roles": several(TEXT), "sep_style": COUNT}),
                "additionalProperties": True,
            }
        }
    )
)
FASTCHAT_COUNT_RESPONSE = ResponseSchema(body=shape({"count": COUNT, "error_code": const(0)}))
FASTCHAT_STATUS_RESPONSE = ResponseSchema(
    body=shape({"model_names": several(TEXT), "speed": COUNT, "queue_length": COUNT})
)
FASTCHAT_DETAILS_RESPONSE = ResponseSchema(body=shape({"context_length": COUNT}))
FASTCHAT_CHECK_RESPONSE = ResponseSchema(
    body=shape({"prompts": several(shape({"fits": FLAG, "tokenCount": COUNT, "contextLength": COUNT}))})
)

COMPONENTS: Mapping[str, Schema] = {
    "FastChatText": shape(
        {
            "text": TEXT,
            "usage": maybe(shape({"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT})),
            "error_code": const(0),
            "finish_reason": maybe(enum("stop", "length")),
        },
        {"logprobs": maybe(ANY_OBJECT)},
    ),
}

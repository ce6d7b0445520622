"""OpenAI's Responses API: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol.dialects.generation_fields import (
    EFFORTS,
    FREE_FORMATS,
    GRAMMAR,
    MAX_TOOLS,
    NAMED_SCHEMA,
    NO_EFFECT,
    ROLES,
    SAMPLING,
    TUNING,
    VERBOSITIES,
)
from worker.protocol.dialects.openai import (
    ADAPTERS,
    ALLOWED_MODES,
    CACHE_HINTS,
    COMMON,
    CONTENT_PARTS,
    CONVERSATION,
    DATA_URL,
    DETAILS,
    MODEL,
    PING_INTERVAL,
    PROMPT_PROGRESS,
    TOKEN_LOGPROBS,
    VISION_ONLY,
    skip_all_but,
)
from worker.protocol.dialects.openai import STREAM_OPTIONS as OF_CHATS
from worker.protocol.schema import (
    ANY_OBJECT,
    ANYTHING,
    COUNT,
    FLAG,
    NULL,
    NUMBER,
    TEXT,
    Body,
    ResponseSchema,
    Schema,
    array,
    choice,
    const,
    described,
    enum,
    flag,
    integer,
    maybe,
    one_of,
    or_null,
    record,
    ref,
    required,
    several,
    shape,
    text,
)

_FUNCTION: Schema = {
    **described(
        {
            "type": {"const": "function"},
            "name": required(text()),
            "description": ANYTHING,
            "parameters": ANYTHING,
            "strict": ANYTHING,
        }
    ),
    "required": ["type", "name"],
}
_STATELESS = "Nothing is kept between requests."
_TEXT_KINDS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_RESPONSE_TEXT: Schema = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {
                        **described(
                            {
                                "type": {"enum": list(_TEXT_KINDS)},
                                "text": required(text()),
                                "annotations": NO_EFFECT,
                                "logprobs": NO_EFFECT,
                                **CACHE_HINTS,
                            }
                        ),
                        "required": ["type", "text"],
                    },
                    CONTENT_PARTS[1],
                    {
                        **described(
                            {
                                "type": {"const": "input_image"},
                                "image_url": DATA_URL,
                                "detail": choice(DETAILS, "Reported as ignored."),
                                **CACHE_HINTS,
                            }
                        ),
                        "required": ["type", "image_url"],
                        "description": f"{VISION_ONLY} In messages of the user and results of functions.",
                    },
                ]
            },
        },
    ]
}
_THOUGHTS: Schema = {"anyOf": [*_RESPONSE_TEXT["anyOf"], ANYTHING]}
# Members of output items that have no effect when clients send them back as input.
_OF_ITEMS: Body = {"id": NO_EFFECT, "status": NO_EFFECT, "phase": NO_EFFECT}
_ITEM: Schema = {
    "anyOf": [
        {
            **described(
                {
                    "type": {"enum": ["message", "", None]},
                    "role": required(choice(ROLES)),
                    "content": _RESPONSE_TEXT,
                    **_OF_ITEMS,
                }
            ),
            "required": ["role", "content"],
        },
        {
            **described(
                {
                    "type": {"const": "function_call"},
                    "call_id": required(text()),
                    "name": required(text()),
                    "arguments": required(text()),
                    **_OF_ITEMS,
                }
            ),
            "required": ["type", "call_id", "name", "arguments"],
        },
        {
            **described(
                {
                    "type": {"const": "function_call_output"},
                    "call_id": text(),
                    "output": _RESPONSE_TEXT,
                    **_OF_ITEMS,
                }
            ),
            "required": ["type", "output"],
        },
        {
            **described(
                {
                    "type": {"const": "reasoning"},
                    "content": _THOUGHTS,
                    "summary": _THOUGHTS,
                    **_OF_ITEMS,
                }
            ),
            "required": ["type"],
        },
    ]
}
STREAM_OPTIONS: Body = {"include_obfuscation": OF_CHATS["include_obfuscation"]}
REASONING: Body = {"effort": choice(EFFORTS), "summary": ANYTHING, "generate_summary": ANYTHING}
_FORMAT: Schema = {
    "anyOf": [*FREE_FORMATS, {**described({"type": {"const": "json_schema"}, **NAMED_SCHEMA}), "required": ["type"]}]
}
TEXT_OPTIONS: Body = {"verbosity": choice(VERBOSITIES), "format": or_null(_FORMAT)}
# Fields of chats that are accepted in addition to OpenAI's fields of a response.
CHAT_FIELDS: Body = {
    **{name: schema for name, schema in SAMPLING.items() if name not in ("temperature", "top_p")},
    **GRAMMAR,
    "chat_template_kwargs": CONVERSATION["chat_template_kwargs"],
    "cache_salt": COMMON["cache_salt"],
    "return_progress": flag("In streams: response.in_progress is repeated with the progress of the prompt."),
    "timings_per_token": flag("In streams: every delta and the last event contain timings."),
    "adapters": ADAPTERS,
    "lora": ADAPTERS,
}
# Values of `include`. The first one is reported as ignored: reasoning is not encrypted.
INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
RESPONSES: Body = {
    **CHAT_FIELDS,
    "model": MODEL,
    "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1}]},
    "instructions": text(),
    "max_output_tokens": integer(1),
    "temperature": TUNING["temperature"],
    "top_p": TUNING["top_p"],
    "tools": array(
        _FUNCTION,
        most=MAX_TOOLS,
    ),
    "tool_choice": {
        "anyOf": [
            {"enum": [None, "none", "auto", "required"]},
            {
                **described({"type": {"const": "function"}, "name": required(text())}),
                "required": ["type", "name"],
            },
            described(
                {
                    "type": {"enum": ["allowed_tools"]},
                    "mode": required(choice(ALLOWED_MODES)),
                    "tools": required(array(_FUNCTION, least=1, about="By their names; others are not shown.")),
                }
            ),
        ]
    },
    "parallel_tool_calls": flag(),
    "text": record(TEXT_OPTIONS),
    "reasoning": record(REASONING),
    "stream": flag(),
    "stream_options": record(STREAM_OPTIONS),
    "sse_ping_interval": PING_INTERVAL,
    "include": array({"enum": list(INCLUDED)}),
    "top_logprobs": integer(
        0, None, "At most the model's max-logprobs; above 0 the text has logprobs, included or not."
    ),
    "metadata": or_null({"type": "object"}),
    "previous_response_id": one_of([""], _STATELESS),
    "conversation": one_of([], _STATELESS),
    "store": one_of([False], _STATELESS),
    "background": one_of([False]),
    "truncation": one_of(["disabled"]),
    "prompt": one_of([]),
}
# For counting only: sampling and structured output accept any value.
INPUT_TOKENS: Body = {**RESPONSES, **skip_all_but(CHAT_FIELDS, CONVERSATION)}

_OUTPUT_TEXT = shape(
    {"type": const("output_text"), "text": TEXT, "annotations": several(ANY_OBJECT), "logprobs": TOKEN_LOGPROBS}
)
_THOUGHT = shape({"type": const("reasoning_text"), "text": TEXT})
_ITEM_STATUS = enum("in_progress", "completed", "incomplete")
_EVENT: dict[str, Schema] = {"type": TEXT, "sequence_number": COUNT}
_ABOUT_ITEM: dict[str, Schema] = {**_EVENT, "item_id": TEXT, "output_index": COUNT}

COMPONENTS: Mapping[str, Schema] = {
    "ResponseItem": {
        "anyOf": [
            shape(
                {
                    "id": TEXT,
                    "type": const("message"),
                    "role": const("assistant"),
                    "status": _ITEM_STATUS,
                    "content": several(_OUTPUT_TEXT),
                }
            ),
            shape(
                {
                    "id": TEXT,
                    "type": const("reasoning"),
                    "summary": several(ANY_OBJECT),
                    "status": _ITEM_STATUS,
                    "content": several(_THOUGHT),
                }
            ),
            shape(
                {
                    "id": TEXT,
                    "type": const("function_call"),
                    "call_id": TEXT,
                    "name": TEXT,
                    "arguments": TEXT,
                    "status": _ITEM_STATUS,
                }
            ),
        ]
    },
    "Response": shape(
        {
            "id": TEXT,
            "object": const("response"),
            "created_at": COUNT,
            "model": TEXT,
            "status": enum("in_progress", "completed", "incomplete"),
            "error": NULL,
            "incomplete_details": maybe(shape({"reason": const("max_output_tokens")})),
            "previous_response_id": NULL,
            "store": const(False),
            "background": const(False),
            "temperature": NUMBER,
            "top_p": NUMBER,
            "truncation": const("disabled"),
            "instructions": maybe(TEXT),
            "max_output_tokens": maybe(COUNT),
            "metadata": ANY_OBJECT,
            "parallel_tool_calls": FLAG,
            "reasoning": shape({"effort": maybe(TEXT), "summary": NULL}),
            "text": shape({"format": ANY_OBJECT}),
            "tool_choice": {"anyOf": [TEXT, ANY_OBJECT]},
            "tools": several(ANY_OBJECT),
            "top_logprobs": COUNT,
            "output": several(ref("ResponseItem")),
            "usage": maybe(
                shape(
                    {
                        "input_tokens": COUNT,
                        "input_tokens_details": shape({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
                        "output_tokens": COUNT,
                        "output_tokens_details": shape({"reasoning_tokens": COUNT}),
                        "total_tokens": COUNT,
                    }
                )
            ),
        }
    ),
    "ResponseEvent": {
        "anyOf": [
            shape(
                {**_EVENT, "response": ref("Response")},
                {"prompt_progress": PROMPT_PROGRESS, "timings": ref("Timings")},
            ),
            shape({**_EVENT, "output_index": COUNT, "item": ref("ResponseItem")}),
            shape({**_EVENT, "output_index": COUNT, "item": ANY_OBJECT}),
            shape({**_ABOUT_ITEM, "content_index": COUNT, "part": {"anyOf": [_OUTPUT_TEXT, _THOUGHT]}}),
            shape(
                {**_ABOUT_ITEM, "content_index": COUNT, "delta": TEXT},
                {"logprobs": TOKEN_LOGPROBS, "timings": ref("Timings")},
            ),
            shape({**_ABOUT_ITEM, "content_index": COUNT, "text": TEXT}, {"logprobs": TOKEN_LOGPROBS}),
            shape({**_ABOUT_ITEM, "delta": TEXT}, {"timings": ref("Timings")}),
            shape({**_ABOUT_ITEM, "name": TEXT, "arguments": TEXT}),
        ]
    },
    "InputTokens": shape({"object": const("response.input_tokens"), "input_tokens": COUNT}),
}

RESPONSES_RESPONSE = ResponseSchema(body=ref("Response"), frame=ref("ResponseEvent"))
INPUT_TOKENS_RESPONSE = ResponseSchema(body=ref("InputTokens"))

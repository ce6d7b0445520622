"""The body of OpenAI's Responses."""

from worker.bodies.common import (
    DESCRIBED,
    EFFORTS,
    FREE_FORMATS,
    GRAMMAR,
    MAX_TOOLS,
    PASSED,
    ROLES,
    SAMPLING,
    TUNING,
    VERBOSITIES,
)
from worker.bodies.openai import (
    ADAPTERS,
    ALLOWED_MODES,
    CACHED,
    COMMON,
    CONVERSATION,
    DATA_URL,
    DETAILS,
    MODEL,
    PARTS,
    PING,
    SEEING,
    unread,
)
from worker.bodies.openai import STREAM_OPTIONS as OF_CHATS
from worker.schemas import (
    ANYTHING,
    Body,
    Schema,
    array,
    choice,
    described,
    flag,
    integer,
    one_of,
    or_null,
    record,
    required,
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
                                "annotations": PASSED,
                                "logprobs": PASSED,
                                **CACHED,
                            }
                        ),
                        "required": ["type", "text"],
                    },
                    PARTS[1],
                    {
                        **described(
                            {
                                "type": {"const": "input_image"},
                                "image_url": DATA_URL,
                                "detail": choice(DETAILS, "Reported as ignored."),
                                **CACHED,
                            }
                        ),
                        "required": ["type", "image_url"],
                        "description": f"{SEEING} In messages of the user and results of functions.",
                    },
                ]
            },
        },
    ]
}
_THOUGHTS: Schema = {"anyOf": [*_RESPONSE_TEXT["anyOf"], ANYTHING]}
_OF_ITEMS: Body = {"id": PASSED, "status": PASSED, "phase": PASSED}
"""What an answer's items have that makes no difference when they come back."""
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
    "anyOf": [*FREE_FORMATS, {**described({"type": {"const": "json_schema"}, **DESCRIBED}), "required": ["type"]}]
}
RESPONSE_TEXT: Body = {"verbosity": choice(VERBOSITIES), "format": or_null(_FORMAT)}
FURTHER: Body = {
    **{name: schema for name, schema in SAMPLING.items() if name not in ("temperature", "top_p")},
    **GRAMMAR,
    "chat_template_kwargs": CONVERSATION["chat_template_kwargs"],
    "cache_salt": COMMON["cache_salt"],
    "return_progress": flag("In streams: response.in_progress comes again and tells how far the prompt is."),
    "timings_per_token": flag("In streams: every delta has timings, and the last event."),
    "adapters": ADAPTERS,
    "lora": ADAPTERS,
}
"""What a response takes from chats, beside what OpenAI's has."""
INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
"""What a response may be asked to include. The first is reported as ignored: thoughts are not encrypted here."""
RESPONSES: Body = {
    **FURTHER,
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
    "text": record(RESPONSE_TEXT),
    "reasoning": record(REASONING),
    "stream": flag(),
    "stream_options": record(STREAM_OPTIONS),
    "sse_ping_interval": PING,
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
RESPONSES_TOKENS: Body = {**RESPONSES, **unread(FURTHER, CONVERSATION)}
"""Of a call that only counts: what the answer would be drawn by or held to is passed over."""

"""Anthropic's API: schemas of requests and responses."""

from collections.abc import Collection, Mapping

from worker.protocol.dialects.generation_fields import MAX_STOPS, MAX_TOOLS, NO_EFFECT, NON_EMPTY_TEXT, TUNING
from worker.protocol.dialects.openai import BASE64, MODEL, PING_INTERVAL, VISION_ONLY, skip_all_but
from worker.protocol.schema import (
    ANY_OBJECT,
    ANYTHING,
    COUNT,
    NULL,
    TEXT,
    Body,
    ResponseSchema,
    Schema,
    array,
    by_name,
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

_OF_BLOCKS: Body = {"cache_control": NO_EFFECT}
_BLOCK_TEXT: Schema = {
    **described({"type": {"const": "text"}, "text": required(text()), "citations": NO_EFFECT, **_OF_BLOCKS}),
    "required": ["type", "text"],
}
_BLOCK_TEXTS: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK_TEXT}]}
_BLOCK_IMAGE: Schema = {
    **described(
        {
            "type": {"const": "image"},
            "source": {
                **described(
                    {
                        "type": {"const": "base64"},
                        "media_type": required(text("For example image/png.")),
                        "data": BASE64,
                    }
                ),
                "required": ["type", "media_type", "data"],
            },
            **_OF_BLOCKS,
        }
    ),
    "required": ["type", "source"],
    "description": VISION_ONLY,
}
_BLOCKS: tuple[Schema, ...] = (
    _BLOCK_TEXT,
    _BLOCK_IMAGE,
    {
        **described(
            {
                "type": {"const": "tool_result"},
                "tool_use_id": required(text()),
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "array", "items": {"anyOf": [_BLOCK_TEXT, _BLOCK_IMAGE]}},
                        {"enum": [None, False, 0, {}]},
                    ]
                },
                "is_error": ANYTHING,
                **_OF_BLOCKS,
            }
        ),
        "required": ["type", "tool_use_id"],
    },
)
_ANSWER_BLOCKS: tuple[Schema, ...] = (
    _BLOCK_TEXT,
    _BLOCK_IMAGE,
    {
        **described(
            {
                "type": {"const": "tool_use"},
                "id": required(text()),
                "name": required(text()),
                "input": {"type": "object"},
                "caller": NO_EFFECT,
                **_OF_BLOCKS,
            }
        ),
        "required": ["type", "id", "name", "input"],
    },
    {
        **described({"type": {"const": "thinking"}, "thinking": required(text()), "signature": NO_EFFECT}),
        "required": ["type", "thinking"],
    },
    {
        **described({"type": {"const": "redacted_thinking"}, "data": {"description": "Ignored: encrypted."}}),
        "required": ["type"],
    },
)


def _message(role: str, blocks: Collection[Schema]) -> Schema:
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": list(blocks)}}]}
    return {**described({"role": {"const": role}, "content": content}), "required": ["role", "content"]}


TOOL_CHOICE: Body = {
    "type": required(choice(("auto", "any", "tool", "none"))),
    "name": text(),
    "disable_parallel_tool_use": flag(),
}
THINKING: Body = {
    "type": required(choice(("enabled", "disabled", "adaptive"))),
    "budget_tokens": integer(1),
}
_FORMAT: Schema = {
    **described({"type": {"const": "json_schema"}, "schema": {"type": "object"}}),
    "required": ["type", "schema"],
}
OUTPUT: Body = {
    "effort": choice(("low", "medium", "high", "xhigh", "max")),
    "format": or_null(_FORMAT),
}
PROMPT: Body = {
    "model": MODEL,
    "messages": required(
        array(
            {
                "anyOf": [
                    _message("user", _BLOCKS),
                    _message("assistant", _ANSWER_BLOCKS),
                    _message("system", [_BLOCK_TEXT]),
                ]
            },
            least=1,
        )
    ),
    "system": {"anyOf": [*_BLOCK_TEXTS["anyOf"], {"type": "null"}]},
    "tools": array(
        described(
            {
                "type": {"anyOf": [{"const": "custom"}, {"not": {"type": "string"}}]},
                "name": required(text()),
                "input_schema": {"type": "object"},
                "description": ANYTHING,
                "strict": ANYTHING,
                **_OF_BLOCKS,
            }
        ),
        most=MAX_TOOLS,
    ),
    "tool_choice": record(TOOL_CHOICE),
    "thinking": record(THINKING),
    "output_config": record(OUTPUT),
    "output_format": or_null(_FORMAT),
    "mcp_servers": one_of([[], {}, ""]),
    "container": one_of([[], {}, ""]),
    "compaction": one_of([[], {}, ""]),
    "thread": one_of([[], {}, ""]),
    "context_management": or_null(
        {"type": "object", "description": "Reported as ignored: the context is never edited."}
    ),
    "cache_control": {"description": "No effect: common prompt prefixes are cached automatically."},
}
MESSAGES: Body = {
    **PROMPT,
    "max_tokens": integer(1),
    "temperature": TUNING["temperature"],
    "top_p": TUNING["top_p"],
    "top_k": TUNING["top_k"],
    "stop_sequences": array(NON_EMPTY_TEXT, most=MAX_STOPS),
    "stream": flag(),
    "sse_ping_interval": PING_INTERVAL,
}
COUNT_TOKENS = skip_all_but({name: schema for name, schema in MESSAGES.items() if name != "sse_ping_interval"}, PROMPT)

COMPONENTS: Mapping[str, Schema] = {
    "AnthropicUsage": shape(
        {
            "input_tokens": COUNT,
            "output_tokens": COUNT,
            "cache_read_input_tokens": COUNT,
            "cache_creation_input_tokens": COUNT,
        }
    ),
    "Message": shape(
        {
            "id": TEXT,
            "type": const("message"),
            "role": const("assistant"),
            "model": TEXT,
            "content": several(
                {
                    "anyOf": [
                        shape({"type": const("text"), "text": TEXT}),
                        shape({"type": const("thinking"), "thinking": TEXT, "signature": TEXT}),
                        shape({"type": const("tool_use"), "id": TEXT, "name": TEXT, "input": ANY_OBJECT}),
                    ]
                }
            ),
            "stop_reason": maybe(enum("end_turn", "max_tokens", "stop_sequence", "tool_use")),
            "stop_sequence": maybe(TEXT),
            "stop_details": NULL,
            "usage": ref("AnthropicUsage"),
        }
    ),
    "MessageEvent": {
        "anyOf": [
            shape({"type": const("message_start"), "message": ref("Message")}),
            shape({"type": const("content_block_start"), "index": COUNT, "content_block": ANY_OBJECT}),
            shape({"type": const("content_block_delta"), "index": COUNT, "delta": by_name(TEXT)}),
            shape({"type": const("content_block_stop"), "index": COUNT}),
            shape(
                {
                    "type": const("message_delta"),
                    "delta": shape({"stop_reason": TEXT, "stop_sequence": maybe(TEXT), "stop_details": NULL}),
                    "usage": ref("AnthropicUsage"),
                }
            ),
            shape({"type": enum("message_stop", "ping")}),
        ]
    },
}

MESSAGES_RESPONSE = ResponseSchema(body=ref("Message"), frame=ref("MessageEvent"))
COUNT_TOKENS_RESPONSE = ResponseSchema(body=shape({"input_tokens": COUNT}))
